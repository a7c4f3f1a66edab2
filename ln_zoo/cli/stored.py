"""What the command line takes from weights and checkpoints, and what it says about it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import pickle
import sys
import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from ln_zoo.checkpoints import check_whole
from ln_zoo.cli.arguments import check_checkpoint, configurations, given, options, parsed
from ln_zoo.models.base import ZooModule, public_module, runs_of_checkpoint
from ln_zoo.norms import from_config
from ln_zoo.training_runs import named
from ln_zoo.zoo import trust

_M = TypeVar("_M", bound=ZooModule)


def with_model(argv: list[str]) -> list[str]:
    """Puts the model that ``--weights`` or ``--ckpt_path`` names before the user's own arguments.

    So ``test --weights NAME`` needs no ``--model``, and whatever the user gives wins. The path
    ``last`` names nothing yet: finding the run needs the model.

    Args:
        argv: arguments, the subcommand first.

    Raises:
        ValueError: for both options at once, an unreadable configuration file or checkpoint, one
            that names a class which is neither ln_zoo's nor named by the arguments.
        FileNotFoundError: if there is no such checkpoint.
    """
    weights, ckpt_path = given(argv, "weights"), given(argv, "ckpt_path")
    if weights and ckpt_path:
        raise ValueError("--ckpt_path resumes a run, --weights starts a new one: give one of them")
    if not weights and ckpt_path in (None, "", "last"):
        return argv
    model = model_of(argv, weights, ckpt_path)
    config = {"model": {"class_path": model.class_path, "init_args": model.init_args}}
    return [argv[0], "--config", json.dumps(config), *argv[1:]]


class StoredModel(NamedTuple):
    """What weights or a checkpoint say of their model.

    Attributes:
        class_path: of the model.
        init_args: its arguments, but for the words.
        words: of its vocabulary; ``None`` for a model that reads no text. They go to the data,
            which have to number their words as the model does.
    """

    class_path: str
    init_args: dict[str, Any]
    words: list[str] | None


def model_of(
    argv: list[str], weights: str | None = None, ckpt_path: str | None = None
) -> StoredModel:
    """The model of weights, or of a checkpoint.

    Args:
        argv: arguments, the subcommand first: they name the classes that may be imported.
        weights: as for ``--weights``.
        ckpt_path: a checkpoint; one of the two is given.

    Raises:
        ValueError: for an unreadable checkpoint, or one that names a class which is neither
            ln_zoo's nor named by the arguments.
        FileNotFoundError: if there is no such checkpoint.
    """
    if weights and not weights.endswith(".ckpt"):
        model = _load_card(weights, _OF_MODEL, named_classes(argv))
        class_path = f"{public_module(type(model))}.{type(model).__qualname__}"
        init_args = {k: v for k, v in model.hparams.items() if not k.startswith("_")}
    else:
        path = weights or ckpt_path
        assert path
        class_path, init_args, _ = _from_checkpoint(path, _OF_MODEL, named_classes(argv))
    words = init_args.pop("vocabulary", None)
    return StoredModel(class_path, init_args, words)


def check_words(data: LightningDataModule, words: list[str], argv: list[str], source: str) -> None:
    """Checks that data number their words as a stored model does; says if they were given others.

    Args:
        data: the data module, which was given the words if it takes any.
        words: of the model.
        argv: arguments, the subcommand first.
        source: weights or checkpoint.

    Raises:
        ValueError: if the data have words of their own.
    """
    own = getattr(data, "vocabulary", None)
    if own is not None and list(own) != words:
        raise ValueError(
            f"{source} has a vocabulary of {len(words):,} words, and {type(data).__name__} has one "
            f"of its own, of {len(own):,}: choose data that take a vocabulary with --data"
        )
    if any(each.name == "data.vocabulary" and each.content is not None for each in options(argv)):
        note(f"note: data.vocabulary is ignored: {source} has its own, of {len(words):,} words")


def read_checkpoint(path: str) -> dict[str, Any]:
    """Reads a Lightning checkpoint without unpickling anything but plain values and tensors.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a checkpoint, is damaged, or holds more than plain values.
    """
    check_checkpoint(path)
    check_whole(path)
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    # An archive cut short fails in the system's seek, with an error that names no file.
    except (pickle.UnpicklingError, EOFError, OSError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a readable Lightning checkpoint (damaged, cut short, or written by "
            f"another program): {trust.why_unreadable(error)}"
        ) from error
    state = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        holds = ", ".join(map(str, checkpoint)) if isinstance(checkpoint, dict) else ""
        raise ValueError(
            f"{path} is not a readable Lightning checkpoint (no state_dict of tensors): it holds "
            f"{textwrap.shorten(holds, 80) or f'a {type(checkpoint).__name__}'}"
        )
    return checkpoint


def check_complete(checkpoint: dict[str, Any], path: str, command: str) -> None:
    """Checks that a checkpoint holds what Lightning needs of it, beside the weights.

    Args:
        checkpoint: its content.
        path: where it lies.
        command: what it is for.

    Raises:
        ValueError: if something is missing, as in one saved with weights only.
    """
    needed = ["pytorch-lightning_version", "epoch", "global_step"]
    if command == "fit":
        needed += ["loops", "callbacks", "optimizer_states", "lr_schedulers"]
    if missing := [key for key in needed if key not in checkpoint]:
        what = "resumed" if command == "fit" else "read by Lightning"
        raise ValueError(
            f"{path} cannot be {what}: it lacks {', '.join(missing)}, as if saved with weights "
            f"only; use --weights {path} in place of --ckpt_path to start from its weights"
        )


def load_weights(model: ZooModule, weights: str, new_head: bool = False) -> None:
    """Loads published weights or those of a checkpoint into a model.

    Args:
        model: to load into.
        weights: as for `load_model`.
        new_head: whether a classifier of another number of classes keeps its last layer as it was
            drawn, and says so.

    Raises:
        ValueError: if they do not fit; the message names the differing keys.
    """
    from ln_zoo.zoo.loading import find_card, head_weights, read_weights

    if weights.endswith(".ckpt"):
        checkpoint = read_checkpoint(weights)
        state = checkpoint["state_dict"]  # its classes were checked with the options
        digest = hashlib.sha256(Path(weights).read_bytes()).hexdigest()
        runs = named(runs_of_checkpoint(checkpoint), f"{Path(weights).name}, sha256 {digest}")
    else:
        card = find_card(weights)
        state, runs = read_weights(card), card.training_runs  # and so were a card's
    own = model.state_dict()
    head = {name: own[name] for name in head_weights(model)}
    if new_head and any(
        name in state and state[name].shape != value.shape for name, value in head.items()
    ):
        state = {**state, **head}
        model.new_weights = tuple(head)
        classes = model.hparams.get("num_classes")
        note(f"note: new weights for {classes} classes: {', '.join(head)}; others are of {weights}")
    check_fits(model, state, weights)
    model.load_state_dict(state)
    model.training_runs = runs


def load_model(weights: str) -> ZooModule:
    """The model of published weights or of a checkpoint, in evaluation mode, on the CPU.

    Args:
        weights: a name, a card folder or a hub id, as `ln_zoo.load` takes them, or a .ckpt file.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ValueError: as `ln_zoo.load`; if a checkpoint cannot be read, is of no model of the zoo,
            names a class of a module that is not imported (see `ln_zoo.zoo.trust`), or does not fit
            its own arguments.
    """
    remedy = "give --import {module}"
    if not weights.endswith(".ckpt"):
        return _load_card(weights, remedy)
    class_path, init_args, state = _from_checkpoint(weights, remedy)
    model = _model_class(class_path, weights)(**init_args)
    check_fits(model, state, weights)
    model.load_state_dict(state)
    return model.eval()


def load_model_of(cls: type[_M], weights: str, lacks: str) -> _M:
    """A model of a class, as `load_model` finds it, whose weights are finite.

    Args:
        cls: the class.
        weights: as for `load_model`.
        lacks: what a model of another class does not do, for the message.

    Raises:
        FileNotFoundError: as `load_model`.
        ValueError: as `load_model`; for a model of another class, or one whose training diverged.
    """
    model = load_model(weights)
    if not isinstance(model, cls):
        raise ValueError(
            f"{weights} is a {type(model).__name__}, which {lacks}: give a {cls.__name__} model"
        )
    if not all(weight.isfinite().all() for weight in model.state_dict().values()):
        raise ValueError(f"{weights} holds weights that are not finite: its training diverged")
    return model


def check_fits(model: torch.nn.Module, state: dict[str, Tensor], where: str) -> None:
    """Raises ValueError, naming the keys, unless the state has the model's keys and shapes."""
    expected = model.state_dict()
    differing = [f"{k} is missing" for k in expected if k not in state]
    differing += [f"{k} is not in the model" for k in state if k not in expected]
    differing += [
        f"{k} is {tuple(state[k].shape)}, the model has {tuple(expected[k].shape)}"
        for k in expected
        if k in state and state[k].shape != expected[k].shape
    ]
    if differing:
        more = f"; and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise ValueError(
            f"the weights of {where} do not fit this {type(model).__name__}, which has another "
            f"norm or size: {'; '.join(differing[:8])}{more}"
        )


def check_finite(values: Mapping[str, Tensor], what: str) -> None:
    """Raises ValueError, naming the first of them, if values are NaN or infinite.

    Args:
        values: by name; integers always pass.
        what: they are, for the message.
    """
    bad = [name for name, value in values.items() if not bool(torch.isfinite(value).all())]
    if bad:
        more = f", as are {len(bad) - 1} more" if len(bad) > 1 else ""
        raise ValueError(
            f"{what} cannot be used: {bad[0]} is not finite{more}: the training diverged; take an "
            "earlier checkpoint"
        )


@rank_zero_only
def note(text: str) -> None:
    """Tells the user something, once for all processes."""
    print(text, file=sys.stderr)


def tell_ignored(mine: Namespace, used: Namespace, path: str) -> None:
    """Says which of the user's model arguments lose against those in the checkpoint.

    Args:
        mine: the model as the user's arguments describe it, over what the checkpoint holds.
        used: the model as the checkpoint holds it.
        path: of the checkpoint.
    """
    asked, stored = _flat(mine), _flat(used)
    for name, value in asked.items():
        # None asks for the model's own choice, which the checkpoint holds.
        # A vocabulary is the data's, or the checkpoint's: see `tell_linked` and `check_words`.
        if name == "model.vocabulary":
            continue
        if value is not None and name in stored and stored[name] != value:
            note(
                f"note: {name} = {value} is ignored: {path} was trained with {stored[name]} "
                "(--weights in place of --ckpt_path starts afresh from its weights)"
            )


def tell_linked(argv: list[str], name: str) -> None:
    """Says that a model argument which the data decide was given in vain."""
    options = (f"--model.{name}", f"--model.init_args.{name}")
    found = any(a.split("=")[0] in options for a in argv)
    for config in configurations(argv):
        model = config.get("model")
        init_args = model.get("init_args") if isinstance(model, dict) else None
        found = found or (isinstance(init_args, dict) and name in init_args)
    if found:
        note(f"note: model.{name} is ignored: it is taken from data.{name}")


def tell_default_norm(argv: list[str], model: ZooModule) -> None:
    """Says which norm runs where ``norm: null`` asks for the model's own choice."""
    asked = [each.content for each in options(argv) if each.name == "model.norm"]
    if asked and asked[-1] is None:
        name = model.hparams["norm"]["class_path"].rpartition(".")[2]
        note(
            f"note: model.norm is null, so the model's default, {name}, is used; give Identity "
            "for no normalisation"
        )


def named_classes(argv: list[str]) -> set[str]:
    """The class paths that the user's own arguments, files and environment give for the model.

    Args:
        argv: arguments, the subcommand first.
    """
    texts: list[Any] = [config.get("model") for config in configurations(argv)]
    prefix = f"LN_ZOO_{argv[0]}__MODEL".upper()
    texts += [value for name, value in os.environ.items() if name.startswith(prefix)]
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        option, equals, value = argument.partition("=")
        if option == "--model" or option.startswith("--model."):
            texts.append(value if equals else following)
    found: set[str] = set()
    seen: set[str] = set()
    while texts:
        value = texts.pop()
        if isinstance(value, dict | list):
            texts += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str) and value not in seen:
            seen.add(value)
            if all(part.isidentifier() for part in value.split(".")):
                found.add(value)
            # It may also be a class with its arguments, or a file that holds them.
            with contextlib.suppress(ValueError):
                texts.append(parsed(value))
    return found


#: What makes `ln-zoo fit|validate|test|predict` take a class from a checkpoint.
_OF_MODEL = "give --{place} {path}"


def _load_card(weights: str, remedy: str, named: Collection[str] = ()) -> ZooModule:
    """The model of a card; of a class of the user's own only if that may be imported."""
    from ln_zoo.zoo import load, registry
    from ln_zoo.zoo.loading import find_card

    card = find_card(weights)
    norm = card.config["init_args"].get("norm")
    own: dict[str, Any] = {}
    if norm is not None and registry.is_own(norm["class"]):
        own["norm"] = {"class_path": norm["class"], "init_args": norm["init_args"]}
    if registry.is_own(card.model):
        own["model"] = card.model
    stored = {"_class_path": own.get("model", "ln_zoo.models"), "norm": own.get("norm")}
    trust.check_classes(stored, weights, remedy, named)
    if "model" in own:
        own["model"] = _model_class(card.model, weights)
    if "norm" in own:
        own["norm"] = from_config(own["norm"])
    return load(card.folder, **own)


def _model_class(class_path: str, where: str) -> type[ZooModule]:
    """The model of a class path that may be imported."""
    module, _, name = class_path.rpartition(".")
    cls = getattr(importlib.import_module(module), name, None)
    if not (isinstance(cls, type) and issubclass(cls, ZooModule)):
        raise ValueError(
            f"{where} is of {class_path}, which is neither a model of ln_zoo nor derived from "
            "its base class"
        )
    return cls


def _from_checkpoint(
    path: str, remedy: str, named: Collection[str] = ()
) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    checkpoint = read_checkpoint(path)
    hparams = checkpoint.get("hyper_parameters")
    hparams = trust.check_classes(hparams, path, remedy, named)
    init_args = {k: v for k, v in hparams.items() if not k.startswith("_")}
    return hparams["_class_path"], init_args, checkpoint["state_dict"]


def _flat(model: Namespace) -> dict[str, Any]:
    """The arguments of a model's configuration by dotted name, without the words between."""
    flat = {"model": _one_path(model.class_path)}
    for part in ("init_args", "dict_kwargs"):
        values = model.get(part) or Namespace()
        items = vars(values.as_flat() if isinstance(values, Namespace) else Namespace(values))
        for key, value in items.items():
            name = f"model.{key.replace('init_args.', '')}"
            if name.endswith(".class_path"):
                name, value = name.removesuffix(".class_path"), _one_path(value)
            flat[name] = value
    return flat


def _one_path(class_path: str) -> str:
    """The one path of a class that can be imported from several."""
    module, _, name = class_path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    return f"{public_module(cls)}.{cls.__qualname__}"
