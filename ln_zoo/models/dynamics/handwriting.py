"""Dynamics of the handwriting network: the loss of the last point of test lines.

The loss of all points would give each state its own gradient, hiding how far gradients reach back.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ln_zoo.models.dynamics.task import DynamicsSource, DynamicsTask, registered
from ln_zoo.models.handwriting import Handwriting


@registered.register
def _(model: Handwriting) -> DynamicsSource:
    return DynamicsSource(partial(_data, model), partial(_task, model))


def _data(model: Handwriting, examples: int) -> tuple[str, dict[str, Any]]:
    # Offsets with mean 0 and deviation 1 had been divided by the median step of their line.
    per_line = bool((model.offset_mean == 0).all() and (model.offset_std == 1).all())
    return "IAMOnDB", {"scale": "median" if per_line else "std"}


def _task(model: Handwriting, data: Any, examples: int, steps: int) -> DynamicsTask:
    lines = data.lines("test")
    long = [i for i, targets in enumerate(lines.targets) if targets >= steps][:examples]
    if not long:
        raise ValueError(
            f"steps must be at most {max(lines.targets)}, the points of the longest test line, got "
            f"{steps}"
        )
    offsets, _, texts, _ = lines[torch.tensor(long)]
    points = model.standardize(offsets[:, : steps + 1]).transpose(0, 1)
    # The first input is the null vector, not a standardised zero.
    inputs = torch.cat([torch.zeros_like(points[:1]), points[1:-1]])
    text = None if model.window is None else model.encode(texts)
    first = 1 if model.window is None else 2  # the layer with the window is a loop of its own
    description = f"{len(long)} lines of IAM-OnDB"
    return DynamicsTask((inputs, text, points[-1]), _loss, description, first)


def _loss(network: Handwriting, batch: tuple[Tensor, Tensor | None, Tensor]) -> Tensor:
    inputs, text, last = batch
    outputs, _ = network(inputs, text)
    return network.mixture(outputs[-1]).nll(last).mean()
