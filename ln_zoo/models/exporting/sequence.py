"""Export of the classifier of pixel sequences."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ln_zoo.export import Form, Part, Parts, Path, export_parts, map_path, paths
from ln_zoo.export.paths import Tensors, flat, layer_path, of_layer
from ln_zoo.models.sequence import SequenceClassifier


@export_parts.register
def _parts(model: SequenceClassifier) -> Mapping[str, Part]:
    return {"logits": partial(_logits, model)}


def _logits(model: SequenceClassifier, copy: Any, form: Form) -> Path:
    if form == "sequence":
        images = {"images": paths.uniform("N", model.in_features)}
        return map_path(model, copy, form, images, "logits", type(model).forward)
    layer = layer_path(model.recurrent, copy.recurrent, "step")
    count = len(layer.states)

    def step(model: Any, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        output, after = model.recurrent.step(x, rest[:count], *rest[count:])
        return model.readout(output), *after

    def steps(model: Any, given: Tensors) -> dict[str, Tensor]:
        examples = given["input"].shape[1]
        states = model.initial_states.unsqueeze(2).expand(-1, -1, examples, -1).unbind()
        output, last = model.recurrent(given["input"], of_layer(states))
        last = dict(zip(layer.states.values(), flat(last), strict=True))
        return {"logits": model.readout(output), **last}

    # (L, H) of each state, shared by all examples.
    initial = dict(zip(layer.states, model.initial_states.detach(), strict=True))
    outputs = ("logits", *layer.states.values())
    return Path(Parts(copy, step), steps, layer.inputs, outputs, layer.states, initial, True)
