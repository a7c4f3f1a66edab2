"""Classes of the zoo by the short names in cards; a class of a card's author has a dotted path."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import ln_zoo.models
import ln_zoo.norms
from ln_zoo.models.base import ZooModule
from ln_zoo.norms import Norm
from ln_zoo.zoo.errors import CardError
from ln_zoo.zoo.names import nearest


def _subclasses(room: Any, base: type[Any]) -> dict[str, type[Any]]:
    classes = {name: cls for name in room.__all__ if inspect.isclass(cls := getattr(room, name))}
    return {k: cls for k, cls in classes.items() if issubclass(cls, base) and cls is not base}


#: Classes of the zoo by name.
MODELS: dict[str, type[ZooModule]] = _subclasses(ln_zoo.models, ZooModule)
NORMS: dict[str, type[Norm]] = _subclasses(ln_zoo.norms, Norm)


def model_class(name: str) -> type[ZooModule]:
    """The model of this short name."""
    return MODELS[class_path(name, MODELS, "model").rpartition(".")[2]]


def is_own(name: str) -> bool:
    """Whether a card's class is the author's own, which has a dotted path."""
    return "." in name


def model_name(cls: type[Any]) -> str:
    """Name of a model's class in cards: short for ours, dotted for a class of the user's own."""
    if MODELS.get(cls.__name__) is cls:
        return cls.__name__
    path = f"{cls.__module__}.{cls.__qualname__}"
    if not issubclass(cls, ZooModule):
        raise CardError(
            f"{path} is not an ln_zoo.models.ZooModule: derive the model from it, so that its "
            "arguments are known"
        )
    return path


def check_stored(model: ZooModule) -> None:
    """Checks that the arguments which make a model again are stored."""
    for name, parameter in inspect.signature(type(model)).parameters.items():
        optional = parameter.default is not parameter.empty
        optional |= parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name not in model.hparams and not (optional and name != "norm"):
            raise CardError(
                f"{type(model).__name__} does not store its argument {name!r}, so the model could "
                "not be rebuilt: call self.save_hyperparameters() and then "
                "self.resolve_hyperparameters(norm) in its __init__"
            )


def encode_norm(config: dict[str, Any]) -> dict[str, Any]:
    """A norm in the form of cards: short name and arguments.

    Example:
        >>> encode_norm({"class_path": "ln_zoo.norms.LayerNorm", "init_args": {"eps": 0.001}})
        {'class': 'LayerNorm', 'init_args': {'eps': 0.001}}
    """
    name = config["class_path"].removeprefix("ln_zoo.norms.")
    return {
        "class": name if name in NORMS else config["class_path"],
        "init_args": dict(config.get("init_args", {})),
    }


def class_path(name: str, classes: Mapping[str, type[Any]], what: str) -> str:
    """The path of one of our classes; of a class of the card's author, its name is the path."""
    if name in classes:
        return f"ln_zoo.{what}s.{name}"
    if is_own(name):
        return name
    raise CardError(
        f"unknown {what} {name!r}: it is not one of ln_zoo's; known are "
        f"{', '.join(sorted(classes))}{nearest(name, classes)}"
    )
