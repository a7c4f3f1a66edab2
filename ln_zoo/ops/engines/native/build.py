"""Compiles the native CPU kernels on first use, keeps the library in a cache, and loads it.

Nothing happens on import or install. Where there is no compiler, or it fails, `library` raises
`Unavailable` with the reason, and callers run something else.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from ln_zoo.ops.engines.native.ownership import is_our_file, make_private, why_not_ours

#: What ``ln_zoo_abi()`` of the source returns: the version of its functions and structures.
ABI = 11
#: Changes when the form of what is in the cache changes.
_SCHEMA = 1
#: Seconds that compiling may take, and that a process waits for another one's.
_LIMIT = 300
_TYPICAL_SECONDS = 20

_NATIVE = (
    "-mcpu=native"
    if platform.machine().startswith(("aarch64", "arm64", "ppc"))
    else "-march=native"
)
# No -ffast-math: NaN and infinity must be what they are elsewhere.
_COMPILE = (
    "-O3",
    _NATIVE,
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    # Where a loop begins decides how many cache lines of instructions it takes.
    "-falign-loops=64",
    "-std=c++17",
    "-fPIC",
)
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_LINK = ("-shared", *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()))
#: Whose OpenMP runs the threads, with the flags to compile and to link. torch has one loaded for
#: all to see; linked with no other, the library finds that one, and torch.set_num_threads holds.
_OPENMP: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("torch's", ("-fopenmp",), ()),
    ("the compiler's", ("-fopenmp",), ("-lgomp",)),
    ("none", (), ()),
)
_COMPILERS = ("c++", "g++", "clang++")
_X86 = ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
_FEATURES = frozenset({*_X86, "neon", "asimd", "sve", "sve2", "bf16"})
_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})

_log = logging.getLogger("ln_zoo")


class Unavailable(RuntimeError):
    """There is no native library; the message says why, in one line.

    Args:
        reason: the message.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Status:
    """What is known of the native library.

    Args:
        available: whether it is loaded, lies in the cache, or will be compiled on first use.
        built: whether it is compiled already.
        path: the library, or ``None`` where it is not built.
        compiler: the compiler and its version, or ``None`` where none was found.
        flags: what the source is compiled with.
        cpu: the processor's name.
        features: those of its instruction sets that matter here.
        bf16: whether the processor multiplies bfloat16.
        openmp: whose threads it runs on: ``"torch's"``, ``"the compiler's"``, ``"none"`` (a single
            thread), or ``None`` before it is built.
        threads: how many threads it would use now.
        reason: why it is not available, or ``None``.
        unused_cache: why nothing is loaded from the cache, which other users could write to; each
            process compiles into a folder of its own then. ``None`` if it is in order.
    """

    available: bool
    built: bool
    path: Path | None
    compiler: str | None
    flags: tuple[str, ...]
    cpu: str
    features: tuple[str, ...]
    bf16: bool
    openmp: str | None
    threads: int
    reason: str | None
    unused_cache: str | None


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the words of its command, the first being a path, and its version."""

    command: tuple[str, ...]
    version: str

    def __str__(self) -> str:
        return f"{shlex.join(self.command)}, {self.version}"


@dataclass(frozen=True)
class _Made:
    """How a library was made, as it lies beside it in the cache."""

    sha256: str
    compiler: str
    flags: tuple[str, ...]
    openmp: str


@dataclass(frozen=True)
class _Loaded:
    library: ctypes.CDLL
    path: Path
    made: _Made


class NativeLibrary:
    """A C++ source that is compiled on first use; `library` and `status` are those of our kernels.

    The cache holds, for each combination of source, processor, torch, compiler and flags, the
    library and a JSON file with its checksum, or a file ``.failed`` with the reason why it could
    not be compiled, so that later processes do not try in vain. A library can do all that its user
    can: the folder and its files must belong to this user or root, and nobody else may write to
    them. Otherwise nothing in it is read, and each process compiles into a folder of its own.

    Args:
        source: the file, whose ``extern "C"`` functions include ``int64_t ln_zoo_abi()``, which
            returns `ABI`.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._mutex = threading.Lock()
        self._loaded: _Loaded | None = None
        self._reason: str | None = None
        self._private_folder: Path | None = None

    def load(self) -> ctypes.CDLL:
        """The library, compiled if it has to be; failure is remembered.

        Raises:
            Unavailable: with the reason, if it cannot be had.
        """
        with self._mutex:
            if self._loaded is None and self._reason is None:
                self._try(rebuild=False)
            return self._result()

    def rebuild(self) -> ctypes.CDLL:
        """Compiles anew, whatever lies in the cache or was tried before.

        Where the library is in use already, this process goes on with the new one, but for calls
        that layers have prepared.

        Raises:
            Unavailable: with the reason, if that fails.
        """
        with self._mutex:
            self._loaded = self._reason = None
            self._try(rebuild=True)
            return self._result()

    def status(self, build: bool = False) -> Status:
        """What is known of the library; compiles it only where asked to.

        Args:
            build: whether to compile and load it first.
        """
        if build:
            with contextlib.suppress(Unavailable):
                self.load()
        compiler, reason = None, self._reason
        try:
            compiler = find_compiler()
        except Unavailable as error:
            reason = reason or error.reason
        path, made = None, None
        folder = cache_folder()
        unused_cache = why_not_ours(folder)
        if self._loaded is not None:
            path, made, reason = self._loaded.path, self._loaded.made, None
        elif self._reason is None and unused_cache is None:
            for stem in self._stems(folder, compiler):
                made = _finished(folder, stem)
                if made is not None:
                    path, reason = _library_file(folder, stem), None
                    break
                reason = reason or _read_failure(folder, stem)
        name, features = _processor()
        openmp = None if made is None else made.openmp
        return Status(
            available=reason is None,
            built=made is not None,
            path=path,
            compiler=made.compiler if made else None if compiler is None else str(compiler),
            flags=made.flags if made else (*_COMPILE, *_chosen_flags()),
            cpu=name,
            features=tuple(sorted(_FEATURES.intersection(features))),
            bf16=not _BF16.isdisjoint(features),
            openmp=openmp,
            threads=1 if openmp == "none" else torch.get_num_threads(),
            reason=reason,
            unused_cache=unused_cache,
        )

    def _result(self) -> ctypes.CDLL:
        if self._loaded is None:
            raise Unavailable(self._reason or "it was not tried")
        return self._loaded.library

    def _try(self, rebuild: bool) -> None:
        try:
            self._loaded = self._find_or_build(rebuild)
        except Unavailable as error:
            self._reason = error.reason
            _log.info("no native CPU kernels: %s", error.reason)
        else:
            made = self._loaded.made
            _log.info(
                "native CPU kernels: %s (compiler: %s; OpenMP: %s)",
                self._loaded.path,
                made.compiler,
                made.openmp,
            )

    def _find_or_build(self, rebuild: bool) -> _Loaded:
        cache = cache_folder()
        unused_cache = why_not_ours(cache)
        if unused_cache is not None:
            _log.warning(
                "the cache of compiled kernels, %s, is not used, since others could put their code "
                "there: %s. Each process compiles its own (about %d s); LN_ZOO_CACHE names another "
                "folder",
                cache,
                unused_cache,
                _TYPICAL_SECONDS,
            )
        try:
            compiler = find_compiler()
        except Unavailable:
            # What was built ahead of time serves where the compiler is gone.
            for stem in () if rebuild or unused_cache else self._stems(cache, None):
                if (loaded := _earlier(cache, stem)) is not None:
                    return loaded
            raise
        (stem,) = self._stems(cache, compiler)
        if not (rebuild or unused_cache) and (loaded := _earlier(cache, stem)) is not None:
            return loaded
        troubles = []
        for folder in (self._private,) if unused_cache else (lambda: cache, self._private):
            try:
                return self._build(folder(), stem, compiler, rebuild)
            except (OSError, NotImplementedError) as error:  # the latter: no locks there
                troubles.append(str(error))
        raise Unavailable(f"the library cannot be kept or loaded: {'; '.join(troubles)}")

    def _build(self, folder: Path, stem: str, compiler: Compiler, rebuild: bool) -> _Loaded:
        make_private(folder)
        try:
            with FileLock(folder / f"{stem}.lock", timeout=_LIMIT + 30):
                # Another process may have been faster.
                if not rebuild and (loaded := _earlier(folder, stem)) is not None:
                    return loaded
                _failure_file(folder, stem).unlink(missing_ok=True)
                return self._compile(folder, stem, compiler)
        except Timeout:
            raise Unavailable(
                f"another process has been compiling into {folder} for over {_LIMIT} s"
            ) from None

    def _compile(self, folder: Path, stem: str, compiler: Compiler) -> _Loaded:
        kept = "this process only" if folder == self._private_folder else f"later runs in {folder}"
        # Not logged: without a handler nobody would see why the first call takes so long.
        print(
            f"ln_zoo: compiling CPU kernels for this machine (about {_TYPICAL_SECONDS} s); "
            f"kept for {kept}",
            file=sys.stderr,
            flush=True,
        )
        with tempfile.TemporaryDirectory(prefix=f"{stem}-", dir=folder) as work:
            try:
                library, made, file = _compile(self._source, compiler, Path(work))
            except Unavailable as error:
                with contextlib.suppress(OSError):
                    _failure_file(folder, stem).write_text(error.reason)
                raise
            path = _library_file(folder, stem)
            file.chmod(0o755)  # whatever the umask: a file that others may write to is not loaded
            file.replace(path)
            note = Path(work) / "made.json"
            note.write_text(json.dumps(asdict(made)))
            note.chmod(0o644)
            # Last, since it is what says that the library is complete.
            note.replace(_made_file(folder, stem))
        return _Loaded(library, path, made)

    def _stems(self, folder: Path, compiler: Compiler | None) -> Iterator[str]:
        """Names of files in the cache: the compiler's, or those of any where there is none."""
        name, features = _processor()
        here = (sys.platform, platform.machine(), name, *sorted(features), torch.__version__)
        here = (*here, *_chosen_flags())
        texts = [file.read_text() for file in parts(self._source)]
        prefix = f"{self._source.stem}-{_digest(*texts, str(_SCHEMA), *here)}"
        if compiler is None:
            yield from (file.stem for file in sorted(folder.glob(f"{prefix}-*.json")))
        else:
            yield f"{prefix}-{_digest(*compiler.command, compiler.version, *_COMPILE, *_LINK)}"

    def _private(self) -> Path:
        """A folder that lives as long as the process."""
        if self._private_folder is None:
            self._private_folder = Path(tempfile.mkdtemp(prefix="ln_zoo-"))
            atexit.register(shutil.rmtree, self._private_folder, ignore_errors=True)
        return self._private_folder


_KERNELS = NativeLibrary(Path(__file__).with_name("kernels.cpp"))


def library() -> ctypes.CDLL:
    """The native kernels, compiled and loaded on the first call, at once on later ones.

    Raises:
        Unavailable: with the reason, if they cannot be had; said again at once on later calls.
    """
    return _KERNELS.load()


def rebuild() -> ctypes.CDLL:
    """Compiles the native kernels anew, even where that failed before.

    Raises:
        Unavailable: with the reason, if it fails.
    """
    return _KERNELS.rebuild()


def status(build: bool = False) -> Status:
    """What is known of the native kernels, without compiling them unless asked to.

    Args:
        build: whether to compile and load them first.

    Example:
        >>> known = status()
        >>> known.available == (known.reason is None)
        True
    """
    return _KERNELS.status(build)


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``LN_ZOO_CACHE``, or ``ln_zoo`` in the user's cache.

    Example:
        >>> cache_folder().is_absolute()
        True
    """
    if chosen := os.environ.get("LN_ZOO_CACHE"):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "ln_zoo"


def find_compiler() -> Compiler:
    """The compiler that ``CXX`` names, else the first of c++, g++ and clang++ that answers.

    Raises:
        Unavailable: if there is none.
    """
    if sys.platform == "win32":
        raise Unavailable("they are compiled on Linux and macOS only")
    named = os.environ.get("CXX", "")
    try:
        chosen = shlex.split(named)
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
    """The first line of what the compiler says of its version; ``None`` if it cannot be run."""
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    first = done.stdout.partition("\n")[0].strip()
    return first if done.returncode == 0 and first else None


def bfloat16_pays() -> bool:
    """Whether our products of bfloat16 are faster than those of float32.

    They are on AMX tiles and with AMD's AVX-512. Intel's processors without AMX have the same
    instruction, at half the rate; on all others the kernels use none. Measurements:
    docs/results/performance.md.
    """
    name, features = _processor()
    return "amx_tile" in features or ("avx512_bf16" in features and "Intel" not in name)


# As `ln_zoo.ops.engines.native.runtime.unavailable_reason`: torch.compile does not look inside.
bfloat16_pays._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _processor() -> tuple[str, frozenset[str]]:
    """The processor's name and its features, as far as the system tells."""
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        for line in first.splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
    features = frozenset((facts.get("flags") or facts.get("Features") or "").split())
    parts = [facts[key] for key in ("CPU implementer", "CPU part") if key in facts]
    name = facts.get("model name") or " ".join(parts)
    if sys.platform == "darwin":
        done = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            check=False,
        )
        name = done.stdout.strip()
    return name or platform.processor() or platform.machine(), features


def _chosen_flags() -> tuple[str, ...]:
    """Those of ``LN_ZOO_CXXFLAGS``, which come last: for other processors, or for a sanitizer."""
    return tuple(os.environ.get("LN_ZOO_CXXFLAGS", "").split())


def parts(source: Path) -> list[Path]:
    """A source and all files that it includes by relative paths, directly or not."""
    found = [source]
    for file in found:
        for name in _INCLUDE.findall(file.read_text()):
            part = Path(os.path.normpath(file.parent / name))
            if part not in found:
                found.append(part)
    return found


def _compile(source: Path, compiler: Compiler, work: Path) -> tuple[ctypes.CDLL, _Made, Path]:
    """Compiles in a folder, with the first kind of OpenMP that can be compiled, linked and loaded.

    Raises:
        OSError: if libraries in this folder cannot be loaded.
        Unavailable: with the compiler's complaint.
    """
    start = time.monotonic()
    # What is loaded before this process, such as a sanitizer, is not meant for the compiler.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | {"LC_ALL": "C"}

    def run(*arguments: str) -> str | None:
        """Runs the compiler in the folder; what it complains of, or ``None``."""
        try:
            done = subprocess.run(
                [*compiler.command, *arguments],
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=max(1.0, start + _LIMIT - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{compiler} was stopped after {_LIMIT} s{_AGAIN}") from None
        if done.returncode == 0:
            return None
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        told = [line for line in lines if "error" in line] or lines
        return "; ".join(told[-3:]) or f"exit code {done.returncode}"

    # A folder below, since some files are included from the one above.
    copy = work / "source" / source.name
    copy.parent.mkdir()
    for file in parts(source):
        shutil.copyfile(file, copy.parent / os.path.relpath(file, source.parent))
    chosen = _chosen_flags()
    compiled: dict[tuple[str, ...], str | None] = {}
    complaint: str | None = None
    for i, (openmp, compile_flags, link_flags) in enumerate(_OPENMP):
        object_file, file = f"{len(compile_flags)}.o", work / f"{i}{_SUFFIX}"
        if compile_flags not in compiled:
            compiled[compile_flags] = run(
                *_COMPILE, *compile_flags, *chosen, "-c", f"source/{source.name}", "-o", object_file
            )
        complaint = compiled[compile_flags]
        complaint = complaint or run(*_LINK, object_file, "-o", file.name, *link_flags, *chosen)
        if complaint is None:
            try:
                library = _open(file)
            except OSError as error:
                complaint = str(error)
                if not _UNRESOLVED.search(complaint):
                    raise
            else:
                flags = (*_COMPILE, *compile_flags, *link_flags, *chosen)
                made = _Made(_checksum(file), str(compiler), flags, openmp)
                return library, made, file
    raise Unavailable(f"{compiler} failed: {complaint}{_AGAIN}")


_AGAIN = " (`ln-zoo kernels --rebuild` tries again)"
_UNRESOLVED = re.compile("undefined symbol|symbol not found", re.IGNORECASE)
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


def _open(path: Path) -> ctypes.CDLL:
    """Loads a library and makes sure that it is one of ours.

    Raises:
        OSError: if it is not.
    """
    library = ctypes.CDLL(str(path))
    try:
        version = library.ln_zoo_abi
    except AttributeError:
        raise OSError(f"{path} has no ln_zoo_abi()") from None
    version.restype, version.argtypes = ctypes.c_int64, ()
    if version() != ABI:
        raise OSError(f"ln_zoo_abi() of {path} returns {version()}, expected {ABI}")
    return library


# The files of the cache


def _library_file(folder: Path, stem: str) -> Path:
    return folder / f"{stem}{_SUFFIX}"


def _made_file(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.json"


def _failure_file(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.failed"


def _earlier(folder: Path, stem: str) -> _Loaded | None:
    """What the cache holds: a library, or ``None`` for nothing usable.

    Raises:
        Unavailable: if compiling failed before.
    """
    if (made := _finished(folder, stem)) is not None:
        path = _library_file(folder, stem)
        try:
            return _Loaded(_open(path), path, made)
        except OSError as error:
            _log.info("cannot load %s, compiling anew: %s", path, error)
            return None
    if (reason := _read_failure(folder, stem)) is not None:
        raise Unavailable(reason)
    return None


def _finished(folder: Path, stem: str) -> _Made | None:
    """The note beside a library, if there is one and the library is whole.

    Loading half a library may end the process, so its checksum is compared first; and one that
    another user could have written is not loaded, whatever its checksum.
    """
    try:
        for file in (_made_file(folder, stem), _library_file(folder, stem)):
            if not is_our_file(file):
                _log.warning("%s is not used: another user could have written it", file)
                return None
        note = json.loads(_made_file(folder, stem).read_text())
        made = _Made(**note | {"flags": tuple(note["flags"])})
        whole = _checksum(_library_file(folder, stem)) == made.sha256
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return made if whole else None


def _read_failure(folder: Path, stem: str) -> str | None:
    try:
        return _failure_file(folder, stem).read_text(errors="replace") or None
    except OSError:
        return None


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
