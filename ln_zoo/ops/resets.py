"""Split sequences at resets, so that each segment becomes a sequence of its own.

All segments form one packed batch, which any kernel runs in both directions. Batch norm and norms
that count time steps since the last reset use it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ln_zoo.ops.cells import States
from ln_zoo.ops.recurrence import RecurrentCall


class Segments(NamedTuple):
    """The segments of a batch of sequences as a packed batch, longest first; int64."""

    rows: Tensor  # source row of each packed row, in padded (T * N) or packed data, (total,)
    batch_sizes: Tensor  # segments active at each time step, (T',), on the CPU
    first: Tensor  # index of each sequence's first segment, (N,)
    last: Tensor  # index of its last segment, (N,)


def split_at_resets(reset: Tensor, batch_sizes: Tensor) -> Segments:
    """Split each sequence before every step at which it is reset; ``reset`` (total,) is boolean."""
    device, reset, sizes = reset.device, reset.cpu(), batch_sizes.cpu()
    # Explicitly on the CPU: torch's default device may differ.
    numbers = functools.partial(torch.arange, device="cpu")
    steps = numbers(len(sizes)).repeat_interleave(sizes)
    starts = (sizes.cumsum(0) - sizes)[steps]
    example = numbers(len(reset)) - starts
    # Rows sequence by sequence.
    in_order = torch.argsort(example * len(sizes) + steps)
    begins = (reset | (steps == 0))[in_order]
    piece = begins.cumsum(0) - 1
    first_rows = begins.nonzero().squeeze(1)
    position = numbers(len(reset)) - first_rows[piece]
    lengths = torch.bincount(piece)
    slot = torch.empty_like(lengths)
    slot[torch.argsort(lengths, descending=True, stable=True)] = numbers(len(lengths))
    packed = torch.argsort(position * len(lengths) + slot[piece])
    # Segments of a sequence are adjacent.
    owner = example[in_order][first_rows]
    first = torch.searchsorted(owner, numbers(int(sizes[0])))
    last = torch.cat([first[1:], first.new_tensor([len(lengths)])]) - 1
    found = in_order[packed], slot[first], slot[last]
    rows, first, last = (a.to(device) for a in found)
    return Segments(rows, torch.bincount(position), first, last)


def split_call_at_resets(call: RecurrentCall) -> tuple[RecurrentCall, Segments | None]:
    """The same call over segments, without resets; synchronises to read the flags.

    Only first segments (in a reverse direction, last segments) start from the given states. If
    nothing is split, the second result is None.
    """
    x, sizes, reset, both = call.x, call.batch_sizes, call.reset, call.bidirectional
    assert reset is not None
    examples = x.shape[1] if sizes is None else int(sizes[0])
    # A sequence that is reset at step 0 does not start from the given states.
    backwards = [both and i % 2 == 1 for i in range(len(call.states[0]))]
    forwards = ~torch.tensor(backwards, device=x.device)
    states = tuple(
        s.masked_fill(forwards[:, None, None] & reset[:examples, None], 0) for s in call.states
    )
    call = call._replace(states=states, reset=None)
    if not bool(reset[examples:].any()):
        return call, None
    if sizes is None:
        sizes = torch.full((x.shape[0],), examples, device="cpu")
    pieces = split_at_resets(reset, sizes)
    rows = x.reshape(-1, x.shape[-1]).index_select(0, pieces.rows)
    states = tuple(split_states(s, pieces, both) for s in states)
    return call._replace(x=rows, batch_sizes=pieces.batch_sizes, states=states), pieces


def join_segments(
    output: Tensor, states: States, pieces: Segments, bidirectional: bool
) -> tuple[Tensor, States]:
    """Output (rows, D * H), in the order of the input rows, and final states of sequences."""
    output = output.index_select(0, torch.argsort(pieces.rows))
    return output, tuple(join_states(s, pieces, bidirectional) for s in states)


def split_states(states: Tensor, pieces: Segments, bidirectional: bool) -> Tensor:
    """Initial states (L, segments, F): given ones (L, N, F) where sequences start, otherwise zeros.

    If ``bidirectional``, every second of L is a reverse direction and starts in the last segments.
    """
    zeros = states.new_zeros(int(pieces.batch_sizes[0]), states.shape[2])
    return torch.stack(
        [
            zeros.index_copy(0, pieces.last if bidirectional and i % 2 else pieces.first, state)
            for i, state in enumerate(states)
        ]
    )


def join_states(states: Tensor, pieces: Segments, bidirectional: bool) -> Tensor:
    """Final states of the sequences, (L, N, F), from all segments' states; see `split_states`."""
    return torch.stack(
        [
            state.index_select(0, pieces.first if bidirectional and i % 2 else pieces.last)
            for i, state in enumerate(states)
        ]
    )
