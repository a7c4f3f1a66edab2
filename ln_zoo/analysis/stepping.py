"""Run recurrent layers step by step, for analyses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from ln_zoo.layers import RecurrentLayer
from ln_zoo.layers.cells import as_states, sites_by_role
from ln_zoo.norms import batch_statistics
from ln_zoo.norms.modes import evaluation_mode
from ln_zoo.ops import Cell, States, scan
from ln_zoo.ops.cells import Step
from ln_zoo.utils.checks import check_choice

#: Statistics of batch-dependent norms: of the batch, as in training, or the running ones.
Statistics = Literal["batch", "kept"]


def check_arguments(caller: str, layer: RecurrentLayer, inputs: Tensor) -> None:
    """Check a recurrent layer and its inputs; ``caller`` names the analysis in messages.

    TypeError for other layers, such as torch's own; ValueError unless inputs are (T, N, I), not
    empty.
    """
    if not isinstance(layer, RecurrentLayer):
        cls = type(layer)
        raise TypeError(
            f"{caller} takes a recurrent layer of ln_zoo.layers, got a {cls.__module__}."
            f"{cls.__qualname__}; the state_dict of one of torch's layers fits ours of that name"
        )
    check_sequences(caller, inputs)


def exact_cell(layer: RecurrentLayer) -> Cell:
    """The cell of a layer, without clipping of derivatives."""
    return layer.cell.unclipped or layer.cell


def check_sequences(caller: str, inputs: Tensor) -> None:
    """Raise ValueError unless inputs are (T, N, I), not empty."""
    if inputs.dim() != 3 or 0 in inputs.shape[:2]:
        raise ValueError(
            f"{caller} takes inputs (T, N, I), T time steps of N examples, both at least 1; got "
            f"{tuple(inputs.shape)}"
        )


def initial_states(
    caller: str, layer: RecurrentLayer, inputs: Tensor, states: Tensor | States | None
) -> States:
    """Initial states of a layer with one layer and one direction, (1, N, H) each; default zeros.

    As `check_arguments`; also ValueError for several layers, two directions or zoneout, and
    RuntimeError for mismatched sizes.
    """
    check_arguments(caller, layer, inputs)
    name = type(layer).__name__
    if layer.num_layers != 1 or layer.bidirectional:
        directions = 2 if layer.bidirectional else 1
        raise ValueError(
            f"{caller} takes one layer and one direction, this {name} has num_layers="
            f"{layer.num_layers} and {directions} direction(s); use network_dynamics for several "
            "layers"
        )
    _check_no_zoneout(caller, layer)
    layer.check_input(inputs, None)
    given = as_states(name, exact_cell(layer), states)
    if given is None:
        return tuple(inputs.new_zeros(size) for size in layer._state_sizes(inputs, None))
    layer._check_states(inputs, None, given)
    return given


def _check_no_zoneout(caller: str, layer: RecurrentLayer) -> None:
    # Unlike other regularisers, zoneout acts in evaluation.
    if "zoneout" in layer.noise:
        raise ValueError(
            f"{caller} takes layers without zoneout, this {type(layer).__name__} has "
            f"zoneout={layer.zoneout}"
        )


def layers_apart(caller: str, layer: RecurrentLayer) -> list[RecurrentLayer]:
    """Split a recurrent layer into modules of one layer, which share its parameters and sites.

    Their derivatives are not clipped. ValueError for two directions, and for zoneout.
    """
    if layer.bidirectional:
        raise ValueError(
            f"{caller} takes layers of one direction, this {type(layer).__name__} has two"
        )
    _check_no_zoneout(caller, layer)
    if layer.num_layers == 1:
        return [layer]
    parts = []
    for number in range(layer.num_layers):
        # Parameters are replaced below; the meta device neither draws nor stores.
        part = RecurrentLayer(
            (layer.proj_size or layer.hidden_size) if number else layer.input_size,
            layer.hidden_size,
            bias=layer.bias,
            proj_size=layer.proj_size,
            device="meta",
            cell=exact_cell(layer),
        )
        for name, parameter in layer.named_parameters(recurse=False):
            kind, _, place = name.rpartition("_l")
            if int(place) == number:
                setattr(part, f"{kind}_l0", parameter)
        part.sites["l0"] = layer.sites[f"l{number}"]
        part.training = layer.training  # train() would change the shared sites
        parts.append(part)
    return parts


def noisy_start(
    layer: RecurrentLayer, inputs: Tensor, noise: float, generator: torch.Generator
) -> Tensor | States:
    """Initial states (1, N, H): h normal with this standard deviation, others zeros.

    The numbers are drawn on the CPU in float64, so that they are equal on all devices.
    """
    zeros = inputs.new_zeros(1, inputs.shape[1], layer.hidden_size)
    h = noise * torch.randn(zeros.shape, generator=generator, dtype=torch.float64).to(zeros)
    others = [zeros] * (len(layer.cell.states) - 1)
    return (h, *others) if others else h


def run_steps(layer: RecurrentLayer, inputs: Tensor, states: States, step: Step) -> Tensor:
    """Outputs (T, N, H) of the generic loop with ``step`` in place of the cell's.

    The layer has one layer and one direction; inputs are (T, N, I), states (N, H).
    """
    sites = sites_by_role(layer.sites["l0"])
    output, _ = scan(
        dataclasses.replace(exact_cell(layer), step=step),
        inputs,
        None,
        states,
        layer._effective_weights("l0", sites).of_step,
        sites,
        sites["input"].norm.per_timestep,
    )
    return output


@contextmanager
def cpu_seed(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator within the block, but no other device's."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def same_random_numbers(module: nn.Module) -> Iterator[None]:
    """Seed the generators of the CPU and the module's GPUs within the block, then restore them."""
    tensors = (*module.parameters(), *module.buffers())
    cards = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    with torch.random.fork_rng(devices=cards), cpu_seed(0):
        for card in cards:
            torch.cuda.default_generators[card].manual_seed(0)
        yield


@contextmanager
def measuring(module: nn.Module, statistics: Statistics) -> Iterator[None]:
    """Evaluation mode with ``"batch"`` or ``"kept"`` statistics; restores modes and buffers."""
    check_choice("statistics", statistics, ("batch", "kept"))
    normalising = batch_statistics(module) if statistics == "batch" else nullcontext()
    with evaluation_mode(module), normalising:
        yield
