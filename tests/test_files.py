"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from ln_zoo.files import atomic_write, atomic_write_text


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for text in ("é\n", "b\r\n"):
        atomic_write_text(path, text)
        assert path.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_the_old_file_is_untouched(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(TypeError, match="bytes-like"), atomic_write(path) as file:
        file.writelines([b"half of", "it"])  # type: ignore[list-item]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
