"""How good the sentence vectors of a model are while it trains."""

from __future__ import annotations

import inspect
import math
import os
import signal
import time
from functools import partial
from typing import Any, NamedTuple, get_args

from lightning.pytorch import LightningModule, Trainer

from ln_zoo.callbacks.updates import UpdateCallback
from ln_zoo.callbacks.whole_set import evaluating
from ln_zoo.data.sentence_tasks import TASKS, ClassificationTask, RelatednessTask, read_task
from ln_zoo.metrics.sentence_tasks import KnownVectors, ProtocolName, evaluate


class _Begun(NamedTuple):
    """Scores that other processes are working on.

    Attributes:
        step: updates done when the sentences were encoded.
        epoch: the epoch then.
        begin: when that was.
        scores: of each task, futures.
    """

    step: int
    epoch: int
    begin: float
    scores: list[Any]


class SentenceEvaluation(UpdateCallback):
    """Scores a model's sentence vectors on MR, CR, SUBJ, MPQA and SICK every so many updates.

    Before the first update and after every n, ``step_mr``, ``step_cr``, ``step_subj`` and
    ``step_mpqa`` (accuracy, per cent), ``step_sick_pearson``, ``step_sick_spearman`` and
    ``step_sick_mse`` go straight to the run's loggers, at the number of updates done so far, with
    ``sentence_seconds``, the time that they took. The training is not touched: modes and random
    numbers are put back. With several processes the first one scores and the others wait. A resumed
    run goes on at the next multiple of n.

    Scores take seconds to minutes, encoding apart. With ``background`` training does not wait for
    them: ``n_jobs`` other processes score the vectors, a task each. The scores are logged when
    they are ready, at the update at which the sentences were encoded. The end of training waits for
    the last scores; a run that is stopped loses those still in progress.

    In a test the scores stand among its metrics: ``mr``, ``cr``, ... under the original protocol,
    ``mr_fast``, ``cr_fast``, ... under the fast one, and those of SICK, for which both are one.

    The model must have ``encode(sentences) -> (n, d)``. If that takes ``eos``, it is told whether
    the released skip-thoughts code reads the end of a sentence in the task. Sentences are
    lowercased if the model's vocabulary has no capital letters.

    Args:
        every_n_steps: updates between two scores in training.
        tasks: which of the tasks; default: all five.
        protocol: ``fast`` or ``original``, as `ln_zoo.metrics.sentence_tasks.accuracy`.
        root: folder of the tasks, as `ln_zoo.data.sentence_tasks.read_task`.
        split_words: divide the sentences of tasks into words as the released code does, which needs
            nltk; else words are what white space separates.
        at_start: whether to score before the first update.
        n_jobs: processes among which the folds of a task are divided, or the tasks, with
            ``background``.
        background: whether training goes on while the vectors are scored.

    Raises:
        ValueError: for an unknown task or protocol, or numbers below 1; when training begins, for a
            model that does not encode sentences.
        FileNotFoundError: when training begins, without the files of a task.
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
        for name, number in (("every_n_steps", every_n_steps), ("n_jobs", n_jobs)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
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
            if not math.isnan(value):  # a correlation of vectors that are all the same
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
        """Logs the scores that are there by now."""
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
        """On the first process; the others have none."""
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
        """Encodes the sentences of all tasks, and has other processes score the vectors."""
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
    """Lets training have the processors first, and leaves signals to its process."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(10)


def model_scores(
    model: Any,
    task: ClassificationTask | RelatednessTask,
    protocol: ProtocolName,
    n_jobs: int = 1,
) -> dict[str, float]:
    """Scores of a model's sentence vectors on a task, as `ln_zoo.metrics.sentence_tasks.evaluate`.

    Args:
        model: with ``encode(sentences) -> (n, d)``, as `SentenceEvaluation` describes.
        task: as `ln_zoo.data.sentence_tasks.read_task` reads it.
        protocol: ``fast`` or ``original``.
        n_jobs: processes among which folds are divided.
    """
    return evaluate(known_vectors(model, task), in_case_of(model, task), protocol, n_jobs)


def known_vectors(model: Any, task: ClassificationTask | RelatednessTask) -> KnownVectors:
    """A model's vectors of the sentences of a task; arguments as of `model_scores`."""
    encode = model.encode
    if "eos" in inspect.signature(encode).parameters:
        encode = partial(encode, eos=task.eos)
    return KnownVectors(encode, in_case_of(model, task).sentences)


def in_case_of(model: Any, task: Any) -> Any:
    """The task in lower case, if the model's vocabulary has no others."""
    vocabulary = getattr(model, "vocabulary", None)
    cased = vocabulary is None or any(word != word.lower() for word in vocabulary)
    return task if cased else task.map(str.lower)


def unknown_share(model: Any, task: Any) -> float | None:
    """Share of the words of a task that are not in the model's vocabulary; ``None`` without one."""
    vocabulary = getattr(model, "vocabulary", None)
    if vocabulary is None:
        return None
    words = [word for s in in_case_of(model, task).sentences for word in s.split()]
    return sum(word not in vocabulary for word in words) / len(words)


def check_tasks(names: list[str]) -> list[str]:
    """The names of tasks in capital letters.

    Raises:
        ValueError: for a name that no task has, or none.
    """
    upper = [name.strip().upper() for name in names]
    unknown = [name for name in upper if name not in TASKS]
    if unknown or not upper:
        raise ValueError(
            f"tasks must be some of {', '.join(TASKS)}, got {', '.join(unknown) or 'none'}"
        )
    return list(dict.fromkeys(upper))


def check_encodes(model: Any) -> None:
    """Raises ValueError for a model without ``encode``."""
    if not callable(getattr(model, "encode", None)):
        raise ValueError(
            f"sentence tasks need a model with encode(sentences), which {type(model).__name__} "
            "lacks: use SkipThought, or give your model that method"
        )
