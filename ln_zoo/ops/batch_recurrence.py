"""Recurrent batch normalisation as an operator of torch: one direction of one layer.

Like `ln_zoo.ops.operator`, whose frame it shares: chunks of time steps, what does not depend on the
step before for a chunk at once, tensors in packed order. What is normalised over examples couples
the rows of a step, and differs in this:

* Where a place uses the statistics of the batch, means come off before products and not after:
  ``W x - mean(W x)`` is ``W (x - mean x)``, and x is narrower. By the same identity, read
  backwards, gradients of products need not have their means taken off: what they are multiplied by
  has none, or its product is centred afterwards.
* Where a place uses given statistics, it is a linear map of every step for itself.

A place is one or the other for the whole operator. The operator returns the means and variances
that it found and changes nothing: `BatchRecurrence`, the kernel, tells them to the records, and
begins a second run where the first example of a packed batch is left alone, since that one is
normalised by what the strategy has learnt of the steps before.

The operators are ``ln_zoo::batch_recurrence`` and ``ln_zoo::batch_recurrence_backward``. Gradients
of gradients are those of the generic loop, run anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ln_zoo.ops.cells import CELLS, Cell, States, Weights
from ln_zoo.ops.checks import check_form, check_given, check_operands, check_together
from ln_zoo.ops.engines.base import Sums
from ln_zoo.ops.operator import (
    CHOICES,
    OPERANDS,
    Chunk,
    allocate_gradients,
    check_kept,
    chunks,
    differentiable,
    no_autocast,
    previous_rows,
    rows_of,
    scan_operands,
    sizes_of,
    unfilled,
)
from ln_zoo.ops.records import Records, RowNorm, StepNorm
from ln_zoo.ops.recurrence import stack
from ln_zoo.ops.recurrent_kernel import untraceable
from ln_zoo.ops.spec import Operands, gather, product_dtype, specialized

# What is to be computed


@dataclass(frozen=True)
class Cases:
    """How one place is normalised over examples, without gain and shift.

    Args:
        scale: whether it is; ``False``: the identity, and the other fields keep their defaults.
        batch: whether by the statistics of the batch, or by given ones.
        eps: added to the variance, inside the root.
        correction: what the sum of squares over n examples is divided by is n less this.
    """

    scale: bool = False
    batch: bool = False
    eps: float = 0.0
    correction: int = 0

    def encode(self) -> str:
        """As text without ``/``; floats survive to the last bit."""
        return f"{int(self.scale)},{int(self.batch)},{specialized(self.eps)!r},{self.correction}"

    @staticmethod
    def decode(text: str) -> Cases:
        """The inverse of `encode`."""
        scale, batch, eps, correction = text.split(",")
        return Cases(scale == "1", batch == "1", float(eps), int(correction))


@dataclass(frozen=True)
class BatchSpec:
    """What a batch engine computes: a cell and what happens at each of its places.

    Args:
        cell: ``"LSTM"``, ``"GRU"``, ``"RNN_TANH"`` or ``"RNN_RELU"``.
        input: of the input term; the identity in an RNN.
        recurrent: of the recurrent term; the identity in an RNN.
        out: of the cell state on its way to the output (LSTM), of the sum of both terms (RNN); the
            identity in a GRU.

    Example:
        >>> spec = BatchSpec("GRU", Cases(True, True, 1e-5), Cases(), Cases())
        >>> spec.encode()
        'GRU/1,1,1e-05,0/0,0,0.0,0/0,0,0.0,0'
        >>> BatchSpec.decode(spec.encode()) == spec
        True
    """

    cell: str
    input: Cases
    recurrent: Cases
    out: Cases

    @property
    def merged(self) -> bool:
        """Whether both terms meet before anything else happens, as in an RNN."""
        return CELLS[self.cell].gates == 1

    @property
    def places(self) -> tuple[Cases, Cases, Cases]:
        """All three, in the order of the operator's tensors."""
        return self.input, self.recurrent, self.out

    @property
    def products(self) -> tuple[Cases, Cases]:
        """What becomes of the products with w_ih and w_hh; in an RNN, of their sum."""
        return (self.out, self.out) if self.merged else (self.input, self.recurrent)

    def widths(self, hidden: int) -> tuple[int, int, int]:
        """Features of each place, for H hidden units."""
        gates = CELLS[self.cell].gates * hidden
        return gates, gates, hidden

    def encode(self) -> str:
        """As text: the form in which it passes through the schema of a torch operator."""
        return "/".join([self.cell, *(place.encode() for place in self.places)])

    @staticmethod
    @functools.cache
    def decode(text: str) -> BatchSpec:
        """The inverse of `encode`."""
        cell, *places = text.split("/")
        return BatchSpec(cell, *(Cases.decode(place) for place in places))


# Engines


class Statistics(NamedTuple):
    """Of one place, for consecutive steps.

    Attributes:
        mean: (steps, F). Of a place that uses the batch's own, ``None`` in the backward: u, v are
            kept without their means. Only the means of an LSTM's cell states are there.
        var: biased variances, (steps, F).
    """

    mean: Tensor | None
    var: Tensor

    def part(self, steps: slice) -> Statistics:
        """Those of some of the steps."""
        return Statistics(None if self.mean is None else self.mean[steps], self.var[steps])


class Places(NamedTuple):
    """`Statistics` of each place; ``None`` for the identity."""

    input: Statistics | None = None
    recurrent: Statistics | None = None
    out: Statistics | None = None

    def part(self, steps: slice) -> Places:
        """Those of some of the steps."""
        return Places(*(None if place is None else place.part(steps) for place in self))


class Kept(NamedTuple):
    """What training keeps of a run of rows; the forward writes it, the backward reads it.

    Attributes:
        v: products W x, (rows, G), in the precision of products, less their means where the place
            uses those of the batch. In an RNN (``spec.merged``) None in the backward, and in the
            forward the same memory as u.
        u: the same of R h'. In an RNN the sum v + u.
        c: cell states after each step, (rows, H), float32 at least; ``None`` but for an LSTM.
    """

    v: Tensor | None
    u: Tensor
    c: Tensor | None

    def part(self, rows: slice) -> Kept:
        """What is kept of some of the rows."""
        v, u, c = self
        return Kept(None if v is None else v[rows], u[rows], None if c is None else c[rows])


class BatchEngine(Protocol):
    """A way to run the time steps of one direction of one layer."""

    @property
    def name(self) -> str:
        """A short identifier: what ``LN_ZOO_KERNELS`` and the log call it.

        It may be that of an engine for rows: both are then chosen by one name.
        """

    @property
    def title(self) -> str:
        """What it is, for the log."""

    def refuses(self, spec: BatchSpec, x: Tensor, w_hh: Tensor, dtype: torch.dtype) -> str | None:
        """Why it cannot take this call, or ``None``; as of `ln_zoo.ops.engines.base.Engine`."""

    def empty(self, *size: int, like: Tensor, dtype: torch.dtype, scratch: str = "") -> Tensor:
        """Memory that is not filled; as `ln_zoo.ops.engines.base.Engine.empty`."""

    def prepare(self, spec: BatchSpec, operands: Operands, backward: bool) -> Any:
        """What is made once per call: `ln_zoo.ops.engines.base.Products` and more.

        Args:
            spec: what is to be computed.
            operands: the tensors; x and states may have any strides, all else is contiguous.
            backward: whether it is for the backward pass.
        """

    def forward_steps(
        self,
        p: Any,
        v: Tensor,
        sizes: Sequence[int],
        places: Places,
        h: Tensor,
        c: Tensor | None,
        out: Tensor,
        kept: Kept | None,
    ) -> None:
        """Runs consecutive time steps; all tensors contiguous but for statistics.

        Args:
            p: what `prepare` made.
            v: products of the inputs with ``p.w_ih``, (rows, G), without bias, less their means
                where their place uses the batch. It is scratch memory where nothing is kept.
            sizes: rows n of each step; 2 at least where a place uses the batch.
            places: what is given is read. What the batch has is written: the variance, and the
                mean added to what is there (0, or the part of it that v is without).
            h: state, (N, H), float32 at least; updated in place.
            c: cell state of an LSTM, (N, H), float32 at least; updated in place.
            out: to be filled with the states h after each step, (rows, H), in the precision of
                products.
            kept: to be filled with what the backward reads (v is filled already); ``None`` where no
                gradient will be asked for.
        """

    def backward_steps(
        self,
        p: Any,
        sizes: Sequence[int],
        places: Places,
        dout: Tensor | None,
        dh: Tensor,
        dc: Tensor | None,
        kept: Kept,
        h_prev: Tensor,
        c_prev: Tensor | None,
        du: Tensor,
        dv: Tensor,
        sums: Sums,
    ) -> None:
        """Takes gradients back through the time steps of one call of `forward_steps`.

        Args:
            p: what `prepare` made.
            sizes: rows of each step.
            places: statistics of each place; read only.
            dout: gradient of ``out``, (rows, H), read only; ``None`` for 0.
            dh: gradient of the state after the last step, (N, H), float32 at least; left as that of
                the state before the first.
            dc: the same of an LSTM's cell state.
            kept: what the forward kept; read only.
            h_prev: states before each step, (rows, H), in the precision of products; read only.
            c_prev: cell states before each step, (rows, H), float32 at least; read only.
            du: to be filled with the gradient of u, (rows, G), in the precision of products. Where
                the place uses the batch, any constant may be added to a feature of a step.
            dv: to be filled with that of v; in an RNN (``spec.merged``) the same tensor as du.
            sums: what to add the gradients of vectors to, in place.
        """


#: Batch engines by name; the operators look them up here.
BATCH_ENGINES: dict[str, BatchEngine] = {}


@dataclass(frozen=True)
class Run:
    """Consecutive steps of equally many cases within a chunk.

    Attributes:
        rows: where its rows are.
        steps: where its steps are.
        examples: rows of each step.
    """

    rows: slice
    steps: slice
    examples: int

    def of(self, a: Tensor) -> Tensor:
        """Its rows, (steps, examples, F), of a (rows, F)."""
        return a[self.rows].unflatten(0, (self.steps.stop - self.steps.start, self.examples))

    def each(self, a: Tensor) -> Tensor:
        """Numbers for its steps, (steps, 1, F), of (steps, F); or a vector (F,) for all."""
        return a if a.dim() < 2 else a[self.steps].unsqueeze(1)


def runs(sizes: Sequence[int]) -> list[Run]:
    """Cuts steps where the number of examples changes.

    Example:
        >>> [(run.steps.start, run.steps.stop, run.examples) for run in runs([3, 3, 2])]
        [(0, 2, 3), (2, 3, 2)]
    """
    found: list[Run] = []
    row = start = 0
    for t, size in enumerate(sizes, start=1):
        if t == len(sizes) or sizes[t] != size:
            rows = slice(row, row + size * (t - start))
            found.append(Run(rows, slice(start, t), size))
            row, start = rows.stop, t
    return found


def sum_examples(a: Tensor, pieces: Iterable[Run], out: Tensor) -> Tensor:
    """Fills out (steps, F) with the sums over examples of a (rows, F), and gives it back."""
    for run in pieces:
        torch.sum(run.of(a), 1, dtype=out.dtype, out=out[run.steps])
    return out


def without_means(
    a: Tensor, sizes: Sequence[int], wide: torch.dtype, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows less their mean over the examples of each step.

    Args:
        a: (rows, F).
        sizes: rows of each step.
        wide: the precision of means.
        out: where to put the result, which may be a; ``None`` for new memory.

    Returns:
        What is left, (rows, F), and the means, (steps, F).
    """
    pieces = runs(sizes)
    means = sum_examples(a, pieces, a.new_empty(len(sizes), a.shape[1], dtype=wide))
    out = torch.empty_like(a) if out is None else out
    for run in pieces:
        means[run.steps].div_(run.examples)
        torch.sub(run.of(a), run.each(means), out=run.of(out))
    return out, means


# The forward

_PLACES = Places._fields
_GIVEN_NAMES = [f"given_{place}" for place in _PLACES]
_GIVEN = ", ".join(f"Tensor? {name}" for name in _GIVEN_NAMES)
_COUNT = len(Operands._fields)

torch.library.define(
    "ln_zoo::batch_recurrence",
    f"({OPERANDS}, {_GIVEN}, {CHOICES}, bool save) -> "
    "(Tensor out, Tensor h, Tensor c, Tensor v, Tensor u, Tensor cells, "
    f"{', '.join(f'Tensor mean_{place}, Tensor var_{place}' for place in _PLACES)})",
)


def _allocate(
    operands: Operands, spec: BatchSpec, steps: int, save: bool, empty: Callable[..., Tensor]
) -> tuple[Tensor, ...]:
    """Outputs of the operator, not filled."""
    x, h0 = operands.x, operands.h0
    wide, narrow, lead = h0.dtype, x.dtype, x.shape[:-1]
    rows = lead.numel() if save else 0
    width, hidden = operands.w_hh.shape
    lstm = spec.cell == "LSTM"
    statistics = [
        empty(steps if place.batch else 0, features, like=x, dtype=wide)
        for place, features in zip(spec.places, spec.widths(hidden), strict=True)
        for _ in ("mean", "var")
    ]
    return (
        empty(*lead, hidden, like=x, dtype=narrow),
        empty(*h0.shape, like=x, dtype=wide),
        empty(h0.shape[0] if lstm else 0, hidden, like=x, dtype=wide),
        empty(0 if spec.merged else rows, width, like=x, dtype=narrow),
        empty(rows, width, like=x, dtype=narrow),
        empty(rows if lstm else 0, hidden, like=x, dtype=wide),
        *statistics,
    )


def _steps(x: Tensor, batch_sizes: Tensor | None) -> int:
    return x.shape[0] if batch_sizes is None else batch_sizes.shape[0]


def numbered(pieces: Sequence[Chunk]) -> Iterator[tuple[Chunk, slice]]:
    """Chunks with their steps."""
    start = 0
    for piece in pieces:
        yield piece, slice(start, start + len(piece.sizes))
        start += len(piece.sizes)


def _statistics(
    spec: BatchSpec,
    given: Sequence[Tensor | None],
    means: Sequence[Tensor | None],
    variances: Sequence[Tensor],
    steps: slice,
) -> Places:
    """Those of some steps.

    Args:
        spec: what is computed.
        given: mean and variance in rows (2, K, F) for each place that uses given ones.
        means: (T, F) of each place that uses the batch, as far as they are there.
        variances: the same.
        steps: the steps.
    """
    found: list[Statistics | None] = []
    for place, rows, mean, var in zip(spec.places, given, means, variances, strict=True):
        if place.batch:
            found.append(Statistics(mean, var).part(steps))
        elif rows is None:
            found.append(None)
        else:
            each = torch.arange(steps.start, steps.stop, device=rows.device)
            found.append(
                Statistics(*rows.index_select(1, each.clamp_(max=rows.shape[1] - 1)).unbind(0))
            )
    return Places(*found)


def _check(
    spec: BatchSpec,
    operands: Operands,
    given: Sequence[Tensor | None],
    batch_sizes: Tensor | None,
) -> None:
    """Raises RuntimeError for tensors that do not fit together."""
    scales = [place.scale for place in spec.places]
    check_operands(operands, spec.cell, scales, batch_sizes)
    needed = [place.scale and not place.batch for place in spec.places]
    check_given(given, spec.widths(operands.w_hh.shape[1]), needed, operands.h0)


@torch.library.impl("ln_zoo::batch_recurrence", "CompositeExplicitAutograd")
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    operands, given = Operands(*arguments[:_COUNT]), arguments[_COUNT:-4]
    batch_sizes, code, name, save = arguments[-4:]
    spec, engine = BatchSpec.decode(code), BATCH_ENGINES[name]
    _check(spec, operands, given, batch_sizes)
    x = operands.x
    results = _allocate(operands, spec, _steps(x, batch_sizes), save, engine.empty)
    out, h, c, v, u, cells, *found = results
    means, variances = found[0::2], found[1::2]
    for mean in means:
        mean.zero_()
    h.copy_(operands.h0)
    if operands.c0 is not None:
        c.copy_(operands.c0)
    flat = out.view(-1, out.shape[-1])
    first, _ = spec.products
    with no_autocast(x):
        p = engine.prepare(spec, operands, backward=False)
        pieces = chunks(sizes_of(x, batch_sizes), p.chunk_rows, p.least_steps)
        if not save:
            longest = max(piece.last - piece.first for piece in pieces)
            scratch = engine.empty(longest, u.shape[1], like=x, dtype=x.dtype, scratch="terms")
        for piece, steps in numbered(pieces):
            rows = slice(piece.first, piece.last)
            if save:
                terms = (u if spec.merged else v)[rows]
                kept = Kept(terms, u[rows], cells[rows] if spec.cell == "LSTM" else None)
            else:
                terms, kept = scratch[: piece.last - piece.first], None
            inputs = rows_of(x, batch_sizes is not None, piece)
            if first.batch:
                inputs, shift = without_means(inputs, piece.sizes, h.dtype)
                mean = means[2 if spec.merged else 0]
                torch.mm(shift, operands.w_ih.t().to(h.dtype), out=mean[steps])
            p.terms(inputs, terms)
            engine.forward_steps(
                p,
                terms,
                piece.sizes,
                _statistics(spec, given, means, variances, steps),
                h,
                c if spec.cell == "LSTM" else None,
                flat[rows],
                kept,
            )
    return results


@torch.library.register_fake("ln_zoo::batch_recurrence")
def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    operands = Operands(*arguments[:_COUNT])
    batch_sizes, code, _, save = arguments[-4:]
    given = dict(zip(_GIVEN_NAMES, arguments[_COUNT:-4], strict=True))
    check_together(batch_sizes, **operands._asdict(), **given)
    steps = _steps(operands.x, batch_sizes)
    return _allocate(operands, BatchSpec.decode(code), steps, save, unfilled)


# The backward

torch.library.define(
    "ln_zoo::batch_recurrence_backward",
    f"(Tensor? d_out, Tensor? d_h, Tensor? d_c, {OPERANDS}, {_GIVEN}, Tensor out, Tensor v, "
    f"Tensor u, Tensor cells, {', '.join(f'Tensor var_{place}' for place in _PLACES)}, "
    f"Tensor mean_out, {CHOICES}, bool[] needs) -> ({', '.join(['Tensor'] * _COUNT)})",
)


@torch.library.impl("ln_zoo::batch_recurrence_backward", "CompositeExplicitAutograd")
def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    d_out, d_h, d_c = arguments[:3]
    operands, given = Operands(*arguments[3 : 3 + _COUNT]), arguments[3 + _COUNT : 6 + _COUNT]
    out, v, u, cells, *variances, mean_out, batch_sizes, code, name, needs = arguments[6 + _COUNT :]
    spec, engine = BatchSpec.decode(code), BATCH_ENGINES[name]
    _check(spec, operands, given, batch_sizes)
    x, h0, c0 = operands.x, operands.h0, operands.c0
    check_kept(operands, spec.merged, d_out, d_h, d_c, out, v, u, cells)
    packed, wide = batch_sizes is not None, h0.dtype
    steps = _steps(x, batch_sizes)
    widths = spec.widths(operands.w_hh.shape[1])
    for var, place, width in zip(variances, spec.places, widths, strict=True):
        check_form("var", var, (steps if place.batch else 0, width), wide, x)
    check_form("mean_out", mean_out, (steps if spec.out.batch else 0, widths[2]), wide, x)
    needed = Operands(*needs)
    found = allocate_gradients(operands, needs, engine.empty)
    gradients = Operands(*found)

    def wanted(name: str) -> Tensor | None:
        a = getattr(operands, name)
        there = a is not None and getattr(needed, name)
        return torch.zeros_like(a, dtype=wide) if there else None

    def of_state(d: Tensor | None, start: Tensor) -> Tensor:
        return start.new_zeros(start.shape) if d is None else start.new_empty(start.shape).copy_(d)

    def total(of: Tensor, needed: bool) -> Tensor | None:
        if not needed:
            return None
        return of if of.dtype == wide else torch.empty_like(of, dtype=wide)

    dw_ih, dw_hh = (
        total(getattr(gradients, name), getattr(needed, name)) for name in ("w_ih", "w_hh")
    )
    sums = Sums(*(wanted(name) for name in Operands._fields[5:]))
    dh = of_state(d_h, h0)
    dc = None if c0 is None else of_state(d_c, c0)
    dx = gradients.x.view(-1, x.shape[-1]) if needed.x else None

    flat, width = out.view(-1, out.shape[-1]), u.shape[1]
    kept = Kept(None if spec.merged else v, u, None if c0 is None else cells)
    first, second = spec.products
    with no_autocast(x):
        p = engine.prepare(spec, operands, backward=True)
        pieces = chunks(sizes_of(x, batch_sizes), p.chunk_rows, p.least_steps)
        longest = max(piece.last - piece.first for piece in pieces)
        du_buffer = dv_buffer = engine.empty(longest, width, like=x, dtype=x.dtype, scratch="du")
        if not spec.merged:
            dv_buffer = engine.empty(longest, width, like=x, dtype=x.dtype, scratch="dv")
        for piece, steps in reversed(list(numbered(pieces))):
            rows, count = slice(piece.first, piece.last), piece.last - piece.first
            h_prev = previous_rows(h0, flat, piece)
            du, dv = du_buffer[:count], dv_buffer[:count]
            mean_cell = None if spec.merged else mean_out
            engine.backward_steps(
                p,
                piece.sizes,
                _statistics(spec, given, (None, None, mean_cell), variances, steps),
                None if d_out is None else rows_of(d_out, packed, piece),
                dh,
                dc,
                kept.part(rows),
                h_prev,
                None if c0 is None else previous_rows(c0, cells, piece),
                du,
                dv,
                sums,
            )
            if dw_hh is not None:
                if second.batch:
                    h_prev, _ = without_means(h_prev, piece.sizes, wide)
                p.add_weight_gradient(du, h_prev, dw_hh, piece is pieces[-1])
            if dw_ih is not None:
                inputs = rows_of(x, packed, piece)
                if first.batch:
                    inputs, _ = without_means(inputs, piece.sizes, wide)
                p.add_weight_gradient(dv, inputs, dw_ih, piece is pieces[-1])
            if dx is not None:
                p.input_gradient(dv, dx[rows])
                if first.batch:
                    without_means(dx[rows], piece.sizes, wide, out=dx[rows])

    for target, value in zip(found[1:], (dw_ih, dw_hh, dh, dc, *vars(sums).values()), strict=True):
        if target.numel() and value is not None and value is not target:
            target.copy_(value)
    return found


@torch.library.register_fake("ln_zoo::batch_recurrence_backward")
def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    operands = Operands(*arguments[3 : 3 + _COUNT])
    names = "d_out", "d_h", "d_c", *_GIVEN_NAMES, "out", "v", "u", "cells"
    names += *(f"var_{place}" for place in _PLACES), "mean_out"
    others = dict(zip(names, (*arguments[:3], *arguments[3 + _COUNT : -4]), strict=True))
    check_together(arguments[-4], **operands._asdict(), **others)
    return allocate_gradients(operands, arguments[-1], unfilled)


# Autograd


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, batch_sizes, ctx.code, ctx.engine, ctx.saves = inputs
    out, _, _, v, u, cells, *found = output
    ctx.mark_non_differentiable(v, u, cells, *found)
    ctx.set_materialize_grads(False)
    if ctx.saves:
        # Means of products were taken off, and are known to nobody but the strategy.
        ctx.save_for_backward(*operands, batch_sizes, out, v, u, cells, *found[1::2], found[4])


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if not ctx.saves:
        raise RuntimeError(
            "ln_zoo::batch_recurrence was called with save=False and keeps nothing for a backward; "
            "call it with save=True"
        )
    saved = ctx.saved_tensors  # read once: activation checkpointing refuses a second time
    operands = Operands(*saved[:_COUNT])
    *given, batch_sizes = saved[_COUNT : _COUNT + 4]
    kept = saved[_COUNT + 4 :]
    needs = [bool(n) for n in ctx.needs_input_grad[:_COUNT]]
    rest: tuple[None, ...] = (None,) * 7
    if torch.is_grad_enabled():
        spec = BatchSpec.decode(ctx.code)
        again = differentiable(
            lambda: replay(spec, operands, given, batch_sizes), operands, grads[:3], needs
        )
        return (*again, *rest)
    found = torch.ops.ln_zoo.batch_recurrence_backward(
        *grads[:3], *operands, *given, *kept, batch_sizes, ctx.code, ctx.engine, needs
    )
    return (*(g if wanted else None for g, wanted in zip(found, needs, strict=True)), *rest)


torch.library.register_autograd("ln_zoo::batch_recurrence", _gradients, setup_context=_keep)


def replay(
    spec: BatchSpec,
    operands: Operands,
    given: Sequence[Tensor | None],
    batch_sizes: Tensor | None,
) -> tuple[Tensor, ...]:
    """The operator's output and final states, by the generic loop.

    Args:
        spec: what is computed.
        operands: the tensors.
        given: mean and variance in rows (2, K, F), for each place that uses given ones.
        batch_sizes: of packed data, (T,).
    """

    def site(
        k: int, gain: Tensor | None, shift: Tensor | None = None
    ) -> Callable[[Tensor, int | None], Tensor]:
        return lambda a, step: normalized(a, spec.places[k], given[k], gain, shift, step)

    sites = {
        "input": site(0, operands.gain_input),
        "recurrent": site(1, operands.gain_recurrent),
        "cell": site(2, operands.gain_out, operands.shift_out),
        "sum": site(2, operands.gain_out),
    }
    return scan_operands(spec.cell, operands, batch_sizes, sites, per_timestep=True)


def normalized(
    a: Tensor,
    examples: Cases,
    given: Tensor | None,
    gain: Tensor | None,
    shift: Tensor | None,
    step: int | None,
) -> Tensor:
    """Rows (n, F) of one step normalised, with gain and shift; differentiable.

    Args:
        a: the rows.
        examples: how they are normalised.
        given: mean and variance in rows (2, K, F), where they are given.
        gain: (F,), or ``None`` for 1.
        shift: (F,), or ``None`` for 0.
        step: the time step.
    """
    if not examples.scale:
        return a
    a = a.to(torch.promote_types(a.dtype, torch.float32))
    if examples.batch:
        var, mean = torch.var_mean(a, 0, correction=examples.correction)
    else:
        assert given is not None
        assert step is not None
        mean, var = given[:, min(step, given.shape[1] - 1)]
    a = (a - mean) * torch.rsqrt(var + examples.eps)
    a = a if gain is None else a * gain
    return a if shift is None else a + shift


# The kernel


class BatchRecurrence:
    """The kernel that a batch engine makes: cells whose sites are normalised over examples, or not.

    Args:
        engine: what runs the time steps; it becomes known to the operators under its name.

    Example:
        >>> from ln_zoo.ops.engines.aten.batch import BatchAtenEngine
        >>> BatchRecurrence(BatchAtenEngine()).name
        'aten'
    """

    def __init__(self, engine: BatchEngine) -> None:
        BATCH_ENGINES[engine.name] = engine
        self.engine, self.name, self.title = engine, engine.name, engine.title

    def refuses(
        self, cell: Cell, records: Sequence[Records], x: Tensor, weights: Sequence[Weights]
    ) -> str | None:
        """Why this call is not for the engine, or ``None``."""
        reason = untraceable() or _refusal(cell, records, weights)
        if reason is not None:
            return reason
        dtype = product_dtype(x)
        for record, w in zip(records, weights, strict=True):
            reason = self.engine.refuses(_specify(cell, _by_place(cell, record)), x, w.hh, dtype)
            if reason is not None:
                return reason
        return None

    def __call__(
        self,
        cell: Cell,
        records: Sequence[Records],
        x: Tensor,
        batch_sizes: Tensor | None,
        states: States,
        weights: Sequence[Weights],
        *,
        bidirectional: bool,
        dropout: float,
        training: bool,
    ) -> tuple[Tensor, States]:
        """Runs the layers; arguments as `ln_zoo.ops.dispatch.Kernel` has them."""

        def run(
            i: int, x: Tensor, sizes: Sequence[int] | None, states: States
        ) -> tuple[Tensor, States]:
            if sizes is None:
                sizes = [x.shape[1]] * x.shape[0]
            for norm in _by_place(cell, records[i]):
                if norm is not None and norm.batch:
                    norm.check(sizes[0])
            out, final = self._direction(
                cell, records[i], weights[i], x, batch_sizes, sizes, states
            )
            # A sequence cut in two shall lose nothing: states are as precise as weights.
            return out, tuple(state.to(weights[i].hh.dtype) for state in final)

        return stack(
            run,
            x,
            batch_sizes,
            states,
            bidirectional=bidirectional,
            dropout=dropout,
            training=training,
        )

    def _direction(
        self,
        cell: Cell,
        records: Records,
        weights: Weights,
        x: Tensor,
        batch_sizes: Tensor | None,
        sizes: Sequence[int],
        states: States,
    ) -> tuple[Tensor, States]:
        norms = _by_place(cell, records)
        spec = _specify(cell, norms)
        operands = gather(cell, records, weights, x, states)
        steps = len(sizes)
        together = sum(n > 1 for n in sizes) if any(p.batch for p in spec.places) else steps
        if together == steps:
            return self._steps(spec, norms, operands, batch_sizes, sizes, 0)
        # The one example that is left is no batch. What its steps use, the strategy knows only when
        # it has been told of those before.
        assert batch_sizes is not None
        rows = sum(sizes[:together])
        heads = operands.x.split([rows, steps - together])
        head, final = self._steps(
            spec,
            norms,
            operands._replace(x=heads[0]),
            batch_sizes[:together],
            sizes[:together],
            0,
        )
        alone = [state[:1] for state in final]
        tail, ends = self._steps(
            BatchSpec(cell.name, *(_given(place) for place in spec.places)),
            norms,
            operands._replace(x=heads[1], h0=alone[0], c0=alone[1] if alone[1:] else None),
            batch_sizes[together:],
            sizes[together:],
            together,
        )
        return torch.cat([head, tail]), tuple(
            torch.cat([end, state[1:]]) for end, state in zip(ends, final, strict=True)
        )

    def _steps(
        self,
        spec: BatchSpec,
        norms: Sequence[StepNorm | None],
        operands: Operands,
        batch_sizes: Tensor | None,
        sizes: Sequence[int],
        first: int,
    ) -> tuple[Tensor, States]:
        """Consecutive steps, of which the first has that number: outputs and states after them."""
        wide = operands.h0.dtype
        given = [
            torch.stack(norm.population(first, len(sizes))).to(wide)
            if norm is not None and not place.batch
            else None
            for place, norm in zip(spec.places, norms, strict=True)
        ]
        save = torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in operands)
        out, h, c, _, _, _, *found = torch.ops.ln_zoo.batch_recurrence(
            *operands, *given, batch_sizes, spec.encode(), self.name, save
        )
        for place, norm, mean, var in zip(
            spec.places, norms, found[0::2], found[1::2], strict=True
        ):
            if norm is not None and place.batch:
                norm.track(first, sizes, mean, var)
        return out, (h, c) if spec.cell == "LSTM" else (h,)


def _by_place(cell: Cell, records: Records) -> tuple[StepNorm | None, ...]:
    """What normalises over examples, in the order of ``BatchSpec.places``."""
    roles = ("input", "recurrent", "cell" if "cell" in records else "sum")
    found = (records.get(role) for role in roles)
    return tuple(record if isinstance(record, StepNorm) else None for record in found)


def _specify(cell: Cell, norms: Sequence[StepNorm | None]) -> BatchSpec:
    return BatchSpec(
        cell.name,
        *(
            Cases() if norm is None else Cases(True, norm.batch, norm.eps, norm.correction)
            for norm in norms
        ),
    )


def _given(place: Cases) -> Cases:
    return Cases(True, False, place.eps) if place.scale else place


def _refusal(cell: Cell, records: Sequence[Records], weights: Sequence[Weights]) -> str | None:
    if not cell.has_kernels:
        return f"no kernel knows this cell, {cell.name}"
    over_examples = False
    for direction, w in zip(records, weights, strict=True):
        if w.hr is not None:
            return "the hidden state is projected"
        for place in cell.places:
            record = direction[place.role]
            if record is None:
                return f"only the strategy knows what the {place.role} site does"
            if record.identity:
                continue
            if isinstance(record, RowNorm):
                return f"the {place.role} site normalises each example for itself"
            if not place.sums:
                return f"the {place.role} site normalises a term of the sum"
            over_examples = True
    return None if over_examples else "no site normalises over the batch"
