"""``ln-zoo test`` with population statistics, and the checkpoint that it writes."""

from __future__ import annotations

import json
from pathlib import Path

from cli_support import QUIET, SMALL, fit, load, same, succeed

CALLBACK = ("--trainer.callbacks", "PopulationStatistics", "--trainer.callbacks.method")
DATA = SMALL[2:]


LAST = Path("runs/MLPClassifier-BatchNorm/version_0/checkpoints/last.ckpt")


def measured(*argv: str | Path) -> tuple[dict, Path]:
    """Test results and their folder, a new one each time."""
    number = len(list(Path().glob("tested-*")))
    succeed("test", *DATA, *QUIET, *argv, f"--trainer.logger.save_dir=tested-{number}")
    (file,) = Path(f"tested-{number}").rglob("test_results.json")
    return json.loads(file.read_text()), file.parent


def test_there_and_back(here: Path) -> None:
    fit("--model.norm=BatchNorm", epochs=2)
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
    # Frozen weights and the same batches give the same statistics.
    again, second = measured("--ckpt_path", written, *CALLBACK, "total_variance")
    assert again["metrics"] == first["metrics"]
    assert same(load(written)["state_dict"], load(second / "population.ckpt")["state_dict"])

    succeed("card", written, "--results", run_folder / "test_results.json", "--out", "cards/a.b")
    evaluation = json.loads(Path("cards/a.b/results.json").read_text())["evaluation"]
    assert evaluation["population_statistics"] == taken
    published, _ = measured("--weights", "./cards/a.b")
    assert published["metrics"] == first["metrics"]

    # Unsaved statistics belong to no file.
    found, folder = measured("--ckpt_path", LAST, *CALLBACK, "average",
                             "--trainer.callbacks.save=false")  # fmt: skip
    assert not (folder / "population.ckpt").exists()
    assert (found["checkpoint"], found["checkpoint_sha256"]) == (None, None)


def test_after_training(here: Path) -> None:
    fit("--model.norm=BatchNorm", "--trainer.callbacks+=PopulationStatistics",
        "--test_after_fit=true")  # fmt: skip
    (written,) = here.rglob("population.ckpt")
    first = json.loads((written.parent / "test_results.json").read_text())
    assert (first["checkpoint"], first["epochs"], first["steps"]) == ("population.ckpt", 1, 5)
    again, _ = measured("--ckpt_path", written)
    for key in ("metrics", "checkpoint_sha256", "epochs", "steps"):
        assert again[key] == first[key], key
