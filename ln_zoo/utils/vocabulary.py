"""Vocabularies, and files of word vectors."""

from __future__ import annotations

import gzip
import os
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ln_zoo.utils.checks import check_at_least
from ln_zoo.utils.files import read_bounded

#: Index of the token that ends a sentence; also the padding.
EOS = 0
#: Index of unknown words.
UNK = 1

_NAMES = ("<eos>", "<unk>")
_MOST_BYTES = 100_000_000


class Vocabulary(Sequence[str]):
    """Words indexed from 2, after the end of a sentence (0) and the unknown word (1).

    As in the released skip-thoughts and order-embedding code (Kiros et al. 2015; Vendrov et al.
    2016), words are sorted by count. Ties are in alphabetical order.

    Args:
        words: the known words in order of their indices, without the two special tokens.

    Raises:
        TypeError: if ``words`` is a string or has other elements than strings.
        ValueError: if a word is empty, has white space, occurs twice or names a special token.

    Example:
        >>> words = Vocabulary.count([["a", "dog"], ["a", "cat"], ["dog"]], size=4)
        >>> list(words), words.numbers(["a", "black", "dog"]), words.size
        (['a', 'dog'], [2, 1, 3], 4)
    """

    def __init__(self, words: Iterable[str]) -> None:
        if isinstance(words, str):
            raise TypeError(f"words must be a sequence of strings, got the string {words!r}")
        self._words = tuple(words)
        for word in self._words:
            if not isinstance(word, str):
                raise TypeError(f"words must be strings, got {word!r}")
            if word.split() != [word]:
                raise ValueError(f"a word must be nonempty without white space, got {word!r}")
        self._numbers = {word: i for i, word in enumerate(self._words, len(_NAMES))}
        if len(self._numbers) < len(self._words):
            (word, count), *_ = Counter(self._words).most_common(1)
            raise ValueError(f"the word {word!r} occurs {count} times: give each word once")
        for name in _NAMES:
            if name in self._numbers:
                raise ValueError(f"{name!r} is the name of a special token and cannot be a word")

    @classmethod
    def count(  # type: ignore[override]  # Sequence.count counts a value
        cls, sentences: Iterable[Iterable[str]], size: int | None = None, min_count: int = 1
    ) -> Vocabulary:
        """Count the words of sentences, most frequent first.

        ``size`` includes the two special tokens; default: no limit. ValueError if it is below 3, or
        ``min_count`` below 1.
        """
        counts: Counter[str] = Counter()
        for sentence in sentences:
            counts.update(sentence)
        return cls.of_counts(counts, size, min_count)

    @classmethod
    def of_counts(
        cls, counts: Counter[str], size: int | None = None, min_count: int = 1
    ) -> Vocabulary:
        """As `count`, from counts of words."""
        if size is not None and size <= len(_NAMES):
            raise ValueError(
                f"size must be at least {len(_NAMES) + 1} ({', '.join(_NAMES)}, a word), got {size}"
            )
        check_at_least(1, min_count=min_count)
        kept = [(word, n) for word, n in counts.items() if n >= min_count and word not in _NAMES]
        kept.sort(key=lambda pair: (-pair[1], pair[0]))
        return cls(word for word, _ in kept[: None if size is None else size - len(_NAMES)])

    @classmethod
    def of(cls, given: Iterable[str] | str | os.PathLike[str]) -> Vocabulary:
        """Create a vocabulary from words, or from a file of `write`.

        OSError if the file cannot be read, ValueError if it is not UTF-8 or empty.
        """
        if not isinstance(given, str | os.PathLike):
            return cls(given)
        try:
            text = read_bounded(given, _MOST_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"the vocabulary {os.fspath(given)} must be text in UTF-8, but byte {error.start} "
                "is not"
            ) from None
        words = text.splitlines()
        if not words:
            raise ValueError(f"the vocabulary {os.fspath(given)} is empty: give one word per line")
        return cls(words)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write one word per line, in UTF-8, in order of their indices."""
        Path(path).write_text("".join(word + "\n" for word in self._words), encoding="utf-8")

    @property
    def size(self) -> int:
        return len(self._words) + len(_NAMES)

    def numbers(self, words: Iterable[str]) -> list[int]:
        """The index of each word; `UNK` for unknown words."""
        get = self._numbers.get
        return [get(word, UNK) for word in words]

    def words(self, numbers: Iterable[int]) -> list[str]:
        """The word of each index, ``"<eos>"`` and ``"<unk>"`` for special tokens; or IndexError."""
        names = (*_NAMES, *self._words)
        found = []
        for number in numbers:
            if not 0 <= number < len(names):
                raise IndexError(f"word indices must be from 0 to {len(names) - 1}, got {number}")
            found.append(names[number])
        return found

    def __contains__(self, word: object) -> bool:
        return word in self._numbers

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # as tuple's, overloaded
        return self._words[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._words)

    def __len__(self) -> int:
        return len(self._words)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and other._words == self._words

    def __hash__(self) -> int:
        return hash(self._words)

    def __repr__(self) -> str:
        return f"Vocabulary({self.size} numbers)"


def read_word_vectors(
    path: str | os.PathLike[str], known: Container[str] | None = None
) -> tuple[list[str], np.ndarray]:
    """Read word vectors in the text format of word2vec, GloVe and fastText, also gzipped.

    A line is a word and E numbers, separated by blanks. A first line of two integers (number of
    words and E) is skipped. The first vector of a repeated word is kept. From the second line on,
    words may contain blanks, as a few in GloVe do. Words outside ``known``, if given, are dropped.
    Returns W words, and their vectors, float32 (W, E).

    Raises:
        OSError: if the file cannot be read.
        ValueError: if a line is invalid (with its number), or no word is found.
    """
    where = os.fspath(path)
    vectors: dict[str, np.ndarray] = {}
    size = 0
    with gzip.open(path) if where.endswith(".gz") else open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            # Words may contain other blanks, such as U+00A0.
            word, *values = line.rstrip().split(b" ")
            if number == 1 and len(values) == 1 and word.isdigit() and values[0].isdigit():
                continue
            while size and len(values) > size and not _is_number(values[0]):
                word += b" " + values.pop(0)
            try:
                text = word.decode()
                if text in vectors or not (known is None or text in known):
                    continue
                vector = np.array(values, dtype=np.float32)
            except ValueError:  # which UnicodeDecodeError is
                vector = np.zeros(0, np.float32)
            size = size or len(vector)
            if not len(vector) == size > 1 or not np.isfinite(vector).all():
                raise ValueError(
                    f"{where}, line {number:,}: expected a word in UTF-8 and {size or 'its'} "
                    f"numbers with blanks between, got {line[:40]!r}"
                )
            vectors[text] = vector
    if not vectors:
        raise ValueError(f"{where} has no {'word' if known is None else 'known word'}")
    return list(vectors), np.stack(list(vectors.values()))


def _is_number(text: bytes) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
