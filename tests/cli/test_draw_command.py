"""``ln-zoo draw``: what it writes and where, and how it fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import cli, told
from PIL import Image
from refusals import refuses
from zoo_support import RESULTS

from ln_zoo.cli import main
from ln_zoo.models import DRAW, MLPClassifier
from ln_zoo.zoo import load, write_card


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small DRAW model, one whose training diverged, and a model that draws nothing."""
    folder = tmp_path_factory.mktemp("cards")
    torch.manual_seed(0)
    draw = DRAW((8, 8), glimpses=4, hidden_size=6, latent_size=3)
    write_card(folder / "small", draw, RESULTS, preprocessing={})
    with torch.no_grad():
        next(draw.parameters()).fill_(torch.nan)
    write_card(folder / "diverged", draw, RESULTS, preprocessing={})
    write_card(folder / "mlp", MLPClassifier(64, [4]), RESULTS, preprocessing={})
    return folder


def test_samples_a_grid_and_a_filmstrip(in_tmp: Path, cards: Path, capsys) -> None:
    model = ["--model", str(cards / "small")]
    files = ["--filmstrip", "strip.svg", "--numbers", "new/x.npy"]
    options = ["--number=6", "--seed=3", "--columns=3", *files]
    printed = told(capsys, "draw", *model, *options).splitlines()
    written = ["picture: samples.png (6 images)", "filmstrip: strip.svg", "numbers: new/x.npy"]
    assert printed == written
    drawn = load(cards / "small")
    assert isinstance(drawn, DRAW)
    expected = drawn.generate_samples(6, seed=3).logits.sigmoid().numpy()
    assert np.array_equal(np.load("new/x.npy"), expected)
    picture = Image.open("samples.png")
    assert picture.width > 1.4 * picture.height  # three columns, two rows
    assert (in_tmp / "strip.svg").read_text().startswith("<?xml")

    for seed in ("3", "4"):
        argv = ["draw", *model, "--number=6", "--seed", seed, "--out", f"{seed}.png"]
        assert main(argv) == 0
    square, other = Image.open("3.png"), Image.open("4.png")
    assert square.tobytes() != other.tobytes()
    assert abs(square.width - square.height) < 0.5 * square.width


def test_black_and_white(in_tmp: Path, cards: Path) -> None:
    argv = ["--number=50", "--binary", "--numbers=a.npy"]
    assert main(["draw", "--model", str(cards / "small"), *argv]) == 0
    drawn = np.load("a.npy")
    assert (drawn.shape, set(np.unique(drawn))) == ((50, 8, 8), {0, 1})


@pytest.mark.parametrize(
    ("model", "says"), [("mlp", "mlp MLPClassifier DRAW"), ("diverged", "diverged finite")]
)
def test_wrong_models(in_tmp: Path, cards: Path, model: str, says: str) -> None:
    refuses(says.split(), cli, "draw", f"--model={cards / model}", code=1)
    assert list(in_tmp.iterdir()) == []
