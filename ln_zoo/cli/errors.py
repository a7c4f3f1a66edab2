"""Errors in one line, and their exit codes. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import importlib
import inspect
import io
import os
import re
import sys
import traceback
from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from ln_zoo.utils.packages import missing_package

#: How jsonargparse's nested messages name an option, and the class it belongs to.
_PLACE = re.compile(r'(?:Parser key|Key) "([\w.]+)":?|Problem with given class_path \'([\w.]+)\':')
#: Lines of such messages to drop: types that were tried.
_NOISE = (
    "Does not validate against", "Subtypes: ", "Errors:", "Given value type: ", "Subclass types",
    "Expected a <class 'NoneType'>", "Expected a path but", "in \"<unicode string>\"",
    "a class path (str)", "a dict with",
)  # fmt: skip
#: Lightning's own class is tried along with all others.
_PLATEAU = "does not correspond to a subclass of ReduceLROnPlateau"
_REQUIRED = "the following arguments are required: "
#: A name in quotes, after a colon, or after ``--``.
_NAME = re.compile(r"'([\w.]+)'|: ([\w.]+)(?:;|$)|--([\w.]+)")
#: Longer lists of classes are not printed.
_LONGEST_LIST = 24
_TRACEBACK = "LN_ZOO_DEBUG"
#: Error numbers of a full disk and an exhausted quota.
_FULL = (errno.ENOSPC, errno.EDQUOT)


class UsageError(Exception):
    """Wrong arguments of a command."""

    exit_code = 2

    def __init__(self, text: str, command: str) -> None:
        super().__init__(text)
        self.command = command


def run_command(command: str, run: Callable[[], int]) -> int:
    """Runs a command and reports any error in one line.

    Returns the exit code of ``run``, or of its error (1 by default); 130 after Ctrl-C; 141 if the
    reader of standard output is gone, as in ``ln-zoo list | head -1``. With ``LN_ZOO_DEBUG=1``,
    raises the error itself.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for ASCII terminals
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:  # None if it was closed
                sys.stdout.flush()  # at exit, Python would report errors in its own way
    except SystemExit as end:  # from a parser, after help
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        print(f"ln-zoo {command}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return report_error(error, command, getattr(error, "exit_code", 1))


def report_error(error: Exception, command: str, code: int = 1) -> int:
    """Print an error in one line and return the exit code: 1 for a bug or a user's, else ``code``.

    With ``LN_ZOO_DEBUG=1``, raises the error itself, unless it is a `UsageError`.
    """
    if isinstance(error, UsageError):
        name = f"ln-zoo {error.command}".strip()
        print(f"{name}: error: {_readable(str(error))}\noptions: {name} --help", file=sys.stderr)
        return error.exit_code
    if os.environ.get(_TRACEBACK) == "1":
        raise error
    if isinstance(error, BrokenPipeError):
        _leave_output()
        return 141
    if isinstance(error, ModuleNotFoundError):
        error = missing_package(error) or error
    text = error_text(error)
    if not _of_input(error):
        place, is_ours = _place(error)
        whose = f"this is a bug{place}" if is_ours else f"error{place}"
        code, text = 1, f"{type(error).__name__}: {text}: {whose}"
    rank = os.environ.get("LOCAL_RANK", "0")
    process = f" (process {rank})" if rank != "0" else ""
    print(f"ln-zoo {command}: error{process}: {_readable(text)}", file=sys.stderr)
    if not (isinstance(error, ValueError | OSError) or type(error).__module__[:6] == "ln_zoo"):
        print(f"traceback: {_TRACEBACK}=1", file=sys.stderr)
    return code


def _readable(text: str) -> str:
    """The text with the middle of very long words left out."""
    return re.sub(r"\S{500,}", lambda word: f"{word[0][:60]}...{word[0][-20:]}", text)


def one_line(message: str, parser: ArgumentParser | None = None) -> str:
    """Condense jsonargparse's nested message to option, causes and the nearest known name.

    Other messages are only joined to one line. The options of ``parser`` can be suggested.

    Example:
        >>> one_line('Key "model":\\n  Key "lr":\\n    Expected a <class \\'float\\'>')
        'model.lr: Expected a float'
    """
    place: list[str] = []
    owner, given, causes = "", "", []
    for line in message.splitlines():
        text = line.strip().removeprefix("- ").strip()
        while match := _PLACE.match(text):
            place += [match[1]] if match[1] else []
            owner, text = match[2] or "", text[match.end() :].strip()
        if text.startswith("Given value: "):
            # The first value is the innermost.
            given = given or text.removeprefix("Given value: ")
        elif text.startswith(_REQUIRED):
            names = text.removeprefix(_REQUIRED).split(", ")
            options = " and ".join(f"--{name.rpartition('.')[2]}" for name in names)
            needed = f"{options} must be given, here or in a file with --config"
            causes.append(f"it needs {', '.join(names)}" if owner else needed)
        elif text and not text.startswith(_NOISE) and not text.endswith(_PLATEAU):
            text = re.sub(r" Got value: \[?Namespace\(.*", "", text)  # all settings
            causes.append(re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text))
    text = "; ".join(dict.fromkeys(causes)) or " ".join(message.split())
    if given and given not in text and len(given) < 80 and not given.startswith("NestedArg("):
        text += f", got {given!r}"
    where = ".".join(place)
    return (f"{where}: " if where else "") + text + _hint(text, where, owner, parser)


def _hint(text: str, place: str, owner: str, parser: ArgumentParser | None) -> str:
    """Suggestions for a cause: arguments of a class, classes of an option, or options."""
    names = [next(filter(None, match)) for match in _NAME.findall(text)]
    # Of no class: arguments were given before the class.
    owner = "" if owner.endswith(".LightningModule") else owner
    known = _attributes(owner)
    if known is None:
        return f": it is neither installed nor a file in the current folder{_hides_a_file(owner)}"
    shown = f" ({owner.rpartition('.')[2]} has {', '.join(known)})" if known else ""
    if not owner and (known := sorted(_known_classes(place))):
        names.append(text.rpartition(" ")[2].strip("'"))
        listed = f"{', '.join(known)}, or " if len(known) <= _LONGEST_LIST else ""
        shown = f" ({listed}the import path of your own, such as my_file.MyClass)"
    if not known and parser is not None and not place:
        known = [o.lstrip("-") for o in _options(parser)]
    if not known:
        return ""
    guesses = (nearest_option(name, known) for name in reversed(names) if name not in known)
    return next(filter(None, guesses), "") + shown + _hides_a_file(owner)


def _attributes(owner: str) -> list[str] | None:
    """Arguments of a class, or classes of its module; None if the module is not found."""
    if not owner:
        return []
    module, _, name = owner.rpartition(".")
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    if not hasattr(found, name):
        return [each for each in vars(found) if isinstance(vars(found)[each], type)]
    skipped = ("self", "args", "kwargs")
    return [p for p in inspect.signature(getattr(found, name)).parameters if p not in skipped]


def _hides_a_file(owner: str) -> str:
    """A remark if an installed package hides a file of the current folder."""
    file, module = Path(f"{owner.partition('.')[0]}.py"), sys.modules.get(owner.partition(".")[0])
    if not file.is_file() or module is None or module.__file__ is None:
        return ""
    if file.samefile(module.__file__):
        return ""
    return f"; the installed package takes precedence over ./{file}: rename your file"


def nearest_option(name: str, options: Iterable[str]) -> str:
    """`nearest` that also handles a misspelt group, such as ``modle.lr``."""
    from ln_zoo.utils.names import nearest

    group, dot, rest = name.partition(".")
    is_known = dot and any(option.startswith(f"{group}.") for option in options)
    near = nearest(group, ("model", "data", "optimizer", "lr_scheduler", "trainer")) if dot else ""
    if is_known or near in ("", "; did you mean 'trainer'?"):
        return nearest(name, options)
    return near.replace("'?", f".{rest}'?")


def _options(parser: ArgumentParser) -> list[str]:
    found: list[str] = []
    for action in parser._actions:
        found += action.option_strings
        for inner in (action.choices or {}).values() if isinstance(action.choices, dict) else ():
            found += _options(inner)
    return found


def _known_classes(place: str) -> set[str]:
    """Names of the imported concrete classes that are valid for an option."""
    if not place or "lightning" not in sys.modules:
        return set()
    from lightning.pytorch import Callback, LightningDataModule
    from lightning.pytorch.loggers import Logger
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from ln_zoo.models.base import ZooModule
    from ln_zoo.norms import Norm

    bases: dict[str, type] = {
        "model": ZooModule, "data": LightningDataModule, "norm": Norm, "callbacks": Callback,
        "logger": Logger, "optimizer": Optimizer, "lr_scheduler": LRScheduler,
    }  # fmt: skip
    base = bases.get(place.rpartition(".")[2])
    names = {c.__name__ for c in _subclasses(base) if not inspect.isabstract(c)} if base else set()
    return {name for name in names if not name.startswith("_")}


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


class OneLineErrors(ArgumentParser):
    """Mixin for jsonargparse parsers: errors are one line, with exit code 2."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            # A parser of one value or class: the parser around it adds the option's name.
            raise ArgumentError(None, message) from ex
        parser = getattr(ex, "subcommand_parser", None) or self
        command = parser.prog.replace(" [options]", "").removeprefix("ln-zoo").strip()
        args = getattr(self, "args", None) or [""]
        if not command and args[0].isalpha():
            command = args[0]  # an error of the main parser: the subcommand has the options
        raise UsageError(one_line(message, parser), command) from ex


def _of_input(error: Exception) -> bool:
    """Whether bad input can raise this error; otherwise it is a bug."""
    if isinstance(error, ValueError | TypeError | OSError | ImportError | MemoryError):
        return True
    owner = type(error).__module__
    if type(error) is RuntimeError:
        # Lightning raises it for unsupported requests, torch if memory runs out.
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        owner = frame.f_globals.get("__name__", "")
        if "alloc" in str(error) or "out of memory" in str(error):
            return True
    return owner.partition(".")[0] in ("lightning", "ln_zoo") or isinstance(error, RecursionError)


def error_text(error: Exception) -> str:
    """The message of an error in one line."""
    if isinstance(error, OSError) and error.errno and not error.filename and not _output_works():
        return f"standard output cannot be written: {error.strerror}"
    if isinstance(error, OSError) and error.strerror and error.errno in _FULL:
        return f"{error.strerror}{f' for {error.filename}' if error.filename else ''}: make room"
    # Without torch's C++ stack.
    text = one_line(re.split(r"\n?Exception raised from |\nC\+\+ ", str(error))[0])
    if isinstance(error, RecursionError):
        return f"the input is nested too deeply ({text})"
    if isinstance(error, MemoryError):
        return f"out of memory: make the model or its batches smaller {text}".strip()
    return text or type(error).__name__


def _place(error: Exception) -> tuple[str, bool]:
    """The innermost line of ln_zoo or of a user's file, and whether it is ours."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        is_ours = module.partition(".")[0] == "ln_zoo"
        if is_ours or not {"site-packages", "lib"} & set(Path(file).parts):
            return f" in {Path(file).name}:{line}", is_ours
    return "", True


def _output_works() -> bool:
    try:
        print(flush=True)  # output that failed once is not retried by itself
    except OSError:
        _leave_output()
        return False
    return True


def _leave_output() -> None:
    """Drop the buffer of standard output, so that Python does not retry at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
