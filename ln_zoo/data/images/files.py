"""Read images: IDX files, Arrow and Parquet tables, the Hugging Face hub, text matrices of bits.

Tables are read with pyarrow: ``datasets`` would follow the paths and URLs in them, and decode every
format that PIL knows.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ln_zoo.data.archives import damage_named, damaged, read_file
from ln_zoo.data.folders import check_folder, find_files, listing
from ln_zoo.utils.files import decode_picture, open_regular

if TYPE_CHECKING:
    from datasets import DatasetDict
import io
import warnings

Arrays = tuple[np.ndarray, np.ndarray]
SPLITS = {"train": "train", "test": "t10k"}
"""Splits, and the prefixes of their IDX files."""
_UNSIGNED_BYTE = 8
_MAX_BYTES = 1_000_000_000
_ROWS = 1000  # rows of a table in memory at a time
_SHOWN = 200  # characters of types and names in an error
_SHARDS = re.compile(r"-of-(\d{1,9})")


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
        self.tables = {} if self.idx else _find_tables(root)
        if not (self.idx or self.tables):
            raise ValueError(
                f"{root} is not a dataset: expected train-images-idx3-ubyte and its "
                "three siblings (also .gz), a folder written by DatasetDict.save_to_disk, or "
                f"train*.parquet and test*.parquet; found {listing(root)}"
            )

    def load(self) -> dict[str, Arrays]:
        """Images uint8 (N, H, W) and labels int64 (N,) of each split."""
        if self.idx:
            return {split: _read_idx_pair(*paths) for split, paths in self.idx.items()}
        return {
            split: _stack(
                (row for path in paths for row in _rows(_read_batches(path), str(path))),
                f"{split} set of {self.root}",
            )
            for split, paths in self.tables.items()
        }


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
    names = {split: f"{split} set of {where}" for split in SPLITS}
    return {
        split: _stack(_rows(dataset[split].data.to_batches(_ROWS), name), name)
        for split, name in names.items()
    }


def _stack(rows: Iterable[tuple[np.ndarray, int]], where: str) -> Arrays:
    images: list[np.ndarray] = []
    labels = []
    for image, label in rows:
        images.append(image)
        labels.append(label)
        if image.shape != images[0].shape or not image.size:
            raise ValueError(
                f"{where}: image {len(images) - 1} has {image.shape} pixels, the first "
                f"{images[0].shape}: expected images of one size"
            )
        if image.size * len(images) > _MAX_BYTES:
            raise ValueError(f"{where} has more than {_MAX_BYTES:,} pixels")
    if not images:
        raise ValueError(f"{where} has no images: copy it again")
    return np.stack(images), np.array(labels, np.int64)


def _read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with damage_named(path):
        open_regular(path).close()
    try:
        with pa.memory_map(str(path)) as file:
            if path.suffix == ".parquet":
                batches = pq.ParquetFile(file).iter_batches(_ROWS)
            else:
                batches = pa.ipc.open_stream(file)
            for batch in batches:
                batch.validate(full=True)  # damaged offsets would read other memory
                _ = batch.schema.names  # raises if they are not UTF-8
                yield batch
    except Exception as error:  # a damaged table can raise anything
        raise damaged(path, error) from error


def _rows(batches: Iterable[pa.RecordBatch], where: str) -> Iterator[tuple[np.ndarray, int]]:
    """Iterate over images, uint8 (H, W), and labels."""
    start = 0
    for batch in batches:
        names = batch.schema.names
        if names.count("image") != 1 or names.count("label") != 1:
            raise ValueError(
                f"{where} has the columns {str(names)[:_SHOWN]}, expected image and label"
            )
        labels = batch.column("label")
        if not pa.types.is_integer(labels.type) or labels.null_count:
            raise ValueError(
                f"{where}: labels of type {str(labels.type)[:_SHOWN]} with {labels.null_count} "
                "missing values, expected integers"
            )
        images = _images(batch.column("image"), where, start)
        yield from zip(images, labels.to_numpy().astype(np.int64), strict=True)
        start += len(batch)


def _images(column: pa.Array, where: str, start: int) -> Iterator[np.ndarray]:
    column = getattr(column, "storage", column)  # an extension type, such as Array2D
    if pa.types.is_struct(column.type) and (i := column.type.get_field_index("bytes")) >= 0:
        for row, content in enumerate(column.flatten()[i].to_pylist(), start):
            if not isinstance(content, bytes):
                raise ValueError(
                    f"{where}, row {row}: image has no bytes, and paths or URLs are not followed: "
                    "write the picture files into the table"
                )
            yield decode_picture(content, f"{where}, row {row}", "L")
        return
    if _is_list(column.type) and _is_list(column.type.value_type):
        lines = column.flatten()
        pixels = lines.flatten()
        sizes = [set(pc.list_value_length(a).to_pylist()) for a in (column, lines)]
        if pixels.type == pa.uint8() and not pixels.null_count and [*map(len, sizes)] == [1, 1]:
            (height,), (width,) = sizes
            yield from pixels.to_numpy().reshape(-1, height, width)
            return
    raise ValueError(
        f"{where}: images of type {str(column.type)[:_SHOWN]}, expected grey images of one size: "
        "PNG or JPEG files as bytes, or lists (H, W) of uint8"
    )


def _is_list(kind: pa.DataType) -> bool:
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(kind) for test in tests)


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


def _find_tables(root: Path) -> dict[str, list[Path]]:
    """Files of each split in order, or {}."""
    if (root / "dataset_dict.json").is_file():
        files = {split: sorted((root / split).glob("data*.arrow")) for split in SPLITS}
    else:
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
        counts = {int(shards[1]) for path in paths if (shards := _SHARDS.search(path.name))}
        if not paths or counts - {len(paths)}:
            wanted = " or ".join(map(str, sorted(counts))) or "at least 1"
            raise FileNotFoundError(
                f"{root} has {len(paths)} files of the {split} set, expected {wanted}: complete "
                "the copy"
            )
    return files


def read_bits(path: Path, columns: int) -> np.ndarray:
    """Read a text matrix of 0 and 1 with P columns, packed to uint8 (N, ceil(P / 8))."""
    text = read_file(path, _MAX_BYTES)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an empty file
            values = np.loadtxt(io.BytesIO(text), np.uint8, comments=None, ndmin=2)
    except ValueError as error:
        raise ValueError(
            f"{path} is not a text matrix of 0 and 1 ({error}): it is damaged or truncated, copy "
            "it again"
        ) from error
    if values.shape[1] != columns or values.max(initial=0) > 1:
        raise ValueError(
            f"{path} has {len(values):,} lines of {values.shape[1]:,} values up to "
            f"{values.max(initial=0)}, expected {columns:,} values of 0 or 1: "
            "it is truncated or another file"
        )
    return np.packbits(values, axis=1)
