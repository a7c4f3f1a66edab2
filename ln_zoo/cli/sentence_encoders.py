"""Encoders of sentences by name: models of the zoo, and controls that learn nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ln_zoo.metrics.sentence_controls import EchoState, MeanOfWords, WordVectors, majority
from ln_zoo.metrics.sentence_models import check_encodes
from ln_zoo.utils.names import nearest
from ln_zoo.utils.vocabulary import read_word_vectors
from ln_zoo.zoo.loading import load_model

_CONTROLS = ("majority", "word-mean", "echo-state")


def maker(text: str, seed: int, features: int) -> Callable[[], Any]:
    """A function that makes an encoder; checks the name now."""
    kind, _, source = text.partition(":")
    if kind == "majority" and not source:
        return lambda: SimpleNamespace(encode=majority)
    if kind == "word-mean":
        if not source:
            raise ValueError("word-mean needs word vectors: word-mean:MODEL or word-mean:FILE")
        return lambda: _word_mean(source)
    if kind == "echo-state":
        return lambda: _echo_state(source, features, seed)
    if kind == "untrained" and source:
        return lambda: _untrained(source, seed)
    if "." not in text and os.sep not in text and nearest(text, _CONTROLS):
        raise ValueError(
            f"no control {text!r}{nearest(text, _CONTROLS)} ({', '.join(_CONTROLS)}, untrained:...)"
        )
    return lambda: _load(text)


def _untrained(source: str, seed: int) -> Any:
    paths = source.split("+")
    if all(path.endswith((".yaml", ".yml")) for path in paths):
        from ln_zoo.cli.lightning import CLIWithoutTrainer

        configs = [f"--config={path}" for path in paths]
        model = CLIWithoutTrainer(["fit", *configs, f"--seed_everything={seed}"]).model
        check_encodes(model)
    else:
        model = _load(source)
    if not callable(getattr(model, "reset_parameters", None)):
        raise ValueError(f"{source} is a {type(model).__name__}, which has no reset_parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.reset_parameters()
    return model.eval()


def _load(weights: str) -> Any:
    """A model that encodes sentences."""
    model = load_model(weights)
    check_encodes(model)
    return model


def _word_mean(source: str) -> Any:
    """The mean of the word vectors of a model or a file; its words are the vocabulary."""
    vectors, words = _word_vectors(source)
    return SimpleNamespace(encode=MeanOfWords(vectors), vocabulary=words)


def _echo_state(source: str, features: int, seed: int) -> Any:
    """A random echo state network on word vectors of a model, of a file, or random ones."""
    if source:
        vectors, words = _word_vectors(source)
        return SimpleNamespace(encode=EchoState(vectors, features, seed=seed), vocabulary=words)
    network = EchoState(WordVectors(seed=seed), features, seed=seed)
    # In lower case, as the vocabularies of our models.
    return SimpleNamespace(encode=lambda texts: network([text.lower() for text in texts]))


def _word_vectors(source: str) -> tuple[WordVectors, frozenset[str]]:
    if source.endswith((".txt", ".vec", ".gz")):
        words, vectors = read_word_vectors(source)
    else:
        model = _load(source)
        table = getattr(getattr(model, "embedding", None), "weight", None)
        if table is None:
            raise ValueError(f"{source} is a {type(model).__name__}, which has no word vectors")
        words = list(model.vocabulary)
        # The first two are of the end of a sentence and of unknown words.
        vectors = table.detach().float().cpu().numpy()[-len(words) :]
    return WordVectors(words, vectors), frozenset(words)
