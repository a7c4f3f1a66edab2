"""Normalised recurrent layers in reinforcement learning libraries.

`LSTMPolicy` requires the package ``sb3-contrib``, `LSTMModule` and `GRUModule` require ``torchrl``;
each is imported on first use. No other module of ln_zoo imports this one.
"""

import importlib
from typing import Any

_MODULES = {
    "LSTMPolicy": "stable_baselines",
    "LSTMModule": "torchrl_modules",
    "GRUModule": "torchrl_modules",
}
__all__ = ["GRUModule", "LSTMModule", "LSTMPolicy"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"ln_zoo.rl.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
