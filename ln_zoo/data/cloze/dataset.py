"""Data modules of cloze questions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.cloze.batches import ClozeQuestions, ClozeSet, Entities, rule_errors
from ln_zoo.data.cloze.files import (
    Question,
    find_json_lines,
    find_question_folders,
    is_entity,
    read_json_lines,
    read_question_archive,
    read_question_folder,
)
from ln_zoo.data.folders import listing, local_folder
from ln_zoo.data.loading import subset
from ln_zoo.data.ragged import Ragged
from ln_zoo.utils.checks import check_at_least, check_choice, check_optional
from ln_zoo.utils.vocabulary import UNK, Vocabulary

_HELP = (
    "--data.root (root= in Python) names a folder of question files or of JSON lines or a tar "
    "archive; default: a folder cloze_qa in $LN_ZOO_DATA"
)


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


def _entity_number(word: str) -> int:
    return int(word.removeprefix("@entity"))


class ClozeQA(ClozeData):
    """A corpus of cloze questions, in one of three forms.

    * The CNN distribution: folders ``training``, ``validation`` and ``test`` of ``.question``
      files, in ``root``, or in ``questions`` or ``cnn/questions`` of it.
    * The same as an archive; ``root`` is the file.
    * JSON lines: ``{corpus}_train.jsonl``, ``{corpus}_valid.jsonl`` and ``{corpus}_test.jsonl``,
      each plain, ``.gz`` or ``.xz``, with the strings ``id``, ``passage``, ``query`` and
      ``answer``.

    Tables list the dataset under its corpus, with the number of sentences: ``cnn_top4``.

    Args:
        corpus: name of the corpus, and of its files of JSON lines.
        root: folder or archive; default: the folder ``cloze_qa`` in ``$LN_ZOO_DATA``.
    """

    def __init__(
        self,
        corpus: str = "bbc",
        root: str | None = None,
        batch_size: int = 64,
        sentences: int | None = 4,
        min_count: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, sentences, min_count=min_count, **options)
        if not corpus or set(corpus) & set("/\\"):
            raise ValueError(f"corpus must be a name such as 'bbc', got {corpus!r}")
        self.corpus = corpus
        self.name = corpus if sentences is None else f"{corpus}_top{sentences}"
        self._folder = local_folder(root, "cloze_qa")

    @property
    def root(self) -> Path:
        if self._folder is None or not self._folder.exists():
            what = f"no folder or file {self._folder}" if self._folder else "no cloze questions"
            raise FileNotFoundError(f"{what}: {_HELP}")
        return self._folder

    @property
    def vocabulary(self) -> list[str] | None:
        # `prepare_data` raises if there are no files.
        nothing = self._vocabulary is None and self._folder is None
        return None if nothing else super().vocabulary

    def prepare_data(self) -> None:
        _ = self.root  # there is no download

    def read(self) -> Mapping[str, Iterable[Question]]:
        root = self.root
        if root.is_file():
            return read_question_archive(root)
        if files := find_json_lines(root, self.corpus):
            return {name: read_json_lines(path) for name, path in files.items()}
        if folders := find_question_folders(root):
            return {name: read_question_folder(folder) for name, folder in folders.items()}
        raise ValueError(
            f"{root} has no corpus {self.corpus!r}: expected {self.corpus}_train.jsonl (.xz, .gz) "
            "and its siblings, or folders training, validation and test of .question files; found "
            f"{listing(root)}"
        )
