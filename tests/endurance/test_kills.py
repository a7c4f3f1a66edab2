"""Runs killed while a checkpoint is written end like uninterrupted ones."""

from __future__ import annotations

import csv
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import CONFIGS, QUIET, environment, load, same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and SIGKILL"),
]
FITS = {
    "digits": [
        f"--config={CONFIGS}/quickstart.yaml", "--test_after_fit=false",
        "--data.train_size=300", "--data.val_size=50", "--trainer.max_epochs=6",
    ],
    "handwriting": [
        f"--config={CONFIGS}/handwriting/quickstart.yaml", "--model.hidden_size=16",
        "--data.train_size=64", "--data.val_size=16", "--trainer.callbacks=[]",
        "--trainer.max_epochs=5",
    ],
}  # fmt: skip
#: A slow disk, so that kills fall between two calls.
SLOW = """
import os, sys, time
from ln_zoo.cli import main
sync = os.fsync
os.fsync = lambda file: (time.sleep(0.02), sync(file), time.sleep(0.02))
sys.exit(main(sys.argv[1:]))
"""


def start(folder: Path, *argv: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", SLOW, "fit", *argv, *QUIET]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, env=environment(), stdout=log, stderr=log)


def kill(process: subprocess.Popen[bytes], folder: Path, chance: random.Random) -> int:
    """Kill while a checkpoint is written, after the first; return the exit code."""
    events, seen, wanted = 0, "", chance.randrange(2, 5)
    while events < wanted and process.poll() is None:
        names = sorted(p.name for p in folder.glob("runs/*/*/checkpoints/*"))
        events += "last.ckpt.partial" in names and str(names) != seen
        seen = str(names)
        time.sleep(0.0002)
    time.sleep(chance.uniform(0, 0.05))
    process.kill()
    return process.wait()


def last(folder: Path) -> dict:
    """The newest run's checkpoint, its curves by column without wall times."""
    found = folder.glob("runs/*/version_*/checkpoints/last.ckpt")
    path = max(found, key=lambda path: int(path.parts[-3].removeprefix("version_")))
    checkpoint = load(path)
    names, *rows = csv.reader(checkpoint["metrics_csv"].splitlines())
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    columns = {k: v for k, v in columns.items() if k not in ("epoch_seconds", "step_seconds")}
    return checkpoint | {"metrics_csv": columns}


@pytest.mark.parametrize("name", FITS)
def test_every_killed_run_resumes(tmp_path: Path, name: str) -> None:
    assert start(tmp_path / "whole", *FITS[name]).wait() == 0
    expected, partial = last(tmp_path / "whole"), 0
    for number in range(5):
        chance = random.Random(f"{name} {number}")
        folder = tmp_path / str(number)
        if kill(start(folder, *FITS[name]), folder, chance) == 0:
            continue  # it ended before the kill
        partial += bool(list(folder.rglob("*.partial")))
        log = folder / "log"
        assert start(folder, *FITS[name], "--ckpt_path=last").wait() == 0, log.read_text()
        found = last(folder)
        assert [key for key in expected if not same(found.get(key), expected[key])] == [], number
        assert not list(folder.rglob("*.partial"))
    assert partial
