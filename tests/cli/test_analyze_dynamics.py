"""``ln-zoo analyze dynamics``: what it measures, prints and writes, and how it fails."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from ln_zoo.analysis import Dynamics, dynamics_table, hidden_dynamics, initial_dynamics
from ln_zoo.cli import main
from ln_zoo.data import Digits
from ln_zoo.models import SequenceClassifier
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, WeightNorm, population_statistics

COMMAND = ["analyze", "dynamics"]
SMALL = ["--steps", "12", "--hidden", "5", "--features", "4", "--batch", "3"]
PNG = b"\x89PNG"


def checkpoint(folder: Path, norm: Norm, **arguments) -> Path:
    """Of a model that reads digits by rows, with weights that are not those of its start."""
    torch.manual_seed(1)
    model = SequenceClassifier(64, hidden_features=6, step_features=8, norm=norm, **arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model(torch.rand(20, 64))
    hparams = dict(model.hparams) | {
        "_class_path": "ln_zoo.models.SequenceClassifier",
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
    }
    path = folder / f"{type(norm).__name__}.ckpt"
    torch.save({"state_dict": model.state_dict(), "hyper_parameters": hparams}, path)
    return path


def test_untrained_layers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cell", "LSTM", "GRU", "--norm", "LayerNorm", "WeightNorm", "--gains", "0.5", "2"]
    files = ["--out", "a/dynamics.png", "--csv", "a/dynamics.csv"]
    more = ["--start", "identity", "--exponents", "2", "--skip", "3", "--seed", "4", "--noise", "1"]
    more += ["--recurrent_scale", "3"]
    assert main([*COMMAND, *SMALL, *options, *files, *more]) == 0
    title, _, *table = capsys.readouterr().out.splitlines()
    assert title == (
        "H = 5, 4 standard normal inputs a step, identity weights, recurrent ones times 3, "
        "3 sequences, 12 steps"
    )
    inputs = torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    wanted = [
        each
        for cell in ("LSTM", "GRU")
        for each in initial_dynamics(
            inputs, cell, 5, [LayerNorm, WeightNorm], (0.5, 2.0), "identity", 3.0, 1.0, 2, 3, 4
        )
    ]
    assert table == dynamics_table(wanted).splitlines()
    assert len(table) == 2 + 8
    assert (here / "a/dynamics.png").read_bytes().startswith(PNG)
    with (here / "a/dynamics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 * 12
    last = wanted[-1]
    assert rows[-1]["layer"] == "WeightNorm 2"
    assert rows[-1]["gradient_norm"] == f"{float(last.gradients[-1]):.4g}"


@pytest.mark.parametrize("statistics", ["kept", "batch"])
@pytest.mark.parametrize("norm", [LayerNorm(), BatchNorm(max_steps=8), Identity()], ids=repr)
def test_a_model_before_and_after_training(
    here: Path, norm: Norm, statistics: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(here, norm, permuted=True)
    options = ["--batch", "5", "--steps", "7", "--skip", "2", "--statistics", statistics]
    assert main([*COMMAND, "--ckpt", str(path), *options, "--csv", "dynamics.csv"]) == 0
    title, _, *table = capsys.readouterr().out.splitlines()
    assert title == "5 test images, 7 steps"

    data = Digits(eval_batch_size=5)
    data.prepare_data()
    data.setup()
    images, labels = next(iter(data.test_dataloader()))
    model = SequenceClassifier(
        64, hidden_features=6, step_features=8, permuted=True, norm=norm
    ).double()
    x = images.double().flatten(1)[:, model.permutation].view(5, 8, 8).transpose(0, 1)

    def measure(name: str) -> Dynamics:
        states = tuple(s.unsqueeze(1).expand(-1, 5, -1).detach() for s in model.initial_states)
        if statistics == "batch" and norm.mixes_cases:
            with torch.random.fork_rng():
                states = states[0] + 0.1 * torch.randn_like(states[0]), states[1]
        return hidden_dynamics(
            model.recurrent, x[:7], states, group="", name=name, skip=2, statistics=statistics,
            loss=lambda h: F.cross_entropy(model.readout(h[-1]), labels),
        )  # fmt: skip

    torch.manual_seed(0)
    model.reset_parameters()
    model.eval()
    if norm.keeps_statistics:
        with population_statistics(model):
            model(images.double())
    untrained = measure(f"{path.name} untrained")
    model.load_state_dict(torch.load(path)["state_dict"])
    trained = measure(f"{path.name} trained")
    if statistics == "batch" and norm.mixes_cases:
        # Its noise is a draw of its own: the rows are there, and finite.
        assert len(table) == 4
        assert "nan" not in "".join(table)
    else:
        assert table == dynamics_table([untrained, trained]).splitlines()
    assert (here / "dynamics.png").read_bytes().startswith(PNG)
    with (here / "dynamics.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * 7


def test_a_strategy_of_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Untrained, its scales are those of the untrained weights."""
    path = checkpoint(here, WeightNorm(), cell="gru")
    assert main([*COMMAND, "--ckpt", str(path), "--batch", "2"]) == 0
    *_, untrained, trained = capsys.readouterr().out.splitlines()
    assert untrained.startswith("| WeightNorm.ckpt untrained |")
    assert trained.split("|")[2] != untrained.split("|")[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--norm", "LayrNorm"], "no strategy 'LayrNorm' in ln_zoo.norms; did you mean 'LayerNorm"),
        (["--steps", "1"], "--steps must be at least 2, got 1"),
        (["--noise", "nan"], "--noise must be at least 0, got nan"),
        (["--exponents", "0"], "--exponents must be at least 1, got 0"),
        (["--exponents", "11", "--cell", "LSTM"], "count must lie in 1, ..., 10"),
        (["--skip", "12"], "skip must lie in 0, ..., 11 for 12 steps, got 12"),
        (["--weights", "no-such-model"], "no model 'no-such-model'"),
        (["--weights", "mlp.layernorm-digits"], "mlp.layernorm-digits is a MLPClassifier; the"),
        (["--ckpt", "none.ckpt"], "there is no checkpoint 'none.ckpt'"),
    ],
)
def test_wrong_values_are_one_line(
    here: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *SMALL, *options]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"ln-zoo analyze dynamics: error: {message}")
    assert told.count("\n") == 1
    assert not list(here.glob("*.png"))


def test_images_of_another_size(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = SequenceClassifier(6, hidden_features=2)
    hparams = dict(model.hparams) | {"_class_path": "ln_zoo.models.SequenceClassifier"}
    torch.save({"state_dict": model.state_dict(), "hyper_parameters": hparams}, here / "m.ckpt")
    assert main([*COMMAND, "--ckpt", "m.ckpt"]) == 1
    told = capsys.readouterr().err
    assert "this model reads 6 numbers a case; there are images of 784 (MNIST) and 64" in told
