"""The penalty of all pairs against all differences at once, its gradients, its memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ln_zoo.models import order_penalty
from ln_zoo.models.order_penalty import order_violation

F64 = torch.float64


def points(m: int, n: int, d: int, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + n)
    above, below = (torch.randn(k, d, generator=generator, dtype=F64).to(dtype) for k in (m, n))
    return above.requires_grad_(), below.requires_grad_()


def all_at_once(above: Tensor, below: Tensor) -> Tensor:
    return (above[:, None] - below).clamp(min=0).square().sum(-1)


@pytest.fixture(params=[1, 60, 2**18])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Differences held at a time: less than a row, some rows, all."""
    monkeypatch.setitem(order_penalty._DIFFERENCES, "cpu", request.param)
    return int(request.param)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 5, 3), (4, 9, 6), (3, 0, 4), (0, 3, 4)], ids=str)
def test_value_and_gradients(sizes: tuple[int, int, int], held: int) -> None:
    above, below = points(*sizes)
    found, expected = order_violation(above, below), all_at_once(above, below)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    weights = torch.randn(expected.shape, dtype=F64, generator=torch.Generator().manual_seed(3))
    ours = torch.autograd.grad(found, (above, below), weights)
    theirs = torch.autograd.grad(expected, (above, below), weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_gradients_by_differences(held: int) -> None:
    assert torch.autograd.gradcheck(order_violation, points(6, 4, 5))


def test_gradients_of_one_side_alone() -> None:
    above, below = points(4, 3, 5)
    order_violation(above, below.detach()).sum().backward()
    expected = torch.autograd.grad(all_at_once(above, below.detach()).sum(), above)
    torch.testing.assert_close(above.grad, expected[0], rtol=1e-12, atol=0)


def test_of_a_point_with_itself_nothing_is_violated() -> None:
    same = torch.rand(3, 4, requires_grad=True)
    violation = order_violation(same, same)
    assert torch.equal(violation.diagonal(), torch.zeros(3))
    (gradient,) = torch.autograd.grad(violation.diagonal().sum(), same)
    assert torch.equal(gradient, torch.zeros(3, 4))


def test_single_precision_is_as_exact_as_all_at_once() -> None:
    above, below = points(50, 40, 300)
    exact = all_at_once(above, below)
    few = [a.detach().float() for a in (above, below)]
    plain = (all_at_once(*few) - exact).abs().max()
    assert (order_violation(*few) - exact).abs().max() <= 2 * plain


def test_all_differences_are_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    monkeypatch.setitem(order_penalty._DIFFERENCES, "cpu", 1000)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    above, below = points(30, 20, 25, torch.float32)
    with Watch():
        order_violation(above, below).sum().backward()
    assert 600 <= largest <= 1000 < 30 * 20 * 25


def test_wrong_sizes_are_told() -> None:
    with pytest.raises(ValueError, match=r"\(M, D\) and \(N, D\), got \(2, 3\) and \(2, 4\)"):
        order_violation(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"got \(3,\) and \(2, 3\)"):
        order_violation(torch.zeros(3), torch.zeros(2, 3))
