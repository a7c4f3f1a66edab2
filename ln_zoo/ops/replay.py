"""The generic loop in place of an operator, for double backward and batched gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ln_zoo.ops.cells import Sites, Weights
from ln_zoo.ops.engines.base import NO_MASKS, NO_STATISTICS, FixedStatistics, Masks
from ln_zoo.ops.lowering import form_of
from ln_zoo.ops.precision import no_autocast
from ln_zoo.ops.recurrence import scan
from ln_zoo.ops.regularization import Noise
from ln_zoo.ops.spec import Examples, Operands, Rows, Spec


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
