"""Encoders of sentences by name: models of the zoo, and controls that learn nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ln_zoo.callbacks.sentence_evaluation import check_encodes
from ln_zoo.metrics.sentence_controls import EchoState, MeanOfWords, WordVectors, majority
from ln_zoo.vocabulary import read_word_vectors
from ln_zoo.zoo.source import load_model


def load_encoder(weights: str) -> Any:
    """A model that encodes sentences, as `source.load_model` finds it."""
    model = load_model(weights)
    check_encodes(model)
    return model


class Majority:
    """Control: the same vector for every sentence."""

    def encode(self, sentences: Sequence[str]) -> Any:
        return majority(sentences)


class WordMean:
    """The mean of the word vectors of a model or a file; its words are the vocabulary."""

    def __init__(self, source: str) -> None:
        vectors, self.vocabulary = _word_vectors(source)
        self.encode = MeanOfWords(vectors)


class EchoStates:
    """A random echo state network on word vectors of a model, of a file, or random ones."""

    def __init__(self, source: str, features: int, seed: int) -> None:
        if source:
            vectors, self.vocabulary = _word_vectors(source)
        else:
            vectors = WordVectors(seed=seed)
        network = EchoState(vectors, features, seed=seed)
        # In lower case, as the vocabularies of our models.
        self.encode = network if source else lambda texts: network([t.lower() for t in texts])


def _word_vectors(source: str) -> tuple[WordVectors, frozenset[str]]:
    if source.endswith((".txt", ".vec", ".gz")):
        words, vectors = read_word_vectors(source)
    else:
        model = load_encoder(source)
        table = getattr(getattr(model, "embedding", None), "weight", None)
        if table is None:
            raise ValueError(f"{source} is a {type(model).__name__}, which has no word vectors")
        words = list(model.vocabulary)
        # The first two are of the end of a sentence and of unknown words.
        vectors = table.detach().float().cpu().numpy()[-len(words) :]
    return WordVectors(words, vectors), frozenset(words)
