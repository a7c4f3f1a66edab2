"""Evaluation of sentence vectors during training."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from typing import NamedTuple, get_args

from lightning.pytorch import LightningModule, Trainer

from ln_zoo.callbacks.evaluation_loop import evaluating
from ln_zoo.callbacks.on_update import EveryUpdate
from ln_zoo.data.books.sentence_tasks import TASKS, ClassificationTask, RelatednessTask, read_task
from ln_zoo.metrics.background_scores import BackgroundScores
from ln_zoo.metrics.sentence_models import check_encodes, encode_task, model_scores
from ln_zoo.metrics.sentence_tasks import ProtocolName
from ln_zoo.utils.checks import check_at_least


class _Unfinished(NamedTuple):
    """Scores that other processes compute."""

    step: int
    epoch: int
    begin: float
    scores: list[Future[dict[str, float]]]  # by task


class SentenceEvaluation(EveryUpdate):
    """Evaluate sentence vectors on MR, CR, SUBJ, MPQA and SICK every n updates.

    Logs ``step_mr``, ``step_cr``, ``step_subj`` and ``step_mpqa`` (accuracy, per cent),
    ``step_sick_pearson``, ``step_sick_spearman``, ``step_sick_mse`` and ``sentence_seconds``, the
    wall time of the evaluation, at the number of updates. The first process evaluates and others
    wait, for seconds to minutes. With ``background``, training continues while ``n_jobs`` further
    processes evaluate the vectors, a task each; scores are logged when ready, at the update of
    encoding. The end of training waits for them; an interrupted run loses them.

    In a test, metrics are ``mr``, ``cr``, ... under the original protocol and ``mr_fast``,
    ``cr_fast``, ... under the fast one; SICK is equal under both.

    The model must have ``encode(sentences) -> (n, d)``; see `ln_zoo.metrics.sentence_models`.

    Args:
        every_n_steps: updates between evaluations.
        tasks: names of tasks; default: all five.
        protocol: ``fast`` or ``original``; see `ln_zoo.metrics.sentence_tasks.accuracy`.
        root: folder of the tasks; see `ln_zoo.data.books.sentence_tasks.read_task`.
        split_words: tokenise as the released code, which needs nltk; otherwise split at white
            space.
        at_start: evaluate before the first update.
        n_jobs: processes for the folds of a task, or for the tasks with ``background``.
        background: continue training meanwhile.

    Raises:
        FileNotFoundError: if the files of a task are missing.
    """

    def __init__(
        self,
        every_n_steps: int = 1000,
        tasks: list[str] | None = None,
        protocol: ProtocolName = "fast",
        root: str | None = None,
        split_words: bool = True,
        at_start: bool = True,
        n_jobs: int = 1,
        background: bool = False,
    ) -> None:
        check_at_least(1, every_n_steps=every_n_steps, n_jobs=n_jobs)
        if protocol not in get_args(ProtocolName):
            raise ValueError(f"protocol must be 'original' or 'fast', got {protocol!r}")
        self.every_n_steps = every_n_steps
        self.tasks = list(TASKS) if tasks is None else check_tasks(tasks)
        self.protocol = protocol
        self.root = root
        self.split_words = split_words
        self.at_start = at_start
        self.n_jobs = n_jobs
        self.background = background
        self._read: list[ClassificationTask | RelatednessTask] = []
        self._processes: BackgroundScores | None = None
        self._unfinished: list[_Unfinished] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._read_tasks(trainer)
        if self.at_start and trainer.global_step == 0:
            self._evaluate(trainer)

    def on_update(self, trainer: Trainer, batch_idx: int) -> None:
        self._log_finished(trainer)
        if trainer.global_step % self.every_n_steps == 0:
            self._evaluate(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_finished(trainer, wait=True)
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._close()

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read_tasks(trainer)
        for name, value in self._scores(trainer).items():
            if self.protocol == "fast" and not name.startswith("sick_"):
                name += "_fast"
            if not math.isnan(value):  # correlation of constant predictions
                pl_module.log(f"test_{name}", value, rank_zero_only=True)

    def _read_tasks(self, trainer: Trainer) -> None:
        check_encodes(trainer.lightning_module)
        if trainer.is_global_zero and not self._read:
            self._read = [read_task(name, self.root, self.split_words) for name in self.tasks]

    def _evaluate(self, trainer: Trainer) -> None:
        begin, place = time.perf_counter(), (trainer.global_step, trainer.current_epoch)
        if not self.background:
            self._log(trainer, *place, begin, self._scores(trainer))
            return
        with evaluating(trainer.lightning_module):
            encoded = [encode_task(trainer.lightning_module, task) for task in self._read]
        trainer.strategy.barrier()
        if self._processes is None:
            self._processes = BackgroundScores(self.n_jobs)
        scores = [self._processes.submit(*each, self.protocol) for each in encoded]
        self._unfinished.append(_Unfinished(*place, begin, scores))

    def _scores(self, trainer: Trainer) -> dict[str, float]:
        scores: dict[str, float] = {}
        with evaluating(trainer.lightning_module):
            for task in self._read:
                scores |= model_scores(trainer.lightning_module, task, self.protocol, self.n_jobs)
        trainer.strategy.barrier()
        return scores

    def _log_finished(self, trainer: Trainer, wait: bool = False) -> None:
        while self._unfinished:
            step, epoch, begin, futures = self._unfinished[0]
            if not wait and not all(future.done() for future in futures):
                return
            scores = {name: value for f in futures for name, value in f.result().items()}
            self._log(trainer, step, epoch, begin, scores)
            self._unfinished.pop(0)

    def _log(
        self, trainer: Trainer, step: int, epoch: int, begin: float, scores: dict[str, float]
    ) -> None:
        logged = {f"step_{name}": value for name, value in scores.items()}
        logged |= {"sentence_seconds": time.perf_counter() - begin, "epoch": epoch}
        for logger in trainer.loggers:
            logger.log_metrics(logged, step)

    def _close(self) -> None:
        if self._processes is not None:
            self._processes.close()
        self._processes, self._unfinished = None, []


def check_tasks(names: list[str]) -> list[str]:
    """Names of tasks in upper case; ValueError if a name is unknown, or there are none."""
    upper = [name.strip().upper() for name in names]
    unknown = [name for name in upper if name not in TASKS]
    if unknown or not upper:
        raise ValueError(
            f"tasks must be some of {', '.join(TASKS)}, got {', '.join(unknown) or 'none'}"
        )
    return list(dict.fromkeys(upper))
