"""Where labelled images come from: IDX files, copies made by Hugging Face ``datasets``, the hub.

Every source becomes a ``datasets.DatasetDict`` with splits ``train`` and ``test`` and columns
``image`` and ``label``; `to_arrays` turns a split into NumPy arrays. ``datasets`` is imported where
it is used: it takes a second, which embedded datasets need not pay.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

SPLITS = ("train", "test")
UNSIGNED_BYTE = 8
"""The third byte of an IDX file: the code of its element type."""
GZIP = b"\x1f\x8b"
"""The first bytes of a gzipped file."""


class LocalImages:
    """A folder with a labelled image dataset in one of three forms.

    * The four IDX files, gzipped or not, named ``train-images-idx3-ubyte`` or
      ``train-images.idx3-ubyte``, likewise ``train-labels-idx1-ubyte`` and ``t10k-...``.
    * A ``DatasetDict`` written by ``save_to_disk``.
    * Parquet files whose names begin with ``train`` and ``test``, in the folder or in one
      subfolder, as on the hub.

    Args:
        root: the folder; looked through at once, read by `load`.

    Raises:
        FileNotFoundError: no such folder, or one of the files is missing.
        NotADirectoryError: not a folder.
        ValueError: the folder holds none of the three forms.
    """

    def __init__(self, root: Path) -> None:
        if not root.exists():
            raise FileNotFoundError(f"no folder {root}: give the folder of a local copy")
        if not root.is_dir():
            raise NotADirectoryError(f"{root} is a file: give the folder that holds the dataset")
        self.root = root
        self.idx = _find_idx(root)
        self.parquet = _find_parquet(root)
        self.arrow = (root / "dataset_dict.json").is_file()
        if not (self.idx or self.parquet or self.arrow):
            found = sorted(path.name for path in root.iterdir())
            raise ValueError(
                f"{root} is not a dataset: expected {_idx_names('train', 'images')[0]} and its "
                "three siblings (also .gz), a folder written by DatasetDict.save_to_disk, or "
                f"train*.parquet and test*.parquet; found {', '.join(found[:8]) or 'nothing'}"
            )

    def load(self) -> DatasetDict:
        """Reads the dataset.

        Raises:
            ValueError: a file is truncated, of another format, or does not match its labels.
        """
        from datasets import Dataset, DatasetDict, load_from_disk

        if self.idx:
            return DatasetDict({split: _idx_dataset(*paths) for split, paths in self.idx.items()})
        try:
            if self.parquet:
                return DatasetDict(
                    {
                        split: Dataset(pq.read_table(paths, partitioning=None))
                        for split, paths in self.parquet.items()
                    }
                )
            dataset = load_from_disk(str(self.root))
        except (OSError, ValueError, LookupError) as error:
            raise ValueError(
                f"{self.root} cannot be read: {error}. The copy may be incomplete: make it again"
            ) from error
        check_splits(dataset, str(self.root))
        return dataset


def load_from_hub(repo_id: str) -> DatasetDict:
    """Loads a dataset from the Hugging Face hub, or from its cache when there is no network.

    Raises:
        ConnectionError: the hub cannot be reached and the cache does not hold the dataset.
        FileNotFoundError: the hub has no such dataset.
        ValueError: it has no splits ``train`` and ``test``.
    """
    from datasets import load_dataset

    hint = "give a local copy by --data.root (root= in Python)"
    if shared := os.environ.get("LN_ZOO_DATA"):
        hint += f" or a folder of its name in LN_ZOO_DATA={shared}, which has none"
    try:
        dataset = load_dataset(repo_id)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"no dataset {repo_id!r} on the Hugging Face hub: check --data.repo_id, or {hint}"
        ) from error
    except ConnectionError as error:
        raise ConnectionError(
            f"dataset {repo_id!r} is not in the cache and the Hugging Face hub cannot be reached "
            f"({error}): {hint}, or go online once"
        ) from error
    check_splits(dataset, repo_id)
    return dataset


def check_splits(dataset: DatasetDict, where: str) -> None:
    """Checks that a dataset has the splits ``train`` and ``test``.

    Raises:
        ValueError: it has not.
    """
    missing = set(SPLITS) - set(dataset)
    if missing:
        raise ValueError(
            f"{where} has the splits {sorted(dataset)}, expected {' and '.join(SPLITS)}"
        )


def to_arrays(dataset: Dataset, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads the columns ``image`` and ``label`` of a split into memory; PNG is decoded here, once.

    Args:
        dataset: ``image`` is an ``Image`` (grey) or an ``Array2D`` of uint8.
        where: what error messages call the split.

    Returns:
        Images uint8 (N, H, W) and labels int64 (N,).

    Raises:
        ValueError: a column is missing, has another type or missing values, or there are no rows.
    """
    from datasets import Array2D, Image

    features = dataset.features
    missing = {"image", "label"} - set(features)
    if missing:
        raise ValueError(f"{where} has the columns {sorted(features)}, expected image and label")
    if not len(dataset):
        raise ValueError(f"{where} is empty")
    table = dataset.with_format("arrow")[:]
    for column in ("image", "label"):
        if table[column].null_count:
            raise ValueError(f"{where}: column {column!r} has missing values")
    if not pa.types.is_integer(table["label"].type):
        raise ValueError(f"{where}: labels of type {table['label'].type}, expected integers")
    feature = features["image"]
    if isinstance(feature, Image):
        images = _decode(dataset, where)
    elif isinstance(feature, Array2D) and feature.dtype == "uint8":
        # Two levels of lists around the pixels: no copy, where row by row would take seconds.
        pixels = table["image"].combine_chunks().storage.flatten().flatten().to_numpy()
        shape = (len(dataset), *feature.shape)
        if pixels.size != math.prod(shape):
            raise ValueError(f"{where}: {pixels.size} pixels do not make images {shape}")
        images = pixels.reshape(shape).copy()
    else:
        raise ValueError(f"{where}: images of type {feature}, expected Image or Array2D of uint8")
    return images, table["label"].to_numpy().astype(np.int64)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Reads an IDX file of unsigned bytes, gzipped or not, whatever its name says.

    The format: two zero bytes, the element type (8), the number of dimensions, each dimension as a
    big-endian 32-bit integer, then the values.

    Args:
        path: the file.
        dimensions: number of dimensions expected: 3 for images, 1 for labels.

    Raises:
        ValueError: the file is truncated, longer than its header says, or of another format.
    """
    content = path.read_bytes()
    try:
        if content.startswith(GZIP):
            content = gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}): copy it again") from error
    expected = bytes((0, 0, UNSIGNED_BYTE, dimensions))
    if content[:4] != expected:
        raise ValueError(
            f"{path} begins with {content[:4].hex(' ') or 'nothing'}, expected {expected.hex(' ')} "
            f"(IDX, unsigned bytes, {dimensions} dimensions): it is another file or damaged"
        )
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise ValueError(f"{path} is truncated within its header: copy it again")
    shape = tuple(int(n) for n in np.frombuffer(content[4:start], ">u4"))
    if 0 in shape:
        raise ValueError(f"{path} is empty: its header says {' x '.join(map(str, shape))}")
    given, wanted = len(content) - start, math.prod(shape)
    if given != wanted:
        raise ValueError(
            f"{path} holds {given:,} values, its header says {' x '.join(map(str, shape))} = "
            f"{wanted:,}: it is {'truncated' if given < wanted else 'damaged'}, copy it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _idx_names(split: str, kind: str) -> list[str]:
    """The names in circulation of one IDX file, ``.gz`` last."""
    prefix = {"train": "train", "test": "t10k"}[split]
    form = {"images": "idx3", "labels": "idx1"}[kind]
    plain = [f"{prefix}-{kind}{mark}{form}-ubyte" for mark in "-."]
    return plain + [f"{name}.gz" for name in plain]


def _find_idx(root: Path) -> dict[str, tuple[Path, Path]]:
    """The images and labels of both splits, or nothing if there is none of the four files."""
    kinds = ("images", "labels")
    found: dict[tuple[str, str], Path] = {}
    for split in SPLITS:
        for kind in kinds:
            existing = [root / n for n in _idx_names(split, kind) if (root / n).is_file()]
            if existing:
                found[split, kind] = existing[0]
    if not found:
        return {}
    missing = [
        _idx_names(split, kind)[0]
        for split in SPLITS
        for kind in kinds
        if (split, kind) not in found
    ]
    if missing:
        raise FileNotFoundError(
            f"{root} lacks {', '.join(missing)} (or .gz): put all four files there"
        )
    return {split: (found[split, "images"], found[split, "labels"]) for split in SPLITS}


def _find_parquet(root: Path) -> dict[str, list[Path]]:
    """The parquet files of both splits, or nothing if there are none."""
    folders = [root, *sorted(path for path in root.iterdir() if path.is_dir())]
    folders = [folder for folder in folders if any(folder.glob("*.parquet"))]
    if not folders:
        return {}
    if len(folders) > 1:
        raise ValueError(
            f"{root} has parquet files in {', '.join(map(str, folders))}: give the one to use"
        )
    files = {split: sorted(folders[0].glob(f"{split}*.parquet")) for split in SPLITS}
    for split, paths in files.items():
        if not paths:
            raise FileNotFoundError(f"{folders[0]} has no {split}*.parquet beside its other files")
    return files


def _idx_dataset(images_path: Path, labels_path: Path) -> Dataset:
    """One split of IDX files as a ``Dataset``."""
    from datasets import Array2D, ClassLabel, Dataset, Features

    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise ValueError(
            f"{images_path} has {len(images):,} images, {labels_path} {len(labels):,} labels: "
            "they belong to different datasets or one is damaged"
        )
    _, height, width = images.shape
    classes = int(labels.max(initial=0)) + 1
    features = Features(
        image=Array2D((height, width), "uint8"), label=ClassLabel(num_classes=classes)
    )
    # Dataset.from_dict would take three seconds for the training set; these arrays are views.
    schema = features.arrow_schema
    pixels = _lists(_lists(pa.array(images.reshape(-1)), width), height)
    image = pa.ExtensionArray.from_storage(schema.field("image").type, pixels)
    table = pa.table([image, pa.array(labels.astype(np.int64))], schema=schema)
    return Dataset(table)


def _lists(values: pa.Array, length: int) -> pa.ListArray:
    offsets = np.arange(0, len(values) + 1, length, dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, values)


def _decode(dataset: Dataset, where: str) -> np.ndarray:
    images = []
    for batch in dataset.select_columns("image").iter(batch_size=1000):
        for image in batch["image"]:
            if image.mode != "L":
                raise ValueError(f"{where}: an image of mode {image.mode}, expected grey (L)")
            images.append(np.asarray(image))
    if len({image.shape for image in images}) > 1:
        raise ValueError(f"{where}: images of different sizes")
    return np.stack(images)
