"""Published models by name, by folder or by hub id, checked before anything is read from them."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ln_zoo.models.base import ZooModule
from ln_zoo.norms import Norm
from ln_zoo.zoo.assembly import check_fits, head_weights
from ln_zoo.zoo.catalog import CardError
from ln_zoo.zoo.hub import HubOptions
from ln_zoo.zoo.source import Source, checkpoint_in, find_card, of_card, of_checkpoint


def load(
    name_or_path: str | os.PathLike[str],
    *,
    num_classes: int | None = None,
    norm: Norm | None = None,
    model: type[ZooModule] | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> ZooModule:
    """A published model with its weights, in evaluation mode.

    Nothing is unpickled, and no file makes a class be imported: weights are safetensors with a
    checked size and sha256, and classes are looked up in ln_zoo. The model is built on the meta
    device first, so a card cannot claim more memory than its weights need.

    Args:
        name_or_path: a name from `ln_zoo.list_models`; a card folder (a path with a separator, as
            in ``./mlp.layernorm``); a hub id ``user/repo``; or a .ckpt file or the folder of a run,
            which take ``dtype`` and ``device`` alone. A folder goes before a hub id. A name or hub
            id may end in ``@revision``, as in ``mlp.layernorm@b93f8b7e``.
        num_classes: replaces the head of a classifier by a new one of this size. The returned
            module's ``new_weights`` names what is new, and a log line lists it.
        norm: replaces the norm of the card; needed for a norm that is not ln_zoo's own. Its
            parameters must be those of the weights.
        model: replaces the class of the card; needed for a class that is not ln_zoo's own. It must
            take the card's arguments and have the weights' parameters.
        revision: version of the weights. On the hub: branch, tag or commit; default ``main``. On
            this machine: the version that the card states, or the first 8 to 64 digits of the
            sha256 of its weights; default: the first found.
        cache_dir: of hub files; default: the hub's own cache.
        token: of the hub; ``True`` for the stored one, ``False`` for none; default: the stored one
            if it exists.
        local_files_only: whether to take hub files from the cache, without a request.
        force_download: whether to download hub files that the cache has.
        dtype: of the weights; default: float32.
        device: of the weights; default: the CPU.

    Returns:
        The module. ``module.card`` is its `Card`: preprocessing, results, configuration.

    Raises:
        CardError: for an unknown name, a missing, damaged or foreign file, an unknown class or
            argument, an unknown revision, ``num_classes`` for a model without a replaceable head,
            or weights that do not fit.
        ValueError: for fewer classes than 1.

    Example:
        >>> model = load("mlp.layernorm-digits", num_classes=3)
        >>> model.new_weights
        ('network.5.weight', 'network.5.bias')
        >>> load("no-such-model")
        Traceback (most recent call last):
            ...
        ln_zoo.zoo.errors.CardError: no model 'no-such-model': ...
    """
    if (path := checkpoint_in(os.fspath(name_or_path))) is not None:
        if (num_classes, norm, model, revision) != (None, None, None, None):
            raise CardError(f"{path} is a checkpoint, which is loaded as it is: give no options")
        found = of_checkpoint(path, remedy="import {module} first").load()
    else:
        options = HubOptions(cache_dir, token, local_files_only, force_download)
        card = find_card(name_or_path, revision, options)
        found = of_card(card, norm, model).load(num_classes, options)
    return found.to(device=device, dtype=dtype)


def load_into(model: ZooModule, source: Source, new_head: bool = False) -> tuple[str, ...]:
    """Load the weights of a source; with `new_head` a head of another size keeps its own.

    Returns:
        Names of the weights that stayed fresh.
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
