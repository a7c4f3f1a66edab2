"""Moments over the examples of all processes, for training on several devices."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional as F


def several_processes() -> bool:
    """Whether there is a process group of more than one process."""
    there = distributed.is_available() and distributed.is_initialized()
    return there and distributed.get_world_size() > 1


def joint_moments(a: Tensor, dims: tuple[int, ...]) -> tuple[int, Tensor, Tensor]:
    """Number, mean and biased variance of the examples that all processes hold together.

    Each process has its own number of examples, which may be 0. Their moments are combined by the
    formula of Chan, Golub and LeVeque (1979), which takes no difference of large numbers. Every
    process gets the same bits. There is one exchange forward and one backward.

    Args:
        a: values, any shape; all processes agree on the sizes of the axes that are kept.
        dims: the axes to average over.

    Returns:
        The number of examples, their mean and variance, each with the averaged axes as 1. Gradients
        flow to the values of all processes.
    """
    examples = math.prod(a.shape[d] for d in dims)
    if examples:
        var, mean = torch.var_mean(a, dims, correction=0, keepdim=True)
    else:
        # Without examples there are no moments, and the weight below is 0; the graph must still be
        # that of the other processes.
        var = mean = a.sum(dims, keepdim=True)
    features = mean.numel()
    own = torch.cat([mean.flatten(), var.flatten(), mean.new_tensor([examples])])
    rank, world = distributed.get_rank(), distributed.get_world_size()
    rows = _SumOverProcesses.apply(F.pad(own.unsqueeze(0), (0, 0, rank, world - rank - 1)))
    means, variances, sizes = rows.split([features, features, 1], dim=1)
    shares = sizes / sizes.sum()
    joint = (shares * means).sum(0)
    spread = (shares * (variances + (means - joint).square())).sum(0)
    return int(sizes.sum()), joint.view_as(mean), spread.view_as(mean)


def extremes(value: int, device: torch.device) -> tuple[int, int]:
    """The smallest and the largest of the numbers that the processes gave."""
    found = torch.tensor([-value, value], device=device)
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    smallest, largest = found.tolist()
    return -smallest, largest


class _SumOverProcesses(torch.autograd.Function):
    """The sum over processes; gradients from any process flow back to all of them."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        total = a.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        found: Tensor = _SumOverProcesses.apply(grad)
        return found
