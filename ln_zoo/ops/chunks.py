"""Run the steps of an engine chunk by chunk, forward and backward.

Input products and, in the backward pass, gradients of weights and inputs run once per chunk of
steps. `Saved` tensors exist for all steps, other buffers for one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ln_zoo.ops import memory
from ln_zoo.ops.engines.base import (
    NO_MASKS,
    NO_STATISTICS,
    Chunk,
    ChunkGrads,
    Engine,
    FixedStatistics,
    Masks,
    Places,
    Saved,
    Statistics,
    Steps,
    Sums,
    centred,
)
from ln_zoo.ops.precision import no_autocast
from ln_zoo.ops.spec import Examples, Operands, Rows, Spec
from ln_zoo.ops.time_chunks import (
    TimeChunk,
    dropped_rows,
    previous_rows,
    rows_of,
    step_sizes,
    time_chunks,
)


class Results(NamedTuple):
    """Results of the operator; ``v`` to ``stats`` (see `Saved`) are empty unless ``save``."""

    out: Tensor  # states after each step, padded (T, N, H) or packed (total, H)
    h: Tensor  # (N, H)
    c: Tensor
    v: Tensor
    u: Tensor
    cells: Tensor
    stats: Tensor
    statistics: Tensor  # concatenated, see `split_statistics`


class SavedTensors(NamedTuple):
    """The part of `Results` that the backward pass reads."""

    out: Tensor
    v: Tensor
    u: Tensor
    cells: Tensor
    stats: Tensor
    statistics: Tensor


class Grads(NamedTuple):
    """Gradients of output and last states."""

    d_out: Tensor | None
    d_h: Tensor | None
    d_c: Tensor | None


def split_statistics(
    statistics: Tensor, spec: Spec, steps: int, hidden: int
) -> list[Statistics | None]:
    """Views of the mean and variance, (T, F) each, of every place with batch statistics."""
    found: list[Statistics | None] = []
    start = 0
    for place, width in zip(spec.places, spec.widths(hidden), strict=True):
        if not place.batch:
            found.append(None)
            continue
        end = start + 2 * steps * width
        found.append(Statistics(*statistics[start:end].view(2, steps, width).unbind(0)))
        start = end
    return found


def statistics_size(spec: Spec, steps: int, hidden: int) -> int:
    """Number of elements that `split_statistics` expects."""
    widths = zip(spec.places, spec.widths(hidden), strict=True)
    return sum(2 * steps * width for place, width in widths if place.batch)


def count_steps(x: Tensor, batch_sizes: Tensor | None) -> int:
    """Time steps T of padded or packed inputs."""
    return x.shape[0] if batch_sizes is None else batch_sizes.shape[0]


def _places(found: Sequence[Statistics | None], given: FixedStatistics, steps: slice) -> Places:
    parts: list[Statistics | None] = []
    for own, rows in zip(found, given, strict=True):
        if own is not None:
            parts.append(own.part(steps))
        elif rows is None:
            parts.append(None)
        else:
            each = torch.arange(steps.start, steps.stop, device=rows.device)
            taken = rows.index_select(1, each.clamp_(max=rows.shape[1] - 1))
            parts.append(Statistics(*taken.unbind(0)))
    return Places(*parts)


def _by_rows(masks: Masks, hidden: int) -> Masks:
    dropout, of_h, of_c, reset = (None if a is None else a.contiguous() for a in masks)
    of_h, of_c = (None if a is None else a.view(-1, hidden) for a in (of_h, of_c))
    return Masks(dropout, of_h, of_c, reset)


# The forward


def allocate(
    operands: Operands,
    spec: Spec,
    engine: Engine,
    steps: int,
    save: bool,
    empty: Callable[..., Tensor],
    unseen: Callable[..., Tensor],
) -> Results:
    """Allocate results; `unseen` allocates the tensors that are never returned to users."""
    x, h0 = operands.x, operands.h0
    wide, narrow, lead = h0.dtype, x.dtype, x.shape[:-1]
    rows = lead.numel() if save else 0
    width, hidden = operands.w_hh.shape
    cell_rows = rows if spec.arithmetic.cell_state else 0
    return Results(
        out=empty(*lead, hidden, like=x, dtype=narrow),
        h=empty(*h0.shape, like=x, dtype=wide),
        c=empty(h0.shape[0] if spec.arithmetic.cell_state else 0, hidden, like=x, dtype=wide),
        v=unseen(0 if spec.merged else rows, width, like=x, dtype=narrow),
        u=unseen(rows, width, like=x, dtype=narrow),
        cells=unseen(cell_rows, hidden, like=x, dtype=wide),
        stats=empty(rows, engine.stats(spec), like=x, dtype=wide),
        statistics=empty(statistics_size(spec, steps, hidden), like=x, dtype=wide),
    )


def unfilled(*size: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate outputs of a fake kernel."""
    return like.new_empty(size, dtype=dtype)


def forward_chunks(
    spec: Spec,
    engine: Engine,
    operands: Operands,
    batch_sizes: Tensor | None,
    save: bool,
    given: FixedStatistics = NO_STATISTICS,
    masks: Masks = NO_MASKS,
    steps_of_call: Steps | None = None,
) -> Results:
    """Run all time steps, chunk by chunk; arguments as in the schema.

    ``steps_of_call`` replaces the engine's `prepare`.
    """
    x, hidden, has_c = operands.x, operands.w_hh.shape[1], spec.arithmetic.cell_state
    packed, steps = batch_sizes is not None, count_steps(x, batch_sizes)
    results = allocate(operands, spec, engine, steps, save, engine.empty, memory.pooled_empty)
    out, h, c, v, u, cells, stats, statistics = results
    h.copy_(operands.h0)
    if operands.c0 is not None:
        c.copy_(operands.c0)
    # Engines may leave some elements unset; results must be deterministic.
    stats.zero_()
    # Engines accumulate into means.
    statistics.zero_()
    found = split_statistics(statistics, spec, steps, hidden)
    flat, masks = out.view(-1, hidden), _by_rows(masks, hidden)
    first, _ = spec.products
    inner = operands.bias_inner
    if inner is not None:  # in the dtype of products
        inner = centred(inner.unsqueeze(1), first).squeeze(1).to(x.dtype)
    with no_autocast(x):
        p = steps_of_call or engine.prepare(spec, operands, backward=False)
        pieces = time_chunks(step_sizes(x, batch_sizes), p.rows_of_chunk(save), p.least_steps)
        if not save:
            longest = max(piece.count for piece in pieces)
            scratch = engine.empty(longest, u.shape[1], like=x, dtype=x.dtype, scratch="terms")
        for piece in pieces:
            rows = piece.rows
            terms, saved = None, None
            if save:
                terms = (u if spec.merged else v)[rows]
                after = cells[rows] if has_c else None
                saved = Saved(terms, u[rows], after, stats[rows])
            else:
                terms = scratch[: piece.count]
            inputs = rows_of(x, packed, piece)
            if first.batch:
                inputs, means = p.without_means(inputs, piece.sizes, h.dtype)
                own = found[spec.product_places[0]]
                assert own is not None
                assert own.mean is not None
                torch.mm(means, operands.w_ih.t().to(h.dtype), out=own.mean[piece.steps])
            p.terms(inputs, terms)
            if inner is not None:
                terms.add_(inner)
            places = _places(found, given, piece.steps) if spec.examples else Places()
            state = c if has_c else None
            now = masks.part(rows)
            p.forward(Chunk(piece.sizes, terms, h, state, flat[rows], saved, places, now))
    return results


# The backward


def allocate_gradients(
    operands: Operands, needs: Sequence[bool], empty: Callable[..., Tensor]
) -> tuple[Tensor, ...]:
    """Allocate gradients of the operands; empty if absent or not needed."""
    x = operands.x
    return tuple(
        empty(
            *((0,) if a is None or not wanted else a.shape),
            like=x,
            dtype=(x if a is None else a).dtype,
        )
        for a, wanted in zip(operands, needs, strict=True)
    )


class _Products:
    """Gradients through the products of inputs and states, from those of each chunk's terms."""

    def __init__(
        self,
        p: Steps,
        spec: Spec,
        operands: Operands,
        packed: bool,
        gradients: Operands,
        needed: Operands,
        empty: Callable[..., Tensor],
    ) -> None:
        self._p, self._x, self._packed = p, operands.x, packed
        self._gradients, self._empty, self._wide = gradients, empty, operands.h0.dtype
        self._first, self._second = spec.products
        self._dw_ih = self._total(gradients.w_ih, self._first)
        self._dw_hh = self._total(gradients.w_hh, self._second)
        self._dx = gradients.x.view(-1, operands.x.shape[-1]) if needed.x else None
        self._d_inner = _wanted("bias_inner", operands, gradients, needed)

    def _total(self, of: Tensor, place: Rows | Examples) -> Tensor | None:
        if not of.numel():
            return None
        if of.dtype == self._wide and not (place.center and self._p.leaves_constants):
            return of
        return torch.empty_like(of, dtype=self._wide)

    def add(self, chunk: ChunkGrads, piece: TimeChunk, first: bool) -> None:
        """Add the part of a chunk, or write it if it is the ``first``."""
        p, x, wide = self._p, self._x, self._wide
        sizes, h_prev, dropout = chunk.sizes, chunk.h_prev, chunk.masks.dropout
        if self._dw_hh is not None:
            if dropout is not None:
                room = self._empty(*h_prev.shape, like=x, dtype=x.dtype, scratch="dropped")
                h_prev = dropped_rows(h_prev, dropout, sizes, room)
            if self._second.batch:
                h_prev, _ = p.without_means(h_prev, sizes, wide)
            p.add_weight_gradient(chunk.du, h_prev, self._dw_hh, first)
        if self._dw_ih is not None:
            inputs = p.inputs(rows_of(x, self._packed, piece), piece)
            if self._first.batch:
                inputs, _ = p.without_means(inputs, sizes, wide)
            p.add_weight_gradient(chunk.dv, inputs, self._dw_ih, first)
        if self._d_inner is not None:
            self._d_inner.add_(chunk.dv.sum(0, dtype=wide))
        if self._dx is not None:
            dx = self._dx[piece.rows]
            p.input_gradient(chunk.dv, dx)
            if self._first.batch:
                p.without_means(dx, sizes, wide, out=dx)

    def finish(self) -> None:
        """Write the totals to the gradients."""
        for target, total, place in (
            (self._gradients.w_ih, self._dw_ih, self._first),
            (self._gradients.w_hh, self._dw_hh, self._second),
        ):
            if total is not None and total is not target:
                if self._p.leaves_constants:
                    centred(total, place, target)
                else:
                    target.copy_(total)
        if self._d_inner is not None and self._p.leaves_constants:
            self._d_inner.copy_(centred(self._d_inner.unsqueeze(1), self._first).squeeze(1))


def _wanted(name: str, operands: Operands, gradients: Operands, needed: Operands) -> Tensor | None:
    """The gradient of a vector, set to zero; None if it is not needed."""
    there = getattr(operands, name) is not None and getattr(needed, name)
    return getattr(gradients, name).zero_() if there else None


def _of_state(d: Tensor | None, start: Tensor, target: Tensor) -> Tensor:
    """Gradient of a last state, in the memory of that of the initial one if there is any."""
    found = target if target.numel() else start.new_empty(start.shape)
    return found.zero_() if d is None else found.copy_(d)


def backward_chunks(
    spec: Spec,
    engine: Engine,
    operands: Operands,
    batch_sizes: Tensor | None,
    kept: SavedTensors,
    grads: Grads,
    needs: Sequence[bool],
    given: FixedStatistics = NO_STATISTICS,
    masks: Masks = NO_MASKS,
    steps_of_call: Steps | None = None,
) -> tuple[Tensor, ...]:
    """Backpropagate through all time steps, last chunk first; see `forward_chunks`.

    Returns gradients of the operands; empty tensors if not needed.
    """
    x, h0, c0, hidden = operands.x, operands.h0, operands.c0, operands.w_hh.shape[1]
    packed, steps = batch_sizes is not None, count_steps(x, batch_sizes)
    needed: Any = Operands(*needs)  # type: ignore[arg-type]
    made = allocate_gradients(operands, needs, engine.empty)
    gradients: Any = Operands(*made)
    sums = Sums(*(_wanted(name, operands, gradients, needed) for name in Sums._fields))
    dh = _of_state(grads.d_h, h0, gradients.h0)
    dc = None if c0 is None else _of_state(grads.d_c, c0, gradients.c0)
    out, v, u, cells, stats, statistics = kept
    flat, width, masks = out.view(-1, hidden), u.shape[1], _by_rows(masks, hidden)
    saved = Saved(None if spec.merged else v, u, None if c0 is None else cells, stats)
    found = split_statistics(statistics, spec, steps, hidden)
    for k, own in enumerate(found):
        # Products are saved centred.
        if own is not None and k in spec.product_places:
            found[k] = own._replace(mean=None)
    with no_autocast(x):
        p = steps_of_call or engine.prepare(spec, operands, backward=True)
        products = _Products(p, spec, operands, packed, gradients, needed, engine.empty)
        pieces = time_chunks(step_sizes(x, batch_sizes), p.rows_of_chunk(True), p.least_steps)
        longest = max(piece.count for piece in pieces)
        du = dv = engine.empty(longest, width, like=x, dtype=x.dtype, scratch="du")
        if not (spec.merged or p.one_gradient):
            dv = engine.empty(longest, width, like=x, dtype=x.dtype, scratch="dv")
        for piece in reversed(pieces):
            rows, now = piece.rows, masks.part(piece.rows)
            chunk = ChunkGrads(
                sizes=piece.sizes,
                dout=None if grads.d_out is None else rows_of(grads.d_out, packed, piece),
                dh=dh,
                dc=dc,
                saved=saved.part(rows),
                h_prev=previous_rows(h0, flat, piece, now.reset),
                c_prev=None if c0 is None else previous_rows(c0, cells, piece, now.reset),
                du=du[: piece.count],
                dv=dv[: piece.count],
                sums=sums,
                places=_places(found, given, piece.steps) if spec.examples else Places(),
                masks=now,
            )
            p.backward(chunk)
            products.add(chunk, piece, piece is pieces[-1])
        products.finish()
    return made
