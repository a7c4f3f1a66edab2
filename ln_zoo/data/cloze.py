"""What the data modules of cloze questions share: batches of passages, queries and answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import Dataset

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.cloze_files import Question, is_entity
from ln_zoo.data.loading import DistributedBatches, check_at_least, check_choice, evenly_spaced
from ln_zoo.vocabulary import EOS, UNK, Vocabulary

Entities = Literal["example", "batch", "file", "order"]

#: Training batches among whose examples those of similar length are put together.
_POOL = 12
_SENTENCE_ENDS = frozenset(".!?")
_NO_ENDS = frozenset(("a.m", "p.m"))


class ClozeInputs(NamedTuple):
    """N passages with a query each, as numbers of words.

    Attributes:
        passage: int64 (N, T), padded with `EOS`.
        passage_lengths: int64 (N,).
        query: int64 (N, S), padded with `EOS`.
        query_lengths: int64 (N,).
    """

    passage: Tensor
    passage_lengths: Tensor
    query: Tensor
    query_lengths: Tensor


ClozeBatch = tuple[ClozeInputs, Tensor]


# Sentences


def sentences(tokens: Sequence[str]) -> list[list[str]]:
    """The sentences of a passage.

    A sentence ends with ``.``, ``!`` or ``?``, but not within quotation marks, and not with the
    full stop of "a.m." or "p.m.". In a passage whose quotation marks do not pair up they are
    ignored.

    Example:
        >>> [" ".join(s) for s in sentences('he said " no . no " . at 9 a.m . sharp'.split())]
        ['he said " no . no " .', 'at 9 a.m . sharp']
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
    """The sentences of a passage that have the most words in common with the query, in order.

    Recurrent batch normalisation was tested on four such sentences (Cooijmans et al. 2017, section
    5.4); how they were chosen was never published. Here words count once each, entities among them,
    and of sentences with as many the first is taken. The answer plays no part in it.

    Args:
        passage: tokens.
        query: tokens.
        count: sentences to keep.

    Returns:
        Their tokens.

    Example:
        >>> closest_sentences("we sing . a cat sat . a dog".split(), "@placeholder cat".split(), 1)
        ['a', 'cat', 'sat', '.']
    """
    parts = sentences(passage)
    asked = set(query)
    overlap = [len(asked.intersection(part)) for part in parts]
    best = sorted(range(len(parts)), key=lambda i: (-overlap[i], i))[:count]
    return [token for i in sorted(best) for token in parts[i]]


# Examples as arrays


class _Rows:
    """Sequences of numbers of different lengths, in one array."""

    def __init__(self) -> None:
        self._numbers, self._ends = array("i"), array("q", [0])

    def append(self, numbers: Iterable[int]) -> None:
        self._numbers.extend(numbers)
        self._ends.append(len(self._numbers))

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """All numbers, int32, and where each row begins, with the end of the last, int64."""
        return np.array(self._numbers, np.int32), np.array(self._ends, np.int64)


class ClozeQuestions:
    """Questions as numbers of the words of a text, in arrays.

    Attributes:
        passages: words of all passages, one after the other, int32.
        passage_starts: where each begins, and the end of the last, int64 (N + 1,).
        queries: likewise.
        query_starts: int64 (N + 1,).
        answers: int32 (N,).
        names: of the questions.
        rows: the number of each question in its whole set, int64 (N,).
    """

    def __init__(
        self,
        passages: tuple[np.ndarray, np.ndarray],
        queries: tuple[np.ndarray, np.ndarray],
        answers: np.ndarray,
        names: Sequence[str],
        rows: np.ndarray | None = None,
    ) -> None:
        self.passages, self.passage_starts = passages
        self.queries, self.query_starts = queries
        self.answers = answers
        self.names = names
        self.rows = np.arange(len(names)) if rows is None else rows

    @classmethod
    def of(
        cls, questions: Iterable[Question], words: dict[str, int], sentences: int | None = None
    ) -> ClozeQuestions:
        """Questions by the numbers of their words.

        Args:
            questions: to be read once.
            words: the numbers so far; words that are not there get the next ones.
            sentences: how many of each passage to keep; see `closest_sentences`.
        """
        passages, queries, answers, names = _Rows(), _Rows(), array("i"), []
        for question in questions:
            passage = question.passage
            if sentences is not None:
                passage = closest_sentences(passage, question.query, sentences)
            for rows, tokens in ((passages, passage), (queries, question.query)):
                rows.append([words.setdefault(token, len(words)) for token in tokens])
            answers.append(words.setdefault(question.answer, len(words)))
            names.append(question.name)
        return cls(passages.arrays(), queries.arrays(), np.array(answers, np.int32), names)

    def __len__(self) -> int:
        return len(self.names)

    def passage(self, i: int) -> np.ndarray:
        return self.passages[self.passage_starts[i] : self.passage_starts[i + 1]]

    def query(self, i: int) -> np.ndarray:
        return self.queries[self.query_starts[i] : self.query_starts[i + 1]]

    def pick(self, rows: Sequence[int]) -> ClozeQuestions:
        """Some of the questions."""
        passages, queries = _Rows(), _Rows()
        for i in rows:
            passages.append(self.passage(i).tolist())
            queries.append(self.query(i).tolist())
        names, kept = [self.names[i] for i in rows], list(rows)
        return type(self)(
            passages.arrays(), queries.arrays(), self.answers[kept], names, self.rows[kept]
        )

    def counts(self, size: int) -> np.ndarray:
        """How often each word occurs in passages and queries, int64 (size,)."""
        both = (np.bincount(part, minlength=size) for part in (self.passages, self.queries))
        return sum(both, np.zeros(size, np.int64))

    def with_answer(self) -> np.ndarray:
        """Whether each answer is in its passage, as far as that was kept, bool (N,)."""
        lengths = np.diff(self.passage_starts)
        rows = np.repeat(np.arange(len(self)), lengths)
        hits = rows[self.passages == np.repeat(self.answers, lengths)]
        return np.isin(np.arange(len(self)), hits)


def rule_errors(questions: ClozeQuestions, entities: np.ndarray) -> dict[str, float]:
    """Share of questions that simple rules get wrong.

    Args:
        questions: the questions.
        entities: bool, whether each number is an entity's.

    Returns:
        By rule: ``majority``, the entity that occurs most often in the passage; ``exclusive``, that
        of those that are not in the query (where all are: of all); ``first``, the first one; and
        ``uniform``, one drawn at random. Of entities that occur equally often the first is taken. A
        passage without an entity counts as wrong.
    """
    right = dict.fromkeys(("majority", "exclusive", "first", "uniform"), 0.0)
    for i, answer in enumerate(questions.answers.tolist()):
        passage = questions.passage(i)
        counts = Counter(passage[entities[passage]].tolist())  # in order of first occurrence
        if not counts:
            continue
        asked = set(questions.query(i).tolist())
        others = {entity: n for entity, n in counts.items() if entity not in asked} or counts
        right["majority"] += max(counts, key=counts.__getitem__) == answer
        right["exclusive"] += max(others, key=others.__getitem__) == answer
        right["first"] += next(iter(counts)) == answer
        right["uniform"] += (answer in counts) / len(counts)
    return {rule: 1 - n / max(1, len(questions)) for rule, n in right.items()}


# Batches


class ClozeSet(Dataset[ClozeBatch]):
    """Questions as training or evaluation sees them, indexed by a tensor of indices.

    Entities are renamed in passage, query and answer alike, or a network could learn facts about
    a name. A renaming depends on the seed, the set, the epoch and the row of the question only: not
    on the batch, on the process that fetches it, or on the epochs before.

    Args:
        questions: as numbers of a vocabulary.
        entities: the numbers of its entities, int64 (E,).
        renaming: ``example``, a permutation of all entities for each question; ``batch``, one for
            each batch; ``order``, by first occurrence in passage and query; ``file``, none.
        seed: of the permutations.
        stream: number of the set, so that those of one seed differ in their permutations.

    Example:
        >>> words = {"@entity0": 0, "@entity1": 1, "@placeholder": 2, "sings": 3}
        >>> question = Question("a", ["@entity1", "sings"], ["@placeholder", "sings"], "@entity1")
        >>> data = ClozeSet(ClozeQuestions.of([question], words), np.array([0, 1]), "order", 0, 0)
        >>> inputs, answers = data[torch.tensor([0])]
        >>> inputs.passage, inputs.query, answers
        (tensor([[0, 3]]), tensor([[2, 3]]), tensor([0]))
    """

    def __init__(
        self,
        questions: ClozeQuestions,
        entities: np.ndarray,
        renaming: Entities,
        seed: int,
        stream: int,
    ) -> None:
        self.questions = questions
        self.entities = entities
        self.renaming = renaming
        self.seed = seed
        self.stream = stream
        # The place of each number among the entities; most have none.
        self._place = np.full(int(entities.max(initial=0)) + 1, -1, np.int64)
        self._place[entities] = np.arange(len(entities))

    @property
    def batches(self) -> type[ClozeBatches]:
        """How `BatchLoader` groups questions."""
        return ClozeBatches

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each passage, int64 (N,)."""
        return np.diff(self.questions.passage_starts)

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: Tensor | tuple[Tensor, int]) -> ClozeBatch:
        """A batch: with the names of evaluation, or of draw number n, from 1."""
        indices, draw = index if isinstance(index, tuple) else (index, 0)
        places = torch.as_tensor(indices).reshape(-1).tolist()
        rows = self.questions.rows[places].tolist()
        passages, queries, answers = [], [], []
        for i, row in zip(places, rows, strict=True):
            passage, query = self.questions.passage(i), self.questions.query(i)
            names = self._names(rows[0] if self.renaming == "batch" else row, draw, passage, query)
            passages.append(self._renamed(passage, names))
            queries.append(self._renamed(query, names))
            answers.append(self._renamed(self.questions.answers[i : i + 1], names))
        inputs = ClozeInputs(*_padded(passages), *_padded(queries))
        return inputs, torch.from_numpy(np.concatenate(answers))

    def __getitems__(self, indices: list[int]) -> ClozeBatch:
        """One batch for a list of indices: what a ``DataLoader`` with a batch size asks for."""
        return self[torch.tensor(indices)]

    def _names(self, row: int, draw: int, passage: np.ndarray, query: np.ndarray) -> np.ndarray:
        """The new number of each entity, by its place."""
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


def _padded(rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """(N, T) and (N,), int64."""
    lengths = torch.tensor([len(row) for row in rows])
    numbers = torch.full((len(rows), int(lengths.max())), EOS)
    for place, row in zip(numbers, rows, strict=True):
        place[: len(row)] = torch.from_numpy(row)
    return numbers, lengths


class ClozeBatches(DistributedBatches):
    """Batches of questions with passages of similar length, dealt out to W processes.

    Yields (B,) indices, in training (indices, number of the draw).

    *Training*: the questions of an epoch are permuted, those of 12 batches at a time sorted by
    length and cut into batches, and the batches permuted. *Evaluation*: batches from the longest
    passages to the shortest, none left out or repeated.
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
    """Questions about passages in which entities have numbers for names (Hermann et al. 2015).

    A batch is ``(ClozeInputs, answers)``: numbers of words, int64, and the word that answers each
    query. A dataset states its name and where its three sets come from (`read`).

    With ``sentences`` of a passage only those are kept that have the most words in common with the
    query (`closest_sentences`). They may lack the answer: how often they hold it is said when the
    data are read, and is in `facts`. No network that points into the passage can do better.

    An entity that the vocabulary lacks takes the name of one that its question does not have. If
    there is none left it becomes an unknown word, the answer last of all.

    Args:
        batch_size: training questions per step of one process.
        sentences: sentences of each passage that are kept; ``None``: all.
        entities: how entities are renamed in training: ``example``, by a permutation of all
            entities for each question, another in each epoch; ``batch``, likewise for each batch;
            ``order``, by first occurrence (Chen et al. 2016), which is easier; ``file``: not.
        eval_entities: the same in evaluation, where permutations are always the same ones; default:
            ``order`` where training has it, else ``file``.
        vocabulary: the known words, or a file with one a line; default: those of the training
            passages and queries, as ``min_count`` and ``vocabulary_size`` say, the entities among
            them first.
        min_count: how often a word must occur in them; entities are always known.
        vocabulary_size: numbers V in all, the two special tokens among them; ``None``: any.
        max_entities: how many entities the vocabulary has; the fewer there are, the more often a
            network sees each. ``None``: all of the training set.
        seed: seed of the order of training questions, and of the permutations of entities.
        eval_batch_size: questions per batch in evaluation; changes no result, but under batch
            statistics.
        num_workers: processes that fetch batches.
        pin_memory: page-locked batches, for faster copies to a GPU.
        drop_last: leave out a last training batch of fewer than ``batch_size`` questions. One of a
            single question is always left out.

    Raises:
        ValueError: a value that is none of those above; a vocabulary without an entity.
    """

    #: What a batch holds, for models that say what they take.
    gives: ClassVar[str] = "cloze questions"
    _sets: dict[str, ClozeQuestions]

    def __init__(
        self,
        batch_size: int,
        sentences: int | None,
        entities: Entities,
        eval_entities: Entities | None,
        vocabulary: list[str] | str | None,
        min_count: int,
        vocabulary_size: int | None,
        max_entities: int | None,
        seed: int,
        eval_batch_size: int,
        num_workers: int,
        pin_memory: bool,
        drop_last: bool,
    ) -> None:
        super().__init__(batch_size, seed, eval_batch_size, num_workers, pin_memory, drop_last)
        check_at_least(1, min_count=min_count)
        if sentences is not None:
            check_at_least(1, sentences=sentences)
        if vocabulary_size is not None:
            check_at_least(3, vocabulary_size=vocabulary_size)
        if max_entities is not None:
            check_at_least(2, max_entities=max_entities)
        check_choice("entities", entities, get_args(Entities))
        if eval_entities is None:
            eval_entities = "order" if entities == "order" else "file"
        # Names by the batch would depend on the number of processes.
        check_choice("eval_entities", eval_entities, ("example", "order", "file"))
        self.sentences = sentences
        self.entities = entities
        self.eval_entities: Entities = eval_entities
        self.min_count = min_count
        self.vocabulary_size = vocabulary_size
        self.max_entities = max_entities
        self._vocabulary = None if vocabulary is None else Vocabulary.of(vocabulary)
        # Words of the text by their order of appearance, until they get the vocabulary's numbers.
        self._words: dict[str, int] = {}
        self._raw: dict[str, ClozeQuestions] = {}

    @abstractmethod
    def read(self) -> Mapping[str, Iterable[Question]]:
        """The questions of the sets ``"train"``, ``"val"`` and ``"test"``, each to be read once."""

    @property
    def vocabulary(self) -> list[str] | None:
        """The known words, in order of their numbers; counted in the training text if none are
        given, for which the questions are read. ``None`` while there is no text to count them in.
        """
        return list(self._known())

    @property
    def facts(self) -> dict[str, Any]:
        """The dataset, its splits and its batches as plain data, for tables and model cards."""
        facts: dict[str, Any] = {"dataset": self.name}
        facts |= {f"{name}_size": len(questions) for name, questions in self._sets.items()}
        facts["sentences"] = self.sentences
        if self._sets:
            facts["answer_kept"] = {
                name: float(questions.with_answer().mean())
                for name, questions in self._sets.items()
            }
            facts["vocabulary_size"] = self._known().size
            facts["entities_known"] = len(self._entity_numbers())
        return facts | {
            "entities": self.entities,
            "eval_entities": self.eval_entities,
            "min_count": self.min_count,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "seed": self.seed,
        }

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What a question goes through before the model, as plain data."""
        return {"sentences": self.sentences, "entities": self.eval_entities}

    def rule_errors(self, name: Literal["train", "val", "test"]) -> dict[str, float]:
        """Share of a set's questions that simple rules get wrong; see `rule_errors`.

        Raises:
            RuntimeError: before `setup`.
        """
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
            kept = ", ".join(
                f"{name} {questions.with_answer().mean():.1%}"
                for name, questions in self._sets.items()
            )
            rank_zero_info(
                f"{self.name}: the {self.sentences} sentences kept of each passage hold the answer "
                f"in {kept} of the questions"
            )

    def training_set(self) -> ClozeSet:
        return self._as_seen("train", self._set("train"), self.entities)

    def evaluation_set(self, name: str, examples: int | None = None) -> ClozeSet:
        """A set in its own order, or evenly spaced questions of it, as neighbours share a passage.

        Its entities have the same names whether the whole set is taken or a part.
        """
        questions = self._set(name)
        if examples is not None and examples < len(questions):
            questions = questions.pick(evenly_spaced(len(questions), examples))
        return self._as_seen(name, questions, self.eval_entities)

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
        """All entities in order of their numbers, then the other words by count."""
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
        """The numbers of the vocabulary's entities, in order of their own."""
        words = sorted(filter(is_entity, self._known()), key=_entity_number)
        return np.array(self._known().numbers(words), np.int64)

    def _numbered(self, raw: ClozeQuestions) -> ClozeQuestions:
        """Questions by the numbers of the vocabulary."""
        number = np.array(self._known().numbers(self._words), np.int32)
        passages, queries, answers = (
            number[part] for part in (raw.passages, raw.queries, raw.answers)
        )
        found = ClozeQuestions(
            (passages, raw.passage_starts), (queries, raw.query_starts), answers, raw.names
        )
        unknown = np.array([is_entity(word) for word in self._words], bool) & (number == UNK)
        if unknown.any():
            self._rename_unknown(raw, found, unknown)
        return found

    def _rename_unknown(
        self, raw: ClozeQuestions, found: ClozeQuestions, unknown: np.ndarray
    ) -> None:
        """Gives entities that the vocabulary lacks names that their questions do not use."""
        entities = self._entity_numbers().tolist()
        for i in range(len(raw)):
            # The answer first: it has to have a name.
            parts = (raw.answers[i : i + 1], raw.passage(i), raw.query(i))
            strangers = dict.fromkeys(
                word for part in parts for word in part[unknown[part]].tolist()
            )
            if not strangers:
                continue
            places = (found.answers[i : i + 1], found.passage(i), found.query(i))
            used = {number for place in places for number in place.tolist()}
            free = [entity for entity in entities if entity not in used]
            if not free and unknown[parts[0]].any():
                # One of the others gives its name up and is unknown from then on.
                free = [next(n for place in places for n in place.tolist() if n in entities)]
                for place in places:
                    place[place == free[0]] = UNK
            # Which name it is must not tell the answer from others.
            free = np.random.default_rng((self.seed, i)).permutation(free).tolist()
            for word, name in zip(strangers, free, strict=False):
                for part, place in zip(parts, places, strict=True):
                    place[part == word] = name
