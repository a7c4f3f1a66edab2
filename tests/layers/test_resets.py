"""Resets inside a sequence: outputs, states and gradients are those of the pieces run apart."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layer_results import assert_close, flat, gradients, made
from refusals import refuses
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ln_zoo.kernels.native.engine import NativeLayers
from ln_zoo.layers import GRU, LSTM, RNN
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, WeightNorm
from ln_zoo.ops import chunks, registry, resets
from ln_zoo.ops.engines.base import Masks
from ln_zoo.ops.spec import Examples, Operands, Rows, Spec
from ln_zoo.ops.time_chunks import time_chunks

F64 = torch.float64
T, N, E, H = 9, 4, 3, 5


def flags() -> Tensor:
    """A sequence that is never reset, one at its start too, one twice, and one at each step."""
    reset = torch.zeros(T, N, dtype=torch.bool)
    reset[[0, 5], 1] = True
    reset[[3, 4], 2] = True
    reset[:, 3] = True
    return reset


def states_of(layer: Any, given: bool) -> tuple[Tensor, ...] | None:
    if not given:
        return None
    rows = len(layer.sites)
    first = torch.randn(rows, N, layer.proj_size or H, dtype=F64, requires_grad=True)
    others = [torch.randn(rows, N, H, dtype=F64, requires_grad=True) for _ in layer.cell.states[1:]]
    return first, *others


def as_hx(states: tuple[Tensor, ...] | None) -> Any:
    return states if states is None or len(states) > 1 else states[0]


def apart(
    layer: Any, x: Tensor, reset: Tensor, states: tuple[Tensor, ...] | None, lengths: list[int]
) -> list[Tensor]:
    """The same by definition: each piece of each sequence in a call of its own."""
    reverse = [suffix.endswith("reverse") for suffix in layer.sites]
    outputs, finals = [], []
    for n, length in enumerate(lengths):
        begins = [0, *(t for t in range(1, length) if reset[t, n])]
        found = []
        for begin, end in zip(begins, [*begins[1:], length], strict=True):
            hx = None
            if states is not None:
                # The first piece starts from the given states, in reverse directions the last.
                given = [end == length if back else not (begin or reset[0, n]) for back in reverse]
                starts = torch.tensor(given).view(-1, 1, 1)
                hx = tuple(s[:, n : n + 1] * starts for s in states)
            found.append(flat(layer(x[begin:end, n : n + 1], as_hx(hx))))
        outputs.append(torch.cat([piece[0] for piece in found])[:, 0])
        last = [found[0 if back else -1][1:] for back in reverse]
        finals.append(
            [
                torch.stack([ends[k][i, 0] for i, ends in enumerate(last)])
                for k in range(len(layer.cell.states))
            ]
        )
    padded = nn.utils.rnn.pad_sequence(outputs)
    return [padded, *(torch.stack(parts, 1) for parts in zip(*finals, strict=True))]


def assert_same(one: list[Tensor], two: list[Tensor], sources: list[Tensor]) -> None:
    assert_close(one, two)
    assert_close(gradients(one, sources), gradients(two, sources), 1e-9, 1e-10)


def check(layer: Any, given: bool, lengths: list[int] | None = None) -> None:
    """Compare a padded or packed call with separate calls of its pieces."""
    x = torch.randn(T, N, E, dtype=F64, requires_grad=True)
    states = states_of(layer, given)
    if lengths is None:
        found = flat(layer(x, as_hx(states), reset=flags()))
    else:
        options: dict[str, Any] = {"lengths": torch.tensor(lengths), "enforce_sorted": False}
        packed, reset = (pack_padded_sequence(a, **options) for a in (x, flags()))
        output, finals = layer(packed, as_hx(states), reset=reset)
        assert output.batch_sizes.equal(packed.batch_sizes)
        found = flat((pad_packed_sequence(output)[0], finals))
    expected = apart(layer, x, flags(), states, lengths or [T] * N)
    assert_same(found, expected, [x, *(states or ()), *layer.parameters()])


NONE, LAYER = Identity(), LayerNorm(eps=1e-3)


BOTH: dict[str, Any] = {"bidirectional": True}
TWO: dict[str, Any] = {"num_layers": 2}


@pytest.mark.parametrize(
    ("cls", "norm", "options", "given", "lengths"),
    [
        # Any two of cell, directions, states and norm meet.
        *((LSTM, NONE, TWO, False, None), (LSTM, LAYER, TWO | BOTH, True, None)),
        *((GRU, NONE, TWO, True, None), (GRU, LAYER, TWO | BOTH, False, None)),
        *((RNN, NONE, TWO | BOTH, True, None), (RNN, LAYER, TWO, False, None)),
        *((cls, BatchNorm(), BOTH, True, None) for cls in (LSTM, RNN)),
        (GRU, WeightNorm(), BOTH, True, None),
        *(
            (LSTM, LAYER, BOTH | own, True, None)
            for own in ({"proj_size": 2}, {"peephole": True}, {"bias": False})
        ),
        *((cls, LayerNorm(), BOTH, True, [3, 9, 6, 7]) for cls in (LSTM, RNN)),
        *((LSTM, LayerNorm(), {}, False, [3, 9, 6, 7]), (GRU, LAYER, BOTH, False, [3, 9, 6, 7])),
    ],
)
def test_pieces_apart(
    cls: type,
    norm: Norm,
    options: dict[str, Any],
    given: bool,
    lengths: list[int] | None,
    loop: str,
) -> None:
    layer = made(cls, norm, **options)
    if isinstance(norm, BatchNorm):  # its statistics count steps from the start of a piece
        with torch.no_grad():
            layer(torch.randn(T, N, E, dtype=F64))
        layer.eval()
    check(layer, given, lengths)


@pytest.mark.parametrize(
    ("cls", "norm", "noise"),
    [
        (LSTM, LAYER, {"zoneout": 0.3, "recurrent_dropout": 0.2}),
        (GRU, NONE, {"zoneout": 0.3, "recurrent_dropout": 0.2}),
        (RNN, LAYER, {}),
    ],
)
def test_flags_instead_of_pieces(
    cls: type, norm: Norm, noise: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In many chunks, padded and packed."""
    monkeypatch.setenv("LN_ZOO_KERNELS", "aten")
    monkeypatch.setattr(resets, "split_at_resets", lambda *_: pytest.fail("cut into pieces"))
    monkeypatch.setattr(chunks, "time_chunks", lambda sizes, *_: time_chunks(sizes, 10))
    layer = made(cls, norm, num_layers=2, bidirectional=True, **noise).eval()
    for lengths in (None, [9, 6, 6, 3]):
        check(layer, True, lengths)


def test_gradients_of_gradients_pass_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LN_ZOO_KERNELS", "aten")
    layer = made(GRU, LayerNorm(eps=1e-3))
    x = torch.randn(T, N, E, dtype=F64, requires_grad=True)
    norms = []
    for kernels in ("aten", "0"):
        monkeypatch.setenv("LN_ZOO_KERNELS", kernels)
        loss = layer(x, reset=flags())[0].square().sum()
        (d_x,) = torch.autograd.grad(loss, x, create_graph=True)
        norms.append(torch.autograd.grad(d_x.square().sum(), [x, *layer.parameters()]))
    assert_close(*norms, 1e-9, 1e-10)


def test_operators_check_resets() -> None:
    none, x = Rows(), torch.zeros(T, N, E)
    operands = Operands(x, torch.zeros(H, E), torch.zeros(H, H), torch.zeros(N, H))

    def run(reset: Tensor, engine: str, out: Rows | Examples = none) -> None:
        spec = Spec("RNN_TANH", none, none, out)
        masks = Masks(reset=reset)
        rest = (*(None,) * 3, *masks, None, *spec.numbers(), engine, False)
        gain = None if out is none else torch.ones(H)
        torch.ops.ln_zoo.recurrence(*operands._replace(gain_out=gain), *rest)

    run(flags().flatten(), "aten")
    for wrong in (flags(), flags().flatten()[1:], flags().flatten().float()):
        refuses("reset", run, wrong, "aten", error=RuntimeError)
    with pytest.raises(RuntimeError, match="native has no resets"):
        run(flags().flatten(), "native", Examples(batch=True, eps=1e-5))


def test_layouts_are_one() -> None:
    layer = made(LSTM, LayerNorm(), bidirectional=True)
    first = made(LSTM, LayerNorm(), bidirectional=True, batch_first=True)
    x = torch.randn(T, N, E, dtype=F64)
    output, (h, c) = layer(x, reset=flags())
    other, _ = first(x.transpose(0, 1), reset=flags().t())
    assert torch.equal(other.transpose(0, 1), output)
    for n in range(N):
        alone, (h_n, c_n) = layer(x[:, n], reset=flags()[:, n])
        torch.testing.assert_close(alone, output[:, n])
        torch.testing.assert_close((h_n, c_n), (h[:, n], c[:, n]))


def test_dropout_is_drawn_over_pieces_as_over_sequences() -> None:
    """Between layers every number has its own draw."""
    layer = made(LSTM, LayerNorm(), num_layers=2, dropout=0.5)
    x = torch.randn(T, N, E, dtype=F64)
    torch.manual_seed(3)
    one = layer(x, reset=flags())[0]
    torch.manual_seed(3)
    assert torch.equal(one, layer(x, reset=flags())[0])
    assert not torch.equal(one, layer(x, reset=flags())[0])


@pytest.mark.parametrize(
    ("reset", "error", "message"),
    [
        (torch.zeros(T, N), ValueError, r"reset .*\(9, 4\).*torch.float32"),
        (torch.zeros(N, T).bool(), ValueError, r"reset .*\(4, 9\)"),
        (torch.zeros(T).bool(), ValueError, r"reset .*\(9,\)"),
        (torch.zeros(T, N, 1).bool(), ValueError, r"reset .*\(9, 4, 1\)"),
        (torch.zeros(T, N, dtype=torch.bool, device="meta"), RuntimeError, "device"),
        ([[False] * N] * T, TypeError, "reset .*list"),
        (pack_padded_sequence(torch.zeros(T, N), [T] * N), TypeError, "reset .*PackedSequence"),
    ],
    ids=["float", "other layout", "one example", "3D", "device", "list", "packed"],
)
def test_resets_that_do_not_fit(reset: Any, error: type, message: str) -> None:
    refuses(message, GRU(E, H), torch.randn(T, N, E), reset=reset, error=error)


def test_packed_resets_that_do_not_fit() -> None:
    layer, x = GRU(E, H), torch.randn(T, N, E)
    packed = pack_padded_sequence(x, torch.tensor([3, 9, 6, 7]), enforce_sorted=False)
    refuses(r"reset .*packed.*Tensor", layer, packed, reset=flags(), error=TypeError)
    other = pack_padded_sequence(flags(), torch.tensor([9, 3, 6, 7]), enforce_sorted=False)
    refuses("reset", layer, packed, reset=other)
    data = PackedSequence(packed.data[:, 0], *packed[1:])
    refuses(r"reset .*\(25,\)", layer, packed, reset=data)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("norm", [LayerNorm(), BatchNorm()], ids=["layer", "batch"])
def test_the_default_device_may_be_another(norm: Norm, dtype: torch.dtype) -> None:
    """The meta device stands for a GPU: what is made there cannot meet what is on the CPU."""
    before = made(LSTM, norm, bidirectional=True).to(dtype)
    x, reset = torch.randn(T, N, E, dtype=dtype), flags()
    lengths = torch.tensor([9, 7, 4, 4])
    packed, packed_reset = (pack_padded_sequence(a, lengths) for a in (x, reset))

    def run() -> list[Tensor]:
        layer = copy.deepcopy(before)  # running averages change
        results = [layer(x), layer(x, reset=reset), layer(packed)]
        results.append(layer(packed, reset=packed_reset))
        return [a for output, states in results for a in (getattr(output, "data", output), *states)]

    expected = run()
    with torch.device("meta"):
        found = run()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=["native", "aten"])
@pytest.mark.parametrize("noise", [{}, {"zoneout": 0.3, "recurrent_dropout": 0.2}], ids=str)
def test_a_compiled_layer_takes_resets(
    noise: dict[str, float], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one graph, which serves every pattern of resets."""
    # A graph calls an operator, which rounds in other places than a call without it.
    kernels = [kernel for kernel in registry.KERNELS if not isinstance(kernel, NativeLayers)]
    monkeypatch.setattr(registry, "KERNELS", kernels)
    layer = made(LSTM, LayerNorm(eps=1e-3), bidirectional=True, **noise).to(dtype)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(T, N, E, dtype=dtype, requires_grad=True)
    none = torch.zeros(T, N, dtype=torch.bool)
    for reset in (flags(), none, flags().flip(1)):
        results = []
        for run in (layer, compiled):
            torch.manual_seed(3)
            results.append(flat(run(x, reset=reset)))
        assert_same(*results, [x, *layer.parameters()])
