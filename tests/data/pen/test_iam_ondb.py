"""IAM-OnDB: the real lines, the compact form, splits, and the pair of NumPy and text file."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from data_support import SETS, real_folder
from data_support import ready as read_in
from handwriting_support import drawn, small_distribution, write_files
from refusals import refuses

from ln_zoo.data import IAMOnDB, PenLines
from ln_zoo.data.pen.files import end_of_stroke_column, load_objects, pack, read_pair

OFFICIAL = {"train": 30, "valid1": 5, "valid2": 7, "test": 9}


@pytest.fixture(scope="module")
def real(data_root: Path) -> str:
    return str(real_folder(data_root, "iam_ondb"))


def ready(root: Path | str | None = None, **options) -> IAMOnDB:
    return read_in(IAMOnDB(None if root is None else str(root), **options))


def lines_of(name: str) -> PenLines:
    lines = drawn(list(range(4, 4 + OFFICIAL[name])), seed=OFFICIAL[name])
    lines.line_id = tuple(f"{name}-{i:02}" for i in range(len(lines)))
    lines.text = tuple(f"{name} {i}" for i in range(len(lines)))
    return lines


def as_npz(folder: Path, name: str) -> None:
    lines = lines_of(name)
    steps = [lines.steps(i) for i in range(len(lines))]
    np.savez_compressed(folder / f"strokes_{name}.npz", **pack(steps, lines.line_id, lines.text))


@pytest.fixture(params=["folders", "npz", "both"])
def compact(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    for name in OFFICIAL:
        if request.param != "npz":
            lines_of(name).save(tmp_path / f"strokes_{name}")
        if request.param != "folders":
            as_npz(tmp_path, name)
    return tmp_path


def identities(data: IAMOnDB) -> dict[str, list[str]]:
    return {name: list(data.lines(name).lines.line_id) for name in SETS}


def test_the_real_sets(real: str) -> None:
    sizes = {name: PenLines.load(Path(real, f"strokes_{name}.npz")) for name in OFFICIAL}
    assert [len(lines) for lines in sizes.values()] == [5364, 1438, 1518, 3859]

    official = ready(real, split="official")
    assert [len(official.lines(n)) for n in SETS] == [5364 - 9, 1438, 3859]
    whole = ready(real, split="official", require_text=False)
    mean, std = whole.offset_statistics
    assert len(whole.lines("train")) == 5364
    # Measured on whiteboards, where y grows downwards: mean (8.46, 0.085), std (42.7, 36.5).
    assert mean.tolist() == pytest.approx([8.46, -0.085], abs=5e-3)
    assert std.tolist() == pytest.approx([42.73, 36.50], abs=1e-2)
    # The transcribed lines alone hardly differ.
    torch.testing.assert_close(official.offset_statistics[1], std, rtol=1e-3, atol=0)


def test_the_split_of_graves_on_the_real_lines(real: str) -> None:
    data = ready(real)
    train, val = data.lines("train"), data.lines("val")
    assert len(train) == 10_741 - 9
    assert len(val) == len(data.lines("test")) == 1438
    assert data.metadata["left_out"] == {"train": {"no text": 9}}
    assert data.metadata["test_split"] == "validation"
    points = train.lines.points
    assert (points.min(), points.max()) == (31, 1940)
    assert 0.74 < (points > 500).mean() < 0.78
    loader = data.train_dataloader()
    assert len(loader) == -(-10_732 // 8)
    batch = next(iter(loader))
    assert batch.offsets.shape[0] == 8
    assert batch.offsets.shape[1] <= 501
    # A line of the paper's archive, by hand.
    place = train.lines.line_id.index("a01-001w-01")
    assert train.text[place] == "By Trevor Williams. A move to"
    with np.load(Path(real, "strokes_train.npz")) as archive:
        wanted = np.stack([archive["dx"][1:590], -archive["dy"][1:590].astype(int)], axis=1)
        assert archive["offsets"][1] == 590
    assert np.array_equal(train.offsets(place)[1:, :2].numpy(), wanted)


@pytest.mark.parametrize(
    ("split", "train", "test"),
    [("graves", ("train", "valid2", "test"), "valid1"), ("official", ("train",), "test")],
)
def test_splits_of_others(compact: Path, split: str, train: tuple[str, ...], test: str) -> None:
    data = ready(compact, split=split)
    assert identities(data) == {
        "train": [line for name in train for line in lines_of(name).line_id],
        "val": list(lines_of("valid1").line_id),
        "test": list(lines_of(test).line_id),
    }
    last = lines_of(train[-1])
    place = data.lines("train").lines.line_id.index(last.line_id[3])
    wanted = last.steps(3) * (1, -1, 1)
    assert np.array_equal(data.lines("train").offsets(place)[1:], wanted[1:])
    stated = "validation" if split == "graves" else "test"
    assert (data.metadata["split"], data.metadata["test_split"]) == (split, stated)


def test_random(compact: Path) -> None:
    def split(**options) -> dict[str, list[str]]:
        return identities(ready(compact, split="random", **options))

    found = split(val_fraction=0.2, test_fraction=0.1)
    assert [len(found[name]) for name in SETS] == [36, 10, 5]
    everything = [line for name in OFFICIAL for line in lines_of(name).line_id]
    assert sorted(line for lines in found.values() for line in lines) == sorted(everything)
    assert found == split(val_fraction=0.2, test_fraction=0.1, seed=3)
    assert found != split(val_fraction=0.2, test_fraction=0.1, split_seed=1)
    facts = ready(compact, split="random", split_seed=4).metadata
    assert (facts["split_seed"], facts["val_fraction"], facts["test_split"]) == (4, 0.1, "random")
    refuses(r"51 lines.*0\.001", split, val_fraction=0.001)


def test_mapped_points_are_read_from_the_file(compact: Path) -> None:
    mapped = (compact / "strokes_train").is_dir()  # also where both forms are there
    sources = ready(compact).lines("train").lines.sources
    assert all(isinstance(points.dx, np.memmap) == mapped for points in sources)


def test_the_folder_is_found_by_the_environment(compact: Path, monkeypatch) -> None:
    compact.rename(compact.parent / "iam_ondb")
    monkeypatch.setenv("LN_ZOO_DATA", str(compact.parent))
    assert len(ready().lines("val")) == 5
    (compact.parent / "iam_ondb").rename(compact)
    refuses("ln-zoo data iam_ondb SRC DST", IAMOnDB().prepare_data, error=FileNotFoundError)
    refuses("no IAM-OnDB", IAMOnDB().setup, error=FileNotFoundError)


@pytest.mark.parametrize(
    ("options", "mentioned"),
    [
        ({"split": "grave"}, "split.*'graves'.*'grave'"),
        ({"y_axis": "left"}, "y_axis.*left"),
        ({"val_fraction": 0}, "val_fraction.* 0 and 0.1"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "0.5 and 0.5"),
        ({"split_seed": -1}, "split_seed.*-1"),
    ],
)
def test_values_are_checked(tmp_path: Path, options: dict, mentioned: str) -> None:
    refuses(mentioned, IAMOnDB, str(tmp_path), **options)


def test_folders_that_hold_something_else(tmp_path: Path) -> None:
    refuses("nowhere", ready, tmp_path / "nowhere", error=FileNotFoundError)
    (tmp_path / "file").write_text("")
    refuses("file", ready, tmp_path / "file", error=NotADirectoryError)
    refuses(r"strokes_train.*file", ready, tmp_path)
    official = write_files(tmp_path / "official", small_distribution())
    refuses(r"official.*ln-zoo data iam_ondb", ready, official)
    as_npz(tmp_path, "train")
    lines_of("test").save(tmp_path / "strokes_test")
    refuses("lacks strokes_valid1, strokes_valid2", ready, tmp_path, error=FileNotFoundError)


# strokes.npy and sentences.txt


def write_pair(folder: Path, order: tuple[int, int, int], scale: float = 1.0) -> list[np.ndarray]:
    """Ten lines with columns dx, dy (upwards), end of stroke in some order."""
    rng = np.random.default_rng(3)
    lines = []
    for points in range(5, 15):
        ends = rng.random(points) < 0.3
        ends[[1, -1]] = True
        moves = rng.normal(0, 20, (points, 2)) * scale
        lines.append(np.column_stack([moves, ends]))
    save_objects(folder, *(line[:, order] for line in lines))
    (folder / "sentences.txt").write_text("".join(f"sentence {i}\r\n" for i in range(10)))
    return lines


@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize("order", [(2, 0, 1), (0, 1, 2), (0, 2, 1)])
def test_the_column_that_ends_strokes_is_found(
    tmp_path: Path, order: tuple[int, int, int], scale: float
) -> None:
    lines = write_pair(tmp_path, order, scale)
    found = read_pair(tmp_path)
    assert found.text == tuple(f"sentence {i}" for i in range(10))
    for i, line in enumerate(lines):
        np.testing.assert_allclose(found.steps(i), line * (1, -1, 1), rtol=1e-6)


def test_the_pair_as_a_data_module(tmp_path: Path) -> None:
    lines = write_pair(tmp_path, (2, 0, 1), scale=0.01)
    data = ready(tmp_path, split="random", val_fraction=0.2, test_fraction=0.2)
    found = {name: data.lines(name) for name in SETS}
    assert [len(part) for part in found.values()] == [6, 2, 2]
    for part in found.values():
        for i, text in enumerate(part.text):
            line = lines[int(text.split()[1])]
            np.testing.assert_allclose(part.offsets(i)[1:], line[1:], rtol=1e-6)
    moves = torch.cat([found["train"].offsets(i)[1:, :2] for i in range(6)]).double()
    torch.testing.assert_close(data.offset_statistics[1].double(), moves.std(0, correction=0))
    down = ready(tmp_path, split="random", val_fraction=0.2, test_fraction=0.2, y_axis="down")
    one, other = data.lines("val").offsets(0), down.lines("val").offsets(0)
    assert torch.equal(one * torch.tensor([1, -1, 1]), other)
    for split in ("graves", "official"):
        refuses(rf"strokes\.npy.*{split}", IAMOnDB, str(tmp_path), split=split)
    (tmp_path / "sentences.txt").unlink()
    refuses(r"sentences\.txt", IAMOnDB, str(tmp_path), split="random", error=FileNotFoundError)


def test_lines_of_one_length_are_a_plain_array(tmp_path: Path) -> None:
    lines = np.array([[[1, 0.5, 0.25], [0, 2, 3]], [[0, 1, 2], [1, 4, 5]]])
    for content in (lines, lines.astype(object)):
        np.save(tmp_path / "strokes.npy", content, allow_pickle=True)
        (tmp_path / "sentences.txt").write_text("a\nb")
        found = read_pair(tmp_path)
        assert found.steps(0).tolist() == [[0.5, -0.25, 1], [2, -3, 0]]
        assert found.text == ("a", "b")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([[2, 0.5, 3], [4, 1, 2]], "none"),
        ([[0, 0.5, 3], [0, 1.5, 2]], "none"),
        ([[1, 0, 3], [0, 1, 2]], "0 and 1 are"),
        ([[1, 0, 0], [0, 1, 1]], "0 and 1 and 2 are"),
    ],
)
def test_no_or_several_binary_columns_are_refused(columns: list, message: str) -> None:
    refuses(f"x: .*{message}", end_of_stroke_column, [np.array(columns, float)], "x")


def objects(*items: object) -> np.ndarray:
    array = np.empty(len(items), object)
    array[:] = items
    return array


def save_objects(path: Path, *lines: object) -> None:
    np.save(path / "strokes.npy", objects(*lines), allow_pickle=True)
    (path / "sentences.txt").write_text("".join(f"{i}\n" for i in range(len(lines))))


GOOD = np.array([[1, 0.5, 3], [0, 2, 4]])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((GOOD, GOOD[:, :2]), r"strokes.npy: line 1 must have three columns, got \(2, 2\)"),
        ((GOOD, "text"), "strokes.npy: line 1 must be an array of numbers"),
        ((GOOD[0], GOOD), "strokes.npy: line 0 must be an array of numbers"),
        ((GOOD, np.array([["a", "b", "c"]])), "strokes.npy: line 1 must be an array of numbers"),
    ],
)
def test_arrays_of_something_else(tmp_path: Path, lines: tuple, message: str) -> None:
    save_objects(tmp_path, *lines)
    refuses(message, read_pair, tmp_path)


def test_texts_that_do_not_fit(tmp_path: Path) -> None:
    save_objects(tmp_path, GOOD, GOOD * 2 / 2)
    for content, message in (
        (b"a\nb\nc\n", r"strokes\.npy.*2.*sentences\.txt.*3"),
        (b"a\n\xe9\n", r"sentences\.txt.*byte 2"),
    ):
        (tmp_path / "sentences.txt").write_bytes(content)
        refuses(message, read_pair, tmp_path)


def test_lines_that_are_not_finite_and_texts_that_are_empty(tmp_path: Path) -> None:
    bad = np.array([[1, 0.5, np.inf], [0, 2, 4]])
    lost = np.array([[np.nan, 0.5, 3], [0, 2, 4], [1, 1, 1]])
    save_objects(tmp_path, *(GOOD + np.array([0, i, 0]) for i in range(8)), bad, lost)
    (tmp_path / "sentences.txt").write_text("a\n\nc\nd\ne\nf\ng\nh\ni\nj\n")
    lines = read_pair(tmp_path)
    assert len(lines) == 10
    assert lines.damaged() == {"coordinates that are not finite": [8, 9]}
    assert lines.text[1] == ""
    with pytest.warns(UserWarning, match=r"coordinates that are not finite \(strokes-0000"):
        data = ready(tmp_path, split="random", val_fraction=0.2, test_fraction=0.2)
    assert sum(len(data.lines(name)) for name in SETS) == 7


class Harmful:
    def __init__(self, call, *arguments) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def npy(pickled: bytes) -> bytes:
    file = io.BytesIO()
    header = {"descr": "|O", "fortran_order": False, "shape": (2,)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + pickled


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    ("harm", "name"),
    [
        (lambda path: Harmful(os.system, f"touch {path}"), "posix.system"),
        (lambda path: Harmful(eval, f"open({str(path)!r}, 'w').close()"), "eval"),
        (lambda path: Harmful(np.savetxt, str(path), [1]), "numpy.*savetxt"),
    ],
)
def test_a_malicious_pickle_is_refused(tmp_path: Path, harm, name: str, protocol: int) -> None:
    harmed = tmp_path / "harmed"
    content = npy(pickle.dumps(objects(GOOD, harm(harmed)), protocol=protocol))
    (tmp_path / "strokes.npy").write_bytes(content)
    (tmp_path / "sentences.txt").write_text("a\nb\n")
    refuses(rf"strokes\.npy.*{name}", read_pair, tmp_path)
    assert not harmed.exists()
    # It would have done harm.
    np.load(tmp_path / "strokes.npy", allow_pickle=True)
    assert harmed.exists()


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        # What Python 3 writes bytes with in protocol 2: encode, by any codec.
        (b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.", "rot13"),
        (pickle.dumps({"a": 1}), "dict"),
    ],
)
def test_pickles_of_something_else(tmp_path: Path, pickled: bytes, message: str) -> None:
    (tmp_path / "x.npy").write_bytes(npy(pickled))
    refuses(rf"x\.npy.*{message}", load_objects, tmp_path / "x.npy")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_arrays_of_every_protocol_are_read(tmp_path: Path, protocol: int) -> None:
    whole = npy(pickle.dumps(objects(GOOD, GOOD[::-1].astype(np.float32)), protocol=protocol))
    # NumPy 1 called its modules otherwise.
    for content in (whole, whole.replace(b"numpy._core", b"numpy.core")):
        if len(content) != len(whole) and protocol >= 4:
            continue  # there the length of a name goes before it
        (tmp_path / "x.npy").write_bytes(content)
        found = load_objects(tmp_path / "x.npy")
        assert np.array_equal(found[0], GOOD)
        assert np.array_equal(found[1], GOOD[::-1])


@pytest.mark.parametrize("size", [0, 5, 60, 200])
def test_truncated_files_are_named(tmp_path: Path, size: int) -> None:
    save_objects(tmp_path, GOOD, GOOD)
    content = (tmp_path / "strokes.npy").read_bytes()
    assert len(content) > size
    (tmp_path / "strokes.npy").write_bytes(content[:size])
    refuses(r"strokes\.npy", load_objects, tmp_path / "strokes.npy")
