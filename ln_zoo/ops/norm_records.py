"""Norms as data: how a norm transforms summed inputs.

Kernels are selected and called from these records; they never see a norm object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowNorm:
    """One normalisation of rows (N, F): ``gain * (a - mean) / sqrt(mean square + eps) + shift``.

    Args:
        groups: sizes of the runs of features that share statistics; they sum to F.
        scale: whether a row is divided by its root mean square. ``False`` means the identity:
            the row passes unchanged and every other field is without effect.
        center: whether the mean is subtracted first (layer norm) or not (RMS norm).
        eps: added to the mean square, inside the root.
        gain: multiplies the normalised row, shape (F,), or ``None`` for 1.
        shift: added last, shape (F,), or ``None`` for 0.

    Example:
        >>> RowNorm(groups=(8,)).identity
        True
        >>> RowNorm(groups=(8,), scale=True, center=True).identity
        False
    """

    groups: tuple[int, ...]
    scale: bool = False
    center: bool = False
    eps: float = 0.0
    gain: Tensor | None = None
    shift: Tensor | None = None

    @property
    def identity(self) -> bool:
        """Whether rows pass unchanged."""
        return not self.scale


@dataclass(frozen=True)
class StepNorm:
    """One normalisation over examples, at each time step t of a recurrent layer separately.

    Of the rows (n, F) of the n examples active at t, each feature becomes
    ``gain * (a - mean) / sqrt(variance + eps) + shift``. Where ``batch`` is set and n is at least
    2, mean and variance are those of the n examples, and gradients flow through them; elsewhere
    they are those that ``population`` gives.

    Statistics are kept by the norm, which receives new ones through ``track``. The order of calls
    is that of time: ``population`` may depend on what ``track`` received for earlier steps.

    Args:
        features: F.
        batch: whether the examples' own statistics are used, as in training.
        eps: added to the variance, inside the root.
        correction: 0 or 1: the sum of squares is divided by n minus this.
        gain: multiplies the normalised rows, shape (F,), or ``None`` for 1.
        shift: added last, shape (F,), or ``None`` for 0.
        check: ``check(n)`` is called first where ``batch`` is set, with the number of examples of
            the first step; it raises where they are too few.
        population: ``population(first, steps)`` gives mean and variance for that many steps from
            step ``first`` on: new tensors (K, F) with ``1 <= K <= steps``. The i-th of these
            steps, counted from 0, uses row ``min(i, K - 1)``.
        track: ``track(first, sizes, mean, var)`` receives the number n of examples of consecutive
            steps from step ``first`` on, and their means and biased variances, (steps, F), without
            gradient.
    """

    features: int
    batch: bool
    eps: float
    correction: int
    gain: Tensor | None
    shift: Tensor | None
    check: Callable[[int], None]
    population: Callable[[int, int], tuple[Tensor, Tensor]]
    track: Callable[[int, Sequence[int], Tensor, Tensor], None]

    @property
    def identity(self) -> bool:
        """Whether rows pass unchanged: never."""
        return False


#: The norm at one place; None if it has no record and must be called.
Record = RowNorm | StepNorm | None
#: The norm at each place of a cell, by role.
Records = Mapping[str, Record]
