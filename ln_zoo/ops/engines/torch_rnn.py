"""torch's own fused recurrent loops (cuDNN, oneDNN, native), for cells that normalise no sums."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ln_zoo.ops.cells import States
from ln_zoo.ops.recurrence import RecurrentCall
from ln_zoo.ops.recurrent_kernel import exporting, transformed
from ln_zoo.ops.registry import Task

_FUNCTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


class TorchRNN:
    """The function behind `torch.nn.LSTM`, `GRU` and `RNN`, on the effective weights.

    It runs all layers and directions in one call, with torch's own dropout, so that random numbers
    are used as `torch.nn` uses them.
    """

    name = "torch"
    title = "torch's fused loop"
    tasks: tuple[Task, ...] = ("layers",)

    def missing(self) -> str | None:
        """Nothing: torch is there."""
        return None

    def unsupported_reason(self, call: RecurrentCall) -> str | None:
        """Why this call is not for torch, or ``None``."""
        cell, records, x = call.cell, call.records, call.x
        if not cell.has_kernels:
            return f"torch has no {cell.name}"
        for direction in records:
            for role, record in direction.items():
                if record is None or not record.identity:
                    return f"the {role} site normalises its summed inputs"
        for w in call.weights:
            if w.noise.kinds:
                return f"torch has no {' and '.join(w.noise.kinds)}"
        reason = transformed()
        if reason is not None:
            return reason
        if x.device.type == "cpu":
            # Compiled, an LSTM's backward fails where the input needs no gradient (torch 2.13), and
            # the others become 26 nodes for each step: compiling takes minutes.
            if torch.compiler.is_compiling() and not exporting():
                return "torch.compile would unroll torch's loops on the CPU"
            if cell.name == "LSTM" and torch.is_autocast_enabled("cpu"):
                dtype = torch.get_autocast_dtype("cpu")
                if dtype == torch.float16:
                    return "torch has no LSTM for float16 autocast on the CPU"
                # It asks oneDNN for one, which has none without AVX-512 (torch 2.13).
                if (
                    dtype == torch.bfloat16
                    and torch.backends.mkldnn.is_available()
                    and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
                ):
                    return "torch has no LSTM for bfloat16 autocast on this processor"
        return None

    def __call__(self, call: RecurrentCall) -> tuple[Tensor, States]:
        """Runs the layers."""
        cell, _, x, batch_sizes, states, weights, bidirectional, dropout, training = call
        hx = states if cell.name == "LSTM" else states[0]
        flat = [w for direction in weights for w in direction.tensors if w is not None]
        has_biases = weights[0].bias_ih is not None
        layers = len(weights) // (2 if bidirectional else 1)
        options = (flat, has_biases, layers, dropout, training, bidirectional)
        function = _FUNCTIONS[cell.name]
        if batch_sizes is None:
            output, *final = function(x, hx, *options, False)
        else:
            output, *final = function(x, batch_sizes, hx, *options)
        return output, tuple(final)
