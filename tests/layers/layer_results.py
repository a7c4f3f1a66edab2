"""Results of layers as flat lists of tensors, their gradients, and random parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def flat(value: Any) -> list[Tensor]:
    """The tensors of nested tuples; the data of a packed sequence, nothing for None."""
    if isinstance(value, PackedSequence):
        return [value.data]
    if value is None or isinstance(value, Tensor):
        return [] if value is None else [value]
    return [a for part in value for a in flat(part)]


def gradients(results: Any, sources: Iterable[Tensor]) -> list[Tensor]:
    """Gradients of a sum that weighs every element of the results differently."""
    generator = torch.Generator().manual_seed(5)
    loss = sum(
        (a * torch.randn(a.shape, generator=generator).to(a.dtype)).sum() for a in flat(results)
    )
    found = torch.autograd.grad(loss, list(sources), allow_unused=True, materialize_grads=True)
    return list(found)


def randomised(module: Any, size: float = 0.3) -> Any:
    """The module, with noise added to its parameters."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return module


def assert_close(one: Any, two: Any, tolerance: float = 1e-11, atol: float | None = None) -> None:
    """Compare results; ``tolerance`` is relative, and absolute unless ``atol`` is given."""
    atol = tolerance if atol is None else atol
    torch.testing.assert_close(flat(one), flat(two), rtol=tolerance, atol=atol)
