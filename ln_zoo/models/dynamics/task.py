"""Data and loss on which the dynamics of a model are measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any, NamedTuple

from torch import Tensor, nn


class DynamicsTask(NamedTuple):
    """Input of ``ln-zoo analyze trained_dynamics``."""

    batch: Any  # examples in float64, as `loss` takes them
    # (model, batch) to a scalar; its gradients with respect to hidden states are measured.
    loss: Callable[[Any, Any], Tensor]
    description: str  # short description of the examples
    first_layer: int = 1  # index of the first measured recurrent layer, from 1


class DynamicsSource(NamedTuple):
    """Factory of the task of a model.

    ``data(examples)`` returns the name of a class in `ln_zoo.data`, or another import path, and its
    arguments. ``task(data, examples, steps)`` returns the `DynamicsTask` for at most these examples
    and time steps; ``data`` is set up, the model in float64.
    """

    data: Callable[[int], tuple[str, dict[str, Any]]]
    task: Callable[[Any, int, int], DynamicsTask]


@singledispatch
def registered(model: nn.Module) -> DynamicsSource | None:
    """The source of a model of ln_zoo, or None."""
    return None


def dynamics_source(model: nn.Module) -> DynamicsSource | None:
    """The source of a model, or None.

    Methods ``dynamics_data(self, examples)`` and ``dynamics_task(self, data, examples, steps)`` of
    your own class have priority.
    """
    own: Any = model
    if hasattr(model, "dynamics_data") and hasattr(model, "dynamics_task"):
        return DynamicsSource(own.dynamics_data, own.dynamics_task)
    return registered(model)
