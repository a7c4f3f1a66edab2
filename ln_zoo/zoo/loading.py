"""Loading models: class, arguments and weights of any source, in one place.

A `Source` is the same for the name of a published model, a card's folder, a hub id, a checkpoint
and the folder of a run. Only tensors and plain values are unpickled, and no module is imported
because a file names it (see `ln_zoo.utils.trust`).
"""

from __future__ import annotations

import hashlib
import inspect
import os
import textwrap
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ln_zoo.callbacks.normalize import normalize_as_trained
from ln_zoo.models.base import ZooModule, runs_of_checkpoint
from ln_zoo.norms import Norm
from ln_zoo.utils import trust
from ln_zoo.utils.class_paths import class_path
from ln_zoo.utils.errors import first_line
from ln_zoo.utils.training_runs import TrainingRun, named
from ln_zoo.zoo import catalog, reading
from ln_zoo.zoo.catalog import Card, CardError
from ln_zoo.zoo.reading import (
    HubOptions,
    checkpoint_in,
    find_card,
    read_checkpoint,
    read_weights,
    vocabulary_of,
    with_weights,
)

_M = TypeVar("_M", bound=ZooModule)
#: Suggestion of commands for a class that may not be imported; see `trust.Reader`.
IMPORT_IT = "give --import {module}"


@dataclass(frozen=True)
class Source:
    """The class, arguments and weights of a model."""

    where: str  #: name of the source in messages
    cls: type[LightningModule]
    stored: dict[str, Any]  #: arguments of the class as plain data
    arguments: dict[str, Any]  #: the same as objects
    card: Card | None = None  #: of a published model
    checkpoint: dict[str, Any] | None = None  #: content of the checkpoint, of any other
    options: reading.HubOptions = reading.DEFAULTS  #: of weights that are downloaded

    @property
    def words(self) -> list[str] | None:
        """The vocabulary; ``None`` for a model that reads no text."""
        return self.arguments.get("vocabulary")

    @property
    def class_path(self) -> str:
        """The path of the class, as configurations name it."""
        return class_path(self.cls)

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

    def runs(self) -> tuple[TrainingRun, ...]:
        """Training runs behind the weights; the last one names this source."""
        if self.card is not None:
            return self.card.training_runs
        assert self.checkpoint is not None
        digest = hashlib.sha256(Path(self.where).read_bytes()).hexdigest()
        label = f"{Path(self.where).name}, sha256 {digest}"
        return named(runs_of_checkpoint(self.checkpoint), label)

    def build(self) -> LightningModule:
        """The model with fresh random weights."""
        try:
            model = self.cls(**self.arguments)
            if self.checkpoint is not None:
                normalize_as_trained(model, self.checkpoint, self.where)
            return model
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
        is_own = self.cls not in reading.MODELS.values() or (
            norm is not None and type(norm) not in reading.NORMS.values()
        )
        check_size(self.build, self.where, self.state, parameters, is_own)

    def load(self, num_classes: int | None = None) -> Any:
        """The model with its weights, in evaluation mode, on the CPU."""
        self.check()
        if self.card is None:
            return self._filled().eval()
        # Random initial weights must not move the user's generator.
        with torch.random.fork_rng(devices=[]):
            model: Any = self._filled()
            if num_classes is not None:
                model = with_head(model, self.card, num_classes)
        # Set in `__dict__`: torch's stubs admit tensors and modules only.
        model.__dict__["card"] = with_weights(self.card, self.options)
        model.training_runs = self.card.training_runs
        return model.eval()

    def _filled(self) -> LightningModule:
        model = self.build()
        fill(model, self.state, self.where)
        return model

    def load_into(self, model: LightningModule, new_head: bool = False) -> tuple[str, ...]:
        """Load the weights; with `new_head` a head of another size keeps its own.

        Returns:
            Names of the weights that stayed fresh.
        """
        state, own = self.state, model.state_dict()
        head = {name: own[name] for name in head_weights(model)} if new_head else {}
        if all(state[k].shape == value.shape for k, value in head.items() if k in state):
            head = {}
        fill(model, state | head, self.where)
        of_model: Any = model
        of_model.new_weights, of_model.training_runs = tuple(head), self.runs()
        return tuple(head)


def find(
    text: str, remedy: str = IMPORT_IT, named: Collection[str] = (), model: str | None = None
) -> Source:
    """The source of a name, a card's folder, a hub id, a .ckpt file or a run's folder.

    ``remedy`` and ``named`` are those of `trust.Reader`; ``model`` is the class path for a
    checkpoint that names none.
    """
    if (path := checkpoint_in(text)) is not None:
        return of_checkpoint(path, remedy, named, model)
    return of_card(find_card(text), trust.Reader(text, remedy, named))


def of_checkpoint(
    path: str, remedy: str = IMPORT_IT, named: Collection[str] = (), model: str | None = None
) -> Source:
    """The source of a Lightning checkpoint; arguments as for `find`."""
    checkpoint = read_checkpoint(path)
    stored = checkpoint.get("hyper_parameters") or {}
    if isinstance(stored, dict) and isinstance(model, str):
        stored.setdefault("_class_path", model)
    if not (isinstance(stored, dict) and "_class_path" in stored):
        raise ValueError(
            f"{path} does not name its model class, as checkpoints of ln-zoo fit do: give its "
            "class by --model, which fit, validate, test and predict take"
        )
    reader = trust.Reader(path, remedy, named)
    cls = reader.find(stored["_class_path"], LightningModule)
    own = {name: value for name, value in stored.items() if str(name)[:1] != "_"}
    own = _renamed(stored["_class_path"], own)
    return Source(path, cls, own, reader.arguments(cls, own), checkpoint=checkpoint)


def of_card(
    card: Card,
    reader: trust.Reader,
    norm: Norm | None = None,
    model: type[ZooModule] | None = None,
    options: reading.HubOptions = reading.DEFAULTS,
) -> Source:
    """The source of a card; norm and class replace the card's."""
    path = reading.full_path(card.model, reading.MODELS, "model")
    cls = model or reader.find(path, ZooModule)
    own = _renamed(path, card.config.init_args)
    if (stored := own.pop("norm", None)) is not None and norm is None:
        class_path = reading.full_path(stored["class"], reading.NORMS, "norm")
        own["norm"] = {"class_path": class_path, "init_args": stored["init_args"]}
    if isinstance(file := own.get("vocabulary"), str):
        own["vocabulary"] = vocabulary_of(card, file)
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
        ln_zoo.utils.errors.CardError: no model 'no-such-model': ...
    """
    if (path := checkpoint_in(os.fspath(name_or_path))) is not None:
        if (num_classes, norm, model, revision) != (None, None, None, None):
            raise CardError(f"{path} is a checkpoint, which is loaded as it is: give no options")
        found = of_checkpoint(path, remedy="import {module} first").load()
    else:
        options = reading.HubOptions(cache_dir, token, local_files_only, force_download)
        card = find_card(name_or_path, revision, options)
        # Classes of a card's author are passed, so that it is plain whose code runs.
        remedy = "import it and pass it, as in load(..., {argument})"
        reader = trust.Reader(card.name, remedy, loaded=False)
        found = of_card(card, reader, norm, model, options).load(num_classes)
    return found.to(device=device, dtype=dtype)


def load_model(text: str) -> Any:
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


#: Upper bound for untrusted weights; ours have at most 32 tensors.
_MAX_TENSORS = 10_000
#: Letters of torch's reasons why weights do not fit, which name every tensor.
_LONGEST_REASON = 1000


class _Limited(TorchFunctionMode):
    """Abort a build that calls torch more often than the number of weights explains."""

    def __init__(self, where: str, tensors: int) -> None:
        super().__init__()
        self.left = 1000 + 100 * tensors
        self.message = (
            f"{where} describes a far larger model than its {tensors} tensors are of: it was "
            "written by hand, or is damaged"
        )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.left -= 1
        if self.left < 0:
            raise CardError(self.message)
        return func(*args, **(kwargs or {}))


def check_size(
    build: Callable[[], LightningModule],
    where: str,
    state: Mapping[str, Tensor],
    parameters: int | None,
    is_own: bool,
) -> None:
    """Build a model on the meta device and compare it with its weights.

    A file may claim any size; this costs neither the memory nor the time of such a model.
    ``parameters`` is the number that a card states; ``is_own`` that the class is the user's, which
    may need numbers to be built.
    """
    if len(state) > _MAX_TENSORS:
        raise CardError(f"{where} holds {len(state):,} tensors, more than any model")
    limit = _Limited(where, len(state))
    try:
        with warnings.catch_warnings(action="ignore"), limit, torch.device("meta"):
            sketch = build()
    except CardError:
        if limit.left < 0 or not is_own:
            raise
        return
    count = sum(parameter.numel() for parameter in sketch.parameters())
    if parameters not in (None, count):
        raise CardError(
            f"{where} says {parameters:,} parameters, the model it describes has {count:,}: the "
            "card was written by hand, or by another ln_zoo"
        )
    with warnings.catch_warnings(action="ignore"):  # nothing is copied to the meta device
        fill(sketch, state, where)


def fill(model: torch.nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Load weights; CardError, with torch's reasons, if they have other names or shapes."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        why = textwrap.shorten(str(error), _LONGEST_REASON)
        raise CardError(f"the weights of {where} are of another norm or size: {why}") from error


def with_head(trained: ZooModule, card: Card, num_classes: int) -> ZooModule:
    """The model with a new head for `num_classes` classes and all other trained weights."""
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


def head_weights(model: LightningModule) -> tuple[str, ...]:
    """Names in the state dict of the parameters of a classifier's head; () without a head."""
    head = getattr(model, "head", None)
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if module is head)
    return tuple(name for name in model.state_dict() if name.startswith(prefixes))


def load_as(
    cls: type[_M],
    name_or_path: str | os.PathLike[str],
    revision: str | None = None,
    **options: Any,
) -> _M:
    """A published model of a class; options as for `ln_zoo.load`."""
    of_hub = {f.name: options[f.name] for f in fields(HubOptions) if f.name in options}
    card = reading.find_card(name_or_path, revision, HubOptions(**of_hub))
    ours, abstract = reading.MODELS.get(card.model), inspect.isabstract(cls)
    foreign = ours is None and cls in reading.MODELS.values()
    if foreign or (ours and not issubclass(ours, cls) and (abstract or not issubclass(cls, ours))):
        raise CardError(
            f"{card.name} is a {card.model}, not a {cls.__name__}: take that class, or "
            "ln_zoo.load, which finds it"
        )
    if not abstract and (ours is None or issubclass(cls, ours)):
        options.setdefault("model", cls)
    model = load(card.folder, **options)
    assert isinstance(model, cls)
    return model
