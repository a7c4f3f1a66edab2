"""Recurrent weights in blocks on generated kernels."""

from __future__ import annotations

import copy
import ctypes
from typing import Any

import pytest
import torch
from accuracy import error, generic_loop
from engines import names_of
from kernels.generated.generated_case import assert_exact, packed
from kernels.generated.test_calls import SHARES, slow
from layer_results import randomised, results_of
from own_cell import MGU, JointGRU

from ln_zoo.kernels.generated import kernel
from ln_zoo.kernels.native import build, mixed_precision
from ln_zoo.layers import GRU, LSTM, RNN
from ln_zoo.norms import Identity, LayerNorm, RMSNorm, WeightNorm

T, N, E = 5, 4, 3


@pytest.fixture(autouse=True)
def all_on_generated(chosen: list[Any]) -> Any:
    torch.manual_seed(0)
    yield
    assert "generated" in names_of(chosen)


def gru(hidden: int = 6, blocks: int = 3, **options: Any) -> Any:
    return randomised(GRU(E, hidden, blocks=blocks, **({"norm": LayerNorm()} | options)))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_layers_directions_states_and_resets(layout: str) -> None:
    layer = gru(num_layers=2, bidirectional=True)
    x, reset, lengths = torch.randn(T, N, E), torch.rand(T, N) < 0.3, [5, 2, 4, 4]
    x, reset = (packed(a, lengths) if layout == "packed" else a for a in (x, reset))
    assert_exact(layer, x, [torch.randn(4, N, 6)], reset)


@pytest.mark.parametrize("training", [True, False])
def test_noise(training: bool) -> None:
    options: dict[str, Any] = {"zoneout": (0.3, 0.0), "recurrent_dropout": 0.3}
    layer = LSTM(E, 6, blocks=2, norm=LayerNorm(), weight_dropout=0.3, **options)
    assert_exact(randomised(layer).train(training), torch.randn(T, N, E))


@pytest.mark.parametrize("widths", [(66, 2), *slow((5, 5), (136, 17))])
@pytest.mark.parametrize("layer", [GRU, *slow(LSTM, RNN)])
def test_widths(layer: Any, widths: tuple[int, int]) -> None:
    hidden, blocks = widths
    assert_exact(randomised(layer(E, hidden, blocks=blocks, norm=RMSNorm())), torch.randn(T, N, E))


@pytest.mark.parametrize(
    "norm",
    [LayerNorm(per_block=True), *slow(Identity(), RMSNorm(per_block=True), WeightNorm())],
)
def test_norms(norm: Any) -> None:
    assert_exact(gru(24, 4, norm=norm), torch.randn(T, N, E))


def test_slices_of_gates() -> None:
    assert_exact(randomised(MGU(E, 8, blocks=4, norm=LayerNorm())), torch.randn(T, N, E))
    layer = randomised(JointGRU(E, 8, blocks=4, bias=False, norm=LayerNorm(eps=1e-3)))
    assert_exact(layer, torch.randn(T, N, E))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("examples", [1, 2, 40])
def test_threads_and_chunks(threads: int, examples: int) -> None:
    torch.set_num_threads(threads)
    layer = randomised(GRU(20, 48, blocks=4, norm=LayerNorm()), 0.1)
    x = torch.randn(40, examples, 20)
    assert_exact(layer, x)
    with torch.no_grad():
        assert torch.equal(layer(x)[0], layer(x)[0])


def test_blocks_as_wide_as_tiles() -> None:
    """Products of 40 rows by 128 columns run on tiles of AMX, where there are some."""
    layer = randomised(GRU(E, 256, blocks=2, norm=LayerNorm()), 0.02)
    assert_exact(layer, torch.randn(T, 40, E))


@pytest.mark.parametrize("shares", [2, 3])
def test_threads_that_share_the_blocks(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(shares)
    layer, x = gru(80, 4, zoneout=0.2), torch.randn(9, 2, E)
    torch.manual_seed(0)
    alone, asked = layer(x)[0], []

    def rule(*numbers: int) -> int:
        asked.append(numbers)
        return shares

    callback = SHARES(rule)
    product_functions = kernel.product_functions()
    monkeypatch.setattr(product_functions, "shares", ctypes.cast(callback, ctypes.c_void_p))
    torch.manual_seed(0)
    together = layer(x)[0]
    assert asked[0] == (3 * 80 * 20, 80, 2, shares)
    assert torch.equal(alone, together)
    assert_exact(layer.eval(), x)


def test_products_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "bfloat16_pays", lambda: True)
    monkeypatch.setitem(mixed_precision.MIN_MULTIPLICATIONS, "layers", 0)
    layer, x = gru(40, 4), torch.randn(6, 5, E)
    with torch.autocast("cpu", torch.bfloat16):
        found = results_of(layer, x)
        with generic_loop():
            loop = results_of(layer, x)
    with generic_loop():
        expected = results_of(copy.deepcopy(layer).double(), x.double())
    for name, a in expected.items():
        assert error(found[name], a) < max(2 * error(loop[name], a), 0.01), name


def test_frozen_weights_and_double_backward() -> None:
    layer = gru()
    layer.weight_hh_l0.requires_grad_(False)
    x = torch.randn(T, N, E, requires_grad=True)
    out, _ = layer(x)
    (d,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    found = torch.autograd.grad(d.square().sum(), x)
    with generic_loop():
        out, _ = layer(x)
        (d,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        expected = torch.autograd.grad(d.square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
