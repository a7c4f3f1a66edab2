"""The generic recurrent loop: any cell and any norm, over time steps, directions and layers.

Sequences of different lengths are packed: data (total, F) and the number n_t of active examples at
each time step, longest example first. A padded batch (T, N, F) has equal n_t.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ln_zoo.ops.cells import Cell, Sites, States, Weights, input_products
from ln_zoo.ops.memory import to_device
from ln_zoo.ops.norm_records import Records
from ln_zoo.ops.regularization import zoneout_mix
from ln_zoo.ops.time_chunks import previous_rows, time_chunks

#: Runs direction i (counted across layers) on ``(x, sizes, states, reset)``; see `scan`.
Direction = Callable[
    [int, Tensor, Sequence[int] | None, States, Tensor | None], tuple[Tensor, States]
]


class RecurrentCall(NamedTuple):
    """One call of a recurrent layer, the argument of every kernel."""

    cell: Cell
    # Norm records by role, for each direction of each layer; None: opaque norm.
    records: Sequence[Records]
    x: Tensor  # padded (T, N, I) or packed (total, I); (N, I) for a single step
    batch_sizes: Tensor | None  # of packed data, (T,); None if x is padded
    # Initial states, each (layers * directions, N, H) in torch's order; (N, H) for a single step.
    states: States
    weights: Sequence[Weights]  # effective weights, one for each direction of each layer
    bidirectional: bool = False
    dropout: float = 0.0  # probability of zeroing an element between layers
    training: bool = False
    # Steps before which states are replaced by zeros: boolean, (T * N,) or (total,). A reverse
    # direction resets where the following input step is flagged.
    reset: Tensor | None = None
    # Norms by role, for each direction of each layer, for kernels that trace them.
    sites: Sequence[Sites] = ()
    # Steps between states that are kept for the backward pass; 0: everything is kept.
    recompute: int = 0


def scan(
    cell: Cell,
    x: Tensor,
    sizes: Sequence[int] | None,
    states: States,
    weights: Weights,
    sites: Sites,
    per_timestep: bool = False,
    reset: Tensor | None = None,
) -> tuple[Tensor, States]:
    """Run one direction of one layer.

    x is (T, N, I), or packed (total, I) with active examples n_t at each step (``sizes``), never
    growing; states are (N, H). With ``per_timestep``, the ``"input"`` site is called for each step,
    otherwise once for all. ``reset`` marks steps before which states are zeros, boolean, (T * N,)
    or (total,).

    Returns outputs, (T, N, H) or (total, H), in the dtype of matrix products, and final states of
    each example, (N, H). States are carried in float32 or wider.
    """

    def steps(a: Tensor) -> Sequence[Tensor]:
        # Split once: each slice would otherwise return a gradient of full size.
        return a.unbind(0) if sizes is None else a.split(sizes)

    products = input_products(x, weights.ih)
    if per_timestep:
        terms = [sites["input"](wx, t) for t, wx in enumerate(steps(products))]
    else:
        terms = list(steps(sites["input"](products, None)))
    states = tuple(s.to(torch.promote_types(s.dtype, torch.float32)) for s in states)
    zoneout = [d if isinstance(d, float) else steps(d) for d in weights.noise.zoneout]
    flags: Sequence[Tensor] | None = None
    if reset is not None:
        flags = steps(reset.view(x.shape[:-1]).unsqueeze(-1))
    outputs: list[Tensor] = []
    finished: list[States] = []
    for t, wx in enumerate(terms):
        if sizes is not None and t > 0 and sizes[t] < sizes[t - 1]:
            parts = [s.split([sizes[t], sizes[t - 1] - sizes[t]]) for s in states]
            states = tuple(active for active, _ in parts)
            finished.append(tuple(ended for _, ended in parts))
        now = [d if isinstance(d, float) else d[t] for d in zoneout]
        flag = None if flags is None else flags[t]
        states = next_states(cell, wx, states, weights, sites, t, now, flag)
        outputs.append(states[0])
    # Examples that end last are first in the batch.
    ends = reversed([*finished, states])
    final = tuple(torch.cat(end).to(weights.hh.dtype) for end in zip(*ends, strict=True))
    output = torch.stack(outputs) if sizes is None else torch.cat(outputs)
    return output.to(products.dtype), final


def next_states(
    cell: Cell,
    wx: Tensor,
    states: States,
    weights: Weights,
    sites: Sites,
    t: int,
    zoneout: Sequence[Tensor | float],
    flag: Tensor | None,
) -> States:
    """One step of `scan`, number t, for the input term wx (n, G) and states (n, H).

    ``zoneout`` has the argument of `zoneout_mix` for each state, or is empty; ``flag`` (n, 1) marks
    examples whose states are reset.
    """
    if flag is not None:
        states = tuple(s.masked_fill(flag, 0) for s in states)
    after = cell.step(wx, states, weights, sites, t)
    if not zoneout:
        return after
    # An LSTM's h is computed from c before zoneout.
    return tuple(zoneout_mix(*each) for each in zip(states, after, zoneout, strict=True))


def run_layers(run: Direction, call: RecurrentCall) -> tuple[Tensor, States]:
    """Run all layers and directions, with dropout between layers.

    The reverse direction runs forward over each sequence reversed within its own length. ``run``
    runs one direction. Returns outputs of the last layer, (T, N, D * H) or (total, D * H), and
    final states.
    """
    _, _, x, batch_sizes, states, _, bidirectional, dropout, training, reset, *_ = call
    sizes = None if batch_sizes is None else batch_sizes.tolist()
    order = back_reset = None
    if bidirectional:
        if batch_sizes is not None:
            order = to_device(reversal(batch_sizes), x.device)
        if reset is not None:
            back_reset = _reversed_flags(reset, x, sizes, order)
    directions = 2 if bidirectional else 1
    runs = states[0].shape[0]
    starts = list(zip(*(s.unbind() for s in states), strict=True))
    finals: list[States] = []
    for i in range(0, runs, directions):
        output, final = run(i, x, sizes, starts[i], reset)
        finals.append(final)
        if bidirectional:
            back, final = run(i + 1, _reverse(x, order), sizes, starts[i + 1], back_reset)
            finals.append(final)
            output = torch.cat([output, _reverse(back, order)], dim=-1)
        if dropout and i + directions < runs:
            output = F.dropout(output, dropout, training)
        x = output
    if runs == 1:  # as `stack` below, in less time
        return x, tuple(state.unsqueeze(0) for state in finals[0])
    return x, tuple(torch.stack(final) for final in zip(*finals, strict=True))


def _reverse(a: Tensor, order: Tensor | None) -> Tensor:
    return a.flip(0) if order is None else a.index_select(0, order)


def _reversed_flags(
    reset: Tensor, x: Tensor, sizes: Sequence[int] | None, order: Tensor | None
) -> Tensor:
    """Reset flags of reversed sequences: each step gets the flag of its successor in the input."""
    if sizes is None:
        flags = reset.view(x.shape[:-1]).flip(0)
        return torch.cat([torch.zeros_like(flags[:1]), flags[:-1]]).flatten()
    (span,) = time_chunks(sizes, len(x))
    flags = _reverse(reset, order).unsqueeze(1)
    return previous_rows(torch.zeros_like(flags), flags, span).squeeze(1)


def reversal(batch_sizes: Tensor) -> Tensor:
    """Permutation of packed rows, (total,), that reverses every sequence within its own length.

    It is its own inverse. ``batch_sizes``: active examples at each time step, (T,), int64.

    Example:
        >>> reversal(torch.tensor([2, 1, 1]))  # lengths 3 and 1: rows a0, b0, a1, a2
        tensor([3, 1, 2, 0])
    """
    starts, device = batch_sizes.cumsum(0) - batch_sizes, batch_sizes.device
    steps = torch.arange(len(batch_sizes), device=device).repeat_interleave(batch_sizes)
    example = torch.arange(int(batch_sizes.sum()), device=device) - starts[steps]
    lengths = torch.bincount(example)
    return starts[lengths[example] - 1 - steps] + example
