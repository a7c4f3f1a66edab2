"""Handwriting: batches of pen offsets with their texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.loading import BatchSet, DistributedBatches, rows, subset
from ln_zoo.data.pen.files import LongSteps, PenLines, first_names
from ln_zoo.utils.checks import check_at_least, check_choice

LengthMode = Literal["crop", "tbptt", "full"]
Scale = Literal["std", "median", "const"]

CONSTANT_SCALE = 20.0
"""Divisor of offsets under ``scale="const"``, whiteboard units."""
_POOL = 100  # training batches whose lines are sorted by length together
_NAMED = 5  # lines named in a message
_NO_TEXT = "no text"


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


class HandwritingData(ZooDataModule, ABC):
    """Lines of handwriting with their texts, as `HandwritingBatch`.

    Offsets are in whiteboard units (per line under ``scale="median"``), y upwards; models
    standardise them by `offset_statistics`. A subclass states its name and implements `read`.

    Args:
        length_mode: targets of a line in training: ``crop``, the first ``max_points``; ``tbptt``,
            all, in consecutive parts over which a model carries its state; ``full``, all at once.
            Evaluation uses the same in ``crop`` and whole lines otherwise.
        max_points: maximum targets of a line or part; unused in ``full``.
        scale: divisor of offsets: ``std``, mean 0 and standard deviation 1 on each axis of the
            training set (the only scale whose likelihoods compare with the papers'); ``median``,
            the median length of each line's own steps; ``const``, 20 units.
        max_step: maximum length of a step within a stroke, whiteboard units; None: no limit. Longer
            ones are errors of the pen sensor, in IAM-OnDB one step in 2,000 above 127 units.
        long_steps: ``drop`` longer steps, or ``clip`` them to ``max_step``.
        require_text: drop lines without transcription.
    """

    batch_kind = "handwriting"
    _sets: dict[str, PenLines]

    def __init__(
        self,
        batch_size: int = 8,
        length_mode: LengthMode = "crop",
        max_points: int = 500,
        scale: Scale = "std",
        max_step: float | None = None,
        long_steps: LongSteps = "drop",
        require_text: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, **options)
        check_at_least(1, max_points=max_points)
        check_choice("length_mode", length_mode, get_args(LengthMode))
        check_choice("scale", scale, get_args(Scale))
        check_choice("long_steps", long_steps, get_args(LongSteps))
        if max_step is not None and not 0 < max_step < float("inf"):
            raise ValueError(f"max_step must be a positive length or None, got {max_step!r}")
        self.length_mode = length_mode
        self.max_points = max_points
        self.scale = scale
        self.max_step = max_step
        self.long_steps = long_steps
        self.require_text = require_text
        self._left_out: dict[str, dict[str, list[str]]] = {}
        self._statistics: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def read(self) -> Mapping[str, PenLines]:
        """Read the three sets by name, including unusable lines."""

    @property
    def preprocessing(self) -> dict[str, Any]:
        mean, std = (values.tolist() for values in self.offset_statistics)
        steps: dict[str, Any] = {
            "offsets": "from point to point, y upwards",
            "scale": self.scale,
            "offset_mean": mean,
            "offset_std": std,
        }
        if self.max_step is not None:
            steps |= {"max_step": self.max_step, "long_steps": self.long_steps}
        return steps | self._points_taken()

    @property
    def metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = super().metadata | {"test_split": self.test_split}
        metadata |= {f"{name}_size": len(lines) for name, lines in self._sets.items()}
        left_out = {
            name: {reason: len(lines) for reason, lines in reasons.items()}
            for name, reasons in self._left_out.items()
        }
        if left_out:
            metadata["left_out"] = left_out
        return metadata | {"scale": self.scale, **self._points_taken()}

    @property
    def offset_statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of dx and dy, float32 (2,) each.

        Under ``scale="std"`` over all targets of the training set, including moves between strokes;
        under ``"const"`` 0 and 20; under ``"median"`` 0 and 1.
        """
        if self.scale != "std":
            value = CONSTANT_SCALE if self.scale == "const" else 1.0
            return torch.zeros(2), torch.full((2,), value)
        if self._statistics is None:
            self._statistics = _mean_and_std(self.lines("train"))
        return self._statistics

    def lines(self, name: Literal["train", "val", "test"]) -> LineSet:
        """The whole lines of a set: line i has ``offsets(i)`` and ``text[i]``."""
        return LineSet(self._set(name), per_line=self.scale == "median")

    def setup(self, stage: str | None = None) -> None:
        if self._sets:
            return
        sets = dict(self.read())
        cleaned: dict[int, PenLines] = {}
        for name, lines in sets.items():
            if id(lines) not in cleaned:
                cleaned[id(lines)] = self._clean(name, lines)
            self._sets[name] = cleaned[id(lines)]

    def training_set(self) -> LineSet:
        return LineSet(
            self._set("train"),
            per_line=self.scale == "median",
            max_points=None if self.length_mode == "full" else self.max_points,
            parts=self.length_mode == "tbptt",
        )

    def evaluation_set(self, name: str, examples: int | None = None) -> LineSet:
        return LineSet(
            subset(self._set(name), examples),
            per_line=self.scale == "median",
            max_points=self.max_points if self.length_mode == "crop" else None,
        )

    def _points_taken(self) -> dict[str, Any]:
        limit = {} if self.length_mode == "full" else {"max_points": self.max_points}
        return {"length_mode": self.length_mode, **limit}

    def _clean(self, name: str, lines: PenLines) -> PenLines:
        reasons = lines.damaged()
        if self.require_text:
            damaged = {i for numbers in reasons.values() for i in numbers}
            silent = [i for i, text in enumerate(lines.text) if not text.strip()]
            reasons[_NO_TEXT] = [i for i in silent if i not in damaged]
        lines = self._leave_out(name, lines, reasons)
        if self.max_step is not None:
            lines = lines.without_long_steps(self.max_step, self.long_steps)
            jumps = [i for numbers in lines.damaged().values() for i in numbers]
            lines = self._leave_out(name, lines, {"nothing but long steps": jumps})
        if not len(lines):
            raise ValueError(f"{self.name}: no line of the {name} set can be used")
        return lines

    def _leave_out(self, name: str, lines: PenLines, reasons: Mapping[str, list[int]]) -> PenLines:
        named = {
            reason: [lines.line_id[i] for i in numbers]
            for reason, numbers in reasons.items()
            if numbers
        }
        if not named:
            return lines
        self._left_out.setdefault(name, {}).update(named)
        # Lines without text are expected (info); damaged lines are not (warning).
        log = rank_zero_info if set(named) == {_NO_TEXT} else rank_zero_warn
        out = [f"{len(n):,} with {why} ({first_names(n, _NAMED)})" for why, n in named.items()]
        log(f"{self.name}, {name} set of {len(lines):,} lines; left out: {'; '.join(out)}")
        left_out = {i for numbers in reasons.values() for i in numbers}
        return lines.pick([i for i in range(len(lines)) if i not in left_out])


def median_step(steps: np.ndarray) -> float:
    """Median length of steps (P, 3); if it is 0, of the nonzero steps; otherwise 1."""
    lengths = np.hypot(steps[:, 0], steps[:, 1])
    for some in (lengths, lengths[lengths > 0]):
        if len(some) and np.median(some) > 0:
            return float(np.median(some))
    return 1.0


def _mean_and_std(lines: LineSet) -> tuple[Tensor, Tensor]:
    count, total, squares = 0, np.zeros(2), np.zeros(2)
    for i in range(len(lines)):
        offsets = lines.offsets(i)[1:, :2].numpy().astype(np.float64)
        count += len(offsets)
        total += offsets.sum(0)
        squares += np.square(offsets).sum(0)
    mean = total / count
    variance = squares / count - np.square(mean)
    if not (variance > 0).all():
        raise ValueError(
            "the offsets of the training lines do not vary on an axis: they cannot be "
            'standardised; scale="const" divides by a constant'
        )
    return torch.from_numpy(mean).float(), torch.from_numpy(np.sqrt(variance)).float()
