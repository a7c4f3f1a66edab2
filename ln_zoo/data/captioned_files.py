"""The forms in which captioned images are distributed, read into `CaptionedSet`s."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ln_zoo.data.captions import CaptionedSet, caption_words
from ln_zoo.files import read_regular

CAPTIONS = "captions.tsv"
THUMBNAILS = "thumbs64_jpeg.npz"

_MOST_BYTES = 4_000_000_000
#: Names of a split's set in the file of captions, and in Karpathy's.
_SPLITS = {"train": "train", "dev": "val", "val": "val", "test": "test", "restval": "restval"}
_SETS = ("train", "val", "test")
_FORMS = (
    "train.txt, val.txt and test.txt with images/<features>/<set>.npy, as released with order "
    f"embeddings; or Karpathy's dataset*.json with a features file; or {CAPTIONS} with "
    "<features>.npy"
)


class Layout(NamedTuple):
    """A form of a folder.

    Attributes:
        name: that the folder's files give the dataset; ``None``: they do not say.
        features: name of the features.
        read: gives the sets ``"train"``, ``"val"`` and ``"test"``.
    """

    name: str | None
    features: str
    read: Callable[[], dict[str, CaptionedSet]]


def find_layout(root: Path, features: str | None, each: int, use_restval: bool) -> Layout:
    """What a folder holds; captions and features are read by the answer's ``read``.

    Args:
        root: the folder.
        features: which features; ``None``: the only ones, or the form's own default.
        each: captions C of an image; more are left out.
        use_restval: whether Karpathy's split ``restval`` belongs to the training set.

    Raises:
        FileNotFoundError: no such folder, or one of its files is missing.
        NotADirectoryError: it is a file.
        ValueError: the folder holds something else.
    """
    if not root.exists():
        raise FileNotFoundError(f"no folder {root}: expected {_FORMS}")
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is a file: give the folder that holds the dataset")
    if (root / CAPTIONS).is_file():
        path = _one_of(sorted(root.glob("*.npy")), features or "mobilenetv2_pool", root)
        return Layout(None, path.stem, lambda: _read_table(root / CAPTIONS, path, each))
    if (root / "train.txt").is_file():
        missing = [f"{name}.txt" for name in _SETS if not (root / f"{name}.txt").is_file()]
        if missing:
            raise FileNotFoundError(f"{root} lacks {', '.join(missing)} beside train.txt")
        folders = [path for path in sorted(root.glob("images/*")) if path.is_dir()]
        folder = _one_of(folders, features or "10crop", root / "images")
        arrays = {name: _released_array(folder, name) for name in _SETS}
        return Layout(None, folder.name, lambda: _read_released(root, arrays, each))
    tables = sorted(root.glob("dataset*.json"))
    if len(tables) > 1:
        raise ValueError(
            f"{root} has {', '.join(path.name for path in tables)}: give a folder with one of them"
        )
    if tables:
        arrays_found = sorted([*root.glob("*.npy"), *root.glob("*.mat")])
        path = _one_of(arrays_found, features, root)
        content = _json(tables[0])
        return Layout(
            str(content["dataset"]) if content.get("dataset") else None,
            path.stem,
            lambda: _read_karpathy(tables[0], content, path, each, use_restval),
        )
    found = sorted(path.name for path in root.iterdir())
    raise ValueError(
        f"{root} holds no captioned images: expected {_FORMS}; found "
        f"{', '.join(found[:8]) or 'nothing'}"
    )


def read_thumbnails(path: Path) -> Callable[[str], np.ndarray | None]:
    """Pictures by the name of the image, uint8 (B, A, 3), of an archive of JPEG files.

    The archive has ``image`` (names), ``data`` (all files) and ``offsets`` of each in it.

    Raises:
        ValueError: if it is something else.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            names, offsets, data = (archive[name] for name in ("image", "offsets", "data"))
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ValueError(f"{path} is not an archive of thumbnails: {error}") from error
    place = {str(name): i for i, name in enumerate(names)}

    def picture(name: str) -> np.ndarray | None:
        from PIL import Image  # of matplotlib

        if name not in place:
            return None
        i = place[name]
        with Image.open(io.BytesIO(data[offsets[i] : offsets[i + 1]].tobytes())) as image:
            return np.asarray(image.convert("RGB"))

    return picture


def _read_table(captions: Path, features: Path, each: int) -> dict[str, CaptionedSet]:
    lines = _lines(captions)
    rows: dict[str, list[int]] = {name: [] for name in _SETS}
    words: dict[str, list[list[str]]] = {name: [] for name in _SETS}
    names = []
    for number, line in enumerate(lines[1:]):
        name, _, rest = line.partition("\t")
        split, *given = rest.split("\t")
        names.append(name)
        if len(given) < each:
            raise ValueError(
                f"{captions}, line {number + 2}: {name} has {len(given)} captions, expected {each}"
            )
        if (kept := _SPLITS.get(split)) in rows:
            rows[kept].append(number)
            words[kept] += [caption_words(caption) for caption in given[:each]]
    array = _array(features)
    _check_count(array, len(names), features, captions)
    return {
        kept: CaptionedSet(
            np.asarray(array[rows[kept]]),
            words[kept],
            [names[i] for i in rows[kept]],
            f"{captions.parent.name}, {kept} set",
        )
        for kept in _SETS
    }


def _read_released(root: Path, arrays: dict[str, Path], each: int) -> dict[str, CaptionedSet]:
    sets = {}
    for name, path in arrays.items():
        array = _array(path)
        # Their captions are tokens in lower case already.
        words = [line.split() for line in _lines(root / f"{name}.txt")]
        if len(words) != each * len(array):
            raise ValueError(
                f"{root / f'{name}.txt'} has {len(words):,} captions and {path} {len(array):,} "
                f"images, expected {each} captions per image, {each * len(array):,}: a file is "
                "incomplete, or they are of different sets"
            )
        names = [f"{name} image {i}" for i in range(len(array))]
        sets[name] = CaptionedSet(array, words, names, f"{root.name}, {name} set")
    return sets


def _read_karpathy(
    table: Path, content: dict[str, Any], features: Path, each: int, use_restval: bool
) -> dict[str, CaptionedSet]:
    array = _array(features)
    images = content["images"]
    if array.shape[0] != len(images) == array.shape[-1]:
        array = array.T  # one column an image, as in vgg_feats.mat
    _check_count(array, len(images), features, table)
    rows: dict[str, list[int]] = {name: [] for name in _SETS}
    words: dict[str, list[list[str]]] = {name: [] for name in _SETS}
    names = []
    for number, image in enumerate(images):
        try:
            name, split = str(image.get("filename", number)), image["split"]
            sentences = [_tokens(sentence) for sentence in image["sentences"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{table}: image {number} must have a split and sentences with tokens or raw text, "
                f"and reading it gave {type(error).__name__}: {error}"
            ) from error
        names.append(name)
        kept = _SPLITS.get(split)
        if kept == "restval" and use_restval:
            kept = "train"
        if kept not in rows:
            continue
        if len(sentences) < each:
            raise ValueError(
                f"{table}: image {number} ({name}) has {len(sentences)} captions, expected {each}"
            )
        rows[kept].append(number)
        words[kept] += sentences[:each]
    return {
        kept: CaptionedSet(
            array[rows[kept]],
            words[kept],
            [names[i] for i in rows[kept]],
            f"{table.name}, {kept} set",
        )
        for kept in _SETS
    }


def _tokens(sentence: dict[str, Any]) -> list[str]:
    tokens = sentence["tokens"] if "tokens" in sentence else caption_words(sentence["raw"])
    # A token with white space in it could not stand in a vocabulary.
    return [word for token in tokens for word in token.split()]


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path, _MOST_BYTES))
    except (UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} is not JSON, or damaged: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        raise ValueError(f"{path} must hold a list of images under the key 'images'")
    return content


def _lines(path: Path) -> list[str]:
    try:
        text = read_regular(path, _MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8, but byte {error.start} is not") from None
    lines = text.replace("\r\n", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def _array(path: Path) -> np.ndarray:
    """A matrix of features, mapped from its file if that can be."""
    try:
        if path.suffix == ".mat":
            from scipy.io import loadmat

            content = {k: v for k, v in loadmat(path).items() if not k.startswith("__")}
            array = content["feats"] if "feats" in content else next(iter(content.values()))
        else:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, NotImplementedError, StopIteration) as error:
        raise ValueError(f"{path} cannot be read: {error}. The copy may be incomplete") from error
    if array.ndim != 2:
        raise ValueError(f"{path} must be a matrix (images, features), got {array.shape}")
    return array


def _check_count(array: np.ndarray, images: int, features: Path, captions: Path) -> None:
    if len(array) != images:
        raise ValueError(
            f"{features} has features of {len(array):,} images and {captions} captions of "
            f"{images:,}: they are of different sets, or one is incomplete"
        )


def _released_array(folder: Path, name: str) -> Path:
    """The file of a set; the released extraction script writes another name than is read there."""
    paths = [folder / f"{name}.npy", folder / f"coco_{name}.npy"]
    for path in paths:
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder} lacks {paths[0].name}: give the features of all three sets")


def _one_of(paths: Sequence[Path], wanted: str | None, where: Path) -> Path:
    """The path of that name, or the only one."""
    for path in paths:
        if wanted in (path.stem, path.name) or (wanted is None and len(paths) == 1):
            return path
    names = ", ".join(path.stem for path in paths) or "none"
    what = "no features" if wanted is None and not paths else f"no features {wanted!r}"
    if wanted is None and paths:
        what = "several features"
    raise FileNotFoundError(f"{where} has {what} (found: {names}): choose with --data.features")
