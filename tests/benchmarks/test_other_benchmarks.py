"""Benchmarks of handwriting, order embeddings, packed sequences and exported files run, and their
contestants compute the same."""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from accuracy import Results, assert_as_accurate, moved
from cli_support import rows_of
from engines import needs_native

from benchmarks import (
    caption_cca,
    checkouts,
    contestants,
    draw,
    export,
    first_call,
    handwriting,
    lightning,
    memory,
    options,
    order_embedding,
    own_cells,
    packed,
    policies,
    skip_thought,
    speed_chart,
    steps,
    threads,
    updates,
)
from benchmarks.contestants import Size
from ln_zoo.data import SyntheticScenes
from ln_zoo.norms import RMSNorm
from ln_zoo.reproduction.claims import claims

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


@pytest.mark.parametrize("available", [True, False])
def test_handwriting_runs_and_writes_its_table(
    available: bool, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(memory, "AVAILABLE", available)
    peaks = iter((300, 200, 100))
    monkeypatch.setattr(memory, "in_new_process", lambda *_: next(peaks))
    table = tmp_path / "handwriting.csv"
    sizes = ["--steps=22", "--batch=2", "--hidden=8", "--rounds=1"]
    assert handwriting.main([*sizes, f"--csv={table}"]) == 0
    found = rows_of(table)
    assert [row["contestant"] for row in found] == [*handwriting.NORMS, handwriting.BASELINE]
    expected = ["3", "2", "1"] if available else [""] * 3
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

    def at_once(s: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"penalties": order_embedding.all_at_once(s, v)}

    found, exact = {"penalties": model.penalties(s, v)}, at_once(s.double(), v.double())
    assert_as_accurate(found, exact, lambda k: at_once(moved(s, k), moved(v, k)))
    table = tmp_path / "order.csv"
    sizes = ["--batch=3", "--tokens=4", "--words=20", "--hidden=8", "--rounds=1"]
    assert order_embedding.main([*sizes, f"--csv={table}"]) == 0
    found = rows_of(table)
    names = ["encoder, none", "encoder, LayerNorm", "loss", "loss, all differences at once"]
    assert [row["contestant"] for row in found] == names
    assert float(found[0]["wall_ratio"]) == 1


@pytest.mark.parametrize("busy", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_threads_are_timed_beside_busy_processes(busy: str, capsys: Capture) -> None:
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
    names = ("Identity", contestants.BASELINE)
    ours, theirs = (contestants.layer(name, cell, size, False) for name in names)
    ours.module.load_state_dict(theirs.module.state_dict())
    whole = packed.call(theirs, size, "infer", False)().view(size.T, size.B, size.H)
    for contestant in (ours, theirs):
        found = packed.call(contestant, size, "infer", True)()
        assert found.shape == (int(long.sum()), size.H)
        # Packed in the order of time, and within a step longest sequences first.
        order = long.argsort(descending=True, stable=True)
        torch.testing.assert_close(found, whole[:, order][real[:, order]])


def test_packed_runs_and_writes_its_table(tmp_path: Path, capsys: Capture) -> None:
    table = tmp_path / "packed.csv"
    few = ["--sizes", "5,2,3,4", "--cells=LSTM", f"--threads={torch.get_num_threads()}"]
    packed.main([*few, "--rounds=1", f"--csv={table}"])
    expected = [(mode, name) for mode in packed.MODES for name in packed.CONTESTANTS]
    assert [(row["mode"], row["contestant"]) for row in rows_of(table)] == expected
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
    given = argparse.Namespace(rounds=1, seconds=1.0)
    found = list(export.steps([(1, 4)], given))
    names = ["torch", "LayerNorm, ln_zoo", "LayerNorm, onnxruntime", "none, onnxruntime"]
    expected = [(cell, name) for cell in ("LSTM", "GRU") for name in names]
    assert [(row["cell"], row["contestant"]) for row in found] == expected


@pytest.mark.slow
@pytest.mark.parametrize(("library", "package"), [("sb3", "sb3_contrib"), ("torchrl", "torchrl")])
def test_policies_are_timed(library: str, package: str, capsys: Capture) -> None:
    pytest.importorskip(package, reason=f"needs the package {package}")
    policies.main([library, "--rounds=1", "--seconds=1"])
    rows = [line for line in capsys.readouterr().out.splitlines() if "layer norm" in line]
    assert rows
    assert all(float(row.split("|")[2]) > 0 for row in rows)


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_steps_prints_a_table_by_rows_and_units(cell: str, capsys: Capture) -> None:
    steps.main([f"--cells={cell}", "--rows", "1", "5", "--units", "8", "16", "--rounds=1"])
    lines = capsys.readouterr().out.splitlines()
    titles = [line.split(",")[:2] for line in lines if "Cell" in line]
    assert titles == [[f"{cell}Cell", f" {mode}"] for mode in steps.MODES]
    tables = [line.split("|")[1:-1] for line in lines if line.startswith("|")]
    assert [row[0].strip() for row in tables] == ["rows", "---", "1", "5"] * 2
    assert [a.strip() for a in tables[0][1:]] == ["H = 8", "H = 16"]


def test_checkouts_are_timed_in_processes_of_their_own(capsys: Capture) -> None:
    options = ["--sizes=1,2,3,5", "--rounds=1", "--seconds=0.01", "--processes=1"]
    assert checkouts.main([str(Path(__file__).parents[2]), *options]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"GRUCell LayerNorm 1,2,3,5 infer \| [\d.]+ \| \d\.\d{3} \(", printed)
    assert "Median of 24" in printed


def test_trainer_is_timed_beside_a_bare_loop(capsys: Capture) -> None:
    lightning.main(["digits", "--seconds", "0.1"])
    line = r"digits: fit [\d.]+ steps/s, bare loop [\d.]+ steps/s, ratio [\d.]+"
    assert re.search(line, capsys.readouterr().out)


def test_updates_train_both_methods_in_turn(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    small = ("batch", "quickstart", "--data.batch_size=9")
    monkeypatch.setattr(updates, "EXPERIMENTS", {"digits": small})
    table = tmp_path / "updates.csv"
    updates.main(["digits", "--rounds=2", "--seconds=0.1", f"--csv={table}"])
    assert [row["contestant"] for row in rows_of(table)] == ["layer", "batch"]
    assert capsys.readouterr().out.count("| digits |") == 2


@pytest.mark.parametrize("name", updates.EXPERIMENTS)
def test_updates_have_the_methods_of_the_protocol(name: str) -> None:
    (row,) = [row for claim in claims() for row in claim.rows if row.primary == name]
    other, config, *_ = updates.EXPERIMENTS[name]
    assert row.baseline == Path(other).name
    page = (Path(__file__).parents[2] / "docs/results/protocol.md").read_text()
    # The protocol gives the first experiment as a command, the others as a table.
    assert f"`{name}` | {config}.yaml |" in page or (name, config) == ("mnist-4", "mlp/paper")


def test_the_bare_loop_trains_beyond_an_epoch() -> None:
    loop = updates.loop_of("quickstart", "layer")
    before = [parameter.clone() for parameter in loop._model.parameters()]
    for _ in range(200):  # more than an epoch
        loop.update()
    after = list(loop._model.parameters())
    assert not any(map(torch.equal, before, after))


def test_skip_thought_without_a_norm_has_torchs_layers() -> None:
    batch = skip_thought.make_batch(3, 20)
    names = ("none", skip_thought.BASELINE)
    models = [skip_thought.build(name, 8, 4, 20).double() for name in names]
    assert type(models[1].encoder) is torch.nn.GRU
    models[1].load_state_dict(models[0].state_dict())
    losses = [model.loss(batch) for model in models]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    pairs = zip(losses, models, strict=True)
    gradients = [torch.autograd.grad(loss, list(m.parameters())) for loss, m in pairs]
    torch.testing.assert_close(*gradients)


def test_skip_thought_runs_and_writes_its_table(tmp_path: Path, capsys: Capture) -> None:
    sizes = ["--batch=3", "--hidden=8", "--embedding=4", "--words=20", "--rounds=1"]
    table = tmp_path / "skip_thought.csv"
    skip_thought.main([*sizes, f"--csv={table}"])
    assert len(table.read_text().splitlines()) == 1 + len(skip_thought.NORMS)
    assert "training step, N 3, D 8, E 4, V 20" in capsys.readouterr().out
    skip_thought.main([*sizes, "--shares", "--bfloat16"])
    out = capsys.readouterr().out
    assert all(part in out for part in ("recurrence", "input projections", "bfloat16"))


def test_ratios_are_those_of_the_files() -> None:
    found = speed_chart.ratios(("64", "128", "256", "256"))
    assert list(found) == [speed_chart.GPU, *speed_chart.CPUS.values()]
    run = {"processor": "AMD EPYC", "cell": "LSTM", "mode": "train", "precision": "float32"}
    run |= {"T": "64", "B": "128", "H": "256", "contestant": "LayerNorm/native"}
    rows = rows_of(speed_chart.FIGURES / "rnn_speed.csv")
    (row,) = (row for row in rows if run.items() <= row.items())
    assert found["AMD EPYC, AVX-512\n2 threads"]["LayerNorm/native"] == float(row["wall_ratio"])
    # 1.042 ms by the side of cuDNN's 2.123 ms.
    assert found[speed_chart.GPU] == {"LayerNorm/native": pytest.approx(1.042 / 2.123, abs=1e-3)}


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    assert speed_chart.main(["--out", str(tmp_path / "speed.png")]) == 0
    assert (tmp_path / "speed.png").stat().st_size > 10_000


DRAW_SIZE = draw.Size(T=3, N=2, side=9, H=16, Z=4, read=2, write=3)


@needs_native
@pytest.mark.parametrize("norm", draw.NORMS)
def test_draw_and_its_loop_compute_the_same(norm: str) -> None:
    torch.manual_seed(0)
    model = draw.Eager(DRAW_SIZE, norm)
    x, noise = (torch.rand(2, 9, 9) < 0.3).float(), torch.randn(3, 2, 4)

    def run(forward: Callable[..., torch.Tensor], dtype: torch.dtype, k: int = 0) -> Results:
        """Loss and gradients, of parameters with their last bits moved."""
        twin = copy.deepcopy(model).to(dtype)
        for parameter in twin.parameters():
            parameter.data = moved(parameter.data, k)
        loss = forward(twin, x.to(dtype), noise.to(dtype))
        loss.backward()
        return {"loss": loss.detach()} | {n: p.grad for n, p in twin.named_parameters()}

    ours, exact = run(draw.ours, torch.float32), run(draw.Eager.forward, torch.float64)
    assert_as_accurate(ours, exact, lambda k: run(draw.Eager.forward, torch.float32, k))


def test_draw_runs_and_writes_its_table(tmp_path: Path, capsys: Capture) -> None:
    sizes = ["--steps=2", "--batch=2", "--hidden=16", "--latents=4", "--rounds=1"]
    table = tmp_path / "draw.csv"
    draw.main([*sizes, "--no-peaks", f"--csv={table}"])
    rows = table.read_text().splitlines()
    assert len(rows) == 1 + len(draw.contestants(DRAW_SIZE))
    assert any("eager none bf16-mixed" in row for row in rows)
    assert "training step, T 2, N 2, H 16, Z 4" in capsys.readouterr().out
    draw.main([*sizes, "--profile"])
    assert "lstm_back" in capsys.readouterr().out


def test_cca_is_that_of_its_definition() -> None:
    """Without ridges: both sides white, correlations on the diagonal between them (here times
    themselves, as directions are weighted by them), the first the largest that can be had."""
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((400, 2))
    x = np.hstack([hidden, rng.standard_normal((400, 3))]) @ rng.standard_normal((5, 5))
    y = np.repeat(hidden, 2, 0) @ rng.standard_normal((2, 4)) + 0.5 * rng.standard_normal((800, 4))
    moments = caption_cca.Moments.of(x, y)
    maps = caption_cca.cca(moments, 0.0, 0.0)
    of_x, of_y = (x - x.mean(0)) @ maps.x, (y - y.mean(0)) @ maps.y
    weights = np.sqrt(np.diag(of_x.T @ of_x) / len(x))
    np.testing.assert_allclose(of_x.T @ of_x / len(x), np.diag(weights**2), atol=1e-10)
    np.testing.assert_allclose(of_y.T @ of_y / len(y), np.diag(weights**2), atol=1e-10)
    pairs = np.repeat(of_x, 2, 0).T @ of_y / len(y)
    np.testing.assert_allclose(pairs, np.diag(weights**3), atol=1e-10)
    assert sorted(weights, reverse=True) == weights.tolist()
    for _ in range(50):
        a, b = rng.standard_normal(5), rng.standard_normal(4)
        one, two = np.repeat((x - x.mean(0)) @ a, 2), (y - y.mean(0)) @ b
        assert abs(np.corrcoef(one, two)[0, 1]) <= weights[0] + 1e-12


def test_the_control_beats_guessing_on_scenes(monkeypatch: Patch) -> None:
    monkeypatch.setattr(caption_cca, "RIDGES", (0.3, 1.0))
    monkeypatch.setattr(caption_cca, "DIRECTIONS", (20, 40))
    data = SyntheticScenes(train_size=300, val_size=60, test_size=60)
    data.setup()
    chosen, tested = caption_cca.control(data)
    assert chosen["directions"] in (20, 40)
    assert tested["image_r1"] > 15
    assert tested["image_mean_rank"] < 12


def test_own_cells(tmp_path: Path, capsys: Capture) -> None:
    table = tmp_path / "own_cells.csv"
    sizes = ["--sizes=16,2,3,5", "--rounds=1", "--seconds=0.01", "--cells", "IndRNN"]
    own_cells.main([*sizes, f"--csv={table}", "--modes", "train"])
    found = rows_of(table)
    assert [row["contestant"] for row in found] == [
        own_cells.BASELINE, "generated", "torch LSTM", "loop"
    ]  # fmt: skip
    assert {row["cell"] for row in found} == {"IndRNN"}
    assert "IndRNN" in capsys.readouterr().out


def test_the_block_gru_and_its_loop(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, x = own_cells.BlockGRU(3, 16, norm=RMSNorm()), torch.randn(5, 2, 3)
    torch.testing.assert_close(own_cells.einsum_loop(layer)(x)[0], layer(x)[0])
    table = tmp_path / "own_cells.csv"
    options = ["--sizes=16,2,3,16", "--rounds=1", "--seconds=0.01", "--modes", "train"]
    own_cells.main([*options, "--cells", "block GRU", f"--csv={table}"])
    contestants = [row["contestant"] for row in rows_of(table)]
    assert contestants == [own_cells.BASELINE, "generated", "torch GRU", "einsum loop"]


@needs_native
def test_a_first_call_compiles_once(capfd: pytest.CaptureFixture[str], monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "argv", ["first_call"])
    first_call.main()
    out, log = capfd.readouterr()
    assert len(re.findall(r"\d+\.\d+", out)) == 3
    assert log.count("compiling the generated kernel") == 1


@pytest.mark.parametrize("cell", list(options.CELLS))
def test_options_of_each_cell(cell: str, tmp_path: Path) -> None:
    table = tmp_path / "options.csv"
    sizes = ["--size=5,2,3,8", "--rounds=1", "--seconds=0.01", "--input=data", "--kernels=1"]
    options.main([*sizes, "--cells", cell, "--options", "recompute=16", f"--csv={table}"])
    (row,) = rows_of(table)
    assert (row["cell"], row["contestant"]) == (cell, "recompute=16")


def test_errors_of_own_cells(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(own_cells, "ERRORS_SIZE", Size(T=16, B=2, I=3, H=5))
    monkeypatch.setattr(own_cells, "NORMS", {"own norm": own_cells.MyNorm()})
    own_cells.main(["--errors=2", "--cells", "IndRNN"])
    *_, head, _, row = capsys.readouterr().out.splitlines()
    assert head.endswith("| own norm |")
    name, ratio = row.strip("| ").split(" | ")
    assert (name, 0.1 < float(ratio) < 10) == ("IndRNN", True)
