"""Helpers of the command line's tests: commands in forked processes, and their results."""

from __future__ import annotations

import atexit
import csv
import functools
import gzip
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from data_support import idx

from ln_zoo.cli import main

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
CONFIGS = Path(__file__).parents[2] / "configs"
SCRIPT = Path(sys.executable).with_name("ln-zoo")

#: A small model on few of scikit-learn's digits: 5 updates an epoch.
SMALL = (
    "--model=MLPClassifier", "--model.hidden_sizes=[8]", "--data=Digits", "--data.batch_size=20",
    "--data.train_size=100", "--data.val_size=20",
)  # fmt: skip
#: The same data, for a model that comes from elsewhere.
DATA = SMALL[2:]
QUIET = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")


#: A user's callback. At a step the disk is full, or a signal comes, or weights are NaN; a test gets
#: the signal at once.
MISHAP = """
import errno, os
from lightning.pytorch import Callback

class Mishap(Callback):
    def __init__(self, number: int = 0, step: int = 7):
        self.number, self.step = number, step
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.step:
            if not self.number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.number < 0:
                next(trainer.model.parameters()).data.fill_(float("nan"))
            else:
                os.kill(os.getpid(), self.number)
    def on_test_batch_start(self, *args):
        os.kill(os.getpid(), self.number)
"""


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


def environment(**changes: str) -> dict[str, str]:
    """The environment without Lightning's variables of the test process."""
    left = ("PL_", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(left)}
    # The warnings are between Lightning and jsonargparse.
    return kept | {"OMP_NUM_THREADS": "1", "JSONARGPARSE_DEPRECATION_WARNINGS": "off"} | changes


@functools.cache
def _zygote() -> subprocess.Popen[str]:
    command = [sys.executable, Path(__file__).with_name("cli_zygote.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    zygote = subprocess.Popen(command, env=environment(), text=True, **pipes)
    atexit.register(zygote.kill)
    return zygote


def run(*argv: str | Path) -> Done:
    return script(Path.cwd(), *argv)


def succeed(*argv: str | Path) -> Done:
    """`run`, which must end with exit code 0."""
    done = run(*argv)
    assert done.code == 0, done.err
    return done


class CommandError(ValueError):
    """The line of error in which a command ends."""


def cli(*argv: str | Path, code: int = 2) -> NoReturn:
    """Run a command that must end with this exit code, and raise its one line of error."""
    done = run(*argv)
    lines = [line for line in done.err.splitlines() if ": error" in line]
    assert done.code == code, (argv, done.code, done.err)
    assert len(lines) == 1, (argv, done.err)
    assert "Traceback" not in done.err, (argv, done.err)
    assert "this is a bug" not in done.err, (argv, done.err)
    assert lines[0].startswith("ln-zoo"), lines[0]
    raise CommandError(lines[0])


def told(capsys: pytest.CaptureFixture[str], *argv: str | Path, code: int = 0) -> str:
    """Runs a command in this process; what it prints, or its errors if it must fail."""
    assert main([*map(str, argv)]) == code
    out, err = capsys.readouterr()
    return err if code else out


def fit(*argv: str | Path, epochs: int = 1) -> Done:
    """Trains the small model in the current folder."""
    return succeed("fit", *SMALL, *QUIET, f"--trainer.max_epochs={epochs}", *argv)


def results(folder: Path) -> dict:
    """The results of the only test below a folder."""
    (path,) = folder.rglob("test_results.json")
    return json.loads(path.read_text())


def last(version: int = 0, name: str = "MLPClassifier-LayerNorm", root: str = "runs") -> Path:
    return Path(root, name, f"version_{version}", "checkpoints/last.ckpt")


def rows_of(file: str | Path) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(file).read_text().splitlines()))


def heavy_imports(*argv: str) -> tuple[str, set[str]]:
    """What a command prints, and the large packages that it imports."""
    code = (
        "import sys\nfrom ln_zoo.cli import main\n"
        f"try: main({list(argv)})\nexcept SystemExit: pass\n"
        "print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *printed, modules = done.stdout.splitlines()
    heavy = {"torch", "lightning", "torchmetrics", "jsonargparse", "numpy", "matplotlib"}
    return "\n".join(printed) + done.stderr, heavy & set(modules.split())


def _forked(folder: Path, argv: list[str], code: str | None, timeout: float) -> Done:
    zygote = _zygote()
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    request = {"folder": str(folder), "env": environment(), "timeout": timeout}
    zygote.stdin.write(json.dumps(request | {"argv": argv, "code": code}) + "\n")
    zygote.stdin.flush()
    reply = json.loads(zygote.stdout.readline())
    assert reply["code"] != -signal.SIGALRM, f"no end within {timeout} s: {reply['err'][-2000:]}"
    return Done(**reply)


def script(folder: Path, *argv: str | Path, timeout: float = 300) -> Done:
    """Runs a command in a folder, in a forked process of its own, which may be killed."""
    return _forked(folder, [str(SCRIPT), *map(str, argv)], None, timeout)


def python(folder: Path, code: str, timeout: float = 300) -> Done:
    """Runs code in a folder, in a process of its own; ``main`` is imported already."""
    return _forked(folder, ["-c"], code, timeout)


def together(folder: Path, *commands: list[str], timeout: float = 300) -> Done:
    """Runs commands for two processes, one after another, in the same two processes."""
    listed = [[str(argument) for argument in command] for command in commands]
    code = f"import sys\nfrom ln_zoo.cli import main\nsys.exit(max(map(main, {listed!r})))\n"
    (folder / "together.py").write_text(code)  # what Lightning starts as the second process
    return _forked(folder, [str(folder / "together.py")], code, timeout)


def installed(folder: Path, *argv: str | Path, timeout: float = 300, **env: str) -> Done:
    """Runs the installed script in a folder, as a user does."""
    options = {"capture_output": True, "text": True, "timeout": timeout}
    done = subprocess.run([SCRIPT, *argv], cwd=folder, env=environment(**env), **options)
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
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return folder
