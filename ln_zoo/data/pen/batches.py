"""Batches of pen offsets with their texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ln_zoo.data.loading import BatchSet, DistributedBatches, rows
from ln_zoo.data.pen.files import PenLines

_POOL = 100  # training batches whose lines are sorted by length together


class HandwritingBatch(NamedTuple):
    """N lines of handwriting, or the same part of each.

    Attributes:
        offsets: float32 (N, T + 1, 3): dx, dy (upwards), 1 at the end of a stroke, not
            standardised, padded with zeros. Rows 1 to T are the targets, row t the input of target
            t + 1. Row 0 is zero at the start of a line, else the previous point.
        lengths: targets of each example, int64 (N,); 0 after the end of a line.
        text: the transcription of each whole line.
        first: whether lines start here, or continue lines of the previous batch.
    """

    offsets: Tensor
    lengths: Tensor
    text: tuple[str, ...]
    first: bool


@dataclass(eq=False)
class LineSet(BatchSet):
    """Lines of one set, indexed by a tensor of indices.

    A line of P points has P - 1 targets, the offsets between points. The first point is the zero
    vector of row 0 (Graves 2013, section 2); as a target its density would be unbounded.
    ``per_line`` divides offsets by the median step of the line. ``max_points`` limits targets: to
    the first ones, or with ``parts`` to consecutive parts.
    """

    lines: PenLines
    _: KW_ONLY
    per_line: bool = False
    max_points: int | None = None
    parts: bool = False

    @property
    def text(self) -> tuple[str, ...]:
        return self.lines.text

    @property
    def batches(self) -> type[DistributedBatches]:
        return LineBatches

    @property
    def targets(self) -> np.ndarray:
        targets = self.lines.points - 1
        if self.max_points is None or self.parts:
            return targets
        return np.minimum(targets, self.max_points)

    @property
    def parts_of_lines(self) -> np.ndarray:
        targets = self.targets
        if self.max_points is None or not self.parts:
            return np.ones_like(targets)
        return -(-targets // self.max_points)

    def __len__(self) -> int:
        return len(self.lines)

    def offsets(self, i: int) -> Tensor:
        """Line i, float32 (P, 3): offsets with y upwards, the first zeroed."""
        steps = self.lines.steps(i)
        steps[0, :2] = 0
        if self.per_line:
            steps[1:, :2] /= median_step(steps[1:])
        steps[:, 1] = 0 - steps[:, 1]  # avoids -0
        return torch.from_numpy(steps)

    def __getitem__(self, index: Tensor | tuple[Tensor, int]) -> HandwritingBatch:
        """A batch of lines, or of their parts number n, from 0."""
        indices, part = index if isinstance(index, tuple) else (index, 0)
        lines = rows(indices)
        start = part * (self.max_points or 0)
        stop = None if self.max_points is None else start + self.max_points + 1
        pieces = [self.offsets(i)[start:stop] for i in lines]
        lengths = [max(len(piece) - 1, 0) for piece in pieces]
        offsets = torch.zeros(len(lines), max(lengths) + 1, 3)
        for example, (piece, length) in enumerate(zip(pieces, lengths, strict=True)):
            if length:
                offsets[example, : length + 1] = piece
        if part == 0:
            offsets[:, 0] = 0
        text = tuple(self.text[i] for i in lines)
        return HandwritingBatch(offsets, torch.tensor(lengths), text, part == 0)


class LineBatches(DistributedBatches):
    """Batches of lines of similar length, distributed over W processes.

    Yields (B,) indices, or (indices, part) if lines have parts: all parts of a batch of lines, then
    the next lines. *Training*: shuffled lines are sorted by length within pools of 100 batches;
    batches are shuffled. All epochs and processes have the same number of steps; the excess, which
    differs between epochs, is dropped. *Evaluation*: longest lines first.
    """

    dataset: LineSet

    def __init__(self, dataset: LineSet, batch_size: int, **options: Any) -> None:
        super().__init__(dataset, batch_size, **options)
        self._targets = torch.from_numpy(dataset.targets)
        self._parts = torch.from_numpy(dataset.parts_of_lines)
        shares = [len(steps) for steps in self._deal()]
        self._steps = min(shares) if self.training else shares[self.rank]

    def __iter__(self) -> Iterator[Any]:
        for lines, part in self._deal()[self.rank][: self._steps][self.first :]:
            yield (lines, part) if self.dataset.parts else lines

    def __len__(self) -> int:
        return self._steps

    def settings(self) -> dict[str, Any]:
        mode = {"max_points": self.dataset.max_points, "parts": self.dataset.parts}
        return super().settings() | mode

    def _deal(self) -> list[list[tuple[Tensor, int]]]:
        batches = self._batches()
        parts = torch.stack([self._parts[lines].max() for lines in batches])
        kept = _keep(self.permutation(len(batches), 1), parts, self.total).tolist()
        # Sorted batches are ordered by number of parts: each process gets its share.
        turn = {batch: n % self.num_replicas for n, batch in enumerate(sorted(kept))}
        dealt: list[list[tuple[Tensor, int]]] = [[] for _ in range(self.num_replicas)]
        for batch in kept:
            dealt[turn[batch]] += [(batches[batch], part) for part in range(int(parts[batch]))]
        return dealt

    def _batches(self) -> list[Tensor]:
        order = self.permutation(len(self.dataset))
        if not self.shuffle:
            longest_first = torch.argsort(self._targets, descending=True, stable=True)
            return list(longest_first.split(self.batch_size))[: self.whole]
        order = _keep(order, self._parts, self.whole * self.batch_size)
        order = order[torch.argsort(self._parts[order], stable=True)]
        pools = order.split(_POOL * self.batch_size)
        by_length = [pool[torch.argsort(self._targets[pool], stable=True)] for pool in pools]
        return list(torch.cat(by_length).split(self.batch_size))


def _keep(order: Tensor, parts: Tensor, count: int) -> Tensor:
    """The first ``count`` of ``order``; the excess has the most common number of parts.

    The remaining numbers of parts do not depend on the order, so that epochs have equal lengths.
    """
    of_each = parts[order]
    commonness = torch.bincount(parts)[of_each] * (parts.max() + 1) + of_each
    rarest_first = torch.argsort(commonness, stable=True)
    return order[rarest_first[:count].sort().values]


def median_step(steps: np.ndarray) -> float:
    """Median length of steps (P, 3); if it is 0, of the nonzero steps; otherwise 1."""
    lengths = np.hypot(steps[:, 0], steps[:, 1])
    for some in (lengths, lengths[lengths > 0]):
        if len(some) and np.median(some) > 0:
            return float(np.median(some))
    return 1.0
