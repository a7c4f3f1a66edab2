"""Processor time of a first training step on a generated kernel, compilation included.

``python -m benchmarks.first_call`` prints seconds for an sLSTM with `LayerNorm`: nothing compiled
yet; compiled by an earlier process; compiled earlier in the same process. The native kernels are
there before.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from ln_zoo.layers import LSTM, SLSTM, RecurrentLayer
from ln_zoo.norms import LayerNorm


def seconds(layer: RecurrentLayer) -> float:
    """Processor time of one training step, in this process and those that it starts."""
    x, before = torch.randn(20, 4, 16), os.times()
    layer(x)[0].sum().backward()
    return sum(os.times()[:4]) - sum(before[:4])


def in_new_process(cache: str) -> list[str]:
    """Seconds of a first and of a second layer, with generated kernels in this folder."""
    command = [sys.executable, "-m", "benchmarks.first_call", cache]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.split()


def main() -> None:
    """Prints seconds for each state of the cache."""
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        seconds(LSTM(16, 64, norm=LayerNorm()))
        os.environ["LN_ZOO_CACHE"] = sys.argv[1]
        print(*(f"{seconds(SLSTM(16, 64, norm=LayerNorm())):.2f}" for _ in range(2)))
        return
    with tempfile.TemporaryDirectory() as cache:
        compiled, again = in_new_process(cache)
        print(f"compiled: {compiled}", f"on disk: {in_new_process(cache)[0]}", f"loaded: {again}")


if __name__ == "__main__":
    main()
