"""The published models on this machine and their cards.

Standard library only: the command line lists models and prints cards without importing torch.

A card is a folder: ``config.json`` (what the model is), ``results.json`` (what was measured, and
how), ``README.md`` (both for readers) and ``model.safetensors``. Folders are looked for in
``$LN_ZOO_MODELS``, then in the installed package, then next to the package in a source checkout.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from ln_zoo.utils import schema
from ln_zoo.utils.errors import CardError
from ln_zoo.utils.files import read_bounded
from ln_zoo.utils.schema import Must, Record
from ln_zoo.utils.training_runs import TrainingRun, read_run, read_runs

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")

#: Version of the layout of ``config.json`` and ``results.json`` that this library reads and writes.
FORMAT_VERSION = 1
CONFIG = "config.json"
RESULTS = "results.json"
README = "README.md"
WEIGHTS = "model.safetensors"
#: The vocabulary of a model that reads text, one word per line.
VOCABULARY = "vocabulary.txt"
#: Every card folder has these; further files are listed in ``config.json``.
CARD_FILES = (README, CONFIG, RESULTS, WEIGHTS)
#: Environment variable: a folder of card folders, searched first.
MODELS_VARIABLE = "LN_ZOO_MODELS"
#: Valid names of models.
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}")

#: Upper bounds for untrusted files, in bytes and levels of nesting; ours have 6,000 and 5.
_MOST_TEXT = 10_000_000
_MOST_LEVELS = 50
_NESTED = (dict, list)

_PACKAGE = Path(__file__).resolve().parents[1]
#: Folders of cards in an installed package, or next to the package of a checkout.
SHIPPED = (_PACKAGE / "model_cards", _PACKAGE.parent / "model_cards")


@dataclass(frozen=True)
class File(Record):
    """A file of a card."""

    sha256: str
    size: int


_Value = Annotated[float, Must(lambda value: abs(value) < 1e300, "in the range of floats")]


@dataclass(frozen=True)
class Metric(Record):
    """A measured value, in the unit in which tests log it."""

    name: str
    value: _Value
    unit: str
    dataset: str
    split: str


def is_plain_file_name(name: str) -> bool:
    """Whether a listed name stays inside its folder and has no wildcards."""
    parts = PurePosixPath(name).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts and not set(name) & set("\\*?[]:")


def _are_plain(files: dict[str, File]) -> bool:
    return WEIGHTS in files and all(map(is_plain_file_name, files))


def _has_plain_norm(init_args: dict[str, Any]) -> bool:
    norm = init_args.get("norm")
    kinds = {"class": str, "init_args": dict}
    return norm is None or (
        isinstance(norm, dict) and {key: type(value) for key, value in norm.items()} == kinds
    )


_Name = Annotated[str, Must(NAME.fullmatch, "1 to 100 letters, digits, '.', '_' and '-'")]
_Arguments = Annotated[dict[str, Any], Must(_has_plain_norm, "with norm as class and init_args")]
_Size = Annotated[int, Must(lambda number: 0 <= number < 2**63, "in the range of sizes")]
_Files = Annotated[dict[str, File], Must(_are_plain, f"plain file names, with {WEIGHTS}")]


@dataclass(frozen=True)
class Config(Record):
    """Content of ``config.json``: what the model is."""

    format_version: int  #: `FORMAT_VERSION` of the writer
    name: _Name
    library: dict[str, Any]  #: name and version of the writer
    model: str  #: class name in `ln_zoo.models`, or the dotted path of a user's class
    #: The norm as ``class`` (a name or dotted path) and ``init_args``.
    init_args: _Arguments
    preprocessing: dict[str, Any]  #: of the data in training
    parameters: _Size  #: their number
    files: _Files  #: all files but README and data files, by name


@dataclass(frozen=True)
class Results(Record):
    """Content of ``results.json``: what was measured."""

    format_version: int  #: `FORMAT_VERSION` of the writer
    metrics: list[Metric]  #: the main one first
    evaluation: dict[str, Any]  #: command, seed, hardware, versions and the like of the test
    training: dict[str, Any]  #: length and settings of the last run, and ``earlier`` runs
    size: dict[str, Any]  #: facts that decide whether numbers are comparable
    data: dict[str, Any]  #: facts of the data, ``dataset`` among them
    card: dict[str, Any]  #: facts of the author; see `ln_zoo.zoo.Facts`


@dataclass(frozen=True)
class Card:
    """The two data files of a card folder, validated."""

    folder: Path  #: of the card
    config: Config  #: ``config.json``
    results: Results  #: ``results.json``
    #: Folder of the weights if they were downloaded separately.
    weights_folder: Path | None = field(default=None, compare=False)

    def path(self, name: str) -> Path:
        """Path of one of the card's files."""
        elsewhere = self.weights_folder if name == WEIGHTS else None
        return (elsewhere or self.folder) / name

    @property
    def name(self) -> str:
        """Name of the model, such as ``mlp.layernorm``."""
        return self.config.name

    @property
    def model(self) -> str:
        """Class name in `ln_zoo.models`, or the dotted path of a user's class."""
        return self.config.model

    @property
    def norm(self) -> str:
        """Class name of the norm, or a dotted path like that of the model; "" without a norm."""
        norm = self.config.init_args.get("norm")
        return str(norm["class"]) if norm else ""

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Preprocessing of the data in training."""
        return dict(self.config.preprocessing)

    def preprocess(self, images: Any, seed: int = 0) -> Tensor:
        """Images with the size, range and binarization of the training data.

        Their content is not checked: MNIST has centred, light strokes on a dark ground.

        Args:
            images: a PIL image, an array or tensor (C, H, W) or (N, C, H, W), for grey images also
                (H, W) or (N, H, W), or a list of them. Integers are levels of brightness up to the
                training data's scale, floats are fractions of it, bool is black and white. PIL
                images have levels from 0 to 255, and become grey if the model has one channel.
            seed: for models of binary images: each pixel is 1 with its brightness as probability,
                as in their training data.

        Returns:
            float32 (N, C, H, W) in [0, 1].

        Raises:
            CardError: if the model takes no images.
            TypeError: if an argument is not an image.
            ValueError: if an image has another size, transparency, or values that training did not
                have (negative, above the scale, NaN, divided twice).

        Example:
            >>> import ln_zoo
            >>> import numpy as np
            >>> model = ln_zoo.load("mlp.layernorm-digits")
            >>> image = np.zeros((8, 8), np.uint8)
            >>> image[1:7, 4] = 16  # a vertical stroke; levels go to 16 in these data
            >>> model(model.card.preprocess(image)).argmax(-1)
            tensor([1])
        """
        from ln_zoo.utils.preprocessing import preprocess  # lists and cards need no torch

        return preprocess(self.preprocessing, images, seed)

    @property
    def training_runs(self) -> tuple[TrainingRun, ...]:
        """The training runs behind the weights, oldest first; see `ln_zoo.utils.training_runs`."""
        data, training = self.results.data, self.results.training
        of_data = {key: data.get(key) for key in ("dataset", "train_size")}
        last = read_run({**of_data, **training, "weights": f"{self.name}, sha256 {self.digest}"})
        return (*read_runs(training.get("earlier", [])), last)

    @property
    def version(self) -> str:
        """The author's name for this version of the weights; empty by default."""
        return str(self.results.card.get("version", ""))

    @property
    def digest(self) -> str:
        """The sha256 of the weights, 64 hexadecimal digits."""
        return self.config.files[WEIGHTS].sha256

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.config.parameters

    @property
    def metrics(self) -> list[Metric]:
        """Measured metrics, the main one first; empty if nothing was measured."""
        return list(self.results.metrics)

    @property
    def datasets(self) -> list[str]:
        """Names of the data sets on which metrics were measured."""
        return sorted({metric.dataset for metric in self.metrics})


# Reading card folders


def read_card(folder: str | os.PathLike[str]) -> Card:
    """Read and validate ``config.json`` and ``results.json``; weights are not touched."""
    path = Path(folder)
    if not path.is_dir():
        raise CardError(f"there is no card folder {str(path)!r}")
    return Card(path, read_config(path), _read_as(Results, path / RESULTS))


def read_config(folder: Path) -> Config:
    """Read and validate the ``config.json`` of a folder."""
    return _read_as(Config, folder / CONFIG)


def verified_bytes(card: Card, name: str) -> bytes:
    """Content of one of the card's listed files, after its size and sha256 were checked."""
    path = card.path(name)
    expected = card.config.files[name]
    remedy = (
        f"the file is damaged or belongs to another card: fetch {path.parent} again, "
        "and do not use it"
    )
    if not path.is_file():
        raise CardError(f"{path} is missing though {CONFIG} lists it: fetch {path.parent} again")
    size = path.stat().st_size
    if size != expected.size:
        raise CardError(f"{path} has {size} bytes, {CONFIG} lists {expected.size}: {remedy}")
    try:
        data = read_bounded(path, size)
    except OSError as error:
        raise CardError(f"{path} cannot be read: {error}") from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != expected.sha256:
        raise CardError(f"{path} has sha256 {digest}, {CONFIG} lists {expected.sha256}: {remedy}")
    return data


def _read_as(kind: type[_T], path: Path) -> _T:
    value = _read_json(path)
    version = value.get("format_version") if isinstance(value, dict) else None
    if type(version) is int and not 1 <= version <= FORMAT_VERSION:
        raise CardError(
            f"{path}: format_version is {version!r:.80}, this ln_zoo reads 1 to {FORMAT_VERSION}: "
            "upgrade ln_zoo"
        )
    return schema.read(kind, value, str(path))


def _read_json(path: Path) -> Any:
    """The content of an untrusted JSON file: bounded, with unique keys and finite numbers."""
    try:
        text = read_text(path)
        value = json.loads(
            text, object_pairs_hook=_once, parse_constant=_finite, parse_float=_finite
        )
    except FileNotFoundError:
        raise CardError(f"{path} is missing: {path.parent} is not a complete card folder") from None
    except (OSError, ValueError) as error:
        raise CardError(f"{path} cannot be read as JSON: {error}") from error
    except RecursionError:
        raise CardError(f"{path} is nested in too many levels: it is not a card's") from None
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        inner = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, _NESTED)]
        level = [value for values in inner for value in values]
    if level:
        raise CardError(f"{path} is nested in over {_MOST_LEVELS} levels: it is not a card's")
    return value


def read_text(path: Path) -> str:
    """A text file of a card; OSError or UnicodeDecodeError if it is not a text of 10 MB at most."""
    return read_bounded(path, _MOST_TEXT).decode("utf-8").replace("\r\n", "\n")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(found := dict(pairs)) < len(keys):
        twice = max(keys, key=keys.count)
        raise ValueError(f"the key {twice!r:.80} appears twice")
    return found


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number:.80} is not a finite number")
    return value


# Finding card folders


def card_folders() -> dict[str, Path]:
    """Folders of the published models on this machine by name, sorted; the first of each name."""
    return {name: folders[0] for name, folders in sorted(_all_folders().items())}


def _all_folders() -> dict[str, list[Path]]:
    """All folders of each name, in the order of the places."""
    found: dict[str, list[Path]] = {}
    for root in _roots():
        try:
            paths = list(root.iterdir())
        except OSError as error:
            raise CardError(f"the folder of cards {root} cannot be read: {error}") from error
        for path in paths:
            # A leading dot marks a card that is being written.
            if not path.name.startswith(".") and os.path.lexists(path / CONFIG):
                found.setdefault(path.name, []).append(path)
    return found


def find(name: str) -> Path:
    """Folder of the published model of this name."""
    return find_all(name)[0]


def find_all(name: str) -> list[Path]:
    """Folders of the published models of this name, such as several versions of its weights."""
    folders = dict(sorted(_all_folders().items()))
    if name in folders:
        return folders[name]
    if not folders:
        raise CardError(
            f"no model {name!r}: no published models were found on this machine; set "
            f"{MODELS_VARIABLE} to a folder of card folders, or give a folder (./{name}) or a hub "
            "id (user/repo)"
        )
    near = difflib.get_close_matches(name, folders, n=3, cutoff=0.5)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    here = f"for the folder of that name here write ./{name}; " if Path(name).is_dir() else ""
    raise CardError(f"no model {name!r}: {guess}{here}there are {', '.join(folders)}")


def _roots() -> list[Path]:
    roots = list(SHIPPED)
    if chosen := os.environ.get(MODELS_VARIABLE):
        first = Path(chosen).expanduser()
        if not first.is_dir():
            raise CardError(f"{MODELS_VARIABLE} is set to {chosen!r}, which is not a folder")
        roots.insert(0, first)
    return [root for root in roots if root.is_dir()]


def folder(name: str) -> Path:
    """The folder at a path (with a separator), or the folder of a published model."""
    return Path(name) if os.sep in name else find(name)


def list_models(
    filter: str = "*",
    *,
    model: str | None = None,
    norm: str | None = None,
    dataset: str | None = None,
) -> list[str]:
    """Names of the published models on this machine that fit all filters, sorted.

    Args:
        filter: pattern of the name, with ``*``, ``?`` and ``[...]``.
        model: class name of the model in any case, such as ``MLPClassifier``.
        norm: class name of the norm in any case, such as ``LayerNorm``.
        dataset: name of a data set of the results in any case, such as ``MNIST``.

    Raises:
        CardError: if a card whose content a filter needs is damaged.

    Example:
        >>> list_models("mlp.*", norm="no such norm")
        []
    """
    names, broken = fitting(filter, model, norm, dataset)
    for error in broken.values():
        raise error
    return names


def fitting(
    filter: str, model: str | None, norm: str | None, dataset: str | None
) -> tuple[list[str], dict[str, CardError]]:
    """Names that match all filters, and errors of damaged cards by name."""

    def fits(card: Card) -> bool:
        pairs = (model, [card.model]), (norm, [card.norm]), (dataset, card.datasets)
        return all(text is None or text.lower() in map(str.lower, known) for text, known in pairs)

    names: list[str] = []
    broken: dict[str, CardError] = {}
    for name, folder in card_folders().items():
        if not fnmatch.fnmatchcase(name, filter):
            continue
        try:
            # Without further filters a card is not read.
            if (model, norm, dataset) == (None, None, None) or fits(read_card(folder)):
                names.append(name)
        except CardError as error:
            broken[name] = error
    return names, broken


def describe(name: str) -> Card:
    """The card of a published model on this machine, without its weights."""
    return read_card(find(name))
