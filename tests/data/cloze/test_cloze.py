"""Cloze questions: sentences, names of entities, vocabulary, batches, the corpora."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_support import ready as read_in
from refusals import refuses
from torch import Tensor

from ln_zoo.data import ClozeQA, SyntheticClozeQA
from ln_zoo.data.cloze.batches import (
    ClozeBatch,
    ClozeBatches,
    ClozeQuestions,
    closest_sentences,
    rule_errors,
    sentences,
)
from ln_zoo.data.cloze.dataset import ClozeData
from ln_zoo.data.cloze.files import Question
from ln_zoo.utils.vocabulary import Vocabulary


class Texts(ClozeData):
    """Questions that are given, as three texts each: passage, query, answer."""

    name = "texts"

    def __init__(self, train: list[tuple[str, str, str]], *others: Any, **arguments: Any) -> None:
        few = {"batch_size": 2, "eval_batch_size": 2, "entities": "file"}
        super().__init__(**few | arguments)  # type: ignore[arg-type]
        self.texts = dict(zip(("train", "val", "test"), (train, *others), strict=False))

    def read(self) -> Mapping[str, Iterable[Question]]:
        return {
            name: [Question(str(i), p.split(), q.split(), a) for i, (p, q, a) in enumerate(texts)]
            for name, texts in self.texts.items()
        }


def ready(*texts: Any, **arguments: Any) -> Texts:
    return read_in(Texts(*texts, **arguments))


TRAIN = [
    ("@entity0 met @entity1 . @entity2 ran .", "@placeholder met @entity1", "@entity0"),
    ("@entity2 met @entity0 .", "@entity2 met @placeholder", "@entity0"),
    ("a @entity1 a @entity1 b", "@placeholder a", "@entity1"),
]


def words(data: ClozeData, batch: ClozeBatch) -> list[tuple[str, str, str]]:
    vocabulary = Vocabulary(data.vocabulary or [])
    inputs, answers = batch
    passages, queries = (
        [" ".join(vocabulary.words(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]
        for rows, lengths in (inputs[:2], inputs[2:])
    )
    return list(zip(passages, queries, vocabulary.words(answers.tolist()), strict=True))


def epoch(data: ClozeData, number: int = 0) -> list[ClozeBatch]:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(number)
    return list(loader)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a . b ! c ? d", ["a .", "b !", "c ?", "d"]),
        ('a . " b . c ! " d . e', ["a .", '" b . c ! " d .', "e"]),
        ('a . " b . c', ["a .", '" b .', "c"]),
        ("at 9 a.m . sharp . p.m . now", ["at 9 a.m . sharp .", "p.m . now"]),
        (". .", [".", "."]),
        ("", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert [" ".join(sentence) for sentence in sentences(text.split())] == expected


def test_sentences_with_most_words_of_the_query() -> None:
    text = "one two . three . two two two . @entity1 four two . five"
    passage, query = text.split(), ["two", "@entity1", "four", "?"]
    kept = {n: " ".join(closest_sentences(passage, query, n)) for n in range(1, 7)}
    assert kept[1] == "@entity1 four two ."
    # Of equally many the first; a word counts once; the order stays.
    assert kept[2] == "one two . @entity1 four two ."
    assert kept[3] == "one two . two two two . @entity1 four two ."
    assert kept[4] == "one two . three . two two two . @entity1 four two ."
    assert kept[5] == kept[6] == text


def test_the_answer_may_be_lost(caplog: pytest.LogCaptureFixture) -> None:
    kept = ready(TRAIN, TRAIN[:2], TRAIN[2:], sentences=1).metadata["answer_kept"]
    assert kept == {"train": 1.0, "val": 1.0, "test": 1.0}
    lost = [("@entity0 x . @entity1 y z .", "@placeholder y z", "@entity0"), TRAIN[1]]
    with caplog.at_level(logging.INFO):
        data = ready(TRAIN, lost, lost, sentences=1)
    assert data.metadata["answer_kept"] == {"train": 1.0, "val": 0.5, "test": 0.5}
    message = "texts: the 1 sentences kept of each passage hold the answer in train 100.0%, "
    assert message in caplog.text
    assert "val 50.0%" in caplog.text


def canonical(texts: tuple[str, str, str]) -> tuple[str, str, str]:
    """A question with entities named by first occurrence, whatever their names were."""
    names: dict[str, str] = {}

    def name(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"#{len(names)}")

    passage, query, answer = (re.sub(r"@entity\d+", name, text) for text in texts)
    return passage, query, answer


def synthetic(**arguments: Any) -> SyntheticClozeQA:
    sizes = {"batch_size": 4, "train_size": 30, "val_size": 9, "test_size": 5}
    return read_in(SyntheticClozeQA(**sizes | arguments))


@pytest.mark.parametrize("entities", ["example", "batch", "order"])
def test_renaming_is_the_same_in_passage_query_and_answer(entities: Any) -> None:
    plain, renamed = synthetic(entities="file"), synthetic(entities=entities)
    names = set()
    for before, after in zip(epoch(plain), epoch(renamed), strict=True):
        texts = words(renamed, after)
        assert list(map(canonical, words(plain, before))) == list(map(canonical, texts))
        assert all(answer in passage.split() for passage, _, answer in texts)
        names |= set(re.findall(r"@entity\d+", str(texts)))
    # All names are used, but where they are given in order: a passage has five entities at most.
    assert len(names) == (5 if entities == "order" else 10)


def by_question(
    data: ClozeData, batches: Iterable[ClozeBatch] | None = None
) -> dict[Any, tuple[str, str, str]]:
    """The texts of questions, by default those of the first epoch, with any entities."""
    texts = [text for batch in batches or epoch(data) for text in words(data, batch)]
    return {canonical(text): text for text in texts}


def test_names_depend_on_seed_epoch_and_question_only() -> None:
    """Not on the size of batches or the number of processes."""
    data = synthetic()
    first = by_question(data)
    assert by_question(synthetic()) == by_question(synthetic(batch_size=5)) == first
    for others in (by_question(data, epoch(data, 1)), by_question(synthetic(seed=1))):
        assert others.keys() == first.keys()
        assert sum(others[key] == first[key] for key in first) < 3
    examples = data.train_dataloader().dataset
    half = ClozeBatches(examples, 4, training=True, shuffle=True, seed=0, num_replicas=2, rank=1)
    assert by_question(data, [examples[index] for index in half]).items() <= first.items()


def test_one_permutation_for_each_batch() -> None:
    """The same passage twice gets the same names in one batch, and others in another."""
    data = ready([TRAIN[0]] * 4, entities="batch")
    one, two = (words(data, batch) for batch in epoch(data))
    assert one[0] == one[1]
    assert two[0] == two[1]
    data = ready([TRAIN[0]] * 40, entities="example")
    assert len({text for batch in epoch(data) for text in words(data, batch)}) == 6


@pytest.mark.parametrize("entities", ["example", "file", "order"])
def test_names_of_evaluation_are_fixed(entities: Any) -> None:
    data = synthetic(eval_entities=entities)
    every = by_question(data, data.val_dataloader())
    again = by_question(data, data.val_eval_dataloader(batch_size=2, examples=4))
    assert (len(every), len(again)) == (9, 4)
    assert again.items() <= every.items()
    plain = synthetic()
    as_read = by_question(plain, plain.val_dataloader())
    assert (every == as_read) == (entities == "file")
    assert synthetic(entities="order").eval_entities == "order"


def test_order_of_first_occurrence() -> None:
    texts = [("b @entity2 a @entity0", "@entity1 @placeholder", "@entity0")] * 2
    data = ready(texts, entities="order")
    (batch,) = epoch(data)
    assert words(data, batch)[0] == ("b @entity0 a @entity1", "@entity2 @placeholder", "@entity1")


def test_vocabulary_is_that_of_training_passages_and_queries() -> None:
    data = Texts(TRAIN, [("@entity0 other .", "@placeholder other", "@entity0")] * 9, TRAIN)
    texts = [text.split() for passage, query, _ in TRAIN for text in (passage, query)]
    others = [word for word in Vocabulary.count(texts) if not word.startswith("@entity")]
    assert data.vocabulary == ["@entity0", "@entity1", "@entity2", *others]
    once = {"ran", "b"}
    assert once <= set(data.vocabulary or [])
    twice = Texts(TRAIN, TRAIN, TRAIN, min_count=2).vocabulary
    assert set(data.vocabulary or []) - set(twice or []) == once
    # Entities come first, in order of their numbers, however seldom they are.
    many = [("@entity10 a", "@placeholder a", "@entity10"), *TRAIN]
    small = Texts(many, TRAIN, TRAIN, vocabulary_size=8, min_count=3).vocabulary or []
    assert small == ["@entity0", "@entity1", "@entity2", "@entity10", "a", "@placeholder"]
    # Words that are cut away do not count.
    assert "ran" not in (Texts(TRAIN, TRAIN, TRAIN, sentences=1).vocabulary or [])
    message = "vocabulary_size 5 leaves no room for a word beside 3 en"
    refuses(message, ready, TRAIN, TRAIN, TRAIN, vocabulary_size=5)


def test_a_given_vocabulary(tmp_path: Path) -> None:
    given = ["met", "@entity1", "@entity0", "@entity2", "@placeholder"]
    (tmp_path / "words.txt").write_text("\n".join(given))
    for vocabulary in (given, str(tmp_path / "words.txt")):
        data = ready(TRAIN, TRAIN, TRAIN, vocabulary=vocabulary)
        assert data.vocabulary == given
        (batch,) = data.val_dataloader().dataset[torch.tensor([1])][:1]
        assert batch.passage.tolist() == [[5, 2, 4, 1]]  # unknown: the full stop


def test_unknown_entities_take_names_that_are_free() -> None:
    given = ["met", "@entity0", "@entity1", "@placeholder", "."]
    val = [("@entity7 met @entity1 .", "@placeholder met @entity1", "@entity7"), TRAIN[1]]
    data = ready(TRAIN[2:], val, val, vocabulary=given)
    (batch, *_) = data.val_eval_dataloader(batch_size=2)
    found = words(data, batch)
    assert found[0] == ("@entity0 met @entity1 .", "@placeholder met @entity1", "@entity0")
    assert found[1] == ("@entity1 met @entity0 .", "@entity1 met @placeholder", "@entity0")
    # Where there are not enough names, the answer still has one, and others are unknown.
    many = ("@entity7 met @entity1 . @entity0 @entity8", "@placeholder met @entity1", "@entity8")
    data = ready(TRAIN, [many, TRAIN[0]], val, vocabulary=given)
    found = words(data, data.evaluation_set("val")[torch.tensor([0, 1])])
    assert found[0] == ("<unk> met <unk> . @entity0 @entity1", "@placeholder met <unk>", "@entity1")
    assert found[1][2] == "@entity0"
    data = ready(TRAIN, val, val, max_entities=2)
    assert [word for word in data.vocabulary or [] if "entity" in word] == ["@entity0", "@entity1"]
    for batch in (*epoch(data), *data.val_dataloader()):
        assert all(answer in passage.split() for passage, _, answer in words(data, batch))
    refuses("the vocabulary has no entity", Texts(TRAIN, val, val, vocabulary=["met"]).setup)


def test_names_of_unknown_entities_do_not_reveal_the_answer() -> None:
    """The answer is renamed first; if it took the first free name, that would tell."""
    entities = [f"@entity{i}" for i in range(6)]
    asked = ("@entity8 met @entity9 .", "@placeholder met @entity9", "@entity8")
    data = ready(TRAIN, [asked] * 12, TRAIN, vocabulary=["met", "@placeholder", ".", *entities])
    (batch,) = data.val_eval_dataloader(batch_size=12)
    assert len({answer for *_, answer in words(data, batch)}) > 2


def test_padding_and_lengths() -> None:
    data = ready(TRAIN, TRAIN, TRAIN)
    inputs, answers = data.evaluation_set("val")[torch.tensor([2, 0])]
    for rows, counts, expected in ((*inputs[:2], [5, 7]), (*inputs[2:], [2, 3])):
        assert (counts.tolist(), rows.shape) == (expected, (2, expected[1]))
        assert (rows[0, expected[0] :] == 0).all()
    assert {a.dtype for a in (*inputs, answers)} == {torch.int64}


def longer(size: int = 101, **arguments: Any) -> Texts:
    """Questions of different lengths, each known by its length."""
    counts = (np.random.default_rng(0).permutation(size) + 1).tolist()
    texts = [("@entity0 " + "a " * count, "@placeholder", "@entity0") for count in counts]
    return ready(texts, texts[:21], texts[:21], **arguments)


def lengths(batches: Iterable[ClozeBatch]) -> list[Tensor]:
    return [inputs.passage_lengths for inputs, _ in batches]


def test_batches_hold_passages_of_similar_length() -> None:
    data = longer(batch_size=4)
    first, second = lengths(epoch(data)), lengths(epoch(data, 1))
    assert len(first) == len(second) == 25  # a last one of a single question is left out
    assert not torch.cat(first).equal(torch.cat(second))
    for batches in (first, second):
        seen = torch.cat(batches)
        assert len(seen.unique()) == 100
        spread = torch.stack([batch.max() - batch.min() for batch in batches]).float()
        assert spread.mean() < 12  # of 100 lengths, 12 batches at a time; at random it is 60
    # Batches come in any order of length.
    assert (torch.stack([batch.max() for batch in first]).diff() > 0).sum() > 5


def test_rules() -> None:
    texts = [
        ("@entity1 @entity0 @entity0 @entity2", "@placeholder @entity0", "@entity1"),
        ("@entity1 @entity0", "@placeholder @entity0 @entity1", "@entity1"),
        ("@entity1 @entity0 @entity0", "@placeholder", "@entity2"),
    ]
    data = ready(texts)
    assert data.rule_errors("train") == pytest.approx(
        {"majority": 1 / 3 + 1 / 3, "exclusive": 1 / 3, "first": 1 / 3,
         "uniform": 1 - (1 / 3 + 1 / 2) / 3}
    )  # fmt: skip
    words: dict[str, int] = {}
    nobody = ClozeQuestions.of([Question("q", ["a"], ["@placeholder"], "@entity0")], words)
    rules = ("majority", "exclusive", "first", "uniform")
    assert rule_errors(nobody, np.zeros(3, bool)) == dict.fromkeys(rules, 1.0)


def test_folders_that_hold_no_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "something").touch()
    refuses(r"has no corpus 'bbc'.*found something", ClozeQA(root=str(tmp_path)).setup)
    nowhere = ClozeQA(root=str(tmp_path / "nowhere"))
    message = r"no folder or file .*nowhere: --data\.root"
    refuses(message, nowhere.prepare_data, error=FileNotFoundError)
    monkeypatch.delenv("LN_ZOO_DATA", raising=False)
    nothing = ClozeQA()
    assert nothing.vocabulary is None
    refuses(r"no cloze questions: --data\.root", nothing.prepare_data, error=FileNotFoundError)


def test_wrong_arguments() -> None:
    refuses(r"corpus .*'\.\./x'", ClozeQA, "../x")
    refuses("nowhere.txt", ClozeQA, vocabulary="nowhere.txt", error=OSError)


def test_made_up_questions_can_be_answered() -> None:
    """By the verb of the query, which one sentence has; counting entities does not help much."""
    data = synthetic(train_size=300, entities="file")
    for batch in epoch(data):
        for passage, query, answer in words(data, batch):
            pattern = re.escape(query).replace("@placeholder", r"(@entity\d+)")
            assert re.findall(pattern, passage) == [answer]
    assert data.rule_errors("train")["majority"] > 0.5
    fewer = synthetic(train_size=7, entities="file")
    assert fewer.metadata["train_size"] == 7
