"""``ln-zoo kernels``: lists the kernels of this machine and builds the native ones."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from json import dumps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ln_zoo.ops.registry import Kernel, Library


def kernels(*, build: bool = False, rebuild: bool = False, json: bool = False) -> int:
    """Lists the kernels for recurrent layers in the order in which they are tried.

    An unavailable kernel is listed with the reason. Nothing is compiled without --build.
    LN_ZOO_KERNELS chooses among them. Native kernels come with the wheel; otherwise LN_ZOO_CACHE is
    their folder and CXX the compiler.

    Args:
        build: compile the native kernels now, unless the wheel has them
        rebuild: compile them for this processor, even if the wheel has them or that failed before
        json: print JSON

    Returns:
        The exit code: 1 if kernels could not be built.
    """
    from ln_zoo.ops import registry

    known = registry.kernels()
    libraries = [make() for make in registry.LIBRARIES]
    errors: list[str | None] = []
    if build or rebuild:
        with _shown_log():
            errors += [library.build(again=rebuild) for library in libraries]
    found = list(_facts(known))
    if json:
        built = {library.name: library.status() for library in libraries}
        print(dumps({"kernels": found} | built, indent=2))
    else:
        _print(found, libraries)
    for error in filter(None, errors):
        print(f"ln-zoo kernels: error: {error}", file=sys.stderr)
    return int(any(errors))


def _facts(known: Sequence[Kernel]) -> Iterator[dict[str, Any]]:
    """Facts of each kernel in the order of preference; one row per name in ``LN_ZOO_KERNELS``."""
    from ln_zoo.ops import registry

    value = os.environ.get("LN_ZOO_KERNELS", "")
    allowed = {kernel.name for kernel in registry.allowed(value)[0]}
    named: dict[str, list[Kernel]] = {}
    for kernel in known:
        named.setdefault(kernel.name, []).append(kernel)
    for name, kernels in named.items():
        reason = kernels[0].missing()
        if name not in allowed:
            reason = f"turned off: LN_ZOO_KERNELS={value}"
        yield {
            "name": name,
            "title": "; ".join(dict.fromkeys(kernel.title for kernel in kernels)),
            "tasks": list(dict.fromkeys(task for kernel in kernels for task in kernel.tasks)),
            "available": reason is None,
            "reason": reason,
        }


def _print(kernels: Sequence[dict[str, Any]], libraries: Sequence[Library]) -> None:
    """One line per fact; rich may not be installed."""
    for kernel in kernels:
        tasks, state = ", ".join(kernel["tasks"]), kernel["reason"] or "available"
        print(f"{kernel['name']:9}  {kernel['title']} ({tasks}): {state}")
    print("(none)     the generic loop (everything): always available\n")
    for library in libraries:
        for name, value in library.describe():
            print(f"{library.name} {name:9}  {value}")


@contextlib.contextmanager
def _shown_log() -> Iterator[None]:
    log, handler = logging.getLogger("ln_zoo"), logging.StreamHandler()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
