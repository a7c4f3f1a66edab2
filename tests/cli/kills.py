"""Kills training runs without warning, resumes each, compares its end with an uninterrupted one.

    python kills.py RUNS TEMPORARY TIMED RANDOM [NAME ...]

RUNS is the folder of the runs; TEMPORARY, best on another file system, is their $TMPDIR. For each
configuration TIMED runs are killed while a checkpoint is being written, RANDOM at any moment after
the first checkpoint. A line of JSON each: what the kill left, and what differs in the end.

The processes are forked from this one, which has imported everything: each takes seconds.
"""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cli_support import CONFIGS, QUIET, load, same

import ln_zoo.cli.lightning  # noqa: F401
from ln_zoo.cli import main

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


def start(argv: list[str], folder: Path, temporary: Path) -> int:
    """Forks a process that runs a command in a folder; its number."""
    process = os.fork()
    if process:
        return process
    code: object = 99
    try:
        log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        os.environ["TMPDIR"], tempfile.tempdir = str(temporary), None
        os.fsync = slow(os.fsync)  # a slow disk, so that kills fall between two calls
        code = main(argv)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def slow(call: Callable[[int], None]) -> Callable[[int], None]:
    """The call with a pause before and after it."""

    def slowed(file: int) -> None:
        time.sleep(0.02)
        call(file)
        time.sleep(0.02)

    return slowed


def code(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill(process: int, folder: Path, timed: bool, chance: random.Random, left: float) -> None:
    """Kills a process at the n-th time that it writes a checkpoint, or at random after one."""
    events, seen, wanted = 0, "", chance.randrange(2, 5) if timed else chance.randrange(1, 9)
    while events < wanted:
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return  # it has ended by itself
        names = {p.name: p for p in folder.glob("runs/*/*/checkpoints/*")}
        now = str(sorted(names))
        begun = "last.ckpt.partial" in names if timed else "last.ckpt" in names
        events += begun and now != seen
        seen = now
        time.sleep(0.0002)
    time.sleep(chance.uniform(0, 0.05) if timed else chance.uniform(0, left))
    os.kill(process, signal.SIGKILL)


def last(folder: Path, version: int) -> Path:
    (path,) = folder.glob(f"runs/*/version_{version}/checkpoints/last.ckpt")
    return path


def kept(path: Path) -> dict:
    """A checkpoint, its curves as values by column without the wall times, which no run repeats."""
    checkpoint = load(path)
    names, *rows = csv.reader(checkpoint["metrics_csv"].splitlines())
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    for name in ("epoch_seconds", "step_seconds"):
        columns.pop(name, None)
    return checkpoint | {"metrics_csv": columns}


def run(name: str, root: Path, temporary: Path, timed: int, at_random: int) -> None:
    command = ["fit", *FITS[name], *QUIET]
    whole = root / name
    whole.mkdir()
    assert code(start(command, whole, temporary)) == 0, (whole / "log").read_text()
    expected = kept(last(whole, 0))
    for number in range(timed + at_random):
        chance = random.Random(f"{name} {number}")
        folder = root / f"{name}-{number}"
        folder.mkdir()
        ended, left = 0, 0.3
        while ended == 0:  # one that came to its end before the kill does not count
            for path in folder.iterdir():
                path.unlink() if path.is_file() else shutil.rmtree(path)
            process = start(command, folder, temporary)
            kill(process, folder, number < timed, chance, left)
            ended, left = code(process), left / 2
        checkpoints = sorted(p.name for p in folder.glob("runs/*/*/checkpoints/*"))
        steps = {n: load(last(folder, 0).with_name(n))["global_step"]
                 for n in checkpoints if n.endswith(".ckpt")}  # fmt: skip
        resumed = code(start([*command, "--ckpt_path=last"], folder, temporary))
        # A run that was killed behind its last epoch has come to its end.
        ends = sorted(folder.glob("runs/*/version_*/checkpoints/last.ckpt"))
        found = kept(ends[-1]) if resumed == 0 else {}
        told = {
            "run": f"{name}-{number}",
            "kill": "timed" if number < timed else "random",
            "ended": ended,
            "left": checkpoints,
            "steps": steps,
            "resumed": resumed,
            "differing": [k for k in expected if not same(found.get(k), expected[k])],
            "partial": [p.name for p in folder.rglob("*.partial")],
            "temporary": [p.name for p in temporary.iterdir()],
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    runs, temporary = Path(sys.argv[1]), Path(sys.argv[2])
    for kind in sys.argv[5:] or FITS:
        run(kind, runs, temporary, int(sys.argv[3]), int(sys.argv[4]))
