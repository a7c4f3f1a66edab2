"""``ln-zoo analyze trained_dynamics``: models before and after training."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import Capture, rows_of, told
from data_support import ready
from layer_results import randomised
from torch import Tensor
from torch.nn import functional as F

from ln_zoo.analysis import Dynamics, dynamics_table, hidden_dynamics
from ln_zoo.data import Digits, PenLines
from ln_zoo.models import Handwriting, SequenceClassifier
from ln_zoo.models.base import ZooModule
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, WeightNorm, population_statistics

COMMAND = ["analyze", "trained_dynamics"]


def save(model: ZooModule, path: Path) -> Path:
    """A checkpoint of a model, with weights that are not those of its start."""
    torch.manual_seed(1)
    randomised(model)
    if isinstance(model, SequenceClassifier):
        model(torch.rand(20, model.hparams["in_features"]))
    hparams = dict(model.hparams) | {
        "_class_path": f"ln_zoo.models.{type(model).__name__}",
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
    }
    torch.save({"state_dict": model.state_dict(), "hyper_parameters": hparams}, path)
    return path


def classifier(norm: Norm, **arguments) -> SequenceClassifier:
    """Reads digits by rows."""
    return SequenceClassifier(64, hidden_size=6, step_features=8, norm=norm, **arguments)


def digits(examples: int) -> tuple[Tensor, Tensor]:
    """The first test images, as the rows that a classifier reads, (8, N, 8), and labels."""
    images, labels = next(iter(ready(Digits(eval_batch_size=examples)).test_dataloader()))
    return images.double(), labels


@pytest.mark.parametrize(
    ("norm", "statistics"),
    [
        (LayerNorm(), "kept"),
        (BatchNorm(max_steps=8), "kept"),
        (BatchNorm(max_steps=8), "batch"),
        (Identity(), "batch"),
        (WeightNorm(), "kept"),
    ],
    ids=str,
)
def test_a_model_before_and_after_training(
    in_tmp: Path, norm: Norm, statistics: str, capsys: Capture
) -> None:
    # Noise in the initial states, where statistics are of the batch, is a draw of its own.
    arguments = {"permuted": True} | ({"initial_noise": 0.0} if statistics == "batch" else {})
    path = save(classifier(norm, **arguments), in_tmp / "model.ckpt")
    options = ["--batch=5", "--steps=7", "--skip=2", "--seed=6", "--statistics", statistics]
    files = ["--out", "dynamics.png", "--csv", "dynamics.csv"]
    printed = told(capsys, *COMMAND, path, *options, *files)
    title, _, *table = printed.splitlines()
    assert title == "5 test images of Digits, 7 steps"

    images, labels = digits(5)
    torch.manual_seed(6)
    model = classifier(norm, **arguments).double().eval()
    x = images.flatten(1)[:, model.permutation].view(5, 8, 8).transpose(0, 1)

    def measure(name: str) -> Dynamics:
        states = tuple(s.unsqueeze(1).expand(-1, 5, -1).detach() for s in model.initial_states)
        return hidden_dynamics(
            model.recurrent, x[:7], states, group="", name=name, skip=2, statistics=statistics,
            seed=6, loss=lambda h: F.cross_entropy(model.readout(h[-1]), labels),
        )  # fmt: skip

    if norm.keeps_statistics:
        with population_statistics(model):
            model(images)
    untrained = measure(f"{path.name} untrained")
    model.load_state_dict(torch.load(path)["state_dict"])
    trained = measure(f"{path.name} trained")
    assert "nan" not in "".join(table)
    assert table == dynamics_table([untrained, trained]).splitlines()
    assert (in_tmp / "dynamics.png").read_bytes().startswith(b"\x89PNG")
    assert len(rows_of("dynamics.csv")) == 2 * 7


def test_noise_of_batch_statistics_is_that_of_the_seed(in_tmp: Path, capsys: Capture) -> None:
    path = save(classifier(BatchNorm(max_steps=8)), in_tmp / "model.ckpt")
    tables = []
    for seed in ("3", "3", "4"):
        torch.manual_seed(len(tables))
        options = ["--statistics", "batch", "--batch", "4", "--seed", seed]
        tables.append(told(capsys, *COMMAND, path, *options))
    assert tables[0] == tables[1] != tables[2]


def test_layers_of_a_classifier(in_tmp: Path, capsys: Capture) -> None:
    """Beside a model of another length; `tests/analysis/test_dynamics.py` has their numbers."""
    save(classifier(LayerNorm(), num_layers=2), in_tmp / "deep.ckpt")
    save(SequenceClassifier(64, hidden_size=3, step_features=16), in_tmp / "short.ckpt")
    files = ["deep.ckpt", "short.ckpt"]
    printed = told(capsys, *COMMAND, *files, "--batch", "3")
    title, _, _, _, *table = printed.splitlines()
    assert title == "3 test images of Digits, 8 steps; 3 test images of Digits, 4 steps"
    both = ("untrained", "trained")
    assert [row.split("|")[1].strip() for row in table] == [
        *(f"deep.ckpt layer {layer}, {when}" for when in both for layer in (1, 2)),
        *(f"short.ckpt {when}" for when in both),
    ]


#: Points of the lines of the validation set, which tests score.
LENGTHS = (12, 8, 15, 10)


def steps_of(number: int) -> np.ndarray:
    """A line: dx, dy downwards, and 1 at the end of a stroke."""
    random = np.random.default_rng(number)
    steps = np.rint(random.normal(0, 20, (LENGTHS[number], 3)))
    steps[:, 2] = random.random(len(steps)) < 0.2
    steps[-1, 2] = 1
    return steps


@pytest.fixture
def iam(in_tmp: Path) -> str:
    names = [f"line {chr(97 + number)}" for number in range(len(LENGTHS))]
    lines = PenLines.from_steps([steps_of(number) for number in range(len(LENGTHS))], names, names)
    for part in ("train", "valid1", "valid2", "test"):
        lines.save(in_tmp / "iam" / f"strokes_{part}")
    return str(in_tmp / "iam")


def last_loss(model, points, below, shown, above, h: Tensor) -> Tensor:
    """Of the last point, where a layer between those has the outputs h."""
    outputs = [*below, h]
    for layer in above:
        outputs.append(layer(torch.cat([points[:-1], outputs[-1], *shown], -1))[0])
    y = model.output(torch.cat([each[-1] for each in outputs], -1))
    return model.mixture(y).nll(points[-1]).mean()


@pytest.mark.parametrize("text", [True, False])
def test_layers_of_a_handwriting_model(in_tmp: Path, text: bool, iam: str, capsys: Capture) -> None:
    """Those above the window, by hand: each driven by offsets, the layer below and the window."""
    model = Handwriting(5, 3, text, 2, 3, norm=LayerNorm())
    model.offset_mean.fill_(1.0)
    model.offset_std.fill_(30.0)
    path = save(model, in_tmp / "hand.ckpt")
    options = ["--steps", "9", "--batch", "3", "--root", iam]
    title, _, *table = told(capsys, *COMMAND, path, *options).splitlines()
    # Of the four lines of the validation set one is too short.
    assert title == "3 lines of IAM-OnDB, 9 steps"
    names = [row.split("|")[1].strip() for row in table[2:]]
    first = 2 if text else 1
    layers = range(first, 4)
    assert names == [
        f"hand.ckpt layer {n}, {when}" for when in ("untrained", "trained") for n in layers
    ]

    long = (0, 2, 3)
    texts = ["line a", "line c", "line d"]
    lines = torch.tensor(np.stack([steps_of(number)[:10] for number in long], 1))  # (T + 1, N, 3)
    points = torch.stack([(lines[..., 0] - 1) / 30, (-lines[..., 1] - 1) / 30, lines[..., 2]], -1)
    points[0] = 0
    found = []
    for when in ("untrained", "trained"):
        torch.manual_seed(0)
        model = Handwriting(5, 3, text, 2, 3, norm=LayerNorm())
        if when == "trained":
            model.load_state_dict(torch.load(path)["state_dict"])
        model = model.double().eval()
        x, outputs, shown = points[:-1], [], []
        if text:
            h, window, _, _ = model.window(x, model.encode(texts))
            outputs, shown = [h.detach()], [window.detach()]
        for number, layer in enumerate(model.layers, first):
            read = torch.cat([x, *outputs[-1:], *shown], -1)
            above = model.layers[number - first + 1 :]
            loss = functools.partial(last_loss, model, points, tuple(outputs), shown, above)
            name = f"hand.ckpt layer {number}, {when}"
            found.append(hidden_dynamics(layer, read, group="", name=name, loss=loss))
            outputs.append(layer(read)[0].detach())
    assert table == dynamics_table(found).splitlines()


def small_writer(layers: int) -> Handwriting:
    return Handwriting(5, layers, mixture_components=2)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (small_writer(2), "--root iam", ("steps", " 14,", "200")),
        (small_writer(1), "--root iam --steps 5", ("this Handwriting runs none",)),
        (
            SequenceClassifier(6, hidden_size=2), "",
            ("in_features", " 6,", "784 (MNIST)", "64 (Digits)"),
        ),
    ],
    ids=["short lines", "a window alone", "images of another size"],
)  # fmt: skip
def test_models_and_data_that_do_not_fit(
    in_tmp: Path, iam: str, capsys: Capture, model: ZooModule, options: str, words: tuple[str, ...]
) -> None:
    path = save(model, in_tmp / "m.ckpt")
    line = told(capsys, *COMMAND, path, *options.split(), code=1)
    assert all(word in line for word in words)
