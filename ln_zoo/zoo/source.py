"""Where a model comes from: its class, arguments and weights, read in one place.

A `Source` is the same for the name of a published model, a card's folder, a hub id, a checkpoint
and the folder of a run. Only tensors and plain values are unpickled, and no module is imported
because a file names it (see `ln_zoo.zoo.trust`).
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ln_zoo.models.base import ZooModule, public_module, runs_of_checkpoint
from ln_zoo.norms import Norm
from ln_zoo.utils.checkpoints import check_whole
from ln_zoo.utils.files import check_checkpoint
from ln_zoo.utils.training_runs import Run, named
from ln_zoo.zoo import catalog, hub, registry, trust
from ln_zoo.zoo.assembly import check_fits, check_header, check_size, head_weights, with_head
from ln_zoo.zoo.catalog import Card, CardError
from ln_zoo.zoo.errors import first_line

_M = TypeVar("_M", bound=ZooModule)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
#: Enough of a sha256 to tell versions apart.
_DIGEST = re.compile("[0-9a-f]{8,64}")
#: Suggestion of commands for a class that may not be imported; see `trust.Reader`.
IMPORT_IT = "give --import {module}"
#: Errors of torch for content that weights-only loading rejects.
_REFUSED = (
    re.compile(r"GLOBAL (\S+)"),
    re.compile(r"load (\S+) whose module \S+ is blocked"),
    re.compile(r"instantiate class (\S+)"),
)
#: Within the folder of a run.
_LAST = "checkpoints/last.ckpt"


@dataclass(frozen=True)
class Source:
    """The class, arguments and weights of a model."""

    where: str  #: name of the source in messages
    cls: type[ZooModule]
    stored: dict[str, Any]  #: arguments of the class as plain data
    arguments: dict[str, Any]  #: the same as objects
    card: Card | None = None  #: of a published model
    checkpoint: dict[str, Any] | None = None  #: content of the checkpoint, of any other
    options: hub.HubOptions = hub.DEFAULTS  #: of weights that are downloaded

    @property
    def words(self) -> list[str] | None:
        """The vocabulary; ``None`` for a model that reads no text."""
        return self.arguments.get("vocabulary")

    @property
    def class_path(self) -> str:
        """The path of the class, as configurations name it."""
        return f"{public_module(self.cls)}.{self.cls.__qualname__}"

    @property
    def classes(self) -> dict[str, Any]:
        """Class path of the model, and of its norm, as configurations name them."""
        norm = self.stored.get("norm")
        init_args = {"norm": {"class_path": norm["class_path"]}} if norm else {}
        return {"class_path": self.class_path, "init_args": init_args}

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """The weights by name."""
        if self.card is not None:
            return read_weights(self.card, self.options)
        assert self.checkpoint is not None
        state: dict[str, Tensor] = self.checkpoint["state_dict"]
        return state

    def runs(self) -> tuple[Run, ...]:
        """Training runs behind the weights; the last one names this source."""
        if self.card is not None:
            return self.card.training_runs
        assert self.checkpoint is not None
        digest = hashlib.sha256(Path(self.where).read_bytes()).hexdigest()
        label = f"{Path(self.where).name}, sha256 {digest}"
        return named(runs_of_checkpoint(self.checkpoint), label)

    def build(self) -> ZooModule:
        """The model with fresh random weights."""
        try:
            return self.cls(**self.arguments)
        except CardError:
            raise
        except Exception as error:
            # Of any class: an argument out of range fails where it is first used.
            raise CardError(
                f"{self.where}: {self.cls.__name__} refuses its arguments: {first_line(error)}"
            ) from error

    def check(self) -> None:
        """Raise CardError unless the weights and all files are those of the model.

        A file may claim any size: the model is built on the meta device, within the limits that the
        weights set.
        """
        parameters = None
        if self.card is not None:
            parameters = self.card.parameters
            for name in self.card.config.files:
                if name != catalog.WEIGHTS:
                    catalog.verified_bytes(self.card, name)
        norm = self.arguments.get("norm")
        is_own = self.cls not in registry.MODELS.values() or (
            norm is not None and type(norm) not in registry.NORMS.values()
        )
        check_size(self.build, self.where, self.state, parameters, is_own)

    def load(self, num_classes: int | None = None) -> ZooModule:
        """The model with its weights, in evaluation mode, on the CPU."""
        self.check()
        if self.card is None:
            return self._filled().eval()
        # Random initial weights must not move the user's generator.
        with torch.random.fork_rng(devices=[]):
            model = self._filled()
            if num_classes is not None:
                model = with_head(model, self.card, num_classes)
        # Set in `__dict__`: torch's stubs admit tensors and modules only.
        model.__dict__["card"] = with_weights(self.card, self.options)
        model.training_runs = self.card.training_runs
        return model.eval()

    def _filled(self) -> ZooModule:
        model = self.build()
        check_fits(model, self.state, self.where)
        model.load_state_dict(self.state)
        return model

    def load_into(self, model: ZooModule, new_head: bool = False) -> tuple[str, ...]:
        """Load the weights; with `new_head` a head of another size keeps its own.

        Returns:
            Names of the weights that stayed fresh.
        """
        state, own = self.state, model.state_dict()
        head = {name: own[name] for name in head_weights(model)} if new_head else {}
        if all(state[k].shape == value.shape for k, value in head.items() if k in state):
            head = {}
        check_fits(model, state | head, self.where)
        model.load_state_dict(state | head)
        model.new_weights = tuple(head)
        model.training_runs = self.runs()
        return model.new_weights


def find(text: str, remedy: str = IMPORT_IT, named: Collection[str] = ()) -> Source:
    """The source of a name, a card's folder, a hub id, a .ckpt file or a run's folder.

    ``remedy`` and ``named`` are those of `trust.Reader`.
    """
    if (path := checkpoint_in(text)) is not None:
        return of_checkpoint(path, remedy, named)
    return of_card(find_card(text), trust.Reader(text, remedy, named))


def checkpoint_in(text: str) -> str | None:
    """The checkpoint of a path: a .ckpt file, or the last one of a run's folder; or None."""
    last = Path(text) / _LAST
    return str(last) if last.is_file() else text if text.endswith(".ckpt") else None


def of_checkpoint(path: str, remedy: str = IMPORT_IT, named: Collection[str] = ()) -> Source:
    """The source of a Lightning checkpoint; arguments as for `find`."""
    checkpoint = read_checkpoint(path)
    stored = checkpoint.get("hyper_parameters")
    if not (isinstance(stored, dict) and "_class_path" in stored):
        raise ValueError(
            f"{path} does not name its model class: it was not written by a model of ln_zoo"
        )
    reader = trust.Reader(path, remedy, named)
    cls = reader.find(stored["_class_path"], ZooModule)
    own = {name: value for name, value in stored.items() if str(name)[:1] != "_"}
    own = _renamed(stored["_class_path"], own)
    return Source(path, cls, own, reader.arguments(cls, own), checkpoint=checkpoint)


def of_card(
    card: Card,
    reader: trust.Reader,
    norm: Norm | None = None,
    model: type[ZooModule] | None = None,
    options: hub.HubOptions = hub.DEFAULTS,
) -> Source:
    """The source of a card; norm and class replace the card's."""
    path = registry.class_path(card.model, registry.MODELS, "model")
    cls = model or reader.find(path, ZooModule)
    own = _renamed(path, card.config.init_args)
    if (stored := own.pop("norm", None)) is not None and norm is None:
        class_path = registry.class_path(stored["class"], registry.NORMS, "norm")
        own["norm"] = {"class_path": class_path, "init_args": stored["init_args"]}
    if isinstance(file := own.get("vocabulary"), str):
        own["vocabulary"] = _words(card, file)
    arguments = reader.arguments(cls, own)
    if norm is not None:
        arguments["norm"] = norm
    return Source(card.name, cls, own, arguments, card=card, options=options)


#: Arguments of models and norms in version 0.1, with their present names.
_RENAMED = {
    "hidden_features": "hidden_size",
    "latent_features": "latent_size",
    "bound": "log_clamp",
    "least_log_std": "min_log_std",
    "largest_correlation": "max_correlation",
    "across_processes": "sync",
}


def _renamed(class_path: str, init_args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a model and its norm by their present names; classes of users keep theirs."""
    found = _present_names(class_path, init_args)
    norm = found.get("norm")
    if isinstance(norm, Mapping) and isinstance(norm.get("init_args"), Mapping):
        path = str(norm.get("class_path") or norm.get("class"))
        found["norm"] = {**norm, "init_args": _present_names(path, norm["init_args"])}
    return found


def _present_names(class_path: str, init_args: Mapping[str, Any]) -> dict[str, Any]:
    ours = class_path.startswith("ln_zoo.") or "." not in class_path
    found = {_RENAMED.get(name, name) if ours else name: v for name, v in init_args.items()}
    if ours and isinstance(found.get("hidden_size"), list | tuple):  # of `MLPClassifier`
        found["hidden_sizes"] = found.pop("hidden_size")
    return found


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
        options = hub.HubOptions(cache_dir, token, local_files_only, force_download)
        card = find_card(name_or_path, revision, options)
        # Classes of a card's author are passed, so that it is plain whose code runs.
        remedy = "import it and pass it, as in load(..., {argument})"
        reader = trust.Reader(card.name, remedy, loaded=False)
        found = of_card(card, reader, norm, model, options).load(num_classes)
    return found.to(device=device, dtype=dtype)


def load_model(text: str) -> ZooModule:
    """The model of a name, a card's folder, a hub id, a .ckpt file or a run's folder."""
    return find(text).load()


def load_model_of(cls: type[_M], text: str, lacks: str) -> _M:
    """The model of a class, as `load_model` finds it, with finite weights."""
    model = load_model(text)
    if not isinstance(model, cls):
        raise ValueError(
            f"{text} is a {type(model).__name__}, which {lacks}: give a {cls.__name__} model"
        )
    if not all(weight.isfinite().all() for weight in model.state_dict().values()):
        raise ValueError(f"{text} holds weights that are not finite: its training diverged")
    return model


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
    options: hub.HubOptions = hub.DEFAULTS,
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
        return catalog.read_card(hub.download(text, revision=revision, options=options))
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


def read_weights(card: Card, options: hub.HubOptions = hub.DEFAULTS) -> dict[str, Tensor]:
    """The weights of a card, with the size and sha256 of the local card, also if downloaded."""
    card = with_weights(card, options)
    check_header(card.path(catalog.WEIGHTS))
    try:
        return safetensors.torch.load(catalog.verified_bytes(card, catalog.WEIGHTS))
    except safetensors.SafetensorError as error:
        raise CardError(
            f"{card.path(catalog.WEIGHTS)} is not a safetensors file: {error}"
        ) from error


def with_weights(card: Card, options: hub.HubOptions = hub.DEFAULTS) -> Card:
    """The card with the folder of its weights, downloaded if the wheel leaves them out."""
    if card.path(catalog.WEIGHTS).is_file() or card.folder.parent not in catalog.SHIPPED:
        return card
    size = card.config.files[catalog.WEIGHTS].size
    account = os.environ.get(hub.ACCOUNT_VARIABLE)
    if not account:
        raise CardError(
            f"the weights of {card.name} ({size / 1e6:.1f} MB) do not come with the installed "
            f"package: put its card folder into one that {catalog.MODELS_VARIABLE} names, or set "
            f"{hub.ACCOUNT_VARIABLE} to a hub account that has {card.name}"
        )
    folder = hub.download(f"{account}/{card.name}", options=options)
    return replace(card, weights_folder=folder)


def _words(card: Card, file: str) -> list[str]:
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
