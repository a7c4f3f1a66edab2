"""An LSTM with a window over a text, on an engine (equations: `ln_zoo.ops.loops.window`)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ln_zoo.ops.cells import CELLS, Weights
from ln_zoo.ops.chunks import Grads, SavedTensors, backward_chunks, forward_chunks
from ln_zoo.ops.engines.base import Chunk, ChunkGrads, Engine, Steps
from ln_zoo.ops.loops.window import Windowed, WindowOperands
from ln_zoo.ops.lowering import kernel_tensors, make_spec, unsupported_reason
from ln_zoo.ops.norm_records import Records
from ln_zoo.ops.precision import no_autocast
from ln_zoo.ops.recurrent_kernel import no_custom_ops_reason
from ln_zoo.ops.registry import EngineKernel, Task
from ln_zoo.ops.replay import check_first_order
from ln_zoo.ops.spec import Operands, Spec
from ln_zoo.ops.time_chunks import TimeChunk, previous_rows

#: Minimum steps for which a kernel beats torch functions and autograd.
_LEAST_STEPS = 16


class WindowSteps(Protocol):
    """Steps of the layer and its window; created once per call."""

    def __init__(
        self,
        steps: Any,
        spec: Spec,
        operands: Operands,
        windows: WindowOperands,
        backward: bool,
    ) -> None:
        """Prepare from the engine's `Steps` of the layer."""

    def forward(self, chunk: Chunk, window: WindowChunk) -> None:
        """Run consecutive steps; add the window's part to the products v."""

    def backward(self, grads: ChunkGrads, window: WindowGrads) -> None:
        """Backpropagate through the steps of one call of `forward`."""


class WindowChunk(NamedTuple):
    """Tensors of the window besides the layer's `Chunk`; all contiguous."""

    window: Tensor  # w before the steps, (N, E); updated in place
    kappa: Tensor  # positions, (N, K); updated in place
    shown: Tensor  # output: windows, (rows, E)
    terms: Tensor  # output: see `Windowed`, (rows, 4K)


class WindowGrads(NamedTuple):
    """The same in the backward pass."""

    dshown: Tensor | None  # gradient of `shown`; None for 0
    dwindow: Tensor  # of the last window, replaced by that before the steps, (N, E)
    dkappa: Tensor  # the same of the positions, (N, K)
    terms: Tensor  # saved by the forward pass
    parameters: Tensor  # output: gradients of alpha^, beta^ and kappa^, (rows, 3K)


class WindowEngine(Engine, Protocol):
    """An engine that has the steps of a window."""

    @property
    def window_steps(self) -> type[WindowSteps]:
        """Class of the steps."""


class WindowKernel(EngineKernel):
    """Kernel of an engine that has the steps of a window."""

    engine: WindowEngine
    tasks: tuple[Task, ...] = ("window",)

    def __init__(self, engine: WindowEngine) -> None:
        super().__init__(engine)

    @functools.cached_property
    def steps(self) -> type[WindowSteps]:
        return self.engine.window_steps

    def unsupported_reason(
        self, records: Records, x: Tensor, weights: Weights, windows: WindowOperands
    ) -> str | None:
        cell = CELLS["LSTM"]
        if torch.compiler.is_compiling():
            return "a compiled program holds functions of torch alone"
        reason = no_custom_ops_reason() or unsupported_reason(cell, [records], [weights])
        if reason is not None:
            return reason
        if x.shape[0] < _LEAST_STEPS:
            return f"it gains nothing below {_LEAST_STEPS} steps"
        if windows.text.requires_grad:
            return "it has no gradients of the text"
        if any(a.dtype != weights.hh.dtype for a in (x, *windows)) or not x.is_floating_point():
            return "precisions differ"
        if x.dtype != torch.float32:
            return f"it computes in float32 alone, not in {str(x.dtype).removeprefix('torch.')}"
        return self.engine.unsupported_reason(
            make_spec(cell, records, weights), x, weights.hh, x.dtype
        )

    def run(
        self,
        records: Records,
        x: Tensor,
        states: tuple[Tensor, Tensor],
        weights: Weights,
        windows: WindowOperands,
    ) -> Windowed:
        cell = CELLS["LSTM"]
        spec = make_spec(cell, records, weights)
        starts = tuple(s.contiguous() for s in states)
        with no_autocast(x):
            operands = kernel_tensors(cell, records, weights, x, starts)
            tensors = (*operands, *(a.contiguous() for a in windows))
            needed = any(a is not None and a.requires_grad for a in tensors)
            save = torch.is_grad_enabled() and needed
            return Windowed(*_WindowedLSTM.apply(spec, self, save, *tensors))


class _Steps(Steps):
    """Steps of the layer and its window, as `ln_zoo.ops.operator` runs them."""

    def __init__(
        self,
        kernel: WindowKernel,
        spec: Spec,
        operands: Operands,
        windows: WindowOperands,
        backward: bool,
    ) -> None:
        layer = kernel.engine.prepare(spec, operands, backward)
        super().__init__(layer.w_ih[:, : operands.x.shape[2]])
        self.rows_of_chunk, self.least_steps = layer.rows_of_chunk, layer.least_steps  # type: ignore[method-assign]
        self.add_weight_gradient = layer.add_weight_gradient  # type: ignore[method-assign]
        self.leaves_constants, self.windows = layer.leaves_constants, windows
        self.loop = kernel.steps(layer, spec, operands, windows, backward)
        #: Index of the next step.
        self.step = operands.x.shape[0] if backward else 0


class _Forward(_Steps):
    def __init__(
        self, kernel: WindowKernel, spec: Spec, operands: Operands, windows: WindowOperands
    ) -> None:
        super().__init__(kernel, spec, operands, windows, backward=False)
        self.window, self.kappa = windows.window.clone(), windows.kappa.clone()
        lead, x = operands.x.shape[:2], operands.x
        (_, letters), (_, kinds) = self.window.shape, self.kappa.shape
        self.shown = kernel.engine.empty(*lead, letters, like=x, dtype=x.dtype)
        self.made = kernel.engine.empty(*lead, 4, kinds, like=x, dtype=x.dtype)

    def forward(self, chunk: Chunk) -> None:
        steps = slice(self.step, self.step + len(chunk.sizes))
        self.step = steps.stop
        shown, terms = self.shown[steps].flatten(0, 1), self.made[steps].flatten(0, 1).flatten(1)
        self.loop.forward(chunk, WindowChunk(self.window, self.kappa, shown, terms))


class _Backward(_Steps):
    def __init__(
        self,
        kernel: WindowKernel,
        spec: Spec,
        operands: Operands,
        windows: WindowOperands,
        made: tuple[Tensor, Tensor, Tensor],
        grads: tuple[Tensor | None, Tensor | None],
    ) -> None:
        super().__init__(kernel, spec, operands, windows, backward=True)
        self.out, self.shown, self.made = (a.flatten(0, 1) for a in made)
        self.made = self.made.flatten(1)
        self.d_windows, d_kappa = grads
        self.dwindow, self.dkappa = (
            torch.zeros_like(windows.window),
            torch.zeros_like(windows.kappa),
        )
        if d_kappa is not None:
            self.dkappa.copy_(d_kappa)
        self.dweight, self.dbias = torch.zeros_like(windows.weight), torch.zeros_like(windows.bias)

    def backward(self, grads: ChunkGrads) -> None:
        steps = slice(self.step - len(grads.sizes), self.step)
        self.step = steps.start
        examples = len(self.dwindow)
        rows = slice(steps.start * examples, steps.stop * examples)
        dshown = None
        if self.d_windows is not None:
            dshown = self.d_windows[steps].flatten(0, 1).contiguous()
        parameters = grads.du.new_empty(len(grads.du), len(self.dbias))
        window = WindowGrads(dshown, self.dwindow, self.dkappa, self.made[rows], parameters)
        self.loop.backward(grads, window)
        self.dweight.addmm_(parameters.t(), self.out[rows])
        self.dbias += parameters.sum(0)

    def inputs(self, x: Tensor, span: TimeChunk) -> Tensor:
        return torch.cat([x, previous_rows(self.windows.window, self.shown, span)], 1)


class _WindowedLSTM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, spec: Spec, kernel: WindowKernel, save: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        operands, windows = _split(tensors)
        steps = _Forward(kernel, spec, operands, windows)
        found = forward_chunks(spec, kernel.engine, operands, None, save, steps_of_call=steps)
        out, h, c, *kept = found
        ctx.spec, ctx.kernel = spec, kernel
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(steps.made)
        if save:
            ctx.save_for_backward(*tensors, steps.shown, steps.made, out, *kept)
        return out, steps.shown, h, c, steps.kappa, steps.made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        check_first_order("the kernels of a layer with a window", grads)
        *tensors, shown, terms, out, v, u, cells, stats, statistics = ctx.saved_tensors
        operands, windows = _split(tensors)
        d_out, d_windows, d_h, d_c, d_kappa, _ = grads
        spec, kernel, needs = ctx.spec, ctx.kernel, ctx.needs_input_grad[3:]
        needed, _ = _split(needs)
        made, of_window = (out, shown, terms), (d_windows, d_kappa)
        with no_autocast(out):
            steps = _Backward(kernel, spec, operands, windows, made, of_window)
            found = backward_chunks(
                spec,
                kernel.engine,
                operands,
                None,
                SavedTensors(out, v, u, cells, stats, statistics),
                Grads(d_out, d_h, d_c),
                needs[: len(needed)],
                steps_of_call=steps,
            )
        gradients = [d if need else None for d, need in zip(found, needed, strict=True)]
        rest = WindowOperands(
            steps.dweight, steps.dbias, cast(Tensor, None), steps.dwindow, steps.dkappa
        )
        return (None, None, None, *gradients, *rest)


def _split(tensors: Any) -> tuple[Operands, WindowOperands]:
    count = len(Operands._fields)
    return Operands(*tensors[:count]), WindowOperands(*tensors[count:])
