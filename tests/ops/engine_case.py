"""Operands and results of one engine, in memory between NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from accuracy import moved
from equations import random_operands, without_input_bias
from torch import Tensor

from ln_zoo.ops.spec import Operands, Spec

F64, F32 = torch.float64, torch.float32
#: Elements on each side.
GUARD = 8


def between_nans(a: Tensor) -> Tensor:
    """The same numbers in memory that has NaN on both sides."""
    around = float("nan") if a.is_floating_point() else True
    memory = torch.full((a.numel() + 2 * GUARD,), around, dtype=a.dtype)
    inner = memory[GUARD:-GUARD].view(a.shape)
    inner.copy_(a)
    return inner


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


def shifted(o: Operands, k: int) -> Operands:
    return Operands(*(moved(a, k) for a in o))


def with_gradients(
    run: Callable[..., tuple[Tensor, ...]], spec: Spec, o: Operands, sizes: Sequence[int], seed: int
) -> dict[str, Tensor]:
    """Outputs, final states and the gradients of all operands for random gradients of those."""
    results = run(spec, o, sizes)
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(r.shape, dtype=F64, generator=generator).to(r.dtype) for r in results]
    names = [name for name, a in zip(Operands._fields, o, strict=True) if a is not None]
    found = torch.autograd.grad(results, [getattr(o, name) for name in names], grads)
    named = dict(zip(("out", "h", "c"), results, strict=False))
    named |= dict(zip((f"d {name}" for name in names), found, strict=True))
    if spec.joint and spec.cell == "GRU" and o.bias is not None:
        named["d bias"] = named["d bias"][: 2 * len(o.w_hh) // 3]
    return named
