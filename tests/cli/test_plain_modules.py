"""Every command of training takes a LightningModule that knows nothing of this package."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from cli_support import QUIET, Capture, CommandError, cli, load, rows_of, succeed, told
from refusals import refuses

from ln_zoo.cli import lightning, main
from ln_zoo.utils import packages

PROJECT = Path(__file__).parents[1] / "callbacks" / "lightning_project" / "forecasting"
MODULE = ("--model=forecasting.model.Forecaster",)
DATA = ("--data=forecasting.data.Waves",)
FIT = (*MODULE, *DATA, *QUIET, "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1")
RMS = ("--trainer.callbacks+=Normalize", "--trainer.callbacks.norm=RMSNorm")
LAST = "runs/Forecaster-RMSNorm/version_0/checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the project, and a run with RMS norm."""
    folder = tmp_path_factory.mktemp("plain")
    shutil.copytree(PROJECT, folder / "forecasting")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = succeed("fit", *FIT, *RMS, "--trainer.max_epochs=2", "--test_after_fit=true")
    assert "RMSNorm() in net.encoder" in done.err
    return folder


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def loss(path: str) -> float:
    results = json.loads(Path(path).read_text())
    assert (results["model"], results["norm"]) == ("Forecaster", "RMSNorm")
    return float(results["metrics"]["loss"])


def test_a_checkpoint_is_tested_and_continued_without_the_callback() -> None:
    succeed("test", "--ckpt_path", LAST, *FIT)
    tested = loss("runs/Forecaster-RMSNorm/version_1/test_results.json")
    assert tested == loss("runs/Forecaster-RMSNorm/version_0/test_results.json")
    succeed("predict", "--weights", LAST, *FIT)
    succeed("fit", "--ckpt_path", LAST, *FIT, "--trainer.max_epochs=3")
    (resumed,) = set(Path("runs").glob("*/*/checkpoints/last.ckpt")) - {Path(LAST)}
    checkpoint = load(resumed)
    assert checkpoint["hyper_parameters"]["_class_path"] == "forecasting.model.Forecaster"
    assert checkpoint["training_runs"]["runs"][0]["epochs"] == 3
    assert "net.encoder.sites.l0.input.gain" in checkpoint["state_dict"]
    assert any(key.startswith("Normalize") for key in checkpoint["callbacks"])


def test_a_module_stores_the_linked_arguments_that_it_takes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digits have an image_shape and num_classes too, which no checkpoint could be loaded with."""
    (folder / "stored.py").write_text(
        "import lightning\nclass Stored(lightning.LightningModule):\n"
        "    def __init__(self, in_features: int, width: int = 3):\n"
        "        super().__init__()\n        self.save_hyperparameters()\n"
    )
    monkeypatch.syspath_prepend(folder)
    model = lightning.CLIWithoutTrainer(["fit", "--model=stored.Stored", "--data=Digits"]).model
    stored = {name: value for name, value in model.hparams.items() if name[0] != "_"}
    assert stored == {"in_features": 64, "width": 3}


def test_a_class_must_be_named() -> None:
    refuses(["forecasting.model.Forecaster", "--model"], cli, "test", "--ckpt_path", LAST, *DATA)
    checkpoint = load(LAST)
    del checkpoint["hyper_parameters"]["_class_path"]
    del checkpoint["hyper_parameters"]["_instantiator"]
    torch.save(checkpoint, "foreign.ckpt")
    refuses(["foreign.ckpt", "--model"], cli, "test", "--ckpt_path=foreign.ckpt", *DATA)
    succeed("test", "--ckpt_path=foreign.ckpt", *FIT)


def test_a_card_needs_a_zoo_module(folder: Path) -> None:
    (results,) = Path("runs/Forecaster-RMSNorm/version_0").glob("test_results.json")
    given = ["--results", results, "--out=cards/x", "--import=forecasting.model"]
    refuses(["ZooModule", "own_data_and_model.md"], cli, "card", LAST, *given, code=1)


BROKEN = """
from forecasting.model import Forecaster

class Broken(Forecaster):
    def training_step(self, batch, batch_idx):
        return [1, 2][self.hparams.hidden_size]
"""


def test_errors_of_a_module_are_its_own(folder: Path) -> None:
    (folder / "broken.py").write_text(BROKEN)
    says = ["IndexError", "broken.py:6"]
    refuses(says, cli, "fit", "--model=broken.Broken", *FIT[1:], code=1)


def test_loggers_name_their_package() -> None:
    for logger, package in (("WandbLogger", "wandb"), ("MLFlowLogger", "mlflow")):
        if importlib.util.find_spec(package) is None:
            given = [*FIT, f"--trainer.logger+={logger}"]
            refuses([logger, package], cli, "fit", *given)


def test_why_a_logger_cannot_be_made_is_not_lost(folder: Path) -> None:
    (folder / "mine.py").write_text(
        "from lightning.pytorch.loggers.logger import DummyLogger\nclass Mine(DummyLogger):\n"
        "    def __init__(self):\n        raise ValueError('there is no database')\n"
    )
    with pytest.raises(CommandError, match="no database") as error:
        cli("fit", *FIT, "--trainer.logger+=mine.Mine")
    assert "Namespace(" not in str(error.value)


def test_tensorboard_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning, "find_spec", lambda name: None)
    (logger,) = lightning.settings_of(
        ["fit", "--model=MLPClassifier", "--data=Digits"]
    ).trainer.logger
    assert logger.class_path.endswith("CSVLogger")


@pytest.mark.parametrize(
    ("package", "extra", "argv"),
    [
        ("matplotlib", "plots", ["compare", "runs"]),
        ("matplotlib", "plots", ["write", "a", "--model=handwriting.none", "--out=a.svg"]),
        ("matplotlib", "plots", ["fit", *FIT, "--trainer.callbacks+=CurvesPlot"]),
        ("shtab", "completion", ["--print_completion=shtab-bash"]),
    ],
)
def test_an_extra_is_asked_for_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, package: str, extra: str, argv: list[str]
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    said = told(capsys, *argv, code=2 if argv[0] == "fit" else 1)
    assert package in said
    assert f"ln-zoo[{extra}]" in said


def test_pictures_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning, "find_spec", lambda name: None)
    assert main(["fit", *FIT, "--trainer.max_epochs=1", "--trainer.logger.name=bare"]) == 0
    assert Path("runs/bare/version_0/metrics.csv").exists()
    assert not Path("runs/bare/version_0/curves.png").exists()


def test_runs_are_compared() -> None:
    succeed("fit", *FIT, "--trainer.max_epochs=2", "--trainer.logger.name=other")
    succeed(
        "compare", "rms=runs/Forecaster-RMSNorm/version_0", "runs/other/version_0", "--csv=c.csv"
    )
    rows = rows_of("c.csv")
    assert {row["label"] for row in rows} == {"rms", "other"}
    assert all(float(row["val/loss"]) > 0 for row in rows)
    assert Path("compare.png").stat().st_size > 0


EXPORTED = """
from forecasting.model import Forecaster
from ln_zoo.export import map_path
from ln_zoo.export.paths import normal

class Exported(Forecaster):
    def export_parts(self):
        inputs, forward = {"x": normal("N", "T", 2)}, Forecaster.forward
        return {"forecast": lambda copy, form: map_path(self, copy, form, inputs, "y", forward)}
"""


def test_a_module_is_exported_if_it_says_what(folder: Path) -> None:
    how = ("--format=pt2", "--form=sequence", "--out=forecast.pt2")
    wanted = ["Forecaster", "export_parts", "export.md"]
    refuses(wanted, cli, "export", LAST, "--import=forecasting.model", *how, code=1)
    (folder / "exported.py").write_text(EXPORTED)
    given = (*RMS, "--trainer.max_epochs=1", "--trainer.logger.name=exported")
    succeed("fit", "--model=exported.Exported", *FIT[1:], *given)
    checkpoint = "runs/exported/version_0/checkpoints/last.ckpt"
    assert "x (N, T, 2)" in succeed("export", checkpoint, "--import=exported", *how).out
    program = torch.export.load("forecast.pt2").module()
    (forecast,) = program(torch.randn(2, 7, 2))
    assert forecast.shape == (2, 7, 2)


def test_help_on_a_class() -> None:
    assert "--model.hidden_size" in succeed("fit", "--model.help", MODULE[0][8:]).out
    assert "--data.steps" in succeed("fit", "--data.help", DATA[0][7:]).out


@pytest.mark.slow
def test_a_sweep_gives_the_module_its_norm() -> None:
    norms = "--norms=LayerNorm,RMSNorm,Identity"
    succeed("sweep", norms, "--seeds=2", "--out=sweep", "--", *FIT, "--trainer.max_epochs=1")
    for norm, acts in (("LayerNorm", True), ("RMSNorm", True), ("none", False)):
        state = load(next(Path(f"sweep/{norm}").rglob("last.ckpt")))["state_dict"]
        assert any(key.endswith("gain") for key in state) == acts
    assert {row["baseline"] for row in rows_of("sweep/report/differences.csv")} == {"none"}
