"""Errors of the command line, cut to their cause, with the nearest known name."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from argparse import ArgumentError
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from ln_zoo.cli.names import nearest

# What jsonargparse says around a cause: which types it tried, and that None was one of them.
_NOISE = re.compile(
    r"Does not validate against any of the Union subtypes|Subtypes: |Errors:$|Given value type: |"
    r"Expected a <class 'NoneType'>|Expected a path but .* either not accessible or invalid|"
    r"in \"<unicode string>\"|$"
)
_KEY = re.compile(r'(?:Parser key|Key) "([\w.]+)"[^:]*:\s*(.*)')
_OWNER = re.compile(r"Problem with given class_path '([\w.]+)':\s*(.*)")
_OPTION = re.compile(
    r"(?:Option|Key) '([\w.-]+)' is not (?:accepted|expected)|"
    r"Group '[\w.]*' does not accept (?:nested key|option) '([\w.]+)'"
)
_NO_CLASS = re.compile(r"Expected a dot import path string: (.*)")
_NO_SUBCLASS = re.compile(r"Import path(?: \S+)? does not correspond to a subclass of (\w+).*")
_ABSTRACT = re.compile(r"Expected an instantiatable class, but( \S+)? is abstract")
_UNKNOWN = re.compile(r"[Uu]nrecognized arguments?: (.*)")
_NOT_OF_COMMAND = re.compile(r"Subcommand '(\w+)' does not accept option '([\w.]+)'")
_NO_MODULE = re.compile(r"No module named '(.*)'")
_NO_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_REQUIRED = re.compile(r"the following arguments are required: (.*)")
_TYPE = re.compile(
    r"Expected an? (?:<class '([\w.]+)'>|typing\.Literal\[(.*)\])(?:\. Got value: (.*))?"
)
_GIVEN = re.compile(r"Given value: (.*)")

#: Longer lists of classes are not printed with an error.
_LONGEST_LIST = 12
#: Stands in a cause for the value that was given, which jsonargparse tells at the end.
_VALUE = "\0"


def cause(message: str, parser: ArgumentParser | None = None) -> str:
    """What went wrong and where, in one line, out of jsonargparse's nested account of it.

    Args:
        message: the account; any other message comes back with its lines joined.
        parser: knows the options that can be suggested in place of a misspelt one.

    Example:
        >>> cause('Parser key "model":\\n  Parser key "lr":\\n    Expected a <class \\'float\\'>. '
        ...       'Got value: fast')
        "model.lr: expected float, got 'fast'"
    """
    place: list[str] = []
    owner = ""
    causes: list[str] = []
    types: list[str] = []
    given: str | None = None
    for line in message.splitlines():
        text = line.strip().removeprefix("- ").strip()
        if match := _KEY.fullmatch(text):
            place.append(match[1])
            text = match[2]
        elif match := _OWNER.fullmatch(text):
            owner, text = match[1], match[2]
        if match := _GIVEN.fullmatch(text):
            # Inner accounts come first: what follows is the whole that this value was part of.
            given = match[1] if given is None else given
            continue
        if _NOISE.match(text):
            continue
        if match := _TYPE.fullmatch(text):
            types += [match[1].rpartition(".")[2]] if match[1] else [f"one of {match[2]}"]
            given = match[3] or given
            continue
        text = _in_our_words(text, place, owner, parser)
        if text not in causes:
            causes.append(text)
    if types and not causes:
        # Only where no better cause is known: a class that cannot be found is not "expected bool".
        causes.append(f"expected {' or '.join(dict.fromkeys(types))}, got {given!r}")
    text = "; ".join(causes) or " ".join(message.split())
    text = text.replace(_VALUE, repr(given))
    return f"{'.'.join(place)}: {text}" if place else text


class ZooParser(LightningArgumentParser):
    """A parser whose errors are one line: the cause, the nearest name, exit code 2."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            # This is the parser of one class's arguments; the parser around it knows the place.
            raise ArgumentError(None, message) from ex
        parser = getattr(ex, "subcommand_parser", None) or self
        print(f"ln-zoo: error: {cause(message, parser)}", file=sys.stderr)
        command = parser.prog.replace(" [options]", "")
        args = getattr(self, "args", None) or [""]
        if " " not in command and args[0].isalpha():
            command += f" {args[0]}"  # an error of the whole: its subcommand has the options
        print(f"options: {command} --help", file=sys.stderr)
        raise SystemExit(2)


def _in_our_words(text: str, place: list[str], owner: str, parser: ArgumentParser | None) -> str:
    """One of jsonargparse's causes with what the user can do about it."""
    if match := _OPTION.search(text):
        return _unknown_option(match[1] or match[2], owner, parser, place)
    if match := _NO_CLASS.fullmatch(text):
        return _unknown_class(match[1], place)
    if match := _NO_SUBCLASS.fullmatch(text):
        return f"{_VALUE} is no subclass of {match[1]}"
    if match := _ABSTRACT.fullmatch(text):
        return _abstract(match[1] is None, place)
    if match := _UNKNOWN.search(text):
        return _unknown_arguments(match[1].split(), parser)
    if match := _NOT_OF_COMMAND.search(text):
        name = match[2]
        return f"{match[1]} takes no {name!r}{_nearest_option(name, _options(parser, match[1]))}"
    if match := _REQUIRED.search(text):
        return _required(match[1].split(", "), owner)
    if _NO_MODULE.search(text):
        return f"{text}: it is neither installed nor a file in the current folder"
    if match := _NO_ATTRIBUTE.search(text):
        module = importlib.import_module(match[1])
        return text + (_hides_a_file(module) or nearest(match[2], vars(module)))
    return text


def _hides_a_file(module: ModuleType) -> str:
    """A remark if a file of the current folder has the name of an installed package."""
    file = Path(f"{module.__name__.partition('.')[0]}.py")
    if not file.is_file() or (module.__file__ is not None and file.samefile(module.__file__)):
        return ""
    return f": that is the installed package, which goes before ./{file}: rename your file"


def _unknown_option(name: str, owner: str, parser: ArgumentParser | None, place: list[str]) -> str:
    if owner:
        known = _arguments(owner)
        return (
            f"{owner.rsplit('.', 1)[-1]} takes no argument {name!r}{nearest(name, known)}"
            f" (it takes {', '.join(known) or 'none'})"
        )
    return f"unknown key {name!r}{_nearest_option('.'.join([*place, name]), _options(parser))}"


def _unknown_class(name: str, place: list[str]) -> str:
    known = sorted(_known_classes(place))
    names = f"{', '.join(known)}, or" if 0 < len(known) <= _LONGEST_LIST else "give"
    return (
        f"no class {name!r} is known{nearest(name, known)} "
        f"({names} the import path of your own, such as my_file.MyClass)"
    )


def _abstract(named: bool, place: list[str]) -> str:
    known = ", ".join(sorted(_known_classes(place)))
    if named:
        return f"{_VALUE} is a base class: give one of its subclasses ({known})"
    option = f"--{'.'.join(place)}"
    return f"the class goes before its arguments, as in {option} NAME {option}.x 1 ({known})"


def _unknown_arguments(arguments: list[str], parser: ArgumentParser | None) -> str:
    options = [a for a in arguments if a.startswith("--")]
    if not options:
        return f"unexpected {' '.join(arguments)}: every value needs the name of its option"
    name = options[0].split("=")[0].lstrip("-")
    return f"unknown argument {' '.join(arguments)}{_nearest_option(name, _options(parser))}"


def _required(names: list[str], owner: str) -> str:
    if owner:
        return f"{owner.rsplit('.', 1)[-1]} needs a value for {', '.join(names)}"
    # With the subcommand before them: "fit.model".
    options = [f"--{name.rpartition('.')[2]}" for name in names]
    return f"{' and '.join(options)} must be given, here or in a file with --config"


def _nearest_option(name: str, options: list[str]) -> str:
    """`nearest`, which also finds a class's argument where the group is misspelt: ``modle.lr``."""
    group, dot, rest = name.partition(".")
    near = difflib.get_close_matches(group, ("model", "data"), n=1, cutoff=0.5) if dot else []
    return f"; did you mean '{near[0]}.{rest}'?" if near else nearest(name, options)


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


def _known_classes(place: list[str]) -> set[str]:
    """Names of the imported concrete classes that the argument in this place takes."""
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
    base = bases.get(".".join(place).rpartition(".")[2])
    if base is None:
        return set()
    names = {c.__name__ for c in _subclasses(base) if not inspect.isabstract(c)}
    return {name for name in names if not name.startswith("_")}


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)
