"""The benchmark for GPUs, rehearsed on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu


def test_a_rehearsal_goes_through_all_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    assert gpu.main(["--rehearse", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "WRONG" not in printed
    assert "FAILED" not in printed
    assert "ok    graphs give the numbers of plain launches" in printed
    found = json.loads(out.read_text())
    names = {(r["cell"], r["name"], r["precision"]) for r in found["results"]}
    assert ("LSTM", "cuDNN", "float16") in names
    assert ("GRU", "ours, graphs", "bfloat16") in names
    table = printed.rsplit("ratios to cuDNN", 1)[1]
    assert sum("ours, graphs" in line for line in table.splitlines()) == 6


def test_what_fails_is_reported_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = gpu.timed

    def some(stage: gpu.Stage, size: Any, cell: str, name: str, precision: str) -> gpu.Result:
        if name == "ours, graphs":
            raise RuntimeError("no such thing")
        return timed(stage, size, cell, name, precision)

    monkeypatch.setattr(gpu, "timed", some)
    monkeypatch.setattr(gpu, "compare", lambda *arguments: ({"out": 0.5}, {"out": 0.01}))
    monkeypatch.setattr(gpu, "where_the_time_goes", lambda stage: None)
    assert gpu.main(["--rehearse"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED LSTM 20,2,3,4 ours, graphs float32: RuntimeError: ['no such thing']" in printed
    assert "wrong: GRU T,B,I,H=(8, 2, 3, 5) padded float32 eager" in printed
    assert "ours, graphs" not in printed.rsplit("ratios to cuDNN", 1)[1].split("failed:")[0]


def test_missed_predictions_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    def result(name: str, precision: str, training: float) -> gpu.Result:
        return gpu.Result("500,8,400,400", "LSTM", name, precision, 1.0, 2.0, training)

    gpu.table(
        [
            result("cuDNN", "float32", 4.0),
            result("ours, graphs", "float32", 8.0),
            result("ours, graphs", "bfloat16", 16.0),
        ]
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if "500,8" in line]
    assert lines[0].startswith("! LSTM")
    assert "bfloat16" in lines[0]
    assert lines[1].split()[-4:] == ["8.90", "8.000", "1.00", "2.00"]


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "finds no GPU" in capsys.readouterr().out
