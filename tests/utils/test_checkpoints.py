"""Checkpoints and other files: atomic, validated; partial files are removed."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from refusals import refuses

from ln_zoo.utils.checkpoints import (
    AtomicCheckpointIO,
    DamagedCheckpointError,
    check_whole,
    previous,
    sweep,
    use_atomic_checkpoints,
)
from ln_zoo.utils.files import atomic_write, atomic_write_text


def content(number: int) -> dict:
    return {"number": number, "state_dict": {"w": torch.arange(5000.0) + number}}


def save(number: int, path: Path) -> None:
    AtomicCheckpointIO().save_checkpoint(content(number), path)


def number(path: Path) -> int:
    return AtomicCheckpointIO().load_checkpoint(path, weights_only=True)["number"]


def test_the_one_before_stays(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints/last.ckpt"
    save(1, path)
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]
    for new in (2, 3):
        save(new, path)
        assert (number(path), number(previous(path))) == (new, new - 1)
    AtomicCheckpointIO().remove_checkpoint(path)
    assert not list(path.parent.iterdir())


def test_no_links_nor_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That may be on another file system, where moving a file is copying it."""
    for name in ("mkstemp", "mkdtemp", "gettempdir"):
        monkeypatch.setattr(tempfile, name, lambda *_, **__: _raise(AssertionError("used")))
    path = tmp_path / "last.ckpt"
    save(1, path)
    monkeypatch.setattr(os, "link", lambda *_: _raise(OSError(errno.EPERM, "no links here")))
    save(2, path)
    assert (number(path), number(previous(path))) == (2, 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("moment", ["write", "fsync", "unlink", "link", "replace", "folder"])
def test_killed_at_any_moment(tmp_path: Path, moment: str, first: bool) -> None:
    path = tmp_path / "last.ckpt"
    for old in () if first else (1, 2):
        save(old, path)
    child = os.fork()
    if child == 0:
        _die_at(moment)
        save(3, path)
        os._exit(0)
    killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert killed or (first and moment in ("unlink", "link"))
    if not first:
        assert number(path) == (3 if moment == "folder" else 2)
        if previous(path).exists():
            assert number(previous(path)) in (1, 2)
    left = [tmp_path / "last.ckpt.partial"] if killed and moment != "folder" else []
    assert sweep(tmp_path) == left
    save(4, path)
    assert number(path) == 4


def _die_at(moment: str) -> None:
    """Makes this process kill itself when `_write` reaches a certain call."""

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "write":
        # Half of the content is on the disk.
        fsync = os.fsync
        os.fsync = lambda file: (os.ftruncate(file, 1000), fsync(file), die())
    elif moment == "unlink":
        Path.unlink = die  # type: ignore[method-assign]
    elif moment == "folder":
        os.open = die  # type: ignore[assignment]
    else:
        setattr(os, moment, die)


def test_what_is_being_written_is_not_swept(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    written, left = tmp_path / "a.ckpt.partial", tmp_path / "b.ckpt.partial"
    others = {tmp_path / name for name in ("c.partial", "d.ckpt", "notes.txt")}
    for path in (left, *others):
        path.write_bytes(b"x")
    with open(written, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sweep(tmp_path) == [left]
    assert set(tmp_path.iterdir()) == {written, *others}
    assert sweep(tmp_path) == [written]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "last.ckpt"
    save(1, path)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, call, lambda *_: _raise(full))
    with pytest.raises(OSError, match=re.escape(str(path))) as raised:
        save(2, path)
    assert raised.value.errno == errno.ENOSPC
    assert not list(tmp_path.glob("*.partial"))
    assert number(path) == 1


def test_damage_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    """Any byte: either the file is refuses, or what torch reads is what was written."""
    whole, path = tmp_path / "whole.ckpt", tmp_path / "damaged.ckpt"
    torch.save({"a": 1, "state_dict": {"w": torch.arange(40.0), "b": torch.ones(3)}}, whole)
    original, chance = whole.read_bytes(), random.Random(0)
    damaged = 0
    for _ in range(400):
        data = bytearray(original)
        at, length = chance.randrange(len(data)), chance.choice((1, 4, 30))
        for i in range(at, min(at + length, len(data))):
            data[i] ^= chance.randrange(1, 256)
        path.write_bytes(data)
        try:
            check_whole(path)
            read = torch.load(path, weights_only=True)
        except Exception:  # torch's own, where the file does not even look like an archive
            damaged += 1
            continue
        assert read["a"] == 1
        assert torch.equal(read["state_dict"]["w"], torch.arange(40.0))
        assert torch.equal(read["state_dict"]["b"], torch.ones(3))
    assert damaged > 100


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda data: data[: len(data) // 2], ""),
        (lambda data: data.replace(b"\0\0\x80?", b"\0\0\0\0", 1), "/data/0"),
    ],
    ids=["cut", "zeroed"],
)
def test_damaged_files(tmp_path: Path, damage: Callable[[bytes], bytes], named: str) -> None:
    path = tmp_path / "last.ckpt"
    save(0, path)
    path.write_bytes(damage(path.read_bytes()))
    refuses(f"{path}.*{named}", number, path, error=DamagedCheckpointError)


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    """A file that unpacks to more than its size, by compression or by members that share bytes."""
    path = tmp_path / "bomb.ckpt"
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("bomb/data/0", bytes(10_000))
        if kind == zipfile.ZIP_STORED:
            archive.filelist *= 3
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda _: _raise(AssertionError("unpacked")))
    message = refuses(re.escape(str(path)), number, path, error=DamagedCheckpointError)
    assert "unpacked" not in message


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    old, unchecked = tmp_path / "old.ckpt", tmp_path / "unchecked.ckpt"
    torch.save(content(1), old, _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(content(2), unchecked)
    finally:
        torch.serialization.set_crc32_options(True)
    assert (number(old), number(unchecked)) == (1, 2)


class Own(CheckpointIO):
    save_checkpoint = load_checkpoint = remove_checkpoint = lambda *_, **__: None


@pytest.mark.parametrize(
    ("plugins", "chosen"),
    [
        ([], AtomicCheckpointIO),
        *(([cls()], cls) for cls in (AsyncCheckpointIO, Own, TorchCheckpointIO)),
    ],
    ids=["none", "wrapping", "own", "lightning"],
)
def test_what_a_user_chose_stays(plugins: list, chosen: type) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, plugins=plugins)
    use_atomic_checkpoints(trainer.strategy)
    assert type(trainer.strategy.checkpoint_io) is chosen
    if chosen is AsyncCheckpointIO:
        assert type(trainer.strategy.checkpoint_io.checkpoint_io) is AtomicCheckpointIO


def _raise(error: BaseException) -> None:
    raise error


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for text in ("é\n", "b\r\n"):
        atomic_write_text(path, text)
        assert path.read_bytes() == text.encode()
    with pytest.raises(TypeError, match="bytes-like"), atomic_write(path) as file:
        file.writelines([b"half of", "it"])  # type: ignore[list-item]
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OSError, match="No space") as raised, atomic_write(path):
        raise full
    assert raised.value.filename == str(path)
    assert path.read_bytes() == b"b\r\n"
    assert list(tmp_path.iterdir()) == [path]
