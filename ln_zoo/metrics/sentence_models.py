"""Sentence tasks of a model with ``encode(sentences) -> (n, d)``.

If ``encode`` has an argument ``eos``, it is the task's: whether to append the end of a sentence, as
the released skip-thoughts code does in some tasks. Sentences are lowercased if all words of the
model's ``vocabulary`` are.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from ln_zoo.metrics.sentence_tasks import KnownVectors, ProtocolName, evaluate


def model_scores(
    model: Any, task: Any, protocol: ProtocolName, n_jobs: int = 1
) -> dict[str, float]:
    """Scores of a model; other arguments and errors as `ln_zoo.metrics.sentence_tasks.evaluate`."""
    return evaluate(*encode_task(model, task), protocol, n_jobs)


def encode_task(model: Any, task: Any) -> tuple[KnownVectors, Any]:
    """The vectors of the sentences of a task, and the task, lowercased if the model needs it."""
    encode, task = model.encode, _with_case(model, task)
    if "eos" in inspect.signature(encode).parameters:
        encode = partial(encode, eos=task.eos)
    return KnownVectors(encode, task.sentences), task


def unknown_share(model: Any, task: Any) -> float | None:
    """Share of unknown words of a task; None without a vocabulary."""
    vocabulary = getattr(model, "vocabulary", None)
    if vocabulary is None:
        return None
    words = [word for s in _with_case(model, task).sentences for word in s.split()]
    return sum(word not in vocabulary for word in words) / len(words)


def check_encodes(model: Any) -> None:
    """Raise ValueError for a model without ``encode``."""
    if not callable(getattr(model, "encode", None)):
        raise ValueError(
            f"sentence tasks need a model with encode(sentences), such as SkipThought, got "
            f"{type(model).__name__}"
        )


def _with_case(model: Any, task: Any) -> Any:
    vocabulary = getattr(model, "vocabulary", None)
    cased = vocabulary is None or any(word != word.lower() for word in vocabulary)
    return task if cased else task.map(str.lower)
