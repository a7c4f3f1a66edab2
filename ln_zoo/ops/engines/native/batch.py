"""Time steps in C++ on the CPU, of cells whose sites normalise over examples.

Statistics are over examples, so that threads share the units, and meet once a step (`batch.h`).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, byref, c_double, c_int64, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

from ln_zoo.ops.addresses import Arguments, Packed, address, check_steps
from ln_zoo.ops.engines.base import Chunk, ChunkGrads, Places, Statistics
from ln_zoo.ops.engines.native.runtime import NativeProducts, library, packed_shares
from ln_zoo.ops.engines.native.steps import CELLS, VECTORS, gradient_tensors, vectors
from ln_zoo.ops.spec import Cases, Operands, Spec

#: Units that are worth a thread.
_LEAST_UNITS = 16


class _Statistics(Arguments):
    """``Statistics`` of batch.h."""

    tensors: ClassVar = dict.fromkeys(("mean", "var", "factor"), ("wide", "steps", "F"))
    _fields_ = (("batch", c_int64), *((name, c_void_p) for name in tensors))


class _BatchSteps(Arguments):
    """``BatchSteps`` of batch.h."""

    tensors: ClassVar = {
        **VECTORS,
        "weight": ("packed", "inner", "outer"),
        "v": ("wide", "rows", "G"),
        "u": ("wide", "rows", "G"),
        "cells": ("wide", "rows", "H"),
        "output": ("wide", "rows", "H"),
        "h": ("wide", "N", "H"),
        "c": ("wide", "N", "H"),
        "output_gradient": ("wide", "rows", "H"),
        "h_prev": ("wide", "rows", "H"),
        "c_prev": ("wide", "rows", "H"),
        "dh": ("wide", "N", "H"),
        "dc": ("wide", "N", "H"),
        "du": ("wide", "rows", "G"),
        "dv": ("wide", "rows", "G"),
        **{f"d{name}": form for name, form in VECTORS.items()},
    }
    _fields_ = (
        *(
            (name, c_int64)
            for name in ("cell", "steps", "examples", "hidden", "shares", "correction")
        ),
        ("sizes", POINTER(c_int64)),
        *((name, c_double) for name in ("eps_recurrent", "eps_out")),
        *((name, _Statistics) for name in Places._fields),
        *((name, c_void_p) for name in tensors),
    )


class NativeBatchSteps(NativeProducts):
    """What is made once per call.

    Args:
        spec: what is to be computed.
        operands: the tensors.
        backward: whether it is for the backward pass.
    """

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        super().__init__(operands.w_ih, spec.products[0])
        self.spec = spec
        self.hidden = operands.w_hh.shape[1]
        *_, self.width, _ = spec.widths(self.hidden)
        shares = max(1, min(torch.get_num_threads(), self.hidden // _LEAST_UNITS))
        weight = packed_shares("w_hh", operands.w_hh, spec.products[1], shares, backward)
        inner, outer = (self.width, self.hidden) if backward else (self.hidden, self.width)
        self.sizes = {"H": self.hidden, "G": self.width, "inner": inner, "outer": outer}
        # The structures hold addresses: these tensors live as long as they do.
        self._alive: list[Tensor | None] = []
        self._tensors: dict[str, Tensor | Packed | None] = {
            **vectors(operands, self.sizes),
            "weight": weight,
        }
        corrections = [
            place.correction for place in spec.places if isinstance(place, Cases) and place.batch
        ]
        self._common = _BatchSteps(
            cell=CELLS[spec.cell],
            hidden=self.hidden,
            shares=shares,
            correction=corrections[0] if corrections else 0,
            eps_recurrent=spec.recurrent.eps,
            eps_out=spec.out.eps,
        )
        self._common.fill(self._tensors, self.sizes)

    def forward(self, chunk: Chunk) -> None:
        """Runs a chunk of steps."""
        tensors = {"v": chunk.v, "h": chunk.h, "c": chunk.c, "output": chunk.out}
        if chunk.saved is not None:
            tensors |= {"u": chunk.saved.u, "cells": chunk.saved.c}
        sizes, first = chunk.sizes, self.spec.input
        arguments, found = self._of_chunk(sizes, chunk.h, tensors, chunk.places, forward=True)
        if isinstance(first, Cases) and first.batch:
            start = address("v", chunk.v, torch.float32, (sum(sizes), self.width))
            library().ln_zoo_batch_inputs(byref(arguments), start, first.eps)
        library().ln_zoo_batch_forward(byref(arguments))
        for statistics, mean in found:
            assert statistics.mean is not None
            statistics.mean.add_(mean)

    def backward(self, grads: ChunkGrads) -> None:
        """Takes gradients back through a chunk of steps."""
        tensors = gradient_tensors(grads, self.sizes)
        arguments, _ = self._of_chunk(grads.sizes, grads.dh, tensors, grads.places, forward=False)
        library().ln_zoo_batch_backward(byref(arguments))

    def _of_chunk(
        self,
        sizes: Sequence[int],
        state: Tensor,
        tensors: dict[str, Tensor | None],
        places: Places,
        forward: bool,
    ) -> tuple[_BatchSteps, list[tuple[Statistics, Tensor]]]:
        """The structure for one chunk, and means that the forward finds, with where they belong."""
        steps = _BatchSteps.from_buffer_copy(self._common)
        rows, examples = sum(sizes), state.shape[0]
        steps.steps, steps.examples = len(sizes), examples
        check_steps(sizes, rows, examples)
        steps.sizes = (c_int64 * len(sizes))(*sizes)
        steps.fill(tensors, {**self.sizes, "rows": rows, "N": examples})
        found = []
        self._alive = []
        widths = self.spec.widths(self.hidden)
        for name, place, width, statistics in zip(
            Places._fields, self.spec.places, widths, places, strict=True
        ):
            if statistics is None or not isinstance(place, Cases):
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
            place_of = _Statistics(batch=place.batch)
            place_of.fill(
                {"mean": mean, "var": var, "factor": factor}, {"steps": len(sizes), "F": width}
            )
            setattr(steps, name, place_of)
        return steps, found


def _factors(place: Cases, var: Tensor, sizes: Sequence[int]) -> Tensor:
    """Reciprocal deviations of each step, (steps, F)."""
    if place.batch and place.correction:
        n = torch.tensor(sizes, dtype=var.dtype).unsqueeze(1)
        var = var * (n / (n - place.correction))
    return (var + place.eps).rsqrt()
