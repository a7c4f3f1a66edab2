"""One direction of one layer as a torch operator; every recurrent engine runs inside it.

Input products and, in the backward pass, gradients of weights and inputs run once per chunk of
steps. `Saved` tensors exist for all steps, other buffers for one chunk. The operators have no side
effects. Double backward reruns the generic loop; batched gradients run one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ln_zoo.ops import memory
from ln_zoo.ops.cells import Sites, Weights
from ln_zoo.ops.checks import (
    check_form,
    check_given,
    check_masks,
    check_operands,
    check_together,
)
from ln_zoo.ops.engines.base import (
    NO_MASKS,
    Chunk,
    ChunkGrads,
    Engine,
    Masks,
    Places,
    Saved,
    Statistics,
    Steps,
    Sums,
    centred,
)
from ln_zoo.ops.recurrence import scan
from ln_zoo.ops.registry import engine_named
from ln_zoo.ops.regularization import Noise
from ln_zoo.ops.spec import Examples, Operands, Rows, Spec, form_of
from ln_zoo.ops.time_chunks import (
    dropped_rows,
    previous_rows,
    rows_of,
    step_sizes,
    time_chunks,
)


@contextlib.contextmanager
def no_autocast(x: Tensor) -> Iterator[None]:
    """Disable autocast: operands already have their final dtype."""
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            yield
    else:
        yield


# Arguments and results of the operators


class FixedStatistics(NamedTuple):
    """Given mean and variance in rows (2, K, F), by place."""

    given_input: Tensor | None = None
    given_recurrent: Tensor | None = None
    given_out: Tensor | None = None


NO_STATISTICS = FixedStatistics()


class Options(NamedTuple):
    """Arguments that are not tensors of the layer; ``spec`` is encoded."""

    batch_sizes: Tensor | None
    spec: str
    engine: str


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


def _split(arguments: Sequence[Any], *kinds: Any) -> Iterator[Any]:
    """Split a flat argument list into named tuples, followed by the remaining arguments."""
    start = 0
    for kind in kinds:
        end = start + len(kind._fields)
        yield kind(*arguments[start:end])
        start = end
    yield arguments[start:]


def _named(kind: Any, optional: Sequence[str] | None = None) -> str:
    """Schema of the fields of a tuple; ``optional``: fields that may be None (default: all)."""
    return ", ".join(
        f"Tensor{'?' if optional is None or name in optional else ''} {name}"
        for name in kind._fields
    )


_OPERANDS = _named(Operands, Operands._fields[4:])
_CHOICES = "Tensor? batch_sizes, str spec, str engine"

torch.library.define(
    "ln_zoo::recurrence",
    f"({_OPERANDS}, {_named(FixedStatistics)}, {_named(Masks)}, {_CHOICES}, bool save) -> "
    f"({_named(Results, ())})",
)
torch.library.define(
    "ln_zoo::recurrence_backward",
    f"({_named(Grads)}, {_OPERANDS}, {_named(FixedStatistics)}, {_named(Masks)}, "
    f"{_named(SavedTensors, ())}, "
    f"{_CHOICES}, bool[] needs) -> ({', '.join(['Tensor'] * len(Operands._fields))})",
)


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


def _steps(x: Tensor, batch_sizes: Tensor | None) -> int:
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


def _check(
    spec: Spec,
    engine: Engine,
    operands: Operands,
    given: FixedStatistics,
    masks: Masks,
    batch_sizes: Tensor | None,
) -> None:
    check_operands(operands, spec.cell, spec.scales, batch_sizes)
    needed = [isinstance(place, Examples) and not place.batch for place in spec.places]
    if any(needed) or any(a is not None for a in given):
        check_given(given, spec.widths(operands.w_hh.shape[1]), needed, operands.h0)
    if (masks.noise or any(spec.zoneout)) and (spec.examples or not engine.has_noise):
        raise RuntimeError(
            f"{engine.name} has neither zoneout nor recurrent dropout for {spec.encode()}"
        )
    if masks.reset is not None and spec.examples:
        raise RuntimeError(f"{engine.name} has no resets for {spec.encode()}")
    check_masks(masks, spec.cell, operands)


def _by_rows(masks: Masks, hidden: int) -> Masks:
    dropout, of_h, of_c, reset = (None if a is None else a.contiguous() for a in masks)
    of_h, of_c = (None if a is None else a.view(-1, hidden) for a in (of_h, of_c))
    return Masks(dropout, of_h, of_c, reset)


# The forward


def _allocate(
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
    lstm = spec.cell == "LSTM"
    return Results(
        out=empty(*lead, hidden, like=x, dtype=narrow),
        h=empty(*h0.shape, like=x, dtype=wide),
        c=empty(h0.shape[0] if lstm else 0, hidden, like=x, dtype=wide),
        v=unseen(0 if spec.merged else rows, width, like=x, dtype=narrow),
        u=unseen(rows, width, like=x, dtype=narrow),
        cells=unseen(rows if lstm else 0, hidden, like=x, dtype=wide),
        stats=empty(rows, engine.stats(spec), like=x, dtype=wide),
        statistics=empty(statistics_size(spec, steps, hidden), like=x, dtype=wide),
    )


def unfilled(*size: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate outputs of a fake kernel."""
    return like.new_empty(size, dtype=dtype)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    operands, given, masks, choices, (save,) = _split(
        arguments, Operands, FixedStatistics, Masks, Options
    )
    spec, engine = Spec.decode(choices.spec), engine_named(choices.engine)
    _check(spec, engine, operands, given, masks, choices.batch_sizes)
    return tuple(forward_chunks(spec, engine, operands, choices.batch_sizes, save, given, masks))


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
    x, hidden = operands.x, operands.w_hh.shape[1]
    packed, steps = batch_sizes is not None, _steps(x, batch_sizes)
    results = _allocate(operands, spec, engine, steps, save, engine.empty, memory.pooled_empty)
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
                after = cells[rows] if spec.cell == "LSTM" else None
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
            state = c if spec.cell == "LSTM" else None
            now = masks.part(rows)
            p.forward(Chunk(piece.sizes, terms, h, state, flat[rows], saved, places, now))
    return results


torch.library.impl("ln_zoo::recurrence", "CompositeExplicitAutograd", _forward)


@torch.library.register_fake("ln_zoo::recurrence")
def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    operands, given, masks, choices, (save,) = _split(
        arguments, Operands, FixedStatistics, Masks, Options
    )
    others = {**given._asdict(), **masks._asdict()}
    check_together(choices.batch_sizes, **operands._asdict(), **others)
    spec, steps = Spec.decode(choices.spec), _steps(operands.x, choices.batch_sizes)
    engine = engine_named(choices.engine)
    return tuple(_allocate(operands, spec, engine, steps, save, unfilled, unfilled))


# The backward


def _check_saved(
    spec: Spec, stats: int, steps: int, operands: Operands, grads: Grads, kept: SavedTensors
) -> None:
    x, h0, lead = operands.x, operands.h0, operands.x.shape[:-1]
    (width, hidden), rows, lstm = operands.w_hh.shape, lead.numel(), operands.c0 is not None
    narrow, wide = x.dtype, h0.dtype
    for name, a, size, dtype in (
        ("d_out", grads.d_out, (*lead, hidden), narrow),
        ("d_h", grads.d_h, tuple(h0.shape), wide),
        ("d_c", grads.d_c, tuple(h0.shape) if lstm else (0, hidden), wide),
        ("out", kept.out, (*lead, hidden), narrow),
        ("v", kept.v, (0 if spec.merged else rows, width), narrow),
        ("u", kept.u, (rows, width), narrow),
        ("cells", kept.cells, (rows if lstm else 0, hidden), wide),
        ("stats", kept.stats, (rows, stats), wide),
        ("statistics", kept.statistics, (statistics_size(spec, steps, hidden),), wide),
    ):
        check_form(name, a, size, dtype, x)


def _allocate_gradients(
    operands: Operands, needs: Sequence[bool], empty: Callable[..., Tensor]
) -> tuple[Tensor, ...]:
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
    grads, operands, given, masks, kept, choices, (needs,) = _split(
        arguments, Grads, Operands, FixedStatistics, Masks, SavedTensors, Options
    )
    batch_sizes, spec = choices.batch_sizes, Spec.decode(choices.spec)
    engine = engine_named(choices.engine)
    _check(spec, engine, operands, given, masks, batch_sizes)
    steps = _steps(operands.x, batch_sizes)
    _check_saved(spec, engine.stats(spec), steps, operands, grads, kept)
    return backward_chunks(spec, engine, operands, batch_sizes, kept, grads, needs, given, masks)


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
    packed, wide, steps = batch_sizes is not None, h0.dtype, _steps(x, batch_sizes)
    needed: Any = Operands(*needs)  # type: ignore[arg-type]
    made = _allocate_gradients(operands, needs, engine.empty)
    gradients = Operands(*made)

    def of_state(d: Tensor | None, start: Tensor, target: Tensor) -> Tensor:
        found = target if target.numel() else start.new_empty(start.shape)
        return found.zero_() if d is None else found.copy_(d)

    def wanted(name: str) -> Tensor | None:
        there = getattr(operands, name) is not None and getattr(needed, name)
        return getattr(gradients, name).zero_() if there else None

    sums = Sums(*(wanted(name) for name in Sums._fields))
    dh = of_state(grads.d_h, h0, gradients.h0)
    dc = None
    if c0 is not None:
        assert gradients.c0 is not None
        dc = of_state(grads.d_c, c0, gradients.c0)
    dx = gradients.x.view(-1, x.shape[-1]) if needed.x else None

    out, v, u, cells, stats, statistics = kept
    flat, width, masks = out.view(-1, hidden), u.shape[1], _by_rows(masks, hidden)
    saved = Saved(None if spec.merged else v, u, None if c0 is None else cells, stats)
    found = split_statistics(statistics, spec, steps, hidden)
    for k, own in enumerate(found):
        # Products are saved centred.
        if own is not None and k in spec.product_places:
            found[k] = own._replace(mean=None)
    first, second = spec.products
    with no_autocast(x):
        p = steps_of_call or engine.prepare(spec, operands, backward=True)
        pieces = time_chunks(step_sizes(x, batch_sizes), p.rows_of_chunk(True), p.least_steps)
        longest = max(piece.count for piece in pieces)
        du_buffer = dv_buffer = engine.empty(longest, width, like=x, dtype=x.dtype, scratch="du")
        if not (spec.merged or p.one_gradient):
            dv_buffer = engine.empty(longest, width, like=x, dtype=x.dtype, scratch="dv")

        def total(of: Tensor, place: Rows | Examples) -> Tensor | None:
            if not of.numel():
                return None
            if of.dtype == wide and not (place.center and p.leaves_constants):
                return of
            return torch.empty_like(of, dtype=wide)

        dw_ih, dw_hh = total(gradients.w_ih, first), total(gradients.w_hh, second)
        d_inner = wanted("bias_inner")
        for piece in reversed(pieces):
            rows, last = piece.rows, piece is pieces[-1]
            now = masks.part(rows)
            h_prev = previous_rows(h0, flat, piece, now.reset)
            du, dv = du_buffer[: piece.count], dv_buffer[: piece.count]
            p.backward(
                ChunkGrads(
                    sizes=piece.sizes,
                    dout=None if grads.d_out is None else rows_of(grads.d_out, packed, piece),
                    dh=dh,
                    dc=dc,
                    saved=saved.part(rows),
                    h_prev=h_prev,
                    c_prev=None if c0 is None else previous_rows(c0, cells, piece, now.reset),
                    du=du,
                    dv=dv,
                    sums=sums,
                    places=_places(found, given, piece.steps) if spec.examples else Places(),
                    masks=now,
                )
            )
            if dw_hh is not None:
                if masks.dropout is not None:
                    room = engine.empty(*h_prev.shape, like=x, dtype=x.dtype, scratch="dropped")
                    h_prev = dropped_rows(h_prev, masks.dropout, piece.sizes, room)
                if second.batch:
                    h_prev, _ = p.without_means(h_prev, piece.sizes, wide)
                p.add_weight_gradient(du, h_prev, dw_hh, last)
            if dw_ih is not None:
                inputs = p.inputs(rows_of(x, packed, piece), piece)
                if first.batch:
                    inputs, _ = p.without_means(inputs, piece.sizes, wide)
                p.add_weight_gradient(dv, inputs, dw_ih, last)
            if d_inner is not None:
                d_inner.add_(dv.sum(0, dtype=wide))
            if dx is not None:
                p.input_gradient(dv, dx[rows])
                if first.batch:
                    p.without_means(dx[rows], piece.sizes, wide, out=dx[rows])

    for target, value, of in ((gradients.w_ih, dw_ih, first), (gradients.w_hh, dw_hh, second)):
        if value is not None and value is not target:
            _ = centred(value, of, target) if p.leaves_constants else target.copy_(value)
    if d_inner is not None and p.leaves_constants:
        d_inner.copy_(centred(d_inner.unsqueeze(1), first).squeeze(1))
    return made


@torch.library.register_fake("ln_zoo::recurrence_backward")
def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, choices, (needs,) = _split(
        arguments, Grads, Operands, FixedStatistics, Masks, SavedTensors, Options
    )
    named = {name: a for part in tensors for name, a in part._asdict().items()}
    check_together(choices.batch_sizes, **named)
    return _allocate_gradients(tensors[1], needs, unfilled)


# Autograd


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    operands, given, masks, choices, (ctx.saves,) = _split(
        inputs, Operands, FixedStatistics, Masks, Options
    )
    ctx.choices = choices[1:]
    out, _, _, *kept = output
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    if ctx.saves:
        ctx.save_for_backward(*operands, *given, *masks, choices.batch_sizes, out, *kept)


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if not ctx.saves:
        raise RuntimeError(
            "ln_zoo::recurrence was called with save=False and keeps nothing for a backward; "
            "call it with save=True"
        )
    saved = ctx.saved_tensors  # read once: activation checkpointing refuses a second time
    operands, given, masks, (batch_sizes, *kept) = _split(saved, Operands, FixedStatistics, Masks)
    needs = [bool(n) for n in ctx.needs_input_grad[: len(operands)]]
    rest: tuple[None, ...] = (None,) * (len(ctx.needs_input_grad) - len(operands))
    if torch.is_grad_enabled():
        spec = Spec.decode(ctx.choices[0])
        again = differentiable(
            lambda found: replay(spec, Operands(*found), batch_sizes, given, masks),
            operands,
            grads[:3],
            needs,
        )
        return (*again, *rest)
    found = torch.ops.ln_zoo.recurrence_backward(
        *grads[:3], *operands, *given, *masks, *kept, batch_sizes, *ctx.choices, needs
    )
    return (*(g if wanted else None for g, wanted in zip(found, needs, strict=True)), *rest)


torch.library.register_autograd("ln_zoo::recurrence", _gradients, setup_context=_keep)


class _Recurrence(torch.autograd.Function):
    forward = staticmethod(_forward)
    setup_context = staticmethod(_keep)
    backward = staticmethod(_gradients)


def recurrence(*arguments: Any) -> tuple[Tensor, ...]:
    """Call ``ln_zoo::recurrence`` (its arguments, then ``save``), if possible undispatched.

    Dispatch takes a sixth of the host time of a training step on a GPU.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or any(isinstance(a, Tensor) and type(a) not in _PLAIN for a in arguments)
    ):
        found: tuple[Tensor, ...] = torch.ops.ln_zoo.recurrence(*arguments)
        return found
    if arguments[-1]:
        return cast("tuple[Tensor, ...]", _Recurrence.apply(*arguments))
    with torch.no_grad():
        return _forward(*arguments)


_PLAIN = (Tensor, torch.nn.Parameter)


def differentiable(
    replayed: Callable[[Sequence[Any]], Sequence[Tensor | None]],
    operands: Sequence[Any],
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of an operator through autograd, differentiable again in grad mode.

    ``replayed`` computes output and final states from the operands, x first. ``grads``, theirs, may
    be `batched`; ``needs``: which operands need gradients.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad(), no_autocast(operands[0]):
        # Views cut the history of states, which belongs to earlier calls.
        operands = [a.view_as(a) if need else a for a, need in zip(operands, needs, strict=True)]
        results = replayed(operands)
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
                create_graph=again,
                allow_unused=True,
            )
        )
    return [next(found) if need else None for need in needs]


def batched(grads: Sequence[Tensor | None]) -> bool:
    """Whether a gradient is a batched tensor (`torch.func.vmap`), which C++ could not read."""
    return any(d is not None and (_is_legacy_batched(d) or _is_batched(d)) for d in grads)


_is_batched = torch._C._functorch.is_batchedtensor
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor


def check_first_order(kernels: str, grads: Sequence[Tensor | None]) -> None:
    """Reject double backward and batched gradients, for operators without a generic loop.

    RuntimeError in grad mode, or for batched gradients; names the operator ``kernels``.
    """
    if torch.is_grad_enabled():
        what, where = "gradients of gradients", "create_graph=True"
    elif batched(grads):
        what, where = "batches of gradients", "is_grads_batched=True, vectorize=True, vmap"
    else:
        return
    raise RuntimeError(
        f"{kernels} have no {what}: set the environment variable LN_ZOO_KERNELS=0 where you ask "
        f"for them ({where})"
    )


def replay(
    spec: Spec,
    operands: Operands,
    batch_sizes: Tensor | None,
    given: FixedStatistics = NO_STATISTICS,
    masks: Masks = NO_MASKS,
) -> tuple[Tensor, ...]:
    """Compute the operator's output and final states with the generic loop; differentiable."""
    hidden, x, w_ih = operands.w_hh.shape[1], operands.x, operands.w_ih
    affine = (operands.gain_input, operands.gain_recurrent, operands.gain_out, operands.shift_out)
    sites = normalized_sites(spec, hidden, *affine, given=given)
    bias = operands.bias
    if bias is None:
        bias = operands.h0.new_zeros(len(operands.w_hh))
    bias_hh = torch.zeros_like(bias)
    if operands.bias_hn is not None:
        bias_hh = torch.cat([bias_hh[hidden:], operands.bias_hn])
    if operands.bias_inner is not None:  # weight of a constant input 1
        x = torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)
        w_ih = torch.cat([w_ih, operands.bias_inner.to(w_ih.dtype).unsqueeze(1)], 1)
    states = (operands.h0,) if operands.c0 is None else (operands.h0, operands.c0)
    output, final = scan(
        spec.computed,
        x,
        None if batch_sizes is None else batch_sizes.tolist(),
        states,
        Weights(w_ih, operands.w_hh, bias, bias_hh, noise=noise_of(spec, masks)),
        sites,
        spec.examples,
        masks.reset,
    )
    return output, *final


def noise_of(spec: Spec, masks: Masks) -> Noise:
    """Noise for the generic loop; expected zoneout is part of the spec."""
    held = masks.zoneout_h, masks.zoneout_c
    pairs = zip(held, spec.zoneout, spec.computed.states, strict=False)
    return Noise(masks.dropout, tuple(q if mask is None else mask for mask, q, _ in pairs))


def normalized_sites(
    spec: Spec, hidden: int, *affine: Tensor | None, given: FixedStatistics = NO_STATISTICS
) -> Sites:
    """Normalisation functions of a cell's places, by role; differentiable.

    ``affine``: gains of the input term, the recurrent term and the output, shift of the output.
    """
    gain_input, gain_recurrent, gain_out, shift_out = affine
    by_input, by_recurrent, by_out = given

    def site(
        place: Rows | Examples,
        gain: Tensor | None,
        rows: Tensor | None,
        shift: Tensor | None = None,
    ) -> Callable[[Tensor, int | None], Tensor]:
        if isinstance(place, Examples):
            return lambda a, step: normalized_over_examples(a, place, rows, gain, shift, step)
        return lambda a, step: normalized_rows(a, place, gain, shift, hidden)

    found = (
        site(spec.input, gain_input, by_input),
        site(spec.recurrent, gain_recurrent, by_recurrent),
        site(spec.out, gain_out, by_out, shift_out),
    )
    by_role = zip(form_of(spec.computed).roles, found, strict=True)
    return {"input": lambda a, step: a} | {role: at for role, at in by_role if role is not None}


def normalized_rows(
    a: Tensor, rows: Rows, gain: Tensor | None, shift: Tensor | None, hidden: int
) -> Tensor:
    """Normalise rows (N, F), with gain and shift (F,); differentiable."""
    if not rows.scale:
        return a
    a = a.to(torch.promote_types(a.dtype, torch.float32))
    parts = []
    for part in a.split([hidden * n for n in rows.groups], dim=-1):
        if rows.center:
            part = part - part.mean(-1, keepdim=True)
        parts.append(part * torch.rsqrt(part.square().mean(-1, keepdim=True) + rows.eps))
    return _affine(torch.cat(parts, dim=-1), gain, shift)


def normalized_over_examples(
    a: Tensor,
    examples: Examples,
    given: Tensor | None,
    gain: Tensor | None,
    shift: Tensor | None,
    step: int | None,
) -> Tensor:
    """Normalise rows (n, F) of one step over examples, with gain and shift (F,); differentiable.

    ``given`` are mean and variance in rows (2, K, F), unless batch statistics are used.
    """
    a = a.to(torch.promote_types(a.dtype, torch.float32))
    if examples.batch:
        var, mean = torch.var_mean(a, 0, correction=examples.correction)
    else:
        assert given is not None
        assert step is not None
        mean, var = given[:, min(step, given.shape[1] - 1)]
    return _affine((a - mean) * torch.rsqrt(var + examples.eps), gain, shift)


def _affine(a: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
    a = a if gain is None else a * gain
    return a if shift is None else a + shift
