"""Norms as data: kernels are selected and called from these records and never see a norm object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowNorm:
    """Normalisation of rows (N, F): ``gain * (a - mean) / sqrt(mean square + eps) + shift``."""

    groups: tuple[int, ...]  # sizes of the runs of features that share statistics; they sum to F
    scale: bool = False  # whether a row is divided by its root mean square; False: the identity
    center: bool = False  # whether the mean is subtracted first (layer norm) or not (RMS norm)
    eps: float = 0.0
    gain: Tensor | None = None  # (F,), or None for 1
    shift: Tensor | None = None  # (F,), or None for 0

    @property
    def identity(self) -> bool:
        return not self.scale


@dataclass(frozen=True)
class StepNorm:
    """Normalisation over examples, at each time step t of a recurrent layer separately.

    In the rows (n, F) of the n examples active at t, each feature becomes ``gain * (a - mean) /
    sqrt(variance + eps) + shift``. If ``batch`` and n > 1, mean and variance are those of the n
    examples, with gradients; otherwise they come from ``population``.

    The norm owns the statistics and receives new ones through ``track``. Calls are in order of
    time: ``population`` may depend on earlier calls of ``track``.

    Args:
        features: F.
        batch: whether to use batch statistics, as in training.
        eps: added to the variance, inside the root.
        correction: 0 or 1: the sum of squares is divided by n minus this.
        gain: (F,), or ``None`` for 1.
        shift: (F,), or ``None`` for 0.
        check: called first if ``batch``, with the number of examples of the first step; raises if
            they are too few.
        population: ``population(first, steps)`` returns mean and variance for steps from ``first``
            on: new tensors (K, F) with ``1 <= K <= steps``. Step i uses row ``min(i, K - 1)``.
        track: ``track(first, sizes, mean, var)`` receives the numbers n of examples of steps from
            ``first`` on, and their means and biased variances, (steps, F), detached.
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
        return False


#: The norm at one place; None if it has no record and must be called.
Record = RowNorm | StepNorm | None
#: The norm at each place of a cell, by role.
Records = Mapping[str, Record]
