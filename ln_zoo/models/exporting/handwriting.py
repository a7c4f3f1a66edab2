"""Export of the handwriting network."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan

from ln_zoo.export import Form, Part, Parts, Path, export_parts, paths
from ln_zoo.export.loops import step_numbers, steps_differ
from ln_zoo.export.paths import STEP, Input, Tensors
from ln_zoo.layers import WindowState
from ln_zoo.models.handwriting import Handwriting, flatten_state, unflatten_state


@export_parts.register
def _parts(model: Handwriting) -> Mapping[str, Part]:
    return {"outputs": partial(_outputs, model)}


def _outputs(model: Handwriting, copy: Any, form: Form) -> Path:
    reads = model.window is not None
    hidden = model.output.in_features
    if model.output_from == "all":
        hidden //= len(model.layers) + reads
    states: dict[str, Input] = {}
    if model.window is not None:
        states = {
            "window_h": paths.normal("N", hidden, std=0.5),
            "window_c": paths.normal("N", hidden, std=0.5),
            "kappa": paths.uniform("N", model.window.components),
            "window": paths.uniform("N", model.window.character_size),
        }
    for i in range(len(model.layers)):
        states |= {f"{letter}{i}": paths.normal("N", hidden, std=0.5) for letter in "hc"}
    points = "points" if form == "sequence" else "point"
    inputs = {points: paths.normal(*(("T", "N") if form == "sequence" else ("N",)), 3)}
    if reads:
        inputs["text"] = paths.one_hot("N", "U", model.num_characters)
    inputs |= states
    if form == "step" and steps_differ(copy):
        inputs[STEP] = paths.step_number()
    after = {name: f"next_{name}" for name in states}
    of_window = len(WindowState._fields) if reads else 0

    def run(model: Any, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        text, rest = rest[0] if reads else None, rest[int(reads) :]
        before, step = rest[: len(states)], rest[len(states) :]
        outputs: list[Tensor] = []
        shown: list[Tensor] = []
        carried: list[Tensor] = []
        if reads:
            window = WindowState(*before[:of_window])
            read_text = _window_step if form == "step" else _window_scan
            h, seen, last = read_text(model.window, x, text, window, *step)
            outputs, shown, carried = [h], [seen], [*last]
        pairs = before[of_window:]
        for i, layer in enumerate(model.layers):
            state = pairs[2 * i].unsqueeze(0), pairs[2 * i + 1].unsqueeze(0)
            read = torch.cat([x, *outputs[-1:], *shown], -1)
            go = layer.step(read, state, *step) if form == "step" else layer(read, state)
            outputs.append(go[0])
            carried += [a.squeeze(0) for a in go[1]]
        y = torch.cat(outputs if model.output_from == "all" else outputs[-1:], -1)
        return model.output(y), *carried

    def by_model(model: Any, given: Tensors) -> dict[str, Tensor]:
        before = None
        if form == "sequence":
            before = unflatten_state([given[name] for name in states], reads)
        y, last = model(given[points], given.get("text"), before)
        return {"outputs": y, **dict(zip(after.values(), flatten_state(last), strict=True))}

    outputs = ("outputs", *after.values())
    return Path(Parts(copy, run), by_model, inputs, outputs, after, is_step=form == "step")


def _window_step(
    layer: Any, point: Tensor, text: Tensor | None, state: WindowState, step: Tensor | None = None
) -> tuple[Tensor, Tensor, WindowState]:
    found, _ = layer._step(point, text, state, step)
    return found.h, found.window, found


def _window_scan(
    layer: Any, points: Tensor, text: Tensor | None, state: WindowState
) -> tuple[Tensor, Tensor, WindowState]:
    def body(
        carried: tuple[Tensor, ...], of_step: tuple[Tensor, Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        after, _ = layer._step(of_step[0], text, WindowState(*carried), of_step[1])
        return tuple(after), (after.h.clone(), after.window.clone())

    last, (h, windows) = scan(body, tuple(state), (points, step_numbers(points)))
    return h, windows, WindowState(*last)
