"""Synthetic scenes with captions of their parts, a partial order by construction."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ln_zoo.data.captions.dataset import CaptionedData
from ln_zoo.data.captions.files import CaptionedSet
from ln_zoo.utils.checks import check_at_least

_WORDS = {
    "things": "dog cat horse bird child woman man boat car train bicycle kite ball umbrella chair "
    "table clock truck bear sheep",
    "colours": "red blue green yellow black white brown grey",
    "actions": "runs sits jumps sleeps waits turns falls stands rests moves",
    "places": "park street kitchen beach field garden harbour forest station market",
}
_OBJECTS, _COLOURS, _ACTIONS, _PLACES = (words.split() for words in _WORDS.values())

_MOST_THINGS = 4
#: Sizes of the parts of the code: things, their colours, their actions, and places.
_PARTS = (len(_OBJECTS), len(_OBJECTS) * len(_COLOURS), len(_OBJECTS) * len(_ACTIONS), len(_PLACES))
_NAMED = 0.6  # probability that a caption mentions a detail of a thing, or the place


class _Thing(NamedTuple):
    what: int
    colour: int
    action: int


class _Scene(NamedTuple):
    things: tuple[_Thing, ...]
    place: int


class SyntheticScenes(CaptionedData):
    """Two to four things with a colour and an action in a place; captions name a part of a scene.

    For tests and first steps. Features are a rectified, noisy random projection of a 0/1 code of
    things, their colours and actions, and the place. Each of the five captions mentions some of
    these parts, so it describes all scenes that have them.

    Args:
        train_size: number of training scenes; a smaller set is the start of a larger one.
        val_size: number of validation scenes.
        test_size: number of test scenes.
        image_features: features I of a scene.
        noise: standard deviation of the noise, relative to about 1 for the projection.
        data_seed: seed of scenes, captions and projection.
    """

    name = "synthetic_scenes"

    def __init__(
        self,
        *,
        train_size: int = 6000,
        val_size: int = 1000,
        test_size: int = 5000,
        image_features: int = 256,
        noise: float = 0.3,
        data_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        sizes = {"train_size": train_size, "val_size": val_size, "test_size": test_size}
        check_at_least(1, **sizes, image_features=image_features)
        check_at_least(0, data_seed=data_seed)
        if not 0 <= noise < float("inf"):
            raise ValueError(f"noise must be a finite number of at least 0, got {noise!r}")
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        self.noise = noise
        self.data_seed = data_seed
        self._features = image_features

    @property
    def image_features(self) -> int:
        return self._features

    def read(self) -> dict[str, CaptionedSet]:
        rng = np.random.default_rng(self.data_seed)
        projection = rng.standard_normal((sum(_PARTS), self._features))
        # A scene has some 10 ones in its code.
        projection /= np.sqrt(10)
        return {
            name: self._scenes(name, number, size, projection)
            for number, (name, size) in enumerate(self.sizes.items())
        }

    def _scenes(self, name: str, number: int, size: int, projection: np.ndarray) -> CaptionedSet:
        features = np.empty((size, self._features), np.float32)
        captions = []
        for i in range(size):
            rng = np.random.default_rng((self.data_seed, number, i))
            scene = _draw(rng)
            captions += [_describe(scene, rng) for _ in range(self.captions_per_image)]
            seen = projection[_code(scene)].sum(0)
            features[i] = np.maximum(seen + self.noise * rng.standard_normal(self._features), 0)
        names = [f"{name} scene {i}" for i in range(size)]
        return CaptionedSet(features, captions, names, f"{self.name}, {name} set")


def _draw(rng: np.random.Generator) -> _Scene:
    kinds = rng.permutation(len(_OBJECTS))[: rng.integers(2, _MOST_THINGS + 1)]
    things = [
        _Thing(int(kind), int(rng.integers(len(_COLOURS))), int(rng.integers(len(_ACTIONS))))
        for kind in kinds
    ]
    return _Scene(tuple(things), int(rng.integers(len(_PLACES))))


def _code(scene: _Scene) -> list[int]:
    kinds, coloured, acting, _ = np.cumsum(_PARTS).tolist()
    ones = [coloured + thing.what * len(_ACTIONS) + thing.action for thing in scene.things]
    ones += [kinds + thing.what * len(_COLOURS) + thing.colour for thing in scene.things]
    return [*(thing.what for thing in scene.things), *ones, acting + scene.place]


def _describe(scene: _Scene, rng: np.random.Generator) -> list[str]:
    named = rng.permutation(len(scene.things))[: rng.integers(1, len(scene.things) + 1)]
    phrases = []
    for number in named:
        thing = scene.things[number]
        coloured, acting = rng.random(2) < _NAMED
        phrase = ["a", *([_COLOURS[thing.colour]] if coloured else []), _OBJECTS[thing.what]]
        phrases.append([*phrase, *([_ACTIONS[thing.action]] if acting else [])])
    words = [word for phrase in phrases for word in ("and", *phrase)][1:]
    return [*words, "in", "the", _PLACES[scene.place]] if rng.random() < _NAMED else words
