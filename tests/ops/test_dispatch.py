"""Which loop runs: the choice, its reasons, the switch."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import names_of
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from ln_zoo.kernels.native import build
from ln_zoo.kernels.triton import engine
from ln_zoo.layers import GRU, LSTM, RNN
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, Site, WeightNorm
from ln_zoo.ops import CELLS, KERNELS, RecurrentCall, RowNorm, Weights, registry
from ln_zoo.ops.engines import torch_rnn
from ln_zoo.ops.engines.torch_rnn import TorchRNN

F32 = torch.float32
H = 4
GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}


def call(cell: str) -> RecurrentCall:
    """One direction whose places do nothing."""
    records = {p.role: RowNorm(tuple(n * H for n in p.groups)) for p in CELLS[cell].places}
    weights = Weights(torch.randn(GATES[cell] * H, 3), torch.randn(GATES[cell] * H, H))
    x, states = torch.randn(5, 2, 3), (torch.zeros(1, 2, H),) * len(CELLS[cell].states)
    return RecurrentCall(CELLS[cell], [records], x, None, states, [weights])


FUSED = TorchRNN.name


@dataclass(frozen=True)
class Opaque(Norm):
    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        return a.tanh()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"norm": Identity()}, FUSED),
        ({"norm": WeightNorm()}, FUSED),
        ({"norm": LayerNorm(), "normalize": ()}, FUSED),
        *(({"norm": norm}, "aten") for norm in (LayerNorm(), RMSNorm(), BatchNorm())),
        ({"norm": Opaque()}, None),
    ],
)
@pytest.mark.parametrize("cls", [LSTM, GRU, RNN])
def test_which_norms_run_where(
    cls: type, options: Any, wanted: str | None, chosen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own loop where no sums are normalised, else a kernel, or the generic loop."""
    monkeypatch.setenv("LN_ZOO_KERNELS", "torch,aten")
    cls(3, 4, **options)(torch.randn(5, 2, 3))
    assert names_of(chosen) == [wanted]


@pytest.mark.parametrize(
    ("cls", "norm", "choices"),
    [
        (LSTM, Identity(), [("0", None), ("1", FUSED), ("0", None), ("", FUSED)]),
        (GRU, LayerNorm(), [("aten", "aten"), (" torch , aten ", "aten"), ("torch", None)]),
    ],
)
def test_the_switch_is_read_at_each_call(
    cls: type, norm: Norm, choices: Any, chosen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = cls(3, 4, norm=norm, dtype=torch.float64), torch.randn(200, 2, 3).double()
    for value, wanted in choices:
        monkeypatch.setenv("LN_ZOO_KERNELS", value)
        layer(x)
        assert names_of(chosen)[-1] == wanted
    for value, name in (("atn", "atn"), ("aten,1", "1"), ("torch,,aten", "")):
        monkeypatch.setenv("LN_ZOO_KERNELS", value)
        with pytest.raises(ValueError, match=f"LN_ZOO_KERNELS={value}.*{name!r}.* torch, .*aten"):
            layer(x)


def logged(caplog: pytest.LogCaptureFixture, layer: torch.nn.Module, times: int = 3) -> list[str]:
    registry._log.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="ln_zoo"):
        for _ in range(times):
            layer(torch.randn(5, 2, 3))
    return caplog.messages


def test_what_runs_is_logged_once_and_why_nothing_else_does(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, ours = f"{FUSED} ({TorchRNN.title})", "aten (steps in functions of torch)"
    monkeypatch.setenv("LN_ZOO_KERNELS", "torch,aten")
    assert logged(caplog, LSTM(3, 4)) == [f"LSTM: runs on {fused}"]
    assert logged(caplog, GRU(3, 4, norm=LayerNorm())) == [
        f"GRU: not run by {fused}: the input site normalises its summed inputs",
        f"GRU: runs on {ours}",
    ]
    messages = logged(caplog, RNN(3, 4, norm=Opaque()))
    assert f"RNN_TANH: not run by {ours}: only the norm knows what the sum site does" in messages
    assert messages[-1] == "RNN_TANH: runs on the generic loop: LN_ZOO_KERNELS=torch,aten"
    monkeypatch.setenv("LN_ZOO_KERNELS", "0")
    assert logged(caplog, LSTM(3, 4)) == ["LSTM: runs on the generic loop: LN_ZOO_KERNELS=0"]
    monkeypatch.delenv("LN_ZOO_KERNELS")
    assert logged(caplog, RNN(3, 4, norm=Opaque()))[-1] == "RNN_TANH: runs on the generic loop"


def test_half_precision_autocast_is_refused_for_the_lstm_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reason(cell: str) -> str | None:
        return TorchRNN().unsupported_reason(call(cell))

    with torch.autocast("cpu", torch.float16):
        assert "float16 autocast" in str(reason("LSTM"))
        assert reason("GRU") is None
    # torch's LSTM in bfloat16 is oneDNN's, where there is oneDNN.
    for bfloat16 in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda b=bfloat16: b)
        with torch.autocast("cpu", torch.bfloat16):
            runs = bfloat16 or not torch.backends.mkldnn.is_available()
            assert (reason("LSTM") is None) == runs
            assert reason("GRU") is None


def test_a_kernel_is_one_entry_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees records with gains, never norms, and may refuse."""

    class Constant:
        name, title = "constant", "a test"
        tasks = ("layers", "step")

        def unsupported_reason(self, call: RecurrentCall) -> str | None:
            return None if call.records[0]["sum"].center else "it centres"

        def __call__(self, call: RecurrentCall) -> Any:
            assert (call.bidirectional, call.dropout, call.training) == (False, 0.0, True)
            return call.records[0]["sum"].gain.expand(*call.x.shape[:2], 4), call.states

    monkeypatch.setattr(registry, "KERNELS", [Constant(), *KERNELS])
    x = torch.randn(5, 2, 3)
    output, _ = RNN(3, 4, norm=LayerNorm(gain=3.0))(x)
    assert (output == 3).all()
    output, _ = RNN(3, 4, norm=RMSNorm(gain=3.0))(x)
    assert not (output == 3).any()


@pytest.mark.skipif(not build.status().available, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("cls", "norm", "dtype", "wanted"),
    [
        *((c, n, F32, "native") for c in (LSTM, GRU, RNN) for n in (Identity(), WeightNorm())),
        *((GRU, Identity(), dtype, FUSED) for dtype in (torch.float64, torch.bfloat16)),
    ],
)
def test_a_larger_layer_without_normalisation_is_ours_in_float32(
    cls: type,
    norm: Norm,
    dtype: torch.dtype,
    wanted: str,
    chosen: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Results have the precision that torch gives them, which differs from cell to cell."""
    monkeypatch.delenv("LN_ZOO_KERNELS", raising=False)
    layer = cls(20, 96, num_layers=2, bidirectional=True, norm=norm, dtype=dtype)
    theirs = getattr(nn, cls.__name__)(20, 96, num_layers=2, bidirectional=True, dtype=dtype)
    theirs.load_state_dict({name: layer.get_parameter(name) for name in theirs.state_dict()})
    x = torch.randn(40, 6, 20, dtype=dtype)
    torch.testing.assert_close(layer(x), theirs(x))
    assert names_of(chosen) == [wanted]


@pytest.mark.skipif(not build.status().available, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("cls", "steps", "examples", "wanted"),
    [(LSTM, 90, 6, "native"), (GRU, 50, 6, FUSED), (RNN, 6, 90, FUSED)],
)
def test_packed_sequences_are_ours_where_there_are_many_rows(
    cls: type,
    steps: int,
    examples: int,
    wanted: str,
    chosen: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LN_ZOO_KERNELS", raising=False)
    torch.manual_seed(0)
    layer = cls(3, 4, bidirectional=True)
    theirs = getattr(nn, cls.__name__)(3, 4, bidirectional=True)
    theirs.load_state_dict(layer.state_dict())
    lengths = torch.tensor([steps // 2, 2, steps, steps, 3, steps // 2] * (examples // 6))
    x = torch.randn(steps, examples, 3)
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)  # 275, 155 or 345 rows
    torch.testing.assert_close(layer(packed)[0].data, theirs(packed)[0].data)
    assert names_of(chosen) == [wanted]


@pytest.mark.parametrize("cell", GATES)
def test_torchs_loop_is_given_contiguous_states(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN refuses others; the loops for CPUs take any."""
    given: list[Tensor] = []
    function = torch_rnn._FUNCTIONS[cell]

    def noted(x: Tensor, hx: Tensor | tuple[Tensor, ...], *rest: Any) -> tuple[Tensor, ...]:
        given.extend(hx if isinstance(hx, tuple) else [hx])
        return function(x, hx, *rest)

    monkeypatch.setitem(torch_rnn._FUNCTIONS, cell, noted)
    c = call(cell)
    expanded = torch.randn(1, 1, H).expand(-1, 2, -1)
    strided = torch.randn(1, H, 2).transpose(1, 2)
    for state in (expanded, strided):
        expected, _ = TorchRNN()(c._replace(states=(state.contiguous(),) * len(c.states)))
        found, _ = TorchRNN()(c._replace(states=(state,) * len(c.states)))
        assert torch.equal(found, expected)
    assert len(given) == 4 * len(c.states)
    assert all(state.is_contiguous() for state in given)


def test_weights_in_one_piece_have_their_values_and_gradients() -> None:
    """In cuDNN's order: the matrices of both layers, projections too, then their biases."""
    sizes = 2 * [(8, 3), (8, 2), (8,), (8,), (1, 2)]
    own = [torch.randn(*size, requires_grad=True) for size in sizes]
    found = torch_rnn.in_one_piece(own, torch.float64)
    assert all(torch.equal(a, b.double()) for a, b in zip(found, own, strict=True))
    starts = [a.storage_offset() for a in found]
    order = sorted(range(10), key=starts.__getitem__)
    assert order == [0, 1, 4, 5, 6, 9, 2, 3, 7, 8]
    assert found[8].storage_offset() + 8 == sum(a.numel() for a in own)
    assert len({a.untyped_storage().data_ptr() for a in found}) == 1
    gradients = torch.autograd.grad(sum((k + 1) * a.sum() for k, a in enumerate(found)), own)
    assert all(torch.equal(g, torch.full_like(g, k + 1)) for k, g in enumerate(gradients))


@pytest.mark.usefixtures("compiler")
def test_checks_of_the_machine_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile cannot trace those of the GPU's engine: they ask importlib and the driver."""

    def untraceable(answer: Any) -> Any:
        def ask(*arguments: Any) -> Any:
            torch._dynamo.graph_break()
            return answer

        return ask

    properties = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", untraceable(properties))
    monkeypatch.setattr(importlib.util, "find_spec", untraceable(object()))
    engine._has_triton.__wrapped__.cache_clear()
    gpu = torch.device("cuda", 0)

    def takes(x: Tensor) -> Tensor:
        return x + 1 if engine._unsupported_gpu(gpu, torch.bfloat16) is None else x

    compiled = torch.compile(takes, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))
    engine._has_triton.__wrapped__.cache_clear()
