"""Half-precision calls that run in float32, where the processor multiplies that faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ln_zoo.ops.cells import States, Weights
from ln_zoo.ops.engines.native import build
from ln_zoo.ops.norm_records import StepNorm
from ln_zoo.ops.operator import no_autocast
from ln_zoo.ops.recurrence import RecurrentCall
from ln_zoo.ops.recurrent_kernel import LayersKernel
from ln_zoo.ops.registry import Task
from ln_zoo.ops.spec import product_dtype

_HALF = (torch.bfloat16, torch.float16)
#: Multiplications of one direction from which products in bfloat16 save more time than is lost
#: outside of them, by a kernel that prepares calls in Python, or by torch's functions in a step;
#: measured on a processor with AMX (docs/results/performance.md).
MIN_MULTIPLICATIONS: dict[Task, int] = {"layers": 2**28, "step": 2**25}


def is_widened(dtype: torch.dtype) -> bool:
    """Whether products of this precision are better computed in float32."""
    return dtype in _HALF and not (dtype == torch.bfloat16 and build.bfloat16_pays())


class MixedPrecision:
    """The kernel of half-precision calls on the CPU that another one runs in float32.

    Few processors multiply bfloat16 faster than float32: those with AMX, and AMD's with AVX-512. On
    others a call in float32 takes 0.5 to 0.9 of the time, and is more precise. So does a small call
    on any processor (docs/results/performance.md). Float16 and batch norm have no half-precision
    kernel.

    Outputs have the precision that was asked for, and final states that of the weights.

    Args:
        kernel: what runs the call.
        task: what is run.

    Example:
        >>> from ln_zoo.ops.engines.native.layers import NativeLayers
        >>> MixedPrecision(NativeLayers()).title
        'C++, in one call, in float32'
    """

    name = "native"

    def __init__(self, kernel: LayersKernel, task: Task = "layers") -> None:
        self.kernel = kernel
        self.tasks: tuple[Task, ...] = (task,)
        self.title = f"{kernel.title}, in float32"

    def missing(self) -> str | None:
        """What this machine lacks for the kernel, or ``None``."""
        return self.kernel.missing()

    def unsupported_reason(self, call: RecurrentCall) -> str | None:
        """Why this call is not widened, or the kernel cannot take it then; else ``None``."""
        dtype = product_dtype(call.x)
        if call.x.device.type != "cpu" or dtype not in _HALF:
            return "the call is not in half precision on the CPU"
        norms = (record for records in call.records for record in records.values())
        over_examples = any(isinstance(norm, StepNorm) for norm in norms)
        if not over_examples and not is_widened(dtype) and not self._is_small(call):
            return "this processor multiplies bfloat16 faster"
        # Only the shape of the inputs is asked about: no need to convert them yet.
        x = call.x.new_empty((), dtype=torch.float32).expand(call.x.shape)
        with no_autocast(x):
            return self.kernel.unsupported_reason(_wide(call, x))

    def _is_small(self, call: RecurrentCall) -> bool:
        """Whether its products are too few for bfloat16."""
        if torch.compiler.is_compiling():
            return False  # sizes may be symbolic
        rows = call.x.shape[:-1].numel()
        most = max(w.ih.numel() + w.hh.numel() for w in call.weights)
        return rows * most < MIN_MULTIPLICATIONS[self.tasks[0]]

    def __call__(self, call: RecurrentCall) -> tuple[Tensor, States]:
        """Runs the layers, or a single step, which has no output but its states."""
        dtype = product_dtype(call.x)
        with no_autocast(call.x):
            output, states = self.kernel(_wide(call, call.x))
        states = tuple(state.to(call.weights[0].hh.dtype) for state in states)
        return output if output is None else output.to(dtype), states


def _wide(call: RecurrentCall, x: Tensor) -> RecurrentCall:
    """The same call of x, all in float32."""

    names = Weights._fields[:5]
    weights = [
        w._replace(own=tuple(map(_float, w.own)), **{n: _float(getattr(w, n)) for n in names})
        for w in call.weights
    ]
    states = tuple(map(_float, call.states))
    return call._replace(x=_float(x), states=states, weights=weights)


def _float(a: Any) -> Any:
    """A tensor in float32, in memory of its own if it is a negated view; None as it is."""
    return None if a is None else a.float().resolve_neg()
