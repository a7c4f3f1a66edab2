"""Errors of the command line, cut to their cause, with the nearest known name."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ln_zoo.cli.names import nearest
from ln_zoo.packages import missing

# What jsonargparse says around a cause: which types it tried, and that None was one of them.
_NOISE = re.compile(
    r"Does not validate against any of the Union subtypes|Subtypes: |Errors:$|Given value type: |"
    r"Expected a <class 'NoneType'>|Expected a path but .* either not accessible or invalid|"
    r"in \"<unicode string>\"|"
    # Lightning's own, which takes a monitor, beside all others.
    r"Import path \S+ does not correspond to a subclass of ReduceLROnPlateau|$"
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
_LONGEST_LIST = 24
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
        if _NO_CLASS.fullmatch(text) and types and not _known_classes(place):
            continue  # as for a rate, which may be a tensor: the plain type is what was meant
        text = _in_our_words(text, place, owner, parser)
        if text not in causes:
            causes.append(text)
    if types and not causes:
        # Only where no better cause is known: a class that cannot be found is not "expected bool".
        causes.append(f"expected {' or '.join(dict.fromkeys(types))}, got {given!r}")
    text = "; ".join(causes) or " ".join(message.split())
    text = text.replace(_VALUE, repr(given))
    return f"{'.'.join(place)}: {text}" if place else text


class OneLineErrors(ArgumentParser):
    """For a parser of jsonargparse: its errors are one line, and exit code 2."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            # This is the parser of one value or class; the parser around it knows the place.
            raise ArgumentError(None, message) from ex
        parser = getattr(ex, "subcommand_parser", None) or self
        command = parser.prog.replace(" [options]", "").removeprefix("ln-zoo").strip()
        args = getattr(self, "args", None) or [""]
        if not command and args[0].isalpha():
            command = args[0]  # an error of the whole: its subcommand has the options
        fail(cause(message, parser), command)


def fail(text: str, command: str) -> NoReturn:
    """Ends the program with a line on what is wrong with its options, and exit code 2."""
    print(f"ln-zoo: error: {text}", file=sys.stderr)
    print(f"options: {f'ln-zoo {command}'.strip()} --help", file=sys.stderr)
    raise SystemExit(2)


def guarded(command: str, run: Callable[[], int]) -> int:
    """Runs a command: whatever goes wrong ends in one line and an exit code, not in a traceback.

    Args:
        command: its name.
        run: does the work and returns the exit code.

    Returns:
        The exit code: that of ``run``; 1 for an error; 130 after Ctrl-C; 141 where the reader of
        standard output went away, as in ``ln-zoo list | head -1``: both as shells have them.

    Raises:
        Exception: any, if ``LN_ZOO_DEBUG`` is 1.
    """
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()  # Python's own at the end has an exit code and words of its own
    except SystemExit as end:  # of a parser, after help or an error
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        print(f"ln-zoo {command}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return told(error, command)


def told(error: Exception, command: str, code: int = 1) -> int:
    """Prints what went wrong in one line, and returns the exit code.

    Args:
        error: what was raised.
        command: its name.
        code: of an error that the user's input can cause; any other has 1.

    Raises:
        Exception: the error itself, if ``LN_ZOO_DEBUG`` is 1.
    """
    if os.environ.get("LN_ZOO_DEBUG") == "1":
        raise error
    if isinstance(error, BrokenPipeError):
        _leave_output()
        return 141
    if isinstance(error, ModuleNotFoundError):
        error = missing(error) or error
    text = _text(error)
    if not _of_input(error):
        code, text = 1, f"{type(error).__name__}: {text}{_place(error)}: this is a bug"
    rank = os.environ.get("LOCAL_RANK", "0")
    process = f" (process {rank})" if rank != "0" else ""
    print(f"ln-zoo {command}: error{process}: {text}", file=sys.stderr)
    # These say what was given and what was expected.
    if not (isinstance(error, ValueError | OSError) or type(error).__module__[:6] == "ln_zoo"):
        print("traceback: LN_ZOO_DEBUG=1", file=sys.stderr)
    return code


def _of_input(error: Exception) -> bool:
    """Whether the user's input can cause an error; it is a bug of a program else."""
    if isinstance(error, ValueError | TypeError | OSError | ImportError | MemoryError):
        return True
    owner = type(error).__module__
    if type(error) is RuntimeError:
        # Lightning raises these for what it cannot do, torch where there is no more memory.
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        owner = frame.f_globals.get("__name__", "")
        if "alloc" in str(error) or "out of memory" in str(error):
            return True
    return owner.partition(".")[0] in ("lightning", "ln_zoo") or isinstance(error, RecursionError)


def _text(error: Exception) -> str:
    """What an error says, in one line."""
    if isinstance(error, OSError) and error.errno and not error.filename and not _output_works():
        return f"standard output cannot be written: {error.strerror}"
    # What torch adds of its own C++ is of no use here.
    text = cause(re.split(r"\n?Exception raised from |\nC\+\+ ", str(error))[0])
    if isinstance(error, RecursionError):
        return f"the input is nested too deeply ({text})"
    if isinstance(error, MemoryError):
        return f"out of memory: make the model or its batches smaller {text}".strip()
    return text or type(error).__name__


def _place(error: Exception) -> str:
    """The last line of ln_zoo, or of a user's own file, that an error came through."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if module.partition(".")[0] == "ln_zoo" or not {"site-packages", "lib"} & set(
            Path(file).parts
        ):
            return f" ({Path(file).name}, line {line})"
    return ""


def _output_works() -> bool:
    """Whether standard output takes what is written; if not, what is left there is dropped."""
    try:
        print(flush=True)  # what failed before is not tried again by itself
    except OSError:
        _leave_output()
        return False
    return True


def _leave_output() -> None:
    """Drops what standard output did not take, so that Python does not try again at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _in_our_words(text: str, place: list[str], owner: str, parser: ArgumentParser | None) -> str:
    """One of jsonargparse's causes with what the user can do about it."""
    if match := _OPTION.search(text):
        return _unknown_option(match[1] or match[2], owner, parser, place)
    if match := _NO_CLASS.fullmatch(text):
        return no_class(match[1], _known_classes(place))
    if match := _NO_SUBCLASS.fullmatch(text):
        return f"{_VALUE} is not a subclass of {match[1]}"
    if match := _ABSTRACT.fullmatch(text):
        return _abstract(match[1] is None, place)
    if match := _UNKNOWN.search(text):
        return _unknown_arguments(match[1].split(), parser)
    if match := _NOT_OF_COMMAND.search(text):
        return no_option(match[1], match[2], "", _options(parser, match[1]))
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
    return (
        f": that is the installed package, which takes precedence over ./{file}: rename your file"
    )


def _unknown_option(name: str, owner: str, parser: ArgumentParser | None, place: list[str]) -> str:
    if owner:
        return no_argument(owner.rsplit(".", 1)[-1], name, _arguments(owner))
    return f"unknown key {name!r}{_nearest_option('.'.join([*place, name]), _options(parser))}"


def no_argument(owner: str, name: str, known: Iterable[str]) -> str:
    """That a class takes no argument of this name."""
    known = list(known)
    return (
        f"{owner} takes no argument {name!r}{nearest(name, known)} "
        f"(it takes {', '.join(known) or 'none'})"
    )


def no_option(command: str, name: str, argument: str, known: Iterable[str]) -> str:
    """That a command takes no option of this name.

    Args:
        command: the command.
        name: without dashes.
        argument: as it was given; empty if it is from a file.
        known: all names.
    """
    given = f"unknown argument {argument}" if argument else f"{command} takes no {name!r}"
    return given + _nearest_option(name, list(known))


def no_class(name: str, known: Iterable[str]) -> str:
    """That no class of this name is known."""
    known = sorted(known)
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
    return f"give the class before its arguments, as in {option} NAME {option}.x 1 ({known})"


def _unknown_arguments(arguments: list[str], parser: ArgumentParser | None) -> str:
    options = [a for a in arguments if a.startswith("--")]
    if not options:
        return f"unexpected {' '.join(arguments)}: every value needs the name of its option"
    name = options[0].split("=")[0].lstrip("-")
    return no_option("", name, " ".join(arguments), _options(parser))


def _required(names: list[str], owner: str) -> str:
    if owner:
        return f"{owner.rsplit('.', 1)[-1]} needs a value for {', '.join(names)}"
    # With the subcommand before them: "fit.model".
    options = [f"--{name.rpartition('.')[2]}" for name in names]
    return f"{' and '.join(options)} must be given, here or in a file with --config"


def _nearest_option(name: str, options: list[str]) -> str:
    """`nearest`, which also finds a class's argument where the group is misspelt: ``modle.lr``."""
    group, dot, rest = name.partition(".")
    groups = ("model", "data", "optimizer", "lr_scheduler")
    misspelt = dot and not any(option.startswith(f"{group}.") for option in options)
    near = difflib.get_close_matches(group, groups, n=1, cutoff=0.5) if misspelt else []
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
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from ln_zoo.models.base import ZooModule
    from ln_zoo.norms import Norm

    bases: dict[str, type] = {
        "model": ZooModule,
        "data": LightningDataModule,
        "norm": Norm,
        "callbacks": Callback,
        "logger": Logger,
        "optimizer": Optimizer,
        "lr_scheduler": LRScheduler,
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
