"""Layers, directions, packing, resets and noise written out for one step at a time.

Only the step itself is the product's (`Cell.step` and its sites), which other tests compare with
the paper. Time, order, lengths, states and masks are spelled here, without packing or kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ln_zoo.ops import Noise, Weights


def unrolled(
    layer: Any,
    x: Tensor,
    lengths: Tensor,
    states: Sequence[Tensor],
    reset: Tensor,
    noise: Sequence[Noise],
    weight_masks: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """Outputs (T, N, D * H), zeros after a sequence's end, and final states (L * D, N, H).

    Args:
        layer: the layer, in float64.
        x: inputs (T, N, I).
        lengths: steps of each sequence, (N,).
        states: initial states.
        reset: where states start anew, boolean, (T, N).
        noise: drawn for each direction, in the order of the examples; empty for none.
        weight_masks: factors of the recurrent weights; empty for none.
    """
    directions = 2 if layer.bidirectional else 1
    finals: list[tuple[Tensor, ...]] = []
    for first in range(0, layer.num_layers * directions, directions):
        sides = []
        for i in range(first, first + directions):
            mask = weight_masks[i] if weight_masks else None
            weights = weights_of(layer, list(layer.sites)[i], mask)
            start = tuple(s[i] for s in states)
            own = noise[i] if noise else Noise()
            output, final = one_direction(
                layer, i, x, lengths, start, reset, weights, own, backwards=i > first
            )
            sides.append(output)
            finals.append(final)
        x = torch.cat(sides, -1)
    return x, [torch.stack(final) for final in zip(*finals, strict=True)]


def weights_of(layer: Any, suffix: str, mask: Tensor | None) -> Weights:
    sites = layer.sites[suffix]
    hh, hidden = getattr(layer, f"weight_hh_{suffix}"), layer.hidden_size
    units = hidden // layer.blocks

    def rows_of(a: Tensor) -> Tensor:
        if layer.blocks == 1:
            return a
        # By gate, then by block.
        gates = zip(*(block.split(units) for block in a), strict=True)
        return torch.cat([rows for of_gate in gates for rows in of_gate])

    hh = sites["recurrent"].weight(rows_of(hh))
    hh = hh if mask is None else hh * rows_of(mask)
    if layer.blocks > 1:
        hh = torch.cat([torch.block_diag(*gate.split(units)) for gate in hh.split(hidden)])
    return Weights(
        sites["input"].weight(getattr(layer, f"weight_ih_{suffix}")),
        hh,
        getattr(layer, f"bias_ih_{suffix}", None),
        getattr(layer, f"bias_hh_{suffix}", None),
        getattr(layer, f"weight_hr_{suffix}", None),
        tuple(getattr(layer, f"weight_{name}_{suffix}") for name, _ in layer.cell.weights),
    )


def one_direction(
    layer: Any,
    number: int,
    x: Tensor,
    lengths: Tensor,
    states: tuple[Tensor, ...],
    reset: Tensor,
    weights: Weights,
    noise: Noise,
    backwards: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    sites = dict(list(layer.sites.values())[number].items())
    rows: list[list[Tensor]] = [[torch.zeros(())] * len(x) for _ in lengths]
    now = [list(s.unbind(0)) for s in states]
    for t in range(len(x)):
        active = (lengths > t).nonzero().flatten().tolist()
        at = {n: int(lengths[n]) - 1 - t if backwards else t for n in active}
        wx = sites["input"](torch.stack([x[at[n], n] for n in active]) @ weights.ih.T, t)
        before = []
        for state in now:
            anew = [_starts_anew(reset, at[n], n, int(lengths[n]), backwards) for n in active]
            pairs = zip(active, anew, strict=True)
            before.append(torch.stack([state[n] * (not zero) for n, zero in pairs]))
        dropout = None if noise.dropout is None else noise.dropout[active]
        step = weights._replace(noise=Noise(dropout))
        after = layer.cell.step(wx, tuple(before), step, sites, t)
        for k, (old, new) in enumerate(zip(before, after, strict=True)):
            kept = noise.zoneout[k] if noise.zoneout else 0.0
            share = kept[t, active].double() if isinstance(kept, Tensor) else kept
            new = share * old + (1 - share) * new
            for n, row in zip(active, new, strict=True):
                now[k][n] = row
        for n in active:
            rows[n][at[n]] = now[0][n]
    zeros = torch.zeros_like(now[0][0])
    output = torch.stack([torch.stack([a if a.dim() else zeros for a in own]) for own in rows], 1)
    return output, tuple(torch.stack(state) for state in now)


def _starts_anew(reset: Tensor, at: int, n: int, length: int, backwards: bool) -> bool:
    """A sequence read backwards starts anew behind the step that a piece begins with."""
    if not backwards:
        return bool(reset[at, n])
    return at + 1 < length and bool(reset[at + 1, n])
