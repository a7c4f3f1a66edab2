"""Reading cards, hub ids and checkpoints: files checked and bounded, nothing unpickled.

Classes have short names in cards; one of a card's author has a dotted path.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import re
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError
from torch import Tensor

import ln_zoo.models
import ln_zoo.norms
from ln_zoo.models.base import ZooModule
from ln_zoo.norms import Norm
from ln_zoo.utils.checkpoints import check_whole
from ln_zoo.utils.class_paths import class_path
from ln_zoo.utils.errors import CardError, first_line
from ln_zoo.utils.files import check_checkpoint, open_regular
from ln_zoo.utils.names import nearest
from ln_zoo.zoo import catalog
from ln_zoo.zoo.catalog import Card


def _subclasses(room: Any, base: type[Any]) -> dict[str, type[Any]]:
    classes = {name: cls for name in room.__all__ if inspect.isclass(cls := getattr(room, name))}
    return {k: cls for k, cls in classes.items() if issubclass(cls, base) and cls is not base}


#: Classes of the zoo by name.
MODELS: dict[str, type[ZooModule]] = _subclasses(ln_zoo.models, ZooModule)
NORMS: dict[str, type[Norm]] = _subclasses(ln_zoo.norms, Norm)


def model_class(name: str) -> type[ZooModule]:
    """The model of this short name."""
    return MODELS[full_path(name, MODELS, "model").rpartition(".")[2]]


def is_own(name: str) -> bool:
    """Whether a card's class is the author's own, which has a dotted path."""
    return "." in name


def model_name(cls: type[Any]) -> str:
    """Name of a model's class in cards: short for ours, dotted for a class of the user's own."""
    if MODELS.get(cls.__name__) is cls:
        return cls.__name__
    path = class_path(cls)
    if not issubclass(cls, ZooModule):
        raise CardError(
            f"{path} is not an ln_zoo.models.ZooModule, which cards need: derive the model from "
            "it, as docs/how-to/own_data_and_model.md says"
        )
    return path


def check_stored(model: ZooModule) -> None:
    """Checks that the arguments which make a model again are stored."""
    for name, parameter in inspect.signature(type(model)).parameters.items():
        optional = parameter.default is not parameter.empty
        optional |= parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name not in model.hparams and not (optional and name != "norm"):
            raise CardError(
                f"{type(model).__name__} does not store its argument {name!r}, so the model could "
                "not be rebuilt: call self.save_hyperparameters() and then "
                "self.resolve_hyperparameters(norm) in its __init__"
            )


def encode_norm(config: dict[str, Any]) -> dict[str, Any]:
    """A norm in the form of cards: short name and arguments.

    Example:
        >>> encode_norm({"class_path": "ln_zoo.norms.LayerNorm", "init_args": {"eps": 0.001}})
        {'class': 'LayerNorm', 'init_args': {'eps': 0.001}}
    """
    name = config["class_path"].removeprefix("ln_zoo.norms.")
    return {
        "class": name if name in NORMS else config["class_path"],
        "init_args": dict(config.get("init_args", {})),
    }


def full_path(name: str, classes: Mapping[str, type[Any]], what: str) -> str:
    """The path of one of our classes; of a class of the card's author, its name is the path."""
    if name in classes:
        return f"ln_zoo.{what}s.{name}"
    if is_own(name):
        return name
    raise CardError(
        f"unknown {what} {name!r}: it is not one of ln_zoo's; known are "
        f"{', '.join(sorted(classes))}{nearest(name, classes)}"
    )


#: Environment variable: the account with the weights that the wheel leaves out.
ACCOUNT_VARIABLE = "LN_ZOO_HUB"


@dataclass(frozen=True)
class HubOptions:
    """Options of `huggingface_hub.snapshot_download`; see `ln_zoo.load`."""

    cache_dir: str | Path | None = None
    token: str | bool | None = None
    local_files_only: bool = False
    force_download: bool = False


DEFAULTS = HubOptions()


def download(repo_id: str, *, revision: str | None = None, options: HubOptions = DEFAULTS) -> Path:
    """Download a card folder from the hub, or find it in the cache, unchecked.

    With ``HF_HUB_OFFLINE=1`` only the cache is used.
    """
    fetch = functools.partial(snapshot_download, repo_id, **asdict(options))
    try:
        folder = Path(fetch(revision=revision, allow_patterns=[catalog.CONFIG]))
        if not (folder / catalog.CONFIG).is_file():
            raise CardError(f"{repo_id} on the hub is not an ln_zoo model: no {catalog.CONFIG}")
        # The folder is named after its commit: both steps then refer to the same files.
        names = [*catalog.CARD_FILES, *catalog.read_config(folder).files]
        return Path(fetch(revision=folder.name, allow_patterns=names))
    except (OSError, HFValidationError) as error:
        # The client's own errors, of the network and of its cache, are all OSErrors.
        why = first_line(error)
        if constants.HF_HUB_OFFLINE or options.local_files_only:
            given = "local_files_only" if options.local_files_only else "HF_HUB_OFFLINE"
            why = f"{given} is set and the cache holds no copy"
        at = f" at revision {revision!r}" if revision else ""
        raise CardError(
            f"{repo_id!r} is not a folder here, and cannot be downloaded from the hub{at}: {why}. "
            "Download it once with a network connection, or give the path of its folder"
        ) from error


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
#: Bytes of names and sizes of tensors in untrusted weights; ours have at most 32 tensors.
_MAX_HEADER = 4_000_000
#: Enough of a sha256 to tell versions apart.
_DIGEST = re.compile("[0-9a-f]{8,64}")
#: Errors of torch for content that weights-only loading rejects.
_REFUSED = (
    re.compile(r"GLOBAL (\S+)"),
    re.compile(r"load (\S+) whose module \S+ is blocked"),
    re.compile(r"instantiate class (\S+)"),
)
#: Within the folder of a run.
_LAST = "checkpoints/last.ckpt"


def checkpoint_in(text: str) -> str | None:
    """The checkpoint of a path: a .ckpt file, or the last one of a run's folder; or None."""
    last = Path(text) / _LAST
    return str(last) if last.is_file() else text if text.endswith(".ckpt") else None


# Checkpoints


def read_checkpoint(path: str) -> dict[str, Any]:
    """Reads a Lightning checkpoint; only plain values and tensors are unpickled."""
    check_checkpoint(path)
    check_whole(path)
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    # A truncated archive fails in the system's seek, with an error that names no file.
    except (pickle.UnpicklingError, EOFError, OSError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a readable Lightning checkpoint (damaged, cut short, or written by "
            f"another program): {_why_unreadable(error)}"
        ) from error
    state = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        holds = ", ".join(map(str, checkpoint)) if isinstance(checkpoint, dict) else ""
        raise ValueError(
            f"{path} is not a readable Lightning checkpoint (no state_dict of tensors): it holds "
            f"{textwrap.shorten(holds, 80) or f'a {type(checkpoint).__name__}'}"
        )
    return checkpoint


def _why_unreadable(error: Exception) -> str:
    """Why torch could not read a checkpoint, in a few words.

    torch's own account of what it refuses to run recommends to run it (``weights_only=False``).
    """
    text = str(error)
    for pattern in _REFUSED:
        if match := pattern.search(text):
            name = match[1].rstrip(".,")
            return (
                f"it asks for {name}, and only tensors and plain values are read: others can run "
                "code"
            )
    if text.strip() and isinstance(error, OSError | RuntimeError):
        return first_line(error)
    return "it holds something other than a checkpoint"


# Cards


def find_card(
    name_or_path: str | os.PathLike[str],
    revision: str | None = None,
    options: HubOptions = DEFAULTS,
) -> Card:
    """The card of a name, a folder or a hub id; arguments as for `load`."""
    text = os.fspath(name_or_path)
    path = Path(text).expanduser()
    is_name = isinstance(name_or_path, str) and not set(text) & {os.sep, "/"}
    if isinstance(name_or_path, str) and (is_name or not path.is_dir()):
        text, at, asked = text.partition("@")
        if at and revision not in (None, asked):
            raise CardError(
                f"{name_or_path} names version {asked!r}, but revision={revision!r}: give only one"
            )
        revision = asked if at else revision
    if revision == "":
        raise CardError(f"{name_or_path}: the revision is empty: leave it out for any")
    if is_name or path.is_dir():
        return _of_version(catalog.find_all(text) if is_name else [path], revision)
    if isinstance(name_or_path, str) and _HUB_ID.fullmatch(text) and text[0] not in ".~":
        return catalog.read_card(download(text, revision=revision, options=options))
    raise CardError(f"there is no card folder {text!r}")


def _of_version(folders: list[Path], revision: str | None) -> Card:
    """The card of the first folder, or of the first with the version."""
    if revision is None:
        return catalog.read_card(folders[0])
    cards = [catalog.read_card(folder) for folder in folders]
    by_digest = _DIGEST.fullmatch(revision)
    for card in cards:
        if revision == card.version or (by_digest and card.digest.startswith(revision)):
            return card
    there = ", ".join(
        f"{card.folder} ({card.version and f'version {card.version}, '}sha256 {card.digest[:8]}...)"
        for card in cards
    )
    raise CardError(
        f"{cards[0].name} has no version {revision!r} on this machine: give one that a card states"
        f", or 8 or more digits of the sha256 of its weights; there are {there}"
    )


def read_weights(card: Card, options: HubOptions = DEFAULTS) -> dict[str, Tensor]:
    """The weights of a card, with the size and sha256 of the local card, also if downloaded."""
    card = with_weights(card, options)
    check_header(card.path(catalog.WEIGHTS))
    try:
        return safetensors.torch.load(catalog.verified_bytes(card, catalog.WEIGHTS))
    except safetensors.SafetensorError as error:
        raise CardError(
            f"{card.path(catalog.WEIGHTS)} is not a safetensors file: {error}"
        ) from error


def with_weights(card: Card, options: HubOptions = DEFAULTS) -> Card:
    """The card with the folder of its weights, downloaded if the wheel leaves them out."""
    if card.path(catalog.WEIGHTS).is_file() or card.folder.parent not in catalog.SHIPPED:
        return card
    size = card.config.files[catalog.WEIGHTS].size
    account = os.environ.get(ACCOUNT_VARIABLE)
    if not account:
        raise CardError(
            f"the weights of {card.name} ({size / 1e6:.1f} MB) do not come with the installed "
            f"package: put its card folder into one that {catalog.MODELS_VARIABLE} names, or set "
            f"{ACCOUNT_VARIABLE} to a hub account that has {card.name}"
        )
    folder = download(f"{account}/{card.name}", options=options)
    return replace(card, weights_folder=folder)


def vocabulary_of(card: Card, file: str) -> list[str]:
    """The vocabulary listed in the card; other paths are rejected."""
    if file not in card.config.files:
        raise CardError(
            f"{card.folder / catalog.CONFIG}: the vocabulary {file!r} is not among the card's files"
        )
    try:
        return catalog.verified_bytes(card, file).decode().splitlines()
    except UnicodeDecodeError as error:
        raise CardError(
            f"{card.folder / file} must be text in UTF-8, but byte {error.start:,} is not"
        ) from None


def check_header(path: Path) -> None:
    """Raise CardError if a safetensors file lists more than any model has, before it is read."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER:
            raise CardError(f"{path} has a header of {size:,} bytes, more than any model needs")
