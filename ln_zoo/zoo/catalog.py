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
from typing import TYPE_CHECKING, Any, TypeVar

from ln_zoo.files import read_bounded
from ln_zoo.training_runs import Run, read_run, read_runs
from ln_zoo.zoo import schema
from ln_zoo.zoo.errors import CardError
from ln_zoo.zoo.schema import Record

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
# In an installed package, or next to the package of a checkout.
_SHIPPED = (_PACKAGE / "model_cards", _PACKAGE.parent / "model_cards")


@dataclass(frozen=True)
class File(Record):
    """A file of a card."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Metric(Record):
    """A measured value, in the unit in which tests log it."""

    name: str
    value: float
    unit: str
    dataset: str
    split: str


@dataclass(frozen=True)
class Config(Record):
    """Content of ``config.json``: what the model is.

    Attributes:
        format_version: `FORMAT_VERSION` of the writer.
        name: of the model.
        library: name and version of the writer.
        model: class name in `ln_zoo.models`, or the dotted path of a user's class.
        init_args: arguments; the norm as ``class`` (a name or dotted path) and ``init_args``.
        preprocessing: what was done to the data before the model read them.
        parameters: their number.
        files: all files but README and data files, by name.
    """

    format_version: int
    name: str
    library: dict[str, Any]
    model: str
    init_args: dict[str, Any]
    preprocessing: dict[str, Any]
    parameters: int
    files: dict[str, File]


@dataclass(frozen=True)
class Results(Record):
    """Content of ``results.json``: what was measured.

    Attributes:
        format_version: `FORMAT_VERSION` of the writer.
        metrics: the main one first.
        evaluation: command, seed, hardware, versions and the like of the test.
        training: length and settings of the last training run, and ``earlier`` runs.
        size: facts that decide whether numbers are comparable.
        data: facts of the data, ``dataset`` among them.
        card: what the author states; see `ln_zoo.zoo.cards.Facts`.
    """

    format_version: int
    metrics: list[Metric]
    evaluation: dict[str, Any]
    training: dict[str, Any]
    size: dict[str, Any]
    data: dict[str, Any]
    card: dict[str, Any]


@dataclass(frozen=True)
class Card:
    """The two data files of a card folder, validated.

    Attributes:
        folder: of the card.
        config: ``config.json``.
        results: ``results.json``.
        weights_folder: folder of the weights if they were downloaded separately.
    """

    folder: Path
    config: Config
    results: Results
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
        """Class name of the model in `ln_zoo.models`, or the dotted path of a user's class."""
        return self.config.model

    @property
    def norm(self) -> str:
        """Class name of the norm, or the dotted path of a user's class; empty without a norm."""
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
            images: a PIL image, a NumPy array, a tensor, or a list of them; an array is (C, H, W)
                or (N, C, H, W), of grey images also (H, W) or (N, H, W). Integers are levels of
                brightness up to the training data's scale, floats are fractions of it, bool is
                black and white. PIL images have levels from 0 to 255, and become grey if the model
                has one channel.
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
        # Imported here: lists and cards are read without torch.
        from ln_zoo.zoo.preprocessing import preprocess

        return preprocess(self.preprocessing, images, seed)

    @property
    def training_runs(self) -> tuple[Run, ...]:
        """The runs of training behind the weights, oldest first; see `ln_zoo.training_runs`."""
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
    """Reads and checks ``config.json`` and ``results.json``; weights are not touched.

    Raises:
        CardError: if the folder or a file is missing, is not JSON, has unknown or missing keys, or
            was written by a newer version of the library.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CardError(f"there is no card folder {str(path)!r}")
    config = _read_config(path / CONFIG)
    results = _read_as(Results, path / RESULTS)
    for metric in results.metrics:
        if abs(metric.value) > 1e300:  # also integers beyond any float
            raise CardError(f"{path / RESULTS}: metrics: {metric.name!r:.80} is out of range")
    return Card(path, config, results)


def listed_files(folder: Path) -> list[str]:
    """Names of the files that the ``config.json`` of a folder lists, checked to be plain names."""
    return sorted(_read_config(folder / CONFIG).files)


def verified_bytes(card: Card, name: str) -> bytes:
    """Content of one of the card's listed files, after its size and sha256 were found right."""
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


def is_plain_file_name(name: str) -> bool:
    """Whether a listed name stays inside its folder and has no wildcards."""
    parts = PurePosixPath(name).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts and not set(name) & set("\\*?[]:")


def _read_config(path: Path) -> Config:
    config = _read_as(Config, path)
    if not NAME.fullmatch(config.name):
        raise CardError(
            f"{path}: invalid model name {config.name!r:.80}: letters, digits, '.', '_' and '-' "
            "only, 100 at most"
        )
    if not 0 <= config.parameters < 2**63:
        raise CardError(f"{path}: parameters: {config.parameters!r:.80} is out of range")
    for name in config.files:
        if not is_plain_file_name(name):
            raise CardError(f"{path}: files: {name!r} is not a plain relative file name")
    if WEIGHTS not in config.files:
        raise CardError(f"{path}: files: {WEIGHTS!r} is missing")
    if (norm := config.init_args.get("norm")) is not None:
        kinds = {"class": str, "init_args": dict}
        if not isinstance(norm, dict) or {k: type(v) for k, v in norm.items()} != kinds:
            raise CardError(
                f"{path}: init_args, norm: expected class and init_args, got {norm!r:.200}"
            )
    return config


def _read_as(kind: type[_T], path: Path) -> _T:
    """A JSON file as a dataclass of this format or an older one."""
    value = _read_json(path)
    version = value.get("format_version") if isinstance(value, dict) else None
    if type(version) is int and not 1 <= version <= FORMAT_VERSION:
        raise CardError(
            f"{path}: format_version is {version!r:.80}, this ln_zoo reads 1 to {FORMAT_VERSION}: "
            "upgrade ln_zoo"
        )
    try:
        return schema.read(kind, value, str(path))
    except ValueError as error:
        raise CardError(str(error)) from None


def _read_json(path: Path) -> Any:
    """The content of an untrusted JSON file.

    Raises:
        CardError: if it is missing, no regular file, longer than 10 MB, no JSON, nested in more
            than 50 levels, or has a key twice or a number that is not finite.
    """
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
    """A text file of a card.

    Raises:
        OSError: if it is missing, no regular file, or longer than 10 MB.
        UnicodeDecodeError: if it is not UTF-8.
    """
    content = read_bounded(path, _MOST_TEXT)
    # As text files are read: a break of lines is "\n".
    return content.decode("utf-8").replace("\r\n", "\n")


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
    """Folders of the published models on this machine by name, sorted; the first of each name.

    Raises:
        CardError: if ``$LN_ZOO_MODELS`` is set to something that is not a folder or cannot be read.
    """
    return {name: folders[0] for name, folders in sorted(_all_folders().items())}


def _all_folders() -> dict[str, list[Path]]:
    """Every folder of each name, in the order in which places are searched."""
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


def is_shipped(card: Card) -> bool:
    """Whether a card came with the package, whose wheel leaves the weights of large models out."""
    return card.folder.parent in _SHIPPED


def _roots() -> list[Path]:
    roots = list(_SHIPPED)
    chosen = os.environ.get(MODELS_VARIABLE)
    if chosen:
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
        model: class name of the model, such as ``MLPClassifier``, in any case.
        norm: class name of the norm, such as ``LayerNorm``, in any case.
        dataset: name of a data set of the results, such as ``MNIST``, in any case.

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
    filters = (model, norm, dataset)
    names: list[str] = []
    broken: dict[str, CardError] = {}
    for name, folder in card_folders().items():
        if not fnmatch.fnmatchcase(name, filter):
            continue
        try:
            # Without further filters a card is not read.
            if filters == (None, None, None) or _fits(read_card(folder), *filters):
                names.append(name)
        except CardError as error:
            broken[name] = error
    return names, broken


def _fits(card: Card, model: str | None, norm: str | None, dataset: str | None) -> bool:
    pairs = (model, [card.model]), (norm, [card.norm]), (dataset, card.datasets)
    return all(
        wanted is None or wanted.lower() in map(str.lower, values) for wanted, values in pairs
    )


def describe(name: str) -> Card:
    """The card of a published model on this machine, without its weights.

    Raises:
        CardError: for an unknown name or a damaged card.
    """
    return read_card(find(name))
