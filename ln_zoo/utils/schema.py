"""Values of a file, read as annotations say: exact types and keys, and conditions on values."""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from ln_zoo.utils.errors import CardError, NotAllowedError
from ln_zoo.utils.files import FROM_USER
from ln_zoo.utils.names import nearest

_T = TypeVar("_T")
#: Reads a value for an annotation that is not one of plain values: annotation, value, place.
Resolve = Callable[[Any, Any, str], Any]
#: Upper bound of lists in untrusted files; only vocabularies are longer.
_MOST_VALUES = 10_000
_PLAIN = (bool, int, float, str, bytes, type(None))


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

    Annotations of fields are those of `read_as`. ``where`` is the place of the value, for messages.

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
        ln_zoo.utils.errors.CardError: config.json: size must be positive, got 0
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
    return kind(**{key: read_as(hints[key], v, f"{where}: {key}") for key, v in value.items()})


def read_as(kind: Any, value: Any, where: str, resolve: Resolve | None = None) -> Any:
    """A value of an annotated type.

    Args:
        kind: a plain class, a dataclass, ``Literal``, ``dict[str, X]``, ``list[X]``, a tuple, a
            union, or one of these with a condition.
        value: plain data.
        where: place of the value, for messages.
        resolve: reads values of ``Any`` and of all other annotations; plain mappings then have no
            key ``class_path``. Default: ``Any`` takes every value, and other annotations take
            instances of theirs.

    Raises:
        CardError: for another type, or a condition that does not hold.

    Example:
        >>> read_as(tuple[int, int] | None, [28, 28], "config.json: image_size")
        (28, 28)
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        if FROM_USER in inner:
            raise CardError(f"{where} cannot name a file, got {value!r:.200}")
        found = read_as(inner[0], value, where, resolve)
        for fit, be in (each for each in inner[1:] if isinstance(each, Must)):
            if not fit(found):
                raise CardError(f"{where} must be {be}, got {value!r:.200}")
        return found
    elif origin in (Union, types.UnionType):
        fitting = [k for k in inner if k is not type(None) or value is None]
        # A list stays a list where both lists and tuples are accepted.
        fitting.sort(key=lambda k: (get_origin(k) or k) is not type(value))
        if len(fitting) == 1:
            return read_as(fitting[0], value, where, resolve)
        for each in fitting:
            try:
                return read_as(each, value, where, resolve)
            except NotAllowedError:
                raise
            except CardError:
                continue
    elif origin is Literal:
        for word in inner:
            if type(word) is type(value) and word == value:
                return word
        raise CardError(f"{where} must be one of {', '.join(map(repr, inner))}, got {value!r:.200}")
    elif origin in (list, tuple):
        alike = origin is list or inner[-1] is ...
        if isinstance(value, list | tuple) and len(value) > _MOST_VALUES and inner[0] is not str:
            raise NotAllowedError(f"{where} has {len(value):,} values, more than any model takes")
        if isinstance(value, list | tuple) and (alike or len(inner) == len(value)):
            if alike and inner[0] in _PLAIN and {*map(type, value)} <= {inner[0]}:
                return origin(value)  # a vocabulary has thousands of words
            kinds = [inner[0]] * len(value) if alike else inner
            both = enumerate(zip(kinds, value, strict=True))
            return origin(read_as(k, v, f"{where}[{i}]", resolve) for i, (k, v) in both)
    elif origin is dict:
        if isinstance(value, dict) and not (resolve and "class_path" in value):
            pairs = value.items()
            return {str(k): read_as(inner[1], v, f"{where}[{k!r:.80}]", resolve) for k, v in pairs}
    elif kind in _PLAIN:
        number = (int, float) if kind is float else kind
        # To Python a bool is an int.
        if isinstance(value, number) and isinstance(value, bool) == (kind is bool):
            return value
    elif resolve is not None:
        return resolve(kind, value, where)
    elif is_dataclass(kind):
        return read(kind, value, where)  # type: ignore[arg-type]
    elif kind is Any or (origin is None and isinstance(value, kind)):
        return value
    name = str(getattr(kind, "__name__", kind) if origin is None else kind)
    raise CardError(f"{where} must be of type {name.replace('typing.', '')}, got {value!r:.200}")


def argument_types(cls: type) -> tuple[dict[str, Any], bool]:
    """Annotations of a constructor's parameters, and whether it takes others.

    Keyword arguments that are passed on are looked up in the base classes.
    """
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in base.__dict__:
            continue
        init: Any = base.__init__  # type: ignore[misc]
        # Some modules import names of annotations for type checkers only.
        names = vars(typing) | vars(collections.abc) | getattr(init, "__globals__", {})
        try:
            hints = typing.get_type_hints(init, names, include_extras=True)
        except (NameError, TypeError, AttributeError):
            hints = {}
        parameters = list(inspect.signature(base).parameters.values())
        passed_on = [p for p in parameters if p.kind is p.VAR_KEYWORD]
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                found.setdefault(parameter.name, hints.get(parameter.name, Any))
        if not passed_on:
            return found, False
    return found, True
