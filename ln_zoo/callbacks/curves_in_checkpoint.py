"""Learning curves in checkpoints."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.fabric.utilities.logger import _add_prefix
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

#: Key of the CSV text in a checkpoint.
_KEY = "metrics_csv"


class CurvesInCheckpoint(Callback):
    """Save ``metrics.csv`` in checkpoints, so that a resumed run continues it.

    A resumed run has the same table as an uninterrupted one: rows after the checkpoint are dropped,
    and rows that Lightning logs just after saving it are included. No-op without a `CSVLogger`.
    """

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        pending = _pending(trainer)  # collective
        logger = _csv_logger(trainer)
        if logger is None or not trainer.is_global_zero:
            return
        table = logger.experiment
        path = Path(table.metrics_file_path)
        rows: list[dict[str, Any]] = []
        if path.is_file():
            with path.open(newline="") as file:
                rows = list(csv.DictReader(file))
        rows += [{name: str(value) for name, value in row.items()} for row in table.metrics]
        if pending:
            row = _add_prefix(pending, logger._prefix, logger.LOGGER_JOIN_CHAR)
            rows.append({name: str(value) for name, value in row.items()})
        text = io.StringIO()
        writer = csv.DictWriter(text, sorted({name for row in rows for name in row}), restval="")
        writer.writeheader()
        writer.writerows(rows)
        checkpoint[_KEY] = text.getvalue()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        logger, text = _csv_logger(trainer), checkpoint.get(_KEY)
        # Older checkpoints have none.
        if logger is None or text is None or not trainer.is_global_zero:
            return
        table = logger.experiment
        Path(table.metrics_file_path).write_text(text, newline="")
        table.metrics_keys = next(csv.reader(io.StringIO(text)), [])


def _csv_logger(trainer: Trainer) -> CSVLogger | None:
    return next((x for x in trainer.loggers if isinstance(x, CSVLogger)), None)


def _pending(trainer: Trainer) -> dict[str, Any]:
    """The row that Lightning logs after the callbacks of this batch or epoch.

    It has no public name; ``logged_metrics`` also contains older values.
    """
    connector = trainer._logger_connector
    if not trainer.training or trainer._results is None:
        return {}
    ends_epoch = connector._first_loop_iter is None
    if not ends_epoch and not connector.should_update_logs:
        return {}
    values = convert_tensors_to_scalars(connector.metrics["log"])
    if not values:
        return {}
    # From 0; at the end of an epoch the last update is already counted.
    step = trainer.fit_loop.epoch_loop._batches_that_stepped - ends_epoch
    return {"epoch": trainer.current_epoch, "step": step} | values
