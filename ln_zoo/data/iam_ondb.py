"""IAM-OnDB: handwritten English lines from a whiteboard (Liwicki and Bunke, ICDAR 2005)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import numpy as np

from ln_zoo.data.handwriting import HandwritingData, LengthMode, Scale
from ln_zoo.data.iam_ondb_files import LISTS, holds_official_files
from ln_zoo.data.loading import check_at_least, check_choice
from ln_zoo.data.mnist import local_folder
from ln_zoo.data.pen_lines import LongSteps, PenLines
from ln_zoo.data.stroke_arrays import SENTENCES, STROKES, read_pair

Split = Literal["graves", "official", "random"]

SETS = tuple(LISTS.values())
"""The sets of the official lists, in the order of the random split."""
_HELP = (
    "the database is given to registered researchers by its owners (fki.tic.heia-fr.ch); "
    "`ln-zoo data iam_ondb SRC DST` converts what they give, and --data.root DST (root= in "
    "Python) or a folder iam_ondb in $LN_ZOO_DATA names the result"
)


class IAMOnDB(HandwritingData):
    """The lines of IAM-OnDB in its compact form, or of a pair of NumPy and text file.

    The database has 12,179 lines of 221 writers in four official lists: ``trainset`` 5,364,
    ``testset_v`` 1,438, ``testset_t`` 1,518, ``testset_f`` 3,859. It may be used for research, not
    commercially, and not be passed on. ``root`` holds one of:

    * the compact form: for each list a folder ``strokes_train``, ``strokes_valid1``,
      ``strokes_valid2``, ``strokes_test`` of arrays that are mapped into memory, as
      ``ln-zoo data iam_ondb SRC DST`` makes it of the official distribution; or an ``.npz`` of
      the same name and arrays;
    * ``strokes.npy``, an array of L arrays (P, 3), and ``sentences.txt``, L lines of text. The
      column that ends strokes is found out. Its lines have no names, so only ``split="random"``
      fits. The file is a pickle; nothing in it is run.

    Without ``root`` the folder ``iam_ondb`` in the folder named by the environment variable
    ``LN_ZOO_DATA`` is taken.

    The splits:

    * ``graves`` (Graves 2013, section 4): training on ``trainset``, ``testset_t`` and
      ``testset_f``, 10,741 lines; validation on ``testset_v``. He reports the likelihood of that
      validation set, so tests score it too.
    * ``official``: training on ``trainset``, validation on ``testset_v``, test on ``testset_f``;
      ``testset_t``, the benchmark's second validation set, stays aside. No writer is in two sets.
    * ``random``: all lines, shuffled by ``split_seed``; the same writers are in every set.

    Nine lines of ``trainset`` (form a08-551z) have no transcription and are left out.

    Args:
        root: folder of the lines.
        split: ``graves``, ``official`` or ``random``, see above.
        batch_size: training lines per step of one process.
        length_mode: ``crop``, ``tbptt`` or ``full``, as `HandwritingData`.
        max_points: targets of a line, or of a part of it; of no use in ``full``.
        scale: ``std``, ``median`` or ``const``, as `HandwritingData`.
        max_step: longest step within a stroke, whiteboard units; ``None``: any. One in two
            thousand is longer than 127 units, a jump of the pen's sensor.
        long_steps: ``drop`` those that are longer, or ``clip`` them to ``max_step``.
        require_text: leave lines without transcription out.
        val_fraction: share of validation lines in the random split.
        test_fraction: share of test lines in the random split.
        split_seed: seed of the random split.
        y_axis: direction in which y grows in ``strokes.npy``: ``up`` in the copies in circulation.
        seed: seed of the order of training lines.
        eval_batch_size: lines per batch in evaluation; changes no result.
        num_workers: processes that fetch batches; 0 is fastest.
        pin_memory: page-locked batches, for faster copies to a GPU.
        drop_last: leave out a last training batch of fewer than ``batch_size`` lines.

    Raises:
        FileNotFoundError: no such folder, or one of its files is missing; without ``root`` and a
            folder in ``LN_ZOO_DATA`` when the lines are to be read.
        ValueError: the folder holds something else, or a value that is none of those above.
    """

    name = "iam_ondb"

    def __init__(
        self,
        root: str | None = None,
        split: Split = "graves",
        batch_size: int = 8,
        length_mode: LengthMode = "crop",
        max_points: int = 500,
        scale: Scale = "std",
        max_step: float | None = None,
        long_steps: LongSteps = "drop",
        require_text: bool = True,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        split_seed: int = 0,
        y_axis: Literal["up", "down"] = "up",
        seed: int = 0,
        eval_batch_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            batch_size,
            length_mode,
            max_points,
            scale,
            max_step,
            long_steps,
            require_text,
            seed,
            eval_batch_size,
            num_workers,
            pin_memory,
            drop_last,
        )
        check_choice("split", split, get_args(Split))
        check_choice("y_axis", y_axis, ("up", "down"))
        check_at_least(0, split_seed=split_seed)
        shares = (val_fraction, test_fraction)
        if not all(0 < share < 1 for share in shares) or sum(shares) >= 1:
            raise ValueError(
                "val_fraction and test_fraction must be shares of the lines that leave some for "
                f"training, got {val_fraction!r} and {test_fraction!r}"
            )
        self.split = split
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.split_seed = split_seed
        self.y_axis = y_axis
        folder = local_folder(root, self.name)
        if folder is not None:
            _check(folder, split)
        self._folder = folder
        # Of the split of Graves the validation set is what is reported.
        self.test_split = {"graves": "validation", "random": "random"}.get(split, "test")

    @property
    def root(self) -> Path:
        """The folder of the lines.

        Raises:
            FileNotFoundError: there is none.
        """
        if self._folder is None:
            raise FileNotFoundError(f"no IAM-OnDB: {_HELP}")
        return self._folder

    def prepare_data(self) -> None:
        _ = self.root  # it cannot be fetched

    @property
    def facts(self) -> dict[str, object]:
        """The dataset, its splits and its batches as plain data, for tables and model cards."""
        facts = super().facts | {"split": self.split}
        if self.split == "random":
            facts |= {
                "val_fraction": self.val_fraction,
                "test_fraction": self.test_fraction,
                "split_seed": self.split_seed,
            }
        return facts

    def read(self) -> dict[str, PenLines]:
        if self.split == "random":
            return self._random(self._all())
        sets = {name: PenLines.load(_compact(self.root, name)) for name in SETS}
        if self.split == "official":
            return {"train": sets["train"], "val": sets["valid1"], "test": sets["test"]}
        train = sets["train"] + sets["valid2"] + sets["test"]
        return {"train": train, "val": sets["valid1"], "test": sets["valid1"]}

    def _all(self) -> PenLines:
        if (self.root / STROKES).is_file():
            return read_pair(self.root, self.y_axis)
        first, *others = (PenLines.load(_compact(self.root, name)) for name in SETS)
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
        # In the order of the file: only who is in which set is a matter of chance.
        return {name: lines.pick(np.sort(part)) for name, part in parts.items()}


def _check(folder: Path, split: str) -> None:
    """Whether the folder has what the split needs."""
    if not folder.exists():
        raise FileNotFoundError(f"no folder {folder}: {_HELP}")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: give the folder that holds the lines")
    if (folder / STROKES).is_file():
        if not (folder / SENTENCES).is_file():
            raise FileNotFoundError(f"{folder} has {STROKES} but no {SENTENCES} beside it")
        if split != "random":
            raise ValueError(
                f"{folder / STROKES} does not say which form a line is from, so split={split!r} "
                'cannot be made of it: use split="random", or convert the official distribution'
            )
        return
    missing = [name for name in SETS if not _compact(folder, name).exists()]
    if len(missing) == len(SETS):
        if holds_official_files(folder):
            raise ValueError(
                f"{folder} is the official distribution: convert it once with `ln-zoo data "
                f"iam_ondb {folder} DST` and give DST"
            )
        found = sorted(path.name for path in folder.iterdir())
        raise ValueError(
            f"{folder} does not hold IAM-OnDB: expected strokes_train and its three siblings "
            f"(folders or .npz), or {STROKES} and {SENTENCES}; "
            f"found {', '.join(found[:8]) or 'nothing'}"
        )
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(f'strokes_{name}' for name in missing)} (or .npz): the "
            "conversion was interrupted or the copy is incomplete; `ln-zoo data iam_ondb SRC DST` "
            "goes on where it was"
        )


def _compact(folder: Path, name: str) -> Path:
    """Where the compact form of a set lies, mapped rather than compressed where both do."""
    mapped = folder / f"strokes_{name}"
    return mapped if mapped.is_dir() else mapped.with_suffix(".npz")
