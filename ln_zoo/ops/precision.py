"""Autocast around kernels."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """Dtype of matrix products with x: autocast's if enabled, else the dtype of x."""
    kind = x.device.type
    if x.dtype == torch.float64 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Disable autocast: operands already have their final dtype."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()
