"""A text file with one sentence per line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ln_zoo.data import SentenceFile


def write(folder: Path, content: bytes) -> SentenceFile:
    path = folder / "sentences.txt"
    path.write_bytes(content)
    return SentenceFile(str(path), batch_size=2, eos=False)


def test_sentences_come_by_length(tmp_path: Path) -> None:
    data = write(tmp_path, "a b c\n d\n\u00e9t\u00e9 e\n".encode())
    data.setup("predict")
    assert data.sentences == ["a b c", "d", "\u00e9t\u00e9 e"]
    loader = data.predict_dataloader()
    assert list(loader) == [(["d", "\u00e9t\u00e9 e"], False), (["a b c"], False)]
    assert list(loader.sampler) == [1, 2, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: give a text file with one sentence per line"),
        (b"a\n\nb\n", "line 2 is empty: every line is a sentence"),
        (b"a\n\xff\n", "must be text in UTF-8, but byte 2 is not"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    data = write(tmp_path, content)
    with pytest.raises(ValueError, match=message) as caught:
        data.setup("predict")
    assert "sentences.txt" in str(caught.value)


def test_wrong_arguments() -> None:
    with pytest.raises(FileNotFoundError, match="no file nowhere"):
        SentenceFile("nowhere.txt")
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1"):
        SentenceFile(__file__, batch_size=0)
