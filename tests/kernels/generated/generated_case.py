"""Layers on generated kernels, compared with the generic loop in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from accuracy import assert_as_accurate, generic_loop, moved
from layer_results import results_of
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ln_zoo.ops import Cell, Place, States, Weights, linear

PLACES = (Place("input", (2,), weight="ih"), Place("recurrent", (2,), weight="hh"))


def gated_cell(function: Any, name: str = "gated") -> Cell:
    """A cell of two gates whose candidate is ``function`` of a pre-activation."""

    def step(wx: Tensor, states: States, w: Weights, sites: Any, t: int | None) -> States:
        (h,) = states
        a, z = (wx + sites["recurrent"](linear(w.dropped(h), w.hh), t) + w.bias).chunk(2, -1)
        return (z.sigmoid() * h + (1 - z.sigmoid()) * function(a),)

    return Cell(name, step, PLACES, candidates=(0,), drops=True)


def packed(x: Tensor, lengths: Sequence[int]) -> PackedSequence:
    return nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)


def in_double(a: Any) -> Any:
    if isinstance(a, PackedSequence):
        return a._replace(data=a.data.double())
    return a.double()


def with_last_bits_moved(a: Any, run: int) -> Any:
    if isinstance(a, PackedSequence):
        return a._replace(data=moved(a.data, run))
    return moved(a, run)


def assert_exact(
    layer: Any, x: Any, states: Sequence[Tensor] | None = None, reset: Any = None
) -> None:
    """Outputs, states and gradients are as exact as those of the generic loop in float32."""
    exact = copy.deepcopy(layer).double()

    def results(of: nn.Module, x: Any, states: Any) -> dict[str, Tensor]:
        return results_of(of, x, states, call=lambda x, hx: of(x, hx, reset=reset))

    def loop(run: int) -> dict[str, Tensor]:
        near = copy.deepcopy(layer)
        with torch.no_grad():
            for p in near.parameters():
                p.copy_(moved(p, run))
        starts = None if states is None else [moved(s, run) for s in states]
        with generic_loop():
            return results(near, with_last_bits_moved(x, run), starts)

    found = results(layer, x, states)
    with generic_loop():
        starts = None if states is None else [s.double() for s in states]
        expected = results(exact, in_double(x), starts)
    assert_as_accurate(found, expected, loop)
