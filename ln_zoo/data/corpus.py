"""Books as sentences of numbered words: in memory, or mapped from files made once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from ln_zoo.data import treebank
from ln_zoo.data.cache import cache_folders
from ln_zoo.data.loading import check_at_least, check_choice
from ln_zoo.data.text_files import TextFile, read_texts

if TYPE_CHECKING:
    from datasets import Dataset

Lines = Literal["sentences", "paragraphs"]

_VERSION = 1
"""To be raised when the form of what is kept changes, or how text is divided."""
_FACTS, _WORDS, _NUMBERS = "corpus.json", "words.txt", "numbers"
_LONG = 60
"""Words of a line above which, on average, lines are hardly sentences."""


class Book(NamedTuple):
    """Consecutive sentences of a corpus: those from ``start``, before ``stop``."""

    name: str
    start: int
    stop: int


class Corpus:
    """N sentences of books, in order, each an array of numbers of words.

    Words are numbered by their count in the whole corpus, the most frequent 0, apart from any
    vocabulary: one chosen later is a table from these numbers to its own.

    Args:
        sources: where sentences lie: for each source the numbers of its words, int32 (M,), and for
            each of its n sentences where it starts, with the end of the last, (n + 1,).
        words: the W words.
        books: the books, one after the other.
        empty_lines: lines of the text that had nothing in them.
    """

    def __init__(
        self,
        sources: Sequence[tuple[np.ndarray, np.ndarray]],
        words: Sequence[str],
        books: Sequence[Book],
        empty_lines: int = 0,
    ) -> None:
        self._sources = list(sources)
        self.words = tuple(words)
        self.books = tuple(books)
        self.empty_lines = empty_lines
        sizes = [len(starts) - 1 for _, starts in self._sources]
        self._first = np.cumsum([0, *sizes])
        lengths = [np.diff(starts).astype(np.int32) for _, starts in self._sources]
        #: Words of each sentence, int32 (N,).
        self.lengths = np.concatenate(lengths) if lengths else np.zeros(0, np.int32)

    @classmethod
    def of(cls, books: Mapping[str, Sequence[Sequence[str]]]) -> Corpus:
        """A corpus in memory.

        Args:
            books: for each book its sentences, for each of these its words.

        Example:
            >>> corpus = Corpus.of({"a tale": [["it", "rained"], ["it", "stopped"]]})
            >>> corpus.words, corpus.numbers(1).tolist(), corpus.books
            (('it', 'rained', 'stopped'), [0, 2], (Book(name='a tale', start=0, stop=2),))
        """
        sentences = [list(sentence) for book in books.values() for sentence in book]
        words = _by_count(Counter(word for sentence in sentences for word in sentence))
        numbers = {word: number for number, word in enumerate(words)}
        values = np.array([numbers[word] for s in sentences for word in s], np.int32)
        starts = np.cumsum([0, *map(len, sentences)])
        ends = np.cumsum([0, *map(len, books.values())]).tolist()
        named = [Book(name, *ends[i : i + 2]) for i, name in enumerate(books)]
        return cls([(values, starts)], words, named)

    @classmethod
    def read(
        cls,
        texts: Sequence[TextFile],
        folder: Path,
        lines: Lines = "sentences",
        lowercase: bool = True,
        num_proc: int = 1,
    ) -> Corpus:
        """The corpus of texts, divided into words once and mapped into memory from then on.

        What is made of the texts is kept as a dataset of Hugging Face ``datasets``: in
        ``LN_ZOO_CACHE`` if that is set, else in a folder ``.cache`` beside them, or in
        ``~/.cache/ln_zoo`` where that folder is another user's or cannot be written. Its name is
        made of the names, sizes and times of the files and of how they are divided. It appears
        whole or not at all: processes may ask at the same time, one works and the others wait.

        Args:
            texts: the texts, of which each is a book.
            folder: of the texts, beside which the cache may lie.
            lines: what a line of the text is: a sentence whose words white space separates, or a
                paragraph, which `ln_zoo.data.treebank` divides.
            lowercase: turn capital letters into small ones.
            num_proc: processes that divide the text.

        Raises:
            OSError: a text cannot be read, or its cache can be written nowhere.
            ValueError: a text is not UTF-8 (with the byte) or damaged, or there is no sentence.
            ModuleNotFoundError: paragraphs without nltk.
        """
        check_choice("lines", lines, get_args(Lines))
        check_at_least(1, num_proc=num_proc)
        how: dict[str, Any] = {"version": _VERSION, "lines": lines, "lowercase": lowercase}
        if lines == "paragraphs":
            how["nltk"] = treebank.version()
        name = f"books-{_digest(texts, how)}"
        failed: OSError | None = None
        folders = list(cache_folders(folder))
        for kept in (parent / name for parent in folders):
            if (kept / _FACTS).is_file():
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
                if not (parent / name / _FACTS).is_file():
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
        from datasets import load_from_disk

        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        words = (folder / _WORDS).read_text(encoding="utf-8").split("\n")[:-1]
        column = load_from_disk(str(folder / _NUMBERS)).data.column("numbers")
        sources = [
            (chunk.values.to_numpy(zero_copy_only=True), chunk.offsets.to_numpy())
            for chunk in column.chunks
        ]
        books = [Book(*book) for book in facts["books"]]
        return cls(sources, words, books, facts["empty_lines"])

    def __len__(self) -> int:
        return len(self.lengths)

    def numbers(self, sentence: int) -> np.ndarray:
        """The numbers of a sentence's words, int32 (n,)."""
        source = int(np.searchsorted(self._first, sentence, side="right")) - 1
        values, starts = self._sources[source]
        row = sentence - self._first[source]
        return values[starts[row] : starts[row + 1]]

    def sentence(self, sentence: int) -> str:
        """The words of a sentence with blanks between."""
        return " ".join(self.words[number] for number in self.numbers(sentence))

    def in_sections(self, sentences: int) -> Corpus:
        """The same sentences in books of so many, where a text holds many books.

        The last section of a book holds what remains.

        Raises:
            ValueError: sections of fewer than three sentences, which make no triple.
        """
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
        """How often each word occurs in some of the books, int64 (W,)."""
        counts = np.zeros(len(self.words), np.int64)
        for book in books:
            for values in self._spans(book):
                found = np.bincount(values)
                counts[: len(found)] += found
        return counts

    def _spans(self, book: Book) -> Iterator[np.ndarray]:
        """The words of a book, as they lie in each source."""
        for (values, starts), first in zip(self._sources, self._first[:-1], strict=True):
            begin = max(book.start - first, 0)
            end = min(book.stop - first, len(starts) - 1)
            if begin < end:
                yield values[starts[begin] : starts[end]]


def _digest(texts: Sequence[TextFile], how: Mapping[str, Any]) -> str:
    """Of everything that the words depend on; of the texts, what their folders say."""
    states = {text.path: os.stat(text.path) for text in texts}
    files = [(path, state.st_size, state.st_mtime_ns) for path, state in states.items()]
    content = json.dumps([files, [*map(str, texts)], dict(how)])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _by_count(counts: Counter[str]) -> list[str]:
    return sorted(counts, key=lambda word: (-counts[word], word))


def _make(
    target: Path, texts: Sequence[TextFile], lines: Lines, lowercase: bool, num_proc: int
) -> None:
    """Divides texts into numbered words and writes them to a folder, which appears whole."""
    from datasets import Dataset, Features, Value
    from datasets import Sequence as Many
    from datasets.exceptions import DatasetGenerationError

    rank_zero_info(f"dividing {len(texts):,} texts into words, once: {target}")
    making = f".{target.name}-"
    for left in (target, *target.parent.glob(f"{making}*")):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=making) as work:
        try:
            text = Dataset.from_generator(
                _numbered_lines,
                Features(book=Value("int32"), text=Value("string")),
                cache_dir=work,
                gen_kwargs={"texts": tuple(texts)},
            )
        except DatasetGenerationError as error:
            raise error.__cause__ or error from None
        # A pool of one process would only cost its start.
        processes = min(num_proc, len(text)) if num_proc > 1 else None
        options: dict[str, Any] = {"batched": True, "num_proc": processes}
        divided = text.map(
            _divide,
            fn_kwargs={"lines": lines, "lowercase": lowercase},
            desc="dividing into words",
            **options,
        )
        rows = divided.with_format("arrow")
        counts: Counter[str] = Counter()
        sizes = np.zeros(len(texts), np.int64)
        for batch in rows.iter(batch_size=10_000):
            counts.update(" ".join(batch["text"].to_pylist()).split())
            found = np.bincount(batch["book"].to_numpy())
            sizes[: len(found)] += found
        if not counts:
            raise ValueError(
                f"{texts[0]}{f' and {len(texts) - 1:,} more' if texts[1:] else ''}: no sentence "
                "in it; expected text, one sentence or paragraph per line"
            )
        _hint(counts, len(rows), lines)
        words = _by_count(counts)
        numbered = divided.map(
            _number,
            fn_kwargs={"numbers": {word: number for number, word in enumerate(words)}},
            remove_columns=["book", "text"],
            features=Features(numbers=Many(Value("int32"))),
            new_fingerprint="numbers",  # that of the words would take long
            desc="numbering words",
            **options,
        )
        made = Path(work, "made")
        _write(made, numbered, words, texts, sizes, empty=_empty_lines(text))
        made.replace(target)


def _write(
    folder: Path,
    numbered: Dataset,
    words: Sequence[str],
    texts: Sequence[TextFile],
    sizes: np.ndarray,
    empty: int,
) -> None:
    numbered.save_to_disk(str(folder / _NUMBERS))
    (folder / _WORDS).write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    ends = np.cumsum([0, *sizes]).tolist()
    names = Counter(text.name for text in texts)
    books = [
        (text.name if names[text.name] == 1 else str(text), *ends[i : i + 2])
        for i, text in enumerate(texts)
    ]
    facts = {"books": books, "empty_lines": empty}
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _hint(counts: Counter[str], sentences: int, lines: Lines) -> None:
    mean = counts.total() / sentences
    if lines == "sentences" and mean > _LONG:
        rank_zero_warn(
            f"lines have {mean:.0f} words on average, many for a sentence: if they are "
            "paragraphs, --data.lines paragraphs (lines= in Python) divides them"
        )


def _empty_lines(text: Dataset) -> int:
    batches = text.with_format("arrow").iter(batch_size=10_000)
    return sum(not line.split() for batch in batches for line in batch["text"].to_pylist())


def _numbered_lines(texts: Sequence[TextFile]) -> Iterator[dict[str, Any]]:
    for book, text in read_texts(texts):
        yield {"book": book, "text": text}


def _divide(batch: Mapping[str, list], lines: Lines, lowercase: bool) -> dict[str, list]:
    """Sentences as their words with blanks between, without empty ones."""
    books, texts = [], []
    for book, line in zip(batch["book"], batch["text"], strict=True):
        if lines == "sentences":
            sentences = [line.split()]
        else:
            sentences = [*map(treebank.split_words, treebank.split_sentences(line))]
        for words in filter(None, sentences):
            text = " ".join(words)
            books.append(book)
            texts.append(text.lower() if lowercase else text)
    return {"book": books, "text": texts}


def _number(batch: Mapping[str, list], numbers: Mapping[str, int]) -> dict[str, list]:
    return {"numbers": [[numbers[word] for word in text.split()] for text in batch["text"]]}
