"""Exportable forms of recurrent layers and cells.

Time loops become torch's ``scan`` with a dynamic number of steps; layers without normalised
pre-activations become ONNX operators. Steps are those of `ln_zoo.ops.cells`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from ln_zoo.export.errors import ExportError
from ln_zoo.layers import RecurrentCell, RecurrentLayer
from ln_zoo.norms import Site
from ln_zoo.ops import Cell, States, Weights, full_weight
from ln_zoo.ops.cells import (
    gru_step,
    input_products,
    lstm_step,
    peephole_lstm_step,
    rnn_relu_step,
    rnn_tanh_step,
)
from ln_zoo.ops.norm_records import StepNorm

#: ONNX operator of a step, and torch's gates in ONNX order (LSTM: i, o, f, c; GRU: z, r, h), from
#: opset 14 on.
_OPERATORS: dict[Callable[..., States], tuple[str, tuple[int, ...]]] = {
    lstm_step: ("LSTM", (0, 3, 1, 2)),
    peephole_lstm_step: ("LSTM", (0, 3, 1, 2)),
    gru_step: ("GRU", (1, 0, 2)),
    rnn_tanh_step: ("RNN", (0,)),
    rnn_relu_step: ("RNN", (0,)),
}
_ACTIVATIONS: dict[Callable[..., States], str] = {rnn_tanh_step: "Tanh", rnn_relu_step: "Relu"}
#: Our peepholes (i, f, o) in ONNX order (i, o, f).
_PEEPHOLES = (0, 2, 1)
_OPERATOR_VERSION = 14


def exportable(module: nn.Module, *, operators: bool = False) -> nn.Module:
    """A copy of a module in evaluation mode with exportable recurrent layers and cells.

    Layers become `Loop`, cells `Step`, with effective weights, so weight normalisation is free.
    ``operators`` turns layers without normalised pre-activations into ONNX's LSTM, GRU and RNN;
    such a copy can be exported to ONNX, but not run.

    Raises:
        ExportError: for a module in training mode, or a norm with unknown statistics per time step.

    Example:
        >>> from ln_zoo import LSTM, LayerNorm
        >>> copied = exportable(LSTM(3, 5, norm=LayerNorm()).eval())
        >>> sizes = {0: torch.export.Dim("T"), 1: torch.export.Dim("N")}
        >>> program = torch.export.export(copied, (torch.randn(4, 2, 3),), dynamic_shapes=(sizes,))
        >>> program.module()(torch.randn(9, 2, 3))[0].shape
        torch.Size([9, 2, 5])
    """
    if any(part.training for part in module.modules()):
        raise ExportError(f"{type(module).__name__} is in training mode: call .eval() first")
    return _replaced(copy.deepcopy(module), operators, {})


def steps_differ(copy: nn.Module) -> bool:
    """Whether steps of an exportable copy need their number, for statistics per time step."""
    return any(part.by_step for part in copy.modules() if isinstance(part, Loop | Step))


def step_numbers(steps: Tensor) -> Tensor:
    """The number of each step of a tensor (T, \\*), int64 (T,)."""
    return torch.arange(steps.shape[0], device=steps.device)


def _replaced(module: nn.Module, operators: bool, done: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in done:
        return done[module]
    if isinstance(module, RecurrentLayer):
        done[module] = Loop(module, operators).eval()
    elif isinstance(module, RecurrentCell):
        done[module] = Step(module).eval()
    else:
        done[module] = module
        # named_children() skips further names of a module.
        for name, child in list(module._modules.items()):
            if child is not None:
                setattr(module, name, _replaced(child, operators, done))
    return done[module]


class _ExportedSite(nn.Module):
    mean: Tensor
    scale: Tensor

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site
        self.by_step = site.normalizes and site.norm.per_timestep
        self.acts = site.normalizes
        if not self.by_step:
            return
        record = site.to_spec()
        if not isinstance(record, StepNorm) or record.batch:
            raise ExportError(
                f"{type(site.norm).__name__} depends on the time step: return a StepNorm from its "
                "to_spec()"
            )
        with torch.no_grad():
            mean, var = record.population(0, len(site.running_mean))
            scale = torch.rsqrt(var + record.eps)
            scale = scale if record.gain is None else scale * record.gain
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def forward(self, a: Tensor, step: Tensor | None) -> Tensor:
        if not self.acts:
            return a
        if not self.by_step:
            out: Tensor = self.site(a)
            return out
        if step is None:
            raise ExportError(f"step must be given for the {self.site.role} site")
        # The last row serves all later steps.
        row = step.clamp(max=len(self.mean) - 1).view(1)
        out = (a - self.mean.index_select(0, row)) * self.scale.index_select(0, row)
        return out if self.site.shift is None else out + self.site.shift


class _Direction(nn.Module):
    def __init__(self, cell: Cell, weights: Weights, sites: dict[str, Site]) -> None:
        super().__init__()
        # Clipping of derivatives does not matter in inference.
        self.cell = cell.unclipped or cell
        if (blocks := cell.blocks(weights)) > 1:  # ONNX has none
            weights = weights._replace(hh=full_weight(weights.of_step.hh, blocks))
        self.names = Weights._fields[:5]
        for name, weight in zip(self.names, weights[:5], strict=True):
            self.register_buffer(name, None if weight is None else weight.detach().clone())
        self.own = [f"own_{i}" for i in range(len(weights.own))]
        for name, weight in zip(self.own, weights.own, strict=True):
            self.register_buffer(name, weight.detach().clone())
        self.places = nn.ModuleDict({role: _ExportedSite(site) for role, site in sites.items()})
        self.by_step = any(place.by_step for place in self._places())

    def _places(self) -> list[_ExportedSite]:
        return [place for place in self.places.values() if isinstance(place, _ExportedSite)]

    @property
    def is_operator(self) -> bool:
        """Whether ONNX has an equivalent operator."""
        known = self.cell.step in _OPERATORS and self.hr is None
        return known and not any(place.acts for place in self._places())

    def _weights(self) -> Weights:
        found: dict[str, Any] = {name: getattr(self, name) for name in self.names}
        # Cloned, since a scan body must not use a tensor twice.
        found["own"] = tuple(getattr(self, name).clone() for name in self.own)
        return Weights(**found)

    def step(self, x: Tensor, states: States, step: Tensor | None) -> States:
        return self._step(input_products(x, self._weights().ih), states, step)

    def _step(self, product: Tensor, states: States, step: Tensor | None) -> States:
        sites: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = dict(self.places.items())
        wx = sites["input"](product, step)
        # Cells only pass the step to their sites.
        return self.cell.step(wx, states, self._weights(), sites, step)  # type: ignore[arg-type]

    def run(self, x: Tensor, states: States, lengths: Tensor | None) -> tuple[Tensor, States]:
        """Outputs (T, N, H) and final states, for x (T, N, I)."""
        products = input_products(x, self._weights().ih)
        steps = step_numbers(x)

        def body(
            states: tuple[Tensor, ...], of_step: tuple[Tensor, Tensor]
        ) -> tuple[tuple[Tensor, ...], Tensor]:
            product, step = of_step
            after = self._step(product, states, step)
            if lengths is not None:
                goes_on = (step < lengths).unsqueeze(1)
                after = tuple(
                    torch.where(goes_on, new, old) for new, old in zip(after, states, strict=True)
                )
            return after, after[0].clone()

        final, output = scan(body, tuple(s.contiguous() for s in states), (products, steps))
        return output, tuple(final)


class Loop(nn.Module):
    """An exportable recurrent layer; see `exportable`."""

    def __init__(self, layer: RecurrentLayer, operators: bool) -> None:
        super().__init__()
        if "zoneout" in layer.noise:
            raise ExportError(
                f"{type(layer).__name__} with zoneout={layer.zoneout} cannot be exported: set it "
                "to 0"
            )
        self.cell = layer.cell
        # A projection shortens only h.
        others = [layer.hidden_size] * (len(layer.cell.states) - 1)
        self.state_sizes = (layer.proj_size or layer.hidden_size, *others)
        self.batch_first = layer.batch_first
        self.num_layers = layer.num_layers
        self.width = 2 if layer.bidirectional else 1
        self.directions = nn.ModuleList(
            _Direction(layer.cell, layer._effective_weights(suffix, sites), sites)
            for suffix, sites in layer._directions().items()
        )
        parts = self._directions()
        self.by_step = any(part.by_step for part in parts)
        self.operators = nn.ModuleList()
        if operators and all(part.is_operator for part in parts):
            for first in range(0, len(parts), self.width):
                of_layer = parts[first : first + self.width]
                self.operators.append(_Operator(of_layer, layer.hidden_size))
            self.directions = nn.ModuleList()

    def _directions(self) -> list[_Direction]:
        return [part for part in self.directions if isinstance(part, _Direction)]

    def forward(
        self,
        input: Tensor,
        hx: Tensor | States | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | States]:
        """Outputs and final states, in the layer's format.

        ``lengths`` (N,), default T, are those of the sequences: states do not change after the
        end, outputs are undefined there.
        """
        x = input.transpose(0, 1) if self.batch_first else input
        if hx is None:
            rows = self.width * self.num_layers
            hx = tuple(x.new_zeros(rows, x.shape[1], size) for size in self.state_sizes)
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        finals: list[States] = []
        for i in range(self.num_layers):
            start = tuple(s[i * self.width : (i + 1) * self.width] for s in states)
            if self.operators:
                x, final = self.operators[i](x, start, lengths)
            else:
                x, final = self._by_scan(i, x, start, lengths)
            finals.append(final)
        after = tuple(torch.cat(final) for final in zip(*finals, strict=True))
        output = x.transpose(0, 1) if self.batch_first else x
        return output, after if len(after) > 1 else after[0]

    def step(self, x: Tensor, states: States, step: Tensor | None = None) -> tuple[Tensor, States]:
        """Output (N, H) and next states (L, N, H), for one time step of input (N, I).

        ``step`` is the number of the time step, an int64 scalar; required if ``by_step``.
        """
        if self.operators:
            x = x.unsqueeze(0).transpose(0, 1) if self.batch_first else x.unsqueeze(0)
            output, after = self(x, states if len(states) > 1 else states[0])
            states = (after,) if isinstance(after, Tensor) else after
            return output.squeeze(1 if self.batch_first else 0), states
        finals = []
        for i, part in enumerate(self._directions()):
            finals.append(part.step(x, tuple(s[i] for s in states), step))
            x = finals[-1][0]
        return x, tuple(torch.stack(final) for final in zip(*finals, strict=True))

    def _by_scan(
        self, i: int, x: Tensor, states: States, lengths: Tensor | None
    ) -> tuple[Tensor, States]:
        layer = self._directions()[i * self.width :]
        output, final = layer[0].run(x, tuple(s[0] for s in states), lengths)
        finals = [final]
        if self.width > 1:
            order = _reversal(x, lengths)
            back, final = layer[1].run(_turned(x, order), tuple(s[1] for s in states), lengths)
            output = torch.cat([output, _turned(back, order)], -1)
            finals.append(final)
        return output, tuple(torch.stack(final) for final in zip(*finals, strict=True))


class _Operator(nn.Module):
    weight: Tensor
    recurrent: Tensor
    bias: Tensor | None
    peephole: Tensor | None

    def __init__(self, layer: list[_Direction], hidden_size: int) -> None:
        super().__init__()
        step = layer[0].cell.step
        self.hidden_size = hidden_size
        self.name, order = _OPERATORS[step]
        width = len(layer)
        self.options: dict[str, Any] = {
            "hidden_size": hidden_size,
            "direction": "bidirectional" if width > 1 else "forward",
        }
        if step in _ACTIVATIONS:
            self.options["activations"] = [_ACTIVATIONS[step]] * width
        elif step is gru_step:
            self.options["linear_before_reset"] = 1  # as in torch, not the default

        def gates(kind: str, order: tuple[int, ...] = order) -> Tensor | None:
            found = [getattr(part, kind) for part in layer]
            if found[0] is None:
                return None
            parts = (weight.view(len(order), hidden_size, -1)[list(order)] for weight in found)
            return torch.stack([part.flatten(0, 1) for part in parts])

        biases = gates("bias_ih"), gates("bias_hh")
        bias = None
        if biases[0] is not None and biases[1] is not None:
            bias = torch.cat(biases, 1).squeeze(2)  # type: ignore[arg-type]
        peephole = gates("own_0", _PEEPHOLES) if layer[0].own else None
        self.register_buffer("weight", gates("ih"))
        self.register_buffer("recurrent", gates("hh"))
        self.register_buffer("bias", bias)
        self.register_buffer("peephole", None if peephole is None else peephole.squeeze(2))

    def forward(self, x: Tensor, states: States, lengths: Tensor | None) -> tuple[Tensor, States]:
        sizes = None if lengths is None else lengths.to(torch.int32)
        inputs = [x, self.weight, self.recurrent, self.bias, sizes, *states]
        if self.peephole is not None:
            inputs.append(self.peephole)
        steps, examples = x.shape[:2]
        width = len(self.weight)
        of_state = (width, examples, self.hidden_size)
        output, *final = torch.onnx.ops.symbolic_multi_out(
            self.name,
            inputs,
            self.options,
            dtypes=[x.dtype] * (1 + len(states)),
            shapes=[(steps, width, examples, self.hidden_size), *[of_state] * len(states)],
            version=_OPERATOR_VERSION,
        )
        return output.transpose(1, 2).flatten(2), tuple(final)


def _reversal(x: Tensor, lengths: Tensor | None) -> Tensor | None:
    """Indices that reverse each sequence within its length, (T, N, 1)."""
    if lengths is None:
        return None
    steps = step_numbers(x).unsqueeze(1)
    return torch.where(steps < lengths, lengths - 1 - steps, steps).unsqueeze(2)


def _turned(x: Tensor, order: Tensor | None) -> Tensor:
    return x.flip(0) if order is None else x.gather(0, order.expand_as(x))


class Step(nn.Module):
    """An exportable recurrent cell, within loops too; see `exportable`."""

    def __init__(self, cell: RecurrentCell) -> None:
        super().__init__()
        sites = {role: site for role, site in cell.sites.items() if isinstance(site, Site)}
        self.hidden_size = cell.hidden_size
        self.direction = _Direction(cell.cell, cell.effective_weights(), sites)
        self.by_step = self.direction.by_step

    def forward(
        self, input: Tensor, hx: Tensor | States | None = None, step: Tensor | None = None
    ) -> Tensor | States:
        """The next states, in the cell's format; ``step`` is an int64 scalar."""
        if hx is None:
            zeros = input.new_zeros(input.shape[0], self.hidden_size)
            hx = (zeros,) * len(self.direction.cell.states)
        after = self.direction.step(input, (hx,) if isinstance(hx, Tensor) else tuple(hx), step)
        return after if len(after) > 1 else after[0]
