"""Registry of kernels, selection by support, and the log of which kernel runs and why.

Kernels come from the package ``ln_zoo.kernels``, if it is there, and from entry points of the group
``ln_zoo.kernels`` of other packages. Their modules are imported at the first selection, and add
what they have to `KERNELS` (by `register`), `SCANS`, `CALL_CACHES` and `LIBRARIES`.
"""

from __future__ import annotations

import bisect
import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, cast

import torch

if TYPE_CHECKING:
    from ln_zoo.ops.engines.base import Engine

#: Tasks of a kernel: all layers and directions of a recurrent layer, a single step of a cell, a
#: layer with a window over a text, or all glimpses of DRAW.
Task = Literal["layers", "step", "window", "DRAW"]


class Kernel(Protocol):
    """A fast implementation of a task; the arguments depend on the task."""

    @property
    def name(self) -> str:
        """Identifier in ``LN_ZOO_KERNELS`` and the log."""

    @property
    def title(self) -> str:
        """Short description for the log."""

    @property
    def tasks(self) -> Sequence[Task]:
        """Tasks that it implements."""

    @property
    def rank(self) -> int:
        """Kernels of smaller rank are tried first; ln_zoo's have ranks from 10 to 90."""

    def missing(self) -> str | None:
        """Why the kernel is unavailable here, or None; compiles nothing."""

    def unsupported_reason(self, *call: Any) -> str | None:
        """Why it does not support this call, or None."""


class EngineKernel:
    """Base of kernels that run the time steps of an engine, under its name and rank."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.name, self.title, self.rank = engine.name, engine.title, engine.rank

    def missing(self) -> str | None:
        return self.engine.missing()


class Library(Protocol):
    """Compiled code of kernels, for ``ln-zoo kernels``."""

    @property
    def name(self) -> str:
        """Name of its kernels."""

    def build(self, again: bool) -> str | None:
        """Compile what is missing, or all if ``again``; returns the error, or None."""

    def status(self) -> Mapping[str, Any]:
        """Facts for JSON."""

    def describe(self) -> Iterable[tuple[str, str]]:
        """The same facts for people, as names and texts."""


#: Kernels in order of preference; complete after `load`.
KERNELS: list[Kernel] = []
#: Implementations of `ln_zoo.ops.recurrence.scan`, by device type.
SCANS: dict[str, Callable[..., Any]] = {}
#: Constructors of `ln_zoo.ops.plans.CallCache`, by device type.
CALL_CACHES: dict[str, Callable[[], Any]] = {}
#: Constructors of libraries.
LIBRARIES: list[Callable[[], Library]] = []
#: Our package of kernels, and the group of entry points of others.
_GROUP = "ln_zoo.kernels"


def register(*kernels: Kernel) -> None:
    """Add kernels by rank; those of equal rank stay in the order in which they are added."""
    for kernel in kernels:
        bisect.insort(KERNELS, kernel, key=lambda known: known.rank)


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def untraced(check: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a check of the environment that torch.compile must not trace, such as an import.

    It runs during tracing, and its result becomes a constant, so arguments must be constants too:
    devices, dtypes, numbers, strings. Apply `functools.cache` below it.
    """

    # The mark must be on a plain function: dynamo ignores it on `functools.cache` objects.
    @functools.wraps(check)
    def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return check(*args, **kwargs)

    # As `torch.compiler.assume_constant_result`, which would import the whole compiler.
    called._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return called


@untraced
@functools.cache
def load() -> None:
    """Import the packages that have kernels, once. Packages that fail are logged and left out."""
    try:
        importlib.import_module(_GROUP)
    except ModuleNotFoundError as error:
        if error.name != _GROUP:
            raise
    for entry in entry_points(group=_GROUP):
        try:
            entry.load()
        except Exception as error:
            message = "kernels of the entry point %s are not used: %s cannot be imported: %s"
            logging.getLogger("ln_zoo").warning(message, entry.name, entry.value, error)


def kernels() -> list[Kernel]:
    """All kernels, in order of preference."""
    load()
    return KERNELS


def select(
    task: Task, what: str, call: Sequence[Any], otherwise: str, last: Sequence[str] = ()
) -> Any:
    """The first kernel that supports the call, or None; ``last`` are tried last, in this order.

    The choice and its reasons are logged once, to the logger ``ln_zoo``; ``what`` describes the
    call, ``otherwise`` the fallback. ValueError if ``LN_ZOO_KERNELS`` contains an unknown name.
    """
    found, why = allowed(os.environ.get("LN_ZOO_KERNELS", ""))
    if last:
        found = sorted(found, key=lambda k: k.name in last and 1 + last.index(k.name))
    for kernel in found:
        if task not in kernel.tasks:
            continue
        reason = kernel.unsupported_reason(*call)
        if reason is None:
            _log_once(f"{what}: runs on {kernel.name} ({kernel.title})")
            return kernel
        _log_once(f"{what}: not run by {kernel.name} ({kernel.title}): {reason}")
    say_unsupported(what, otherwise, why)
    return None


def say_unsupported(what: str, otherwise: str, why: str = "") -> None:
    """Log once that no kernel supports a call; ``why`` is empty or starts with a colon."""
    _log_once(f"{what}: runs on {otherwise}{why}")


def allowed(value: str) -> tuple[list[Kernel], str]:
    """Kernels allowed by a value of ``LN_ZOO_KERNELS``, and a description for the log."""
    found = kernels()
    if value in ("", "1"):
        return found, ""
    why = f": LN_ZOO_KERNELS={value}"
    if value == "0":
        return [], why
    names = [name.strip() for name in value.split(",")]
    known = dict.fromkeys(kernel.name for kernel in found)
    for name in names:
        if name not in known:
            raise ValueError(
                f"LN_ZOO_KERNELS={value}: there is no kernel called {name!r}; expected 0 (none), "
                f"1 (all) or names out of {', '.join(known)} with commas between them"
            )
    return [kernel for kernel in found if kernel.name in names], why


def kernel_named(task: Task, name: str) -> Any:
    """The kernel of that name for a task."""
    return next(k for k in kernels() if k.name == name and task in k.tasks)


def engine_named(name: str) -> Engine:
    """The engine of that name, for operators."""
    for kernel in kernels():
        engine = getattr(kernel, "engine", None)
        if kernel.name == name and "layers" in kernel.tasks and engine is not None:
            return cast("Engine", engine)
    raise RuntimeError(f"there is no recurrent engine called {name!r}")


def _log_once(message: str) -> None:
    if not torch.compiler.is_compiling():
        _log(message)


@functools.cache
def _log(message: str) -> None:
    logging.getLogger("ln_zoo").info(message)
