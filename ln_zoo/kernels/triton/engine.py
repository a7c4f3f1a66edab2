"""The engine of the Triton kernels."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ln_zoo.ops.lowering import unsupported_places
from ln_zoo.ops.registry import untraced
from ln_zoo.ops.spec import Operands, Spec

if TYPE_CHECKING:
    from ln_zoo.kernels.triton.draw import TritonDraw
    from ln_zoo.kernels.triton.steps import Prepared
    from ln_zoo.kernels.triton.window import TritonWindow

#: Maximum H: a program holds a row, four units in each of 1024 threads.
MAX_HIDDEN = 4096


class TritonEngine:
    """Time steps as Triton kernels, in float32 or bfloat16."""

    name = "triton"
    title = "Triton kernels"
    rank = 30
    device = "cuda"
    has_noise = True

    def missing(self) -> str | None:
        if not torch.cuda.is_available():
            return "torch finds no GPU here"
        return _unsupported_gpu(torch.device("cuda"), torch.float32)

    def unsupported_reason(
        self, spec: Spec, x: Tensor, w_hh: Tensor, dtype: torch.dtype, examples: int = 1
    ) -> str | None:
        if x.device.type != self.device:
            return f"the input is on the device {x.device.type}, not on an NVIDIA GPU"
        reason = _unsupported_gpu(x.device, dtype)
        if reason is not None:
            return reason
        if spec.cell == "light GRU":
            return f"it has no kernels of the {spec.cell}"
        hidden = w_hh.shape[1]
        if spec.examples:
            return unsupported_places(spec.places)
        if hidden > MAX_HIDDEN:
            return f"H is {hidden}; a program holds a row of at most {MAX_HIDDEN}"
        return None

    def stats(self, spec: Spec) -> int:
        """A reciprocal deviation per group of statistics, and the mean of a centred cell state."""
        if spec.examples:
            return 0
        from ln_zoo.kernels.triton import steps

        first, second, out = spec.rows
        if spec.gates == 1:
            return int(out.scale)
        return sum(len(rows.groups) for rows in (first, second) if rows.scale) + steps.rule(out)

    def empty(self, *size: int, like: Tensor, dtype: torch.dtype, scratch: str = "") -> Tensor:
        from ln_zoo.kernels.triton import steps

        return steps.empty(size, like, dtype)

    def prepare(self, spec: Spec, operands: Operands, backward: bool) -> Prepared:
        from ln_zoo.kernels.triton import batch, steps

        kind = batch.PreparedBatch if spec.examples else steps.Prepared
        with steps.on(operands.x):
            return kind(spec, operands, backward, self.stats(spec))

    @property
    def window_steps(self) -> type[TritonWindow]:
        from ln_zoo.kernels.triton.window import TritonWindow

        return TritonWindow

    @property
    def draw_steps(self) -> type[TritonDraw]:
        from ln_zoo.kernels.triton.draw import TritonDraw

        return TritonDraw


def _unsupported_gpu(device: torch.device, dtype: torch.dtype) -> str | None:
    if torch.version.hip is not None:
        return "it was never tried on GPUs of other makers than NVIDIA"
    if not _has_triton():
        return "triton is not installed"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"products are in {dtype}; it computes in torch.float32 and torch.bfloat16"
    needed = (8, 0) if dtype == torch.bfloat16 else (7, 0)
    capability = _capability(device)
    if capability < needed:
        return (
            f"for {dtype} it needs compute capability {needed[0]}.{needed[1]}, the GPU has "
            f"{capability[0]}.{capability[1]}"
        )
    return None


@untraced
@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@untraced
def _capability(device: torch.device) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor
