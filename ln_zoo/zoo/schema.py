"""Data of a file, read into dataclasses: exact keys and types, and conditions on values."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from ln_zoo.zoo.errors import CardError
from ln_zoo.zoo.names import nearest

_T = TypeVar("_T")


class Record:
    """Base of dataclasses whose fields can also be read by key, as in the file."""

    def __getitem__(self, key: str) -> Any:
        try:
            return getattr(self, key)
        except AttributeError:
            raise KeyError(key) from None


class Must(NamedTuple):
    """A condition on a value, in ``Annotated[type, Must(...)]``."""

    fit: Callable[[Any], object]
    be: str  #: what a value must be, for the message


def read(kind: type[_T], value: Any, where: str) -> _T:
    """An instance of a dataclass from the content of a file. Fields with a default are optional.

    Types of fields may be dataclasses, unions, ``dict[str, X]``, ``list[X]``, ``tuple[X, ...]``,
    plain classes, and these with a condition. ``where`` is the place of the value, for messages.

    Raises:
        CardError: for a missing or unknown key, another type, or a condition that does not hold.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class File:
        ...     name: str
        ...     size: Annotated[int, Must(lambda size: size > 0, "positive")] = 1
        >>> read(File, {"name": "a"}, "config.json")
        File(name='a', size=1)
        >>> read(File, {"name": "a", "size": 0}, "config.json")
        Traceback (most recent call last):
            ...
        ln_zoo.zoo.errors.CardError: config.json: size must be positive, got 0
    """
    if not isinstance(value, dict):
        raise CardError(f"{where}: expected a mapping, got {value!r:.200}")
    hints = get_type_hints(kind, include_extras=True)
    known = {f.name: f for f in fields(kind) if f.init}  # type: ignore[arg-type]
    for name, f in known.items():
        if name not in value and f.default is MISSING and f.default_factory is MISSING:
            raise CardError(f"{where}: {name!r} is missing")
    for key in value:
        if key not in known:
            guess = nearest(str(key), known)
            raise CardError(
                f"{where}: unknown key {key!r:.80}{guess}; known are {', '.join(known)}"
            )
    return kind(**{key: _read_as(hints[key], v, f"{where}: {key}") for key, v in value.items()})


def _read_as(kind: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        found, (fit, be) = _read_as(inner[0], value, where), inner[1]
        if fit(found):
            return found
        raise CardError(f"{where} must be {be}, got {value!r:.200}")
    if is_dataclass(kind):
        return read(kind, value, where)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):
        for each in inner:
            try:
                return _read_as(each, value, where)
            except CardError:
                continue
    elif origin in (list, tuple) and isinstance(value, list):
        return origin(_read_as(inner[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    elif origin is dict and isinstance(value, dict):
        return {str(k): _read_as(inner[1], v, f"{where}[{k!r:.80}]") for k, v in value.items()}
    elif (
        origin is None
        and isinstance(value, (int, float) if kind is float else kind)
        and isinstance(value, bool) == (kind is bool)  # to Python a bool is an int
    ):
        return value
    name = str(getattr(kind, "__name__", kind) if origin is None else kind)
    raise CardError(f"{where} must be of type {name.replace('typing.', '')}, got {value!r:.200}")
