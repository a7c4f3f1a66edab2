"""Data modules of handwriting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.folders import check_folder, find_files, listing, local_folder
from ln_zoo.data.loading import subset
from ln_zoo.data.pen.batches import LineSet
from ln_zoo.data.pen.conversion import LISTS, holds_official_files
from ln_zoo.data.pen.files import (
    SENTENCES,
    STROKES,
    LongSteps,
    PenLines,
    first_names,
    read_pair,
)
from ln_zoo.utils.checks import check_at_least, check_choice

LengthMode = Literal["crop", "tbptt", "full"]
Scale = Literal["std", "median", "const"]
Split = Literal["graves", "official", "random"]

CONSTANT_SCALE = 20.0
"""Divisor of offsets under ``scale="const"``, whiteboard units."""

_NAMED = 5  # lines named in a message
_NO_TEXT = "no text"
_HELP = (
    "the database is given to registered researchers by its owners (fki.tic.heia-fr.ch); "
    "`ln-zoo data iam_ondb SRC DST` converts what they give, and --data.root DST (root= in "
    "Python) or a folder iam_ondb in $LN_ZOO_DATA names the result"
)


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


class IAMOnDB(HandwritingData):
    """The lines of IAM-OnDB in its compact form, or in a pair of NumPy and text file.

    The database has 12,179 lines of 221 writers in four official lists: ``trainset`` 5,364,
    ``testset_v`` 1,438, ``testset_t`` 1,518, ``testset_f`` 3,859. It may be used for research only
    and not be redistributed. ``root`` holds one of:

    * the compact form, as written by ``ln-zoo data iam_ondb SRC DST``: for each list a folder of
      mapped arrays, ``strokes_train``, ``strokes_valid1``, ``strokes_valid2`` and ``strokes_test``;
      or an ``.npz`` of the same name and arrays;
    * ``strokes.npy``, an array of L arrays (P, 3), and ``sentences.txt``, L lines of text. The
      column that ends strokes is detected. Lines have no names, so this needs ``split="random"``.
      The file is a pickle; it is read without running code.

    The splits:

    * ``graves`` (Graves 2013, section 4): training on ``trainset``, ``testset_t`` and
      ``testset_f``, 10,741 lines; validation on ``testset_v``, which he reports, so it is the test
      set too.
    * ``official``: training on ``trainset``, validation on ``testset_v``, test on ``testset_f``.
      Writers do not overlap.
    * ``random``: all lines, shuffled by ``split_seed``; writers overlap.

    Nine lines of ``trainset`` (form a08-551z) have no transcription and are dropped.

    Args:
        root: folder of the lines; default: the folder ``iam_ondb`` in ``$LN_ZOO_DATA``.
        split: ``graves``, ``official`` or ``random``.
        val_fraction: fraction of validation lines in the random split.
        test_fraction: fraction of test lines in the random split.
        split_seed: seed of the random split.
        y_axis: direction in which y grows in ``strokes.npy``: ``up`` in the copies in circulation.
    """

    name = "iam_ondb"

    def __init__(
        self,
        root: str | None = None,
        split: Split = "graves",
        *,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        split_seed: int = 0,
        y_axis: Literal["up", "down"] = "up",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_choice("split", split, get_args(Split))
        check_choice("y_axis", y_axis, ("up", "down"))
        check_at_least(0, split_seed=split_seed)
        shares = (val_fraction, test_fraction)
        if not all(0 < share < 1 for share in shares) or sum(shares) >= 1:
            raise ValueError(
                "val_fraction and test_fraction must be positive fractions with a sum below 1, got "
                f"{val_fraction!r} and {test_fraction!r}"
            )
        self.split = split
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.split_seed = split_seed
        self.y_axis = y_axis
        self._folder = local_folder(root, self.name)
        if self._folder is not None:
            _check(self._folder, split)
        # Graves reports the validation set of his split.
        self.test_split = {"graves": "validation", "random": "random"}.get(split, "test")

    @property
    def root(self) -> Path:
        if self._folder is None:
            raise FileNotFoundError(f"no IAM-OnDB: {_HELP}")
        return self._folder

    def prepare_data(self) -> None:
        _ = self.root  # there is no download

    @property
    def metadata(self) -> dict[str, Any]:
        metadata = super().metadata | {"split": self.split}
        if self.split == "random":
            metadata |= {
                "val_fraction": self.val_fraction,
                "test_fraction": self.test_fraction,
                "split_seed": self.split_seed,
            }
        return metadata

    def read(self) -> dict[str, PenLines]:
        if self.split == "random":
            return self._random(self._all())
        sets = {name: PenLines.load(path) for name, path in _find(self.root).items()}
        if self.split == "official":
            return {"train": sets["train"], "val": sets["valid1"], "test": sets["test"]}
        train = sets["train"] + sets["valid2"] + sets["test"]
        return {"train": train, "val": sets["valid1"], "test": sets["valid1"]}

    def _all(self) -> PenLines:
        if (self.root / STROKES).is_file():
            return read_pair(self.root, self.y_axis)
        first, *others = map(PenLines.load, _find(self.root).values())
        for other in others:
            first += other
        return first

    def _random(self, lines: PenLines) -> dict[str, PenLines]:
        order = np.random.default_rng(self.split_seed).permutation(len(lines))
        sizes = [round(share * len(lines)) for share in (self.val_fraction, self.test_fraction)]
        if not all(sizes) or sum(sizes) >= len(lines):
            raise ValueError(
                f"{len(lines)} lines make no random split with val_fraction {self.val_fraction} "
                f"and test_fraction {self.test_fraction}: a set would be empty"
            )
        val, test, train = np.split(order, np.cumsum(sizes))
        parts = {"train": train, "val": val, "test": test}
        return {name: lines.pick(np.sort(part)) for name, part in parts.items()}


def _check(folder: Path, split: str) -> None:
    check_folder(folder, _HELP)
    if (folder / STROKES).is_file():
        if not (folder / SENTENCES).is_file():
            raise FileNotFoundError(f"{folder} has {STROKES} but no {SENTENCES} beside it")
        if split != "random":
            raise ValueError(
                f"{folder / STROKES} does not name the forms of its lines, so split={split!r} "
                'cannot be made of it: use split="random", or convert the official distribution'
            )
        return
    if not _find(folder):
        if holds_official_files(folder):
            raise ValueError(
                f"{folder} is the official distribution: convert it once with `ln-zoo data "
                f"iam_ondb {folder} DST` and give DST"
            )
        raise ValueError(
            f"{folder} has no IAM-OnDB: expected strokes_train and its three siblings (folders or "
            f".npz), or {STROKES} and {SENTENCES}; found {listing(folder)}"
        )


def _find(folder: Path) -> dict[str, Path]:
    """Paths of the sets in the compact form; a mapped folder has precedence over the ``.npz``."""
    names = {name: (f"strokes_{name}", f"strokes_{name}.npz") for name in LISTS.values()}
    hint = "run `ln-zoo data iam_ondb SRC DST` again, or complete the copy (folders or .npz)"
    return find_files(folder, names, hint)
