"""Synthetic handwriting in a stick font."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ln_zoo.data.pen.dataset import HandwritingData
from ln_zoo.data.pen.files import PenLines
from ln_zoo.utils.checks import check_at_least

# Control points "xy" on a grid: the baseline is y = 3, descenders reach y = 0, lower-case letters
# are 3 high, tall ones and capitals 6. "/" lifts the pen, "|" separates glyphs. A single point is a
# dot.
_TABLE = """
a 45 26 05 04 23 44 46 43 | b 09 03 04 23 44 45 26 05 | c 45 26 05 04 23 44
d 45 26 05 04 23 44 49 43 | e 05 45 26 05 04 23 43 | f 38 29 18 13/06 26
g 45 26 05 04 23 44 46 41 20 01 | h 09 03 05 26 45 43 | i 06 03/08 | j 26 21 10 01/28
k 09 03/36 04 33 | l 09 04 13 | m 06 03 05 16 25 23 25 36 45 43 | n 06 03 05 26 45 43
o 26 05 04 23 44 45 26 | p 06 00 05 26 45 44 23 04 | q 45 26 05 04 23 44 46 40 51
r 06 03 05 26 36 | s 46 16 05 44 33 03 | t 18 14 23 33/06 36 | u 06 04 23 44 46 43 | v 06 23 46
w 06 13 26 33 46 | x 06 43/46 03 | y 06 04 23 44 46 41 20 01 | z 06 46 03 43 | A 03 29 43/15 35
B 03 09 29 38 37 26 06 36 45 44 33 03 | C 48 29 19 07 05 13 33 44 | D 03 09 29 47 45 23 03
E 49 09 03 43/06 36 | F 49 09 03/06 36 | G 48 29 07 05 23 43 46 26 | H 09 03/49 43/06 46
I 09 49/29 23/03 43 | J 49 44 23 04 | K 09 03/49 06 43 | L 09 03 43 | M 03 09 25 49 43
N 03 09 43 49 | O 29 07 05 23 45 47 29 | P 03 09 39 48 47 36 06 | Q 29 07 05 23 45 47 29/34 52
R 03 09 39 48 47 36 06 26 43 | S 48 29 08 07 45 44 23 04 | T 09 49/29 23 | U 09 05 23 45 49
V 09 23 49 | W 09 13 26 33 49 | X 09 43/49 03 | Y 09 26 49/26 23 | Z 09 49 03 43
0 19 07 05 13 25 27 19 | 1 07 29 23 | 2 08 29 48 46 03 43 | 3 08 29 48 26 45 44 23 04
4 39 05 45/38 33 | 5 49 09 06 36 45 44 23 03 | 6 49 16 04 23 44 45 26 05 | 7 09 49 13
8 26 08 29 48 26 04 23 44 26 | 9 47 29 07 26 47 43 | . 03 | , 13 02 | ? 08 29 48 46 25 24/23
! 19 14/13 | ' 19 17 | - 05 25
"""
_GLYPHS = {
    entry[0]: entry[2:] for line in _TABLE.split("\n") for entry in line.split(" | ") if entry
}
_UNIT = 40.0  # whiteboard units per grid unit: letters are as large as in IAM-OnDB
_STEP = 0.5  # step length, grid units: about 20 points per character
_GAP, _SPACE = 1.3, 3.0  # widths between characters and of a blank, grid units

_VOCABULARY = (
    "a I at be by do go he if in is it me my no of on or so to up us we all and any are ask "
    "big but can cat day did dog end far few for get had has her him his how its job key law "
    "let man may new nor not now off old one our out own pen put red run sat saw say see set "
    "she sit six sun ten the too top try two use was way who why yes yet you able also away "
    "back been body book both call came city come dark deep door down each early easy even "
    "ever face fact fall feel find fire five form four from full gave girl give gold good "
    "great green half hand hard have head hear heard heart help here high hold home hope hour "
    "house idea into just keep kind king knew know land large last late learn left less "
    "letter life light like line list live long look made make many mark mean might mind more "
    "most move much name near need never next night north note once only open order other "
    "over page paper part past people place plain point power press quick quiet quite rain "
    "read real rest right river road room rule same seem sentence seven shape ship short side "
    "sign small some song soon sound south speak stand state step still stone stop story such "
    "table take talk tell than that their them then there they thing think this those three "
    "through time took town tree true turn under until upon very view voice wait walk want "
    "warm water week well were west what when where which while white whole wind with word "
    "work world would write year young zero"
)
_WORDS = _VOCABULARY.split()
_ENDINGS = (*"......,,,?!", *("",) * 6)


class SyntheticHandwriting(HandwritingData):
    """Lines of random words in a stick font, each in a random hand; for tests and first steps.

    A hand has its own slant, proportions, spacing and tremor. A character has about 20 points, in
    the units and at the size of IAM-OnDB's.

    Args:
        train_size: number of training lines; a smaller set is the start of a larger one.
        val_size: number of validation lines.
        test_size: number of test lines.
        characters: maximum characters of a line.
        data_seed: seed of texts and hands.
    """

    name = "synthetic_handwriting"

    def __init__(
        self,
        *,
        train_size: int = 1000,
        val_size: int = 100,
        test_size: int = 100,
        characters: int = 20,
        data_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_at_least(
            1, train_size=train_size, val_size=val_size, test_size=test_size, characters=characters
        )
        check_at_least(0, data_seed=data_seed)
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        self.characters = characters
        self.data_seed = data_seed

    def read(self) -> dict[str, PenLines]:
        return {
            name: self._lines(name, number, size)
            for number, (name, size) in enumerate(self.sizes.items())
        }

    def _lines(self, name: str, number: int, size: int) -> PenLines:
        texts, steps = [], []
        for i in range(size):
            rng = np.random.default_rng((self.data_seed, number, i))
            texts.append(random_text(rng, self.characters))
            steps.append(write(texts[-1], rng))
        return PenLines.from_steps(steps, [f"{name}-{i:05}" for i in range(size)], texts)


def random_text(rng: np.random.Generator, characters: int) -> str:
    """Random words of at most ``characters``, with some numbers, capitals and punctuation marks."""
    wanted = int(rng.integers(max(1, characters // 2), characters + 1))
    text = ""
    while True:
        number = rng.random() < 0.05
        word = str(rng.integers(10_000)) if number else _WORDS[rng.integers(len(_WORDS))]
        longer = f"{text} {word}" if text else word
        if len(longer) > wanted:
            if text:
                break
            continue  # the first word did not fit; there are words of one letter
        text = longer
    if rng.random() < 0.5:
        text = text[0].upper() + text[1:]
    ending = _ENDINGS[rng.integers(len(_ENDINGS))]
    return text + ending if len(text) < characters else text


def write(text: str, rng: np.random.Generator) -> np.ndarray:
    """Write a text in a random hand.

    Returns integer steps (P, 3): dx, dy (downwards), 1 on the last point of a stroke.
    """
    unknown = sorted(set(text) - set(_GLYPHS) - {" "})
    if unknown or not text.strip():
        raise ValueError(
            f"the stick font draws {''.join(_GLYPHS)} and blanks, got {text!r}"
            f"{' with ' + repr(''.join(unknown)) if unknown else ''}"
        )
    slant, narrow, tall = rng.normal(0.15, 0.2), rng.uniform(0.75, 1.1), rng.uniform(0.85, 1.15)
    shake, drift = rng.uniform(0.02, 0.08), rng.normal(0, 0.02)
    drawn, ends, x = [], [], 0.0
    for character in text:
        if character == " ":
            x += _SPACE
            continue
        glyph = _glyph(character)
        drawn.append(glyph.points + np.array((x, rng.normal(0, 0.1))))
        ends.append(glyph.pen_up)
        x += glyph.width + _GAP + rng.normal(0, 0.12)
    points = np.concatenate(drawn)
    points += _smooth_noise(len(points), shake, rng)
    points[:, 0] = points[:, 0] * narrow + slant * points[:, 1]
    points[:, 1] = points[:, 1] * tall + drift * points[:, 0]
    # The first step leads to the left margin; y downwards as on the whiteboard.
    recorded = np.rint(points * (_UNIT, -_UNIT)) + np.array((500, 2000))
    moves = np.diff(recorded, axis=0, prepend=0)
    return np.column_stack([moves, np.concatenate(ends)])


class _Glyph(NamedTuple):
    """Points (P, 2) from the baseline, ends of strokes (P,), and width, grid units."""

    points: np.ndarray
    pen_up: np.ndarray
    width: float


@functools.cache
def _glyph(character: str) -> _Glyph:
    points, pen_up = [], []
    for stroke in _GLYPHS[character].split("/"):
        corners = np.array([[int(p[0]), int(p[1]) - 3] for p in stroke.split()], float)
        points.append(_along(_rounded(corners)))
        pen_up.append(np.arange(1, len(points[-1]) + 1) // len(points[-1]))
    drawn = np.concatenate(points)
    return _Glyph(drawn, np.concatenate(pen_up), float(drawn[:, 0].max()))


def _rounded(corners: np.ndarray) -> np.ndarray:
    """Cut the corners of a polyline twice, except its ends (Chaikin 1974)."""
    for _ in range(2):
        if len(corners) > 2:
            near, far = corners[:-1], corners[1:]
            cut = np.stack([0.75 * near + 0.25 * far, 0.25 * near + 0.75 * far], 1).reshape(-1, 2)
            corners = np.concatenate([corners[:1], cut[1:-1], corners[-1:]])
    return corners


def _along(corners: np.ndarray) -> np.ndarray:
    """Equidistant points along a polyline, including both ends."""
    sides = np.diff(corners, axis=0)
    lengths = np.concatenate([np.zeros(1), np.cumsum(np.hypot(sides[:, 0], sides[:, 1]))])
    places = np.linspace(0, lengths[-1], 1 + int(np.ceil(lengths[-1] / _STEP)))
    return np.column_stack([np.interp(places, lengths, corners[:, axis]) for axis in (0, 1)])


def _smooth_noise(points: int, scale: float, rng: np.random.Generator) -> np.ndarray:
    """(P, 2) smooth noise of standard deviation ``scale``."""
    width = 7
    noise = rng.normal(0, scale * np.sqrt(width), (points + width - 1, 2))
    total = np.cumsum(np.concatenate([np.zeros((1, 2)), noise]), axis=0)
    return (total[width:] - total[:-width]) / width
