"""The engine that runs time steps in C++ on the CPU.

Its products beat those of a general library on the shapes that occur here: the recurrent weight is
packed once per call, and a thread takes its cases through all steps of a chunk without waiting for
the others (`kernels.cpp` tells the rest).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_int64, c_void_p

import torch
from torch import Tensor

from ln_zoo.ops.engine import Saved, Sums
from ln_zoo.ops.native.runtime import (
    NativeProducts,
    constant,
    empty,
    first_gates,
    library,
    packed,
    scratch_memory,
    trouble,
)
from ln_zoo.ops.spec import Operands, Rows, Spec

CELLS = {name: i for i, name in enumerate(("LSTM", "GRU", "RNN_TANH", "RNN_RELU"))}
_GATES = 4
_DTYPES = (torch.float32, torch.bfloat16)


class RowArguments(Structure):
    """``Rows`` of kernels.cpp."""

    _fields_ = (
        ("scale", c_int64),
        ("center", c_int64),
        ("eps", c_double),
        ("groups", c_int64 * _GATES),
    )


class StepsArguments(Structure):
    """``Steps`` of kernels.cpp."""

    _fields_ = (
        *((name, c_int64) for name in ("cell", "narrow", "steps", "cases", "hidden", "threads")),
        ("sizes", POINTER(c_int64)),
        *((name, RowArguments) for name in ("input", "recurrent", "out")),
        *(
            (name, c_void_p)
            for name in (
                *("bias", "bias_hn", "gain_input", "gain_recurrent", "gain_out", "shift_out"),
                *("weight", "v", "u", "cells", "stats", "output", "h", "c"),
                *("output_gradient", "h_prev", "c_prev", "dh", "dc", "du", "dv"),
                *("dbias", "dbias_hn", "dgain_input", "dgain_recurrent", "dgain_out"),
                "dshift_out",
            )
        ),
    )


class NativeEngine:
    """Time steps in C++, for float32 and bfloat16 on the CPU."""

    name = "native"
    title = "C++ loops compiled on this machine"

    def refuses(self, spec: Spec, x: Tensor, w_hh: Tensor, dtype: torch.dtype) -> str | None:
        """Devices, precisions and machines that it is not made for."""
        if x.device.type != "cpu":
            return f"it runs on the CPU, not on {x.device.type}"
        if dtype not in _DTYPES:
            return f"it has no products in {str(dtype).removeprefix('torch.')}"
        return trouble()

    def stats(self, spec: Spec) -> int:
        """Reciprocal deviations of all gates of both products, and two numbers of the last site."""
        return 2 * _GATES + 2

    def empty(self, *size: int, like: Tensor, dtype: torch.dtype, scratch: str = "") -> Tensor:
        """Memory that costs little to touch first."""
        return empty(*size, like=like, dtype=dtype, scratch=scratch)

    def prepare(self, spec: Spec, operands: Operands, backward: bool) -> NativeSteps:
        """Centred and packed weights, and the arguments that are the same for all chunks."""
        return NativeSteps(spec, operands, backward)

    def forward_steps(
        self,
        p: NativeSteps,
        v: Tensor,
        sizes: Sequence[int],
        h: Tensor,
        c: Tensor | None,
        out: Tensor,
        saved: Saved | None,
    ) -> None:
        """Runs a chunk of steps."""
        arguments = self.forward_arguments(p, v, sizes, h, c, out, saved)
        p.library.ln_zoo_forward(byref(arguments))

    def forward_arguments(
        self,
        p: NativeSteps,
        v: Tensor,
        sizes: Sequence[int],
        h: Tensor,
        c: Tensor | None,
        out: Tensor,
        saved: Saved | None,
    ) -> StepsArguments:
        """What C++ is told of a chunk of steps."""
        tensors = {"v": v, "h": h, "c": c, "output": out}
        if saved is not None:
            tensors |= {"u": saved.u, "cells": saved.c, "stats": saved.stats}
        elif p.spec.merged:
            tensors["u"] = v
        return p.arguments(sizes, h, tensors)

    def backward_steps(
        self,
        p: NativeSteps,
        sizes: Sequence[int],
        dout: Tensor | None,
        dh: Tensor,
        dc: Tensor | None,
        saved: Saved,
        h_prev: Tensor,
        c_prev: Tensor | None,
        du: Tensor,
        dv: Tensor,
        sums: Sums,
    ) -> None:
        """Takes gradients back through a chunk of steps."""
        arguments = self.backward_arguments(
            p, sizes, dout, dh, dc, saved, h_prev, c_prev, du, dv, sums
        )
        p.library.ln_zoo_backward(byref(arguments))

    def backward_arguments(
        self,
        p: NativeSteps,
        sizes: Sequence[int],
        dout: Tensor | None,
        dh: Tensor,
        dc: Tensor | None,
        saved: Saved,
        h_prev: Tensor,
        c_prev: Tensor | None,
        du: Tensor,
        dv: Tensor,
        sums: Sums,
    ) -> StepsArguments:
        """What C++ is told of a chunk of steps on the way back."""
        unwanted = scratch_memory("unwanted", p.width, torch.float32)
        tensors = {
            **{"v": saved.v, "u": saved.u, "cells": saved.c, "stats": saved.stats},
            **{"output_gradient": dout, "h_prev": h_prev, "c_prev": c_prev},
            **{"dh": dh, "dc": dc, "du": du, "dv": dv},
            **{f"d{k}": unwanted if a is None else a for k, a in vars(sums).items()},
        }
        return p.arguments(sizes, dh, tensors)


class NativeSteps(NativeProducts):
    """What is made once per call.

    Args:
        spec: what is to be computed.
        operands: the tensors.
        backward: whether it is for the backward pass.
    """

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        first, second = spec.products
        super().__init__(operands.w_ih, first)
        self.spec, self.library = spec, library()
        self.width, self.hidden = operands.w_hh.shape
        wide = operands.h0.dtype

        def vector(a: Tensor | None, size: int, default: float) -> Tensor:
            return constant(default, size) if a is None else a

        # The structure holds addresses: these tensors live as long as it.
        self._vectors = {
            "bias": vector(operands.bias, self.width, 0.0),
            "bias_hn": vector(operands.bias_hn, self.hidden, 0.0),
            "gain_input": vector(operands.gain_input, self.width, 1.0),
            "gain_recurrent": vector(operands.gain_recurrent, self.width, 1.0),
            "gain_out": vector(operands.gain_out, self.hidden, 1.0),
            "shift_out": vector(operands.shift_out, self.hidden, 0.0),
            "weight": packed("w_hh", operands.w_hh, second, transposed=not backward),
        }
        assert all(a.dtype == wide for name, a in self._vectors.items() if name != "weight")
        self._common = StepsArguments(
            cell=CELLS[spec.cell],
            narrow=operands.w_hh.dtype == torch.bfloat16,
            hidden=self.hidden,
            threads=torch.get_num_threads(),
            input=row_arguments(spec.input),
            recurrent=row_arguments(spec.recurrent),
            out=row_arguments(spec.out),
            **{name: a.data_ptr() for name, a in self._vectors.items()},
        )

    def arguments(
        self, sizes: Sequence[int], state: Tensor, tensors: dict[str, Tensor | None]
    ) -> StepsArguments:
        """The structure for one chunk."""
        steps = StepsArguments.from_buffer_copy(self._common)
        steps.steps, steps.cases = len(sizes), state.shape[0]
        steps.sizes = (c_int64 * len(sizes))(*sizes)
        for name, tensor in tensors.items():
            if tensor is not None:
                assert tensor.is_contiguous(), name
                setattr(steps, name, tensor.data_ptr())
        return steps


@functools.cache
def row_arguments(rows: Rows) -> RowArguments:
    """A place as C++ has it."""
    groups = (c_int64 * _GATES)(*first_gates(rows))
    return RowArguments(rows.scale, rows.center, rows.eps, groups)
