"""Paths: exported functions of named tensors, with example inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ln_zoo.export.errors import ExportError
from ln_zoo.export.loops import Loop, Step
from ln_zoo.layers import RecurrentCell, RecurrentLayer

Form = Literal["step", "sequence"]
FORMS: tuple[str, ...] = get_args(Form)
#: Sizes of dynamic axes by letter: N examples, T steps, and others.
Sizes = Mapping[str, int]
Tensors = Mapping[str, Tensor]

#: Name of the input with the number of the time step, from 0.
STEP = "step"


@dataclass(frozen=True)
class Input:
    """An input of an exported file."""

    shape: tuple[int | str, ...]  #: sizes, or letters of dynamic axes
    #: Draws a random input of these sizes.
    draw: Callable[[tuple[int, ...], Sizes, torch.Generator], Tensor]
    constant: bool = False  #: in a step form, equal at every step

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return self.draw(self.size(sizes), sizes, generator)

    def size(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape with letters replaced."""
        return tuple(n if isinstance(n, int) else sizes[n] for n in self.shape)


def normal(*shape: int | str, std: float = 1.0) -> Input:
    """Normal numbers."""
    return Input(shape, lambda size, _, g: std * torch.randn(size, generator=g))


def uniform(*shape: int | str, constant: bool = False) -> Input:
    """Numbers from 0 to 1."""
    return Input(shape, lambda size, _, g: torch.rand(size, generator=g), constant)


def numbers(below: int, *shape: int | str) -> Input:
    """Random word indices below a bound."""
    return Input(shape, lambda size, _, g: torch.randint(below, size, generator=g))


def one_hot(*shape: int | str) -> Input:
    """One-hot vectors along the last axis, the same at every step."""

    def draw(size: tuple[int, ...], _: Sizes, g: torch.Generator) -> Tensor:
        *rest, classes = size
        return torch.eye(classes)[torch.randint(classes, tuple(rest), generator=g)]

    return Input(shape, draw, constant=True)


def lengths(of: str = "T") -> Input:
    """Lengths of N sequences, from 1 to the size of an axis; the last has full length."""

    def draw(size: tuple[int, ...], sizes: Sizes, g: torch.Generator) -> Tensor:
        found = torch.randint(1, sizes[of] + 1, size, generator=g)
        found[-1] = sizes[of]
        return found

    return Input(("N",), draw)


def step_number() -> Input:
    """The number of a time step."""
    return Input((), lambda size, _, g: torch.randint(20, size, generator=g))


@dataclass(frozen=True)
class Path:
    """An exported function of tensors.

    ``reference(model, tensors)`` returns outputs by name, by the model's code. In step form, it
    gets inputs of T steps, stacked, starts from the model's initial states, and returns outputs of
    T steps, stacked, and the last states.
    """

    module: nn.Module  #: maps inputs to outputs, in order, with the loops of `ln_zoo.export.loops`
    reference: Callable[[Any, Tensors], dict[str, Tensor]]
    inputs: dict[str, Input]
    outputs: tuple[str, ...]
    #: Name of the output with the next state, by the name of the input.
    states: dict[str, str] = field(default_factory=dict)
    #: Nonzero initial states, without the axis of examples.
    initial: dict[str, Tensor] = field(default_factory=dict)
    is_step: bool = False

    def start(self, sizes: Sizes) -> dict[str, Tensor]:
        """Initial states."""
        found = {}
        for name in self.states:
            spec = self.inputs[name]
            begin = self.initial.get(name, torch.zeros(()))
            axis = spec.shape.index("N")
            begin = begin.unsqueeze(axis) if begin.dim() else begin
            found[name] = begin.expand(spec.size(sizes)).contiguous()
        return found


class Parts(nn.Module):
    """A function of a module and tensors as a module, so that exporters find the weights."""

    def __init__(self, model: nn.Module, function: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.model = model
        self.function = function
        self.eval()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.function(self.model, *inputs)


def flat(states: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """States of a layer as a tuple."""
    return (states,) if isinstance(states, Tensor) else tuple(states)


def of_layer(states: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """States in a layer's format: a tuple, or a single tensor."""
    return states if len(states) > 1 else states[0]


def no_step_form(model: nn.Module, why: str) -> ExportError:
    """The error of a model without step form."""
    return ExportError(
        f"{type(model).__name__} has no step form: {why}; export it with the form sequence"
    )


def layer_path(layer: RecurrentLayer, loop: Loop, form: Form) -> Path:
    """Path of a recurrent layer: input and states to output and next states.

    ``loop`` is its `exportable` copy. Input is (T, N, I) in sequence form, (N, I) in step form.
    ExportError for the step form of a bidirectional layer.
    """
    rows = loop.num_layers * loop.width
    output, *others = loop.cell.states
    states = {output: normal(rows, "N", layer.proj_size or layer.hidden_size, std=0.5)}
    states |= {name: normal(rows, "N", layer.hidden_size, std=0.5) for name in others}
    after = {name: f"next_{name}" for name in states}
    outputs = ("output", *after.values())
    if form == "sequence":
        axes = ("N", "T") if layer.batch_first else ("T", "N")

        def run(model: Any, x: Tensor, *before: Tensor) -> tuple[Tensor, ...]:
            output, last = model(x, of_layer(before))
            return output, *flat(last)

        def whole(model: Any, given: Tensors) -> dict[str, Tensor]:
            return dict(zip(outputs, run(model, *given.values()), strict=True))

        inputs = {"input": normal(*axes, layer.input_size), **states}
        return Path(Parts(loop, run), whole, inputs, outputs, after)
    if loop.width > 1:
        raise no_step_form(layer, "its reverse direction reads the end of a sequence first")
    inputs = {"input": normal("N", layer.input_size), **states}
    if loop.by_step:
        inputs[STEP] = step_number()
    count = len(states)

    def step(model: Any, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        output, last = model.step(x, rest[:count], *rest[count:])
        return output, *last

    def steps(model: Any, given: Tensors) -> dict[str, Tensor]:
        x = given["input"]
        output, last = model(x.transpose(0, 1) if model.batch_first else x)
        output = output.transpose(0, 1) if model.batch_first else output
        return dict(zip(outputs, (output, *flat(last)), strict=True))

    return Path(Parts(loop, step), steps, inputs, outputs, after, is_step=True)


def cell_path(cell: RecurrentCell, step: Step, form: Form) -> Path:
    """Path of a recurrent cell: input and states to next states; step form only."""
    if form != "step":
        raise ExportError(f"{type(cell).__name__} runs one time step: use the form step")
    names = step.direction.cell.states
    inputs = {"input": normal("N", cell.input_size)}
    inputs |= {name: normal("N", cell.hidden_size, std=0.5) for name in names}
    after = {name: f"next_{name}" for name in names}
    if step.by_step:
        inputs[STEP] = step_number()
    count = len(names)

    def run(model: Any, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return flat(model(x, of_layer(rest[:count]), *rest[count:]))

    def steps(model: Any, given: Tensors) -> dict[str, Tensor]:
        last = None
        for t, x in enumerate(given["input"]):
            last = model(x, last, step=t)
        assert last is not None
        return dict(zip(after.values(), flat(last), strict=True))

    return Path(Parts(step, run), steps, inputs, tuple(after.values()), after, is_step=True)
