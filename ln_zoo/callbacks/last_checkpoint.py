"""Keeps the newest state of a run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint


class LastCheckpoint(ModelCheckpoint):
    """Writes ``last.ckpt`` after each epoch, in place of the one before.

    Apart from a user's own `ModelCheckpoint`: with ``save_last`` that one writes ``last.ckpt`` only
    when its monitored score improves, and a resumed run would fall back to that epoch. It keeps no
    state in checkpoints: a resumed run writes to a folder of its own.
    """

    def __init__(self) -> None:
        super().__init__(
            filename="last", save_on_train_epoch_end=True, enable_version_counter=False
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes nothing: checkpoints written before hold what another run had."""
