"""Scores under one, two and three processes are the same, for every dataset.

``python tests/data/test_processes.py`` writes the table ``docs/figures/processes.csv``.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_support import ready
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from training import quiet_trainer

from ln_zoo import data, models
from ln_zoo.callbacks import SentenceEvaluation
from ln_zoo.callbacks.evaluation_loop import score
from ln_zoo.data.base import ZooDataModule

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs/figures/processes.csv"
PROCESSES = (1, 2, 3)
#: Sums over examples are float64: N terms in another order differ by N roundings.
ROUNDING = 1e-16

Make = Callable[[], LightningDataModule]


#: A small model for a dataset.
MODELS: dict[str, Callable[[Any], LightningModule]] = {
    "classifier": lambda made: models.MLPClassifier(made.in_features, [8], made.num_classes),
    "draw": lambda made: models.DRAW(made.image_shape[1:], 2, 8, 4, eval_samples=1),
    "pen": lambda made: models.Handwriting(8, 1, text=False, mixture_components=2),
    "scenes": lambda made: models.OrderEmbedding(
        made.vocabulary, made.image_features, 6, 8, fold_size=None
    ),
    "sentences": lambda made: models.SkipThought(made.vocabulary, 8, 6),
    "reader": lambda made: models.AttentiveReader(made.vocabulary, 8, dropout=0.0),
}
UNEVEN = {"train_size": 31, "val_size": 23, "test_size": 29, "eval_batch_size": 4}
#: Sizes that no number of processes or of examples per batch divides.
SMALL: dict[str, tuple[Make, str]] = {
    "digits": (lambda: data.Digits(train_size=31, val_size=23, eval_batch_size=7), "classifier"),
    "binarized_digits": (
        lambda: data.BinarizedDigits(8, train_size=31, val_size=23, eval_batch_size=7),
        "draw",
    ),
    "synthetic_handwriting": (
        lambda: data.SyntheticHandwriting(**UNEVEN, characters=4, length_mode="full"),
        "pen",
    ),
    "synthetic_scenes": (lambda: data.SyntheticScenes(**UNEVEN, image_features=9), "scenes"),
    "synthetic_books": (
        lambda: data.SyntheticBooks(6, paragraphs=3, val_books=1, test_books=1, eval_batch_size=4),
        "sentences",
    ),
    "synthetic_cloze": (lambda: data.SyntheticClozeQA(**UNEVEN), "reader"),
}
#: Real data, by their folder in ``$LN_ZOO_DATA``.
REAL: dict[str, tuple[Make, str]] = {
    "mnist": (lambda: data.MNIST(eval_batch_size=999), "classifier"),
    "flickr8k": (lambda: data.CaptionedImages(dataset="flickr8k", eval_batch_size=77), "scenes"),
    "cloze_qa": (lambda: data.ClozeQA(eval_batch_size=53), "reader"),
    "iam_ondb": (lambda: data.IAMOnDB(split="official", length_mode="crop", max_points=50), "pen"),
}


@pytest.mark.slow
def test_scores_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    compare(measure(tmp_path, list(SMALL)))


def compare(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for processes in PROCESSES[1:]:
            assert row[f"{processes}_processes"] == pytest.approx(
                row["1_processes"], rel=row["examples"] * ROUNDING, abs=1e-300
            ), row


def measure(folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """Rows of dataset, metric, examples, and the score under each number of processes."""
    _write_task(folder)
    found = {processes: _launch(processes, folder, names) for processes in PROCESSES}
    return [
        {"dataset": name, "metric": metric, "examples": int(scores["examples"])}
        | {f"{processes}_processes": found[processes][name][metric] for processes in PROCESSES}
        for name, scores in found[1].items()
        for metric in scores
        if metric != "examples"
    ]


def _write_task(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for ending, word in (("pos", "fine"), ("neg", "broken")):
        lines = [f"the {word} {rng.choice(['boat', 'tree', 'book'])} ." for _ in range(61)]
        (folder / f"rt-polarity.{ending}").write_text("\n".join(lines) + "\n")


def _launch(processes: int, folder: Path, names: list[str]) -> dict[str, dict[str, float]]:
    with tempfile.NamedTemporaryFile(dir=folder) as unused:
        store = f"{unused.name}-{processes}"
    running = []
    path = f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests/data'}"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    for rank in range(processes):
        argv = [sys.executable, __file__, str(rank), str(processes), store, str(folder), *names]
        running.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=600)[0] for process in running]
    assert [process.returncode for process in running] == [0] * processes
    ranks = [json.loads(output.splitlines()[-1]) for output in outputs]
    for rank in ranks[1:]:
        assert _shared(rank) == _shared(ranks[0])
    return ranks[0]


def _shared(scores: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Scores that all processes have; sentence tasks are scored by the first."""
    alone = {"test_mr_fast"}
    return {name: {k: of[k] for k in of.keys() - alone} for name, of in scores.items()}


class TrainingScores(Callback):
    """Score the training set as `EpochEvaluation` does, in a test."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if hasattr(pl_module, "per_example"):
            loader = trainer.datamodule.train_eval_dataloader(examples=31)
            self.found = score(trainer, loader, "train")


def work(rank: int, processes: int, store: str, folder: str, names: list[str]) -> None:
    """One of several processes: print its scores as JSON."""
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    place = {"init_method": f"file://{store}", "rank": rank, "world_size": processes}
    torch.distributed.init_process_group("gloo", **place)

    class Given(LightningEnvironment):
        creates_processes_externally = True

        def local_rank(self) -> int:
            return rank

    scores: dict[str, dict[str, float]] = {}
    for name in names:
        torch.manual_seed(0)
        make, model = {**SMALL, **REAL}[name]
        made: Any = ready(make())
        training = TrainingScores()
        callbacks: list[Callback] = [training]
        if isinstance(made, data.SyntheticBooks):
            callbacks.append(SentenceEvaluation(tasks=["MR"], root=folder, split_words=False))
        strategy = DDPStrategy(cluster_environment=Given(), process_group_backend="gloo")
        options = {"devices": processes, "strategy": strategy, "precision": "64-true"}
        trainer = quiet_trainer(*callbacks, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.test(MODELS[model](made), datamodule=made, verbose=False)
        found = {key: float(value) for key, value in trainer.callback_metrics.items()}
        found["examples"] = _examples(made)
        scores[name] = found | training.found
    torch.distributed.barrier()
    print(json.dumps(scores), flush=True)


def _examples(made: ZooDataModule) -> int:
    """Terms of the largest sum of a score: examples, or their tokens, points or pixels."""
    return max(len(made.evaluation_set("train")), len(made.evaluation_set("test"))) * 1000


def main() -> None:
    """Write the table of all datasets that are here."""
    here = [name for name in REAL if Path(os.environ.get("LN_ZOO_DATA", "-"), name).is_dir()]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), [*SMALL, *here])
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    compare(rows)


if __name__ == "__main__":
    if sys.argv[1:]:
        work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
    else:
        main()
