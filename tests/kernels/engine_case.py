"""One engine's operator against the equations in float64, in memory between NaN."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from accuracy import assert_as_accurate, moved
from equations import (
    FixedStatistics,
    direction,
    equations,
    masks_for,
    random_operands,
    without_input_bias,
)
from torch import Tensor

from ln_zoo.ops.chunks import split_statistics
from ln_zoo.ops.engines import base
from ln_zoo.ops.engines.base import NO_MASKS, Masks
from ln_zoo.ops.replay import replay
from ln_zoo.ops.spec import Examples, Operands, Rows, Spec

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
#: Elements on each side, and what is there.
GUARD, MARK = 8, 12345.0


def rows(*groups: int, center: bool = True) -> Rows:
    return Rows(True, center, 1e-3, groups)


NONE, EACH_GATE = Rows(), rows(1, 1, 1, 1)
LSTM = Spec("LSTM", rows(4), rows(4), rows(1))
GRU = Spec("GRU", rows(2, 1), rows(2, 1), NONE)
RNN = Spec("RNN_TANH", NONE, NONE, rows(1))
JOINT = Spec("LSTM", NONE, rows(4), rows(1), joint=True)
CARRIED = replace(LSTM, carried=True)
BOTH = replace(JOINT, carried=True)
JOINT_GRU = Spec("GRU", NONE, rows(3), NONE, joint=True)

BATCH, GIVEN = Examples(True, 1e-3), Examples(False, 1e-3)
UNBIASED = replace(BATCH, correction=1)
BATCH_LSTM, BATCH_GRU = Spec("LSTM", BATCH, BATCH, BATCH), Spec("GRU", BATCH, BATCH, NONE)
BATCH_RNN = Spec("RNN_TANH", NONE, NONE, BATCH)
OVER_BATCH = {"LSTM": BATCH_LSTM, "GRU": BATCH_GRU, "RNN": BATCH_RNN}

NO_STATISTICS: FixedStatistics = (None, None, None)


def with_given(spec: Spec) -> Spec:
    return Spec(spec.cell, *(GIVEN if place.scale else NONE for place in spec.places))


def given_for(spec: Spec, hidden: int, rows: int = 2) -> FixedStatistics:
    """Given means and variances, (2, rows, F) by place; later steps use the last row."""
    generator = torch.Generator().manual_seed(7)

    def statistics(width: int) -> Tensor:
        mean, var = torch.randn(2, rows, width, dtype=F64, generator=generator)
        return torch.stack([0.3 * mean, var.abs() + 0.2]).float().double()

    return [
        statistics(width) if isinstance(place, Examples) and not place.batch else None
        for place, width in zip(spec.places, spec.widths(hidden), strict=True)
    ]


def noisy(
    spec: Spec, noise: str, hidden: int, sizes: Sequence[int], reset: bool
) -> tuple[Spec, Masks]:
    """Masks of packed rows; of 3 rows 1 is reset, among them 2 in turn."""
    masks = NO_MASKS
    if noise:
        spec, masks = masks_for(spec, noise, (sum(sizes),), sizes[0], hidden)
    if reset:
        flags = torch.arange(sum(sizes)) % 3 == 1
        flags[sizes[0] + 1] = flags[2 * sizes[0]] = True
        masks = masks._replace(reset=flags)
    return spec, masks


def between_nans(a: Tensor, shift: int = 0) -> Tensor:
    """A copy at an offset of ``shift`` elements, with NaN on both sides."""
    around = float("nan") if a.is_floating_point() else True
    memory = torch.full((a.numel() + 2 * GUARD + shift,), around, dtype=a.dtype)
    return memory[GUARD + shift :][: a.numel()].view(a.shape).copy_(a)


class Marked:
    """Memory that is NaN until it is written to, between marks which kernels must leave alone."""

    def __init__(self) -> None:
        self.made: list[tuple[Tensor, Tensor, Tensor]] = []

    def empty(
        self, size: Sequence[int], like: Tensor, dtype: torch.dtype | None = None, shift: int = 0
    ) -> Tensor:
        dtype, count = dtype or like.dtype, torch.Size(size).numel()
        memory = torch.full((count + 2 * GUARD + shift,), MARK).to(dtype)
        before, inner, after = memory.split([GUARD + shift, count, GUARD])
        inner.fill_(-1 if dtype == torch.int64 else float("nan"))
        self.made.append((before, inner, after))
        return inner.view(tuple(size))

    def check(self) -> None:
        for before, inner, after in self.made:
            for a in (before, after):
                assert (a == torch.tensor(MARK).to(a.dtype)).all(), f"beyond {tuple(inner.shape)}"


def operands(spec: Spec, hidden: int, sizes: Sequence[int], *, seed: int = 0) -> Operands:
    """Without the bias that a joint GRU's candidate does not have."""
    offset = 0.3 * hidden**-0.5
    o = random_operands(spec, (sum(sizes),), sizes[0], 3, hidden, offset=offset, seed=seed)
    return without_input_bias(spec, o)


def as_float32(o: Operands, products: torch.dtype = F32) -> Operands:
    kinds = (products,) * 3 + (F32,) * (len(o) - 3)
    converted = [
        None if a is None else between_nans(a.to(kind)).requires_grad_()
        for a, kind in zip(o, kinds, strict=True)
    ]
    return Operands(*converted)


def cotangents_of(results: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(r.shape, dtype=F64, generator=generator).to(r.dtype) for r in results]


def with_gradients(
    run: Callable[..., tuple[Tensor, ...]], spec: Spec, o: Operands, sizes: Sequence[int]
) -> dict[str, Tensor]:
    """Outputs, final states and the gradients of all operands for random gradients of those."""
    results = run(spec, o, sizes)
    there = {name: a for name, a in o._asdict().items() if a is not None}
    found = torch.autograd.grad(results, list(there.values()), cotangents_of(results))
    named = dict(zip(("out", "h", "c"), results, strict=False))
    named |= dict(zip((f"d {name}" for name in there), found, strict=True))
    if spec.joint and spec.cell == "GRU" and o.bias is not None:
        named["d bias"] = named["d bias"][: 2 * len(o.w_hh) // 3]
    return named


def by_equations(
    spec: Spec,
    o: Operands,
    sizes: Sequence[int],
    masks: Masks = NO_MASKS,
    given: FixedStatistics = NO_STATISTICS,
    found: dict[str, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Output and final states; the statistics of the batch go to ``found``."""
    d = direction(spec, o, len(sizes), given)
    results = equations(spec, o, masks, sizes, d)
    # Running averages of one batch are its own, and unbiased.
    shares = torch.tensor([1 - 1 / n for n in sizes], dtype=o.h0.dtype).unsqueeze(1)
    for name, site in d.sites.items():
        own = site.statistics
        if found is not None and own is not None and own.training:
            found |= {f"mean {name}": own.mean, f"var {name}": own.var * shares}
    return results


def by_loop(
    spec: Spec,
    o: Operands,
    sizes: Sequence[int],
    masks: Masks = NO_MASKS,
    given: FixedStatistics = NO_STATISTICS,
) -> tuple[Tensor, ...]:
    rows = base.FixedStatistics(*(None if a is None else a.to(o.h0.dtype) for a in given))
    return replay(spec, o, torch.tensor(sizes), rows, masks)


def by_engine(
    spec: Spec,
    o: Operands,
    sizes: Sequence[int],
    masks: Masks = NO_MASKS,
    given: FixedStatistics = NO_STATISTICS,
    found: dict[str, Tensor] | None = None,
    save: bool = True,
    engine: str = "triton",
) -> tuple[Tensor, ...]:
    """The same by the engine: a padded call where all steps have as many examples."""
    packed = len(set(sizes)) > 1
    if not packed:
        lead = len(sizes), sizes[0]
        o = o._replace(x=o.x.view(*lead, -1))
        held = (None if a is None else a.view(*lead, -1) for a in masks[1:3])
        masks = Masks(masks.dropout, *held, masks.reset)
    fixed = (None if a is None else between_nans(a.float()) for a in given)
    drawn = (None if a is None else between_nans(a) for a in masks)
    out, h, c, *_, own = torch.ops.ln_zoo.recurrence(
        *o, *fixed, *drawn, torch.tensor(sizes) if packed else None, *spec.numbers(), engine, save
    )
    names = ("input", "recurrent", "cell" if spec.cell == "LSTM" else "sum")
    split = split_statistics(own, spec, len(sizes), o.w_hh.shape[1])
    for name, statistics in zip(names, split, strict=True):
        if found is not None and statistics is not None:
            found |= {f"mean {name}": statistics.mean, f"var {name}": statistics.var}
    results = out if packed else out.flatten(0, 1), h, c
    return results[: 3 if spec.cell == "LSTM" else 2]


def check(
    spec: Spec,
    hidden: int,
    sizes: Sequence[int],
    *,
    products: torch.dtype = F32,
    without: Sequence[str] = (),
    masks: Masks = NO_MASKS,
    engine: str = "triton",
) -> None:
    """Everything against the equations in float64.

    ``sizes``: examples of each step; ``products``: the precision of products; ``without``: operands
    that are not there; ``masks``: of packed rows.
    """
    exact = operands(spec, hidden, sizes)._replace(**dict.fromkeys(without))
    narrow = as_float32(exact, products)
    if products != F32:  # what is compared is the engine, not the rounding of what it is given
        exact = Operands(*(None if a is None else a.detach().double() for a in narrow))
    wide = Operands(*(None if a is None else a.clone().requires_grad_() for a in exact))
    given = given_for(spec, hidden)

    def everything(run: Callable[..., tuple[Tensor, ...]], o: Operands) -> dict[str, Tensor]:
        statistics: dict[str, Tensor] = {}
        run = functools.partial(run, masks=masks, given=given, found=statistics)
        found = with_gradients(run, spec, o, sizes)
        # In half precision the loop is the generic one, which does not tell them.
        return found | (statistics if products == F32 else {})

    def loop(k: int) -> dict[str, Tensor]:
        o = as_float32(Operands(*(moved(a, k) for a in exact)))
        if spec.examples and products == F32:
            return everything(by_equations, o)
        run = functools.partial(by_loop, masks=masks, given=given)
        with torch.autocast("cpu", products, enabled=products != F32):
            return with_gradients(run, spec, o, sizes)

    found = everything(functools.partial(by_engine, engine=engine), narrow)
    assert_as_accurate(found, everything(by_equations, wide), loop)
