"""Scores of sentence vectors during training: at which updates, of what, leaving training alone."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import rows_of
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from refusals import refuses
from torch.utils.data import DataLoader
from training import quiet_trainer

from ln_zoo.callbacks import SentenceEvaluation
from ln_zoo.data.books.sentence_tasks import ClassificationTask, read_task
from ln_zoo.metrics import background_scores, sentence_tasks
from ln_zoo.metrics.background_scores import BackgroundScores
from ln_zoo.metrics.sentence_models import model_scores, unknown_share
from ln_zoo.metrics.sentence_tasks import KnownVectors, accuracy, evaluate
from ln_zoo.utils.vocabulary import Vocabulary

pytestmark = [
    pytest.mark.usefixtures("few_penalties"),
    pytest.mark.filterwarnings("ignore:.*items here"),
]
ALL_PENALTIES = sentence_tasks.PENALTIES
WORDS = ["good", "bad", "it", "is", "very"]


class Counter(LightningModule):
    """Counts its words, with weights that training changes."""

    def __init__(self, words: list[str] = WORDS) -> None:
        super().__init__()
        self.vocabulary = Vocabulary(words)
        self.table = torch.nn.Embedding(len(words) + 2, 4)
        self.seen: list[tuple[int, bool]] = []
        self.read: list[str] = []

    def encode(self, sentences: list[str], eos: bool = True) -> np.ndarray:
        assert not self.training
        torch.rand(3)
        self.seen.append((len(sentences), eos))
        self.read += sentences
        numbers = [self.vocabulary.numbers(sentence.split()) for sentence in sentences]
        return np.stack([self.table.weight[row].mean(0).numpy() for row in numbers])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.table.weight * torch.rand(4)).sum()

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Nothing is measured."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(6, 1))


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """CR and MPQA of 120 sentences each, which training can tell apart."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name in ("custrev", "mpqa"):
        for ending, word in (("pos", "Good"), ("neg", "bad")):
            lines = [
                f"it is {'very ' * rng.integers(3)}{word if rng.random() < 0.9 else 'odd'}"
                for _ in range(60)
            ]
            (folder / f"{name}.{ending}").write_text("\n".join(lines))
    return folder


@pytest.fixture
def few_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the regressions; other processes have all of them."""
    monkeypatch.setattr(sentence_tasks, "PENALTIES", (1, 16))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of processes, each of which takes seconds to start."""
    monkeypatch.setattr(BackgroundScores, "_evaluate", lambda self, *work: evaluate(*work))


def fit(folder: Path, *callbacks: object, model: Counter | None = None, **options) -> Counter:
    torch.manual_seed(0)
    model = model or Counter()
    logger = CSVLogger(folder, "run")
    trainer = quiet_trainer(*callbacks, max_epochs=2, logger=logger, log_every_n_steps=100)
    trainer.fit(model, **options)
    return model


def logged(folder: Path, version: int = 0) -> dict[int, dict[str, str]]:
    rows = rows_of(folder / f"run/version_{version}/metrics.csv")
    return {int(row["step"]): row for row in rows}


def evaluation(folder: Path, **options) -> SentenceEvaluation:
    chosen = {"every_n_steps": 5, "tasks": ["cr", "MPQA"], "split_words": False, **options}
    return SentenceEvaluation(root=str(folder), **chosen)


def test_scores_are_logged_at_updates_and_training_is_left_alone(
    tmp_path: Path, tasks: Path
) -> None:
    plain = fit(tmp_path / "plain")
    model = fit(tmp_path, evaluation(tasks))
    assert torch.equal(plain.table.weight, model.table.weight)
    rows = logged(tmp_path)
    assert {step: row["epoch"] for step, row in rows.items()} == {0: "0", 5: "0", 10: "1"}
    # A sentence is encoded once, however often it occurs.
    assert len(model.seen) == 6
    assert all(0 < count < 30 and not eos for count, eos in model.seen)
    # Small letters, as those of the vocabulary are.
    assert {word for sentence in model.read for word in sentence.split()} == {*WORDS, "odd"}
    torch.manual_seed(0)
    untrained = Counter().eval()
    task = read_task("CR", str(tasks), split_words=False).map(str.lower)
    assert isinstance(task, ClassificationTask)
    with torch.no_grad():
        expected = 100 * accuracy(untrained.encode(task.sentences), task.labels, "fast")
    assert float(rows[0]["step_cr"]) == pytest.approx(expected)
    assert expected > 85
    assert float(rows[10]["sentence_seconds"]) > 0


@pytest.mark.parametrize(
    "by", ["threads", pytest.param("processes", marks=pytest.mark.slow)], ids=str
)
def test_scores_made_in_the_background_are_the_same(
    tmp_path: Path, tasks: Path, by: str, request: pytest.FixtureRequest
) -> None:
    if by == "threads":
        request.getfixturevalue(by)
    fit(tmp_path / "waiting", evaluation(tasks, every_n_steps=10))
    callback = evaluation(tasks, every_n_steps=10, background=True)
    fit(tmp_path / "beside", callback)
    waiting, beside = logged(tmp_path / "waiting"), logged(tmp_path / "beside")
    assert set(beside) == {0, 10}
    for step, name in itertools.product(beside, ("step_cr", "step_mpqa", "epoch")):
        assert beside[step][name] == waiting[step][name]
    assert callback._processes is None  # and no process is left


@pytest.mark.usefixtures("threads")
def test_errors_in_the_background_end_the_run(tmp_path: Path, tasks: Path) -> None:
    class Broken(Counter):
        def encode(self, sentences: list[str], eos: bool = True) -> np.ndarray:
            return np.full((len(sentences), 2), np.nan)

    class Stopped(Counter):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            raise ValueError("stopped")

    for model, message in ((Broken(), "vectors that are not finite"), (Stopped(), "stopped")):
        callback = evaluation(tasks, background=True)
        refuses(message, fit, tmp_path / message, callback, model=model)
        assert callback._processes is None


def lengths(sentences: list[str]) -> np.ndarray:
    return np.array([[len(sentence), 1.0] for sentence in sentences])


def test_another_process_gives_the_same_scores(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = read_task("CR", str(tasks), split_words=False)
    vectors = KnownVectors(lengths, task.sentences)
    scores = BackgroundScores(1)
    found = scores.submit(vectors, task, "fast")
    monkeypatch.setattr(sentence_tasks, "PENALTIES", ALL_PENALTIES)
    assert found.result() == evaluate(vectors, task, "fast")
    scores.close()


@pytest.mark.parametrize("code", ["raise ValueError('labels')", "import time; time.sleep(600)"])
def test_a_process_that_fails_or_is_killed(
    tasks: Path, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_scores, "_COMMAND", [sys.executable, "-S", "-c", code])
    task = read_task("CR", str(tasks), split_words=False)
    scores = BackgroundScores(1)
    running = scores.submit(KnownVectors(lengths, task.sentences), task, "fast")
    if "sleep" in code:
        while not scores._running:
            time.sleep(0.01)
        scores.close()
    refuses("CR.*labels" if "labels" in code else "CR.*-9", running.result, error=RuntimeError)


@pytest.mark.filterwarnings("ignore:.*callbacks used to create")
def test_a_resumed_run_goes_on_at_the_next_multiple(tmp_path: Path, tasks: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6, save_top_k=-1)
    fit(tmp_path, evaluation(tasks, at_start=False), saving)
    assert set(logged(tmp_path)) == {5, 10}
    fit(tmp_path, evaluation(tasks), ckpt_path=tmp_path / "step=6.ckpt")
    assert set(logged(tmp_path, 1)) == {10}
    assert logged(tmp_path, 1)[10]["step_mpqa"] == logged(tmp_path)[10]["step_mpqa"]


def test_tests_have_the_scores_among_their_metrics(tasks: Path) -> None:
    torch.manual_seed(0)
    model = Counter()
    task = read_task("CR", str(tasks), split_words=False)
    for protocol, name in (("fast", "test_cr_fast"), ("original", "test_cr")):
        callback = evaluation(tasks, tasks=["CR"], protocol=protocol)
        trainer = quiet_trainer(callback)
        (metrics,) = trainer.test(model, DataLoader(torch.zeros(2, 1)), verbose=False)
        with torch.no_grad():
            expected = model_scores(model.eval(), task, protocol)["cr"]  # type: ignore[arg-type]
        assert metrics == {name: pytest.approx(expected)}


def test_capitals_stay_for_a_model_that_knows_some(tasks: Path) -> None:
    model = Counter(["Good", "bad", "it"]).eval()
    task = read_task("CR", str(tasks), split_words=False)
    with torch.no_grad():
        model_scores(model, task, "fast")
    assert any("Good" in sentence for sentence in model.read)
    words = [word for sentence in task.sentences for word in sentence.split()]
    share = np.mean([word not in ("Good", "bad", "it") for word in words])
    assert unknown_share(model, task) == pytest.approx(share)


def test_wrong_arguments_are_told_at_once(tmp_path: Path, tasks: Path) -> None:
    for name, value in (("every_n_steps", 0), ("n_jobs", 0), ("protocol", "slow")):
        refuses(f"{name}.*{value}", SentenceEvaluation, **{name: value})
    refuses(r"tasks.*MPQA.*SST", SentenceEvaluation, tasks=["MR", "sst"])

    class Mute(Counter):
        encode = None  # type: ignore[assignment]

    refuses(r"encode.*Mute", fit, tmp_path, evaluation(tasks), model=Mute())
    message = "has no rt-polarity.pos and rt-polarity.neg"
    refuses(message, fit, tmp_path, evaluation(tasks, tasks=["MR"]), error=FileNotFoundError)
