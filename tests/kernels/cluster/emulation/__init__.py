"""Runs the CUDA kernels of `ln_zoo.kernels.cluster` on the CPU, one fiber per CUDA thread.

The sources are compiled unchanged by the C++ compiler, with ``emulation.h`` for ``device.h``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ln_zoo.kernels.cluster
from ln_zoo.kernels.native.build import Unavailable, _processor, cache_folder, find_compiler
from ln_zoo.kernels.native.ownership import make_private

_HERE = Path(__file__).parent
SOURCES = Path(ln_zoo.kernels.cluster.__file__).parent
_KERNEL = re.compile(r"^KERNEL\(.*\) void (\w+)\(", re.MULTILINE)
_HARNESS = """
static void body_{name}() {{ emulation::call({name}); }}
extern "C" __attribute__((visibility("default")))
const char* run_{name}(u32 grid, u32 threads, u32 cluster, size_t shared, const void* arguments,
                       size_t bytes, u64 seed) {{
  return emulation::run(body_{name}, grid, threads, cluster, shared, arguments, bytes, seed);
}}
"""
_FLAGS = (
    "-std=c++17",
    "-Og",
    "-march=native",
    "-shared",
    "-fPIC",
    # Kernels of other macros have functions and variables of the same names.
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-fsanitize=alignment,null,bounds",
    "-fno-strict-aliasing",
)


def missing() -> str | None:
    """Why kernels cannot be emulated on this machine, or ``None``."""
    if sys.platform != "linux":
        return "kernels are emulated on Linux only"
    try:
        find_compiler()
    except Unavailable as error:
        return error.reason
    return None


class Emulated:
    """A kernel on the CPU, with the interface of `ln_zoo.kernels.cluster.driver.Kernel`.

    Args:
        function: compiled by `emulate`.
        threads: threads of a block.
        cluster: blocks of a cluster.
        shared_bytes: dynamic shared memory of a block; filled with 0xff before each cluster.

    Attributes:
        seed: for which messages and copies arrive late.
    """

    registers = local_bytes = 0

    def __init__(self, function: Any, threads: int, cluster: int, shared_bytes: int) -> None:
        self._function = function
        self._threads, self._cluster, self._shared_bytes = threads, cluster, shared_bytes
        self.seed = 1

    def max_clusters(self) -> int:
        return 1000

    def __call__(self, grid: int, arguments: ctypes.Structure, stream: int = 0) -> None:
        """Runs all blocks; raises RuntimeError if the kernel breaks a rule of `emulation.h`."""
        complaint = self._function(
            grid,
            self._threads,
            self._cluster,
            self._shared_bytes,
            ctypes.byref(arguments),
            ctypes.sizeof(arguments),
            self.seed,
        )
        if complaint is not None:
            raise RuntimeError(complaint.decode())


def emulate(
    source: str | Path,
    name: str,
    macros: Mapping[str, object],
    threads: int,
    cluster: int = 1,
    shared_bytes: int = 0,
) -> Emulated:
    """Compile a kernel for the CPU, or take it from the cache; the arguments of `Emulated`.

    ``source``: a file of the package, or the path of another file. RuntimeError with the compiler's
    messages if it does not compile.
    """
    items = tuple(sorted((key, str(value)) for key, value in macros.items()))
    path = SOURCES / source
    names = {name, *_KERNEL.findall(path.read_text())}
    library = _library(path, tuple(sorted(names)), items)
    function = library[f"run_{name}"]
    number, size = ctypes.c_uint, ctypes.c_size_t
    function.argtypes = [number, number, number, size, ctypes.c_void_p, size, ctypes.c_uint64]
    function.restype = ctypes.c_char_p
    return Emulated(function, threads, cluster, shared_bytes)


@functools.cache
def _library(source: Path, names: Sequence[str], macros: Sequence[tuple[str, str]]) -> ctypes.CDLL:
    """From the user's cache, which all processes and runs of the tests share."""
    harness = "".join(_HARNESS.format(name=name) for name in names)
    text = f'#include "emulation.h"\n#include "{source}"\n{harness}'
    command = [
        *find_compiler().command,
        *_FLAGS,
        *(f"-D{key}={value}" for key, value in macros),
        f"-I{_HERE}",
        f"-I{SOURCES}",
        *("-x", "c++", "-"),
    ]
    name, features = _processor()  # of ``-march=native``
    made_by = (text, command, find_compiler().version, name, sorted(features))
    digest = hashlib.sha256(repr(made_by).encode())
    for file in (source, _HERE / "emulation.h", *sorted(SOURCES.glob("*.h"))):
        digest.update(file.read_bytes())
    path = cache_folder() / "emulation" / f"{digest.hexdigest()[:32]}.so"
    if not path.exists():
        make_private(path.parent)
        made = path.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            [*command, "-o", str(made)], input=text, capture_output=True, text=True, check=False
        )
        if done.returncode or done.stderr:  # warnings too
            raise RuntimeError(f"{source.name} does not compile: {done.stderr}")
        made.replace(path)
    return ctypes.CDLL(str(path))
