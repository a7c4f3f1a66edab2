"""Counts the training runs behind a model's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer

from ln_zoo.utils.training_runs import (
    UNKNOWN,
    TrainingRun,
    dataset_metadata,
    read_run,
    read_runs,
    same_data,
)


class _Done(NamedTuple):
    """Batches of this process and updates of a trainer over all its runs."""

    batches: int
    steps: int


class RunCounter:
    """The runs behind the weights of one model; the last may be in progress.

    Training that resumes from a checkpoint continues its last run if data and batch size are the
    same; otherwise a new run starts.
    """

    def __init__(self, runs: tuple[TrainingRun, ...] = ()) -> None:
        self._runs = runs
        # Progress of the trainer before the last run; None if that run had another trainer.
        self._before: _Done | None = None
        self._in_progress = False

    def begin(self, trainer: Trainer, resumed: bool) -> None:
        """Open the run of a trainer whose loops are ready.

        ``resumed``: whether it continues a checkpoint, which was passed to `restored`.
        """
        facts = _facts(trainer)
        if resumed and self._before is not None and same_data(self._runs[-1], facts):
            self._runs = self._runs[:-1]
        else:
            self._before = _done(trainer)
        # Its length is added by `runs`.
        self._runs, self._in_progress = (*self._runs, facts), True

    def end(self, trainer: Trainer) -> None:
        if self._in_progress:
            self._runs, self._in_progress = self.runs(trainer), False

    def runs(self, trainer: Trainer | None) -> tuple[TrainingRun, ...]:
        """All runs, oldest first; the one in progress with its length so far."""
        if trainer is None:
            return self._runs
        if self._before is None and trainer.global_step:
            return (*self._runs, UNKNOWN)  # a subclass overrides `on_train_start` without super()
        if not self._in_progress or self._before is None:
            return self._runs
        return (*self._runs[:-1], {**self._runs[-1], **_length(trainer, self._before)})

    def stored(self, trainer: Trainer) -> dict[str, Any]:
        runs = self.runs(trainer)
        ours = self._before is not None and (
            self._in_progress or _done(trainer).steps - self._before.steps == runs[-1].get("steps")
        )
        before = self._before._asdict() if ours and self._before is not None else None
        return {"runs": [dict(run) for run in runs], "before": before}

    @classmethod
    def restored(cls, stored: Any) -> RunCounter:
        """Read the content of a checkpoint; unknown runs if it is missing or damaged."""
        stored = stored if isinstance(stored, Mapping) else {}
        counter = cls(read_runs(stored.get("runs")))
        before = stored.get("before")
        if counter._runs and isinstance(before, Mapping):
            batches, steps = before.get("batches"), before.get("steps")
            if type(batches) is int and type(steps) is int and batches >= 0 and steps >= 0:
                counter._before = _Done(batches, steps)
        return counter


def _done(trainer: Trainer) -> _Done:
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return _Done(total.processed, trainer.global_step)


def _facts(trainer: Trainer) -> TrainingRun:
    data = getattr(trainer, "datamodule", None)
    if data is None:
        return {}
    facts = dataset_metadata(data)
    size = facts.get("batch_size", getattr(data, "batch_size", None))
    if type(size) is int:
        size *= trainer.world_size * trainer.accumulate_grad_batches
    known = {"dataset": facts["dataset"], "train_size": facts.get("train_size"), "batch_size": size}
    return read_run(known)


def _length(trainer: Trainer, before: _Done) -> dict[str, int]:
    now = _done(trainer)
    length = {"steps": now.steps - before.steps}
    loader = trainer.train_dataloader
    several = isinstance(loader, Sequence | Mapping)  # its length is the number of loaders
    if batches := None if several else sized_len(loader):
        length["epochs"] = (now.batches - before.batches) // batches
    return length
