"""Errors of the command line, cut to their cause, with the nearest known name."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from argparse import ArgumentError
from collections.abc import Iterable, Iterator
from typing import NoReturn

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from ln_zoo.cli.names import nearest

# What jsonargparse says around a cause: which types it tried, and that None was one of them.
_NOISE = re.compile(
    r"Does not validate against any of the Union subtypes|Subtypes: |Errors:$|Given value|"
    r"Expected a <class 'NoneType'>|Expected a path but .* either not accessible or invalid|$"
)
_KEY = re.compile(r'(?:Parser key|Key) "([\w.]+)":\s*(.*)')
_OWNER = re.compile(r"Problem with given class_path '([\w.]+)':\s*(.*)")
_OPTION = re.compile(r"(?:Option|Key) '([\w.-]+)' is not (?:accepted|expected)|"
                     r"Group '[\w.]*' does not accept nested key '([\w.]+)'")
_NO_CLASS = re.compile(r"Expected a dot import path string: (.*)")
_UNKNOWN = re.compile(r"[Uu]nrecognized arguments?: (.*)")
_NOT_OF_COMMAND = re.compile(r"Subcommand '(\w+)' does not accept option '([\w.]+)'")
_NO_MODULE = re.compile(r"No module named '(.*)'")


def cause(message: str, parser: ArgumentParser | None = None) -> str:
    """What went wrong and where, out of the nested account that jsonargparse gives.

    Args:
        message: the account, or any other message, which is returned as it is.
        parser: knows the options that can be suggested in place of a misspelt one.
    """
    place: list[str] = []
    owner = ""
    causes: list[str] = []
    for line in message.splitlines():
        text = line.strip().removeprefix("- ").strip()
        if match := _KEY.fullmatch(text):
            place.append(match[1])
            text = match[2]
        elif match := _OWNER.fullmatch(text):
            owner, text = match[1], match[2]
        if _NOISE.match(text):
            continue
        if match := _OPTION.search(text):
            text = _unknown_option(match[1] or match[2], owner, parser, place)
        elif match := _NO_CLASS.fullmatch(text):
            text = _unknown_class(match[1], place)
        elif match := _UNKNOWN.search(text):
            text = _unknown_arguments(match[1].split(), parser)
        elif match := _NOT_OF_COMMAND.search(text):
            text = f"{match[1]} takes no {match[2]!r}{nearest(match[2], _options(parser, match[1]))}"
        elif match := _NO_MODULE.search(text):
            text += ": it is neither installed nor a file in the current folder"
        if text not in causes:
            causes.append(text)
    if not causes:
        return message
    return f"{'.'.join(place)}: {'; '.join(causes)}" if place else "\n".join(causes)


class ZooParser(LightningArgumentParser):
    """A parser whose errors are one line: the cause, the nearest name, exit code 2."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            # The parser of one class's arguments: the parser around it knows the place.
            raise ArgumentError(None, message) from ex
        parser = getattr(ex, "subcommand_parser", None) or self
        print(f"ln-zoo: error: {cause(message, parser)}", file=sys.stderr)
        prog = parser.prog.split(" [")[0]
        print(f"options: {prog} --help", file=sys.stderr)
        raise SystemExit(2)


def _unknown_option(
    name: str, owner: str, parser: ArgumentParser | None, place: list[str]
) -> str:
    if owner:
        known = _arguments(owner)
        return (
            f"{owner.rsplit('.', 1)[-1]} takes no argument {name!r}"
            f"{nearest(name, known)} It takes: {', '.join(known) or 'none'}"
        )
    return f"unknown key {name!r}{nearest('.'.join([*place, name]), _options(parser))}"


def _unknown_class(name: str, place: list[str]) -> str:
    known = sorted(_known_classes(place[-1] if place else ""))
    return (
        f"no class {name!r} is known{nearest(name, known)} Known: {', '.join(known)}; or the "
        "import path of your own, such as my_file.MyClass"
    )


def _unknown_arguments(arguments: list[str], parser: ArgumentParser | None) -> str:
    options = [a for a in arguments if a.startswith("--")] or arguments
    hint = nearest(options[0].split("=")[0].lstrip("-"), _options(parser))
    return f"unknown argument {' '.join(arguments)}{hint}"


def _options(parser: ArgumentParser | None, subcommand: str | None = None) -> list[str]:
    """The options of a parser, or of one of its subcommands, without their dashes."""
    actions = [] if parser is None else parser._actions
    if subcommand is not None:
        for action in actions:
            if isinstance(action.choices, dict) and subcommand in action.choices:
                return _options(action.choices[subcommand])
    return [option.lstrip("-") for action in actions for option in action.option_strings]


def _arguments(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    return [p for p in inspect.signature(cls).parameters if p not in ("self", "args", "kwargs")]


def _known_classes(key: str) -> set[str]:
    """Names of the imported concrete classes that an argument of this name takes."""
    from lightning.pytorch import Callback, LightningDataModule
    from lightning.pytorch.loggers import Logger

    from ln_zoo.models.base import ZooModule
    from ln_zoo.norms import Norm

    bases: dict[str, type] = {
        "model": ZooModule,
        "data": LightningDataModule,
        "norm": Norm,
        "callbacks": Callback,
        "logger": Logger,
    }
    base = bases.get(key.rsplit(".", 1)[-1])
    if base is None:
        return set()
    return {c.__name__ for c in _subclasses(base) if not inspect.isabstract(c)}


def _subclasses(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)
