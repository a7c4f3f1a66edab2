"""Run a call in pieces of time steps that the backward pass runs again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ln_zoo.ops.cells import States
from ln_zoo.ops.memory import empty
from ln_zoo.ops.recurrence import RecurrentCall, run_layers
from ln_zoo.ops.regularization import Noise
from ln_zoo.ops.time_chunks import step_sizes, time_chunks


def run_recomputed(
    run: Callable[[int, RecurrentCall, Tensor], tuple[Tensor, States]],
    call: RecurrentCall,
) -> tuple[Tensor, States]:
    """Outputs and final states of a call, in pieces of ``recompute`` time steps.

    ``run`` runs direction i (counted across layers) of a call on the input of a piece. What it
    saves for the backward pass is freed, and computed again from the piece's inputs and states
    (Chen et al. 2016, arXiv 1604.06174).
    """

    def direction(
        i: int, x: Tensor, sizes: Sequence[int] | None, states: States, reset: Tensor | None
    ) -> tuple[Tensor, States]:
        weights = call.weights[i]
        pieces = time_chunks(sizes or step_sizes(x, None), 0, call.recompute)
        whole: Tensor | None = None
        outputs: list[Tensor] = []
        ended: list[States] = []
        for piece in pieces:
            n, rows = piece.sizes[0], piece.steps if sizes is None else piece.rows
            ended.append(tuple(s[n:] for s in states))
            part = call._replace(
                batch_sizes=None if sizes is None else torch.tensor(piece.sizes),
                states=tuple(s[:n].unsqueeze(0) for s in states),
                records=call.records[i : i + 1],
                weights=[weights._replace(noise=_noise_of(weights.noise, rows, n))],
                sites=call.sites[i : i + 1],
                bidirectional=False,
                dropout=0.0,
                reset=None if reset is None else reset[piece.rows],
                recompute=0,
            )
            own, x = _Take.apply(x, rows)
            # The input alone: `checkpoint` walks through its arguments.
            output, after = checkpoint(functools.partial(run, i, part), own, use_reentrant=False)
            if whole is None:
                shape = *x.shape[:-1], output.shape[-1]
                whole = empty(*shape, like=output, dtype=output.dtype)
            outputs.append(_Copy.apply(output, whole[rows]))
            states = tuple(s.squeeze(0) for s in after)
        # Examples that end last are first in the batch.
        ends = zip(states, *reversed(ended), strict=True)
        return _Joined.apply(whole, *outputs), tuple(map(torch.cat, ends))

    return run_layers(direction, call)


def _noise_of(noise: Noise, rows: slice, examples: int) -> Noise:
    dropout = None if noise.dropout is None else noise.dropout[:examples]
    return Noise(dropout, tuple(d if isinstance(d, float) else d[rows] for d in noise.zoneout))


# `torch.cat` would hold all outputs twice; the backward pass of `split`, all gradients of inputs.


class _Copy(torch.autograd.Function):
    """Copies a piece to its place, so that its own memory is freed."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, place: Tensor) -> Tensor:
        return place.copy_(piece).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _Joined(torch.autograd.Function):
    """The tensor whose consecutive parts the pieces are."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, *pieces: Tensor) -> Tensor:
        ctx.sizes = [len(piece) for piece in pieces]
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *gradients[0].split(ctx.sizes)


class _Take(torch.autograd.Function):
    """Rows of an input, and the input for those who take other, later rows.

    The gradient of the input goes from taker to taker, and each writes its rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        ctx.rows = rows
        return x[rows].detach(), x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        own, whole = gradients
        if torch.is_grad_enabled():  # the gradient is differentiated
            return whole.slice_scatter(own, 0, ctx.rows.start, ctx.rows.stop), None
        whole[ctx.rows] = own
        return whole, None
