"""Checkpoints: read weights-only on every road, and what they override is said."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from cli_support import QUIET, SMALL, fails, fit, load, results, run, succeed
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import ln_zoo
from ln_zoo.data import Digits
from ln_zoo.models import MLPClassifier, ZooModule
from ln_zoo.norms import LayerNorm, RMSNorm
from ln_zoo.zoo import card_from_checkpoint, describe, source
from ln_zoo.zoo.catalog import results_csv

DATA = SMALL[2:]  # the model comes from the checkpoint


def test_loads_in_python_and_trains_again(trained: Path, here: Path) -> None:
    state = load(trained)["state_dict"]
    for cls in (ZooModule, MLPClassifier):
        model = cls.load_from_checkpoint(trained)
        assert (type(model), model.lr, model.network[1].site.norm) == (
            MLPClassifier, 0.01, LayerNorm(),
        )  # fmt: skip
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model = ZooModule.load_from_checkpoint(trained, lr=0.5, norm=LayerNorm(eps=1e-3))
    trainer = Trainer(
        max_epochs=1, logger=False, enable_progress_bar=False, default_root_dir=here,
        callbacks=ModelCheckpoint(here, "again"), accelerator="cpu", enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, datamodule=Digits(batch_size=20, train_size=100))
    hparams = load(here / "again.ckpt")["hyper_parameters"]
    assert (hparams["lr"], hparams["norm"]["init_args"]["eps"]) == (0.5, 1e-3)
    succeed("test", "--ckpt_path", here / "again.ckpt", *DATA, *QUIET)


# test and validate


def test_scores_without_naming_the_model(trained: Path, here: Path) -> None:
    done = succeed("test", "--ckpt_path", trained, *DATA, *QUIET)
    assert "untrained" not in done.err
    assert "ignored" not in done.err
    model = MLPClassifier.load_from_checkpoint(trained).eval()
    data = Digits()
    data.setup()
    with torch.no_grad():
        wrong = sum(
            float(model.per_example(batch)["error"].sum()) for batch in data.test_dataloader()
        )
    assert results(here)["metrics"]["error"] == wrong / 300


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_a_warning_of_untrained_weights(here: Path, command: str) -> None:
    done = succeed(command, *SMALL, *QUIET)
    assert "WARNING: the weights are untrained" in done.err
    assert bool(list(here.rglob("test_results.json"))) == (command == "test")
    if command != "predict":
        for word in ("MLPClassifier, LayerNorm", "metric", "measured", "error", "nll"):
            assert word in done.out


# What is ignored is said


def test_resuming_notes_ignored_arguments(trained: Path, here: Path) -> None:
    done = succeed(
        "fit", *SMALL, *QUIET, "--ckpt_path", trained, "--trainer.max_epochs=2",
        "--model.lr=0.5", "--model.norm=RMSNorm", "--model.activation=relu",
    )  # fmt: skip
    norm, rate = [line for line in done.err.splitlines() if line.startswith("note:")]
    for word in ("model.norm", "RMSNorm", trained, "LayerNorm", "--weights"):
        assert str(word) in norm
    for word in ("model.lr", "0.5", trained, "0.01"):
        assert str(word) in rate
    # The folder has the name of what was trained.
    (last,) = here.glob("runs/MLPClassifier-LayerNorm/version_0/checkpoints/last.ckpt")
    assert load(last)["hyper_parameters"]["norm"]["class_path"] == "ln_zoo.norms.LayerNorm"
    assert load(last)["optimizer_states"][0]["param_groups"][0]["lr"] == 0.01
    assert load(last)["epoch"] == 1
    for norm in ("LayerNorm", "ln_zoo.norms.LayerNorm", "ln_zoo.LayerNorm"):
        given = (f"--model.norm={norm}", "--model.lr=1e-2")
        assert "ignored" not in succeed("test", "--ckpt_path", trained, *SMALL, *QUIET, *given).err


def test_notes_of_arguments_that_the_data_determine(trained: Path, here: Path) -> None:
    (here / "c.yaml").write_text("model: {init_args: {num_classes: 7}}\n")
    for argv, noted in (
        ([*SMALL, "--model.in_features=40"], {"in_features"}),
        ([*SMALL, "--config=c.yaml"], {"num_classes"}),
        ([*DATA, "--ckpt_path", trained], set()),
    ):
        found = succeed("test", *argv, *QUIET).err
        assert {name for name in ("in_features", "num_classes") if f"model.{name} is" in found} == (
            noted
        )


# last


def test_last_finds_the_newest_run_of_the_name(here: Path) -> None:
    fit()
    fit("--model.norm=RMSNorm", epochs=2)
    done = fit("--ckpt_path=last", epochs=3)
    assert "ignored" not in done.err
    runs = here / "runs/MLPClassifier-LayerNorm"
    assert load(runs / "version_1/checkpoints/last.ckpt")["global_step"] == 15
    done = fit("--ckpt_path=last", "--model.lr=0.5", epochs=4)
    assert load(runs / "version_2/checkpoints/last.ckpt")["global_step"] == 20
    assert "note: model.lr = 0.5 is ignored: runs/MLPClassifier-LayerNorm/version_1" in done.err


@pytest.mark.parametrize(("every", "limit"), [(1, ()), (2, ("--trainer.max_steps=25",))])
def test_resumed_after_an_epoch_it_goes_on_as_if_uninterrupted(
    here: Path, every: int, limit: tuple[str, ...]
) -> None:
    """Whether or not the epoch was validated, and whatever ends the run."""
    options = [
        *limit,
        f"--trainer.check_val_every_n_epoch={every}",
        "--lr_scheduler=ExponentialLR",
        "--lr_scheduler.gamma=0.5",
    ]
    fit(*options, epochs=5)
    fit(*options, epochs=3)
    fit(*options, "--ckpt_path=last", epochs=5)
    whole, _, resumed = (
        load(here / f"runs/MLPClassifier-LayerNorm/version_{i}/checkpoints/last.ckpt")
        for i in range(3)
    )
    for part in ("epoch", "global_step", "lr_schedulers", "state_dict", "optimizer_states"):
        torch.testing.assert_close(resumed[part], whole[part], rtol=0, atol=0, msg=part)


# --weights


def test_weights_start_a_new_run_and_arguments_win(trained: Path, here: Path) -> None:
    start = ("fit", "--weights", trained, *DATA, *QUIET, "--trainer.max_epochs=1")
    succeed(*start, "--model.lr=1e-30")
    (last,) = here.glob("runs/**/last.ckpt")
    checkpoint = load(last)
    hparams = checkpoint["hyper_parameters"]
    assert (checkpoint["global_step"], hparams["lr"], hparams["hidden_sizes"]) == (5, 1e-30, [8])
    before = load(trained)["state_dict"]  # at that rate nothing moves
    assert all(torch.equal(v, before[k]) for k, v in checkpoint["state_dict"].items())


def test_training_before_a_run_counts(
    trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten updates in two runs, which started from the weights after five."""
    more = ("fit", *DATA, *QUIET)
    succeed(*more, "--weights", trained, "--trainer.max_epochs=1")
    first = here / "runs/MLPClassifier-LayerNorm/version_0/checkpoints/last.ckpt"
    resumed = ("--trainer.max_epochs=2", "--trainer.logger=false", "--test_after_fit=true")
    succeed(*more, "--ckpt_path", first, *resumed)
    (last,) = here.glob("runs/*/version_1/checkpoints/last.ckpt")
    of_all = {"dataset": "digits", "train_size": 100, "batch_size": 20}
    digest = hashlib.sha256(trained.read_bytes()).hexdigest()
    before = of_all | {"epochs": 1, "steps": 5, "weights": f"last.ckpt, sha256 {digest}"}
    runs = [before, of_all | {"epochs": 2, "steps": 10}]
    assert results(here / "runs")["training_runs"] == runs
    file = next(here.rglob("test_results.json"))
    monkeypatch.setenv("LN_ZOO_MODELS", str(here))
    card_from_checkpoint(last, file, here / "mlp.continued")
    assert describe("mlp.continued").results["training"]["earlier"] == [before]
    assert before["weights"] in (here / "mlp.continued/README.md").read_text()
    for row in csv.DictReader(results_csv(["mlp.continued"]).splitlines()):
        assert (row["epochs"], row["steps"]) == ("3", "15")
    # Nothing depends on the size of batches in a test.
    own = "--trainer.logger.save_dir=again"
    succeed("test", "--weights=mlp.continued", *DATA, *QUIET, "--data.batch_size=300", own)
    *earlier, of_card = results(here / "again")["training_runs"]
    assert of_card.pop("weights").startswith("mlp.continued, sha256 ")
    assert [*earlier, of_card] == runs


def test_a_card_overridden_in_part(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MLPClassifier(64, [8], norm=RMSNorm(eps=1e-4)).save_pretrained(here / "cards/mlp.mine")
    monkeypatch.setenv("LN_ZOO_MODELS", str(here / "cards"))
    more = ("--trainer.max_epochs=1", "--model.norm.eps=1")
    done = succeed("fit", "--weights=mlp.mine", *DATA, *QUIET, *more)
    assert "untrained" not in done.err
    (last,) = here.glob("runs/MLPClassifier-RMSNorm/**/last.ckpt")
    assert load(last)["hyper_parameters"]["norm"] == {
        "class_path": "ln_zoo.norms.RMSNorm", "init_args": {"gain": 1.0, "eps": 1.0},
    }  # fmt: skip


@pytest.mark.parametrize("option", ["--weights", "--ckpt_path"])
def test_weights_of_another_norm_or_size_name_the_keys(
    trained: Path, here: Path, option: str
) -> None:
    wrong = here / "wrong.ckpt"
    checkpoint = load(trained)
    hparams = checkpoint["hyper_parameters"]
    hparams["norm"] = {"class_path": "ln_zoo.norms.BatchNorm", "init_args": {}}
    hparams["hidden_sizes"] = [9]
    torch.save(checkpoint, wrong)
    says = ["network.1.site.running_mean", "network.1.weight", "(8, 64)", "(9, 64)"]
    fails("test", option, wrong, *DATA, *QUIET, says=[wrong, "MLPClassifier", *says])


def test_one_source_of_models(trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File, run folder, card folder and name give the same model, in Python and by command."""
    monkeypatch.setenv("LN_ZOO_MODELS", str(here / "cards"))
    source.load_model(str(trained)).save_pretrained(here / "cards/mlp.again")
    state = load(trained)["state_dict"]
    measured = []
    for text in (trained, trained.parents[1], here / "cards/mlp.again", "mlp.again"):
        found = source.find(str(text))
        assert (found.cls, found.init_args["hidden_sizes"]) == (MLPClassifier, [8]), text
        for loaded in (found.load(), ln_zoo.load(text)):
            assert not loaded.training
            assert all(torch.equal(v, state[k]) for k, v in loaded.state_dict().items()), text
        succeed("test", "--weights", text, *DATA, *QUIET)
        measured.append(results(here / "runs")["metrics"])
        shutil.rmtree(here / "runs")
    assert all(each == measured[0] for each in measured)


# Damaged files


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[:200] = b"\0" * 200
    path.write_bytes(data)


def _zero(path: Path) -> None:
    """Some weights become 0: torch reads the file, and the model scores a little worse."""
    data = path.read_bytes()
    weights = load(path)["state_dict"]["network.1.weight"].numpy().tobytes()
    path.write_bytes(data.replace(weights[:400], b"\0" * 400, 1))


def _foreign(path: Path) -> None:
    torch.save({"weights": torch.zeros(2)}, path)


def _object(path: Path) -> None:
    torch.save({"state_dict": {}, "norm": torch.nn.Identity()}, path)


def _nameless(path: Path) -> None:
    checkpoint = load(path)
    del checkpoint["hyper_parameters"]
    torch.save(checkpoint, path)


@pytest.mark.parametrize(
    "damage",
    [_cut, _zero, _flip, lambda path: path.write_text("hello"), _foreign, _object, _nameless],
)
@pytest.mark.parametrize("option", ["--ckpt_path", "--weights"])
def test_damaged_checkpoints(trained: Path, here: Path, damage: object, option: str) -> None:
    path = here / "damaged.ckpt"
    shutil.copy(trained, path)
    damage(path)  # type: ignore[operator]
    before = path.read_bytes()
    fails("fit", option, path, *DATA, *QUIET, says=[path])
    assert path.read_bytes() == before
    assert [p.name for p in here.iterdir()] == ["damaged.ckpt"]


def test_the_newest_whole_checkpoint_is_resumed(here: Path) -> None:
    fit(epochs=2)
    (checkpoints,) = here.glob("runs/*/version_0/checkpoints")
    assert {p.name for p in checkpoints.iterdir()} == {"last.ckpt", "last-previous.ckpt"}
    (checkpoints / "last.ckpt.partial").write_bytes(b"what a kill left")
    _zero(checkpoints / "last.ckpt")
    done = fit("--ckpt_path=last", epochs=3)
    kept = (checkpoints / "last-previous.ckpt").relative_to(here)
    assert "last.ckpt is damaged: the checksum of" in done.err
    assert f"{kept} is the newest whole checkpoint" in done.err
    assert not (checkpoints / "last.ckpt.partial").exists()
    (resumed,) = here.glob("runs/*/version_1/checkpoints/last.ckpt")
    assert load(resumed)["global_step"] == 15
    for path in here.glob("runs/*/*/checkpoints/*"):
        _cut(path)
    done = run("fit", *SMALL, *QUIET, "--ckpt_path=last")
    assert done.code == 2
    assert "runs/MLPClassifier-LayerNorm" in done.err


# A card from a checkpoint and its test


def test_card_of_a_test_and_back(here: Path) -> None:
    done = fit("--test_after_fit=true", epochs=2)
    (file,) = here.rglob("test_results.json")
    assert f"results: {file.relative_to(here)}" in done.out
    measured = results(here)
    assert (measured["checkpoint"], measured["epochs"], measured["steps"]) == ("last.ckpt", 2, 10)
    last = file.parent / "checkpoints/last.ckpt"
    succeed("card", last, "--results", file, "--out", here / "cards/mlp.new")
    carried = json.loads((here / "cards/mlp.new/results.json").read_text())
    assert {m["name"]: m["value"] for m in carried["metrics"]} == measured["metrics"]
    assert carried["evaluation"]["command"] == measured["command"]
    assert (carried["training"]["epochs"], carried["training"]["steps"]) == (2, 10)
    config = json.loads((here / "cards/mlp.new/config.json").read_text())
    assert config["preprocessing"] == {"scale": 16, "image_shape": [1, 8, 8]}
    # The card's weights give the card's numbers.
    own = "--trainer.logger.save_dir=again"
    succeed("test", "--weights", here / "cards/mlp.new", *DATA, *QUIET, own)
    assert results(here / "again")["metrics"] == measured["metrics"]
    # Results of another checkpoint are refused.
    fit("--model.lr=0.1")
    other = here / "runs/MLPClassifier-LayerNorm/version_1/checkpoints/last.ckpt"
    fails("card", other, "--results", file, "--out", "mlp.other", code=1, says=["sha256"])


# Checkpoints from anywhere


def _foreign_class(trained: Path, path: Path, **changes: object) -> None:
    checkpoint = load(trained)
    checkpoint["hyper_parameters"].update(changes)
    torch.save(checkpoint, path)


def test_no_module_is_imported_because_a_checkpoint_names_it(trained: Path, here: Path) -> None:
    (here / "redteam.py").write_text("open('imported', 'w')\nclass Foo: pass\n")
    # A file that would be read as the configuration of a norm.
    (here / "norm.yaml").write_text("class_path: redteam.Foo")
    _foreign_class(trained, here / "model.ckpt", _class_path="redteam.Foo")
    _foreign_class(trained, here / "norm.ckpt", norm={"class_path": "redteam.Foo"})
    _foreign_class(trained, here / "path.ckpt", norm="norm.yaml")
    # Text that the parser would import, or read as a class.
    _foreign_class(trained, here / "cell.ckpt", activation="redteam.Foo")
    _foreign_class(trained, here / "json.ckpt", activation='{"class_path": "redteam.Foo"}')
    _foreign_class(trained, here / "words.ckpt", vocabulary="mine.yaml")
    (here / "mine.yaml").write_text("ckpt_path: model.ckpt\n")
    for given, says in (
        ("test --ckpt_path=model.ckpt", "model.ckpt redteam.Foo"),
        ("test --ckpt_path=norm.ckpt", "--model.norm redteam.Foo"),
        ("test --ckpt_path=path.ckpt", "norm class_path"),
        ("test --ckpt_path=cell.ckpt", "redteam.Foo"),
        ("fit --weights=json.ckpt", "redteam.Foo"),
        ("test --weights=words.ckpt", "mine.yaml"),
        ("test --weights=model.ckpt", "--model redteam.Foo"),
        ("fit --ckpt_path=norm.ckpt", "redteam.Foo"),
        ("predict --weights=norm.ckpt", "redteam.Foo"),
        ("validate --config=mine.yaml", "redteam.Foo"),
        ('validate --config={"ckpt_path":"model.ckpt"}', "redteam.Foo"),
        ("test --ckpt_path=model.ckpt --model=MLPClassifier", "redteam.Foo"),
        ("write text --model=model.ckpt", "--import redteam"),
        ("analyze dynamics --ckpt=norm.ckpt", "--import redteam"),
        ("card norm.ckpt --results=x --out=card", "--import redteam"),
        ("card model.ckpt --results=x --out=card", "--import redteam"),
    ):
        trains = given.split()[0] in ("test", "fit", "predict", "validate")
        more = DATA if trains else ()
        fails(*given.split(), *more, code=2 if trains else 1, says=says.split())
        assert not (here / "imported").exists(), given


@pytest.mark.parametrize("option", ["--ckpt_path", "--weights"])
def test_checkpoints_of_no_model_or_of_another_version(
    trained: Path, here: Path, option: str
) -> None:
    """One short line, without the arguments in the file."""
    _foreign_class(trained, here / "linear.ckpt", _class_path="torch.nn.Linear", secret="x" * 99)
    _foreign_class(trained, here / "old.ckpt", hidden_features=[8])
    for name, says in (
        ("linear.ckpt", ["torch.nn.Linear"]),
        ("old.ckpt", ["hidden_features", "MLPClassifier", "'in_features'"]),
    ):
        line = fails("test", option, name, *DATA, *QUIET, says=[name, *says])
        assert len(line) < 300


OWN = """
from dataclasses import dataclass
import torch
from ln_zoo.models import MLPClassifier
from ln_zoo.norms import RMSNorm


@dataclass(frozen=True)
class Mine(RMSNorm): pass


class Decayed(MLPClassifier):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)
"""


def test_a_users_own_model_and_norm_are_tested_by_naming_them(here: Path) -> None:
    (here / "my_models.py").write_text(OWN)
    own = ["--model=my_models.Decayed", "--model.norm=my_models.Mine"]
    fit(*own, "--model.norm.eps=1e-3")
    folder = "runs/Decayed-Mine/version_0"
    last = f"{folder}/checkpoints/last.ckpt"
    for named in (own, ["--config", f"{folder}/config.yaml"]):
        done = succeed("test", "--ckpt_path", last, *named, "--data=Digits", *QUIET)
        assert "ignored" not in done.err
    succeed("test", "--weights", last, *own, "--data=Digits", *QUIET)
    # Both of its classes are to be named.
    fails("test", "--ckpt_path", last, own[0], "--data=Digits", *QUIET,
          says=["--model.norm my_models.Mine"])  # fmt: skip
    fails("analyze", "dynamics", "--ckpt", last, "--import=my_models", code=1, says=["Decayed"])
