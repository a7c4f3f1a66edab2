"""Compile the native CPU kernels. The wheel's build hook runs this file, so it imports no torch."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: Result of ``ln_zoo_abi()``: version of the functions and structures.
ABI = 19
SOURCE = Path(__file__).with_name("kernels.cpp")
SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
#: Timeout of one compilation, seconds.
LIMIT = 300
TYPICAL_SECONDS = 20
#: The manifest of prebuilt libraries, in their folder.
MANIFEST = "manifest.json"

ARCHITECTURE = {"amd64": "x86_64", "arm64": "aarch64"}.get(
    platform.machine().lower(), platform.machine().lower()
)
# No -ffast-math: NaN and infinity must behave as in torch (tests/ops/test_infinity.py).
COMPILE = (
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    # Alignment of loops: fewer cache lines of instructions.
    "-falign-loops=64",
    "-std=c++17",
    *(() if sys.platform == "win32" else ("-fPIC",)),
)
LINK = ("-shared", *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()))
#: No OpenMP runtime is linked: symbols resolve to torch's, so torch.set_num_threads applies.
#: Without it, the kernels run on one thread.
_OPENMP: tuple[tuple[str, ...], ...] = (("-fopenmp",), ())
#: Run a command, and stop it and its children if stdin ends first. stdin is a pipe that this
#: process holds open, so that a compiler never outlives it.
_WATCHED = """
exec 3<&0
(read -r _ <&3; kill 0) >/dev/null 2>&1 &
"$@" 3<&- </dev/null
code=$?
kill $!
wait $! 2>/dev/null
exit $code
"""
_COMPILERS = ("c++", "g++", "clang++")
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_UNRESOLVED = re.compile("undefined symbol|symbol not found", re.IGNORECASE)
_AGAIN = " (`ln-zoo kernels --rebuild` tries again)"


class Unavailable(RuntimeError):
    """There is no native library; the message, one line, is also ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Level:
    """An instruction set to compile for, a value of ``LN_ZOO_CPU_LEVEL``.

    ``features``: required processor features, in the names of ``torch.cpu.get_capabilities()``.
    """

    name: str
    flags: tuple[str, ...]
    features: frozenset[str] = frozenset()


#: Level of this machine's processor.
NATIVE = Level(
    "native",
    ("-mcpu=native" if ARCHITECTURE.startswith(("aarch64", "ppc")) else "-march=native",),
)
_V2 = frozenset({"sse4_2", "popcnt"})
_V3 = _V2 | {"avx2", "fma3", "bmi2", "f16c"}
_V4 = _V3 | {f"avx512_{part}" for part in ("f", "bw", "cd", "dq", "vl")}
#: Levels of a wheel by architecture, fastest first. AMX tiles are no feature of a level:
#: `amx_products.h` requests them at run time.
LEVELS: dict[str, tuple[Level, ...]] = {
    "x86_64": (
        Level(
            "x86-64-v4-bf16",
            ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
            _V4 | {"avx512_bf16"},
        ),
        Level("x86-64-v4", ("-march=x86-64-v4",), _V4),
        Level("x86-64-v3", ("-march=x86-64-v3",), _V3),
        Level("x86-64-v2", ("-march=x86-64-v2",), _V2),
    ),
    "aarch64": (Level("armv8-a", ("-march=armv8-a",)),),
}


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command, starting with a path, and version."""

    command: tuple[str, ...]
    version: str

    def __str__(self) -> str:
        return f"{shlex.join(self.command)}, {self.version}"


@dataclass(frozen=True)
class Made:
    """How a library was compiled; stored in a JSON file next to it.

    ``openmp`` is ``"torch's"``, or ``"none"`` for a single-threaded library.
    """

    sha256: str
    level: str
    compiler: str
    flags: tuple[str, ...]
    openmp: str


def find_compiler() -> Compiler:
    """The first compiler that runs: ``CXX`` if set, or c++, g++, clang++; `Unavailable` without."""
    named = os.environ.get("CXX", "")
    try:
        chosen = shlex.split(named, posix=sys.platform != "win32")
    except ValueError as error:
        raise Unavailable(f"CXX={named!r} is not a command: {error}") from None
    for first, *rest in [chosen] if chosen else [[name] for name in _COMPILERS]:
        path = shutil.which(first)
        version = None if path is None else _version((path, *rest))
        if path is not None and version is not None:
            return Compiler((path, *rest), version)
    if chosen:
        raise Unavailable(f"CXX={named} is not a compiler that can be run; correct or unset it")
    raise Unavailable(f"no C++ compiler ({', '.join(_COMPILERS)}); install one, or name it in CXX")


@functools.cache
def _version(command: tuple[str, ...]) -> str | None:
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    first = done.stdout.partition("\n")[0].strip()
    return first if done.returncode == 0 and first else None


def chosen_flags() -> tuple[str, ...]:
    """Flags from ``LN_ZOO_CXXFLAGS``; they come last and take precedence."""
    return tuple(os.environ.get("LN_ZOO_CXXFLAGS", "").split())


def parts(source: Path, text: str | None = None) -> list[Path]:
    """A source file and all files that it includes by relative paths, recursively.

    ``text`` is the source of a file that need not exist.
    """
    found = [source]
    for file in found:
        content = file.read_text() if text is None or file is not source else text
        for name in _INCLUDE.findall(content):
            part = Path(os.path.normpath(file.parent / name))
            if part not in found:
                found.append(part)
    return found


def compile_library(
    source: Path,
    compiler: Compiler,
    level: Level,
    work: Path,
    check: Callable[[Path], object] | None = None,
    text: str | None = None,
) -> tuple[Path, Made]:
    """Compile a source file in an empty folder, with OpenMP if that compiles and passes the check.

    ``text`` is the source of a file that need not exist. ``check`` loads the library and raises
    ``OSError`` on failure. OSError if libraries in this folder cannot be loaded; Unavailable with
    the compiler's messages.
    """
    start = time.monotonic()
    # LD_PRELOAD, such as a sanitizer, must not affect the compiler.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | {"LC_ALL": "C"}

    def run(*arguments: str) -> str | None:
        watched = () if sys.platform == "win32" else ("/bin/sh", "-c", _WATCHED, "sh")
        reading, writing = os.pipe()
        try:
            done = subprocess.run(
                [*watched, *compiler.command, *arguments],
                cwd=work,
                env=environment,
                stdin=reading,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=max(1.0, start + LIMIT - time.monotonic()),
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{compiler} was stopped after {LIMIT} s{_AGAIN}") from None
        finally:
            os.close(reading)
            os.close(writing)
        if done.returncode == 0:
            return None
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        told = [line for line in lines if "error" in line] or lines
        return "; ".join(told[-3:]) or f"exit code {done.returncode}"

    # A subfolder, since some files are included from the parent.
    folder = work / "source"
    folder.mkdir()
    for file in parts(source, text):
        copy = Path(os.path.normpath(folder / os.path.relpath(file, source.parent)))
        copy.parent.mkdir(exist_ok=True)
        if text is not None and file is source:
            copy.write_text(text)
        else:
            shutil.copyfile(file, copy)
    complaint: str | None = None
    for openmp in _OPENMP:
        flags = (*COMPILE, *level.flags, *openmp, *chosen_flags())
        file = work / f"{len(openmp)}{SUFFIX}"
        complaint = run(*flags, "-c", f"source/{source.name}", "-o", f"{len(openmp)}.o")
        complaint = complaint or run(*LINK, f"{len(openmp)}.o", "-o", file.name, *chosen_flags())
        if complaint is not None:
            continue
        try:
            if check is not None:
                check(file)
        except OSError as error:
            complaint = str(error)
            if not _UNRESOLVED.search(complaint):
                raise
            continue
        threads = "torch's" if "-fopenmp" in flags else "none"
        return file, Made(checksum(file), level.name, str(compiler), flags, threads)
    raise Unavailable(f"{compiler} failed: {complaint}{_AGAIN}")


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
