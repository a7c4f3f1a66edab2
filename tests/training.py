"""What tests that train share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor


def quiet_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    """A trainer on the CPU without output; it saves only through a given checkpoint callback."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(each, Checkpoint) for each in callbacks),
    }  # fmt: skip
    return Trainer(callbacks=list(callbacks), **quiet | options)


class Weights(Callback):
    """Keep the state of the model by the number of updates done."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Tensor]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        state = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.states[trainer.global_step] = state

    on_train_batch_end = on_train_start


def logged_trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    """`quiet_trainer` of three epochs that logs each update to ``run/version_0``."""
    given = {"logger": CSVLogger(folder, "run", 0), "max_epochs": 3, "log_every_n_steps": 1}
    return quiet_trainer(*callbacks, **given | options)


def mean_scores(model: Any, batches: Iterable[Any], train: bool = False) -> dict[str, float]:
    """Means over examples of ``per_example``, in float64; the model's state stays.

    ``train``: in training mode, without batches of one example.
    """
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    values: dict[str, list[float]] = {}
    model.train(train)
    with torch.no_grad():
        for batch in batches:
            if train and len(batch[1]) < 2:
                continue
            for name, scores in model.per_example(batch).items():
                values.setdefault(name, []).extend(scores.tolist())
    model.load_state_dict(kept)
    return {name: sum(v) / len(v) for name, v in values.items()}


class Resumable(list[Any]):
    """Batches; a resumed run continues after the last one it was given."""

    first = 0

    def __iter__(self) -> Iterator[Any]:
        begin, self.first = self.first, 0
        for i in range(begin, len(self)):
            self.given = i + 1
            yield self[i]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["given"]
