"""Archives and compressed files: read to their end, checked, bounded."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from archive_support import packed
from refusals import refuses

from ln_zoo.data.archives import open_file, read_archive, read_file, read_rest
from ln_zoo.data.array_files import read_npz

FILES = {f"books/b{i}.txt": f"text {i}\n".encode() * (i + 1) for i in range(4)}
LONG = f"{'d' * 120}/long.txt"


def contents(path: Path) -> dict[str, bytes]:
    return {name: content.read() for name, content in read_archive(path)}


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress, None])
def test_any_archive_holds_the_same_whatever_its_name(tmp_path: Path, compress) -> None:
    files = FILES | {LONG: b"x"}
    path = tmp_path / "archive"
    path.write_bytes(compress(packed(files)) if compress else packed(files, "zip"))
    assert contents(path) == files
    # Contents that are not read are skipped.
    assert [name for name, _ in read_archive(path)] == list(files)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_a_flipped_bit_of_a_header_is_an_error(tmp_path: Path, form: int) -> None:
    files = FILES if form == tarfile.USTAR_FORMAT else {LONG: b"x"} | FILES
    whole = packed(files, form=form)
    path = tmp_path / "books.tar"
    path.write_bytes(whole)
    assert contents(path) == files
    last = whole.index(b"books/b3.txt")
    for position in (*range(last, last + 512, 7), last + 512 + 512, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        refuses(r"books\.tar", contents, path)


def test_every_truncation_of_an_archive_is_an_error(tmp_path: Path) -> None:
    whole = packed(FILES)
    end = whole.index(b"books/b3.txt") + 2 * 512  # where the zero blocks begin
    path = tmp_path / "books.tar"
    for size in (0, 1, 511, 512, 700, 1024, end - 512, end, end + 511, end + 512, end + 1023):
        path.write_bytes(whole[:size])
        refuses(r"books\.tar", contents, path)
    path.write_bytes(whole[: end + 1024])
    assert contents(path) == FILES
    path.write_bytes(whole + whole)
    refuses(r"books\.tar", contents, path)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, None])
def test_a_flipped_bit_of_a_compressed_archive_changes_nothing_unseen(
    tmp_path: Path, compress
) -> None:
    whole = compress(packed(FILES)) if compress else packed(FILES, "zip")
    path = tmp_path / "books"
    messages = []
    for position in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[position] ^= 4
        path.write_bytes(damaged)
        try:
            assert contents(path) == FILES  # some bytes are times and names of systems
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > len(whole) / 3 / 2
    assert all(str(path) in message for message in messages)


def test_a_header_that_claims_too_much_is_not_read(tmp_path: Path) -> None:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    path = tmp_path / "bomb.tar"
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(10_240))
    refuses(r"bomb\.tar", contents, path)


def test_files_are_bounded_after_decompression(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(1000)))
    assert read_file(path, 1000) == bytes(1000)
    refuses(r"bomb\.gz.*999", read_file, path, 999)
    refuses(r"a member.*2 bytes", read_rest, io.BytesIO(b"abc"), 2, "a member")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_small_file_takes_little_address_space(tmp_path: Path) -> None:
    import resource

    np.savez(tmp_path / "strokes.npz", dx=np.arange(9))
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(bytes(1000)))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 500_000_000, hard))
    try:
        assert read_npz(tmp_path / "strokes.npz")["dx"].tolist() == list(range(9))
        assert read_file(path, 4_000_000_000) == bytes(1000)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, b"Z"])
def test_links_and_devices_in_an_archive_are_listed_and_not_read(
    tmp_path: Path, kind: bytes
) -> None:
    path = tmp_path / "books.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("a.txt", "b.txt", "c.txt"):
            member = tarfile.TarInfo(name)
            if name == "b.txt":
                member.type, member.linkname = kind, "a.txt"
            member.size = 0 if name == "b.txt" else 4
            archive.addfile(member, io.BytesIO(b"text"))
    names = []
    for name, content in read_archive(path):
        names.append(name)
        if name == "b.txt":
            refuses(r"books\.tar, b\.txt.*link", content.read)
        else:
            assert content.read() == b"text"
    assert names == ["a.txt", "b.txt", "c.txt"]


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
def test_pipes_folders_and_missing_files_are_named_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        for read in (lambda path: read_file(path, 9), lambda path: list(read_archive(path))):
            refuses(str(tmp_path), read, tmp_path / name)
    with pytest.raises(FileNotFoundError, match="absent"), open_file(tmp_path / "absent"):
        pass
