"""What starts the runs of a sweep: this machine, SLURM, or Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ln_zoo.sweeps.grid import SweepError
from ln_zoo.sweeps.launchers.base import Launcher
from ln_zoo.sweeps.launchers.local import LocalLauncher
from ln_zoo.sweeps.options import split_values


def launcher_of(
    name: str, out: Path, jobs: int, threads: int, gpus: float = 0, slurm: Sequence[str] = ()
) -> Launcher:
    """The launcher ``"local"``, ``"slurm"`` or ``"ray"``; engines are imported here.

    ``slurm`` are options of sbatch, such as ``"partition=gpu,time=04:00:00"``. SweepError for
    options of another launcher, and if the engine is missing.
    """
    if slurm and name != "slurm":
        raise SweepError(f"--slurm has no effect with --launcher {name}: give --launcher slurm")
    if name == "slurm":
        from ln_zoo.sweeps.launchers.slurm import SlurmLauncher

        return SlurmLauncher(out, jobs, threads, gpus, parse_slurm(slurm))
    if name == "ray":
        from ln_zoo.sweeps.launchers.ray import RayLauncher

        return RayLauncher(threads, gpus)
    if gpus:
        raise SweepError("--gpus has no effect with --launcher local, whose runs share all GPUs")
    return LocalLauncher()


def parse_slurm(given: Sequence[str]) -> dict[str, str]:
    """Options of sbatch by name.

    Example:
        >>> parse_slurm(["partition=gpu,time=04:00:00", "exclude=node[1,2]"])
        {'partition': 'gpu', 'time': '04:00:00', 'exclude': 'node[1,2]'}
    """
    options = {}
    for text in given:
        for part in split_values(text):
            name, equals, value = part.lstrip("-").partition("=")
            if not (name and equals and value):
                raise SweepError(
                    f"--slurm takes NAME=VALUE,..., such as time=04:00:00, got {part!r}"
                )
            options[name] = value
    return options
