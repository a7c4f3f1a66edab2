"""Data of a file, read into dataclasses: exact keys and types."""

from __future__ import annotations

import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ln_zoo.zoo.names import nearest

_T = TypeVar("_T")


class Record:
    """Base of dataclasses whose fields can also be read by key, as in the file."""

    def __getitem__(self, key: str) -> Any:
        try:
            return getattr(self, key)
        except AttributeError:
            raise KeyError(key) from None


def read(kind: type[_T], value: Any, where: str) -> _T:
    """An instance of a dataclass from a mapping. Fields with a default are optional.

    Args:
        kind: the dataclass. Types of fields may be dataclasses, unions, ``dict[str, X]``,
            ``list[X]``, ``tuple[X, ...]`` and plain classes.
        value: content of the file.
        where: the file and the place in it, for messages.

    Raises:
        ValueError: for a missing or unknown key, or a value of another type.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class File:
        ...     sha256: str
        ...     size: int = 0
        >>> read(File, {"sha256": "b93f"}, "config.json")
        File(sha256='b93f', size=0)
        >>> read(File, {"sha": "b93f"}, "config.json")
        Traceback (most recent call last):
            ...
        ValueError: config.json: 'sha256' is missing
        >>> read(File, {"sha256": "b93f", "size": True}, "config.json")
        Traceback (most recent call last):
            ...
        ValueError: config.json: size must be of type int, got True
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a mapping, got {value!r:.200}")
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind) if f.init}  # type: ignore[arg-type]
    for name, field in known.items():
        if name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where}: {name!r} is missing")
    for key in value:
        if key not in known:
            guess = nearest(str(key), known)
            raise ValueError(
                f"{where}: unknown key {key!r:.80}{guess}; known are {', '.join(known)}"
            )
    return kind(**{key: _read_as(hints[key], v, f"{where}: {key}") for key, v in value.items()})


def _read_as(kind: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind):
        return read(kind, value, where)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):
        for each in inner:
            try:
                return _read_as(each, value, where)
            except ValueError:
                continue
    elif origin in (list, tuple) and isinstance(value, list):
        return origin(_read_as(inner[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    elif origin is dict and isinstance(value, dict):
        return {str(k): _read_as(inner[1], v, f"{where}[{k!r:.80}]") for k, v in value.items()}
    elif (
        origin is None
        and isinstance(value, (int, float) if kind is float else kind)
        and (
            kind is bool or type(value) is not bool  # to Python a bool is an int
        )
    ):
        return value
    name = kind.__name__ if origin is None and isinstance(kind, type) else str(kind)
    name = name.replace("typing.", "")
    raise ValueError(f"{where} must be of type {name}, got {value!r:.200}")
