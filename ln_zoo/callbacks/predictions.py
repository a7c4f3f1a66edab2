"""Files of predictions."""

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

from ln_zoo.utils.files import atomic_write

_FORMATS = (".jsonl", ".npy")


class PredictionWriter(BasePredictionWriter):
    r"""Write predictions to the log directory, as JSON lines or as rows of an array.

    ``predict_step`` must return a tensor (N, \*), or a dict of such tensors and of lists of N
    strings. JSON lines have a key ``index``, the example's index in the dataset, if Lightning
    provides it (for a plain ``DataLoader``). Each process writes its share:
    ``predictions-0.jsonl``, ``predictions-1.jsonl``, ... An array needs one value per example, a
    number or a vector, and one process; rows are in the order of the dataset. Files are replaced
    atomically at the end; nothing is written under ``fast_dev_run``.

    Args:
        path: file to write, ``.jsonl`` or ``.npy``; default: ``predictions`` in the log directory,
            in the data module's ``prediction_format`` or as JSON lines.
        beside: ``.npy`` file with as many rows, to which this model's are appended, as for
            combine-skip vectors (Kiros et al. 2015).

    Raises:
        TypeError: if ``predict_step`` returns another type.
        ValueError: if values are not finite.
    """

    #: Name of the file on the command line.
    written_as = "predictions"

    def __init__(self, path: str | None = None, beside: str | None = None) -> None:
        super().__init__(write_interval="batch")
        if path is not None and Path(path).suffix not in _FORMATS:
            raise ValueError(f"path must end in {' or '.join(_FORMATS)}, got {path!r}")
        self.path = path
        self.beside = beside
        self.written: Path | None = None
        #: File to write; None under ``fast_dev_run``.
        self._path: Path | None = None
        #: The open file of JSON lines, and the context that replaces the old file.
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
            raise ValueError(
                f"beside={self.beside!r} needs an array: give a path that ends in .npy"
            )
        if trainer.world_size > 1:
            if is_array:
                raise ValueError(
                    f"{path} needs one process, got {trainer.world_size}: use --trainer.devices 1 "
                    "or a path that ends in .jsonl"
                )
            path = path.with_stem(f"{path.stem}-{trainer.global_rank}")
        self._path = path

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.suffix != ".npy":
            self._lines = self._draft.enter_context(atomic_write(self._path))

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Tensor | dict[str, Tensor | list[str]],
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        if isinstance(prediction, Tensor):
            prediction = {"prediction": prediction}
        if not isinstance(prediction, dict):
            raise TypeError(
                f"predict_step of {type(pl_module).__name__} must return a dict of tensors (N, *), "
                f"got {type(prediction).__name__}"
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
        with atomic_write(path) as file:
            np.save(file, rows)
        self._rows = {}

    def _keep(
        self, prediction: dict[str, Tensor | list[str]], batch_indices: Sequence[int] | None
    ) -> None:
        if len(prediction) != 1:
            raise ValueError(
                f"an array needs one value per example, got {', '.join(prediction)}: give a path "
                "that ends in .jsonl"
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
        raise ValueError(f"{path} must have {count:,} rows, one per prediction, got {shape}")
    return found
