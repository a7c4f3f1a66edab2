"""One training step of every layer that may run on a kernel: ``python every_layer.py FILE``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ln_zoo import GRU, LSTM, RNN, BatchNorm, GRUCell, LayerNorm, LSTMCell, RNNCell
from ln_zoo.layers import DRAWNetwork, WindowLSTM

NORMS = {"none": None, "layer": LayerNorm(), "batch": BatchNorm()}


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, PackedSequence):
        return [value.data]
    if isinstance(value, Tensor):
        return [value]
    return [] if value is None else [a for part in value for a in flat(part)]


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The same numbers in every precision."""
    return torch.randn(shape).to(dtype)


def cases(dtype: torch.dtype) -> Iterator[tuple[str, nn.Module, Callable[[Any], Any]]]:
    """Name, module, and a call of it."""
    for name, norm in NORMS.items():
        for cls in (LSTM, GRU, RNN):
            layer = cls(3, 5, num_layers=2, bidirectional=True, norm=norm)
            x = draw((20, 4, 3), dtype)
            packed = pack_sequence([a[: 20 - 6 * i] for i, a in enumerate(x.unbind(1))])
            yield f"{cls.__name__} {name}", layer, lambda m, x=x: m(x)
            yield f"{cls.__name__} {name} packed", layer, lambda m, x=packed: m(x)
        for cls in (LSTMCell, GRUCell, RNNCell):
            cell, x = cls(3, 5, norm=norm), draw((4, 3), dtype)
            yield f"{cls.__name__} {name}", cell, lambda m, x=x: m(x, step=0)
        window = WindowLSTM(3, 6, character_size=5, components=2, norm=norm)
        x, text = draw((20, 4, 3), dtype), torch.eye(5, dtype=dtype).expand(4, 5, 5)
        yield f"window {name}", window, lambda m, x=x, text=text: m(x, text)[:3]
        network = DRAWNetwork(
            9, 8, hidden_size=8, latent_size=2, read_size=2, write_size=3, norm=norm
        )
        images, noise = torch.rand(4, 9, 8).to(dtype), draw((3, 4, 2), dtype)
        yield f"DRAW {name}", network, lambda m, x=images, e=noise: m(x, e)[:3]


def results() -> dict[str, list[Tensor]]:
    """Outputs, states and gradients by case, in both precisions; the seed is fixed."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(1)
        for name, module, call in cases(dtype):
            outputs = flat(call(module.to(dtype)))
            sum(a.square().sum() for a in outputs).backward()
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            found[f"{name} {dtype}"] = [a.detach().clone() for a in (*outputs, *gradients)]
            module.zero_grad()
    return found


if __name__ == "__main__":
    torch.save(results(), sys.argv[1])
    assert not any(name.startswith("ln_zoo.kernels") for name in sys.modules)
