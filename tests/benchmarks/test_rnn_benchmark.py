"""The benchmark compares equals, in turn, and writes down what it found."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from cli_support import rows_of
from PIL import Image
from reference import Direction, Site, run

from benchmarks import contestants, modes, rnn
from benchmarks.contestants import Absent, Size, limited_to
from benchmarks.timing import Spread, interleave, ratios
from ln_zoo.kernels.native import build
from ln_zoo.ops.engines.aten import AtenEngine

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

SIZE = Size(5, 3, 7, 6)
#: One layer in one direction, where the reference has them.
PLACES = {"LSTM": ("input", "recurrent", "cell"), "GRU": ("input", "recurrent")}


def needs_compiler(name: str) -> None:
    if name.endswith("/native") and not build.status(build=True).available:
        pytest.skip(str(build.status().reason))


def expected(cell: str, kind: str, x: torch.Tensor) -> torch.Tensor:
    weights = {k: v.double() for k, v in contestants._weights(cell, SIZE).items()}
    sites = {}
    for place in PLACES[cell] if kind != "none" else ():
        groups = (1,) if place == "cell" else {"LSTM": (4,), "GRU": (2, 1)}[cell]
        sites[place] = Site(kind, groups=groups)
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    direction = Direction(cell, *(weights[name] for name in names), sites=sites)
    zeros = torch.zeros(SIZE.B, SIZE.H, dtype=torch.float64)
    states = (zeros, zeros if cell == "LSTM" else None)
    return torch.stack(run(direction, x.double().unbind(1), *states)[0], dim=1)


KINDS = [
    ("torch", "none"),
    ("cell-loop", "none"),
    ("naive", "layer"),
    ("LayerNorm/aten", "layer"),
    ("LayerNorm/native", "layer"),
    ("RMSNorm/aten", "rms"),
    ("torchscript", "layer"),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*deprecated")
@pytest.mark.parametrize("cell", contestants.CELLS)
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_contestants_compute_what_their_names_say(cell: str, name: str, kind: str) -> None:
    needs_compiler(name)
    if (name, cell) == ("torchscript", "GRU"):
        with pytest.raises(Absent, match="no GRU"):
            contestants.layer(name, cell, SIZE, training=True)
        return
    contestant = contestants.layer(name, cell, SIZE, training=True)
    x = torch.randn(SIZE.T, SIZE.B, SIZE.I, generator=torch.Generator().manual_seed(3))
    with limited_to(contestant.kernels):
        output = contestant.module(x)[0]
    torch.testing.assert_close(output.double(), expected(cell, kind, x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("cell", contestants.CELLS)
@pytest.mark.parametrize("name", ["naive", "LayerNorm/aten", "LayerNorm/native"])
def test_steps_of_a_cell_are_those_of_its_layer(cell: str, name: str) -> None:
    needs_compiler(name)
    size = Size(modes.STEPS, 1, SIZE.I, SIZE.H)
    stepped = modes.streaming(contestants.cell_step(name, cell, size), size, "float32")()
    layer = contestants.layer("naive", cell, size, training=False)
    whole = modes.inference(layer, size, "float32")()
    torch.testing.assert_close(stepped, whole[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("cell", contestants.CELLS)
def test_training_steps_have_the_same_gradients(cell: str) -> None:
    """The naive loop's, and those of ln_zoo, by way of the summed biases they share."""
    found = []
    for name in ("naive", "LayerNorm/aten"):
        contestant = contestants.layer(name, cell, SIZE, training=True)
        modes.training_step(contestant, SIZE, "float32")()
        parameters = dict(contestant.module.named_parameters())
        assert all(value.grad is not None for value in parameters.values())
        hh = "cell.recurrent.weight" if name == "naive" else "weight_hh_l0"
        found.append(parameters[hh].grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_loss_may_read_the_last_time_step_alone() -> None:
    contestant = contestants.layer("torch", "GRU", SIZE, training=True)
    step = modes.training_step(contestant, SIZE, "float32", last=True)
    step()
    output = step()  # from no gradients
    found = contestant.module.weight_hh_l0.grad.clone()
    contestant.module.zero_grad()
    torch.manual_seed(1)
    x, gradient = torch.randn(SIZE.T, SIZE.B, SIZE.I), torch.randn(SIZE.T, SIZE.B, SIZE.H)
    again, h = contestant.module(x)
    torch.testing.assert_close(again, output)
    h[0].backward(gradient[-1])
    torch.testing.assert_close(contestant.module.weight_hh_l0.grad, found)


def test_absence_has_a_reason_and_sizes_four_numbers(monkeypatch: Patch) -> None:
    """An engine that does not run is not measured under its name."""
    monkeypatch.setattr(AtenEngine, "unsupported_reason", lambda *_: "not today")
    for name, size, words in (
        ("LayerNorm/aten", SIZE, "LayerNorm/aten: aten does not take the call"),
        ("LayrNorm/aten", SIZE, "there is no norm 'LayrNorm'"),
        ("BatchNorm", Size(2, 1, 3, 4), "no statistics"),
    ):
        with pytest.raises(Absent, match=words):
            contestants.layer(name, "GRU", size, training=True)
    for text in ("1,2,3", "1,2,3,0", "1,2,3,4,5"):
        with pytest.raises(ValueError, match="a size is T,B,I,H"):
            Size.parse(text)


def test_bf16_is_mixed() -> None:
    contestant = contestants.layer("naive", "LSTM", SIZE, training=False)
    exact = modes.inference(contestant, SIZE, "float32")()
    mixed = modes.inference(contestant, SIZE, "bf16-mixed")()
    assert not torch.equal(exact, mixed.float())
    torch.testing.assert_close(exact, mixed.float(), rtol=0, atol=0.1)
    assert {p.dtype for p in contestant.module.parameters()} == {torch.float32}


def test_names_of_contestants_and_their_kernels(monkeypatch: Patch) -> None:
    monkeypatch.setenv("LN_ZOO_KERNELS", "0")
    with limited_to("aten"):
        assert os.environ["LN_ZOO_KERNELS"] == "aten"
    assert os.environ["LN_ZOO_KERNELS"] == "0"
    with limited_to(None):
        assert "LN_ZOO_KERNELS" not in os.environ
    assert os.environ["LN_ZOO_KERNELS"] == "0"
    ours = ["LayerNorm/native", "LayerNorm/aten", "BatchNorm"]
    found = contestants.names(["LayerNorm", "BatchNorm"], "train")
    assert found == ["torch", "cell-loop", "naive", "torchscript", *ours]
    found = contestants.names(["RMSNorm"], "step")
    assert found == ["torch", "naive", "RMSNorm/native", "RMSNorm/aten"]


def test_rounds_take_turns_and_ratios_are_taken_by_round(monkeypatch: Patch) -> None:
    order: list[str] = []
    monkeypatch.setattr("benchmarks.timing._calls_per_measurement", lambda _: 1)
    times = interleave({name: lambda n=name: order.append(n) for name in "abc"}, 3, 10.0)
    assert "".join(order) == "abcbcacab"
    assert {name: len(found.wall) for name, found in times.items()} == {"a": 3, "b": 3, "c": 3}
    # They end in time.
    times = interleave({"a": lambda: None, "b": lambda: None}, 100_000, 0.1)
    assert 1 <= len(times["a"].wall) == len(times["b"].cpu) < 100_000
    # The machine was ten times slower in the second round, for both.
    assert ratios([2.0, 20.0, 2.2], [1.0, 10.0, 1.0]) == Spread(2.0, 2.0, 2.1)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)


def read(folder: Path) -> list[dict[str, str]]:
    rows = rows_of(folder / "rnn.csv")
    assert list(rows[0]) == [field.name for field in dataclasses.fields(rnn.Row)]
    return rows


def test_command_writes_and_prints(tmp_path: Path, capsys: Capture) -> None:
    names = ["naive", "LayerNorm/aten", "BatchNorm"]
    sizes = ["--sizes", "3,2,4,5", "1,1,4,5"]
    few = ["--repeats", "3", "--seconds", "0.01", "--threads", str(torch.get_num_threads())]
    modes_ = ["--modes", "train", "infer", "step"]
    out = ["--contestants", *names, "--out", str(tmp_path / "out")]
    assert rnn.main([*sizes, *few, *modes_, *out]) == 0
    rows = read(tmp_path / "out")
    shown = capsys.readouterr()
    assert "left out: BatchNorm: a batch of one example has no statistics" in shown.err
    # Both cells; training without the batch of one example; single steps fall together.
    assert len(rows) == 2 * ((4 + 3) + (4 + 4) + 4)
    for row in rows:
        assert row["baseline"] == "torch"
        for kind in ("wall", "cpu"):
            low, median, high = (float(row[f"{kind}_ratio{end}"]) for end in ("_low", "", "_high"))
            assert 0 < low <= median <= high
        if row["contestant"] == "torch":
            assert float(row["wall_ratio"]) == float(row["cpu_ratio"]) == 1
        assert float(row["ms"]) > 0
        assert row["peak_mib"] == ""
    for title in ("LSTM: training step, time", "GRU: one step of one example, time"):
        assert title in shown.out
    with Image.open(tmp_path / "out" / "rnn.png") as picture:
        assert picture.height > picture.width
        assert len(picture.convert("L").getcolors() or [0] * 3) > 2


def test_small_calls_are_options_that_others_replace(tmp_path: Path, capsys: Capture) -> None:
    few = ["--cells", "GRU", "--sizes", "1,1,4,5", "--repeats", "2", "--seconds", "0.01"]
    rnn.main(["--small", *few, "--modes", "step", "train", "--out", str(tmp_path)])
    pairs = [(row["mode"], row["contestant"]) for row in read(tmp_path)]
    names = ("torch", "naive", "LayerNorm", "Identity")
    assert pairs == [(mode, name) for mode in ("step", "train") for name in names]
    assert "one step of one example" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_of_a_training_step(tmp_path: Path, capsys: Capture) -> None:
    few = ["--cells", "LSTM", "--modes", "memory", "--contestants", "naive"]
    rnn.main([*few, "--sizes", "2,2,3,4", "100,64,8,64", "--out", str(tmp_path)])
    assert "left out: too small" in capsys.readouterr().err
    torch_row, naive_row = read(tmp_path)
    outputs = 4 * 100 * 64 * 64 / 2**20
    # Gates, states and outputs there and gradients back: several times the outputs in both.
    assert float(torch_row["peak_mib"]) > 4 * outputs
    assert 1 < float(naive_row["peak_ratio"]) < 4
    assert (torch_row["ms"], torch_row["rounds"]) == ("", "1")
