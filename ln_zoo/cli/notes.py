"""Notes on the arguments of a run, and checks that end it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from ln_zoo.cli.arguments import Arguments
from ln_zoo.models.base import ZooModule
from ln_zoo.utils.class_paths import class_path, import_path
from ln_zoo.zoo.loading import Source

#: The largest numbers that are valid in torch.
_LARGEST_INT, _LARGEST_FLOAT = 2**63 - 1, 3.4e38
#: Lower bounds of options by which Lightning divides without a check.
_LEAST = {
    "trainer.accumulate_grad_batches": 1,
    "trainer.check_val_every_n_epoch": 1,
    "lr_scheduler_config.frequency": 1,
}


@rank_zero_only
def print_note(text: str, kind: str = "note") -> None:
    """Print a note to stderr, in one process only."""
    print(f"{kind}: {text}", file=sys.stderr)


# Checks


def check_numbers(settings: Namespace) -> None:
    """Raises ValueError, naming the option, for numbers that torch or Lightning cannot use."""
    for key, value in vars(settings.as_flat()).items():
        name = key.replace("init_args.", "")
        for each in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(each, int | float):
                continue
            largest = _LARGEST_INT if isinstance(each, int) else _LARGEST_FLOAT
            if not -largest <= each <= largest:
                raise ValueError(f"{name} must be a number of at most {largest:.2g}, got {each:g}")
            if each < _LEAST.get(name, each):
                raise ValueError(f"{name} must be at least {_LEAST[name]}, got {each}")


def check_fit(model: LightningModule, data: LightningDataModule) -> None:
    """Raises ValueError if model and data declare different kinds of batches."""
    takes = getattr(model, "input_kinds", None)
    # `gives`, the deprecated name, warns.
    gives = data.batch_kind if hasattr(data, "batch_kind") else getattr(data, "gives", None)
    if takes and gives and gives not in takes:
        raise ValueError(
            f"{type(model).__name__} takes {' or '.join(takes)}, and {type(data).__name__} gives "
            f"{gives}: choose others with --data or --model"
        )


def check_words(data: LightningDataModule, words: list[str], given: Arguments, source: str) -> None:
    """Checks that data number words as a stored model does; notes an ignored vocabulary.

    ``data`` already has these words if it accepts a vocabulary; otherwise ValueError. ``source`` is
    the weights or checkpoint.
    """
    own = getattr(data, "vocabulary", None)
    if own is not None and list(own) != words:
        raise ValueError(
            f"{source} has a vocabulary of {len(words):,} words, {type(data).__name__} has another "
            f"one of {len(own):,}: choose data with the argument `vocabulary`"
        )
    if given.last("data.vocabulary") is not None:
        print_note(f"data.vocabulary is ignored: {source} has its own, of {len(words):,} words")


def check_complete(checkpoint: dict[str, Any], path: str, command: str) -> None:
    """Raises ValueError if a checkpoint lacks entries that Lightning needs."""
    needed = ["pytorch-lightning_version", "epoch", "global_step"]
    if command == "fit":
        needed += ["loops", "callbacks", "optimizer_states", "lr_schedulers"]
    if missing := [key for key in needed if key not in checkpoint]:
        what = "resumed" if command == "fit" else "read by Lightning"
        raise ValueError(
            f"{path} cannot be {what}: it lacks {', '.join(missing)}; --weights {path} in place of "
            "--ckpt_path starts from its weights"
        )


def check_finite(values: Mapping[str, Tensor], what: str) -> None:
    """Raises ValueError if values are NaN or infinite, with the name of the first.

    ``what`` describes them in the message.
    """
    bad = [name for name, value in values.items() if not bool(torch.isfinite(value).all())]
    if bad:
        more = f", as are {len(bad) - 1} more" if len(bad) > 1 else ""
        raise ValueError(
            f"{what} cannot be used: {bad[0]} is not finite{more}: the training diverged; take an "
            "earlier checkpoint"
        )


# Notes


def note_ignored(given: Arguments, asked: Namespace, source: Source, path: str) -> None:
    """Notes the user's model arguments that the checkpoint at ``path`` overrides.

    ``asked`` are the parsed settings of the model, ``source`` is the checkpoint's.
    """
    stored = _flat({"class_path": source.class_path, "init_args": source.stored})
    for name, value in _flat(plain(asked)).items():
        # None stands for the model's default. `note_linked` and `check_words` note a vocabulary.
        if name == "model.vocabulary" or value is None or name not in stored:
            continue
        if stored[name] != value and given.has(name):
            print_note(
                f"{name} = {value} is ignored: {path} was trained with {stored[name]} "
                "(--weights in place of --ckpt_path starts afresh from its weights)"
            )


def note_linked(given: Arguments, name: str) -> None:
    """Notes a model argument that the data override."""
    if given.has(f"model.{name}"):
        print_note(f"model.{name} is ignored: data.{name} sets it")


def note_default_norm(given: Arguments, model: LightningModule) -> None:
    """Notes the norm that ``norm: null`` selects."""
    chosen = given.has("model.norm") and given.last("model.norm") is None
    if chosen and isinstance(model, ZooModule):
        name = model.hparams["norm"]["class_path"].rpartition(".")[2]
        print_note(
            f"model.norm is null, which stands for the default, {name}; give Identity "
            "for no normalisation"
        )


def _flat(value: object, name: str = "model") -> dict[str, Any]:
    """Classes and arguments by option, such as ``model.norm.eps``."""
    if not (isinstance(value, dict) and "class_path" in value):
        return {name: value}
    flat: dict[str, Any] = {name: class_path(import_path(value["class_path"]))}
    for key, inner in (value.get("init_args") or {}).items():
        flat |= _flat(inner, f"{name}.{key}")
    return flat


def plain(value: Any) -> Any:
    """Settings as plain data; classes and functions by their path."""
    if isinstance(value, Namespace):
        value = value.as_dict()
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if inspect.isroutine(value) or inspect.isclass(value):
        return class_path(value)
    return value
