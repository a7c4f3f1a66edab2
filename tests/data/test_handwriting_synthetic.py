"""The stick font's lines."""

from __future__ import annotations

import string

import numpy as np
import pytest
import torch

from ln_zoo.data import SyntheticHandwriting
from ln_zoo.data.synthetic_handwriting import _GLYPHS, _glyph, random_text, write

ALPHABET = string.ascii_letters + string.digits


def made(**options) -> SyntheticHandwriting:
    data = SyntheticHandwriting(**{"train_size": 60, "val_size": 9, "test_size": 8, **options})
    data.setup()
    return data


def test_it_is_seeded() -> None:
    one, same, other = made(seed=1), made(seed=2), made(data_seed=1)
    for name in ("train", "val", "test"):
        lines = [data.lines(name) for data in (one, same, other)]
        assert lines[0].text == lines[1].text != lines[2].text
        assert all(torch.equal(lines[0].offsets(i), lines[1].offsets(i)) for i in range(8))
    texts = [one.lines(name).text[:8] for name in ("train", "val", "test")]
    assert len(set(texts)) == 3


def test_a_smaller_training_set_is_the_first_of_the_larger() -> None:
    small, large = made(train_size=5).lines("train"), made().lines("train")
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
    with pytest.raises(ValueError, match="the stick font draws"):
        write(text, np.random.default_rng(0))
