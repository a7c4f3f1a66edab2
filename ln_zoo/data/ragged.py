"""Sequences of different lengths, stored in one array and padded in batches."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ln_zoo.vocabulary import EOS


class Ragged:
    """N sequences of integers.

    Args:
        values: all values, concatenated, int32 (M,).
        starts: the start of each sequence and the end of the last, int64 (N + 1,).

    Example:
        >>> rows = Ragged.of([[3, 4], [], [5]])
        >>> rows[0].tolist(), rows.lengths.tolist(), rows.pick([2, 0])[1].tolist()
        ([3, 4], [2, 0, 1], [3, 4])
    """

    def __init__(self, values: np.ndarray, starts: np.ndarray) -> None:
        self.values = values
        self.starts = starts
        #: Length of each sequence, int32 (N,).
        self.lengths = np.diff(starts).astype(np.int32)

    @classmethod
    def of(cls, rows: Iterable[Iterable[int]]) -> Ragged:
        """Collect sequences."""
        values, starts = array("i"), array("q", [0])
        for row in rows:
            values.extend(row)
            starts.append(len(values))
        return cls(np.array(values, np.int32), np.array(starts, np.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.values[self.starts[i] : self.starts[i + 1]]

    def pick(self, indices: Sequence[int]) -> Ragged:
        """The sequences with these indices."""
        return Ragged.of(self[i].tolist() for i in indices)


def pad(rows: Sequence[np.ndarray], ends: int = 0) -> tuple[Tensor, Tensor]:
    """Pad sequences by `EOS`.

    Args:
        rows: N sequences.
        ends: number of `EOS` that belong to each sequence.

    Returns:
        int64 (N, T), and lengths including ``ends``, int64 (N,).
    """
    lengths = np.array([len(row) for row in rows], np.int64)
    padded = np.full((len(rows), int(lengths.max(initial=0)) + ends), EOS, np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.concatenate(rows)
    return torch.from_numpy(padded), torch.from_numpy(lengths + ends)
