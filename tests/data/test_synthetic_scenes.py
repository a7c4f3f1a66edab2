"""Scenes: captions name parts of their scene, features tell scenes apart, chance by seed alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ln_zoo.data import SyntheticScenes
from ln_zoo.data.synthetic_scenes import (
    _ACTIONS,
    _COLOURS,
    _OBJECTS,
    _PLACES,
    _code,
    _describe,
    _draw,
)

SMALL: dict[str, Any] = {"train_size": 30, "val_size": 6, "test_size": 7}


def made(**arguments: Any) -> SyntheticScenes:
    data = SyntheticScenes(**SMALL | arguments)
    data.setup()
    return data


@pytest.mark.parametrize("seed", range(20))
def test_a_caption_names_a_part_of_its_scene(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scene = _draw(rng)
    assert 2 <= len(scene.things) == len({thing.what for thing in scene.things}) <= 4
    for _ in range(10):
        text = " ".join(_describe(scene, rng))
        *phrases, last = text.split(" and ")
        last, _, place = last.partition(" in the ")
        assert place in ("", _PLACES[scene.place])
        named = set()
        for phrase in [*phrases, last]:
            words = set(phrase.split()) - {"a"}
            (thing,) = [t for t in scene.things if _OBJECTS[t.what] in words]
            named.add(thing)
            assert words <= {_OBJECTS[thing.what], _COLOURS[thing.colour], _ACTIONS[thing.action]}
        assert 1 <= len(named) == len(phrases) + 1


def test_the_code_has_a_one_for_each_fact() -> None:
    rng = np.random.default_rng(0)
    codes = set()
    for _ in range(200):
        scene = _draw(rng)
        code = _code(scene)
        assert len(set(code)) == len(code) == 3 * len(scene.things) + 1
        assert 0 <= min(code) <= max(code) < 20 + 20 * 8 + 20 * 10 + 10
        codes.add((scene, frozenset(code)))
    assert len({code for _, code in codes}) == len({scene for scene, _ in codes})


def test_fewer_are_the_first_of_more() -> None:
    some, more = made(), made(train_size=50)
    for name in ("train", "val", "test"):
        few, many = some.captioned(name), more.captioned(name)  # type: ignore[arg-type]
        np.testing.assert_array_equal(few.features, many.features[: len(few)])
        assert few.captions == many.captions[: 5 * len(few)]
    assert not np.array_equal(some.captioned("val").features, some.captioned("test").features[:6])


def test_seeds_and_noise() -> None:
    here = made().captioned("train")
    np.testing.assert_array_equal(here.features, made(seed=5).captioned("train").features)
    assert here.captions != made(data_seed=1).captioned("train").captions
    clear = made(noise=0.0).captioned("train")
    assert clear.captions == here.captions
    assert 0.1 < np.abs(clear.features - here.features).mean() < 0.3
    assert (here.features >= 0).all()
    assert here.features.std() > 0.3


def test_batches() -> None:
    data = made(batch_size=10, image_features=40)
    batch = next(iter(data.train_dataloader()))
    assert batch.images.shape == (10, 40)
    torch.testing.assert_close(batch.images.norm(dim=1), torch.ones(10))
    assert len(batch.captions) == 10
    assert data.image_features == 40
    assert data.metadata["dataset"] == "synthetic_scenes"
    assert set(made(train_size=400).vocabulary or ()) == {
        *_OBJECTS, *_COLOURS, *_ACTIONS, *_PLACES, "a", "and", "in", "the",
    }  # fmt: skip
