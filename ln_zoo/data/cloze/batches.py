"""Cloze questions as word indices: their sentences, entities and batches."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ln_zoo.data.cloze.files import Question
from ln_zoo.data.loading import BatchSet, DistributedBatches, rows
from ln_zoo.data.ragged import Ragged, pad

Entities = Literal["example", "batch", "file", "order"]

_POOL = 12  # training batches whose examples are sorted by length together
_SENTENCE_ENDS = frozenset(".!?")
_NO_ENDS = frozenset(("a.m", "p.m"))


class ClozeInputs(NamedTuple):
    """N passages (N, T) and queries (N, S) as word indices padded with `EOS`, and lengths (N,)."""

    passage: Tensor
    passage_lengths: Tensor
    query: Tensor
    query_lengths: Tensor


ClozeBatch = tuple[ClozeInputs, Tensor]


# Sentences


def sentences(tokens: Sequence[str]) -> list[list[str]]:
    """Split a passage into sentences.

    A sentence ends with ``.``, ``!`` or ``?``, but not within paired quotation marks or after
    "a.m." or "p.m.".
    """
    quotes = tokens.count('"') % 2 == 0
    found, start, inside = [], 0, False
    for i, token in enumerate(tokens):
        if token == '"':
            inside = quotes and not inside
        elif token in _SENTENCE_ENDS and not inside and (not i or tokens[i - 1] not in _NO_ENDS):
            found.append(list(tokens[start : i + 1]))
            start = i + 1
    if start < len(tokens):
        found.append(list(tokens[start:]))
    return found


def closest_sentences(passage: Sequence[str], query: Sequence[str], count: int) -> list[str]:
    """The sentences of a passage with the most words in common with the query, in order.

    After the four sentences of Cooijmans et al. (2017, section 5.4), whose choice is unpublished.
    Each word counts once, including entities; ties go to the first sentence. The answer is not
    used.
    """
    parts = sentences(passage)
    asked = set(query)
    overlap = [len(asked.intersection(part)) for part in parts]
    best = sorted(range(len(parts)), key=lambda i: (-overlap[i], i))[:count]
    return [token for i in sorted(best) for token in parts[i]]


# Examples as arrays


@dataclass(eq=False)
class ClozeQuestions:
    """N questions as word indices, with their names and their rows in the full set."""

    passages: Ragged
    queries: Ragged
    answers: np.ndarray
    names: Sequence[str]
    rows: np.ndarray

    @classmethod
    def of(
        cls, questions: Iterable[Question], words: dict[str, int], sentences: int | None = None
    ) -> ClozeQuestions:
        """Convert questions to indices of ``words``, to which new words are added.

        ``sentences`` keeps only the `closest_sentences` of each passage.
        """
        parts: tuple[list[array[int]], ...] = ([], [], [])
        names = []
        for question in questions:
            passage = question.passage
            if sentences is not None:
                passage = closest_sentences(passage, question.query, sentences)
            for part, tokens in zip(
                parts, (passage, question.query, [question.answer]), strict=True
            ):
                part.append(array("i", [words.setdefault(token, len(words)) for token in tokens]))
            names.append(question.name)
        passages, queries, answers = map(Ragged.of, parts)
        return cls(passages, queries, answers.values, names, np.arange(len(names)))

    def __len__(self) -> int:
        return len(self.names)

    def pick(self, indices: Sequence[int]) -> ClozeQuestions:
        kept = list(indices)
        return ClozeQuestions(
            self.passages.pick(kept),
            self.queries.pick(kept),
            self.answers[kept],
            [self.names[i] for i in kept],
            self.rows[kept],
        )

    def counts(self, size: int) -> np.ndarray:
        passages, queries = (
            np.bincount(part.values, minlength=size) for part in (self.passages, self.queries)
        )
        return passages + queries

    def with_answer(self) -> np.ndarray:
        return np.array([answer in self.passages[i] for i, answer in enumerate(self.answers)])


def rule_errors(questions: ClozeQuestions, entities: np.ndarray) -> dict[str, float]:
    """Error rates of simple rules; ``entities`` marks the entities among word indices, bool (V,).

    ``majority``: the most frequent entity of the passage; ``exclusive``: the most frequent that is
    not in the query; ``first``; ``uniform``: a random one. Ties go to the first entity.
    """
    right = dict.fromkeys(("majority", "exclusive", "first", "uniform"), 0.0)
    for i, answer in enumerate(questions.answers.tolist()):
        passage = questions.passages[i]
        counts = Counter(passage[entities[passage]].tolist())  # in order of first occurrence
        if not counts:
            continue
        asked = set(questions.queries[i].tolist())
        others = {entity: n for entity, n in counts.items() if entity not in asked} or counts
        right["majority"] += max(counts, key=counts.__getitem__) == answer
        right["exclusive"] += max(others, key=others.__getitem__) == answer
        right["first"] += next(iter(counts)) == answer
        right["uniform"] += (answer in counts) / len(counts)
    return {rule: 1 - n / max(1, len(questions)) for rule, n in right.items()}


# Batches


@dataclass(eq=False)
class ClozeSet(BatchSet):
    """Questions of one set, indexed by a tensor of indices.

    Entities, int64 (E,), are renamed consistently in passage, query and answer, so that a network
    cannot learn facts about a name. The permutation depends only on the seed, the set (``stream``),
    the epoch and the row of the question.
    """

    questions: ClozeQuestions
    entities: np.ndarray
    renaming: Entities
    seed: int
    stream: int

    def __post_init__(self) -> None:
        # The position of each word among the entities, or -1.
        self._place = np.full(int(self.entities.max(initial=0)) + 1, -1, np.int64)
        self._place[self.entities] = np.arange(len(self.entities))

    @property
    def batches(self) -> type[ClozeBatches]:
        return ClozeBatches

    @property
    def lengths(self) -> np.ndarray:
        return self.questions.passages.lengths

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: Tensor | tuple[Tensor, int]) -> ClozeBatch:
        """A batch with the names of draw n, from 1, or of evaluation."""
        indices, draw = index if isinstance(index, tuple) else (index, 0)
        places = rows(indices)
        numbers = self.questions.rows[places].tolist()
        passages, queries, answers = [], [], []
        for i, row in zip(places, numbers, strict=True):
            passage, query = self.questions.passages[i], self.questions.queries[i]
            names = self._names(
                numbers[0] if self.renaming == "batch" else row, draw, passage, query
            )
            passages.append(self._renamed(passage, names))
            queries.append(self._renamed(query, names))
            answers.append(self._renamed(self.questions.answers[i : i + 1], names))
        inputs = ClozeInputs(*pad(passages), *pad(queries))
        return inputs, torch.from_numpy(np.concatenate(answers))

    def _names(self, row: int, draw: int, passage: np.ndarray, query: np.ndarray) -> np.ndarray:
        if self.renaming == "file":
            return self.entities
        if self.renaming == "order":
            seen = self._places(np.concatenate([passage, query]))
            met = dict.fromkeys(seen[seen >= 0].tolist())
            rest = (place for place in range(len(self.entities)) if place not in met)
            order = np.fromiter((*met, *rest), np.int64, len(self.entities))
            names = np.empty_like(self.entities)
            names[order] = self.entities
            return names
        seed = np.random.SeedSequence((self.seed, self.stream, draw, row))
        return np.random.default_rng(seed).permutation(self.entities)

    def _renamed(self, numbers: np.ndarray, names: np.ndarray) -> np.ndarray:
        place = self._places(numbers)
        return np.where(place >= 0, names[place], numbers)

    def _places(self, numbers: np.ndarray) -> np.ndarray:
        last = len(self._place) - 1
        return np.where(numbers <= last, self._place[np.minimum(numbers, last)], -1)


class ClozeBatches(DistributedBatches):
    """Batches of questions with passages of similar length, distributed over W processes.

    Yields (B,) indices, in training (indices, number of the draw). *Training*: shuffled questions
    are sorted by length within pools of 12 batches; batches are shuffled. *Evaluation*: longest
    passages first.
    """

    dataset: ClozeSet

    def __iter__(self) -> Iterator[Any]:
        dealt = self._batches()[self.rank : self.total : self.num_replicas]
        for indices in dealt[self.first :]:
            yield (indices, self.epoch + 1) if self.training else indices

    def settings(self) -> dict[str, Any]:
        data = self.dataset
        return super().settings() | {"entities": data.renaming, "entity_seed": data.seed}

    def _batches(self) -> list[Tensor]:
        lengths = torch.from_numpy(self.dataset.lengths)
        order = self.permutation(len(lengths))[: self.whole * self.batch_size]
        size = _POOL * self.batch_size if self.shuffle else len(order)
        pools = order.split(size)
        longest_first = [
            pool[torch.argsort(lengths[pool], descending=True, stable=True)] for pool in pools
        ]
        batches = torch.cat(longest_first).split(self.batch_size)
        return [batches[i] for i in self.permutation(len(batches), 1)]
