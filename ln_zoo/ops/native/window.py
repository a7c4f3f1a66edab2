"""The loop of a layer with a window over a text, in C++ (equations: `ln_zoo.ops.window`)."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Structure, byref, c_int64, c_void_p
from typing import TYPE_CHECKING

from torch import Tensor

from ln_zoo.ops.engine import Saved, Sums
from ln_zoo.ops.native.runtime import packed
from ln_zoo.ops.native.steps import NativeEngine, NativeSteps
from ln_zoo.ops.spec import Operands, Spec

if TYPE_CHECKING:
    from ln_zoo.ops.chunked import Chunk
    from ln_zoo.ops.window import WindowOperands


class WindowArguments(Structure):
    """``Window`` of kernels.cpp."""

    _fields_ = (
        *((name, c_int64) for name in ("components", "characters", "letters")),
        *(
            (name, c_void_p)
            for name in (
                *("text", "bias", "input_weight", "weight", "terms"),
                *("windows", "window", "kappa"),
                *("windows_gradient", "dwindow", "dkappa", "dparameters"),
            )
        ),
    )


class NativeWindow:
    """Runs chunks of steps; as `ln_zoo.ops.window.WindowSteps`.

    Args:
        engine: the native engine.
        p: what it prepared.
        spec: what is computed.
        operands: the layer's tensors.
        windows: the window's.
        backward: whether it is for the backward pass.
    """

    def __init__(
        self,
        engine: NativeEngine,
        p: NativeSteps,
        spec: Spec,
        operands: Operands,
        windows: WindowOperands,
        backward: bool,
    ) -> None:
        self.engine, self.p = engine, p
        w_window = operands.w_ih[:, operands.x.shape[2] :].contiguous()
        forward = not backward
        # The structure holds addresses: these tensors live as long as it.
        self._tensors = {
            "text": windows.text.contiguous(),
            "bias": windows.bias.contiguous(),
            "input_weight": packed("w_window", w_window, spec.products[0], transposed=forward),
            "weight": packed("window", windows.weight, transposed=forward),
        }
        self._common = WindowArguments(
            components=windows.kappa.shape[1],
            characters=windows.text.shape[1],
            letters=windows.text.shape[2],
            **{name: a.data_ptr() for name, a in self._tensors.items()},
        )

    def forward(
        self,
        piece: Chunk,
        v: Tensor,
        h: Tensor,
        c: Tensor,
        out: Tensor,
        saved: Saved | None,
        window: Tensor,
        kappa: Tensor,
        shown: Tensor,
        terms: Tensor,
    ) -> None:
        """Runs consecutive steps."""
        tensors = {"terms": terms, "windows": shown, "window": window, "kappa": kappa}
        steps = self.engine.forward_arguments(self.p, v, piece.sizes, h, c, out, saved)
        self.p.library.ln_zoo_window_forward(byref(steps), byref(self._arguments(tensors)))

    def backward(
        self,
        piece: Chunk,
        dout: Tensor | None,
        dshown: Tensor | None,
        dh: Tensor,
        dc: Tensor,
        dwindow: Tensor,
        dkappa: Tensor,
        saved: Saved,
        terms: Tensor,
        h_prev: Tensor,
        c_prev: Tensor,
        du: Tensor,
        dv: Tensor,
        parameters: Tensor,
        sums: Sums,
    ) -> None:
        """Takes gradients back through consecutive steps."""
        tensors = {
            **{"terms": terms, "windows_gradient": dshown},
            **{"dwindow": dwindow, "dkappa": dkappa, "dparameters": parameters},
        }
        steps = self.engine.backward_arguments(
            self.p, piece.sizes, dout, dh, dc, saved, h_prev, c_prev, du, dv, sums
        )
        self.p.library.ln_zoo_window_backward(byref(steps), byref(self._arguments(tensors)))

    def _arguments(self, tensors: Mapping[str, Tensor | None]) -> WindowArguments:
        window = WindowArguments.from_buffer_copy(self._common)
        for name, tensor in tensors.items():
            if tensor is not None:
                assert tensor.is_contiguous(), name
                setattr(window, name, tensor.data_ptr())
        return window
