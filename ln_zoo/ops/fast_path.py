"""The choice of a fast way to run a recurrent layer."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ln_zoo.ops.cells import Cell, States, Weights
from ln_zoo.ops.records import Records
from ln_zoo.ops.torch_rnn import TorchRNN


class Kernel(Protocol):
    """A fast way to run all layers and directions of a recurrent layer.

    One that runs a single direction becomes a kernel through `ln_zoo.ops.recurrence.stack`.
    """

    @property
    def name(self) -> str:
        """What the log calls it."""

    def refuses(self, cell: Cell, records: Sequence[Records], x: Tensor) -> str | None:
        """The reason why it cannot take this call, or ``None``; arguments as for `pick`."""

    def __call__(
        self,
        cell: Cell,
        records: Sequence[Records],
        x: Tensor,
        batch_sizes: Tensor | None,
        states: States,
        weights: Sequence[Weights],
        *,
        bidirectional: bool,
        dropout: float,
        training: bool,
    ) -> tuple[Tensor, States]:
        """Outputs and final states.

        Args:
            cell: the cell.
            records: what happens to summed inputs, by role, for each direction of each layer.
            x: padded (T, N, I) or packed (total, I).
            batch_sizes: of packed data, (T,); ``None`` says that x is padded.
            states: initial states, each (layers * directions, N, H).
            weights: effective weights, one for each direction of each layer.
            bidirectional: whether each layer has a reverse direction.
            dropout: probability of a zero between two layers.
            training: whether the layer is in training mode.
        """


#: Kernels in order of preference: the first that does not refuse is taken.
KERNELS: list[Kernel] = [
    TorchRNN(),
]


def pick(cell: Cell, records: Sequence[Records], x: Tensor) -> Kernel | None:
    """The kernel for this call; ``None`` stands for the generic loop, which can do everything.

    The environment variable ``LN_ZOO_KERNELS=0``, read at each call, turns all kernels off. Each
    reason for a refusal is logged once, to the logger ``ln_zoo``.

    Args:
        cell: the cell.
        records: what happens to summed inputs, by role, for each direction of each layer; a record
            ``None`` says that only the strategy knows.
        x: padded (T, N, I) or packed (total, I) input.

    Example:
        >>> from ln_zoo.ops.cells import CELLS
        >>> from ln_zoo.ops.records import RowNorm
        >>> plain, scaled = RowNorm((8,)), RowNorm((8,), scale=True)
        >>> pick(CELLS["GRU"], [{"input": plain, "recurrent": plain}], torch.randn(5, 2, 3)).name
        "torch's fused loop"
        >>> pick(CELLS["GRU"], [{"input": plain, "recurrent": scaled}], torch.randn(5, 2, 3))
    """
    if os.environ.get("LN_ZOO_KERNELS") == "0":
        return None
    for kernel in KERNELS:
        reason = kernel.refuses(cell, records, x)
        if reason is None:
            return kernel
        if not torch.compiler.is_compiling():
            _log_once(f"{cell.name}: not run by {kernel.name}: {reason}")
    return None


@functools.cache
def _log_once(message: str) -> None:
    logging.getLogger("ln_zoo").info(message)
