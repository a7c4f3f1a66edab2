"""Test cases to subclass: name what is under test, and pytest runs every check on it.
`CellCase` is for recurrent cells, `DataCase` for datasets, `CallbackCase` for callbacks. `NormCase`
is for norms, and is used like this:

    from dataclasses import dataclass

    import torch
    from ln_zoo.norms import Norm
    from ln_zoo.testing import NormCase


    @dataclass(frozen=True)
    class MyNorm(Norm):
        eps: float = 1e-5
        invariances = frozenset(
            {"weight_matrix_rescaling", "dataset_rescaling", "example_rescaling"}
        )

        def init_params(self, site):
            site.add_affine(gain=1.0)

        def normalize(self, site, a, step=None):
            return site.affine(a * torch.rsqrt(site.mean(a.square()) + self.eps))


    class TestMyNorm(NormCase):
        norm = MyNorm()

Needs pytest: ``pip install 'ln-zoo[test]'``.
"""

from __future__ import annotations

import importlib.util
from typing import Any

if importlib.util.find_spec("pytest") is None:
    raise ImportError("ln_zoo.testing needs pytest: pip install 'ln-zoo[test]'")

from ln_zoo.testing.cell_case import CellCase
from ln_zoo.testing.layer_case import TOLERANCES
from ln_zoo.testing.norm_case import LAYERS, NormCase, invariance_deviations

__all__ = [
    "LAYERS",
    "TOLERANCES",
    "CallbackCase",
    "CellCase",
    "DataCase",
    "NormCase",
    "invariance_deviations",
]


def __getattr__(name: str) -> Any:
    """Import `DataCase` and `CallbackCase` on first use, since they need Lightning."""
    if name == "DataCase":
        from ln_zoo.testing.data_case import DataCase

        return DataCase
    if name == "CallbackCase":
        from ln_zoo.testing.callback_case import CallbackCase

        return CallbackCase
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
