"""The engine in torch functions, for calls that no other engine supports."""

from __future__ import annotations

import torch
from torch import Tensor

from ln_zoo.ops import memory
from ln_zoo.ops.engines.aten.steps import (
    AtenSteps,
    GRUSteps,
    LightGRUSteps,
    LSTMSteps,
    RNNSteps,
)
from ln_zoo.ops.engines.base import Steps
from ln_zoo.ops.spec import Operands, Rows, Spec

_CELLS: dict[str, type[AtenSteps]] = {
    "LSTM": LSTMSteps,
    "GRU": GRUSteps,
    "light GRU": LightGRUSteps,
}


class AtenEngine:
    """Time steps in torch functions."""

    name = "aten"
    title = "steps in functions of torch"
    rank = 90
    device = None
    has_noise = True

    def missing(self) -> str | None:
        return None

    def unsupported_reason(
        self, spec: Spec, x: Tensor, w_hh: Tensor, dtype: torch.dtype, examples: int = 1
    ) -> str | None:
        return None

    def stats(self, spec: Spec) -> int:
        places = spec.products[1:] if spec.merged else spec.products
        return sum(len(place.groups) for place in places if isinstance(place, Rows))

    def empty(self, *size: int, like: Tensor, dtype: torch.dtype, scratch: str = "") -> Tensor:
        if scratch and like.device.type == "cpu":
            return memory.scratch(f"aten frame {scratch}", *size, dtype=dtype)
        return memory.empty(*size, like=like, dtype=dtype)

    def prepare(self, spec: Spec, operands: Operands, backward: bool) -> Steps:
        return _CELLS.get(spec.cell, RNNSteps)(spec, operands, backward)
