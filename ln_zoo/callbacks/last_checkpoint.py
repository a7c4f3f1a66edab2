"""Keeps the newest state of a run."""

from __future__ import annotations

from lightning.pytorch.callbacks import ModelCheckpoint


class LastCheckpoint(ModelCheckpoint):
    """Writes ``last.ckpt`` after each epoch, in place of the one before.

    Apart from a user's own `ModelCheckpoint`: with ``save_last`` that one writes ``last.ckpt`` only
    when its monitored score improves, and a resumed run would fall back to that epoch. As a class
    of its own its state in a checkpoint is not taken for the other's.
    """

    def __init__(self) -> None:
        super().__init__(
            filename="last", save_on_train_epoch_end=True, enable_version_counter=False
        )
