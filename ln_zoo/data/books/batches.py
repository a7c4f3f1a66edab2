"""Sentence triples for skip-thought vectors: a sentence, the next and the previous one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ln_zoo.data.books.files import Book, Corpus
from ln_zoo.data.loading import BatchSet, DistributedBatches, rows
from ln_zoo.data.ragged import pad
from ln_zoo.utils.vocabulary import Vocabulary

SamplerName = Literal["round_robin", "proportional"]


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
