"""Where runs write: a folder of their own each, also without a logger, and never a user's file."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cli_support import QUIET, SMALL, cli, fit, last, load, succeed
from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from refusals import refuses

from ln_zoo.cli import run_folders


def test_simultaneous_starts_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        claimed = list(pool.map(lambda _: run_folders.claim(tmp_path / "runs"), range(64)))
    assert {folder.name for folder in claimed} == {f"version_{n}" for n in range(64)}


def test_numbers_go_on_behind_the_highest(tmp_path: Path) -> None:
    for name in ("version_3", "version_x", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "version_4").write_text("a file")
    assert run_folders.claim(tmp_path).name == "version_5"
    (tmp_path / "version_3/checkpoints").mkdir()
    (tmp_path / "version_3/checkpoints/last.ckpt.partial").write_text("what a kill left")
    assert run_folders.claim(tmp_path).name == "version_6"
    assert not list((tmp_path / "version_3/checkpoints").iterdir())


def test_loggers_of_a_run_share_its_folder(tmp_path: Path) -> None:
    def loggers() -> list:
        a, b = (tmp_path, "a"), (tmp_path, "b")
        return [CSVLogger(*a), TensorBoardLogger(*a), CSVLogger(*b)]

    (tmp_path / "b/version_6").mkdir(parents=True)
    claimed = run_folders.claim_for(first := loggers())
    assert claimed == [tmp_path / "a/version_0", tmp_path / "b/version_7"]
    assert [logger.version for logger in first] == [0, 0, 7]
    assert all(Path(logger.log_dir).is_dir() for logger in first)
    # Asked for before anything is written: Lightning itself would give the same number again.
    run_folders.claim_for(second := loggers())
    assert [logger.version for logger in second] == [1, 1, 8]
    given = CSVLogger(tmp_path, "a", version=3)
    assert run_folders.claim_for([given]) == []
    assert given.version == 3


def test_loggers_of_a_sweeps_run_have_its_folder_or_its_name(tmp_path: Path) -> None:
    def logger(kind: str, **given: object) -> Namespace:
        return Namespace(class_path=f"lightning.pytorch.loggers.{kind}", init_args=Namespace(given))

    mlflow = logger("MLFlowLogger", experiment_name="lightning_logs", run_name=None)
    mine = logger("MLFlowLogger", experiment_name="mine", run_name="mine")
    wandb = logger("WandbLogger", name=None, save_dir=".", version=None)
    csv = logger("CSVLogger", save_dir="runs", name=None, version=None)
    other = Namespace(class_path="my_logger.Logger")
    loggers = [mlflow, mine, wandb, other, csv]
    assert not run_folders.place(loggers)
    assert loggers[0] is mlflow
    with run_folders.of_sweep(tmp_path / "rates", "layer", "seed_3"):
        assert run_folders.place(loggers)
    assert loggers == [csv, mlflow, mine, wandb, other]
    place = {"save_dir": str(tmp_path / "rates"), "name": "layer", "version": "seed_3"}
    assert csv.init_args.as_dict() == place
    named = {"experiment_name": "rates", "run_name": "layer/seed_3"}
    assert mlflow.init_args.as_dict() == named
    assert mine.init_args.as_dict() == {"experiment_name": "mine", "run_name": "mine"}
    assert wandb.init_args.as_dict() == {"name": "layer/seed_3", "save_dir": ".", "version": None}


def test_what_is_left_empty_is_removed(tmp_path: Path) -> None:
    empty, used = (run_folders.claim(tmp_path / name) for name in ("empty", "used"))
    (used / "metrics.csv").write_text("epoch")
    run_folders.release([empty, used])
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


def test_without_a_logger_no_file_of_the_user_is_touched(here: Path) -> None:
    own = {name: f"# {name}: mine\n" for name in ("config.yaml", "test_results.json")}
    own["config.yaml"] += "trainer:\n  max_epochs: 1\n"
    for name, text in own.items():
        (here / name).write_text(text)
    fit("--config=config.yaml", "--trainer.logger=false", "--test_after_fit=true")
    done = fit("--trainer.logger=false", "--ckpt_path=last", epochs=2)
    assert str(last()) in done.err + done.out
    assert {path.name: path.read_text() for path in here.iterdir() if path.is_file()} == own
    written = [{path.name for path in last(version).parents[1].iterdir()} for version in (0, 1)]
    assert written[1] == {"config.yaml", "checkpoints"}
    assert written[0] == written[1] | {"test_results.json"}


@pytest.mark.parametrize("logger", [[], ["--trainer.logger=false"]], ids=["loggers", "none"])
def test_default_root_dir(here: Path, logger: list[str]) -> None:
    root = ("--trainer.default_root_dir=here/below", *logger)
    fit(*root)
    fit(*root, "--ckpt_path=last", epochs=2)
    assert [path.name for path in here.iterdir()] == ["here"]
    assert load(last(1, root="here/below"))["global_step"] == 10
    if not logger:
        fit(*root, "--trainer.logger.save_dir=logs")
        assert (here / "logs/MLPClassifier-LayerNorm/version_0/metrics.csv").is_file()


@pytest.mark.parametrize(("version", "checkpoints"), [("7", True), ("seed_0", False)])
def test_a_test_into_the_folder_of_a_training_spares_its_files(
    here: Path, version: str, checkpoints: bool
) -> None:
    named = (f"--trainer.logger.version={version}", "--trainer.logger.name=mine")
    fit(*named, f"--trainer.enable_checkpointing={str(checkpoints).lower()}")
    folder = here / "runs/mine" / ("version_7" if version == "7" else version)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {folder / "metrics.csv", folder / "config.yaml"} <= set(before)
    weights = [f"--ckpt_path={folder / 'checkpoints/last.ckpt'}"] if checkpoints else []
    for _ in range(2):
        succeed("test", f"--config={folder / 'config.yaml'}", *weights, *QUIET)
        assert {path: path.read_bytes() for path in before} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert (folder / "test/test_results.json").is_file()


def test_a_test_may_take_the_place_of_a_test(here: Path) -> None:
    for _ in range(2):
        succeed("test", *SMALL, *QUIET, "--trainer.logger.version=8", "--trainer.logger.name=mine")
    assert [path.name for path in (here / "runs/mine").iterdir()] == ["version_8"]
    assert not (here / "runs/mine/version_8/test").exists()


def test_a_run_that_does_not_start_leaves_no_folder(here: Path) -> None:
    for more in ([], ["--trainer.logger=false"]):
        refuses((), cli, "fit", *SMALL, *QUIET, "--weights=mlp.layernorm", *more)
        assert not list(here.glob("runs/*"))
