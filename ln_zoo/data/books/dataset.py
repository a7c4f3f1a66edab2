"""Data modules of books as sentence triples (Kiros et al. 2015), and of lines to encode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.books.batches import SamplerName, TripleSet
from ln_zoo.data.books.files import Book, Corpus, Lines
from ln_zoo.data.folders import local_folder
from ln_zoo.data.loading import subset
from ln_zoo.data.text_files import TextFile, find_texts, read_texts
from ln_zoo.utils.checks import check_at_least, check_choice, check_optional
from ln_zoo.utils.vocabulary import UNK, Vocabulary

_NAMED = 5  # names in an error message


class BookData(ZooDataModule, ABC):
    """Books as `SentenceTriples`; a subclass states its name and implements `read`.

    Args:
        max_length: drop triples with a sentence of this many words or more.
        sampler: order of source lengths in training: ``round_robin``, one batch of each length in
            turn, or ``proportional`` to their frequency.
        across_books: make triples across the end of a book, as the released code does.
        val_books: validation books: their number, drawn by ``split_seed``, or their names (file
            names without suffixes).
        test_books: test books, likewise.
        val_triples: number of validation triples to score, evenly spaced; default: all.
        split_seed: seed of the choice of validation and test books.
        vocabulary: the known words, or a file with one per line; default: the most frequent words
            of the training books.
        vocabulary_size: size of the default vocabulary, including the end of a sentence and the
            unknown word.
        drop_last: drop training batches of fewer than ``batch_size`` triples, of which each source
            length has one. Batches of one triple are always dropped.
    """

    batch_kind = "sentence triples"

    def __init__(
        self,
        batch_size: int = 64,
        max_length: int = 30,
        sampler: SamplerName = "round_robin",
        across_books: bool = False,
        val_books: int | list[str] = 4,
        test_books: int | list[str] = 4,
        val_triples: int | None = None,
        split_seed: int = 0,
        vocabulary: list[str] | str | None = None,
        vocabulary_size: int = 20_000,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, **options)
        check_at_least(2, max_length=max_length)
        check_at_least(0, split_seed=split_seed)
        check_at_least(3, vocabulary_size=vocabulary_size)
        check_choice("sampler", sampler, get_args(SamplerName))
        check_optional(1, val_triples=val_triples)
        for name, books in (("val_books", val_books), ("test_books", test_books)):
            if isinstance(books, int):
                check_at_least(1, **{name: books})
            elif not books or len(set(books)) < len(books):
                raise ValueError(f"{name} must be a number or different names, got {books!r}")
        self.max_length = max_length
        self.sampler = sampler
        self.across_books = across_books
        self.val_books = val_books
        self.test_books = test_books
        self.val_triples = val_triples
        self.split_seed = split_seed
        self.vocabulary_size = vocabulary_size
        self._vocabulary = None if vocabulary is None else Vocabulary.of(vocabulary)

    @abstractmethod
    def read(self) -> Corpus:
        """Read the corpus."""

    @cached_property
    def corpus(self) -> Corpus:
        return self.read()

    @property
    def vocabulary(self) -> list[str]:
        """The known words in order of their indices."""
        return list(self._words)

    @property
    def preprocessing(self) -> dict[str, Any]:
        return {"vocabulary_size": self._words.size, "max_length": self.max_length}

    @property
    def metadata(self) -> dict[str, Any]:
        metadata = super().metadata | {"test_split": "test"}
        for name, books in self.books.items():
            sentences = sum(book.stop - book.start for book in books)
            metadata |= {f"{name}_books": len(books), f"{name}_sentences": sentences}
            metadata[f"{name}_size"] = len(self._set(name))
            metadata[f"{name}_unknown"] = round(self.unknown_share(name), 5)
        return metadata | {
            "vocabulary_size": self._words.size,
            "max_length": self.max_length,
            "sampler": self.sampler,
            "across_books": self.across_books,
            "split_seed": self.split_seed,
        }

    @cached_property
    def books(self) -> dict[str, list[Book]]:
        """The books of the sets ``"train"``, ``"val"`` and ``"test"``."""
        books = self.corpus.books
        names = [book.name for book in books]
        chosen: dict[str, list[str]] = {}
        counted: dict[str, int] = {}
        for name, wanted in (("test", self.test_books), ("val", self.val_books)):
            if isinstance(wanted, int):
                counted[name] = wanted
                continue
            if unknown := [title for title in wanted if title not in names]:
                raise ValueError(
                    f"{self.name}: {name}_books {', '.join(unknown)} are not among the "
                    f"{len(names):,} books, such as {', '.join(names[:_NAMED])}"
                )
            chosen[name] = wanted
        taken = Counter(title for titles in chosen.values() for title in titles)
        if twice := [title for title, times in taken.items() if times > 1]:
            raise ValueError(f"{self.name}: {', '.join(twice)} cannot be in two sets")
        free = [name for name in names if name not in taken]
        drawn = [free[i] for i in np.random.default_rng(self.split_seed).permutation(len(free))]
        for name, count in counted.items():
            chosen[name], drawn = drawn[:count], drawn[count:]
        if not drawn:
            raise ValueError(
                f"{self.name}: {len(names):,} books are too few to hold out {self.val_books} for "
                f"validation and {self.test_books} for the test: lower val_books and test_books, "
                "or cut files that hold many books (section_sentences)"
            )
        sets = {"train": set(drawn), "val": set(chosen["val"]), "test": set(chosen["test"])}
        return {name: [b for b in books if b.name in titles] for name, titles in sets.items()}

    def unknown_share(self, name: str) -> float:
        """Share of unknown words in a set's books."""
        counts = self.corpus.counts(self.books[name])
        numbers = np.array(self._words.numbers(self.corpus.words))
        return float(counts[numbers == UNK].sum() / counts.sum())

    def sentences(self, name: str) -> Iterator[str]:
        """The sentences of a set's books in order, words separated by blanks."""
        for book in self.books[name]:
            for sentence in range(book.start, book.stop):
                yield self.corpus.sentence(sentence)

    def prepare_data(self) -> None:
        _ = self.corpus

    def setup(self, stage: str | None = None) -> None:
        if self._sets:
            return
        sets = {
            name: TripleSet(
                self.corpus, books, self._words, self.max_length, self.across_books, self.sampler
            )
            for name, books in self.books.items()
        }
        for name, triples in sets.items():
            if not len(triples):
                raise ValueError(
                    f"{self.name}: no sentence of the {name} set and both its neighbours have "
                    f"fewer than {self.max_length} words each: raise max_length, or use more books"
                )
        unknown = self.unknown_share("train")
        if unknown == 1:
            raise ValueError(
                f"{self.name}: none of the words of the training books is in the vocabulary, "
                f"which begins with {', '.join(self._words[:_NAMED])}: it belongs to another text"
            )
        sizes = ", ".join(f"{name} {len(triples):,}" for name, triples in sets.items())
        rank_zero_info(
            f"{self.name}: {len(self.corpus.books):,} books, {len(self.corpus):,} sentences "
            f"(empty lines: {self.corpus.empty_lines:,}); triples: {sizes}; words not among the "
            f"{len(self._words):,} of the vocabulary: {unknown:.1%}"
        )
        self._sets = sets

    def training_set(self) -> TripleSet:
        return self._set("train")

    def evaluation_set(self, name: str, examples: int | None = None) -> TripleSet:
        if name == "val" and self.val_triples is not None:
            examples = min(self.val_triples, examples or self.val_triples)
        return subset(self._set(name), examples)

    @cached_property
    def _words(self) -> Vocabulary:
        if self._vocabulary is not None:
            return self._vocabulary
        corpus = self.corpus
        counts = corpus.counts(self.books["train"])
        found = {word: int(n) for word, n in zip(corpus.words, counts, strict=True) if n}
        return Vocabulary.of_counts(Counter(found), self.vocabulary_size)


class Books(BookData):
    """A folder of books as triples: a sentence, the next and the previous one.

    A book is a file or a member of an archive that ends in ``.txt`` or ``.txt.gz``, in ``root`` or
    its subfolders. By default a line is a sentence with words separated by white space, as in
    BookCorpus. With ``lines="paragraphs"`` nltk splits each line into sentences and words.

    The tokenised text is cached and mapped into memory, so the corpus may be larger than memory.
    The cache does not depend on the vocabulary, ``max_length`` or the held-out books.

    Args:
        root: folder of the books, or one text or archive; default: the folder ``books`` in
            ``$LN_ZOO_DATA``.
        lines: content of a line, ``sentences`` or ``paragraphs``.
        lowercase: convert to lower case, as in the sentence tasks of the paper. The released code
            keeps capital letters.
        section_sentences: split each text into books of this many sentences, for files of many
            books without marks, as BookCorpus. Default: a text is a book.
        leave_out: names of books to skip.
        num_proc: processes that tokenise the text.
    """

    name = "books"

    def __init__(
        self,
        root: str | None = None,
        lines: Lines = "sentences",
        lowercase: bool = True,
        section_sentences: int | None = None,
        leave_out: list[str] | None = None,
        num_proc: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_choice("lines", lines, get_args(Lines))
        check_at_least(1, num_proc=num_proc)
        check_optional(3, section_sentences=section_sentences)
        self.lines = lines
        self.lowercase = lowercase
        self.section_sentences = section_sentences
        self.leave_out = leave_out or []
        self.num_proc = num_proc
        self._folder = local_folder(root, self.name)
        if self._folder is not None and not self._folder.exists():
            raise FileNotFoundError(f"no folder or file {self._folder}: give that of the books")

    @property
    def root(self) -> Path:
        if self._folder is None:
            raise FileNotFoundError(
                "no books: give a folder of texts by --data.root (root= in Python), or a folder "
                "books in $LN_ZOO_DATA"
            )
        return self._folder

    @property
    def preprocessing(self) -> dict[str, Any]:
        words = "white space" if self.lines == "sentences" else "Penn Treebank (nltk)"
        return {"words": words, "lowercase": self.lowercase} | super().preprocessing

    @property
    def metadata(self) -> dict[str, Any]:
        metadata = super().metadata | {"lines": self.lines, "lowercase": self.lowercase}
        if self.section_sentences is not None:
            metadata["section_sentences"] = self.section_sentences
        if self.leave_out:
            metadata["left_out"] = self.leave_out
        return metadata

    def read(self) -> Corpus:
        texts = find_texts(self.root)
        if unknown := set(self.leave_out) - {text.name for text in texts}:
            raise ValueError(
                f"leave_out: no book {', '.join(sorted(unknown))} in {self.root}, which has "
                f"{', '.join(text.name for text in texts[:5])}, ..."
            )
        kept = [text for text in texts if text.name not in self.leave_out]
        folder = self.root if self.root.is_dir() else self.root.parent
        corpus = Corpus.read(kept, folder, self.lines, self.lowercase, self.num_proc)
        return corpus.in_sections(self.section_sentences) if self.section_sentences else corpus


class SentenceFile(LightningDataModule):
    """The lines of a text file, for `ln-zoo predict` with a sentence model.

    Each line is a sentence, tokenised as the model's training text. Batches, lists of sentences and
    ``eos``, have similar lengths; predictions are in the order of the lines.

    Args:
        path: text in UTF-8, also compressed (``.gz``).
        batch_size: sentences per batch; changes vectors by rounding only.
        eos: append the end of a sentence as in training; see `SkipThought.encode`.
    """

    #: The kind of batch, which models check.
    batch_kind: ClassVar[str] = "sentences"
    #: Predictions are rows of one array.
    prediction_format: ClassVar[str] = ".npy"

    def __init__(self, path: str, batch_size: int = 128, eos: bool = True) -> None:
        super().__init__()
        check_at_least(1, batch_size=batch_size)
        if not Path(path).is_file():
            raise FileNotFoundError(f"no file {path}: give a text file with one sentence per line")
        self.path = path
        self.batch_size = batch_size
        self.eos = eos
        #: The lines of the file, after `setup`.
        self.sentences: list[str] = []

    @property
    def metadata(self) -> dict[str, Any]:
        return {"dataset": Path(self.path).name, "eos": self.eos}

    def setup(self, stage: str | None = None) -> None:
        sentences = [line for _, line in read_texts([TextFile(self.path)])]
        if not sentences:
            raise ValueError(f"{self.path} is empty: give a text file with one sentence per line")
        if "" in sentences:
            raise ValueError(
                f"{self.path}, line {sentences.index('') + 1:,} is empty: every line is a "
                "sentence, so remove it"
            )
        self.sentences = sentences

    def predict_dataloader(self) -> DataLoader:
        order = sorted(range(len(self.sentences)), key=lambda i: len(self.sentences[i].split()))
        # A plain loader: Lightning passes its indices to prediction writers.
        return DataLoader(
            self.sentences,  # type: ignore[arg-type]
            batch_size=self.batch_size,
            sampler=order,
            collate_fn=self._batch,
        )

    def _batch(self, sentences: Sequence[str]) -> tuple[list[str], bool]:
        return list(sentences), self.eos
