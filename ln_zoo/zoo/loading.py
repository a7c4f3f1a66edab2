"""Published models by name, by folder or by hub id, checked before anything is read from them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ln_zoo.models.base import ZooModule
from ln_zoo.norms import Norm
from ln_zoo.zoo import catalog
from ln_zoo.zoo.catalog import Card, CardError
from ln_zoo.zoo.source import (
    Source,
    check_fits,
    checkpoint_in,
    find_card,
    of_card,
    of_checkpoint,
    read_weights,
    with_weights,
)

#: Of the weights of a card. The largest of ours has 32.
_MOST_TENSORS = 10_000


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
            in ``./mlp.layernorm``); a hub id ``user/repo``; or a checkpoint, as a .ckpt file or the
            folder of a run, which takes no further options. A folder goes before a hub id.
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
    if (path := checkpoint_in(os.fspath(name_or_path))) is not None:
        if (num_classes, norm, model, revision) != (None, None, None, None):
            raise CardError(f"{path} is a checkpoint, which is loaded as it is: give no options")
        return of_checkpoint(path, remedy="import {module} first").load()
    source = of_card(find_card(name_or_path, revision, cache_dir), norm, model)
    return load_card(source, num_classes, cache_dir)


def load_card(
    source: Source, num_classes: int | None = None, cache_dir: str | Path | None = None
) -> ZooModule:
    """The model of a card, once all its files are found to be what they should be.

    Args:
        source: from a card.
        num_classes: as for `load`.
        cache_dir: as for `load`.

    Raises:
        CardError: as `load`.
    """
    assert source.card is not None
    for name in source.card.config["files"]:
        if name != catalog.WEIGHTS:
            catalog.verified_bytes(source.card, name)
    card = with_weights(source.card, cache_dir)
    state = read_weights(card)
    # A model is built with random weights first: that must not move the user's random numbers.
    with torch.random.fork_rng(devices=[]):
        _check_size(source, card, state)
        built = source.build()
        _fill(built, state, card, assign=False)
        if num_classes is not None:
            built = _with_head(built, card, num_classes)
    # Not by attribute: torch's stubs admit tensors and modules only.
    built.__dict__["card"] = card
    built.training_runs = card.training_runs
    return built.eval()


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


def load_into(model: ZooModule, source: Source, new_head: bool = False) -> tuple[str, ...]:
    """Loads the weights of a source into a model.

    Args:
        model: to load into.
        source: of the weights.
        new_head: whether a classifier of another number of classes keeps its fresh last layer.

    Returns:
        Names of the weights that stayed fresh.

    Raises:
        ValueError: if the weights do not fit; the message names the differing keys.
    """
    state, own = source.state(), model.state_dict()
    head = {name: own[name] for name in head_weights(model)}
    other = any(k in state and state[k].shape != value.shape for k, value in head.items())
    if new_head and other:
        state = {**state, **head}
        model.new_weights = tuple(head)
    check_fits(model, state, source.where)
    model.load_state_dict(state)
    model.training_runs = source.runs()
    return tuple(head) if new_head and other else ()


def card_of(model: ZooModule) -> Card:
    """The card of a model that `load` returned: ``model.card``, typed."""
    card: Card = model.__dict__["card"]
    return card


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


def _check_size(source: Source, card: Card, state: dict[str, Tensor]) -> None:
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
            sketch = source.build()
    except _TooLargeError:
        raise
    except CardError:
        if source.is_ours:
            raise
        return  # classes of the user's own may need numbers, which the meta device has not
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
