"""`ln-zoo reproduce`: the list, and verdicts on runs whose numbers are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ln_zoo.cli import main, reproduce
from ln_zoo.cli.reproduce import judge, with_table
from ln_zoo.cli.sweep.evidence import recompute
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
    # Targets of 0.27, 0.235 and 0.207: after 30, 40 and 40 updates, and 80 of the baseline.
    found = judge(report(tmp_path / "a", FAST, SLOW), FASTER)
    assert (found.verdict, found.seeds) == ("holds", 3)
    ratio = "2.2 (1.46 to 3.33)"
    assert found.number == f"times as fast to 90 %: {ratio}; 95 %: {ratio}; 99 %: {ratio}"
    assert found.interval == pytest.approx((1.46, 3.33), abs=0.005)
    # The other way round, the baseline's best is missed: two seeds in three cannot tell.
    back = judge(report(tmp_path / "b", SLOW, FAST), FASTER)
    assert back.verdict == "undecided"
    assert "99 %: met by 0 of 3, baseline 3 of 3" in back.number
    # Six seeds can, by ranks.
    never = judge(report(tmp_path / "c", SLOW * 2, FAST * 2), FASTER)
    assert never.verdict == "does not hold"
    one = judge(report(tmp_path / "d", FAST[:1], SLOW[:1]), FASTER)
    assert (one.verdict, one.interval) == ("undecided", None)


def test_each_at_its_best_settings(tmp_path: Path) -> None:
    assert judge(report(tmp_path, FAST, SLOW, ("1", "2")), FASTER).verdict == "holds"


def test_own_best(tmp_path: Path) -> None:
    # Own bests after 40, 50 and 50 updates, whatever they are; the baseline's after 80.
    found = report(tmp_path / "a", [FAST[0], FAST[1], FAST[1]], SLOW)
    for value, verdict in {0.6: "holds", 0.5: "holds", 0.95: "holds in part"}.items():
        rule = Rule("own_best", "val_nll", "layer", "none", value=value)
        assert judge(found, rule).verdict == verdict
    assert judge(found, rule).number == "0.58 (0.421 to 0.799) of the baseline's updates"
    assert judge(report(tmp_path / "b", FAST, SLOW), rule).verdict == "undecided"
    assert judge(report(tmp_path / "c", SLOW, [FAST[1]] * 3), rule).verdict == "does not hold"


def test_lower_and_higher(tmp_path: Path) -> None:
    found = report(tmp_path / "a", [[0.10], [0.11], [0.12]], [[0.20], [0.22], [0.21]])
    lower = judge(found, LOWER)
    assert lower.verdict == "holds"
    assert (lower.number, lower.seeds) == ("error -10 (-12.5 to -7.52)", 3)
    assert judge(found, Rule("higher", "error", "layer", "none")).verdict == "does not hold"
    mixed = report(tmp_path / "b", [[0.10], [0.30]], [[0.20], [0.22]])
    assert judge(mixed, LOWER).verdict == "undecided"
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
    grown = judge(found, rule)
    assert (grown.verdict, grown.seeds) == ("holds", 3)
    assert grown.number == "lead in error +1 to +5, +4 (+1.52 to +6.48)"
    back = Rule("grows", "error", "layer", "none", "batch", "16", "128")
    assert judge(found, back).verdict == "does not hold"
    length = Rule("grows", "error", "layer", "none", "length", "1", "2")
    assert judge(found, length).verdict == "undecided"
    with pytest.raises(SweepError, match="no seed has finished at all settings"):
        judge(found, Rule("grows", "error", "layer", "none", "batch", "128", "4"))


def test_comparable(tmp_path: Path) -> None:
    # The last values are 0.1, 0.1 and 0.2 with 0.2: -0.1, -0.1 and 0 apart, within 0.21 of it.
    found = report(tmp_path, [*FAST[:2], [*FAST[2][:-1], 0.2]], SLOW)
    wide, narrow = (Rule("comparable", "nll", "layer", "none", margin=m) for m in (0.25, 0.1))
    within = judge(found, wide)
    assert (within.verdict, within.number) == ("holds", "nll -0.0667 (-0.21 to +0.0768)")
    assert judge(found, narrow).verdict == "undecided"
    assert judge(found, narrow).seeds_needed == 5


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
    printed = capsys.readouterr().out
    assert "holds; times as fast to 90 %: 2.2" in printed
    assert "3 seeds (reduced size)" in printed
    assert main(["reproduce", "draw-speed", "--gather"]) == 0
    assert len(calls) == 1
    assert main(["reproduce", "draw-speed", "--size=paper", "--gather"]) == 2
    assert "there is no sweep in sweeps/draw-speed-paper" in capsys.readouterr().err
    assert main(["reproduce", "draw-speed", "--print"]) == 1
    assert "--print" in calls[-1]
    assert main(["reproduce", "draw-speed", "--seeds", "3,4"]) == 1
    assert calls[-1][calls[-1].index("--seeds") + 1] == "3,4"


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
        ([none.name], f"{none.name} has no command: {none.verdict}."),
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
    assert readme == f"before\n{first}\n{claims.readme_table()}\n{last}\nafter\n"
    assert with_table(readme) == readme


def test_all_rows_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == {each.name for each in claims.claims()}
    assert len(rows) == sum(max(1, len(each.outcomes)) for each in claims.claims())
    keys = {"claim", "quote", "verdict", "size", "interval", "seeds", "rule_date", "runs_date"}
    assert all(keys <= row.keys() for row in rows)


def test_every_verdict_with_a_table_is_recomputed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdict, seeds, number and interval, from the tables in git."""
    root = Path(__file__).parents[2]
    for each in claims.claims():
        for outcome in each.outcomes:
            if outcome.data:
                found = recompute(each.rule, outcome, root)
                assert (found.verdict, found.seeds) == (outcome.verdict, outcome.seeds), each.name
                assert found.number in outcome.number, each.name
                ends = found.interval and pytest.approx(found.interval, rel=1e-3)
                assert outcome.interval == ends, each.name
    monkeypatch.chdir(root)
    assert main(["reproduce", "--recompute"]) == 0
    assert "BUT" not in capsys.readouterr().out


def test_a_verdict_that_its_table_does_not_give_is_told(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["label,run,step,nll"]
    for label, steps in (("LN", 10), ("none", 20)):
        for run in range(3):
            rows += [f"{label},{run},0,2", f"{label},{run},{steps},{1 + run / 1000}"]
    (in_tmp / "curves.csv").write_text("\n".join(rows) + "\n")
    outcome = {"verdict": "holds", "size": "paper", "seeds": 3, "number": "", "runs": "today"}
    outcome["data"] = {"file": "curves.csv", "norm": "LN"}
    rule = {"kind": "faster", "metric": "nll", "norm": "layer", "baseline": "none"}
    entry = dict.fromkeys(("name", "section", "quote", "claim", "page", "known", "reason"), "x")
    entry |= {"fixed": "today", "rule": rule, "sweep": {"paper": "--norms layer,none"}}
    entry["outcomes"] = [outcome]
    parsed = claims.parse({"claims": [entry]})
    monkeypatch.setattr(claims, "claims", lambda: parsed)
    # Twice as fast, but scored so rarely that the interval is (0.7 to 5.5).
    assert main(["reproduce", "--recompute"]) == 1
    assert "x (paper): undecided; times as fast to 90 %: 2 (" in capsys.readouterr().out
    (in_tmp / "curves.csv").unlink()
    assert main(["reproduce", "--recompute"]) == 2
    assert "curves.csv" in capsys.readouterr().err
