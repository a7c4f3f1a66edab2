"""``ln-zoo evaluate-sentences``: rows of models and controls, the file, mistakes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import CONFIGS
from lightning.pytorch import Trainer

from ln_zoo.callbacks.sentence_evaluation import model_scores
from ln_zoo.cli import main
from ln_zoo.data import SyntheticBooks
from ln_zoo.data.sentence_tasks import read_task
from ln_zoo.metrics import sentence_tasks
from ln_zoo.models import MLPClassifier, SkipThought
from ln_zoo.plots.comparison import read_curves

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*items here"),
    pytest.mark.filterwarnings("ignore:.*dataloader.*"),
]


def save(path: Path, model, data) -> Path:
    trainer = Trainer(
        max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    trainer.save_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = SyntheticBooks(books=4, paragraphs=5, val_books=1, test_books=1)
    torch.manual_seed(1)
    model = SkipThought(data.vocabulary, hidden_size=8, embedding_features=4)
    return save(tmp_path_factory.mktemp("trained") / "small.ckpt", model, data)


@pytest.fixture(autouse=True)
def tasks(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CR and SICK in words of the synthetic books, in the current folder's ``tasks``."""
    monkeypatch.setattr(sentence_tasks, "PENALTIES", (1, 16))
    rng = np.random.default_rng(0)
    folder = in_tmp / "tasks"
    folder.mkdir()
    things = ["boat", "bread", "tree", "Book", "coin"]

    def sentence(deed: str) -> str:
        return f"they {deed} the {rng.choice(things)} in the market qqq"

    for ending, deed in (("pos", "praised"), ("neg", "burned")):
        lines = [sentence(deed) for _ in range(60 if ending == "pos" else 70)]
        (folder / f"custrev.{ending}").write_text("\n".join(lines))
    for name in ("train", "trial", "test_annotated"):
        rows = [
            f"{i}\t{sentence('sold')}\t{sentence('stole')}\t{1 + i % 5}\tNEUTRAL" for i in range(20)
        ]
        header = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment"
        (folder / f"SICK_{name}.txt").write_text("\n".join([header, *rows]))
    return folder


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    options = ("--data", "tasks", "--as_is", "--tasks", "cr,SICK")
    code = main(["evaluate-sentences", *map(str, argv), *options])
    return code, *capsys.readouterr()


def test_rows_of_a_model_and_of_controls(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    Path("vectors.txt").write_text("boat 1 2\nBook 0 1\n")
    encoders = (
        f"ours={checkpoint}",
        f"fresh=untrained:{checkpoint}",
        f"mean=word-mean:{checkpoint}",
        "file=word-mean:vectors.txt",
        "echo=echo-state",
        "majority",
    )
    code, out, err = run(capsys, *encoders, "--features", "16", "--out", "scores.csv")
    assert code == 0, err
    rows = list(csv.DictReader(Path("scores.csv").read_text().splitlines()))
    assert len(rows) == 6 * 4
    found = {(row["encoder"], row["metric"]): row for row in rows}
    model = SkipThought.load_from_checkpoint(checkpoint).eval()
    task = read_task("CR", "tasks", split_words=False)
    expected = model_scores(model, task, "fast")["cr"]
    ours = found["ours", "cr"]
    assert float(ours["value"]) == pytest.approx(expected, rel=1e-5)
    share = expected / 100
    error = 100 * (share * (1 - share) / 130) ** 0.5
    assert float(ours["standard_error"] or 0) == pytest.approx(error, rel=1e-5)
    assert (ours["items"], ours["protocol"]) == ("130", "fast")
    # Capitals are read as small letters.
    words = " ".join(task.sentences).lower().split()
    unknown = np.mean([word not in model.vocabulary for word in words])
    assert 0 < float(ours["unknown"]) == pytest.approx(unknown, rel=1e-5)
    assert found["echo", "cr"]["unknown"] == ""
    assert float(found["majority", "cr"]["value"]) == pytest.approx(100 * 70 / 130, rel=1e-5)
    assert found["majority", "sick_pearson"]["value"] == ""
    torch.manual_seed(0)
    model.reset_parameters()
    fresh = float(found["fresh", "cr"]["value"])
    assert fresh == pytest.approx(model_scores(model, task, "fast")["cr"], rel=1e-5)
    lines = [line.strip() for line in out.splitlines()]
    (row,) = (line for line in lines if line.startswith("ours"))
    assert row.split()[-3:] == [f"{expected:.1f}", "±", f"{error:.1f}"]
    (paper,) = (line for line in lines if "one month (about 1.7 M iterations)" in line)
    assert paper.split()[-4:] == ["0.858", "0.788", "0.270", "83.1"]
    (echo,) = (line for line in lines if line.startswith("random echo state network, 4,096"))
    assert echo.split()[-2:] == ["0.861", "80.3"]
    assert "reported rows are not comparable" in out
    assert lines[-1] == "scores: scores.csv"


def test_checkpoints_of_a_run_become_a_curve(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = torch.load(checkpoint, weights_only=True) | {"global_step": 20}
    torch.save(later, "later.ckpt")
    code, _, err = run(
        capsys, "later.ckpt", f"a={checkpoint}", "--curve", "curve.csv", "--out", "scores.csv"
    )
    assert code == 0, err
    rows = list(csv.DictReader(Path("curve.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["1", "20"]
    scores = csv.DictReader(Path("scores.csv").read_text().splitlines())
    assert {f"step_{r['metric']}": float(r["value"]) for r in scores if r["encoder"] == "a"} == {
        name: float(value) for name, value in rows[0].items() if name != "step"
    }
    curve = read_curves(Path("curve.csv"), ["step_cr"], "step")["step_cr"]
    assert curve == {step: float(rows[0]["step_cr"]) for step in (1, 20)}  # the same weights


def test_scores_that_are_there_stand_in_the_same_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(capsys, "majority", "--out", "scores.csv")[0] == 0
    metrics = {"cr_fast": 65.4321, "sick_mse": 0.2701, "mr_fast": 70.0, "nll": 5.0}
    Path("test_results.json").write_text(json.dumps({"metrics": metrics}))
    given = ("LN=test_results.json", "scores.csv")
    code, out, err = run(capsys, *given, "--out", "table.md")
    assert code == 0, err
    title, _, head, _, *rows = Path("table.md").read_text().splitlines()
    assert title.startswith("Sentence vectors, fast protocol. ±")
    assert "not comparable" in title
    assert head == "| encoder | SICK r | SICK rho | SICK MSE | CR |"
    error = (65.4321 * (100 - 65.4321) / 130) ** 0.5
    assert rows[0] == f"| LN |  |  | 0.270 | 65.4 ± {error:.1f} |"
    assert rows[1].startswith("| majority | - | - | ")
    assert rows[1].endswith("| 53.8 ± 4.4 |")
    (paper,) = (row for row in rows if "one month (about 1.7 M iterations)" in row)
    assert paper.endswith("| *0.858* | *0.788* | *0.270* | *83.1* |")
    assert "LN" in out
    # What was scored by one protocol is not shown under the other.
    code, _, err = run(capsys, *given[1:], "--protocol", "original")
    assert (code != 0, "by the fast protocol: give --protocol" in err) == (True, True)


def test_an_untrained_model_of_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    configs = (CONFIGS / "skip_thought/quickstart.yaml", CONFIGS / "norms/none.yaml")
    text = "+".join(map(str, configs))
    code, _, err = run(capsys, f"GRU=untrained:{text}", "--out", "scores.json", "--seed", "3")
    assert code == 0, err
    content = json.loads(Path("scores.json").read_text())
    assert (content["protocol"], content["seed"]) == ("fast", 3)
    assert {row["encoder"] for row in content["scores"]} == {"GRU"}
    assert not Path("runs").exists()


def test_models_that_do_not_encode(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from ln_zoo.data import Digits

    digits = Digits(batch_size=20, train_size=40, val_size=20)
    path = save(tmp_path / "digits.ckpt", MLPClassifier(64, [4]), digits)
    code, _, err = run(capsys, path)
    assert code != 0
    assert "need a model with encode(sentences), which MLPClassifier lacks" in err
