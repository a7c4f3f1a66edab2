"""Helpers of the command line's tests: short runs inside this process, and whole ones outside."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ln_zoo.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"
SCRIPT = Path(sys.executable).with_name("ln-zoo")

#: A small model on few of scikit-learn's digits: 5 updates an epoch.
SMALL = (
    "--model=MLPClassifier",
    "--model.hidden_features=[8]",
    "--data=Digits",
    "--data.batch_size=20",
    "--data.train_size=100",
    "--data.val_size=20",
)
QUIET = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


def run(*argv: str) -> Done:
    """Runs the command line inside this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(a) for a in argv])
    return Done(code, out.getvalue(), err.getvalue())


def fit(*argv: str, epochs: int = 1) -> Done:
    """Trains the small model in the current folder, and insists that it worked."""
    done = run("fit", *SMALL, *QUIET, f"--trainer.max_epochs={epochs}", *argv)
    assert done.code == 0, done.err
    return done


def script(
    folder: Path, *argv: str, timeout: float = 120, env: dict[str, str] | None = None
) -> Done:
    """Runs the installed script in a folder, as a user does."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    # What Lightning leaves in this process's environment would reach the other.
    for name in ("PL_GLOBAL_SEED", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_PORT"):
        environment.pop(name, None)
    done = subprocess.run(
        [str(SCRIPT), *map(str, argv)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def load(path: Path) -> dict:
    """A checkpoint, read as it must be readable: without unpickling any object."""
    return torch.load(path, map_location="cpu", weights_only=True)


def same(a: object, b: object) -> bool:
    """Whether two nested values agree to the last bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))  # type: ignore[arg-type]
    return a == b


def write_idx(folder: Path, train: int = 60, test: int = 13, seed: int = 0) -> Path:
    """Writes the four files of an MNIST of noise; 13 test images are shared evenly by no one."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    for name, number in (("train", train), ("t10k", test)):
        images = random.integers(0, 256, (number, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, number, dtype=np.uint8)
        header = struct.pack(">4B3I", 0, 0, 8, 3, number, 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">4BI", 0, 0, 8, 1, number)
        with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(header + labels.tobytes())
    return folder


def python(folder: Path, code: str, timeout: float = 120) -> Done:
    """Runs code in a process of its own, in a folder; ``main`` is imported already."""
    done = subprocess.run(
        [sys.executable, "-c", f"from ln_zoo.cli import main\n{code}"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return Done(done.returncode, done.stdout, done.stderr)
