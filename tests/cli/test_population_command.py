"""``ln-zoo test`` with population statistics, and the checkpoint that it writes."""

from __future__ import annotations

import json
from pathlib import Path

from cli_support import QUIET, SMALL, fit, last, succeed

CALLBACK = ("--trainer.callbacks", "PopulationStatistics", "--trainer.callbacks.method")
DATA = SMALL[2:]
LAST = last(name="MLPClassifier-BatchNorm")


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
    # Unsaved statistics belong to no file.
    found, folder = measured("--ckpt_path", LAST, *CALLBACK, "average",
                             "--trainer.callbacks.save=false")  # fmt: skip
    assert not (folder / "population.ckpt").exists()
    assert (found["checkpoint"], found["checkpoint_sha256"]) == (None, None)
