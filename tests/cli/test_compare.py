"""`ln-zoo compare`: the picture, the table and the refusals."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from cli_support import Capture, cli, rows_of
from refusals import refuses
from sweep_runs import write_run, write_steps

from ln_zoo.cli import main


def compare(capsys: Capture, *argv: str) -> str:
    assert main(["compare", *argv, "--out=out/picture.png"]) == 0
    assert Path("out/picture.png").read_bytes().startswith(b"\x89PNG")
    return capsys.readouterr().out


def test_writes_picture_and_table(here: Path, capsys: Capture) -> None:
    one, two = (write_run(here / f"m/version_{i}", [0.1, 0.05]) for i in range(2))
    printed = compare(capsys, f"LN={one}", f"LN={two}", str(two), "--csv=out/curves.csv")
    assert "| LN | 2 | 2 | 0.05 (0.05 to 0.05) | 0.02 (0.02 to 0.02) |" in printed
    assert "| m | 1 | 2 |" in printed
    rows = rows_of("out/curves.csv")
    assert len(rows) == 6
    assert list(rows[3].values()) == ["LN", "1", "2", "0.05", "0.02"]
    assert list(rows[3]) == ["label", "run", "epoch", "epoch_train_nll", "epoch_test_error"]


@pytest.mark.parametrize(
    ("label", "folder", "shown"),
    [("A=", "a=b/runs/x", "A"), ("", "a=b/runs/x", "runs"), ("lr=0.1=", "b/runs/x", "lr=0.1")],
)
def test_equal_signs(here: Path, capsys: Capture, label: str, folder: str, shown: str) -> None:
    write_run(here / folder, [0.1, 0.05])
    assert f"| {shown} | 1 | 2 |" in compare(capsys, f"{label}{folder}")


@pytest.fixture
def three(here: Path) -> list[str]:
    """Three runs of one label, of which the last is shorter, and one of another."""
    scores = [
        {0: 1.0, 5: 0.1, 10: 0.2, 15: 0.01},
        {0: 1.0, 5: 0.5, 10: 0.1, 15: 0.02},
        {0: 1.0, 5: 0.7, 10: 0.2},
    ]
    runs = [f"LN={write_steps(here / f'a/{i}', run)}" for i, run in enumerate(scores)]
    return [*runs, f"BN={write_steps(here / 'b/0', {0: 1.0, 5: 0.01, 10: 0.001})}"]


def test_steps_to_values(three: list[str], capsys: Capture) -> None:
    printed = compare(
        capsys, *three, "--x=step", "--metric=step_train_nll", "--csv=out/t.csv",
        "--steps_to", "step_train_nll", "0.1", "0.01", "0.0001",
    )  # fmt: skip
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
    assert lines[3].startswith("| BN | 1 | 5 (5 to 5) | 5 (5 to 5) | > 10 (0 of 1 runs) | -1.667 ")
    assert list(rows_of("out/t.csv")[0]) == ["label", "run", "step", "step_train_nll"]
    rows = rows_of("out/t_steps_to.csv")
    assert len(rows) == 12
    first = ["LN", "0", "step_train_nll", "0.01", "15", "15", "-0.566323"]
    assert list(rows[1].values()) == first
    assert [row["steps"] for row in rows if row["value"] == "0.1"] == ["5", "10", "", "5"]


def test_activity(here: Path, capsys: Capture) -> None:
    for name, active in (("a", 0.2), ("b", 0.6), ("c", 0.5)):
        (here / name / "version_1").mkdir(parents=True)
        rows = ["layer,row,column,ring,active,variance"]
        for place in range(9):
            centre = int(place == 4)
            rows.append(f"conv,{place // 3},{place % 3},{centre},{active},{1 + centre}")
        (here / name / "version_1/activity.csv").write_text("\n".join(rows) + "\n")
    printed = compare(capsys, "--activity", "L=a/version_1", "L=b/version_1", "c/version_1")
    first, second = (line.split("|")[1:6] for line in printed.splitlines()[2:])
    assert [cell.strip() for cell in first] == ["conv", "L", "0.4", "0.4", "1"]
    assert [cell.strip() for cell in second] == ["conv", "c", "0.5", "0.5", "1"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{runs} --steps_to step_train_nll low", "--steps_to low"),
        ("{runs} --steps_to step_train_nll", "--steps_to step_train_nll"),
        ("{run} LN={other}", "step_train_nll {other}"),
        ("--activity {other}", "{other}"),
        ("--weight_geometry {run}", "metrics.csv WeightGeometry"),
        ("--weight_geometry a={geometry} a={geometry}", "--weight_geometry a"),
        ("A=file.ckpt", "file.ckpt"),
        ("A=file.csv", "file.csv"),
        ("A=empty.csv", "empty.csv step_train_nll"),
    ],
)
def test_wrong_input(three: list[str], here: Path, given: str, says: str) -> None:
    (here / "file.ckpt").write_bytes(bytes(range(256)))
    (here / "file.csv").write_text("step,step_train_nll\nx,1\n")
    (here / "empty.csv").touch()
    names = {
        "runs": " ".join(three), "run": three[0],
        "other": write_steps(here / "c/0", {3: 1.0, 7: 0.1}),
        "geometry": write_geometry_run(here / "geometry", [1.0]),
    }  # fmt: skip
    argv = [*given.format(**names).split(), "--metric=step_train_nll", "--x=step", "--out=x.png"]
    refuses(says.format(**names).split(), cli, "compare", *argv, code=1)
    assert not (here / "x.png").exists()


def write_geometry_run(folder: Path, norms: list[float]) -> Path:
    """A run as `WeightGeometry` logs it, beside a loss."""
    each = itertools.product(("norm", "turn", "effective_lr"), ("mean", "q10", "q50", "q90"))
    names = [f"weights/layer.weight/{quantity}_{statistic}" for quantity, statistic in each]
    folder.mkdir(parents=True)
    lines = [",".join(["epoch", "step", "train_loss", *names])]
    for number, norm in enumerate(norms):
        lines += [f"0,{20 * number},0.5" + "," * len(names)]
        lines += [f"0,{20 * number + 10},," + ",".join([str(norm)] * len(names))]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_weight_geometry(here: Path, capsys: Capture) -> None:
    write_geometry_run(here / "LN", [1.0, 3.0])
    write_geometry_run(here / "none", [2.0, 1.0])
    printed = compare(capsys, "--weight_geometry", "LN=LN", "none=none", "--csv=b/both.csv")
    assert "| layer.weight | LN | 10 to 30 | 1 | 3 | 3 |" in printed
    assert "| layer.weight | none | 10 to 30 | 2 | 1 | 0.5 |" in printed
    assert [(row["label"], row["step"], row["norm_q50"]) for row in rows_of("b/both.csv")] == [
        ("LN", "10", "1"), ("LN", "30", "3"), ("none", "10", "2"), ("none", "30", "1"),
    ]  # fmt: skip
