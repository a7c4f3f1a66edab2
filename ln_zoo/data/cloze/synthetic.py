"""Synthetic cloze questions, which can always be answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ln_zoo.data.cloze.dataset import ClozeData
from ln_zoo.data.cloze.files import PLACEHOLDER, Question
from ln_zoo.utils.checks import check_at_least

_VERB_WORDS = "met called saw thanked paid hired warned praised followed helped sued beat"
_PLACE_WORDS = "london paris rome cairo lima oslo delhi tokyo boston berlin"
_MONTH_WORDS = "january march april june july august october december"
_VERBS, _PLACES, _MONTHS = (words.split() for words in (_VERB_WORDS, _PLACE_WORDS, _MONTH_WORDS))


class SyntheticClozeQA(ClozeData):
    """Passages of sentences such as ``@entity3 met @entity7 in rome last june .``

    For tests and first steps. The query is one of the sentences with one entity blanked. Its verb
    determines the answer: sentences of a passage have different verbs.

    Args:
        train_size: number of training questions; a smaller set is the start of a larger one.
        val_size: number of validation questions.
        test_size: number of test questions.
        passage_sentences: maximum sentences of a passage; the minimum is half of it.
        num_entities: entities E in total; a passage has at most half of them, at least 2.
        data_seed: seed of the passages.
    """

    name = "synthetic_cloze"

    def __init__(
        self,
        *,
        batch_size: int = 32,
        train_size: int = 2000,
        val_size: int = 200,
        test_size: int = 200,
        passage_sentences: int = 4,
        num_entities: int = 10,
        data_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, **options)
        check_at_least(1, train_size=train_size, val_size=val_size, test_size=test_size)
        check_at_least(0, data_seed=data_seed)
        check_at_least(4, num_entities=num_entities)
        if not 1 <= passage_sentences <= len(_VERBS):
            raise ValueError(
                f"passage_sentences must be from 1 to {len(_VERBS)}, got {passage_sentences!r}"
            )
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        self.passage_sentences = passage_sentences
        self.num_entities = num_entities
        self.data_seed = data_seed

    def read(self) -> Mapping[str, Iterable[Question]]:
        return {
            name: [self._question(name, number, i) for i in range(size)]
            for number, (name, size) in enumerate(self.sizes.items())
        }

    def _question(self, name: str, number: int, i: int) -> Question:
        rng = np.random.default_rng((self.data_seed, number, i))
        most = self.passage_sentences
        verbs = rng.permutation(_VERBS)[: rng.integers((most + 1) // 2, most + 1)]
        cast = rng.permutation(self.num_entities)[: max(2, self.num_entities // 2)]
        lines = [
            f"@entity{who} {verb} @entity{whom} in {rng.choice(_PLACES)} last {rng.choice(_MONTHS)}"
            for verb in verbs
            for who, whom in [rng.choice(cast, 2, replace=False)]
        ]
        asked = lines[rng.integers(len(lines))].split()
        blank = 2 * int(rng.integers(2))
        answer, asked[blank] = asked[blank], PLACEHOLDER
        passage = " . ".join(lines).split()
        return Question(f"{name}-{i:05}", [*passage, "."], [*asked, "."], answer)
