"""Weights of other libraries' recurrent layers, read and written.

docs/explanation/dialects.md has the equations of each, and where they were read.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ln_zoo.conversion.replace import sites
from ln_zoo.layers import GRU, LSTM, RNN, RecurrentLayer
from ln_zoo.norms import LayerNorm, Norm
from ln_zoo.ops import (
    CARRIED_LSTM,
    DREAMER_GRU_INNER_BIAS,
    JOINT_LSTM,
    PRENORM_GRU,
    WHOLE_GRU,
    Cell,
)

#: Parameters by our names, all of one layer.
Weights = dict[str, Tensor]
_GATES = "ifgo"


class _Keys:
    """What a state dict has under a prefix; each key is taken once."""

    def __init__(self, dialect: str, state: Mapping[str, Any], prefix: str) -> None:
        self.dialect = dialect
        self.left = {
            key.removeprefix(prefix): value
            for key, value in state.items()
            if key.startswith(prefix)
        }
        if not self.left:
            shown = ", ".join(map(repr, list(state)[:4])) or "no keys"
            raise ValueError(f"{dialect}: no key begins with {prefix!r}; there are {shown}")

    def __contains__(self, key: str) -> bool:
        return key in self.left

    def take(self, key: str) -> Tensor:
        """The tensor of a key."""
        if key not in self.left:
            near = difflib.get_close_matches(key, self.left, 1)
            hint = f"; is it {near[0]!r}?" if near else f"; left are {sorted(self.left)[:6]}"
            raise ValueError(f"{self.dialect}: the state dict has no {key!r}{hint}")
        value = self.left.pop(key)
        try:
            tensor = torch.as_tensor(value).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{self.dialect}: {key!r} is not a tensor: {error}") from None
        if not tensor.is_floating_point():
            raise ValueError(
                f"{self.dialect}: {key!r} is {tensor.dtype}; quantised weights are not read"
            )
        return tensor

    def cut(self, key: str, given: str, wanted: str = _GATES, dim: int = 0) -> Tensor:
        """The tensor of a key, its gates in another order."""
        return self.ordered(key, self.take(key), given, wanted, dim)

    def ordered(
        self, key: str, tensor: Tensor, given: str, wanted: str = _GATES, dim: int = 0
    ) -> Tensor:
        """The same of a tensor that was taken."""
        if not tensor.dim() or tensor.shape[dim] % len(given):
            raise ValueError(
                f"{self.dialect}: {key!r} should hold {len(given)} gates along dimension {dim}, "
                f"got shape {tuple(tensor.shape)}"
            )
        return _ordered(tensor, given, wanted, dim)

    def count(self, lead: str) -> int:
        """How many layers there are, by keys that begin with ``lead`` and a number."""
        numbers = {
            key.removeprefix(lead).partition(".")[0] for key in self.left if key.startswith(lead)
        }
        return max((int(n) + 1 for n in numbers if n.isdigit()), default=0)

    def finish(self) -> None:
        """All was taken.

        Raises:
            ValueError: if there is more.
        """
        if self.left:
            raise ValueError(
                f"{self.dialect}: the state dict has keys of other layers, "
                f"{', '.join(map(repr, sorted(self.left)[:4]))}: name the layer by prefix=..."
            )


def _ordered(tensor: Tensor, given: str, wanted: str, dim: int = 0) -> Tensor:
    parts = dict(zip(given, tensor.chunk(len(given), dim), strict=True))
    return torch.cat([parts[gate] for gate in wanted], dim)


def _build(
    dialect: str, kind: type[RecurrentLayer] | Cell, weights: Weights, **arguments: Any
) -> RecurrentLayer:
    """The layer of these weights."""
    ih, hr = weights["weight_ih_l0"], weights.get("weight_hr_l0")
    cls: Any = kind
    if isinstance(kind, Cell):
        cls, arguments["cell"], gates = RecurrentLayer, kind, kind.gates
    else:
        gates = {LSTM: 4, GRU: 3, RNN: 1}[kind]
    if hr is not None:
        arguments["proj_size"] = len(hr)
    layers = [key for key in weights if key.startswith("weight_hh") and not key.endswith("reverse")]
    layer = cls(
        ih.shape[1],
        len(ih) // gates,
        num_layers=len(layers),
        bias="bias_ih_l0" in weights,
        bidirectional="weight_ih_l0_reverse" in weights,
        dtype=ih.dtype,
        device=ih.device,
        **arguments,
    )
    try:
        layer.load_state_dict(weights)
    except RuntimeError as error:
        lines = " ".join(str(error).split("\n", 1)[-1].split())
        raise ValueError(f"{dialect}: sizes do not fit each other: {lines}") from None
    return layer


def _expect(
    dialect: str,
    layer: RecurrentLayer,
    cell: str,
    normalized: Iterable[str] = (),
    eps: float | None = None,
    layers: bool = False,
    directions: bool = False,
    per_gate: bool = False,
) -> Weights:
    """The weights of a layer that a dialect has, by our names.

    Raises:
        ValueError: for any other layer.
    """

    def refuse(what: str) -> ValueError:
        return ValueError(f"{dialect} has no {what}")

    if layer.cell.name != cell:
        raise refuse(f"{layer.cell.name} of this form, but {cell}")
    if layer.num_layers > 1 and not layers:
        raise refuse("several layers: write each layer apart")
    if layer.bidirectional and not directions:
        raise refuse("second direction")
    normalized = set(normalized)
    for name, site in sites(layer).items():
        norm: Norm = site.norm
        if site.role in normalized and not (type(norm) is LayerNorm and norm.per_gate == per_gate):
            raise refuse(f"{norm} at {name}: it has LayerNorm there")
        if eps is not None and isinstance(norm, LayerNorm) and norm.eps != eps:
            raise refuse(f"eps of {norm.eps}: its eps is {eps}")
        if site.role not in normalized and site.normalizes:
            raise refuse(f"normalisation at {name}: {norm}")
        if type(norm).weight is not Norm.weight:
            raise refuse(f"{norm}: denormalize_ the layer first")
    return {name: value.detach() for name, value in layer.state_dict().items()}


def _bias(weights: Weights, like: str, suffix: str = "l0") -> tuple[Tensor, Tensor]:
    """Both biases, zeros where there are none."""
    rows = weights[f"weight_{like}_{suffix}"]
    zeros = rows.new_zeros(len(rows))
    return (
        weights.get(f"bias_ih_{suffix}", zeros),
        weights.get(f"bias_hh_{suffix}", zeros),
    )


# torch


def _read_torch(keys: _Keys, eps: float | None, options: dict[str, Any]) -> RecurrentLayer:
    names = list(keys.left)
    weights = {name: keys.take(name) for name in names}
    for name in ("weight_ih_l0", "weight_hh_l0"):
        if name not in weights:
            weights[name] = keys.take(name)  # which says what is missing
    hidden = weights["weight_hr_l0" if "weight_hr_l0" in weights else "weight_hh_l0"].shape[1]
    kinds: dict[float, type[RecurrentLayer]] = {4: LSTM, 3: GRU, 1: RNN}
    per_unit = len(weights["weight_hh_l0"]) / hidden
    if per_unit not in kinds:
        shape = tuple(weights["weight_hh_l0"].shape)
        raise ValueError(f"{keys.dialect}: weight_hh_l0 {shape} does not fit an LSTM, GRU or RNN")
    return _build(keys.dialect, kinds[per_unit], weights, **options)


def _write_torch(layer: RecurrentLayer) -> Weights:
    cell = layer.cell.name
    if cell not in ("LSTM", "GRU", "RNN_TANH", "RNN_RELU"):
        raise ValueError(f"torch has no {cell}")
    return _expect("torch", layer, cell, layers=True, directions=True)


# The TorchScript example


def _read_torchscript(keys: _Keys, eps: float | None, options: dict[str, Any]) -> RecurrentLayer:
    weights: Weights = {}
    cells = {"l0": ""}
    if any(key.startswith("cell.") for key in keys.left):
        cells = {"l0": "cell."}
    elif layers := keys.count("layers."):
        both = keys.count("layers.0.directions.") == 2
        cells = {}
        for k in range(layers):
            if both:
                cells[f"l{k}"] = f"layers.{k}.directions.0.cell."
                cells[f"l{k}_reverse"] = f"layers.{k}.directions.1.cell."
            else:
                cells[f"l{k}"] = f"layers.{k}.cell."
    normalised = f"{cells['l0']}layernorm_i.weight" in keys
    for suffix, lead in cells.items():
        for kind in ("ih", "hh"):
            weights[f"weight_{kind}_{suffix}"] = keys.take(f"{lead}weight_{kind}")
            if not normalised:
                weights[f"bias_{kind}_{suffix}"] = keys.take(f"{lead}bias_{kind}")
        if normalised:
            for kind, place, letter in (("ih", "input", "i"), ("hh", "recurrent", "h")):
                weights[f"sites.{suffix}.{place}.gain"] = keys.take(
                    f"{lead}layernorm_{letter}.weight"
                )
                weights[f"bias_{kind}_{suffix}"] = keys.take(f"{lead}layernorm_{letter}.bias")
            weights[f"sites.{suffix}.cell.gain"] = keys.take(f"{lead}layernorm_c.weight")
            weights[f"sites.{suffix}.cell.shift"] = keys.take(f"{lead}layernorm_c.bias")
    if not normalised:
        return _build(keys.dialect, LSTM, weights, **options)
    norm = LayerNorm(eps=1e-5 if eps is None else eps)
    return _build(keys.dialect, CARRIED_LSTM, weights, norm=norm, **options)


def _write_torchscript(layer: RecurrentLayer) -> Weights:
    normalised = layer.cell is CARRIED_LSTM
    weights = _expect(
        "torchscript",
        layer,
        CARRIED_LSTM.name if normalised else "LSTM",
        ("input", "recurrent", "cell") if normalised else (),
        layers=True,
        directions=True,
    )
    found: Weights = {}
    for k in range(layer.num_layers):
        for d, end in enumerate(("", "_reverse")[: 1 + layer.bidirectional]):
            suffix = f"l{k}{end}"
            lead = (
                f"layers.{k}.directions.{d}.cell." if layer.bidirectional else f"layers.{k}.cell."
            )
            biases = dict(zip(("ih", "hh"), _bias(weights, "ih", suffix), strict=True))
            for kind, place, letter in (("ih", "input", "i"), ("hh", "recurrent", "h")):
                found[f"{lead}weight_{kind}"] = weights[f"weight_{kind}_{suffix}"]
                if not normalised:
                    found[f"{lead}bias_{kind}"] = biases[kind]
                    continue
                found[f"{lead}layernorm_{letter}.weight"] = weights[f"sites.{suffix}.{place}.gain"]
                found[f"{lead}layernorm_{letter}.bias"] = biases[kind]
            if normalised:
                found[f"{lead}layernorm_c.weight"] = weights[f"sites.{suffix}.cell.gain"]
                found[f"{lead}layernorm_c.bias"] = weights[f"sites.{suffix}.cell.shift"]
    return found


# haste

#: Its gates; the candidate of a GRU is n here, as in torch.
_HASTE = {"LSTM": "igfo", "GRU": "zrn"}
_OURS = {"LSTM": _GATES, "GRU": "rzn"}


def _read_haste(keys: _Keys, eps: float | None, options: dict[str, Any]) -> RecurrentLayer:
    gru = "recurrent_bias" in keys
    given, wanted = (_HASTE["GRU"], _OURS["GRU"]) if gru else (_HASTE["LSTM"], _OURS["LSTM"])
    gains = keys.cut("gamma", given, wanted, dim=-1)
    if gains.dim() != 2 or len(gains) != 2:
        raise ValueError(f"haste: 'gamma' should be (2, gates), got {tuple(gains.shape)}")
    bias = keys.cut("bias", given, wanted)
    weights = {
        "weight_ih_l0": keys.cut("kernel", given, wanted, dim=1).T,
        "weight_hh_l0": keys.cut("recurrent_kernel", given, wanted, dim=1).T,
        "bias_ih_l0": bias,
        "bias_hh_l0": keys.cut("recurrent_bias", given, wanted) if gru else bias * 0,
        "sites.l0.input.gain": gains[0],
        "sites.l0.recurrent.gain": gains[1],
    }
    norm = LayerNorm(eps=1e-5 if eps is None else eps)
    if gru:
        return _build("haste", WHOLE_GRU, weights, norm=norm, **options)
    weights["sites.l0.cell.gain"] = keys.take("gamma_h")
    weights["sites.l0.cell.shift"] = keys.take("beta_h")
    return _build("haste", LSTM, weights, norm=norm, **options)


def _write_haste(layer: RecurrentLayer) -> Weights:
    gru = layer.cell is WHOLE_GRU
    kind = "GRU" if gru else "LSTM"
    weights = _expect(
        "haste",
        layer,
        WHOLE_GRU.name if gru else "LSTM",
        ("input", "recurrent", "cell"),
        eps=1e-5,
    )
    if "weight_hr_l0" in weights:
        raise ValueError("haste has no projection")

    def theirs(a: Tensor) -> Tensor:
        return _ordered(a, _OURS[kind], _HASTE[kind])

    b_ih, b_hh = _bias(weights, "ih")
    gains = [theirs(weights[f"sites.l0.{place}.gain"]) for place in ("input", "recurrent")]
    found = {
        "kernel": theirs(weights["weight_ih_l0"]).T,
        "recurrent_kernel": theirs(weights["weight_hh_l0"]).T,
        "bias": theirs(b_ih if gru else b_ih + b_hh),
        "gamma": torch.stack(gains),
    }
    if gru:
        return found | {"recurrent_bias": theirs(b_hh)}
    return found | {
        "gamma_h": weights["sites.l0.cell.gain"],
        "beta_h": weights["sites.l0.cell.shift"],
    }


# Keras and TensorFlow Addons


def _short_names(keys: _Keys, known: Iterable[str]) -> None:
    """Cuts what Keras puts before and behind the names of weights: ``lstm/lstm_cell/kernel:0``."""
    for key in list(keys.left):
        plain = key.rpartition(":")[0] or key
        for name in known:
            if plain == name or plain.endswith(f"/{name}"):
                keys.left[name] = keys.left.pop(key)
                break


def _read_keras(keys: _Keys, eps: float | None, options: dict[str, Any]) -> RecurrentLayer:
    _short_names(keys, ("recurrent_kernel", "kernel", "bias"))
    kernel, recurrent = keys.take("kernel"), keys.take("recurrent_kernel")
    hidden = recurrent.shape[0]
    per_unit = recurrent.shape[-1] / hidden
    if per_unit not in (3, 4):
        raise ValueError(
            f"keras: recurrent_kernel {tuple(recurrent.shape)} does not fit an LSTM or GRU"
        )
    given, wanted = (_GATES, _GATES) if per_unit == 4 else ("zrn", "rzn")
    weights = {
        "weight_ih_l0": keys.ordered("kernel", kernel, given, wanted, 1).T,
        "weight_hh_l0": keys.ordered("recurrent_kernel", recurrent, given, wanted, 1).T,
    }
    if "bias" in keys:
        bias = keys.cut("bias", given, wanted, dim=-1)
        if per_unit == 3 and bias.dim() == 1:
            raise ValueError(
                "keras: this GRU applies the reset gate before the matrix product "
                "(reset_after=False), ours applies it after"
            )
        both = bias if bias.dim() == 2 else torch.stack([bias, bias * 0])
        weights["bias_ih_l0"], weights["bias_hh_l0"] = both
    kind: type[RecurrentLayer] = LSTM if per_unit == 4 else GRU
    return _build("keras", kind, weights, **options)


def _write_keras(layer: RecurrentLayer) -> Weights:
    lstm = layer.cell.name == "LSTM"
    weights = _expect("keras", layer, "LSTM" if lstm else "GRU")
    if "weight_hr_l0" in weights:
        raise ValueError("keras has no projection")
    order = (_GATES, _GATES) if lstm else ("rzn", "zrn")
    found = {
        "kernel": _ordered(weights["weight_ih_l0"], *order).T,
        "recurrent_kernel": _ordered(weights["weight_hh_l0"], *order).T,
    }
    if "bias_ih_l0" in weights:
        biases = [_ordered(bias, *order) for bias in _bias(weights, "ih")]
        found["bias"] = biases[0] + biases[1] if lstm else torch.stack(biases)
    return found


_ADDONS = {
    "kernel_norm/gamma": "sites.l0.input.gain",
    "recurrent_norm/gamma": "sites.l0.recurrent.gain",
    "state_norm/gamma": "sites.l0.cell.gain",
    "state_norm/beta": "sites.l0.cell.shift",
}


def _read_addons(keys: _Keys, eps: float | None, options: dict[str, Any]) -> RecurrentLayer:
    shifts = ("kernel_norm/beta", "recurrent_norm/beta")
    _short_names(keys, ("recurrent_kernel", "kernel", "bias", *_ADDONS, *shifts))
    weights = {ours: keys.take(theirs) for theirs, ours in _ADDONS.items()}
    weights["weight_ih_l0"] = keys.take("kernel").T
    weights["weight_hh_l0"] = keys.take("recurrent_kernel").T
    weights["bias_ih_l0"], weights["bias_hh_l0"] = (keys.take(shift) for shift in shifts)
    if "bias" in keys:
        weights["bias_ih_l0"] = weights["bias_ih_l0"] + keys.take("bias")
    norm = LayerNorm(eps=1e-3 if eps is None else eps)
    return _build(keys.dialect, CARRIED_LSTM, weights, norm=norm, **options)


def _write_addons(layer: RecurrentLayer) -> Weights:
    places = ("input", "recurrent", "cell")
    weights = _expect("tensorflow-addons", layer, CARRIED_LSTM.name, places)
    b_ih, b_hh = _bias(weights, "ih")
    return {
        "kernel": weights["weight_ih_l0"].T,
        "recurrent_kernel": weights["weight_hh_l0"].T,
        "bias": b_ih * 0,
        "kernel_norm/beta": b_ih,
        "recurrent_norm/beta": b_hh,
        **{theirs: weights[ours] for theirs, ours in _ADDONS.items()},
    }


# DI-engine

_DI = "ifog"


def _read_di(keys: _Keys, eps: float | None, options: dict[str, Any]) -> RecurrentLayer:
    weights: Weights = {}
    biases = keys.cut("bias", _DI, dim=-1) if "bias" in keys else None
    for k in range(max(1, keys.count("wx."))):
        for n, (theirs, kind, place) in enumerate(
            (("wx", "ih", "input"), ("wh", "hh", "recurrent"))
        ):
            weights[f"weight_{kind}_l{k}"] = keys.cut(f"{theirs}.{k}", _DI, dim=1).T
            norm = f"norm.{2 * k + n}"
            weights[f"sites.l{k}.{place}.gain"] = keys.cut(f"{norm}.weight", _DI)
            weights[f"bias_{kind}_l{k}"] = keys.cut(f"{norm}.bias", _DI)
        if biases is not None:
            weights[f"bias_ih_l{k}"] = weights[f"bias_ih_l{k}"] + biases[k]
    return _build(
        keys.dialect,
        LSTM,
        weights,
        norm=LayerNorm(eps=1e-5 if eps is None else eps),
        normalize=("input", "recurrent"),
        **options,
    )


def _write_di(layer: RecurrentLayer) -> Weights:
    weights = _expect("di-engine", layer, "LSTM", ("input", "recurrent"), layers=True)
    if "weight_hr_l0" in weights:
        raise ValueError("di-engine has no projection")
    found: Weights = {}
    for k in range(layer.num_layers):
        biases = _bias(weights, "ih", f"l{k}")
        for n, (theirs, kind, place) in enumerate(
            (("wx", "ih", "input"), ("wh", "hh", "recurrent"))
        ):
            found[f"{theirs}.{k}"] = _ordered(weights[f"weight_{kind}_l{k}"], _GATES, _DI).T
            gain = weights[f"sites.l{k}.{place}.gain"]
            found[f"norm.{2 * k + n}.weight"] = _ordered(gain, _GATES, _DI)
            found[f"norm.{2 * k + n}.bias"] = _ordered(biases[n], _GATES, _DI)
    found["bias"] = biases[0].new_zeros(layer.num_layers, 4 * layer.hidden_size)
    return found


# Dreamer and sheeprl

_DREAMER = "rnu"


def _joint(
    dialect: str, product: Tensor, first: bool, bias: Tensor | None, norm: tuple[Tensor, Tensor]
) -> Weights:
    """Weights of the joint GRU.

    Args:
        dialect: for messages.
        product: (3H, I + H), or (3H, H + I) where the state comes first.
        first: whether it does.
        bias: that inside the norm, (3H,).
        norm: its gain and shift, (3H,).
    """
    if product.dim() != 2 or len(product) % 3 or product.shape[1] <= len(product) // 3:
        raise ValueError(
            f"{dialect}: the weight should be of three gates over states and inputs, got "
            f"{tuple(product.shape)} as outputs and inputs"
        )
    product, gain, shift = (_ordered(a, _DREAMER, "run") for a in (product, *norm))
    hidden = len(product) // 3
    cut = hidden if first else product.shape[1] - hidden
    left, right = product.split([cut, product.shape[1] - cut], 1)
    hh, ih = (left, right) if first else (right, left)
    inside = product.new_zeros(len(product))
    if bias is not None:
        inside = _ordered(bias, _DREAMER, "run")
    return {
        "weight_ih_l0": ih,
        "weight_hh_l0": hh,
        "weight_prenorm_bias_l0": inside.view(3, -1),
        "sites.l0.sum.gain": gain,
        "bias_ih_l0": shift,
        "bias_hh_l0": shift * 0,
    }


def _joint_of(dialect: str, layer: RecurrentLayer, first: bool) -> tuple[Tensor, ...]:
    """The weight (3H, I + H), the bias inside, the gain and the shift of a joint GRU."""
    weights = _expect(dialect, layer, DREAMER_GRU_INNER_BIAS.name, ("sum",))
    ih, hh = weights["weight_ih_l0"], weights["weight_hh_l0"]
    b_ih, b_hh = _bias(weights, "ih")
    found = (
        torch.cat([hh, ih] if first else [ih, hh], 1),
        weights["weight_prenorm_bias_l0"].flatten(),
        weights["sites.l0.sum.gain"],
        b_ih + b_hh,
    )
    return tuple(_ordered(a, "run", _DREAMER) for a in found)


def _read_sheeprl(keys: _Keys, eps: float | None, options: dict[str, Any]) -> RecurrentLayer:
    weights = _joint(
        keys.dialect,
        keys.take("linear.weight"),
        True,
        keys.take("linear.bias") if "linear.bias" in keys else None,
        (keys.take("layer_norm.weight"), keys.take("layer_norm.bias")),
    )
    norm = LayerNorm(eps=1e-5 if eps is None else eps)
    return _build(keys.dialect, DREAMER_GRU_INNER_BIAS, weights, norm=norm, **options)


def _write_sheeprl(layer: RecurrentLayer) -> Weights:
    names = ("linear.weight", "linear.bias", "layer_norm.weight", "layer_norm.bias")
    return dict(zip(names, _joint_of("sheeprl", layer, True), strict=True))


def _read_dreamer(keys: _Keys, eps: float | None, options: dict[str, Any]) -> RecurrentLayer:
    _short_names(keys, ("kernel", "bias", "gamma", "beta"))
    weights = _joint(
        keys.dialect,
        keys.take("kernel").T,
        False,
        keys.take("bias") if "bias" in keys else None,
        (keys.take("gamma"), keys.take("beta")),
    )
    norm = LayerNorm(eps=1e-3 if eps is None else eps)
    return _build(keys.dialect, DREAMER_GRU_INNER_BIAS, weights, norm=norm, **options)


def _write_dreamer(layer: RecurrentLayer) -> Weights:
    product, *others = _joint_of("dreamer-v2", layer, False)
    return {"kernel": product.T, **dict(zip(("bias", "gamma", "beta"), others, strict=True))}


# TFLite

_TFLITE = {"i": "input", "f": "forget", "g": "cell", "o": "output"}


def _read_tflite(keys: _Keys, eps: float | None, options: dict[str, Any]) -> RecurrentLayer:
    if "input_to_input_weights" not in keys and "input_to_forget_weights" in keys:
        raise ValueError(
            "tflite: this LSTM has no input gate (it is coupled with the forget gate), ours has one"
        )

    def all_gates(name: str) -> Tensor:
        return torch.cat([keys.take(name.format(gate)) for gate in _TFLITE.values()])

    weights = {
        "weight_ih_l0": all_gates("input_to_{}_weights"),
        "weight_hh_l0": all_gates("recurrent_to_{}_weights"),
    }
    weights["bias_ih_l0"] = all_gates("{}_gate_bias")
    weights["bias_hh_l0"] = weights["bias_ih_l0"] * 0
    if "projection_weights" in keys:
        weights["weight_hr_l0"] = keys.take("projection_weights")
    if "projection_bias" in keys and keys.take("projection_bias").any():
        raise ValueError("tflite: this LSTM has a bias in its projection, ours has none")
    peephole = "cell_to_input_weights" in keys
    normalised = "forget_layer_norm_coefficients" in keys
    if peephole and normalised:
        raise ValueError("tflite: peepholes under a norm (both inside it) are not in our layers")
    if peephole:
        gates = ("input", "forget", "output")
        rows = [keys.take(f"cell_to_{gate}_weights") for gate in gates]
        weights["weight_peephole_l0"] = torch.stack(rows)
        options = {**options, "peephole": True}
    if not normalised:
        return _build(keys.dialect, LSTM, weights, **options)
    weights["sites.l0.sum.gain"] = all_gates("{}_layer_norm_coefficients")
    norm = LayerNorm(eps=1e-8 if eps is None else eps, per_gate=True)
    options = {**options, "normalize": ("sum",)}
    return _build(keys.dialect, JOINT_LSTM, weights, norm=norm, **options)


def _write_tflite(layer: RecurrentLayer) -> Weights:
    normalised = layer.cell is JOINT_LSTM
    peephole = layer.cell.name == "LSTM with peepholes"
    cell = JOINT_LSTM.name if normalised else "LSTM with peepholes" if peephole else "LSTM"
    weights = _expect(
        "tflite", layer, cell, ("sum",) if normalised else (), eps=1e-8, per_gate=normalised
    )
    b_ih, b_hh = _bias(weights, "ih")
    parts = {
        "input_to_{}_weights": weights["weight_ih_l0"],
        "recurrent_to_{}_weights": weights["weight_hh_l0"],
        "{}_gate_bias": b_ih + b_hh,
    }
    if normalised:
        parts["{}_layer_norm_coefficients"] = weights["sites.l0.sum.gain"]
    found = {
        name.format(gate): part
        for name, whole in parts.items()
        for gate, part in zip(_TFLITE.values(), whole.chunk(4), strict=True)
    }
    if peephole:
        for gate, row in zip(
            ("input", "forget", "output"), weights["weight_peephole_l0"], strict=True
        ):
            found[f"cell_to_{gate}_weights"] = row
    if "weight_hr_l0" in weights:
        found["projection_weights"] = weights["weight_hr_l0"]
    return found


# Skip-thoughts


def _read_skip(keys: _Keys, eps: float | None, options: dict[str, Any]) -> RecurrentLayer:
    weights: Weights = {}
    normalised = "s1" in keys
    for suffix, lead in {"l0": "", "l0_reverse": "r_"}.items():
        if lead and f"{lead}W" not in keys:
            break
        for kind, two, one in (("ih", "W", "Wx"), ("hh", "U", "Ux")):
            parts = [keys.take(f"{lead}{two}"), keys.take(f"{lead}{one}")]
            weights[f"weight_{kind}_{suffix}"] = torch.cat(parts, 1).T
        bias = torch.cat([keys.take(f"{lead}b"), keys.take(f"{lead}bx")])
        if not normalised:
            weights[f"bias_ih_{suffix}"], weights[f"bias_hh_{suffix}"] = bias, bias * 0
            continue
        weights[f"weight_prenorm_bias_{suffix}"] = bias.view(3, -1)
        for kind, place, pair in (("ih", "term", "12"), ("hh", "recurrent", "34")):
            gains, shifts = (
                torch.cat([keys.take(f"{lead}{letter}{n}") for n in pair]) for letter in "sb"
            )
            weights[f"sites.{suffix}.{place}.gain"] = gains
            weights[f"bias_{kind}_{suffix}"] = shifts
    if not normalised:
        return _build(keys.dialect, GRU, weights, **options)
    norm = LayerNorm(eps=1e-5 if eps is None else eps)
    return _build(keys.dialect, PRENORM_GRU, weights, norm=norm, **options)


def _write_skip(layer: RecurrentLayer) -> Weights:
    normalised = layer.cell is PRENORM_GRU
    weights = _expect(
        "skip-thoughts",
        layer,
        PRENORM_GRU.name if normalised else "GRU",
        ("term", "recurrent") if normalised else (),
        directions=True,
    )
    h = layer.hidden_size
    found: Weights = {}
    for suffix, lead in {"l0": "encoder_", "l0_reverse": "encoder_r_"}.items():
        if f"weight_ih_{suffix}" not in weights:
            break
        for kind, two, one in (("ih", "W", "Wx"), ("hh", "U", "Ux")):
            parts = weights[f"weight_{kind}_{suffix}"].T.split([2 * h, h], 1)
            found[f"{lead}{two}"], found[f"{lead}{one}"] = parts
        b_ih, b_hh = _bias(weights, "ih", suffix)
        if not normalised:
            if b_hh[2 * h :].any():
                raise ValueError("skip-thoughts has no bias inside the reset of its candidate")
            found[f"{lead}b"], found[f"{lead}bx"] = (b_ih + b_hh).split([2 * h, h])
            continue
        inside = weights[f"weight_prenorm_bias_{suffix}"].flatten()
        found[f"{lead}b"], found[f"{lead}bx"] = inside.split([2 * h, h])
        for shift, place, pair in ((b_ih, "term", "12"), (b_hh, "recurrent", "34")):
            gain = weights[f"sites.{suffix}.{place}.gain"]
            for letter, whole in (("s", gain), ("b", shift)):
                for n, part in zip(pair, whole.split([2 * h, h]), strict=True):
                    found[f"{lead}{letter}{n}"] = part
    return found


@dataclass(frozen=True)
class Dialect:
    """How a library names, orders and normalises.

    Attributes:
        read: makes a layer of keys, an eps if one was given, and further arguments of the layer.
        write: the state dict of a layer.
        prefix: what its keys begin with, unless the user says otherwise.
    """

    read: Callable[[_Keys, float | None, dict[str, Any]], RecurrentLayer]
    write: Callable[[RecurrentLayer], Weights]
    prefix: str = ""


DIALECTS: dict[str, Dialect] = {
    "torch": Dialect(_read_torch, _write_torch),
    "torchscript": Dialect(_read_torchscript, _write_torchscript),
    "haste": Dialect(_read_haste, _write_haste),
    "keras": Dialect(_read_keras, _write_keras),
    "tensorflow-addons": Dialect(_read_addons, _write_addons),
    "di-engine": Dialect(_read_di, _write_di),
    "dreamer-v2": Dialect(_read_dreamer, _write_dreamer),
    "sheeprl": Dialect(_read_sheeprl, _write_sheeprl),
    "tflite": Dialect(_read_tflite, _write_tflite),
    "skip-thoughts": Dialect(_read_skip, _write_skip, "encoder_"),
}


def _dialect(name: str) -> Dialect:
    if name not in DIALECTS:
        near = difflib.get_close_matches(str(name), DIALECTS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown dialect {name!r}{hint}; there are {', '.join(DIALECTS)}")
    return DIALECTS[name]


def from_dialect(
    name: str,
    state_dict: Mapping[str, Any],
    *,
    prefix: str | None = None,
    eps: float | None = None,
    **options: Any,
) -> RecurrentLayer:
    """A layer with the weights of another library's recurrent layer, which computes the same.

    Sizes, layers and directions are read off the weights. Where that library normalises in another
    way than our `LSTM` and `GRU`, the layer is a `RecurrentLayer` of a cell of its own, on the
    generic loop.

    Args:
        name: the dialect: ``torch``, ``torchscript`` (torch's benchmark example), ``haste``,
            ``keras``, ``tensorflow-addons``, ``di-engine``, ``dreamer-v2``, ``sheeprl``, ``tflite``
            or ``skip-thoughts`` (with or without layer norm).
        state_dict: tensors or arrays by that library's names; an opened ``.npz`` will do. Quantised
            weights are refused.
        prefix: what the keys of this layer begin with, in a larger state dict; others are left
            alone. Default: nothing, and ``"encoder_"`` for ``skip-thoughts``.
        eps: that of the norms, where it differs from the library's default; no weights say it.
        **options: further arguments of the layer, such as ``batch_first``.

    Raises:
        ValueError: for an unknown dialect, a key that is missing or left over, sizes that do not
            fit, and what our layers do not compute, with the reason.

    Example:
        >>> lstm = torch.nn.LSTM(3, 5, num_layers=2)
        >>> layer = from_dialect("torch", lstm.state_dict())
        >>> x = torch.randn(4, 2, 3)
        >>> torch.allclose(layer(x)[0], lstm(x)[0], atol=1e-6)
        True
        >>> list(to_dialect("keras", from_dialect("torch", torch.nn.GRU(3, 5).state_dict())))
        ['kernel', 'recurrent_kernel', 'bias']
    """
    dialect = _dialect(name)
    keys = _Keys(name, state_dict, dialect.prefix if prefix is None else prefix)
    layer = dialect.read(keys, eps, options)
    keys.finish()
    return layer


def to_dialect(name: str, layer: RecurrentLayer) -> dict[str, Tensor]:
    """The weights of a layer as another library's state dict, for a layer that computes the same.

    What `from_dialect` made goes back. Where a library has one bias and we have two, it gets their
    sum.

    Args:
        name: the dialect, as in `from_dialect`.
        layer: one of our layers.

    Returns:
        Contiguous copies, by that library's names.

    Raises:
        TypeError: for another module.
        ValueError: for an unknown dialect, or a layer that it does not have, with the reason.
    """
    dialect = _dialect(name)
    if not isinstance(layer, RecurrentLayer):
        raise TypeError(
            f"expected a recurrent layer of ln_zoo, got {type(layer).__name__}: from_dialect or "
            "normalize_ make one"
        )
    found = dialect.write(layer)
    return {key: value.clone(memory_format=torch.contiguous_format) for key, value in found.items()}
