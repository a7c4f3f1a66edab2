"""Arrays in NumPy and MATLAB files, read with a bound and without pickles."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from ln_zoo.data.archives import damage_named, damaged, read_archive, read_file, read_rest
from ln_zoo.utils.files import open_regular

_MAX_BYTES = 4_000_000_000
#: Types of elements in MATLAB's MAT-file format, level 5, and of their values.
_MATRIX, _COMPRESSED = 14, 15
_VALUES = dict(zip((1, 2, 3, 4, 5, 6, 7, 9, 12, 13), "bBhHiIfdqQ", strict=True))
#: Numeric classes of a matrix, which may be stored in a smaller type.
_CLASSES = dict(enumerate("dfbBhHiIqQ", 6))
_COMPLEX = 0x800
_HDF5 = b"\x89HDF\r\n\x1a\n"


def map_array(path: Path) -> np.ndarray:
    """Map an ``.npy`` file into memory."""
    with damage_named(path):
        open_regular(path).close()
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy evaluates the header, which can fail in any way
        raise damaged(path, error) from error


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of an ``.npz`` file into memory."""
    arrays = {}
    for name, content in read_archive(path):
        where = f"{path}, {name}"
        file = io.BytesIO(read_rest(content, _MAX_BYTES, where))
        try:
            arrays[name.removesuffix(".npy")] = np.load(file, allow_pickle=False)
        except Exception as error:
            raise damaged(where, error) from error
    return arrays


def read_mat(path: Path, wanted: str) -> np.ndarray:
    """Read a real, dense matrix of a MATLAB file, version 5 to 7.

    It is the variable ``wanted`` or, without one of this name, the first. SciPy's ``loadmat``
    crashes on some damaged files.
    """
    content = read_file(path, _MAX_BYTES)
    if _HDF5 in (content[:8], content[512:520]):
        raise ValueError(f"{path} is of MATLAB 7.3: save it as version 7 (save -v7), or as .npy")
    try:
        chosen = None
        for name, array in _variables(content):
            if chosen is None or name == wanted.encode():
                chosen = array
            if name == wanted.encode():
                break
        if chosen is None:
            raise ValueError("it has no variable")
        return chosen()
    except Exception as error:  # of struct, zlib and NumPy
        raise damaged(path, error) from error


def _variables(content: bytes) -> Iterator[tuple[bytes, Callable[[], np.ndarray]]]:
    order = {b"IM": "<", b"MI": ">"}.get(content[126:128])
    if order is None:
        raise ValueError("it has no header of MATLAB 5 to 7")
    for kind, data in _elements(memoryview(content)[128:], order):
        if kind == _COMPRESSED:
            unpack = zlib.decompressobj()
            unpacked = unpack.decompress(data, _MAX_BYTES)
            if not unpack.eof:
                raise ValueError(f"a variable is truncated or longer than {_MAX_BYTES:,} bytes")
            kind, data = next(_elements(memoryview(unpacked), order))
        if kind != _MATRIX:
            raise ValueError(f"it has an element of type {kind}, not a variable")
        header = [part for _, part in islice(_elements(data, order), 3)]
        yield bytes(header[2]), partial(_matrix, data, order)


def _matrix(data: memoryview, order: str) -> np.ndarray:
    (_, flags), (_, shape), _, (kind, values) = islice(_elements(data, order), 4)
    (flag,) = np.frombuffer(flags[:4], f"{order}u4").tolist()
    stored, wanted = _VALUES.get(kind), _CLASSES.get(flag & 0xFF)
    if stored is None or wanted is None or flag & _COMPLEX:
        raise ValueError("the variable is not a real, dense matrix")
    array = np.frombuffer(values, f"{order}{stored}")
    return array.reshape(np.frombuffer(shape, f"{order}u4"), order="F").astype(wanted, copy=False)


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Iterate over types and contents; a content of up to four bytes is in the tag itself."""
    at = 0
    while at < len(data):
        kind, size = struct.unpack_from(f"{order}II", data, at)
        start = at + 8
        if kind >> 16:
            kind, size, start = kind & 0xFFFF, kind >> 16, at + 4
        end = start + size
        if end > len(data):
            raise ValueError("it ends within an element")
        yield kind, data[start:end]
        at = end if kind == _COMPRESSED else end + -(end - at) % 8
