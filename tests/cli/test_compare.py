"""`ln-zoo compare`: the picture, the table and the refusals."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from sweep_runs import write_run, write_steps

from ln_zoo.cli import main


def test_writes_picture_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (write_run(tmp_path / f"m/version_{i}", [0.1, 0.05]) for i in range(2))
    picture, table = tmp_path / "out/curves.png", tmp_path / "out/curves.csv"
    command = ["compare", f"LN={one}", f"LN={two}", str(two), "--out", str(picture)]
    assert main([*command, "--csv", str(table)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "| LN | 2 | 2 | 0.05 (0.05 to 0.05) | 0.02 (0.02 to 0.02) |" in printed
    assert "| m | 1 | 2 |" in printed
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert rows[3] == {
        "label": "LN",
        "run": "1",
        "epoch": "2",
        "epoch_train_nll": "0.05",
        "epoch_test_error": "0.02",
    }


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    """Three runs of one label, of which the last is shorter, and one of another."""
    scores = [
        {0: 1.0, 5: 0.1, 10: 0.2, 15: 0.01},
        {0: 1.0, 5: 0.5, 10: 0.1, 15: 0.02},
        {0: 1.0, 5: 0.7, 10: 0.2},
    ]
    runs = [f"LN={write_steps(tmp_path / f'a/{i}', run)}" for i, run in enumerate(scores)]
    return [*runs, f"BN={write_steps(tmp_path / 'b/0', {0: 1.0, 5: 0.01, 10: 0.001})}"]


def test_steps_to_values(
    three: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "out/t.csv"
    assert main(
        ["compare", *three, "--x=step", "--metric=step_train_nll", "--out", str(tmp_path / "c.png"),
         "--csv", str(table), "--steps_to", "step_train_nll", "0.1", "0.01", "0.0001"]
    ) == 0  # fmt: skip
    printed = capsys.readouterr().out
    assert "| LN | 3 | 10 | 0.2 (0.1 to 0.2) |" in printed
    lines = printed.split("\n\n")[1].splitlines()
    head = [f"updates to step_train_nll ≤ {value}" for value in ("0.1", "0.01", "0.0001")]
    assert lines[0] == f"|  | runs | {' | '.join(head)} | mean log10 step_train_nll |"
    # A value reached once counts from there on; the middle of (5, 10, never) is 10, that of (15,
    # never, never) is never. Of those that never get there the shortest lasted 10 updates. Areas
    # are taken over updates 0, 5 and 10.
    areas = [(0 - 1 - 0.69897) / 3, (0 - 0.30103 - 1) / 3, (0 - 0.154902 - 0.69897) / 3]
    area = f"{areas[1]:.4g} ({areas[0]:.4g} to {areas[2]:.4g})"
    assert lines[2] == (
        f"| LN | 3 | 10 (5 to > 10), 2 of 3 runs | > 10 (15 to > 10), 1 of 3 runs "
        f"| > 10 (0 of 3 runs) | {area} |"
    )
    assert lines[3] == (
        "| BN | 1 | 5 (5 to 5) | 5 (5 to 5) | > 10 (0 of 1 runs) "
        f"| {-5 / 3:.4g} ({-5 / 3:.4g} to {-5 / 3:.4g}) |"
    )
    with table.open() as file:
        assert next(csv.DictReader(file)).keys() == {"label", "run", "step", "step_train_nll"}
    with table.with_name("t_steps_to.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert rows[1] == {
        "label": "LN", "run": "0", "metric": "step_train_nll", "value": "0.01", "steps": "15",
        "last_step": "15", "mean_log10": "-0.566323",
    }  # fmt: skip
    assert [row["steps"] for row in rows if row["value"] == "0.1"] == ["5", "10", "", "5"]


# Activity by position


def test_activity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, active in (("a", 0.2), ("b", 0.6), ("c", 0.5)):
        (tmp_path / name / "version_1").mkdir(parents=True)
        rows = ["layer,row,column,ring,active,variance" + ",rare" * (name != "c")]
        for place in range(9):
            row, column = divmod(place, 3)
            centre = int(place == 4)
            rare = ",0.25" * (name != "c")  # a file of an earlier version has none
            rows.append(f"conv,{row},{column},{centre},{active},{1 + centre}{rare}")
        (tmp_path / name / "version_1/activity.csv").write_text("\n".join(rows) + "\n")
    runs = [f"LN={tmp_path / name / 'version_1'}" for name in "ab"]
    picture = tmp_path / "out/activity.png"
    other = str(tmp_path / "c/version_1/activity.csv")
    assert main(["compare", "--activity", *runs, other, "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines() == [
        "| layer |  | active: border | centre | border / centre "
        "| variance: border | centre | border / centre "
        "| rare: border | centre | border / centre |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        "| conv | LN | 0.4 | 0.4 | 1 | 1 | 2 | 0.5 | 0.25 | 0.25 | 1 |",
        "| conv | c | 0.5 | 0.5 | 1 | 1 | 2 | 0.5 | nan | nan | nan |",
    ]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{runs} --steps_to step_train_nll low", "--steps_to low"),
        ("{runs} --steps_to step_train_nll", "--steps_to step_train_nll"),
        ("{run} LN={other}", "step_train_nll {other}"),
        ("--activity {other}", "{other}"),
        ("--weight_geometry {run}", "metrics.csv WeightGeometry"),
        ("--weight_geometry a={geometry} a={geometry}", "--weight_geometry a"),
    ],
    ids=range(6),
)
def test_wrong_input(
    three: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, says: str
) -> None:
    names = {
        "runs": " ".join(three), "run": three[0],
        "other": write_steps(tmp_path / "c/0", {3: 1.0, 7: 0.1}),
        "geometry": write_geometry_run(tmp_path / "geometry", [1.0]),
    }  # fmt: skip
    given, says = given.format(**names), says.format(**names)
    picture = tmp_path / "x.png"
    argv = [*given.split(), "--metric=step_train_nll", "--x=step", f"--out={picture}"]
    assert main(["compare", *argv]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert [word for word in says.split() if word not in line] == []
    assert not picture.exists()


# Geometry of weights


def write_geometry_run(folder: Path, norms: list[float]) -> Path:
    """A run as `WeightGeometry` logs it, beside a loss."""
    names = [
        f"weights/layer.weight/{quantity}_{statistic}"
        for quantity in ("norm", "turn", "effective_lr")
        for statistic in ("mean", "q10", "q50", "q90")
    ]
    folder.mkdir(parents=True)
    lines = [",".join(["epoch", "step", "train_loss", *names])]
    for number, norm in enumerate(norms):
        lines += [f"0,{20 * number},0.5" + "," * len(names)]
        lines += [f"0,{20 * number + 10},," + ",".join([str(norm)] * len(names))]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_weight_geometry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [f"{label}={write_geometry_run(tmp_path / label, norms)}" for label, norms in
            (("LN", [1.0, 3.0]), ("none", [2.0, 1.0]))]  # fmt: skip
    picture, table = tmp_path / "a/both.png", tmp_path / "b/both.csv"
    command = ["compare", "--weight_geometry", *runs, "--out", str(picture), "--csv", str(table)]
    assert main(command) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "| layer.weight | LN | 10 to 30 | 1 | 3 | 3 |" in printed
    assert "| layer.weight | none | 10 to 30 | 2 | 1 | 0.5 |" in printed
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["label"], row["step"], row["norm_q50"]) for row in rows] == [
        ("LN", "10", "1"), ("LN", "30", "3"), ("none", "10", "2"), ("none", "30", "1"),
    ]  # fmt: skip
