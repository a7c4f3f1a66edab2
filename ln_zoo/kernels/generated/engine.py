"""The kernels of cells and norms that no hand-written kernel knows."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ln_zoo.kernels.triton import engine as triton_engine
from ln_zoo.ops.cells import States
from ln_zoo.ops.precision import no_autocast, product_dtype
from ln_zoo.ops.recurrence import RecurrentCall, run_layers
from ln_zoo.ops.recurrent_kernel import no_custom_ops_reason
from ln_zoo.ops.registry import Task

#: The generic loop runs calls below both: steps of all directions, and multiplications.
LEAST_STEPS, LEAST_MULTIPLICATIONS = 16, 2**18


class GeneratedLayers:
    """A `ln_zoo.ops.registry.Kernel` that traces, emits and compiles the step of any cell."""

    name = "generated"
    title = "C++ generated from the cell and its norms"
    rank = 95
    tasks: tuple[Task, ...] = ("layers", "step")
    recomputes = True
    device = "cpu"

    def __init__(self) -> None:
        self._last = threading.local()

    def missing(self) -> str | None:
        from ln_zoo.kernels.native import build

        return build.compiler_missing() or build.status().reason

    def unsupported_reason(self, call: RecurrentCall) -> str | None:
        call = as_layer(call)
        reason = no_custom_ops_reason() or self._unsupported(call)
        if reason is not None:
            return reason
        found = self._bound(call)
        return found if isinstance(found, str) else None

    def __call__(self, call: RecurrentCall) -> tuple[Any, States]:
        bound = self.bound_to(call)
        self._last.found = None  # the call's tensors
        return run_bound(call, bound)

    def bound_to(self, call: RecurrentCall) -> Sequence[Any]:
        """The kernels of a call that it supports, for `run_bound`."""
        kept = getattr(self._last, "found", None)
        bound = kept[1] if kept is not None and kept[0] is call else self._bound(call)
        if isinstance(bound, str):
            raise RuntimeError(f"{call.cell.name} changed during its call: {bound}")
        return bound

    def _bound(self, call: RecurrentCall) -> Any:
        """The kernels of all directions, kept for this call; or why there are none."""
        from ln_zoo.kernels.generated.binding import bound_to

        found, make = [], self._maker()
        for i in range(len(call.weights)):
            bound = bound_to(as_layer(call), i, make)
            if isinstance(bound, str):
                return bound
            found.append(bound)
        self._last.found = call, found
        return found

    def _maker(self) -> Any:
        from ln_zoo.kernels.generated.kernel import make

        return make

    def _unsupported(self, call: RecurrentCall) -> str | None:
        if call.x.device.type != self.device:
            return f"it runs on {self.device}, not on {call.x.device.type}"
        return _unsupported(call)


class GeneratedTriton(GeneratedLayers):
    """The same for NVIDIA GPUs, as Triton kernels between products of cuBLAS.

    Only if ``LN_ZOO_KERNELS`` names ``generated``: these kernels have not been run on a GPU.
    """

    title = "Triton generated from the cell and its norms"
    tasks = ("layers",)
    device = "cuda"

    def missing(self) -> str | None:
        return triton_engine.TritonEngine().missing()

    def _maker(self) -> Any:
        from ln_zoo.kernels.generated.triton_passes import make

        return make

    def _unsupported(self, call: RecurrentCall) -> str | None:
        reason = super()._unsupported(call)
        if reason is None and "generated" not in os.environ.get("LN_ZOO_KERNELS", ""):
            return "it has only been run in Triton's interpreter: name it in LN_ZOO_KERNELS to try"
        return reason


def as_layer(call: RecurrentCall) -> RecurrentCall:
    """A single step of a cell as that of a layer."""
    if call.states[0].dim() == 3:
        return call
    x = call.x if call.x.dim() == 3 else call.x.unsqueeze(0)
    return call._replace(x=x, states=tuple([s.unsqueeze(0) for s in call.states]))


def run_bound(call: RecurrentCall, bound: Sequence[Any]) -> tuple[Any, States]:
    """Run all layers and directions on their kernels (`ln_zoo.kernels.generated.binding.Bound`)."""
    from ln_zoo.kernels.generated.binding import prepared
    from ln_zoo.kernels.generated.kernel import Kernel
    from ln_zoo.kernels.generated.operator import run

    def direction(
        i: int, x: Tensor, sizes: Sequence[int] | None, states: States, reset: Tensor | None
    ) -> tuple[Any, States]:
        output, final = run(*prepared(call, i, bound[i], x, sizes, states, reset))
        kept = call.weights[i].hh.dtype
        if kept is torch.float32:
            return output, final
        # States keep the dtype of weights, so splitting a sequence does not round.
        return output, tuple([state.to(kept) for state in final])

    dtype = product_dtype(call.x)
    with no_autocast(call.x):
        x, is_step = _as(call.x, torch.float32), call.states[0].dim() == 2
        alone = len(bound) == 1 and isinstance(bound[0].kernel, Kernel)
        if is_step or (alone and call.batch_sizes is None):
            # States keep their shape, as in `Single`, which runs later calls: a checkpoint
            # compares the shapes of what its two calls save.
            output, states = direction(0, x, None, call.states, call.reset)
        else:
            output, states = run_layers(direction, call._replace(x=x))
    return None if output is None else _as(output, dtype), states


def _multiplications(call: RecurrentCall) -> int:
    numbers = sum(a.numel() for w in call.weights for a in (w.ih, w.hh, *w.own))
    return call.x.shape[:-1].numel() * numbers


def _as(a: Tensor, dtype: torch.dtype) -> Tensor:
    return a if a.dtype is dtype else a.to(dtype)


def _unsupported(call: RecurrentCall) -> str | None:
    """Why a call cannot run, as far as known without a trace, or None."""
    from ln_zoo.kernels.generated.binding import DTYPES

    x, weights = call.x, call.weights
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return "something watches the operators of torch"
    if product_dtype(x) not in DTYPES or any(w.hh.dtype not in DTYPES for w in weights):
        return f"it computes in float32, not in {str(x.dtype).removeprefix('torch.')}"
    if not call.sites:
        return "it needs the norms of the layer"
    steps = len(x) if call.batch_sizes is None else len(call.batch_sizes)
    if steps * len(weights) < LEAST_STEPS and _multiplications(call) < LEAST_MULTIPLICATIONS:
        return f"it has fewer than {LEAST_STEPS} steps"
    if not x.numel() or not all(s.numel() for s in call.states):
        return "it has no numbers"
    for a in (x, *call.states, *(a for w in weights for a in w.tensors)):
        if type(a) not in (Tensor, nn.Parameter, type(None)):
            return "tensors are of other classes than torch's own"
    return None
