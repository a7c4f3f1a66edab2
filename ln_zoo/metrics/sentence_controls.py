"""Untrained sentence encoders, as baselines."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np


def majority(sentences: Sequence[str]) -> np.ndarray:
    """Zeros, float32 (n, 1), from which only the majority class can be predicted."""
    return np.zeros((len(sentences), 1), np.float32)


class WordVectors:
    """Word vectors (W, E) from a table of W words, or random ones without ``words``.

    Random vectors of E ``features`` depend on word and seed only. ValueError if words and vectors
    differ in number.
    """

    def __init__(
        self,
        words: Sequence[str] | None = None,
        vectors: np.ndarray | None = None,
        features: int = 300,
        seed: int = 0,
    ) -> None:
        self._table: dict[str, np.ndarray] | None = None
        self.features = features
        self.seed = seed
        if words is not None and vectors is not None:
            if len(words) != len(vectors):
                raise ValueError(
                    f"words and vectors must be as many, got {len(words)} and {len(vectors)}"
                )
            self._table = dict(zip(words, np.asarray(vectors, np.float32), strict=True))
            self.features = vectors.shape[1]
        self._drawn = lru_cache(maxsize=None)(self._draw)

    def of(self, sentence: str) -> np.ndarray:
        """Vectors of the known words of a sentence, float32 (T, E); one zero row if T is 0."""
        if self._table is None:
            found = [self._drawn(word) for word in sentence.split()]
        else:
            found = [self._table[word] for word in sentence.split() if word in self._table]
        return np.stack(found) if found else np.zeros((1, self.features), np.float32)

    def _draw(self, word: str) -> np.ndarray:
        rng = np.random.default_rng((self.seed, zlib.crc32(word.encode())))
        return rng.uniform(-0.1, 0.1, self.features).astype(np.float32)


class MeanOfWords:
    """Mean of the word vectors of a sentence, normalised.

    Example:
        >>> table = WordVectors(["a", "dog"], np.array([[1.0, 0.0], [0.0, 1.0]]))
        >>> MeanOfWords(table)(["a dog", "dog cat", "cat"]).astype(float).round(3).tolist()
        [[0.707, 0.707], [0.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self, vectors: WordVectors) -> None:
        self.vectors = vectors

    def __call__(self, sentences: Sequence[str]) -> np.ndarray:
        return _unit(np.stack([self.vectors.of(sentence).mean(0) for sentence in sentences]))


class EchoState:
    """A random bidirectional echo state network with max pooling over time.

    As Wieting and Kiela (2019, arXiv 1901.10444, section 3.3), but with random word vectors by
    default: h_t = (1 - a) h_{t-1} + a tanh(W x_t + U h_{t-1} + b), with a sparse matrix U.

    Args:
        vectors: word vectors; default: random ones of 300 features.
        features: units D of both directions.
        radius: spectral radius of U.
        leak: leaking rate a.
        connections: mean connections per unit.
        seed: seed of all matrices.
        batch_size: sentences per batch; changes vectors by rounding only.

    Example:
        >>> EchoState(features=64)(["it rained all day", "it rained"]).shape
        (2, 64)
    """

    def __init__(
        self,
        vectors: WordVectors | None = None,
        features: int = 2048,
        radius: float = 0.9,
        leak: float = 0.9,
        connections: int = 10,
        seed: int = 0,
        batch_size: int = 512,
    ) -> None:
        if features < 2 or features % 2:
            raise ValueError(f"features must be an even number of at least 2, got {features}")
        self.vectors = WordVectors(seed=seed) if vectors is None else vectors
        self.features = features
        self.leak = leak
        self.batch_size = batch_size
        rng = np.random.default_rng((seed, 1))
        units = features // 2
        size = (self.vectors.features, units)
        # Word vectors are normalised, so inputs have about unit variance.
        self._inputs = [rng.normal(size=size).astype(np.float32) for _ in range(2)]
        self._states = [_reservoir(units, radius, connections, rng) for _ in range(2)]
        self._biases = [rng.uniform(-0.1, 0.1, units).astype(np.float32) for _ in range(2)]

    def __call__(self, sentences: Sequence[str]) -> np.ndarray:
        found = np.zeros((len(sentences), self.features), np.float32)
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i].split()))
        for begin in range(0, len(order), self.batch_size):
            rows = order[begin : begin + self.batch_size]
            words = [_unit(self.vectors.of(sentences[i])) for i in rows]
            halves = [self._read([w[:: 1 - 2 * way] for w in words], way) for way in range(2)]
            found[rows] = np.concatenate(halves, axis=1)
        return _unit(found)

    def _read(self, sentences: list[np.ndarray], way: int) -> np.ndarray:
        lengths = np.array([len(words) for words in sentences])
        units = self.features // 2
        state = np.zeros((len(sentences), units), np.float32)
        most = np.full_like(state, -np.inf)
        for step in range(lengths.max()):
            on = np.flatnonzero(lengths > step)
            inputs = np.stack([sentences[i][step] for i in on]) @ self._inputs[way]
            inputs += state[on] @ self._states[way] + self._biases[way]
            state[on] = (1 - self.leak) * state[on] + self.leak * np.tanh(inputs)
            most[on] = np.maximum(most[on], state[on])
        return most


def _reservoir(units: int, radius: float, connections: int, rng: np.random.Generator) -> Any:
    """A sparse random matrix of a given spectral radius, (units, units)."""
    from scipy import sparse

    density = min(1.0, connections / units)
    matrix = sparse.random(units, units, density, "csr", np.float64, rng, rng.standard_normal)
    largest = _spectral_radius(matrix)
    return (matrix * (radius / largest if largest else 1.0)).astype(np.float32)


def _spectral_radius(matrix: Any) -> float:
    from scipy.sparse.linalg import ArpackNoConvergence, eigs

    if matrix.shape[0] < 100:
        return float(np.abs(np.linalg.eigvals(matrix.toarray())).max())
    start = np.ones(matrix.shape[0])  # default: the global random state
    try:
        return float(np.abs(eigs(matrix, k=6, v0=start, return_eigenvectors=False)).max())
    except ArpackNoConvergence:
        return float(np.abs(np.linalg.eigvals(matrix.toarray())).max())


def _unit(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)
