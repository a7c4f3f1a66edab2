"""Passes in pieces of time steps.

Only the states between pieces are kept; the backward pass runs the forward pass of each piece again
(Chen et al. 2016, arXiv 1604.06174). `ln_zoo.ops.recompute` does so for all other kernels, by
torch's checkpoint around a call for each piece, which costs more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ln_zoo.kernels.generated.direction import FIRST_STATE, Direction, Tensors
from ln_zoo.ops import memory
from ln_zoo.ops.time_chunks import TimeChunk, step_sizes, time_chunks


def in_pieces(forward: Any, backward: Any) -> tuple[Any, Any]:
    """Both passes of a backend, in pieces of ``Direction.recompute`` steps."""
    return functools.partial(_forward, forward), functools.partial(_backward, forward, backward)


def _forward(
    forward: Any, d: Direction, t: Tensors, saves: bool
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    width = d.kernel.trace.widths[0]
    whole = memory.empty(*t.x.shape[:-1], width, like=t.x, dtype=torch.float32)
    states: Sequence[Tensor] = t.states
    starts: list[Tensor] = []
    for piece in _pieces(d, t):
        part, n = _part(d, t, piece, states), piece.sizes[0]
        starts += part[1].states if saves else ()
        whole[_rows(d, piece)], after, _ = forward(*part, saves=False)
        # The others have ended before.
        ended = [a[..., n:, :] for a in states]
        states = [torch.cat(each, dim=-2) for each in zip(after, ended, strict=True)]
    return whole, list(states), starts


def _backward(
    forward: Any,
    backward: Any,
    d: Direction,
    t: Tensors,
    kept: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    d_out, *d_finals = grads
    d_states = [
        torch.zeros_like(a) if b is None else b.clone()
        for a, b in zip(t.states, d_finals, strict=True)
    ]
    places = slice(FIRST_STATE, FIRST_STATE + len(d_states))
    each_needs = [need or places.start <= i < places.stop for i, need in enumerate(needs)]
    d_x = memory.empty(*t.x.shape, like=t.x, dtype=t.x.dtype) if needs[0] else None
    sums: list[Tensor | None] = [None] * len(needs)
    for number, piece in reversed([*enumerate(_pieces(d, t))]):
        first, rows = number * len(d_states), _rows(d, piece)
        part = _part(d, t, piece, kept[first : first + len(d_states)])
        active = [a[..., : piece.sizes[0], :] for a in d_states]
        d_piece = None if d_out is None else d_out[rows]
        _, _, saved = forward(*part, saves=True)
        found = backward(*part, saved, (d_piece, *active), each_needs)
        del saved  # before the next piece's are made
        for a, b in zip(active, found[places], strict=True):
            a.copy_(b)
        if d_x is not None:
            d_x[rows] = found[0]
        found[0], found[places] = None, [None] * len(d_states)
        pairs = zip(sums, found, strict=True)
        sums = [a if b is None else b if a is None else a.add_(b) for a, b in pairs]
    sums[0], sums[places] = d_x, d_states
    return [a if need else None for a, need in zip(sums, needs, strict=True)]


def _pieces(d: Direction, t: Tensors) -> list[TimeChunk]:
    return time_chunks(d.sizes or step_sizes(t.x, None), 0, d.recompute)


def _rows(d: Direction, piece: TimeChunk) -> slice:
    """Of tensors in the layout of x."""
    return piece.steps if d.sizes is None else piece.rows


def _part(
    d: Direction, t: Tensors, piece: TimeChunk, states: Sequence[Tensor]
) -> tuple[Direction, Tensors]:
    n, rows = piece.sizes[0], _rows(d, piece)
    tensors = t._replace(
        x=t.x[rows],
        states=tuple(a[..., :n, :] for a in states),
        dropped=None if t.dropped is None else t.dropped[:n],
        reset=None if t.reset is None else t.reset[piece.rows],
        held=tuple(None if a is None else a[rows] for a in t.held),
        addresses=None,
    )
    sizes = None if d.sizes is None else piece.sizes
    return d._replace(sizes=sizes, recompute=0), tensors
