"""What a contestant has to do: a training step, inference on whole sequences, single steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.contestants import Contestant, Size, limited_to

PRECISIONS = ("float32", "bf16-mixed")
#: Steps of one call in the mode "step".
STEPS = 50


def training_step(
    contestant: Contestant, size: Size, precision: str, last: bool = False
) -> Callable[[], Tensor]:
    """Forward and backward, with gradients of the inputs and all parameters; gives the outputs.

    Args:
        contestant: a layer.
        size: of the call.
        precision: one of `PRECISIONS`.
        last: whether the loss reads the last time step alone, as that of a classifier does. Over
            many steps its gradient vanishes without a norm.
    """
    torch.manual_seed(1)
    x = torch.randn(size.T, size.B, size.I, requires_grad=True)
    gradient = torch.randn(size.T, size.B, size.H)
    module = contestant.module.train()
    parameters = [x, *module.parameters()]

    def step() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        with limited_to(contestant.kernels), _autocast(precision):
            output: Tensor = module(x)[0]
        read = slice(-1, None) if last else slice(None)
        output[read].backward(gradient[read].to(output.dtype))
        return output

    return step


def inference(contestant: Contestant, size: Size, precision: str) -> Callable[[], Tensor]:
    """The forward pass of whole sequences, without gradients; gives the outputs."""
    torch.manual_seed(1)
    x = torch.randn(size.T, size.B, size.I)
    module = contestant.module.eval()

    def run() -> Tensor:
        with limited_to(contestant.kernels), torch.no_grad(), _autocast(precision):
            output: Tensor = module(x)[0]
            return output

    return run


def streaming(contestant: Contestant, size: Size, precision: str) -> Callable[[], Tensor]:
    """`STEPS` calls of a cell on one example, each with the state of the one before; gives h."""
    torch.manual_seed(1)
    xs = torch.randn(STEPS, 1, size.I).unbind(0)
    module = contestant.module.eval()

    def run() -> Tensor:
        state = None
        with limited_to(contestant.kernels), torch.no_grad(), _autocast(precision):
            for t, x in enumerate(xs):
                state = module(x, state, t) if contestant.counts else module(x, state)
        assert state is not None
        return state if isinstance(state, Tensor) else state[0]

    return run


def _autocast(precision: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")
