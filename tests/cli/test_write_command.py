"""``ln-zoo write``: what it writes and where, how it lays out a page, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from cli_support import Capture, cli
from handwriting_support import Waves
from refusals import refuses
from training import quiet_trainer

from ln_zoo.cli import main
from ln_zoo.data.pen.files import PenLines
from ln_zoo.models import Handwriting
from ln_zoo.norms import RMSNorm
from ln_zoo.plots.pen import THICKNESS, Page, page, strokes

SVG = "{http://www.w3.org/2000/svg}"


def train(path: Path, data: Waves | None = None, **arguments) -> Path:
    torch.manual_seed(0)
    small = {"hidden_size": 8, "num_layers": 2, "mixture_components": 2, "norm": RMSNorm()}
    model = Handwriting(**small, window_components=2, lr=0.02, kappa_bias=-1.5, **arguments)
    trainer = quiet_trainer(max_epochs=8)
    trainer.fit(model, datamodule=data or Waves())
    trainer.save_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained") / "small.ckpt")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Handwriting:
    return Handwriting.load_from_checkpoint(checkpoint, weights_only=True).eval()


def expected(model: Handwriting, texts: list[str], seed: int = 0, bias=0.7, **more) -> list:
    return model.write(texts, bias, generator=torch.Generator().manual_seed(seed), **more)


def write(checkpoint: Path, *argv: str) -> None:
    assert main(["write", "--model", str(checkpoint), *argv]) == 0


def paths(svg: Path) -> int:
    """How many strokes: lines, and dots, which are uses of a marker."""
    groups = ElementTree.parse(svg).iter(f"{SVG}g")
    drawn = [g for g in groups if g.get("id", "").startswith(("LineColl", "PathColl"))]
    return sum(len([*g.findall(f"{SVG}path"), *g.iter(f"{SVG}use")]) for g in drawn)


def as_svg(drawn: Page, thickness: float = THICKNESS) -> str:
    file = Path("expected.svg")
    drawn.save(file, thickness)
    return file.read_text()


def written(file: Path) -> list[dict]:
    return json.loads(file.read_text())


# What it writes


def test_a_line(here: Path, checkpoint: Path, model: Handwriting, capsys: Capture) -> None:
    options = "--strokes out/a.json --attention out/phi.png --seed 3 --bias 0.2 --thickness 2"
    write(checkpoint, "no cab", "--out=out/a.svg", *options.split())
    (line,) = expected(model, ["no cab"], seed=3, bias=0.2)
    points = len(line.offsets)
    out, err = capsys.readouterr()
    writing = f"writing: out/a.svg (1 line, {points} points)"
    assert out.splitlines() == [writing, "attention: out/phi.png", "strokes: out/a.json"]
    assert ("was cut" in err) is not line.finished
    assert (here / "out/a.svg").read_text() == as_svg(page([line.offsets], title="no cab"), 2.0)
    assert paths(here / "out/a.svg") == len(strokes(line.offsets)) > 1
    (kept,) = written(here / "out/a.json")
    assert (kept["text"], kept["finished"]) == ("no cab", line.finished)
    np.testing.assert_allclose(kept["offsets"], line.offsets, atol=6e-5)
    assert (here / "out/phi.png").read_bytes().startswith(b"\x89PNG")


def test_a_page(here: Path, checkpoint: Path, model: Handwriting) -> None:
    """Wrapped between words; breaks and blank lines of the text stay."""
    text = "a cab can\n\n  to several  \n\nok"
    (here / "text.txt").write_text(text)
    lines = ["a cab", "can", None, "to", "several", None, "ok"]
    write(checkpoint, "--file=text.txt", "--width=5", "--strokes=a.json", "--out=a.svg")
    assert [line["text"] for line in written(here / "a.json")] == [x for x in lines if x]
    found = iter(expected(model, [x for x in lines if x]))
    rows = [None if x is None else next(found).offsets for x in lines]
    title = "\n".join(x or "" for x in lines)
    assert (here / "a.svg").read_text() == as_svg(page(rows, title=title))
    # The same given as arguments, each from a new line.
    write(checkpoint, *text.split("\n"), "--width=5", "--out=b.svg")
    assert (here / "b.svg").read_text() == (here / "a.svg").read_text()


@pytest.mark.parametrize(
    ("texts", "rows"), [(["ab"], ["ab", "ab"]), (["ab", "c"], ["ab", "c", None, "ab", "c"])]
)
def test_several_versions(here: Path, checkpoint: Path, texts: list[str], rows: list) -> None:
    write(checkpoint, *texts, "--samples=2", "--out=a.svg", "--strokes=a.json")
    lines = written(here / "a.json")
    assert [line["text"] for line in lines] == [row for row in rows if row]
    assert lines[0]["offsets"] != lines[len(texts)]["offsets"]
    drawn = [torch.tensor(line["offsets"]) for line in lines]
    assert paths(here / "a.svg") == sum(map(len, map(strokes, drawn)))


@pytest.mark.parametrize(
    ("bias", "notes"),
    [
        # The window stands still: 40 points for each character.
        ([-9.0] * 6, ["'!'", "line 1 'a' 40", "line 2 'b!' 80"]),
        # The window moves by three characters at a step.
        ([0, 0, 0, 0, 1.1, 1.1], ["'!'", "line 1 'a' empty", "line 2 'b!' empty"]),
    ],
)
def test_notes_of_lines_that_are_cut_empty_or_have_unknown_characters(
    here: Path, checkpoint: Path, capsys: Capture, bias: list[float], notes: list[str]
) -> None:
    state = torch.load(checkpoint, weights_only=True)
    state["state_dict"]["window.window.weight"].zero_()
    state["state_dict"]["window.window.bias"].copy_(torch.tensor(bias))
    torch.save(state, here / "other.ckpt")
    write(here / "other.ckpt", "a", "b!", "--attention=phi.png")
    for line, words in zip(capsys.readouterr().err.splitlines(), notes, strict=True):
        assert line.startswith("note: ")
        assert all(word in line for word in words.split()), line
    assert (paths(here / "writing.svg") == 0) == ("empty" in notes[1])


def test_a_note_before_long_texts(here: Path, checkpoint: Path, capsys: Capture) -> None:
    for samples, noted in ((1, False), (251, True)):
        write(checkpoint, "ab", "--strokes=a.json", f"--samples={samples}")
        assert ("502 characters" in capsys.readouterr().err) == noted


# In the hand of a line

GIVEN = np.array([[4, 3, 0], [2, -8, 0], [9, 0, 1], [7, 7, 0], [3, -3, 1]])


@pytest.mark.parametrize("form", ["npy", "npz", "lifts first", "null vector"])
def test_primed_by_a_file(here: Path, checkpoint: Path, model: Handwriting, form: str) -> None:
    file, shown = ("given.npz", True) if form == "npz" else ("given.npy", form == "npy")
    if form == "npz":
        np.savez(file, line=GIVEN)
    else:
        others = {"lifts first": GIVEN[:, [2, 0, 1]], "null vector": np.vstack([[0, 0, 0], GIVEN])}
        np.save(file, others.get(form, GIVEN))
    prime = ["--prime", file, "--prime_text", "hi", *(["--show_prime"] if shown else [])]
    write(checkpoint, "abc", *prime, "--strokes=a.npy", "--out=a.svg", "--attention=phi.png")
    given = torch.tensor(GIVEN, dtype=torch.float32)
    (line,) = expected(model, ["abc"], prime=(given, "hi "))
    assert np.load("a.npy").tolist() == line.offsets.tolist()
    drawn = page([line.offsets], given=given, show_given=shown, title="abc")
    assert (here / "a.svg").read_text() == as_svg(drawn)
    assert paths(here / "a.svg") == len(strokes(line.offsets, False)) + 2 * shown


@pytest.mark.parametrize("scale", ["std", "median"])
def test_primed_by_a_line_of_the_database(
    here: Path, checkpoint: Path, model: Handwriting, scale: str
) -> None:
    """Whose y points down; models of lines divided by their own median step get such a line."""
    for name in ("train", "valid1", "valid2", "test"):
        steps = np.array([[900, 700, 0], [4, -3, 0], [6, 8, 0], [8, 6, 1]])
        both, names = [steps, steps * (1, -1, 1)], [f"{name}-1", f"{name}-2"]
        PenLines.from_steps(both, names, ["x", "hi"]).save(here / f"iam/strokes_{name}")
    given = torch.tensor([[4.0, -3, 0], [6, 8, 0], [8, 6, 1]])
    if scale == "median":
        checkpoint = train(here / "median.ckpt", Waves(mean=0.0, std=1.0))
        model = Handwriting.load_from_checkpoint(checkpoint, weights_only=True).eval()
        given[:, :2] /= 10
    write(checkpoint, "abc", "--prime=valid2-2", "--data=iam", "--strokes=a.npy")
    (line,) = expected(model, ["abc"], prime=(given, "hi "))
    assert np.load("a.npy").tolist() == line.offsets.tolist()
    assert paths(here / "writing.svg") == len(strokes(line.offsets, False))


# How it fails


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--model diverged.ckpt", "diverged.ckpt"),
        ("--bias nan", "--bias nan"),
        ("--thickness 0", "--thickness 0"),
        ("--file text.txt", "--file"),
        ("--attention a", "--attention a"),
        ("--attention a.svg --out a.svg", "--attention --out a.svg"),
        ("--strokes a.npy --samples 2", "--strokes a.npy 2"),
        ("--prime no.npy --prime_text a", "no.npy"),
        ("--prime line.npy", "line.npy --prime_text"),
        ("--prime two.npz", "two.npz"),
        ("--prime objects.npy", "objects.npy"),
        ("--prime flat.npy", "flat.npy (3, 2)"),
        ("--prime infinite.npy", "infinite.npy"),
        ("--prime large.npy --prime_text a", "large.npy"),
        ("--prime broken.npz", "broken.npz"),
        ("--prime id --data none", "none"),
        ("--prime test-3 --data iam", "'test-3' 'test-1'"),
        ("--prime test-1 --data iam", "test-1 --prime_text"),
    ],
)
def test_wrong_input(here: Path, checkpoint: Path, given: str, says: str) -> None:
    _prepare(here, checkpoint)
    before = sorted(here.rglob("*"))
    # The last of two options counts.
    argv = ["--model", str(checkpoint), *given.split()]
    refuses(says.split(), cli, "write", "ab!", *argv, code=1)
    assert sorted(here.rglob("*")) == before


def _prepare(here: Path, checkpoint: Path) -> None:
    (here / "text.txt").write_text("ab")
    np.save("line.npy", GIVEN)
    np.savez("two.npz", a=GIVEN, b=GIVEN)
    np.save("objects.npy", np.array([GIVEN, None], dtype=object), allow_pickle=True)
    np.save("flat.npy", GIVEN[:3, :2])
    np.save("infinite.npy", np.where(GIVEN == 9, np.inf, GIVEN))
    np.save("large.npy", np.where(GIVEN == 9, 1e39, GIVEN))
    np.savez_compressed("broken.npz", GIVEN)
    broken = Path("broken.npz").read_bytes()
    Path("broken.npz").write_bytes(broken[:70] + b"\xff" * 20 + broken[90:])
    state = torch.load(checkpoint, weights_only=True)
    state["state_dict"]["output.bias"][3] = torch.nan
    torch.save(state, here / "diverged.ckpt")
    for name in ("train", "valid1", "valid2", "test"):
        PenLines.from_steps([GIVEN], [f"{name}-1"], [""]).save(here / f"iam/strokes_{name}")


@pytest.mark.parametrize("text", [[], [""], [" ", "\n\n"]])
def test_nothing_to_write(here: Path, text: list[str]) -> None:
    """Said before a model is looked for."""
    refuses(["text"], cli, "write", *text, "--model", "none.ckpt", code=1)
    (here / "a.txt").write_bytes(b"\xff\xfe")
    for file in ("a.txt", "b.txt", "/dev/zero"):
        refuses([file], cli, "write", "--file", file, "--model", "none.ckpt", code=1)
