"""Layer normalisation for PyTorch Lightning: normalised layers and a zoo of pretrained models.

Subpackages are imported on first use:

    >>> import ln_zoo
    >>> import torch
    >>> output, (h, c) = ln_zoo.LSTM(3, 4, norm=ln_zoo.LayerNorm())(torch.randn(5, 2, 3))
    >>> output.shape
    torch.Size([5, 2, 4])
    >>> ln_zoo.norms.RMSNorm(eps=1e-6)
    RMSNorm(gain=1.0, eps=1e-06, per_block=False)
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ln_zoo._version import __version__

if TYPE_CHECKING:
    from ln_zoo import (
        analysis,
        callbacks,
        conversion,
        data,
        export,
        layers,
        metrics,
        models,
        norms,
        ops,
        plots,
        zoo,
    )
    from ln_zoo.conversion import adopt_, denormalize_, from_dialect, normalize_, to_dialect
    from ln_zoo.layers import (
        GRU,
        LSTM,
        RNN,
        Conv2d,
        GRUCell,
        Linear,
        LSTMCell,
        RNNCell,
        data_dependent_init,
        orthogonal_init,
    )
    from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, Site, WeightNorm
    from ln_zoo.zoo import list_models, load

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "BatchNorm",
    "Conv2d",
    "GRUCell",
    "Identity",
    "LSTMCell",
    "LayerNorm",
    "Linear",
    "Norm",
    "RMSNorm",
    "RNNCell",
    "Site",
    "WeightNorm",
    "__version__",
    "adopt_",
    "analysis",
    "callbacks",
    "conversion",
    "data",
    "data_dependent_init",
    "denormalize_",
    "export",
    "from_dialect",
    "layers",
    "list_models",
    "load",
    "metrics",
    "models",
    "normalize_",
    "norms",
    "ops",
    "orthogonal_init",
    "plots",
    "to_dialect",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        if importlib.util.find_spec(f"ln_zoo.{name}"):
            return importlib.import_module(f"ln_zoo.{name}")
        # Neither a list of models nor a layer imports what the other needs.
        rooms = ("zoo",) if name in ("list_models", "load") else ("norms", "layers", "conversion")
        for room in rooms:
            found = getattr(importlib.import_module(f"ln_zoo.{room}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
