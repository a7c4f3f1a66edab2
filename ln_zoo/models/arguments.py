"""Checks of what models read: the words of their data, and the size of inputs."""

from __future__ import annotations

from lightning.pytorch import Trainer
from torch import Tensor

from ln_zoo.utils.vocabulary import Vocabulary


def check_vocabulary(vocabulary: Vocabulary, trainer: Trainer) -> None:
    """Raise ValueError if the trainer's data have another vocabulary than the model."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    words = getattr(data, "vocabulary", None)
    if words is not None and list(words) != list(vocabulary):
        raise ValueError(
            f"the model has a vocabulary of {len(vocabulary):,} words, and {type(data).__name__} "
            f"numbers {len(words):,} in its own way: give one the vocabulary of the other "
            "(vocabulary=)"
        )


def check_inputs(inputs: object, features: int) -> None:
    r"""Raise TypeError or ValueError unless inputs are tensors (N, \*) of this size per example."""
    hint = "give a batch (N, ...), as model.card.preprocess makes of images"
    if not isinstance(inputs, Tensor):
        raise TypeError(f"inputs must be a tensor, got {type(inputs).__name__}: {hint}")
    if (given := inputs.shape[1:].numel()) != features:
        raise ValueError(
            f"this model reads {features} numbers per example, got inputs {tuple(inputs.shape)}, "
            f"which have {given}: {hint}"
        )
