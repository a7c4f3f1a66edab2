"""`ln-zoo reproduce`: the list, the sweep of a claim, the page."""

from __future__ import annotations

import json
from pathlib import Path

from cli_support import Capture, Patch, cli, told
from refusals import refuses
from sweep_runs import FAST, SLOW, results

from ln_zoo.cli import main, reproduce
from ln_zoo.reproduction import claims, theory
from ln_zoo.reproduction.claims_page import MARKS, claims_page, history, readme_part, with_part


def test_lists_all(capsys: Capture) -> None:
    printed = told(capsys, "reproduce")
    rows = json.loads(told(capsys, "reproduce", "--json"))
    assert {row["name"] for row in rows} == {each.name for each in claims.claims()}
    assert len(rows) == sum(len(each.rows) for each in claims.claims())
    keys = {"claim", "quote", "word", "uncorrected", "judged", "size", "low", "pairs", "runs_date"}
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
                text = file.read_text().replace("val_nll", "step_val_bound")
                for loss in range(1, 10):  # of 10 to 90 % into nats: the target is 134.4
                    text = text.replace(f",0.{loss}\n", f",{537.6 * loss / 10}\n")
                file.write_text(text)
        return 1  # as where a run has failed

    monkeypatch.setattr(reproduce, "call", fake_call)
    assert main(["reproduce", "draw-speed", "--jobs=2"]) == 1
    (call,) = calls
    assert "--out=sweeps/draw-speed-reduced" in call
    assert "--jobs=2" in call
    words = claims.claim("draw-speed").sweep["reduced"].split()
    assert call[-len(words) :] == words
    assert words[-6:-4] == ["--model.read_stride_bias", "-1"]
    printed = capsys.readouterr().out
    assert "better; 2.24 times as fast" in printed
    assert "pairs: 3 (reduced size)" in printed
    assert main(["reproduce", "draw-speed", "--gather"]) == 0
    assert len(calls) == 1
    assert main(["reproduce", "draw-speed", "--print"]) == 1
    assert "--print" in calls[-1]
    # A number counts from the claim's first seed.
    for given, seeds in (("3,4", "3,4"), ("3", "100,101,102,")):
        assert main(["reproduce", "draw-speed", "--seeds", given]) == 1
        assert calls[-1][calls[-1].index("--seeds") + 1] == seeds
    capsys.readouterr()
    (in_tmp / "sweeps/draw-speed-reduced/layer-lr-1/seed_2/test_results.json").write_text(
        '{"metrics": {"bound": NaN}}'
    )
    assert main(["reproduce", "draw-speed", "--gather"]) == 1
    printed = capsys.readouterr().out
    assert "pairs: 2" in printed
    assert "without 1 of 6 runs" in printed
    # The sweep's exit code stays if nothing can be judged.
    for file in (in_tmp / "sweeps").rglob("test_results.json"):
        file.write_text('{"metrics": {"bound": NaN}}')
    assert main(["reproduce", "draw-speed"]) == 1
    assert main(["reproduce", "draw-speed", "--gather"]) == 2


def test_an_analysis_is_printed_and_not_run(in_tmp: Path, capsys: Capture) -> None:
    for given, says in (
        ("invariance --print", "ln-zoo analyze invariance\n"),
        ("invariance --gather", "our outcome: confirmed"),
        ("weight-growth --print --out=there", "fisher --out=there/fisher.png\n"),
        ("batch-size-one --print --out=there", " --out there "),
    ):
        assert says in told(capsys, "reproduce", *given.split())
        assert not list(in_tmp.iterdir())


def test_a_statement_of_theory_judges_itself(
    in_tmp: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(theory._TABLE_1, "LayerNorm", (True, True, True, True, False, True))
    said = told(capsys, "reproduce", "feature-shift", f"--out={in_tmp}")
    assert "in part; 1 of 2 cases; not shifting" in said
    said = told(capsys, "reproduce", "invariance", f"--out={in_tmp}")
    assert "17 of 18 cases; not LayerNorm, weight_vector_rescaling" in said


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


def test_the_page_is_written_with_the_parts_of_readme_and_history(in_tmp: Path) -> None:
    (in_tmp / "docs/results").mkdir(parents=True)
    first, last = MARKS
    marked = f"before\n{first}\nold\n{last}\nafter\n"
    (in_tmp / "README.md").write_text(marked)
    (in_tmp / "docs/results/protocol_history.md").write_text(marked)
    assert main(["reproduce", "--write", "docs/results/claims.md"]) == 0
    assert (in_tmp / "docs/results/claims.md").read_text() == claims_page("docs/results")
    readme = (in_tmp / "README.md").read_text()
    assert readme == f"before\n{first}\n{readme_part()}\n{last}\nafter\n"
    assert with_part(readme, readme_part()) == readme
    assert history() in (in_tmp / "docs/results/protocol_history.md").read_text()
    # The page does not take the place of the README.
    assert main(["reproduce", "--write", "README.md"]) == 0
    assert (in_tmp / "README.md").read_text() == readme


def test_every_outcome_and_number_is_recomputed(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    code = main(["reproduce", "--recompute"])
    out = capsys.readouterr().out
    assert code == 0, [line for line in out.splitlines() if "BUT" in line or ".md:" in line]
    assert "README.md: " in out
    assert "model_cards: " in out


def test_an_outcome_that_its_table_does_not_give(in_tmp: Path, monkeypatch, capsys) -> None:
    name = "convnet-speed: 55,000 images"
    wrong = claims.outcomes() | {name: claims.Outcome("worse")}
    monkeypatch.setattr(claims, "outcomes", lambda: wrong)
    assert main(["reproduce", "--recompute"]) == 1  # by the tables that ship with the package
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "BUT" in line]
    assert line.startswith(name)
    assert "worse" in line


def test_the_picture_has_every_primary_outcome(in_tmp: Path) -> None:
    assert main(["reproduce", "--plot", "claims.svg"]) == 0
    drawn = (in_tmp / "claims.svg").read_text()
    names = [row.primary for each in claims.claims() for row in each.rows if row.primary]
    assert names
    assert all(f"<!-- {name}" in drawn or name in drawn for name in names)


def test_a_table_of_judged_runs(in_tmp: Path, capsys: Capture) -> None:
    out = in_tmp / "sweep"
    results(out, FAST, SLOW)
    for number, path in enumerate(out.rglob("metrics.csv")):
        path.write_text(path.read_text().replace("val_nll", "step_train_nll"))
        (path.parent / f"events.out.tfevents.1795900005.host.{number}.0").touch()
    command = ["reproduce", "convnet-speed", f"--out={out}", "--csv=t.csv"]
    assert "t.csv: 6 runs" in told(capsys, *command)
    head, *rows = (in_tmp / "t.csv").read_text().splitlines()
    assert head == "begun,norm,seed,step,step_train_nll"
    assert len(rows) == 6 * len(FAST[0])
    refuses(["--csv", "--out"], cli, "reproduce", "convnet-speed", "--csv=t.csv")
    refuses(["invariance"], cli, "reproduce", "invariance", "--out=sweep", "--csv=t.csv")
