"""Lines of pen points: the compact form, parts and unions, long steps, damage."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from handwriting_support import drawn
from refusals import refuses

from ln_zoo.data import PenLines
from ln_zoo.data.pen.files import ARRAYS, pack

STEPS = [
    np.array([[500, 900, 0], [3, -4, 1], [100, 20, 1]]),
    np.array([[450, 1900, 1], [7, 7, 0], [0, -2, 0], [1, 1, 1]]),
]


def lines() -> PenLines:
    return PenLines.from_steps(STEPS, ["a01-000u-01", "a01-000u-02"], ["Ab", "c, d"])


def same(one: PenLines, other: PenLines) -> bool:
    return (
        one.line_id == other.line_id
        and one.text == other.text
        and all(np.array_equal(one.steps(i), other.steps(i)) for i in range(len(one)))
    )


def test_steps_come_back() -> None:
    found = lines()
    assert found.points.tolist() == [3, 4]
    for i, steps in enumerate(STEPS):
        assert found.steps(i).dtype == np.float32
        assert np.array_equal(found.steps(i), steps)
    assert found.sources[0].dx.dtype == np.int16


def test_the_compact_form_is_documented_arrays(tmp_path: Path) -> None:
    lines().save(tmp_path / "strokes_train")
    stored = {name: np.load(tmp_path / f"strokes_train/{name}.npy") for name in ARRAYS}
    assert stored["dx"].tolist() == [500, 3, 100, 450, 7, 0, 1]
    assert stored["dy"].tolist() == [900, -4, 20, 1900, 7, -2, 1]
    assert stored["pen_up"].tolist() == [0, 1, 1, 1, 0, 0, 1]
    assert stored["offsets"].tolist() == [0, 3, 7]
    assert stored["line_id"].tolist() == ["a01-000u-01", "a01-000u-02"]
    assert stored["text"].tolist() == ["Ab", "c, d"]
    types = [stored[name].dtype.kind + str(stored[name].dtype.itemsize) for name in ARRAYS[:4]]
    assert types == ["i2", "i2", "u1", "i8"]


def test_folder_is_mapped_and_npz_is_the_same(tmp_path: Path) -> None:
    lines().save(tmp_path / "folder")
    np.savez_compressed(tmp_path / "file.npz", **pack(STEPS, lines().line_id, lines().text))
    mapped, loaded = PenLines.load(tmp_path / "folder"), PenLines.load(tmp_path / "file.npz")
    assert isinstance(mapped.sources[0].dx, np.memmap)
    assert same(mapped, lines())
    assert same(loaded, lines())


def test_what_is_no_whole_number_or_too_large_is_kept_as_float() -> None:
    for steps in ([[0.5, 0, 0], [0.25, -3, 1]], [[40_000, 0, 0], [1, 2, 1]]):
        found = PenLines.from_steps([np.array(steps)], ["a"], ["b"])
        assert found.sources[0].dx.dtype == np.float32
        assert found.steps(0).tolist() == steps


def test_parts_and_unions_share_points() -> None:
    both = lines() + drawn([5, 2])
    part = both.pick([3, 0, 2])
    assert part.line_id == ("line-1", "a01-000u-01", "line-0")
    assert part.text == ("text 1", "Ab", "text 0")
    assert part.points.tolist() == [2, 3, 5]
    assert np.array_equal(part.steps(1), STEPS[0])
    assert np.array_equal(part.steps(2), drawn([5, 2]).steps(0))
    assert part.sources[0].dx is both.sources[0].dx
    assert len(both.pick([])) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dy": None}, "lacks dy: the compact form has dx, dy, pen_up, offsets, line_id, text"),
        ({"dy": np.zeros(6)}, r"of one length, got dx \(7,\), dy \(6,\)"),
        ({"dx": np.zeros((7, 1))}, "of one length"),
        ({"offsets": np.array([0, 3, 6])}, "0 to 7, got 0 to 6"),
        ({"offsets": np.array([0, 8, 7])}, "0 to 7"),
        ({"offsets": np.array([1, 3, 7])}, "0 to 7, got 1 to 7"),
        ({"offsets": np.array([0.0, 3.0, 7.0])}, "integers"),
        ({"offsets": np.array([0, 8, 7], np.uint64)}, "0 to 7"),
        ({"text": np.array(["a"])}, r"2 lines .*\(2,\) names .*\(1,\) texts"),
        ({"line_id": np.array("a")}, r"2 lines .*\(\) names"),
        ({"pen_up": np.array([0, 1, 1, 2, 0, 0, 1])}, r"pen_up must be 0 or 1, got \[0 1 2\]"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    arrays = pack(STEPS, ["a", "b"], ["c", "d"]) | changes
    np.savez(tmp_path / "x.npz", **{k: v for k, v in arrays.items() if v is not None})
    refuses(f"x.npz.*{message}", PenLines.load, tmp_path / "x.npz")


@pytest.mark.parametrize("kind", ["complex", "objects", "empty", "pipe", 0, 100, 900])
def test_files_that_are_no_lines_are_named(tmp_path: Path, kind: str | int) -> None:
    path, arrays = tmp_path / "x.npz", pack(STEPS, ["a", "b"], ["c", "d"])
    changes = {
        "complex": {"dx": arrays["dx"] * 1j},
        "objects": {"text": np.array([{}, {}], dtype=object)},
        "empty": pack([], [], []),
    }
    np.savez_compressed(path, **arrays | changes.get(kind, {}))  # type: ignore[call-overload]
    if isinstance(kind, int):
        content = path.read_bytes()
        assert len(content) > kind
        path.write_bytes(content[:kind])
    elif kind == "pipe":
        path.unlink()
        os.mkfifo(path)
    refuses(r"x\.npz", PenLines.load, path)


def test_damaged_lines_are_found() -> None:
    nan, inf = ([[1, 1, 0], [np.nan, 2, 1]], [[np.inf, 1, 0], [1, 2, 1]])
    bad = [STEPS[0], np.array([[1, 1, 1]]), np.empty((0, 3)), np.array(nan), np.array(inf)]
    found = PenLines.from_steps(bad, list("abcde"), list("abcde")).damaged()
    assert found == {"fewer than two points": [1, 2], "coordinates that are not finite": [3, 4]}


LONG = np.array(
    [
        [900, 900, 0],  # the position: no step
        [3, 4, 0],
        [60, 80, 0],  # 100 long
        [6, 8, 1],  # 10 long
        [300, 400, 0],  # between strokes: stays
        [0, -20, 0],  # 20 long
        [30, 40, 0],  # 50 long
        [-30, 40, 1],  # 50 long, ends the stroke
        [0, 200, 1],  # between strokes
    ]
)


def test_long_steps_within_strokes_are_dropped() -> None:
    given = drawn([4]) + PenLines.from_steps([LONG], ["x"], ["y"]) + drawn([3], seed=1)
    found = given.without_long_steps(20, "drop")
    assert (found.line_id, found.text) == (given.line_id, given.text)
    kept = [[900, 900, 0], [3, 4, 0], [6, 8, 1], [300, 400, 0], [0, -20, 1], [0, 200, 1]]
    assert found.steps(1).tolist() == kept
    assert np.array_equal(given.steps(1), LONG)


def test_long_steps_within_strokes_are_clipped() -> None:
    found = PenLines.from_steps([LONG], ["x"], ["y"]).without_long_steps(25, "clip")
    wanted = LONG.astype(float)
    wanted[2, :2], wanted[6, :2], wanted[7, :2] = (15, 20), (15, 20), (-15, 20)
    np.testing.assert_allclose(found.steps(0), wanted, rtol=1e-6)


def test_lines_without_long_steps_stay_where_they_are() -> None:
    given = drawn([4, 5])
    found = given.without_long_steps(1000, "drop")
    assert same(found, given)
    assert found.sources[0].dx is given.sources[0].dx
