"""Run a call of a recurrent layer or a cell: on a kernel, or on the generic loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ln_zoo.ops.cells import Sites, States, input_products
from ln_zoo.ops.dispatch import select_kernel, select_step_kernel
from ln_zoo.ops.plans import Runner
from ln_zoo.ops.recompute import run_recomputed
from ln_zoo.ops.recurrence import RecurrentCall, run_layers, scan
from ln_zoo.ops.registry import SCANS
from ln_zoo.ops.resets import join_segments, split_call_at_resets


class Description(NamedTuple):
    """What a recurrent layer adds to a call; lists are over the directions of all layers."""

    sites: Sequence[Sites]
    per_timestep: Sequence[bool]  # see `scan`
    counts_steps: bool  # whether any norm counts time steps, which begins anew at a reset
    # Begins a sequence, and returns the call with records, weights and noise.
    complete: Callable[[RecurrentCall], RecurrentCall]
    # Told how a call ran, if similar calls may run so as well; see `Plans.keep`.
    keep: Callable[[Runner, RecurrentCall], None] | None = None
    recompute: int = 0  # see `RecurrentCall`


def run_call(layer: Description, call: RecurrentCall) -> tuple[Tensor, States]:
    """Outputs of the last layer, in the layout of x, and final states.

    ``call`` has neither records nor weights yet. Segments between resets run as sequences of their
    own where neither the norms nor a kernel support resets.
    """
    x, reset, pieces = call.x, call.reset, None
    if reset is not None and layer.counts_steps:
        call, pieces = split_call_at_resets(call)
    call = layer.complete(call)._replace(sites=layer.sites, recompute=layer.recompute)
    kernel = select_kernel(call)
    if call.recompute and not getattr(kernel, "recomputes", False):
        return run_recomputed(functools.partial(_run_piece, layer), call)
    if kernel is None and _runs_in_pieces(call):
        call, pieces = split_call_at_resets(call)
        kernel = select_kernel(call)
    if kernel is None:
        output, states = run_layers(_generic_loop(layer, call), call)
    else:
        if layer.keep is not None and call.reset is reset:
            layer.keep(kernel, call)
        output, states = kernel(call)
    if pieces is not None:
        output, states = join_segments(output, states, pieces, call.bidirectional)
        output = output.reshape(*x.shape[:-1], output.shape[-1])
    return output, states


def _run_piece(layer: Description, i: int, call: RecurrentCall, x: Tensor) -> tuple[Tensor, States]:
    of_piece = Description(
        call.sites, layer.per_timestep[i : i + 1], False, complete=lambda whole: whole
    )
    return run_call(of_piece, call._replace(x=x))


def _generic_loop(layer: Description, call: RecurrentCall) -> Callable[..., tuple[Tensor, States]]:
    scan_here = SCANS.get(call.x.device.type, scan)

    def direction(
        i: int, x: Tensor, sizes: Sequence[int] | None, states: States, reset: Tensor | None
    ) -> tuple[Tensor, States]:
        of_direction = call.weights[i].of_step, layer.sites[i], layer.per_timestep[i]
        found: tuple[Tensor, States] = scan_here(call.cell, x, sizes, states, *of_direction, reset)
        return found

    return direction


def _runs_in_pieces(call: RecurrentCall) -> bool:
    """Whether a CPU kernel runs the call once it is split at resets."""
    if call.reset is None or call.x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    # Noise masks belong to whole sequences.
    if any(w.noise.kinds for w in call.weights):
        return False
    return select_kernel(call._replace(reset=None)) is not None


def run_step(
    call: RecurrentCall, sites: Sites, t: int | None, keep: Callable[[Runner, RecurrentCall], None]
) -> States:
    """The states (N, H) after a single step, number t, of a cell; ``keep`` as in `Description`."""
    kernel = select_step_kernel(call) or functools.partial(_generic_step, sites, t)
    keep(kernel, call)
    _, states = kernel(call)
    return states


def _generic_step(sites: Sites, t: int | None, call: RecurrentCall) -> tuple[None, States]:
    (w,) = call.weights
    w = w.of_step
    states = tuple(s.to(torch.promote_types(s.dtype, torch.float32)) for s in call.states)
    wx = sites["input"](input_products(call.x, w.ih), t)
    states = call.cell.step(wx, states, w, sites, t)
    return None, tuple(s.to(w.hh.dtype) for s in states)
