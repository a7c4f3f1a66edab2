"""Sentence triples for skip-thought vectors: a sentence, the next and the previous one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.books.files import Book, Corpus
from ln_zoo.data.loading import BatchSet, DistributedBatches, rows, subset
from ln_zoo.data.ragged import pad
from ln_zoo.utils.checks import check_at_least, check_choice, check_optional
from ln_zoo.utils.vocabulary import UNK, Vocabulary

SamplerName = Literal["round_robin", "proportional"]

_NAMED = 5  # names in an error message


class Sentences(NamedTuple):
    """B sentences as word indices (B, T), ended and padded by `EOS`, with their lengths (B,)."""

    tokens: Tensor
    lengths: Tensor


class SentenceTriples(NamedTuple):
    """B sentences, each with its neighbours in the book."""

    source: Sentences
    next: Sentences
    previous: Sentences


class TripleSet(BatchSet):
    """Triples of some books, indexed by a tensor of indices; options as `BookData`."""

    def __init__(
        self,
        corpus: Corpus,
        books: Sequence[Book],
        vocabulary: Vocabulary,
        max_length: int = 30,
        across_books: bool = False,
        sampler: SamplerName = "round_robin",
    ) -> None:
        self.corpus = corpus
        self.max_length = max_length
        self.sampler = sampler
        self._tokens = np.array(vocabulary.numbers(corpus.words), np.int64)
        books = [book for book in books if book.start < book.stop]
        #: Neighbours in different books.
        self._next: dict[int, int] = {}
        self._previous: dict[int, int] = {}
        if across_books:
            self._next = {a.stop - 1: b.start for a, b in pairwise(books)}
            self._previous = {b: a for a, b in self._next.items()}
        short = corpus.lengths < max_length
        found = [np.zeros(0, np.int64)]
        for book in books:
            sources = np.arange(book.start, book.stop)
            kept = short[sources]
            kept[1:] &= short[sources[:-1]]
            kept[:-1] &= short[sources[1:]]
            # The first and last sentence may have a neighbour in another book.
            for end, others in ((0, self._previous), (-1, self._next)):
                other = others.get(int(sources[end]))
                kept[end] &= other is not None and short[other]
            found.append(sources[kept])
        #: Corpus index of the source of each triple, int64 (N,).
        self.sources = np.concatenate(found)

    @property
    def batches(self) -> type[DistributedBatches]:
        return TripleBatches

    @property
    def lengths(self) -> np.ndarray:
        return self.corpus.lengths[self.sources]

    def pick(self, indices: Sequence[int]) -> TripleSet:
        picked = copy(self)
        picked.sources = self.sources[list(indices)]
        return picked

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: Tensor) -> SentenceTriples:
        sources = self.sources[rows(index)].tolist()
        return SentenceTriples(
            self._sentences(sources),
            self._sentences([self._next.get(i, i + 1) for i in sources]),
            self._sentences([self._previous.get(i, i - 1) for i in sources]),
        )

    def _sentences(self, numbers: Sequence[int]) -> Sentences:
        return Sentences(*pad([self._tokens[self.corpus.numbers(i)] for i in numbers], ends=1))


class TripleBatches(DistributedBatches):
    """Batches of triples with sources of one length, distributed over W processes.

    *Training*: shuffled triples are divided into batches of one source length; a remainder of one
    triple is dropped. ``round_robin`` takes one batch of each length in turn, in a random order of
    lengths, as the released skip-thoughts code: rare lengths come early in an epoch.
    ``proportional`` takes batches in random order. *Evaluation*: longest sources first.
    """

    dataset: TripleSet

    def __init__(self, dataset: TripleSet, batch_size: int, **options: Any) -> None:
        super().__init__(dataset, batch_size, **options)
        self._lengths = torch.from_numpy(dataset.lengths)
        if not self.training:
            return
        batches = len(self._cut())
        self.total = batches - batches % self.num_replicas
        if not self.total:
            raise ValueError(
                f"{len(dataset)} triples make {batches} batches of {batch_size} with sources of "
                f"one length, too few for {self.num_replicas} process(es): lower the batch size or "
                "use fewer devices"
            )

    def __iter__(self) -> Iterator[Tensor]:
        order = self.permutation(len(self.dataset))
        longest_first = not self.training
        order = order[torch.argsort(self._lengths[order], stable=True, descending=longest_first)]
        batches = self._in_turn(self._cut()) if self.training else self._split()
        mine = batches[: self.total][self.rank :: self.num_replicas][self.first :]
        for start, stop in mine[:, :2].tolist():
            yield order[start:stop]

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"sampler": self.dataset.sampler}

    def _split(self) -> np.ndarray:
        """Start and stop of batches of mixed lengths, int64 (batches, 2)."""
        starts = np.arange(0, len(self.dataset), self.batch_size)
        return np.column_stack([starts, np.minimum(starts + self.batch_size, len(self.dataset))])

    def _cut(self) -> np.ndarray:
        """Start, stop, turn and length of batches of one length, int64 (K, 4)."""
        least = self.batch_size if self.drop_last else min(2, self.batch_size)
        found = [np.zeros((0, 4), np.int64)]
        stop = 0
        for length, count in enumerate(torch.bincount(self._lengths).tolist()):
            start, stop = stop, stop + count
            starts = np.arange(start, stop, self.batch_size)
            stops = np.minimum(starts + self.batch_size, stop)
            turns = np.arange(len(starts))
            batches = np.column_stack([starts, stops, turns, np.full_like(turns, length)])
            found.append(batches[stops - starts >= least])
        return np.concatenate(found)

    def _in_turn(self, batches: np.ndarray) -> np.ndarray:
        if not self.shuffle:
            return batches
        if self.dataset.sampler == "proportional":
            return batches[self.permutation(len(batches), 1).numpy()]
        turns, lengths = batches[:, 2], batches[:, 3]
        place = self.permutation(int(lengths.max()) + 1, 1).numpy()
        return batches[np.lexsort((place[lengths], turns))]


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
