"""Checkpoints: read weights-only on every road, and what they override is said."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from cli_support import QUIET, SMALL, fails, fit, load, run
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import ln_zoo
from ln_zoo.data import Digits
from ln_zoo.models import MLPClassifier, ZooModule
from ln_zoo.norms import BatchNorm, LayerNorm, RMSNorm
from ln_zoo.zoo import CardError, card_from_checkpoint, describe, source, write_card
from ln_zoo.zoo.catalog import results_csv
from ln_zoo.zoo.source import check_fits

DATA = SMALL[2:]  # the model comes from the checkpoint
PREPROCESSING = {"scale": 16, "image_shape": [1, 8, 8]}


def metrics(folder: Path) -> dict[str, float]:
    """The metrics of the only test run below a folder."""
    (path,) = folder.glob("**/test_results.json")
    return json.loads(path.read_text())["metrics"]


def card(folder: Path, **model_args: object) -> Path:
    """A published model of random weights."""
    model = MLPClassifier(64, [8], 10, **model_args)  # type: ignore[arg-type]
    results = {
        "metrics": [
            {"name": "error", "value": 0.9, "unit": "fraction", "dataset": "digits",
             "split": "test"},
        ],
        "evaluation": {
            "command": "ln-zoo test", "seed": 0, "hardware": "CPU", "date": "2026-01-01",
            "versions": {},
        },
        "training": {"epochs": 1, "steps": 5, "commands": []},
        "size": {}, "data": {"dataset": "digits"}, "card": {},
    }  # fmt: skip
    return write_card(folder, model, results, preprocessing=PREPROCESSING)


# What a checkpoint holds


def test_holds_plain_values_and_its_class(trained: Path) -> None:
    checkpoint = load(trained)
    hparams = checkpoint["hyper_parameters"]
    assert hparams["_class_path"] == "ln_zoo.models.MLPClassifier"
    assert hparams["norm"] == {
        "class_path": "ln_zoo.norms.LayerNorm",
        "init_args": {"gain": 1.0, "eps": 1e-5, "convolution": "channel", "per_gate": False},
    }
    assert (hparams["lr"], hparams["hidden_sizes"]) == (0.01, [8])


def test_loads_by_base_class_and_by_class(trained: Path) -> None:
    state = load(trained)["state_dict"]
    for cls in (ZooModule, MLPClassifier):
        model = cls.load_from_checkpoint(trained)
        assert type(model) is MLPClassifier
        assert model.lr == 0.01
        assert model.network[1].site.norm == LayerNorm()
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_overrides_win_when_loading(trained: Path) -> None:
    model = ZooModule.load_from_checkpoint(trained, lr=0.5, norm=LayerNorm(eps=1e-3))
    assert (model.lr, model.network[1].site.norm) == (0.5, LayerNorm(eps=1e-3))
    assert model.hparams["norm"]["init_args"]["eps"] == 1e-3


def test_load_fit_save_again(trained: Path, here: Path) -> None:
    model = ZooModule.load_from_checkpoint(trained)
    trainer = Trainer(
        max_epochs=1, logger=False, enable_progress_bar=False, default_root_dir=here,
        callbacks=ModelCheckpoint(here, "again"), accelerator="cpu", enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, datamodule=Digits(batch_size=20, train_size=100))
    first, again = load(trained), load(here / "again.ckpt")
    assert again["hyper_parameters"] == first["hyper_parameters"]
    assert ZooModule.load_from_checkpoint(here / "again.ckpt").lr == 0.01
    # And the command line reads it.
    assert run("test", "--ckpt_path", here / "again.ckpt", *DATA, *QUIET).code == 0


def test_made_in_python_with_a_norm_object(here: Path) -> None:
    data = Digits(batch_size=20, train_size=100)
    options = {
        "logger": False, "enable_progress_bar": False, "default_root_dir": here,
        "accelerator": "cpu", "enable_model_summary": False,
    }  # fmt: skip
    keep = ModelCheckpoint(here, monitor="val_nll")
    trainer = Trainer(max_epochs=2, callbacks=keep, **options)
    trainer.fit(MLPClassifier(64, [8], norm=BatchNorm(momentum=0.2)), datamodule=data)
    (by_trainer,) = trainer.test(ckpt_path="best", datamodule=data, verbose=False)
    assert (
        load(Path(keep.best_model_path))["hyper_parameters"]["norm"]["init_args"]["momentum"] == 0.2
    )
    # Resumed in Python, and scored by the command line, which needs no --model.
    longer = Trainer(max_epochs=3, callbacks=ModelCheckpoint(here / "more"), **options)
    longer.fit(
        MLPClassifier(64, [8], norm=BatchNorm()), datamodule=data, ckpt_path=keep.best_model_path
    )
    assert longer.current_epoch == 3
    done = run("test", "--ckpt_path", keep.best_model_path, "--data=Digits", *QUIET)
    assert done.code == 0, done.err
    assert metrics(here / "runs") == {
        "nll": by_trainer["test_nll"], "error": by_trainer["test_error"],
    }  # fmt: skip


# test and validate


def test_scores_without_naming_the_model(trained: Path, here: Path) -> None:
    done = run("test", "--ckpt_path", trained, *DATA, *QUIET)
    assert done.code == 0, done.err
    assert "untrained" not in done.err
    assert "ignored" not in done.err
    model = MLPClassifier.load_from_checkpoint(trained).eval()
    data = Digits()
    data.setup()
    with torch.no_grad():
        wrong = sum(
            float(model.per_example(batch)["error"].sum()) for batch in data.test_dataloader()
        )
    assert metrics(here)["error"] == wrong / 300


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_untrained_weights_are_said_loudly(here: Path, command: str) -> None:
    done = run(command, *SMALL, *QUIET)
    assert done.code == 0
    assert f"WARNING: the weights are untrained. `ln-zoo {command}` uses their" in done.err


# What is ignored is said


def test_resuming_tells_which_arguments_are_ignored(trained: Path, here: Path) -> None:
    done = run(
        "fit", *SMALL, *QUIET, "--ckpt_path", trained, "--trainer.max_epochs=2",
        "--model.lr=0.5", "--model.norm=RMSNorm", "--model.activation=relu",
    )  # fmt: skip
    assert done.code == 0, done.err
    notes = [line for line in done.err.splitlines() if line.startswith("note:")]
    tail = "(--weights in place of --ckpt_path starts afresh from its weights)"
    assert notes == [
        f"note: model.norm = ln_zoo.norms.RMSNorm is ignored: {trained} was trained with "
        f"ln_zoo.norms.LayerNorm {tail}",
        f"note: model.lr = 0.5 is ignored: {trained} was trained with 0.01 {tail}",
    ]
    (last,) = here.glob("runs/**/last.ckpt")
    assert load(last)["hyper_parameters"]["norm"]["class_path"] == "ln_zoo.norms.LayerNorm"
    assert load(last)["optimizer_states"][0]["param_groups"][0]["lr"] == 0.01
    assert load(last)["epoch"] == 1


@pytest.mark.parametrize("norm", ["LayerNorm", "ln_zoo.norms.LayerNorm", "ln_zoo.LayerNorm"])
def test_what_agrees_is_not_called_ignored(trained: Path, here: Path, norm: str) -> None:
    done = run(
        "test", "--ckpt_path", trained, *SMALL, *QUIET, f"--model.norm={norm}", "--model.lr=1e-2"
    )
    assert done.code == 0, done.err
    assert "ignored" not in done.err


def test_what_the_data_decide_is_said(trained: Path, here: Path) -> None:
    note = "note: model.in_features is ignored: it is taken from data.in_features"
    done = run("test", *SMALL, *QUIET, "--model.in_features=40")
    assert (done.code, note in done.err) == (0, True)
    (here / "c.yaml").write_text("model: {init_args: {num_classes: 7}}\n")
    done = run("test", *SMALL, *QUIET, "--config=c.yaml")
    assert (done.code, note in done.err) == (0, False)
    assert "note: model.num_classes is ignored: it is taken from data.num_classes" in done.err
    done = run("test", *DATA, *QUIET, "--ckpt_path", trained)
    assert (done.code, "note" in done.err) == (0, False)


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


@pytest.mark.parametrize("limit", [(), ("--trainer.max_steps=25",)])
@pytest.mark.parametrize("every", [1, 2])
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


def test_weights_start_afresh_and_arguments_win(trained: Path, here: Path) -> None:
    done = run(
        "fit", "--weights", trained, *DATA, *QUIET, "--trainer.max_epochs=1", "--model.lr=1e-30"
    )
    assert done.code == 0, done.err
    (last,) = here.glob("runs/**/last.ckpt")
    checkpoint = load(last)
    assert (checkpoint["global_step"], checkpoint["hyper_parameters"]["lr"]) == (5, 1e-30)
    assert checkpoint["hyper_parameters"]["hidden_sizes"] == [8]
    before = load(trained)["state_dict"]  # at that rate nothing moves
    assert all(torch.equal(v, before[k]) for k, v in checkpoint["state_dict"].items())


def test_training_before_a_run_counts(
    trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten updates in two runs, which started from the weights after five."""
    more = ("fit", *DATA, *QUIET, "--test_after_fit=true")
    start = run(*more, "--weights", trained, "--trainer.max_epochs=1", "--test_after_fit=false")
    assert start.code == 0, start.err
    first = here / "runs/MLPClassifier-LayerNorm/version_0/checkpoints/last.ckpt"
    done = run(*more, "--ckpt_path", first, "--trainer.max_epochs=2", "--trainer.logger=false")
    assert done.code == 0, done.err
    (last,) = here.glob("runs/*/version_1/checkpoints/last.ckpt")
    assert run("test", "--ckpt_path", last, *DATA, *QUIET).code == 0
    of_all = {"dataset": "digits", "train_size": 100, "batch_size": 20}
    digest = hashlib.sha256(trained.read_bytes()).hexdigest()
    before = of_all | {"epochs": 1, "steps": 5, "weights": f"last.ckpt, sha256 {digest}"}
    runs = [before, of_all | {"epochs": 2, "steps": 10}]
    found = [json.loads(path.read_text()) for path in here.glob("runs/**/test_results.json")]
    assert [measured["training_runs"] for measured in found] == [runs, runs]
    results = next(here.glob("runs/**/test_results.json"))
    monkeypatch.setenv("LN_ZOO_MODELS", str(here))
    card_from_checkpoint(last, results, here / "mlp.continued")
    assert describe("mlp.continued").results["training"]["earlier"] == [before]
    readme = (here / "mlp.continued/README.md").read_text()
    assert f"- started from: {before['weights']}: 1 epoch, 5 updates, on digits" in readme
    for row in csv.DictReader(results_csv(["mlp.continued"]).splitlines()):
        assert (row["epochs"], row["steps"]) == ("3", "15")
    # Of the size of batches in a test nothing depends.
    again = run("test", "--weights=mlp.continued", *DATA, *QUIET, "--data.batch_size=300")
    assert again.code == 0, again.err
    published = max(here.glob("runs/**/test_results.json"), key=lambda path: path.stat().st_mtime)
    *earlier, of_card = json.loads(published.read_text())["training_runs"]
    assert earlier == [before]
    assert of_card.pop("weights").startswith("mlp.continued, sha256 ")
    assert of_card == runs[1]


def test_weights_of_a_card_by_name_and_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = card(here / "cards/mlp.mine", norm=RMSNorm(eps=1e-4))
    monkeypatch.setenv("LN_ZOO_MODELS", str(here / "cards"))
    results = []
    for weights in ("mlp.mine", folder):
        done = run("test", "--weights", weights, *DATA, *QUIET)
        assert done.code == 0, done.err
        assert "untrained" not in done.err
        results.append(metrics(here / "runs"))
        shutil.rmtree(here / "runs")
    assert results[0] == results[1]
    (here / "a").mkdir()
    done = run(
        "fit", "--weights=mlp.mine", *DATA, *QUIET, "--trainer.max_epochs=1", "--model.norm.eps=1"
    )
    assert done.code == 0, done.err
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


def test_eight_differing_keys_are_enough() -> None:
    with pytest.raises(ValueError, match=r"network\.5\.bias is missing; and 1 more$"):
        check_fits(MLPClassifier(6, [5, 5], 3, normalize_logits=True), {}, "x.ckpt")


def test_data_of_another_size(trained: Path, here: Path, data_root: Path) -> None:
    fails("test", "--ckpt_path", trained, "--data=MNIST", f"--data.root={data_root / 'mnist'}",
          says=["network.1.weight", "(8, 64)", "(8, 784)"])  # fmt: skip


def test_one_source_of_models(trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File, run folder, card folder and name give the same model, in Python and by command."""
    monkeypatch.setenv("LN_ZOO_MODELS", str(here / "cards"))
    model = source.load_model(str(trained))
    model.save_pretrained(here / "cards/mlp.again")
    state = load(trained)["state_dict"]
    measured = []
    for text in (trained, trained.parents[1], here / "cards/mlp.again", "mlp.again"):
        found = source.find(str(text))
        assert (found.cls, found.init_args["hidden_sizes"]) == (MLPClassifier, [8]), text
        for loaded in (found.load(), ln_zoo.load(text)):
            assert not loaded.training
            assert all(torch.equal(v, state[k]) for k, v in loaded.state_dict().items()), text
        done = run("test", "--weights", text, *DATA, *QUIET)
        assert done.code == 0, done.err
        measured.append(metrics(here / "runs"))
        shutil.rmtree(here / "runs")
    assert all(each == measured[0] for each in measured)
    with pytest.raises(CardError, match="checkpoint"):
        ln_zoo.load(trained, num_classes=3)


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


def test_card_of_a_test_and_back(trained: Path, here: Path) -> None:
    assert run("test", "--ckpt_path", trained, *DATA, *QUIET).code == 0
    (results,) = here.glob("runs/**/test_results.json")
    done = run("card", trained, "--results", results, "--out", here / "cards/mlp.new")
    assert done.code == 0, done.err
    measured = json.loads(results.read_text())
    carried = json.loads((here / "cards/mlp.new/results.json").read_text())
    assert {m["name"]: m["value"] for m in carried["metrics"]} == measured["metrics"]
    assert carried["evaluation"]["command"] == measured["command"]
    assert carried["training"]["epochs"] == measured["epochs"] == 1
    assert carried["training"]["steps"] == measured["steps"] == 5
    config = json.loads((here / "cards/mlp.new/config.json").read_text())
    assert config["preprocessing"] == PREPROCESSING
    # The card's weights give the card's numbers.
    shutil.rmtree(here / "runs")
    assert run("test", "--weights", here / "cards/mlp.new", *DATA, *QUIET).code == 0
    assert metrics(here / "runs") == measured["metrics"]


def test_card_after_fit(here: Path) -> None:
    done = fit("--test_after_fit=true", epochs=2)
    (results,) = here.glob("runs/**/test_results.json")
    measured = json.loads(results.read_text())
    assert (measured["checkpoint"], measured["epochs"], measured["steps"]) == ("last.ckpt", 2, 10)
    last = results.parent / "checkpoints/last.ckpt"
    assert f"results: {results.relative_to(here)}" in done.out
    done = run("card", last, "--results", results, "--out", here / "mlp.new")
    assert done.code == 0, done.err
    # Of another checkpoint it is refused.
    fit("--model.lr=0.1", epochs=2)
    other = here / "runs/MLPClassifier-LayerNorm/version_1/checkpoints/last.ckpt"
    done = run("card", other, "--results", results, "--out", here / "mlp.other")
    assert done.code == 1
    assert "sha256 differs" in done.err


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
    of, asks = (
        "is of redteam.Foo, which is not",
        "asks for redteam.Foo, which is not one of ln_zoo's",
    )
    for argv, message in (
        (["test", "--ckpt_path=model.ckpt"], f"model.ckpt {of}"),
        (["test", "--ckpt_path=norm.ckpt"], "you trust the file, give --model.norm redteam.Foo"),
        (["test", "--ckpt_path=path.ckpt"], "norm must be stored as class_path and init_args"),
        (["test", "--ckpt_path=cell.ckpt"], asks),
        (["fit", "--weights=json.ckpt"], "redteam.Foo"),
        (["test", "--weights=words.ckpt"], "mine.yaml"),
        (["test", "--weights=model.ckpt"], "if you trust the file, give --model redteam.Foo"),
        (["fit", "--ckpt_path=norm.ckpt"], asks),
        (["predict", "--weights=norm.ckpt"], asks),
        (["validate", "--config=mine.yaml"], of),
        (["validate", "--config", '{"ckpt_path": "model.ckpt"}'], of),
        (["test", "--ckpt_path=model.ckpt", "--model=MLPClassifier"], of),
        (["write", "text", "--model=model.ckpt"], "you trust the file, give --import redteam"),
        (["analyze", "dynamics", "--ckpt=norm.ckpt"], "trust the file, give --import redteam"),
        (
            ["card", "norm.ckpt", "--results=x", "--out=card"],
            "trust the file, give --import redteam, or",
        ),
        (
            ["card", "model.ckpt", "--results=x", "--out=card"],
            "trust the file, give --import redteam, or",
        ),
    ):
        done = run(*argv, *(DATA if argv[0] in ("test", "fit", "predict", "validate") else ()))
        assert done.code in (1, 2), argv
        assert message in done.err, (argv, done.err)
        assert not (here / "imported").exists(), argv


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


def test_a_users_own_model_and_norm_are_tested_by_naming_them(own_classes: Path) -> None:
    (own_classes / "my_models.py").write_text(OWN)
    own = ["--model=my_models.Decayed", "--model.norm=my_models.Mine"]
    fit(*own, "--model.norm.eps=1e-3")
    last = "runs/Decayed-Mine/version_0/checkpoints/last.ckpt"
    config = "runs/Decayed-Mine/version_0/config.yaml"
    for named in (own, ["--config", config]):
        done = run("test", "--ckpt_path", last, *named, "--data=Digits", *QUIET)
        assert (done.code, "ignored" in done.err) == (0, False), done.err
    done = run("test", "--weights", last, *own, "--data=Digits", *QUIET)
    assert done.code == 0, done.err
    # Both of its classes are to be named.
    done = run("test", "--ckpt_path", last, own[0], "--data=Digits", *QUIET)
    assert (done.code, "give --model.norm my_models.Mine" in done.err) == (2, True), done.err
    done = run("analyze", "dynamics", "--ckpt", last, "--import=my_models")
    assert "Decayed" in done.err
    assert "dynamics_data" in done.err
