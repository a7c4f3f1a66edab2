"""Published models by name, by folder or by hub id, checked before anything is read from them."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ln_zoo.models.base import ZooModule
from ln_zoo.norms import Norm
from ln_zoo.zoo import catalog, hub, registry
from ln_zoo.zoo.catalog import Card, CardError

#: Of the weights of a card. The largest of ours has 32.
_MOST_TENSORS = 10_000
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
#: Enough of a sha256 to tell versions apart.
_DIGEST = re.compile("[0-9a-f]{8,64}")


def load(
    name_or_path: str | os.PathLike[str],
    *,
    num_classes: int | None = None,
    norm: Norm | None = None,
    model: type[ZooModule] | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
) -> ZooModule:
    """A published model with its weights, in evaluation mode, on the CPU, in float32.

    Nothing is unpickled and no class is imported because a file names it: the weights are
    safetensors, whose size and sha256 are checked first, and classes are looked up among our own.
    No more memory is taken than the weights need: the model is built on the meta device first.

    Args:
        name_or_path: a name from `ln_zoo.list_models`; a card folder (a path with a separator, as
            in ``./mlp.layernorm``); or a hub id ``user/repo``. A folder goes before a hub id.
            A name or hub id may end in ``@revision``, as in ``mlp.layernorm@b93f8b7e``.
        num_classes: of a classifier for other classes: its last layer is new, with as many outputs,
            and the others keep their weights. The returned module's ``new_weights`` names what
            is new, and a log line says so. Default: the card's, with its weights.
        norm: the normalisation to use in place of the one in the card. Needed for a model whose
            norm is not ln_zoo's own; its parameters must be those of the weights.
        model: class to use in place of the one in the card. Needed for a model whose class is not
            ln_zoo's own; it must take the card's arguments and have the weights' parameters.
        revision: which version of the weights. On the hub: branch, tag or commit; default ``main``.
            On this machine: the version that the card states, or the first 8 to 64 digits of the
            sha256 of its weights; default: any, the first found. A commit and a sha256 always mean
            the very same weights.
        cache_dir: where hub files are kept; default: the hub's own cache.

    Returns:
        The module. ``module.card`` is its `Card`: preprocessing, results, configuration.

    Raises:
        CardError: for an unknown name (it lists the nearest), a missing, damaged or foreign file,
            an unknown class or argument, a revision that is not there, ``num_classes`` for a model
            without a replaceable head, or weights that do not fit.
        ValueError: for fewer classes than 1.

    Example:
        >>> model = load("mlp.layernorm-digits", num_classes=3)
        >>> model.new_weights
        ('network.5.weight', 'network.5.bias')
        >>> load("no-such-model")
        Traceback (most recent call last):
            ...
        ln_zoo.zoo.catalog.CardError: no model 'no-such-model': ...
    """
    card = find_card(name_or_path, revision, cache_dir)
    for name in card.config["files"]:
        if name != catalog.WEIGHTS:
            catalog.verified_bytes(card, name)
    card = with_weights(card, cache_dir)
    state = read_weights(card)
    # A model is built with random weights first: that must not move the user's random numbers.
    with torch.random.fork_rng(devices=[]):
        _check_size(card, state, norm, model)
        built = build(card, norm, model)
        _fill(built, state, card, assign=False)
        if num_classes is not None:
            built = _with_head(built, card, num_classes)
    # Not by attribute: torch's stubs admit tensors and modules only.
    built.__dict__["card"] = card
    built.training_runs = card.training_runs
    return built.eval()


def read_weights(card: Card) -> dict[str, Tensor]:
    """The weights of a card by name, their size and sha256 checked.

    Size and sha256 are those of the card here, wherever the weights come from.

    Raises:
        CardError: if they are missing, damaged or others.
    """
    card = with_weights(card)
    try:
        return safetensors.torch.load(catalog.verified_bytes(card, catalog.WEIGHTS))
    except safetensors.SafetensorError as error:
        raise CardError(
            f"{card.path(catalog.WEIGHTS)} is not a safetensors file: {error}"
        ) from error


def with_weights(card: Card, cache_dir: str | Path | None = None) -> Card:
    """The card with the place of its weights; those that the wheel leaves out are fetched.

    Args:
        card: of a model; nothing is done if it has its weights, or their place.
        cache_dir: where hub files are kept; default: the hub's own cache.

    Raises:
        CardError: if they are to be fetched and cannot be.
    """
    if card.path(catalog.WEIGHTS).is_file() or not catalog.is_shipped(card):
        return card
    size = card.config["files"][catalog.WEIGHTS]["size"]
    account = os.environ.get(hub.ACCOUNT_VARIABLE)
    if not account:
        raise CardError(
            f"the weights of {card.name} ({size / 1e6:.1f} MB) do not come with the installed "
            f"package: put its card folder into one that {catalog.MODELS_VARIABLE} names, or set "
            f"{hub.ACCOUNT_VARIABLE} to a hub account that has {card.name}"
        )
    folder = hub.download(f"{account}/{card.name}", cache_dir=cache_dir)
    return replace(card, weights_folder=folder)


def _with_head(trained: ZooModule, card: Card, num_classes: int) -> ZooModule:
    """The model with a new head of so many classes; all other weights are the trained ones."""
    if "num_classes" not in trained.hparams or getattr(trained, "head", None) is None:
        raise CardError(
            f"num_classes={num_classes} is for classifiers of images; {card.name} is a "
            f"{type(trained).__name__}, which has no head to replace"
        )
    arguments = {key: value for key, value in trained.hparams.items() if not key.startswith("_")}
    model = type(trained)(**arguments | {"num_classes": num_classes})
    head = head_weights(model)
    below = {k: v for k, v in trained.state_dict().items() if k not in head}
    model.load_state_dict(below, strict=False)
    model.new_weights = head
    rank_zero_info(f"{card.name}: new weights for {num_classes} classes: {', '.join(head)}")
    return model


def head_weights(model: ZooModule) -> tuple[str, ...]:
    """Names in the state dict of what belongs to a classifier's last layer; none without one."""
    head = getattr(model, "head", None)
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if module is head)
    return tuple(name for name in model.state_dict() if name.startswith(prefixes))


def card_of(model: ZooModule) -> Card:
    """The card of a model that `load` returned: ``model.card``, typed."""
    card: Card = model.__dict__["card"]
    return card


def build(card: Card, norm: Norm | None = None, model: type[ZooModule] | None = None) -> ZooModule:
    """The model that a card describes, with fresh random weights.

    Args:
        card: of the model.
        norm: the normalisation in place of the card's.
        model: class in place of the card's.

    Raises:
        CardError: for a class or argument that is not ours.
    """
    init_args = dict(card.config["init_args"])
    if isinstance(file := init_args.get("vocabulary"), str):
        init_args["vocabulary"] = _words(card, file)
    stored = init_args.pop("norm", None)
    cls = registry.model_class(card.model) if model is None else model
    if norm is None and stored is not None:
        norm = registry.decode_norm(stored)
    if norm is not None:
        init_args["norm"] = norm
    built: ZooModule = registry.build(cls, init_args)
    return built


def _words(card: Card, file: str) -> list[str]:
    """The words of a file of the card; a path to any other file is none of it."""
    if file not in card.config["files"]:
        raise CardError(
            f"{card.folder / catalog.CONFIG}: the vocabulary {file!r} is not among the card's files"
        )
    try:
        return catalog.verified_bytes(card, file).decode().splitlines()
    except UnicodeDecodeError as error:
        raise CardError(
            f"{card.folder / file} must be text in UTF-8, but byte {error.start:,} is not"
        ) from None


class _TooLargeError(CardError):
    """The model of a card is much larger than its weights."""


class _Limited(TorchFunctionMode):
    """Ends the building of a model that takes more calls of torch than its weights explain."""

    def __init__(self, card: Card, tensors: int) -> None:
        super().__init__()
        self.left = 1000 + 100 * tensors
        self.message = (
            f"{card.folder / catalog.CONFIG} describes a far larger model than the {tensors} "
            f"tensors of {catalog.WEIGHTS} are of: the card was written by hand, or is damaged"
        )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.left -= 1
        if self.left < 0:
            raise _TooLargeError(self.message)
        return func(*args, **(kwargs or {}))


def _check_size(
    card: Card, state: dict[str, Tensor], norm: Norm | None, model: type[ZooModule] | None
) -> None:
    """Builds the model without memory for its weights, and compares it with those of the card.

    A card may say any size: the memory and the time of a model that its weights do not fit are
    never spent.

    Raises:
        CardError: if they do not fit.
    """
    if len(state) > _MOST_TENSORS:
        raise CardError(
            f"{card.folder / catalog.WEIGHTS} holds {len(state):,} tensors, more than any model"
        )
    try:
        with _Limited(card, len(state)), torch.device("meta"):
            sketch = build(card, norm, model)
    except _TooLargeError:
        raise
    except CardError:
        if norm is None and model is None:
            raise
        return  # classes of the user's own may need numbers, which there are none of here
    count = sum(parameter.numel() for parameter in sketch.parameters())
    if count != card.parameters:
        raise CardError(
            f"{card.folder / catalog.CONFIG} says {card.parameters:,} parameters, the model it "
            f"describes has {count:,}: the card was written by hand, or by another ln_zoo"
        )
    _fill(sketch, state, card, assign=True)


def _fill(model: ZooModule, state: dict[str, Tensor], card: Card, assign: bool) -> None:
    try:
        model.load_state_dict(state, strict=True, assign=assign)
    except RuntimeError as error:
        raise CardError(
            f"{card.folder / catalog.WEIGHTS} does not fit the model of the card: {error}"
        ) from error


def find_card(
    name_or_path: str | os.PathLike[str],
    revision: str | None = None,
    cache_dir: str | Path | None = None,
) -> Card:
    """The card of a name, a folder or a hub id, of the version that is asked for.

    Arguments and errors are those of `load`.
    """
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
        return catalog.read_card(hub.download(text, revision=revision, cache_dir=cache_dir))
    raise CardError(f"there is no card folder {text!r}")


def _of_version(folders: list[Path], revision: str | None) -> Card:
    """The card of the first of the folders, or of the first that has the version."""
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
