"""What kernels remember of a layer's calls, so that a similar call skips selection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ln_zoo.ops import registry
from ln_zoo.ops.cells import States
from ln_zoo.ops.recurrence import RecurrentCall
from ln_zoo.ops.regularization import Noise

#: Dictionary entries (dict, key) that weights and records of a layer depend on.
Entries = Sequence[tuple[dict[str, Any], str]]
#: Runs a call of a layer, or of a single step.
Runner = Callable[[RecurrentCall], tuple[Any, States]]


class CallCache(Protocol):
    """How the calls of one layer or cell run, by the form of the input."""

    def run(
        self,
        owner: dict[str, Any],
        x: Tensor,
        states: States | None,
        count: int,
        dropout: float = 0.0,
        training: bool = False,
        draw: Callable[[States], Sequence[Noise]] | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Any, States] | None:
        """Output and final states, or None for a call whose form is not known.

        ``owner`` is the layer's ``__dict__``, which shallow copies do not share. x is (T, N, I), or
        (N, I) for a single step; ``reset`` is (T * N,). ``draw`` samples the noise of a call, given
        its ``count`` initial states.
        """

    def keep(
        self, owner: dict[str, Any], entries: Entries | None, run: Runner, call: RecurrentCall
    ) -> None:
        """Remember how a call runs, until a value in ``entries`` (None: unknown) is replaced."""


class Plans:
    """The `CallCache` of a layer, or None; copies of the layer begin without one."""

    def __init__(self) -> None:
        self.cache: CallCache | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Plans, ()

    def keep(
        self, owner: dict[str, Any], entries: Entries | None, run: Runner, call: RecurrentCall
    ) -> None:
        """See `CallCache.keep`; a no-op where no kernel has a cache for the device."""
        if torch.compiler.is_compiling():
            return
        if self.cache is None:
            make = registry.CALL_CACHES.get(call.x.device.type)
            if make is None:
                return
            self.cache = make()
        self.cache.keep(owner, entries, run, call)
