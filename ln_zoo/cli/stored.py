"""What the command line takes from weights and checkpoints, and what it says about it."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from torch import Tensor

from ln_zoo.models.base import ZooModule, public_module

#: Words that Lightning resolves itself.
_KEYWORDS = ("last", "best", "hpc")


def with_model(argv: list[str]) -> list[str]:
    """Puts the model that ``--weights`` or ``--ckpt_path`` names before the user's own arguments.

    So ``test --weights NAME`` needs no ``--model``, and whatever the user gives wins.
    """
    source = _value(argv, "--weights")
    if source is None:
        source = _value(argv, "--ckpt_path")
        if source is None or source in _KEYWORDS:
            return argv
        class_path, init_args = _from_checkpoint(read_checkpoint(source), source)
    else:
        class_path, init_args, _ = _from_weights(source)
    config = {"model": {"class_path": class_path, "init_args": init_args}}
    return [argv[0], "--config", json.dumps(config), *argv[1:]]


def read_checkpoint(path: str) -> dict[str, Any]:
    """Reads a Lightning checkpoint without unpickling anything but plain values and tensors.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no checkpoint, was cut short, or holds more than plain values.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no checkpoint {path!r}")
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["state_dict"]  # noqa: B018  asked for here, so that its absence is told here
    except (pickle.UnpicklingError, EOFError, RuntimeError, KeyError, TypeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} is no readable Lightning checkpoint: {first}") from error
    return checkpoint


def load_weights(model: ZooModule, weights: str) -> None:
    """Loads published weights or those of a checkpoint into a model.

    Raises:
        ValueError: if they do not fit; the message names the differing keys.
    """
    state = _from_weights(weights)[2]
    check_fits(model, state, weights)
    model.load_state_dict(state)


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
            f"the weights of {where} do not fit this {type(model).__name__}, which has another norm "
            f"or size: {'; '.join(differing[:8])}{more}"
        )


def tell_ignored(given: Namespace, used: Namespace, path: str) -> None:
    """Says which of the user's model arguments lose against those in the checkpoint."""
    mine, stored = _flat(given), _flat(used)
    for name, value in mine.items():
        if name in stored and stored[name] != value:
            print(
                f"note: {name} = {value} is ignored: {path} was trained with {stored[name]} "
                "(--weights in place of --ckpt_path starts afresh from its weights)",
                file=sys.stderr,
            )


def tell_linked(argv: list[str], name: str) -> None:
    """Says that a model argument which the data decide was given in vain."""
    options = (f"--model.{name}", f"--model.init_args.{name}")
    given = any(a.split("=")[0] in options for a in argv)
    for config in _configs(argv):
        model = config.get("model")
        init_args = model.get("init_args") if isinstance(model, dict) else None
        given = given or (isinstance(init_args, dict) and name in init_args)
    if given:
        print(f"note: model.{name} is ignored: it is taken from data.{name}", file=sys.stderr)


def _value(argv: list[str], option: str) -> str | None:
    """The value of an option, the last one given."""
    value = None
    for argument, following in zip(argv, [*argv[1:], None], strict=True):
        if argument == option:
            value = following
        elif argument.startswith(f"{option}="):
            value = argument.partition("=")[2]
    return value


def _configs(argv: list[str]) -> list[dict[str, Any]]:
    """The content of the configuration files among the arguments."""
    paths = [
        following if argument in ("--config", "-c") else argument.partition("=")[2]
        for argument, following in zip(argv, [*argv[1:], ""], strict=True)
        if argument in ("--config", "-c") or argument.startswith("--config=")
    ]
    loaded = [yaml.safe_load(Path(p).read_text()) for p in paths if Path(p).is_file()]
    return [config for config in loaded if isinstance(config, dict)]


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
    flat = {"model": model.get("class_path")}
    for part in ("init_args", "dict_kwargs"):
        values = model.get(part) or Namespace()
        items = vars(values.as_flat() if isinstance(values, Namespace) else Namespace(values))
        flat |= {f"model.{k.replace('init_args.', '')}": v for k, v in items.items()}
    return flat
