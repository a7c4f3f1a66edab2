"""What steps in functions of torch share, whatever is normalised."""

from __future__ import annotations

import torch
from torch import Tensor

from ln_zoo.ops import memory
from ln_zoo.ops.engines.base import ChunkGrads, Steps
from ln_zoo.ops.spans import spans
from ln_zoo.ops.spec import Operands, Spec

#: Numbers of one kind that are in work at a time on the way back, on CPUs.
PIECE = 2**18


class AtenSteps(Steps):
    """What all cells share; made once per call.

    ``tanh(a)`` is computed as ``1 - 2 sigmoid(-2 a)``, several times as fast on CPUs. The factor -2
    goes into gains and biases; the derivative is ``4 s (1 - s)``, with s that sigmoid, and its 4
    goes into gains on the way back (the slopes).

    Args:
        spec: what is to be computed.
        operands: the tensors.
        w_ih: what inputs are multiplied by.
    """

    #: Factors of the sums of each gate, forward, and of their gradients: see above on tanh.
    signs: tuple[float, ...]
    slopes: tuple[float, ...]

    def __init__(self, spec: Spec, operands: Operands, w_ih: Tensor) -> None:
        super().__init__(w_ih)
        like = operands.h0
        self.spec = spec
        self.narrow, self.wide = operands.x.dtype, like.dtype
        self.exact = self.narrow == self.wide
        self.hidden = operands.w_hh.shape[1]
        self.one = like.new_ones(1)
        self._memory: dict[tuple[str | int, ...], Tensor] = {}
        self.sign, self.slope = (
            like.new_tensor(factors).repeat_interleave(self.hidden)
            for factors in (self.signs, self.slopes)
        )
        #: Gains of both products.
        self.gains = [like.new_ones(()) if g is None else g for g in operands.gains]
        bias = operands.bias
        self.bias = torch.zeros_like(self.sign) if bias is None else bias * self.sign

    def scratch(self, name: str, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory of that name for the time of one call, not filled; as wide as states."""
        dtype = self.wide if dtype is None else dtype
        if self.one.device.type != "cpu":
            return self.one.new_empty(size, dtype=dtype)
        found = self._memory.get((name, *size))
        if found is None:
            found = memory.scratch(f"aten {name}", *size, dtype=dtype)
            self._memory[(name, *size)] = found
        return found

    def backward(self, grads: ChunkGrads) -> None:
        """Takes gradients back, in pieces short enough that their numbers stay in the cache."""
        count, width = grads.du.shape
        limit = PIECE // max(width, 1) if grads.du.device.type == "cpu" else count
        for span in reversed(spans(grads.sizes, limit)):
            self.backward_part(grads.part(span))

    def backward_part(self, grads: ChunkGrads) -> None:
        """Takes gradients back through some of the steps."""
        raise NotImplementedError
