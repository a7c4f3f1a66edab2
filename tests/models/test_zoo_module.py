"""What every model shares: arguments in plain values, checkpoints, noise that goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from training import quiet_trainer

from ln_zoo.data import Digits
from ln_zoo.models import MLPClassifier, OrderEmbedding, SequenceClassifier, ZooModule
from ln_zoo.models.base import fused_on_cpu
from ln_zoo.models.run_counter import RunCounter
from ln_zoo.norms import BatchNorm, Norm, RMSNorm


class Noisy(MLPClassifier):
    """A model that draws numbers while it trains, and has an argument of its own."""

    def __init__(self, noise: float, norm: Norm | None = None, lr: float = 1e-2) -> None:
        super().__init__(64, [8], norm=norm, lr=lr)
        self.noise = noise

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return super().training_step(
            (images + self.noise * torch.randn_like(images), labels), batch_idx
        )


class Stop(ModelCheckpoint):
    """Writes a checkpoint after some update, and stops there."""

    def __init__(self, folder: Path, step: int) -> None:
        super().__init__(folder, "stopped", every_n_train_steps=step, save_top_k=-1)
        self.step = step

    def on_train_batch_end(self, trainer, *args, **kwargs) -> None:
        super().on_train_batch_end(trainer, *args, **kwargs)
        trainer.should_stop = trainer.global_step >= self.step


def data() -> Digits:
    return Digits(batch_size=20, train_size=100)


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def test_is_abstract() -> None:
    with pytest.raises(TypeError, match=r"ZooModule.*configure_optimizers"):
        ZooModule()


def test_stores_what_is_in_use_not_what_was_given() -> None:
    for norm, logits in ((None, False), (BatchNorm(momentum=0.3), True)):
        model = MLPClassifier(norm=norm)
        assert model.hparams["normalize_logits"] is logits
        assert model.hparams["hidden_sizes"] == [1000, 1000]
        assert model.hparams["norm"]["class_path"].startswith("ln_zoo.norms.")
        assert model.hparams_initial == model.hparams
    assert model.hparams["norm"]["init_args"]["momentum"] == 0.3


def test_refuses_a_norm_that_cannot_be_stored() -> None:
    class Plain(Norm):
        pass

    with pytest.raises(TypeError, match="dataclass"):
        MLPClassifier(norm=Plain())


@pytest.mark.parametrize("step", [3, 5, 7])  # within an epoch, at its end, within the next
def test_noise_goes_on_where_it_stopped(tmp_path: Path, step: int) -> None:
    def model() -> Noisy:
        torch.manual_seed(1)
        return Noisy(0.5, norm=RMSNorm())

    whole = model()
    quiet_trainer(max_epochs=3).fit(whole, datamodule=data())

    quiet_trainer(Stop(tmp_path, step), max_epochs=3).fit(model(), datamodule=data())
    (stopped,) = tmp_path.glob("stopped*.ckpt")
    assert load(stopped)["global_step"] == step
    resumed = model()
    torch.manual_seed(99)  # what another process would draw
    quiet_trainer(max_epochs=3).fit(resumed, datamodule=data(), ckpt_path=stopped)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_model_that_was_merely_loaded_has_no_past_noise(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, "kept")
    quiet_trainer(keep, max_epochs=1).fit(Noisy(0.5), datamodule=data())

    def continued(seed: int) -> Tensor:
        model = Noisy.load_from_checkpoint(tmp_path / "kept.ckpt")
        torch.manual_seed(seed)
        quiet_trainer(max_epochs=1).fit(model, datamodule=data())
        return model.network[1].weight

    assert not torch.equal(continued(1), continued(2))


def test_a_subclass_keeps_its_own_arguments(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, "kept")
    quiet_trainer(keep, max_epochs=1).fit(Noisy(0.25, norm=RMSNorm(eps=1e-3)), datamodule=data())
    hparams = load(tmp_path / "kept.ckpt")["hyper_parameters"]
    assert hparams["noise"] == 0.25
    assert hparams["_class_path"] == f"{__name__}.Noisy"
    model = ZooModule.load_from_checkpoint(tmp_path / "kept.ckpt")
    assert type(model) is Noisy
    assert (model.noise, model.network[1].site.norm) == (0.25, RMSNorm(eps=1e-3))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rmsprop"])
def test_every_optimizer_in_every_precision_with_clipping(
    tmp_path: Path, optimizer: str, precision: str
) -> None:
    """On a CPU; and from a checkpoint of the other precision, which says "fused" or not."""

    def run(model: SequenceClassifier, epochs: int, precision: str, **resumed) -> Trainer:
        runner = quiet_trainer(
            ModelCheckpoint(tmp_path, precision), max_epochs=epochs, limit_val_batches=0,
            precision=precision, gradient_clip_val=1e-3,
        )  # fmt: skip
        runner.fit(model, datamodule=data(), **resumed)
        return runner

    def model() -> SequenceClassifier:
        torch.manual_seed(0)
        return SequenceClassifier(64, hidden_size=4, step_features=16, optimizer=optimizer)

    trained = model()
    start = {name: value.clone() for name, value in trained.state_dict().items()}
    runner = run(trained, 1, precision)
    fused = runner.optimizers[0].defaults.get("fused")
    assert bool(fused) is (precision == "32-true" and optimizer != "rmsprop")
    assert all((value != start[name]).any() for name, value in trained.state_dict().items())
    other = {"32-true": "bf16-mixed", "bf16-mixed": "32-true"}[precision]
    resumed = run(model(), 2, other, ckpt_path=tmp_path / f"{precision}.ckpt")
    assert resumed.global_step == 2 * runner.global_step


def test_without_a_trainer_the_fused_form_is_for_the_cpu() -> None:
    assert fused_on_cpu(MLPClassifier(64, [8])) == {"fused": True}
    assert fused_on_cpu(MLPClassifier(64, [8]).to("meta")) == {}


@dataclass(frozen=True)
class OwnNorm(Norm):
    scale: float = 2.0

    def normalize(self, site, a, step=None):
        return a * self.scale


def test_a_users_norm_comes_back(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, "kept")
    model = MLPClassifier(64, [8], norm=OwnNorm(3.0))
    quiet_trainer(keep, max_epochs=1).fit(model, datamodule=data())
    again = ZooModule.load_from_checkpoint(tmp_path / "kept.ckpt")
    assert again.network[1].site.norm == OwnNorm(3.0)


def test_every_process_has_noise_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """All begin with one seed; the first goes on as if it were alone."""
    monkeypatch.setattr(RunCounter, "begin", lambda *arguments: None)  # it reads a whole trainer
    drawn = []
    for rank in range(3):
        model = Noisy(0.1)
        model.trainer = SimpleNamespace(  # type: ignore[assignment]
            global_rank=rank, world_size=3, ckpt_path=None
        )
        torch.manual_seed(5)
        torch.rand(7)
        alone = torch.get_rng_state()
        model.on_train_start()
        drawn.append(torch.randn(4))
        if rank == 0:
            torch.set_rng_state(alone)
            assert torch.equal(torch.randn(4), drawn[0])
    assert not any(torch.equal(drawn[i], drawn[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_no_norm_is_stored_as_the_norm_that_does_nothing() -> None:
    class Plain(MLPClassifier):
        def __init__(self, norm: Norm | None = None) -> None:
            ZooModule.__init__(self)
            self.save_hyperparameters()
            self.resolve_hyperparameters(norm)

    assert Plain().hparams["norm"] == {"class_path": "ln_zoo.norms.Identity", "init_args": {}}


def test_loggers_get_the_size_of_a_vocabulary() -> None:
    model = OrderEmbedding(["a", "cat"], hidden_size=4)
    assert model.hparams["vocabulary"] == ["a", "cat"]
    assert model.hparams_initial["vocabulary"] == "2 words"
    assert model.hparams_initial["margin"] == model.margin


def test_names_of_0_1_still_work() -> None:
    with pytest.warns(DeprecationWarning, match="input_kinds"):

        class Old(MLPClassifier):
            takes = ("letters",)

            def __init__(self, width: int, norm: Norm | None = None) -> None:
                super().__init__(64, [width])
                self.remember(norm, width=width + 1)

    assert Old.input_kinds == ("letters",)
    with pytest.warns(DeprecationWarning, match="resolve_hyperparameters"):
        model = Old(8, RMSNorm())
    norm = {"class_path": "ln_zoo.norms.RMSNorm", "init_args": RMSNorm().__dict__}
    assert dict(model.hparams) == {"width": 9, "norm": norm}
