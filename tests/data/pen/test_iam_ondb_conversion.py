"""The official distribution of IAM-OnDB: reading it, converting it, going on, damage."""

from __future__ import annotations

import json
import os
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from archive_support import write_archive
from handwriting_support import LISTS, distribution, small_distribution, steps_of, write_files, xml
from refusals import refuses

from ln_zoo.data import IAMOnDB, PenLines
from ln_zoo.data.pen import conversion
from ln_zoo.data.pen.conversion import Conversion, convert, read_strokes, transcription

FORMS = ("a01-000u", "a02-004", "b01-010z", "c03-021")
SPLITS = ("train", "valid1", "valid2", "test")


def sets(folder: Path) -> dict[str, PenLines]:
    return {name: PenLines.load(folder / f"strokes_{name}") for name in SPLITS}


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_strokes_are_steps_from_point_to_point() -> None:
    strokes = [[(674, 5360), (672, 5356)], [(900, 5000)], [(901, 5001), (901, 5001), (890, 5004)]]
    found = read_strokes(xml(strokes))
    moves = [[674, 5360], [-2, -4], [228, -356], [1, 1], [0, 0], [-11, 3]]
    assert found[:, :2].tolist() == moves
    assert found.tolist() == [list(map(float, step)) for step in steps_of(strokes)]


def test_coordinates_of_the_description_are_no_points_and_empty_strokes_none() -> None:
    assert read_strokes(xml([[], [(3, 4)], []])).tolist() == [[3, 4, 1]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "malformed XML: no element found"),
        (xml([[(1, 2)]])[:-30], "malformed XML: no element found|malformed XML: unclosed token"),
        (b"<a><b></a>", "malformed XML: mismatched tag"),
        (b"<a><Stroke/></a>", "malformed XML: no StrokeSet"),
        (b"<a><StrokeSet><Stroke><Point x='1'/></Stroke></StrokeSet></a>", "a Point without 'y'"),
        (xml([[(1, "two")]]), "malformed XML: could not convert string to float: 'two'"),
        (xml([]), "^no strokes$"),
        (xml([[], []]), "^no strokes$"),
        (xml([[(1, 2), (3, "nan")]]), "not finite"),
        (xml([[("-inf", 2)]]), "not finite"),
        (xml([[(1, 2), (3, "1e39")]]), "not finite in float32"),
        (xml([[("2e38", 2)], [("-2e38", 2)]]), "not finite in float32"),
        (xml([[("1e308", 2)], [("-1e308", 2)]]), "not finite in float32"),
    ],
)
def test_damaged_files_say_what_is_wrong(content: bytes, message: str) -> None:
    refuses(message, read_strokes, content)


def test_transcriptions() -> None:
    text = (
        "OCR:\r\n\r\nA MOVE CSR: to\r\n\r\n\r\nCSR: \r\n\r\n"
        "  A MOVE to stop\tMr \r\n\r\nfrom%%%%%%%%%%%nominating 5 % more%%\r\ncaf\xe9 .\r\n\r\n"
    )
    lines = ["A MOVE to stop Mr", "from", "nominating 5 % more", "café ."]
    assert transcription(text.encode("latin-1")) == lines
    assert transcription(b"OCR:\n\nA MOVE\n") == []
    assert transcription(b"CSR:\n") == []


def by_hand() -> tuple[dict[str, bytes], dict[str, list], dict[str, str]]:
    """Files, steps of the lines and their texts."""
    strokes = {
        "a01-000u-01": [[(500, 900), (503, 896)], [(600, 910)]],
        "a01-000u-02": [[(450, 1900)], [(457, 1907), (457, 1905)]],
        "a02-004-01": [[(100, 200), (101, 202), (99, 190)]],
        "b01-010z-01": [[(9, 8), (7, 6)], [(90, 80), (91, 85)]],
        "c03-021-01": [[(1000, 9000), (1003, 8996)]],
        "z01-000-01": [[(1, 2), (3, 4)]],
    }
    contents = "caf\xe9\n", "first\nsecond\n", "last\n"
    texts = {f: f"CSR:\n\n{content}" for f, content in zip(FORMS[1:], contents, strict=True)}
    texts[FORMS[0]] = "OCR:\n\nx\n\nCSR:\n\nA MOVE %%%%%%%%%%% to stop\r\n"
    files = distribution(strokes, texts, {n: [f] for n, f in zip(LISTS, FORMS, strict=True)})
    words = dict(zip(strokes, ("A MOVE", "to stop", "café", "first", "last"), strict=False))
    return files, {name: steps_of(strokes[name]) for name in words}, words


def split_archives(folder: Path, files: dict[str, bytes], ending: str) -> Path:
    """The two trees in an archive each, the lists beside them."""
    for tree in ("lineStrokes", "ascii"):
        part = {path: content for path, content in files.items() if path.startswith(tree)}
        write_archive(folder / f"{tree}-all{ending}", part)
    return write_files(folder, {name: files[name] for name in LISTS})


@pytest.mark.parametrize(
    "form", ["folder", "deep", ".tar.gz", ".tar", ".tar.bz2", ".zip", "one.tar.gz", "archive"]
)
def test_the_official_distribution_in_every_form(tmp_path: Path, form: str) -> None:
    files, steps, words = by_hand()
    source = tmp_path / "source"
    if form == "folder":
        write_files(source, files)
    elif form == "deep":
        write_files(source, {f"a/{path.replace('/', '/b/')}": c for path, c in files.items()})
        write_files(source, {"a/._a01-000u-01.xml": b"a Mac's notes", "readme.txt": b"hello"})
    elif form == "one.tar.gz":
        write_archive(source / "all.tar.gz", files)
    elif form == "archive":
        source = write_archive(tmp_path / "all.zip", files)
    else:
        split_archives(source, files, form)
    found = convert(source, tmp_path / "x" / "compact")
    assert found == Conversion(
        lines={"train": 2, "valid1": 1, "valid2": 1, "test": 1},
        points={"train": 6, "valid1": 3, "valid2": 4, "test": 2},
        unlisted=1,
    )
    compact = sets(tmp_path / "x" / "compact")
    assert [line for name in SPLITS for line in compact[name].line_id] == list(steps)
    for lines in compact.values():
        assert lines.sources[0].dx.dtype == np.int16
        for i, name in enumerate(lines.line_id):
            assert lines.steps(i).tolist() == [list(map(float, step)) for step in steps[name]]
            assert lines.text[i] == words[name]
    table = (tmp_path / "x/compact/lines.tsv").read_text(encoding="utf-8").splitlines()
    assert table[:2] == [
        "line_id\tsplit\tn_points\tn_strokes\ttext",
        "a01-000u-01\ttrain\t3\t2\tA MOVE",
    ]
    assert table[3] == "a02-004-01\tvalid1\t3\t1\tcafé"
    assert len(table) == 6
    names = {path.name for path in (tmp_path / "x/compact").iterdir()}
    assert names == {"conversion.json", "lines.tsv", *(f"strokes_{name}" for name in SPLITS)}


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("form", ["folder", "archives"])
def test_an_interrupted_conversion_can_be_run_again(tmp_path: Path, monkeypatch, form: str) -> None:
    files = small_distribution(lines_of_train=11)
    source = tmp_path / "source"
    if form == "folder":
        write_files(source, files)
    else:
        split_archives(source, files, ".tar.gz")
    whole = convert(source, tmp_path / "whole")
    assert sum(whole.lines.values()) == 17

    def stopping(done: int, of: int) -> None:
        assert of == 17
        if done == 10:
            raise Interrupted

    with pytest.raises(Interrupted):
        convert(source, tmp_path / "again", stopping)
    assert not list((tmp_path / "again").glob("strokes_*"))
    told: list[tuple[int, int]] = []
    assert convert(source, tmp_path / "again", lambda *x: told.append(x)) == whole
    assert told == [(n, 17) for n in range(1, 18)]
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")
    monkeypatch.setattr(conversion, "read_strokes", None)
    assert convert(source, tmp_path / "again") == whole


def test_sets_half_written_are_written_anew(tmp_path: Path, monkeypatch) -> None:
    source = write_files(tmp_path / "source", small_distribution())
    original = PenLines.save

    def dying(lines: PenLines, folder: Path) -> None:
        original(lines, folder)
        if folder.name == "valid2":
            (folder / "text.npy").unlink()
            raise Interrupted

    monkeypatch.setattr(PenLines, "save", dying)
    with pytest.raises(Interrupted):
        convert(source, tmp_path / "compact")
    written = sorted(path.name for path in (tmp_path / "compact").glob("strokes_*"))
    assert written == ["strokes_train", "strokes_valid1"]
    message = "strokes_valid2, strokes_test"
    refuses(message, IAMOnDB, str(tmp_path / "compact"), error=FileNotFoundError)
    monkeypatch.undo()
    convert(source, tmp_path / "compact")
    convert(source, tmp_path / "other")
    assert contents(tmp_path / "compact") == contents(tmp_path / "other")


def many(damaged: dict[str, bytes], count: int = 200) -> dict[str, bytes]:
    """Many small files of the training list, some of them damaged."""
    files = small_distribution()
    for number in range(1, count - 5):
        name = f"d{number // 90:02}-{number:03}-01"
        content = damaged.get(name, xml([[(1, 2), (3, number)]]))
        files[f"lineStrokes/{name[:3]}/{name[:7]}/{name}.xml"] = content
        files[f"ascii/{name[:3]}/{name[:7]}/{name[:7]}.txt"] = f"CSR:\n\nline {number}\n".encode()
        files["trainset.txt"] += f"{name[:7]}\n".encode()
    assert sum(path.endswith(".xml") for path in files) == count + 3
    return files


def test_a_few_damaged_files_are_named_and_left_out(tmp_path: Path) -> None:
    damaged = {"d00-007-01": b"<a>", "d01-100-01": xml([])}
    found = convert(write_files(tmp_path / "x", many(damaged)), tmp_path / "compact")
    assert set(found.left_out) == {"d00-007-01.xml", "d01-100-01.xml"}
    assert found.left_out["d00-007-01.xml"].startswith("malformed XML: no element found")
    assert found.left_out["d01-100-01.xml"] == "no strokes"
    assert found.lines["train"] == 203 - 6 - 2
    names = sets(tmp_path / "compact")["train"].line_id
    assert "d00-006-01" in names
    assert "d00-007-01" not in names
    stored = json.loads((tmp_path / "compact/conversion.json").read_text())
    assert stored["left_out"] == found.left_out


def test_more_than_one_in_a_hundred_is_an_error_until_they_are_mended(tmp_path: Path) -> None:
    damaged = {f"d00-00{n}-01": xml([[(1, "nan")]]) for n in range(1, 4)}
    source = write_files(tmp_path / "x", many(damaged))
    message = refuses(r"3 of 203", convert, source, tmp_path / "compact")
    for name in damaged:
        assert f"{name}.xml (coordinates or steps that are not finite" in message
    assert not list((tmp_path / "compact").glob("strokes_*"))
    # After one was mended there are few enough.
    (source / "lineStrokes/d00/d00-001/d00-001-01.xml").write_bytes(xml([[(1, 2), (3, 4)]]))
    found = convert(source, tmp_path / "compact")
    assert set(found.left_out) == {"d00-002-01.xml", "d00-003-01.xml"}


def test_a_form_with_more_lines_than_text_has_no_text(tmp_path: Path) -> None:
    files = small_distribution(lines_of_train=3)
    files["ascii/a01/a01-000/a01-000u.txt"] = b"CSR:\n\none\ntwo\n"
    del files["ascii/c03/c03-021/c03-021.txt"]
    found = convert(write_files(tmp_path / "x", files), tmp_path / "compact")
    assert found.without_text == [
        *("a01-000u-01", "a01-000u-02", "a01-000u-03"),
        *("c03-021-01", "c03-021-02"),
    ]
    assert sets(tmp_path / "compact")["train"].text == ("", "", "")
    assert sets(tmp_path / "compact")["valid1"].text == ("a02-004 has 1", "a02-004 has 2")


def test_texts_go_by_the_number_of_the_line(tmp_path: Path) -> None:
    """Beside a listed form without strokes, and a link to a parent folder."""
    files = small_distribution(lines_of_train=3)
    del files["lineStrokes/a01/a01-000/a01-000u-02.xml"]
    files["testset_v.txt"] += b" m01-999z\n"
    source = write_files(tmp_path / "x", files)
    (source / "lineStrokes" / "loop").symlink_to(source)
    assert convert(source, tmp_path / "compact").missing_forms == ["m01-999z"]
    train = sets(tmp_path / "compact")["train"]
    assert train.line_id == ("a01-000u-01", "a01-000u-03")
    assert train.text == ("a01-000u has 1", "a01-000u has 3")


def without(files: dict[str, bytes], part: str) -> dict[str, bytes]:
    return {path: content for path, content in files.items() if part not in path}


@pytest.mark.parametrize(
    ("change", "error", "mentioned"),
    [
        (lambda f: without(f, "lineStrokes"), FileNotFoundError, "x lacks lineStrokes"),
        (lambda f: without(f, "ascii"), FileNotFoundError, "x lacks ascii"),
        (lambda f: without(f, "testset"), FileNotFoundError, "testset_v.txt, testset_t.txt"),
        (lambda f: without(f, "lineStrokes/c03"), ValueError, "testset_f.txt"),
        (lambda f: f | {"testset_v.txt": b"a01-000u"}, ValueError, "a01-000u.*trainset.txt"),
        (lambda f: f | {"testset_t.txt": b"<html>"}, ValueError, "testset_t.txt.*<html>"),
        (lambda f: f | {"old/a02-004-01.xml": b""}, ValueError, "a02-004-01.xml.*lineStrokes.*old"),
    ],
)
def test_distributions_that_are_incomplete(
    tmp_path: Path, change, error: type[Exception], mentioned: str
) -> None:
    source = write_files(tmp_path / "x", change(small_distribution()))
    refuses(mentioned, convert, source, tmp_path / "compact", error=error)
    assert not list((tmp_path / "compact").glob("strokes_*"))


def test_wrong_sources_and_folders(tmp_path: Path) -> None:
    compact = tmp_path / "compact"
    refuses("nowhere", convert, tmp_path / "nowhere", compact, error=FileNotFoundError)
    (tmp_path / "notes.txt").write_text("hello")
    refuses(r"notes\.txt", convert, tmp_path / "notes.txt", compact)
    # Other sets are not written over.
    source = write_files(tmp_path / "source", small_distribution())
    (compact / "strokes_train").mkdir(parents=True)
    refuses(r"compact.*strokes_train", convert, source, compact, error=FileExistsError)


@pytest.mark.parametrize("ending", [".tar.gz", ".zip"])
def test_damaged_archives_are_named(tmp_path: Path, ending: str) -> None:
    files = small_distribution(lines_of_train=40)
    source = split_archives(tmp_path / "x", files, ending)
    archive = source / f"lineStrokes-all{ending}"
    content = archive.read_bytes()
    for damaged in (content[: len(content) // 2], b"no archive"):
        archive.write_bytes(damaged)
        refuses(f"lineStrokes-all{ending}", convert, source, tmp_path / "compact")


@pytest.mark.parametrize("ending", [".tar.gz", ".zip", ""])
def test_a_file_of_any_size_takes_little_memory(tmp_path: Path, ending: str, monkeypatch) -> None:
    """One of 40 MB, in an archive of 40 kB or in a folder."""
    monkeypatch.setattr(conversion, "MAX_BYTES", 1_000_000)
    huge = "lineStrokes/d00/d00-007/d00-007-01.xml"
    files = many({}) | {huge: b""}
    if ending:
        source = tmp_path / f"all{ending}"
        write_archive(source, files | {huge: bytes(40_000_000)})
        assert source.stat().st_size < 2_000_000
    else:
        source = write_files(tmp_path / "x", files)
        os.truncate(source / huge, 40_000_000)
    tracemalloc.start()
    try:
        found = convert(source, tmp_path / "compact")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000
    (why,) = found.left_out.values()
    assert "1,000,000 bytes" in why


def test_links_in_an_archive_are_reported(tmp_path: Path) -> None:
    source = tmp_path / "all.tar"
    write_archive(source, without(many({}), "d00-007-01"))
    with tarfile.open(source, "a") as archive:
        link = tarfile.TarInfo("lineStrokes/d00/d00-007/d00-007-01.xml")
        link.type, link.linkname = tarfile.SYMTYPE, "../d00-008/d00-008-01.xml"
        archive.addfile(link)
    found = convert(source, tmp_path / "compact")
    ((name, why),) = found.left_out.items()
    assert name == "d00-007-01.xml"
    assert "all.tar" in why
    assert "link" in why


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    source = write_files(tmp_path / "x", many({}))
    pipe = source / "lineStrokes/d00/d00-007/d00-007-01.xml"
    pipe.unlink()
    os.mkfifo(pipe)
    found = convert(source, tmp_path / "compact")
    assert list(found.left_out) == [pipe.name]
    assert str(pipe) in found.left_out[pipe.name]
    (source / "trainset.txt").unlink()
    os.mkfifo(source / "trainset.txt")
    refuses(r"trainset\.txt", convert, source, tmp_path / "again")


@pytest.mark.parametrize(
    "text",
    [
        '{"lines": {}, "colour": 1}',
        "[1]",
        '{"lines": []}',
        '{"lines": {"train": 1}, "points": {}}',
        '{"lines": {"a": "1"}, "points": {"a": 1}}',
        "{",
        "[" * 100_000,
    ],
    ids=range(7),
)
def test_another_result_of_a_conversion_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "conversion.json").write_text(text)
    refuses(r"conversion\.json", convert, tmp_path / "x", tmp_path)


def test_an_encrypted_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "all.zip"
    write_archive(path, small_distribution())
    content = bytearray(path.read_bytes())
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flags of every member
        start = 0
        while (start := content.find(mark, start)) >= 0:
            content[start + at] |= 1
            start += 4
    path.write_bytes(content)
    refuses(r"all\.zip.*encrypted", convert, path, tmp_path / "compact")
