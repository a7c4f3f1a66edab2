"""The generic recurrent loop: any cell with anything at its sites, through time and layers.

Sequences of different lengths are in packed form, data (total, F) with the number n_t of examples
active at each time step, longest example first, so that padding never enters. A batch (T, N, F) is
the special case of T equal numbers, and the loop is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ln_zoo.ops.cells import Cell, Sites, States, Weights
from ln_zoo.ops.records import Records
from ln_zoo.ops.regularization import held

#: Runs direction i (counted through the layers) over ``(x, sizes, states)``; see `scan`.
Direction = Callable[[int, Tensor, Sequence[int] | None, States], tuple[Tensor, States]]


class RecurrentCall(NamedTuple):
    """One call of a recurrent layer: all that its kernels are asked about and run.

    Attributes:
        cell: the cell.
        records: what happens to summed inputs, by role, for each direction of each layer; a record
            ``None`` says that only the norm knows.
        x: padded (T, N, I) or packed (total, I); of a single step (N, I).
        batch_sizes: of packed data, (T,); ``None`` says that x is padded.
        states: initial states, each (layers * directions, N, H) in torch's order; of a single step
            (N, H).
        weights: effective weights, one for each direction of each layer.
        bidirectional: whether each layer has a reverse direction.
        dropout: probability with which an output between two layers is set to zero.
        training: whether there is dropout at all.
    """

    cell: Cell
    records: Sequence[Records]
    x: Tensor
    batch_sizes: Tensor | None
    states: States
    weights: Sequence[Weights]
    bidirectional: bool = False
    dropout: float = 0.0
    training: bool = False


def scan(
    cell: Cell,
    x: Tensor,
    sizes: Sequence[int] | None,
    states: States,
    weights: Weights,
    sites: Sites,
    per_timestep: bool = False,
) -> tuple[Tensor, States]:
    """Runs one direction of one layer.

    The states are carried in float32 at least, whatever the precision of the weights.

    Args:
        cell: what is done at each step.
        x: inputs, (T, N, I), or packed (total, I).
        sizes: of packed inputs: examples n_t active at each time step, never growing; they sum to
            total. ``None`` says that x is not packed.
        states: initial states, each (N, H).
        weights: the effective weights, and the noise.
        sites: what happens to summed inputs, by role.
        per_timestep: whether the ``"input"`` site must see the time steps one by one; otherwise it
            is called once for all of them.

    Returns:
        Outputs, (T, N, H) or packed (total, H), in the precision of the matrix products, and the
        final states of each example, (N, H), in the precision of the weights.
    """

    def steps(a: Tensor) -> Sequence[Tensor]:
        # Cut once: slices taken step by step would each send back a gradient of full size.
        return a.unbind(0) if sizes is None else a.split(sizes)

    products = F.linear(x, weights.ih)
    if per_timestep:
        terms = [sites["input"](wx, t) for t, wx in enumerate(steps(products))]
    else:
        terms = list(steps(sites["input"](products, None)))
    states = tuple(s.to(torch.promote_types(s.dtype, torch.float32)) for s in states)
    zoneout = [d if isinstance(d, float) else steps(d) for d in weights.noise.zoneout]
    outputs: list[Tensor] = []
    finished: list[States] = []
    for t, wx in enumerate(terms):
        if sizes is not None and t > 0 and sizes[t] < sizes[t - 1]:
            parts = [s.split([sizes[t], sizes[t - 1] - sizes[t]]) for s in states]
            states = tuple(active for active, _ in parts)
            finished.append(tuple(ended for _, ended in parts))
        before, states = states, cell.step(wx, states, weights, sites, t)
        if zoneout:
            now = [d if isinstance(d, float) else d[t] for d in zoneout]
            # States do not see each other's zoneout in a step: an LSTM's h is that of the new c.
            states = tuple(held(*each) for each in zip(before, states, now, strict=True))
        outputs.append(states[0])
    # The last to finish are the first in the batch.
    ends = reversed([*finished, states])
    final = tuple(torch.cat(end).to(weights.hh.dtype) for end in zip(*ends, strict=True))
    output = torch.stack(outputs) if sizes is None else torch.cat(outputs)
    return output.to(products.dtype), final


def run_layers(run: Direction, call: RecurrentCall) -> tuple[Tensor, States]:
    """Runs all layers and directions, with dropout between layers.

    The reverse direction runs forward over each sequence reversed within its own length.

    Args:
        run: runs one direction of one layer: `scan`, or a kernel of its signature.
        call: what it runs.

    Returns:
        The outputs of the last layer, (T, N, D * H) or (total, D * H), and the final states.
    """
    _, _, x, batch_sizes, states, _, bidirectional, dropout, training = call
    sizes = None if batch_sizes is None else batch_sizes.tolist()
    order = None
    if batch_sizes is not None and bidirectional:
        order = reversal(batch_sizes).to(x.device)
    directions = 2 if bidirectional else 1
    runs = states[0].shape[0]
    finals: list[States] = []
    for i in range(0, runs, directions):
        output, final = run(i, x, sizes, tuple(s[i] for s in states))
        finals.append(final)
        if bidirectional:
            start = tuple(s[i + 1] for s in states)
            back, final = run(i + 1, _reverse(x, order), sizes, start)
            finals.append(final)
            output = torch.cat([output, _reverse(back, order)], dim=-1)
        if dropout and i + directions < runs:
            output = F.dropout(output, dropout, training)
        x = output
    return x, tuple(torch.stack(final) for final in zip(*finals, strict=True))


def _reverse(a: Tensor, order: Tensor | None) -> Tensor:
    return a.flip(0) if order is None else a.index_select(0, order)


def reversal(batch_sizes: Tensor) -> Tensor:
    """Where each row of packed data goes when every sequence is reversed within its own length.

    Reversing twice changes nothing, so this is its own inverse.

    Args:
        batch_sizes: examples active at each time step, (T,), int64.

    Returns:
        Row numbers, (total,), int64.

    Example:
        >>> reversal(torch.tensor([2, 1, 1]))  # lengths 3 and 1: rows a0, b0, a1, a2
        tensor([3, 1, 2, 0])
    """
    starts, device = batch_sizes.cumsum(0) - batch_sizes, batch_sizes.device
    steps = torch.arange(len(batch_sizes), device=device).repeat_interleave(batch_sizes)
    example = torch.arange(int(batch_sizes.sum()), device=device) - starts[steps]
    lengths = torch.bincount(example)
    return starts[lengths[example] - 1 - steps] + example
