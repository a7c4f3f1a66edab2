"""One recurrent layer, step by step, in the hands of an analysis."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Tensor, nn

from ln_zoo.layers import GRU, LSTM, RNN
from ln_zoo.layers.cells import as_states, sites_by_role
from ln_zoo.norms import batch_statistics
from ln_zoo.ops import CELLS, States, scan
from ln_zoo.ops.cells import Step

#: Where the statistics of a strategy that mixes cases come from: of the batch at hand, as in
#: training, or the running ones, as in evaluation.
Statistics = Literal["batch", "kept"]


def initial_states(
    caller: str, layer: LSTM | GRU | RNN, inputs: Tensor, states: Tensor | States | None
) -> States:
    """The states that a layer of one layer and one direction begins with, (1, N, H) each.

    Args:
        caller: the name of the analysis, for messages.
        layer: the layer.
        inputs: (T, N, I).
        states: as for the layer; default zeros.

    Raises:
        ValueError: for several layers or two directions.
        RuntimeError: if sizes do not fit.
    """
    name = type(layer).__name__
    if layer.num_layers != 1 or layer.bidirectional:
        directions = 2 if layer.bidirectional else 1
        raise ValueError(
            f"{caller} takes one layer and one direction, this {name} has num_layers="
            f"{layer.num_layers} and {directions} direction(s)"
        )
    layer.check_input(inputs, None)
    given = as_states(name, CELLS[layer.mode], states)
    if given is None:
        return tuple(inputs.new_zeros(size) for size in layer._state_sizes(inputs, None))
    layer._check_states(inputs, None, given)
    return given


def run_steps(layer: LSTM | GRU | RNN, inputs: Tensor, states: States, step: Step) -> Tensor:
    """Outputs (T, N, H) of the generic loop, with this function in place of the cell's own step.

    Args:
        layer: of one layer and one direction.
        inputs: (T, N, I).
        states: those the loop begins with, (N, H) each.
        step: what is done at each step.
    """
    sites = sites_by_role(layer.sites["l0"])
    output, _ = scan(
        dataclasses.replace(CELLS[layer.mode], step=step),
        inputs,
        None,
        states,
        layer._effective_weights("l0", sites),
        sites,
        sites["input"].norm.reads_step,
    )
    return output


@contextmanager
def measuring(module: nn.Module, statistics: Statistics) -> Iterator[None]:
    """Evaluation mode, with these statistics; modes and buffers are put back after.

    Raises:
        ValueError: for other statistics than ``"batch"`` and ``"kept"``.
    """
    if statistics not in ("batch", "kept"):
        raise ValueError(f"statistics must be 'batch' or 'kept', got {statistics!r}")
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        if statistics == "batch":
            with batch_statistics(module):
                yield
        else:
            yield
    finally:
        for m, mode in modes.items():
            m.training = mode
