"""Data that are made up: scenes with captions that name parts of them, lines in a stick font."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import pytest
import torch
from data_support import SETS, ready
from refusals import refuses

from ln_zoo.data import SyntheticHandwriting, SyntheticScenes
from ln_zoo.data.captions.synthetic import (
    _ACTIONS,
    _COLOURS,
    _OBJECTS,
    _PLACES,
    _code,
    _describe,
    _draw,
)
from ln_zoo.data.pen.synthetic import _GLYPHS, _glyph, random_text, write

# Scenes

SMALL: dict[str, Any] = {"train_size": 30, "val_size": 6, "test_size": 7}


def scenes(**arguments: Any) -> SyntheticScenes:
    return ready(SyntheticScenes(**SMALL | arguments))


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
    some, more = scenes(), scenes(train_size=50)
    for name in SETS:
        few, many = some.captioned(name), more.captioned(name)  # type: ignore[arg-type]
        np.testing.assert_array_equal(few.features, many.features[: len(few)])
        assert few.captions == many.captions[: 5 * len(few)]
    assert not np.array_equal(some.captioned("val").features, some.captioned("test").features[:6])


def test_seeds_and_noise() -> None:
    here = scenes().captioned("train")
    np.testing.assert_array_equal(here.features, scenes(seed=5).captioned("train").features)
    assert here.captions != scenes(data_seed=1).captioned("train").captions
    clear = scenes(noise=0.0).captioned("train")
    assert clear.captions == here.captions
    assert 0.1 < np.abs(clear.features - here.features).mean() < 0.3
    assert (here.features >= 0).all()
    assert here.features.std() > 0.3


def test_batches() -> None:
    data = scenes(batch_size=10, image_features=40)
    batch = next(iter(data.train_dataloader()))
    assert batch.images.shape == (10, 40)
    torch.testing.assert_close(batch.images.norm(dim=1), torch.ones(10))
    assert (len(batch.captions), data.image_features) == (10, 40)
    assert data.metadata["dataset"] == "synthetic_scenes"
    words = {*_OBJECTS, *_COLOURS, *_ACTIONS, *_PLACES, "a", "and", "in", "the"}
    assert set(scenes(train_size=400).vocabulary or ()) == words


# Handwriting

ALPHABET = string.ascii_letters + string.digits


def lines(**options) -> SyntheticHandwriting:
    sizes = {"train_size": 60, "val_size": 9, "test_size": 8}
    return ready(SyntheticHandwriting(**sizes | options))


def test_it_is_seeded() -> None:
    one, same, other = lines(seed=1), lines(seed=2), lines(data_seed=1)
    for name in SETS:
        first, again, others = (data.lines(name) for data in (one, same, other))
        assert first.text == again.text != others.text
        assert all(torch.equal(first.offsets(i), again.offsets(i)) for i in range(8))
    texts = [one.lines(name).text[:8] for name in SETS]
    assert len(set(texts)) == 3


def test_a_smaller_training_set_is_the_first_of_the_larger() -> None:
    small, large = lines(train_size=5).lines("train"), lines().lines("train")
    assert small.text == large.text[:5]
    assert all(torch.equal(small.offsets(i), large.offsets(i)) for i in range(5))


@pytest.mark.parametrize("characters", [1, 2, 7, 20, 40])
def test_texts_fit(characters: int) -> None:
    rng = np.random.default_rng(0)
    texts = [random_text(rng, characters) for _ in range(200)]
    assert all(1 <= len(text) <= characters for text in texts)
    assert max(map(len, texts)) >= characters - 1
    assert all(text == text.strip() and set(text) <= set(_GLYPHS) | {" "} for text in texts)
    assert len(set(texts)) > (1 if characters == 1 else 20)


def test_every_letter_and_digit_is_drawn_in_its_own_way() -> None:
    assert set(ALPHABET) <= set(_GLYPHS)
    shapes = {"".join(map(str, _glyph(c).points.round(3).tolist())) for c in _GLYPHS}
    assert len(shapes) == len(_GLYPHS)
    for character in _GLYPHS:
        glyph = _glyph(character)
        lowest, highest = glyph.points[:, 1].min(), glyph.points[:, 1].max()
        assert -3 <= lowest <= highest <= 6
        assert glyph.pen_up[-1] == 1
        assert glyph.pen_up.sum() == _GLYPHS[character].count("/") + 1
        if character in string.ascii_uppercase:
            assert highest > 4
        if character in "gjpqy":
            assert lowest < -1


def test_strokes_follow_their_glyph() -> None:
    steps = write("it", np.random.default_rng(0))
    strokes = np.split(steps, np.flatnonzero(steps[:, 2])[:-1] + 1)
    assert len(strokes) == 4
    assert len(strokes[1]) == 1  # the dot of the i
    # The stem goes down on the whiteboard, where y grows downwards.
    assert strokes[0][1:, 1].sum() > 50
    assert abs(strokes[3][1:, 0].sum()) > abs(strokes[3][1:, 1].sum())


@pytest.mark.parametrize("text", ["é", "a#b", "", "  "])
def test_what_the_font_does_not_have_is_refused(text: str) -> None:
    refuses("the stick font draws", write, text, np.random.default_rng(0))
