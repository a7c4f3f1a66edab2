"""Data modules that are ready, and their examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
