"""Repeatable random numbers of a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ln_zoo.analysis.stepping import cpu_seed


@contextmanager
def same_random_numbers(module: nn.Module) -> Iterator[None]:
    """Seed the generators of the CPU and the module's GPUs within the block, then restore them."""
    tensors = (*module.parameters(), *module.buffers())
    cards = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    with torch.random.fork_rng(devices=cards), cpu_seed(0):
        for card in cards:
            torch.cuda.default_generators[card].manual_seed(0)
        yield
