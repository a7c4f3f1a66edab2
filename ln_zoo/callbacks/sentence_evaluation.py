"""Evaluation of sentence vectors during training."""

from __future__ import annotations

import inspect
import math
import os
import signal
import time
from functools import partial
from typing import Any, NamedTuple, get_args

from lightning.pytorch import LightningModule, Trainer

from ln_zoo.callbacks.evaluation_loop import evaluating
from ln_zoo.callbacks.on_update import EveryUpdate
from ln_zoo.data.books.sentence_tasks import TASKS, ClassificationTask, RelatednessTask, read_task
from ln_zoo.metrics.sentence_tasks import KnownVectors, ProtocolName, evaluate
from ln_zoo.utils.checks import check_at_least


class _Begun(NamedTuple):
    """Scores in progress in other processes: futures by task, and the time of encoding."""

    step: int
    epoch: int
    begin: float
    scores: list[Any]


class SentenceEvaluation(EveryUpdate):
    """Evaluate sentence vectors on MR, CR, SUBJ, MPQA and SICK every n updates.

    Logs ``step_mr``, ``step_cr``, ``step_subj`` and ``step_mpqa`` (accuracy, per cent),
    ``step_sick_pearson``, ``step_sick_spearman``, ``step_sick_mse`` and ``sentence_seconds``, the
    wall time of the evaluation, at the number of updates. The first process evaluates and others
    wait, for seconds to minutes. With ``background``, ``n_jobs`` processes evaluate the vectors, a
    task each, while training continues; scores are logged when ready, at the update of encoding.
    The end of training waits for them; an interrupted run loses them.

    In a test, metrics are ``mr``, ``cr``, ... under the original protocol and ``mr_fast``,
    ``cr_fast``, ... under the fast one; SICK is equal under both.

    The model must have ``encode(sentences) -> (n, d)``. Its argument ``eos``, if present, controls
    whether the end of a sentence is appended, as the released skip-thoughts code does in some
    tasks. Sentences are lowercased if the model's vocabulary is.

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
        self._pool: Any = None
        self._begun: list[_Begun] = []
        self._read: list[ClassificationTask | RelatednessTask] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._read_tasks(trainer)
        if self.at_start and trainer.global_step == 0:
            self._log_curves(trainer)

    def on_update(self, trainer: Trainer, batch_idx: int) -> None:
        self._log_finished(trainer)
        if trainer.global_step % self.every_n_steps == 0:
            self._log_curves(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_finished(trainer, wait=True)
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._close()

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read_tasks(trainer)
        fast = self.protocol == "fast"
        for name, value in self._scores(trainer).items():
            of_both = name.startswith("sick_")
            name = f"test_{name}_fast" if fast and not of_both else f"test_{name}"
            if not math.isnan(value):  # correlation of constant predictions
                pl_module.log(name, value, rank_zero_only=True)
        self._close()

    def _read_tasks(self, trainer: Trainer) -> None:
        check_encodes(trainer.lightning_module)
        if trainer.is_global_zero and not self._read:
            self._read = [read_task(name, self.root, self.split_words) for name in self.tasks]

    def _log_curves(self, trainer: Trainer) -> None:
        begin = time.perf_counter()
        place = trainer.global_step, trainer.current_epoch
        if self.background:
            self._begun.append(_Begun(*place, begin, self._begin(trainer)))
            return
        self._log(trainer, *place, begin, self._scores(trainer))

    def _log_finished(self, trainer: Trainer, wait: bool = False) -> None:
        while self._begun and (wait or all(future.done() for future in self._begun[0].scores)):
            begun = self._begun.pop(0)
            scores: dict[str, float] = {}
            for future in begun.scores:
                scores |= future.result()
            self._log(trainer, *begun[:3], scores)

    def _log(
        self, trainer: Trainer, step: int, epoch: int, begin: float, scores: dict[str, float]
    ) -> None:
        logged = {f"step_{name}": value for name, value in scores.items()}
        logged |= {"sentence_seconds": time.perf_counter() - begin, "epoch": epoch}
        for logger in trainer.loggers:
            logger.log_metrics(logged, step)

    def _scores(self, trainer: Trainer) -> dict[str, float]:
        model = trainer.lightning_module
        scores: dict[str, float] = {}
        if self.background:
            for future in self._begin(trainer):
                scores |= future.result()
            return scores
        with evaluating(model):
            for task in self._read:
                scores |= model_scores(model, task, self.protocol, self.n_jobs)
        trainer.strategy.barrier()
        return scores

    def _begin(self, trainer: Trainer) -> list[Any]:
        model = trainer.lightning_module
        with evaluating(model):
            known = [(known_vectors(model, task), in_case_of(model, task)) for task in self._read]
        trainer.strategy.barrier()
        if known and self._pool is None:
            from joblib.externals.loky import ProcessPoolExecutor

            self._pool = ProcessPoolExecutor(
                self.n_jobs, env={"OMP_NUM_THREADS": "1"}, initializer=_stand_back
            )
        return [self._pool.submit(evaluate, *each, self.protocol) for each in known]

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(kill_workers=True)
        self._pool, self._begun = None, []


def _stand_back() -> None:
    """Lower the priority of a worker, and leave signals to the main process."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(10)


def model_scores(
    model: Any, task: ClassificationTask | RelatednessTask, protocol: ProtocolName, n_jobs: int = 1
) -> dict[str, float]:
    """Scores of a model with ``encode``; see `ln_zoo.metrics.sentence_tasks.evaluate`."""
    return evaluate(known_vectors(model, task), in_case_of(model, task), protocol, n_jobs)


def known_vectors(model: Any, task: ClassificationTask | RelatednessTask) -> KnownVectors:
    """Vectors of the sentences of a task; arguments as `model_scores`."""
    encode = model.encode
    if "eos" in inspect.signature(encode).parameters:
        encode = partial(encode, eos=task.eos)
    return KnownVectors(encode, in_case_of(model, task).sentences)


def in_case_of(model: Any, task: Any) -> Any:
    """The task, lowercased if the model's vocabulary is."""
    vocabulary = getattr(model, "vocabulary", None)
    cased = vocabulary is None or any(word != word.lower() for word in vocabulary)
    return task if cased else task.map(str.lower)


def unknown_share(model: Any, task: Any) -> float | None:
    """Share of unknown words of a task; None without a vocabulary."""
    vocabulary = getattr(model, "vocabulary", None)
    if vocabulary is None:
        return None
    words = [word for s in in_case_of(model, task).sentences for word in s.split()]
    return sum(word not in vocabulary for word in words) / len(words)


def check_tasks(names: list[str]) -> list[str]:
    """Names of tasks in upper case; ValueError if a name is unknown, or there are none."""
    upper = [name.strip().upper() for name in names]
    unknown = [name for name in upper if name not in TASKS]
    if unknown or not upper:
        raise ValueError(
            f"tasks must be some of {', '.join(TASKS)}, got {', '.join(unknown) or 'none'}"
        )
    return list(dict.fromkeys(upper))


def check_encodes(model: Any) -> None:
    """Raise ValueError for a model without ``encode``."""
    if not callable(getattr(model, "encode", None)):
        raise ValueError(
            f"sentence tasks need a model with encode(sentences), such as SkipThought, got "
            f"{type(model).__name__}"
        )
