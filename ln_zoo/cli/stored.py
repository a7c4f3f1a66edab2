"""What the command line takes from weights and checkpoints, and what it says about it."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from ln_zoo.checkpoints import check_whole
from ln_zoo.models.base import ZooModule, public_module


def with_model(argv: list[str]) -> list[str]:
    """Puts the model that ``--weights`` or ``--ckpt_path`` names before the user's own arguments.

    So ``test --weights NAME`` needs no ``--model``, and whatever the user gives wins. The path
    ``last`` names nothing yet: finding the run needs the model.

    Args:
        argv: arguments, the subcommand first.

    Raises:
        ValueError: for both options at once, an unreadable configuration file or checkpoint.
        FileNotFoundError: if there is no such checkpoint.
    """
    weights, ckpt_path = given(argv, "weights"), given(argv, "ckpt_path")
    if weights and ckpt_path:
        raise ValueError("--ckpt_path resumes a run, --weights starts a new one: give one of them")
    if weights:
        class_path, init_args, _ = _from_weights(weights)
    elif ckpt_path and ckpt_path != "last":
        class_path, init_args = _from_checkpoint(read_checkpoint(ckpt_path), ckpt_path)
    else:
        return argv
    config = {"model": {"class_path": class_path, "init_args": init_args}}
    return [argv[0], "--config", json.dumps(config), *argv[1:]]


def given(argv: list[str], option: str) -> str | None:
    """The value of a top-level option: of an argument, else of a file, else of the environment."""
    value = os.environ.get(f"LN_ZOO_{argv[0]}__{option}".upper())
    for config in _configs(argv):
        value = config.get(option, value)
    for argument, following in zip(argv, [*argv[1:], None], strict=True):
        if argument == f"--{option}":
            value = following
        elif argument.startswith(f"--{option}="):
            value = argument.partition("=")[2]
    return None if value == "null" else value


def read_checkpoint(path: str) -> dict[str, Any]:
    """Reads a Lightning checkpoint without unpickling anything but plain values and tensors.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no checkpoint, is damaged, or holds more than plain values.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"there is no checkpoint {path!r}: give a file, or `last` for that of the newest run"
        )
    check_whole(path)
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["state_dict"]  # asked for here, so that its absence is told here
    # An archive cut short fails in the system's seek, with an error that names no file.
    except (pickle.UnpicklingError, EOFError, OSError, RuntimeError, KeyError, TypeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{path} is no readable Lightning checkpoint (damaged, cut short, or of another "
            f"program): {first}"
        ) from error
    return checkpoint


def load_weights(model: ZooModule, weights: str) -> None:
    """Loads published weights or those of a checkpoint into a model.

    Raises:
        ValueError: if they do not fit; the message names the differing keys.
    """
    state = _from_weights(weights)[2]
    check_fits(model, state, weights)
    model.load_state_dict(state)


def load_model(weights: str) -> ZooModule:
    """The model of published weights or of a checkpoint, in evaluation mode, on the CPU.

    Args:
        weights: a name, a card folder or a hub id, as `ln_zoo.load` takes them, or a .ckpt file.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ImportError: if its class is neither installed nor in the current folder.
        ValueError: as `ln_zoo.load`; if a checkpoint cannot be read, is of no model of the zoo, or
            does not fit its own arguments.
    """
    if not weights.endswith(".ckpt"):
        from ln_zoo.zoo import load

        return load(weights)
    class_path, init_args, state = _from_weights(weights)
    module, _, name = class_path.rpartition(".")
    cls = getattr(importlib.import_module(module), name, None)
    if not (isinstance(cls, type) and issubclass(cls, ZooModule)):
        raise ValueError(
            f"{weights} is of {class_path}, which is no model of ln_zoo or on its base"
        )
    model = cls(**init_args)
    check_fits(model, state, weights)
    model.load_state_dict(state)
    return model.eval()


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
        if value is not None and name in stored and stored[name] != value:
            note(
                f"note: {name} = {value} is ignored: {path} was trained with {stored[name]} "
                "(--weights in place of --ckpt_path starts afresh from its weights)"
            )


def tell_linked(argv: list[str], name: str) -> None:
    """Says that a model argument which the data decide was given in vain."""
    options = (f"--model.{name}", f"--model.init_args.{name}")
    found = any(a.split("=")[0] in options for a in argv)
    for config in _configs(argv):
        model = config.get("model")
        init_args = model.get("init_args") if isinstance(model, dict) else None
        found = found or (isinstance(init_args, dict) and name in init_args)
    if found:
        note(f"note: model.{name} is ignored: it is taken from data.{name}")


def _configs(argv: list[str]) -> list[dict[str, Any]]:
    """The content of the configuration files among the arguments.

    Raises:
        ValueError: if one of them is no YAML.
    """
    configs = []
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        if argument in ("--config", "-c"):
            path = following
        elif argument.startswith(("--config=", "-c=")):
            path = argument.partition("=")[2]
        else:
            continue
        # A configuration may also be given in place of a path; os.path copes with any text.
        if os.path.isfile(path):
            try:
                content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
            except yaml.MarkedYAMLError as error:
                line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
                raise ValueError(f"{path}{line} is no YAML: {error.problem}") from error
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                raise ValueError(f"{path} is no text that YAML could read: {error}") from error
            if not isinstance(content, dict):
                raise ValueError(f"{path} holds no options: expected YAML with lines `name: value`")
            configs.append(content)
    return configs


def _from_weights(weights: str) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Class path, arguments and state of published weights or of a checkpoint file."""
    if weights.endswith(".ckpt"):
        checkpoint = read_checkpoint(weights)
        return *_from_checkpoint(checkpoint, weights), checkpoint["state_dict"]
    from ln_zoo.zoo import load

    model = load(weights)
    cls = type(model)
    init_args = {k: v for k, v in model.hparams.items() if not k.startswith("_")}
    return f"{public_module(cls)}.{cls.__qualname__}", init_args, model.state_dict()


def _from_checkpoint(checkpoint: dict[str, Any], path: str) -> tuple[str, dict[str, Any]]:
    hparams = dict(checkpoint.get("hyper_parameters", {}))
    if "_class_path" not in hparams:
        raise ValueError(
            f"{path} does not say which model it holds: it was not written by a model of ln_zoo"
        )
    class_path = hparams["_class_path"]
    return class_path, {k: v for k, v in hparams.items() if not k.startswith("_")}


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
