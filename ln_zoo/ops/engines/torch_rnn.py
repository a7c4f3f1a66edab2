"""torch's own fused recurrent loops (cuDNN, oneDNN, native), for cells without normalised sums."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ln_zoo.ops.cells import States
from ln_zoo.ops.precision import no_autocast, product_dtype
from ln_zoo.ops.recurrence import RecurrentCall
from ln_zoo.ops.recurrent_kernel import is_exporting, no_fused_loop_reason
from ln_zoo.ops.registry import Task

_FUNCTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


class TorchRNN:
    """The function behind `torch.nn.LSTM`, `GRU` and `RNN`, on the effective weights.

    One call runs all layers and directions with torch's own dropout, so random numbers match
    `torch.nn`.
    """

    name = "torch"
    title = "torch's fused loop"
    rank = 20
    tasks: tuple[Task, ...] = ("layers",)

    def missing(self) -> str | None:
        return None

    def unsupported_reason(self, call: RecurrentCall) -> str | None:
        cell, records, x = call.cell, call.records, call.x
        if not cell.in_torch:
            return f"torch has no {cell.name}"
        for direction in records:
            for role, record in direction.items():
                if record is None or not record.identity:
                    return f"the {role} site normalises its summed inputs"
        for w in call.weights:
            if w.noise.kinds:
                return f"torch has no {' and '.join(w.noise.kinds)}"
            if cell.blocks(w) > 1:
                return "torch has no recurrent weights in blocks"
        if call.reset is not None:
            return "torch has no resets"
        reason = no_fused_loop_reason()
        if reason is not None:
            return reason
        # Decomposed into 26 nodes for each step, on a GPU too, layers take minutes to compile; an
        # LSTM's backward fails on the CPU where the input needs no gradient (torch 2.13).
        if torch.compiler.is_compiling() and not is_exporting():
            return "torch.compile would unroll torch's loops"
        lstm = _FUNCTIONS[cell.name] is torch.lstm
        if lstm and x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            if dtype == torch.float16:
                return "torch has no LSTM for float16 autocast on the CPU"
            # Needs a oneDNN kernel, which requires AVX-512 (torch 2.13).
            if (
                dtype == torch.bfloat16
                and torch.backends.mkldnn.is_available()
                and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
            ):
                return "torch has no LSTM for bfloat16 autocast on this processor"
        return None

    def __call__(self, call: RecurrentCall) -> tuple[Tensor, States]:
        cell, _, x, batch_sizes, states, weights, bidirectional, dropout, training, *_ = call
        flat = [w for direction in weights for w in direction.tensors if w is not None]
        dropout = dropout if training else 0.0
        # cuDNN rejects expanded states.
        states = tuple(s.contiguous() for s in states)
        on_gpu = x.is_cuda and not is_exporting()
        if on_gpu:
            # Autocast runs cuDNN in float16, also when set to another dtype.
            dtype = product_dtype(x)
            if flat[0].dtype != dtype or len({w.untyped_storage().data_ptr() for w in flat}) > 1:
                flat = in_one_piece(flat, dtype)
            x, states = x.to(dtype), tuple(s.to(dtype) for s in states)
            # cuDNN supports backward in training mode only.
            if torch.is_grad_enabled():
                training = training or any(a.requires_grad for a in (x, *states, *flat))
        hx = states if len(states) > 1 else states[0]
        has_biases = weights[0].bias_ih is not None
        layers = len(weights) // (2 if bidirectional else 1)
        options = (flat, has_biases, layers, dropout, training, bidirectional)
        function = _FUNCTIONS[cell.name]
        with no_autocast(x) if on_gpu else contextlib.nullcontext():
            if batch_sizes is None:
                output, *final = function(x, hx, *options, False)
            else:
                output, *final = function(x, batch_sizes, hx, *options)
        return output, tuple(final)


def in_one_piece(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copy weights, in torch's order, into one block in cuDNN's layout: matrices, then biases.

    Otherwise cuDNN copies them on each call, and torch warns.
    """
    order = sorted(range(len(weights)), key=lambda i: weights[i].dim() == 1)
    piece = torch.cat([weights[i].flatten() for i in order]).to(dtype)
    parts = piece.split([weights[i].numel() for i in order])
    placed = {i: part.view(weights[i].shape) for i, part in zip(order, parts, strict=True)}
    return [placed[i] for i in range(len(weights))]
