"""Select a kernel for a recurrent layer or a step of a cell; register those in torch functions."""

from __future__ import annotations

import torch

from ln_zoo.ops.engines.aten import AtenEngine
from ln_zoo.ops.engines.torch_rnn import TorchRNN
from ln_zoo.ops.recurrence import RecurrentCall
from ln_zoo.ops.recurrent_kernel import LayersKernel, Recurrence
from ln_zoo.ops.registry import register, select

#: Minimum rows and steps of packed sequences for which other loops beat torch's.
_PACKED_ROWS, _PACKED_STEPS = 257, 8
register(TorchRNN(), Recurrence(AtenEngine()))


def select_kernel(call: RecurrentCall) -> LayersKernel | None:
    """Select the kernel for a call; None for the generic loop, which supports everything.

    The environment variable ``LN_ZOO_KERNELS``, read at each call, restricts the choice: ``0``
    disables all kernels, ``1`` (default) allows all, a comma-separated list allows the named ones.
    The choice and its reasons are logged once, to the logger ``ln_zoo``.

    Raises:
        ValueError: if ``LN_ZOO_KERNELS`` contains an unknown name.
    """
    last = ("torch", "aten", "generated") if _torch_is_slow(call) else ()
    kinds = call.weights[0].noise.kinds
    what = f"{call.cell.name} with {' and '.join(kinds)}" if kinds else call.cell.name
    found: LayersKernel | None = select("layers", what, (call,), "the generic loop", last)
    return found


def select_step_kernel(call: RecurrentCall) -> LayersKernel | None:
    """Select the kernel for a single step of a cell; None for torch functions."""
    name, call = call.cell.name, call._replace(x=call.x.unsqueeze(0))
    found: LayersKernel | None = select("step", f"a step of {name}", (call,), "functions of torch")
    return found


def _torch_is_slow(call: RecurrentCall) -> bool:
    """Whether C++ kernels beat torch's loop without normalisation.

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
