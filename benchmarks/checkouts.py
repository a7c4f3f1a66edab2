"""Layers of this checkout against those of another, each in a process of its own, asked in turn.

``python -m benchmarks.checkouts PATH`` prints ratios of time to the checkout at ``PATH``. A process
of each checkout prepares all calls first, with ``ln_zoo``'s public layers alone, so that any two
versions can be compared. Freed memory stays with the process, as in a run that goes on: otherwise
a process that begins with this call gives its gradients back to the system after each.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

#: T, B, I and H. A single step, (1, B, I, H), is also that of a cell.
SIZES = (
    "1,1,16,16", "1,1,256,256", "20,1,16,16", "20,8,32,32",
    "50,64,256,256", "100,8,400,400", "784,100,1,100",
)  # fmt: skip
#: Seconds that one measurement takes at least.
_SHORTEST = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    from benchmarks import runner
    from benchmarks.timing import Times, compared

    parser = runner.parser("checkouts", __doc__, rounds=31, seconds=2, threads=1)
    parser.add_argument("other", type=Path, help="checkout to compare with")
    parser.add_argument("--processes", type=int, default=5, help="of each checkout (default: 5)")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="T,B,I,H")
    given = runner.parse(parser, argv)
    medians = []
    of = f"relative to {given.other.name}"
    runner.print_head(["call", "milliseconds", f"time, {of} (quartiles)", "of processor time"])
    with contextlib.ExitStack() as stack:
        # Where memory lies moves small calls by a tenth: several processes of each checkout.
        here, other = Path(__file__).resolve().parents[1], given.other.resolve()
        pairs = [
            [stack.enter_context(_process(path, given)) for path in (here, other)]
            for _ in range(given.processes)
        ]
        for name in pairs[0][0].names:
            number = max(1, round(_SHORTEST / max(pairs[0][0].measure(name, 3)[1], 1e-7)))
            new, old = Times(), Times()
            start = time.perf_counter()
            for turn, pair in zip(range(given.rounds), itertools.cycle(pairs)):
                if turn >= len(pairs) and time.perf_counter() - start > 2 * given.seconds:
                    break
                contestants = list(zip(pair, (new, old), strict=True))
                for process, times in contestants[:: -1 if turn % 2 else 1]:
                    wall, cpu = process.measure(name, number)
                    times.wall.append(wall)
                    times.cpu.append(cpu)
            row = compared(new, old)
            medians.append(row["wall_ratio"])
            milliseconds = f"{1e3 * min(new.wall):.4g}"
            runner.print_row(
                [name, milliseconds, *(runner.ratio(row, k, 3) for k in ("wall", "cpu"))]
            )
    print(f"\nMedian of {len(medians)}: {sorted(medians)[len(medians) // 2]:.3f}")
    return 0


class _Process:
    """Runs calls of one checkout."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin
        assert process.stdout
        self._input, self._output = process.stdin, process.stdout
        self.names: list[str] = json.loads(self._output.readline())

    def measure(self, name: str, number: int) -> tuple[float, float]:
        """Seconds of a call, by the clock and of the processor, as means over ``number`` calls."""
        print(json.dumps([name, number]), file=self._input, flush=True)
        wall, cpu = json.loads(self._output.readline())
        return wall, cpu


@contextlib.contextmanager
def _process(checkout: Path, given: Any) -> Iterator[_Process]:
    command = [sys.executable, "-P", __file__, str(given.threads), *given.sizes]
    keep = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}
    environment = {**os.environ, **keep, "PYTHONPATH": str(checkout)}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        yield _Process(process)
        process.terminate()


def _serve(threads: str, *sizes: str) -> None:
    """Answers requests of standard input: a name and a number of calls."""
    torch.set_num_threads(int(threads))
    torch.set_flush_denormal(True)
    calls = dict(_calls(sizes))
    for call in calls.values():
        call()
    print(json.dumps(list(calls)), flush=True)
    for line in sys.stdin:
        name, number = json.loads(line)
        call = calls[name]
        call()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(number):
            call()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print([wall / number, cpu / number], flush=True)


def _calls(sizes: Sequence[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    import ln_zoo
    from ln_zoo.norms import Identity, LayerNorm

    for cell, norm, size in itertools.product(("LSTM", "GRU", "RNN"), (LayerNorm, Identity), sizes):
        steps, examples, inputs, units = map(int, size.split(","))
        torch.manual_seed(0)
        layer = getattr(ln_zoo, cell)(inputs, units, norm=norm())
        yield from _modes(f"{cell} {norm.__name__} {size}", layer, steps, examples, inputs)
        if steps == 1:
            layer = getattr(ln_zoo, f"{cell}Cell")(inputs, units, norm=norm())
            yield from _modes(f"{cell}Cell {norm.__name__} {size}", layer, examples, inputs)


def _modes(name: str, layer: Any, *shape: int) -> Iterator[tuple[str, Callable[[], object]]]:
    x = torch.randn(shape)
    parameters = list(layer.parameters())

    def infer() -> None:
        with torch.no_grad():
            layer(x)

    def train() -> None:
        output = layer(x)
        output = output[0] if isinstance(output, tuple) else output
        torch.autograd.grad(output.sum(), parameters)

    yield f"{name} train", train
    yield f"{name} infer", infer


if __name__ == "__main__":
    # A process that answers is started by path, without the folder of this file on `sys.path`.
    if __package__:
        sys.exit(main())
    _serve(*sys.argv[1:])
