"""Compile CUDA C++ with NVRTC and launch it with the driver API, both through ctypes.

Requires neither nvcc nor CUDA headers: torch's CUDA wheels include NVRTC, the driver includes
libcuda. Nothing is loaded or compiled on import.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from ln_zoo.kernels.native.build import cache_folder, parts
from ln_zoo.kernels.native.ownership import is_our_file, make_private, why_not_ours

#: Version of the cache format.
_SCHEMA = 1
#: Where the wheels nvidia-cuda-nvrtc (13) and nvidia-cuda-nvrtc-cu12 keep NVRTC, by CUDA version.
_WHEELS = {13: "cu13/lib", 12: "cuda_nvrtc/lib"}
_OPTIONS = ("--std=c++17",)
_FOLDER = Path(__file__).parent
_log = logging.getLogger("ln_zoo")

Macros = Mapping[str, object]


class CudaError(RuntimeError):
    """A failed call of NVRTC or the CUDA driver."""


class Resources(NamedTuple):
    """Resources of a kernel per ptxas, per thread and in bytes; ``shared`` is a block's."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


# NVRTC


class _Nvrtc:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = major.value, minor.value

    def compile(self, source: Path, macros: Macros, arch: str, *options: str) -> tuple[bytes, str]:
        """Compile a file to a cubin, with the log; `CudaError` with the compiler's messages."""
        headers = [file for file in parts(source) if file != source]
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.read_bytes(),
            source.name.encode(),
            len(headers),
            _strings([file.read_text() for file in headers]),
            # Keyed by the names in #include.
            _strings([os.path.relpath(file, source.parent) for file in headers]),
        )
        try:
            definitions = [f"-D{name}={value}" for name, value in macros.items()]
            arguments = [f"--gpu-architecture={arch}", *_OPTIONS, *options, *definitions]
            try:
                self._call("nvrtcCompileProgram", program, len(arguments), _strings(arguments))
            except CudaError as error:
                log = self._read(program, "ProgramLog").decode(errors="replace")
                raise CudaError(
                    f"{source.name} does not compile for {arch}: {error}\n{log}"
                ) from None
            log = self._read(program, "ProgramLog").decode(errors="replace")
            return self._read(program, "CUBIN"), log
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            text = self._library.nvrtcGetErrorString
            text.restype = ctypes.c_char_p
            raise CudaError(f"{name}: {text(code).decode()}")


def _strings(texts: list[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


@functools.cache
def _nvrtc() -> _Nvrtc | str:
    """NVRTC, preferably of torch's CUDA version, or why it is unavailable."""
    if sys.platform != "linux":
        return "NVRTC is used on Linux only"
    troubles = []
    for path in _nvrtc_candidates():
        try:
            # NVRTC opens them by name, so they must be loaded.
            for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return _Nvrtc(ctypes.CDLL(path))
        except (OSError, AttributeError, CudaError) as error:
            troubles.append(str(error))
    return f"NVRTC cannot be loaded: {troubles[-1]}; install nvidia-cuda-nvrtc"


def _nvrtc_candidates() -> Iterator[str]:
    ours = int((torch.version.cuda or "13").partition(".")[0])
    majors = sorted(_WHEELS, key=lambda major: major != ours)
    spec = importlib.util.find_spec("nvidia")
    for major in majors:
        for root in (spec.submodule_search_locations or ()) if spec else ():
            yield from map(str, sorted(Path(root, _WHEELS[major]).glob(f"libnvrtc.so.{major}*")))
    yield from (f"libnvrtc.so.{major}" for major in majors)


def _need_nvrtc() -> _Nvrtc:
    found = _nvrtc()
    if isinstance(found, str):
        raise CudaError(found)
    return found


def missing_compiler() -> str | None:
    """Why kernels cannot be compiled on this machine, or None; needs no GPU."""
    found = _nvrtc()
    return found if isinstance(found, str) else None


def missing() -> str | None:
    """Why kernels cannot be compiled and launched here, or None; compiles nothing."""
    driver = _driver()
    if isinstance(driver, str):
        return driver
    compiler = _nvrtc()
    if isinstance(compiler, str):
        return compiler
    version = ctypes.c_int()
    try:
        driver.call("cuDriverGetVersion", ctypes.byref(version))
    except CudaError as error:
        return str(error)
    if version.value // 1000 < compiler.version[0]:
        return (
            f"the driver supports CUDA {version.value // 1000}, NVRTC is {compiler.version[0]}; "
            "update the driver"
        )
    return None


def compile_kernel(source: str, macros: Macros, arch: str = "sm_90a") -> bytes:
    """Compile a file of this package to a cubin, cached on disk.

    The cache is in `ln_zoo.kernels.native.build.cache_folder`; files that do not match their
    SHA-256 are replaced. CudaError without NVRTC, or with the compiler's messages.
    """
    compiler = _need_nvrtc()
    path = _FOLDER / source
    key = (
        _SCHEMA,
        compiler.version,
        _OPTIONS,
        arch,
        [(name, str(macros[name])) for name in sorted(macros)],
        [(file.name, file.read_text()) for file in parts(path)],
    )
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    folder = cache_folder()
    file = folder / f"{path.stem}-{digest}.cubin"
    unused_cache = why_not_ours(folder)
    if unused_cache is None and (cubin := _read_cached(file)) is not None:
        return cubin
    cubin, _ = compiler.compile(path, macros, arch)
    if unused_cache is None:
        with contextlib.suppress(OSError):  # then the next process compiles again
            _write_cached(file, cubin)
    else:
        _log.warning("compiled kernels are not kept in %s: %s", folder, unused_cache)
    return cubin


def _read_cached(file: Path) -> bytes | None:
    try:
        if not is_our_file(file):
            _log.warning("%s is not used: another user could have written it", file)
            return None
        content = file.read_bytes()
    except OSError:
        return None
    cubin, checksum = content[:-32], content[-32:]
    return cubin if hashlib.sha256(cubin).digest() == checksum else None


def _write_cached(file: Path, cubin: bytes) -> None:
    make_private(file.parent)
    number, name = tempfile.mkstemp(prefix=file.stem, dir=file.parent)
    try:
        with os.fdopen(number, "wb") as out:
            out.write(cubin + hashlib.sha256(cubin).digest())
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


_FUNCTION = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def resource_usage(source: str, macros: Macros, arch: str = "sm_90a") -> dict[str, Resources]:
    """Compile a file of this package and return resource usage by kernel; needs no GPU."""
    _, log = _need_nvrtc().compile(_FOLDER / source, macros, arch, "--ptxas-options=-v")
    _, *reports = _FUNCTION.split(log)
    found = {}
    for name, report in zip(reports[::2], reports[1::2], strict=True):
        registers, stack = _REGISTERS.search(report), _STACK.search(report)
        if registers is None or stack is None:
            raise CudaError(f"the report of ptxas on {name} cannot be parsed: {report!r}")
        shared = _SHARED.search(report)
        found[name] = Resources(
            registers=int(registers[1]),
            stack=int(stack[1]),
            spill_stores=int(stack[2]),
            spill_loads=int(stack[3]),
            shared=int(shared[1]) if shared else 0,
        )
    return found


# The driver

# CUfunction_attribute
_LOCAL_BYTES, _REGISTER_COUNT, _MAX_SHARED_BYTES, _LARGE_CLUSTERS = 3, 4, 8, 14
#: Default limit of dynamic shared memory per block.
_DEFAULT_SHARED_BYTES = 48 << 10
#: Largest portable cluster size.
_PORTABLE_CLUSTER = 8
_CLUSTER_DIMENSION = 4


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    ]


class _Driver:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise CudaError(f"{name}: {self._text('Name', code)} ({self._text('String', code)})")

    def has(self, name: str) -> bool:
        return hasattr(self._library, name)

    def _text(self, what: str, code: int) -> str:
        text = ctypes.c_char_p()
        getattr(self._library, f"cuGetError{what}")(code, ctypes.byref(text))
        return text.value.decode() if text.value else f"error {code}"

    def use_context(self, device: int) -> None:
        """Make the primary context of a device, which torch uses, current in this thread."""
        primary = self._contexts.get(device)
        if primary is None:
            primary, number = ctypes.c_void_p(), ctypes.c_int()
            self.call("cuDeviceGet", ctypes.byref(number), device)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(primary), number)
            self._contexts[device] = primary
        current = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value != primary.value:
            self.call("cuCtxSetCurrent", primary)


@functools.cache
def _driver() -> _Driver | str:
    if sys.platform != "linux":
        return "the CUDA driver is used on Linux only"
    try:
        return _Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        return f"there is no CUDA driver: {error}"


def _need_driver() -> _Driver:
    found = _driver()
    if isinstance(found, str):
        raise CudaError(found)
    return found


class Kernel:
    """A kernel of this package, compiled and loaded once per device on first use.

    Methods use torch's current device and are thread-safe. Launches are asynchronous. The kernel
    takes one structure by value; ``threads`` per block and blocks per ``cluster`` must match its
    ``KERNEL``; ``shared_bytes`` is a block's dynamic shared memory.
    """

    def __init__(
        self,
        source: str,
        name: str,
        macros: Macros,
        threads: int,
        cluster: int = 1,
        shared_bytes: int = 0,
    ) -> None:
        self._source, self._name, self._macros = source, name, dict(macros)
        self._threads, self._cluster, self._shared_bytes = threads, cluster, shared_bytes
        self._mutex = threading.Lock()
        self._functions: dict[int, ctypes.c_void_p] = {}
        self._argument_bytes: int | None = None

    def load(self) -> ctypes.c_void_p:
        device = torch.cuda.current_device()
        driver = _need_driver()
        driver.use_context(device)
        function = self._functions.get(device)
        if function is None:
            with self._mutex:
                function = self._functions.get(device)
                if function is None:
                    function = self._functions[device] = self._load(driver, device)
        return function

    def _load(self, driver: _Driver, device: int) -> ctypes.c_void_p:
        cubin = compile_kernel(self._source, self._macros, architecture(device))
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        driver.call("cuModuleLoadData", ctypes.byref(module), cubin)
        driver.call("cuModuleGetFunction", ctypes.byref(function), module, self._name.encode())
        if self._shared_bytes > _DEFAULT_SHARED_BYTES:
            driver.call("cuFuncSetAttribute", function, _MAX_SHARED_BYTES, self._shared_bytes)
        if self._cluster > _PORTABLE_CLUSTER:
            driver.call("cuFuncSetAttribute", function, _LARGE_CLUSTERS, 1)
        if driver.has("cuFuncGetParamInfo"):  # CUDA 12.4
            offset, size = ctypes.c_size_t(), ctypes.c_size_t()
            driver.call(
                "cuFuncGetParamInfo",
                function,
                ctypes.c_size_t(0),
                ctypes.byref(offset),
                ctypes.byref(size),
            )
            self._argument_bytes = size.value
        return function

    @property
    def registers(self) -> int:
        return _attribute(self.load(), _REGISTER_COUNT)

    @property
    def local_bytes(self) -> int:
        """Local memory of a thread; more than 0 usually means spilled registers."""
        return _attribute(self.load(), _LOCAL_BYTES)

    def max_clusters(self, cluster: int | None = None) -> int:
        """Maximum resident clusters of this size, by default the kernel's own."""
        function = self.load()
        cluster = cluster or self._cluster
        attribute = _LaunchAttribute(id=_CLUSTER_DIMENSION)
        attribute.value[:3] = [cluster, 1, 1]
        config = _LaunchConfig(
            grid=(64 * cluster, 1, 1),
            block=(self._threads, 1, 1),
            shared_bytes=self._shared_bytes,
            attributes=ctypes.pointer(attribute),
            attribute_count=1,
        )
        count = ctypes.c_int()
        _need_driver().call(
            "cuOccupancyMaxActiveClusters", ctypes.byref(count), function, ctypes.byref(config)
        )
        return count.value

    def __call__(self, grid: int, arguments: ctypes.Structure, stream: int = 0) -> None:
        """Launch ``grid`` blocks, a multiple of the cluster size, on a stream handle."""
        function = self.load()
        if self._argument_bytes not in (None, ctypes.sizeof(arguments)):
            raise CudaError(
                f"{self._name} takes {self._argument_bytes} bytes of arguments, "
                f"{type(arguments).__name__} has {ctypes.sizeof(arguments)}"
            )
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _need_driver().call(
            "cuLaunchKernel",
            function,
            *(grid, 1, 1),
            *(self._threads, 1, 1),
            self._shared_bytes,
            ctypes.c_void_p(stream),
            pointers,
            None,
        )


def architecture(device: int) -> str:
    """Architecture to compile for, such as ``"sm_90a"``."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a" if major >= 9 else f"sm_{major}{minor}"


def _attribute(function: ctypes.c_void_p, number: int) -> int:
    value = ctypes.c_int()
    _need_driver().call("cuFuncGetAttribute", ctypes.byref(value), number, function)
    return value.value
