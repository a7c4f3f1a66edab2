"""Steps with statistics over examples, by an engine, against the equations in float64."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from accuracy import assert_as_accurate
from equations import FixedStatistics, direction, equations
from ops.engine_case import F32, F64, as_float32, between_nans, operands, shifted, with_gradients
from torch import Tensor

from ln_zoo.ops import operator
from ln_zoo.ops.engines.base import NO_MASKS
from ln_zoo.ops.spec import Examples, Operands, Rows, Spec

NONE, BATCH, GIVEN = Rows(), Examples(True, 1e-3), Examples(False, 1e-3)
UNBIASED = replace(BATCH, correction=1)
LSTM, GRU = Spec("LSTM", BATCH, BATCH, BATCH), Spec("GRU", BATCH, BATCH, NONE)
RNN = Spec("RNN_TANH", NONE, NONE, BATCH)


def with_given(spec: Spec) -> Spec:
    return Spec(spec.cell, *(GIVEN if place.scale else NONE for place in spec.places))


def given_for(spec: Spec, hidden: int, rows: int = 2) -> FixedStatistics:
    """Given means and variances, (2, rows, F) by place; later steps use the last row."""
    generator = torch.Generator().manual_seed(7)

    def statistics(width: int) -> Tensor:
        mean, var = torch.randn(2, rows, width, dtype=F64, generator=generator)
        return torch.stack([0.3 * mean, var.abs() + 0.2]).float().double()

    widths = zip(spec.places, spec.widths(hidden), strict=True)
    return [statistics(width) if place.scale > place.batch else None for place, width in widths]


def by_equations(
    spec: Spec, o: Operands, sizes: Sequence[int], given: FixedStatistics = (None,) * 3
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Output and final states, and the statistics of the batch."""
    d, found = direction(spec, o, len(sizes), given), {}
    results = equations(spec, o, sizes=sizes, d=d)
    # Running averages of one batch are its own, and unbiased.
    shares = torch.tensor([1 - 1 / n for n in sizes], dtype=o.x.dtype).unsqueeze(1)
    for name, site in d.sites.items():
        own = site.statistics
        if own is not None and own.training:
            found |= {f"mean {name}": own.mean, f"var {name}": own.var * shares}
    return results, found


def by_loop(
    spec: Spec, o: Operands, sizes: Sequence[int], given: FixedStatistics = (None,) * 3
) -> tuple[Tensor, ...]:
    rows = operator.FixedStatistics(*(None if a is None else a.to(o.h0.dtype) for a in given))
    return operator.replay(spec, o, torch.tensor(sizes), rows)


def by_engine(
    spec: Spec,
    o: Operands,
    sizes: Sequence[int],
    given: FixedStatistics = (None,) * 3,
    save: bool = True,
    found: dict[str, Tensor] | None = None,
    engine: str = "triton",
) -> tuple[Tensor, ...]:
    """The same by the engine; the statistics of the batch go to ``found``."""
    rows = [None if a is None else between_nans(a.float()) for a in given]
    results = torch.ops.ln_zoo.recurrence(
        *o, *rows, *NO_MASKS, torch.tensor(sizes), spec.encode(), engine, save
    )
    names = ("input", "recurrent", "cell" if spec.cell == "LSTM" else "sum")
    split = operator.split_statistics(results[-1], spec, len(sizes), o.w_hh.shape[1])
    for name, own in zip(names, split, strict=True):
        if found is not None and own is not None:
            assert own.mean is not None
            found |= {f"mean {name}": own.mean, f"var {name}": own.var}
    return results[:3] if spec.cell == "LSTM" else results[:2]


def check(
    spec: Spec,
    hidden: int,
    sizes: Sequence[int],
    *,
    bias: bool = True,
    products: torch.dtype = F32,
    engine: str = "triton",
) -> None:
    """Everything against the equations in float64."""
    given = given_for(spec, hidden)
    exact = operands(spec, hidden, sizes)
    if not bias:
        exact = exact._replace(bias=None, bias_hn=None)
    narrow = as_float32(exact, products)
    if products != F32:
        exact = Operands(*(None if a is None else a.detach().double() for a in narrow))
    wide = Operands(*(None if a is None else a.clone().requires_grad_() for a in exact))

    def by_definition(o: Operands) -> dict[str, Tensor]:
        statistics: dict[str, Tensor] = {}

        def run(*arguments: Any) -> tuple[Tensor, ...]:
            results, found = by_equations(*arguments, given)
            statistics.update(found)
            return results

        found = with_gradients(run, spec, o, sizes, seed=1)
        # The generic loop does not tell the statistics.
        return found | (statistics if products == F32 else {})

    def loop(k: int) -> dict[str, Tensor]:
        o = as_float32(shifted(exact, k))
        if products == F32:
            return by_definition(o)
        with torch.autocast("cpu", products):
            return with_gradients(functools.partial(by_loop, given=given), spec, o, sizes, seed=1)

    found: dict[str, Tensor] = {}
    run = functools.partial(by_engine, given=given, found=found, engine=engine)
    results = with_gradients(run, spec, narrow, sizes, seed=1)
    wanted = by_definition(wide)
    results |= {name: a for name, a in found.items() if name in wanted}
    assert_as_accurate(results, wanted, loop)
