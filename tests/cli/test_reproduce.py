"""`ln-zoo reproduce`: the list, and verdicts on runs whose numbers are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ln_zoo.cli import main, reproduce
from ln_zoo.cli.reproduce import judge, with_table
from ln_zoo.cli.sweep.grid import Grid, SweepError, write_grid
from ln_zoo.cli.sweep.report import Report
from ln_zoo.zoo import claims
from ln_zoo.zoo.claims import Rule

FASTER = Rule("faster", "val_nll", "layer", "none")
LOWER = Rule("lower", "error", "layer", "none")


def report(
    out: Path, layer: list[list[float]], none: list[list[float]], lrs: tuple[str, ...] = ("1",)
) -> Report:
    """A sweep whose runs log these validation losses by epochs of 10 updates.

    The last is the test error too. With several rates the curves are those of the last, and the
    others' are worse.
    """
    out.mkdir(exist_ok=True)
    seeds = list(range(len(layer)))
    grid = Grid(["c.yaml"], ["layer.yaml", "none.yaml"], seeds, {"lr": list(lrs)})
    write_grid(grid, out)
    for run in grid.runs():
        curve = {"layer": layer, "none": none}[Path(run.norm).stem][run.seed]
        if run.settings["lr"] != lrs[-1]:
            curve = [9.0 for _ in curve]
        folder = out / run.name
        folder.mkdir(parents=True)
        results = {"metrics": {"error": curve[-1], "nll": curve[-1]}}
        (folder / "test_results.json").write_text(json.dumps(results))
        lines = [f"{epoch},{10 * epoch + 9},{value}" for epoch, value in enumerate(curve)]
        (folder / "metrics.csv").write_text("\n".join(["epoch,step,val_nll", *lines]) + "\n")
    return Report(grid, out)


SLOW = [[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]] * 3
FAST = [
    [0.9, 0.5, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1],
    [0.9, 0.5, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1],
    [0.9, 0.5, 0.3, 0.2, 0.2, 0.1, 0.1, 0.1],
]


def test_faster(tmp_path: Path) -> None:
    # 30, 40 and 40 updates to what takes the baseline 80.
    verdict, number = judge(report(tmp_path / "a", FAST, SLOW), FASTER)
    assert verdict == "holds"
    assert number == "2.2 times as fast (1.46 to 3.33), 3 seeds"
    # The other way round it is slower, but for what it never reaches: then it does not hold.
    assert judge(report(tmp_path / "b", SLOW, FAST), FASTER)[0] == "does not hold"
    slower = [[1.0, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.1]] * 2
    quick = [[1.0, 0.1], [1.0, 0.9, 0.1]]
    verdict, number = judge(report(tmp_path / "c", slower, quick), FASTER)
    assert (verdict, number) == ("undecided", "0.31 times as fast (0.0233 to 4.02), 2 seeds")
    # Met with some seeds only, or with one seed alone.
    assert judge(report(tmp_path / "d", [*FAST[:2], SLOW[0]], FAST), FASTER)[0] == "undecided"
    verdict, number = judge(report(tmp_path / "e", FAST[:1], SLOW[:1]), FASTER)
    assert (verdict, number) == ("undecided", "2.7 times as fast, 1 seeds")


def test_each_at_its_best_settings(tmp_path: Path) -> None:
    assert judge(report(tmp_path, FAST, SLOW, ("1", "2")), FASTER)[0] == "holds"


def test_lower_and_higher(tmp_path: Path) -> None:
    found = report(tmp_path / "a", [[0.10], [0.11], [0.12]], [[0.20], [0.22], [0.21]])
    verdict, number = judge(found, LOWER)
    assert verdict == "holds"
    assert number == "error -10 (-12.5 to -7.52), 3 seeds"
    assert judge(found, Rule("higher", "error", "layer", "none"))[0] == "does not hold"
    mixed = report(tmp_path / "b", [[0.10], [0.30]], [[0.20], [0.22]])
    assert judge(mixed, LOWER)[0] == "undecided"
    with pytest.raises(SweepError, match="the test has no 'bound'"):
        judge(found, Rule("lower", "bound", "layer", "none"))
    with pytest.raises(SweepError, match="has no 'loss'"):
        judge(found, Rule("faster", "loss", "layer", "none"))


def test_a_gain_that_grows(tmp_path: Path) -> None:
    # By seed: error of layer and of none, for a batch of 128 and one of 16, at either length.
    errors = [[0.30, 0.31, 0.20, 0.24], [0.30, 0.32, 0.20, 0.26], [0.31, 0.31, 0.19, 0.24]]
    settings = {"batch": ["128", "16"], "length": ["1", "2"]}
    grid = Grid(["c.yaml"], ["layer.yaml", "none.yaml"], [0, 1, 2, 3], settings)
    write_grid(grid, tmp_path)
    for run in grid.runs():
        # The last seed has finished in part.
        if run.seed == 3 and run.settings["length"] == "2":
            continue
        at = 2 * (run.settings["batch"] == "16") + (run.norm == "none.yaml")
        error = errors[run.seed % 3][at] + (run.settings["length"] == "2")
        folder = tmp_path / run.name
        folder.mkdir(parents=True)
        (folder / "test_results.json").write_text(json.dumps({"metrics": {"error": error}}))
        (folder / "metrics.csv").write_text(f"epoch,step,val_error\n0,9,{error}\n")
    found = Report(grid, tmp_path)
    # 1, 2 and 0 points become 4, 6 and 5.
    rule = Rule("grows", "error", "layer", "none", "batch", "128", "16")
    verdict, number = judge(found, rule)
    assert (verdict, number) == (
        "holds",
        "lead in error +1 to +5, +4 (+1.52 to +6.48), 3 seeds",
    )
    back = Rule("grows", "error", "layer", "none", "batch", "16", "128")
    assert judge(found, back)[0] == "does not hold"
    length = Rule("grows", "error", "layer", "none", "length", "1", "2")
    assert judge(found, length)[0] == "undecided"
    with pytest.raises(SweepError, match="no seed has finished at all settings"):
        judge(found, Rule("grows", "error", "layer", "none", "batch", "128", "4"))


def test_comparable(tmp_path: Path) -> None:
    # The last values are 0.1, 0.1 and 0.2 with 0.2: -0.1, -0.1 and 0 apart, within 0.21 of it.
    found = report(tmp_path, [*FAST[:2], [*FAST[2][:-1], 0.2]], SLOW)
    wide, narrow = (Rule("comparable", "nll", "layer", "none", margin=m) for m in (0.25, 0.1))
    assert judge(found, wide) == ("holds", "nll -0.0667 (-0.21 to +0.0768), 3 seeds")
    assert judge(found, narrow)[0] == "undecided"


def test_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    printed = capsys.readouterr().out
    for each in claims.claims():
        assert each.name in printed


def test_runs_the_sweep_and_gives_the_verdict(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []

    def fake_sweep(argv: list[str]) -> int:
        calls.append(argv)
        if not (in_tmp / "sweeps").exists():
            (in_tmp / "sweeps").mkdir()
            out = in_tmp / "sweeps/draw-speed-reduced"
            report(out, FAST, SLOW)
            for file in out.rglob("metrics.csv"):
                file.write_text(file.read_text().replace("val_nll", "step_val_bound"))
        return 1  # as where a run has failed

    monkeypatch.setattr(reproduce, "sweep", fake_sweep)
    assert main(["reproduce", "draw-speed", "--jobs=2"]) == 1
    (call,) = calls
    assert "--out=sweeps/draw-speed-reduced" in call
    assert "--jobs=2" in call
    assert call[call.index("--") + 1 :] == ["--model.importance_samples", "0"]
    assert "almost twice as fast: holds (reduced size; 2.2 times" in capsys.readouterr().out
    assert main(["reproduce", "draw-speed", "--gather"]) == 0
    assert len(calls) == 1
    assert main(["reproduce", "draw-speed", "--size=paper", "--gather"]) == 2
    assert "there is no sweep in sweeps/draw-speed-paper" in capsys.readouterr().err
    assert main(["reproduce", "draw-speed", "--print"]) == 1
    assert "--print" in calls[-1]


def test_an_analysis_is_printed_and_not_run(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "invariance", "--print"]) == 0
    assert capsys.readouterr().out == "ln-zoo analyze invariance\n"
    assert main(["reproduce", "invariance", "--gather"]) == 0
    assert "our verdict: holds" in capsys.readouterr().out
    assert not list(in_tmp.iterdir())


def test_claims_that_cannot_be_run(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = next(each for each in claims.claims() if not each.sweep and not each.command)
    for argv, message in (
        (["draw-sped"], "no claim 'draw-sped'; did you mean 'draw-speed'?"),
        ([none.name], f"{none.name} has no sweep: {none.verdict}. {none.reason}"),
        (["draw-bound", "--size=reduced"], "has no sweep of --size reduced, only paper"),
    ):
        assert main(["reproduce", *argv]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_the_page_is_written_with_the_table_of_the_readme(in_tmp: Path) -> None:
    (in_tmp / "docs/results").mkdir(parents=True)
    first, last = reproduce._MARKS
    (in_tmp / "README.md").write_text(f"before\n{first}\nold\n{last}\nafter\n")
    assert main(["reproduce", "--write", "docs/results/claims.md"]) == 0
    assert (in_tmp / "docs/results/claims.md").read_text() == claims.page("docs/results")
    readme = (in_tmp / "README.md").read_text()
    assert readme == f"before\n{first}\n{claims.table()}\n{last}\nafter\n"
    assert with_table(readme) == readme
