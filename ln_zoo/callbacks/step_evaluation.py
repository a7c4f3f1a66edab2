"""Evaluation between epochs, for learning curves by update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from ln_zoo.callbacks.evaluation_loop import data_module, now, score, seconds_aside
from ln_zoo.callbacks.on_update import EveryUpdate
from ln_zoo.utils.checks import check_at_least


class StepEvaluation(EveryUpdate):
    """Evaluate the model on training examples before the first and after every n-th update.

    Logs the means of the model's metrics in evaluation mode, ``step_train_nll`` and
    ``step_train_error``, at the number of updates, independently of ``log_every_n_steps``.
    ``step_seconds`` is the wall time of training without validation and evaluation by callbacks.
    Sums are reduced over processes.

    The model must have ``per_example(batch) -> {name: (N,)}``; the data module
    ``train_eval_dataloader(examples=...)``, which repeats no example, and for ``validation``
    ``val_eval_dataloader(examples=...)``.

    Args:
        every_n_steps: updates between evaluations.
        examples: maximum training examples, chosen by the data module.
        validation: evaluate as many validation examples too, as ``step_val_*``.
        early: evaluate after 1, 2, 5, 10, 20, 50, ... updates below n too, for a logarithmic axis.
    """

    def __init__(
        self,
        every_n_steps: int = 25,
        examples: int = 2000,
        validation: bool = False,
        early: bool = False,
    ) -> None:
        check_at_least(1, every_n_steps=every_n_steps, examples=examples)
        self.every_n_steps = every_n_steps
        self.examples = examples
        self.validation = validation
        self.early = early
        self._module: LightningModule | None = None  # None outside training
        self._began = 0.0  # clock at the start, advanced by pauses
        self._before = 0.0  # seconds of training in earlier processes

    @property
    def state_key(self) -> str:
        """Distinguishes the states of several instances in a checkpoint."""
        chosen = (self.every_n_steps, self.examples, self.validation, self.early)
        return f"{type(self).__name__}{chosen}"

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self._seconds()}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self._before = state_dict["seconds"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._loaders(trainer)  # fails early
        self._module = pl_module
        self._began = now(pl_module) - seconds_aside(pl_module)
        if trainer.global_step == 0:
            self._score(trainer)

    def on_update(self, trainer: Trainer, batch_idx: int) -> None:
        if self._is_due(trainer.global_step):
            self._score(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._module is not None:
            self._began -= now(pl_module) - seconds_aside(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._module is not None:
            self._began += now(pl_module) - seconds_aside(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before, self._module = self._seconds(), None

    def _seconds(self) -> float:
        if self._module is None:
            return self._before
        return self._before + now(self._module) - seconds_aside(self._module) - self._began

    def _is_due(self, step: int) -> bool:
        if step % self.every_n_steps == 0:
            return True
        early = step < self.every_n_steps and str(step).rstrip("0") in ("1", "2", "5")
        return self.early and early

    def _loaders(self, trainer: Trainer) -> dict[str, Callable[..., Iterable[Any]]]:
        sets = ("train", "val") if self.validation else ("train",)
        names = {name: f"{name}_eval_dataloader" for name in sets}
        data = data_module(trainer, self, *names.values())
        return {name: getattr(data, loader) for name, loader in names.items()}

    def _score(self, trainer: Trainer) -> None:
        scores = {"step_seconds": self._seconds()}
        for name, loader in self._loaders(trainer).items():
            scores |= score(trainer, loader(examples=self.examples), f"step_{name}")
        for logger in trainer.loggers:
            logger.log_metrics({**scores, "epoch": trainer.current_epoch}, trainer.global_step)
