"""What the data modules of handwriting share: batches of pen offsets with their texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.loading import (
    DistributedBatches,
    check_at_least,
    check_choice,
    evenly_spaced,
)
from ln_zoo.data.pen_lines import LongSteps, PenLines

LengthMode = Literal["crop", "tbptt", "full"]
Scale = Literal["std", "median", "const"]

CONSTANT_SCALE = 20.0
"""What ``scale="const"`` divides offsets by, whiteboard units."""
_POOL = 100
"""Training batches among whose lines those of similar length are put together."""
_NAMED = 5
"""Lines named where some are left out."""
_NO_TEXT = "no text"


class HandwritingBatch(NamedTuple):
    """N lines of handwriting, or the same part of each.

    Args:
        offsets: float32 (N, T + 1, 3): (dx, dy, 1 at the end of a stroke), not standardised, y
            upwards. Rows 1 to T are the targets, row t is the input before target t + 1. Row 0 is
            what came before the first target: the null vector at the start of a line, the point
            before otherwise. Padded with zeros at the end.
        lengths: int64 (N,): targets of each example, at most T; 0 where a line has ended before the
            others of its batch (``first`` is False then).
        text: transcription of each line, whole wherever the points are a part of it.
        first: whether these are the beginnings of their lines; else the next part of the lines of
            the batch before, in the same order.
    """

    offsets: Tensor
    lengths: Tensor
    text: tuple[str, ...]
    first: bool


class LineSet(Dataset[HandwritingBatch]):
    """Lines as training or evaluation sees them, indexed by a tensor of indices.

    A line of P points has P - 1 targets, the offsets from each point to the next. Its first point
    has none before it and is the null vector of row 0 (Graves 2013, section 2), with no flag even
    where it is a stroke of its own: were it a target, a density could grow on it without bound.

    Args:
        lines: the lines.
        per_line: divide the offsets of each line by the median length of its own steps.
        max_points: of a line or part; ``None``: whole lines.
        parts: take lines in consecutive parts of ``max_points`` targets, else the first alone.

    Example:
        >>> steps = np.array([[90, 70, 0], [3, 4, 0], [1, -2, 1]])
        >>> data = LineSet(PenLines.from_steps([steps], ["a01-001-01"], ["hi"]))
        >>> data[torch.tensor([0])]
        HandwritingBatch(offsets=tensor([[[ 0.,  0.,  0.],
                                          [ 3., -4.,  0.],
                                          [ 1.,  2.,  1.]]]),
                         lengths=tensor([2]), text=('hi',), first=True)
    """

    def __init__(
        self,
        lines: PenLines,
        *,
        per_line: bool = False,
        max_points: int | None = None,
        parts: bool = False,
    ) -> None:
        self.lines = lines
        self.text = lines.text
        self.per_line = per_line
        self.max_points = max_points
        self.parts = parts

    @property
    def batches(self) -> type[DistributedBatches]:
        """How `BatchLoader` groups lines."""
        return LineBatches

    @property
    def targets(self) -> np.ndarray:
        """Targets of each line in one epoch, int64 (L,)."""
        targets = self.lines.points - 1
        if self.max_points is None or self.parts:
            return targets
        return np.minimum(targets, self.max_points)

    @property
    def parts_of_lines(self) -> np.ndarray:
        """In how many parts each line is taken, int64 (L,)."""
        targets = self.targets
        if self.max_points is None or not self.parts:
            return np.ones_like(targets)
        return -(-targets // self.max_points)

    def __len__(self) -> int:
        return len(self.lines)

    def offsets(self, i: int) -> Tensor:
        """The whole of line i, float32 (P, 3): offsets with y upwards, the first zeroed."""
        steps = self.lines.steps(i)
        steps[0, :2] = 0
        if self.per_line:
            steps[1:, :2] /= median_step(steps[1:])
        steps[:, 1] = 0 - steps[:, 1]  # which makes no -0
        return torch.from_numpy(steps)

    def __getitem__(self, index: Tensor | tuple[Tensor, int]) -> HandwritingBatch:
        """A batch: of lines, or of part number n of lines, from 0."""
        indices, part = index if isinstance(index, tuple) else (index, 0)
        lines = torch.as_tensor(indices).reshape(-1).tolist()
        start = part * (self.max_points or 0)
        pieces = [self.offsets(i)[start:][: self._rows] for i in lines]
        lengths = [max(len(piece) - 1, 0) for piece in pieces]
        offsets = torch.zeros(len(lines), max(lengths) + 1, 3)
        for example, (piece, length) in enumerate(zip(pieces, lengths, strict=True)):
            if length:
                offsets[example, : length + 1] = piece
        if part == 0:
            offsets[:, 0] = 0
        text = tuple(self.text[i] for i in lines)
        return HandwritingBatch(offsets, torch.tensor(lengths), text, part == 0)

    def __getitems__(self, indices: list[int]) -> HandwritingBatch:
        """One batch for a list of indices: what a ``DataLoader`` with a batch size asks for."""
        return self[torch.tensor(indices)]

    @property
    def _rows(self) -> int | None:
        return None if self.max_points is None else self.max_points + 1


class LineBatches(DistributedBatches):
    """Batches of lines of similar length, dealt out to W processes.

    Yields (B,) indices, or (indices, part) where lines are taken in parts: all parts of a batch of
    lines one after the other, then the next lines.

    *Training*: the order of epoch e depends on (seed, e) only. Lines are permuted, those of 100
    batches at a time sorted by length and cut into batches, and the batches permuted: what a batch
    holds differs from epoch to epoch, and is the same for any W. All epochs have the same number of
    steps, and so have all processes. For that are left out, others in each epoch: a last line that
    would be a batch of its own; batches that would not go round; and, where lines are taken in
    parts, the last steps of the processes that have more than another. *Evaluation*: batches from
    the longest lines to the shortest, none left out or repeated, so that any number of processes
    scores the same lines.

    Args:
        dataset: the lines, a `LineSet`.
        batch_size: lines per batch.
        options: as `DistributedBatches`.

    Raises:
        ValueError: as `DistributedBatches`.
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
        """The steps of a whole epoch for this process, wherever iteration starts."""
        return self._steps

    def settings(self) -> dict[str, Any]:
        mode = {"max_points": self.dataset.max_points, "parts": self.dataset.parts}
        return super().settings() | mode

    def _deal(self) -> list[list[tuple[Tensor, int]]]:
        """All steps of this epoch, lines and number of the part, for each process."""
        batches = self._batches()
        parts = torch.stack([self._parts[lines].max() for lines in batches])
        kept = _keep(self.permutation(len(batches), 1), parts, self.total).tolist()
        # Batches of one number of parts lie together: each process gets its share of them.
        turn = {batch: n % self.num_replicas for n, batch in enumerate(sorted(kept))}
        dealt: list[list[tuple[Tensor, int]]] = [[] for _ in range(self.num_replicas)]
        for batch in kept:
            dealt[turn[batch]] += [(batches[batch], part) for part in range(int(parts[batch]))]
        return dealt

    def _batches(self) -> list[Tensor]:
        """The batches of this epoch, by number of parts and, among neighbours, by length."""
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
    """The first of ``order``; what is left out is of the commonest number of parts.

    So the numbers of parts that stay are the same whatever the order, and epochs of one length.
    """
    of_each = parts[order]
    commonness = torch.bincount(parts)[of_each] * (parts.max() + 1) + of_each
    rarest_first = torch.argsort(commonness, stable=True)
    return order[rarest_first[:count].sort().values]


class HandwritingData(ZooDataModule, ABC):
    """Lines of handwriting with their texts.

    Batches are `HandwritingBatch`: offsets from point to point in whiteboard units (per line under
    ``scale="median"``), y upwards. Models standardise them by `offset_statistics`. A dataset states
    its name and where its three sets come from (`read`).

    Training takes of each line the first ``max_points`` targets with the whole text (``crop``), all
    in consecutive parts over which a model carries its state (``tbptt``), or all at once
    (``full``). Evaluation takes the same targets in ``crop``, whole lines otherwise.

    Args:
        batch_size: training lines per step of one process.
        length_mode: ``crop``, ``tbptt`` or ``full``, see above.
        max_points: targets of a line, or of a part of it; of no use in ``full``.
        scale: what models divide offsets by: ``std``, mean 0 and standard deviation 1 on each axis
            of the training set (the only scale whose likelihoods compare with the papers');
            ``median``, for each line the median length of its own steps; ``const``, 20 units.
        max_step: longest step within a stroke, whiteboard units; ``None``: any. Longer ones are
            jumps of the pen's sensor.
        long_steps: ``drop`` those that are longer, or ``clip`` them to ``max_step``.
        require_text: leave lines without transcription out.
        seed: seed of the order of training lines; the splits do not depend on it.
        eval_batch_size: lines per batch in evaluation; changes no result.
        num_workers: processes that fetch batches; 0 is fastest.
        pin_memory: page-locked batches, for faster copies to a GPU.
        drop_last: leave out a last training batch of fewer than ``batch_size`` lines. One of a
            single line is always left out.

    Raises:
        ValueError: a value that is none of those above.
    """

    #: What a batch holds, for models that say what they take.
    gives: ClassVar[str] = "handwriting"
    test_split: str = "test"
    """What the set that tests score is called in tables."""
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
        seed: int = 0,
        eval_batch_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
    ) -> None:
        super().__init__(batch_size, seed, eval_batch_size, num_workers, pin_memory, drop_last)
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
        """Reads the lines of the sets ``"train"``, ``"val"`` and ``"test"``, good or bad."""

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What a line goes through before the model, as plain data."""
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
    def facts(self) -> dict[str, Any]:
        """The dataset, its splits and its batches as plain data, for tables and model cards."""
        facts: dict[str, Any] = {"dataset": self.name, "test_split": self.test_split}
        facts |= {f"{name}_size": len(lines) for name, lines in self._sets.items()}
        left_out = {
            name: {reason: len(lines) for reason, lines in reasons.items()}
            for name, reasons in self._left_out.items()
        }
        if left_out:
            facts["left_out"] = left_out
        return facts | {
            "scale": self.scale,
            **self._points_taken(),
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "seed": self.seed,
        }

    @property
    def offset_statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation by which models standardise dx and dy, float32 (2,) each.

        Under ``scale="std"`` those of the training set's offsets, whole lines, jumps from stroke to
        stroke included, the zeroed first ones not; under ``"const"`` 0 and 20; under ``"median"``
        0 and 1, as each line is divided by its own median already.

        Raises:
            RuntimeError: before `setup`, under ``"std"``.
            ValueError: the offsets do not vary.
        """
        if self.scale != "std":
            value = CONSTANT_SCALE if self.scale == "const" else 1.0
            return torch.zeros(2), torch.full((2,), value)
        if self._statistics is None:
            self._statistics = _mean_and_std(self.lines("train"))
        return self._statistics

    def lines(self, name: Literal["train", "val", "test"]) -> LineSet:
        """The whole lines of a set: ``offsets(i)`` is the writing of one, ``text[i]`` its text.

        Raises:
            RuntimeError: before `setup`.
        """
        return LineSet(self._set(name), per_line=self.scale == "median")

    def setup(self, stage: str | None = None) -> None:
        if self._sets:
            return
        sets = dict(self.read())
        cleaned: dict[int, PenLines] = {}
        for name, lines in sets.items():
            # Two names may stand for one set.
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
        """A set in its own order, or evenly spaced lines of it, as neighbours are of one writer."""
        lines = self._set(name)
        if examples is not None and examples < len(lines):
            lines = lines.pick(evenly_spaced(len(lines), examples))
        return LineSet(
            lines,
            per_line=self.scale == "median",
            max_points=self.max_points if self.length_mode == "crop" else None,
        )

    def _points_taken(self) -> dict[str, Any]:
        limit = {} if self.length_mode == "full" else {"max_points": self.max_points}
        return {"length_mode": self.length_mode, **limit}

    def _clean(self, name: str, lines: PenLines) -> PenLines:
        """The lines of a set that can be learnt from, as they are learnt."""
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
        """The lines without some, by number, of which it tells."""
        named = {
            reason: [lines.line_id[i] for i in numbers]
            for reason, numbers in reasons.items()
            if numbers
        }
        if not named:
            return lines
        self._left_out.setdefault(name, {}).update(named)
        # That some lines have no text is in the order of things; damaged ones are not.
        tell = rank_zero_info if set(named) == {_NO_TEXT} else rank_zero_warn
        tell(
            f"{self.name}, {name} set of {len(lines):,} lines; left out: "
            f"{'; '.join(name_some(reason, ids) for reason, ids in named.items())}"
        )
        out = {i for numbers in reasons.values() for i in numbers}
        return lines.pick([i for i in range(len(lines)) if i not in out])


def median_step(steps: np.ndarray) -> float:
    """Median length of the steps (P, 3), of those that move where half of them do not; or 1."""
    lengths = np.hypot(steps[:, 0], steps[:, 1])
    for some in (lengths, lengths[lengths > 0]):
        if len(some) and np.median(some) > 0:
            return float(np.median(some))
    return 1.0


def name_some(reason: str, names: Sequence[str]) -> str:
    """How many there are of a kind, and the names of the first.

    Example:
        >>> name_some("no text", ["a01-1", "a01-2"])
        '2 with no text (a01-1, a01-2)'
    """
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"{len(names):,} with {reason} ({', '.join(names[:_NAMED])}{more})"


def _mean_and_std(lines: LineSet) -> tuple[Tensor, Tensor]:
    """Of dx and dy over all targets, float32 (2,) each; summed in float64."""
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
