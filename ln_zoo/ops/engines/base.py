"""Interface of recurrent engines: preparation, and chunks of time steps, forward and backward.

`ln_zoo.ops.operator` calls all engines in the same way and does the rest: chunks, products over
many steps, torch operators, double backward. An engine sees plain tensors.

Data of one direction are rows in packed order (`ln_zoo.ops.time_chunks`). States are buffers (N, H)
of which step t reads and writes the first ``sizes[t]`` rows: after the last step they hold each
example's final state.

With v = W x and u = R h', p the normalised terms with gains and biases, the equations are those of
`ln_zoo.ops.cells`. Where a place is centred, the weights are (`centred`, by ``spec.products``): the
mean of every group of v and u is then 0 for all x and h, so that no step has to subtract it,
and the mean square is the variance, without cancellation. The frame takes gradients back through
that by centring those of the weights, so that an engine may leave any constant per group in du and
dv; one that leaves none says so (`Products.leaves_constants`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ln_zoo.ops.spec import Examples, Operands, Rows, Spec
from ln_zoo.ops.time_chunks import TimeChunk, without_means


class Products:
    """Products over all rows of a chunk, by torch's own; `Steps` build on it.

    Args:
        w_ih: the input weights to multiply by, (G, I): `centred` ones where the place is centred.
    """

    #: Rows with which a product over all of them runs at full speed; more would only take memory.
    chunk_rows = 512
    #: Least number of steps of a chunk, except the last.
    least_steps = 1
    #: Whether du and dv may hold a constant per group that has no meaning.
    leaves_constants = True
    #: Whether dv is the same tensor as du, as neither product is normalised; always if
    #: ``spec.merged``.
    one_gradient = False

    def __init__(self, w_ih: Tensor) -> None:
        self.w_ih = w_ih

    def rows_of_chunk(self, saved: bool) -> int:
        """Least number of rows of a chunk, except the last.

        Args:
            saved: whether what the backward needs is kept of all rows, or nothing but the output.
        """
        return self.chunk_rows

    def terms(self, x: Tensor, out: Tensor) -> None:
        """Fills out (rows, G) with the products of x (rows, I) and ``w_ih``."""
        torch.mm(x, self.w_ih.t(), out=out)

    def input_gradient(self, dv: Tensor, out: Tensor) -> None:
        """Fills out (rows, I) with what dv (rows, G) makes of ``w_ih``."""
        torch.mm(dv, self.w_ih, out=out)

    def inputs(self, x: Tensor, span: TimeChunk) -> Tensor:
        """Factors (rows, I) of ``w_ih`` in the gradient of the weight, for the rows x of a span."""
        return x

    def without_means(
        self, a: Tensor, sizes: Sequence[int], wide: torch.dtype, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `ln_zoo.ops.time_chunks.without_means`."""
        return without_means(a, sizes, wide, out)

    def add_weight_gradient(self, d: Tensor, a: Tensor, total: Tensor, first: bool) -> None:
        """Adds the product of d (rows, G), transposed, and a (rows, F) to the total (G, F).

        The first one fills the total.
        """
        if total.dtype != a.dtype:
            product = torch.mm(d.t(), a)
            _ = total.copy_(product) if first else total.add_(product)
        elif first:
            torch.mm(d.t(), a, out=total)
        else:
            total.addmm_(d.t(), a)


class Statistics(NamedTuple):
    """Over the examples of consecutive steps, at one place.

    Attributes:
        mean: (steps, F). Of a place that uses the batch's own, ``None`` in the backward: u, v are
            kept without their means. Only the means of an LSTM's cell states are there.
        var: biased variances, (steps, F).
    """

    mean: Tensor | None
    var: Tensor

    def part(self, steps: slice) -> Statistics:
        """Statistics of a slice of the steps."""
        return Statistics(None if self.mean is None else self.mean[steps], self.var[steps])


class Places(NamedTuple):
    """`Statistics` of each place; ``None`` where nothing is normalised over examples."""

    input: Statistics | None = None
    recurrent: Statistics | None = None
    out: Statistics | None = None

    def part(self, steps: slice) -> Places:
        """Statistics of a slice of the steps."""
        return Places(*(None if place is None else place.part(steps) for place in self))


class Masks(NamedTuple):
    """Sampled masks of one direction of one layer, or of a slice of its rows.

    Attributes:
        dropout: what h is multiplied by in recurrent products, (N, H), float32 at least; ``None``:
            nothing is dropped.
        zoneout_h: where h stays as it was before its step, (rows, H), boolean; ``None``: nowhere,
            but for ``spec.zoneout``.
        zoneout_c: the same for an LSTM's cell state.
        reset: where the states before a step are zeros, (rows,), boolean; ``None``: nowhere.
    """

    dropout: Tensor | None = None
    zoneout_h: Tensor | None = None
    zoneout_c: Tensor | None = None
    reset: Tensor | None = None

    @property
    def noise(self) -> bool:
        """Whether there is a mask of zoneout or recurrent dropout."""
        return any(a is not None for a in self[:3])

    def part(self, rows: slice) -> Masks:
        """Masks of a slice of the rows."""
        dropout, *by_row = self
        return Masks(dropout, *(None if a is None else a[rows] for a in by_row))


NO_MASKS = Masks()


class Saved(NamedTuple):
    """Tensors that the forward pass saves for the backward pass.

    Attributes:
        v: products W x, (rows, G), in the precision of products, less their means where the place
            uses those of the batch. Where ``spec.merged``, None in the backward, and in the forward
            the same memory as u.
        u: the same of R h'; where ``spec.merged``, the sum v + u.
        c: cell states after each step, and after zoneout, (rows, H), float32 at least; ``None`` but
            for an LSTM.
        stats: (rows, S), float32 at least, where S is ``Engine.stats(spec)``; in the engine's own
            layout.
    """

    v: Tensor | None
    u: Tensor
    c: Tensor | None
    stats: Tensor

    def part(self, rows: slice) -> Saved:
        """Saved tensors of a slice of the rows."""
        v, u, c, stats = self
        return Saved(
            None if v is None else v[rows],
            u[rows],
            None if c is None else c[rows],
            stats[rows],
        )


class Sums(NamedTuple):
    """Gradients that add up over rows, float32 at least; ``None``: not wanted.

    Attributes:
        bias: (G,).
        bias_hn: (H,).
        gain_input: (G,).
        gain_recurrent: (G,).
        gain_out: (H,).
        shift_out: (H,).
    """

    bias: Tensor | None = None
    bias_hn: Tensor | None = None
    gain_input: Tensor | None = None
    gain_recurrent: Tensor | None = None
    gain_out: Tensor | None = None
    shift_out: Tensor | None = None


class Chunk(NamedTuple):
    """Consecutive time steps in the forward pass; all tensors but statistics are contiguous.

    Attributes:
        sizes: rows of each step; at least 2 where a place uses the batch.
        v: products of the inputs with ``w_ih``, (rows, G), without bias, less their means where
            their place uses the batch. It is scratch memory where nothing is saved.
        h: state, (N, H), float32 at least; updated in place.
        c: cell state of an LSTM, (N, H), float32 at least; updated in place.
        out: to be filled with the states h after each step, (rows, H), in the precision of
            products.
        saved: to be filled with what the backward reads (v is filled already); ``None`` where no
            gradient will be asked for.
        places: statistics over examples. What is given is read. What the batch has is written: the
            variance, and the mean added to what is there (0, or the part of it that v is without).
        masks: noise and resets of these steps; read only. An engine takes h and c of a flagged
            row to be zeros before its step, so that its row of u is 0.
    """

    sizes: Sequence[int]
    v: Tensor
    h: Tensor
    c: Tensor | None
    out: Tensor
    saved: Saved | None
    places: Places = Places()
    masks: Masks = NO_MASKS


class ChunkGrads(NamedTuple):
    """The same steps in the backward pass.

    Attributes:
        sizes: rows of each step.
        dout: gradient of ``out``, (rows, H), read only; ``None`` for 0.
        dh: gradient of the state after the last step, (N, H), float32 at least; left as that of
            the state before the first.
        dc: the same of an LSTM's cell state.
        saved: what the forward kept; read only.
        h_prev: states before each step, (rows, H), in the precision of products, zeros in rows that
            are reset; read only.
        c_prev: the same of cell states, (rows, H), float32 at least; read only.
        du: to be filled with the gradient of u, (rows, G), in the precision of products. (The frame
            makes the gradient of w_hh of it; dh is the engine's.) Where the place uses the batch,
            any constant may be added to a feature of a step.
        dv: to be filled with that of v; where ``spec.merged`` and under `Products.one_gradient` the
            same tensor as du.
        sums: what to add the gradients of vectors to, in place.
        places: statistics over examples; read only.
        masks: noise and resets of these steps; read only. The gradients dh and dc that leave the
            step of a flagged row are zeros: the engine sets them.
    """

    sizes: Sequence[int]
    dout: Tensor | None
    dh: Tensor
    dc: Tensor | None
    saved: Saved
    h_prev: Tensor
    c_prev: Tensor | None
    du: Tensor
    dv: Tensor
    sums: Sums
    places: Places = Places()
    masks: Masks = NO_MASKS

    def part(self, span: TimeChunk) -> ChunkGrads:
        """Gradients of a slice of the steps."""
        rows = span.rows
        return ChunkGrads(
            span.sizes,
            None if self.dout is None else self.dout[rows],
            self.dh,
            self.dc,
            self.saved.part(rows),
            self.h_prev[rows],
            None if self.c_prev is None else self.c_prev[rows],
            self.du[rows],
            self.dv[rows],
            self.sums,
            self.places.part(span.steps),
            self.masks.part(rows),
        )


class Steps(Products):
    """An engine's state of one call: centred, transposed or packed weights, and the loops."""

    def forward(self, chunk: Chunk) -> None:
        """Run consecutive time steps."""
        raise NotImplementedError

    def backward(self, grads: ChunkGrads) -> None:
        """Backpropagate through the steps of one call of `forward`."""
        raise NotImplementedError


class Engine(Protocol):
    """Runs the time steps of one direction of one layer."""

    @property
    def name(self) -> str:
        """Identifier in ``LN_ZOO_KERNELS`` and the log."""

    @property
    def title(self) -> str:
        """Short description for the log: ``"C++ loops"``."""

    @property
    def device(self) -> str | None:
        """Device type that it runs on; None for any."""

    @property
    def has_noise(self) -> bool:
        """Whether it supports zoneout and recurrent dropout, without batch statistics."""

    def missing(self) -> str | None:
        """Why the engine is unavailable here, or None; compiles nothing."""

    def unsupported_reason(
        self, spec: Spec, x: Tensor, w_hh: Tensor, dtype: torch.dtype
    ) -> str | None:
        """Why it does not support this call, or None.

        Args:
            spec: what is to be computed.
            x: (T, N, I) or (total, I), on its device, before any cast.
            w_hh: (G, H), before any cast.
            dtype: the precision of matrix products, to which both will be cast.
        """

    def stats(self, spec: Spec) -> int:
        """Numbers S kept per row (`Saved`); 0 for none."""

    def empty(self, *size: int, like: Tensor, dtype: torch.dtype, scratch: str = "") -> Tensor:
        """Allocate uninitialised memory.

        Args:
            *size: the shape.
            like: a tensor on the same device.
            dtype: the precision.
            scratch: a name for memory that is needed for the time of one call alone; two such
                pieces of one call have different names.
        """

    def prepare(self, spec: Spec, operands: Operands, backward: bool) -> Steps:
        """Prepare one call.

        Args:
            spec: what is to be computed.
            operands: the tensors; x and states may have any strides, all else is contiguous.
            backward: whether it is for the backward pass.
        """


def centred(weight: Tensor, rows: Rows | Examples, out: Tensor | None = None) -> Tensor:
    """The weight less the mean of its rows over each group of statistics, where rows are centred.

    It is its own adjoint: gradients of the weight are taken back by the same function.

    Args:
        weight: (G, I) or (G, H).
        rows: what happens to its products.
        out: where to put the result; ``None`` for new memory, or the weight itself where that is
            the result.

    Example:
        >>> rows = Rows(scale=True, center=True, eps=1e-5, groups=(1, 1))
        >>> centred(torch.tensor([[1.0], [3.0], [4.0], [8.0]]), rows).flatten()
        tensor([-1.,  1., -2.,  2.])
    """
    if not isinstance(rows, Rows) or not (rows.scale and rows.center):
        return weight if out is None else out.copy_(weight)
    if out is None:
        out = torch.empty_like(weight)
    # Means of half-precision rows are taken in float32.
    wide = torch.promote_types(weight.dtype, torch.float32)
    hidden = weight.shape[0] // sum(rows.groups)
    sizes = [hidden * n for n in rows.groups]
    for part, target in zip(weight.split(sizes), out.split(sizes), strict=True):
        mean = part.mean(0, keepdim=True, dtype=wide)
        if target.dtype == wide:
            torch.sub(part, mean, out=target)
        else:
            target.copy_(part - mean)
    return out
