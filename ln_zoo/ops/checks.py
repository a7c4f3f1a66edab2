"""Validate devices, dtypes and sizes of a call, with torch's error messages.

Errors name the layer's arguments and are the same on every kernel. Functions raise
``RuntimeError`` unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ln_zoo.ops.cells import Cell, States, Weights, recurrent_shape
from ln_zoo.ops.norm_records import Records
from ln_zoo.ops.spec import Operands, Spec

_NOT_ON_CPU = (
    "batch_sizes should always be on CPU, got them on {}: make packed data with "
    "torch.nn.utils.rnn.pack_sequence or pack_padded_sequence"
)

# Layers and cells


def check_devices(input: Tensor, /, **others: Tensor | None) -> None:
    """Validate that tensors are on the device of the input; not all torch functions do."""
    device = input.device
    for name, a in others.items():
        if a is not None and a.device != device:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but got {name} is on {a.device}, "
                f"different from the input on {device}"
            )


def check_states(input: Tensor, states: States, sizes: Sequence[tuple[int, ...]]) -> None:
    """Validate size, dtype and device of initial states."""
    for i, (state, size) in enumerate(zip(states, sizes, strict=True)):
        place = f"[{i}]" if len(sizes) > 1 else ""
        if state.shape != size:
            raise RuntimeError(f"Expected hidden{place} size {size}, got {list(state.shape)}")
        if state.device != input.device:
            raise RuntimeError(
                "Input and hidden tensors are not at the same device, found input tensor at "
                f"{input.device} and hidden{place} tensor at {state.device}"
            )
        if state.dtype != input.dtype and not _is_autocast(input):
            raise RuntimeError(
                "Input and hidden tensors are not the same dtype, found input tensor with "
                f"{input.dtype} and hidden{place} tensor with {state.dtype}"
            )


def check_parameters(
    cell: Cell,
    records: Records,
    weights: Weights,
    input: Tensor,
    sizes: tuple[int, int, int],
    suffix: str = "",
    blocks: int = 1,
) -> None:
    """Validate weights, gains and shifts of one direction of one layer.

    ``sizes`` are the features of input, states and output; ``suffix`` ends parameter names;
    ``blocks`` are those of the recurrent weight.
    Outside autocast, weights need the dtype of the input; gains and shifts may have any.
    """
    inputs, hidden, outputs = sizes
    gates, recurrent = cell.gates * hidden, cell.recurrent_gates * hidden
    *given, own, _ = weights
    expected: list[tuple[int, ...]] = [
        (gates, inputs),
        recurrent_shape(recurrent, outputs, blocks),
        (gates,),
        (recurrent,),
        (outputs, hidden),
    ]
    expected += cell.own_shapes(hidden).values()
    names = ["weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr"]
    names += [f"weight_{name}" for name, _ in cell.weights]
    end = f"_{suffix}" if suffix else ""
    for name, a, size in zip(names, (*given, *own), expected, strict=True):
        if a is None:
            continue
        _check_parameter(f"{name}{end}", a, input, size)
        if a.dtype != input.dtype and not _is_autocast(input):
            raise RuntimeError(
                "Input and parameter tensors are not the same dtype, found input tensor with "
                f"{input.dtype} and parameter tensor {name}{end} with {a.dtype}"
            )
    begin = f"sites.{suffix}." if suffix else "sites."
    for place in cell.places:
        record = records[place.role]
        if record is None or record.identity:
            continue
        size = (sum(place.sizes(hidden)),)
        for name, a in (("gain", record.gain), ("shift", record.shift)):
            if a is not None:
                _check_parameter(f"{begin}{place.role}.{name}", a, input, size)


def _check_parameter(name: str, a: Tensor, input: Tensor, size: tuple[int, ...]) -> None:
    if a.device != input.device:
        raise RuntimeError(
            "Input and parameter tensors are not at the same device, found input tensor at "
            f"{input.device} and parameter tensor {name} at {a.device}"
        )
    if a.shape != size:
        raise RuntimeError(f"Expected {name} size {size}, got {list(a.shape)}")


def _is_autocast(input: Tensor) -> bool:
    kind = input.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def check_packed(data: Tensor, batch_sizes: Tensor) -> None:
    """Validate packed data (total, I) and the active examples of each step, (T,).

    ValueError if ``batch_sizes`` are not on the CPU.
    """
    if batch_sizes.device.type != "cpu":
        raise ValueError(_NOT_ON_CPU.format(batch_sizes.device))
    if batch_sizes.dim() != 1 or batch_sizes.dtype != torch.int64:
        raise RuntimeError(
            "batch_sizes of packed data must be whole numbers (T,) of torch.int64, got "
            f"{tuple(batch_sizes.shape)} of {batch_sizes.dtype}"
        )
    if data.dim() != 2:
        raise RuntimeError(f"input must have 2 dimensions, got {data.dim()}")
    sizes, rows = batch_sizes.tolist(), data.shape[0]
    if not sizes:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    if sum(sizes) != rows or sizes != sorted(sizes, reverse=True) or sizes[-1] < 0:
        few = f"{sizes[:8]}" if len(sizes) <= 8 else f"{sizes[:8]} and {len(sizes) - 8} more"
        raise RuntimeError(
            f"batch_sizes of packed data must never grow and sum to its {rows} rows, got {few}: "
            "make packed data with torch.nn.utils.rnn.pack_sequence or pack_padded_sequence"
        )


# Operators


def check_operands(operands: Operands, spec: Spec, batch_sizes: Tensor | None) -> None:
    """Validate the tensors of an operator call.

    ValueError if ``batch_sizes`` are not on the CPU.
    """
    x, w_hh, h0 = operands.x, operands.w_hh, operands.h0
    form = "(T, N, I)" if batch_sizes is None else "(total, I)"
    if x.dim() != form.count(",") + 1 or w_hh.dim() != 2 or h0.dim() != 2 or not len(x):
        raise RuntimeError(
            f"Expected x {form} with T at least 1, w_hh (G, H) and h0 (N, H), got "
            f"{tuple(x.shape)}, {tuple(w_hh.shape)} and {tuple(h0.shape)}"
        )
    examples = x.shape[1]
    if batch_sizes is not None:
        check_packed(x, batch_sizes)
        examples = int(batch_sizes[0])
    hidden, cell_state = w_hh.shape[1], spec.arithmetic.cell_state
    first, second, out = (place.scale for place in spec.places)
    wide = torch.promote_types(x.dtype, torch.float32)
    width, vector, state = (spec.gates * hidden,), (hidden,), (examples, hidden)
    for name, a, size, dtype, needed in (
        ("w_ih", operands.w_ih, (*width, x.shape[-1]), x.dtype, True),
        ("w_hh", w_hh, (*width, hidden), x.dtype, True),
        ("h0", h0, state, wide, True),
        ("c0", operands.c0, state, wide, cell_state),
        ("bias", operands.bias, width, wide, False),
        ("bias_hn", operands.bias_hn, vector, wide, False),
        ("gain_input", operands.gain_input, width, wide, first),
        ("gain_recurrent", operands.gain_recurrent, width, wide, second),
        ("gain_out", operands.gain_out, vector, wide, out),
        ("shift_out", operands.shift_out, vector, wide, out and cell_state),
        ("bias_inner", operands.bias_inner, width, wide, False),
    ):
        if a is None and needed:
            raise RuntimeError(f"{spec.cell} needs {name}, got None")
        check_form(name, a, size, dtype, x)


def check_masks(masks: Sequence[Tensor | None], spec: Spec, operands: Operands) -> None:
    """Validate masks of recurrent dropout, zoneout of h and c, and resets; operands are valid."""
    x, h0 = operands.x, operands.h0
    dropout, of_h, of_c, reset = masks
    if of_c is not None and not spec.arithmetic.cell_state:
        raise RuntimeError(
            f"Expected no zoneout_c, since {spec.cell} has no c, got {list(of_c.shape)}"
        )
    rows = (*x.shape[:-1], h0.shape[1])
    check_form("dropout", dropout, tuple(h0.shape), h0.dtype, x)
    check_form("zoneout_h", of_h, rows, torch.bool, x)
    check_form("zoneout_c", of_c, rows, torch.bool, x)
    check_form("reset", reset, (x.shape[:-1].numel(),), torch.bool, x)


def check_together(batch_sizes: Tensor | None, /, x: Tensor, **others: Tensor | None) -> None:
    """Validate devices only, for calls with a tensor on the meta device.

    ValueError if ``batch_sizes`` are not on the CPU.
    """
    check_devices(x, **others)
    if batch_sizes is not None and batch_sizes.device.type != "cpu":
        raise ValueError(_NOT_ON_CPU.format(batch_sizes.device))


def check_form(
    name: str, a: Tensor | None, size: tuple[int, ...], dtype: torch.dtype, input: Tensor
) -> None:
    """Validate size, dtype and device (the device of ``input``) of a tensor or None."""
    if a is None:
        return
    check_devices(input, **{name: a})
    if a.dtype != dtype:
        raise RuntimeError(f"Expected {name} to have dtype {dtype}, got {a.dtype}")
    if a.shape != size:
        raise RuntimeError(f"Expected {name} size {size}, got {list(a.shape)}")


def check_given(
    given: Sequence[Tensor | None], widths: Sequence[int], needed: Sequence[bool], like: Tensor
) -> None:
    """Validate given statistics, mean and variance (2, K, F) with F in ``widths``, where needed."""
    for a, width, wanted in zip(given, widths, needed, strict=True):
        if a is None:
            if wanted:
                raise RuntimeError("a place with given statistics has none")
            continue
        rows = a.shape[1] if a.dim() == 3 and a.shape[1] else 1
        check_form("statistics", a, (2, rows, width), like.dtype, like)
