"""C++ time steps for places that normalise over examples.

Threads split the units and synchronise at every step (`batch.h`).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int64, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

from ln_zoo.kernels.ctypes_arguments import Arguments
from ln_zoo.kernels.native.steps import NativeSteps
from ln_zoo.ops.engines.base import Chunk, ChunkGrads, Masks, Places, Statistics
from ln_zoo.ops.spec import Examples

#: Minimum units per thread.
_LEAST_UNITS = 16


def shares_under_batch_norm(hidden: int) -> int:
    """Number of shares of units, one per thread."""
    return max(1, min(torch.get_num_threads(), hidden // _LEAST_UNITS))


class _Statistics(Arguments):
    """``Statistics`` of arguments.h."""

    tensors: ClassVar = dict.fromkeys(("mean", "var", "factor"), ("wide", "steps", "F"))
    _fields_ = (("batch", c_int64), *((name, c_void_p) for name in tensors))


class _Batch(Arguments):
    """``Batch`` of arguments.h."""

    _fields_ = (("correction", c_int64), *((name, _Statistics) for name in Places._fields))


class NativeBatchSteps(NativeSteps):
    """`NativeSteps` for places that normalise over examples."""

    def forward(self, chunk: Chunk) -> None:
        arguments = self.forward_arguments(chunk, self._shares(len(chunk.h), chunk.masks))
        batch, found, _alive = self._batch(chunk.sizes, chunk.places, forward=True)
        self.library.ln_zoo_batch_forward(byref(arguments), byref(batch))
        for statistics, mean in found:
            assert statistics.mean is not None
            statistics.mean.add_(mean)

    def backward(self, grads: ChunkGrads) -> None:
        arguments = self.backward_arguments(grads, self._shares(len(grads.dh), grads.masks))
        batch, _, _alive = self._batch(grads.sizes, grads.places, forward=False)
        self.library.ln_zoo_batch_backward(byref(arguments), byref(batch))

    def rows_of_chunk(self, saved: bool) -> int:
        # Statistics cost several torch calls per chunk, so chunks are twice as large.
        return 2 * super().rows_of_chunk(saved)

    def _shares(self, examples: int, masks: Masks) -> int:
        return shares_under_batch_norm(self._sizes["H"])

    def _batch(
        self, sizes: Sequence[int], places: Places, forward: bool
    ) -> tuple[_Batch, list[tuple[Statistics, Tensor]], list[Tensor | None]]:
        """The structure, computed means with their destinations, and tensors to keep alive."""
        batch, found = _Batch(), []
        alive: list[Tensor | None] = []
        widths = self.spec.widths(self._sizes["H"])
        for name, place, width, statistics in zip(
            Places._fields, self.spec.places, widths, places, strict=True
        ):
            if statistics is None or not isinstance(place, Examples):
                continue
            mean, var = statistics.mean, statistics.var.contiguous()
            if place.batch:
                batch.correction = place.correction
            if place.batch and forward:
                factor = torch.empty_like(var)
                # v is already centred.
                mean = None if name == "input" else torch.empty_like(var)
                if mean is not None:
                    found.append((statistics, mean))
            else:
                mean = None if mean is None else mean.contiguous()
                factor = _factors(place, var, sizes)
            alive += [mean, var, factor]
            place_of = _Statistics(batch=place.batch)
            place_of.fill(
                {"mean": mean, "var": var, "factor": factor}, {"steps": len(sizes), "F": width}
            )
            setattr(batch, name, place_of)
        return batch, found, alive


def _factors(place: Examples, var: Tensor, sizes: Sequence[int]) -> Tensor:
    if place.batch and place.correction:
        n = torch.tensor(sizes, dtype=var.dtype, device=var.device).unsqueeze(1)
        var = var * (n / (n - place.correction))
    return (var + place.eps).rsqrt()
