"""The contestants of ``benchmarks.draw`` compute the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import draw as benchmark
from benchmarks.draw import Eager, Size

SIZE = Size(T=3, N=2, side=9, H=16, Z=4, read=2, write=3)


@pytest.mark.parametrize("norm", benchmark.NORMS)
def test_ours_and_the_loop_compute_the_same(norm: str) -> None:
    torch.manual_seed(0)
    model = Eager(SIZE, norm).double()
    x = (torch.rand(2, 9, 9) < 0.3).double()
    noise = torch.randn(3, 2, 4).double()
    results = []
    for forward in (benchmark.ours, Eager.forward):
        model.zero_grad()
        loss = forward(model, x, noise)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


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
