"""Training curves between epochs: how many updates a loss takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from ln_zoo.callbacks.updates import UpdateCallback
from ln_zoo.callbacks.whole_set import data_module, now, score, seconds_aside


class StepEvaluation(UpdateCallback):
    """Scores the model on part of the training set every few updates, and logs the curve.

    Before the first update and after every n, the means of the model's metrics over some examples
    of the training set, in evaluation mode: ``step_train_nll``, ``step_train_error``, at the number
    of updates done so far; with ``validation`` over as many of the validation set too,
    ``step_val_nll``. Beside them stands ``step_seconds``, the wall time of training so far, apart
    from validation and from what callbacks score, as here. They go straight to the run's loggers,
    as what is logged in a training step would be thinned out by ``log_every_n_steps``. The training
    is not touched: modes, running averages and random numbers are put back.

    With several processes each scores its share, and the sums are added up: the numbers are those
    of one process. A resumed run goes on at the next multiple of n.

    The model must have ``per_example(batch) -> {name: (N,)}``; the data module
    ``train_eval_dataloader(examples=...)``, whose loader repeats no example, and for ``validation``
    ``val_eval_dataloader(examples=...)``.

    Args:
        every_n_steps: updates between two scores.
        examples: how many of the training examples are scored, those that the data module chooses
            (the first of classified images); all where there are fewer.
        validation: whether as many validation examples are scored.
        early: whether to score after 1, 2, 5, 10, 20, 50, ... updates below n as well, for curves
            over the logarithm of updates.

    Raises:
        ValueError: for numbers below 1; when training begins, without a data module of that kind.
    """

    def __init__(
        self,
        every_n_steps: int = 25,
        examples: int = 2000,
        validation: bool = False,
        early: bool = False,
    ) -> None:
        for name, number in (("every_n_steps", every_n_steps), ("examples", examples)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        self.every_n_steps = every_n_steps
        self.examples = examples
        self.validation = validation
        self.early = early
        self._module: LightningModule | None = None  # while it trains
        self._began = 0.0  # the clock then, moved on by what is not training
        self._before = 0.0  # seconds of training before the run was resumed

    @property
    def state_key(self) -> str:
        """Names its state in checkpoints: several may score different sets."""
        chosen = (self.every_n_steps, self.examples, self.validation, self.early)
        return f"{type(self).__name__}{chosen}"

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self._seconds()}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self._before = state_dict["seconds"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._loaders(trainer)  # if there is none, now
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
        """Wall time of training, in all processes that have worked on it."""
        if self._module is None:
            return self._before
        return self._before + now(self._module) - seconds_aside(self._module) - self._began

    def _is_due(self, step: int) -> bool:
        if step % self.every_n_steps == 0:
            return True
        early = step < self.every_n_steps and str(step).rstrip("0") in ("1", "2", "5")
        return self.early and early

    def _loaders(self, trainer: Trainer) -> dict[str, Callable[..., Iterable[Any]]]:
        """What gives the sets to score, by name."""
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
