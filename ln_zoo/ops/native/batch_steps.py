"""The batch engine that runs time steps in C++ on the CPU.

Statistics are over cases, so that threads share the units, and meet once a step (`kernels.cpp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_int64, c_void_p

import torch
from torch import Tensor

from ln_zoo.ops.batch_recurrence import BatchSpec, Cases, Kept, Places, Statistics
from ln_zoo.ops.engine import Sums
from ln_zoo.ops.native.runtime import (
    NativeProducts,
    constant,
    empty,
    library,
    scratch_memory,
    trouble,
)
from ln_zoo.ops.native.steps import CELLS
from ln_zoo.ops.spec import Operands, Rows

#: Units that are worth a thread.
_LEAST_UNITS = 16


class _Statistics(Structure):
    """``Statistics`` of kernels.cpp."""

    _fields_ = (("batch", c_int64), *((name, c_void_p) for name in ("mean", "var", "factor")))


class _BatchSteps(Structure):
    """``BatchSteps`` of kernels.cpp."""

    _fields_ = (
        *((name, c_int64) for name in ("cell", "steps", "cases", "hidden", "shares", "correction")),
        ("sizes", POINTER(c_int64)),
        *((name, c_double) for name in ("eps_recurrent", "eps_out")),
        *((name, _Statistics) for name in Places._fields),
        *(
            (name, c_void_p)
            for name in (
                *("bias", "bias_hn", "gain_input", "gain_recurrent", "gain_out", "shift_out"),
                *("weight", "v", "u", "cells", "output", "h", "c"),
                *("output_gradient", "h_prev", "c_prev", "dh", "dc", "du", "dv"),
                *("dbias", "dbias_hn", "dgain_input", "dgain_recurrent", "dgain_out"),
                "dshift_out",
            )
        ),
    )


class NativeBatchEngine:
    """Time steps in C++, for float32 on the CPU."""

    name = "native"
    title = "C++ loops over a batch, compiled on this machine"

    def refuses(self, spec: BatchSpec, x: Tensor, w_hh: Tensor, dtype: torch.dtype) -> str | None:
        """Devices, precisions and machines that it is not made for."""
        if x.device.type != "cpu":
            return f"it runs on the CPU, not on {x.device.type}"
        if dtype != torch.float32:
            return f"it has no steps in {str(dtype).removeprefix('torch.')}"
        if len({place.correction for place in spec.places if place.batch}) > 1:
            return "places differ in the correction of variances"
        return trouble()

    def empty(self, *size: int, like: Tensor, dtype: torch.dtype, scratch: str = "") -> Tensor:
        """Memory that costs little to touch first."""
        return empty(*size, like=like, dtype=dtype, scratch=scratch)

    def prepare(self, spec: BatchSpec, operands: Operands, backward: bool) -> NativeBatchSteps:
        """Packed weights, and the arguments that are the same for all chunks."""
        return NativeBatchSteps(spec, operands, backward)

    def forward_steps(
        self,
        p: NativeBatchSteps,
        v: Tensor,
        sizes: Sequence[int],
        places: Places,
        h: Tensor,
        c: Tensor | None,
        out: Tensor,
        kept: Kept | None,
    ) -> None:
        """Runs a chunk of steps."""
        tensors = {"v": v, "h": h, "c": c, "output": out}
        if kept is not None:
            tensors |= {"u": kept.u, "cells": kept.c}
        arguments, found = p.arguments(sizes, h, tensors, places, forward=True)
        if p.spec.input.batch:
            library().ln_zoo_batch_inputs(byref(arguments), v.data_ptr(), p.spec.input.eps)
        library().ln_zoo_batch_forward(byref(arguments))
        for statistics, mean in found:
            assert statistics.mean is not None
            statistics.mean.add_(mean)

    def backward_steps(
        self,
        p: NativeBatchSteps,
        sizes: Sequence[int],
        places: Places,
        dout: Tensor | None,
        dh: Tensor,
        dc: Tensor | None,
        kept: Kept,
        h_prev: Tensor,
        c_prev: Tensor | None,
        du: Tensor,
        dv: Tensor,
        sums: Sums,
    ) -> None:
        """Takes gradients back through a chunk of steps."""
        unwanted = scratch_memory("unwanted", p.width, torch.float32)
        tensors = {
            **{"v": kept.v, "u": kept.u, "cells": kept.c, "output_gradient": dout},
            **{"h_prev": h_prev, "c_prev": c_prev, "dh": dh, "dc": dc, "du": du, "dv": dv},
            **{f"d{k}": unwanted if a is None else a for k, a in vars(sums).items()},
        }
        arguments, _ = p.arguments(sizes, dh, tensors, places, forward=False)
        library().ln_zoo_batch_backward(byref(arguments))


class NativeBatchSteps(NativeProducts):
    """What is made once per call.

    Args:
        spec: what is to be computed.
        operands: the tensors.
        backward: whether it is for the backward pass.
    """

    def __init__(self, spec: BatchSpec, operands: Operands, backward: bool) -> None:
        super().__init__(operands.w_ih, Rows())
        self.spec = spec
        self.width, self.hidden = operands.w_hh.shape
        shares = max(1, min(torch.get_num_threads(), self.hidden // _LEAST_UNITS))

        def vector(a: Tensor | None, size: int, default: float) -> Tensor:
            return constant(default, size) if a is None else a

        # The structures hold addresses: these tensors live as long as they do.
        self._alive: list[Tensor | None] = []
        self._vectors = {
            "bias": vector(operands.bias, self.width, 0.0),
            "bias_hn": vector(operands.bias_hn, self.hidden, 0.0),
            "gain_input": vector(operands.gain_input, self.width, 1.0),
            "gain_recurrent": vector(operands.gain_recurrent, self.width, 1.0),
            "gain_out": vector(operands.gain_out, self.hidden, 1.0),
            "shift_out": vector(operands.shift_out, self.hidden, 0.0),
        }
        layout = (CELLS[spec.cell], self.hidden, shares, backward)
        weight = scratch_memory(
            "batch_w_hh", library().ln_zoo_batch_packed_size(*layout), torch.float32
        )
        library().ln_zoo_batch_pack(*layout, operands.w_hh.data_ptr(), weight.data_ptr())
        corrections = [place.correction for place in spec.places if place.batch]
        self._common = _BatchSteps(
            cell=CELLS[spec.cell],
            hidden=self.hidden,
            shares=shares,
            correction=corrections[0] if corrections else 0,
            eps_recurrent=spec.recurrent.eps,
            eps_out=spec.out.eps,
            weight=weight.data_ptr(),
            **{name: a.data_ptr() for name, a in self._vectors.items()},
        )
        self._weight = weight

    def arguments(
        self,
        sizes: Sequence[int],
        state: Tensor,
        tensors: dict[str, Tensor | None],
        places: Places,
        forward: bool,
    ) -> tuple[_BatchSteps, list[tuple[Statistics, Tensor]]]:
        """The structure for one chunk, and means that the forward finds, with where they belong."""
        steps = _BatchSteps.from_buffer_copy(self._common)
        steps.steps, steps.cases = len(sizes), state.shape[0]
        steps.sizes = (c_int64 * len(sizes))(*sizes)
        for name, tensor in tensors.items():
            if tensor is not None:
                assert tensor.is_contiguous(), name
                setattr(steps, name, tensor.data_ptr())
        found = []
        self._alive = []
        for name, place, statistics in zip(Places._fields, self.spec.places, places, strict=True):
            if statistics is None:
                continue
            mean, var = statistics.mean, statistics.var.contiguous()
            if place.batch and forward:
                factor = torch.empty_like(var)
                # The frame has taken the inputs' means off.
                mean = None if name == "input" else torch.empty_like(var)
                if mean is not None:
                    found.append((statistics, mean))
            else:
                mean = None if mean is None else mean.contiguous()
                factor = _factors(place, var, sizes)
            self._alive += [mean, var, factor]
            addresses = (None if a is None else a.data_ptr() for a in (mean, var, factor))
            setattr(steps, name, _Statistics(place.batch, *addresses))
        return steps, found


def _factors(place: Cases, var: Tensor, sizes: Sequence[int]) -> Tensor:
    """Reciprocal deviations of each step, (steps, F)."""
    if place.batch and place.correction:
        n = torch.tensor(sizes, dtype=var.dtype).unsqueeze(1)
        var = var * (n / (n - place.correction))
    return (var + place.eps).rsqrt()
