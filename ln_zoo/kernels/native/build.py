"""Find, compile on first use, cache and load the native CPU kernels.

Wheels contain kernels for several instruction sets (`ln_zoo.kernels.native.prebuilt`); an
editable install compiles for this machine. Nothing happens on import. Without a library, `library`
raises `Unavailable` and other kernels run.
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
import shutil
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from ln_zoo.kernels.native import prebuilt
from ln_zoo.kernels.native.compiler import (
    ABI,
    ARCHITECTURE,
    COMPILE,
    LEVELS,
    LIMIT,
    LINK,
    NATIVE,
    SOURCE,
    SUFFIX,
    TYPICAL_SECONDS,
    Compiler,
    Level,
    Made,
    Unavailable,
    checksum,
    chosen_flags,
    compile_library,
    find_compiler,
    parts,
)
from ln_zoo.kernels.native.ownership import (
    is_our_file,
    is_our_folder,
    make_private,
    why_not_ours,
)

#: Version of the cache format.
_SCHEMA = 2
_FEATURES = frozenset(
    {"avx", "avx2", "fma3", "avx512_f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"}
    | {"neon", "sve", "sve2", "bf16"}
)
_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})

_log = logging.getLogger("ln_zoo")


@dataclass(frozen=True)
class Status:
    """State of the native library; fields are ``None`` where nothing is known or wrong."""

    available: bool  # loaded, prebuilt, cached, or compiled on first use
    built: bool
    prebuilt: bool  # part of the wheel
    level: str  # name of its `Level`
    path: Path | None
    compiler: str | None
    flags: tuple[str, ...]
    cpu: str
    features: tuple[str, ...]  # relevant instruction sets, in torch's names
    bf16: bool  # whether the processor multiplies bfloat16
    openmp: str | None  # "torch's" threads, or "none" (single-threaded)
    threads: int
    reason: str | None  # why it is unavailable
    unused_cache: str | None  # why the cache is not used: other users could write to it


@dataclass(frozen=True)
class _Loaded:
    library: ctypes.CDLL
    path: Path
    made: Made


class NativeLibrary:
    """A C++ library, prebuilt or compiled on first use.

    The cache holds the library and a JSON file with its checksum, for each source, processor, torch
    version and flags. A file ``.failed`` with the compiler's error keeps later processes from
    retrying. A cache that other users own or may write to (root excepted) is ignored; each process
    then compiles into a folder of its own.

    Args:
        source: defines ``int64_t ln_zoo_abi()``, which returns `ABI`.
        prebuilt: folder of prebuilt libraries.
        text: the source of a file that need not exist.
        what: name in messages.
        seconds: typical time of compilation, for messages.
    """

    def __init__(
        self,
        source: Path,
        prebuilt: Path | None = None,
        text: str | None = None,
        what: str = "native CPU kernels",
        seconds: int = TYPICAL_SECONDS,
    ) -> None:
        self._source, self._prebuilt, self._text = source, prebuilt, text
        self._what, self._seconds = what, seconds
        self._mutex = threading.Lock()
        self._loaded: _Loaded | None = None
        self._reason: str | None = None
        self._private_folder: Path | None = None

    def load(self) -> ctypes.CDLL:
        """The library, compiled if necessary; Unavailable, at once on later calls, if it fails."""
        with self._mutex:
            if self._loaded is None and self._reason is None:
                self._try(rebuild=False)
            return self._result()

    def rebuild(self) -> ctypes.CDLL:
        """Compile for this machine, even if there is a library or compilation failed before.

        This process then uses the new library, except for prepared calls of layers. Later processes
        prefer a prebuilt library unless ``LN_ZOO_CPU_LEVEL`` is ``native``. Unavailable if that
        fails.
        """
        with self._mutex:
            self._loaded = self._reason = None
            self._try(rebuild=True)
            return self._result()

    def status(self, build: bool = False) -> Status:
        if build:
            with contextlib.suppress(Unavailable):
                self.load()
        unused_cache = why_not_ours(cache_folder())
        level, compiler, reason = NATIVE, None, self._reason
        found = self._loaded and (self._loaded.path, self._loaded.made)
        if not found and not reason:
            try:
                chosen = _chosen_level()
                level = chosen or NATIVE
                found = self._finished(chosen, unused_cache)
                if not found:
                    compiler = _local_compiler()
                    reason = None if unused_cache else self._read_failure(level, compiler)
            except Unavailable as error:
                reason = error.reason
        path, made = found or (None, None)
        name, features = _processor()
        openmp = made.openmp if made else None
        return Status(
            available=reason is None,
            built=made is not None,
            prebuilt=path is not None and path.parent == self._prebuilt,
            level=made.level if made else level.name,
            path=path,
            compiler=made.compiler if made else str(compiler) if compiler else None,
            flags=made.flags if made else (*COMPILE, *level.flags, *chosen_flags()),
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
        troubles: list[str] = []
        try:
            self._loaded = self._find_or_build(rebuild, troubles)
        except Unavailable as error:
            self._reason = "; ".join([*troubles, error.reason])
            wrong = troubles or "LN_ZOO_CPU_LEVEL" in os.environ
            severity = logging.WARNING if wrong else logging.INFO
            _log.log(severity, "no %s: %s", self._what, self._reason)
        else:
            for trouble in troubles:
                _log.warning("%s", trouble)
            made = self._loaded.made
            _log.info(
                "%s: %s (level: %s; compiler: %s; OpenMP: %s)",
                *(self._what, self._loaded.path, made.level, made.compiler, made.openmp),
            )

    def _find_or_build(self, rebuild: bool, troubles: list[str]) -> _Loaded:
        """What was tried in vain before is appended to ``troubles``."""
        chosen = _chosen_level()
        for path, made in () if rebuild else self._prebuilt_libraries(chosen, troubles):
            try:
                return _Loaded(_open(path), path, made)
            except OSError as error:
                troubles.append(f"{path} cannot be loaded: {error}")
        return self._find_cached_or_build(chosen or NATIVE, rebuild)

    def _find_cached_or_build(self, level: Level, rebuild: bool) -> _Loaded:
        cache = cache_folder()
        unused_cache = why_not_ours(cache)
        if unused_cache is not None:
            _log.warning(
                "the cache of compiled kernels, %s, is not used, since others could put their code "
                "there: %s. Each process compiles its own (about %d s); LN_ZOO_CACHE names another "
                "folder",
                *(cache, unused_cache, self._seconds),
            )
        elif not rebuild and (loaded := _cached(cache, self._stem(level))):
            return loaded
        compiler = _local_compiler()
        if not (rebuild or unused_cache) and (reason := self._read_failure(level, compiler)):
            raise Unavailable(reason)
        troubles = []
        for folder in (self._private,) if unused_cache else (lambda: cache, self._private):
            try:
                return self._build(folder(), level, compiler, rebuild)
            except (OSError, NotImplementedError) as error:  # NotImplementedError: no locks
                troubles.append(str(error))
        raise Unavailable(f"the library cannot be kept or loaded: {'; '.join(troubles)}")

    def _build(self, folder: Path, level: Level, compiler: Compiler, rebuild: bool) -> _Loaded:
        make_private(folder)
        _remove_abandoned(folder, self._source.stem)
        stem = self._stem(level)
        try:
            with FileLock(folder / f"{stem}.lock", timeout=LIMIT + 30):
                # Another process may have compiled it.
                if not rebuild and (loaded := _cached(folder, stem)):
                    return loaded
                failure = _failure_file(folder, stem, compiler)
                failure.unlink(missing_ok=True)
                try:
                    return self._compile(folder, level, compiler)
                except Unavailable as error:
                    with contextlib.suppress(OSError):
                        failure.write_text(error.reason)
                    raise
        except Timeout:
            raise Unavailable(
                f"another process has been compiling into {folder} for over {LIMIT} s"
            ) from None

    def _compile(self, folder: Path, level: Level, compiler: Compiler) -> _Loaded:
        kept = "this process only" if folder == self._private_folder else f"later runs in {folder}"
        # Printed, since logs may have no handler: explains the delay of the first call.
        print(
            f"ln_zoo: compiling {self._what} for this machine (about {self._seconds} s); "
            f"kept for {kept}",
            file=sys.stderr,
            flush=True,
        )
        stem, opened = self._stem(level), {}
        with tempfile.TemporaryDirectory(prefix=f"{stem}-", dir=folder) as work:
            file, made = compile_library(
                *(self._source, compiler, level, Path(work)),
                check=lambda path: opened.update({path: _open(path)}),
                text=self._text,
            )
            path = _library_file(folder, stem)
            file.chmod(0o755)  # regardless of the umask: files writable by others are not loaded
            file.replace(path)
            note = Path(work) / "made.json"
            note.write_text(json.dumps(asdict(made)))
            note.chmod(0o644)
            # Written last: marks the library as complete.
            note.replace(_made_file(folder, stem))
        return _Loaded(opened[file], path, made)

    def _prebuilt_libraries(
        self, chosen: Level | None, troubles: list[str]
    ) -> list[tuple[Path, Made]]:
        if self._prebuilt is None or chosen == NATIVE or chosen_flags():
            return []
        levels = [chosen] if chosen else prebuilt.levels_for(_processor()[1])
        return prebuilt.find(self._prebuilt, levels, troubles)

    def _finished(self, chosen: Level | None, unused_cache: str | None) -> tuple[Path, Made] | None:
        if found := self._prebuilt_libraries(chosen, []):
            return found[0]
        folder, stem = cache_folder(), self._stem(chosen or NATIVE)
        made = None if unused_cache else _finished(folder, stem)
        return (_library_file(folder, stem), made) if made else None

    def _read_failure(self, level: Level, compiler: Compiler) -> str | None:
        try:
            file = _failure_file(cache_folder(), self._stem(level), compiler)
            return file.read_text(errors="replace") or None
        except OSError:
            return None

    def _stem(self, level: Level) -> str:
        """Base name of files in the cache; the compiler is part of it for failures only."""
        name, features = _processor()
        here = (sys.platform, platform.machine(), name, *sorted(features), torch.__version__)
        first, *others = parts(self._source, self._text)
        texts = [first.read_text() if self._text is None else self._text]
        texts += [file.read_text() for file in others]
        flags = (*COMPILE, *level.flags, *LINK, *chosen_flags())
        return f"{self._source.stem}-{_digest(*texts, str(_SCHEMA), *here, *flags)}"

    def _private(self) -> Path:
        if self._private_folder is None:
            self._private_folder = Path(tempfile.mkdtemp(prefix="ln_zoo-"))
            atexit.register(shutil.rmtree, self._private_folder, ignore_errors=True)
        return self._private_folder


_KERNELS = NativeLibrary(SOURCE, prebuilt.FOLDER)


def library() -> ctypes.CDLL:
    """The native kernels, loaded or compiled on the first call; see `NativeLibrary.load`."""
    return _KERNELS.load()


def rebuild() -> ctypes.CDLL:
    """See `NativeLibrary.rebuild`."""
    return _KERNELS.rebuild()


def status(build: bool = False) -> Status:
    """State of the native kernels; compiles and loads them first if ``build``."""
    return _KERNELS.status(build)


def compiler_missing() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        _local_compiler()
    except Unavailable as error:
        return error.reason
    return None


def cache_folder() -> Path:
    """Folder of compiled kernels: ``LN_ZOO_CACHE``, or ``ln_zoo`` in the user's cache folder."""
    if chosen := os.environ.get("LN_ZOO_CACHE"):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "ln_zoo"


def bfloat16_pays() -> bool:
    """Whether our bfloat16 products are faster than float32.

    True with AMX tiles and AMD's AVX-512. Intel's AVX-512 has the instruction at half the rate;
    other processors lack it. Measurements: docs/results/performance.md.
    """
    name, features = _processor()
    return "amx_tile" in features or ("avx512_bf16" in features and "Intel" not in name)


# Not traced by torch.compile, as `ln_zoo.kernels.native.runtime.unavailable_reason`.
bfloat16_pays._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _processor() -> tuple[str, frozenset[str]]:
    known = torch.cpu.get_capabilities()
    features = frozenset(name for name, value in known.items() if value is True)
    return known.get("cpu_name") or platform.processor() or platform.machine(), features


def _chosen_level() -> Level | None:
    """The level named by ``LN_ZOO_CPU_LEVEL``, or None.

    Unavailable for an unknown level, or one that the processor cannot run.
    """
    name = os.environ.get("LN_ZOO_CPU_LEVEL", "")
    levels = {level.name: level for level in (NATIVE, *LEVELS.get(ARCHITECTURE, ()))}
    if not name:
        return None
    if name not in levels:
        raise Unavailable(
            f"LN_ZOO_CPU_LEVEL={name} is not a level of {ARCHITECTURE}; set one of "
            f"{', '.join(levels)}, or unset it"
        )
    if missing := levels[name].features - _processor()[1]:
        raise Unavailable(
            f"LN_ZOO_CPU_LEVEL={name}: this processor lacks {', '.join(sorted(missing))}; unset it"
        )
    return levels[name]


def _local_compiler() -> Compiler:
    if sys.platform == "win32":
        raise Unavailable("kernels are not compiled on Windows; install the wheel for it")
    return find_compiler()


def _open(path: Path) -> ctypes.CDLL:
    """Load a library and check its version; OSError if it is not ours."""
    if sys.platform == "darwin":
        # On Linux the symbols of torch's OpenMP runtime are global; here they must be made so.
        runtime = Path(torch.__file__).with_name("lib") / "libomp.dylib"
        if runtime.exists():
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    try:
        version = library.ln_zoo_abi
    except AttributeError:
        raise OSError(f"{path} has no ln_zoo_abi()") from None
    version.restype, version.argtypes = ctypes.c_int64, ()
    if version() != ABI:
        raise OSError(f"ln_zoo_abi() of {path} returns {version()}, expected {ABI}")
    return library


# Cache files


def _library_file(folder: Path, stem: str) -> Path:
    return folder / f"{stem}{SUFFIX}"


def _made_file(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.json"


def _failure_file(folder: Path, stem: str, compiler: Compiler) -> Path:
    return folder / f"{stem}-{_digest(str(compiler))}.failed"


def _remove_abandoned(folder: Path, name: str) -> None:
    """Remove the folders of compilations that were killed; a running one holds its lock."""
    for work in folder.glob(f"{name}-*-*"):
        stem = work.name.rpartition("-")[0]
        with contextlib.suppress(OSError):  # locked, or removed by another process
            if is_our_folder(work):
                with FileLock(folder / f"{stem}.lock", timeout=0):
                    shutil.rmtree(work)


def _cached(folder: Path, stem: str) -> _Loaded | None:
    path = _library_file(folder, stem)
    if (made := _finished(folder, stem)) is not None:
        try:
            return _Loaded(_open(path), path, made)
        except OSError as error:
            _log.info("cannot load %s, compiling anew: %s", path, error)
    return None


def _finished(folder: Path, stem: str) -> Made | None:
    """The record of a complete library that nobody else could have written, or None.

    The checksum is compared before loading, because loading a truncated library may crash.
    """
    try:
        for file in (_made_file(folder, stem), _library_file(folder, stem)):
            if not is_our_file(file):
                _log.warning("%s is not used: another user could have written it", file)
                return None
        note = json.loads(_made_file(folder, stem).read_text())
        made = Made(**note | {"flags": tuple(note["flags"])})
        whole = checksum(_library_file(folder, stem)) == made.sha256
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return made if whole else None


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
