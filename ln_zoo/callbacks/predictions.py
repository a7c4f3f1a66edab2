"""Writes what ``predict`` returns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor


class PredictionWriter(BasePredictionWriter):
    """Writes predictions as JSON lines, one case a line, beside the logs.

    A model's ``predict_step`` returns a dict of tensors (N, \\*). The key ``index`` says which case
    of the dataset a line is about, wherever Lightning knows it: for a plain ``DataLoader``. With
    several processes each writes its own share, as ``predictions-0.jsonl``,
    ``predictions-1.jsonl``, ...; put together they hold every case once.

    Args:
        path: file to write; default ``predictions.jsonl`` in the log directory.

    Raises:
        TypeError: if ``predict_step`` returns anything but a dict of tensors.
        ValueError: if one of them is not finite.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="batch")
        self.path = path
        self.written: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "predict":
            return
        path = Path(self.path or Path(trainer.log_dir or ".") / "predictions.jsonl")
        if trainer.world_size > 1:
            path = path.with_stem(f"{path.stem}-{trainer.global_rank}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        self.written = path

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: dict[str, Tensor],
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        if not isinstance(prediction, dict):
            raise TypeError(
                f"predict_step of {type(pl_module).__name__} must return a dict of tensors (N, *) "
                f"to be written, got {type(prediction).__name__}"
            )
        for name, values in prediction.items():
            if not bool(torch.as_tensor(values).isfinite().all()):
                raise ValueError(
                    f"the predictions of batch {batch_idx} are not finite ({name}): JSON has no "
                    "NaN, and nothing follows from them"
                )
        assert self.written is not None
        columns = {name: torch.as_tensor(values).tolist() for name, values in prediction.items()}
        if batch_indices:
            columns = {"index": list(batch_indices)} | columns
        with self.written.open("a") as file:
            for row in zip(*columns.values(), strict=True):
                file.write(json.dumps(dict(zip(columns, row, strict=True))) + "\n")
