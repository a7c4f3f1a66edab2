"""The engine of the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ln_zoo.kernels.triton import steps
from ln_zoo.kernels.triton.batch import PreparedBatch
from ln_zoo.kernels.triton.steps import Prepared
from ln_zoo.ops.spec import Operands, Spec, unsupported_places


class TritonEngine:
    """Time steps as Triton kernels, in float32 or bfloat16."""

    name = "triton"
    title = "Triton kernels"
    device = "cuda"
    has_noise = True

    def missing(self) -> str | None:
        if not torch.cuda.is_available():
            return "torch finds no GPU here"
        return steps._unsupported_gpu(torch.device("cuda"), torch.float32)

    def unsupported_reason(
        self, spec: Spec, x: Tensor, w_hh: Tensor, dtype: torch.dtype, examples: int = 1
    ) -> str | None:
        if x.device.type != self.device:
            return f"the input is on the device {x.device.type}, not on an NVIDIA GPU"
        reason = steps._unsupported_gpu(x.device, dtype)
        if reason is not None:
            return reason
        if spec.cell == "light GRU":
            return f"it has no kernels of the {spec.cell}"
        hidden = w_hh.shape[1]
        if spec.examples:
            return unsupported_places(spec.places)
        if hidden > steps.MAX_HIDDEN:
            return f"H is {hidden}; a program holds a row of at most {steps.MAX_HIDDEN}"
        return None

    def stats(self, spec: Spec) -> int:
        """A reciprocal deviation per group of statistics, and the mean of a centred cell state."""
        if spec.examples:
            return 0
        first, second, out = spec.rows
        if spec.gates == 1:
            return int(out.scale)
        return sum(len(rows.groups) for rows in (first, second) if rows.scale) + steps.rule(out)

    def empty(self, *size: int, like: Tensor, dtype: torch.dtype, scratch: str = "") -> Tensor:
        return steps.empty(size, like, dtype)

    def prepare(self, spec: Spec, operands: Operands, backward: bool) -> Prepared:
        kind = PreparedBatch if spec.examples else Prepared
        with steps.on(operands.x):
            return kind(spec, operands, backward, self.stats(spec))
