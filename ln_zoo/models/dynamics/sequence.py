"""Dynamics of the classifier of pixel sequences: the loss of test images."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ln_zoo.models.dynamics.task import DynamicsSource, DynamicsTask, registered
from ln_zoo.models.sequence import SequenceClassifier

#: Dataset by the values per image.
_IMAGES = {784: "MNIST", 64: "Digits"}


@registered.register
def _(model: SequenceClassifier) -> DynamicsSource:
    return DynamicsSource(partial(_data, model), _task)


def _data(model: SequenceClassifier, examples: int) -> tuple[str, dict[str, Any]]:
    if model.in_features not in _IMAGES:
        raise ValueError(
            f"in_features is {model.in_features}, and dynamics need images of "
            f"{' or '.join(f'{size} ({name})' for size, name in _IMAGES.items())} values"
        )
    return _IMAGES[model.in_features], {"eval_batch_size": examples}


def _task(data: Any, examples: int, steps: int) -> DynamicsTask:
    images, labels = next(iter(data.test_dataloader()))
    description = f"{len(images)} test images of {type(data).__name__}"
    return DynamicsTask((images.double(), labels), _loss, description)


def _loss(network: SequenceClassifier, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(network(batch[0]), batch[1])
