"""Writes what ``predict`` returns."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from ln_zoo.files import replacing

_FORMATS = (".jsonl", ".npy")


class PredictionWriter(BasePredictionWriter):
    """Writes predictions beside the logs: as JSON lines, one example a line, or as rows of an
    array.

    A model's ``predict_step`` returns a dict of tensors (N, \\*) or lists of N words. In JSON the
    key ``index`` says which example of the dataset a line is about, wherever Lightning knows it:
    for a plain ``DataLoader``. With several processes each writes its own share, as
    ``predictions-0.jsonl``, ``predictions-1.jsonl``, ...; put together they hold every example
    once.

    An array holds the only value of each example, a number or a vector, in the order of the
    dataset.

    A file appears when all is predicted, whole: what was there before stays until then, and after
    an error too. A dry run (``fast_dev_run``) writes nothing.

    Args:
        path: file to write, which ends in ``.jsonl`` or ``.npy``; default ``predictions`` in the
            log directory, in the format that the data module asks for, else JSON lines.
        beside: an array with as many rows, which go before those of this model, as for combine-skip
            vectors (Kiros et al. 2015).

    Raises:
        TypeError: if ``predict_step`` returns anything but a dict of tensors or words.
        ValueError: for another ending, for values that are not finite; for an array with
            several values per example, or with several processes; for ``beside`` with JSON lines,
            or with another number of rows.
    """

    def __init__(self, path: str | None = None, beside: str | None = None) -> None:
        super().__init__(write_interval="batch")
        if path is not None and Path(path).suffix not in _FORMATS:
            raise ValueError(f"path must end in {' or '.join(_FORMATS)}, got {path!r}")
        self.path = path
        self.beside = beside
        self.written: Path | None = None
        #: Where to write; ``None`` in a dry run.
        self._path: Path | None = None
        #: The JSON lines so far, and what puts them in place.
        self._lines: IO[bytes] | None = None
        self._draft = contextlib.ExitStack()
        self._rows: dict[int, np.ndarray] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "predict":
            return
        self.written = self._path = self._lines = None
        self._rows = {}
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        ending = getattr(data, "prediction_format", _FORMATS[0])
        path = Path(self.path or Path(trainer.log_dir or ".") / f"predictions{ending}")
        is_array = path.suffix == ".npy"
        if self.beside and not is_array:
            raise ValueError(f"beside={self.beside!r} is for arrays: give a path that ends in .npy")
        if trainer.world_size > 1:
            if is_array:
                raise ValueError(
                    f"{path} is written by one process, and there are {trainer.world_size}: choose "
                    "--trainer.devices 1, or a path that ends in .jsonl"
                )
            path = path.with_stem(f"{path.stem}-{trainer.global_rank}")
        self._path = path

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.suffix != ".npy":
            self._lines = self._draft.enter_context(replacing(self._path))

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: dict[str, Tensor | list[str]],
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
        columns: dict[str, list[Any]] = {}
        for name, values in prediction.items():
            if isinstance(values, list) and all(isinstance(value, str) for value in values):
                columns[name] = values
                continue
            numbers = torch.as_tensor(values)
            if not bool(numbers.isfinite().all()):
                raise ValueError(
                    f"the predictions of batch {batch_idx} are not finite ({name}): check the "
                    "weights and the data"
                )
            columns[name] = numbers.tolist()
        if self._path is None:
            return
        if self._lines is None:
            self._keep(prediction, batch_indices)
            return
        if batch_indices:
            columns = {"index": list(batch_indices)} | columns
        for row in zip(*columns.values(), strict=True):
            line = json.dumps(dict(zip(columns, row, strict=True))) + "\n"
            self._lines.write(line.encode())

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._path is None:
            return
        if self._lines is not None:
            self._draft.close()
        elif self._rows:
            self._write_array(self._path)
        else:
            return
        self.written = self._path

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._draft.__exit__(type(exception), exception, exception.__traceback__)

    def _write_array(self, path: Path) -> None:
        rows = np.stack([self._rows[i] for i in sorted(self._rows)])
        if self.beside is not None:
            rows = np.hstack([_read_beside(self.beside, len(rows)), rows.reshape(len(rows), -1)])
        with replacing(path) as file:
            np.save(file, rows)
        self._rows = {}

    def _keep(
        self, prediction: dict[str, Tensor | list[str]], batch_indices: Sequence[int] | None
    ) -> None:
        if len(prediction) != 1:
            raise ValueError(
                "an array has one value per example, and predict_step gives "
                f"{', '.join(prediction)}: choose a path that ends in .jsonl"
            )
        (values,) = prediction.values()
        array = torch.as_tensor(values).cpu().numpy()
        places = batch_indices or range(len(self._rows), len(self._rows) + len(array))
        self._rows.update(zip(places, array, strict=True))


def _read_beside(path: str, count: int) -> np.ndarray:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as an array: {error}") from error
    if not isinstance(found, np.ndarray) or found.ndim != 2 or len(found) != count:
        shape = found.shape if isinstance(found, np.ndarray) else "several arrays"
        raise ValueError(f"{path} must hold {count:,} rows, as many as were predicted, got {shape}")
    return found
