"""Text matrices of zeros and ones: what is read, what is refused, and what is kept of them."""

from __future__ import annotations

import gzip
import io
import multiprocessing
import os
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from amat_support import text

from ln_zoo.data import amat
from ln_zoo.data.amat import load_bits, parse
from ln_zoo.data.cache import cache_folders

COLUMNS = 37


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("LN_ZOO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user" / "ln_zoo" / "data"


def matrix(rows: int = 23, columns: int = COLUMNS, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2, (rows, columns), dtype=np.uint8)


def unpacked(bits: np.ndarray, columns: int = COLUMNS) -> np.ndarray:
    return np.unpackbits(bits, axis=1, count=columns)


def files_in(folder: Path) -> list[Path]:
    """Those of its folders too."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def write(folder: Path, content: bytes, name: str = "some.amat") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(content)
    return path


# Reading


@pytest.mark.parametrize("columns", [1, 8, COLUMNS])
@pytest.mark.parametrize("rows", [1, 1000, 2003])
def test_the_standard_form(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    content = text(matrix(rows, columns))
    # None of it may take the slow way.
    monkeypatch.setattr(amat, "_line_by_line", None)
    expected = np.loadtxt(io.BytesIO(content), dtype=np.uint8, ndmin=2)
    for given in (content, gzip.compress(content)):
        assert np.array_equal(unpacked(parse(given, columns, "it"), columns), expected)


@pytest.mark.parametrize(
    "content",
    [
        text(matrix(), end=b"\r\n"),
        text(matrix(), end=b"\r"),
        text(matrix(), end=b" \n"),
        text(matrix(), end=b"\n\n"),
        text(matrix(), end=b"\r\r\n"),
        text(matrix(), between=b"\t"),
        text(matrix(), between=b"  "),
        b" " + text(matrix(), end=b"\n "),
        text(matrix()) + b"\n\r\n  \n",
        text(matrix())[:-1],
        b"\n" + text(matrix()),
    ],
)
def test_other_blanks_and_ends_of_lines(content: bytes) -> None:
    for given in (content, gzip.compress(content)):
        assert np.array_equal(unpacked(parse(given, COLUMNS, "it")), matrix())


def test_a_file_of_two_gzip_members() -> None:
    content = text(matrix())
    given = gzip.compress(content[:500]) + gzip.compress(content[500:])
    assert np.array_equal(unpacked(parse(given, COLUMNS, "it")), matrix())


# What is refused


def changed(line: int, old: bytes, new: bytes) -> bytes:
    """The standard text with a change in one line, counted from 1."""
    lines = text(np.tile(np.arange(COLUMNS) % 2, (23, 1))).splitlines(keepends=True)
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    return b"".join(lines)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(7, b"0 1 ", b"0 "), r"it, line 7: found 36 .* expected 37 of 0 or 1: .*damaged"),
        (changed(7, b"0 1 ", b"0 1 1 "), "it, line 7: found 38 .* expected 37 of 0 or 1"),
        (changed(1, b"0\n", b"0 1\n"), "it, line 1: found 38 .*another size, labels are among"),
        (changed(7, b"\n", b" "), "it, line 7: found 74 values .* expected 37"),
        (text(matrix(columns=64)), "it, line 1: found 64 values .* expected 37 .*another size"),
        (changed(23, b"0 1 ", b"2 1 "), "it, line 23: value 1 is '2', expected 0 or 1: .*damaged"),
        (changed(7, b"0 1 ", b"0 0.5 "), "it, line 7: value 2 is '0.5', expected 0 or 1"),
        (changed(7, b"0 1 ", b"0 -1 "), "it, line 7: value 2 is '-1', expected 0 or 1"),
        (changed(7, b"0 1 ", b"10 1 "), "it, line 7: value 1 is '10', expected 0 or 1"),
        (changed(7, b"0 1 ", b"0 x "), "it, line 7: value 2 is 'x', .*not binarized"),
        (text(matrix(), between=b","), "it, line 1: found 1 values .'[01],[01],.*another size"),
        (b"<html>\n<b>no</b>\n</html>", "it, line 1: found 1 values .'<html>'.*another file"),
        (b"\x80\x02 \x00", "it, line 1: found 2 values"),
        (b"", "it, line 1: found nothing, expected 37 values"),
        (b" \n\n", "it, line 1: found nothing, expected 37 values"),
    ],
)
def test_damage_is_named_with_its_line(content: bytes, message: str) -> None:
    for given in (content, gzip.compress(content)):
        with pytest.raises(ValueError, match=f"^{message}"):
            parse(given, COLUMNS, "it")


@pytest.mark.parametrize("length", [1, 73, 75, 74 * 9 + 10, 74 * 23 - 3])
def test_a_truncated_text(length: int) -> None:
    content = text(matrix())
    line = length // 74 + 1
    found = len(content[:length].splitlines()[-1].split())
    message = f"^it, line {line}: found {found} values .*breaks off there, it is truncated; copy"
    if found == COLUMNS:  # all but the newline
        assert len(parse(content[:length], COLUMNS, "it")) == line
        return
    with pytest.raises(ValueError, match=message):
        parse(content[:length], COLUMNS, "it")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_gzip_file(share: float) -> None:
    content = gzip.compress(text(matrix(900)))
    cut = content[: int(share * len(content))]
    whole_lines = zlib.decompressobj(31).decompress(cut).count(b"\n")
    with pytest.raises(ValueError, match=r"^it, line ([\d,]+): .*truncated or damaged, copy") as e:
        parse(cut, COLUMNS, "it")
    assert f"line {whole_lines + 1:,}:" in str(e.value)
    assert whole_lines > 0 or share < 0.5


def test_a_damaged_gzip_file() -> None:
    content = bytearray(gzip.compress(text(matrix(900))))
    content[len(content) // 2] ^= 255
    with pytest.raises(
        ValueError, match=r"^it, line [\d,]+: .*truncated or damaged, copy it again"
    ):
        parse(bytes(content), COLUMNS, "it")


# What is kept


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is parsed from here on."""
    files: list[str] = []

    def watched(content: bytes, columns: int, where: str) -> np.ndarray:
        files.append(where)
        return parse(content, columns, where)

    monkeypatch.setattr(amat, "parse", watched)
    return files


def test_it_is_read_once_and_mapped(tmp_path: Path, parsed: list[str]) -> None:
    path = write(tmp_path / "data", gzip.compress(text(matrix())), "some.amat.gz")
    for _ in range(3):
        bits = load_bits(path, COLUMNS)
        assert isinstance(bits, np.memmap)
        assert np.array_equal(unpacked(bits), matrix())
        with pytest.raises(ValueError, match="read-only"):
            bits[0] = 0
    assert parsed == [str(path)]
    (kept,) = (path.parent / ".cache").iterdir()
    assert kept.stat().st_size < 300
    assert not (tmp_path / "user").exists()


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "data", text(matrix()))
    status = path.stat()
    load_bits(path, COLUMNS)
    # Neither size nor time tell.
    path.write_bytes(text(matrix(seed=1)))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert np.array_equal(unpacked(load_bits(path, COLUMNS)), matrix(seed=1))
    with pytest.raises(ValueError, match=r"found 37 values .* expected 36"):
        load_bits(path, COLUMNS - 1)


def test_beside_a_read_only_folder_the_users_cache_is_taken(
    tmp_path: Path, user_cache: Path, parsed: list[str]
) -> None:
    path = write(tmp_path / "data", text(matrix()))
    path.parent.chmod(0o555)
    try:
        for _ in range(2):
            assert isinstance(load_bits(path, COLUMNS), np.memmap)
    finally:
        path.parent.chmod(0o755)
    assert len(parsed) == 1
    assert [file.name for file in path.parent.iterdir()] == ["some.amat"]
    assert len(files_in(user_cache)) == 1


def test_a_cache_that_is_set_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: list[str]
) -> None:
    monkeypatch.setenv("LN_ZOO_CACHE", str(tmp_path / "chosen"))
    path = write(tmp_path / "data", text(matrix()))
    for _ in range(2):
        assert isinstance(load_bits(path, COLUMNS), np.memmap)
    assert len(parsed) == 1
    assert [file.name for file in path.parent.iterdir()] == ["some.amat"]
    assert len(files_in(tmp_path / "chosen")) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders have owners")
def test_nothing_is_written_beside_the_data_of_others(
    tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "data", text(matrix()))
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    load_bits(path, COLUMNS)
    assert [file.name for file in path.parent.iterdir()] == ["some.amat"]
    assert len(files_in(user_cache)) == 1


def test_the_users_cache_is_where_kernels_are_kept(tmp_path: Path) -> None:
    from ln_zoo.ops.engines.native.build import cache_folder

    path = write(tmp_path / "data", text(matrix()))
    beside, users = cache_folders(path.parent)
    assert beside == path.parent / ".cache"
    assert users.parent == cache_folder() / "data"


def test_without_a_place_to_keep_it_it_is_read_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: list[str]
) -> None:
    path = write(tmp_path / "data", text(matrix()))
    (path.parent / ".cache").write_text("in the way")
    monkeypatch.setenv("LN_ZOO_CACHE", str(path))
    for _ in range(2):
        assert np.array_equal(unpacked(load_bits(path, COLUMNS)), matrix())
    assert len(parsed) == 2


@pytest.mark.parametrize("place", ["beside", "user"])
def test_without_a_home_there_is_no_place_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: list[str], place: str
) -> None:
    pwd = pytest.importorskip("pwd")

    def nobody(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "LN_ZOO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    path = write(tmp_path / "data", text(matrix()))
    if place == "user":
        (path.parent / ".cache").write_text("in the way")
    for _ in range(2):
        assert np.array_equal(unpacked(load_bits(path, COLUMNS)), matrix())
    assert len(parsed) == (1 if place == "beside" else 2)


def changed_byte(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place:][1:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: kept[:-1],
        lambda kept: kept[:-5],
        lambda kept: kept + kept[-5:],
        lambda kept: kept[:5],
        lambda kept: b"",
        lambda kept: bytes(len(kept)),
        lambda kept: changed_byte(kept, 0),
        lambda kept: changed_byte(kept, 31),
        lambda kept: changed_byte(kept, 32),
        lambda kept: changed_byte(kept, 80),
        lambda kept: changed_byte(kept, -1),
    ],
)
def test_a_damaged_cache_is_replaced(tmp_path: Path, parsed: list[str], damage) -> None:
    path = write(tmp_path / "data", text(matrix()))
    load_bits(path, COLUMNS)
    (kept,) = (path.parent / ".cache").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    for _ in range(2):
        assert np.array_equal(unpacked(load_bits(path, COLUMNS)), matrix())
    assert len(parsed) == 2
    assert kept.read_bytes() == whole


def test_what_is_kept_of_another_text_is_not_taken(tmp_path: Path) -> None:
    """Under the name of this one, with images of another size."""
    path = write(tmp_path / "data", text(matrix()))
    load_bits(path, COLUMNS)
    (kept,) = (path.parent / ".cache").iterdir()
    other = write(tmp_path / "other", text(matrix(columns=64)))
    load_bits(other, 64)
    (others,) = (other.parent / ".cache").iterdir()
    kept.write_bytes(others.read_bytes())
    assert np.array_equal(unpacked(load_bits(path, COLUMNS)), matrix())


def test_a_text_that_changed_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write(tmp_path / "data", text(matrix()))
    names = ("some.amat-5", "other.some.amat", "some.amat.gz")
    folder, bits = path.parent / ".cache", []
    for name in names:
        load_bits(write(path.parent, text(matrix()), name), COLUMNS)
    (folder / "some.amat-notes.bits").write_text("mine")
    others = set(files_in(folder))
    for seed in range(3):
        path.write_bytes(text(matrix(seed=seed)))
        bits.append(load_bits(path, COLUMNS))
        (kept,) = set(files_in(folder)) - others
        kept.with_name(kept.name.replace(f"-v{amat._VERSION}-", "-v1-")).write_text("older form")
    assert others < set(files_in(folder))
    # Those that had mapped what was removed still have it.
    for seed in range(3):
        assert np.array_equal(unpacked(bits[seed]), matrix(seed=seed))


def test_folders_of_texts_of_one_name_share_the_users_cache(
    tmp_path: Path, user_cache: Path, parsed: list[str]
) -> None:
    paths = [write(tmp_path / str(seed), text(matrix(seed=seed))) for seed in range(2)]
    for path in paths:
        (path.parent / ".cache").write_text("in the way")
    for _ in range(2):
        for seed, path in enumerate(paths):
            assert np.array_equal(unpacked(load_bits(path, COLUMNS)), matrix(seed=seed))
    assert parsed == [str(path) for path in paths]
    assert len(files_in(user_cache)) == 2


def test_what_killed_processes_left_is_removed_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "data", text(matrix()))

    def killed(file: int) -> None:
        raise OSError

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", killed)
            patch.setattr(Path, "unlink", lambda *_, **__: None)
            load_bits(path, COLUMNS)
    old, young = (path.parent / ".cache").iterdir()
    for file, days in ((old, 1.01), (young, 0.99)):
        os.utime(file, (time.time() - days * 86_400,) * 2)
    load_bits(path, COLUMNS)
    assert not old.exists()
    assert young.exists()
    assert len(files_in(path.parent / ".cache")) == 2


def test_nothing_is_left_of_a_cache_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "data", text(matrix()))

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert np.array_equal(unpacked(load_bits(path, COLUMNS)), matrix())
    assert not list((path.parent / ".cache").iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
def test_processes_at_once(tmp_path: Path) -> None:
    rows = 20_000
    path = write(tmp_path / "data", text(matrix(rows)))
    context = multiprocessing.get_context("fork")
    start = context.Barrier(3)

    def read() -> None:
        start.wait(60)
        same = np.array_equal(unpacked(load_bits(path, COLUMNS)), matrix(rows))
        os._exit(0 if same else 1)

    processes = [context.Process(target=read) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list((path.parent / ".cache").iterdir())) == 1
