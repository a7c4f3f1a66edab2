"""How sentence vectors are judged by the tasks of skip-thoughts (Kiros et al. 2015, section 3).

Vectors are not trained further. Opinions and subjectivity (MR, CR, SUBJ, MPQA) are told from them
by logistic regression in ten folds, the relatedness of two sentences (SICK) by a softmax regression
on their difference and product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, get_args

import numpy as np

Encode = Callable[[list[str]], Any]
"""Makes vectors (n, d) of n sentences: an array, or a sparse matrix for classification."""
ProtocolName = Literal["original", "fast"]

FOLDS = 10
PENALTIES = tuple(2.0**power for power in range(9))
"""The values of C that are tried."""
_SEED = 1234
"""That of the released code."""
_EPOCHS, _BATCH = 100, 128
"""Of a round of training on SICK: the library defaults of the released code's year."""


class Classes(Protocol):
    """A task with sentences of two classes."""

    name: str
    sentences: list[str]
    labels: np.ndarray


class Pairs(Protocol):
    """Pairs of sentences with scores from 1 to 5."""

    first: list[str]
    second: list[str]
    scores: np.ndarray


class KnownVectors:
    """An encoder of sentences whose vectors are known, which other processes can be given.

    Args:
        encode: makes the vectors; it is asked once, for each sentence that differs.
        sentences: those that may be asked for.

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
        encode: makes vectors (n, d) of n sentences.
        task: a task of `ln_zoo.data.sentence_tasks`, or an object with the same attributes:
            ``name``, ``sentences`` and ``labels``, or ``name``, ``train``, ``trial`` and ``test``.
        protocol: ``original`` or ``fast``, see `accuracy`.
        n_jobs: processes among which folds are divided.

    Returns:
        ``{"mr": accuracy in per cent}``, or ``sick_pearson``, ``sick_spearman`` and ``sick_mse``.

    Raises:
        ValueError: an unknown protocol, or vectors that are not finite or not one a sentence.
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
    """Accuracy of a logistic regression on vectors in ten folds.

    ``original`` is the protocol of the released skip-thoughts code: the examples are shuffled once
    and cut into ten folds in that order; for each, the penalty C is the one of 1, 2, 4, ..., 256
    with the best mean accuracy (the least of equals) in ten folds of the other nine, again in
    order; a regression with it on those nine is scored on the fold. It is liblinear's, which
    penalises the intercept too: 910 regressions in all.

    ``fast`` chooses C by the last tenth of the nine folds alone and solves by L-BFGS, which starts
    each C from the one before and leaves the intercept free: 100 regressions. For curves during
    training; accuracies lie within some tenths of a point of the original's.

    Args:
        vectors: (N, D), an array or a sparse matrix.
        labels: (N,).
        protocol: ``original`` or ``fast``.
        seed: of the shuffle; 1234 in the released code.
        n_jobs: processes among which the ten folds are divided.

    Returns:
        The mean of ten accuracies, a share.

    Raises:
        ValueError: an unknown protocol, fewer than a hundred examples, or a single class.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> labels = rng.integers(0, 2, 200)
        >>> vectors = rng.normal(size=(200, 3)) + 3 * labels[:, None]
        >>> bool(accuracy(vectors, labels, "fast") > 0.95)
        True
    """
    if protocol not in get_args(ProtocolName):
        raise ValueError(f"protocol must be 'original' or 'fast', got {protocol!r}")
    if len(labels) < FOLDS**2 or len(np.unique(labels)) < 2:
        raise ValueError(
            f"ten folds within ten need at least {FOLDS**2} examples of two classes, got "
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
    """What the relatedness of two sentences is told from: [|a - b|, a * b], (N, 2 D).

    Args:
        first: vectors a, (N, D).
        second: vectors b, (N, D).
    """
    return np.concatenate([np.abs(first - second), first * second], axis=1)


def soft_targets(scores: np.ndarray) -> np.ndarray:
    """Scores from 1 to 5 as distributions over the five (Tai et al. 2015, section 5.2).

    Args:
        scores: (N,).

    Returns:
        (N, 5): a score y between k and k + 1 gives y - k to k + 1 and the rest to k.

    Example:
        >>> soft_targets(np.array([1.0, 3.75, 5.0])).tolist()
        [[1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.25, 0.75, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]]
    """
    return np.maximum(1 - np.abs(np.asarray(scores)[:, None] - np.arange(1, 6)), 0)


def relatedness(
    features: Sequence[np.ndarray], scores: Sequence[np.ndarray], *, seed: int = _SEED
) -> dict[str, float]:
    """How well a softmax regression tells scores from 1 to 5 from the features of pairs.

    The protocol of the released skip-thoughts code. The training pairs are shuffled once. Adam
    (learning rate 1e-3, batches of 128) lowers the cross-entropy to `soft_targets`; after every 100
    epochs the correlation on the trial set is taken, and training ends when it is no better than
    before. What is predicted is the expected score of the best regression.

    Args:
        features: those of the training, trial and test pairs, each (N, F).
        scores: likewise, each (N,).
        seed: of the shuffle and of the first weights.

    Returns:
        ``pearson`` and ``spearman``, correlations on the test pairs, NaN for predictions that are
        all the same; ``mse``, mean squared error.
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
    """A softmax regression on five scores and its Adam, in float32.

    Of NumPy: thousands of updates of a small matrix take torch five times as long.

    Args:
        features: F; the last row of the weights (F + 1, 5) is of the biases.
        seed: of the first weights, which are those of Glorot and Bengio (2010), biases 0.
    """

    def __init__(self, features: int, seed: int) -> None:
        bound = (6 / (features + 5)) ** 0.5
        drawn = np.random.default_rng(seed).uniform(-bound, bound, (features, 5))
        self.weights = np.pad(drawn, ((0, 1), (0, 0))).astype(np.float32)
        self._mean = np.zeros_like(self.weights)
        self._square = np.zeros_like(self.weights)
        self._updates = 0

    def update_over(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        """An update for each batch, in order."""
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
    # Of what does not vary there is none; scipy would warn.
    return float(measure(one, other)[0]) if np.ptp(one) > 1e-9 else float("nan")


def _encoded(encode: Encode, sentences: Iterable[str]) -> Any:
    given = list(sentences)
    vectors: Any = encode(given)
    if len(vectors.shape) != 2 or vectors.shape[0] != len(given):
        raise ValueError(
            f"the encoder must give an array (n, d) for n = {len(given):,} sentences, got "
            f"{tuple(vectors.shape)}"
        )
    sparse = hasattr(vectors, "tocsr")
    if not np.isfinite(vectors.data if sparse else vectors).all():
        raise ValueError("the encoder gave vectors that are not finite: its training diverged")
    return vectors
