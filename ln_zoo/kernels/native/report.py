"""The native library for ``ln-zoo kernels``: build it and describe it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from ln_zoo.kernels.native import build


class NativeReport:
    """A `ln_zoo.ops.registry.Library`."""

    name = "native"

    def build(self, again: bool) -> str | None:
        if again:
            with contextlib.suppress(build.Unavailable):
                build.rebuild()
        status = build.status(build=True)
        if not status.available:
            return f"not built: {status.reason}"
        if status.unused_cache and not status.prebuilt:
            return (
                f"built, but not kept: {status.unused_cache}; correct that, or name another folder "
                "in LN_ZOO_CACHE"
            )
        return None

    def status(self) -> dict[str, Any]:
        found = build.status()
        return dataclasses.asdict(found) | {"path": found.path and str(found.path)}

    def describe(self) -> Iterator[tuple[str, str]]:
        status = build.status()
        if status.available and not status.built:
            yield "library", "not compiled yet: on first use, or by `ln-zoo kernels --build`"
        else:
            yield "library", str(status.path or status.reason)
        yield "level", status.level + (" (from the wheel)" if status.prebuilt else "")
        if status.unused_cache and not status.prebuilt:
            cache = f"not used: {status.unused_cache}; each process compiles its own library"
            yield "cache", cache
        yield "compiler", status.compiler or "none"
        yield "flags", " ".join(status.flags)
        if status.openmp is not None:
            yield "OpenMP", f"{status.openmp}, {status.threads} threads"
        yield "processor", f"{status.cpu} ({' '.join(status.features)})"
        pays = build.bfloat16_pays()
        use = "" if pays else ", slower than float32: half precision runs in float32"
        yield "bfloat16", ("in hardware" if status.bf16 else "not in hardware") + use
