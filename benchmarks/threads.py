"""How long a training step takes on an idle and on a busy machine, by how threads wait.

``python -m benchmarks.threads`` prints a table. Each time is the median over rounds of the mean
step of a process of its own, since libgomp reads its settings once. Busy processes keep ``--busy``
processors busy meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

#: Columns: threads, and the environment.
SETTINGS: dict[str, tuple[int, dict[str, str]]] = {
    "1 thread": (1, {}),
    "2 threads": (2, {}),
    "2, spin 3000": (2, {"GOMP_SPINCOUNT": "3000"}),
    "2, spin 10000": (2, {"GOMP_SPINCOUNT": "10000"}),
    "2, spin 30000": (2, {"GOMP_SPINCOUNT": "30000"}),
    "2, passive": (2, {"OMP_WAIT_POLICY": "passive"}),
}
MODELS = ("quickstart", "mnist", "lstm", "lstm, shared units")


def step_of(name: str) -> Callable[[], None]:
    """A training step of a model, with Adam."""
    import torch

    import ln_zoo
    from ln_zoo.models import MLPClassifier

    torch.manual_seed(0)
    models: dict[str, Callable[[], tuple[Any, tuple[int, ...]]]] = {
        "quickstart": lambda: (MLPClassifier(64, [256, 256]), (64, 64)),
        "mnist": lambda: (MLPClassifier(784), (128, 784)),
        "lstm": lambda: (ln_zoo.LSTM(64, 128, norm=ln_zoo.LayerNorm()), (50, 32, 64)),
        "lstm, shared units": lambda: (
            ln_zoo.LSTM(400, 400, norm=ln_zoo.LayerNorm()),
            (100, 4, 400),
        ),
    }
    model, shape = models[name]()
    x = torch.rand(shape)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        output = model(x)
        (output[0] if isinstance(output, tuple) else output).square().mean().backward()
        optimizer.step()

    return step


def mean_time(name: str, threads: int, seconds: float) -> float:
    """Seconds a step takes in this process."""
    import torch

    torch.set_num_threads(threads)
    step = step_of(name)
    for _ in range(5):
        step()
    start, steps = time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        step()
        steps += 1
    return (time.perf_counter() - start) / steps


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run processes that never wait."""
    started = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)
    ]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measured(name: str, setting: str, seconds: float) -> float:
    """`mean_time` in a process with the environment of the setting."""
    threads, variables = SETTINGS[setting]
    ours = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {k: v for k, v in os.environ.items() if k not in ours} | variables
    call = f"mean_time({name!r}, {threads}, {seconds})"
    code = f"from benchmarks.threads import mean_time\nprint({call})"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 2], help="busy processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="for each process")
    given = parser.parse_args(arguments)
    print(f"| ms a step | busy processes | {' | '.join(given.settings)} |")
    print(f"|---|---:|{'---:|' * len(given.settings)}")
    for name in given.models:
        for processes in given.busy:
            times: dict[str, list[float]] = {setting: [] for setting in given.settings}
            with busy(processes):
                for _ in range(given.rounds):
                    for setting, found in times.items():
                        found.append(measured(name, setting, given.seconds))
            row = " | ".join(f"{1e3 * statistics.median(found):.1f}" for found in times.values())
            print(f"| {name} | {processes} | {row} |", flush=True)


if __name__ == "__main__":
    main()
