"""Trains for long, with pictures and checkpoints, once as a whole and once with kills.

    python tests/endurance/soak.py 3600 docs/figures

The folder gets ``soak.csv`` and ``soak.png``. Paths: tests and tests/cli on PYTHONPATH.
"""

from __future__ import annotations

import csv
import math
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from cli_support import CONFIGS, same
from test_kills import last, start

#: Options of each run besides its configuration; the pictures are of the configuration.
FITS = {
    "handwriting": (
        f"--config={CONFIGS}/handwriting/quickstart.yaml", "--data.train_size=128",
        "--data.val_size=16",
    ),
    "draw": (
        f"--config={CONFIGS}/draw/quickstart.yaml", "--data.train_size=256",
        "--data.val_size=32",
    ),
}  # fmt: skip
#: Epochs of a run that shows how long an epoch takes.
TRIAL = 4


@dataclass(frozen=True)
class Soaked:
    """What a model's runs have shown.

    Attributes:
        epochs: of the whole run: steps, CPU seconds of a step, MB.
        kills: how many times the other run was killed.
        differing: entries of the last checkpoint that differ between both.
        left: temporary files that are left.
    """

    epochs: list[tuple[int, float, float]]
    kills: int
    differing: list[str]
    left: list[str]

    def growth(self, column: int) -> float:
        """The last third of the epochs against the middle one, by the lowest quarter.

        Caches and the allocator's arenas settle in the first third. Other work on the machine slows
        epochs down, and never makes one quicker.
        """
        values, third = [epoch[column] for epoch in self.epochs], len(self.epochs) // 3
        parts = values[third:-third], values[-third:]
        middle, last = (statistics.quantiles(part, n=4)[0] for part in parts)
        return last / middle


def soak(name: str, seconds: float, folder: Path, seed: int = 0) -> Soaked:
    """Both runs of a model, each of about half the time."""
    meter = Path(__file__).with_name("meter.py")

    def begun(place: Path, epochs: int, *more: str) -> subprocess.Popen[bytes]:
        place.mkdir(exist_ok=True)
        shutil.copy(meter, place)
        own = ("--trainer.callbacks+=meter.Meter", f"--trainer.max_epochs={epochs}")
        return start(place, *FITS[name], *own, *more)

    def measured(place: Path) -> list[tuple[float, int, float, float]]:
        with (place / "meter.csv").open() as file:
            return [(float(t), int(n), float(cpu), float(mb)) for t, n, cpu, mb in csv.reader(file)]

    trial, before = folder / f"{name}-trial", time.monotonic()
    assert begun(trial, TRIAL).wait() == 0, (trial / "log").read_text()[-2000:]
    begin = time.monotonic() - before
    times = [row[0] for row in measured(trial)]
    epoch = (times[-1] - times[0]) / (TRIAL - 1)
    epochs = max(9, math.ceil(seconds / 2 / epoch))

    whole = folder / f"{name}-whole"
    assert begun(whole, epochs).wait() == 0, (whole / "log").read_text()[-2000:]

    killed, count, chance, resume = folder / f"{name}-killed", 0, random.Random(seed), ()
    while True:
        process = begun(killed, epochs, *resume)
        try:
            process.wait(begin + chance.uniform(0.02, 0.25) * epochs * epoch)
        except subprocess.TimeoutExpired:
            process.kill()
        status = process.wait()
        if status != -signal.SIGKILL:
            assert status == 0, (killed / "log").read_text()[-2000:]
            break
        count += 1
        if any(killed.glob("runs/*/*/checkpoints/last*.ckpt")):
            resume = ("--ckpt_path=last",)
    one, two = map(last, (whole, killed))
    differing = [key for key in one if not same(two.get(key), one[key])]
    left = [path.name for path in folder.rglob("*.partial")]
    return Soaked([row[1:] for row in measured(whole)], count, differing, left)


def write(found: dict[str, Soaked], folder: Path) -> None:
    """The table of epochs and its picture."""
    import matplotlib.pyplot as plt

    with (folder / "soak.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["model", "epoch", "steps", "cpu_ms_per_step", "memory_mb"])
        for name, each in found.items():
            for number, (steps, cpu, mb) in enumerate(each.epochs):
                table.writerow([name, number, steps, f"{1000 * cpu:.3f}", f"{mb:.1f}"])
    figure, axes = plt.subplots(2, len(found), figsize=(8, 4), sharex="col", squeeze=False)
    for column, (name, each) in enumerate(found.items()):
        _, cpu, mb = zip(*each.epochs, strict=True)
        axes[0, column].plot([1000 * c for c in cpu], ".", markersize=3)
        axes[1, column].plot(mb, ".", markersize=3)
        axes[0, column].set(title=f"{name}, {each.kills} kills", ylim=(0, None))
        axes[1, column].set(xlabel="epoch", ylim=(0, None))
    axes[0, 0].set_ylabel("CPU ms a step")
    axes[1, 0].set_ylabel("resident MB")
    figure.tight_layout()
    figure.savefig(folder / "soak.png", dpi=120)


if __name__ == "__main__":
    length, out = float(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as place:
        results = {name: soak(name, length / len(FITS), Path(place)) for name in FITS}
    write(results, out)
    for name, each in results.items():
        print(
            f"{name}: {len(each.epochs)} epochs, {sum(e[0] for e in each.epochs)} steps; "
            f"step {each.growth(1):.3f}, memory {each.growth(2):.3f} of the middle third; "
            f"{each.kills} kills, differing {each.differing}, left {each.left}"
        )
