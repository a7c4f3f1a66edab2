"""The classes that a downloaded file may name: those in ln_zoo, by short name.

Card folders are untrusted. A class path in a card is never imported, since importing runs code. A
card of a user's class has its dotted path, and the caller passes the class.
"""

from __future__ import annotations

import inspect
from typing import Any

import ln_zoo.models
import ln_zoo.norms
from ln_zoo.models.base import ZooModule
from ln_zoo.norms import Norm
from ln_zoo.zoo.errors import CardError, first_line
from ln_zoo.zoo.names import nearest


def _subclasses(room: Any, base: type[Any]) -> dict[str, type[Any]]:
    classes = {name: cls for name in room.__all__ if inspect.isclass(cls := getattr(room, name))}
    return {k: cls for k, cls in classes.items() if issubclass(cls, base) and cls is not base}


#: Classes of the zoo by name.
MODELS: dict[str, type[ZooModule]] = _subclasses(ln_zoo.models, ZooModule)
NORMS: dict[str, type[Norm]] = _subclasses(ln_zoo.norms, Norm)


def model_class(name: str) -> type[ZooModule]:
    """The model of this class name."""
    return _look_up(name, MODELS, "model")


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


def decode_norm(config: dict[str, Any]) -> Norm:
    """The norm that a card names."""
    return build(_look_up(config["class"], NORMS, "norm"), config["init_args"])


def build(cls: type[Any], init_args: dict[str, Any]) -> Any:
    """An instance of one of our classes from a card's plain arguments."""
    known = list(inspect.signature(cls).parameters)
    for key, value in init_args.items():
        if key not in known:
            raise CardError(
                f"{cls.__name__} takes no argument {key!r}{nearest(key, known)}; the card was "
                "written by another version of ln_zoo, or by hand. Known are "
                f"{', '.join(known)}"
            )
        if _names_a_class(value):
            raise CardError(
                f"{cls.__name__}: argument {key!r} holds a class path; none is imported from a card"
            )
    try:
        return cls(**init_args)
    except CardError:
        raise
    except Exception as error:
        # Of any class: an argument of a wrong type fails where it is first used.
        raise CardError(
            f"{cls.__name__} refuses the card's arguments: {first_line(error)}"
        ) from error


def _names_a_class(value: Any) -> bool:
    # Models build a norm from such a dict, importing the path.
    if isinstance(value, dict):
        return "class_path" in value or any(map(_names_a_class, value.values()))
    return isinstance(value, list) and any(map(_names_a_class, value))


def _look_up(name: str, classes: dict[str, type[Any]], what: str) -> type[Any]:
    if name in classes:
        return classes[name]
    if is_own(name):
        instance = name.rpartition(".")[2] + ("()" if what == "norm" else "")
        raise CardError(
            f"the card's {what} {name!r} is not one of ln_zoo's, and classes named in a file are "
            f"not imported: if it is yours, import it and pass it, as in load(..., "
            f"{what}={instance})"
        )
    raise CardError(
        f"unknown {what} {name!r}: it is not one of ln_zoo's, and nothing was imported; known are "
        f"{', '.join(sorted(classes))}{nearest(name, classes)}"
    )
