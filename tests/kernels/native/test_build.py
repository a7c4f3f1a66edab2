"""Compiling, caching and loading of a native library, and every way in which that goes wrong.

A tiny source stands for the kernels, so that compiling it takes no time.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cli_support import python as forked_python

from ln_zoo.kernels.native import build, compiler, ownership, runtime
from ln_zoo.kernels.native.build import NativeLibrary
from ln_zoo.kernels.native.compiler import NATIVE, Unavailable, find_compiler

SOURCE = """
#include "part.h"
#include <cstdint>
#ifdef _OPENMP
#include <omp.h>
#endif
extern "C" int64_t ln_zoo_abi() { return %d; }
extern "C" int64_t threads() {
  int64_t n = 1;
#ifdef _OPENMP
#pragma omp parallel
#pragma omp single
  n = omp_get_num_threads();
#endif
  return n;
}
"""


def compiler_path() -> str | None:
    try:
        return find_compiler().command[0]
    except Unavailable:
        return None


COMPILER = compiler_path()
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LN_ZOO_CACHE", str(folder))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.cpp"
    file.write_text(SOURCE % build.ABI)
    (tmp_path / "part.h").write_text('#pragma once\n#include "part of part.h"\n')
    (tmp_path / "part of part.h").write_text('#pragma once\n#include "part.h"\n')
    return file


class Counted:
    """A compiler that notes each time it compiles, and fails where a line of shell says so."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes = folder / "compiled"
        self.script = folder / "compiler"
        monkeypatch.setenv("CXX", str(self.script))
        self.behave()

    def behave(self, shell: str = "") -> None:
        self.script.write_text(
            f'#!/bin/sh\ncase "$*" in *--version*) echo counted 1.0; exit;; esac\n'
            f'case "$*" in *-c*) echo x >> {self.notes};; esac\n'
            f'{shell}\nexec {COMPILER} "$@"\n'
        )
        self.script.chmod(0o755)

    @property
    def times(self) -> int:
        return len(self.notes.read_text().split()) if self.notes.exists() else 0


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    compiler._version.cache_clear()
    yield Counted(tmp_path, monkeypatch)
    compiler._version.cache_clear()


def reason_of(native: NativeLibrary) -> str:
    with pytest.raises(Unavailable) as caught:
        native.load()
    status = native.status()
    assert (status.available, status.reason) == (False, caught.value.reason)
    return caught.value.reason


def python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_compiled_on_first_use_and_found_again(
    source: Path, cache: Path, counted: Counted, capfd: pytest.CaptureFixture[str]
) -> None:
    native = NativeLibrary(source)
    before = native.status()
    assert (before.available, before.built, before.path) == (True, False, None)
    assert not cache.exists()

    assert native.load().threads() == torch.get_num_threads()
    (line,) = capfd.readouterr().err.splitlines()
    assert "compiling" in line
    assert str(cache) in line
    once = counted.times
    after = native.status()
    assert after.available
    assert after.built
    assert after.path.parent == cache
    assert after.compiler == f"{counted.script}, counted 1.0"
    assert {"-O3", "-fopenmp", "-fno-math-errno"} <= set(after.flags)
    assert not any("fast-math" in flag for flag in after.flags)

    again = NativeLibrary(source)
    assert again.status() == after
    assert again.load().ln_zoo_abi() == build.ABI
    assert native.load() is native.load()
    assert counted.times == once == 1
    assert capfd.readouterr().err == ""
    assert not [file for file in cache.iterdir() if file.is_dir()]


def test_threads_of_one_process_compile_once(source: Path, counted: Counted) -> None:
    native = NativeLibrary(source)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(native.load) for _ in range(4)]
    assert counted.times == 1
    assert [each.result() for each in found] == [native.load()] * 4


@pytest.mark.slow
def test_processes_that_start_at_once_compile_once(source: Path, counted: Counted) -> None:
    counted.behave("sleep 1")
    code = (
        "from pathlib import Path\nfrom ln_zoo.kernels.native.build import NativeLibrary\n"
        f"print(NativeLibrary(Path({str(source)!r})).load().ln_zoo_abi())"
    )
    processes = [python(code) for _ in range(3)]
    texts = [process.communicate(timeout=120) for process in processes]
    assert [out for out, _ in texts] == [f"{build.ABI}\n"] * 3
    assert sorted(err.count("compiling") for _, err in texts) == [0, 0, 1]
    assert counted.times == 1


def test_import_compiles_nothing_and_torch_lends_its_threads(
    source: Path, cache: Path, counted: Counted
) -> None:
    code = f"""
import os
from pathlib import Path
import torch
import ln_zoo.layers
from ln_zoo.kernels.native import build, ownership
assert not Path({str(cache)!r}).exists()
library = build.NativeLibrary(Path({str(source)!r})).load()
for n in (1, 2, 3):
    torch.set_num_threads(n)
    assert library.threads() == n, n
maps = Path("/proc/self/maps")
if maps.exists():
    runtimes = {{line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line}}
    assert sum("gomp" in name or "iomp" in name for name in runtimes) == 1, runtimes
"""
    process = python(code)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert counted.times == 1


@pytest.mark.parametrize("change", ["source", "part", "processor", "torch"])
def test_another_combination_is_compiled_anew(
    source: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    assert NativeLibrary(source).status(build=True).built
    if change in ("source", "part"):
        changed = source if change == "source" else source.with_name("part of part.h")
        changed.write_text(changed.read_text() + "// changed\n")
    elif change == "processor":
        monkeypatch.setattr(build, "_processor", lambda: ("another", frozenset()))
    else:
        monkeypatch.setattr(torch, "__version__", "99.0")
    NativeLibrary(source).load()
    assert counted.times == 2


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("LN_ZOO_CACHE", "/mine")
    assert build.cache_folder() == Path("/mine")
    monkeypatch.delenv("LN_ZOO_CACHE")
    assert build.cache_folder() == Path("/x/ln_zoo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_folder() == Path.home() / ".cache" / "ln_zoo"


@pytest.mark.parametrize("trouble", ["no folder", "no writing", "no locks"])
def test_unusable_cache_is_replaced_by_a_private_folder(
    source: Path, cache: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    if trouble == "no folder":
        cache.write_text("a file where the folder should be")
    else:
        error = OSError(30, "Read-only file system") if trouble == "no writing" else None
        acquire = build.FileLock.acquire

        def acquire_elsewhere(lock: build.FileLock, *args: object, **kwargs: object) -> object:
            if str(cache) in lock.lock_file:
                raise error or NotImplementedError("no locks here")
            return acquire(lock, *args, **kwargs)

        monkeypatch.setattr(build.FileLock, "acquire", acquire_elsewhere)
    native = NativeLibrary(source)
    assert native.load().ln_zoo_abi() == build.ABI
    path = native.status().path
    assert cache not in path.parents
    assert path.exists()
    assert native.load() is not None
    assert counted.times == 1


def test_abandoned_folders_are_removed(source: Path, cache: Path) -> None:
    """For any version of the source, but no other folder, nor one whose lock is held."""
    stem = NativeLibrary(source)._stem(NATIVE)
    removed = [cache / f"{start}-abcdefg_" for start in (stem, "tiny-0123456789abcdef")]
    kept = [cache / name for name in ("other-0123456789abcdef-abcdefgh", "tiny-2-locked", "tiny-3")]
    for folder in (*removed, *kept):
        (folder / "source").mkdir(parents=True)
    link, file = cache / "tiny-4-link", cache / "tiny-5-abc.failed"
    link.symlink_to(kept[0])
    file.write_text("broken")
    theirs = cache / "tiny-6-theirs"
    theirs.mkdir()
    if os.geteuid() == 0:
        os.chown(theirs, 65534, -1)
        kept.append(theirs)
    with build.FileLock(cache / "tiny-2.lock"):
        NativeLibrary(source).load()
    assert not any(folder.exists() for folder in removed)
    assert all(path.exists() for path in (*kept, link, file))
    assert (kept[0] / "source").exists()


def test_compiler_ends_with_its_process(source: Path, tmp_path: Path, counted: Counted) -> None:
    """With its children: all of them hold the pipe open."""
    os.mkfifo(alive := tmp_path / "alive")
    counted.behave(f'case "$*" in *-c*) exec 9> {alive}; echo started >&9; sleep 60; esac')
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(compiler.__file__).parent)!r})
import compiler
work = Path({str(tmp_path / "work")!r})
work.mkdir()
compiler.compile_library(Path({str(source)!r}), compiler.find_compiler(), compiler.NATIVE, work)
"""
    process = python(code)
    with alive.open() as pipe:
        assert pipe.readline() == "started\n"
        process.terminate()
        process.communicate()
        killed = time.monotonic()
        assert pipe.read() == ""
    assert time.monotonic() - killed < 30


def test_read_only_cache_that_is_filled_is_used(
    source: Path, cache: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    NativeLibrary(source).load()

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(build, "FileLock", refuse)
    native = NativeLibrary(source)
    native.load()
    assert native.status().path.parent == cache
    assert counted.times == 1


def test_private_folder_goes_with_the_process(source: Path, tmp_path: Path) -> None:
    """A process that is forked, and ends as one that was started."""
    (tmp_path / "file").write_text("")
    code = f"""
import os
from pathlib import Path
os.environ["LN_ZOO_CACHE"] = {str(tmp_path / "file")!r}
from ln_zoo.kernels.native.build import NativeLibrary
print(NativeLibrary(Path({str(source)!r})).status(build=True).path)
"""
    done = forked_python(tmp_path, code)
    assert done.code == 0, done.err
    assert Path(done.out.strip()).suffix in (".so", ".dylib")
    assert not Path(done.out.strip()).parent.exists()


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it another user's, or makes us another user where only root may give files away."""
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)


@pytest.mark.parametrize("how", ["everyone", "group", "owner", "above", "link"])
def test_a_folder_that_others_can_write_to_is_not_used(
    source: Path, cache: Path, counted: Counted, how: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    NativeLibrary(source).load()
    reason = f"every user can write to {cache}"
    if how == "everyone":
        cache.chmod(0o1777)
        reason += f" (chmod go-w {cache})"
    elif how == "group":
        cache.chmod(0o770)
        monkeypatch.setattr(ownership, "_is_private", lambda group: False)
        reason = f"a group of users can write to {cache} (chmod g-w {cache})"
    elif how == "owner":
        give_away(cache, monkeypatch)
        reason = f"{cache if os.geteuid() == 0 else ''} belongs to another user"
    else:
        named = cache / "a/b" if how == "above" else cache.parent / "link"
        if how == "above":
            named.mkdir(parents=True, mode=0o700)
        else:
            named.symlink_to(cache)
        monkeypatch.setenv("LN_ZOO_CACHE", str(named))
        cache.chmod(0o777)
    (planted,) = cache.glob("*.so")
    planted.unlink()  # another file, not the same cut short: the library is in use by this process
    planted.write_bytes(b"not a library")
    before = sorted(file.name for file in cache.iterdir())

    native = NativeLibrary(source)
    known = native.status()
    assert (known.available, known.built, reason in str(known.unused_cache)) == (True, False, True)
    native.load()
    assert native.status().path.parent.name.startswith("ln_zoo-")
    assert counted.times == 2
    assert sorted(file.name for file in cache.iterdir()) == before
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert reason in warning


@pytest.mark.parametrize("suffix", [".so", ".json"])
@pytest.mark.parametrize("how", ["owner", "mode", "link"])
def test_a_file_that_others_could_have_written_is_replaced(
    source: Path, cache: Path, counted: Counted, suffix: str, how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    NativeLibrary(source).load()
    (planted,) = cache.glob(f"*{suffix}")
    if how == "mode":
        planted.chmod(0o666)
    elif how == "link":
        planted.symlink_to(planted.rename(cache.parent / planted.name))
    elif os.geteuid() == 0:
        give_away(planted, monkeypatch)
    else:
        pytest.skip("only root can give a file away and keep the folder")
    native = NativeLibrary(source)
    assert not native.status().built
    native.load()
    assert counted.times == 2
    assert native.status().path.parent == cache
    assert planted.is_file()
    assert not planted.is_symlink()
    NativeLibrary(source).load()
    assert counted.times == 2


@pytest.mark.parametrize("umask", [0o002, 0o000, 0o077])
def test_what_is_cached_can_be_loaded_whatever_the_umask(
    source: Path, tmp_path: Path, counted: Counted, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LN_ZOO_CACHE", str(tmp_path / "new/cache"))
    before = os.umask(umask)
    try:
        NativeLibrary(source).load()
    finally:
        os.umask(before)
    for folder in (tmp_path / "new", tmp_path / "new/cache"):
        assert folder.stat().st_mode & 0o777 == 0o700
    native = NativeLibrary(source)
    assert native.status().built
    native.load()
    assert counted.times == 1


def test_nowhere_to_write_is_a_reason(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file where the folder should be")
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path / "missing"))
    reason = reason_of(NativeLibrary(source))
    assert "cannot be kept" in reason
    assert str(cache) in reason
    assert "missing" in reason


def test_waiting_for_another_process_ends(
    source: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    native = NativeLibrary(source)
    stem = native._stem(NATIVE)
    cache.mkdir()
    monkeypatch.setattr(build, "LIMIT", -29.8)
    with build.FileLock(cache / f"{stem}.lock", is_singleton=False):
        assert "another process has been compiling" in reason_of(native)


def test_no_compiler_is_a_reason(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    reason = reason_of(NativeLibrary(source))
    assert reason == "no C++ compiler (c++, g++, clang++); install one, or name it in CXX"


@pytest.mark.parametrize("named", ["no-such-compiler", "sh -c false", "'unbalanced"])
def test_cxx_that_is_no_compiler_is_a_reason(
    source: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("CXX", named)
    assert named.strip("'") in reason_of(NativeLibrary(source))


def test_cxx_may_have_arguments(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{COMPILER} -DWITH_ARGUMENTS")
    source.write_text(source.read_text() + "\n#ifndef WITH_ARGUMENTS\n#error no\n#endif\n")
    assert NativeLibrary(source).load().ln_zoo_abi() == build.ABI


def test_further_flags_are_part_of_the_choice(
    source: Path, cache: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come last, so that they win, and each choice is kept apart."""
    plain = NativeLibrary(source).status(build=True)
    monkeypatch.setenv("LN_ZOO_CXXFLAGS", "-O1  -DSOMETHING=1")
    chosen = NativeLibrary(source).status(build=True)
    assert chosen.flags[-2:] == ("-O1", "-DSOMETHING=1")
    assert chosen.path != plain.path
    assert NativeLibrary(source).status().path == chosen.path
    monkeypatch.delenv("LN_ZOO_CXXFLAGS")
    assert NativeLibrary(source).status() == plain


def test_what_was_built_ahead_serves_without_a_compiler(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = NativeLibrary(source)
    built.load()
    monkeypatch.setenv("CXX", "gone")
    found = NativeLibrary(source)
    assert found.status() == built.status()
    assert found.load().ln_zoo_abi() == build.ABI
    with pytest.raises(Unavailable, match="gone"):
        found.rebuild()


def test_failure_is_remembered_until_rebuilt(source: Path, cache: Path, counted: Counted) -> None:
    counted.behave('case "$*" in *-c*) echo "tiny.cpp:1: error: broken" >&2; exit 1;; esac')
    native = NativeLibrary(source)
    reason = reason_of(native)
    assert "tiny.cpp:1: error: broken" in reason
    assert "ln-zoo kernels --rebuild" in reason
    assert "\n" not in reason
    tried = counted.times
    assert tried == 2  # with OpenMP and without
    assert reason_of(native) == reason
    later = NativeLibrary(source)
    assert later.status().reason == reason
    assert reason_of(later) == reason
    assert counted.times == tried

    counted.behave()
    assert later.rebuild().ln_zoo_abi() == build.ABI
    assert later.status().reason is None
    assert NativeLibrary(source).load().ln_zoo_abi() == build.ABI
    assert counted.times == tried + 1
    assert not list(cache.glob("*.failed"))


def test_compiler_that_hangs_is_stopped(
    source: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted.behave("exec sleep 60")
    monkeypatch.setattr(compiler, "LIMIT", 1)
    assert "was stopped after 1 s" in reason_of(NativeLibrary(source))


@pytest.mark.parametrize("lacking", ["flag", "runtime"])
def test_without_openmp_there_is_a_single_thread(
    source: Path, counted: Counted, lacking: str
) -> None:
    if lacking == "flag":
        counted.behave('case "$*" in *-fopenmp*) echo "error: no -fopenmp" >&2; exit 1;; esac')
    else:
        source.write_text(
            source.read_text()
            + '\n#ifdef _OPENMP\nextern "C" int of_no_library();\n'
            + 'extern "C" int use() { return of_no_library(); }\n#endif\n'
        )
    native = NativeLibrary(source)
    assert native.load().threads() == 1
    status = native.status()
    assert (status.openmp, status.threads) == ("none", 1)
    assert "-fopenmp" not in status.flags
    assert counted.times == 2


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "missing", "no note", "half a note", "deep note", "no library"]
)
def test_damaged_library_is_compiled_anew(
    source: Path, cache: Path, counted: Counted, damage: str
) -> None:
    NativeLibrary(source).load()
    # Another file, not the same cut short: the library is in use by this process.
    (library,) = (file for file in cache.iterdir() if file.suffix in (".so", ".dylib"))
    note = library.with_suffix(".json")
    content = library.read_bytes()
    library.unlink()
    if damage != "missing":
        cut = {"truncated": content[: len(content) // 2], "empty": b"", "no library": b"text"}
        library.write_bytes(cut.get(damage, content))
    if damage == "no note":
        note.unlink()
    elif damage == "half a note":
        note.write_text(note.read_text()[:20])
    elif damage == "deep note":
        note.write_text("[" * 100_000)
    elif damage == "no library":  # whole by its checksum
        made = json.loads(note.read_text())
        made["sha256"] = hashlib.sha256(library.read_bytes()).hexdigest()
        note.write_text(json.dumps(made))
    native = NativeLibrary(source)
    assert native.status().built == (damage == "no library")
    assert native.load().ln_zoo_abi() == build.ABI
    assert native.status().built
    assert library.read_bytes()
    assert NativeLibrary(source).load().ln_zoo_abi() == build.ABI
    assert counted.times == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("int x = undeclared;\n", "tiny.cpp:1:9: error:"),
        (SOURCE % (build.ABI + 1), f"returns {build.ABI + 1}, expected {build.ABI}"),
        ("int nothing() { return 0; }\n", "has no ln_zoo_abi()"),
    ],
    ids=["error", "other version", "no version"],
)
def test_a_source_that_cannot_be_used_is_a_reason(source: Path, text: str, reason: str) -> None:
    source.write_text(text)
    assert reason in reason_of(NativeLibrary(source))


def test_module_functions_are_of_one_library(monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    monkeypatch.setattr(build, "_KERNELS", NativeLibrary(source))
    assert not build.status().built
    library = build.library()
    assert build.library() is library
    assert build.status().built
    assert build.rebuild().ln_zoo_abi() == build.ABI
    assert os.environ["LN_ZOO_CACHE"] in str(build.status().path)


def test_a_failure_is_forgotten_once_there_is_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `build.rebuild`: engines ask each time what there is."""

    def none() -> None:
        raise Unavailable("no compiler")

    for library, reason in ((none, "no compiler"), (lambda: None, None)):
        monkeypatch.setattr(runtime, "library", library)
        assert runtime.unavailable_reason() == reason
