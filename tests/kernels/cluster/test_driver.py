"""Compiling kernels for GPUs and launching them, without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ln_zoo.kernels.cluster import driver
from ln_zoo.kernels.cluster.driver import CudaError, Kernel, compile_kernel, resource_usage
from ln_zoo.kernels.cluster.geometry import Problem

NO_COMPILER = driver.missing_compiler()
needs_compiler = pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
MACROS = {"PIECES": 1, "KIND": 0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LN_ZOO_CACHE", str(folder))
    return folder


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    original = driver._Nvrtc.compile

    def compile(self: Any, source: Path, *more: Any) -> tuple[bytes, str]:
        found.append(source.name)
        return original(self, source, *more)

    monkeypatch.setattr(driver._Nvrtc, "compile", compile)
    return found


@needs_compiler
@pytest.mark.parametrize(
    ("cell", "kind"),
    [(0, 0), (1, 2), *(pytest.param(*a, marks=pytest.mark.slow) for a in ((0, 1), (1, 0), (2, 1)))],
)
def test_row_kernels_need_no_local_memory(cell: int, kind: int) -> None:
    problem = Problem(cell, 64, kind, 1, input=cell < 2, recurrent=True)
    found = resource_usage("rows.cu", problem.rows_macros())
    assert found.keys() == {"input_statistics", "after_loop"}
    for name, used in found.items():
        assert used.stack == used.spill_stores == used.spill_loads == 0, (name, used)
    # Several blocks of 256 threads share the 65536 registers of a multiprocessor.
    assert found["input_statistics"].registers <= 64
    assert found["after_loop"].registers <= 168


@needs_compiler
@pytest.mark.parametrize(("pieces", "kind"), [(1, 0), (2, 0), (1, 1), (1, 2)])
def test_kernels_that_pack_weights_need_no_local_memory(pieces: int, kind: int) -> None:
    found = resource_usage("pack.cu", {"PIECES": pieces, "KIND": kind})
    assert found.keys() == {"scale_weights", "pack_weights"}
    assert all(used.stack == 0 and used.registers <= 64 for used in found.values())


@needs_compiler
def test_resource_usage_notices_spills(tmp_path: Path) -> None:
    source = tmp_path / "spills.cu"
    source.write_text(
        "extern __shared__ int dynamic[];\n"
        'extern "C" __global__ __launch_bounds__(1024, 2) void spills(float* x) {\n'
        "  __shared__ float y[32];\n"
        "  float a[96];\n"
        "  for (int i = 0; i < 96; ++i) a[i] = x[i * 1024 + threadIdx.x];\n"
        "  y[threadIdx.x % 32] = a[0];\n"
        "  __syncthreads();\n"
        "  for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = a[95 - i] * y[i % 32];\n"
        "}\n"
    )
    used = resource_usage(str(source), {})["spills"]
    assert used.registers <= 32
    assert used.shared == 128
    assert used.spill_stores > 0
    assert used.spill_loads > 0


@needs_compiler
def test_the_cache_is_used(cache: Path, compilations: list[str]) -> None:
    first = compile_kernel("pack.cu", MACROS)
    assert first[:4] == b"\x7fELF"
    assert compile_kernel("pack.cu", dict(reversed(MACROS.items()))) == first
    assert compilations == ["pack.cu"]
    assert len(list(cache.iterdir())) == 1
    assert compile_kernel("pack.cu", MACROS | {"PIECES": 2}) != first
    assert compile_kernel("pack.cu", MACROS, "sm_90") != first
    assert len(compilations) == 3


@needs_compiler
def test_a_change_of_a_header_is_noticed(tmp_path: Path, compilations: list[str]) -> None:
    source, header = tmp_path / "a.cu", tmp_path / "a.h"
    source.write_text('#include "a.h"\nextern "C" __global__ void f(int* x) { *x = NUMBER; }\n')
    header.write_text("#define NUMBER 1\n")
    first = compile_kernel(str(source), {})
    header.write_text("#define NUMBER 2\n")
    assert compile_kernel(str(source), {}) != first
    assert len(compilations) == 2


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "empty", "altered"])
def test_a_damaged_entry_is_replaced(cache: Path, compilations: list[str], damage: str) -> None:
    first = compile_kernel("pack.cu", MACROS)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(
        {"truncated": whole[:-100], "empty": b"", "altered": b"\0" + whole[1:]}[damage]
    )
    assert compile_kernel("pack.cu", MACROS) == first
    assert file.read_bytes() == whole
    assert len(compilations) == 2
    assert len(list(cache.iterdir())) == 1


@needs_compiler
def test_nothing_is_kept_where_others_can_write(cache: Path, compilations: list[str]) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    first = compile_kernel("pack.cu", MACROS)
    assert compile_kernel("pack.cu", MACROS) == first
    assert len(compilations) == 2
    assert not list(cache.iterdir())


@needs_compiler
def test_an_entry_that_others_can_write_to_is_not_used(
    cache: Path, compilations: list[str]
) -> None:
    compile_kernel("pack.cu", MACROS)
    (file,) = cache.iterdir()
    file.chmod(0o666)
    compile_kernel("pack.cu", MACROS)
    assert len(compilations) == 2
    assert file.stat().st_mode & 0o777 == 0o600


@needs_compiler
def test_a_cache_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.write_text("a file")
    assert compile_kernel("pack.cu", MACROS)[:4] == b"\x7fELF"


@needs_compiler
def test_errors_of_the_compiler_are_shown(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text("int f() { return undeclared_name; }\n")
    with pytest.raises(CudaError, match="undeclared_name"):
        compile_kernel(str(source), {})
    with pytest.raises(CudaError, match="gpu-architecture"):
        compile_kernel("pack.cu", MACROS, "sm_1")


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(driver, "_nvrtc_candidates", lambda: iter(["libnvrtc.so.no"]))
    driver._nvrtc.cache_clear()
    yield
    driver._nvrtc.cache_clear()


@pytest.mark.usefixtures("no_nvrtc")
def test_without_nvrtc_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_driver", lambda: FakeDriver())
    assert "NVRTC" in str(driver.missing())
    assert "NVRTC" in str(driver.missing_compiler())
    with pytest.raises(CudaError, match="NVRTC"):
        compile_kernel("pack.cu", MACROS)


def test_without_a_driver_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(driver.ctypes, "CDLL", load)
    driver._driver.cache_clear()
    try:
        assert "libcuda" in str(driver.missing())
        with pytest.raises(CudaError, match="libcuda"):
            driver._need_driver()
    finally:
        driver._driver.cache_clear()


class FakeLibrary:
    """Functions of libcuda: each notes its arguments and succeeds, or returns a code."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.failing: dict[str, int] = {}
        self.context = None
        self.argument_bytes = 16

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            first = arguments[0] if arguments else None
            if name.startswith("cuGetError"):
                ctypes.memmove(arguments[1], ctypes.byref(ctypes.c_char_p(b"CUDA_ERROR_X")), 8)
            elif name == "cuDriverGetVersion":
                first._obj.value = 13000
            elif name == "cuDevicePrimaryCtxRetain":
                first._obj.value = 77
            elif name == "cuCtxGetCurrent":
                first._obj.value = self.context
            elif name == "cuCtxSetCurrent":
                self.context = first.value
            elif name == "cuFuncGetParamInfo":
                arguments[3]._obj.value = self.argument_bytes
            elif name == "cuOccupancyMaxActiveClusters":
                config = arguments[2]._obj
                attribute = config.attributes.contents
                self.occupancy = (
                    list(config.block), config.shared_bytes, attribute.id, attribute.value[0],
                )  # fmt: skip
                first._obj.value = 9
            elif name == "cuLaunchKernel":
                pointers = arguments[9]
                self.sent = ctypes.string_at(pointers[0], self.argument_bytes)
            return self.failing.get(name, 0)

        return function

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]


class FakeDriver(driver._Driver):
    def __init__(self) -> None:
        super().__init__(FakeLibrary())  # type: ignore[arg-type]

    @property
    def library(self) -> FakeLibrary:
        return self._library  # type: ignore[return-value]


class Two(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("n", ctypes.c_int))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """A driver that runs nothing; compiled code is a constant."""
    made = FakeDriver()
    monkeypatch.setattr(driver, "_driver", lambda: made)
    monkeypatch.setattr(driver, "compile_kernel", lambda source, macros, arch: b"cubin")
    monkeypatch.setattr(driver, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return made.library


def test_a_launch(fake: FakeLibrary) -> None:
    kernel = Kernel("pack.cu", "pack_weights", {}, threads=256, cluster=13, shared_bytes=100_000)
    arguments = Two(1234, 5)
    kernel(26, arguments, stream=99)
    kernel(26, arguments, stream=99)
    assert fake.context == 77  # the one that torch uses
    assert len(fake.named("cuModuleLoadData")) == 1
    attributes = [arguments[1:] for arguments in fake.named("cuFuncSetAttribute")]
    assert attributes == [(8, 100_000), (14, 1)]
    _, *numbers = fake.named("cuLaunchKernel")[0]
    assert numbers[:7] == [26, 1, 1, 256, 1, 1, 100_000]
    assert numbers[7].value == 99
    assert fake.sent == bytes(arguments)
    assert kernel.max_clusters() == 9
    assert fake.occupancy == ([256, 1, 1], 100_000, 4, 13)


def test_small_kernels_need_no_attributes(fake: FakeLibrary) -> None:
    Kernel("pack.cu", "pack_weights", {}, threads=256, cluster=8, shared_bytes=4096).load()
    assert not fake.named("cuFuncSetAttribute")


def test_a_kernel_is_loaded_once_per_device(
    fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel("pack.cu", "pack_weights", {}, threads=256)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: kernel.load(), range(64)))
    assert len(fake.named("cuModuleLoadData")) == 1
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    kernel.load()
    assert len(fake.named("cuModuleLoadData")) == 2


def test_a_wrong_structure_is_refused(fake: FakeLibrary) -> None:
    fake.argument_bytes = 24
    with pytest.raises(CudaError, match="Two has 16"):
        Kernel("pack.cu", "pack_weights", {}, threads=256)(1, Two())
    assert not fake.named("cuLaunchKernel")


def test_errors_of_the_driver_are_named(fake: FakeLibrary) -> None:
    fake.failing["cuLaunchKernel"] = 700
    with pytest.raises(CudaError, match=r"cuLaunchKernel: CUDA_ERROR_X"):
        Kernel("pack.cu", "pack_weights", {}, threads=256)(1, Two())


@needs_compiler
def test_a_driver_older_than_nvrtc_is_a_reason(
    fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = driver._need_nvrtc()
    monkeypatch.setattr(compiler, "version", (13, 0))
    assert driver.missing() is None
    monkeypatch.setattr(compiler, "version", (14, 0))
    assert "update the driver" in str(driver.missing())
