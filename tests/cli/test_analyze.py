"""``ln-zoo analyze``: arguments reach the analyses; tables, pictures and CSV files are theirs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from cli_support import Capture, Patch, cli, rows_of, told, write_idx
from refusals import refuses

from ln_zoo import analysis
from ln_zoo.cli import main
from ln_zoo.data.images.files import read_idx
from ln_zoo.layers import GRU
from ln_zoo.norms import LayerNorm, RMSNorm, WeightNorm
from ln_zoo.reproduction import fisher_claims

SMALL = "--steps 12 --hidden 5 --batch 4"
#: A user's norm, beside the folder of the command.
MINE = """
from dataclasses import dataclass
from typing import ClassVar

from ln_zoo.norms import Norm


@dataclass(frozen=True)
class MaxNorm(Norm):
    eps: float = 1e-5
    invariances: ClassVar = frozenset({"weight_matrix_rescaling", "weight_matrix_recentering"})

    def normalize(self, site, a, step=None):
        return a / (a.square().amax(-1, keepdim=True) + self.eps).sqrt()
"""


def analyze(capsys: Capture, given: str, *more: str) -> str:
    return told(capsys, "analyze", *given.split(), *more)


def table_of(printed: str) -> list[dict[str, str]]:
    return list(csv.DictReader(printed.splitlines()))


def labels(table: str) -> list[str]:
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [line.split("|")[1].strip() for line in lines]


# gradient_flow


def test_gradient_flow(here: Path, capsys: Capture) -> None:
    options = "--norm LayerNorm RMSNorm --gains 0.5 2 --cell LSTM --data random --seed 3"
    files = "--out a/flow.png --csv a/flow.csv"
    out = analyze(capsys, f"gradient_flow {SMALL} {options} {files}")
    for word in ("LSTM", "H = 5", "identity", "random numbers", "4 sequences"):
        assert word in out.splitlines()[0]
    assert labels(out) == ["LayerNorm"] * 2 + ["RMSNorm"] * 2
    assert (here / "a/flow.png").stat().st_size > 10_000
    inputs = analysis.random_sequences(12, 4, seed=3)
    rows = rows_of("a/flow.csv")
    for flow in analysis.gradient_flow(inputs, "LSTM", 5, [LayerNorm, RMSNorm], (0.5, 2.0), seed=3):
        assert [row[flow.label] for row in rows] == [f"{x:.4g}" for x in flow.norms.tolist()]


@pytest.mark.parametrize("kind", ["pixels", "permuted", None])
def test_pixels(here: Path, kind: str | None, capsys: Capture, monkeypatch: Patch) -> None:
    folder = write_idx(here / "data" / "mnist")
    images = torch.from_numpy(read_idx(folder / "train-images-idx3-ubyte", 3).copy())
    inputs = (images[:4].flatten(1).T.double() / 255).unsqueeze(-1)
    order = torch.arange(784)
    if kind == "permuted":
        order = torch.randperm(784, generator=torch.Generator().manual_seed(0))
    if kind is None:  # the default folder
        monkeypatch.setenv("LN_ZOO_DATA", str(here / "data"))
    source = f"--root {folder} --data {kind}" if kind else ""
    given = f"gradient_flow {SMALL} --norm LayerNorm --gains 1 --csv flow.csv {source}"
    assert ("permuted" in analyze(capsys, given)) == (kind == "permuted")
    found = [float(row["LayerNorm 1"]) for row in rows_of("flow.csv")]
    (flow,) = analysis.gradient_flow(inputs[order[:12]], "RNN", 5, [LayerNorm], (1.0,))
    # Pixels are divided in float32.
    assert found == pytest.approx(flow.norms.tolist(), rel=1e-3)


def test_random_numbers_without_mnist(here: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.delenv("LN_ZOO_DATA", raising=False)
    out = analyze(capsys, f"gradient_flow {SMALL} --norm ln_zoo.norms.Norm --cell GRU")
    assert "random numbers" in out
    assert labels(out) == ["Norm"]
    assert not list(here.iterdir())  # no file that is not asked for


class Bounded(GRU):
    """A layer of a user's own."""


def test_own_layers(here: Path, capsys: Capture) -> None:
    flow = f"gradient_flow {SMALL} --norm LayerNorm --gains 0.5 --data random --cell"
    ours, own = (analyze(capsys, f"{flow} {cell}") for cell in ("GRU", f"{__name__}.Bounded"))
    assert ours == own.replace("Bounded", "GRU")
    out = analyze(capsys, f"dynamics {SMALL} --norm Identity --cell RNN {__name__}.Bounded")
    assert labels(out) == ["RNN Identity", "Bounded Identity"]
    for wrong in ("TCN", "no.Such"):
        for command in ("gradient_flow", "dynamics"):
            refuses([repr(wrong)], cli, "analyze", command, "--cell", wrong, code=1)


# dynamics


def test_dynamics(here: Path, capsys: Capture) -> None:
    options = (
        "--cell LSTM GRU --norm LayerNorm WeightNorm --gains 0.5 2 --features 6 --noise 1 "
        "--recurrent_scale 3 --start identity --exponents 2 --skip 3 --seed 4 "
        "--out a/dynamics.png --csv a/dynamics.csv"
    )
    title, _, *table = analyze(capsys, f"dynamics {SMALL} {options}").splitlines()
    for word in ("H = 5", "6 standard", "identity", "times 3", "4 sequences", "12 steps"):
        assert word in title
    inputs = torch.randn(12, 4, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    given = [LayerNorm, WeightNorm], (0.5, 2.0), "identity", 3.0, 1.0, 2, 3, 4
    cells = [list(analysis.initial_dynamics(inputs, cell, 5, *given)) for cell in ("LSTM", "GRU")]
    assert table == analysis.dynamics_table(cells[0] + cells[1]).splitlines()
    assert (here / "a/dynamics.png").read_bytes().startswith(b"\x89PNG")
    rows = rows_of("a/dynamics.csv")
    assert (len(rows), rows[-1]["layer"]) == (8 * 12, "WeightNorm 2")
    assert rows[-1]["gradient_norm"] == f"{float(cells[1][-1].gradients[-1]):.4g}"


def test_default_layers(here: Path, capsys: Capture) -> None:
    out = analyze(capsys, f"dynamics {SMALL} --features 4")
    gains = ("0.1", "0.5", "1")
    norms = ("LayerNorm", "RMSNorm", "BatchNorm", "WeightNorm")
    names = [*(f"{norm} {gain}" for norm in norms for gain in gains), "Identity"]
    assert labels(out) == [f"{cell} {name}" for cell in ("LSTM", "GRU", "RNN") for name in names]
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--steps 1", "--steps 2 1"),
        ("--noise nan", "--noise nan"),
        ("--gains 1 nan", "--gains nan"),
        ("--recurrent_scale -1", "--recurrent_scale -1"),
        ("--statistics batch", "--statistics"),
        ("--exponents 11 --cell LSTM", "10"),
        ("--skip 12", "skip 12"),
    ],
)
def test_wrong_values(here: Path, given: str, says: str) -> None:
    code = 2 if "--statistics" in given else 1
    refuses(says.split(), cli, "analyze", "dynamics", *f"{SMALL} {given}".split(), code=code)


# fisher


def test_fisher(here: Path, capsys: Capture, monkeypatch: Patch) -> None:
    study = fisher_claims.study_fisher(3, 2, 50, 5000, seed=3)
    given = "fisher --units 3 --features 2 --examples 50 --draws 5000 --seed 3"
    files = ("--out=a/fisher.png", "--csv=a/fisher.csv")
    out = analyze(capsys, given, "--format=csv", *files)
    # Values at the level of rounding depend on the order of sums.
    found = {r["claim"]: r["measured"] for r in table_of(out) if r["expected"] != "<= 1e-12"}
    assert found == {c.claim: c.measured for c in study.checks if c.expected != "<= 1e-12"}
    assert (here / "a/fisher.png").stat().st_size > 10_000
    rows = rows_of("a/fisher.csv")
    drawn = [float(row["y"]) for row in rows if row["panel"] == "eq. 13 as printed, LN"]
    wanted = [value for values in study.panels[3].lines.values() for value in values]
    assert drawn == pytest.approx(wanted, rel=1e-3)
    monkeypatch.setattr(fisher_claims, "study_fisher", lambda *arguments: study)
    for form in ("rich", "markdown"):
        out = analyze(capsys, given, f"--format={form}")
        assert ("|---" in out) == (form == "markdown")
    assert [path.name for path in here.iterdir()] == ["a"]


# invariance


def test_invariance(here: Path, capsys: Capture) -> None:
    out = analyze(capsys, "invariance", "--out=a/invariance.png")
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("yes (yes)") == 4 + 2 + 4 + 3
    assert (here / "a/invariance.png").stat().st_size > 10_000


@pytest.mark.parametrize("form", ["markdown", "latex", "csv"])
def test_formats_and_options(here: Path, form: str, capsys: Capture) -> None:
    options = (
        "--norm LayerNorm WeightNorm --eps 0.001 --examples 5 --inputs 4 --features 3 --seed 3 "
        "--factors 2 7 --weight_scale 0.1 --out a/eps.svg --csv a/eps.csv"
    )
    inputs = analysis.random_inputs(5, 4, 3)
    norms = [LayerNorm(), WeightNorm()]
    table = analysis.invariance_table(norms, 0.001, inputs, 3, (2, 7), 0.1, 3)
    out = analyze(capsys, f"invariance --format {form} {options}")
    assert out == getattr(table, form)() + "\n"
    assert "<!-- weights times 7 -->" in (here / "a/eps.svg").read_text()
    effects = analysis.eps_effect(norms[0], 0.001, (2, 7), inputs=inputs, features=3, seed=3)
    found = [float(row["measured"]) for row in rows_of("a/eps.csv")]
    wanted = [value for effect in effects for value in effect.measured.tolist()]
    assert found == pytest.approx(wanted, rel=1e-3)


def test_own_norms_and_shipped_eps(here: Path, capsys: Capture) -> None:
    (here / "max_norms.py").write_text(MINE)
    given = "invariance --norm max_norms.MaxNorm RMSNorm --eps shipped --format csv"
    rows = table_of(analyze(capsys, given))
    assert {row["eps"] for row in rows} == {"shipped"}
    cells = analysis.invariance_table([RMSNorm()], None).rows[0].cells
    deviations = [row["deviation"] for row in rows if row["norm"] == "RMSNorm"]
    assert deviations == [f"{cell.deviation:.4g}" for cell in cells.values()]
    found = {row["map"]: row["agrees"] for row in rows if row["norm"] == "MaxNorm"}
    assert found["weight_matrix_recentering"] == "no"
    assert found["dataset_recentering"] == "yes"


def test_no_picture_of_norms_without_eps(here: Path, capsys: Capture) -> None:
    argv = ("--norm", "WeightNorm", "Identity", "--csv", "eps.csv", "--out", "eps.png")
    assert main(["analyze", "invariance", *argv]) == 0
    printed = capsys.readouterr()
    assert "yes (yes)" in printed.out
    assert all(word in printed.err for word in ("eps.png", "eps.csv", "WeightNorm()"))
    assert not list(here.iterdir())
