"""Cloze questions: passages, queries and answers as word indices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.cloze.files import Question, is_entity
from ln_zoo.data.loading import BatchSet, DistributedBatches, rows, subset
from ln_zoo.data.ragged import Ragged, pad
from ln_zoo.utils.checks import check_at_least, check_choice, check_optional
from ln_zoo.utils.vocabulary import UNK, Vocabulary

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


def _entity_number(word: str) -> int:
    return int(word.removeprefix("@entity"))


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


# Data modules


class ClozeData(ZooDataModule, ABC):
    """Questions about passages with anonymised entities (Hermann et al. 2015).

    A batch is ``(ClozeInputs, answers)``: word indices, int64, and the word that answers each
    query. A subclass states its name and implements `read`. With ``sentences``, a passage may lack
    the answer; `metadata` has the share that keeps it. An entity outside the vocabulary is renamed
    to one that its question does not use, or becomes an unknown word.

    Args:
        sentences: keep this many sentences of each passage, with the most words in common with the
            query (`closest_sentences`); None: all.
        entities: renaming of entities in training: ``example``, a permutation for each question and
            epoch; ``batch``, for each batch; ``order``, by first occurrence (Chen et al. 2016),
            which is easier; ``file``, none.
        eval_entities: the same in evaluation, where permutations are fixed; default: ``order`` if
            ``entities`` is, else ``file``.
        vocabulary: the known words, or a file with one per line; default: the words of the training
            set, entities first.
        min_count: minimum count of a word in the training set; entities are always known.
        vocabulary_size: size of the vocabulary, including the two special tokens; None: no limit.
        max_entities: number of entities in the vocabulary; with fewer, each is seen more often.
            None: all of the training set.
    """

    batch_kind = "cloze questions"
    _sets: dict[str, ClozeQuestions]

    def __init__(
        self,
        batch_size: int,
        sentences: int | None = None,
        entities: Entities = "example",
        eval_entities: Entities | None = None,
        vocabulary: list[str] | str | None = None,
        min_count: int = 1,
        vocabulary_size: int | None = None,
        max_entities: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, **options)
        check_at_least(1, min_count=min_count)
        check_optional(1, sentences=sentences)
        check_optional(3, vocabulary_size=vocabulary_size)
        check_optional(2, max_entities=max_entities)
        check_choice("entities", entities, get_args(Entities))
        if eval_entities is None:
            eval_entities = "order" if entities == "order" else "file"
        # Renaming per batch would depend on the number of processes.
        check_choice("eval_entities", eval_entities, ("example", "order", "file"))
        self.sentences = sentences
        self.entities = entities
        self.eval_entities: Entities = eval_entities
        self.min_count = min_count
        self.vocabulary_size = vocabulary_size
        self.max_entities = max_entities
        self._vocabulary = None if vocabulary is None else Vocabulary.of(vocabulary)
        # Words in order of appearance, until they get the vocabulary's indices.
        self._words: dict[str, int] = {}
        self._raw: dict[str, ClozeQuestions] = {}

    @abstractmethod
    def read(self) -> Mapping[str, Iterable[Question]]:
        """The questions of the sets ``"train"``, ``"val"`` and ``"test"``, each read once."""

    @property
    def vocabulary(self) -> list[str] | None:
        """The known words in order of their indices; None if there is no text to count them."""
        return list(self._known())

    @property
    def metadata(self) -> dict[str, Any]:
        metadata = super().metadata
        metadata |= {f"{name}_size": len(questions) for name, questions in self._sets.items()}
        metadata["sentences"] = self.sentences
        if self._sets:
            metadata["answer_kept"] = self._answer_kept()
            metadata["vocabulary_size"] = self._known().size
            metadata["entities_known"] = len(self._entity_numbers())
        return metadata | {
            "entities": self.entities,
            "eval_entities": self.eval_entities,
            "min_count": self.min_count,
        }

    @property
    def preprocessing(self) -> dict[str, Any]:
        return {"sentences": self.sentences, "entities": self.eval_entities}

    def rule_errors(self, name: Literal["train", "val", "test"]) -> dict[str, float]:
        """Error rates of simple rules on a set, such as the most frequent entity."""
        is_one = np.zeros(self._known().size, bool)
        is_one[self._entity_numbers()] = True
        return rule_errors(self._set(name), is_one)

    def setup(self, stage: str | None = None) -> None:
        if self._sets:
            return
        raw = self._read()
        numbers = self._entity_numbers()
        if not len(numbers):
            raise ValueError(f"{self.name}: the vocabulary has no entity (@entity0, @entity1, ...)")
        self._sets = {name: self._numbered(questions) for name, questions in raw.items()}
        self._raw, self._words = {}, {}
        if self.sentences is not None:
            kept = ", ".join(f"{name} {part:.1%}" for name, part in self._answer_kept().items())
            rank_zero_info(
                f"{self.name}: the {self.sentences} sentences kept of each passage hold the answer "
                f"in {kept} of the questions"
            )

    def training_set(self) -> ClozeSet:
        return self._as_seen("train", self._set("train"), self.entities)

    def evaluation_set(self, name: str, examples: int | None = None) -> ClozeSet:
        """A set in its own order; names of entities do not depend on ``examples``."""
        return self._as_seen(name, subset(self._set(name), examples), self.eval_entities)

    def _answer_kept(self) -> dict[str, float]:
        return {name: float(part.with_answer().mean()) for name, part in self._sets.items()}

    def _as_seen(self, name: str, questions: ClozeQuestions, renaming: Entities) -> ClozeSet:
        stream = ("train", "val", "test").index(name)
        return ClozeSet(questions, self._entity_numbers(), renaming, self.seed, stream)

    def _read(self) -> dict[str, ClozeQuestions]:
        if not self._raw:
            self._raw = {
                name: ClozeQuestions.of(questions, self._words, self.sentences)
                for name, questions in self.read().items()
            }
        return self._raw

    def _known(self) -> Vocabulary:
        if self._vocabulary is None:
            train = self._read()["train"]
            counts = train.counts(len(self._words)).tolist()
            self._vocabulary = self._counted(Counter(dict(zip(self._words, counts, strict=True))))
        return self._vocabulary

    def _counted(self, counts: Counter[str]) -> Vocabulary:
        entities = sorted((word for word in counts if is_entity(word)), key=_entity_number)
        entities = [word for word in entities if counts.pop(word)][: self.max_entities]
        size = self.vocabulary_size
        if size is not None:
            size -= len(entities)
            if size < 3:
                raise ValueError(
                    f"{self.name}: vocabulary_size {self.vocabulary_size} leaves no room for a "
                    f"word beside {len(entities)} entities and two special tokens"
                )
        return Vocabulary([*entities, *Vocabulary.of_counts(counts, size, self.min_count)])

    def _entity_numbers(self) -> np.ndarray:
        words = sorted(filter(is_entity, self._known()), key=_entity_number)
        return np.array(self._known().numbers(words), np.int64)

    def _numbered(self, raw: ClozeQuestions) -> ClozeQuestions:
        number = np.array(self._known().numbers(self._words), np.int32)
        passages, queries = (
            Ragged(number[part.values], part.starts) for part in (raw.passages, raw.queries)
        )
        found = replace(raw, passages=passages, queries=queries, answers=number[raw.answers])
        unknown = np.array([is_entity(word) for word in self._words], bool) & (number == UNK)
        if unknown.any():
            self._rename_unknown(raw, found, unknown)
        return found

    def _rename_unknown(
        self, raw: ClozeQuestions, found: ClozeQuestions, unknown: np.ndarray
    ) -> None:
        entities = self._entity_numbers().tolist()
        for i in range(len(raw)):
            # The answer first: it needs a name.
            parts = (raw.answers[i : i + 1], raw.passages[i], raw.queries[i])
            strangers = dict.fromkeys(
                word for part in parts for word in part[unknown[part]].tolist()
            )
            if not strangers:
                continue
            places = (found.answers[i : i + 1], found.passages[i], found.queries[i])
            used = {number for place in places for number in place.tolist()}
            free = [entity for entity in entities if entity not in used]
            if not free and unknown[parts[0]].any():
                # Another entity becomes unknown.
                free = [next(n for place in places for n in place.tolist() if n in entities)]
                for place in places:
                    place[place == free[0]] = UNK
            # The choice of the name must not reveal the answer.
            free = np.random.default_rng((self.seed, i)).permutation(free).tolist()
            for word, name in zip(strangers, free, strict=False):
                for part, place in zip(parts, places, strict=True):
                    place[part == word] = name
