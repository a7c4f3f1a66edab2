"""The report of a sweep, of runs whose numbers are known."""

from __future__ import annotations

import csv
import math
import shutil
from pathlib import Path

import pytest
import sweep_runs
from PIL import Image
from sweep_runs import refuses, write_tested

from ln_zoo.cli import main
from ln_zoo.sweeps import pictures
from ln_zoo.sweeps.comparisons import differences, reached, spreads
from ln_zoo.sweeps.grid import Grid, SweepError
from ln_zoo.sweeps.manifest import existing_grid, write_grid
from ln_zoo.sweeps.pictures import metrics_to_draw
from ln_zoo.sweeps.report import write_report
from ln_zoo.sweeps.results import Results
from ln_zoo.sweeps.selection import chosen_settings, median_seed
from ln_zoo.sweeps.state import write_failure
from ln_zoo.sweeps.statistics import SeedSummary, paired

#: Test error, and test error by epochs of 10 updates, by label and seed.
RUNS = {
    ("layer", "1e-3"): [(0.02, [0.5, 0.1, 0.02]), (0.03, [0.4, 0.03, 0.03]), (0.01, [0.01] * 3)],
    ("layer", "1e-2"): [(0.05, [0.5, 0.4, 0.3])] * 3,
    ("none", "1e-3"): [(0.04, [0.5, 0.3, 0.1]), (0.04, [0.6, 0.2, 0.03]), (0.03, [0.5, 0.4, 0.02])],
    ("none", "1e-2"): [(0.035, [0.2, 0.2, 0.2])] * 2,
}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    norms, settings = ["n/layer.yaml", "n/none.yaml"], {"model.lr": ["1e-3", "1e-2"]}
    grid = Grid(["c.yaml"], norms, [0, 1, 2], settings)
    (tmp_path / "mlp").mkdir()
    write_grid(grid, tmp_path / "mlp")
    for run in grid.runs():
        numbers = RUNS[run.label.split(", ")[0], run.settings["model.lr"]]
        folder = tmp_path / "mlp" / run.name
        if run.seed >= len(numbers):
            write_failure(folder, "the training loss is not finite at step 3")
            continue
        error, curve = numbers[run.seed]
        columns = "epoch,epoch_seconds,epoch_test_error,epoch_train_nll,step,val_nll"
        lines = [f"{n},5.0,{value},{value},{10 * n + 9},{value}" for n, value in enumerate(curve)]
        metrics = {"nll": 2 * error, "error": error}
        write_tested(folder, columns, lines, metrics=metrics, steps=30)
    return tmp_path / "mlp"


def results(out: Path, **options: str) -> Results:
    return Results(existing_grid(out), out, **options)


def test_spreads_in_the_units_of_the_tables(out: Path) -> None:
    found = spreads(results(out))
    assert found["layer, model.lr=1e-3", "error"] == SeedSummary.of([2.0, 3.0, 1.0])
    assert found["layer, model.lr=1e-3", "error"].deviation == pytest.approx(1.0)
    assert found["none, model.lr=1e-2", "error"].number == 2


def test_paired_differences(out: Path) -> None:
    found = differences(results(out))
    same = found["layer, model.lr=1e-3", "none, model.lr=1e-3", "error"]
    # -2, -1, -2 points: mean -5/3, standard error 1/3, t(2) at 97.5 % is 4.302653.
    assert (same.number, same.mean) == (3, pytest.approx(-5 / 3))
    assert (same.low, same.high) == pytest.approx((-5 / 3 - 4.302653 / 3, -5 / 3 + 4.302653 / 3))
    # Only of seeds that both have.
    assert found["layer, model.lr=1e-2", "none, model.lr=1e-2", "error"].number == 2
    # Best settings by validation: 1e-3 of both.
    chosen = chosen_settings(results(out))
    assert [(c.norm, c.label, c.edges) for c in chosen] == [
        ("layer", "layer, model.lr=1e-3", ["model.lr=1e-3"]),
        ("none", "none, model.lr=1e-3", ["model.lr=1e-3"]),
    ]
    single = paired({0: 1.0}, {0: 2.0, 1: 5.0})
    assert single is not None
    assert single.mean == -1
    assert math.isnan(single.low)
    assert paired({0: 1.0}, {1: 1.0}) is None


def with_scores_at_1e2(out: Path, score: str) -> Results:
    """The results, had layer norm at 1e-2 this score of validation in place of 0.3."""
    for run in results(out).grid.runs():
        if run.label == "layer, model.lr=1e-2":
            table = out / run.name / "metrics.csv"
            table.write_text(table.read_text().replace("0.3", score))
    return results(out)


def test_settings_of_equal_scores_are_all_named(out: Path, tmp_path: Path) -> None:
    """By seeds 0.02, 0.03 and 0.01 at 1e-3; thrice 0.02 at 1e-2."""
    found = with_scores_at_1e2(out, "0.02")
    layer, none = chosen_settings(found)
    assert (layer.label, layer.tied) == ("layer, model.lr=1e-3", ["layer, model.lr=1e-2"])
    assert none.tied == []
    written = write_report(found, tmp_path / "report")
    assert "| layer | model.lr=1e-3 or model.lr=1e-2 | 0.02 |" in written


def test_an_unfinished_grid_has_no_edge(out: Path, tmp_path: Path) -> None:
    shutil.rmtree(out / "layer-model.lr-1e-2")
    written = write_report(results(out), tmp_path / "report")
    assert "| layer | model.lr=1e-3 | 0.02 | 1 of 2 settings have finished |" in written
    assert written.count("settings have finished") == 1


def test_settings_are_compared_over_the_seeds_that_all_of_them_have(out: Path) -> None:
    """By seeds 0.02, 0.03 and 0.01 at 1e-3; 0.022 at 1e-2, which lacks the last seed."""
    with_scores_at_1e2(out, "0.022")
    shutil.rmtree(out / "layer-model.lr-1e-2/seed_2")
    layer = chosen_settings(results(out))[0]
    assert (layer.label, layer.score) == ("layer, model.lr=1e-2", pytest.approx(0.022))


def test_the_highest_accuracy_is_chosen(tmp_path: Path) -> None:
    done = sweep_runs.results(tmp_path / "sweep", sweep_runs.FAST, sweep_runs.SLOW, ("1", "2"))
    assert [each.label for each in chosen_settings(done)] == ["layer, lr=2", "none, lr=2"]
    for file in done.out.rglob("metrics.csv"):
        file.write_text(file.read_text().replace("val_nll", "val_accuracy"))
    by_accuracy = chosen_settings(results(done.out, select="val_accuracy"))
    # Validation has 9.0 throughout at the other rate.
    assert [each.label for each in by_accuracy] == ["layer, lr=1", "none, lr=1"]


def test_the_median_seed_by_validation_is_the_one_to_publish(out: Path) -> None:
    """The last validation scores of layer norm at 1e-3 are 0.02, 0.03 and 0.01."""
    last = results(out)
    assert median_seed(last, "layer, model.lr=1e-3") == 0
    # 0.1, 0.03, 0.02; of an even number the worse of the middle two.
    assert median_seed(last, "none, model.lr=1e-3") == 1
    assert median_seed(last, "none, model.lr=1e-2") == 1


def test_when_the_best_of_the_baseline_is_met(out: Path) -> None:
    metrics = ["epoch_train_nll", "val_nll"]
    found = {(r.run.label, r.run.seed, r.metric): r for r in reached(results(out), metrics)}
    first = found["layer, model.lr=1e-3", 0, "epoch_train_nll"]
    # The baseline's best of seed 0 is 0.1, met after two of three epochs: 20 updates of 0.5 s.
    assert (first.best, first.steps, first.baseline_steps) == (0.1, 20, 30)
    assert (first.seconds, first.baseline_seconds) == (10, 15)
    # Its own is 0.02 after 30 updates.
    assert (first.own_best, first.own_steps, first.share, first.own_share) == (0.02, 30, 2 / 3, 1)
    assert found["layer, model.lr=1e-3", 1, "val_nll"].own_share == 20 / 30
    never = found["layer, model.lr=1e-2", 0, "epoch_train_nll"]
    assert never.best == 0.2
    assert math.isinf(never.steps)
    assert found["none, model.lr=1e-3", 2, "epoch_train_nll"].steps == 30


def test_what_is_written(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--out", str(out), "--gather"]) == 0
    printed = capsys.readouterr().out
    folder = out / "report"
    text = (folder / "report.md").read_text()
    assert text in printed
    assert "11 of 12 runs have finished." in text
    assert "`none-model.lr-1e-2/seed_2` failed: the training loss is not finite at step 3" in text
    assert "| layer, model.lr=1e-3 | 3 | 0 | 0.04 ± 0.02 (0.02 to 0.06) | 2 ± 1 (1 to 3) |" in text
    assert "| layer, model.lr=1e-3 | none, model.lr=1e-3 | error (%) | 3 | -1.67 | -3.1 to -0.232 |" in text  # fmt: skip  # noqa: E501
    assert "| layer | model.lr=1e-3 | 0.02 | model.lr=1e-3 |" in text
    assert "| layer, model.lr=1e-3 | epoch_train_nll | 20 (10 to 20) | 0.6667 (0.3333 to 0.6667) | 10 (5 to 10) | 3 of 3 | 20 (10 to 30) | 0.6667 (0.3333 to 1) |" in text  # fmt: skip  # noqa: E501
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    rows = {name: list(csv.DictReader((folder / f"{name}.csv").open())) for name in
            ("runs", "spread", "differences", "reached", "curves")}  # fmt: skip
    assert len(rows["runs"]) == 12
    assert rows["runs"][0] == {
        "norm": "layer", "model.lr": "1e-3", "seed": "0", "state": "finished", "nll": "0.04",
        "error": "2", "updates": "30", "failure": "",
    }  # fmt: skip
    assert (rows["spread"][1]["deviation"], rows["differences"][0]["pairs"]) == ("1", "3")
    assert len(rows["curves"]) == 33
    assert (rows["reached"][0]["steps"], rows["reached"][0]["own_steps"]) == ("20", "30")
    # The curves, and what chooses settings.
    compared = {row["metric"] for row in rows["reached"]}
    assert compared == {"epoch_train_nll", "epoch_test_error", "val_nll"}


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        ("val_image_r1,val_image_r5,val_image_r10", "val_image_r1,val_image_r5,val_image_r10"),
        ("step_train_nll,step_val_error,step_train_error", "step_train_error,step_val_error"),
        ("step_train_nll,step_train_error", "step_train_nll,step_train_error"),
        ("step_seconds,step_train_nll,step_train_error", "step_train_nll,step_train_error"),
    ],
)
def test_which_curves_are_drawn(
    tmp_path: Path, columns: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = Grid(["c.yaml"], ["layer.yaml"], [0])
    write_grid(grid, tmp_path)
    row = ",".join("0.5" for _ in columns.split(","))
    rows = [f"{step},{row}" for step in (2999, 3999)]
    write_tested(tmp_path / "layer/seed_0", f"step,{columns}", rows, metrics={"nll": 1.0}, steps=3)
    found = results(tmp_path)
    assert metrics_to_draw(found) == (shown.split(","), "step")
    picture = tmp_path / "report/curves.png"
    write_report(found, picture.parent)
    with Image.open(picture) as image:
        assert image.mode == "P"  # a table of colours: half of the bytes
    timed = "step_seconds" in columns
    assert (picture.parent / "curves_seconds.png").is_file() == timed
    assert ("](curves_seconds.png)" in (picture.parent / "report.md").read_text()) == timed

    monkeypatch.setattr(pictures, "find_spec", lambda name: None)  # without matplotlib
    page = write_report(found, tmp_path / "bare")
    assert (tmp_path / "bare/curves.csv").read_text() == picture.with_suffix(".csv").read_text()
    assert "curves.png" not in page


def test_seconds_of_training_tell_when_the_best_is_met(tmp_path: Path) -> None:
    grid = Grid(["c.yaml"], ["layer.yaml", "none.yaml"], [0])
    write_grid(grid, tmp_path)
    for run, pace in zip(grid.runs(), (0.5, 0.25), strict=True):
        rows = [f"{step},{step * pace},{1 / (1 + step)},0.5" for step in (0, 10, 20)]
        names = "step,step_seconds,step_train_nll,step_train_error"
        write_tested(tmp_path / run.name, names, rows, metrics={"nll": 1.0}, steps=20)
    first = reached(results(tmp_path), ["step_train_nll"])[0]
    assert (first.run.label, first.steps, first.baseline_steps) == ("layer", 20, 20)
    assert (first.seconds, first.baseline_seconds) == (10, 5)


def test_reports_that_cannot_be(out: Path, tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="--baseline batch is not one of layer, none"):
        results(out, baseline="batch")
    with pytest.raises(SweepError, match=r"--metric: not all runs in .* logged 'loss'"):
        write_report(results(out), tmp_path / "report", ["loss"])
    refuses("--select: not all runs logged 'loss'", results, out, select="loss")
    write_grid(Grid(["c.yaml"], ["a.yaml"], [0]), tmp_path)
    write_failure(tmp_path / "a/seed_0", "no data")
    with pytest.raises(SweepError, match="no run has finished yet; 1 failed, such as: no data"):
        results(tmp_path)
    assert main(["sweep", "--out", str(tmp_path / "nowhere"), "--gather"]) == 2
    assert not (tmp_path / "nowhere").exists()
