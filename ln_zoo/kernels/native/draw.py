"""DRAW between its products, in C++ (equations: `ln_zoo.ops.loops.draw`)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_double, c_int64, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

from ln_zoo.kernels.ctypes_arguments import Arguments
from ln_zoo.kernels.draw import (
    Back,
    DrawOperands,
    DrawPlan,
    DrawSteps,
    Kept,
    Made,
)
from ln_zoo.kernels.native.mixed_precision import is_widened
from ln_zoo.kernels.native.runtime import constant, library, multiply, packed
from ln_zoo.kernels.native.steps import RowArguments, row_arguments
from ln_zoo.ops.precision import product_dtype


class _LSTM(Arguments):
    """``DrawLSTM`` of draw.h."""

    tensors: ClassVar = {
        "bias": ("wide", "4H"),
        "gain": ("wide", "H"),
        "shift": ("wide", "H"),
        "inputs": ("kind", "slots", "N", "I + H"),
        "gates": ("wide", "slots", "N", "4H"),
        "cells": ("wide", "slots", "N", "H"),
        "stats": ("wide", "slots", "N", "2"),
        "dcells": ("wide", "N", "H"),
        "dinputs": ("kind", "N", "I + H"),
        "dgates": ("kind", "chunk", "N", "4H"),
    }
    _fields_ = (("norm", RowArguments), *((name, c_void_p) for name in tensors))


class DrawArguments(Arguments):
    """``Draw`` of draw.h."""

    tensors: ClassVar = {
        "images": ("wide", "N", "B", "A"),
        "noise": ("wide", "T", "N", "Z"),
        "posterior_bias": ("wide", "2Z"),
        "states": ("wide", "slots", "N", "H"),
        "heads": ("wide", "slots", "N", "heads"),
        "canvases": ("wide", "slots", "N", "B", "A"),
        "logits": ("wide", "N", "B", "A"),
        "means": ("wide", "T", "N", "Z"),
        "log_stds": ("wide", "T", "N", "Z"),
        "sums": ("kind", "N", "4H"),
        "posterior": ("kind", "N", "2Z"),
        "clamped": ("whole", "threads", "3"),
        "means_gradient": ("wide", "T", "N", "Z"),
        "log_stds_gradient": ("wide", "T", "N", "Z"),
        "dcanvas": ("wide", "N", "B", "A"),
        "dheads": ("wide", "T + 1", "N", "heads"),
        "dstates": ("wide", "N", "H"),
        "dencoded": ("kind", "N", "H"),
        "dposterior": ("kind", "chunk", "N", "2Z"),
        "totals": ("wide", "threads", "12H + 2Z"),
    }
    _fields_ = (
        *(
            (name, c_int64)
            for name in (
                *("narrow", "kept", "steps", "examples", "height", "width", "hidden", "latents"),
                *("read", "write", "adds_eps", "chunk", "threads"),
            )
        ),
        *((name, c_double) for name in ("eps", "log_clamp")),
        ("lstms", _LSTM * 2),
        *((name, c_void_p) for name in tensors),
    )


def _fields(
    operands: DrawOperands, kept: Kept, made: Made, back: Back | None
) -> tuple[dict[str, Tensor | None], dict[str, tuple[Tensor | None, Tensor | None]]]:
    """Tensors by field of `DrawArguments`, and pairs by field of both LSTMs."""
    tensors: dict[str, Tensor | None] = {
        "images": operands.images,
        "noise": operands.noise,
        "posterior_bias": operands.b_posterior,
        **made._asdict(),
    }
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {
        "bias": (operands.b_encoder, operands.b_decoder),
        "gain": (operands.gain_encoder, operands.gain_decoder),
        "shift": (operands.shift_encoder, operands.shift_decoder),
    }
    for name, a in kept._asdict().items():
        (pairs if isinstance(a, tuple) else tensors)[name] = a
    for name, a in ({} if back is None else back._asdict()).items():
        field = f"{name}_gradient" if name in ("means", "log_stds") else f"d{name}"
        (pairs if isinstance(a, tuple) else tensors)[field] = a
    return tensors, pairs


class NativeDraw(DrawSteps):
    """`DrawSteps` in C++."""

    @staticmethod
    def product_dtype(images: Tensor) -> torch.dtype:
        dtype = product_dtype(images)
        return torch.float32 if is_widened(dtype) else dtype

    def __init__(
        self,
        plan: DrawPlan,
        operands: DrawOperands,
        weights: Sequence[Tensor],
        kept: Kept,
        made: Made,
        back: Back | None,
    ) -> None:
        glimpses, examples, latents = operands.noise.shape
        _, height, width = operands.images.shape
        hidden, settings = len(operands.h_decoder), plan.settings
        self._library, self._hidden = library(), hidden
        self._chunk = 1 if back is None else len(back.posterior)
        threads = max(1, min(torch.get_num_threads(), examples))
        self._clamped = torch.zeros(threads, 3, dtype=torch.int64, device="cpu")
        self._totals = operands.h_decoder.new_zeros(
            threads if back else 0, 12 * hidden + 2 * latents
        )
        narrow = plan.narrow == torch.bfloat16
        self._weights, self._forward = weights, back is None
        # With AMX tiles, torch's bfloat16 products are faster.
        self._packed = [
            packed(f"draw {i}", w, transposed=self._forward)
            for i, w in enumerate(weights)
            if not narrow
        ]
        self._b_heads = operands.b_heads
        self._w_heads = packed("draw heads", operands.w_heads, transposed=self._forward)

        tensors, pairs = _fields(operands, kept, made, back)
        tensors["clamped"] = self._clamped
        if not narrow:
            tensors["states"] = None
        if back is not None:
            tensors["totals"] = self._totals
        # The structure holds addresses, so it must keep these tensors alive.
        self._alive: list[object] = [tensors]
        self._arguments = DrawArguments(
            narrow=narrow,
            kept=len(kept.heads) == glimpses + 1,
            **{"steps": glimpses, "examples": examples, "height": height, "width": width},
            **{"hidden": hidden, "latents": latents},
            **{"read": settings.read, "write": settings.write},
            adds_eps=settings.filter_norm == "eps",
            chunk=self._chunk,
            threads=threads,
            eps=settings.filter_eps,
            log_clamp=settings.log_clamp,
        )
        sizes = {
            **{"N": examples, "B": height, "A": width, "T": glimpses, "T + 1": glimpses + 1},
            **{"Z": latents, "2Z": 2 * latents, "H": hidden, "4H": 4 * hidden},
            **{"slots": len(kept.heads), "chunk": self._chunk, "threads": threads},
            **{"2": 2, "3": 3, "heads": 10 + settings.write**2},
            "12H + 2Z": 12 * hidden + 2 * latents,
        }
        self._arguments.fill(tensors, sizes, plan.narrow)
        inputs = 2 * settings.read**2 + 2 * hidden, latents + hidden
        for i, lstm in enumerate(self._arguments.lstms):
            own = {name: pair[i] for name, pair in pairs.items()}
            for name, default in (("gain", 1.0), ("shift", 0.0)):
                if own[name] is None:
                    own[name] = constant(default, hidden)
            self._alive.append(own)
            lstm.norm = row_arguments(plan.norms[i])
            lstm.fill(own, {**sizes, "I + H": inputs[i]}, plan.narrow)
        self._address = byref(self._arguments)

    def multiply(self, which: int, a: Tensor, out: Tensor) -> None:
        if self._packed:
            multiply(a, self._packed[which], out, add=False)
        else:
            w = self._weights[which]
            torch.mm(a, w.t() if self._forward else w, out=out)

    def heads(self, states: Tensor, out: Tensor) -> None:
        out.copy_(self._b_heads)
        multiply(states, self._w_heads, out, add=True)

    def heads_back(self, d: Tensor, out: Tensor) -> None:
        multiply(d, self._w_heads, out, add=False)

    def read(self, t: int) -> None:
        self._library.ln_zoo_draw_read(self._address, t)

    def lstm(self, which: int, t: int) -> None:
        self._library.ln_zoo_draw_lstm(self._address, which, t)

    def latent(self, t: int) -> None:
        self._library.ln_zoo_draw_latent(self._address, t)

    def write(self, t: int) -> None:
        self._library.ln_zoo_draw_write(self._address, t)

    def read_back(self, t: int) -> None:
        self._library.ln_zoo_draw_read_back(self._address, t)

    def lstm_back(self, which: int, t: int) -> None:
        self._library.ln_zoo_draw_lstm_back(self._address, which, t)

    def latent_back(self, t: int) -> None:
        self._library.ln_zoo_draw_latent_back(self._address, t)

    def write_back(self, t: int) -> None:
        self._library.ln_zoo_draw_write_back(self._address, t)

    def clamped(self) -> Tensor:
        return self._clamped.sum(0)

    def totals(self) -> Sequence[Tensor]:
        """Gradients of vectors, summed in thread order."""
        totals, h = self._totals.sum(0), self._hidden
        return totals.split([4 * h, h, h, 4 * h, h, h, len(totals) - 12 * h])
