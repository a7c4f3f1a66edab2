"""External word vectors mapped into a model's space (Kiros et al. 2015, section 2.2)."""

from __future__ import annotations

import os
import warnings
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ln_zoo.utils.vocabulary import Vocabulary, read_word_vectors


class Expansion(NamedTuple):
    """Row of each word outside a model's vocabulary, and vectors in its space, float32 (n, E)."""

    rows: dict[str, int]
    vectors: Tensor


def expand(vocabulary: Vocabulary, vectors: Tensor, path: str | os.PathLike[str]) -> Expansion:
    """Map a file of word vectors into the space of a model's by least squares with an intercept.

    The map is fitted on common words and applied to the others. Words with ``_``, phrases in
    word2vec, are dropped, as in the released code. ``vectors`` (V, E) are the model's, ``path`` is
    a file for `ln_zoo.utils.vocabulary.read_word_vectors`.

    Raises:
        OSError: if the file cannot be read.
        ValueError: as `ln_zoo.utils.vocabulary.read_word_vectors`; without common words.

    Warns:
        UserWarning: if there are fewer common words than coefficients per output.
    """
    read, given = read_word_vectors(path)
    kept = [i for i, word in enumerate(read) if "_" not in word]
    words, given = [read[i] for i in kept], given[kept]
    own = vectors.detach().cpu().double().numpy()
    inputs = np.hstack([given, np.ones((len(words), 1), np.float32)])
    known = [i for i, word in enumerate(words) if word in vocabulary]
    if not known:
        raise ValueError(
            f"{os.fspath(path)} has no word that the model knows: give vectors of the same "
            "language, in lower case where the model was trained on them"
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
