"""Zoneout and recurrent dropout: sample masks, and apply them to states.

Masks are sampled by torch's generator before a kernel runs, so they depend on the seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Noise(NamedTuple):
    """Recurrent dropout and zoneout of one direction of one layer."""

    # Mask of h in recurrent products at all steps, zeros and 1 / (1 - p), (N, H or P), float32 or
    # wider.
    dropout: Tensor | None = None
    # For each state, in the cell's order, a boolean mask of elements that keep their previous
    # value, (T, N, F), or (total, F) for packed data; or the expected share of them, 0.0 for no
    # zoneout.
    zoneout: tuple[Tensor | float, ...] = ()

    @property
    def kinds(self) -> list[str]:
        found = {
            "recurrent dropout": self.dropout is not None,
            "zoneout": any(isinstance(d, Tensor) or d for d in self.zoneout),
        }
        return [name for name, there in found.items() if there]

    @property
    def sampled(self) -> bool:
        return self.dropout is not None or any(isinstance(d, Tensor) for d in self.zoneout)

    @property
    def shares(self) -> Noise:
        return Noise(None, tuple(0.0 if isinstance(d, Tensor) else d for d in self.zoneout))


def draw_noise(
    zoneout: Sequence[float],
    dropout: float,
    states: Sequence[Tensor],
    lead: Sequence[int],
    training: bool,
) -> list[Noise]:
    """Sample the noise of one call, for each direction of each layer.

    ``zoneout`` is the probability for each state that an element keeps its previous value,
    ``dropout`` that an element of h is zeroed in recurrent products. ``lead`` is T and N, or the
    rows of packed data. In evaluation there is no dropout, and zoneout is its expectation (Krueger
    et al. 2017, section 3.2).
    """
    runs = len(states[0])
    masks = dropout_mask(dropout, states[0]) if dropout and training else [None] * runs
    held = [
        bernoulli(q, (runs, *lead, s.shape[2]), s.device) if q and training else [q] * runs
        for q, s in zip(zoneout, states, strict=True)
    ]
    return [Noise(mask, tuple(d[i] for d in held)) for i, mask in enumerate(masks)]


def bernoulli(p: float, size: Sequence[int], device: torch.device) -> Tensor:
    """True with probability p, rounded to a multiple of 2^-16; boolean.

    On CPUs, five times as fast as `torch.Tensor.bernoulli_`, a tenth of a training step.
    """
    whole, below = 2**16, round(p * 2**16)
    if device.type != "cpu":
        # Rounded, as on CPUs.
        return torch.empty(size, dtype=torch.bool, device=device).bernoulli_(below / whole)
    if below == whole:  # exceeds 16 bits
        return torch.ones(size, dtype=torch.bool, device=device)
    count = math.prod(size)
    # Each integer is viewed as four of 16 bits.
    drawn = torch.randint(-(2**63), 2**63 - 1, (-(-count // 4),), device=device)
    return drawn.view(torch.int16)[:count].lt(below - whole // 2).view(size)


def dropout_mask(p: float, like: Tensor) -> Tensor:
    """Zeros with probability p, else 1 / (1 - p), float32 or wider, in the shape of a tensor."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return bernoulli(1 - p, like.shape, like.device).to(dtype).div_(1 - p)


def zoneout_mix(before: Tensor, after: Tensor, d: Tensor | float) -> Tensor:
    """``d * before + (1 - d) * after`` for states (n, F) (Krueger et al. 2017, section 3).

    d is a boolean mask, (n, F), or the share that is kept.
    """
    if isinstance(d, Tensor):
        return torch.where(d, before, after)
    return after + d * (before - after) if d else after
