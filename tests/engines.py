"""Which engines tests of all of them run on: those in the registry, so that new ones are tested."""

from __future__ import annotations

from ln_zoo.ops import KERNELS
from ln_zoo.ops.engines.base import Engine
from ln_zoo.ops.registry import Task


def cpu_engines(task: Task = "layers") -> dict[str, Engine]:
    """Engines that have kernels for a task on CPUs, by name.

    Triton's is for GPUs, and is tested in its interpreter (`tests/ops/gpu_in_interpreter.py`).
    """
    engines = {k.name: getattr(k, "engine", None) for k in KERNELS if task in k.tasks}
    return {name: e for name, e in engines.items() if e is not None and name != "triton"}
