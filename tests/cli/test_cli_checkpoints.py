"""Checkpoints: read weights-only on every road, and what they override is said."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from cli_support import DATA, QUIET, SMALL, Patch, cli, fit, last, load, results, same, succeed
from data_support import ready
from refusals import refuses

import ln_zoo
from ln_zoo.data import Digits
from ln_zoo.models import MLPClassifier
from ln_zoo.norms import RMSNorm
from ln_zoo.zoo import card_from_checkpoint, loading


def test_scores_without_naming_the_model(trained: Path, here: Path) -> None:
    done = succeed("test", "--ckpt_path", trained, *DATA, *QUIET)
    assert not re.search("untrained|ignored", done.err)
    model = MLPClassifier.load_from_checkpoint(trained).eval()
    loader = ready(Digits()).test_dataloader()
    with torch.no_grad():
        wrong = sum(model.per_example(batch)["error"].sum() for batch in loader)
    assert results(here)["metrics"]["error"] == float(wrong) / 300


@pytest.mark.parametrize("option", ["--weights", "--ckpt_path"])
def test_a_path_with_a_line_break(trained: Path, here: Path, option: str) -> None:
    path = here / "two\nlines/last.ckpt"
    path.parent.mkdir()
    path.symlink_to(trained)
    succeed("test", option, path, *DATA, *QUIET)


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_a_warning_of_untrained_weights(here: Path, command: str) -> None:
    done = succeed(command, *SMALL, *QUIET)
    assert "WARNING: the weights are untrained" in done.err
    assert bool(list(here.rglob("test_results.json"))) == (command == "test")
    if command != "predict":
        for word in ("MLPClassifier, LayerNorm", "metric", "measured", "error", "nll"):
            assert word in done.out


def test_resuming_notes_ignored_arguments(trained: Path, here: Path) -> None:
    done = succeed(
        "fit", *SMALL, *QUIET, "--ckpt_path", trained, "--trainer.max_epochs=2",
        "--model.lr=0.5", "--model.norm=RMSNorm", "--model.activation=relu",
    )  # fmt: skip
    notes = [line for line in done.err.splitlines() if line.startswith("note:")]
    words = "model.norm RMSNorm LayerNorm --weights", "model.lr 0.5 0.01"
    for note, says in zip(notes, words, strict=True):
        assert [word for word in (*says.split(), str(trained)) if word not in note] == []
    # The run goes where its norm belongs.
    assert [path.name for path in (here / "runs").iterdir()] == ["MLPClassifier-LayerNorm"]
    resumed = load(last())  # in the folder of what was trained
    assert resumed["hyper_parameters"]["norm"]["class_path"] == "ln_zoo.norms.LayerNorm"
    assert resumed["optimizer_states"][0]["param_groups"][0]["lr"] == 0.01
    assert resumed["epoch"] == 1
    for norm in ("LayerNorm", "ln_zoo.LayerNorm"):
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
        assert {x for x in ("in_features", "num_classes") if f"model.{x} is" in found} == noted


def test_last_finds_the_newest_run_of_the_name(here: Path) -> None:
    fit()
    fit("--model.norm=RMSNorm", epochs=2)
    done = fit("--ckpt_path=last", epochs=3)
    assert "ignored" not in done.err
    assert load(last(1))["global_step"] == 15
    done = fit("--ckpt_path=last", "--model.lr=0.5", epochs=4)
    assert load(last(2))["global_step"] == 20
    assert "note: model.lr = 0.5 is ignored: runs/MLPClassifier-LayerNorm/version_1" in done.err


def test_weights_start_a_new_run_and_arguments_win(trained: Path, here: Path) -> None:
    start = ("fit", "--weights", trained, *DATA, *QUIET, "--trainer.max_epochs=1")
    succeed(*start, "--model.lr=1e-30")
    checkpoint = load(last())
    hparams = checkpoint["hyper_parameters"]
    assert (checkpoint["global_step"], hparams["lr"], hparams["hidden_sizes"]) == (5, 1e-30, [8])
    # At that rate nothing moves.
    assert same(dict(checkpoint["state_dict"]), dict(load(trained)["state_dict"]))


def test_training_before_a_run_counts(trained: Path, here: Path) -> None:
    """Ten updates in two runs, which started from the weights after five."""
    more = ("fit", *DATA, *QUIET)
    succeed(*more, "--weights", trained, "--trainer.max_epochs=1")
    resumed = ("--trainer.max_epochs=2", "--trainer.logger=false", "--test_after_fit=true")
    succeed(*more, "--ckpt_path", last(), *resumed)
    of_all = {"dataset": "digits", "train_size": 100, "batch_size": 20}
    digest = hashlib.sha256(trained.read_bytes()).hexdigest()
    before = of_all | {"epochs": 1, "steps": 5, "weights": f"last.ckpt, sha256 {digest}"}
    runs = [before, of_all | {"epochs": 2, "steps": 10}]
    file = next(here.rglob("test_results.json"))
    assert json.loads(file.read_text())["training_runs"] == runs
    card_from_checkpoint(last(1), file, here / "mlp.continued")
    # Nothing depends on the size of batches in a test.
    own = ("--data.batch_size=300", "--trainer.logger.save_dir=again")
    succeed("test", "--weights=./mlp.continued", *DATA, *QUIET, *own)
    *earlier, of_card = results(here / "again")["training_runs"]
    assert of_card.pop("weights").startswith("mlp.continued, sha256 ")
    assert [*earlier, of_card] == runs


def test_a_card_overridden_in_part(here: Path, monkeypatch: Patch) -> None:
    MLPClassifier(64, [8], norm=RMSNorm(eps=1e-4)).save_pretrained(here / "cards/mlp.mine")
    monkeypatch.setenv("LN_ZOO_MODELS", str(here / "cards"))
    more = ("--trainer.max_epochs=1", "--model.norm.eps=1")
    done = succeed("fit", "--weights=mlp.mine", *DATA, *QUIET, *more)
    assert "untrained" not in done.err
    norm = load(last(name="MLPClassifier-RMSNorm"))["hyper_parameters"]["norm"]
    assert (norm["class_path"], norm["init_args"]["eps"]) == ("ln_zoo.norms.RMSNorm", 1.0)


@pytest.mark.parametrize("option", ["--weights", "--ckpt_path"])
def test_weights_of_another_norm_or_size_name_the_keys(
    trained: Path, here: Path, option: str
) -> None:
    wrong = here / "wrong.ckpt"
    norm = {"class_path": "ln_zoo.norms.BatchNorm", "init_args": {}}
    _foreign_class(trained, wrong, norm=norm, hidden_sizes=[9])
    says = ["network.1.site.running_mean", "network.1.weight", "[8, 64]", "[9, 64]"]
    refuses([wrong, "MLPClassifier", *says], cli, "test", option, wrong, *DATA, *QUIET)


CALLBACK = ("--trainer.callbacks", "PopulationStatistics", "--trainer.callbacks.method")
BATCH = last(name="MLPClassifier-BatchNorm")


def scored(*argv: str | Path) -> tuple[dict, Path]:
    """Test results and their folder, a new one each time."""
    number = len(list(Path().glob("tested-*")))
    succeed("test", *DATA, *QUIET, *argv, f"--trainer.logger.save_dir=tested-{number}")
    (file,) = Path(f"tested-{number}").rglob("test_results.json")
    return json.loads(file.read_text()), file.parent


def test_population_statistics_there_and_back(here: Path) -> None:
    fit("--model.norm=BatchNorm", epochs=2)
    plain, _ = scored("--ckpt_path", BATCH)
    first, run_folder = scored("--ckpt_path", BATCH, *CALLBACK, "total_variance")
    written = run_folder / "population.ckpt"
    assert first["metrics"] != plain["metrics"]
    # What was tested is the file that was written, not the one that was read.
    assert (first["checkpoint"], plain["checkpoint"]) == ("population.ckpt", "last.ckpt")
    assert (first["epochs"], first["steps"]) == (plain["epochs"], plain["steps"]) == (2, 10)
    taken = {"method": "total_variance", "batch_size": 100, "examples": 100}
    assert (first["population_statistics"], plain["population_statistics"]) == (taken, None)

    # To the last digit, as a checkpoint, as weights, and after the next test of either.
    for option in ("--ckpt_path", "--weights"):
        again, _ = scored(option, written)
        for key in ("metrics", "checkpoint", "checkpoint_sha256", "epochs", "steps", "size"):
            assert again[key] == first[key], key
    # Unsaved statistics belong to no file.
    unsaved = (*CALLBACK, "average", "--trainer.callbacks.save=false")
    found, folder = scored("--ckpt_path", BATCH, *unsaved)
    assert not (folder / "population.ckpt").exists()
    assert (found["checkpoint"], found["checkpoint_sha256"]) == (None, None)


def test_one_source_of_models(trained: Path, here: Path, monkeypatch: Patch) -> None:
    """File, run folder, card folder and name give the same model, in Python and by command."""
    monkeypatch.setenv("LN_ZOO_MODELS", str(here / "cards"))
    loading.load_model(str(trained)).save_pretrained(here / "cards/mlp.again")
    state = load(trained)["state_dict"]
    measured = []
    for text in (trained, trained.parents[1], here / "cards/mlp.again", "mlp.again"):
        found = loading.find(str(text))
        assert (found.cls, found.arguments["hidden_sizes"]) == (MLPClassifier, [8]), text
        for loaded in (found.load(), ln_zoo.load(text)):
            assert not loaded.training
            assert same(dict(loaded.state_dict()), dict(state)), text
    for text in (trained.parents[1], "mlp.again"):
        succeed("test", "--weights", text, *DATA, *QUIET)
        measured.append(results(here / "runs")["metrics"])
        shutil.rmtree(here / "runs")
    assert measured[0] == measured[1]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _zero(path: Path) -> None:
    """Some weights become 0: torch reads the file, and the model scores a little worse."""
    data = path.read_bytes()
    weights = load(path)["state_dict"]["network.1.weight"].numpy().tobytes()
    path.write_bytes(data.replace(weights[:400], b"\0" * 400, 1))


def _nameless(path: Path) -> None:
    torch.save({k: v for k, v in load(path).items() if k != "hyper_parameters"}, path)


@pytest.mark.parametrize("damage", [_cut, _zero, _nameless])
@pytest.mark.parametrize("option", ["--ckpt_path", "--weights"])
def test_damaged_checkpoints(trained: Path, here: Path, damage: object, option: str) -> None:
    path = here / "damaged.ckpt"
    shutil.copy(trained, path)
    damage(path)  # type: ignore[operator]
    before = path.read_bytes()
    refuses([path], cli, "fit", option, path, *DATA, *QUIET)
    assert path.read_bytes() == before
    assert [p.name for p in here.iterdir()] == ["damaged.ckpt"]


def test_the_newest_whole_checkpoint_is_resumed(here: Path) -> None:
    fit(epochs=2)
    checkpoints = last().parent
    partial, previous = checkpoints / "last.ckpt.partial", checkpoints / "last-previous.ckpt"
    assert set(checkpoints.iterdir()) == {last(), previous}
    partial.write_bytes(b"what a kill left")
    _zero(last())
    done = fit("--ckpt_path=last", epochs=3)
    assert all(x in done.err for x in ("last.ckpt is damaged", f"{previous} is the newest"))
    assert not partial.exists()
    assert load(last(1))["global_step"] == 15
    for path in here.glob("runs/*/*/checkpoints/*"):
        _cut(path)
    refuses(["runs/MLPClassifier-LayerNorm"], cli, "fit", *SMALL, *QUIET, "--ckpt_path=last")


def _foreign_class(trained: Path, path: Path, **changes: object) -> None:
    checkpoint = load(trained)
    checkpoint["hyper_parameters"].update(changes)
    torch.save(checkpoint, path)


def test_no_module_is_imported_because_a_checkpoint_names_it(trained: Path, here: Path) -> None:
    (here / "redteam.py").write_text("open('imported', 'w')\nclass Foo: pass\n")
    # A file that would be read as the configuration of a norm.
    (here / "norm.yaml").write_text("class_path: redteam.Foo")
    _foreign_class(trained, here / "model.ckpt", _class_path="redteam.Foo")
    for name, norm in (("norm", {"class_path": "redteam.Foo"}), ("path", "norm.yaml")):
        _foreign_class(trained, here / f"{name}.ckpt", norm=norm)
    # Text that the parser would import, or read as a class.
    texts = ("redteam.Foo", '{"class_path": "redteam.Foo"}', "class_path: redteam.Foo")
    for name, text in zip(("cell", "json", "yaml"), texts, strict=True):
        _foreign_class(trained, here / f"{name}.ckpt", activation=text)
    for name, text in (("words", "mine.yaml"), ("file", "mine")):
        _foreign_class(trained, here / f"{name}.ckpt", vocabulary=text)
    (here / "mine.yaml").write_text("ckpt_path: model.ckpt\n")
    for given, says in (
        ("test --ckpt_path=model.ckpt", "model.ckpt redteam.Foo"),
        ("test --ckpt_path=norm.ckpt", "--model.norm redteam.Foo"),
        ("test --ckpt_path=path.ckpt", "norm norm.yaml"),
        ("test --ckpt_path=cell.ckpt", "activation redteam.Foo"),
        ("fit --weights=json.ckpt", "activation redteam.Foo"),
        ("fit --weights=yaml.ckpt", "activation redteam.Foo"),
        ("test --weights=words.ckpt", "vocabulary"),
        ("test --weights=file.ckpt", "vocabulary"),
        ("test --weights=model.ckpt", "--model redteam.Foo"),
        ("fit --ckpt_path=norm.ckpt", "redteam.Foo"),
        ("predict --weights=norm.ckpt", "redteam.Foo"),
        ("validate --config=mine.yaml", "redteam.Foo"),
        ('validate --config={"ckpt_path":"model.ckpt"}', "redteam.Foo"),
        ("test --ckpt_path=model.ckpt --model=MLPClassifier", "redteam.Foo"),
        ("write text --model=model.ckpt", "--import redteam"),
        ("analyze trained_dynamics norm.ckpt", "--import redteam"),
        ("card norm.ckpt --results=x --out=card", "--import redteam"),
        ("card model.ckpt --results=x --out=card", "--import redteam"),
    ):
        trains = given.split()[0] in ("test", "fit", "predict", "validate")
        more = DATA if trains else ()
        refuses(says.split(), cli, *given.split(), *more, code=2 if trains else 1)
        assert not (here / "imported").exists(), given


@pytest.mark.parametrize("option", ["--ckpt_path", "--weights"])
def test_checkpoints_of_no_model_or_of_another_version(
    trained: Path, here: Path, option: str
) -> None:
    """One short line, without the arguments in the file."""
    _foreign_class(trained, here / "linear.ckpt", _class_path="torch.nn.Linear", secret="x" * 99)
    _foreign_class(trained, here / "old.ckpt", hidden_units=[8])
    for says in ("linear.ckpt torch.nn.Linear", "old.ckpt hidden_units MLPClassifier"):
        line = refuses(says.split(), cli, "test", option, says.split()[0], *DATA, *QUIET)
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
    for name in ("statistics", "datasets", "yaml", "torch"):  # packages, not these files
        (here / f"{name}.py").write_text("raise SystemExit('imported')")
    fit(*own, "--model.norm.eps=1e-3")
    mine = last(name="Decayed-Mine")
    config = mine.parents[1] / "config.yaml"
    for argv in (["--ckpt_path", mine, "--config", config], ["--weights", mine, *own]):
        assert "ignored" not in succeed("test", *argv, "--data=Digits", *QUIET).err
    fit(*own, "--ckpt_path=last", epochs=2)
    assert load(last(3, "Decayed-Mine"))["hyper_parameters"]["norm"]["init_args"]["eps"] == 1e-3
    # A class of a module that the user names is imported with it.
    succeed("test", "--ckpt_path", mine, own[0], "--data=Digits", *QUIET)
    refuses(
        ["--model my_models.Decayed"], cli, "test", "--ckpt_path", mine, "--data=Digits", *QUIET
    )
    refuses(["Decayed"], cli, "analyze", "trained_dynamics", mine, "--import=my_models", code=1)
