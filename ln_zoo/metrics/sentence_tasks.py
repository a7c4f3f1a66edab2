"""Evaluation of fixed sentence vectors (Kiros et al. 2015, section 3).

Classification (MR, CR, SUBJ, MPQA) by logistic regression in ten folds; relatedness of pairs (SICK)
by softmax regression on their difference and product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, get_args

import numpy as np

from ln_zoo.utils.checks import check_choice

Encode = Callable[[list[str]], Any]
"""Function from n sentences to vectors (n, d): an array, or a sparse matrix for classification."""
ProtocolName = Literal["original", "fast"]

FOLDS = 10
PENALTIES = tuple(2.0**power for power in range(9))
"""Values of C to choose from."""
_SEED = 1234
"""Seed of the released code."""
_EPOCHS, _BATCH = 100, 128
"""Epochs per round and batch size on SICK: defaults of the library at the time of the release."""


class Classes(Protocol):
    """A classification task."""

    name: str
    sentences: list[str]
    labels: np.ndarray


class Pairs(Protocol):
    """Pairs of sentences with scores from 1 to 5."""

    first: list[str]
    second: list[str]
    scores: np.ndarray


class KnownVectors:
    """A picklable encoder that returns precomputed vectors.

    Calls ``encode`` once with the different sentences.

    Example:
        >>> known = KnownVectors(lambda given: np.array([[len(s)] for s in given]), ["a", "by"])
        >>> known(["by", "a", "by"]).tolist()
        [[2], [1], [2]]
    """

    def __init__(self, encode: Encode, sentences: Iterable[str]) -> None:
        different = list(dict.fromkeys(sentences))
        self._rows = {sentence: row for row, sentence in enumerate(different)}
        self._vectors = _encoded(encode, different)

    def __call__(self, sentences: Sequence[str]) -> Any:
        return self._vectors[[self._rows[sentence] for sentence in sentences]]


def evaluate(
    encode: Encode, task: Any, protocol: ProtocolName = "original", n_jobs: int = 1
) -> dict[str, float]:
    """Scores of an encoder on a task.

    Args:
        encode: function from n sentences to vectors (n, d).
        task: a task of `ln_zoo.data.books.sentence_tasks`, or an object with the attributes
            ``name``, ``sentences`` and ``labels``, or ``name``, ``train``, ``trial`` and ``test``.
        protocol: ``original`` or ``fast``; see `accuracy`.
        n_jobs: processes for the folds.

    Returns:
        ``{"mr": accuracy in per cent}``, or ``sick_pearson``, ``sick_spearman`` and ``sick_mse``.

    Raises:
        ValueError: if the protocol is unknown, or vectors are not finite (n, d).
    """
    name = task.name.lower()
    if hasattr(task, "labels"):
        vectors = _encoded(encode, task.sentences)
        return {name: 100 * accuracy(vectors, task.labels, protocol, n_jobs=n_jobs)}
    parts = (task.train, task.trial, task.test)
    features = [
        pair_features(_encoded(encode, part.first), _encoded(encode, part.second)) for part in parts
    ]
    scores = [part.scores for part in parts]
    found = relatedness(features, scores)
    return {f"{name}_{measure}": value for measure, value in found.items()}


def accuracy(
    vectors: Any,
    labels: np.ndarray,
    protocol: ProtocolName = "original",
    *,
    seed: int = _SEED,
    n_jobs: int = 1,
) -> float:
    """Mean accuracy, a fraction, of a logistic regression in ten folds.

    ``original`` is the protocol of the released skip-thoughts code: shuffle once, split into ten
    folds in order; for each, choose C among 1, 2, 4, ..., 256 by the mean accuracy in ten folds of
    the other nine (ties go to the smallest) and fit on all nine. The solver is liblinear, which
    penalises the intercept: 910 regressions.

    ``fast``, for curves during training, chooses C on the last tenth of the nine folds and solves
    by L-BFGS with warm starts and a free intercept: 100 regressions, within some tenths of a point
    of the original.

    Args:
        vectors: (N, D), an array or a sparse matrix.
        labels: (N,).
        protocol: ``original`` or ``fast``.
        seed: seed of the shuffle; 1234 in the released code.
        n_jobs: processes for the folds.

    Raises:
        ValueError: if the protocol is unknown, or there are fewer than 100 examples or two classes.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> labels = rng.integers(0, 2, 200)
        >>> vectors = rng.normal(size=(200, 3)) + 3 * labels[:, None]
        >>> bool(accuracy(vectors, labels, "fast") > 0.95)
        True
    """
    check_choice("protocol", protocol, get_args(ProtocolName))
    if len(labels) < FOLDS**2 or len(np.unique(labels)) < 2:
        raise ValueError(
            f"labels must have at least {FOLDS**2} examples of two classes, got "
            f"{len(labels)} of {len(np.unique(labels))}"
        )
    from joblib import Parallel, delayed
    from sklearn.model_selection import KFold

    order = np.arange(len(labels))
    np.random.RandomState(seed).shuffle(order)  # the order of the released code
    vectors, labels = vectors[order], np.asarray(labels)[order]
    score = {"original": _nested_fold, "fast": _single_fold}[protocol]
    folds = KFold(FOLDS).split(order)
    found = Parallel(n_jobs)(
        delayed(score)(vectors[train], labels[train], vectors[test], labels[test])
        for train, test in folds
    )
    return float(np.mean(found))


def _nested_fold(vectors: Any, labels: np.ndarray, others: Any, answers: np.ndarray) -> float:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import KFold, cross_val_score

    means = [
        cross_val_score(
            LogisticRegression(C=penalty, solver="liblinear"), vectors, labels, cv=KFold(FOLDS)
        ).mean()
        for penalty in PENALTIES
    ]
    best = PENALTIES[int(np.argmax(means))]
    chosen = LogisticRegression(C=best, solver="liblinear").fit(vectors, labels)
    return float(chosen.score(others, answers))


def _single_fold(vectors: Any, labels: np.ndarray, others: Any, answers: np.ndarray) -> float:
    from sklearn.linear_model import LogisticRegression

    inner = len(labels) - len(labels) // FOLDS
    regression = LogisticRegression(warm_start=True, max_iter=1000)
    found = []
    for penalty in PENALTIES:
        regression.set_params(C=penalty).fit(vectors[:inner], labels[:inner])
        found.append(regression.score(vectors[inner:], labels[inner:]))
    regression.set_params(C=PENALTIES[int(np.argmax(found))]).fit(vectors, labels)
    return float(regression.score(others, answers))


def pair_features(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Features [|a - b|, a * b] of pairs, (N, 2 D), from vectors (N, D)."""
    return np.concatenate([np.abs(first - second), first * second], axis=1)


def soft_targets(scores: np.ndarray) -> np.ndarray:
    """Scores (N,) from 1 to 5 as distributions (N, 5) (Tai et al. 2015, section 5.2).

    A score y between k and k + 1 has the probability y - k of k + 1, and the rest of k.

    Example:
        >>> soft_targets(np.array([1.0, 3.75, 5.0])).tolist()
        [[1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.25, 0.75, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]]
    """
    return np.maximum(1 - np.abs(np.asarray(scores)[:, None] - np.arange(1, 6)), 0)


def relatedness(
    features: Sequence[np.ndarray], scores: Sequence[np.ndarray], *, seed: int = _SEED
) -> dict[str, float]:
    """Predict scores from 1 to 5 by softmax regression on features of pairs.

    The protocol of the released skip-thoughts code: shuffle the training pairs once; minimise the
    cross-entropy to `soft_targets` by Adam (learning rate 1e-3, batches of 128) until the
    correlation on the trial set, taken every 100 epochs, does not improve. The prediction is the
    expected score of the best regression.

    ``features`` (N, F) and ``scores`` (N,) are given for training, trial and test pairs.

    Returns:
        ``pearson``, ``spearman`` (NaN for constant predictions) and ``mse`` on the test pairs.
    """
    from scipy.stats import pearsonr, spearmanr

    # A last column of ones for the biases.
    train, trial, test = (np.pad(part, ((0, 0), (0, 1)), constant_values=1) for part in features)
    order = np.random.RandomState(seed).permutation(len(train))  # as sklearn's
    train = train[order].astype(np.float32)
    targets = soft_targets(scores[0])[order].astype(np.float32)
    regression = _Regression(train.shape[1] - 1, seed)
    best, kept = -1.0, regression.weights
    while True:
        for _ in range(_EPOCHS):
            regression.update_over(train, targets)
        found = _correlation(pearsonr, _expected(regression.weights, trial), scores[1])
        if not found > best:
            break
        best, kept = found, regression.weights
    predicted = _expected(kept, test)
    return {
        "pearson": _correlation(pearsonr, predicted, scores[2]),
        "spearman": _correlation(spearmanr, predicted, scores[2]),
        "mse": float(np.mean((predicted - scores[2]) ** 2)),
    }


class _Regression:
    """Softmax regression with Adam in float32; torch is five times slower for small matrices.

    The last row of the weights (F + 1, 5) are the biases. Initial weights follow Glorot and Bengio
    2010; biases are 0.
    """

    def __init__(self, features: int, seed: int) -> None:
        bound = (6 / (features + 5)) ** 0.5
        drawn = np.random.default_rng(seed).uniform(-bound, bound, (features, 5))
        self.weights = np.pad(drawn, ((0, 1), (0, 0))).astype(np.float32)
        self._mean = np.zeros_like(self.weights)
        self._square = np.zeros_like(self.weights)
        self._updates = 0

    def update_over(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        for begin in range(0, len(inputs), _BATCH):
            rows = inputs[begin : begin + _BATCH]
            error = _shares(rows @ self.weights) - targets[begin : begin + _BATCH]
            gradient = rows.T @ (error / len(rows))
            self._updates += 1
            self._mean = 0.9 * self._mean + 0.1 * gradient
            self._square = 0.999 * self._square + 0.001 * gradient**2
            deviation = np.sqrt(self._square / (1 - 0.999**self._updates)) + 1e-8
            rate = 1e-3 / (1 - 0.9**self._updates)
            self.weights = self.weights - rate * self._mean / deviation


def _shares(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def _expected(weights: np.ndarray, features: np.ndarray) -> np.ndarray:
    return _shares(features.astype(np.float64) @ weights) @ np.arange(1, 6)


def _correlation(measure: Callable[..., Any], one: np.ndarray, other: np.ndarray) -> float:
    # scipy would warn of constant predictions.
    return float(measure(one, other)[0]) if np.ptp(one) > 1e-9 else float("nan")


def _encoded(encode: Encode, sentences: Iterable[str]) -> Any:
    given = list(sentences)
    vectors: Any = encode(given)
    if len(vectors.shape) != 2 or vectors.shape[0] != len(given):
        raise ValueError(
            f"encode must return (n, d), n = {len(given):,} sentences, got {tuple(vectors.shape)}"
        )
    sparse = hasattr(vectors, "tocsr")
    if not np.isfinite(vectors.data if sparse else vectors).all():
        raise ValueError("encode returned vectors that are not finite: check its weights")
    return vectors
