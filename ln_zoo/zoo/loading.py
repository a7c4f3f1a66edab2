"""Published models by name, by folder or by hub id, checked before anything is read from them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ln_zoo.models.base import ZooModule
from ln_zoo.norms import Norm
from ln_zoo.zoo import catalog, hub, registry
from ln_zoo.zoo.catalog import Card, CardError

#: Of the weights of a card. The largest of ours has 32.
_MOST_TENSORS = 10_000
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def load(
    name_or_path: str | os.PathLike[str],
    *,
    norm: Norm | None = None,
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
        norm: strategy to use in place of the one in the card. Needed for a model whose strategy
            is not ln_zoo's own; its parameters must be those of the weights.
        revision: branch, tag or commit of a hub repository; default ``main``. Give a commit to be
            sure of the very same files.
        cache_dir: where hub files are kept; default: the hub's own cache.

    Returns:
        The module. ``module.card`` is its `Card`: preprocessing, results, configuration.

    Raises:
        CardError: for an unknown name (it lists the nearest), a missing, damaged or foreign file,
            an unknown class or argument, or weights that do not fit.

    Example:
        >>> load("no-such-model")
        Traceback (most recent call last):
            ...
        ln_zoo.zoo.catalog.CardError: no model 'no-such-model': ...
    """
    card = catalog.read_card(_folder(name_or_path, revision, cache_dir))
    for name in card.config["files"]:
        if name != catalog.WEIGHTS:
            catalog.verified_bytes(card, name)
    weights = card.folder / catalog.WEIGHTS
    try:
        state = safetensors.torch.load(catalog.verified_bytes(card, catalog.WEIGHTS))
    except safetensors.SafetensorError as error:
        raise CardError(f"{weights} is no safetensors file: {error}") from error
    # A model is built with random weights first: that must not move the user's random numbers.
    with torch.random.fork_rng(devices=[]):
        _check_size(card, state, norm)
        model = build(card, norm)
    _fill(model, state, card, assign=False)
    # Not by attribute: torch's stubs admit tensors and modules only.
    model.__dict__["card"] = card
    return model.eval()


def card_of(model: ZooModule) -> Card:
    """The card of a model that `load` returned: ``model.card``, typed."""
    card: Card = model.__dict__["card"]
    return card


def build(card: Card, norm: Norm | None = None) -> ZooModule:
    """The model that a card describes, with fresh random weights.

    Args:
        card: of the model.
        norm: strategy in place of the card's.

    Raises:
        CardError: for a class or argument that is not ours.
    """
    init_args = dict(card.config["init_args"])
    if isinstance(file := init_args.get("vocabulary"), str):
        init_args["vocabulary"] = _words(card, file)
    stored = init_args.pop("norm", None)
    cls = registry.model_class(card.model)
    if norm is None and stored is not None:
        norm = registry.decode_norm(stored)
    if norm is not None:
        init_args["norm"] = norm
    model: ZooModule = registry.build(cls, init_args)
    return model


def _words(card: Card, file: str) -> list[str]:
    """The words of a file of the card; a path to any other file is none of it."""
    if file not in card.config["files"]:
        raise CardError(
            f"{card.folder / catalog.CONFIG}: the vocabulary {file!r} is none of the card's files"
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


def _check_size(card: Card, state: dict[str, Tensor], norm: Norm | None) -> None:
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
            sketch = build(card, norm)
    except _TooLargeError:
        raise
    except CardError:
        if norm is None:
            raise
        return  # a strategy of the user's own may need numbers, which there are none of here
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


def _folder(
    name_or_path: str | os.PathLike[str],
    revision: str | None,
    cache_dir: str | Path | None,
) -> Path:
    text = os.fspath(name_or_path)
    is_name = isinstance(name_or_path, str) and not set(text) & {os.sep, "/"}
    path = Path(text).expanduser()
    if not is_name and path.is_dir():
        folder = path
    elif is_name:
        folder = catalog.find(text)
    elif isinstance(name_or_path, str) and _HUB_ID.fullmatch(text) and text[0] not in ".~":
        return hub.download(text, revision=revision, cache_dir=cache_dir)
    else:
        raise CardError(f"there is no card folder {text!r}")
    if revision is not None:
        raise CardError(f"revision={revision!r} is for hub ids; {text!r} is the folder {folder}")
    return folder
