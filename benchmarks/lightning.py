"""Training steps of ``ln-zoo fit`` against a bare loop on the same batches, on the CPU.

``python -m benchmarks.lightning`` trains as the command does, with its callbacks, loggers and
progress bar. After each of its steps a bare loop (batch, loss, backward pass, clipping, update)
does one on a copy of the model, so that both meet the same machine. It prints steps per second and
their ratio; ``--profile`` also prints where the time of the trainer goes. See
``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from benchmarks.timing import ratios
from benchmarks.updates import BareLoop
from ln_zoo.cli.lightning import ZooCLI

_CONFIGS = Path(__file__).parents[1] / "configs"
_LAYER_NORM = "--model.norm=LayerNorm"
#: Options of ``ln-zoo fit``; data are synthetic or scikit-learn's, except for pixels.
WORKLOADS = {
    "mlp": (f"--config={_CONFIGS}/mlp/paper.yaml", _LAYER_NORM),
    "digits": (f"--config={_CONFIGS}/quickstart.yaml",),
    "pixels": (f"--config={_CONFIGS}/pixels/permuted.yaml", _LAYER_NORM),
    "handwriting": (
        f"--config={_CONFIGS}/handwriting/quickstart.yaml", "--model.hidden_size=128", _LAYER_NORM,
    ),
}  # fmt: skip


class Bare(Callback):
    """After each step of the trainer, times one without it.

    Args:
        seconds: after which training stops.
        warm: first steps, which are not counted.
    """

    def __init__(self, seconds: float, warm: int = 3) -> None:
        self.seconds, self.warm = seconds, warm
        self.fit: list[float] = []
        self.bare: list[float] = []
        self._left = 0.0
        self.profile = cProfile.Profile()
        self.profiled = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        model = copy.deepcopy(pl_module)
        model.trainer = trainer  # not a copy
        self._loop = BareLoop(model, trainer.datamodule, trainer.gradient_clip_val)
        self._left = self._begin = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        now = time.perf_counter()
        self.profile.disable()
        self.fit.append(now - self._left)
        start = time.perf_counter()
        self._loop.update()
        self.bare.append(time.perf_counter() - start)
        late = time.perf_counter() - self._begin > self.seconds
        if late and len(self.bare) > self.warm + 8:
            trainer.should_stop = True
            trainer.limit_val_batches = 0
        if self.profiled and len(self.bare) >= self.warm:
            self.profile.enable()
        self._left = time.perf_counter()


def measure(name: str, seconds: float, profiled: bool = False) -> Bare:
    """Trains a workload for some seconds in a folder that is removed."""
    bare = Bare(seconds)
    bare.profiled = profiled
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            cli = ZooCLI(["fit", *WORKLOADS[name], "--trainer.num_sanity_val_steps=0"])
            callbacks = cli.trainer.callbacks  # type: ignore[attr-defined]
            callbacks.insert(0, bare)
            cli.trainer.fit(cli.model, cli.datamodule)
        finally:
            os.chdir(before)
    return bare


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for each workload."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lightning", description=__doc__)
    parser.add_argument("workloads", nargs="*", metavar="NAME", default=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each, about")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--profile", action="store_true", help="print where the trainer's time goes"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    for name in options.workloads:
        found = measure(name, options.seconds, options.profile)
        fit, bare = found.fit[found.warm :], found.bare[found.warm :]
        ratio = ratios(bare, fit)
        print(
            f"\n{name}: fit {1 / statistics.median(fit):.1f} steps/s, bare loop "
            f"{1 / statistics.median(bare):.1f} steps/s, ratio {ratio.median:.3f} "
            f"[{ratio.low:.3f}, {ratio.high:.3f}], {len(fit)} steps",
            flush=True,
        )
        if options.profile:
            pstats.Stats(found.profile).sort_stats("cumtime").print_stats(45)


if __name__ == "__main__":
    main()
