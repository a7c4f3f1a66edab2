"""The engine for Hopper GPUs."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ln_zoo.kernels.cluster.geometry import (
    CELLS,
    MAX_BLOCKS,
    MAX_HIDDEN,
    STORAGE,
    Problem,
    groups_of,
    problem_of,
)
from ln_zoo.ops.lowering import unsupported_places
from ln_zoo.ops.registry import untraced
from ln_zoo.ops.spec import Examples, Operands, Spec

if TYPE_CHECKING:
    from ln_zoo.kernels.cluster.persistent import Persistent


class ClusterEngine:
    """Persistent kernels on thread-block clusters (compute capability 9.0)."""

    name = "cluster"
    title = "persistent CUDA kernels"
    rank = 10
    device = "cuda"
    has_noise = True

    def missing(self) -> str | None:
        if not torch.cuda.is_available():
            return "torch finds no GPU here"
        return _unsupported_gpu(torch.device("cuda"))

    def unsupported_reason(
        self, spec: Spec, x: Tensor, w_hh: Tensor, dtype: torch.dtype, examples: int = 1
    ) -> str | None:
        if x.device.type != self.device:
            return f"the input is on the device {x.device.type}, not on an NVIDIA GPU"
        if spec.cell not in CELLS:
            return f"it has no {spec.cell}: its states are unbounded, and halves are not"
        if dtype not in STORAGE:
            return f"it has no kernels for {str(dtype).removeprefix('torch.')}"
        if spec.examples:
            reason = unsupported_places(spec.places)
            if reason is not None:
                return reason
            if len({place.batch for place in spec.places if isinstance(place, Examples)}) > 1:
                return "some places use batch statistics, others given ones"
        elif len(groups := groups_of(spec)) > 1:
            return f"statistics of both terms run over different gates, {groups[0]} and {groups[1]}"
        return _unsupported_gpu(x.device) or _unsupported_size(
            *spec.numbers(), w_hh.shape[1], dtype, examples if spec.examples else 1, x.device
        )

    def stats(self, spec: Spec) -> int:
        """Reciprocal deviations of each product, then of the output, and its mean."""
        return problem_of(spec, 1, torch.float32).stats

    def empty(self, *size: int, like: Tensor, dtype: torch.dtype, scratch: str = "") -> Tensor:
        return torch.empty(size, dtype=dtype, device=like.device)

    def prepare(self, spec: Spec, operands: Operands, backward: bool) -> Persistent:
        from ln_zoo.kernels.cluster import batch, persistent

        kind = batch.PersistentBatch if spec.examples else persistent.Persistent
        return kind(spec, operands)


@untraced
@functools.cache
def _unsupported_gpu(device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"the GPU has compute capability {major}.{minor}, not 9.0"
    from ln_zoo.kernels.cluster import driver, persistent

    reason = driver.missing()
    if reason is None:
        try:
            persistent.resident_clusters(device)
        except driver.CudaError as error:
            return str(error)
    return reason


@untraced
def _unsupported_size(
    integers: tuple[int, ...],
    floats: tuple[float, ...],
    hidden: int,
    dtype: torch.dtype,
    examples: int,
    device: torch.device,
) -> str | None:
    problem = problem_of(Spec.of_numbers(integers, floats), hidden, dtype)
    if hidden <= MAX_HIDDEN and _fits(problem, examples, device):
        return None
    what = f"{examples} rows and " if problem.batch else ""
    return f"{what}the weights of {hidden} units do not fit into a cluster of {MAX_BLOCKS} blocks"


@functools.cache
def _fits(problem: Problem, examples: int, device: torch.device) -> bool:
    """Whether both directions have a layout, with every feature that a call may add."""
    from ln_zoo.kernels.cluster.choice import layouts
    from ln_zoo.kernels.cluster.persistent import resident_clusters

    most = replace(problem, lengths=True, dropout=not problem.batch, resets=not problem.batch)
    return all(
        layouts(replace(most, zoneout=zoneout), backward, examples, resident_clusters(device))
        for backward in (False, True)
        for zoneout in {False, not problem.batch}
    )
