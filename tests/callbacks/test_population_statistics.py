"""Population statistics before the test: those of the whole training set, in a checkpoint too."""

from __future__ import annotations

import copy
import logging
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from training import quiet_trainer

from ln_zoo.callbacks import LastCheckpoint, PopulationStatistics
from ln_zoo.data import BatchLoader, Digits
from ln_zoo.models import MLPClassifier, SequenceClassifier
from ln_zoo.norms import BatchNorm, LayerNorm, Norm
from ln_zoo.testing import CallbackCase

#: Examples that count of 101 in batches of 25: the last one, alone, is left out.
SIZES = {"batch_size": 25, "examples": 100}


digits = partial(Digits, batch_size=20, train_size=101, eval_batch_size=25)


def trainer(folder: Path, *callbacks, **options) -> Trainer:
    given = {"default_root_dir": folder, "max_epochs": 2, **options}
    return quiet_trainer(*callbacks, **given)


def scores_of(
    folder: Path, model: nn.Module, *callbacks, path: Path | None = None, data=None, **options
) -> dict[str, float]:
    """Scores of a test, by default of the weights that the model has."""
    runner = trainer(folder, *callbacks, **options)
    (scores,) = runner.test(model, data or digits(), ckpt_path=path, verbose=False)
    return scores


def fitted(folder: Path, norm: Norm, **options) -> tuple[MLPClassifier, Path]:
    torch.manual_seed(0)
    model = MLPClassifier(64, [8], norm=norm)
    last = LastCheckpoint()
    trainer(folder, last, **options).fit(model, datamodule=digits())
    return model, Path(last.best_model_path)


def expected(model: MLPClassifier, loader: BatchLoader, method: str) -> dict[str, Tensor]:
    """The statistics of both layers, batch after batch in float64."""
    wide = MLPClassifier(64, [8], norm=BatchNorm()).double()
    wide.load_state_dict(model.state_dict())
    sums: dict[int, list[Tensor]] = {1: [], 3: []}
    with torch.no_grad():
        for images, _ in loader:
            if len(images) < 2:
                continue
            h = images.double().flatten(1)
            for number, layer in ((1, wide.network[1]), (3, wide.network[3])):
                a = h @ layer.weight.T
                sums[number].append(a)
                h = (a - a.mean(0)) / (a.var(0, correction=0) + 1e-5).sqrt()
                h = (layer.site.gain * h + layer.bias).clamp(min=0)
    found = {}
    for number, batches in sums.items():
        parts = batches if method == "average" else [torch.cat(batches)]
        examples = torch.tensor([[len(a)] for a in parts]).double()
        means = torch.stack([a.mean(0) for a in parts])
        variances = torch.stack([a.var(0, correction=0) for a in parts])
        mean, var = ((examples * each).sum(0) / examples.sum() for each in (means, variances))
        found |= {f"network.{number}.site.running_mean": mean}
        found |= {f"network.{number}.site.running_var": var}
        found |= {f"network.{number}.site.num_batches_tracked": torch.tensor(len(batches))}
    return found


@pytest.mark.parametrize("batch_size", [None, 40])
@pytest.mark.parametrize("method", ["average", "total_variance"])
def test_statistics_are_those_of_the_training_set(
    tmp_path: Path, method: str, batch_size: int | None
) -> None:
    model, path = fitted(tmp_path, BatchNorm())
    before = copy.deepcopy(model.state_dict())
    callback = PopulationStatistics(method, batch_size, save=False)
    data = digits()
    random = torch.get_rng_state()
    scores = scores_of(tmp_path, model, callback, path=path, data=data)
    assert torch.equal(random, torch.get_rng_state())
    new = expected(model, data.train_eval_dataloader(batch_size), method)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (name not in new), name
        if name in new:
            torch.testing.assert_close(value.double(), new[name].double(), rtol=2e-6, atol=2e-6)
    assert callback.estimated
    sizes = {"batch_size": 40, "examples": 101} if batch_size else SIZES
    assert callback.facts == {"method": method} | sizes
    assert callback.written is None
    assert not list(tmp_path.rglob("population.ckpt"))
    # The test that follows is that of the new statistics.
    assert scores_of(tmp_path, model, data=data) == scores


def test_the_checkpoint_is_that_of_the_training_with_new_statistics(tmp_path: Path) -> None:
    model, path = fitted(tmp_path, BatchNorm())
    callback = PopulationStatistics("total_variance")
    folder = tmp_path / "tested"
    scores = scores_of(folder, model, callback, path=path, logger=True)
    assert callback.written is not None
    assert callback.written.name == "population.ckpt"
    assert callback.written.is_relative_to(folder)
    old, new = (torch.load(each, weights_only=True) for each in (path, callback.written))
    assert old.keys() == new.keys()
    for name in ("epoch", "global_step", "loops", "hyper_parameters"):
        assert new[name] == old[name], name
    assert new["global_step"] == 10
    changed = {n for n, v in new["state_dict"].items() if not torch.equal(v, old["state_dict"][n])}
    assert {name.rpartition(".")[2] for name in changed} >= {"running_mean", "running_var"}
    assert all("site" in name and "gain" not in name for name in changed)

    loaded = MLPClassifier.load_from_checkpoint(callback.written)
    assert scores_of(tmp_path, loaded) == scores


def test_after_training_in_one_go(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, callback = MLPClassifier(64, [8], norm=BatchNorm()), PopulationStatistics()
    one = trainer(tmp_path, callback, logger=True)
    one.fit(model, datamodule=digits())
    (scores,) = one.test(model, digits(), verbose=False)
    assert callback.written is not None
    checkpoint = torch.load(callback.written, weights_only=True)
    assert checkpoint["global_step"] == 10
    assert checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] == 2
    loaded = MLPClassifier.load_from_checkpoint(callback.written)
    assert scores_of(tmp_path, loaded) == scores


def test_weights_of_unknown_training_are_not_written(tmp_path: Path, caplog) -> None:
    model, _ = fitted(tmp_path, BatchNorm())
    callback = PopulationStatistics()
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        scores_of(tmp_path, model, callback)
    assert callback.estimated
    assert callback.written is None
    assert "no population.ckpt" in caplog.text
    assert "population statistics (average) of 100 examples in batches of 25" in caplog.text


def test_a_model_without_statistics_is_tested_as_it_is(tmp_path: Path, caplog) -> None:
    model, path = fitted(tmp_path, LayerNorm())
    before, callback = copy.deepcopy(model.state_dict()), PopulationStatistics()
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        scores_of(tmp_path, model, callback, path=path)
    assert (callback.estimated, callback.facts, callback.written) == (False, {}, None)
    assert caplog.text.count("no running statistics") == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_each_step_of_a_recurrent_model_and_its_noise(tmp_path: Path) -> None:
    """Noise on initial states moves no random number that the test would draw."""
    torch.manual_seed(0)
    norm = BatchNorm(max_steps=16)
    model = SequenceClassifier(64, hidden_size=6, step_features=4, norm=norm)
    assert model.initial_noise == 0.1
    model(torch.rand(20, 64))
    torch.manual_seed(5)
    data = digits()
    scores_of(tmp_path, model, PopulationStatistics(), data=data)
    after = torch.get_rng_state()
    tested = copy.deepcopy(model.state_dict())
    sites = model.recurrent.sites["l0"]
    assert sites["cell"].num_batches_tracked.tolist() == [4] * 16
    torch.manual_seed(5)
    scores_of(tmp_path, model)
    assert torch.equal(after, torch.get_rng_state())
    # The pixels of a step, straight from the images.
    images = torch.cat([batch for batch, _ in data.train_eval_dataloader()])[:100]
    rows = images.flatten(1).unflatten(1, (16, 4)).transpose(0, 1).double()
    products = rows @ model.recurrent.weight_ih_l0.detach().double().T
    mean = tested["recurrent.sites.l0.input.running_mean"]
    torch.testing.assert_close(mean.double(), products.mean(1), rtol=1e-5, atol=1e-6)


def test_in_the_precision_of_the_test(tmp_path: Path) -> None:
    model, path = fitted(tmp_path, BatchNorm())
    found = []
    for precision in ("32-true", "bf16-mixed"):
        callback = PopulationStatistics(save=False)
        scores_of(tmp_path, model, callback, path=path, precision=precision)
        found.append(model.network[1].site.running_mean.clone())
    full, half = found
    assert half.dtype == torch.float32
    assert not torch.equal(full, half)
    assert (full - half).abs().max() < 0.02 * full.abs().max()


def test_a_trial_run_takes_one_batch_and_writes_nothing(tmp_path: Path) -> None:
    model, path = fitted(tmp_path, BatchNorm())
    callback = PopulationStatistics()
    scores_of(tmp_path / "trial", model, callback, path=path, fast_dev_run=True)
    assert int(model.network[1].site.num_batches_tracked) == 1
    assert callback.written is None
    assert not list(tmp_path.rglob("population.ckpt"))


class TestPopulationStatistics(CallbackCase):
    stage = "test"
    invalid: ClassVar[dict[str, Any]] = {"method": ("ema",), "batch_size": (1, 0)}
    callback = PopulationStatistics
    model = staticmethod(partial(MLPClassifier, 64, [8], norm=BatchNorm()))
    data = staticmethod(digits)
