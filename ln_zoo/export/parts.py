"""Exported parts of models, and functions that several models share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, nn

from ln_zoo.export.errors import ExportError
from ln_zoo.export.loops import exportable
from ln_zoo.export.paths import (
    STEP,
    Form,
    Input,
    Parts,
    Path,
    Tensors,
    cell_path,
    layer_path,
    lengths,
    no_step_form,
    normal,
    numbers,
    step_number,
)
from ln_zoo.layers import RecurrentCell, RecurrentLayer

#: ``part(copy, form)``: the path of a part, given the model's `exportable` copy.
Part = Callable[[Any, Form], Path]


def path_of(model: nn.Module, form: Form, part: str | None = None, operators: bool = False) -> Path:
    """The function of a model to export.

    The model has ``export_parts``, or is a recurrent layer or cell, in evaluation mode. The default
    part is the first of `parts_of`; ``operators`` as for `exportable`.

    Raises:
        ExportError: if the model has no such form or part, or cannot be exported.
    """
    parts = _parts(model)
    part = next(iter(parts)) if part is None else part
    if part not in parts:
        raise ExportError(
            f"{type(model).__name__} has no part {part!r}: its parts are {', '.join(parts)}"
        )
    return parts[part](exportable(model, operators=operators), form)


def parts_of(model: nn.Module) -> tuple[str, ...]:
    """Names of a model's exported parts, the most used first."""
    return tuple(_parts(model))


@singledispatch
def export_parts(model: nn.Module) -> Mapping[str, Part]:
    """The parts of a model that are exported, by name, the most used first; {} if none is declared.

    Models of ln_zoo are registered in `ln_zoo.models.exporting`. A class of your own defines a
    method ``export_parts(self)``, which has priority. Values are functions ``part(copy, form)``
    that return the `Path`; ``copy`` is the model's `exportable` copy.

    Example:
        >>> from ln_zoo.models import OrderEmbedding
        >>> list(export_parts(OrderEmbedding(["a", "cat"], hidden_size=4)))
        ['captions', 'images']
    """
    return {}


@export_parts.register
def _(layer: RecurrentLayer) -> Mapping[str, Part]:
    return {"layer": lambda loop, form: layer_path(layer, loop, form)}


@export_parts.register
def _(cell: RecurrentCell) -> Mapping[str, Part]:
    return {"cell": lambda step, form: cell_path(cell, step, form)}


def _parts(model: nn.Module) -> Mapping[str, Part]:
    own: Callable[[], Mapping[str, Part]] | None = getattr(model, "export_parts", None)
    parts = export_parts(model) if own is None else own()
    if not parts:
        raise ExportError(
            f"{type(model).__name__} does not declare what to export: define a method "
            "export_parts, or make its layers exportable with ln_zoo.export.exportable and export "
            "it with torch.export, as docs/how-to/export.md says"
        )
    return parts


def map_path(
    model: nn.Module,
    copy: nn.Module,
    form: Form,
    inputs: dict[str, Input],
    output: str,
    reference: Callable[..., Tensor],
    run: Callable[..., Tensor] | None = None,
) -> Path:
    """A path without a loop over time, in sequence form only; ExportError for the step form.

    Args:
        model: the model.
        copy: its `exportable` copy.
        form: the requested form.
        inputs: inputs by name.
        output: name of the output.
        reference: ``reference(model, *inputs)``: the output, by the model's code.
        run: ``run(copy, *inputs)``, if exporters cannot trace that code; default: ``reference``.

    Example:
        >>> from ln_zoo.export.paths import normal
        >>> model = nn.Linear(3, 2).eval()
        >>> inputs = {"input": normal("N", 3)}
        >>> path = map_path(model, model, "sequence", inputs, "output", nn.Linear.forward)
        >>> path.module(torch.rand(4, 3))[0].shape
        torch.Size([4, 2])
    """
    function = run or reference
    if form == "step":
        raise no_step_form(model, f"nothing recurrent leads to its {output}")

    def of_copy(copy: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (function(copy, *tensors),)

    def of_model(model: Any, given: Tensors) -> dict[str, Tensor]:
        return {output: reference(model, *given.values())}

    return Path(Parts(copy, of_copy), of_model, inputs, (output,))


def text_path(
    model: nn.Module,
    copy: nn.Module,
    form: Form,
    *,
    layer: str,
    words: int,
    hidden: int,
    output: str,
    vectors: Callable[[Any, Tensor, Tensor], Tensor],
    step: Callable[..., tuple[Tensor, ...]],
    reference: Callable[[Any, Tensor, Tensor], Tensor],
    is_state: bool = False,
) -> Path:
    """A path of a recurrent layer with one state that maps a text to a vector.

    Args:
        model: the model.
        copy: its `exportable` copy.
        form: sequence: tokens (N, T) and lengths (N,); step: tokens (N,) and the state.
        layer: name of the recurrent layer.
        words: size of the vocabulary.
        hidden: size of the state.
        output: name of the vector.
        vectors: ``vectors(copy, tokens, lengths)``: vectors (N, D).
        step: ``step(copy, token, h, *number)``: the vector and the next state.
        reference: ``reference(model, tokens, lengths)``: vectors, by the model's code.
        is_state: the vector is the state; then ``step`` returns only the state.

    Raises:
        ExportError: for the step form of a bidirectional layer.
    """

    def whole(model: Any, given: Tensors) -> dict[str, Tensor]:
        return {output: reference(model, given["tokens"], given["lengths"])}

    def steps(model: Any, given: Tensors) -> dict[str, Tensor]:
        tokens = given["token"].t()
        sizes = torch.full(tokens.shape[:1], tokens.shape[1])
        # The output of an earlier step equals that of a shorter text.
        found = [
            reference(model, tokens[:, :t], sizes.clamp(max=t))
            for t in range(1, tokens.shape[1] + 1)
        ]
        if is_state:
            return {"next_h": found[-1].unsqueeze(0)}
        return {output: torch.stack(found)}

    if form == "sequence":

        def run(copy: Any, tokens: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
            return (vectors(copy, tokens, sizes),)

        inputs = {"tokens": numbers(words, "N", "T"), "lengths": lengths()}
        return Path(Parts(copy, run), whole, inputs, (output,))
    loop: Any = getattr(copy, layer)
    if loop.width > 1:
        raise no_step_form(model, "its encoder reads sentences from both ends")
    inputs = {"token": numbers(words, "N"), "h": normal(1, "N", hidden, std=0.5)}
    if loop.by_step:
        inputs[STEP] = step_number()
    outputs = ("next_h",) if is_state else (output, "next_h")
    return Path(Parts(copy, step), steps, inputs, outputs, {"h": "next_h"}, is_step=True)
