"""Dialects: state dicts of recurrent layers of other libraries, as tables.

docs/explanation/dialects.md has the equations and their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ln_zoo.conversion.formats.adapters import (
    Adapter,
    CellOfList,
    CellOfPair,
    CellOfTuples,
    DiEngineLayer,
    LayerOfLists,
    LayerOfTuples,
    R2DreamerStep,
    SheeprlCell,
    SpeechBrainLayer,
    StackOfTuples,
    TorchRLLayer,
    TorchRLModel,
    TorchRLStep,
    XLSTMCell,
)
from ln_zoo.conversion.formats.entries import (
    BIASES,
    Entry,
    Form,
    StateKeys,
    Weights,
    affine,
    kernel,
)
from ln_zoo.conversion.formats.sequence_models import R2_DREAMER, TORCHRL, SequenceModelForm
from ln_zoo.layers import GRU, LSTM, RNN, SLSTM, RecurrentCell, RecurrentLayer
from ln_zoo.norms import LayerNorm
from ln_zoo.ops import (
    CARRIED_LSTM,
    DREAMER_GRU,
    DREAMER_GRU_INNER_BIAS,
    JOINT_CARRIED_LSTM,
    JOINT_LSTM,
    LIGHT_GRU,
    PRENORM_GRU,
    WHOLE_GRU,
    lstm_cell,
)

#: Gates in our order, and in other libraries'; n is a GRU's candidate, u an update gate of 1 - z.
_LSTM, _GRU = "ifgo", "rzn"


@dataclass(frozen=True)
class ForeignClass:
    """A class of a library that `ln_zoo.adopt_` replaces."""

    paths: tuple[str, ...]  # import paths
    adapter: type[Adapter]  # its call signature and state format
    eps: str | None = None  # attribute with its norm's eps
    # Attributes with arguments of our layer, by our names.
    options: Mapping[str, str] = field(default_factory=dict)
    # Values that attributes must have, since our layers have no others.
    only: Mapping[str, Any] = field(default_factory=dict)
    views: tuple[str, ...] = ()  # attributes that show its former parameters; they become None
    # Values of attributes that choose between implementations of the library, for comparison.
    plain: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Dialect:
    """A library's state dicts of recurrent layers."""

    # Its kinds of layers; the first that matches a state dict is used.
    forms: tuple[Form | SequenceModelForm, ...]
    prefix: str = ""  # default start of its keys
    # Why our layers cannot compute a state dict.
    refuse: Callable[[StateKeys], str | None] | None = None
    scopes: bool = False  # keys have Keras' scopes and suffixes (lstm/lstm_cell/kernel:0)
    classes: tuple[ForeignClass, ...] = ()  # its classes in PyTorch

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for form in self.forms for entry in form.entries for key in entry.keys)


def _has(key: str) -> Callable[[StateKeys], bool]:
    return lambda keys: any(name == key or name.endswith(f".{key}") for name in keys.values)


# torch: a layer's kind is in the shape of its recurrent weight


def _torch_form(kind: type[RecurrentLayer], gates: int) -> Form:
    def fits(keys: StateKeys) -> bool:
        rows, _ = keys.matrix_shape("weight_hh_l0")
        hidden = keys.matrix_shape("weight_hr_l0" if "weight_hr_l0" in keys else "weight_hh_l0")[1]
        return rows == gates * hidden

    names = ("weight_ih", "weight_hh", *BIASES, "weight_hr")
    entries = (
        Entry(f"{name}_{{suffix}}", name, cut=False, optional=k > 1) for k, name in enumerate(names)
    )
    return Form(kind, tuple(entries), leads=(("", ""), ("",)), when=fits)


def _refuse_torch(keys: StateKeys) -> str | None:
    if any(form.matches(keys) for form in _TORCH):
        return None
    return f"weight_hh_l0 {keys.shape('weight_hh_l0')} does not fit an LSTM, GRU or RNN"


_TORCH = tuple(_torch_form(kind, gates) for kind, gates in ((LSTM, 4), (GRU, 3), (RNN, 1)))

# The TorchScript example, which NeMo has too

_TORCHSCRIPT_LEADS = (
    ("layers.{k}.directions.0.cell.", "layers.{k}.directions.1.cell."),
    ("layers.{k}.cell.",),
    ("cell.",),
    ("",),
)
_WEIGHTS = (Entry("weight_ih", "weight_ih"), Entry("weight_hh", "weight_hh"))
_TORCHSCRIPT = (
    Form(
        CARRIED_LSTM,
        (
            *_WEIGHTS,
            *affine("layernorm_i", "input", "bias_ih"),
            *affine("layernorm_h", "recurrent", "bias_hh"),
            Entry("layernorm_c.weight", "cell.gain", cut=False),
            Entry("layernorm_c.bias", "cell.shift", cut=False),
        ),
        norm=LayerNorm(),
        leads=_TORCHSCRIPT_LEADS,
        when=_has("layernorm_i.weight"),
    ),
    Form(LSTM, (*_WEIGHTS, *(Entry(b, b) for b in BIASES)), leads=_TORCHSCRIPT_LEADS),
)

_TORCHSCRIPT_MODULES = (
    "custom_lstms",
    "fastrnns.custom_lstms",
    "benchmarks.fastrnns.custom_lstms",
    "nemo.collections.common.parts.rnn",
)
_TORCHSCRIPT_CLASSES = tuple(
    ForeignClass(tuple(f"{module}.{name}" for module in _TORCHSCRIPT_MODULES), adapter, eps)
    for name, adapter, eps in (
        ("StackedLSTM", StackOfTuples, "layers.0.cell.layernorm_i.eps"),
        ("LSTMLayer", LayerOfTuples, "cell.layernorm_i.eps"),
        ("LayerNormLSTMCell", CellOfTuples, "layernorm_i.eps"),
    )
)

# torchaudio's RNN-T predictor: the layer, or the predictor's list of layers

_TORCHAUDIO_LEADS = (("",), ("lstm_layers.{k}.",))
_X2G = (Entry("x2g.weight", "weight_ih"), Entry("p2g.weight", "weight_hh"))
_TORCHAUDIO = (
    Form(
        JOINT_CARRIED_LSTM,
        (
            *_X2G,
            Entry("g_norm.weight", "sum.gain"),
            Entry("g_norm.bias", BIASES, "sum"),
            Entry("c_norm.weight", "cell.gain", cut=False),
            Entry("c_norm.bias", "cell.shift", cut=False),
        ),
        norm=LayerNorm(),
        normalized=("sum", "cell"),
        leads=_TORCHAUDIO_LEADS,
        when=_has("g_norm.weight"),
    ),
    Form(LSTM, (*_X2G, Entry("x2g.bias", BIASES, "sum")), leads=_TORCHAUDIO_LEADS),
)

# haste

_KERNELS = (kernel("kernel", "weight_ih"), kernel("recurrent_kernel", "weight_hh"))
_GAMMA = Entry("gamma", ("input.gain", "recurrent.gain"), "rows")
_HASTE = (
    Form(
        WHOLE_GRU,
        (*_KERNELS, _GAMMA, Entry("bias", "bias_ih"), Entry("recurrent_bias", "bias_hh")),
        norm=LayerNorm(),
        order=("zrn", _GRU),
        when=_has("recurrent_bias"),
        fixed_eps=True,
    ),
    Form(
        LSTM,
        (
            *_KERNELS,
            _GAMMA,
            Entry("bias", BIASES, "sum"),
            Entry("gamma_h", "cell.gain", cut=False),
            Entry("beta_h", "cell.shift", cut=False),
        ),
        norm=LayerNorm(),
        order=("igfo", _LSTM),
        fixed_eps=True,
    ),
)

# Keras and TensorFlow Addons


def _keras_gates(keys: StateKeys) -> float:
    hidden, sums = keys.matrix_shape("recurrent_kernel")
    return sums / hidden


def _refuse_keras(keys: StateKeys) -> str | None:
    gates = _keras_gates(keys)
    if gates not in (3, 4):
        return f"recurrent_kernel {keys.shape('recurrent_kernel')} does not fit an LSTM or GRU"
    if gates == 3 and "bias" in keys and len(keys.shape("bias")) == 1:
        return (
            "this GRU applies the reset gate before the matrix product (reset_after=False), ours "
            "applies it after"
        )
    return None


_KERAS = (
    Form(
        LSTM,
        (*_KERNELS, Entry("bias", BIASES, "sum", optional=True)),
        when=lambda keys: _keras_gates(keys) == 4,
    ),
    Form(
        GRU,
        (*_KERNELS, Entry("bias", BIASES, "rows", optional=True)),
        order=("zrn", _GRU),
        when=lambda keys: _keras_gates(keys) == 3,
    ),
)
_ADDONS = (
    Form(
        CARRIED_LSTM,
        (
            *_KERNELS,
            Entry("kernel_norm/gamma", "input.gain"),
            Entry("recurrent_norm/gamma", "recurrent.gain"),
            Entry("state_norm/gamma", "cell.gain", cut=False),
            Entry("state_norm/beta", "cell.shift", cut=False),
            Entry("kernel_norm/beta", "bias_ih"),
            Entry("recurrent_norm/beta", "bias_hh"),
            Entry("bias", "bias_ih", "added", optional=True),
        ),
        norm=LayerNorm(eps=1e-3),
    ),
)

# Dreamer's GRU in six libraries: one norm of the weight's products with state and input

_STATE_FIRST, _INPUT_FIRST = ("weight_hh", "weight_ih"), ("weight_ih", "weight_hh")


def _dreamer(
    weight: Entry, norm: tuple[str, str], eps: float, bias: str | None = None
) -> tuple[Form, ...]:
    """Forms with and, if ``bias`` is a key, without a bias inside the norm."""
    gain, shift = Entry(norm[0], "sum.gain"), Entry(norm[1], BIASES, "sum")
    plain = Form(
        DREAMER_GRU,
        (weight, gain, shift),
        norm=LayerNorm(eps=eps),
        normalized=("sum",),
        order=("rnu", "run"),
    )
    if bias is None:
        return (plain,)
    inside = Entry(bias, "weight_prenorm_bias")
    biased = replace(
        plain,
        kind=DREAMER_GRU_INNER_BIAS,
        entries=(weight, inside, gain, shift),
        when=_has(bias),
    )
    return biased, plain


_LAYER_NORM = ("layer_norm.weight", "layer_norm.bias")
_LINEAR = Entry("linear.weight", _STATE_FIRST)

# DI-engine

_DI = Form(
    LSTM,
    (
        kernel("wx.{k}", "weight_ih"),
        kernel("wh.{k}", "weight_hh"),
        *affine("norm.{even}", "input", "bias_ih"),
        *affine("norm.{odd}", "recurrent", "bias_hh"),
        Entry("bias", "bias_ih", "added", layers=True, optional=True),
    ),
    norm=LayerNorm(),
    normalized=("input", "recurrent"),
    order=("ifog", _LSTM),
)
_DI_DREAMER = _dreamer(
    Entry("_layer.weight", _INPUT_FIRST), ("_norm.weight", "_norm.bias"), eps=1e-3
)

# SpeechBrain's light GRUs: one layer, or the list of layers


def _refuse_speechbrain(keys: StateKeys) -> str | None:
    if any(key.endswith("running_mean") for key in keys.values):
        return "this layer normalises over all steps of a batch at once, ours at each step"
    for key in keys.values:
        if key.endswith("h_init") and keys.read(key).any():
            return "this layer has a learned initial state, ours have none"
    return None


_LIGHT = Form(
    LIGHT_GRU,
    (
        Entry("w.weight", "weight_ih"),
        Entry("u.weight", "weight_hh"),
        Entry("norm.weight", "input.gain"),
        Entry("norm.bias", BIASES, "sum"),
    ),
    norm=LayerNorm(),
    normalized=("input",),
    leads=(("",), ("rnn.{k}.",)),
    when=_has("drop_masks"),
    constants={
        "h_init": lambda units: torch.zeros(1, units),
        "drop_masks": lambda units: torch.ones(16000, units),
        "drop_mask_te": lambda units: torch.ones(1),
    },
)
_STABLE_LIGHT = replace(
    _LIGHT,
    entries=(
        *_LIGHT.entries[:-1],
        Entry("norm.bias", "bias_ih"),
        Entry("layer_norm.weight", "recurrent.gain", default=1.0),
        Entry("layer_norm.bias", "bias_hh", default=0.0),
    ),
    normalized=("input", "recurrent"),
    when=None,
    constants={key: _LIGHT.constants[key] for key in ("h_init", "drop_mask_te")},
)

# TFLite: a tensor for each gate

_TFLITE_GATES = ("input", "forget", "cell", "output")


def _by_gate(key: str, names: str | tuple[str, ...], **options: Any) -> Entry:
    keys = tuple(key.format(gate) for gate in _TFLITE_GATES)
    return Entry(keys, names, "columns" if isinstance(names, str) else "sum", **options)


def _refuse_tflite(keys: StateKeys) -> str | None:
    if "input_to_input_weights" not in keys and "input_to_forget_weights" in keys:
        return "this LSTM couples its input gate with the forget gate, ours has both"
    if "projection_bias" in keys and keys.read("projection_bias").any():
        return "this LSTM has a bias in its projection, ours has none"
    if "cell_to_input_weights" in keys and "forget_layer_norm_coefficients" in keys:
        return "this LSTM has peepholes inside the norm, ours has not"
    return None


_TFLITE_ENTRIES = (
    _by_gate("input_to_{}_weights", "weight_ih"),
    _by_gate("recurrent_to_{}_weights", "weight_hh"),
    _by_gate("{}_gate_bias", BIASES),
    Entry("projection_weights", "weight_hr", cut=False, optional=True),
)
_PEEPHOLES = tuple(f"cell_to_{gate}_weights" for gate in ("input", "forget", "output"))
_TFLITE = (
    Form(
        JOINT_LSTM,
        (*_TFLITE_ENTRIES, _by_gate("{}_layer_norm_coefficients", "sum.gain")),
        norm=LayerNorm(eps=1e-8, per_gate=True),
        normalized=("sum",),
        when=_has("forget_layer_norm_coefficients"),
        fixed_eps=True,
    ),
    Form(
        lstm_cell(peephole=True),
        (*_TFLITE_ENTRIES, Entry(_PEEPHOLES, "weight_peephole", cut=False)),
        when=_has("cell_to_input_weights"),
    ),
    Form(LSTM, _TFLITE_ENTRIES),
)

# Skip-thoughts: both gates in one tensor, the candidate in another

_TWO_ONE = (2, 1)
_SKIP_WEIGHTS = (
    Entry(("W", "Wx"), "weight_ih", transposed=True, gates=_TWO_ONE),
    Entry(("U", "Ux"), "weight_hh", transposed=True, gates=_TWO_ONE),
)
_SKIP_LEADS = (("", "r_"), ("",))
_SKIP = (
    Form(
        PRENORM_GRU,
        (
            *_SKIP_WEIGHTS,
            Entry(("b", "bx"), "weight_prenorm_bias", gates=_TWO_ONE),
            Entry(("s1", "s2"), "term.gain", gates=_TWO_ONE),
            Entry(("s3", "s4"), "recurrent.gain", gates=_TWO_ONE),
            Entry(("b1", "b2"), "bias_ih", gates=_TWO_ONE),
            Entry(("b3", "b4"), "bias_hh", gates=_TWO_ONE),
        ),
        norm=LayerNorm(),
        normalized=("term", "recurrent"),
        leads=_SKIP_LEADS,
        when=_has("s1"),
    ),
    Form(
        GRU, (*_SKIP_WEIGHTS, Entry(("b", "bx"), BIASES, "sum", gates=_TWO_ONE)), leads=_SKIP_LEADS
    ),
)

# TorchRL's and R2-Dreamer's models of DreamerV3

_TORCHRL = "torchrl.modules.models.model_based"

# xlstm's sLSTMCell, whose inputs are the terms of the gates


class _XLSTMForm(Form):
    """Recurrent weights by head, of the backend "vanilla" or "cuda"; the former is written."""

    def matches(self, keys: StateKeys) -> bool:
        return True

    def read(
        self, keys: StateKeys, eps: float | None, options: dict[str, Any]
    ) -> tuple[RecurrentLayer, list[str]]:
        weight, bias = keys.read("_recurrent_kernel_"), keys.read("_bias_")
        heads, rows, columns = weight.shape if weight.dim() == 3 else (1, 0, 0)
        units = min(rows, columns)
        if 4 * units != max(rows, columns) or bias.shape != (4 * heads * units,):
            raise ValueError(
                f"{keys.dialect}: _recurrent_kernel_ and _bias_ must be (heads, 4 * units, units) "
                f"and (4 * heads * units,), got {tuple(weight.shape)} and {tuple(bias.shape)}"
            )
        if rows == units:  # of the backend "cuda"
            weight, bias = weight.mT, bias.view(heads, 4, units).transpose(0, 1).flatten()
        layer = SLSTM(
            0,
            heads * units,
            bias=True,
            blocks=heads,
            dtype=weight.dtype,
            device=weight.device,
            **options,
        )
        found = {
            "weight_ih_l0": weight.new_empty(len(bias), 0),
            "weight_hh_l0": weight if heads > 1 else weight[0],
            "bias_ih_l0": bias,
            "bias_hh_l0": torch.zeros_like(bias),
        }
        layer.load_state_dict(found, strict=False)  # norms have parameters of their own
        return layer, ["weight_ih_l0", "bias_hh_l0"]

    def unwritable(self, layer: RecurrentLayer | RecurrentCell) -> str | None:
        if layer.cell is self.cell and layer.input_size:
            return f"input weight: input_size must be 0, got {layer.input_size}"
        return super().unwritable(layer)

    def write(self, dialect: str, layer: RecurrentLayer | RecurrentCell) -> Weights:
        own = {name.removesuffix("_l0"): value for name, value in layer.state_dict().items()}
        weight = own["weight_hh"]
        zeros = weight.new_zeros(4 * layer.hidden_size)
        bias = own.get("bias_ih", zeros) + own.get("bias_hh", zeros)
        weight = weight if weight.dim() == 3 else weight.unsqueeze(0)
        return {"_recurrent_kernel_": weight, "_bias_": bias}


DIALECTS: dict[str, Dialect] = {
    "torch": Dialect(_TORCH, refuse=_refuse_torch),
    "torchscript": Dialect(_TORCHSCRIPT, classes=_TORCHSCRIPT_CLASSES),
    "torchaudio": Dialect(
        _TORCHAUDIO,
        classes=(
            ForeignClass(("torchaudio.models.rnnt._CustomLSTM",), LayerOfLists, "g_norm.eps"),
        ),
    ),
    "haste": Dialect(_HASTE),
    "keras": Dialect(_KERAS, refuse=_refuse_keras, scopes=True),
    "tensorflow-addons": Dialect(_ADDONS, scopes=True),
    "di-engine": Dialect(
        (_DI, *_DI_DREAMER),
        classes=(
            ForeignClass(
                ("ding.torch_utils.network.rnn.LSTM",),
                DiEngineLayer,
                "norm.0.eps",
                {"dropout": "dropout.p"},
            ),
            ForeignClass(("ding.world_model.model.networks.GRUCell",), CellOfList, "_norm.eps"),
        ),
    ),
    "dreamer-v2": Dialect(
        _dreamer(kernel("kernel", _INPUT_FIRST), ("gamma", "beta"), 1e-3, "bias"), scopes=True
    ),
    "dreamerv3-torch": Dialect(
        _dreamer(
            Entry("layers.GRU_linear.weight", _INPUT_FIRST),
            ("layers.GRU_norm.weight", "layers.GRU_norm.bias"),
            1e-3,
        ),
        classes=(ForeignClass(("networks.GRUCell",), CellOfList, "layers.GRU_norm.eps"),),
    ),
    "sheeprl": Dialect(
        _dreamer(_LINEAR, _LAYER_NORM, 1e-5, "linear.bias"),
        classes=(
            ForeignClass(
                ("sheeprl.models.models.LayerNormGRUCell",), SheeprlCell, "layer_norm.eps"
            ),
        ),
    ),
    "rllib": Dialect(
        _dreamer(_LINEAR, _LAYER_NORM, 1e-3),
        classes=(
            ForeignClass(
                (
                    "ray.rllib.algorithms.dreamerv3.torch.models.components.sequence_model"
                    ".DreamerV3GRU",
                ),
                CellOfPair,
                "layer_norm.eps",
            ),
        ),
    ),
    "torchrl": Dialect(
        TORCHRL,
        classes=(
            ForeignClass(
                (f"{_TORCHRL}.DreamerV3BlockGRU",),
                TorchRLLayer,
                "cell.norm_eps",
                {"activation": "cell.activation", "update_offset": "cell.update_bias"},
                plain={"recurrent_backend": "reference"},
            ),
            ForeignClass(
                (f"{_TORCHRL}.DreamerV3BlockGRUCell",),
                TorchRLStep,
                "norm_eps",
                {"activation": "activation", "update_offset": "update_bias"},
            ),
            ForeignClass(
                (f"{_TORCHRL}._DreamerV3BlockGRU",), TorchRLModel, "belief_projection.1.eps"
            ),
        ),
    ),
    "r2dreamer": Dialect(
        (R2_DREAMER,),
        classes=(
            ForeignClass(
                ("rssm.Deter",), R2DreamerStep, "_dyn_in0.1.eps", {"activation": "_dyn_in0.2"}
            ),
        ),
    ),
    "speechbrain": Dialect(
        (_LIGHT, _STABLE_LIGHT),
        refuse=_refuse_speechbrain,
        classes=(
            ForeignClass(
                ("speechbrain.nnet.RNN.LiGRU_Layer", "speechbrain.nnet.RNN.SLiGRU_Layer"),
                SpeechBrainLayer,
                "norm.eps",
                only={"dropout": 0},
            ),
        ),
    ),
    "tflite": Dialect(_TFLITE, refuse=_refuse_tflite),
    "xlstm": Dialect(
        (_XLSTMForm(SLSTM, (Entry("_recurrent_kernel_", "weight_hh"),)),),
        classes=(
            ForeignClass(
                ("xlstm.blocks.slstm.cell.sLSTMCell_vanilla",),
                XLSTMCell,
                only={"config.function": "slstm"},
                views=("recurrent_kernel", "bias"),
            ),
        ),
    ),
    "skip-thoughts": Dialect(_SKIP, "encoder_"),
}
