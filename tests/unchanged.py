"""Modules that a call leaves as they were."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """States, modes and random numbers are as before; there are no gradients and no hooks."""
    state, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    modes = [each.training for each in module.modules()]
    yield
    assert torch.equal(torch.get_rng_state(), random)
    assert [each.training for each in module.modules()] == modes
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
    assert all(p.grad is None for p in module.parameters())
    assert module.state_dict().keys() == state.keys()
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name
