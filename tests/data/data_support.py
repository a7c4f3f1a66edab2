"""Data modules that are ready, their examples, and the files of formats."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

SETS = ("train", "val", "test")


def ready(data: Any) -> Any:
    """A data module that has read its data."""
    data.prepare_data()
    data.setup()
    return data


def in_order(data: Any, name: str) -> Any:
    """All examples of an evaluation set, in one batch; of images without labels the images."""
    examples = data.evaluation_set(name)
    batch = examples[torch.arange(len(examples))]
    return batch[0] if type(batch) is tuple and len(batch) == 1 else batch


def real_folder(data_root: Path, name: str) -> Path:
    """The folder of a real dataset; skips the test without it."""
    if not (folder := data_root / name).is_dir():
        pytest.skip(f"needs real data: there is no {folder}")
    return folder


def idx(values: np.ndarray) -> bytes:
    """An IDX file, as of MNIST."""
    header = bytes([0, 0, 8, values.ndim])
    return header + b"".join(n.to_bytes(4, "big") for n in values.shape) + values.tobytes()


def picture(pixels: np.ndarray, form: str = "PNG") -> bytes:
    """A picture file of grey levels (H, W) or of RGB (H, W, 3)."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def image_table(cells: Sequence[dict[str, Any] | None], form: str) -> bytes:
    """A table of images, as of ``datasets``, and labels 0 to 9; ``form``: arrow or parquet."""
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    labels = [i % 10 for i in range(len(cells))]
    table = pa.table({"image": pa.array(cells, kind), "label": labels})
    file = io.BytesIO()
    if form == "parquet":
        pq.write_table(table, file)
    else:
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, 7)  # rows of a batch
    return file.getvalue()
