"""All kernels, and the choice of one for a recurrent layer and for a step of a cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ln_zoo.ops.cells import Cell, States, Weights
from ln_zoo.ops.engines.aten import AtenEngine
from ln_zoo.ops.engines.native.draw import NativeDraw
from ln_zoo.ops.engines.native.engine import NativeEngine
from ln_zoo.ops.engines.native.one_call import ONE_CALL_ROWS, OneCall
from ln_zoo.ops.engines.native.window import NativeWindow
from ln_zoo.ops.engines.torch_rnn import TorchRNN
from ln_zoo.ops.engines.triton import TritonEngine
from ln_zoo.ops.engines.triton.draw import TritonDraw
from ln_zoo.ops.loops.draw import DrawKernel
from ln_zoo.ops.loops.window import WindowKernel
from ln_zoo.ops.records import Records
from ln_zoo.ops.recurrent_kernel import Recurrence
from ln_zoo.ops.registry import KERNELS, Kernel, select


class LayersKernel(Kernel, Protocol):
    """A fast way to run all layers and directions of a recurrent layer.

    One that runs a single direction becomes a kernel through `ln_zoo.ops.recurrence.stack`.
    """

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


#: Multiplications of all steps from which our own loop of a GRU is faster than torch's.
_LARGE = 2**21
_TRITON, _NATIVE, _ATEN = TritonEngine(), NativeEngine(), AtenEngine()
KERNELS += [
    TorchRNN(),
    Recurrence(_TRITON),
    OneCall(),
    Recurrence(_NATIVE),
    Recurrence(_ATEN),
    WindowKernel(_NATIVE, NativeWindow),
    DrawKernel(_TRITON, TritonDraw),
    DrawKernel(_NATIVE, NativeDraw),
]


def pick(
    cell: Cell, records: Sequence[Records], x: Tensor, weights: Sequence[Weights]
) -> LayersKernel | None:
    """The kernel for this call; ``None`` stands for the generic loop, which can do everything.

    The environment variable ``LN_ZOO_KERNELS``, read at each call, chooses among kernels: ``0``
    turns all off, ``1`` (the default) allows all, and names with commas between them allow those
    alone. What runs a cell, and each reason for a refusal, is logged once, to the logger
    ``ln_zoo``.

    Args:
        cell: the cell.
        records: what happens to summed inputs, by role, for each direction of each layer; a record
            ``None`` says that only the strategy knows.
        x: padded (T, N, I) or packed (total, I) input.
        weights: effective weights, one for each direction of each layer.

    Raises:
        ValueError: if ``LN_ZOO_KERNELS`` names no kernel.

    Example:
        >>> from ln_zoo.ops.cells import CELLS
        >>> from ln_zoo.ops.records import RowNorm
        >>> x, weights = torch.randn(500, 2, 3), Weights(torch.randn(6, 3), torch.randn(6, 2))
        >>> plain, scaled = RowNorm((4, 2)), RowNorm((4, 2), scale=True)
        >>> pick(CELLS["GRU"], [{"input": plain, "recurrent": plain}], x, [weights]).name
        'torch'
        >>> pick(CELLS["GRU"], [{"input": None, "recurrent": scaled}], x, [weights])
    """
    last = ("torch", "aten") if _ours_is_faster(cell, x, weights) else ()
    call = (cell, records, x, weights)
    kinds = weights[0].noise.kinds
    what = f"{cell.name} with {' and '.join(kinds)}" if kinds else cell.name
    found: LayersKernel | None = select("layers", what, call, "the generic loop", last)
    return found


def pick_step(cell: Cell, records: Records, x: Tensor, weights: Weights) -> LayersKernel | None:
    """The same for a single step of a cell; ``None`` stands for functions of torch.

    Args:
        cell: the cell.
        records: what happens to summed inputs, by role.
        x: input, (N, I).
        weights: the effective weights.
    """
    call = (cell, [records], x.unsqueeze(0), [weights])
    found: LayersKernel | None = select(
        "step", f"a step of {cell.name}", call, "functions of torch"
    )
    return found


def _ours_is_faster(cell: Cell, x: Tensor, weights: Sequence[Weights]) -> bool:
    """Whether the native kernels beat torch's own loop where nothing is normalised.

    On CPUs a call in one piece does, and the loops take 0.5 to 0.9 of the time for a GRU
    (docs/results/performance.md), but not where calls are so small that they cost what their
    Python costs. For an LSTM the two are equal. Nothing was measured in half precision.
    """
    if x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    if torch.compiler.is_compiling():
        return False  # torch's loop is out there anyhow, and sizes may be symbols
    rows = x.numel() // max(1, x.shape[-1])
    if x.dim() == 3 and rows <= ONE_CALL_ROWS:
        return True
    return cell.name == "GRU" and rows * weights[0].hh.numel() >= _LARGE
