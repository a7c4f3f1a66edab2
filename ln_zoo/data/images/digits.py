"""The table of handwritten digits, and its stratified splits."""

from __future__ import annotations

from importlib.resources import files

import numpy as np


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 (1797, 8, 8) of levels 0 to 16, and labels uint8 (1797,).

    The test part of "Optical Recognition of Handwritten Digits" of the UCI repository (Alpaydin and
    Kaynak, 1998; CC BY 4.0), in the order of scikit-learn's copy.
    """
    with files("ln_zoo.data.images").joinpath("digits.npz").open("rb") as file:
        table = np.load(file, allow_pickle=False)
        return table["images"], table["labels"]


def stratified_split(labels: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the rest and of a part of this size, with each class's share of all.

    The same as scikit-learn's ``train_test_split(..., random_state=0, stratify=labels)``.
    """
    random = np.random.RandomState(0)
    counts = np.bincount(labels)
    of_rest = _shares(counts, len(labels) - size, random)
    of_part = _shares(counts - of_rest, size, random)
    rest, part = [], []
    for label, count in enumerate(counts):
        places = np.flatnonzero(labels == label)[random.permutation(count)]
        rest += list(places[: of_rest[label]])
        part += list(places[of_rest[label] :][: of_part[label]])
    return random.permutation(rest), random.permutation(part)


def _shares(counts: np.ndarray, total: int, random: np.random.RandomState) -> np.ndarray:
    """How many of each class make a total; those with the largest remainders are rounded up."""
    exact = counts / counts.sum() * total
    shares = np.floor(exact)
    remainders = exact - shares
    for value in np.unique(remainders)[::-1]:
        left = int(total - shares.sum())
        if left <= 0:
            break
        (tied,) = np.where(remainders == value)
        shares[random.choice(tied, min(len(tied), left), replace=False)] += 1
    return shares.astype(int)
