"""``--optimizer`` and ``--lr_scheduler``, in runs that are resumed too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_support import Capture, fit, last, load, same
from jsonargparse import Namespace
from lightning.pytorch.cli import ReduceLROnPlateau
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ln_zoo.cli import optimizers
from ln_zoo.cli.arguments import Arguments
from ln_zoo.cli.notes import plain
from ln_zoo.cli.optimizers import OPTIMIZATION
from ln_zoo.models import Handwriting, MLPClassifier, ZooModule

COSINE = (
    "--lr_scheduler=CosineAnnealingLR",
    "--lr_scheduler.T_max=20",
    "--lr_scheduler_config.interval=step",
)


def settings(optimizer: str = "", scheduler: str = "", interval: str = "epoch") -> Namespace:
    """Settings of a subcommand as they are parsed, from YAML of arguments behind class names."""

    def part(text: str, room: str) -> Namespace | None:
        if not text:
            return None
        name, _, rest = text.partition(" ")
        path = name if "." in name else f"{room}.{name}"
        return Namespace(class_path=path, init_args=Namespace(yaml.safe_load(rest or "{}")))

    return Namespace(
        optimizer=part(optimizer, "torch.optim"),
        lr_scheduler=part(scheduler, "torch.optim.lr_scheduler"),
        lr_scheduler_config=Namespace(interval=interval, frequency=1),
        model=Namespace(class_path="MLPClassifier", init_args=Namespace(lr=0.02)),
    )


def configured(model: ZooModule, given: Namespace, rate_of_model: bool = False) -> Any:
    assert optimizers.install(model, given, rate_of_model)
    return model.configure_optimizers()


def test_a_resumed_run_goes_on_with_optimizer_and_schedule(here: Path) -> None:
    adamw = ("--optimizer=AdamW", "--optimizer.weight_decay=0.1", "--model.lr=0.02")
    name = "--trainer.logger.name"
    fit(*adamw, *COSINE, f"{name}=whole", epochs=2)
    fit(*adamw, *COSINE, f"{name}=parts", "--trainer.max_epochs=1")
    # The options of the checkpoint win over others.
    done = fit(f"{name}=parts", "--ckpt_path=last", "--optimizer=SGD", epochs=2)
    assert all(word in done.err for word in ("--optimizer is ignored", "torch.optim.AdamW"))
    whole = load(last(name="whole"))
    parts = load(last(1, "parts"))
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert same(whole[part], parts[part]), part
    (group,) = whole["optimizer_states"][0]["param_groups"]
    assert (group["weight_decay"], group["initial_lr"], group["fused"]) == (0.1, 0.02, True)
    # Half of the cosine's period: by updates, of which there were 10 in 2 epochs.
    assert whole["lr_schedulers"][0]["last_epoch"] == 10
    assert group["lr"] == pytest.approx(0.01)
    for folder in ("whole/version_0", "parts/version_1"):
        config = yaml.safe_load((here / "runs" / folder / "config.yaml").read_text())
        assert config["optimizer"]["class_path"] == "torch.optim.AdamW"
        assert config["optimizer"]["init_args"]["lr"] == 0.02
        assert config["lr_scheduler"]["init_args"]["T_max"] == 20
        assert config["lr_scheduler_config"] == {"interval": "step", "frequency": 1}


def test_schedules_without_an_optimizer(trained: Path) -> None:
    """The schedule is of the model's own optimizer; without one nothing is stored."""
    checkpoint = load(trained)
    assert OPTIMIZATION not in checkpoint
    assert checkpoint["lr_schedulers"] == []
    assert optimizers.install(MLPClassifier(64, [8]), settings(), False) == []

    model = Handwriting(hidden_size=8, num_layers=1, optimizer="graves", lr=3e-4)
    found = configured(model, settings(scheduler="StepLR {step_size: 7}", interval="step"))
    assert type(found["optimizer"]).__name__ == "GravesRMSprop"
    assert found["lr_scheduler"]["scheduler"].optimizer is found["optimizer"]
    assert (found["lr_scheduler"]["interval"], found["lr_scheduler"]["frequency"]) == ("step", 1)

    name = f"{ReduceLROnPlateau.__module__}.ReduceLROnPlateau"
    found = configured(MLPClassifier(64, [8]), settings(scheduler=f"{name} {{monitor: val_nll}}"))
    assert isinstance(found["lr_scheduler"]["scheduler"], ReduceLROnPlateau)
    assert found["lr_scheduler"]["monitor"] == "val_nll"


class Scheduled(MLPClassifier):
    """A user's model with a schedule of its own."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


def test_a_users_model_with_a_schedule_of_its_own() -> None:
    found = configured(Scheduled(64, [8]), settings("SGD {lr: 0.3, momentum: 0.9}"))
    assert isinstance(found, torch.optim.SGD)
    assert found.defaults["lr"] == 0.3
    assert found.defaults["fused"] is True  # on a CPU, as the models' own
    with pytest.raises(MisconfigurationException, match="Scheduled"):
        configured(Scheduled(64, [8]), settings(scheduler="StepLR {step_size: 7}"))
    found = configured(MLPClassifier(64, [8]), settings("Adam {lr: 0.3, foreach: true}"))
    assert isinstance(found, torch.optim.Adam)
    assert not found.defaults["fused"]


def test_whose_learning_rate_it_is(capsys: Capture) -> None:
    given = settings("AdamW {lr: 0.001}")
    use = optimizers.use_rate_of_model
    assert use(given.optimizer, 0.02, Arguments(["fit", "--optimizer", "AdamW"]))
    assert given.optimizer.init_args.lr == 0.02
    model = MLPClassifier(64, [8], lr=0.02)
    model.lr = 0.5  # as a learning rate finder sets it
    found = configured(model, given, rate_of_model=True)
    assert isinstance(found, torch.optim.AdamW)
    assert found.defaults["lr"] == 0.5
    assert capsys.readouterr().err == ""

    given = settings("AdamW {lr: 0.001}")
    assert not use(given.optimizer, 0.02, Arguments(["fit", "--optimizer.lr=0.001"]))
    assert given.optimizer.init_args.lr == 0.001
    note = capsys.readouterr().err
    assert all(word in note for word in ("model.lr", "0.02", "optimizer.lr", "0.001"))
    # A model without a rate, an optimizer without one, no optimizer.
    assert not use(given.optimizer, None, Arguments(["fit"]))
    assert not use(settings("Adafactor2 {}").optimizer, 0.02, Arguments(["fit"]))
    assert not use(None, 0.02, Arguments(["fit"]))


def test_functions_are_stored_by_their_path() -> None:
    given = settings("Adam {betas: [0.9, 0.99]}", "LambdaLR {}")
    assert given.lr_scheduler is not None
    given.lr_scheduler.init_args.lr_lambda = torch.square
    checkpoint: dict[str, object] = {}
    (record,) = optimizers.install(MLPClassifier(64, [8]), given, False)
    record.on_save_checkpoint(None, None, checkpoint)  # type: ignore[arg-type]
    stored = checkpoint[OPTIMIZATION]
    assert isinstance(stored, dict)
    assert stored["optimizer"]["init_args"] == {"betas": [0.9, 0.99]}
    assert stored["lr_scheduler"]["init_args"]["lr_lambda"].endswith(".square")


def test_a_checkpoint_imports_no_optimizer_because_it_names_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "my_lion.py").write_text(
        "import torch\nclass Lion(torch.optim.SGD): pass\ndef halve(epoch): return 0.5**epoch\n"
    )
    monkeypatch.syspath_prepend(here)
    schedule = {
        "class_path": "torch.optim.lr_scheduler.LambdaLR",
        "init_args": {"lr_lambda": "my_lion.halve"},
    }
    stored = {"optimizer": {"class_path": "my_lion.Lion", "init_args": {"lr": 0.5}}}
    for named, place in ((stored, "optimizer"), ({"lr_scheduler": schedule}, "lr_lambda")):
        with pytest.raises(ValueError, match=rf"my_lion.*--\S*{place} my_lion"):
            optimizers.of_checkpoint({OPTIMIZATION: named}, "a.ckpt", Arguments(["fit"]))
    assert "my_lion" not in sys.modules
    mine = ["fit", "--optimizer=my_lion.Lion", "--lr_scheduler.lr_lambda=my_lion.halve"]
    stored["lr_scheduler"] = schedule
    found = optimizers.of_checkpoint({OPTIMIZATION: stored}, "a.ckpt", Arguments(mine))
    assert plain(found) == stored | {"lr_scheduler_config": {"interval": "epoch", "frequency": 1}}
    assert found.lr_scheduler.init_args.lr_lambda is sys.modules["my_lion"].halve
    monkeypatch.delitem(sys.modules, "my_lion")
