"""Without normalisation every layer is torch's: parameters, outputs, states, gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from layer_results import gradients
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from ln_zoo.layers import GRU, LSTM, RNN, Conv2d, GRUCell, Linear, LSTMCell, RNNCell
from ln_zoo.norms import Identity, Norm, WeightNorm

F64 = torch.float64
TOLERANCE = 1e-12
PAIRS = {"LSTM": (LSTM, nn.LSTM), "GRU": (GRU, nn.GRU), "RNN": (RNN, nn.RNN)}
CELL_PAIRS = {
    "LSTM": (LSTMCell, nn.LSTMCell),
    "GRU": (GRUCell, nn.GRUCell),
    "RNN": (RNNCell, nn.RNNCell),
}
# A fresh weight-normalised layer computes what it would without normalisation.
neutral = pytest.mark.parametrize("norm", [Identity(), WeightNorm()], ids=["identity", "weight"])

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "no bias": {"bias": False},
    "both directions": {"bidirectional": True},
    "everything": {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.4},
    "no bias, both directions": {"bias": False, "bidirectional": True, "num_layers": 2},
    "relu": {"nonlinearity": "relu", "num_layers": 2},
    "projection": {"proj_size": 2},
    "projection, everything": {
        "proj_size": 3,
        "num_layers": 2,
        "bidirectional": True,
        "bias": False,
        "dropout": 0.4,
    },
}
ONLY = {"relu": "RNN", "projection": "LSTM", "projection, everything": "LSTM"}
COMBINATIONS = [
    pytest.param(kind, options, id=f"{kind}, {options}")
    for kind in PAIRS
    for options in OPTIONS
    if ONLY.get(options, kind) == kind
]


def exchange_states(ours: nn.Module, theirs: nn.Module) -> None:
    """Names are torch's, and each loads the other's; all numbers are new then."""
    assert list(ours.state_dict()) == list(theirs.state_dict())
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.uniform_(-0.5, 0.5)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)


def pair(kind: str, norm: Norm, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Our layer and torch's with the same parameters, first drawn by both from a seed."""
    cls, torch_cls = PAIRS[kind]
    torch.manual_seed(7)
    theirs = torch_cls(3, 5, dtype=F64, **options)
    torch.manual_seed(7)
    ours = cls(3, 5, dtype=F64, norm=norm, **options)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), name
    if norm == Identity():
        exchange_states(ours, theirs)
    return ours, theirs


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(tensors(actual), tensors(expected), rtol=0, atol=TOLERANCE)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, PackedSequence):
        return [t for t in value if t is not None]
    return [value] if isinstance(value, Tensor) else [t for part in value for t in tensors(part)]


def random_states(layer: nn.Module, *examples: int) -> Any:
    runs = layer.num_layers * (2 if layer.bidirectional else 1)
    h = torch.randn(runs, *examples, layer.proj_size or 5, dtype=F64, requires_grad=True)
    if layer.mode != "LSTM":
        return h
    return h, torch.randn(runs, *examples, 5, dtype=F64, requires_grad=True)


INPUTS = ["batch", "T = 1", "one example", "packed", "packed unsorted", "packed T = 1"]


def make_input(kind: str, batch_first: bool) -> tuple[Any, tuple[int, ...], Tensor]:
    """The input, the shape of its examples, and the tensor that takes gradients."""
    if kind == "one example":
        x = torch.randn(6, 3, dtype=F64, requires_grad=True)
        return x, (), x
    length = 1 if kind.endswith("T = 1") else 6
    if not kind.startswith("packed"):
        shape = (4, length, 3) if batch_first else (length, 4, 3)
        x = torch.randn(shape, dtype=F64, requires_grad=True)
        return x, (4,), x
    x = torch.randn(length, 4, 3, dtype=F64)
    lengths = {"packed": [6, 4, 4, 1], "packed unsorted": [4, 1, 6, 4]}.get(kind, [1] * 4)
    packed = pack_padded_sequence(x, lengths, enforce_sorted=kind != "packed unsorted")
    packed = packed._replace(data=packed.data.detach().requires_grad_())
    return packed, (4,), packed.data


#: Initial states or none, the norm, fast paths allowed or not: all 8 ways in turn, so that any
#: options meet any layout, and either of them meets both values of each of these three.
WAYS = list(itertools.product([True, False], [Identity(), WeightNorm()], ["1", "0"]))
PAIRWISE = [
    pytest.param(combination.values, layout, WAYS[(i + j) % len(WAYS)])
    for i, combination in enumerate(COMBINATIONS)
    for j, layout in enumerate(INPUTS)
]


@pytest.mark.parametrize(("case", "layout", "way"), PAIRWISE)
def test_layer(
    case: tuple[str, str], layout: str, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kind, options), (given, norm, kernels) = case, way
    monkeypatch.setenv("LN_ZOO_KERNELS", kernels)
    ours, theirs = pair(kind, norm, **OPTIONS[options])
    x, examples, source = make_input(layout, ours.batch_first)
    hx = random_states(ours, *examples) if given else None
    # The same seed: dropout must draw the same numbers as torch's.
    torch.manual_seed(8)
    actual = ours(x, hx)
    torch.manual_seed(8)
    expected = theirs(x, hx)
    assert_same(actual, expected)

    sources = [source, *(tensors(hx) if given else [])]
    if norm == Identity():  # weight normalisation has other gradients on weights
        ours_all, theirs_all = list(ours.parameters()), list(theirs.parameters())
    else:
        names = [name for name, _ in theirs.named_parameters() if name.startswith("bias")]
        ours_all = [ours.get_parameter(name) for name in names]
        theirs_all = [theirs.get_parameter(name) for name in names]
    assert_same(gradients(actual, sources + ours_all), gradients(expected, sources + theirs_all))


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("given", [True, False])
@neutral
def test_cell(kind: str, bias: bool, batched: bool, given: bool, norm: Norm) -> None:
    cls, torch_cls = CELL_PAIRS[kind]
    torch.manual_seed(9)
    theirs = torch_cls(3, 5, bias, dtype=F64)
    torch.manual_seed(9)
    ours = cls(3, 5, bias, dtype=F64, norm=norm)
    if norm == Identity():
        exchange_states(ours, theirs)
    shape = (4,) if batched else ()
    x = torch.randn(*shape, 3, dtype=F64, requires_grad=True)
    states = [torch.randn(*shape, 5, dtype=F64, requires_grad=True) for _ in range(2)]
    hx = None if not given else tuple(states) if kind == "LSTM" else states[0]
    actual, expected = ours(x, hx), theirs(x, hx)
    assert_same(actual, expected)
    with_weights = norm == Identity()
    assert_same(
        gradients(actual, [x, *(ours.parameters() if with_weights else ())]),
        gradients(expected, [x, *(theirs.parameters() if with_weights else ())]),
    )


OF_IMAGES: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": 1, "bias": False},
    {"padding": "same", "dilation": (1, 2)},
    {"padding": (1, 2), "padding_mode": "circular"},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": 1, "padding_mode": "replicate", "groups": 2},
]


@pytest.mark.parametrize(
    ("cls", "sizes", "shapes", "options"),
    [
        *((Linear, (3, 5, bias), [(3,), (4, 3), (2, 4, 3)], {}) for bias in (True, False)),
        *((Conv2d, (4, 6, (3, 2)), [(2, 4, 6, 7), (4, 6, 7)], options) for options in OF_IMAGES),
    ],
    ids=str,
)
@neutral
def test_feed_forward(
    cls: Any,
    sizes: tuple[Any, ...],
    shapes: list[tuple[int, ...]],
    norm: Norm,
    options: dict[str, Any],
) -> None:
    torch.manual_seed(10)
    theirs = getattr(nn, cls.__name__)(*sizes, dtype=F64, **options)
    torch.manual_seed(10)
    ours = cls(*sizes, dtype=F64, norm=norm, **options)
    if norm == Identity():
        exchange_states(ours, theirs)
    for shape in shapes:
        x = torch.randn(shape, dtype=F64, requires_grad=True)
        assert_same(ours(x), theirs(x))
        assert_same(gradients(ours(x), [x]), gradients(theirs(x), [x]))
