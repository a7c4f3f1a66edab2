"""Published models: lists, loading, cards, and comparison with reported numbers.

Importing this package does not import torch. Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ln_zoo.utils.packages import missing_package
from ln_zoo.zoo.catalog import Card, CardError, describe, list_models

if TYPE_CHECKING:
    from ln_zoo.zoo.loading import load
    from ln_zoo.zoo.publishing import Facts, card_from_checkpoint, publish, render_card, write_card
    from ln_zoo.zoo.reported import comparison, render

__all__ = [
    "Card",
    "CardError",
    "Facts",
    "card_from_checkpoint",
    "comparison",
    "describe",
    "list_models",
    "load",
    "publish",
    "render",
    "render_card",
    "write_card",
]

_LATE = {
    "Facts": "publishing",
    "card_from_checkpoint": "publishing",
    "comparison": "reported",
    "load": "loading",
    "publish": "publishing",
    "render": "reported",
    "render_card": "publishing",
    "write_card": "publishing",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_LATE[name]}")
    except ModuleNotFoundError as error:
        raise missing_package(error) or error from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
