"""Which engines tests of all of them run on: those in the registry, so that new ones are tested."""

from __future__ import annotations

from ln_zoo.ops import KERNELS
from ln_zoo.ops.engines.base import Engine
from ln_zoo.ops.registry import Task


def cpu_engines(task: Task = "layers") -> dict[str, Engine]:
    """Engines that have kernels for a task on CPUs, by name.

    Triton's is for GPUs, and is tested in its interpreter (`tests/ops/gpu_in_interpreter.py`).
    """
    engines = [k.engine for k in KERNELS if task in k.tasks and hasattr(k, "engine")]
    return {engine.name: engine for engine in engines if engine.device in (None, "cpu")}
