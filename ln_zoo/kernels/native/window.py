"""A layer with a window over a text, in C++ (equations: `ln_zoo.ops.loops.window`)."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import byref, c_int64, c_void_p
from typing import ClassVar

from torch import Tensor

from ln_zoo.kernels.ctypes_arguments import Arguments, Packed
from ln_zoo.kernels.native.runtime import packed
from ln_zoo.kernels.native.steps import NativeSteps
from ln_zoo.kernels.window import WindowChunk, WindowGrads
from ln_zoo.ops.engines.base import Chunk, ChunkGrads
from ln_zoo.ops.loops.window import WindowOperands
from ln_zoo.ops.spec import Operands, Spec


class WindowArguments(Arguments):
    """``Window`` of arguments.h."""

    tensors: ClassVar = {
        "text": ("wide", "N", "U", "E"),
        "bias": ("wide", "3K"),
        "input_weight": ("packed", "inner", "outer"),
        "weight": ("packed", "rows of weight", "columns of weight"),
        "terms": ("wide", "rows", "4K"),
        "windows": ("wide", "rows", "E"),
        "window": ("wide", "N", "E"),
        "kappa": ("wide", "N", "K"),
        "windows_gradient": ("wide", "rows", "E"),
        "dwindow": ("wide", "N", "E"),
        "dkappa": ("wide", "N", "K"),
        "dparameters": ("wide", "rows", "3K"),
    }
    _fields_ = (
        *((name, c_int64) for name in ("components", "characters", "letters")),
        *((name, c_void_p) for name in tensors),
    )


class NativeWindow:
    """`ln_zoo.kernels.window.WindowSteps` in C++; ``operands`` are the layer's."""

    def __init__(
        self,
        steps: NativeSteps,
        spec: Spec,
        operands: Operands,
        windows: WindowOperands,
        backward: bool,
    ) -> None:
        self.p = steps
        w_window = operands.w_ih[:, operands.x.shape[2] :].contiguous()
        forward = not backward
        examples, characters, letters = windows.text.shape
        kinds, hidden = windows.kappa.shape[1], operands.w_hh.shape[1]
        self._sizes = {"N": examples, "U": characters, "E": letters, "K": kinds}
        self._sizes |= {"3K": 3 * kinds, "4K": 4 * kinds}
        # Shapes of the packed weights, (E, G) and (H, 3K).
        names = ("inner", "outer"), ("rows of weight", "columns of weight")
        shapes = (letters, spec.gates * hidden), (hidden, 3 * kinds)
        for name, shape in zip(names, shapes, strict=True):
            self._sizes |= zip(name, shape if forward else shape[::-1], strict=True)
        # The structure holds addresses, so it must keep these tensors alive.
        self._tensors: dict[str, Tensor | Packed] = {
            "text": windows.text.contiguous(),
            "bias": windows.bias.contiguous(),
            "input_weight": packed("w_window", w_window, spec.products[0], transposed=forward),
            "weight": packed("window", windows.weight, transposed=forward),
        }
        self._common = WindowArguments(components=kinds, characters=characters, letters=letters)
        self._common.fill(self._tensors, self._sizes)

    def forward(self, chunk: Chunk, window: WindowChunk) -> None:
        steps = self.p.forward_arguments(chunk)
        tensors = {
            **{"terms": window.terms, "windows": window.shown},
            **{"window": window.window, "kappa": window.kappa},
        }
        window_too = self._arguments(len(chunk.v), steps.examples, tensors)
        self.p.library.ln_zoo_window_forward(byref(steps), byref(window_too))

    def backward(self, grads: ChunkGrads, window: WindowGrads) -> None:
        steps = self.p.backward_arguments(grads)
        tensors = {
            **{"terms": window.terms, "windows_gradient": window.dshown},
            **{"dwindow": window.dwindow, "dkappa": window.dkappa},
            **{"dparameters": window.parameters},
        }
        window_too = self._arguments(len(grads.du), steps.examples, tensors)
        self.p.library.ln_zoo_window_backward(byref(steps), byref(window_too))

    def _arguments(
        self, rows: int, examples: int, tensors: Mapping[str, Tensor | None]
    ) -> WindowArguments:
        if examples != self._sizes["N"]:
            raise RuntimeError(
                f"Expected {self._sizes['N']} examples as in the text, got {examples}"
            )
        window = WindowArguments.from_buffer_copy(self._common)
        window.fill(tensors, {**self._sizes, "rows": rows})
        return window
