"""What a file of a stranger may choose: values of the kinds that annotations name, and classes.

A file selects, it never spells: its values reach constructors as Python objects, no text in it is
parsed, and no module is imported because it names one. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, get_args, get_origin

from ln_zoo.utils import schema
from ln_zoo.utils.class_paths import import_path, loaded
from ln_zoo.utils.errors import CardError, NotAllowedError
from ln_zoo.utils.names import nearest

#: A public name of ours, which an argument without annotation may hold.
_OWN_NORM = re.compile(r"ln_zoo\.norms\.\w+")
#: Annotations that any plain value, or any mapping or sequence of them, fits.
_ANY = (Any, object, dict, list, tuple)


@dataclass(frozen=True)
class Reader:
    """Reads the arguments of classes that a file holds, as their annotations say.

    A class may be one of ln_zoo's, a subclass of the annotated class whose module is imported
    already, or one that the user named.
    """

    where: str  #: name of the file, in errors
    #: What to do about a class that the user trusts; ``{place}`` (``model``, ``model.norm``),
    #: ``{path}``, ``{module}`` and ``{argument}`` (``model=Mine``, ``norm=Mine()``) stand for it.
    remedy: str = "give --import {module}"
    named: Collection[str] = ()  #: class paths that the user gave
    loaded: bool = True  #: whether a module that is imported already will do

    def find(self, path: object, base: type, place: str = "model") -> Any:
        """The subclass of ``base`` at a class path; NotAllowedError if it may not be chosen."""
        found = None
        if isinstance(path, str):
            if path in self.named:
                found = _imported(path, self.where)
            elif self.loaded or path.startswith("ln_zoo."):
                found = loaded(path)
        if found is None:
            self._refuse(path, place)
        if not (isinstance(found, type) and issubclass(found, base)):
            raise NotAllowedError(f"{self.where}: {place} is {path}, not a {base.__name__}")
        return found

    def arguments(
        self, cls: type, values: Mapping[str, Any], place: str = "model"
    ) -> dict[str, Any]:
        """The arguments of a class, as objects. CardError for an unknown one or another kind."""
        _check_plain(values, f"{self.where}: {place}")
        known, others = schema.argument_types(cls)
        found = {}
        for name, value in values.items():
            if name not in known and not others:
                raise CardError(
                    f"{self.where}: {cls.__name__} takes no argument {name!r:.80}"
                    f"{nearest(str(name), known)}; it was written by another version of this "
                    f"class, or by hand. Known are {', '.join(known)}"
                )
            at = f"{self.where}: {place}.{name}"
            found[name] = schema.read_as(known.get(name, Any), value, at, self._resolve)
        return found

    def _resolve(self, kind: Any, value: Any, where: str) -> Any:
        """A class, a function, an instance, or plain values that name no class."""
        place = where.removeprefix(f"{self.where}: ")
        if get_origin(kind) is type:
            path = value.get("class_path") if isinstance(value, dict) else value
            return self.find(path, get_args(kind)[0], place)
        if get_origin(kind) is Callable:
            if isinstance(value, str) and value in self.named:
                return _imported(value, self.where)
            self._refuse(value, place)
        path = _class_path(value)
        base = kind if isinstance(kind, type) and kind not in _ANY else None
        if kind in _ANY[:2] and isinstance(path, str) and isinstance(value, dict):
            # An argument without annotation.
            base = object if path in self.named or _OWN_NORM.fullmatch(path) else None
        if base is not None and isinstance(value, dict) and "class_path" in value:
            return self._build(base, value, where, place)
        if base is None and path is not None:
            self._refuse(path, place)
        if base is not None or (kind in _ANY[2:] and not isinstance(value, kind)):
            raise CardError(f"{where} must be of type {kind.__name__}, got {value!r:.200}")
        return value

    def _build(self, base: type, config: dict[str, Any], where: str, place: str) -> Any:
        cls = self.find(config["class_path"], base, place)
        init_args = schema.read_as(dict, config.get("init_args", {}), where)
        arguments = self.arguments(cls, init_args, place)
        try:
            return cls(**arguments)
        except (TypeError, ValueError) as error:
            raise CardError(f"{where}: {error}") from error

    def _refuse(self, path: object, place: str) -> NoReturn:
        module, _, name = str(path).rpartition(".")
        value = name if place == "model" else f"{name}()"
        argument = f"{place.rpartition('.')[2]}={value}"
        how = self.remedy.format(place=place, path=path, module=module, argument=argument)
        raise NotAllowedError(
            f"{self.where}: {place} asks for {path!r:.80}, which is not one of ln_zoo's classes, "
            f"and nothing is imported because a file names it: if you trust the file, {how}"
        )


def _check_plain(values: object, where: str) -> None:
    """Raises CardError unless all values are plain, finitely many and nested in few levels."""
    try:
        json.dumps(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise CardError(f"{where}: expected numbers, text, lists and mappings: {error}") from error


def _class_path(value: object) -> Any:
    """The first class path within plain values, or None."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            return value["class_path"] or ""
        value = list(value.values())
    inner = map(_class_path, value if isinstance(value, list | tuple) else ())
    return next((path for path in inner if path is not None), None)


def _imported(path: str, where: str) -> object:
    try:
        return import_path(path)
    except ImportError as error:
        raise CardError(f"{where}: {error}") from error
