"""Matrices in MATLAB files: as SciPy writes and reads them, and damaged ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from refusals import refuses
from scipy.io import loadmat, savemat

from ln_zoo.data.array_files import read_mat

OTHERS = {
    "text": "feats",
    "record": {"a": 1.0, "feats": [2, 3]},
    "cell": np.array([1, "a"], object),
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", ["f8", "f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_matrices_of_all_types(tmp_path: Path, dtype: str, compressed: bool) -> None:
    path = tmp_path / "x.mat"
    for shape in ((1, 1), (2, 3), (5, 1), (0, 3), (2, 3, 4)):
        matrix = (100 * np.random.default_rng(0).normal(size=shape)).astype(dtype)
        for name in ("a", "feats", "name_of_many_letters"):
            savemat(path, {name: matrix} | OTHERS, do_compression=compressed)
            found, expected = read_mat(path, "feats"), loadmat(path)[name]
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            np.testing.assert_array_equal(found, expected)
    savemat(path, {"first": matrix, "feats": matrix[0]}, do_compression=compressed)
    np.testing.assert_array_equal(read_mat(path, "feats"), matrix[0])


@pytest.mark.parametrize("array", [np.ones((2, 2)) * 1j, "text", {"a": 1}, OTHERS["cell"]])
def test_other_variables_are_refused(tmp_path: Path, array: object) -> None:
    savemat(tmp_path / "x.mat", {"feats": array})
    refuses(r"x\.mat.*real, dense", read_mat, tmp_path / "x.mat", "feats")


@pytest.mark.parametrize("compressed", [False, True])
def test_a_flipped_bit_is_an_error_or_harmless(tmp_path: Path, compressed: bool) -> None:
    """SciPy's reader crashes on some of these."""
    path = tmp_path / "x.mat"
    matrix = np.random.default_rng(0).normal(size=(3, 4))
    savemat(path, {"feats": matrix}, do_compression=compressed)
    whole, messages = path.read_bytes(), []
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            found = read_mat(path, "feats")
            same = found.shape == (3, 4) and (found == matrix).all()
            assert same or not compressed  # which has a checksum
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > 30
    assert all(str(path) in message and "\n" not in message for message in messages)
