"""Random numbers of a module that is run several times over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ln_zoo.analysis.stepping import drawing


@contextmanager
def same_random_numbers(module: nn.Module) -> Iterator[None]:
    """Within it what a module draws in one run is the same in every run.

    Generators of the CPU and of the cards that the module is on are put back after; those of other
    cards are not touched, as `torch.manual_seed` would do.
    """
    tensors = (*module.parameters(), *module.buffers())
    cards = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    with torch.random.fork_rng(devices=cards), drawing(0):
        for card in cards:
            torch.cuda.default_generators[card].manual_seed(0)
        yield
