"""NumPy files, read with a bound and without pickles."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from ln_zoo.data.archives import damage_named, read_archive, read_rest
from ln_zoo.utils.files import open_regular

_MAX_BYTES = 4_000_000_000


def map_array(path: Path) -> np.ndarray:
    """Map an ``.npy`` file into memory."""
    with damage_named(path):
        open_regular(path).close()
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy evaluates the header, which can fail in any way
        raise _damaged(path, error) from error


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of an ``.npz`` file into memory."""
    arrays = {}
    for name, content in read_archive(path):
        where = f"{path}, {name}"
        file = io.BytesIO(read_rest(content, _MAX_BYTES, where))
        try:
            arrays[name.removesuffix(".npy")] = np.load(file, allow_pickle=False)
        except Exception as error:
            raise _damaged(where, error) from error
    return arrays


def _damaged(where: str | Path, error: Exception) -> ValueError:
    return ValueError(f"{where} cannot be read ({error}): it is damaged or not an array")
