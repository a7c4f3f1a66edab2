"""What weights were trained on and for how long, in their own run and in those it started from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ln_zoo.cli import stored
from ln_zoo.zoo import lineage
from ln_zoo.zoo.loading import find_card

_KEY = "lineage"


def of_checkpoint(path: str | Path) -> dict[str, Any]:
    """The training behind the weights of a checkpoint.

    Args:
        path: of the checkpoint.

    Returns:
        What `ln_zoo.zoo.lineage` describes: epochs and updates that were completed, and what else
        the checkpoint says.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a readable checkpoint.
    """
    checkpoint = stored.read_checkpoint(str(path))
    known = {key: value for key, value in checkpoint.get(_KEY, {}).items() if value is not None}
    if "loops" not in checkpoint:  # as one saved with plain torch
        return known
    loops = checkpoint["loops"]["fit_loop"]
    progress = loops["epoch_progress"]["current"]
    epochs = int(progress["processed"])
    # What a validation at the end of an epoch keeps is written before the epoch counts as done.
    if progress["started"] > epochs and loops["epoch_loop.batch_progress"]["is_last_batch"]:
        epochs += 1
    return {"epochs": epochs, "steps": int(checkpoint["global_step"]), **known}


def of_weights(weights: str) -> dict[str, Any]:
    """The training behind published weights or those of a checkpoint, and their name.

    Args:
        weights: as for ``--weights``.

    Returns:
        The same, with the name of the weights.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ValueError: if it is not a readable checkpoint, or there is no such card.
    """
    if weights.endswith(".ckpt"):
        return {"weights": Path(weights).name, **of_checkpoint(weights)}
    return lineage.of_card(find_card(weights))


class Lineage(Callback):
    """Stores in checkpoints which data a run trains on, and what it started from.

    Args:
        started_from: as `of_weights` describes it; ``None``: from weights that were drawn.
    """

    def __init__(self, started_from: dict[str, Any] | None = None) -> None:
        self.started_from = started_from

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        data = getattr(trainer, "datamodule", None)
        dataset = getattr(data, "facts", {}).get("dataset") if data else None
        checkpoint[_KEY] = {"dataset": dataset, "started_from": self.started_from}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.started_from = checkpoint.get(_KEY, {}).get("started_from")
