"""Pages and sheets of handwriting: strokes against sums by hand, places, files that can be read."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection
from refusals import refuses

from ln_zoo.plots.pen import GIVEN, INK, page, sheet, strokes

#: Two strokes, a dot and a stroke that is not ended; sums are below.
LINE = [[10, 0, 0], [0, -20, 1], [5, 5, 0], [1, 2, 0], [3, 4, 1], [7, 0, 1], [2, 2, 0], [4, -8, 0]]
STROKES = [
    [[0, 0], [10, 0], [10, -20]], [[15, -15], [16, -13], [19, -9]],
    [[26, -9]], [[28, -7], [32, -15]],
]  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


def line(seed: int = 0, points: int = 30) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    moves = torch.randn(points, 2, generator=generator) * 20 + torch.tensor([5.0, 0.0])
    lifts = torch.rand(points, 1, generator=generator) < 0.2
    return torch.cat([moves, lifts.float()], 1)


def places(drawn) -> np.ndarray:
    return np.concatenate([stroke.points for stroke in drawn])


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_strokes_are_sums_broken_after_lifts(kind) -> None:
    found = strokes(kind(LINE, dtype={torch.tensor: torch.float32, np.array: np.int64}[kind]))
    assert [stroke.tolist() for stroke in found] == STROKES
    # Behind a lift the pen comes down at the first point.
    found = strokes(np.array(LINE), pen_down=False)
    assert [stroke.tolist() for stroke in found] == [STROKES[0][1:], *STROKES[1:]]
    assert [s.tolist() for s in strokes(np.array([[1, 2, 1]]))] == [[[0, 0], [1, 2]]]
    assert [s.tolist() for s in strokes(np.array([[1, 2, 1]]), pen_down=False)] == [[[1, 2]]]
    assert strokes(torch.zeros(0, 3)) == strokes(torch.zeros(0, 3), pen_down=False) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite(value: float) -> None:
    offsets = torch.tensor(LINE, dtype=torch.float64)
    offsets[5, 1] = value
    for draw in (strokes, lambda x: page([x]), lambda x: sheet([x], ["a"])):
        refuses(r"1 of 8 offsets .*number 5", draw, offsets)


@pytest.mark.parametrize("shape", [(4, 2), (3,), (1, 4, 3)])
def test_wrong_shapes(shape: tuple[int, ...]) -> None:
    refuses(r"offsets must be \(T, 3\)", strokes, np.zeros(shape))


def test_a_page_is_the_strokes_moved_and_scaled() -> None:
    drawn = page([np.array(LINE)])
    assert [len(stroke.points) for stroke in drawn.strokes] == [3, 3, 1, 2]
    expected = np.concatenate([np.array(stroke) for stroke in STROKES]) / drawn.units_per_inch
    found = places(drawn.strokes)
    np.testing.assert_allclose(found - found[0], expected - expected[0], atol=1e-12)
    assert (found > 0).all()
    assert (found < (drawn.width, drawn.height)).all()
    # A median step, of those on the board, is a 45th of an inch.
    steps = [10, 20, math.hypot(1, 2), 5, math.hypot(4, 8)]
    assert drawn.units_per_inch == pytest.approx(45 * np.median(steps))


def test_lines_lie_below_one_another_from_the_left() -> None:
    lines = [line(0), None, line(1), line(2, points=60), line(3)]
    drawn = page(lines)
    counts = [0 if a is None else len(strokes(a)) for a in lines]
    ends = np.cumsum(counts)
    parts = zip(ends - counts, ends, strict=True)
    rows = [places(drawn.strokes[first:end]) for first, end in parts if first < end]
    for row, offsets in zip(rows, [a for a in lines if a is not None], strict=True):
        alone = np.concatenate(strokes(offsets)) / drawn.units_per_inch
        np.testing.assert_allclose(row - row[0], alone - alone[0], atol=1e-9)
    lefts = [row[:, 0].min() for row in rows]
    assert lefts == pytest.approx([lefts[0]] * 4)
    for upper, lower in itertools.pairwise(rows):
        assert upper[:, 1].min() > lower[:, 1].max()
    # The lines are ruled: one distance, and two where a line is blank.
    middles = np.array([np.median(row[:, 1]) for row in rows])
    distance = middles[1] - middles[2]
    np.testing.assert_allclose(-np.diff(middles), distance * np.array([2, 1, 1]))
    # And no greater than the closest pair needs.
    gaps = [a[:, 1].min() - b[:, 1].max() for a, b in itertools.pairwise(rows[1:])]
    assert 0 < min(gaps) < 0.2


def test_pages_of_nothing_and_of_lines_that_run_away() -> None:
    for lines in ([], [None], [torch.zeros(0, 3)], [torch.zeros(0, 3), None, torch.zeros(0, 3)]):
        drawn = page(lines)
        assert drawn.strokes == ()
        assert min(drawn.width, drawn.height) > 0
        drawn.figure()
    offsets = torch.tensor([[1.0, 0, 0]] * 2000)
    drawn = page([offsets])
    assert drawn.units_per_inch == pytest.approx(2000 / 16)
    assert drawn.width == pytest.approx(16.5)


def test_a_sheet_of_two_columns() -> None:
    lines = {"real": [line(0), line(1)], "sample": [line(2), torch.zeros(0, 3)]}
    drawn = sheet(lines, ["first", "second"], "Lines")
    counts = [len(strokes(a)) for column in lines.values() for a in column]
    parts = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    real, below, sample = (places([drawn.strokes[i] for i in part]) for part in parts[:3])
    assert max(real[:, 0].max(), below[:, 0].max()) < sample[:, 0].min()
    assert below[:, 1].max() < real[:, 1].min()
    assert np.median(sample[:, 1]) == pytest.approx(np.median(real[:, 1]))
    words = {w.text: w for w in drawn.words}
    assert set(words) == {"Lines", "real", "sample", "first", "second"}
    assert words["Lines"].y > words["real"].y == words["sample"].y > words["first"].y
    assert words["sample"].x == pytest.approx(sample[:, 0].min())
    # Each label stands between its line and the line above.
    assert max(real[:, 1].max(), sample[:, 1].max()) < words["first"].y
    assert below[:, 1].max() < words["second"].y < min(real[:, 1].min(), sample[:, 1].min())


@pytest.mark.parametrize("lift", [0, 1])
def test_primed_lines_go_on_where_the_given_strokes_end(lift: int) -> None:
    given, written = np.array(LINE), line(1).numpy()
    given[-1, 2] = lift
    drawn = page([written, written[:4]], given=given, show_given=True)
    colours = [stroke.colour for stroke in drawn.strokes]
    first = colours[: 4 + len(strokes(written, not lift))]
    assert first == [GIVEN] * 4 + [INK] * (len(first) - 4)
    assert len(drawn.strokes[4].points) == len(strokes(written, not lift)[0])
    # Both together are one line.
    whole = np.concatenate(strokes(np.concatenate([given, written]))) / drawn.units_per_inch
    found = places(drawn.strokes[: len(first)])
    # Where the pen stays down, the last given point is the first of the next stroke as well.
    points = np.unique(np.round(found - found[0], 9), axis=0)
    np.testing.assert_allclose(points, np.unique(np.round(whole - whole[0], 9), axis=0), atol=1e-8)
    # The given strokes show only if they are asked for.
    assert len(page([written], given=given).strokes) == len(first) - 4


def test_labels_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="zip"):
        sheet({"real": [line()], "b": []}, ["a"])


def test_an_svg_has_its_strokes_and_texts(tmp_path: Path) -> None:
    primed = page([line(1)], given=np.array(LINE), show_given=True).strokes
    labelled = sheet([line(1), line(2)], ["<a> & b", "c\x00"], "title")
    drawn = dataclasses.replace(labelled, strokes=primed)
    drawn.save(tmp_path / "deep/sheet.svg", thickness=3.6)
    root = ElementTree.parse(tmp_path / "deep/sheet.svg").getroot()
    assert root.find(f"{SVG}title").text == "title"
    points = [float(root.get(side).removesuffix("pt")) for side in ("width", "height")]
    assert points == pytest.approx([72 * drawn.width, 72 * drawn.height])
    groups = {group.get("id"): group for group in root.iter(f"{SVG}g")}
    lines = groups["LineCollection_1"].findall(f"{SVG}path")
    long = [stroke for stroke in drawn.strokes if len(stroke.points) > 1]
    for path, stroke in zip(lines, long, strict=True):
        numbers = [float(n) for n in path.get("d").replace("M", "").replace("L", "").split()]
        found = np.reshape(numbers, (-1, 2)) / 72
        # y points down
        assert np.abs(found * (1, -1) + (0, drawn.height) - stroke.points).max() < 1e-4
        style = path.get("style")
        assert f"stroke: {stroke.colour}" in style
        assert "stroke-width: 3.6; stroke-linecap: round" in style
    dots = len(drawn.strokes) - len(long)
    assert len([*groups["PathCollection_1"].iter(f"{SVG}use")]) == dots > 0


def test_the_figure_is_drawn_to_scale() -> None:
    drawn = sheet([np.array(LINE), line(1)], ["one", "$x^2$"], "title")
    figure = drawn.figure()
    (axis,) = figure.axes
    assert axis.get_aspect() == 1
    assert axis.get_position().bounds == (0, 0, 1, 1)
    assert not axis.axison
    assert figure.get_size_inches().tolist() == [drawn.width, drawn.height]
    assert (*axis.get_xlim(), *axis.get_ylim()) == (0, drawn.width, 0, drawn.height)
    lines, dots = axis.collections
    assert isinstance(lines, LineCollection)
    long = [s.points for s in drawn.strokes if len(s.points) > 1]
    points = [s.points[0] for s in drawn.strokes if len(s.points) == 1]
    assert len(points) >= 1
    for found, expected in zip(lines.get_segments(), long, strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(dots.get_offsets(), points)
    assert [text.get_text() for text in axis.texts] == ["title", "one", "$x^2$"]
    assert not any(text.get_parse_math() for text in axis.texts)
    (axis,) = drawn.figure(thickness=3.6).axes
    assert axis.collections[0].get_linewidths() == [3.6]


@pytest.mark.parametrize(
    ("ending", "begins"),
    [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".SVG", b"<?xml"), (".jpg", b"\xff\xd8")],
)
def test_pictures_of_each_kind_are_reproducible(tmp_path: Path, ending: str, begins: bytes) -> None:
    files = [tmp_path / f"{name}{ending}" for name in ("a", "b")]
    for file in files:
        sheet([line()], ["one"]).save(file)
    first, second = (file.read_bytes() for file in files)
    assert first.startswith(begins)
    assert first == second


@pytest.mark.parametrize("name", ["picture", "picture.xyz"])
def test_other_endings(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} does not name a picture: end it in .svg, .png"):
        page([line()]).save(tmp_path / name)
    assert not list(tmp_path.iterdir())
