"""Which engines tests of all of them run on: those in the registry, so that new ones are tested."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ln_zoo.ops import KERNELS
from ln_zoo.ops.engines.base import Engine
from ln_zoo.ops.registry import Task


def cpu_engines(task: Task = "layers") -> dict[str, Engine]:
    """Engines that have kernels for a task on CPUs, by name.

    Triton's is for GPUs, and is tested in its interpreter (`tests/ops/gpu_in_interpreter.py`).
    """
    engines = [k.engine for k in KERNELS if task in k.tasks and hasattr(k, "engine")]
    return {engine.name: engine for engine in engines if engine.device in (None, "cpu")}


@contextlib.contextmanager
def poisoned(engine: Engine) -> Iterator[None]:
    """New memory of torch's and of an engine's own holds NaN."""
    shapes = []

    def poison(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def new(*arguments: Any, **options: Any) -> Tensor:
            found = function(*arguments, **options)
            shapes.append(found.shape)
            # Bytes of ones are a NaN in every precision.
            return found.fill_(float("nan") if found.is_floating_point() else 255)

        return new

    owners: list[Any] = [torch, torch, Tensor, engine]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in zip(owners, ("empty", "empty_like", "new_empty", "empty"), strict=True):
            patch.setattr(owner, name, poison(getattr(owner, name)))
        yield
    assert shapes
