"""No normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ln_zoo.norms.base import Norm


@dataclass(frozen=True)
class Identity(Norm):
    """No normalisation: layers have torch's state dict, outputs and gradients.

    Example:
        >>> from ln_zoo.layers import LSTM
        >>> list(LSTM(3, 4, norm=Identity()).state_dict())
        ['weight_ih_l0', 'weight_hh_l0', 'bias_ih_l0', 'bias_hh_l0']
    """

    invariances: ClassVar[frozenset[str] | None] = frozenset()
