"""The C++ library's own pieces: packing, products, functions, memory."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from ctypes import c_int64
from pathlib import Path

import pytest
import torch
from accuracy import assert_as_accurate, assert_within, generic_loop, limits, moved
from engines import needs_native

from ln_zoo.kernels.ctypes_arguments import Packed
from ln_zoo.kernels.generated.kernel import product_functions
from ln_zoo.kernels.native import build, runtime
from ln_zoo.kernels.native.runtime import NativeProducts, shares_of_units
from ln_zoo.layers import LSTM
from ln_zoo.norms import LayerNorm
from ln_zoo.ops.engines.base import centred
from ln_zoo.ops.spec import Rows


def test_where_there_is_a_compiler_there_are_native_kernels() -> None:
    """Else every test of theirs would be left out without a word."""
    try:
        build.find_compiler()
    except build.Unavailable as error:
        pytest.skip(error.reason)
    assert runtime.unavailable_reason() is None


SIZES = [(16, 16, 16), (17, 33, 65), (1, 16, 16), (100, 129, 48), (37, 1100, 257), (300, 20, 1000)]


@needs_native
@pytest.mark.parametrize("rows", [Rows(), Rows(True, True, 1e-5, (2, 1))])
@pytest.mark.parametrize(
    ("m", "k", "n", "threads"), [(*size, 1 + i % 3) for i, size in enumerate(SIZES)]
)
def test_products_are_those_of_torch_in_float64(
    m: int, k: int, n: int, rows: Rows, threads: int
) -> None:
    """Every product of a direction; weights are centred on the way."""
    torch.manual_seed(0)
    k = k // 3 * 3 + 3  # three gates
    torch.set_num_threads(threads)
    w, x, d = torch.randn(k, n) + 3.0, torch.randn(m, n), torch.randn(m, k)

    def plain(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        weight, a, b = centred(w.to(dtype), rows), x.to(dtype), d.to(dtype)
        return {"out": a @ weight.t(), "dx": b @ weight, "total": 2 * (b.t() @ a)}

    found = {
        "out": torch.full((m, k), torch.nan),
        "dx": torch.full((m, n), torch.nan),
        "total": torch.full((k, n), torch.nan),
    }
    NativeProducts(w, rows, len(x)).terms(x, found["out"])
    NativeProducts(w, rows, len(x)).input_gradient(d, found["dx"])
    NativeProducts(w, rows, len(x)).add_weight_gradient(d, x, found["total"], first=True)
    NativeProducts(w, rows, len(x)).add_weight_gradient(d, x, found["total"], first=False)
    assert_as_accurate(found, plain(torch.float64), lambda _: plain(torch.float32))


@needs_native
@pytest.mark.parametrize("k", [7, 40])
def test_packed_matrices_may_begin_anywhere(k: int) -> None:
    """Some instructions end the process where a vector is not aligned."""
    torch.manual_seed(0)
    a, b = torch.randn(20, k), runtime.packed("right", torch.randn(k, 75))
    expected = torch.empty(20, 75)
    runtime.multiply(a, b, expected, add=False)
    numbers = b.memory.numel()
    for offset in range(1, 16):
        memory = torch.empty(numbers + offset)[offset:].copy_(b.memory)
        found = torch.empty(20, 75)
        runtime.multiply(a, Packed(memory, b.shape), found, add=False)
        assert torch.equal(found, expected)


@needs_native
def test_the_library_loads_whatever_memory_it_gets() -> None:
    """It tries out a product of bfloat16 on memory from malloc, which begins at 16 bytes."""
    code = """
import ctypes, os, sys, torch
for part in range(4):
    child = os.fork()
    if not child:
        kept = ctypes.CDLL(None).malloc(40_000 + 16 * part)
        ctypes.CDLL(sys.argv[1]).ln_zoo_tiles()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, part
"""
    path = str(build.status(build=True).path)
    subprocess.run([sys.executable, "-c", code, path], check=True)


#: The third arena begins after the first has ended, and while the second is alive.
ARENAS = """
#include <cstdio>
#include "scratch.h"
int main() {
  auto first = std::make_unique<Arena>(), second = std::make_unique<Arena>();
  float *a = first->take(100), *b = second->take(100);
  first.reset();
  Arena third;
  float* c = third.take(100);
  std::printf("apart %d %d, reused %d", a != b, c != b, c == a);
}
"""


@needs_native
def test_live_arenas_have_memory_of_their_own(tmp_path: Path) -> None:
    source, program = tmp_path / "arenas.cpp", tmp_path / "arenas"
    source.write_text(ARENAS)
    folder = Path(build.__file__).parent
    compiler = build.find_compiler().command
    subprocess.run([*compiler, "-std=c++17", f"-I{folder}", source, "-o", program], check=True)
    done = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "apart 1 1, reused 1"


@pytest.mark.parametrize(
    ("rows", "saved", "expected"),
    [(100, True, 256), (3200, True, 320), (3200, False, 1600), (10**6, True, 2048)],
)
def test_chunks_of_a_long_call_are_long(rows: int, saved: bool, expected: int) -> None:
    """A tenth of the rows where the backward's needs are kept of all, else half of them."""
    w = torch.randn(8, 3)
    assert NativeProducts(w, Rows(), rows).rows_of_chunk(saved) == expected


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_call_gives_the_same_bits_and_threads_matter_to_rounding_alone(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    layer, x = LSTM(20, 37, norm=LayerNorm(gain=0.5)).to(dtype), torch.randn(9, 5, 20).to(dtype)

    def run(threads: int, k: int = 0) -> dict[str, torch.Tensor]:
        torch.set_num_threads(threads)
        layer.zero_grad()
        output, _ = layer(moved(x, k))
        output.float().square().sum().backward()
        return {"out": output.detach(), **{n: p.grad.clone() for n, p in layer.named_parameters()}}

    one, again, two, five = run(1), run(1), run(2), run(5)
    with generic_loop():
        allowed = limits(one, lambda k: run(1, k))
    assert all(torch.equal(one[name], again[name]) for name in one)
    for other in (two, five):
        assert_within(other, one, allowed)
    assert torch.equal(one["out"], two["out"])  # an example is one thread's own


@needs_native
@pytest.mark.parametrize(
    ("hidden", "examples", "noise", "shares"),
    [
        (32, 1, False, 1),  # 16 KiB: within any core's cache
        (32, 2, False, 1),
        (2400, 64, False, 2),  # 88 MiB: more than the caches hold
        (2400, 65, False, 1),
        (2400, 64, True, 1),
        (24, 2, False, 1),
        (1200, 16, False, 2),  # 22 MiB: with up to eight examples per thread
        (1200, 17, False, 1),
    ],
)
def test_threads_share_the_units_of_large_weights(
    hidden: int, examples: int, noise: bool, shares: int
) -> None:
    torch.set_num_threads(2)
    assert shares_of_units(4, hidden, examples, noise) == shares


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="the size of a core's cache is asked of glibc")
def test_threads_share_the_units_where_each_part_fits_its_cache() -> None:
    torch.set_num_threads(2)
    level_2_cache = 191  # glibc's _SC_LEVEL2_CACHE_SIZE, which Python has no name for
    size = os.sysconf(level_2_cache)
    if size <= 0:
        size = 1 << 20
    hidden = math.isqrt(3 * size // 32)  # 1.5 times what one core's cache holds
    assert shares_of_units(4, hidden, 16, False) == 2
    assert shares_of_units(4, hidden, 17, False) == 1
    hidden = math.isqrt(size // 32)  # half of it
    assert shares_of_units(4, hidden, 1, False) == 2  # a thread would have no example
    assert shares_of_units(4, hidden, 2, False) == 1
    torch.set_num_threads(64)
    assert shares_of_units(4, hidden, 1, False) < 64  # small shares would mostly wait


@needs_native
def test_columns_are_shared_by_few_examples_with_large_weights() -> None:
    of_four = ctypes.CFUNCTYPE(c_int64, *[c_int64] * 4)
    shares = of_four(product_functions().shares)  # of weights, units, examples and threads
    assert shares(2**24, 2048, 8, 2) == 2
    assert shares(2**24, 2048, 8, 1) == 1
    assert shares(2**24, 2048, 65, 2) == 1
    assert shares(2**10, 16, 8, 2) == 1
