"""Moments over examples of all processes, for training on several devices."""

from __future__ import annotations

import math

import torch
from torch import Tensor, distributed
from torch.nn import functional as F


def several_processes() -> bool:
    """Whether a process group with more than one process is initialised."""
    there = distributed.is_available() and distributed.is_initialized()
    return there and distributed.get_world_size() > 1


def joint_moments(a: Tensor, dims: tuple[int, ...]) -> tuple[int, Tensor, Tensor]:
    """Number, mean and biased variance of the examples of all processes.

    Processes may have different numbers of examples, or none. Moments are combined by the formula
    of Chan, Golub and LeVeque (1979), without cancellation, and are bitwise equal in all processes.
    One all-reduce in the forward and one in the backward pass. Gradients flow to the values of all
    processes. Averages over ``dims``, which have size 1 in the results.
    """
    from torch.distributed.nn.functional import all_reduce  # not in every build of torch

    examples = math.prod(a.shape[d] for d in dims)
    if examples:
        var, mean = torch.var_mean(a, dims, correction=0, keepdim=True)
    else:
        # The weight is 0, but all processes need the same graph.
        var = mean = a.sum(dims, keepdim=True)
    features = mean.numel()
    own = torch.cat([mean.flatten(), var.flatten(), mean.new_tensor([examples])])
    rank, world = distributed.get_rank(), distributed.get_world_size()
    padded = F.pad(own.unsqueeze(0), (0, 0, rank, world - rank - 1))
    rows = all_reduce(padded, group=distributed.group.WORLD)
    means, variances, sizes = rows.split([features, features, 1], dim=1)
    shares = sizes / sizes.sum()
    joint = (shares * means).sum(0)
    spread = (shares * (variances + (means - joint).square())).sum(0)
    return int(sizes.sum()), joint.view_as(mean), spread.view_as(mean)


def extremes(value: int, device: torch.device) -> tuple[int, int]:
    """Smallest and largest value over all processes."""
    found = torch.tensor([-value, value], device=device)
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    smallest, largest = found.tolist()
    return -smallest, largest
