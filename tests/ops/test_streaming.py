"""Single steps without gradients: the same numbers as the generic step, whatever ran."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accuracy import assert_as_accurate, moved
from torch import Tensor

from ln_zoo import ops
from ln_zoo.layers import GRUCell, LSTMCell, RNNCell
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.ops.native.runtime import constant, trouble

CELLS = {"LSTM": LSTMCell, "GRU": GRUCell, "RNN": RNNCell}


def randomised(cell: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return cell


def states_of(cell: torch.nn.Module, cases: int) -> tuple[Tensor, ...]:
    count = 2 if isinstance(cell, LSTMCell) else 1
    return tuple(torch.randn(cases, cell.hidden_size) for _ in range(count))


def run(cell: torch.nn.Module, x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    after = cell(x, states if len(states) > 1 else states[0])
    return after if isinstance(after, tuple) else (after,)


def by_name(states: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip("hc", states, strict=False))


def assert_generic_step(cell: torch.nn.Module, x: Tensor, states: tuple[Tensor, ...]) -> None:
    """A step without gradients against the generic step in float64.

    With gradients it is the generic step that runs.
    """

    def generic(dtype: torch.dtype, k: int = 0) -> dict[str, Tensor]:
        twin = copy.deepcopy(cell)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.copy_(moved(parameter, k))
        given = tuple(moved(s, k).to(dtype) for s in states)
        return by_name(run(twin.to(dtype), moved(x, k).to(dtype).requires_grad_(), given))

    with torch.no_grad():
        found = by_name(run(cell, x.clone(), states))
    float32 = torch.float32
    assert_as_accurate(found, generic(torch.float64), lambda k: generic(float32, k))


@pytest.fixture(params=["native", "aten"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native" and trouble() is not None:
        pytest.skip(f"no native kernels: {trouble()}")
    monkeypatch.setenv("LN_ZOO_KERNELS", request.param)
    return request.param


@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm(gain=0.7), Identity(), WeightNorm()])
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize(
    ("hidden", "cases", "bias"),
    [(1, 1, True), (5, 1, False), (100, 3, True), (257, 1, True), (33, 9, False)],
)
def test_steps_are_those_of_the_generic_step_in_float64(
    engine: str, norm: Norm, name: str, hidden: int, cases: int, bias: bool
) -> None:
    cell = randomised(CELLS[name](7, hidden, bias=bias, norm=norm))
    x, states = torch.randn(cases, 7), states_of(cell, cases)
    before = [s.clone() for s in states]
    assert_generic_step(cell, x, states)
    assert all(torch.equal(s, b) for s, b in zip(states, before, strict=True))  # left alone


@pytest.mark.parametrize("normalize", [(), ("input",), ("recurrent",), ("cell",)])
def test_sites_may_be_left_out(engine: str, normalize: tuple[str, ...]) -> None:
    cell = randomised(LSTMCell(7, 20, norm=LayerNorm(), normalize=normalize))
    x, states = torch.randn(2, 7), states_of(cell, 2)
    assert_generic_step(cell, x, states)


def test_parameters_that_change_are_read_anew(engine: str) -> None:
    """In place, by a new tensor, by another precision and back."""
    cell = randomised(LSTMCell(7, 20, norm=LayerNorm()))
    x, states = torch.randn(1, 7), states_of(cell, 1)

    def check() -> None:
        for _ in range(2):
            assert_generic_step(cell, x, states)

    check()
    with torch.no_grad():
        cell.weight_hh.mul_(0.5)
    check()
    cell.sites["cell"].gain = torch.nn.Parameter(torch.full((20,), 2.0))
    check()
    cell.weight_ih.data = torch.randn_like(cell.weight_ih)
    check()
    cell.double().float()
    check()
    cell.load_state_dict(randomised(LSTMCell(7, 20, norm=LayerNorm())).state_dict())
    check()


def test_what_stands_for_absent_gains_outlives_its_cache(engine: str) -> None:
    cell = randomised(LSTMCell(7, 20))
    x, states = torch.randn(1, 7), states_of(cell, 1)
    with torch.no_grad():
        wanted = run(cell, x, states)
        constant.cache_clear()
        others = [torch.full((n,), torch.nan) for n in (20, 80) for _ in range(100)]
        for a, b in zip(run(cell, x, states), wanted, strict=True):
            assert torch.equal(a, b)
    assert len(others) == 200


def test_threads_may_share_a_cell(engine: str) -> None:
    cell = randomised(LSTMCell(7, 50, norm=LayerNorm()))
    problems = [(torch.randn(1 + i % 2, 7), states_of(cell, 1 + i % 2)) for i in range(8)]

    def steps(problem: tuple[Tensor, tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        with torch.no_grad():
            return [run(cell, *problem) for _ in range(200)]

    wanted = [steps(problem)[0] for problem in problems]
    with ThreadPoolExecutor(4) as pool:
        for found, expected in zip(pool.map(steps, problems), wanted, strict=True):
            for states in found:
                assert all(torch.equal(a, b) for a, b in zip(states, expected, strict=True))


def test_a_cell_that_has_run_can_be_copied_and_pickled(engine: str) -> None:
    cell = LSTMCell(7, 20, norm=LayerNorm())
    x, states = torch.randn(1, 7), states_of(cell, 1)
    with torch.no_grad():
        wanted = run(cell, x, states)
        for twin in (copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))):
            for a, b in zip(run(twin, x, states), wanted, strict=True):
                assert torch.equal(a, b)


def test_it_stands_back_where_it_is_not_meant_for(engine: str) -> None:
    def streams(cell: torch.nn.Module, x: Tensor, states: tuple[Tensor, ...]) -> bool:
        sites = cell.sites
        records = {role: site.describe() for role, site in sites.items()}
        weights = ops.Weights(cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
        return cell._stream(records, x, states, weights) is not None

    cell = GRUCell(7, 20, norm=LayerNorm())
    x, states = torch.randn(1, 7), states_of(cell, 1)
    assert not streams(cell, x, states)  # gradients are wanted
    with torch.no_grad():
        assert streams(cell, x, states)
        assert not streams(GRUCell(7, 20, norm=BatchNorm()), x, states)
        half = tuple(s.bfloat16() for s in states)
        assert not streams(copy.deepcopy(cell).bfloat16(), x.bfloat16(), half)
        with torch.autocast("cpu", torch.bfloat16):
            assert not streams(cell, x, states)
    assert not streams(cell.requires_grad_(False), x.requires_grad_(), states)


def test_views_with_strides_are_taken_as_they_are(engine: str) -> None:
    cell = randomised(GRUCell(7, 20, norm=LayerNorm()))
    x, h = torch.randn(7, 2).t(), torch.randn(20, 2).t()
    with torch.no_grad():
        found = cell(x, h)
        wanted = cell(x.contiguous(), h.contiguous())
    torch.testing.assert_close(found, wanted)


def test_nan_and_infinity_pass(engine: str) -> None:
    cell = LSTMCell(7, 20, norm=LayerNorm())
    with torch.no_grad():
        h, c = cell(torch.full((1, 7), float("nan")))
        assert h.isnan().all()
        assert c.isnan().all()
        plain = LSTMCell(7, 20)
        h, c = plain(torch.full((1, 7), float("inf")).abs())
        reference = torch.nn.LSTMCell(7, 20)
        reference.load_state_dict(plain.state_dict())
        wanted = reference(torch.full((1, 7), float("inf")))
    torch.testing.assert_close(h, wanted[0], equal_nan=True)
    torch.testing.assert_close(c, wanted[1], equal_nan=True)


def test_it_is_off_where_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LN_ZOO_KERNELS", "0")
    cell = GRUCell(7, 20, norm=LayerNorm())
    records = {role: site.describe() for role, site in cell.sites.items()}
    weights = ops.Weights(cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
    with torch.no_grad():
        assert cell._stream(records, torch.randn(1, 7), states_of(cell, 1), weights) is None
