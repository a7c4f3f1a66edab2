"""The kernels for CPUs in C++: an engine, and layers in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ln_zoo.ops import memory
from ln_zoo.ops.cells import States
from ln_zoo.ops.engines.base import Steps
from ln_zoo.ops.lowering import make_spec, unsupported_places, unsupported_reason
from ln_zoo.ops.precision import product_dtype
from ln_zoo.ops.recurrence import RecurrentCall
from ln_zoo.ops.recurrent_kernel import no_custom_ops_reason
from ln_zoo.ops.registry import Task
from ln_zoo.ops.regularization import Noise
from ln_zoo.ops.spec import Operands, Spec

if TYPE_CHECKING:
    from ln_zoo.kernels.native.draw import NativeDraw
    from ln_zoo.kernels.native.window import NativeWindow


class NativeEngine:
    """C++ time steps, for float32 and bfloat16 on the CPU; over examples, float32 only."""

    name = "native"
    title = "C++ loops"
    rank = 60
    device = "cpu"
    has_noise = True

    def missing(self) -> str | None:
        return _missing()

    def unsupported_reason(
        self, spec: Spec, x: Tensor, w_hh: Tensor, dtype: torch.dtype, examples: int = 1
    ) -> str | None:
        if x.device.type != self.device:
            return f"it runs on the CPU, not on {x.device.type}"
        if dtype not in (torch.float32, torch.bfloat16):
            return f"it has no products in {_word(dtype)}"
        if spec.examples:
            if dtype != torch.float32:
                return f"it has no steps over a batch in {_word(dtype)}"
            reason = unsupported_places(spec.places)
            if reason is not None:
                return reason
        return _unavailable()

    def stats(self, spec: Spec) -> int:
        from ln_zoo.kernels.native.steps import STATS

        return 0 if spec.examples else STATS

    def empty(self, *size: int, like: Tensor, dtype: torch.dtype, scratch: str = "") -> Tensor:
        if scratch:
            return memory.scratch(f"native {scratch}", *size, dtype=dtype)
        return memory.empty(*size, like=like, dtype=dtype)

    def prepare(self, spec: Spec, operands: Operands, backward: bool) -> Steps:
        from ln_zoo.kernels.native import batch, steps

        kind = batch.NativeBatchSteps if spec.examples else steps.NativeSteps
        return kind(spec, operands, backward)

    @property
    def window_steps(self) -> type[NativeWindow]:
        from ln_zoo.kernels.native.window import NativeWindow

        return NativeWindow

    @property
    def draw_steps(self) -> type[NativeDraw]:
        from ln_zoo.kernels.native.draw import NativeDraw

        return NativeDraw


def _unsupported_statistics(spec: Spec, call: RecurrentCall, noise: Noise) -> str | None:
    """Why one call cannot normalise x (T, N, I) over examples, or None."""
    x = call.x
    if not spec.examples:
        return None
    if call.reset is not None:
        return "its steps over a batch have no resets"
    if x.shape[0] == 1:
        return "a single step may be any of a sequence, and each has statistics of its own"
    if x.shape[1] == 1 and any(place.batch for place in spec.places):
        return "a batch of one example has no statistics"
    if noise.kinds:
        return f"its steps over a batch have no {' and '.join(noise.kinds)}"
    return unsupported_places(spec.places)


class NativeLayers:
    """The kernel of padded float32 calls on the CPU."""

    name = "native"
    title = "C++, in one call"
    rank = 50
    tasks: tuple[Task, ...] = ("layers", "step")

    def missing(self) -> str | None:
        return _missing()

    def unsupported_reason(self, call: RecurrentCall) -> str | None:
        cell, records, x, _, _, weights, *_ = call
        reason = no_custom_ops_reason() or unsupported_reason(cell, records, weights, batch=True)
        if reason is not None:
            return reason
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return "something watches the operators of torch"
        if x.device.type != "cpu":
            return f"it runs on the CPU, not on {x.device.type}"
        if x.dim() != 3 or not x.shape[0] * x.shape[1]:
            return "it runs padded calls of at least one row"
        for direction, w in zip(records, weights, strict=True):
            reason = _unsupported_statistics(make_spec(cell, direction, w), call, w.noise)
            if reason is not None:
                return reason
        norms = [r for direction in records for r in direction.values() if r is not None]
        tensors = [a for w in weights for a in w.tensors] + [
            a for r in norms for a in (r.gain, r.shift)
        ]
        for a in (x, *tensors):
            if a is None:
                continue
            if a.dtype != torch.float32 or product_dtype(x) != torch.float32:
                return "it computes in float32 alone"
            if type(a) not in (Tensor, nn.Parameter) or not a.numel() or a.is_neg():
                return "a tensor has no numbers of its own"
            if a is not x and not a.is_contiguous():
                return "a parameter is not contiguous"
        if any(s.is_neg() for s in call.states):
            return "a state has no numbers of its own"
        for direction in records:
            for role, record in direction.items():
                if role != "cell" and record is not None and record.shift is not None:
                    return f"the {role} site has a shift"
        return _unavailable()

    def __call__(self, call: RecurrentCall) -> tuple[Tensor, States]:
        from ln_zoo.kernels.native.layers import Prepared

        prepared, noise = Prepared(call), [w.noise for w in call.weights]
        states = tuple(s.contiguous() for s in call.states)
        options = call.dropout, call.training, noise, call.reset
        return prepared(prepared.check(), call.x, None, states, *options)


def _missing() -> str | None:
    from ln_zoo.kernels.native import build

    return build.status().reason


def _unavailable() -> str | None:
    from ln_zoo.kernels.native.runtime import unavailable_reason

    return unavailable_reason()


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
