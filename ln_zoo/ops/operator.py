"""One direction of one layer as a torch operator; every recurrent engine runs inside it.

The operators have no side effects. Double backward reruns the generic loop; batched gradients run
one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ln_zoo.ops.checks import (
    check_form,
    check_given,
    check_masks,
    check_operands,
    check_together,
)
from ln_zoo.ops.chunks import (
    Grads,
    Results,
    SavedTensors,
    allocate,
    allocate_gradients,
    backward_chunks,
    count_steps,
    forward_chunks,
    statistics_size,
    unfilled,
)
from ln_zoo.ops.engines.base import Engine, FixedStatistics, Masks
from ln_zoo.ops.registry import engine_named
from ln_zoo.ops.replay import differentiable, replay
from ln_zoo.ops.spec import Examples, Operands, Spec

# Schema


class Options(NamedTuple):
    """Arguments that are not tensors of the layer: the numbers of a `Spec`, and an engine."""

    batch_sizes: Tensor | None
    integers: Sequence[int]
    floats: Sequence[float]
    engine: str

    @property
    def spec(self) -> Spec:
        return Spec.of_numbers(tuple(self.integers), tuple(self.floats))


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
_CHOICES = "Tensor? batch_sizes, int[] integers, float[] floats, str engine"

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


def _check(
    spec: Spec,
    engine: Engine,
    operands: Operands,
    given: FixedStatistics,
    masks: Masks,
    batch_sizes: Tensor | None,
) -> None:
    check_operands(operands, spec, batch_sizes)
    needed = [isinstance(place, Examples) and not place.batch for place in spec.places]
    if any(needed) or any(a is not None for a in given):
        check_given(given, spec.widths(operands.w_hh.shape[1]), needed, operands.h0)
    if (masks.noise or any(spec.zoneout)) and (spec.examples or not engine.has_noise):
        raise RuntimeError(f"{engine.name} has neither zoneout nor recurrent dropout for {spec}")
    if masks.reset is not None and spec.examples:
        raise RuntimeError(f"{engine.name} has no resets for {spec}")
    check_masks(masks, spec, operands)


# The forward


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    operands, given, masks, choices, (save,) = _split(
        arguments, Operands, FixedStatistics, Masks, Options
    )
    spec, engine = choices.spec, engine_named(choices.engine)
    _check(spec, engine, operands, given, masks, choices.batch_sizes)
    return tuple(forward_chunks(spec, engine, operands, choices.batch_sizes, save, given, masks))


torch.library.impl("ln_zoo::recurrence", "CompositeExplicitAutograd", _forward)


@torch.library.register_fake("ln_zoo::recurrence")
def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    operands, given, masks, choices, (save,) = _split(
        arguments, Operands, FixedStatistics, Masks, Options
    )
    others = {**given._asdict(), **masks._asdict()}
    check_together(choices.batch_sizes, **operands._asdict(), **others)
    spec, steps = choices.spec, count_steps(operands.x, choices.batch_sizes)
    engine = engine_named(choices.engine)
    return tuple(allocate(operands, spec, engine, steps, save, unfilled, unfilled))


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


@torch.library.impl("ln_zoo::recurrence_backward", "CompositeExplicitAutograd")
def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    grads, operands, given, masks, kept, choices, (needs,) = _split(
        arguments, Grads, Operands, FixedStatistics, Masks, SavedTensors, Options
    )
    batch_sizes, spec = choices.batch_sizes, choices.spec
    engine = engine_named(choices.engine)
    _check(spec, engine, operands, given, masks, batch_sizes)
    steps = count_steps(operands.x, batch_sizes)
    _check_saved(spec, engine.stats(spec), steps, operands, grads, kept)
    return backward_chunks(spec, engine, operands, batch_sizes, kept, grads, needs, given, masks)


@torch.library.register_fake("ln_zoo::recurrence_backward")
def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, choices, (needs,) = _split(
        arguments, Grads, Operands, FixedStatistics, Masks, SavedTensors, Options
    )
    named = {name: a for part in tensors for name, a in part._asdict().items()}
    check_together(choices.batch_sizes, **named)
    return allocate_gradients(tensors[1], needs, unfilled)


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
        spec = Options(None, *ctx.choices).spec
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
