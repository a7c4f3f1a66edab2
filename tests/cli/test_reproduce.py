"""`ln-zoo reproduce`: the list, the sweep of a claim, the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from cli_support import Capture, Patch, cli, told
from refusals import refuses
from sweep_runs import FAST, SLOW, results

from ln_zoo.cli import main, reproduce
from ln_zoo.reproduction import claims
from ln_zoo.reproduction.claims_page import MARKS, claims_page, readme_table, with_table


def test_lists_all(capsys: Capture) -> None:
    printed = told(capsys, "reproduce")
    rows = json.loads(told(capsys, "reproduce", "--json"))
    assert {row["name"] for row in rows} == {each.name for each in claims.claims()}
    assert len(rows) == sum(max(1, len(each.outcomes)) for each in claims.claims())
    keys = {"claim", "quote", "verdict", "size", "interval", "seeds", "rule_date", "runs_date"}
    assert all(keys <= row.keys() and row["name"] in printed for row in rows)


def test_runs_the_sweep_and_gives_the_verdict(in_tmp: Path, monkeypatch, capsys) -> None:
    calls: list[list[str]] = []

    def fake_call(function: object, name: str, argv: list[str]) -> int:
        assert name == "sweep"
        calls.append(argv)
        if not (in_tmp / "sweeps").exists():
            (in_tmp / "sweeps").mkdir()
            out = in_tmp / "sweeps/draw-speed-reduced"
            results(out, FAST, SLOW)
            for file in out.rglob("metrics.csv"):
                file.write_text(file.read_text().replace("val_nll", "step_val_bound"))
        return 1  # as where a run has failed

    monkeypatch.setattr(reproduce, "call", fake_call)
    assert main(["reproduce", "draw-speed", "--jobs=2"]) == 1
    (call,) = calls
    assert "--out=sweeps/draw-speed-reduced" in call
    assert "--jobs=2" in call
    words = claims.claim("draw-speed").sweep["reduced"].split()
    assert call[-len(words) :] == words
    printed = capsys.readouterr().out
    assert "holds; times as fast to 90 %: 2.2" in printed
    assert "3 seeds (reduced size)" in printed
    assert main(["reproduce", "draw-speed", "--gather"]) == 0
    assert len(calls) == 1
    assert main(["reproduce", "draw-speed", "--print"]) == 1
    assert "--print" in calls[-1]
    # A number counts from the claim's first seed.
    for given, seeds in (("3,4", "3,4"), ("8", "10,11,12,13,14,15,16,17,")):
        assert main(["reproduce", "draw-speed", "--seeds", given]) == 1
        assert calls[-1][calls[-1].index("--seeds") + 1] == seeds
    capsys.readouterr()
    (in_tmp / "sweeps/draw-speed-reduced/layer-lr-1/seed_2/test_results.json").write_text(
        '{"metrics": {"bound": NaN}}'
    )
    assert main(["reproduce", "draw-speed", "--gather"]) == 1
    printed = capsys.readouterr().out
    assert "2 seeds" in printed
    assert "without 1 of 6 runs" in printed
    # The sweep's exit code stays if nothing can be judged.
    for file in (in_tmp / "sweeps").rglob("test_results.json"):
        file.write_text('{"metrics": {"bound": NaN}}')
    assert main(["reproduce", "draw-speed"]) == 1
    assert main(["reproduce", "draw-speed", "--gather"]) == 2


def test_an_analysis_is_printed_and_not_run(in_tmp: Path, capsys: Capture) -> None:
    for given, says in (
        ("invariance --print", "ln-zoo analyze invariance\n"),
        ("invariance --gather", "our verdict: holds"),
        ("invariance --print --out=there", "invariance --out=there/invariance.png\n"),
        ("batch-size-one --print --out=there", " --out there "),
    ):
        assert says in told(capsys, "reproduce", *given.split())
        assert not list(in_tmp.iterdir())


def test_a_folder_that_cannot_be_written(in_tmp: Path) -> None:
    (in_tmp / "file").touch()
    refuses(["--out", "file/invariance.png"], cli, "reproduce", "invariance", "--out=file", code=1)
    assert [path.name for path in in_tmp.iterdir()] == ["file"]


def test_claims_that_cannot_be_run(in_tmp: Path) -> None:
    none = next(each for each in claims.claims() if not each.sweep and not each.command)
    for given, says in (
        ("draw-sped", "'draw-sped' 'draw-speed'"),
        (none.name, none.name),
        ("draw-bound --size=reduced", "draw-bound --size reduced paper"),
        ("draw-speed --size=paper --gather", "sweeps/draw-speed-paper"),
        ("invariance --seeds=5", "invariance --seeds"),
    ):
        refuses(says.split(), cli, "reproduce", *given.split())


def test_the_page_is_written_with_the_table_of_the_readme(in_tmp: Path) -> None:
    (in_tmp / "docs/results").mkdir(parents=True)
    first, last = MARKS
    (in_tmp / "README.md").write_text(f"before\n{first}\nold\n{last}\nafter\n")
    assert main(["reproduce", "--write", "docs/results/claims.md"]) == 0
    assert (in_tmp / "docs/results/claims.md").read_text() == claims_page("docs/results")
    readme = (in_tmp / "README.md").read_text()
    assert readme == f"before\n{first}\n{readme_table()}\n{last}\nafter\n"
    assert with_table(readme) == readme
    # The page does not take the place of the README.
    assert main(["reproduce", "--write", "README.md"]) == 0
    assert (in_tmp / "README.md").read_text() == readme


def test_every_verdict_with_a_table_is_recomputed(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert "BUT" not in told(capsys, "reproduce", "--recompute")


def test_a_verdict_that_its_table_does_not_give(in_tmp: Path, monkeypatch, capsys) -> None:
    each = next(x for x in claims.claims() if x.outcomes and x.outcomes[0].data)
    outcome = replace(each.outcomes[0], verdict=claims.NOT_TESTED)
    monkeypatch.setattr(claims, "claims", lambda: (replace(each, outcomes=(outcome,)),))
    assert outcome.data["file"] in told(capsys, "reproduce", "--recompute", code=2)
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main(["reproduce", "--recompute"]) == 1
    assert f"BUT claims.yaml: {claims.NOT_TESTED}" in capsys.readouterr().out
