"""The benchmark for GPUs, on the CPU at tiny sizes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import rows_of
from torch import nn

from benchmarks import gpu

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

LITTLE = ("--device=cpu", "--each=0", "--no-handwriting", "--cells", "LSTM")


@pytest.fixture
def in_this_process(monkeypatch: Patch) -> None:
    monkeypatch.setattr(gpu.Worker, "ask", lambda self, group: gpu.measured(group))


@pytest.mark.usefixtures("in_this_process")
def test_all_parts(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "gpu.csv"
    precisions = ("float32", "bfloat16", "bf16-mixed")
    assert gpu.main([*LITTLE, "--precisions", *precisions, "--csv", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "FAILED" not in printed
    assert "! LSTM" not in printed
    found = rows_of(file)
    kinds = {(r["kind"], r["precision"], r["contestant"]) for r in found}
    assert {(kind, "float32", "layer") for kind in gpu.KINDS} <= kinds
    assert ("padded", "float32", "batch") in kinds
    assert {("padded", p, c) for p in precisions for c in (gpu.CUDNN, "none")} <= kinds
    for row in found:
        assert float(row["ms"]) > 0
        assert float(row["first_call_s"]) > 0
        assert (row["error"] == "") == (row["contestant"] == gpu.CUDNN or row["kind"] == "zoneout")
        if row["contestant"] == gpu.CUDNN:
            assert float(row["ratio"]) == 1


@pytest.mark.usefixtures("in_this_process")
def test_what_is_wrong_is_marked_and_failures_left_out(monkeypatch: Patch, capsys: Capture) -> None:
    made = gpu.made

    def broken(name: str, *arguments: Any) -> nn.Module:
        if name == "rms":
            raise RuntimeError("no such thing")
        return made(name, *arguments)

    errors = gpu.errors
    monkeypatch.setattr(
        gpu, "errors", lambda name, group: (1e-3, 1e-7) if name == "layer" else errors(name, group)
    )
    monkeypatch.setattr(gpu, "made", broken)
    some = ("--precisions", "float32", "--kinds", "padded")
    assert gpu.main([*LITTLE, *some]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("FAILED LSTM 5,3,4,8 padded float32 rms RuntimeE") for line in lines)
    table = [line for line in lines if " LSTM " in line and not line.startswith("FAILED")]
    assert all(line.startswith("!") == (" layer " in line) for line in table)
    assert any(" batch " in line for line in table)


def test_errors_are_those_of_the_contestant(monkeypatch: Patch) -> None:
    group = gpu.Group("GRU", "5,3,4,8", "float32", "packed", ("layer",), "cpu", 0.0)
    found, loop = gpu.errors("layer", group)
    assert 0 < found < 1e-5
    assert 0 < loop < 1e-5
    step = gpu.training_step

    def off(name: str, group: gpu.Group, size: Any, exact: bool = False) -> Any:
        run = step(name, group, size, exact)
        return run if exact else lambda: [a * 1.01 for a in run()]

    monkeypatch.setattr(gpu, "training_step", off)
    found, _ = gpu.errors("layer", group)
    assert found == pytest.approx(0.01, rel=1e-2)


def test_a_process_that_hangs_is_killed(monkeypatch: Patch) -> None:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def asleep(command: list[str], **options: Any) -> subprocess.Popen[str]:
        code = "import time; input(); print('{\"alive\": 1}', flush=True); time.sleep(60)"
        started.append(popen([sys.executable, "-c", code], **options))
        return started[-1]

    monkeypatch.setattr(gpu.subprocess, "Popen", asleep)
    worker = gpu.Worker(patience=0.5)
    group = gpu.Group("LSTM", "5,3,4,8", "float32", "padded", ("layer",), "cpu", 0.0)
    for _ in range(2):
        begin = time.perf_counter()
        alive, failed = worker.ask(group)
        assert alive == {"alive": 1}
        assert failed["why"] == "no answer for 0.5 s"
        assert time.perf_counter() - begin < 20
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_nothing_is_begun_too_late_or_without_a_gpu(monkeypatch: Patch, capsys: Capture) -> None:
    def ask(self: gpu.Worker, group: gpu.Group) -> Iterator[dict[str, Any]]:
        time.sleep(0.02)
        return iter(())

    monkeypatch.setattr(gpu.Worker, "ask", ask)
    assert gpu.main([*LITTLE, "--seconds=0.01"]) == 0
    assert "groups are left out" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "finds no GPU" in capsys.readouterr().out


@pytest.mark.slow
def test_in_a_process_of_its_own(capsys: Capture) -> None:
    assert gpu.main([*LITTLE, "--quick", "--cells", "LSTM"]) == 0
    assert " layer " in capsys.readouterr().out
