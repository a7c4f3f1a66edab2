"""IAM-OnDB: handwritten English lines from a whiteboard (Liwicki and Bunke, ICDAR 2005)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ln_zoo.data.folders import check_folder, find_files, listing, local_folder
from ln_zoo.data.pen.conversion import LISTS, holds_official_files
from ln_zoo.data.pen.dataset import HandwritingData
from ln_zoo.data.pen.files import PenLines
from ln_zoo.data.pen.stroke_arrays import SENTENCES, STROKES, read_pair
from ln_zoo.utils.checks import check_at_least, check_choice

Split = Literal["graves", "official", "random"]

SETS = tuple(LISTS.values())
"""The sets of the official lists, in the order of the random split."""
_HELP = (
    "the database is given to registered researchers by its owners (fki.tic.heia-fr.ch); "
    "`ln-zoo data iam_ondb SRC DST` converts what they give, and --data.root DST (root= in "
    "Python) or a folder iam_ondb in $LN_ZOO_DATA names the result"
)


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
    names = {name: (f"strokes_{name}", f"strokes_{name}.npz") for name in SETS}
    hint = "run `ln-zoo data iam_ondb SRC DST` again, or complete the copy (folders or .npz)"
    return find_files(folder, names, hint)
