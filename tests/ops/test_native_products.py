"""The C++ library's own pieces: packing, products, functions, memory."""

from __future__ import annotations

import pytest
import torch

from ln_zoo.layers import LSTM
from ln_zoo.norms import LayerNorm
from ln_zoo.ops.engine import centred
from ln_zoo.ops.native import build, runtime
from ln_zoo.ops.native.runtime import NativeProducts
from ln_zoo.ops.spec import Rows

needs_native = pytest.mark.skipif(
    runtime.trouble() is not None, reason=f"no native kernels: {runtime.trouble()}"
)


def test_where_there_is_a_compiler_there_are_native_kernels() -> None:
    """Else every test of theirs would be left out without a word."""
    try:
        build.find_compiler()
    except build.Unavailable as error:
        pytest.skip(error.reason)
    assert runtime.trouble() is None


SIZES = [(16, 16, 16), (17, 33, 65), (1, 16, 16), (100, 129, 48), (37, 1100, 257), (300, 20, 1000)]


@needs_native
@pytest.mark.parametrize("rows", [Rows(), Rows(True, True, 1e-5, (2, 1))])
@pytest.mark.parametrize(("m", "k", "n"), SIZES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_products_are_those_of_torch_in_float64(
    m: int, k: int, n: int, rows: Rows, threads: int
) -> None:
    """Every product of a direction; weights are centred on the way."""
    torch.manual_seed(0)
    k = k // 3 * 3 + 3  # three gates
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        w, x, d = torch.randn(k, n) + 3.0, torch.randn(m, n), torch.randn(m, k)
        exact = centred(w.double(), rows)

        def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
            assert (found.double() - wanted).norm() <= 2e-6 * wanted.norm() + 1e-9

        out = torch.full((m, k), torch.nan)
        NativeProducts(w, rows).terms(x, out)
        close(out, x.double() @ exact.t())
        dx = torch.full((m, n), torch.nan)
        NativeProducts(w, rows).input_gradient(d, dx)
        close(dx, d.double() @ exact)
        total = torch.full((k, n), torch.nan)
        NativeProducts(w, rows).add_weight_gradient(d, x, total, first=True)
        NativeProducts(w, rows).add_weight_gradient(d, x, total, first=False)
        close(total, 2 * d.double().t() @ x.double())
    finally:
        torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_call_gives_the_same_bits_and_threads_matter_to_rounding_alone(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    layer, x = LSTM(20, 37, norm=LayerNorm(gain=0.5)).to(dtype), torch.randn(9, 5, 20).to(dtype)
    before = torch.get_num_threads()

    def run(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        layer.zero_grad()
        output, _ = layer(x)
        output.float().square().sum().backward()
        return [output.detach(), *(p.grad.clone() for p in layer.parameters())]

    try:
        one, again, two, five = run(1), run(1), run(2), run(5)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for other in (two, five):
        for a, b in zip(one, other, strict=True):
            assert (a - b).norm() <= limit * a.norm()
    assert torch.equal(one[0], two[0])  # a case is one thread's own


@needs_native
def test_nan_reaches_its_own_case_alone() -> None:
    layer, x = LSTM(20, 37, norm=LayerNorm()), torch.randn(4, 3, 20)
    x[1, 2, 5] = torch.nan
    output, _ = layer(x)
    assert output[1:, 2].isnan().all()
    assert not output[:, :2].isnan().any()
    assert not output[0].isnan().any()
