"""Lengths and turns of weight vectors: against the weights themselves, and what theory says."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cli_support import rows_of
from lightning.pytorch import Callback
from matplotlib.image import imread
from refusals import refuses
from training import Weights, logged_trainer

from ln_zoo.callbacks import CurvesPlot, WeightGeometry
from ln_zoo.callbacks.weight_geometry import turns, weight_vectors
from ln_zoo.data import Digits
from ln_zoo.layers import LSTM
from ln_zoo.models import ConvClassifier, MLPClassifier, SequenceClassifier
from ln_zoo.norms import LayerNorm, WeightNorm
from ln_zoo.plots.weight_geometry import (
    QUANTITIES,
    geometry_table,
    plot_weight_geometry,
    read_geometry,
    write_geometry,
)
from ln_zoo.testing import CallbackCase


class Plain(MLPClassifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


data = partial(Digits, batch_size=20, train_size=100, val_size=20)


def fitted(folder: Path, model: torch.nn.Module, *callbacks: Callback, **options) -> Path:
    defaults = {"max_epochs": 2, "limit_val_batches": 0}
    logged_trainer(folder, *callbacks, **defaults | options).fit(model, datamodule=data())
    return folder / "run/version_0"


@pytest.mark.parametrize(("cls", "power"), [(MLPClassifier, 1), (Plain, 2)])
def test_numbers_are_those_of_the_weights(tmp_path: Path, cls: type, power: int) -> None:
    torch.manual_seed(0)
    model, weights = cls(64, [8], norm=LayerNorm(), lr=0.02), Weights()
    folder = fitted(tmp_path, model, weights, WeightGeometry(every_n_steps=4))
    geometry = read_geometry(folder / "metrics.csv")
    assert list(geometry) == ["network.1.weight", "network.3.weight"]
    for name, quantities in geometry.items():
        wanted: dict[str, list[np.ndarray]] = {"norm": [], "turn": [], "effective_lr": []}
        for step in (4, 8):
            states = weights.states[step - 1], weights.states[step]
            before, after = (state[name].double().numpy() for state in states)
            lengths = [np.linalg.norm(weight, axis=1) for weight in (before, after)]
            cosines = (before * after).sum(1) / (lengths[0] * lengths[1])
            angles = np.degrees(np.arccos(np.minimum(1.0, cosines)))
            rates = 0.02 / lengths[0] ** power
            for key, values in zip(wanted, (lengths[1], angles, rates), strict=True):
                quantiles = np.quantile(values, [0.1, 0.5, 0.9])
                wanted[key].append(np.array([values.mean(), *quantiles]))
        for quantity, rows in wanted.items():
            for number, statistic in enumerate(("mean", "q10", "q50", "q90")):
                steps, values = quantities[quantity][statistic]
                assert steps == [4, 8]
                assert values == pytest.approx([row[number] for row in rows], rel=1e-5)


def test_small_angles() -> None:
    angles = torch.tensor([0.0, 1e-12, 1e-6, 0.5, math.pi / 2, math.pi], dtype=torch.float64)
    before = torch.tensor([2.0, 0.0], dtype=torch.float64).expand(6, 2)
    after = 3 * torch.stack([angles.cos(), angles.sin()], dim=1)
    torch.testing.assert_close(turns(before, after), angles, rtol=1e-9, atol=1e-16)
    # A vector of zeros has no direction: no turn, and no NaN.
    assert turns(torch.zeros(1, 3), torch.zeros(1, 3)).tolist() == [0.0]


def test_which_weights() -> None:
    conv = ConvClassifier((1, 4, 4), 3, [[2]], 3, norm=WeightNorm())
    assert list(weight_vectors(conv)) == [f"network.{n}.weight" for n in (0, 4, 6)]
    sequence = SequenceClassifier(4, 3, 3, norm=LayerNorm())
    names = ["recurrent.weight_ih_l0", "recurrent.weight_hh_l0", "readout.weight"]
    assert list(weight_vectors(sequence)) == names
    projected = weight_vectors(LSTM(2, 3, proj_size=2, num_layers=2, bidirectional=True))
    assert {name[:9] for name in projected} == {"weight_ih", "weight_hh", "weight_hr"}
    assert list(weight_vectors(LSTM(2, 3, peephole=True))) == ["weight_ih_l0", "weight_hh_l0"]
    assert list(weight_vectors(LSTM(2, 4, blocks=2))) == ["weight_ih_l0"]
    assert weight_vectors(LSTM(2, 3).requires_grad_(False)) == {}


def test_accumulated_gradients_make_one_update(tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {"accumulate_grad_batches": 5, "max_epochs": 4}
    folder = fitted(tmp_path, Plain(64, [8]), WeightGeometry(every_n_steps=2), **options)
    geometry = read_geometry(folder / "metrics.csv")["network.1.weight"]
    steps, values = geometry["turn"]["q50"]
    assert steps == [2, 4]
    assert min(values) > 0


def test_learning_rates_are_those_of_each_group_at_the_update(tmp_path: Path) -> None:
    class Groups(MLPClassifier):
        def configure_optimizers(self):
            first, second = self.network[1], self.network[3]
            groups = [
                {"params": list(first.parameters()), "lr": 0.1},
                {"params": [second.bias], "lr": 0.2},
            ]
            optimizer = torch.optim.Adam(groups)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    torch.manual_seed(0)
    watch = WeightGeometry(every_n_steps=2, power=0)
    folder = fitted(tmp_path, Groups(64, [8]), watch, max_epochs=1)
    geometry = read_geometry(folder / "metrics.csv")
    # Of what the optimizer does not know nothing is said.
    assert list(geometry) == ["network.1.weight"]
    assert geometry["network.1.weight"]["effective_lr"]["mean"][1] == pytest.approx([0.05, 0.0125])


def test_picture_beside_the_logs(tmp_path: Path) -> None:
    watch, curves = WeightGeometry(every_n_steps=2), CurvesPlot()
    folder = fitted(tmp_path, MLPClassifier(64, [8]), watch, curves)
    assert watch.written == folder / "weight_geometry.png"
    assert watch.written.read_bytes().startswith(b"\x89PNG")
    assert curves.written is not None
    # Curves are those of losses: a panel for each of the weights would make it metres wide.
    height, width, _ = imread(curves.written).shape
    assert width < 3 * height


class Decay(MLPClassifier):
    """Logs something of its own below the name of weights."""

    def training_step(self, batch, batch_idx):
        names = ["decay", "norm_mean", "network.1.weight/share_q50", "a/norm_q99", "b/norm_mean"]
        for name in names:
            self.log(f"weights/{name}", 0.5)
        return super().training_step(batch, batch_idx)


def test_metrics_of_others_below_the_same_prefix(tmp_path: Path) -> None:
    watch = WeightGeometry(every_n_steps=2)
    folder = fitted(tmp_path, Decay(64, [8]), watch)
    assert "weights/decay" in (folder / "metrics.csv").read_text()
    assert watch.written is not None
    found = read_geometry(folder / "metrics.csv")
    assert list(found) == ["network.1.weight", "network.3.weight"]
    assert all(set(quantities) == set(QUANTITIES) for quantities in found.values())


def test_wrong_arguments(tmp_path: Path) -> None:
    model = MLPClassifier(64, [8])
    for weight in weight_vectors(model).values():
        weight.requires_grad_(False)
    refuses(r"WeightGeometry .*MLPClassifier", fitted, tmp_path, model, WeightGeometry())


def geometry(first: float, last: float) -> dict:
    curve = ([10, 20], [first, last])
    statistics = dict.fromkeys(("mean", "q10", "q50", "q90"), curve)
    return {"layer.weight": dict.fromkeys(("norm", "turn", "effective_lr"), statistics)}


def test_several_runs(tmp_path: Path) -> None:
    none = geometry(4.0, 1.0) | {"more": geometry(0, 0)["layer.weight"]}
    runs = {"LN": geometry(1.0, 2.0), "none": none}
    head, _, first, second, third = geometry_table(runs).splitlines()
    assert head.startswith("| weight |  | updates | length of weight vectors: first | last |")
    assert first == "| layer.weight | LN | 10 to 20 | 1 | 2 | 2 | 1 | 2 | 2 | 1 | 2 | 2 |"
    assert second.startswith("| layer.weight | none | 10 to 20 | 4 | 1 | 0.25 |")
    assert third.startswith("| more | none | 10 to 20 | 0 | 0 | nan |")
    plot_weight_geometry(runs, tmp_path / "a/both.png", "a title")
    assert (tmp_path / "a/both.png").read_bytes().startswith(b"\x89PNG")
    write_geometry(runs, tmp_path / "b/both.csv")
    rows = rows_of(tmp_path / "b/both.csv")
    expected = [("LN", "layer.weight"), ("none", "layer.weight"), ("none", "more")]
    assert [(row["label"], row["weight"], row["step"]) for row in rows] == [
        (*each, step) for each in expected for step in ("10", "20")
    ]
    assert (rows[1]["norm_q50"], rows[1]["effective_lr_mean"]) == ("2", "2")


class TestWeightGeometry(CallbackCase):
    invalid: ClassVar[dict[str, Any]] = {"every_n_steps": (0, -1)}
    test_runs_again = None  # it writes a picture of the whole log
    callback = staticmethod(partial(WeightGeometry, every_n_steps=2))
    model = staticmethod(partial(MLPClassifier, 64, [8]))
    data = staticmethod(data)
