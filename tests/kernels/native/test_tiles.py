"""Products of bfloat16 on AMX tiles: the loop on an emulation of the instructions, and its code."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from pathlib import Path

import pytest
import torch

import ln_zoo.kernels.native
from benchmarks.inner_loops import largest, loops
from ln_zoo.kernels.native import build, runtime

FOLDER = Path(ln_zoo.kernels.native.__file__).parent
#: A product with the right factor packed as the library packs it.
SOURCE = """
#include "amx_products.h"
extern "C" void multiply(int64_t M, int64_t N, int64_t K, const bfloat* a, const bfloat* b,
                         bfloat* packed, float* c, int64_t add) {
  pack<bfloat>(b, N, 1, K, N, packed, 1, Center{});
  const int64_t wide = padded<bfloat>(K);
  product<bfloat>(M, N, wide, Left<bfloat>{a, wide, 1}, packed, c, N, add);
}
"""
#: Lanes of vectors as on processors that have tiles, and their instructions in C++.
EMULATED = ("-O1", "-DLN_ZOO_LANES=16", "-DLN_ZOO_EMULATED_TILES", "-Wno-psabi")


def sources(folder: Path, header: str = "amx_products.h", program: str = SOURCE) -> Path:
    """The headers, and a program that includes them, in a folder of their own."""
    for file in build.parts(FOLDER / header):
        shutil.copy(file, folder)
    path = folder / "product.cpp"
    path.write_text(program)
    return path


def compiled(source: Path, *flags: str) -> Path:
    try:
        compiler = build.find_compiler()
    except build.Unavailable as error:
        pytest.skip(error.reason)
    out = source.with_suffix(".out")
    done = subprocess.run(
        [*compiler.command, "-std=c++17", *flags, source, "-o", out],
        capture_output=True,
        text=True,
        check=False,
    )
    if "sapphirerapids" in done.stderr or "amx" in done.stderr:
        pytest.skip(f"{compiler} knows no tiles")
    assert done.returncode == 0, done.stderr
    return out


def library(source: Path, *arguments: type) -> ctypes.CDLL:
    """Its `multiply` takes three sizes and these arguments."""
    found = ctypes.CDLL(str(compiled(source, "-fPIC", "-shared", *EMULATED)))
    found.multiply.argtypes = (*[c_int64] * 3, *arguments, c_int64)
    return found


def multiply(
    found: ctypes.CDLL, a: torch.Tensor, b: torch.Tensor, start: torch.Tensor, add: bool
) -> torch.Tensor:
    """a (M, K) b (K, N), added to what is there or not; rows of a have whole pairs."""
    (m, k), n = a.shape, b.shape[1]
    left = torch.zeros(m, k + k % 2, dtype=torch.bfloat16)
    left[:, :k] = a
    packed = torch.full(((k + 1) * (n + 16),), torch.nan, dtype=torch.bfloat16)
    c = start.clone()
    found.multiply(m, n, k, left.data_ptr(), b.data_ptr(), packed.data_ptr(), c.data_ptr(), add)
    return c


def assert_right(
    multiply: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor, roundings: int
) -> None:
    """Errors are at most those of a given number of float32 roundings."""
    start = torch.randn(len(a), b.shape[1])
    allowed = (a.double().abs() @ b.double().abs() + start.abs()) * roundings * 2**-24
    for add in (False, True):
        exact = a.double() @ b.double() + (start if add else 0)
        error = (multiply(a, b, start, add) - exact).abs()
        assert (error <= allowed).all(), (a.shape, b.shape, add, error.max())


def assert_tiles_right(found: ctypes.CDLL, m: int, k: int, n: int) -> None:
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    assert_right(functools.partial(multiply, found), a, b, k + 1)


def test_products_on_emulated_tiles(tmp_path: Path) -> None:
    found = library(sources(tmp_path), *[c_void_p] * 4)
    assert found.ln_zoo_tiles() == 0  # it compared tiles with vectors, and uses them
    torch.manual_seed(0)
    # Any two of rows, depth and columns meet, but for some of the last two.
    columns = (1, 16, 17, 32, 100)
    for i, m in enumerate((1, 5, 16, 17, 32, 50)):
        for j, k in enumerate((1, 2, 31, 32, 78, 601)):
            assert_tiles_right(found, m, k, columns[(i + j) % 5])


def test_tiles_that_multiply_wrongly_are_not_used(tmp_path: Path) -> None:
    source = sources(tmp_path)
    header = tmp_path / "amx_products.h"
    right = header.read_text()
    header.write_text(right.replace("flushed(even + odd)", "flushed(even)"))
    assert header.read_text() != right
    found = library(source, *[c_void_p] * 4)
    level, text = runtime._TILES[found.ln_zoo_tiles()]
    assert (level, text) == runtime._TILES[-1]
    assert_tiles_right(found, 33, 78, 40)


def test_the_inner_loop_loads_four_tiles_for_four_products(tmp_path: Path) -> None:
    """Compiled for a processor that has them; it need not be this one."""
    flags = ("-O3", "-march=sapphirerapids", "-S")
    assembly = compiled(sources(tmp_path), *flags).read_text()
    found = largest(list(loops(assembly, "tdpbf16ps", "tile")))
    assert found.multiplications == 4
    assert sum(line.startswith("tileloadd") for line in found.lines) == 4
    # Nothing else reads or writes memory.
    others = [line for line in found.lines if not line.startswith(("tileloadd", "lea"))]
    assert not any("(" in line for line in others), found.lines


#: Products of float32 by parts, of a transposed left operand where ``column`` is not 1, with a
#: right operand that is given twice.
PARTS = """
#include "float32_on_tiles.h"
extern "C" int64_t size(int64_t K, int64_t N) { return parts_size(K, N); }
extern "C" void multiply(int64_t M, int64_t N, int64_t K, const float* a, int64_t row,
                         int64_t column, const float* b, int64_t b_row, int64_t b_column,
                         float* packed, float* c, float* again, int64_t add) {
  pack_parts(b, b_row, b_column, K, N, packed, Center{}, 1);
  parts_product(M, K, Left<float>{a, row, column}, {{packed, N, c, N}, {packed, N, again, N}}, add);
}
"""


@pytest.fixture(scope="module")
def by_parts(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = sources(tmp_path_factory.mktemp("parts"), "float32_on_tiles.h", PARTS)
    strided = (c_void_p, c_int64, c_int64)
    found = library(source, *strided, *strided, *[c_void_p] * 3)
    found.size.restype, found.size.argtypes = c_int64, (c_int64, c_int64)
    return found


def multiply_by_parts(
    found: ctypes.CDLL, a: torch.Tensor, b: torch.Tensor, start: torch.Tensor, add: bool
) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    packed, c, again = torch.full((found.size(k, n),), torch.nan), start.clone(), start.clone()
    operands = (a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride(), packed.data_ptr())
    found.multiply(m, n, k, *operands, c.data_ptr(), again.data_ptr(), add)
    torch.testing.assert_close(again, c, rtol=0, atol=0, equal_nan=True)
    return c


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "size", [(1, 1, 1), (17, 33, 40), (32, 64, 32), (140, 30, 70), (33, 530, 5), (82, 40, 33)]
)
def test_float32_by_parts(by_parts: ctypes.CDLL, size: tuple[int, ...], transposed: bool) -> None:
    """For numbers of any size but the smallest."""
    torch.manual_seed(0)
    m, k, n = size
    a, b = torch.randn(m, k) * 10 ** torch.randn(m, 1), torch.randn(k, n)
    if transposed:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    assert_right(functools.partial(multiply_by_parts, by_parts), a, b, k + 2)


def test_parts_of_numbers_that_bfloat16_has_not(by_parts: ctypes.CDLL) -> None:
    """Infinity, NaN and what rounds to infinity reach the results as in float32."""
    torch.manual_seed(0)
    a, b = torch.randn(40, 50), torch.randn(50, 36)
    largest = torch.finfo(torch.float32).max
    a[3, 4], a[5, 6], a[20, 7] = torch.inf, torch.nan, largest
    b[8, 9], b[10, 11], b[12, 13] = -torch.inf, torch.nan, -largest
    a[:, 12], b[7] = 0.25, 0.25
    a[3, 12] = 0.0
    found = multiply_by_parts(by_parts, a, b, torch.zeros(40, 36), False)
    expected = (a.double() @ b.double()).float()
    assert torch.equal(found.isnan(), expected.isnan())
    finite = ~expected.isnan()
    torch.testing.assert_close(found[finite], expected[finite], rtol=1e-4, atol=1e-4)
