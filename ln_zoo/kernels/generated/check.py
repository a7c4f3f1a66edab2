"""Compare a new kernel with the generic loop before it is used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ln_zoo.kernels.generated import operator
from ln_zoo.kernels.generated.direction import Direction, Tensors
from ln_zoo.ops.precision import no_autocast

#: Largest difference, as a part of the largest element, in float32 and with products in bfloat16.
TOLERANCE, NARROW_TOLERANCE = 2e-3, 0.2
_STEPS, _EXAMPLES = 2, 3
_NAMES = ("x", "weight_ih", "weight_hh", "weight_hr")


def difference(d: Direction, like: Tensors) -> str | None:
    """What differs in outputs and gradients of two steps, or None."""
    forward, backward = operator.passes(d)
    with no_autocast(like.x), torch.inference_mode(False), torch.enable_grad():
        generator = torch.Generator().manual_seed(0)
        t = _tensors(d, like, generator)
        d = d._replace(sizes=None)
        with torch.no_grad():  # to states that the cell can have: a counter is never negative
            _, *reached = operator._replay(d, t.flat())
        t = t._replace(states=tuple(s.requires_grad_() for s in reached))
        flat = t.flat()
        needs = [a is not None and a.requires_grad for a in flat]
        with torch.no_grad():
            out, finals, saved = forward(d, t, saves=True)
            grads: list[Tensor | None] = [_normal(a, generator) for a in (out, *finals)]
            found = [out, *finals, *backward(d, t, saved, grads, needs)]
            alone, *_ = forward(d, t, saves=False)
        expected = operator._replay(d, flat)
        pairs = zip(expected, grads, strict=True)
        terms = [(a * g).sum() for a, g in pairs if a.requires_grad and g is not None]
        wanted = [a for a, need in zip(flat, needs, strict=True) if a is not None and need]
        loop = iter(torch.autograd.grad(torch.stack(terms).sum(), wanted, allow_unused=True))
        expected_grads = [next(loop) if need else None for need in needs]
        names = ["output", *(f"state {s}" for s in d.cell.states), *_names(d)]
        tolerance = NARROW_TOLERANCE if d.narrow else TOLERANCE
        both = zip(names, found, [*expected, *expected_grads], strict=True)
        for name, a, b in [*both, ("output without gradients", alone, expected[0])]:
            if not _close(a, b, tolerance):
                return name
    return None


def _names(d: Direction) -> list[str]:
    states = [f"the gradient of state {s}" for s in d.cell.states]
    own = [f"the gradient of parameter {i}" for i in range(len(d.parameters))]
    masks = ["a mask"] * (2 + len(d.form.zoneout))
    return [*(f"the gradient of {name}" for name in _NAMES), *states, *own, *masks]


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator).to(like)


def _tensors(d: Direction, like: Tensors, generator: torch.Generator) -> Tensors:
    """Random tensors of two steps from zeros, with parameters near those of the call."""
    trace = d.kernel.trace

    def near(a: Tensor) -> Tensor:
        a = a.detach()
        found = a + 0.1 * _normal(a, generator) * a.abs().clamp(min=0.1)
        return found.requires_grad_()

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(like.x.device).requires_grad_()

    def mask(*size: int, share: float) -> Tensor:
        return (torch.rand(size, generator=generator) < share).to(like.x.device)

    weights: Sequence[Tensor | None] = (like.w_ih, like.w_hh, like.w_hr)
    own = []
    for a, original in zip(like.parameters, d.parameters, strict=True):
        is_parameter = isinstance(original, torch.nn.Parameter) or original.requires_grad
        own.append(near(a) if is_parameter else a.detach())
    form, lead = d.form, (_STEPS, _EXAMPLES)
    w_ih, w_hh, w_hr = (None if a is None else near(a) for a in weights)
    assert w_ih is not None
    assert w_hh is not None
    return Tensors(
        random(*lead, like.x.shape[-1]),
        w_ih,
        w_hh,
        w_hr,
        tuple(torch.zeros(_EXAMPLES, width, device=like.x.device) for width in trace.widths),
        tuple(own),
        2 * mask(_EXAMPLES, trace.widths[0], share=0.5).float() if form.drops else None,
        mask(_STEPS * _EXAMPLES, share=0.3) if form.resets else None,
        tuple(
            mask(*lead, width, share=0.4) if share is None else None
            for share, width in zip(form.zoneout, trace.widths, strict=False)
        ),
    )


def _close(a: Tensor | None, b: Tensor | None, tolerance: float) -> bool:
    if a is None or b is None:
        # The loop's gradient of what does not matter is None or zero.
        found = b if a is None else a
        return found is None or not bool(found.any())
    a, b = a.detach(), b.detach()
    scale = float(b.abs().max()) if b.numel() else 0.0
    if not scale < float("inf"):
        return bool((a.isfinite() == b.isfinite()).all())
    return bool(((a - b).abs() <= tolerance * scale + 1e-6).all())
