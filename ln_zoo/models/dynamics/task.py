"""Data and loss on which the dynamics of a model are measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any, NamedTuple

from torch import Tensor, nn


class DynamicsTask(NamedTuple):
    """What ``ln-zoo analyze dynamics`` runs a model on.

    Attributes:
        batch: examples in float64, as ``loss`` takes them.
        loss: (model, batch) to a scalar; its gradients with respect to hidden states are measured.
        description: the examples in a few words.
        first_layer: number of the first recurrent layer that is measured, counted from 1.
    """

    batch: Any
    loss: Callable[[Any, Any], Tensor]
    description: str
    first_layer: int = 1


class DynamicsSource(NamedTuple):
    """How the task of a model is made.

    Attributes:
        data: ``data(examples)`` returns the name of a class in `ln_zoo.data`, or the import path of
            another, and its arguments.
        task: ``task(data, examples, steps)`` returns the `DynamicsTask`, limited to
            these examples and time steps; ``data`` is set up, the model in float64.
    """

    data: Callable[[int], tuple[str, dict[str, Any]]]
    task: Callable[[Any, int, int], DynamicsTask]


@singledispatch
def registered(model: nn.Module) -> DynamicsSource | None:
    """The source of a model of ln_zoo, or None."""
    return None


def dynamics_source(model: nn.Module) -> DynamicsSource | None:
    """The source of a model, or None.

    A class of your own defines the methods ``dynamics_data(self, examples)`` and
    ``dynamics_task(self, data, examples, steps)``, which have priority.

    Example:
        >>> from ln_zoo.models import SequenceClassifier
        >>> dynamics_source(SequenceClassifier(64, hidden_size=4)).data(16)
        ('Digits', {'eval_batch_size': 16})
    """
    own: Any = model
    if hasattr(model, "dynamics_data") and hasattr(model, "dynamics_task"):
        return DynamicsSource(own.dynamics_data, own.dynamics_task)
    return registered(model)
