"""Noise in the recurrence, around the step of any cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ln_zoo.ops.cells import Cell, Sites, States, Weights


def with_zoneout(
    cell: Cell, p: Sequence[float], steps: int, states: States, training: bool
) -> Cell:
    """The cell whose states stay as they were, each number with this probability.

    Krueger et al. (2017, arXiv 1606.01305, section 3): ``s' = d * s + (1 - d) * step(s)`` with d
    from a Bernoulli distribution, drawn for each number of each state and each step; in evaluation
    d is its expectation. A step's own states do not see each other's d: an LSTM's h is that of the
    whole new c.

    Args:
        cell: the cell.
        p: probability for each state.
        steps: T.
        states: those that the sequences begin with, (N, F) each.
        training: whether to draw.
    """
    kept: list[Tensor | None] = [
        torch.empty(steps, *s.shape, dtype=torch.bool, device=s.device).bernoulli_(q)
        if training and q
        else None
        for q, s in zip(p, states, strict=True)
    ]

    def step(wx: Tensor, before: States, w: Weights, sites: Sites, t: int | None) -> States:
        after = cell.step(wx, before, w, sites, t)
        found = []
        for q, old, new, mask in zip(p, before, after, kept, strict=True):
            if mask is not None:
                assert t is not None
                new = torch.where(mask[t, : len(new)], old, new)
            elif q:
                new = new + q * (old - new)
            found.append(new)
        return tuple(found)

    return replace(cell, step=step)


def dropout_mask(p: float, like: Tensor) -> Tensor:
    """Zeros with probability p, else 1 / (1 - p), float32 at least, in the shape of a state."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.empty_like(like, dtype=dtype).bernoulli_(1 - p).div_(1 - p)
