"""What a strategy does to rows of summed inputs, written down as data.

Kernels are chosen and fed by these records alone; they never see a strategy object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowNorm:
    """One normalisation of rows (N, F): ``gain * (a - mean) / sqrt(mean square + eps) + shift``.

    Args:
        groups: sizes of the runs of features that share statistics; they sum to F.
        scale: whether a row is divided by its root mean square. ``False`` means the identity:
            the row passes unchanged and every other field is without effect.
        center: whether the mean is taken off first (layer norm) or not (RMS norm).
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


#: What happens at each place of a cell, by role; ``None``: only the strategy knows.
Records = Mapping[str, RowNorm | None]
