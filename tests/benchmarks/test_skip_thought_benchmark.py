"""The contestants of ``benchmarks.skip_thought`` compute the same, as far as they should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import skip_thought as benchmark

SIZE = (3, 8, 4, 20)


def test_without_a_norm_our_layers_are_torchs() -> None:
    batch = benchmark.make_batch(3, 20)
    models = [benchmark.build(name, *SIZE[1:]).double() for name in ("none", benchmark.BASELINE)]
    assert type(models[1].encoder) is torch.nn.GRU
    models[1].load_state_dict(models[0].state_dict())
    losses = [model.loss(batch) for model in models]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    for a, b in zip(*(torch.autograd.grad(*pair) for pair in zip(
        losses, [list(m.parameters()) for m in models], strict=True
    )), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b)


def test_it_runs_and_writes_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch=3", "--hidden=8", "--embedding=4", "--words=20", "--rounds=1"]
    table = tmp_path / "skip_thought.csv"
    benchmark.main([*sizes, f"--csv={table}"])
    assert len(table.read_text().splitlines()) == 1 + len(benchmark.NORMS)
    assert "training step, N 3, D 8, E 4, V 20" in capsys.readouterr().out
    benchmark.main([*sizes, "--shares", "--bfloat16"])
    out = capsys.readouterr().out
    assert all(part in out for part in ("recurrence", "input projections", "bfloat16"))
