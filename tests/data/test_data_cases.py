"""Every kind of dataset meets the contract of `DataCase`."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from ln_zoo.data import (
    BinarizedDigits,
    Digits,
    SyntheticBooks,
    SyntheticClozeQA,
    SyntheticHandwriting,
    SyntheticScenes,
)
from ln_zoo.testing import DataCase

COUNTS = {"train_size": 31, "val_size": 11, "test_size": 13}
NO_COUNT = (0, -1, 2.5)


class TestDigits(DataCase):
    invalid: ClassVar[dict[str, Any]] = {
        "train_size": (0, 1490),
        "val_size": (0, 4, 1490),
        "image_size": (7, 8.5),
    }
    data = staticmethod(partial(Digits, train_size=31, val_size=11))


class TestBinarizedDigits(DataCase):
    invalid: ClassVar[dict[str, Any]] = {
        "image_size": (7, 8.5),
        "binarization": ("other",),
        "binarization_seed": (-1,),
        "train_size": (0, 1490),
        "val_size": (0, 1490),
    }
    data = staticmethod(partial(BinarizedDigits, image_size=8, train_size=31, val_size=11))


class TestDynamicDigits(TestBinarizedDigits):
    data = staticmethod(partial(TestBinarizedDigits.data, binarization="dynamic"))


class TestScenes(DataCase):
    invalid: ClassVar[dict[str, Any]] = {
        **dict.fromkeys((*COUNTS, "image_features", "min_count"), NO_COUNT),
        "noise": (-1.0, float("nan")),
        "data_seed": (-1,),
        "caption_sampling": ("two",),
        "vocabulary_from": ("test",),
    }
    data = staticmethod(partial(SyntheticScenes, **COUNTS, image_features=20))


class TestAllCaptions(TestScenes):
    data = staticmethod(partial(TestScenes.data, caption_sampling="all"))


class TestBooks(DataCase):
    invalid: ClassVar[dict[str, Any]] = {
        "books": (2,),
        "paragraphs": NO_COUNT,
        "max_length": (1, 2.5),
        "sampler": ("other",),
        "val_books": (0, [], ["a", "a"]),
        "test_books": (0, []),
        "val_triples": (0,),
        "split_seed": (-1,),
        "vocabulary_size": (2,),
        "data_seed": (-1,),
    }
    data = staticmethod(partial(SyntheticBooks, books=6, paragraphs=3, val_books=1))


class TestProportionalBooks(TestBooks):
    data = staticmethod(partial(TestBooks.data, sampler="proportional"))


class TestCloze(DataCase):
    invalid: ClassVar[dict[str, Any]] = {
        **dict.fromkeys((*COUNTS, "sentences", "min_count"), NO_COUNT),
        "passage_sentences": (0, 13),
        "num_entities": (3,),
        "entities": ("other",),
        "eval_entities": ("batch",),
        "vocabulary_size": (2,),
        "max_entities": (1,),
        "data_seed": (-1,),
    }
    data = staticmethod(partial(SyntheticClozeQA, **COUNTS))


class TestHandwriting(DataCase):
    invalid: ClassVar[dict[str, Any]] = {
        **dict.fromkeys((*COUNTS, "characters", "max_points"), NO_COUNT),
        "length_mode": ("whole",),
        "scale": ("mean",),
        "long_steps": ("keep",),
        "max_step": (0.0, float("nan")),
        "data_seed": (-1,),
    }
    data = staticmethod(partial(SyntheticHandwriting, **COUNTS, characters=3))


class TestPartsOfLines(TestHandwriting):
    data = staticmethod(partial(TestHandwriting.data, length_mode="tbptt", max_points=25))
