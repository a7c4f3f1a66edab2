"""A control for image-caption retrieval: regularised linear CCA.

``python -m benchmarks.caption_cca --dataset flickr8k`` maps features of images and tf-idf bags of
the words of captions to one space by canonical correlation analysis on the training set, with a
caption and its image as a pair, and ranks test images and captions by the cosine of their maps,
with directions weighted by their correlation. The ridges, in units of the mean variance, and the
number of directions are chosen by the recalls of the validation set. Whatever learns an embedding
by gradient descent has to be compared with it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.linalg import cholesky, solve_triangular
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor

from ln_zoo.data import CaptionedData, CaptionedImages
from ln_zoo.metrics import retrieval_scores

#: Ridges of images and of captions, and numbers of directions, of which the best are chosen.
RIDGES = (0.3, 1.0, 3.0)
DIRECTIONS = (128, 256, 512)
#: Captions in whose training set a word must occur.
_FEWEST = 5


class Moments(NamedTuple):
    """Means and covariances of pairs, of which each x stands for several y."""

    x_mean: np.ndarray
    y_mean: np.ndarray
    xx: np.ndarray
    yy: np.ndarray
    xy: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray) -> Moments:
        """Of x (N, I) and y (C N, V); those of row i are C i to C i + C - 1."""
        x_mean, y_mean = x.mean(0), y.mean(0)
        a, b = x - x_mean, y - y_mean
        of_each = b.reshape(len(x), -1, y.shape[1]).mean(1)
        return cls(x_mean, y_mean, a.T @ a / len(a), b.T @ b / len(b), a.T @ of_each / len(a))


class Maps(NamedTuple):
    """Linear maps to the common space, directions in order of their correlation."""

    x: np.ndarray
    y: np.ndarray


def cca(moments: Moments, x_ridge: float, y_ridge: float) -> Maps:
    """Canonical directions, each weighted by its correlation.

    Args:
        moments: of the pairs.
        x_ridge: added to the diagonal of the covariance of x, in units of its mean.
        y_ridge: the same of y.
    """
    roots = [
        cholesky(c + ridge * np.trace(c) / len(c) * np.eye(len(c)), lower=True)
        for c, ridge in ((moments.xx, x_ridge), (moments.yy, y_ridge))
    ]
    left = solve_triangular(roots[0], moments.xy, lower=True)
    between = solve_triangular(roots[1], left.T, lower=True).T
    u, correlations, vt = np.linalg.svd(between, full_matrices=False)
    x, y = (
        solve_triangular(root.T, side) * correlations
        for root, side in zip(roots, (u, vt.T), strict=True)
    )
    return Maps(x, y)


def score(
    maps: Maps, moments: Moments, x: np.ndarray, y: np.ndarray, size: int
) -> dict[str, float]:
    """`retrieval_scores` of the first directions."""
    images, captions = (
        torch.nn.functional.normalize(torch.from_numpy((a - mean) @ to[:, :size]).float(), dim=1)
        for a, mean, to in ((x, moments.x_mean, maps.x), (y, moments.y_mean, maps.y))
    )
    found = retrieval_scores(captions, images, _cosine)
    return {name: float(value) for name, value in found.items()}


def _cosine(captions: Tensor, images: Tensor) -> Tensor:
    return -captions @ images.T


def control(data: CaptionedData) -> tuple[dict[str, float], dict[str, float]]:
    """What was chosen on the validation set, and the scores of the test set.

    Args:
        data: after `setup`.
    """
    bag = TfidfVectorizer(min_df=_FEWEST, sublinear_tf=True, token_pattern=r"\S+")
    x, y = {}, {}
    for name in ("train", "val", "test"):
        read = data.captioned(name)
        rows = np.asarray(read.features, np.float64)
        x[name] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        texts = [" ".join(words) for words in read.captions]
        counted = bag.fit_transform(texts) if name == "train" else bag.transform(texts)
        y[name] = counted.toarray()
    moments = Moments.of(x["train"], y["train"])
    best: tuple[float, dict[str, float], dict[str, float]] | None = None
    for x_ridge, y_ridge in product(RIDGES, RIDGES):
        maps = cca(moments, x_ridge, y_ridge)
        for size in DIRECTIONS:
            validated = score(maps, moments, x["val"], y["val"], size)["recall_sum"]
            if best is None or validated > best[0]:
                chosen = {"x_ridge": x_ridge, "y_ridge": y_ridge, "directions": size}
                tested = score(maps, moments, x["test"], y["test"], size)
                best = validated, chosen | {"val_recall_sum": validated}, tested
    assert best is not None
    return best[1:]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the control; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.caption_cca", description=__doc__)
    parser.add_argument("--root", help="folder of the images")
    parser.add_argument("--dataset", help="or its name in LN_ZOO_DATA, such as flickr8k")
    parser.add_argument("--features", help="which of several features")
    arguments = parser.parse_args(argv)
    data = CaptionedImages(arguments.root, arguments.dataset, arguments.features)
    data.setup()
    chosen, tested = control(data)
    facts = ", ".join(f"{name} {value:g}" for name, value in chosen.items())
    print(f"{data.name}, {data.metadata['features']}; chosen on the validation set: {facts}")
    table = Table("metric", "test")
    for name, value in tested.items():
        table.add_row(name, f"{value:.1f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
