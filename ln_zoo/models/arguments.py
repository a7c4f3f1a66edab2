"""Validation of the arguments of models: errors name the argument."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

from lightning.pytorch import Trainer
from torch import Tensor

from ln_zoo.vocabulary import Vocabulary


def check_sizes(**sizes: int | Sequence[int]) -> None:
    """Raise TypeError or ValueError unless sizes, or their elements, are integers of at least 1."""
    small = {}
    for name, given in sizes.items():
        values = given if isinstance(given, list | tuple) else [given]
        if not all(isinstance(v, numbers.Integral) and not isinstance(v, bool) for v in values):
            raise TypeError(f"{name} must be an integer, or several, got {given!r}")
        if values and min(values) < 1:
            small[name] = given
    if small:
        raise ValueError(f"every size must be at least 1, got {small}")


def check_positive(**values: float | None) -> None:
    """Raise TypeError or ValueError unless values are positive numbers or None."""
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value!r}")


def check_words(**choices: tuple[str, tuple[str, ...]]) -> None:
    """Raise ValueError unless each value is among its choices, given as (value, choices)."""
    for name, (value, words) in choices.items():
        if value not in words:
            raise ValueError(f"{name} must be one of {', '.join(words)}, got {value!r}")


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
