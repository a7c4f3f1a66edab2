"""Functional recurrent layers: cells, norm records, the generic loop and the kernels."""

from typing import TYPE_CHECKING, Any

from ln_zoo.ops import registry
from ln_zoo.ops.calls import Description, run_call, run_step
from ln_zoo.ops.cells import (
    CARRIED_LSTM,
    CELLS,
    DREAMER_GRU,
    DREAMER_GRU_INNER_BIAS,
    JOINT_CARRIED_LSTM,
    JOINT_LSTM,
    LIGHT_GRU,
    PRENORM_GRU,
    WHOLE_GRU,
    Cell,
    Form,
    Place,
    States,
    Weights,
    blocks_of_rows,
    clip_derivative,
    full_weight,
    linear,
    lstm_cell,
    recurrent_shape,
    rows_of_blocks,
)
from ln_zoo.ops.checks import check_devices, check_packed, check_parameters, check_states
from ln_zoo.ops.dispatch import select_kernel, select_step_kernel
from ln_zoo.ops.loops.draw import (
    Affine,
    DrawLSTM,
    Drawn,
    DrawSettings,
    DrawWeights,
    divergence,
    draw_forward,
    select_draw_kernel,
)
from ln_zoo.ops.loops.glimpse import FilterNorm, attention, filterbank
from ln_zoo.ops.loops.window import (
    Windowed,
    WindowOperands,
    select_window_kernel,
    window_weights,
    windowed_lstm,
)
from ln_zoo.ops.norm_records import Record, Records, RowNorm, StepNorm
from ln_zoo.ops.plans import Entries, Plans, Runner
from ln_zoo.ops.recurrence import RecurrentCall, run_layers, scan
from ln_zoo.ops.registry import Kernel
from ln_zoo.ops.regularization import Noise, draw_noise, dropout_mask
from ln_zoo.ops.resets import Segments, join_segments, split_call_at_resets

if TYPE_CHECKING:
    from ln_zoo.ops.registry import KERNELS

__all__ = [
    "CARRIED_LSTM",
    "CELLS",
    "DREAMER_GRU",
    "DREAMER_GRU_INNER_BIAS",
    "JOINT_CARRIED_LSTM",
    "JOINT_LSTM",
    "KERNELS",
    "LIGHT_GRU",
    "PRENORM_GRU",
    "WHOLE_GRU",
    "Affine",
    "Cell",
    "Description",
    "DrawLSTM",
    "DrawSettings",
    "DrawWeights",
    "Drawn",
    "Entries",
    "FilterNorm",
    "Form",
    "Kernel",
    "Noise",
    "Place",
    "Plans",
    "Record",
    "Records",
    "RecurrentCall",
    "RowNorm",
    "Runner",
    "Segments",
    "States",
    "StepNorm",
    "Weights",
    "WindowOperands",
    "Windowed",
    "attention",
    "blocks_of_rows",
    "check_devices",
    "check_packed",
    "check_parameters",
    "check_states",
    "clip_derivative",
    "divergence",
    "draw_forward",
    "draw_noise",
    "dropout_mask",
    "filterbank",
    "full_weight",
    "join_segments",
    "linear",
    "lstm_cell",
    "recurrent_shape",
    "rows_of_blocks",
    "run_call",
    "run_layers",
    "run_step",
    "scan",
    "select_draw_kernel",
    "select_kernel",
    "select_step_kernel",
    "select_window_kernel",
    "split_call_at_resets",
    "window_weights",
    "windowed_lstm",
]


def __getattr__(name: str) -> Any:
    if name == "KERNELS":  # imported on first use
        return registry.kernels()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
