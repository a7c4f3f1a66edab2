"""Published models by name, by folder or by hub id, checked before anything is read from them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from ln_zoo.models.base import ZooModule
from ln_zoo.norms import Norm
from ln_zoo.zoo import catalog, hub, registry
from ln_zoo.zoo.catalog import Card, CardError

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
    # A model is built with random weights first: that must not move the user's random numbers.
    with torch.random.fork_rng(devices=[]):
        model = build(card, norm)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != card.parameters:
        raise CardError(
            f"{card.folder / catalog.CONFIG} says {card.parameters:,} parameters, the model it "
            f"describes has {count:,}: the card was written by hand, or by another ln_zoo"
        )
    for name in card.config["files"]:
        if name != catalog.WEIGHTS:
            catalog.verified_bytes(card, name)
    weights = card.folder / catalog.WEIGHTS
    try:
        state = safetensors.torch.load(catalog.verified_bytes(card, catalog.WEIGHTS))
    except safetensors.SafetensorError as error:
        raise CardError(f"{weights} is no safetensors file: {error}") from error
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise CardError(f"{weights} does not fit the model of the card: {error}") from error
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
    stored = init_args.pop("norm", None)
    cls = registry.model_class(card.model)
    if norm is None and stored is not None:
        norm = registry.decode_norm(stored)
    if norm is not None:
        init_args["norm"] = norm
    model: ZooModule = registry.build(cls, init_args)
    return model


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
