"""Which engines tests of all of them run on: those in the registry, so that new ones are tested."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ln_zoo.kernels.native.runtime import unavailable_reason
from ln_zoo.ops import KERNELS, dispatch
from ln_zoo.ops.engines.base import Engine
from ln_zoo.ops.registry import Task

needs_native = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no native kernels: {unavailable_reason()}"
)


def cpu_engines(task: Task = "layers") -> dict[str, Engine]:
    """Engines that have kernels for a task on CPUs, by name.

    Triton's is for GPUs, and is tested in its interpreter
    (`tests/kernels/triton/gpu_in_interpreter.py`).
    """
    engines = [k.engine for k in KERNELS if task in k.tasks and hasattr(k, "engine")]
    return {engine.name: engine for engine in engines if engine.device in (None, "cpu")}


#: Where torch makes memory that it does not fill.
NEW_MEMORY: tuple[tuple[Any, str], ...] = (
    (torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")
)  # fmt: skip


@contextlib.contextmanager
def poisoned(*makers: tuple[Any, str]) -> Iterator[None]:
    """New memory from these functions, each an owner and a name, holds NaN."""
    shapes = []

    def poison(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def new(*arguments: Any, **options: Any) -> Tensor:
            found = function(*arguments, **options)
            shapes.append(found.shape)
            # Bytes of ones are a NaN in every precision.
            return found.fill_(float("nan") if found.is_floating_point() else 255)

        return new

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in makers:
            patch.setattr(owner, name, poison(getattr(owner, name)))
        yield
    assert shapes


def note_kernels(patch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels of calls and steps to come; a call that follows a plan adds nothing."""
    found: list[Any] = []
    for owner, pick in (
        ("ln_zoo.ops.calls.select_kernel", dispatch.select_kernel),
        ("ln_zoo.ops.calls.select_step_kernel", dispatch.select_step_kernel),
    ):

        def noted(*arguments: Any, pick: Callable[..., Any] = pick) -> Any:
            found.append(pick(*arguments))
            return found[-1]

        patch.setattr(owner, noted)
    return found


def names_of(kernels: list[Any]) -> list[str | None]:
    """``None``: the generic loop."""
    return [None if kernel is None else kernel.name for kernel in kernels]
