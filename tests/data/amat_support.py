"""Small files in the form of binarized MNIST, for tests of what reads them."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path

import numpy as np

ROWS = {"train": 30, "valid": 12, "test": 20}


def pixels(word: str, columns: int = 784) -> np.ndarray:
    """The images of a small file, uint8 (N, columns)."""
    rng = np.random.default_rng(ROWS[word])
    return rng.integers(0, 2, (ROWS[word], columns), dtype=np.uint8)


def text(matrix: np.ndarray, between: bytes = b" ", end: bytes = b"\n") -> bytes:
    """The matrix as text."""
    rows = ((row + ord("0")).astype(np.uint8).tobytes().decode() for row in matrix)
    return b"".join(between.decode().join(row).encode() + end for row in rows)


def write_files(
    folder: Path,
    matrices: Mapping[str, np.ndarray] | None = None,
    packed: bool = False,
    **options: bytes,
) -> Path:
    """Writes the three files, of small images unless others are given."""
    folder.mkdir(parents=True, exist_ok=True)
    for word in ROWS:
        content = text(pixels(word) if matrices is None else matrices[word], **options)
        name = f"binarized_mnist_{word}.amat{'.gz' if packed else ''}"
        (folder / name).write_bytes(gzip.compress(content) if packed else content)
    return folder
