"""Bad input and poor machines: an error or another engine, never a hang."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from engines import names_of, note_kernels
from outcomes import Problem, assert_right, devices, gpu, limited_to
from torch import nn

from ln_zoo.layers import GRU, LSTM, RNN
from ln_zoo.norms import LayerNorm
from ln_zoo.ops import registry


@devices
@pytest.mark.parametrize("cls", [LSTM, GRU, RNN])
@pytest.mark.parametrize("norm", [None, LayerNorm()])
def test_tensors_on_different_devices(device: str, cls: type[nn.Module], norm: Any) -> None:
    other = "cpu" if device == "cuda" else "meta"
    layer = cls(6, 24, norm=norm).to(device)
    with pytest.raises((RuntimeError, ValueError), match="device"):
        layer(torch.randn(5, 3, 6, device=other))
    state = torch.randn(1, 3, 24, device=other)
    with pytest.raises((RuntimeError, ValueError), match="device"):
        layer(torch.randn(5, 3, 6, device=device), (state, state) if cls is LSTM else state)
    # It goes on working.
    assert layer(torch.randn(5, 3, 6, device=device))[0].isfinite().all()


@devices
@pytest.mark.parametrize("hidden", [1, 7, 520, 1100])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_sizes_at_the_ends_of_the_tables(device: str, hidden: int, precision: str) -> None:
    """Beyond the largest H of an engine another one runs."""
    for norm in ("layer", "none"):
        assert_right(Problem("LSTM", norm, precision, sizes=(4, 3, 5, hidden)), device, "1")


@devices
def test_a_row_that_no_kernel_holds(device: str) -> None:
    assert_right(Problem("RNN_TANH", "layer", sizes=(3, 2, 5, 4100)), device, "1")


@devices
@pytest.mark.parametrize("sizes", [(1, 1, 1, 24), (1, 300, 3, 24), (2000, 1, 1, 24)])
def test_extreme_shapes(device: str, sizes: tuple[int, int, int, int]) -> None:
    assert_right(Problem("GRU", "layer", sizes=sizes), device, "1")


@devices
def test_no_examples_and_no_steps(device: str) -> None:
    layer = LSTM(6, 24, norm=LayerNorm()).to(device)
    with pytest.raises(RuntimeError, match="sequence length"):
        layer(torch.randn(0, 3, 6, device=device))
    output, _ = layer(torch.randn(5, 0, 6, device=device))
    assert output.shape == (5, 0, 24)


@devices
def test_not_a_number_stays_in_its_row(device: str) -> None:
    layer = LSTM(6, 24, norm=LayerNorm()).to(device)
    x = torch.randn(20, 5, 6, device=device)
    expected, _ = layer(x)
    x[7, 2] = float("nan")
    found, _ = layer(x)
    others = [0, 1, 3, 4]
    torch.testing.assert_close(found[:, others], expected[:, others], rtol=1e-5, atol=1e-5)
    assert found[7:, 2].isnan().all()
    assert found[:7, 2].isfinite().all()


@devices
def test_no_card_is_visible(device: str) -> None:
    """As a user has it who hides the card: everything runs on the CPU."""
    code = (
        "import torch, ln_zoo; assert not torch.cuda.is_available();"
        "layer = ln_zoo.LSTM(6, 24, norm=ln_zoo.LayerNorm());"
        "layer(torch.randn(5, 3, 6))[0].sum().backward(); print('done')"
    )
    command = "from ln_zoo.cli import main; main(['kernels']) or print('done')"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "LN_ZOO_KERNELS": "1"}
    for program in (code, command):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=80,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("done\n")


@gpu
def test_nvrtc_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step kernels run, and one line of the log says why."""
    from ln_zoo.kernels.cluster import driver, engine

    check: Any = engine._unsupported_gpu
    cached = check if hasattr(check, "cache_clear") else check.__wrapped__
    cached.cache_clear()
    monkeypatch.setattr(driver, "_nvrtc", lambda: "NVRTC cannot be loaded: there is none")
    registry._log.cache_clear()
    try:
        picked = note_kernels(monkeypatch)
        with caplog.at_level(logging.INFO, "ln_zoo"):
            assert_right(Problem("LSTM", "layer"), "cuda", "1")
        assert names_of(picked)[0] == "triton"
        said = [r.getMessage() for r in caplog.records if "NVRTC" in r.getMessage()]
        assert len(said) == 1, said
    finally:
        cached.cache_clear()


@gpu
@pytest.mark.parametrize("kernels", ["1", "cluster", "triton", "torch"])
def test_a_full_card(kernels: str) -> None:
    """Memory runs out within a layer: torch's error, and the next call is right."""
    norm = "none" if kernels == "torch" else "layer"
    problem = Problem("LSTM", norm, sizes=(64, 64, 6, 256))
    layer = problem.layer().cuda()
    x = torch.randn(4000, 64, 6, device="cuda")
    torch.cuda.empty_cache()
    used = torch.cuda.memory_reserved() + (96 << 20)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(used / total)
    try:
        with limited_to(kernels), pytest.raises(torch.cuda.OutOfMemoryError):
            layer(x)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
    assert_right(problem, "cuda", kernels)
