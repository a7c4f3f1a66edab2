"""Peak memory of one training step, in a process of its own.

That is the most that the process held during the step, above what it held before. `peak` starts
``python -m benchmarks.memory LSTM 50,64,256,256 LayerNorm/native``, which prints bytes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

_STATUS = Path("/proc/self/status")
#: Whether the system tells.
AVAILABLE = _STATUS.exists()
#: glibc gives back at once what is freed: otherwise it keeps more or less of it, by chance, and two
#: measurements of one thing differ by a third.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def peak(cell: str, size: str, contestant: str, precision: str, threads: int) -> int:
    """Bytes of a training step of a recurrent layer, measured in a new process.

    Raises:
        RuntimeError: as `in_new_process`.
    """
    arguments = [cell, size, contestant, "--precision", precision, "--threads", str(threads)]
    return in_new_process("benchmarks.memory", arguments, threads)


def in_new_process(module: str, arguments: list[str], threads: int) -> int:
    """What ``python -m module arguments`` prints last, as a number.

    Raises:
        RuntimeError: if the process fails, with the last line of what it said.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parent.parent,
        env=os.environ | _ALLOCATOR | {"OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return int(done.stdout.splitlines()[-1])


def of_contestants(
    module: str, names: Iterable[str], options: Iterable[str], given: argparse.Namespace
) -> dict[str, int]:
    """Peak bytes of contestants by name, each measured by ``python -m module --peak=NAME``.

    Args:
        module: name of the benchmark's module.
        names: of the contestants.
        options: names of the options to pass on.
        given: the values of these options.

    Returns:
        An empty dict where the system does not tell peak memory.
    """
    passed = [f"--{name}={getattr(given, name)}" for name in options]
    return {
        name: in_new_process(module, [*passed, f"--peak={name}"], given.threads)
        for name in (names if AVAILABLE else ())
    }


def of_step(step: Callable[[], object]) -> int:
    """Bytes that a call takes at its peak above what is held before, in this process."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, code = _held("VmRSS"), _held("RssFile")
    step()
    # Pages of libraries that were read for the first time are no memory of the step.
    return _held("VmHWM") - before - (_held("RssFile") - code)


def _held(key: str) -> int:
    """Bytes: ``VmRSS``, all there is; ``VmHWM``, the most there was; ``RssFile``, mapped files."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {key}")


def main(argv: list[str] | None = None) -> int:
    """Measures one contestant in this process, and prints bytes."""
    import torch

    from benchmarks.contestants import Size, layer
    from benchmarks.modes import training_step

    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("cell")
    parser.add_argument("size", type=Size.parse)
    parser.add_argument("contestant")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    size: Size = arguments.size
    contestant = layer(arguments.contestant, arguments.cell, size, training=True)
    # What is made once per process (threads, compiled code, tables of libraries) does not count.
    training_step(contestant, Size(2, size.B, size.I, size.H), arguments.precision)()
    step = training_step(contestant, size, arguments.precision)
    for parameter in contestant.module.parameters():
        parameter.grad = None
    print(of_step(step))
    return 0


if __name__ == "__main__":
    sys.exit(main())
