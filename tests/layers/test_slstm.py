"""sLSTM against the equations of Beck et al. 2024 (section 2.2), without a stabiliser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from engines import names_of
from kernels.generated.generated_case import assert_exact
from layer_results import assert_close, assert_threads_run_parts, randomised, results_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ln_zoo.kernels.native.build import compiler_missing
from ln_zoo.layers import SLSTM, SLSTMCell
from ln_zoo.norms import Identity, LayerNorm, Norm
from ln_zoo.testing import CellCase

F64 = torch.float64
GATES = ("sigmoid", "exponential")
every_gate = pytest.mark.parametrize("gate", GATES)


class TestSLSTM(CellCase):
    layer, step = SLSTM, SLSTMCell
    norms = (Identity(), LayerNorm(), LayerNorm(per_block=True))


def made(gate: str, norm: Norm | None = None, inputs: int = 3, blocks: int = 2) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {"forget_gate": gate, "norm": norm, "blocks": blocks, "dtype": F64}
    return randomised(SLSTM(inputs, 6, **options))


def start(examples: int) -> list[Tensor]:
    """Random states; n is positive after any step."""
    h, c, n, m = torch.randn(4, 1, examples, 6, dtype=F64)
    return [h, c, n.exp(), m]


def equations(layer: Any, reset: Tensor | None = None) -> Callable[..., Any]:
    """The layer's function of x (T, N, I) and states: one unit's head at a time, weights C and N of
    the past in full, and states c = C / exp(m), n = N / exp(m)."""

    def norm(a: Tensor, role: str) -> Tensor:
        site = layer.sites["l0"][role]
        if not site.normalizes:
            return a
        centred = a - a.mean(-1, keepdim=True)
        a = centred / (centred.square().mean(-1, keepdim=True) + site.norm.eps).sqrt() * site.gain
        return a + site.shift if role == "cell" else a

    def one(x: Tensor, states: Sequence[Tensor], flags: Tensor) -> tuple[Tensor, list[Tensor]]:
        w, units = layer.weight_hh_l0, layer.hidden_size // layer.blocks
        h, c, n, m = states
        C, N, outputs = c * m.exp(), n * m.exp(), []
        for now, flag in zip(x, flags, strict=True):
            if flag:
                h, C, N = (torch.zeros_like(h) for _ in range(3))
            w_h = w if w.dim() == 3 else w[None]
            heads = [
                of.unflatten(0, (4, -1)) @ part
                for of, part in zip(w_h, h.split(units), strict=True)
            ]
            uh = torch.cat(heads, 1).flatten()
            wx = layer.weight_ih_l0 @ now if layer.input_size else now
            a = norm(wx, "input") + norm(uh, "recurrent") + layer.bias_ih_l0 + layer.bias_hh_l0
            i, f, z, o = a.split(layer.hidden_size)
            forget = f.exp() if layer.forget_gate == "exponential" else 1 / (1 + (-f).exp())
            new = bool((N == 0).all())
            m = i if new else torch.maximum(forget.log() + m, i)
            C, N = forget * C + i.exp() * z.tanh(), forget * N + i.exp()
            h = norm(C / N, "cell") / (1 + (-o).exp())
            outputs.append(h)
        return torch.stack(outputs), [h, C / m.exp(), N / m.exp(), m]

    def run(x: Any, states: Sequence[Tensor] | None) -> Any:
        padded, lengths = x, [len(x)] * x.shape[1] if isinstance(x, Tensor) else None
        if isinstance(x, PackedSequence):
            padded, lengths = pad_packed_sequence(x)
        flags = torch.zeros(padded.shape[:2]) if reset is None else reset
        if states is None:
            states = (padded.new_zeros(1, padded.shape[1], layer.hidden_size),) * 4
        outputs, finals = [], []
        for k, length in enumerate(lengths):
            given = [s[0, k] for s in states]
            output, final = one(padded[:length, k], given, flags[:length, k])
            outputs.append(output)
            finals.append(final)
        ends = tuple(torch.stack(s)[None] for s in zip(*finals, strict=True))
        if isinstance(x, PackedSequence):
            return nn.utils.rnn.pack_sequence(outputs, enforce_sorted=False), ends
        return torch.stack(outputs, 1), ends

    return run


def assert_equations(layer: Any, x: Any, states: Any = None, reset: Tensor | None = None) -> None:
    found = results_of(layer, x, states, call=lambda x, hx: layer(x, hx, reset=reset))
    expected = results_of(layer, x, states, call=equations(layer, reset))
    assert found.keys() == expected.keys()
    for name, a in expected.items():
        assert_close(found[name], a, 1e-13 * max([1.0, *a.abs().flatten().tolist()]))


@every_gate
@pytest.mark.parametrize("norm", [None, LayerNorm()], ids=str)
@pytest.mark.parametrize("given", [False, True])
def test_is_the_equations(gate: str, norm: Norm | None, given: bool) -> None:
    assert_equations(made(gate, norm), torch.randn(7, 4, 3, dtype=F64), start(4) if given else None)


@every_gate
def test_packed_sequences_are_the_equations(gate: str) -> None:
    x = torch.randn(7, 4, 3, dtype=F64)
    packed = pack_padded_sequence(x, torch.tensor([3, 7, 1, 5]), enforce_sorted=False)
    assert_equations(made(gate), packed, start(4))
    assert_equations(made(gate), packed)


@every_gate
def test_resets_begin_anew(gate: str) -> None:
    reset = torch.rand(7, 4) < 0.3
    reset[0, 1] = True
    assert_equations(made(gate), torch.randn(7, 4, 3, dtype=F64), start(4), reset)


@every_gate
@pytest.mark.parametrize("norm", [None, LayerNorm()], ids=str)
def test_given_input_terms(gate: str, norm: Norm | None) -> None:
    assert_equations(made(gate, norm, inputs=0), torch.randn(7, 4, 24, dtype=F64), start(4))


@pytest.mark.parametrize("layer", [SLSTM(0, 6), SLSTMCell(0, 6)], ids=lambda of: type(of).__name__)
def test_wrong_input_terms(layer: Any) -> None:
    with pytest.raises(RuntimeError, match=r"24.*got 6|got 6.*24"):
        layer(torch.zeros(3, 6) if isinstance(layer, SLSTMCell) else torch.zeros(5, 3, 6))


@pytest.mark.parametrize("cls", [SLSTM, SLSTMCell])
def test_wrong_forget_gate(cls: type) -> None:
    with pytest.raises(ValueError, match=r"forget_gate.*'tanh'"):
        cls(3, 6, forget_gate="tanh")


@every_gate
def test_first_step_is_the_input(gate: str) -> None:
    """For gates of all sizes; gradients are finite."""
    for size in (0.0, 1.0, 1e3, 1e6):
        x = (size * torch.randn(1, 50, 24)).requires_grad_()
        layer = SLSTM(0, 6, forget_gate=gate, bias=False)
        output, (_, c, n, m) = layer(x)
        i, _, z, o = x.chunk(4, -1)
        assert_close([c, n, m], [z.tanh(), torch.ones_like(z), i], 1e-6)
        assert_close(output, o.sigmoid() * z.tanh(), 1e-6)
        (d,) = torch.autograd.grad(output.sum(), x)
        assert d.isfinite().all()


@every_gate
def test_equal_exponents_have_gradients(gate: str) -> None:
    """Gates of zero make the exponents of past and input equal, at every step if exponential."""
    layer = made(gate, inputs=0)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    x = torch.cat([torch.zeros(5, 1, 12), torch.randn(5, 1, 12)], -1).double().requires_grad_()
    outputs = layer(x)[0], equations(layer)(x, None)[0]
    one, two = (torch.autograd.grad(output.sin().sum(), x)[0] for output in outputs)
    assert two[..., :12].any()
    assert_close(one, two, 1e-13)


def alone(gate: str, dtype: torch.dtype) -> SLSTM:
    """Two units without recurrent weights, whose states have a closed form."""
    layer = SLSTM(0, 2, forget_gate=gate, bias=False, dtype=dtype)
    nn.init.zeros_(layer.get_parameter("weight_hh_l0"))
    return layer


def closed_form(terms: Tensor, gate: str) -> Tensor:
    """Outputs (T, 1, 2): means of tanh(z) over all steps, with weights in logarithms."""
    i, f, z, o = terms.double().chunk(4, -1)
    weights = i - (f if gate == "exponential" else F.logsigmoid(f)).cumsum(0)
    positive = weights + F.logsigmoid(2 * z)  # (1 + tanh(z)) / 2
    means = 2 * (positive.logcumsumexp(0) - weights.logcumsumexp(0)).exp() - 1
    return o.sigmoid() * means


def assert_long(gate: str, steps: int, dtype: torch.dtype, tolerance: float) -> None:
    terms = torch.randn(steps, 1, 8, dtype=dtype)
    terms[..., 2:4] -= 1.0  # of the forget gate: exponents stay small in float32
    with torch.no_grad():
        output, _ = alone(gate, dtype)(terms)
    assert_close(output.double(), closed_form(terms, gate), tolerance)


def assert_finite(gate: str, size: float, steps: int) -> None:
    """Of all steps, and of the gradient of the last thousand."""
    torch.manual_seed(0)
    layer = randomised(SLSTM(0, 8, forget_gate=gate, blocks=2))
    terms = size * torch.randn(steps, 1, 32)
    with torch.no_grad():
        output, states = layer(terms[:-1000])
    last = terms[-1000:].requires_grad_()
    final, ends = layer(last, states)
    (final.sum() + ends[0].sum()).backward()
    for a in (output, *states, final, *ends, last.grad, layer.weight_hh_l0.grad):
        assert a.isfinite().all()
    for a in (output, final):
        assert a.abs().max() <= 1 + 1e-6
    for _, _, n, _ in (states, ends):
        assert n.min() >= 1


@every_gate
def test_long_sequences_have_their_closed_form(gate: str) -> None:
    assert_long(gate, 2000, F64, 1e-10)


@every_gate
@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_large_gates_do_not_overflow(gate: str, size: float) -> None:
    assert_finite(gate, size, 3000)


@pytest.mark.slow
@every_gate
def test_a_million_steps(gate: str) -> None:
    assert_long(gate, 1_000_000, torch.float32, 1e-4)
    for size in (1.0, 1e3, 1e6):
        assert_finite(gate, size, 1_000_000)


@every_gate
@pytest.mark.parametrize("inputs", [3, 0])
def test_on_its_kernel(gate: str, inputs: int, chosen: list[Any]) -> None:
    if reason := compiler_missing():
        pytest.skip(reason)
    layer, reset = made(gate, LayerNorm(), inputs).float(), torch.rand(20, 5) < 0.1
    x, states = torch.randn(20, 5, inputs or 24), [s.float() for s in start(5)]
    assert_exact(layer, x, states, reset)
    packed = pack_padded_sequence(x, torch.tensor([20, 3, 9, 1, 17]), enforce_sorted=False)
    assert_exact(layer, packed, states)
    assert names_of(chosen)[0] == "generated"


def test_threads_run_parts_of_given_terms() -> None:
    layer = made("sigmoid", inputs=0).float()
    states = [s.float() for s in start(41)]
    assert_threads_run_parts(layer, torch.randn(20, 41, 24), states, one_thread_backward=True)
