"""Weights of other libraries' layers, against their equations written once more, in float64.

Each function here is one library's forward pass over (T, N, X), from its own state dict.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from block_grus import BlockGRU, Deter, LatentModel
from reference import layer_norm as normed
from refusals import refuses
from torch import Tensor, nn

import ln_zoo
from ln_zoo.conversion import DIALECTS, from_dialect, to_dialect
from ln_zoo.layers import SLSTM
from ln_zoo.norms import LayerNorm, RMSNorm, WeightNorm

F64 = torch.float64
X, H, P = 3, 4, 2
State = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
#: A library's outputs, of its state dict and inputs (T, N, X).
Pass = Callable[[State, Tensor], Tensor]
Known = tuple[str, State, Pass]
sigmoid, tanh = torch.sigmoid, torch.tanh


def part(s: State, lead: str) -> State:
    return {name.removeprefix(lead): v for name, v in s.items() if name.startswith(lead)}


def draw(shapes: Shapes) -> State:
    drawn = torch.Generator().manual_seed(len(shapes))
    return {n: torch.randn(shape, dtype=F64, generator=drawn) for n, shape in shapes.items()}


def layered(lead: str, shapes: Callable[[int], Shapes]) -> State:
    """Two layers, of X and of H inputs, with numbers of their own."""
    return {
        f"{lead.format(k)}{name}": value + 0.1 * k
        for k, size in enumerate((X, H))
        for name, value in draw(shapes(size)).items()
    }


def stacked(lead: str, layer: Pass) -> Pass:
    """Two layers, each from its part of the state dict."""
    first, second = (lead.format(k) for k in range(2))
    return lambda s, x: layer(part(s, second), layer(part(s, first), x))


def inputs(form: str = "") -> Tensor:
    width = 4 * H if form == "xlstm" else X
    return torch.rand(6, 5, width, dtype=F64, generator=torch.Generator().manual_seed(9)) * 2 - 1


def lstm_loop(x: Tensor, step: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
              outputs: int = H) -> Tensor:  # fmt: skip
    h, c = x.new_zeros(x.shape[1], outputs), x.new_zeros(x.shape[1], H)
    rows = []
    for row in x:
        h, c = step(row, h, c)
        rows.append(h)
    return torch.stack(rows)


def cell(gates: Tensor, c: Tensor, norm: Callable[[Tensor], Tensor] = lambda a: a) -> Any:
    """An LSTM's, of gates in torch's order, that carries on what is normalised."""
    i, f, g, o = gates.chunk(4, 1)
    c = norm(sigmoid(f) * c + sigmoid(i) * tanh(g))
    return sigmoid(o) * tanh(c), c


def gru_loop(x: Tensor, step: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    h, rows = x.new_zeros(x.shape[1], H), []
    for row in x:
        h = step(row, h)
        rows.append(h)
    return torch.stack(rows)


def affine(*names: str, size: int = 4 * H, kinds: tuple[str, str] = ("weight", "bias")) -> Shapes:
    return {f"{name}.{kind}": (size,) for name in names for kind in kinds}


TORCHSCRIPT = layered(
    "layers.{}.cell.",
    lambda size: {
        "weight_ih": (4 * H, size),
        "weight_hh": (4 * H, H),
        **affine("layernorm_i", "layernorm_h"),
        **affine("layernorm_c", size=H),
    },
)


def torchscript(p: State, x: Tensor) -> Tensor:
    def norm(a: Tensor, name: str) -> Tensor:
        return normed(a, 1e-5) * p[f"layernorm_{name}.weight"] + p[f"layernorm_{name}.bias"]

    def step(row: Tensor, h: Tensor, c: Tensor) -> Any:
        gates = norm(row @ p["weight_ih"].T, "i") + norm(h @ p["weight_hh"].T, "h")
        return cell(gates, c, lambda a: norm(a, "c"))

    return lstm_loop(x, step)


KERAS = draw({"kernel": (X, 4 * H), "recurrent_kernel": (H, 4 * H), "bias": (4 * H,)})
HASTE = KERAS | draw({"gamma": (2, 4 * H), "gamma_h": (H,), "beta_h": (H,)})


def haste(s: State, x: Tensor) -> Tensor:
    def step(row: Tensor, h: Tensor, c: Tensor) -> Any:
        wx = normed(row @ s["kernel"], 1e-5) * s["gamma"][0]
        rh = normed(h @ s["recurrent_kernel"], 1e-5) * s["gamma"][1]
        i, g, f, o = (wx + rh + s["bias"]).chunk(4, 1)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        return sigmoid(o) * tanh(normed(c, 1e-5) * s["gamma_h"] + s["beta_h"]), c

    return lstm_loop(x, step)


KERNELS = draw({"kernel": (X, 3 * H), "recurrent_kernel": (H, 3 * H)})
KERAS_GRU = KERNELS | draw({"bias": (2, 3 * H)})
HASTE_GRU = KERNELS | draw({"bias": (3 * H,), "recurrent_bias": (3 * H,), "gamma": (2, 3 * H)})


def keras_gru(s: State, x: Tensor) -> Tensor:
    """That of haste too, with gains."""
    b_x, b_h = (s["bias"], s["recurrent_bias"]) if "gamma" in s else s["bias"]

    def norm(a: Tensor, k: int) -> Tensor:
        return normed(a, 1e-5) * s["gamma"][k] if "gamma" in s else a

    def step(row: Tensor, h: Tensor) -> Tensor:
        xz, xr, xn = (norm(row @ s["kernel"], 0) + b_x).chunk(3, 1)
        hz, hr, hn = (norm(h @ s["recurrent_kernel"], 1) + b_h).chunk(3, 1)
        z = sigmoid(xz + hz)
        return z * h + (1 - z) * tanh(xn + sigmoid(xr + hr) * hn)

    return gru_loop(x, step)


SIZES = {"kernel_norm": 4 * H, "recurrent_norm": 4 * H, "state_norm": H}
ADDONS = KERAS | draw({f"{n}/{k}": (size,) for n, size in SIZES.items() for k in ("gamma", "beta")})


def keras(s: State, x: Tensor) -> Tensor:
    """That of the addons too, with norms."""

    def norm(a: Tensor, name: str) -> Tensor:
        if f"{name}/gamma" not in s:
            return a
        return normed(a, 1e-3) * s[f"{name}/gamma"] + s[f"{name}/beta"]

    def step(row: Tensor, h: Tensor, c: Tensor) -> Any:
        z = norm(row @ s["kernel"], "kernel_norm")
        z = z + norm(h @ s["recurrent_kernel"], "recurrent_norm") + s["bias"]
        return cell(z, c, lambda a: norm(a, "state_norm"))

    return lstm_loop(x, step)


DI = {"bias": draw({"bias": (2, 4 * H)})["bias"], **draw(affine(*(f"norm.{n}" for n in range(4))))}
for k, size in enumerate((X, H)):
    DI |= draw({f"wx.{k}": (size, 4 * H), f"wh.{k}": (H, 4 * H)})


def di(s: State, x: Tensor) -> Tensor:
    for k in range(2):

        def norm(a: Tensor, n: int) -> Tensor:
            return normed(a, 1e-5) * s[f"norm.{n}.weight"] + s[f"norm.{n}.bias"]

        def step(row: Tensor, h: Tensor, c: Tensor, k: int = k, norm: Any = norm) -> Any:
            gate = norm(row @ s[f"wx.{k}"], 2 * k) + norm(h @ s[f"wh.{k}"], 2 * k + 1)
            i, f, o, u = (gate + s["bias"][k]).chunk(4, 1)
            return cell(torch.cat([i, f, u, o], 1), c)

        x = lstm_loop(x, step)
    return x


TORCHAUDIO = layered(
    "lstm_layers.{}.",
    lambda size: {
        "x2g.weight": (4 * H, size),
        "p2g.weight": (4 * H, H),
        **affine("g_norm"),
        **affine("c_norm", size=H),
    },
)
TORCHAUDIO_PLAIN = draw({"x2g.weight": (4 * H, X), "x2g.bias": (4 * H,), "p2g.weight": (4 * H, H)})


def torchaudio(p: State, x: Tensor) -> Tensor:
    def step(row: Tensor, h: Tensor, c: Tensor) -> Any:
        gates = normed(row @ p["x2g.weight"].T + h @ p["p2g.weight"].T, 1e-5)
        gates = gates * p["g_norm.weight"] + p["g_norm.bias"]
        return cell(gates, c, lambda a: normed(a, 1e-5) * p["c_norm.weight"] + p["c_norm.bias"])

    return lstm_loop(x, step)


def torchaudio_plain(s: State, x: Tensor) -> Tensor:
    def step(row: Tensor, h: Tensor, c: Tensor) -> Any:
        return cell(row @ s["x2g.weight"].T + s["x2g.bias"] + h @ s["p2g.weight"].T, c)

    return lstm_loop(x, step)


def dream(s: State, x: Tensor, weight: str, norm: str, state_first: bool, eps: float) -> Tensor:
    """Dreamer's GRU, by the names of its weight and norm."""

    def step(row: Tensor, h: Tensor) -> Tensor:
        both = torch.cat([h, row] if state_first else [row, h], -1)
        sums = both @ s[f"{weight}.weight"].T + s.get(f"{weight}.bias", torch.zeros(()))
        parts = normed(sums, eps) * s[f"{norm}.weight"] + s[f"{norm}.bias"]
        reset, cand, update = parts.chunk(3, -1)
        cand, update = tanh(sigmoid(reset) * cand), sigmoid(update - 1)
        return update * cand + (1 - update) * h

    return gru_loop(x, step)


def dreamers(
    name: str, weight: str, norm: str, state_first: bool, eps: float, bias: bool = False
) -> Known:
    state = draw({f"{weight}.weight": (3 * H, X + H), **affine(norm, size=3 * H)})
    if bias:
        state |= draw({f"{weight}.bias": (3 * H,)})
    return name, state, lambda s, x: dream(s, x, weight, norm, state_first, eps)


def light_state(kind: str) -> State:
    norms = ("norm", "layer_norm") if kind == "affine" else ("norm",)
    found = layered(
        "rnn.{}.",
        lambda size: {
            "w.weight": (2 * H, size), "u.weight": (2 * H, H), **affine(*norms, size=2 * H)
        },
    )  # fmt: skip
    for k in range(2):
        found[f"rnn.{k}.h_init"] = torch.zeros(1, H, dtype=F64)
        found[f"rnn.{k}.drop_mask_te"] = torch.ones(1, dtype=F64)
        if kind == "light":
            found[f"rnn.{k}.drop_masks"] = torch.ones(16000, H, dtype=F64)
    return found


def light(p: State, x: Tensor) -> Tensor:
    def step(row: Tensor, h: Tensor) -> Tensor:
        wx = normed(row @ p["w.weight"].T, 1e-5) * p["norm.weight"] + p["norm.bias"]
        uh = h @ p["u.weight"].T
        if "drop_masks" not in p:  # the stable one
            one, zero = torch.ones(2 * H, dtype=F64), torch.zeros(2 * H, dtype=F64)
            uh = normed(uh, 1e-5) * p.get("layer_norm.weight", one)
            uh = uh + p.get("layer_norm.bias", zero)
        a, z = (wx + uh).chunk(2, 1)
        return sigmoid(z) * h + (1 - sigmoid(z)) * a.relu()

    return gru_loop(x, step)


DREAMER = draw({"kernel": (X + H, 3 * H), "bias": (3 * H,), "gamma": (3 * H,), "beta": (3 * H,)})


def dreamer(s: State, x: Tensor) -> Tensor:
    names = {"w.weight": s["kernel"].T, "w.bias": s["bias"], "n.weight": s["gamma"]}
    return dream(names | {"n.bias": s["beta"]}, x, "w", "n", False, 1e-3)


GATES = ("input", "forget", "cell", "output")


def tflite_state(norm: bool = True, peephole: bool = False) -> State:
    shapes: Shapes = {"projection_weights": (P, H)}
    for gate in GATES:
        shapes |= {f"input_to_{gate}_weights": (H, X), f"recurrent_to_{gate}_weights": (H, P),
                   f"{gate}_gate_bias": (H,)}  # fmt: skip
        if norm:
            shapes[f"{gate}_layer_norm_coefficients"] = (H,)
        if peephole and gate != "cell":
            shapes[f"cell_to_{gate}_weights"] = (H,)
    return draw(shapes)


def tflite(s: State, x: Tensor) -> Tensor:
    def gate(name: str, row: Tensor, h: Tensor, c: Tensor) -> Tensor:
        a = row @ s[f"input_to_{name}_weights"].T + h @ s[f"recurrent_to_{name}_weights"].T
        a = a + s.get(f"cell_to_{name}_weights", torch.zeros(H, dtype=F64)) * c
        if "forget_layer_norm_coefficients" in s:
            a = normed(a, 1e-8) * s[f"{name}_layer_norm_coefficients"]
        return a + s[f"{name}_gate_bias"]

    def step(row: Tensor, h: Tensor, c: Tensor) -> Any:
        i, f = (sigmoid(gate(name, row, h, c)) for name in GATES[:2])
        c = f * c + i * tanh(gate("cell", row, h, c))
        h = sigmoid(gate("output", row, h, c)) * tanh(c)
        return h @ s["projection_weights"].T, c

    return lstm_loop(x, step, P)


def skip_state(norm: bool = True, leads: tuple[str, ...] = ("encoder_",)) -> State:
    found = {"Wemb": torch.randn(7, X)}
    for n, lead in enumerate(leads):
        shapes = {"W": (X, 2 * H), "b": (2 * H,), "U": (H, 2 * H), "Wx": (X, H), "Ux": (H, H),
                  "bx": (H,)}  # fmt: skip
        if norm:
            sizes = {"1": 2 * H, "2": H, "3": 2 * H, "4": H}
            shapes |= {f"{letter}{k}": (size,) for letter in "sb" for k, size in sizes.items()}
        found |= {f"{lead}{name}": value + n for name, value in draw(shapes).items()}
    return found


def skip(s: State, x: Tensor, lead: str = "encoder_") -> Tensor:
    p = part(s, lead)

    def ln(a: Tensor, k: int) -> Tensor:
        return p[f"s{k}"] * normed(a, 1e-5) + p[f"b{k}"] if "s1" in p else a

    def step(row: Tensor, h: Tensor) -> Tensor:
        x_, xx_ = ln(row @ p["W"] + p["b"], 1), ln(row @ p["Wx"] + p["bx"], 2)
        r, u = sigmoid(ln(h @ p["U"], 3) + x_).chunk(2, 1)
        new = tanh(ln(h @ p["Ux"], 4) * r + xx_)
        return u * h + (1 - u) * new

    return gru_loop(x, step)


def of_module(dialect: str, module: Any, split: tuple[int, int] | None = None) -> Known:
    """A module that gets the whole input, or both parts of it and the state."""

    def run(s: State, x: Tensor) -> Tensor:
        def call(*arguments: Tensor) -> Any:
            return torch.func.functional_call(module, s, arguments)

        if split is None:
            outputs: Tensor = call(x.transpose(0, 1))[0].transpose(0, 1)
            return outputs
        # Actions are clipped to a magnitude of 1 before our layer.
        return gru_loop(x, lambda row, h: call(row[:, : split[0]], h, row[:, split[0] :]))

    return dialect, draw({name: a.shape for name, a in module.named_parameters()}), run


XLSTM = draw({"_recurrent_kernel_": (2, 2 * H, H // 2), "_bias_": (4 * H,)})


def xlstm(s: State, x: Tensor) -> Tensor:
    weight, outputs = s["_recurrent_kernel_"], []
    y, c, n, m = torch.zeros(4, x.shape[1], H, dtype=F64)
    for row in x:
        of_heads = torch.einsum(
            "kgud,nkd->ngku", weight.unflatten(1, (4, -1)), y.unflatten(1, (2, -1))
        )
        i, f, z, o = (row + of_heads.flatten(1) + s["_bias_"]).chunk(4, 1)
        log_f = m + torch.nn.functional.logsigmoid(f)
        m = i if len(outputs) == 0 else torch.max(i, log_f)
        i, f = (torch.exp(a - m) for a in (i, log_f))
        c, n = f * c + i * tanh(z), f * n + i
        y = sigmoid(o) * c / n
        outputs.append(y)
    return torch.stack(outputs)


GRU_NAMES = ("layers.GRU_linear", "layers.GRU_norm")
KNOWN: dict[str, Known] = {
    "torchscript": ("torchscript", TORCHSCRIPT, stacked("layers.{}.cell.", torchscript)),
    "haste LSTM": ("haste", HASTE, haste),
    "haste GRU": ("haste", HASTE_GRU, keras_gru),
    "keras LSTM": ("keras", KERAS, keras),
    "keras GRU": ("keras", KERAS_GRU, keras_gru),
    "addons": ("tensorflow-addons", ADDONS, keras),
    "di-engine": ("di-engine", DI, di),
    "sheeprl": dreamers("sheeprl", "linear", "layer_norm", True, 1e-5, bias=True),
    "sheeprl without a bias": dreamers("sheeprl", "linear", "layer_norm", True, 1e-5),
    "RLlib": dreamers("rllib", "linear", "layer_norm", True, 1e-3),
    "DI-engine's Dreamer": dreamers("di-engine", "_layer", "_norm", False, 1e-3),
    "dreamerv3-torch": dreamers("dreamerv3-torch", *GRU_NAMES, False, 1e-3),
    "torchaudio": ("torchaudio", TORCHAUDIO, stacked("lstm_layers.{}.", torchaudio)),
    "torchaudio without a norm": ("torchaudio", TORCHAUDIO_PLAIN, torchaudio_plain),
    "LiGRU": ("speechbrain", light_state("light"), stacked("rnn.{}.", light)),
    "SLiGRU": ("speechbrain", light_state("stable"), stacked("rnn.{}.", light)),
    "SLiGRU with gains": ("speechbrain", light_state("affine"), stacked("rnn.{}.", light)),
    "dreamer": ("dreamer-v2", DREAMER, dreamer),
    "TorchRL": of_module("torchrl", BlockGRU(X, H, P, 2, 2)),
    "TorchRL's RSSM": of_module("torchrl", LatentModel(2, 1, P, H, 2), (2, 1)),
    "R2-Dreamer": of_module("r2dreamer", Deter(H, 2, 1, P, 2, 2), (2, 1)),
    "tflite": ("tflite", tflite_state(), tflite),
    "tflite peephole": ("tflite", tflite_state(norm=False, peephole=True), tflite),
    "xlstm": ("xlstm", XLSTM, xlstm),
    "skip-thoughts": ("skip-thoughts", skip_state(norm=False), skip),
    "skip-thoughts LN": ("skip-thoughts", skip_state(), skip),
}
every_dialect = pytest.mark.parametrize("form", KNOWN)


@every_dialect
def test_the_layer_computes_what_the_library_does(form: str) -> None:
    name, state, reference = KNOWN[form]
    layer = from_dialect(name, state)
    output, _ = layer(inputs(form))
    torch.testing.assert_close(output, reference(state, inputs(form)), rtol=1e-10, atol=1e-11)
    for p, value in layer.named_parameters():
        assert value.dtype == F64, p
    output.square().sum().backward()
    assert all(value.grad is not None for value in layer.parameters() if value.numel())


@every_dialect
def test_weights_go_back(form: str) -> None:
    """What is written is what was read, or has the same function where two biases became one."""
    name, state, reference = KNOWN[form]
    written = to_dialect(name, from_dialect(name, state))
    former = {key: value for key, value in state.items() if key != "Wemb"}
    assert written.keys() == former.keys()
    assert all(value.is_contiguous() for value in written.values())
    assert {k: v.shape for k, v in written.items()} == {k: v.shape for k, v in former.items()}
    again = reference(written, inputs(form))
    torch.testing.assert_close(again, reference(state, inputs(form)), rtol=1e-10, atol=1e-11)


#: Keys that are not read, and keys that are optional or tell one form from another.
UNREAD = ("Wemb", "drop_mask", "h_init")
OPTIONAL = (*UNREAD, "layernorm", "layer_norm", "cell_to", "projection", "encoder_s1")


@every_dialect
def test_a_missing_and_a_spare_key_are_named(form: str) -> None:
    name, state, _ = KNOWN[form]
    whole = ("bias", "linear.bias", "recurrent_bias", "input_to_input_weights")
    for key in state:
        if key in whole or any(part in key for part in OPTIONAL):
            continue
        fewer = {k: v for k, v in state.items() if k != key}
        refuses(f"^{name}: ", from_dialect, name, fewer)
    spare = f"{DIALECTS[name].prefix}spare"
    refuses("spare", from_dialect, name, state | {spare: torch.ones(2)})


@every_dialect
def test_tensors_of_other_shapes(form: str) -> None:
    name, state, _ = KNOWN[form]
    for key in state:
        for shape in ((), (0,), (3,), (16, 0), (2, 3, 4)):
            if any(part in key for part in UNREAD):
                continue
            refuses(f"^{name}: ", from_dialect, name, state | {key: torch.ones(shape, dtype=F64)})


@every_dialect
def test_a_prefix_chooses_a_layer_of_a_larger_state_dict(form: str) -> None:
    name, state, reference = KNOWN[form]
    lead = DIALECTS[name].prefix
    larger = {f"model.rnn.{k}": v for k, v in state.items()} | {"model.head": torch.ones(2)}
    layer = from_dialect(name, larger, prefix=f"model.rnn.{lead}")
    torch.testing.assert_close(layer(inputs(form))[0], reference(state, inputs(form)))
    refuses(r"no key starts with 'model\.lstm", from_dialect, name, larger, prefix="model.lstm.")


@pytest.mark.parametrize(
    "plain",
    [
        nn.LSTM(X, H, 2, bidirectional=True, proj_size=P),
        nn.GRU(X, H, 2, bias=False),
        nn.RNN(X, H),
        nn.LSTM(X, 1),
    ],
    ids=["LSTM", "GRU", "RNN", "one unit"],
)
def test_torchs_own(plain: nn.RNNBase) -> None:
    plain = plain.double()
    layer = from_dialect("torch", plain.state_dict())
    assert torch.allclose(layer(inputs())[0], plain(inputs())[0], atol=1e-12)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    for key, value in to_dialect("torch", layer).items():
        assert torch.equal(value, plain.state_dict()[key])


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_weights_of_both_backends_of_xlstm(heads: int) -> None:
    """ "cuda" has inputs before gates and units, and biases by head."""
    units = H // heads
    state = draw({"_recurrent_kernel_": (heads, 4 * units, units), "_bias_": (4 * H,)})
    by_head = state["_bias_"].view(4, heads, units).transpose(0, 1).flatten()
    cuda = {"_recurrent_kernel_": state["_recurrent_kernel_"].mT, "_bias_": by_head}
    layers = [from_dialect("xlstm", of) for of in (state, cuda)]
    x = inputs("xlstm")
    assert torch.equal(layers[0](x)[0], layers[1](x)[0])
    for of in (*layers, layers[1].to_cell()):
        written = to_dialect("xlstm", of)
        assert all(torch.equal(written[key], value) for key, value in state.items())


def test_both_directions_of_skip_thoughts_from_an_archive(tmp_path: Any) -> None:
    state = skip_state(leads=("encoder_", "encoder_r_"))
    np.savez(tmp_path / "bi_skip.npz", **{name: value.numpy() for name, value in state.items()})
    with np.load(tmp_path / "bi_skip.npz") as archive:
        layer = from_dialect("skip-thoughts", archive)
    _, h = layer(inputs())
    torch.testing.assert_close(h[0], skip(state, inputs())[-1])
    torch.testing.assert_close(h[1], skip(state, inputs().flip(0), "encoder_r_")[-1])
    assert to_dialect("skip-thoughts", layer).keys() == state.keys() - {"Wemb"}


def test_forms_of_torchscript_and_names_of_keras() -> None:
    lstm = nn.LSTM(X, H, bidirectional=True, dtype=F64)
    state = {}
    for d, end in enumerate(("", "_reverse")):
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            state[f"layers.0.directions.{d}.cell.{kind}"] = getattr(lstm, f"{kind}_l0{end}")
    layer = from_dialect("torchscript", state)
    assert torch.allclose(layer(inputs())[0], lstm(inputs())[0], atol=1e-12)
    assert to_dialect("torchscript", layer).keys() == state.keys()
    one = {k.removeprefix("layers.0.directions.0."): v for k, v in state.items() if ".0.cell" in k}
    assert torch.allclose(from_dialect("torchscript", one)(inputs())[0], lstm(inputs())[0][..., :H])
    state = {f"rnn/layer_norm_lstm_cell/{name}:0": v.numpy() for name, v in ADDONS.items()}
    layer = from_dialect("tensorflow-addons", state, eps=0.1, batch_first=True)
    assert layer.sites["l0"]["input"].norm == LayerNorm(eps=0.1)
    assert layer(inputs().transpose(0, 1))[0].shape == (5, 6, H)


COUPLED = {k: v for k, v in tflite_state().items() if k != "input_to_input_weights"}


@pytest.mark.parametrize(
    ("name", "state", "named"),
    [
        ("hast", {}, "'hast'.*'haste'"),
        ("haste", {}, "no key"),
        ("torch", {f"weight_{k}_l0": torch.ones(10, 5) for k in ("ih", "hh")}, r"hh_l0 \(10, 5\)"),
        ("keras", KERAS | {"kernel": ["a"]}, "'kernel'"),
        ("keras", KERAS | {"kernel": torch.ones(2, 8, dtype=torch.int8)}, "torch.int8"),
        ("haste", HASTE | {"gamma": torch.ones(2, 8)}, r"haste: .*recurrent\.gain"),
        ("haste", HASTE | {"kernel": torch.ones(X, 7)}, "haste: .*'kernel'"),
        ("keras", KERAS_GRU | {"bias": torch.zeros(3 * H, dtype=F64)}, "reset_after"),
        ("tflite", tflite_state(peephole=True), "peepholes"),
        ("tflite", tflite_state() | {"projection_bias": torch.ones(P)}, "projection"),
        ("tflite", COUPLED, "input gate"),
        ("xlstm", {f"slstm_cell.{k}": v for k, v in XLSTM.items()}, "slstm_cell._recurrent"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_states_that_no_layer_takes(name: str, state: dict[str, Any], named: str) -> None:
    refuses(named, from_dialect, name, state)


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("x", ln_zoo.LSTM(X, H), "'x'"),
        ("torch", ln_zoo.LSTM(X, H, norm=LayerNorm()), "no normalisation at sites.l0.input"),
        ("torch", ln_zoo.LSTM(X, H, peephole=True), "no LSTM with peepholes"),
        ("torch", ln_zoo.GRU(X, H, norm=WeightNorm()), "denormalize_ the layer first"),
        ("haste", ln_zoo.LSTM(X, H), "but LayerNorm"),
        ("haste", ln_zoo.LSTM(X, H, norm=RMSNorm()), "but LayerNorm"),
        ("haste", ln_zoo.LSTM(X, H, norm=LayerNorm(eps=1e-3)), "1e-05"),
        ("haste", ln_zoo.LSTM(X, H, norm=LayerNorm(per_gate=True)), "but LayerNorm"),
        ("haste", ln_zoo.LSTM(X, H, 2, norm=LayerNorm()), "no several layers"),
        ("haste", ln_zoo.LSTM(X, H, bidirectional=True, norm=LayerNorm()), "no second direction"),
        ("haste", ln_zoo.GRU(X, H, norm=LayerNorm()), "no GRU of this form"),
        ("tensorflow-addons", ln_zoo.LSTM(X, H, norm=LayerNorm()), "no LSTM of this form"),
        ("di-engine", ln_zoo.LSTM(X, H, norm=LayerNorm()), "no normalisation at sites.l0.cell"),
        ("sheeprl", ln_zoo.GRU(X, H, norm=LayerNorm()), "no GRU of this form"),
        ("skip-thoughts", ln_zoo.GRU(X, H), "no bias inside the reset"),
        ("keras", ln_zoo.LSTM(X, H, proj_size=P), "no projection"),
        ("xlstm", SLSTM(X, H), f"got {X}"),
        ("xlstm", SLSTM(0, H, 2), "several layers"),
        ("xlstm", SLSTM(0, H, forget_gate="exponential"), "exponential"),
        ("xlstm", SLSTM(0, H, norm=LayerNorm()), "normalisation at sites.l0.input"),
    ],
)
def test_a_layer_that_a_library_does_not_have(name: str, layer: Any, reason: str) -> None:
    refuses(re.escape(reason), to_dialect, name, layer)
    refuses("LSTM", to_dialect, "torch", nn.LSTM(2, 3), error=TypeError)
