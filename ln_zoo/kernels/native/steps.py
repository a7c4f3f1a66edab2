"""C++ time steps for places that normalise rows.

The recurrent weight is packed once per call, and each thread runs its examples through all steps of
a chunk without synchronising (`kernels.cpp`). For these shapes, that beats a general matrix
library.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_double, c_int64, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor

from ln_zoo.kernels.ctypes_arguments import Arguments, Packed, TensorForm, check_steps
from ln_zoo.kernels.native.runtime import (
    NativeProducts,
    constant,
    first_gates,
    library,
    packed,
    packed_shares,
    scratch_memory,
    shares_of_units,
)
from ln_zoo.ops.engines.base import Chunk, ChunkGrads, Masks
from ln_zoo.ops.spec import Examples, Operands, Rows, Spec

#: ``Cell`` of arguments.h.
CELLS = {"LSTM": 0, "GRU": 1, "RNN_TANH": 2, "RNN_RELU": 3, "light GRU": 4}
_GATES = 4
#: Numbers saved per row: reciprocal deviations of all gates of both products, and two of the last
#: site.
STATS = 2 * _GATES + 2


class RowArguments(Structure):
    """``Rows`` of arguments.h."""

    _fields_ = (
        ("scale", c_int64),
        ("center", c_int64),
        ("eps", c_double),
        ("groups", c_int64 * _GATES),
    )


#: Vectors over features, in the order of `ln_zoo.ops.engines.base.Sums`.
VECTORS: dict[str, TensorForm] = {
    "bias": ("wide", "G"),
    "bias_hn": ("wide", "H"),
    "gain_input": ("wide", "G"),
    "gain_recurrent": ("wide", "G"),
    "gain_out": ("wide", "H"),
    "shift_out": ("wide", "H"),
}


def _zoned(tensors: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Fields of `StepsArguments`, with the shares of zoneout after its masks."""
    for name in tensors:
        yield name, c_void_p
        if name == "zoneout_c":
            yield from (("share_h", c_double), ("share_c", c_double))


class StepsArguments(Arguments):
    """``Steps`` of arguments.h."""

    tensors: ClassVar = {
        **VECTORS,
        "weight": ("packed", "inner", "outer"),
        "v": ("kind", "rows", "G"),
        "u": ("kind", "rows", "G"),
        "cells": ("wide", "rows", "H"),
        "stats": ("wide", "rows", "S"),
        "dropout": ("wide", "N", "H"),
        "zoneout_h": ("flag", "rows", "H"),
        "zoneout_c": ("flag", "rows", "H"),
        "reset": ("flag", "rows"),
        "output": ("kind", "rows", "H"),
        "h": ("wide", "N", "H"),
        "c": ("wide", "N", "H"),
        "output_gradient": ("kind", "rows", "H"),
        "h_prev": ("kind", "rows", "H"),
        "c_prev": ("wide", "rows", "H"),
        "dh": ("wide", "N", "H"),
        "dc": ("wide", "N", "H"),
        "du": ("kind", "rows", "G"),
        "dv": ("kind", "rows", "G"),
        **{f"d{name}": form for name, form in VECTORS.items()},
    }
    _fields_ = (
        *((name, c_int64) for name in ("cell", "narrow", "steps", "examples", "hidden", "threads")),
        *((name, c_int64) for name in ("shares", "parts", "joint", "carried")),
        ("sizes", POINTER(c_int64)),
        *((name, RowArguments) for name in ("input", "recurrent", "out")),
        # The first two for padded calls in float32 alone.
        *((name, c_int64) for name in ("inputs", "skipped", "to_start")),
        *((name, c_void_p) for name in ("x", "input_weight")),
        *_zoned(tensors),
    )


class NativeSteps(NativeProducts):
    """State of one call."""

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        super().__init__(operands.w_ih, spec.products[0], operands.x.shape[:-1].numel())
        self.spec, self.library = spec, library()
        hidden = operands.w_hh.shape[1]
        width = spec.gates * hidden
        self._kind = operands.w_hh.dtype
        self._sizes = {"H": hidden, "G": width, "S": 0 if spec.examples else STATS}
        # Shape of the packed weight.
        inner, outer = (width, hidden) if backward else (hidden, width)
        self._sizes |= {"inner": inner, "outer": outer}
        self._w_hh, self._backward = operands.w_hh, backward
        self._weights: dict[int, Packed] = {}
        # The structure holds addresses, so it must keep these tensors alive.
        self._tensors = vectors(operands, self._sizes)
        self._common = StepsArguments(
            cell=CELLS[spec.cell],
            narrow=self._kind == torch.bfloat16,
            hidden=hidden,
            threads=torch.get_num_threads(),
            input=row_arguments(spec.input),
            recurrent=row_arguments(spec.recurrent),
            out=row_arguments(spec.out),
            share_h=spec.zoneout[0],
            share_c=spec.zoneout[1],
            joint=spec.joint,
            carried=spec.carried,
            to_start=1,
        )
        self._common.fill(self._tensors, self._sizes, self._kind)

    def forward(self, chunk: Chunk) -> None:
        shares = self._shares(len(chunk.h), chunk.masks)
        self.library.ln_zoo_forward(byref(self.forward_arguments(chunk, shares)))

    def backward(self, grads: ChunkGrads) -> None:
        shares = self._shares(len(grads.dh), grads.masks)
        self.library.ln_zoo_backward(byref(self.backward_arguments(grads, shares)))

    def forward_arguments(self, chunk: Chunk, shares: int = 1) -> StepsArguments:
        saved, v = chunk.saved, chunk.v
        tensors = {"v": v, "h": chunk.h, "c": chunk.c, "output": chunk.out}
        tensors |= chunk.masks._asdict()
        if saved is not None:
            tensors |= {"u": saved.u, "cells": saved.c, "stats": saved.stats}
        return self._of_chunk(chunk.sizes, chunk.h, tensors, shares)

    def backward_arguments(self, grads: ChunkGrads, shares: int = 1) -> StepsArguments:
        tensors = gradient_tensors(grads, self._sizes) | {"stats": grads.saved.stats}
        tensors |= grads.masks._asdict()
        return self._of_chunk(grads.sizes, grads.dh, tensors, shares)

    def _shares(self, examples: int, masks: Masks) -> int:
        """Shares of units for this many examples; 1 under noise and in bfloat16."""
        noise = any(self.spec.zoneout) or masks.noise
        if self._kind != torch.float32:
            return 1
        return shares_of_units(self.spec.gates, self._sizes["H"], examples, noise)

    def _weight(self, shares: int) -> Packed:
        if shares not in self._weights:
            place, backward = self.spec.products[1], self._backward
            self._weights[shares] = (
                packed("w_hh", self._w_hh, place, transposed=not backward)
                if shares == 1
                else packed_shares("w_hh", self._w_hh, place, shares, backward)
            )
        return self._weights[shares]

    def _of_chunk(
        self,
        sizes: Sequence[int],
        state: Tensor,
        tensors: Mapping[str, Tensor | Packed | None],
        shares: int,
    ) -> StepsArguments:
        tensors = {**tensors, "weight": self._weight(shares)}
        steps = StepsArguments.from_buffer_copy(self._common)
        rows, examples = sum(sizes), state.shape[0]
        steps.steps, steps.examples, steps.shares = len(sizes), examples, shares
        check_steps(sizes, rows, examples)
        steps.sizes = (c_int64 * len(sizes))(*sizes)
        steps.fill(tensors, {**self._sizes, "rows": rows, "N": examples}, self._kind)
        return steps


def vectors(operands: Operands, sizes: Mapping[str, int]) -> dict[str, Tensor | Packed | None]:
    """The `VECTORS` of a call; constants replace absent ones."""
    found: dict[str, Tensor | Packed | None] = {}
    for name, (_, letter) in VECTORS.items():
        a = getattr(operands, name)
        default = 1.0 if name.startswith("gain") else 0.0
        found[name] = constant(default, sizes[letter]) if a is None else a
    return found


def gradient_tensors(grads: ChunkGrads, sizes: Mapping[str, int]) -> dict[str, Tensor | None]:
    """Tensors of the backward pass; scratch memory replaces sums that are not needed."""
    unwanted = scratch_memory("unwanted", sizes["G"], torch.float32)
    saved = grads.saved
    return {
        **{"v": saved.v, "u": saved.u, "cells": saved.c, "output_gradient": grads.dout},
        **{"h_prev": grads.h_prev, "c_prev": grads.c_prev},
        **{"dh": grads.dh, "dc": grads.dc, "du": grads.du, "dv": grads.dv},
        **{
            f"d{name}": unwanted[: sizes[letter]] if a is None else a
            for (name, a), (_, letter) in zip(
                grads.sums._asdict().items(), VECTORS.values(), strict=True
            )
        },
    }


@functools.cache
def row_arguments(rows: Rows | Examples) -> RowArguments:
    """A place as a C++ structure; over examples, only its eps."""
    if isinstance(rows, Examples):
        return RowArguments(eps=rows.eps)
    groups = (c_int64 * _GATES)(*first_gates(rows))
    return RowArguments(rows.scale, rows.center, rows.eps, groups)
