"""Register all kernels, and select one for a recurrent layer or a step of a cell."""

from __future__ import annotations

import torch

from ln_zoo.kernels.cluster.engine import ClusterEngine
from ln_zoo.kernels.native.draw import NativeDraw
from ln_zoo.kernels.native.engine import NativeEngine
from ln_zoo.kernels.native.layers import NativeLayers
from ln_zoo.kernels.native.mixed_precision import MixedPrecision
from ln_zoo.kernels.native.window import NativeWindow
from ln_zoo.kernels.triton import TritonEngine
from ln_zoo.kernels.triton.draw import TritonDraw
from ln_zoo.kernels.triton.window import TritonWindow
from ln_zoo.ops.engines.aten import AtenEngine
from ln_zoo.ops.engines.torch_rnn import TorchRNN
from ln_zoo.ops.loops.draw import DrawKernel
from ln_zoo.ops.loops.window import WindowKernel
from ln_zoo.ops.recurrence import RecurrentCall
from ln_zoo.ops.recurrent_kernel import LayersKernel, Recurrence
from ln_zoo.ops.registry import KERNELS, select

#: Minimum rows and steps of packed sequences for which our loops beat torch's.
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

    The environment variable ``LN_ZOO_KERNELS``, read at each call, restricts the choice: ``0``
    disables all kernels, ``1`` (default) allows all, a comma-separated list allows the named ones.
    The choice and its reasons are logged once, to the logger ``ln_zoo``.

    Raises:
        ValueError: if ``LN_ZOO_KERNELS`` contains an unknown name.
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

    Padded on a CPU, a GRU or a simple RNN takes 0.1 to 0.8 of torch's time, an LSTM 0.4 to 1.0
    (docs/results/performance.md). On packed sequences torch is up to 20 times slower, except for
    few steps or rows. Other dtypes follow torch's own precision rules.
    """
    x, sizes = call.x, call.batch_sizes
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    if torch.compiler.is_compiling():
        return False  # unsupported by torch's loop, and sizes may be symbolic
    rows = x.numel() // max(1, x.shape[-1])
    return sizes is None or (rows >= _PACKED_ROWS and len(sizes) >= _PACKED_STEPS)
