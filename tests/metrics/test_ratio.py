"""A sum over a sum, across batches, precisions, processes and copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from ln_zoo.metrics import Ratio


def batches() -> list[tuple[Tensor, Tensor]]:
    """Of different sizes: the mean of the batches' ratios is another number."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, generator=generator) * 100, torch.randint(1, 50, (n,), generator=generator))
        for n in (1, 7, 30)
    ]


def expected() -> float:
    above = sum(a.double().sum().item() for a, _ in batches())
    return above / sum(b.double().sum().item() for _, b in batches())


def filled() -> Ratio:
    ratio = Ratio()
    for above, below in batches():
        ratio.update(above, below)
    return ratio


def test_sums_over_sums_of_batches_and_copies() -> None:
    found = filled().compute()
    assert (found.dtype, found.shape) == (torch.float64, ())
    assert found.item() == pytest.approx(expected(), rel=1e-12)
    # Calls give a batch's own ratio, of which the mean is another number.
    ratio = Ratio()
    per_batch = [above.double().sum() / below.sum() for above, below in batches()]
    own = [ratio(above, below).item() for above, below in batches()]
    assert own == pytest.approx(torch.stack(per_batch).tolist(), rel=1e-12)
    assert found.item() != pytest.approx(torch.stack(per_batch).mean().item(), rel=1e-3)
    for twin in (copy.deepcopy(ratio), pickle.loads(pickle.dumps(ratio)), ratio.clone()):
        assert twin.compute() == ratio.compute()
        twin.update(torch.tensor(1e6), torch.tensor(1))
        assert twin.compute() > ratio.compute()
    assert ratio.compute() == found


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
def test_any_shape_and_precision(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ratio = Ratio()
    ratio.update(torch.full(shape, 6, dtype=dtype), torch.full(shape, 4))
    ratio.update(torch.zeros(0), torch.zeros(0))
    assert ratio.compute().item() == 1.5


def test_many_small_numbers_are_not_lost() -> None:
    """In float32, 2^24 + 1 is 2^24."""
    ratio = Ratio()
    ratio.update(torch.tensor(2.0**24), torch.tensor(1))
    for _ in range(8):
        ratio.update(torch.tensor(1.0), torch.tensor(0))
    assert ratio.compute().item() == 2**24 + 8
    rows = torch.cat([torch.tensor([2.0**24]), torch.ones(8)])
    ratio.reset()
    ratio.update(rows, torch.tensor(1))
    assert ratio.compute().item() == 2**24 + 8


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float", "to"])
def test_a_module_in_less_precision_leaves_it_as_it_is(cast: str) -> None:
    module = nn.Module()
    module.ratio, module.linear = Ratio(), nn.Linear(2, 2)
    _ = module.to(torch.bfloat16) if cast == "to" else getattr(module, cast)()
    for above, below in batches():
        module.ratio.update(above, below)
    assert module.ratio.numerator.dtype == torch.float64
    assert module.ratio.compute().item() == pytest.approx(expected(), rel=1e-12)
    again = module.ratio.numerator.clone()
    module.to(torch.float16)
    assert torch.equal(module.ratio.numerator, again)
    module.ratio.reset()
    assert module.ratio.denominator.dtype == torch.float64
    assert module.to("meta").ratio.numerator.is_meta
    assert module.to(torch.float16).ratio.numerator.dtype == torch.float64


def test_reset_nothing_yet_gradients_and_nan() -> None:
    ratio = filled()
    ratio.reset()
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert ratio.compute().isnan()
    ratio.update(torch.tensor(3.0, requires_grad=True) * 1, torch.tensor(2))
    assert ratio.compute().item() == 1.5
    assert not ratio.numerator.requires_grad
    ratio.update(torch.tensor([1.0, float("nan")]), torch.tensor([1, 1]))
    assert ratio.compute().isnan()


def test_processes_add_up() -> None:
    """Two processes, the other one with three times the numbers of this one."""
    ratio = Ratio()
    ratio.update(torch.tensor([8.0]), torch.tensor([2]))
    others = [torch.tensor(30.0).double(), torch.tensor(6.0).double()]
    ratio.dist_sync_fn = lambda a, group: [a, others.pop(0)]
    ratio.distributed_available_fn = lambda: True
    assert ratio.compute().item() == (8 + 30) / (2 + 6)
    assert not others
    assert ratio.numerator.item() == 8  # this process counts on by itself
