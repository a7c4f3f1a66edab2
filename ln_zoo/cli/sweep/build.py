"""The settings of a run, with its model and data built but nothing trained. Imports torch."""

from __future__ import annotations

import logging
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer

from ln_zoo.cli.lightning import ZooCLI


class _Unrun(ZooCLI):
    """Parses the arguments and builds model and data, but no trainer."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer | None:  # type: ignore[override]
        return None


def settings(argv: list[str]) -> Namespace:
    """All settings of a ``fit``; errors are those of ``ln-zoo fit``."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)  # which seed was set is of no interest here
    try:
        return _Unrun(argv)._settings()
    finally:
        logging.disable(before)
