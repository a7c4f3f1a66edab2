"""Persistent kernels for statistics over the rows of a step (`batch.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ln_zoo.kernels.cluster import persistent
from ln_zoo.kernels.cluster.arguments import (
    BatchBackwardArguments,
    BatchForwardArguments,
    RowsLessMeansArguments,
)
from ln_zoo.kernels.cluster.geometry import STORAGE
from ln_zoo.kernels.cluster.persistent import Persistent
from ln_zoo.ops.engines.base import Chunk, ChunkGrads, Places
from ln_zoo.ops.spec import Examples

#: Columns and lines of threads in ``rows_less_means``.
_COLUMNS, _LINES = 32, 8


class PersistentBatch(Persistent):
    """Time steps of one call, all rows in one cluster."""

    leaves_constants = False

    def _statistics(self, places: Places) -> dict[str, Any]:
        _, recurrent = self.spec.product_places
        # An RNN normalises the sum alone.
        order = {"input": 0, "recurrent": recurrent} | ({"out": 2} if self.problem.out else {})
        found: dict[str, Any] = {"correction": 0}
        for name, index in order.items():
            place, own = self.spec.places[index], places[index]
            if isinstance(place, Examples) and own is not None:
                found |= {
                    f"mean_{name}": own.mean,
                    f"var_{name}": own.var,
                    f"eps_{name}": place.eps,
                }
                found["correction"] = max(found["correction"], place.correction)
        return found

    def forward(self, chunk: Chunk) -> None:
        sizes, v, h, c, out, saved, places, masks = chunk
        if not len(v):
            return
        with persistent.on(self._device):
            found = self._compiled(False, sizes, masks)
            arguments = BatchForwardArguments(
                **self._shared_arguments(found, sizes),
                **self._statistics(places),
                v=v,
                h=h,
                c=c,
                out=out,
                u=None if saved is None else saved.u,
                cells=None if saved is None else saved.c,
            )
            self._launch(found.kernel, found.layout.blocks, arguments)

    def backward(self, grads: ChunkGrads) -> None:
        sizes, dout, dh, dc, saved, h_prev, c_prev, du, dv, sums, places, masks = grads
        if not len(du):
            return
        simple = self.problem.gates == 1
        with persistent.on(self._device):
            found = self._compiled(True, sizes, masks)
            arguments = BatchBackwardArguments(
                **self._shared_arguments(found, sizes),
                **self._statistics(places),
                v=saved.v,
                u=saved.u,
                dout=dout,
                h_before=h_prev,
                c_before=c_prev,
                c_after=saved.c,
                dh=dh,
                dc=dc,
                du=du,
                dv=dv,
                sum_bias=sums.bias,
                sum_bias_candidate=sums.bias_hn,
                sum_gain_input=sums.gain_input,
                sum_gain_recurrent=sums.gain_out if simple else sums.gain_recurrent,
                sum_gain_out=None if simple else sums.gain_out,
                sum_shift_out=sums.shift_out,
            )
            self._launch(found.kernel, found.layout.blocks, arguments)

    def without_means(
        self, a: Tensor, sizes: Sequence[int], wide: torch.dtype, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        a, width = a.contiguous(), a.shape[1]
        out = torch.empty_like(a) if out is None else out
        means = self._new(len(sizes), width, dtype=wide)
        packed = sizes[0] != sizes[-1]
        threads = _COLUMNS * _LINES
        kernel = persistent.kernel_of("batch_rows.cu", "rows_less_means", (), threads, 4 * threads)
        arguments = RowsLessMeansArguments(
            a=a,
            out=out,
            means=means,
            first_rows=persistent.first_rows(sizes, self._device) if packed else None,
            n=sizes[0],
            width=width,
            kind=STORAGE[a.dtype],
        )
        with persistent.on(self._device):
            self._launch(kernel, len(sizes) * -(-width // _COLUMNS), arguments)
        return out, means
