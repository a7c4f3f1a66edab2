"""Benchmarks of handwriting, order embeddings, packed sequences and exported files run, and their
contestants compute the same."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accuracy import assert_as_accurate, moved

from benchmarks import (
    contestants,
    export,
    handwriting,
    lightning,
    memory,
    order_embedding,
    packed,
    policies,
    steps,
    threads,
)
from benchmarks.contestants import Size


def rows_of(table: Path) -> list[dict[str, Any]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("available", [True, False])
def test_handwriting_runs_and_writes_its_table(
    available: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "AVAILABLE", available)
    peaks = iter((300, 200, 100))
    monkeypatch.setattr(memory, "in_new_process", lambda *_: next(peaks))
    table = tmp_path / "handwriting.csv"
    sizes = ["--steps=22", "--batch=2", "--hidden=8", "--rounds=1"]
    assert handwriting.main([*sizes, f"--csv={table}"]) == 0
    found = rows_of(table)
    assert [row["contestant"] for row in found] == [*handwriting.NORMS, handwriting.BASELINE]
    expected = ["3.0", "2.0", "1.0"] if available else [""] * 3
    assert [row["peak_ratio"] for row in found] == expected
    assert "training step, T 22, N 2, H 8" in capsys.readouterr().out


@pytest.mark.skipif(not memory.AVAILABLE, reason="the system does not tell peak memory")
def test_handwriting_prints_the_peak_of_one_contestant() -> None:
    arguments = ["--steps=200", "--batch=4", "--hidden=64", "--threads=1", "--peak=none"]
    found = memory.in_new_process("benchmarks.handwriting", arguments, 1)
    # At the least, three layers keep their states.
    assert found > 3 * 2 * 200 * 4 * 64 * 4


def test_order_embedding_at_once_is_the_models_penalty(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = order_embedding.OrderEmbedding(["a", "b"], hidden_size=9)
    s, v = torch.rand(5, 9), torch.rand(7, 9)
    exact = order_embedding.all_at_once(s.double(), v.double())
    assert_as_accurate(
        {"penalties": model.penalties(s, v)},
        {"penalties": exact},
        lambda k: {"penalties": order_embedding.all_at_once(moved(s, k), moved(v, k))},
    )
    table = tmp_path / "order.csv"
    sizes = ["--batch=3", "--tokens=4", "--words=20", "--hidden=8", "--rounds=1"]
    assert order_embedding.main([*sizes, f"--csv={table}"]) == 0
    found = rows_of(table)
    assert [row["contestant"] for row in found] == [
        "encoder, none",
        "encoder, LayerNorm",
        "loss",
        "loss, all differences at once",
    ]
    assert float(found[0]["wall_ratio"]) == 1


@pytest.mark.parametrize("busy", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_threads_are_timed_beside_busy_processes(
    busy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--models=quickstart", "--settings=1 thread", "--rounds=1", "--seconds=0.01"]
    threads.main([*quick, f"--busy={busy}"])
    last = capsys.readouterr().out.splitlines()[-1]
    name, processes, milliseconds = last.strip("| ").split(" | ")
    assert (name, processes) == ("quickstart", busy)
    assert float(milliseconds) > 0


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_packed_contestants_read_the_same_batch(cell: str) -> None:
    size = Size.parse("6,3,5,4")
    long = packed.lengths(size)
    assert long.max() == size.T
    assert long.min() >= 1
    real = torch.arange(size.T).unsqueeze(1) < long
    ours, theirs = (
        contestants.layer(name, cell, size, False) for name in ("Identity", contestants.BASELINE)
    )
    ours.module.load_state_dict(theirs.module.state_dict())
    whole = packed.call(theirs, size, "infer", False)().view(size.T, size.B, size.H)
    for contestant in (ours, theirs):
        found = packed.call(contestant, size, "infer", True)()
        assert found.shape == (int(long.sum()), size.H)
        # Packed in the order of time, and within a step longest sequences first.
        order = long.argsort(descending=True, stable=True)
        torch.testing.assert_close(found, whole[:, order][real[:, order]])


def test_packed_runs_and_writes_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "packed.csv"
    packed.main(
        [
            "--sizes",
            "5,2,3,4",
            "--cells=LSTM",
            f"--threads={torch.get_num_threads()}",
            "--rounds=1",
            f"--csv={table}",
        ]
    )
    found = rows_of(table)
    assert [(row["mode"], row["contestant"]) for row in found] == [
        (mode, name) for mode in packed.MODES for name in packed.CONTESTANTS
    ]
    assert "| train | LSTM | 5,2,3,4 |" in capsys.readouterr().out


def test_export_table_keeps_the_rows_that_it_has(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    table = tmp_path / "export.csv"
    export.table(["mlp.layernorm-digits"], table)
    once = table.read_text()
    assert {row["format"] for row in rows_of(table)} == set(export.FORMATS)
    export.table(["mlp.layernorm-digits"], table)
    assert table.read_text() == once


def test_export_times_steps_of_every_contestant() -> None:
    pytest.importorskip("onnxruntime")
    found = list(export.steps([(1, 4)], rounds=1, seconds=1.0))
    names = ["torch", "LayerNorm, ln_zoo", "LayerNorm, onnxruntime", "none, onnxruntime"]
    assert [(row["cell"], row["contestant"]) for row in found] == [
        (cell, name) for cell in ("LSTM", "GRU") for name in names
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("library", "package"), [("sb3", "sb3_contrib"), ("torchrl", "torchrl")])
def test_policies_are_timed(library: str, package: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(package, reason=f"needs the package {package}")
    policies.main([library, "--rounds=1", "--seconds=1"])
    rows = [line for line in capsys.readouterr().out.splitlines() if "layer norm" in line]
    assert rows
    assert all(float(row.split("|")[2]) > 0 for row in rows)


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_steps_prints_a_table_by_rows_and_units(
    cell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps.main([f"--cells={cell}", "--rows", "1", "5", "--units", "8", "16", "--rounds=1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[:2] for line in lines if "Cell" in line] == [
        [f"{cell}Cell", f" {mode}"] for mode in steps.MODES
    ]
    tables = [line.split("|")[1:-1] for line in lines if line.startswith("|")]
    assert [row[0].strip() for row in tables] == ["rows", "---:", "1", "5"] * 2
    assert [a.strip() for a in tables[0][1:]] == ["H = 8", "H = 16"]


def test_trainer_is_timed_beside_a_bare_loop(capsys: pytest.CaptureFixture[str]) -> None:
    lightning.main(["digits", "--seconds", "0.1"])
    line = r"digits: fit [\d.]+ steps/s, bare loop [\d.]+ steps/s, ratio [\d.]+"
    assert re.search(line, capsys.readouterr().out)
