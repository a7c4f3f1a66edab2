"""Words and their numbers."""

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses

from ln_zoo.utils.vocabulary import EOS, UNK, Vocabulary, read_word_vectors


def test_the_most_frequent_come_first_and_equal_ones_by_alphabet():
    sentences = [["b", "b", "b", "c"], ["a", "c"], ["d", "a"]]
    assert list(Vocabulary.count(sentences)) == ["b", "a", "c", "d"]
    for options in ({"size": 5}, {"min_count": 2}):
        assert list(Vocabulary.count(sentences, **options)) == ["b", "a", "c"]
    # A special token in the text is no word.
    assert list(Vocabulary.of_counts(Counter({"<unk>": 9, "a": 1}))) == ["a"]


def test_numbers_and_written_words_are_read_back(tmp_path):
    words = Vocabulary(["cat", "dog"])
    assert (words.size, len(words)) == (4, 2)
    assert words.numbers(["dog", "cow", "cat"]) == [3, UNK, 2]
    assert words.words([EOS, UNK, 2, 3]) == ["<eos>", "<unk>", "cat", "dog"]
    assert "dog" in words
    assert "cow" not in words
    words = Vocabulary(["naïve", "don't", "@entity3"])
    words.write(tmp_path / "words.txt")
    assert Vocabulary.of(tmp_path / "words.txt") == words
    assert Vocabulary.of(list(words)) == words


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("cat", TypeError, "string 'cat'"),
        ([1], TypeError, "got 1"),
        (["a", "b", "a"], ValueError, "'a' occurs 2 times"),
        (["a b"], ValueError, "'a b'"),
        ([""], ValueError, "''"),
        (["<unk>"], ValueError, "special token"),
    ],
)
def test_words_that_cannot_be(words, error, message):
    refuses(message, Vocabulary, words, error=error)


def test_files_and_sizes_that_cannot_be(tmp_path):
    latin = tmp_path / "latin.txt"
    latin.write_bytes("caf\xe9\n".encode("latin-1"))
    refuses("byte 3", Vocabulary.of, latin)
    (tmp_path / "empty").touch()
    refuses("is empty", Vocabulary.of, tmp_path / "empty")
    refuses(r"size .*3.*got 2", Vocabulary.count, [["a"]], size=2)
    refuses(r"min_count .*got 0", Vocabulary.count, [["a"]], min_count=0)
    refuses("from 0 to 2, got 3", Vocabulary(["a"]).words, [3], error=IndexError)


@pytest.mark.parametrize("header", ["", "3 2\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_word_vectors_of_a_text_file(tmp_path: Path, header: str, packed: bool) -> None:
    text = header + "the 0.5 -1\ncaf\u00e9 1e-1 2 \n3 1 1\nthe 9 9\n"
    path = tmp_path / ("vectors.txt.gz" if packed else "vectors.txt")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    words, vectors = read_word_vectors(path)
    assert words == ["the", "caf\u00e9", "3"]
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, [[0.5, -1], [0.1, 2], [1, 1]], rtol=1e-6)
    words, vectors = read_word_vectors(path, {"3", "sun"})
    assert (words, vectors.tolist()) == (["3"], [[1, 1]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"the 1 2\nsun 1\n", r"line 2: expected a word in UTF-8 and 2 numbers .*got b'sun 1"),
        (b"the 1 x\n", "line 1: expected a word in UTF-8 and its numbers"),
        (b"the 1 2\n\xff 1 2\n", "line 2: expected a word in UTF-8"),
        (b"the 1 nan\n", "line 1: expected"),
        (b"a 1 2\nb 1 2 3\n", "line 2: expected a word"),
        (b"\n", "line 1: expected"),
        (b"", "no word"),
    ],
)
def test_damaged_word_vectors(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "v.txt").write_bytes(content)
    refuses(message, read_word_vectors, tmp_path / "v.txt")


def test_words_of_vectors_may_hold_blanks(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_text("a 1 2\n. . . 3 4\nat name@domain.com 5 6\n")
    words, vectors = read_word_vectors(path)
    assert words == ["a", ". . .", "at name@domain.com"]
    assert vectors.tolist() == [[1, 2], [3, 4], [5, 6]]
