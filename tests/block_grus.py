"""DreamerV3's block GRU as other libraries have it, written from their equations and names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class RootMeanSquare(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, a: Tensor) -> Tensor:
        return self.weight * a / (a.square().mean(-1, keepdim=True) + self.eps).sqrt()


class RootMeanSquareInFloat32(RootMeanSquare):
    def forward(self, a: Tensor) -> Tensor:
        return super().forward(a.float()).to(a.dtype)


class InBlocks(nn.Module):
    """A linear layer of blocks; ``axes`` are those of the weight: block, input, output."""

    def __init__(self, axes: str, blocks: int, inputs: int, outputs: int) -> None:
        super().__init__()
        sizes = {"g": blocks, "i": inputs // blocks, "o": outputs // blocks}
        self.axes, self.blocks = axes, blocks
        self.weight = nn.Parameter(torch.randn([sizes[axis] for axis in axes]) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, a: Tensor) -> Tensor:
        a = a.unflatten(-1, (self.blocks, -1))
        products = torch.einsum(f"...gi,{self.axes}->...go", a, self.weight)
        return products.flatten(-2) + self.bias


def updated(
    h: Tensor, features: Sequence[Tensor], layers: Any, gates: InBlocks, offset: float
) -> Tensor:
    """The next state; each block reads its part of the state, and all features."""
    blocks = gates.blocks
    all_blocks = [a.unsqueeze(-2).expand(*a.shape[:-1], blocks, -1) for a in features]
    a = layers(torch.cat([h.unflatten(-1, (blocks, -1)), *all_blocks], -1).flatten(-2))
    reset, candidate, update = (
        gate.flatten(-2) for gate in gates(a).unflatten(-1, (blocks, 3, -1)).unbind(-2)
    )
    update = torch.sigmoid(update + offset)
    return update * torch.tanh(torch.sigmoid(reset) * candidate) + (1 - update) * h


class BlockGRUCell(nn.Module):
    """TorchRL's ``DreamerV3BlockGRUCell``."""

    def __init__(
        self,
        size: int,
        hidden: int,
        projection: int,
        blocks: int,
        layers: int = 1,
        activation: Any = nn.functional.silu,
        norm_eps: float = 1e-4,
        update_bias: float = -1.0,
        norm: type[RootMeanSquare] = RootMeanSquare,
    ) -> None:
        super().__init__()
        self.hidden_size, self.norm_eps, self.update_bias = hidden, norm_eps, update_bias
        self.activation = activation
        self.input_linear = nn.Linear(size, projection)
        self.input_norm = norm(projection, norm_eps)
        self.hidden_linear = nn.Linear(hidden, projection)
        self.hidden_norm = norm(projection, norm_eps)
        inputs = [hidden + 2 * projection * blocks] + [hidden] * (layers - 1)
        self.dynamic_linears = nn.ModuleList(InBlocks("gio", blocks, n, hidden) for n in inputs)
        self.dynamic_norms = nn.ModuleList(norm(hidden, norm_eps) for _ in inputs)
        self.gates = InBlocks("gio", blocks, hidden, 3 * hidden)

    def _dynamics(self, a: Tensor) -> Tensor:
        for linear, norm in zip(self.dynamic_linears, self.dynamic_norms, strict=True):
            a = self.activation(norm(linear(a)))
        return a

    def forward(self, input: Tensor, hidden: Tensor | None = None) -> Tensor:
        if hidden is None:
            hidden = input.new_zeros(*input.shape[:-1], self.hidden_size)
        features = [
            self.activation(self.input_norm(self.input_linear(input))),
            self.activation(self.hidden_norm(self.hidden_linear(hidden))),
        ]
        return updated(hidden, features, self._dynamics, self.gates, self.update_bias)


class BlockGRU(nn.Module):
    """TorchRL's ``DreamerV3BlockGRU``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self.cell = BlockGRUCell(*arguments, **options)
        self.recurrent_backend = "reference"

    def forward(
        self, input: Tensor, hidden: Tensor | None = None, is_init: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        n, t = input.shape[:2]
        hidden = input.new_zeros(n, self.cell.hidden_size) if hidden is None else hidden
        starts = torch.zeros(n, t, 1, dtype=torch.bool) if is_init is None else is_init
        outputs = []
        for x, first in zip(input.unbind(1), starts.view(n, t, 1).unbind(1), strict=True):
            hidden = self.cell(x, torch.where(first, 0.0, hidden))
            outputs.append(hidden)
        return torch.stack(outputs, 1), hidden


def parts_of_layer(inputs: int, outputs: int, linear: Any, eps: float) -> list[nn.Module]:
    return [linear(inputs, outputs), RootMeanSquare(outputs, eps), nn.SiLU()]


class LatentModel(nn.Module):
    """The model in TorchRL's RSSM, ``_DreamerV3BlockGRU``."""

    def __init__(
        self, state: int, action: int, hidden: int, belief: int, blocks: int, layers: int = 1
    ) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> InBlocks:
            return InBlocks("gio", blocks, inputs, outputs)

        for name, size in (("belief", belief), ("state", state), ("action", action)):
            part = nn.Sequential(*parts_of_layer(size, hidden, nn.Linear, 1e-4))
            setattr(self, f"{name}_projection", part)
        inputs = [belief + 3 * hidden * blocks] + [belief] * (layers - 1)
        parts = [part for n in inputs for part in parts_of_layer(n, belief, block, 1e-4)]
        self.hidden_layers, self.gates = nn.Sequential(*parts), block(belief, 3 * belief)

    def forward(self, state: Tensor, belief: Tensor, action: Tensor) -> Tensor:
        of: Any = self
        action = action / action.detach().abs().clamp(min=1)
        features = [
            of.belief_projection(belief), of.state_projection(state), of.action_projection(action),
        ]  # fmt: skip
        return updated(belief, features, self.hidden_layers, self.gates, -1.0)


class Deter(nn.Module):
    """R2-Dreamer's."""

    def __init__(
        self, deter: int, stoch: int, action: int, hidden: int, blocks: int, layers: int = 1
    ) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> InBlocks:
            return InBlocks("oig", blocks, inputs, outputs)

        for i, size in enumerate((deter, stoch, action)):
            part = nn.Sequential(*parts_of_layer(size, hidden, nn.Linear, 1e-4))
            setattr(self, f"_dyn_in{i}", part)
        self._dyn_hid = nn.Sequential()
        inputs = [deter + 3 * hidden * blocks] + [deter] * (layers - 1)
        for i, n in enumerate(inputs):
            names = (f"{kind}_{i}" for kind in ("dyn_hid", "norm", "act"))
            for name, part in zip(names, parts_of_layer(n, deter, block, 1e-4), strict=True):
                self._dyn_hid.add_module(name, part)
        self._dyn_gru = block(deter, 3 * deter)

    def forward(self, stoch: Tensor, deter: Tensor, action: Tensor) -> Tensor:
        of: Any = self
        action = action / action.detach().abs().clamp(min=1)
        features = [
            of._dyn_in0(deter), of._dyn_in1(stoch.reshape(len(action), -1)), of._dyn_in2(action),
        ]  # fmt: skip
        return updated(deter, features, self._dyn_hid, self._dyn_gru, -1.0)
