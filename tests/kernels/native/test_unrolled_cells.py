"""Cells in a loop, whose steps share one node of the graph for the gradients of weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from accuracy import assert_as_accurate, generic_loop, moved
from engines import needs_native
from own_cell import MGU
from torch import Tensor, nn

from ln_zoo.kernels import shared_weights
from ln_zoo.kernels.generated import engine
from ln_zoo.kernels.native.compiler import Unavailable, find_compiler
from ln_zoo.layers import SLSTM, GRUCell, LSTMCell, RecurrentCell, RNNCell
from ln_zoo.norms import Identity, LayerNorm, Norm

pytestmark = needs_native
T, N, INPUTS, H = 7, 3, 5, 9


class MGUCell(RecurrentCell):
    cell = MGU.cell


class SLSTMCell(RecurrentCell):
    cell = SLSTM.cell


CELLS: dict[str, Any] = {"LSTM": LSTMCell, "GRU": GRUCell, "RNN": RNNCell}
#: On generated kernels.
GENERATED: dict[str, Any] = {
    "GRU in blocks": lambda *sizes, **options: GRUCell(*sizes, blocks=3, **options),
    "MGU": MGUCell,
    "sLSTM": SLSTMCell,
}
CELLS |= GENERATED


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated kernels run steps of any size."""
    monkeypatch.setattr(engine, "LEAST_MULTIPLICATIONS", 1)


def made(name: str, norm: Norm | None = None) -> RecurrentCell:
    if name in GENERATED:
        try:
            find_compiler()
        except Unavailable as error:
            pytest.skip(error.reason)
    torch.manual_seed(0)
    cell: RecurrentCell = CELLS[name](INPUTS, H, norm=LayerNorm() if norm is None else norm)
    for parameter in cell.parameters():
        nn.init.uniform_(parameter, 0.2, 0.7)
    cell(torch.zeros(N, INPUTS))  # The second call has a plan.
    return cell


@pytest.fixture(params=CELLS)
def cell(request: pytest.FixtureRequest) -> RecurrentCell:
    return made(request.param)


@pytest.fixture
def x(cell: RecurrentCell) -> Tensor:
    return torch.randn(T, N, INPUTS)


def outputs(cell: RecurrentCell, x: Tensor) -> list[Tensor]:
    state, found = None, []
    for row in x:
        state = cell(row, state)
        found.append(state[0] if isinstance(state, tuple) else state)
    return found


def loss_of(found: Sequence[Tensor], first: int = 0) -> Tensor:
    """Loss of the outputs from step ``first`` on."""
    return sum((h * h).sum() * (t + 1) for t, h in enumerate(found) if t >= first)


def gradients(cell: RecurrentCell, x: Tensor, create_graph: bool = False) -> dict[str, Tensor]:
    parameters = dict(cell.named_parameters())
    loss = loss_of(outputs(cell, x))
    found = torch.autograd.grad(loss, [*parameters.values()], create_graph=create_graph)
    return dict(zip(parameters, found, strict=True))


def assert_gradients(cell: RecurrentCell, wanted: dict[str, Tensor]) -> None:
    """Compare the gradients of parameters that require one."""
    for key, parameter in cell.named_parameters():
        assert (parameter.grad is None) == (not parameter.requires_grad)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, wanted[key])


@pytest.mark.parametrize("norm", [LayerNorm(), Identity()], ids=str)
@pytest.mark.parametrize("at_once", [6, 512])
@pytest.mark.parametrize("name", CELLS)
def test_gradients_are_those_of_the_generic_loop(
    name: str, at_once: int, norm: Norm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rows of all steps do not fit into memory for some of them."""
    monkeypatch.setattr(shared_weights, "ROWS_AT_ONCE", at_once)
    cell, x = made(name, norm), torch.randn(T, N, INPUTS)

    def run(module: Any, x: Tensor) -> dict[str, Tensor]:
        with generic_loop():
            return gradients(module, x)

    exact = run(copy.deepcopy(cell).double(), x.double())
    assert_as_accurate(gradients(cell, x), exact, lambda i: run(cell, moved(x, i)))


def test_one_product_for_all_later_steps(
    cell: RecurrentCell, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    real = shared_weights.StepRows._flush

    def counted(self: Any) -> None:
        counts.append(self._rows)
        real(self)

    monkeypatch.setattr(shared_weights.StepRows, "_flush", counted)
    gradients(cell, x)
    assert counts == [(T - 1) * N]


def test_two_losses_of_one_graph(cell: RecurrentCell, x: Tensor) -> None:
    whole = gradients(cell, x)
    found = outputs(cell, x)
    # The second pass begins after the first has ended; both run the first steps.
    loss_of(found[:3]).backward(retain_graph=True)
    loss_of(found, 3).backward()
    assert_gradients(cell, whole)


def test_two_graphs_from_learned_states(cell: RecurrentCell, x: Tensor) -> None:
    """Their states have a history from the first step on, so both graphs share the node."""
    learned = [torch.randn(N, H, requires_grad=True) for _ in cell.cell.states]

    def loss(module: Any, x: Tensor, states: Sequence[Tensor]) -> Tensor:
        begun = [2 * s for s in states]
        state = begun[0] if len(begun) == 1 else tuple(begun)
        for row in x:
            state = module(row, state)
        return sum((s * s).sum() for s in (state if isinstance(state, tuple) else (state,)))

    def run(module: Any, x: Tensor, states: Sequence[Tensor]) -> dict[str, Tensor]:
        module.zero_grad()
        both = loss(module, x, states), loss(module, x.flip(0), states)
        for each in both:
            each.backward()
        return {key: parameter.grad.clone() for key, parameter in module.named_parameters()}

    def generic(module: Any, x: Tensor, states: Sequence[Tensor]) -> dict[str, Tensor]:
        with generic_loop():
            return run(module, x, states)

    wide = [s.detach().double() for s in learned]
    exact = generic(copy.deepcopy(cell).double(), x.double(), wide)
    assert_as_accurate(run(cell, x, learned), exact, lambda i: generic(cell, moved(x, i), learned))


def test_a_pass_within_a_pass(cell: RecurrentCell, x: Tensor) -> None:
    """As reentrant checkpoints have it: the outer one has run some steps of the same node."""
    whole = gradients(cell, x)
    found = outputs(cell, x)

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return h.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                loss_of(found[:3]).backward(retain_graph=True)
            return torch.zeros_like(grad)

    (loss_of(found, 3) + Inner.apply(found[3]).sum()).backward()
    assert_gradients(cell, whole)


def test_gradients_of_inputs_alone_keep_no_rows(cell: RecurrentCell, x: Tensor) -> None:
    x.requires_grad_()
    whole = torch.autograd.grad(loss_of(outputs(cell, x)), [x, *cell.parameters()])
    found = loss_of(outputs(cell, x))
    (alone,) = torch.autograd.grad(found, [x])
    torch.testing.assert_close(alone, whole[0])
    ((_, (plan, _)),) = cell._plans.cache._kept.plans.items()
    of_steps = plan._single if hasattr(plan, "_single") else plan._directions[0]
    shared = of_steps._shared
    assert not shared.sums._passes


def test_some_parameters_are_frozen(cell: RecurrentCell, x: Tensor) -> None:
    whole = gradients(cell, x)
    cell.weight_ih.requires_grad_(False)
    loss_of(outputs(cell, x)).backward()
    assert_gradients(cell, whole)


def test_gradients_of_gradients(cell: RecurrentCell, x: Tensor) -> None:
    x = x[:3, :2]
    cell(x[0])

    def penalty(module: Any, x: Tensor) -> dict[str, Tensor]:
        module.zero_grad()
        first = gradients(module, x, create_graph=True)
        sum((g * g).sum() for g in first.values()).backward()
        second = {f"{key}, again": p.grad.clone() for key, p in module.named_parameters()}
        return {key: g.detach() for key, g in first.items()} | second

    def generic(module: Any, x: Tensor) -> dict[str, Tensor]:
        with generic_loop():
            return penalty(copy.deepcopy(module), x)

    exact = generic(copy.deepcopy(cell).double(), x.double())
    assert_as_accurate(penalty(cell, x), exact, lambda i: generic(cell, moved(x, i)))


def test_changed_weights_are_an_error(cell: RecurrentCell, x: Tensor) -> None:
    loss = loss_of(outputs(cell, x))
    with torch.no_grad():
        cell.weight_hh.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_next_graph_has_a_node_of_its_own(cell: RecurrentCell, x: Tensor) -> None:
    """And reads weights that were changed through `data`."""
    first = gradients(cell, x)
    cell.weight_hh.data.mul_(0.5)
    second = gradients(cell, x)
    torch.testing.assert_close(second, gradients(copy.deepcopy(cell), x))
    assert not torch.allclose(first["weight_hh"], second["weight_hh"])
