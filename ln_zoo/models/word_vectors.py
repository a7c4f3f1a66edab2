"""Vectors of words from elsewhere, mapped into a model's own (Kiros et al. 2015, section 2.2)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ln_zoo.vocabulary import Vocabulary

#: Bytes of the longest line that may be one of word vectors.
_LONGEST = 1_000_000


class Expansion(NamedTuple):
    """Words beyond a model's vocabulary, with vectors like its own.

    Attributes:
        rows: the row of each word.
        vectors: float32 (n, E).
    """

    rows: dict[str, int]
    vectors: Tensor


def expand(vocabulary: Vocabulary, vectors: Tensor, path: str | os.PathLike[str]) -> Expansion:
    """Maps a file of word vectors into the space of a model's by least squares with an intercept.

    The map is fitted on the words that both have, and applied to those that the model has not.
    Words with ``_``, which are phrases in word2vec, are left out, as in the released code.

    Args:
        vocabulary: of the model.
        vectors: of its numbers of words, (V, E).
        path: text in the form of word2vec (a first line with two numbers) or of GloVe (without): a
            word and its d numbers a line, with blanks between, in UTF-8.

    Raises:
        OSError: if the file cannot be read.
        ValueError: for a file that is not UTF-8 (with the byte), a line that does not hold a word
            and as many finite numbers as the first, or no word that the model has as well.

    Warns:
        UserWarning: if there are fewer common words than the map has coefficients for each number.
    """
    words, given = read_word_vectors(path)
    own = vectors.detach().cpu().double().numpy()
    inputs = np.hstack([given, np.ones((len(words), 1), np.float32)])
    known = [i for i, word in enumerate(words) if word in vocabulary]
    if not known:
        raise ValueError(
            f"{os.fspath(path)} has no word that the model knows: give vectors of the same "
            "language, in small letters where the model was trained on them"
        )
    if len(known) < inputs.shape[1]:
        warnings.warn(
            f"{os.fspath(path)} and the model have {len(known)} words in common, fewer than the "
            f"{inputs.shape[1]} coefficients for each number: the map is not determined by them",
            stacklevel=2,
        )
    targets = own[vocabulary.numbers(words[i] for i in known)]
    fitted, *_ = np.linalg.lstsq(inputs[known].astype(np.float64), targets)
    fresh = [i for i, word in enumerate(words) if word not in vocabulary]
    mapped = inputs[fresh] @ fitted.astype(np.float32)
    return Expansion({words[i]: row for row, i in enumerate(fresh)}, torch.from_numpy(mapped))


def read_word_vectors(path: str | os.PathLike[str]) -> tuple[list[str], np.ndarray]:
    """The words of a file and their vectors, float32 (n, d); see `expand`.

    Of a word that is there twice the first vector is kept.
    """
    name = os.fspath(path)
    found: dict[str, np.ndarray] = {}
    size = 0
    for number, line in _lines(name):
        fields = line.split(" ")
        if number == 1 and len(line.split()) == 2 and all(f.isdigit() for f in line.split()):
            continue
        size = size or len(fields) - 1
        try:
            vector = np.array(fields[-size:], np.float32)
        except ValueError:
            vector = np.zeros(0, np.float32)
        # A few words of GloVe hold blanks.
        word = " ".join(fields[:-size])
        if not size or not word or len(vector) != size or not np.isfinite(vector).all():
            raise ValueError(
                f"{name}, line {number}: expected a word and {size or 'its'} finite numbers, with "
                f"a blank between any two, got {line[:60]!r}"
            )
        if "_" not in word:
            found.setdefault(word, vector)
    if not found:
        raise ValueError(f"{name} holds no word: expected a word and its numbers a line")
    return list(found), np.stack(list(found.values()))


def _lines(name: str) -> Iterator[tuple[int, str]]:
    start = 0
    with open(name, "rb") as file:
        number = 0
        while raw := file.readline(_LONGEST):
            number += 1
            try:
                line = raw.decode().strip()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{name} must be text in UTF-8, but byte {start + error.start:,} is not: "
                    "convert the file"
                ) from None
            start += len(raw)
            if line:
                yield number, line
