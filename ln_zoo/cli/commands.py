"""Commands as typed functions: signature and docstring define the arguments.

Parameters before ``*`` are positional, others options; ``*name`` receives the arguments after
``--``. A list accepts several values, a `bool` is a flag, a `Literal` gives choices. Metadata of
`Annotated` are checks, called with option and value, or `ONE_EACH`. jsonargparse's own CLI needs
YAML for lists, and twice the time to import.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import math
import re
import tempfile
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from ln_zoo.cli.errors import UsageError
from ln_zoo.utils.packages import require

Check = Callable[[str, Any], object]

#: Mark of a list whose option is repeated, with one value each.
ONE_EACH = "one each"
#: Suffixes that matplotlib can write; importing it takes half a second.
_PICTURES = (".png", ".svg", ".pdf", ".eps", ".jpg", ".jpeg", ".svgz", ".tif", ".tiff", ".webp")


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest option, and exit code 2."""

    #: jsonargparse reads it to prepare completion.
    _subcommands_action = None

    def error(self, message: str) -> NoReturn:
        for word in re.findall(r"(?:unrecognized arguments: )(-\S+)", message):
            from ln_zoo.utils.names import nearest

            name = word.partition("=")[0]
            of_fit = self.prog == "ln-zoo sweep" and re.match("--(model|data|trainer)", name)
            message += "" if of_fit else nearest(name, self._option_string_actions)
            message += "; options of fit follow after --" if self.prog == "ln-zoo sweep" else ""
        raise UsageError(message, self.prog.removeprefix("ln-zoo "))


def call(function: Callable[..., int | None], name: str, argv: Sequence[str]) -> int:
    """Runs a command's function on its arguments and returns the exit code (None: 0).

    Raises:
        UsageError: for arguments that cannot be parsed.
        SystemExit: after ``--help``.
        ValueError: from a check.

    Example:
        >>> def repeat(text: str, *, times: Annotated[int, at_least(1)] = 2) -> None:
        ...     "Print a text several times."
        ...     print(text * times)
        >>> call(repeat, "repeat", ["ho", "--times", "3"])
        hohoho
        0
    """
    parameters = inspect.signature(function).parameters
    hints = typing.get_type_hints(function, include_extras=True)
    parser = parser_of(function, name)
    argv = list(argv)
    takes_rest = any(p.kind is p.VAR_POSITIONAL for p in parameters.values()) and "--" in argv
    cut = argv.index("--") if takes_rest else len(argv)
    given = vars(parser.parse_args(argv[:cut]))
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        value = given.get(parameter.name, parameter.default)
        option = parameter.name.rstrip("_")
        option = f"--{option}" if parameter.kind is parameter.KEYWORD_ONLY else option
        for check in _checks(hints[parameter.name]):
            for each in value if isinstance(value, list) else [value]:
                try:
                    None if each is None else check(option, each)
                except argparse.ArgumentTypeError as error:
                    parser.error(f"argument {option}: {error}")
    return function(*argv[cut + 1 :], **given) or 0


def parser_of(function: Callable[..., object], name: str) -> argparse.ArgumentParser:
    """The parser of a command."""
    description, documented = _documentation(function)
    parser = OneLineParser(prog=f"ln-zoo {name}", description=description, allow_abbrev=False)
    hints = typing.get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        option, required = parameter.name.rstrip("_"), parameter.default is parameter.empty
        settings = _settings(hints[parameter.name])
        text = documented.get(parameter.name, "")
        default = parameter.default
        default = " ".join(map(str, default)) if isinstance(default, list) else default
        if not (required or default is None or default is False or default == ""):
            text += f" (default: {default})"
        # Missing arguments get the function's own default.
        settings |= {"help": text.replace("%", "%%"), "default": argparse.SUPPRESS}
        if not {"action", "choices"} & settings.keys() or settings.get("action") == "append":
            settings["metavar"] = option.upper()
        if parameter.kind is parameter.KEYWORD_ONLY:
            parser.add_argument(f"--{option}", dest=parameter.name, required=required, **settings)
        else:
            if not required:
                settings["nargs"] = "*" if "nargs" in settings else "?"
            parser.add_argument(parameter.name, **settings)
    return parser


def add_parsers(subparsers: Any, commands: Mapping[str, str]) -> None:
    """Adds the parsers of commands for shell completion.

    ``commands`` has the function's import path by name; a name of two words is in a group.
    """
    groups: dict[str, Any] = {}
    for command, path in commands.items():
        group, _, name = command.rpartition(" ")
        if group and group not in groups:
            several = OneLineParser(prog=f"ln-zoo {group}")
            groups[group] = several.add_subparsers()
            _add_parser(subparsers, group, several)
        _add_parser(groups.get(group, subparsers), name, parser_of(load(path), command))


def _add_parser(subparsers: Any, name: str, parser: argparse.ArgumentParser) -> None:
    about = (parser.description or "").partition(". ")[0]
    subparsers._choices_actions.append(subparsers._ChoicesPseudoAction(name, (), about))
    subparsers._name_parser_map[name] = parser


def load(path: str) -> Callable[..., int | None]:
    """Imports the function of a command, from ``module:function``."""
    module, _, function = path.partition(":")
    found: Callable[..., int | None] = getattr(importlib.import_module(module), function)
    return found


def _documentation(function: Callable[..., object]) -> tuple[str, dict[str, str]]:
    head, _, rest = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", rest.partition("\n\n")[0], re.MULTILINE)
    return " ".join(head.split()), {name: " ".join(text.split()) for name, text in entries}


def _settings(hint: Any) -> dict[str, Any]:
    if typing.get_origin(hint) is Annotated:
        settings = _settings(hint.__origin__)
        repeated = ONE_EACH in hint.__metadata__
        return {"type": settings["type"], "action": "append"} if repeated else settings
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _settings(next(each for each in arguments if each is not type(None)))
    if origin is list:
        inner = _settings(arguments[0])
        return inner | ({"action": "append"} if "nargs" in inner else {"nargs": "+"})
    if origin is Literal:
        return {"choices": arguments}
    return {"action": "store_true"} if hint is bool else {"type": hint}


def _checks(hint: Any) -> list[Check]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType, list):
        return [check for each in typing.get_args(hint) for check in _checks(each)]
    return [each for each in getattr(hint, "__metadata__", ()) if each != ONE_EACH]


# Checks


def at_least(least: float, most: float = math.inf) -> Check:
    """A check that a number is finite and within bounds."""

    def check(option: str, value: float) -> None:
        if not least <= value < math.inf:
            finite = " and finite" if value == math.inf else ""
            raise ValueError(f"{option} must be at least {least:g}{finite}, got {value}")
        if value > most:
            raise ValueError(f"{option} must be at most {most:,}, got {value}")

    return check


def positive(option: str, value: float) -> None:
    """Checks that a number is finite and above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"{option} must be positive and finite, got {value:g}")


def torch_seed(option: str, value: int) -> None:
    """Checks that a seed is valid for torch."""
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{option} must be between -2**63 and 2**64 - 1, got {value}")


def picture(option: str, path: Path) -> None:
    """Checks that a file can be written and has the suffix of a picture."""
    if path.suffix.lower() not in _PICTURES:
        raise ValueError(
            f"{option} {path} is not the name of a picture: end it in .png, .svg or .pdf"
        )
    require("matplotlib")
    writable(option, path)


def writable(option: str, path: Path) -> None:
    """Checks that a file can be written; makes its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(b"0")
    except OSError as error:
        raise OSError(f"{option} {path} cannot be written: {error}") from error
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path} is a folder: give the name of a file")


def suffix(*allowed: str) -> Check:
    """A check that a file has one of these suffixes and can be written."""

    def check(option: str, path: Path) -> None:
        if path.suffix not in allowed:
            raise ValueError(f"{option} {path} must end in {' or '.join(allowed)}")
        writable(option, path)

    return check


def own_module(option: str, name: str) -> None:
    """Imports a module of the user's own; ValueError if it cannot be imported."""
    try:
        importlib.import_module(name)
    except (ImportError, ValueError, TypeError) as error:
        raise ValueError(
            f"{option} {name}: {error}: give the name of a module, such as my_models for "
            "my_models.py in the current folder"
        ) from error


Count = Annotated[int, at_least(1)]
Seed = Annotated[int, torch_seed]
Picture = Annotated[Path, picture]
File = Annotated[Path, writable]
#: ``--import``: modules that define a checkpoint's own classes, imported first.
OwnModules = Annotated[list[str], ONE_EACH, own_module]
