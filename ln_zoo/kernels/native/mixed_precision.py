"""Half-precision calls computed in float32, where that is faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ln_zoo.ops.cells import States, Weights
from ln_zoo.ops.norm_records import StepNorm
from ln_zoo.ops.precision import no_autocast, product_dtype
from ln_zoo.ops.recurrence import RecurrentCall
from ln_zoo.ops.recurrent_kernel import LayersKernel
from ln_zoo.ops.registry import Task

_HALF = (torch.bfloat16, torch.float16)
#: Minimum multiplications of one direction for which bfloat16 is faster overall, for layers and
#: for single steps; measured with AMX (docs/results/performance.md).
MIN_MULTIPLICATIONS: dict[Task, int] = {"layers": 2**28, "step": 2**25}


def is_widened(dtype: torch.dtype) -> bool:
    """Whether products of this dtype are computed in float32."""
    from ln_zoo.kernels.native import build

    return dtype in _HALF and not (dtype == torch.bfloat16 and build.bfloat16_pays())


class MixedPrecision:
    """A kernel that runs half-precision CPU calls on a float32 kernel.

    Only AMX, and AMD's AVX-512, multiply bfloat16 faster than float32. Elsewhere, and for small
    calls, float32 takes 0.5 to 0.9 of the time and is more precise (docs/results/performance.md).
    Float16 and batch norm have no half-precision kernel. Outputs have the requested dtype, final
    states the dtype of the weights.
    """

    name = "native"
    rank = 40

    def __init__(self, kernel: LayersKernel, task: Task = "layers") -> None:
        self.kernel = kernel
        self.tasks: tuple[Task, ...] = (task,)
        self.title = f"{kernel.title}, in float32"

    def missing(self) -> str | None:
        return self.kernel.missing()

    def unsupported_reason(self, call: RecurrentCall) -> str | None:
        dtype = product_dtype(call.x)
        if call.x.device.type != "cpu" or dtype not in _HALF:
            return "the call is not in half precision on the CPU"
        norms = (record for records in call.records for record in records.values())
        over_examples = any(isinstance(norm, StepNorm) for norm in norms)
        if not over_examples and not is_widened(dtype) and not self._is_small(call):
            return "this processor multiplies bfloat16 faster"
        # Only shapes matter: inputs need no conversion yet.
        x = call.x.new_empty((), dtype=torch.float32).expand(call.x.shape)
        with no_autocast(x):
            return self.kernel.unsupported_reason(_wide(call, x))

    def _is_small(self, call: RecurrentCall) -> bool:
        if torch.compiler.is_compiling():
            return False  # sizes may be symbolic
        rows = call.x.shape[:-1].numel()
        most = max(w.ih.numel() + w.hh.numel() for w in call.weights)
        return rows * most < MIN_MULTIPLICATIONS[self.tasks[0]]

    def __call__(self, call: RecurrentCall) -> tuple[Tensor, States]:
        dtype = product_dtype(call.x)
        with no_autocast(call.x):
            output, states = self.kernel(_wide(call, call.x))
        states = tuple(state.to(call.weights[0].hh.dtype) for state in states)
        return output if output is None else output.to(dtype), states


def _wide(call: RecurrentCall, x: Tensor) -> RecurrentCall:
    names = Weights._fields[:5]
    weights = [
        w._replace(own=tuple(map(_float, w.own)), **{n: _float(getattr(w, n)) for n in names})
        for w in call.weights
    ]
    states = tuple(map(_float, call.states))
    return call._replace(x=_float(x), states=states, weights=weights)


def _float(a: Any) -> Any:
    """A tensor in float32, with negated views materialised."""
    return None if a is None else a.float().resolve_neg()
