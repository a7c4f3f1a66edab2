"""The frame of all recurrent engines: one direction of one layer as an operator of torch.

Time is cut into chunks of consecutive steps. What does not depend on the step before is done for a
chunk at once: the products of the inputs, and on the way back the gradients of weights and inputs,
one product each. What the backward needs is kept (`Saved`) for all steps; all else, above all the
gradients of summed inputs, exists for one chunk at a time.

The operators are ``ln_zoo::recurrence`` and ``ln_zoo::recurrence_backward``. Gradients of gradients
are those of the generic loop, run anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ln_zoo.ops.cells import CELLS, Sites, Weights
from ln_zoo.ops.checks import check_form, check_operands, check_together
from ln_zoo.ops.engines.base import ENGINES, Saved, Sums, centred
from ln_zoo.ops.recurrence import scan
from ln_zoo.ops.spec import Operands, Rows, Spec


@dataclass(frozen=True)
class Chunk:
    """Consecutive time steps.

    Attributes:
        first: row of the first step's first example.
        last: one past the last row.
        sizes: rows of each step.
        before: rows of the step before; of the first step the number of examples.
    """

    first: int
    last: int
    sizes: tuple[int, ...]
    before: int


def chunks(sizes: Sequence[int], least_rows: int, least_steps: int = 1) -> list[Chunk]:
    """Cuts time steps into runs of so many rows and steps at least, but for the last.

    Example:
        >>> [(c.first, c.last, len(c.sizes)) for c in chunks([200, 200, 200, 150, 10], 512)]
        [(0, 600, 3), (600, 760, 2)]
    """
    found: list[Chunk] = []
    first = row = step = 0
    before = sizes[0]
    for t, size in enumerate(sizes):
        row += size
        full = row - first >= least_rows and t + 1 - step >= least_steps
        if full or t == len(sizes) - 1:
            found.append(Chunk(first, row, tuple(sizes[step : t + 1]), before))
            first, step, before = row, t + 1, size
    return found


def sizes_of(x: Tensor, batch_sizes: Tensor | None) -> list[int]:
    """Rows of each step."""
    return [x.shape[1]] * x.shape[0] if batch_sizes is None else batch_sizes.tolist()


def rows_of(a: Tensor, packed: bool, chunk: Chunk) -> Tensor:
    """The rows (rows, F) of a chunk, contiguous, of a padded (T, N, F) or packed (total, F)."""
    if packed:
        return a[chunk.first : chunk.last].contiguous()
    examples = a.shape[1]
    start, steps = chunk.first // max(examples, 1), len(chunk.sizes)
    return a[start : start + steps].reshape(steps * examples, a.shape[2]).contiguous()


def previous_rows(start: Tensor, after: Tensor, chunk: Chunk) -> Tensor:
    """What each row of a chunk had in the step before, (rows, F).

    Args:
        start: what the first step had, (N, F).
        after: what there was after each step of all, (total, F).
        chunk: the chunk.
    """
    if chunk.first and chunk.sizes[-1] == chunk.before:
        return after[chunk.first - chunk.before : chunk.last - chunk.before]
    row = chunk.first - chunk.before
    parts = []
    for size, before in zip(chunk.sizes, (chunk.before, *chunk.sizes), strict=False):
        parts.append(start[:size] if row < 0 else after[row : row + size])
        row += before
    return torch.cat([part.to(after.dtype) for part in parts])


@contextlib.contextmanager
def no_autocast(x: Tensor) -> Iterator[None]:
    """Operands have the precision that they shall have."""
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            yield
    else:
        yield


# The forward

#: Arguments of operators: the fields of `Operands`, and the last but one.
OPERANDS = (
    "Tensor x, Tensor w_ih, Tensor w_hh, Tensor h0, Tensor? c0, Tensor? bias, Tensor? bias_hn, "
    "Tensor? gain_input, Tensor? gain_recurrent, Tensor? gain_out, Tensor? shift_out"
)
CHOICES = "Tensor? batch_sizes, str spec, str engine"

torch.library.define(
    "ln_zoo::recurrence",
    f"({OPERANDS}, {CHOICES}, bool save) -> "
    "(Tensor out, Tensor h, Tensor c, Tensor v, Tensor u, Tensor cells, Tensor stats)",
)


def _allocate(
    operands: Operands, spec: Spec, engine: str, save: bool, empty: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs of the operator, not filled."""
    x, h0 = operands.x, operands.h0
    wide, narrow, lead = h0.dtype, x.dtype, x.shape[:-1]
    rows = lead.numel() if save else 0
    width, hidden = operands.w_hh.shape
    lstm = spec.cell == "LSTM"
    return (
        empty(*lead, hidden, like=x, dtype=narrow),
        empty(*h0.shape, like=x, dtype=wide),
        empty(h0.shape[0] if lstm else 0, hidden, like=x, dtype=wide),
        empty(0 if spec.merged else rows, width, like=x, dtype=narrow),
        empty(rows, width, like=x, dtype=narrow),
        empty(rows if lstm else 0, hidden, like=x, dtype=wide),
        empty(rows, ENGINES[engine].stats(spec), like=x, dtype=wide),
    )


def unfilled(*size: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for outputs where nothing is computed."""
    return like.new_empty(size, dtype=dtype)


@torch.library.impl("ln_zoo::recurrence", "CompositeExplicitAutograd")
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    operands = Operands(*arguments[:-4])
    batch_sizes, code, name, save = arguments[-4:]
    spec, engine = Spec.decode(code), ENGINES[name]
    check_operands(operands, spec.cell, spec.scales, batch_sizes)
    x = operands.x
    results = _allocate(operands, spec, name, save, engine.empty)
    out, h, c, v, u, cells, stats = results
    h.copy_(operands.h0)
    if operands.c0 is not None:
        c.copy_(operands.c0)
    # An engine may leave some as they are: what it gives shall be the same from run to run.
    stats.zero_()
    flat = out.view(-1, out.shape[-1])
    with no_autocast(x):
        p = engine.prepare(spec, operands, backward=False)
        pieces = chunks(sizes_of(x, batch_sizes), p.chunk_rows, p.least_steps)
        if not save:
            longest = max(piece.last - piece.first for piece in pieces)
            scratch = engine.empty(longest, u.shape[1], like=x, dtype=x.dtype, scratch="terms")
        for piece in pieces:
            rows = slice(piece.first, piece.last)
            if save:
                terms = (u if spec.merged else v)[rows]
                after = cells[rows] if spec.cell == "LSTM" else None
                kept = Saved(terms, u[rows], after, stats[rows])
            else:
                terms, kept = scratch[: piece.last - piece.first], None
            p.terms(rows_of(x, batch_sizes is not None, piece), terms)
            state = c if spec.cell == "LSTM" else None
            engine.forward_steps(p, terms, piece.sizes, h, state, flat[rows], kept)
    return results


@torch.library.register_fake("ln_zoo::recurrence")
def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    batch_sizes, code, name, save = arguments[-4:]
    operands = Operands(*arguments[:-4])
    check_together(batch_sizes, **operands._asdict())
    return _allocate(operands, Spec.decode(code), name, save, unfilled)


# The backward

torch.library.define(
    "ln_zoo::recurrence_backward",
    f"(Tensor? d_out, Tensor? d_h, Tensor? d_c, {OPERANDS}, Tensor out, Tensor v, Tensor u, "
    f"Tensor cells, Tensor stats, {CHOICES}, bool[] needs) -> "
    f"({', '.join(['Tensor'] * len(Operands._fields))})",
)


def check_kept(
    operands: Operands,
    merged: bool,
    d_out: Tensor | None,
    d_h: Tensor | None,
    d_c: Tensor | None,
    out: Tensor,
    v: Tensor,
    u: Tensor,
    cells: Tensor,
) -> None:
    """Checks what a backward is called with beside the operands, which are right.

    Raises:
        RuntimeError: if one has another size, precision or device.
    """
    x, h0, lead = operands.x, operands.h0, operands.x.shape[:-1]
    (width, hidden), rows, lstm = operands.w_hh.shape, lead.numel(), operands.c0 is not None
    narrow, wide = x.dtype, h0.dtype
    for name, a, size, dtype in (
        ("d_out", d_out, (*lead, hidden), narrow),
        ("d_h", d_h, tuple(h0.shape), wide),
        ("d_c", d_c, tuple(h0.shape) if lstm else (0, hidden), wide),
        ("out", out, (*lead, hidden), narrow),
        ("v", v, (0 if merged else rows, width), narrow),
        ("u", u, (rows, width), narrow),
        ("cells", cells, (rows if lstm else 0, hidden), wide),
    ):
        check_form(name, a, size, dtype, x)


def allocate_gradients(
    operands: Operands, needs: Sequence[bool], empty: Callable[..., Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of the operands, not filled; without elements where there is none to give."""
    x = operands.x
    return tuple(
        empty(
            *((0,) if a is None or not wanted else a.shape),
            like=x,
            dtype=(x if a is None else a).dtype,
        )
        for a, wanted in zip(operands, needs, strict=True)
    )


@torch.library.impl("ln_zoo::recurrence_backward", "CompositeExplicitAutograd")
def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    d_out, d_h, d_c = arguments[:3]
    operands = Operands(*arguments[3:-9])
    out, v, u, cells, stats, batch_sizes, code, name, needs = arguments[-9:]
    spec, engine = Spec.decode(code), ENGINES[name]
    check_operands(operands, spec.cell, spec.scales, batch_sizes)
    x, h0, c0 = operands.x, operands.h0, operands.c0
    check_form("stats", stats, (x.shape[:-1].numel(), engine.stats(spec)), h0.dtype, x)
    check_kept(operands, spec.merged, d_out, d_h, d_c, out, v, u, cells)
    packed, wide = batch_sizes is not None, h0.dtype
    needed = Operands(*needs)
    found = allocate_gradients(operands, needs, engine.empty)
    gradients = Operands(*found)

    def zeros(a: Tensor | None) -> Tensor | None:
        return None if a is None else torch.zeros_like(a, dtype=wide)

    def of_state(d: Tensor | None, start: Tensor) -> Tensor:
        return start.new_zeros(start.shape) if d is None else start.new_empty(start.shape).copy_(d)

    def wanted(name: str) -> Tensor | None:
        return zeros(getattr(operands, name)) if getattr(needed, name) else None

    sums = Sums(*(wanted(name) for name in Operands._fields[5:]))
    dh = of_state(d_h, h0)
    dc = None if c0 is None else of_state(d_c, c0)
    dx = gradients.x.view(-1, x.shape[-1]) if needed.x else None

    flat, width = out.view(-1, out.shape[-1]), u.shape[1]
    with no_autocast(x):
        p = engine.prepare(spec, operands, backward=True)
        pieces = chunks(sizes_of(x, batch_sizes), p.chunk_rows, p.least_steps)
        longest = max(piece.last - piece.first for piece in pieces)
        du_buffer = dv_buffer = engine.empty(longest, width, like=x, dtype=x.dtype, scratch="du")
        if not spec.merged:
            dv_buffer = engine.empty(longest, width, like=x, dtype=x.dtype, scratch="dv")

        def total(of: Tensor, rows: Rows) -> Tensor | None:
            if not of.numel():
                return None
            if of.dtype == wide and not (rows.center and p.leaves_constants):
                return of
            return torch.empty_like(of, dtype=wide)

        first, second = spec.products
        dw_ih = total(gradients.w_ih, first)
        dw_hh = total(gradients.w_hh, second)
        for piece in reversed(pieces):
            rows, count = slice(piece.first, piece.last), piece.last - piece.first
            last = piece is pieces[-1]
            h_prev = previous_rows(h0, flat, piece)
            du, dv = du_buffer[:count], dv_buffer[:count]
            engine.backward_steps(
                p,
                piece.sizes,
                None if d_out is None else rows_of(d_out, packed, piece),
                dh,
                dc,
                Saved(
                    None if spec.merged else v[rows],
                    u[rows],
                    None if c0 is None else cells[rows],
                    stats[rows],
                ),
                h_prev,
                None if c0 is None else previous_rows(c0, cells, piece),
                du,
                dv,
                sums,
            )
            if dw_hh is not None:
                p.add_weight_gradient(du, h_prev, dw_hh, last)
            if dw_ih is not None:
                p.add_weight_gradient(dv, rows_of(x, packed, piece), dw_ih, last)
            if dx is not None:
                p.input_gradient(dv, dx[rows])

    for target, value, of in ((gradients.w_ih, dw_ih, first), (gradients.w_hh, dw_hh, second)):
        if value is not None and value is not target:
            _ = centred(value, of, target) if p.leaves_constants else target.copy_(value)
    for target, value in zip(found[3:], (dh, dc, *vars(sums).values()), strict=True):
        if target.numel() and value is not None:
            target.copy_(value)
    return found


@torch.library.register_fake("ln_zoo::recurrence_backward")
def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    operands = Operands(*arguments[3:-9])
    names = ("d_out", "d_h", "d_c", "out", "v", "u", "cells", "stats")
    others = dict(zip(names, (*arguments[:3], *arguments[-9:-4]), strict=True))
    check_together(arguments[-4], **operands._asdict(), **others)
    return allocate_gradients(operands, arguments[-1], unfilled)


# Autograd


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, batch_sizes, ctx.code, ctx.engine, ctx.saves = inputs
    out, _, _, *kept = output
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    if ctx.saves:
        ctx.save_for_backward(*operands, batch_sizes, out, *kept)


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if not ctx.saves:
        raise RuntimeError(
            "ln_zoo::recurrence was called with save=False and keeps nothing for a backward; "
            "call it with save=True"
        )
    *tensors, batch_sizes, out, v, u, cells, stats = ctx.saved_tensors
    operands = Operands(*tensors)
    needs = [bool(n) for n in ctx.needs_input_grad[: len(operands)]]
    rest: tuple[None, ...] = (None,) * 4
    if torch.is_grad_enabled():
        spec = Spec.decode(ctx.code)
        again = differentiable(
            lambda: replay(spec, operands, batch_sizes), operands, grads[:3], needs
        )
        return (*again, *rest)
    found = torch.ops.ln_zoo.recurrence_backward(
        *grads[:3],
        *operands,
        *(out, v, u, cells, stats),
        batch_sizes,
        ctx.code,
        ctx.engine,
        needs,
    )
    return (*(g if wanted else None for g, wanted in zip(found, needs, strict=True)), *rest)


torch.library.register_autograd("ln_zoo::recurrence", _gradients, setup_context=_keep)


def differentiable(
    replayed: Callable[[], Sequence[Tensor | None]],
    operands: tuple[Any, ...],
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of an operator as functions that have gradients again.

    Args:
        replayed: its output and final states as functions of the operands.
        operands: the operands, x first.
        grads: gradients of those.
        needs: of which operands gradients are needed.
    """
    with torch.enable_grad(), no_autocast(operands[0]):
        results = replayed()
        pairs = [
            (result, grad.to(result.dtype))
            for result, grad in zip(results, grads, strict=False)
            if grad is not None and result is not None and result.requires_grad
        ]
        wanted = [a for a, need in zip(operands, needs, strict=True) if a is not None and need]
        found = iter(
            torch.autograd.grad(
                [result for result, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                create_graph=True,
                allow_unused=True,
            )
        )
    return [next(found) if need else None for need in needs]


def replay(spec: Spec, operands: Operands, batch_sizes: Tensor | None) -> tuple[Tensor, ...]:
    """The operator's output and final states, by the generic loop.

    Args:
        spec: what is computed.
        operands: the tensors.
        batch_sizes: of packed data, (T,).
    """
    sites = normalized_sites(spec, operands.w_hh.shape[1], *operands[7:])
    return scan_operands(spec.cell, operands, batch_sizes, sites)


def normalized_sites(spec: Spec, hidden: int, *affine: Tensor | None) -> Sites:
    """What happens at each place of a cell, by role; differentiable.

    Args:
        spec: what is computed.
        hidden: H.
        *affine: gains of the input term, of the recurrent term and of the output, and the shift of
            the output.
    """
    gain_input, gain_recurrent, gain_out, shift_out = affine

    def site(
        rows: Rows, gain: Tensor | None, shift: Tensor | None = None
    ) -> Callable[[Tensor, int | None], Tensor]:
        return lambda a, step: normalized(a, rows, gain, shift, hidden)

    return {
        "input": site(spec.input, gain_input),
        "recurrent": site(spec.recurrent, gain_recurrent),
        "cell": site(spec.out, gain_out, shift_out),
        "sum": site(spec.out, gain_out),
    }


def scan_operands(
    cell: str,
    operands: Operands,
    batch_sizes: Tensor | None,
    sites: Sites,
    per_timestep: bool = False,
) -> tuple[Tensor, ...]:
    """Output and final states by the generic loop, differentiable.

    Args:
        cell: its name.
        operands: the tensors.
        batch_sizes: of packed data, (T,).
        sites: what happens to summed inputs, by role.
        per_timestep: whether the ``"input"`` site must see the time steps one by one.
    """
    bias, hidden = operands.bias, operands.w_hh.shape[1]
    if bias is None:
        bias = operands.h0.new_zeros(len(operands.w_hh))
    bias_hh = torch.zeros_like(bias)
    if operands.bias_hn is not None:
        bias_hh = torch.cat([bias_hh[hidden:], operands.bias_hn])
    states = (operands.h0,) if operands.c0 is None else (operands.h0, operands.c0)
    output, final = scan(
        CELLS[cell],
        operands.x,
        None if batch_sizes is None else batch_sizes.tolist(),
        states,
        Weights(operands.w_ih, operands.w_hh, bias, bias_hh),
        sites,
        per_timestep,
    )
    return output, *final


def normalized(
    a: Tensor, rows: Rows, gain: Tensor | None, shift: Tensor | None, hidden: int
) -> Tensor:
    """Rows (N, F) normalised, with gain and shift; differentiable.

    Args:
        a: the rows.
        rows: how they are normalised.
        gain: (F,), or ``None`` for 1.
        shift: (F,), or ``None`` for 0.
        hidden: H, in whose units the groups are.
    """
    if not rows.scale:
        return a
    a = a.to(torch.promote_types(a.dtype, torch.float32))
    parts = []
    for part in a.split([hidden * n for n in rows.groups], dim=-1):
        if rows.center:
            part = part - part.mean(-1, keepdim=True)
        parts.append(part * torch.rsqrt(part.square().mean(-1, keepdim=True) + rows.eps))
    a = torch.cat(parts, dim=-1)
    a = a if gain is None else a * gain
    return a if shift is None else a + shift
