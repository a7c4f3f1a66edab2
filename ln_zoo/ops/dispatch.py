"""Register all kernels, and select one for a recurrent layer or a step of a cell."""

from __future__ import annotations

import torch

from ln_zoo.ops.engines.aten import AtenEngine
from ln_zoo.ops.engines.cluster.engine import ClusterEngine
from ln_zoo.ops.engines.native.draw import NativeDraw
from ln_zoo.ops.engines.native.engine import NativeEngine
from ln_zoo.ops.engines.native.layers import NativeLayers
from ln_zoo.ops.engines.native.mixed_precision import MixedPrecision
from ln_zoo.ops.engines.native.window import NativeWindow
from ln_zoo.ops.engines.torch_rnn import TorchRNN
from ln_zoo.ops.engines.triton import TritonEngine
from ln_zoo.ops.engines.triton.draw import TritonDraw
from ln_zoo.ops.engines.triton.window import TritonWindow
from ln_zoo.ops.loops.draw import DrawKernel
from ln_zoo.ops.loops.window import WindowKernel
from ln_zoo.ops.recurrence import RecurrentCall
from ln_zoo.ops.recurrent_kernel import LayersKernel, Recurrence
from ln_zoo.ops.registry import KERNELS, select

#: Rows, and steps, of packed sequences from which our own loops are faster than torch's.
_PACKED_ROWS, _PACKED_STEPS = 257, 8
_TRITON, _NATIVE, _ATEN = TritonEngine(), NativeEngine(), AtenEngine()
KERNELS += [
    Recurrence(ClusterEngine()),
    TorchRNN(),
    Recurrence(_TRITON),
    MixedPrecision(NativeLayers()),
    MixedPrecision(Recurrence(_NATIVE)),
    MixedPrecision(NativeLayers(), "step"),
    NativeLayers(),
    Recurrence(_NATIVE),
    Recurrence(_ATEN),
    WindowKernel(_TRITON, TritonWindow),
    WindowKernel(_NATIVE, NativeWindow),
    DrawKernel(_TRITON, TritonDraw),
    DrawKernel(_NATIVE, NativeDraw),
]


def select_kernel(call: RecurrentCall) -> LayersKernel | None:
    """Select the kernel for a call; None for the generic loop, which supports everything.

    The environment variable ``LN_ZOO_KERNELS``, read at each call, chooses among kernels: ``0``
    turns all off, ``1`` (the default) allows all, and a comma-separated list of names allows only
    those. What runs a cell, and each reason for a refusal, is logged once, to the logger
    ``ln_zoo``.

    Args:
        call: the call.

    Raises:
        ValueError: if ``LN_ZOO_KERNELS`` names no kernel.

    Example:
        >>> from ln_zoo.ops.cells import CELLS, Weights
        >>> from ln_zoo.ops.norm_records import RowNorm
        >>> x, weights = torch.randn(500, 2, 3), Weights(torch.randn(6, 3), torch.randn(6, 2))
        >>> plain = {"input": RowNorm((4, 2)), "recurrent": RowNorm((4, 2))}
        >>> states = (torch.zeros(1, 2, 2),)
        >>> call = RecurrentCall(CELLS["GRU"], [plain], x, None, states, [weights])
        >>> select_kernel(call._replace(x=x.double())).name
        'torch'
        >>> select_kernel(call._replace(records=[plain | {"input": None}]))
    """
    last = ("torch", "aten") if _ours_is_faster(call) else ()
    kinds = call.weights[0].noise.kinds
    what = f"{call.cell.name} with {' and '.join(kinds)}" if kinds else call.cell.name
    found: LayersKernel | None = select("layers", what, (call,), "the generic loop", last)
    return found


def select_step_kernel(call: RecurrentCall) -> LayersKernel | None:
    """Select the kernel for a single step of a cell; None for torch functions."""
    name, call = call.cell.name, call._replace(x=call.x.unsqueeze(0))
    found: LayersKernel | None = select("step", f"a step of {name}", (call,), "functions of torch")
    return found


def _ours_is_faster(call: RecurrentCall) -> bool:
    """Whether the native kernels beat torch's loop without normalisation.

    On CPUs they do in padded calls: a GRU or a simple RNN takes 0.14 to 0.8 of the time, an LSTM
    0.5 to 1.2 (docs/results/performance.md). Of packed sequences torch runs each step by itself,
    which takes up to 20 times as long, unless there are few steps or rows. In other precisions
    torch's runs, which has its own rules for the precision of results.
    """
    x, sizes = call.x, call.batch_sizes
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    if torch.compiler.is_compiling():
        return False  # torch's loop refuses these calls anyway, and sizes may be symbolic
    rows = x.numel() // max(1, x.shape[-1])
    return sizes is None or (rows >= _PACKED_ROWS and len(sizes) >= _PACKED_STEPS)
