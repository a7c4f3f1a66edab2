"""``ln-zoo test`` with population statistics, and the checkpoint that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import QUIET, SMALL, fit, load, run, same

CALLBACK = ("--trainer.callbacks", "PopulationStatistics", "--trainer.callbacks.method")
DATA = SMALL[2:]
CPU = ("--trainer.accelerator=cpu",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a batch-normalised model was trained."""
    folder = tmp_path_factory.mktemp("population")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fit("--model.norm=BatchNorm", epochs=2)
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


LAST = Path("runs/MLPClassifier-BatchNorm/version_0/checkpoints/last.ckpt")


def newest() -> Path:
    runs = Path("runs/MLPClassifier-BatchNorm").glob("version_*")
    return max(runs, key=lambda path: int(path.name.rpartition("_")[2]))


def results(run_folder: Path) -> dict:
    return json.loads((run_folder / "test_results.json").read_text())


def measured(*argv: str | Path) -> tuple[dict, Path]:
    """What a test measured, and its folder."""
    done = run("test", *DATA, *QUIET, *argv)
    assert done.code == 0, done.err
    return results(newest()), newest()


def test_there_and_back(here: Path) -> None:
    plain, _ = measured("--ckpt_path", LAST)
    first, run_folder = measured("--ckpt_path", LAST, *CALLBACK, "total_variance")
    written = run_folder / "population.ckpt"
    assert first["metrics"] != plain["metrics"]
    # What was tested is the file that was written, not the one that was read.
    assert (first["checkpoint"], plain["checkpoint"]) == ("population.ckpt", "last.ckpt")
    assert (first["epochs"], first["steps"]) == (plain["epochs"], plain["steps"]) == (2, 10)
    taken = {"method": "total_variance", "batch_size": 100, "examples": 100}
    assert (first["population_statistics"], plain["population_statistics"]) == (taken, None)

    # To the last digit, as a checkpoint, as weights, and after the next test of either.
    for option in ("--ckpt_path", "--weights"):
        again, _ = measured(option, written)
        for key in ("metrics", "checkpoint", "checkpoint_sha256", "epochs", "steps", "size"):
            assert again[key] == first[key], key
    # Frozen weights and the same batches: the statistics of the statistics are they themselves.
    again, second = measured("--ckpt_path", written, *CALLBACK, "total_variance")
    assert again["metrics"] == first["metrics"]
    assert same(load(written)["state_dict"], load(second / "population.ckpt")["state_dict"])

    # `last` is a run's own checkpoint still.
    assert load(written)["hyper_parameters"]["_class_path"] == "ln_zoo.models.MLPClassifier"
    last, _ = measured("--model=MLPClassifier", "--model.norm=BatchNorm", "--ckpt_path=last")
    assert last["checkpoint"] == "last.ckpt"

    done = run("card", written, "--results", run_folder / "test_results.json", "--out", "cards/a.b")
    assert done.code == 0, done.err
    evaluation = json.loads(Path("cards/a.b/results.json").read_text())["evaluation"]
    assert evaluation["population_statistics"] == taken
    published, _ = measured("--weights", "./cards/a.b")
    assert published["metrics"] == first["metrics"]


def test_after_training(here: Path) -> None:
    fit("--model.norm=BatchNorm", "--trainer.callbacks+=PopulationStatistics",
        "--test_after_fit=true")  # fmt: skip
    first, folder = results(newest()), newest()
    assert (first["checkpoint"], first["epochs"], first["steps"]) == ("population.ckpt", 1, 5)
    again, _ = measured("--ckpt_path", folder / "population.ckpt")
    for key in ("metrics", "checkpoint_sha256", "epochs", "steps"):
        assert again[key] == first[key], key


def test_unsaved_statistics_belong_to_no_file(here: Path) -> None:
    found, folder = measured(
        "--ckpt_path", LAST, *CALLBACK, "average", "--trainer.callbacks.save=false"
    )
    assert not (folder / "population.ckpt").exists()
    assert found["checkpoint"] is None
    assert found["checkpoint_sha256"] is None


def test_a_model_without_statistics(trained: Path, in_tmp: Path) -> None:
    done = run("test", *DATA, *QUIET, "--ckpt_path", trained, *CALLBACK, "average")
    assert done.code == 0, done.err
    (found,) = Path("runs").glob("*/version_0/test_results.json")
    assert json.loads(found.read_text())["checkpoint"] == "last.ckpt"


def test_an_unknown_method(here: Path) -> None:
    done = run("test", *DATA, *QUIET, "--ckpt_path", LAST, *CALLBACK, "ema")
    assert done.code == 2
    assert "ema" in done.err
    assert "total_variance" in done.err
