"""Interface of recurrent engines: preparation, and chunks of time steps, forward and backward.

Data of one direction are rows in packed order (`ln_zoo.ops.time_chunks`); step t updates the first
``sizes[t]`` rows of the state buffers (N, H), which finally hold each example's last state.

With v = W x and u = R h', centred places use centred weights (`centred`): every group of v and u
has mean 0, and the variance is the mean square, without cancellation. Gradients of the weights are
centred in turn, so du and dv may contain any constant per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ln_zoo.ops.spec import Examples, Operands, Rows, Spec
from ln_zoo.ops.time_chunks import TimeChunk, without_means


class Products:
    """Products over all rows of a chunk in torch; base of `Steps`.

    ``w_ih`` are the input weights, (G, I), `centred` if the place is.
    """

    #: Minimum rows for full speed of products; more rows only cost memory.
    chunk_rows = 512
    #: Minimum steps of a chunk, except the last.
    least_steps = 1
    #: Whether du and dv may contain an arbitrary constant per group.
    leaves_constants = True
    #: Whether dv is the same tensor as du (no normalised product); always if ``spec.merged``.
    one_gradient = False

    def __init__(self, w_ih: Tensor) -> None:
        self.w_ih = w_ih

    def rows_of_chunk(self, saved: bool) -> int:
        """Minimum rows of a chunk, except the last; ``saved``: whether a backward pass follows."""
        return self.chunk_rows

    def terms(self, x: Tensor, out: Tensor) -> None:
        """Write x (rows, I) times ``w_ih``, transposed, to out (rows, G)."""
        torch.mm(x, self.w_ih.t(), out=out)

    def input_gradient(self, dv: Tensor, out: Tensor) -> None:
        """Write dv (rows, G) times ``w_ih`` to out (rows, I)."""
        torch.mm(dv, self.w_ih, out=out)

    def inputs(self, x: Tensor, span: TimeChunk) -> Tensor:
        """Right operand (rows, I) of the gradient of ``w_ih``, for the rows x of a span."""
        return x

    def without_means(
        self, a: Tensor, sizes: Sequence[int], wide: torch.dtype, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return without_means(a, sizes, wide, out)

    def add_weight_gradient(self, d: Tensor, a: Tensor, total: Tensor, first: bool) -> None:
        """Add d (rows, G), transposed, times a (rows, F) to total (G, F), or overwrite it."""
        if total.dtype != a.dtype:
            product = torch.mm(d.t(), a)
            _ = total.copy_(product) if first else total.add_(product)
        elif first:
            torch.mm(d.t(), a, out=total)
        else:
            total.addmm_(d.t(), a)


class Statistics(NamedTuple):
    """Statistics over examples of consecutive steps at one place, (steps, F).

    Variances are biased. In the backward pass of batch statistics, ``mean`` is None except for an
    LSTM's cell states, because u and v are saved centred.
    """

    mean: Tensor | None
    var: Tensor

    def part(self, steps: slice) -> Statistics:
        return Statistics(None if self.mean is None else self.mean[steps], self.var[steps])


class Places(NamedTuple):
    """`Statistics` of each place that normalises over examples."""

    input: Statistics | None = None
    recurrent: Statistics | None = None
    out: Statistics | None = None

    def part(self, steps: slice) -> Places:
        return Places(*(None if place is None else place.part(steps) for place in self))


class FixedStatistics(NamedTuple):
    """Given mean and variance in rows (2, K, F), by place."""

    given_input: Tensor | None = None
    given_recurrent: Tensor | None = None
    given_out: Tensor | None = None


NO_STATISTICS = FixedStatistics()


class Masks(NamedTuple):
    """Sampled masks of one direction of one layer, or of a slice of its rows."""

    dropout: Tensor | None = None  # factor of h in recurrent products, (N, H), float32 or wider
    zoneout_h: Tensor | None = None  # elements of h that keep their value, (rows, H), boolean
    zoneout_c: Tensor | None = None
    reset: Tensor | None = None  # rows whose previous states become zeros, (rows,), boolean

    @property
    def noise(self) -> bool:
        return any(a is not None for a in self[:3])

    def part(self, rows: slice) -> Masks:
        dropout, *by_row = self
        return Masks(dropout, *(None if a is None else a[rows] for a in by_row))


NO_MASKS = Masks()


class Saved(NamedTuple):
    """Tensors that the forward pass saves for the backward pass.

    Products have their own dtype and are centred under batch statistics; the rest is float32 or
    wider. If ``spec.merged``, u is the sum v + u, and v is None in the backward pass and the memory
    of u in the forward pass.
    """

    v: Tensor | None  # products W x, (rows, G)
    u: Tensor  # products R h', (rows, G)
    c: Tensor | None  # cell states of an LSTM after each step and zoneout, (rows, H)
    stats: Tensor  # (rows, S), S = Engine.stats(spec); the engine chooses the layout

    def part(self, rows: slice) -> Saved:
        v, u, c, stats = self
        return Saved(
            None if v is None else v[rows],
            u[rows],
            None if c is None else c[rows],
            stats[rows],
        )


class Sums(NamedTuple):
    """Gradients that are sums over rows, float32 or wider; ``None`` if not needed.

    ``bias``, ``gain_input`` and ``gain_recurrent`` are (G,), the others (H,).
    """

    bias: Tensor | None = None
    bias_hn: Tensor | None = None
    gain_input: Tensor | None = None
    gain_recurrent: Tensor | None = None
    gain_out: Tensor | None = None
    shift_out: Tensor | None = None


class Chunk(NamedTuple):
    """Consecutive time steps in the forward pass; tensors except statistics are contiguous."""

    sizes: Sequence[int]  # rows of each step; at least 2 where a place uses batch statistics
    # Products of the inputs with w_ih, (rows, G), without bias, centred under batch statistics. May
    # be overwritten if nothing is saved.
    v: Tensor
    h: Tensor  # state, (N, H), float32 or wider; updated in place
    c: Tensor | None  # the same of an LSTM's cell state
    out: Tensor  # output: h after each step, (rows, H), in the dtype of products
    saved: Saved | None  # output, except v; None if no gradient is needed
    # Statistics over examples. Given ones are read. For batch statistics, the variance is written,
    # and the mean is added to the initial value (0, or the mean removed from v).
    places: Places = Places()
    # Read only. Before the step of a flagged row, h and c are zeros, so its row of u is 0.
    masks: Masks = NO_MASKS


class ChunkGrads(NamedTuple):
    """The same steps in the backward pass; inputs are read only."""

    sizes: Sequence[int]
    dout: Tensor | None  # gradient of `out`, (rows, H); None for 0
    # Gradient of the state after the last step, (N, H), float32 or wider; replaced by that of the
    # state before the first step. Set to 0 before the step of a flagged row, as is dc.
    dh: Tensor
    dc: Tensor | None  # the same of an LSTM's cell state
    saved: Saved
    # States before each step, (rows, H), in the dtype of products, zeros in reset rows.
    h_prev: Tensor
    c_prev: Tensor | None  # the same of cell states, float32 or wider
    # Output: gradient of u, (rows, G), in the dtype of products. Under batch statistics, any
    # constant may be added to a feature of a step.
    du: Tensor
    # Output: gradient of v; the same tensor as du if `spec.merged` or `Products.one_gradient`.
    dv: Tensor
    sums: Sums  # gradients of vectors to accumulate into
    places: Places = Places()
    masks: Masks = NO_MASKS

    def part(self, span: TimeChunk) -> ChunkGrads:
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
    """An engine's state of one call: prepared weights, and the loops."""

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
    def rank(self) -> int:
        """See `ln_zoo.ops.registry.Kernel`."""

    @property
    def device(self) -> str | None:
        """Device type that it runs on; None for any."""

    @property
    def has_noise(self) -> bool:
        """Whether it supports zoneout and recurrent dropout, without batch statistics."""

    def missing(self) -> str | None:
        """Why the engine is unavailable here, or None; must not compile."""

    def unsupported_reason(
        self, spec: Spec, x: Tensor, w_hh: Tensor, dtype: torch.dtype, examples: int = 1
    ) -> str | None:
        """Why it does not support this call, or None.

        x (T, N, I) or (total, I) and w_hh (G, H) are not yet cast to ``dtype``, that of products.
        ``examples``: rows of the first step, N.
        """

    def stats(self, spec: Spec) -> int:
        """Elements S saved per row (`Saved`); 0 for none."""

    def empty(self, *size: int, like: Tensor, dtype: torch.dtype, scratch: str = "") -> Tensor:
        """Allocate uninitialised memory on the device of ``like``.

        ``scratch`` names memory used during one call only; names are unique within a call.
        """

    def prepare(self, spec: Spec, operands: Operands, backward: bool) -> Steps:
        """Prepare one call; x and states may have any strides, other operands are contiguous."""


def centred(weight: Tensor, rows: Rows | Examples, out: Tensor | None = None) -> Tensor:
    """Subtract the mean of the weight's rows over each group of statistics, if rows are centred.

    The function is its own adjoint, so gradients of the weight (G, I or H) pass through it as well.
    Without ``out``, an unchanged weight is returned itself.

    Example:
        >>> rows = Rows(scale=True, center=True, eps=1e-5, groups=(1, 1))
        >>> centred(torch.tensor([[1.0], [3.0], [4.0], [8.0]]), rows).flatten()
        tensor([-1.,  1., -2.,  2.])
    """
    if not isinstance(rows, Rows) or not (rows.scale and rows.center):
        return weight if out is None else out.copy_(weight)
    if out is None:
        out = torch.empty_like(weight)
    # Means of half-precision rows are computed in float32.
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
