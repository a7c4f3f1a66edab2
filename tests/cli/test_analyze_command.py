"""``ln-zoo analyze``: what it reads, prints and writes, and how it fails."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from cli_support import write_idx

from ln_zoo.analysis import gradient_flow, random_sequences
from ln_zoo.cli import main
from ln_zoo.data.image_files import read_idx
from ln_zoo.layers import GRU
from ln_zoo.norms import LayerNorm, RMSNorm

SMALL = ("--steps", "12", "--hidden", "5", "--batch", "4")


def columns(path: Path) -> dict[str, list[str]]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return {name: [row[name] for row in rows] for name in rows[0]}


def test_it_prints_a_table_and_writes_picture_and_csv(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--norm", "LayerNorm", "RMSNorm", "--gains", "0.5", "2", "--cell", "LSTM"]
    command = ["analyze", "gradient_flow", *SMALL, *options, "--data", "random", "--seed", "3"]
    assert main([*command, "--out", "a/flow.png", "--csv", "a/flow.csv"]) == 0
    title, _, _, _, *rows = capsys.readouterr().out.splitlines()
    wanted = "LSTM, H = 5, identity recurrent weights; random numbers, 4 sequences"
    assert title == wanted
    assert [row.split("|")[1].strip() for row in rows] == ["LayerNorm"] * 2 + ["RMSNorm"] * 2
    assert (here / "a/flow.png").stat().st_size > 10_000
    found = columns(here / "a/flow.csv")
    flows = gradient_flow(
        random_sequences(12, 4, seed=3), "LSTM", 5, [LayerNorm, RMSNorm], (0.5, 2.0), seed=3
    )
    for flow in flows:
        assert found[flow.label] == [f"{value:.4g}" for value in flow.norms.tolist()]
    assert set(found["inputs"]) == {"random numbers"}


class Bounded(GRU):
    """A layer of a user's own."""


def test_layers_of_ones_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{__name__}.Bounded"
    options = ["--norm", "LayerNorm", "--gains", "0.5", "--data", "random"]
    tables = []
    for cell in ("GRU", path):
        assert main(["analyze", "gradient_flow", *SMALL, *options, "--cell", cell]) == 0
        tables.append(capsys.readouterr().out.replace("Bounded", "GRU"))
    assert tables[0] == tables[1]
    options = ["--steps", "6", "--hidden", "3", "--batch", "2", "--norm", "Identity"]
    assert main(["analyze", "dynamics", *options, "--cell", "RNN", path]) == 0
    rows = capsys.readouterr().out.splitlines()[4:]
    assert [row.split("|")[1].strip() for row in rows] == ["RNN Identity", "Bounded Identity"]
    for wrong, said in (("TCN", "got 'TCN'"), ("no.Such", "'no.Such' cannot be imported")):
        for analysis in ("gradient_flow", "dynamics"):
            assert main(["analyze", analysis, "--cell", wrong]) == 1
            assert said in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pixels", "permuted", None])
def test_pixels(
    here: Path, kind: str | None, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    folder = write_idx(here / "data" / "mnist")
    images = torch.from_numpy(read_idx(folder / "train-images-idx3-ubyte", 3).copy())
    inputs = (images[:4].flatten(1).T.double() / 255).unsqueeze(-1)
    order = torch.arange(784)
    if kind == "permuted":
        order = torch.randperm(784, generator=torch.Generator().manual_seed(0))
    if kind is None:  # found where the environment says
        monkeypatch.setenv("LN_ZOO_DATA", str(here / "data"))
        source = []
    else:
        source = ["--root", str(folder), "--data", kind]
    options = [*SMALL, "--norm", "LayerNorm", "--gains", "1", "--csv", "flow.csv"]
    assert main(["analyze", "gradient_flow", *options, *source]) == 0
    said = "permuted pixels" if kind == "permuted" else "pixels in order"
    assert f"MNIST, {said}, 4 sequences" in capsys.readouterr().out
    found = [float(value) for value in columns(here / "flow.csv")["LayerNorm 1"]]
    (flow,) = gradient_flow(inputs[order[:12]], "RNN", 5, [LayerNorm], (1.0,))
    # Pixels are divided in float32.
    assert found == pytest.approx(flow.norms.tolist(), rel=1e-3)
    assert (here / "gradient_flow.png").is_file()


def test_random_numbers_where_there_is_no_mnist(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LN_ZOO_DATA", raising=False)
    assert main(["analyze", "gradient_flow", *SMALL, "--norm", "Identity"]) == 0
    assert "random numbers, 4 sequences" in capsys.readouterr().out


@pytest.mark.parametrize("analysis", ["gradient_flow", "dynamics"])
def test_a_norm_that_is_no_dataclass(
    here: Path, analysis: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--norm", "ln_zoo.norms.Norm", "--cell", "GRU"]
    options += ["--data", "random"] if analysis == "gradient_flow" else []
    assert main(["analyze", analysis, *SMALL, *options]) == 0
    _, _, _, _, row = capsys.readouterr().out.splitlines()
    assert "Norm |" in row
