"""Validation of the arguments of models: errors name the argument."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

from lightning.pytorch import Trainer
from torch import Tensor

from ln_zoo.vocabulary import Vocabulary


def check_sizes(**sizes: int | Sequence[int]) -> None:
    """Check that sizes are integers of at least 1.

    Args:
        **sizes: a size, or several, by the argument's name.

    Raises:
        TypeError: for a value that is not an integer.
        ValueError: for a value below 1.

    Example:
        >>> check_sizes(in_features=784, hidden_sizes=[1000, 0])
        Traceback (most recent call last):
            ...
        ValueError: every size must be at least 1, got {'hidden_sizes': [1000, 0]}
    """
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
    """Check that numbers are positive; None is allowed.

    Args:
        **values: by the argument's name.

    Raises:
        TypeError: for a value that is not a number.
        ValueError: for a value that is not positive.

    Example:
        >>> check_positive(lr="fast")
        Traceback (most recent call last):
            ...
        TypeError: lr must be a number, got 'fast'
    """
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value!r}")


def check_words(**choices: tuple[str, tuple[str, ...]]) -> None:
    """Check that arguments are among their choices.

    Args:
        **choices: value and choices by the argument's name.

    Raises:
        ValueError: for another value.

    Example:
        >>> check_words(encoder=("tri", ("uni", "bi")))
        Traceback (most recent call last):
            ...
        ValueError: encoder must be one of uni, bi, got 'tri'
    """
    for name, (value, words) in choices.items():
        if value not in words:
            raise ValueError(f"{name} must be one of {', '.join(words)}, got {value!r}")


def check_vocabulary(vocabulary: Vocabulary, trainer: Trainer) -> None:
    """Check that a trainer's data have the vocabulary of the model, if they have one.

    Args:
        vocabulary: of the model.
        trainer: with its data module, if there is one.

    Raises:
        ValueError: if the data have another vocabulary.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    words = getattr(data, "vocabulary", None)
    if words is not None and list(words) != list(vocabulary):
        raise ValueError(
            f"the model has a vocabulary of {len(vocabulary):,} words, and {type(data).__name__} "
            f"numbers {len(words):,} in its own way: give one the vocabulary of the other "
            "(vocabulary=)"
        )


def check_inputs(inputs: object, features: int) -> None:
    """Check that inputs are a batch of the right size.

    Args:
        inputs: a batch (N, \\*).
        features: size of an example.

    Raises:
        TypeError: if the inputs are not a tensor.
        ValueError: for examples of another size.

    Example:
        >>> import torch
        >>> check_inputs(torch.rand(28, 28), features=784)
        Traceback (most recent call last):
            ...
        ValueError: this model reads 784 numbers per example, got inputs (28, 28), ...
    """
    hint = "give a batch (N, ...), as model.card.preprocess makes of images"
    if not isinstance(inputs, Tensor):
        raise TypeError(f"inputs must be a tensor, got {type(inputs).__name__}: {hint}")
    if (given := inputs.shape[1:].numel()) != features:
        raise ValueError(
            f"this model reads {features} numbers per example, got inputs {tuple(inputs.shape)}, "
            f"which have {given}: {hint}"
        )
