"""The CPU engine in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from ln_zoo.kernels.native import build
from ln_zoo.kernels.native.batch import NativeBatchSteps
from ln_zoo.kernels.native.runtime import empty, unavailable_reason
from ln_zoo.kernels.native.steps import STATS, NativeSteps
from ln_zoo.ops.engines.base import Steps
from ln_zoo.ops.spec import Operands, Spec, unsupported_places


class NativeEngine:
    """C++ time steps, for float32 and bfloat16 on the CPU; over examples, float32 only."""

    name = "native"
    title = "C++ loops"
    device = "cpu"
    has_noise = True

    def missing(self) -> str | None:
        return build.status().reason

    def unsupported_reason(
        self, spec: Spec, x: Tensor, w_hh: Tensor, dtype: torch.dtype, examples: int = 1
    ) -> str | None:
        if x.device.type != self.device:
            return f"it runs on the CPU, not on {x.device.type}"
        if dtype not in (torch.float32, torch.bfloat16):
            return f"it has no products in {_word(dtype)}"
        if spec.examples:
            if dtype != torch.float32:
                return f"it has no steps over a batch in {_word(dtype)}"
            reason = unsupported_places(spec.places)
            if reason is not None:
                return reason
        return unavailable_reason()

    def stats(self, spec: Spec) -> int:
        return 0 if spec.examples else STATS

    def empty(self, *size: int, like: Tensor, dtype: torch.dtype, scratch: str = "") -> Tensor:
        return empty(*size, like=like, dtype=dtype, scratch=scratch)

    def prepare(self, spec: Spec, operands: Operands, backward: bool) -> Steps:
        kind = NativeBatchSteps if spec.examples else NativeSteps
        return kind(spec, operands, backward)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
