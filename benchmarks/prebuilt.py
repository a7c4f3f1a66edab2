"""Time of calls with prebuilt kernels relative to kernels compiled for this processor.

Two processes take turns, and load one library each. Needs an installed wheel and a compiler::

    python -m benchmarks.prebuilt --rounds 13 --threads 1
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ln_zoo import LSTM, LayerNorm
from ln_zoo.kernels.native import build

#: Seconds of one measurement.
_SECONDS = 0.12


class Call(NamedTuple):
    """A call of an LSTM."""

    steps: int
    batch: int
    inputs: int
    hidden: int
    norm: bool = True
    training: bool = True
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        words = ["training" if self.training else "inference", "LN" if self.norm else "no norm"]
        return f"{'x'.join(map(str, self[:4]))} {', '.join(words)}, {str(self.dtype)[6:]}"


CALLS = (
    Call(50, 32, 128, 256),
    Call(100, 64, 256, 512),
    Call(1, 1, 64, 64, training=False),
    Call(20, 8, 32, 64, training=False),
    Call(50, 32, 128, 256, norm=False),
    Call(50, 64, 256, 512, dtype=torch.bfloat16),
)


def work(threads: int) -> None:
    """Measure each call whose number comes on standard input."""
    torch.set_num_threads(threads)
    known = build.status(build=True)
    print(json.dumps([known.level, known.prebuilt]), flush=True)
    layers = {}
    for line in sys.stdin:
        call = CALLS[int(line)]
        if call not in layers:
            torch.manual_seed(0)
            layer = LSTM(call.inputs, call.hidden, norm=LayerNorm() if call.norm else None)
            layers[call] = layer.to(call.dtype)
        layer, x = layers[call], torch.randn(call.steps, call.batch, call.inputs).to(call.dtype)
        calls, start = 0, time.perf_counter()
        while time.perf_counter() - start < _SECONDS or calls < 2:
            with torch.set_grad_enabled(call.training):
                output, _ = layer(x)
            if call.training:
                output.sum().backward()
            calls += 1
        print((time.perf_counter() - start) / calls, flush=True)


def compare(rounds: int, threads: int) -> None:
    """Print the median and the quartiles of the ratio, for each call."""

    def start(level: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "benchmarks.prebuilt", "--threads", str(threads), "--work"]
        # torch runs an LSTM without a norm itself, unless the kernels are named.
        environment = {"LN_ZOO_CPU_LEVEL": level, "LN_ZOO_KERNELS": "native"}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            words, stdin=pipe, stdout=pipe, text=True, env=os.environ | environment
        )

    def read(worker: subprocess.Popen[str]) -> str:
        assert worker.stdout is not None
        return worker.stdout.readline()

    def ask(worker: subprocess.Popen[str], number: int) -> float:
        assert worker.stdin is not None
        worker.stdin.write(f"{number}\n")
        worker.stdin.flush()
        return float(read(worker))

    workers = [start(""), start("native")]
    (level, prebuilt), _ = [json.loads(read(worker)) for worker in workers]
    if not prebuilt:
        raise SystemExit("benchmarks.prebuilt: the package has no prebuilt kernels")
    for number, call in enumerate(CALLS):
        ratios = []
        for k in range(rounds + 1):
            order = workers if k % 2 else workers[::-1]
            seconds = {worker.pid: ask(worker, number) for worker in order}
            ratios.append(seconds[workers[0].pid] / seconds[workers[1].pid])
        low, middle, high = statistics.quantiles(ratios[1:], n=4)
        print(f"{call}: {level}/native {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)
    for worker in workers:
        worker.kill()


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=13)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.work:
        work(given.threads)
    else:
        compare(given.rounds, given.threads)


if __name__ == "__main__":
    main()
