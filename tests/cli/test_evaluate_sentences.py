"""``ln-zoo evaluate-sentences``: rows of models and controls, the file, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import CONFIGS, Capture, Patch, cli, rows_of
from refusals import refuses
from training import quiet_trainer

from ln_zoo.cli import main
from ln_zoo.data import SyntheticBooks
from ln_zoo.data.books.sentence_tasks import read_task
from ln_zoo.metrics import sentence_tasks
from ln_zoo.metrics.sentence_models import model_scores
from ln_zoo.models import SkipThought
from ln_zoo.plots.comparison import read_curves

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*items here"),
    pytest.mark.filterwarnings("ignore:.*dataloader.*"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = SyntheticBooks(books=4, paragraphs=5, val_books=1, test_books=1)
    torch.manual_seed(1)
    trainer = quiet_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(SkipThought(data.vocabulary, hidden_size=8, embedding_features=4), datamodule=data)
    path = tmp_path_factory.mktemp("trained") / "small.ckpt"
    trainer.save_checkpoint(path)
    return path


@pytest.fixture(autouse=True)
def tasks(in_tmp: Path, monkeypatch: Patch) -> Path:
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
        rows = ["pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment"]
        for i in range(20):
            rows += [f"{i}\t{sentence('sold')}\t{sentence('stole')}\t{1 + i % 5}\tNEUTRAL"]
        (folder / f"SICK_{name}.txt").write_text("\n".join(rows))
    return folder


def run(*argv: object) -> None:
    options = ("--data", "tasks", "--as_is", "--tasks", "cr,SICK")
    assert main(["evaluate-sentences", *map(str, argv), *options]) == 0


def test_rows_of_a_model_and_of_controls(checkpoint: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    Path("vectors.txt").write_text("boat 1 2\nBook 0 1\n")
    encoders = (
        f"ours={checkpoint}", f"fresh=untrained:{checkpoint}", f"mean=word-mean:{checkpoint}",
        "file=word-mean:vectors.txt", "echo=echo-state", "majority",
    )  # fmt: skip
    run(*encoders, "--features", "16", "--out", "scores.csv")
    found = {(row["encoder"], row["metric"]): row for row in rows_of("scores.csv")}
    assert len(found) == 6 * 4
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
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (row,) = (line for line in lines if line[:1] == ["ours"])
    assert row[-3:] == [f"{expected:.1f}", "±", f"{error:.1f}"]
    (paper,) = (line for line in lines if "(about 1.7 M iterations)" in " ".join(line))
    assert paper[-4:] == ["0.858", "0.788", "0.270", "83.1"]


def test_checkpoints_of_a_run_become_a_curve(checkpoint: Path) -> None:
    later = torch.load(checkpoint, weights_only=True) | {"global_step": 20}
    torch.save(later, "later.ckpt")
    run("later.ckpt", f"a={checkpoint}", "--curve", "curve.csv", "--out", "scores.csv")
    rows = rows_of("curve.csv")
    assert [row["step"] for row in rows] == ["1", "20"]
    scores = [row for row in rows_of("scores.csv") if row["encoder"] == "a"]
    first = {name: float(value) for name, value in rows[0].items() if name != "step"}
    assert {f"step_{r['metric']}": float(r["value"]) for r in scores} == first
    curve = read_curves(Path("curve.csv"), ["step_cr"], "step")["step_cr"]
    assert curve == {step: float(rows[0]["step_cr"]) for step in (1, 20)}  # the same weights


def test_stored_scores_in_the_same_table(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run("majority", "--out", "scores.csv")
    metrics = {"cr_fast": 65.4321, "sick_mse": 0.2701, "mr_fast": 70.0, "nll": 5.0}
    Path("test_results.json").write_text(json.dumps({"metrics": metrics}))
    run("LN=test_results.json", "scores.csv", "--out", "table.md")
    _, _, head, _, *rows = Path("table.md").read_text().splitlines()
    assert head == "| encoder | SICK r | SICK rho | SICK MSE | CR |"
    error = (65.4321 * (100 - 65.4321) / 130) ** 0.5
    assert rows[0] == f"| LN |  |  | 0.270 | 65.4 ± {error:.1f} |"
    assert rows[1].startswith("| majority | - | - | ")
    assert rows[1].endswith("| 53.8 ± 4.4 |")
    (paper,) = (row for row in rows if "one month (about 1.7 M iterations)" in row)
    assert paper.endswith("| *0.858* | *0.788* | *0.270* | *83.1* |")
    argv = ["evaluate-sentences", "scores.csv", "--protocol", "original"]
    refuses(["scores.csv", "fast", "--protocol"], cli, *argv, code=1)


def test_an_untrained_model_of_a_configuration() -> None:
    configs = (CONFIGS / "skip_thought/quickstart.yaml", CONFIGS / "norms/none.yaml")
    text = "+".join(map(str, configs))
    run(f"GRU=untrained:{text}", "--out", "scores.json", "--seed", "3")
    content = json.loads(Path("scores.json").read_text())
    assert (content["protocol"], content["seed"]) == ("fast", 3)
    assert {row["encoder"] for row in content["scores"]} == {"GRU"}
    assert not Path("runs").exists()
    argv = ["evaluate-sentences", "mlp.none", "--data=tasks", "--as_is", "--tasks=CR"]
    refuses(["MLPClassifier"], cli, *argv, code=1)
