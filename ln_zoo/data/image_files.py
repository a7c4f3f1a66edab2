"""Labelled images from IDX files, Hugging Face ``datasets`` copies, or the hub.

``datasets`` is imported where it is used: importing it takes a second.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq

from ln_zoo.data.archives import read_file
from ln_zoo.data.folders import check_folder, find_files, listing

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

Arrays = tuple[np.ndarray, np.ndarray]

SPLITS = {"train": "train", "test": "t10k"}
"""Splits, and the prefixes of their IDX files."""
_UNSIGNED_BYTE = 8
_MAX_BYTES = 1_000_000_000


class LocalImages:
    """A folder with labelled images in one of three forms.

    * The four IDX files, gzipped or not; see `MNIST`.
    * A ``DatasetDict`` written by ``save_to_disk``.
    * Parquet files ``train*`` and ``test*``, in the folder or in one subfolder, as on the hub.
    """

    def __init__(self, root: Path) -> None:
        check_folder(root, "give the folder of a local copy")
        self.root = root
        self.idx = _find_idx(root)
        self.parquet = {} if self.idx else _find_parquet(root)
        if not (self.idx or self.parquet or (root / "dataset_dict.json").is_file()):
            raise ValueError(
                f"{root} is not a dataset: expected train-images-idx3-ubyte and its "
                "three siblings (also .gz), a folder written by DatasetDict.save_to_disk, or "
                f"train*.parquet and test*.parquet; found {listing(root)}"
            )

    def load(self) -> dict[str, Arrays]:
        """Images uint8 (N, H, W) and labels int64 (N,) of each split."""
        if self.idx:
            return {split: _read_idx_pair(*paths) for split, paths in self.idx.items()}
        from datasets import Dataset, DatasetDict, load_from_disk

        try:
            if self.parquet:
                tables = {k: pq.read_table(v, partitioning=None) for k, v in self.parquet.items()}
                dataset = DatasetDict({k: Dataset(table) for k, table in tables.items()})
            else:
                dataset = load_from_disk(str(self.root))
        except (OSError, ValueError, LookupError) as error:
            raise ValueError(
                f"{self.root} cannot be read: {error}. The copy may be incomplete: make it again"
            ) from error
        return to_arrays(dataset, str(self.root))


def load_from_hub(repo_id: str) -> DatasetDict:
    """Load a dataset from the Hugging Face hub, or from its cache if offline."""
    from datasets import load_dataset

    hint = "give a local copy by --data.root (root= in Python)"
    if shared := os.environ.get("LN_ZOO_DATA"):
        hint += f" or a folder of its name in LN_ZOO_DATA={shared}, which has none"
    try:
        return load_dataset(repo_id)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"no dataset {repo_id!r} on the Hugging Face hub: check --data.repo_id, or {hint}"
        ) from error
    except ConnectionError as error:
        raise ConnectionError(
            f"dataset {repo_id!r} is not in the cache and the Hugging Face hub cannot be reached "
            f"({error}): {hint}, or go online once"
        ) from error


def to_arrays(dataset: DatasetDict, where: str) -> dict[str, Arrays]:
    """Read the columns ``image`` (grey, to uint8 (N, H, W)) and ``label`` (to int64 (N,))."""
    missing = set(SPLITS) - set(dataset)
    if missing:
        raise ValueError(f"{where} has the splits {sorted(dataset)}, expected {[*SPLITS]}")
    return {split: _split_arrays(dataset[split], f"{split} set of {where}") for split in SPLITS}


def _split_arrays(split: Dataset, where: str) -> Arrays:
    missing = {"image", "label"} - set(split.features)
    if missing or not len(split):
        raise ValueError(
            f"{where} has {len(split)} rows of the columns {sorted(split.features)}, expected "
            "image and label"
        )
    if any(split.data.column(column).null_count for column in ("image", "label")):
        raise ValueError(f"{where}: image or label has missing values")
    # By default integers become int64.
    kept = {"dtype": np.uint8} if getattr(split.features["image"], "dtype", "") == "uint8" else {}
    images = split.select_columns("image").with_format("numpy", **kept)[:]["image"]
    labels = split.select_columns("label").with_format("numpy")[:]["label"]
    if images.dtype != np.uint8 or images.ndim != 3:
        raise ValueError(
            f"{where}: {split.features['image']} with values {images.dtype} {images.shape}, "
            "expected grey images of one size, uint8 (N, H, W)"
        )
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"{where}: labels of type {labels.dtype}, expected integers")
    return images, labels.astype(np.int64)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes, gzipped or not, with 3 dimensions (images) or 1 (labels).

    Format: two zero bytes, the element type (8), the number of dimensions, each dimension as a
    big-endian 32-bit integer, then the values.
    """
    content = read_file(path, _MAX_BYTES)
    expected = bytes((0, 0, _UNSIGNED_BYTE, dimensions))
    start = 4 + 4 * dimensions
    if content[:4] != expected or len(content) < start:
        raise ValueError(
            f"{path} begins with {content[:4].hex(' ') or 'nothing'}, expected {expected.hex(' ')} "
            f"(IDX, unsigned bytes, {dimensions} dimensions): it is another file or damaged"
        )
    shape = tuple(int(n) for n in np.frombuffer(content[4:start], ">u4"))
    given, wanted = len(content) - start, math.prod(shape)
    if given != wanted or not given:
        raise ValueError(
            f"{path} has {given:,} values, its header says {' x '.join(map(str, shape))} = "
            f"{wanted:,}: it is empty, truncated or damaged, copy it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _read_idx_pair(images_path: Path, labels_path: Path) -> Arrays:
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise ValueError(
            f"{images_path} has {len(images):,} images, {labels_path} {len(labels):,} labels: "
            "they belong to different datasets or one is damaged"
        )
    return images.copy(), labels.astype(np.int64)


def _find_idx(root: Path) -> dict[str, list[Path]]:
    names = {
        (split, kind): [f"{prefix}-{kind}{mark}{form}{end}" for mark in "-." for end in ("", ".gz")]
        for split, prefix in SPLITS.items()
        for kind, form in (("images", "idx3-ubyte"), ("labels", "idx1-ubyte"))
    }
    found = find_files(root, names, "put all four files there, gzipped or not")
    if not found:
        return {}
    return {split: [found[split, kind] for kind in ("images", "labels")] for split in SPLITS}


def _find_parquet(root: Path) -> dict[str, list[str]]:
    folders = [root, *sorted(path for path in root.iterdir() if path.is_dir())]
    folders = [folder for folder in folders if any(folder.glob("*.parquet"))]
    if not folders:
        return {}
    if len(folders) > 1:
        raise ValueError(
            f"{root} has parquet files in {', '.join(map(str, folders))}: give the one to use"
        )
    files = {split: sorted(map(str, folders[0].glob(f"{split}*.parquet"))) for split in SPLITS}
    for split, paths in files.items():
        if not paths:
            raise FileNotFoundError(f"{folders[0]} has no {split}*.parquet beside its other files")
    return files
