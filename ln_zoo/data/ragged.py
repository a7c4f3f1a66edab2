"""Sequences of different lengths, stored in one array and padded in batches."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ln_zoo.utils.vocabulary import EOS


class Ragged:
    """N sequences of integers: values, int32 (M,), and starts with the end, int64 (N + 1,)."""

    def __init__(self, values: np.ndarray, starts: np.ndarray) -> None:
        self.values = values
        self.starts = starts
        #: Length of each sequence, int32 (N,).
        self.lengths = np.diff(starts).astype(np.int32)

    @classmethod
    def of(cls, rows: Iterable[Iterable[int]]) -> Ragged:
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
        return Ragged.of(self[i].tolist() for i in indices)


def pad(rows: Sequence[np.ndarray], ends: int = 0) -> tuple[Tensor, Tensor]:
    """Pad N sequences by `EOS`; the first ``ends`` of them count as part of a sequence.

    Returns int64 (N, T), and lengths including ``ends``, int64 (N,).
    """
    lengths = np.array([len(row) for row in rows], np.int64)
    padded = np.full((len(rows), int(lengths.max(initial=0)) + ends), EOS, np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.concatenate(rows)
    return torch.from_numpy(padded), torch.from_numpy(lengths + ends)


def check_offsets(offsets: np.ndarray, total: int, where: str | Path) -> None:
    """Raise ValueError unless offsets (N + 1,) divide ``total`` items into N parts."""
    if offsets.ndim != 1 or not np.issubdtype(offsets.dtype, np.integer) or not len(offsets):
        raise ValueError(
            f"{where}: offsets must be integers (N + 1,), got {offsets.dtype} {offsets.shape}"
        )
    # Not np.diff, which wraps in unsigned types.
    if offsets[0] != 0 or offsets[-1] != total or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(
            f"{where}: offsets must increase from 0 to {total:,}, got {offsets[0]:,} to "
            f"{offsets[-1]:,}: files of different sets, or a damaged one"
        )
