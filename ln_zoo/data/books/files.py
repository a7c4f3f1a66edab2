"""Books as sentences of word indices, in memory or mapped from a cache."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from ln_zoo.data.array_files import map_array
from ln_zoo.data.books import english_tokens
from ln_zoo.data.folders import cache_folders
from ln_zoo.data.ragged import Ragged
from ln_zoo.data.text_files import TextFile, read_texts
from ln_zoo.utils.checks import check_at_least, check_choice

Lines = Literal["sentences", "paragraphs"]

_VERSION = 2  # version of the cache and of tokenisation
_METADATA, _WORDS, _VALUES, _STARTS = "corpus.json", "words.txt", "values.npy", "starts.npy"
_PARAGRAPH = 60  # mean words of a line that suggest paragraphs
_BATCH = 1000  # lines that a process tokenises at a time
_CHUNK = 10_000_000  # word indices in memory at a time


class Book(NamedTuple):
    """Sentences ``start`` to ``stop`` (exclusive) of a corpus."""

    name: str
    start: int
    stop: int


class Corpus:
    """N sentences of books, in order, as arrays of word indices, in memory or mapped from files.

    The W words are sorted by their count in the corpus; a vocabulary maps these indices to its own.
    """

    def __init__(
        self, sentences: Ragged, words: Sequence[str], books: Sequence[Book], empty_lines: int = 0
    ) -> None:
        self._sentences = sentences
        self.words = tuple(words)
        self.books = tuple(books)
        self.empty_lines = empty_lines

    @classmethod
    def of(cls, books: Mapping[str, Sequence[Sequence[str]]]) -> Corpus:
        """Create a corpus in memory from the words of each sentence of each book."""
        sentences = [list(sentence) for book in books.values() for sentence in book]
        words = _by_count(Counter(word for sentence in sentences for word in sentence))
        numbers = {word: number for number, word in enumerate(words)}
        ends = np.cumsum([0, *map(len, books.values())]).tolist()
        named = [Book(name, *ends[i : i + 2]) for i, name in enumerate(books)]
        return cls(Ragged.of([numbers[word] for word in s] for s in sentences), words, named)

    @classmethod
    def read(
        cls,
        texts: Sequence[TextFile],
        folder: Path,
        lines: Lines = "sentences",
        lowercase: bool = True,
        num_proc: int = 1,
    ) -> Corpus:
        """Tokenise texts once, and map the cached result into memory from then on.

        The cache is in one of `cache_folders`, named by a hash of the names, sizes and times of the
        files and of the options of `Books`. It is written atomically, by one process while others
        wait.
        """
        check_choice("lines", lines, get_args(Lines))
        check_at_least(1, num_proc=num_proc)
        how: dict[str, Any] = {"version": _VERSION, "lines": lines, "lowercase": lowercase}
        if lines == "paragraphs":
            how["nltk"] = english_tokens.version()
        name = f"books-{_digest(texts, how)}"
        failed: OSError | None = None
        folders = list(cache_folders(folder))
        for kept in (parent / name for parent in folders):
            if (kept / _METADATA).is_file():
                return cls._load(kept)
        for parent in folders:
            try:
                parent.mkdir(parents=True, exist_ok=True)
                lock = FileLock(parent / f"{name}.lock")
                lock.acquire()
            except OSError as error:
                failed = error
                continue
            try:
                if not (parent / name / _METADATA).is_file():
                    _make(parent / name, texts, lines, lowercase, num_proc)
            finally:
                lock.release()
            return cls._load(parent / name)
        raise OSError(
            f"the words of {folder} can be kept nowhere ({failed}): set LN_ZOO_CACHE to a folder "
            "that can be written"
        )

    @classmethod
    def _load(cls, folder: Path) -> Corpus:
        metadata = json.loads((folder / _METADATA).read_text(encoding="utf-8"))
        words = (folder / _WORDS).read_text(encoding="utf-8").split("\n")[:-1]
        sentences = Ragged(map_array(folder / _VALUES), map_array(folder / _STARTS))
        books = [Book(*book) for book in metadata["books"]]
        return cls(sentences, words, books, metadata["empty_lines"])

    @property
    def lengths(self) -> np.ndarray:
        return self._sentences.lengths

    def __len__(self) -> int:
        return len(self._sentences)

    def numbers(self, sentence: int) -> np.ndarray:
        return self._sentences[sentence]

    def sentence(self, sentence: int) -> str:
        return " ".join(self.words[number] for number in self.numbers(sentence))

    def in_sections(self, sentences: int) -> Corpus:
        """The same sentences in books of this many; the last section of a book is shorter."""
        check_at_least(3, section_sentences=sentences)
        books = [
            Book(f"{book.name}-{number}", start, min(start + sentences, book.stop))
            for book in self.books
            for number, start in enumerate(range(book.start, book.stop, sentences), 1)
        ]
        cut = copy(self)
        cut.books = tuple(books)
        return cut

    def counts(self, books: Sequence[Book]) -> np.ndarray:
        starts = self._sentences.starts
        spans = [self._sentences.values[starts[b.start] : starts[b.stop]] for b in books]
        return _count(spans, len(self.words))


def _count(spans: Iterable[np.ndarray], size: int) -> np.ndarray:
    counts = np.zeros(size, np.int64)
    for span in spans:
        for start in range(0, len(span), _CHUNK):
            counts += np.bincount(span[start : start + _CHUNK], minlength=size)
    return counts


def _digest(texts: Sequence[TextFile], how: Mapping[str, Any]) -> str:
    states = {text.path: os.stat(text.path) for text in texts}
    files = [(path, state.st_size, state.st_mtime_ns) for path, state in states.items()]
    content = json.dumps([files, [*map(str, texts)], dict(how)])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _by_count(counts: Counter[str]) -> list[str]:
    return sorted(counts, key=lambda word: (-counts[word], word))


def _make(
    target: Path, texts: Sequence[TextFile], lines: Lines, lowercase: bool, num_proc: int
) -> None:
    rank_zero_info(f"dividing {len(texts):,} texts into words, once: {target}")
    making = f".{target.name}-"
    for left in (target, *target.parent.glob(f"{making}*")):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=making) as work:
        made = Path(work, "made")
        made.mkdir()
        found: dict[str, int] = {}  # words in order of appearance
        lengths, books, empty_lines = array("i"), array("i"), 0
        with Path(work, "appearance").open("wb") as file:
            for book, sentences in _tokenise(texts, lines, lowercase, num_proc):
                empty_lines += not sentences
                for words in sentences:
                    file.write(array("i", [found.setdefault(w, len(found)) for w in words]))
                    lengths.append(len(words))
                    books.append(book)
        if not lengths:
            raise ValueError(
                f"{texts[0]}{f' and {len(texts) - 1:,} more' if texts[1:] else ''}: no sentence "
                "in it; expected text, one sentence or paragraph per line"
            )
        if lines == "sentences" and sum(lengths) > _PARAGRAPH * len(lengths):
            rank_zero_warn(
                f"lines have {sum(lengths) / len(lengths):.0f} words on average, many for a "
                "sentence: if they are paragraphs, use --data.lines paragraphs (lines= in Python)"
            )
        numbers = np.memmap(Path(work, "appearance"), np.int32, mode="r")
        counts = Counter(dict(zip(found, _count([numbers], len(found)).tolist(), strict=True)))
        ordered = _by_count(counts)
        table = np.empty(len(found), np.int32)
        table[[found[word] for word in ordered]] = np.arange(len(found), dtype=np.int32)
        values = np.lib.format.open_memmap(made / _VALUES, "w+", np.int32, numbers.shape)
        for start in range(0, len(numbers), _CHUNK):
            values[start : start + _CHUNK] = table[numbers[start : start + _CHUNK]]
        values.flush()
        np.save(made / _STARTS, np.cumsum([0, *lengths], dtype=np.int64))
        (made / _WORDS).write_text("".join(f"{word}\n" for word in ordered), encoding="utf-8")
        ends = np.cumsum([0, *np.bincount(books, minlength=len(texts))]).tolist()
        names = Counter(text.name for text in texts)
        named = [text.name if names[text.name] == 1 else str(text) for text in texts]
        metadata = {
            "books": [(name, *ends[i : i + 2]) for i, name in enumerate(named)],
            "empty_lines": empty_lines,
        }
        (made / _METADATA).write_text(json.dumps(metadata), encoding="utf-8")
        made.replace(target)


def _tokenise(
    texts: Sequence[TextFile], lines: Lines, lowercase: bool, num_proc: int
) -> Iterator[tuple[int, list[list[str]]]]:
    source = read_texts(texts)
    split = partial(_split, lines=lines, lowercase=lowercase)
    with multiprocessing.Pool(num_proc) if num_proc > 1 else nullcontext() as pool:
        while window := list(islice(source, _BATCH * num_proc)):
            if pool is None:
                results: Iterable[list[list[str]]] = map(split, [line for _, line in window])
            else:
                results = pool.map(split, [line for _, line in window], _BATCH)
            yield from zip((book for book, _ in window), results, strict=True)


def _split(line: str, lines: Lines, lowercase: bool) -> list[list[str]]:
    if lines == "sentences":
        sentences = [line.split()]
    else:
        sentences = [*map(english_tokens.split_words, english_tokens.split_sentences(line))]
    if lowercase:
        sentences = [[word.lower() for word in words] for words in sentences]
    return [words for words in sentences if words]
