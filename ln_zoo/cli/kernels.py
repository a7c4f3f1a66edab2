"""``ln-zoo kernels``: lists the kernels of this machine and builds the native ones."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from json import dumps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ln_zoo.kernels.native.build import Status
    from ln_zoo.ops import Kernel


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
    from ln_zoo.kernels.native import build as engine

    wanted = build or rebuild
    with _shown_log() if wanted else contextlib.nullcontext():
        if rebuild:
            with contextlib.suppress(engine.Unavailable):
                engine.rebuild()
        native = engine.status(build=wanted)
    found = list(_kernels())
    if json:
        known = dataclasses.asdict(native) | {"path": native.path and str(native.path)}
        print(dumps({"kernels": found, "native": known}, indent=2))
    else:
        _print(found, native)
    if wanted and not native.available:
        print(f"ln-zoo kernels: error: not built: {native.reason}", file=sys.stderr)
        return 1
    if wanted and native.unused_cache and not native.prebuilt:
        print(
            f"ln-zoo kernels: error: built, but not kept: {native.unused_cache}; correct that, or "
            "name another folder in LN_ZOO_CACHE",
            file=sys.stderr,
        )
        return 1
    return 0


def _kernels() -> Iterator[dict[str, Any]]:
    """Facts of each kernel in the order of preference; one row per name in ``LN_ZOO_KERNELS``."""
    from ln_zoo.ops import KERNELS, registry

    value = os.environ.get("LN_ZOO_KERNELS", "")
    allowed = {kernel.name for kernel in registry.allowed(value)[0]}
    named: dict[str, list[Kernel]] = {}
    for kernel in KERNELS:
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


def _print(kernels: Sequence[dict[str, Any]], native: Status) -> None:
    """One line per fact; rich may not be installed."""
    for kernel in kernels:
        tasks, state = ", ".join(kernel["tasks"]), kernel["reason"] or "available"
        print(f"{kernel['name']:7}  {kernel['title']} ({tasks}): {state}")
    print("(none)   the generic loop (everything): always available\n")
    for name, value in _facts(native):
        print(f"native {name:9}  {value}")


def _facts(native: Status) -> Iterator[tuple[str, str]]:
    from ln_zoo.kernels.native import build

    if native.available and not native.built:
        yield "library", "not compiled yet: on first use, or by `ln-zoo kernels --build`"
    else:
        yield "library", str(native.path or native.reason)
    yield "level", native.level + (" (from the wheel)" if native.prebuilt else "")
    if native.unused_cache and not native.prebuilt:
        yield "cache", f"not used: {native.unused_cache}; each process compiles its own library"
    yield "compiler", native.compiler or "none"
    yield "flags", " ".join(native.flags)
    if native.openmp is not None:
        yield "OpenMP", f"{native.openmp}, {native.threads} threads"
    yield "processor", f"{native.cpu} ({' '.join(native.features)})"
    use = "" if build.bfloat16_pays() else ", slower than float32: half precision runs in float32"
    yield "bfloat16", ("in hardware" if native.bf16 else "not in hardware") + use


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
