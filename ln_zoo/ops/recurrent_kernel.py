"""Adapt engines to kernels: run all layers and directions, one operator call for each.

When one example of a packed batch is left, a second operator call runs the remaining steps with the
norm's running statistics, which include the previous steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ln_zoo.ops import operator
from ln_zoo.ops.cells import States
from ln_zoo.ops.chunks import split_statistics
from ln_zoo.ops.engines.base import NO_MASKS, FixedStatistics, Masks
from ln_zoo.ops.lowering import in_slots, kernel_terms, make_spec, unsupported_reason
from ln_zoo.ops.norm_records import Record, StepNorm
from ln_zoo.ops.precision import product_dtype
from ln_zoo.ops.recurrence import RecurrentCall, run_layers
from ln_zoo.ops.registry import EngineKernel, Kernel, Task
from ln_zoo.ops.regularization import Noise
from ln_zoo.ops.spec import Examples, Operands, Spec


def no_custom_ops_reason() -> str | None:
    """Why custom operators cannot be called in the current tracing context, or None."""
    if is_exporting() or torch.jit.is_tracing():
        return "an exported program must run without this package"
    return no_fused_loop_reason()


def is_exporting() -> bool:
    """Whether torch.export is tracing, also inside torch.compile."""
    # torch.compile of torch 2.11 evaluates `torch.compiler.is_exporting()` to True, which would
    # force the generic loop; it reads the flag itself correctly.
    return bool(torch.compiler._is_exporting_flag)


def no_fused_loop_reason() -> str | None:
    """Why no fused loop, torch's included, supports the active transforms, or None."""
    # torch.compile evaluates both while tracing, and recompiles if they change.
    if torch._C._are_functorch_transforms_active():
        return "transforms of torch.func pass through elementary functions of torch alone"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives pass through elementary functions of torch alone"
    return None


def masks_of(noise: Noise) -> Masks:
    """Sampled masks for the operator; expected zoneout is part of the spec."""
    held = [d if isinstance(d, Tensor) else None for d in noise.zoneout]
    return Masks(noise.dropout, *held)


def given_statistics(
    spec: Spec, norms: Sequence[Record], first: int, steps: int, dtype: torch.dtype
) -> FixedStatistics:
    """Running statistics for consecutive steps, at places that do not use batch statistics."""
    return FixedStatistics(
        *(
            torch.stack(norm.population(first, steps)).to(dtype)
            if isinstance(norm, StepNorm) and not place.batch
            else None
            for place, norm in zip(spec.places, norms, strict=True)
        )
    )


def update_running_statistics(
    spec: Spec,
    norms: Sequence[Record],
    first: int,
    sizes: Sequence[int],
    statistics: Tensor,
    hidden: int,
) -> None:
    """Pass batch statistics of steps from ``first`` on to the norms; ``sizes``: their examples."""
    found = split_statistics(statistics, spec, len(sizes), hidden)
    for norm, own in zip(norms, found, strict=True):
        if isinstance(norm, StepNorm) and own is not None:
            assert own.mean is not None
            norm.track(first, sizes, own.mean, own.var)


class LayersKernel(Kernel, Protocol):
    """A kernel for all layers and directions of a recurrent layer.

    One with an attribute ``recomputes`` that is true follows ``RecurrentCall.recompute``; others
    get pieces of calls.
    """

    def unsupported_reason(self, call: RecurrentCall) -> str | None:
        """Why the kernel does not support this call, or None."""

    def __call__(self, call: RecurrentCall) -> tuple[Tensor, States]:
        """Outputs and final states."""


class Recurrence(EngineKernel):
    """A kernel from an engine, for cells whose sites have a record or no norm."""

    tasks: tuple[Task, ...] = ("layers",)

    def unsupported_reason(self, call: RecurrentCall) -> str | None:
        cell, records, x, _, _, weights, *_ = call
        if self.engine.device not in (None, x.device.type):
            return f"the input is on the device {x.device.type}, not on {self.engine.device}"
        reason = no_custom_ops_reason() or unsupported_reason(cell, records, weights, batch=True)
        if reason is not None:
            return reason
        dtype = product_dtype(x)
        for record, w in zip(records, weights, strict=True):
            spec, kinds = make_spec(cell, record, w), " and ".join(w.noise.kinds)
            if kinds and not self.engine.has_noise:
                return f"it has no {kinds}"
            if kinds and spec.examples:
                return f"its steps over a batch have no {kinds}"
            if call.reset is not None and spec.examples:
                return "its steps over a batch have no resets"
            examples = call.states[0].shape[-2]
            reason = self.engine.unsupported_reason(spec, x, w.hh, dtype, examples)
            if reason is not None:
                return reason
        return None

    def __call__(self, call: RecurrentCall) -> tuple[Tensor, States]:
        cell, records, _, batch_sizes, _, weights, *_ = call

        def run(
            i: int,
            x: Tensor,
            sizes: Sequence[int] | None,
            states: States,
            reset: Tensor | None,
        ) -> tuple[Tensor, States]:
            spec, operands = kernel_terms(cell, records[i], weights[i], x, states)
            final: Sequence[Tensor]
            if spec.examples:
                sizes = [x.shape[1]] * x.shape[0] if sizes is None else sizes
                norms = in_slots(cell, records[i])
                out, final = self._over_examples(spec, norms, operands, batch_sizes, sizes)
            else:
                masks = masks_of(weights[i].noise)._replace(reset=reset)
                out, *final, _ = self._operator(spec, operands, (None,) * 3, batch_sizes, masks)
            # States keep the dtype of weights, so splitting a sequence does not round.
            return out, tuple(state.to(weights[i].hh.dtype) for state in final)

        return run_layers(run, call)

    def _operator(
        self,
        spec: Spec,
        operands: Operands,
        given: Sequence[Tensor | None],
        batch_sizes: Tensor | None,
        masks: Masks = NO_MASKS,
    ) -> tuple[Tensor, ...]:
        save = torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in operands)
        out, h, c, *_, statistics = operator.recurrence(
            *operands, *given, *masks, batch_sizes, *spec.numbers(), self.name, save
        )
        return (out, h, statistics) if operands.c0 is None else (out, h, c, statistics)

    def _over_examples(
        self,
        spec: Spec,
        norms: Sequence[Record],
        operands: Operands,
        batch_sizes: Tensor | None,
        sizes: Sequence[int],
    ) -> tuple[Tensor, States]:
        for norm in norms:
            if isinstance(norm, StepNorm) and norm.batch:
                norm.check(sizes[0])
        cell, steps = spec.cell, len(sizes)
        together = steps - sizes.count(1) if any(p.batch for p in spec.places) else steps
        if together == steps:
            return self._some_steps(spec, norms, operands, batch_sizes, sizes, 0)
        # One example is not a batch: its steps use running statistics, which are known only after
        # the norm has received the previous steps'.
        assert batch_sizes is not None
        first, second, out = (p.given if isinstance(p, Examples) else p for p in spec.places)
        rows = sum(sizes[:together])
        heads = operands.x.split([rows, steps - together])
        head, final = self._some_steps(
            spec,
            norms,
            operands._replace(x=heads[0]),
            batch_sizes[:together],
            sizes[:together],
            0,
        )
        alone = [state[:1] for state in final]
        tail, ends = self._some_steps(
            Spec(cell, first, second, out),
            norms,
            operands._replace(x=heads[1], h0=alone[0], c0=alone[1] if alone[1:] else None),
            batch_sizes[together:],
            sizes[together:],
            together,
        )
        return torch.cat([head, tail]), tuple(
            torch.cat([end, state[1:]]) for end, state in zip(ends, final, strict=True)
        )

    def _some_steps(
        self,
        spec: Spec,
        norms: Sequence[Record],
        operands: Operands,
        batch_sizes: Tensor | None,
        sizes: Sequence[int],
        first: int,
    ) -> tuple[Tensor, States]:
        given = given_statistics(spec, norms, first, len(sizes), operands.h0.dtype)
        out, *final, statistics = self._operator(spec, operands, given, batch_sizes)
        update_running_statistics(spec, norms, first, sizes, statistics, operands.w_hh.shape[1])
        return out, tuple(final)
