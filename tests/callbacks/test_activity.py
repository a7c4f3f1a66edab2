"""Activity by position: numbers counted by hand, hooks that go again, files and pictures."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import rows_of
from refusals import refuses
from torch import Tensor
from training import quiet_trainer

from ln_zoo.callbacks import ActivityByPosition, EpochEvaluation
from ln_zoo.callbacks.activity import _Sums
from ln_zoo.data import BatchLoader, Digits, Tensors
from ln_zoo.models import ConvClassifier
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm
from ln_zoo.plots.activity import (
    Activity,
    activity_table,
    plot_activities,
    ratio,
    read_activity,
    rings,
    write_activity,
)
from ln_zoo.testing import CallbackCase


def hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def small(norm: Norm, **arguments) -> ConvClassifier:
    torch.manual_seed(0)
    return ConvClassifier((1, 8, 8), channels=[[3, 2], [4]], hidden_size=5, norm=norm, **arguments)


def expected_activity(model: ConvClassifier, images: Tensor) -> dict[str, Activity]:
    """From the outputs of all examples at once, in float64."""
    found: dict[str, Activity] = {}
    h = images
    with torch.no_grad():
        for number, module in enumerate(model.eval().network):
            h = module(h)
            if number in (0, 2, 5):
                on, outputs = (h > 0).double(), h.double()
                active, variance = on.mean((0, 1)), outputs.var(0, correction=0).mean(0)
                rare = (on.mean(0) < 0.05).double().mean(0)
                found[f"network.{number}"] = Activity(active, variance, rare)
    return found


def watched(folder: Path, model: ConvClassifier, data: Any, **options) -> ActivityByPosition:
    watch = ActivityByPosition()
    quiet_trainer(watch, default_root_dir=folder, **options).test(model, data, verbose=False)
    return watch


def test_a_small_layer_counted_by_hand(tmp_path: Path) -> None:
    """Two examples, two channels, three by three positions; the kernels pass their input on."""
    images = torch.tensor([[1.0, 2, 3], [3, 0, 3]]).diag_embed().unsqueeze(1)
    model = ConvClassifier((1, 3, 3), num_classes=2, channels=[[2]], hidden_size=1, norm=Identity())
    layer = model.network[0]
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[:, 0, 1, 1] = torch.tensor([1.0, -2.0])
        layer.bias.copy_(torch.tensor([-1.5, 1.0]))
    data = BatchLoader(Tensors(images, torch.tensor([0, 1])), 1)
    (activity,) = watched(tmp_path, model, data).activities.values()
    # Channel 0 is on where the input is above 1.5, channel 1 where it is below 0.5.
    on = [[1, 2, 2], [2, 2, 2], [2, 2, 2]]
    assert (4 * activity.active).tolist() == on
    # The input has variance 1 in two places; the other channel four times that.
    assert activity.variance.tolist() == [[2.5, 0, 0], [0, 2.5, 0], [0, 0, 0]]
    assert activity.rings("active") == pytest.approx([15 / 32, 0.5])
    # One channel is never on, except in the middle: there each is on for one of the examples.
    never = [[1, 1, 1], [1, 0, 1], [1, 1, 1]]
    assert (2 * activity.rare).tolist() == never
    assert ratio(activity, "active") == pytest.approx(15 / 16)
    assert ratio(activity, "variance") == pytest.approx(2.5 / 8 / 2.5)


@pytest.mark.parametrize(
    ("norm", "command"),
    [
        (LayerNorm(), "validate"),
        (LayerNorm(convolution="position"), "test"),
        (BatchNorm(), "validate"),
    ],
    ids=str,
)
def test_all_examples_in_evaluation_mode(tmp_path: Path, norm: Norm, command: str) -> None:
    """Validation of batch norm sees each batch twice, the second time with its own statistics."""
    model = small(norm)
    data = Digits(batch_size=50, train_size=100, val_size=23, eval_batch_size=16)
    quiet_trainer(max_epochs=1, limit_val_batches=0).fit(model, datamodule=data)
    watch = ActivityByPosition()
    runner = quiet_trainer(watch, default_root_dir=tmp_path, limit_test_batches=2)
    getattr(runner, command)(model, datamodule=data, verbose=False)
    assert watch.written == tmp_path / "activity.png"
    assert (tmp_path / "activity.csv").exists()
    loader = data.test_dataloader() if command == "test" else data.val_dataloader()
    images = torch.cat([images for images, _ in itertools.islice(loader, 2)])
    expected = expected_activity(model, images)
    assert list(watch.activities) == list(expected) == ["network.0", "network.2", "network.5"]
    for name, wanted in expected.items():
        found = watch.activities[name]
        # In float32 a sum may fall on either side of zero, in one batch or the other.
        assert (found.active - wanted.active).abs().max() < 0.01
        assert torch.equal(found.rare, wanted.rare)
        torch.testing.assert_close(found.variance, wanted.variance, rtol=1e-4, atol=1e-6)
    assert hooks(model) == 0


def test_shares_of_several_processes_are_those_of_one() -> None:
    """However unevenly they are dealt out."""
    outputs = torch.randn(7, 3, 4, 5)
    shares = [_Sums("conv"), _Sums("conv")]
    for share, part in zip(shares, outputs.split([2, 5]), strict=True):
        share.add(part)
    whole = _Sums("conv")
    whole.add(outputs)
    # What is asked to be reduced: the number of examples, then the sums.
    others = iter([torch.tensor(float(shares[1].examples)), shares[1].sums])
    found, expected = shares[0].activity(lambda x: x + next(others)), whole.activity(lambda x: x)
    for name in ("active", "variance", "rare"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))


def test_files(tmp_path: Path) -> None:
    watch = ActivityByPosition(str(tmp_path / "out"))
    data = Digits(val_size=20, eval_batch_size=100)
    runner = quiet_trainer(watch, limit_test_batches=1)
    runner.test(small(LayerNorm()), datamodule=data, verbose=False)
    assert watch.written == tmp_path / "out/activity.png"
    assert watch.written.read_bytes().startswith(b"\x89PNG")
    rows = rows_of(tmp_path / "out/activity.csv")
    assert len(rows) == 64 + 64 + 16
    row = rows[8 + 2]
    activity = watch.activities["network.0"]
    assert (row["layer"], row["row"], row["column"], row["ring"]) == ("network.0", "1", "2", "1")
    again = read_activity([tmp_path / "out/activity.csv"])
    assert again.keys() == watch.activities.keys()
    for quantity in ("active", "variance", "rare"):
        assert float(row[quantity]) == float(getattr(activity, quantity)[1, 2])
        for name, each in watch.activities.items():
            assert torch.equal(getattr(again[name], quantity), getattr(each, quantity))


def test_training_is_not_measured(tmp_path: Path) -> None:
    watch = ActivityByPosition()
    model, data = small(BatchNorm()), Digits(batch_size=50, train_size=100, val_size=20)
    runner = quiet_trainer(watch, EpochEvaluation(), default_root_dir=tmp_path, max_epochs=1)
    runner.fit(model, datamodule=data)
    assert (watch.activities, watch.written, hooks(model)) == ({}, None, 0)


def test_outputs_must_keep_their_size(tmp_path: Path) -> None:
    class Twice(ConvClassifier):
        def forward(self, inputs):
            self.network[0](inputs[..., :4])
            return super().forward(inputs)

    model = Twice((1, 8, 8), channels=[[2]], norm=Identity())
    message = r"\(2, 8, 4\) and \(2, 8, 8\) from network\.0"
    refuses(message, watched, tmp_path, model, Digits(val_size=20))
    assert hooks(model) == 0
    assert not list(tmp_path.iterdir())


def test_rings() -> None:
    assert rings(4, 5).tolist() == [[0] * 5, [0, 1, 1, 1, 0], [0, 1, 1, 1, 0], [0] * 5]
    assert rings(1, 3).tolist() == [[0, 0, 0]]


def even(active: float, border: float = 1.0) -> Activity:
    """Three by three positions; the border's variance beside 1 in the centre."""
    variance = torch.full((3, 3), border, dtype=torch.float64)
    variance[1, 1] = 1.0
    on = torch.full((3, 3), active, dtype=torch.float64)
    return Activity(on, variance, (on < 0.3).double())


def test_several_runs(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.csv" for name in ("first", "second", "other")]
    for path, active, border in zip(paths, (0.2, 0.6, 0.5), (0.1, 0.3, 1.0), strict=True):
        write_activity({"conv": even(active, border)}, path)
    runs = {"LN": read_activity(paths[:2]), "BN": read_activity(paths[2:])}
    # Two runs of a label are averaged.
    assert activity_table(runs).splitlines()[2:] == [
        "| conv | LN | 0.4 | 0.4 | 1 | 0.2 | 1 | 0.2 | 0.5 | 0.5 | 1 |",
        "| conv | BN | 0.5 | 0.5 | 1 | 1 | 1 | 1 | 0 | 0 | nan |",
    ]
    plot_activities(runs, tmp_path / "both.png", "a title")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_runs_that_do_not_fit_one_another(tmp_path: Path) -> None:
    one, two, none = (tmp_path / f"{name}.csv" for name in ("one", "two", "none"))
    write_activity({"conv": even(0.1)}, one)
    write_activity({"other": even(0.1)}, two)
    none.write_text("epoch,step\n0,1\n")
    refuses("the layers of these runs differ", read_activity, [one, two])
    runs = {"A": read_activity([one]), "B": read_activity([two])}
    refuses(r"B has the layers \['other'\], other runs have", activity_table, runs)
    refuses(r"none\.csv is not an activity\.csv", read_activity, [none])


class TestActivityByPosition(CallbackCase):
    stage = "test"
    needs = True
    callback = ActivityByPosition
    model = staticmethod(partial(small, LayerNorm()))
    data = staticmethod(partial(Digits, train_size=50))
