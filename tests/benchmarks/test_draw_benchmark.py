"""The contestants of ``benchmarks.draw`` compute the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accuracy import assert_as_accurate, moved
from engines import needs_native
from torch import Tensor

from benchmarks import draw as benchmark
from benchmarks.draw import Eager, Size

SIZE = Size(T=3, N=2, side=9, H=16, Z=4, read=2, write=3)


@needs_native
@pytest.mark.parametrize("norm", benchmark.NORMS)
def test_ours_and_the_loop_compute_the_same(norm: str) -> None:
    torch.manual_seed(0)
    model = Eager(SIZE, norm)
    x, noise = (torch.rand(2, 9, 9) < 0.3).float(), torch.randn(3, 2, 4)

    def run(forward: Callable[..., Tensor], dtype: torch.dtype, k: int = 0) -> dict[str, Tensor]:
        """Loss and gradients, of parameters with their last bits moved."""
        twin = copy.deepcopy(model).to(dtype)
        for parameter in twin.parameters():
            parameter.data = moved(parameter.data, k)
        loss = forward(twin, x.to(dtype), noise.to(dtype))
        loss.backward()
        return {"loss": loss.detach()} | {n: p.grad for n, p in twin.named_parameters()}

    ours, exact = run(benchmark.ours, torch.float32), run(Eager.forward, torch.float64)
    assert_as_accurate(ours, exact, lambda k: run(Eager.forward, torch.float32, k))


def test_it_runs_and_writes_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--steps=2", "--batch=2", "--hidden=16", "--latents=4", "--rounds=1"]
    table = tmp_path / "draw.csv"
    benchmark.main([*sizes, "--no-peaks", f"--csv={table}"])
    rows = table.read_text().splitlines()
    assert len(rows) == 1 + len(benchmark.contestants(SIZE))
    assert any("eager none bf16-mixed" in row for row in rows)
    assert "training step, T 2, N 2, H 16, Z 4" in capsys.readouterr().out
    benchmark.main([*sizes, "--profile"])
    assert "lstm_back" in capsys.readouterr().out
