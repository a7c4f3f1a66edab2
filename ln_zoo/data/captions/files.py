"""Captioned images and the file formats they are read from."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from ln_zoo.data.archives import open_file, read_file
from ln_zoo.data.array_files import map_array, read_mat, read_npz
from ln_zoo.data.folders import check_folder, find_files, listing
from ln_zoo.data.ragged import check_offsets
from ln_zoo.data.text_files import read_lines
from ln_zoo.utils.files import decode_picture

CAPTIONS = "captions.tsv"
THUMBNAILS = "thumbs64_jpeg.npz"

_MAX_BYTES = 4_000_000_000
_ROWS = 8192  # rows of features to check at a time
_PUNCTUATION = str.maketrans("", "", string.punctuation)
#: Splits in caption files, and the sets they belong to.
_SPLITS = {"train": "train", "dev": "val", "val": "val", "test": "test", "restval": "restval"}
_SETS = ("train", "val", "test")
_FORMS = (
    "expected train.txt, val.txt and test.txt with images/<features>/<set>.npy, as released with "
    f"order embeddings; or Karpathy's dataset*.json with a features file; or {CAPTIONS} with "
    "<features>.npy"
)


def caption_words(caption: str) -> list[str]:
    """Split a caption into lower-case words without punctuation (Karpathy and Fei-Fei 2015)."""
    return caption.lower().translate(_PUNCTUATION).split()


@dataclass(frozen=True)
class CaptionedSet:
    """N images: features (N, I), words of C N captions, names; ``where`` is for errors."""

    features: np.ndarray
    captions: Sequence[Sequence[str]]
    names: Sequence[str]
    where: str

    def __len__(self) -> int:
        return len(self.features)

    def first(self, images: int) -> CaptionedSet:
        each = len(self.captions) // max(1, len(self))
        return CaptionedSet(
            self.features[:images], self.captions[: each * images], self.names[:images], self.where
        )

    def check(self, each: int) -> None:
        if self.features.ndim != 2 or not np.issubdtype(self.features.dtype, np.floating):
            raise ValueError(
                f"{self.where}: features must be a matrix (images, features) of floating point, "
                f"got {self.features.dtype} {self.features.shape}"
            )
        if not len(self):
            raise ValueError(f"{self.where}: there are no images")
        if len(self.captions) != each * len(self):
            raise ValueError(
                f"{self.where}: {len(self.captions):,} captions of {len(self):,} images, expected "
                f"{each} an image, {each * len(self):,}: a file is incomplete, or captions and "
                "features are of different sets"
            )
        for start in range(0, len(self), _ROWS):
            rows = self.features[start : start + _ROWS]
            with np.errstate(over="ignore"):
                finite = np.isfinite(rows.astype(np.float32)).all(1)
            for good, what in ((finite, "that are not finite"), (rows.any(1), "of zeros alone")):
                if not good.all():
                    row = start + int(np.flatnonzero(~good)[0])
                    raise ValueError(
                        f"{self.where}: image {row} ({self.names[row]}) has float32 features "
                        f"{what}: extract them again"
                    )
        empty = [i for i, words in enumerate(self.captions) if not words]
        if empty:
            rank_zero_warn(
                f"{self.where}: {len(empty):,} captions have no word, the first is caption "
                f"{empty[0] % each} of {self.names[empty[0] // each]}"
            )


class Layout(NamedTuple):
    """The format of a folder: name of the dataset or None, name of the features, reader of sets."""

    name: str | None
    features: str
    read: Callable[[], dict[str, CaptionedSet]]


def find_layout(root: Path, features: str | None, each: int, use_restval: bool) -> Layout:
    """Detect the format of a folder with ``each`` captions per image."""
    check_folder(root, _FORMS)
    if (root / CAPTIONS).is_file():
        path = _choose(sorted(root.glob("*.npy")), features or "mobilenetv2_pool", root)
        return Layout(None, path.stem, lambda: _read_table(root / CAPTIONS, path, each))
    if find_files(root, {name: (f"{name}.txt",) for name in _SETS}, _FORMS):
        folders = [path for path in sorted(root.glob("images/*")) if path.is_dir()]
        folder = _choose(folders, features or "10crop", root / "images")
        # The released script writes another name than is read.
        names = {name: (f"{name}.npy", f"coco_{name}.npy") for name in _SETS}
        arrays = find_files(folder, names, "give the features of all three sets", required=True)
        return Layout(None, folder.name, lambda: _read_released(root, arrays, each))
    tables = sorted(root.glob("dataset*.json"))
    if len(tables) > 1:
        raise ValueError(
            f"{root} has {', '.join(path.name for path in tables)}: give a folder with one of them"
        )
    if not tables:
        raise ValueError(f"{root} has no captioned images: {_FORMS}; found {listing(root)}")
    path = _choose(sorted([*root.glob("*.npy"), *root.glob("*.mat")]), features, root)
    content = _read_json(tables[0])
    return Layout(
        str(content["dataset"]) if content.get("dataset") else None,
        path.stem,
        lambda: _read_karpathy(tables[0], content, path, each, use_restval),
    )


def read_thumbnails(path: Path) -> Callable[[str], np.ndarray | None]:
    """Read an ``.npz`` of JPEG files: ``image`` (names), ``data`` (all bytes) and ``offsets``.

    Returns a function from a name to a thumbnail, uint8 (B, A, 3), or None.
    """
    arrays = read_npz(path)
    try:
        names, offsets, data = (arrays[name] for name in ("image", "offsets", "data"))
    except KeyError as error:
        raise ValueError(f"{path} is not an archive of thumbnails: no array {error}") from error
    check_offsets(offsets, data.size, path)
    if names.shape != (len(offsets) - 1,) or data.ndim != 1 or data.dtype != np.uint8:
        raise ValueError(
            f"{path}: offsets of {len(offsets) - 1:,} images with names {names.shape} and data "
            f"{data.dtype} {data.shape}, expected names (N,) and uint8 (M,)"
        )
    place = {str(name): i for i, name in enumerate(names)}

    def picture(name: str) -> np.ndarray | None:
        if name not in place:
            return None
        i = place[name]
        content = data[offsets[i] : offsets[i + 1]].tobytes()
        return decode_picture(content, f"{path}, image {i}", "RGB", ("JPEG",))

    return picture


class _Image(NamedTuple):
    name: str
    split: str
    captions: Sequence[Sequence[str]]


def _read_table(table: Path, features: Path, each: int) -> dict[str, CaptionedSet]:
    def images() -> Iterable[_Image]:
        for line in _lines(table)[1:]:
            name, _, rest = line.partition("\t")
            split, *captions = rest.split("\t")
            yield _Image(name, split, [caption_words(caption) for caption in captions[:each]])

    return _divide(list(images()), _read_features(features), table, features, each)


def _read_karpathy(
    table: Path, content: dict[str, Any], features: Path, each: int, use_restval: bool
) -> dict[str, CaptionedSet]:
    images = []
    for number, image in enumerate(content["images"]):
        try:
            name, split = str(image.get("filename", number)), image["split"]
            if not isinstance(split, str):
                raise TypeError(f"a split of type {type(split).__name__}")
            captions = [_tokens(sentence) for sentence in image["sentences"][:each]]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{table}: image {number} must have a split and sentences with tokens or raw text, "
                f"and reading it gave {type(error).__name__}: {error}"
            ) from error
        images.append(
            _Image(name, "train" if split == "restval" and use_restval else split, captions)
        )
    array = _read_features(features)
    if array.shape[0] != len(images) == array.shape[-1]:
        array = array.T  # a column per image, as in vgg_feats.mat
    return _divide(images, array, table, features, each)


def _divide(
    images: Sequence[_Image], array: np.ndarray, table: Path, features: Path, each: int
) -> dict[str, CaptionedSet]:
    if len(array) != len(images):
        raise ValueError(
            f"{features} has features of {len(array):,} images and {table} captions of "
            f"{len(images):,}: they are of different sets, or one is incomplete"
        )
    rows: dict[str, list[int]] = {name: [] for name in _SETS}
    for number, image in enumerate(images):
        kept = rows.get(_SPLITS.get(image.split, ""))
        if kept is None:
            continue
        if len(image.captions) < each:
            raise ValueError(
                f"{table}: image {number} ({image.name[:100]}) has {len(image.captions)} captions, "
                f"expected {each}"
            )
        kept.append(number)
    return {
        name: CaptionedSet(
            np.asarray(array[numbers]),
            [words for i in numbers for words in images[i].captions],
            [images[i].name for i in numbers],
            f"{table.name} and {features.name}, {name} set",
        )
        for name, numbers in rows.items()
    }


def _read_released(root: Path, arrays: dict[str, Path], each: int) -> dict[str, CaptionedSet]:
    sets = {}
    for name, path in arrays.items():
        array = _read_features(path)
        words = [line.split() for line in _lines(root / f"{name}.txt")]  # tokenised, lower case
        if len(words) != each * len(array):
            raise ValueError(
                f"{root / f'{name}.txt'} has {len(words):,} captions and {path} {len(array):,} "
                f"images, expected {each} captions per image, {each * len(array):,}: a file is "
                "incomplete, or they are of different sets"
            )
        names = [f"{name} image {i}" for i in range(len(array))]
        sets[name] = CaptionedSet(array, words, names, f"{path.name}, {name} set")
    return sets


def _tokens(sentence: dict[str, Any]) -> list[str]:
    tokens = sentence["tokens"] if "tokens" in sentence else caption_words(sentence["raw"])
    if not isinstance(tokens, list):
        raise TypeError(f"tokens of type {type(tokens).__name__}")
    # Words of a vocabulary have no white space.
    return [word for token in tokens for word in token.split()]


def _read_json(path: Path) -> dict[str, Any]:
    text = read_file(path, _MAX_BYTES)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON, or damaged: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        raise ValueError(f"{path} must have a list of images under the key 'images'")
    return content


def _lines(path: Path) -> list[str]:
    with open_file(path) as file:
        return list(read_lines(file, path))


def _read_features(path: Path) -> np.ndarray:
    array = map_array(path) if path.suffix == ".npy" else read_mat(path, "feats")
    if array.ndim != 2:
        raise ValueError(f"{path} must be a matrix (images, features), got {array.shape}")
    return array


def _choose(paths: Sequence[Path], wanted: str | None, where: Path) -> Path:
    for path in paths:
        if wanted in (path.stem, path.name) or (wanted is None and len(paths) == 1):
            return path
    names = ", ".join(path.stem for path in paths) or "none"
    what = "several features" if wanted is None and paths else f"no features {wanted or ''}"
    raise FileNotFoundError(f"{where} has {what} (found: {names}): choose with --data.features")
