"""What stands between the products of DRAW, in C++ (equations: `ln_zoo.ops.draw`)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, byref, c_double, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ln_zoo.ops.native.runtime import constant, library, multiply, packed
from ln_zoo.ops.native.steps import RowArguments, row_arguments

if TYPE_CHECKING:
    from ln_zoo.ops.draw import Back, Kept, Made, _Operands, _Plan

_Pair = c_void_p * 2


class DrawArguments(Structure):
    """``Draw`` of kernels.cpp."""

    _fields_ = (
        *(
            (name, c_int64)
            for name in (
                *("narrow", "kept", "steps", "cases", "height", "width", "hidden", "latents"),
                *("read", "write", "adds_eps", "chunk", "threads"),
            )
        ),
        *((name, c_double) for name in ("eps", "bound")),
        ("norms", RowArguments * 2),
        *((name, c_void_p) for name in ("images", "noise")),
        *((name, _Pair) for name in ("bias", "gain", "shift")),
        ("posterior_bias", c_void_p),
        ("inputs", _Pair),
        *((name, c_void_p) for name in ("states", "heads")),
        *((name, _Pair) for name in ("gates", "cells", "stats")),
        *(
            (name, c_void_p)
            for name in (
                *("canvases", "logits", "means", "log_stds"),
                *("sums", "posterior", "clamped"),
                *("means_gradient", "log_stds_gradient", "dcanvas", "dheads", "dstates"),
            )
        ),
        *((name, _Pair) for name in ("dcells", "dinputs")),
        ("dencoded", c_void_p),
        ("dgates", _Pair),
        *((name, c_void_p) for name in ("dposterior", "totals")),
    )


class NativeDraw:
    """As `ln_zoo.ops.draw.DrawSteps`; arguments as `ln_zoo.ops.draw.AtenDraw`."""

    def __init__(
        self,
        plan: _Plan,
        operands: _Operands,
        weights: Sequence[Tensor],
        kept: Kept,
        made: Made,
        back: Back | None,
    ) -> None:
        glimpses, cases, latents = operands.noise.shape
        _, height, width = operands.images.shape
        hidden, settings = len(operands.h_decoder), plan.settings
        self._library, self._hidden = library(), hidden
        threads = max(1, min(torch.get_num_threads(), cases))
        self._clamped = torch.zeros(threads, 3, dtype=torch.int64)
        self._totals = operands.h_decoder.new_zeros(
            threads if back else 0, 12 * hidden + 2 * latents
        )
        narrow = kept.inputs[0].dtype == torch.bfloat16
        self._weights, self._forward = weights, back is None
        # Torch's products of bfloat16 are the faster ones where the processor has tiles for them.
        self._packed = [
            packed(f"draw {i}", w, transposed=self._forward)
            for i, w in enumerate(weights)
            if not narrow
        ]
        self._b_heads = operands.b_heads
        self._w_heads = packed("draw heads", operands.w_heads, transposed=self._forward)

        def of_norm(value: Tensor | None, default: float) -> Tensor:
            return constant(default, hidden) if value is None else value

        tensors: dict[str, Tensor | tuple[Tensor, ...] | None] = {
            "images": operands.images,
            "noise": operands.noise,
            "bias": (operands.b_encoder, operands.b_decoder),
            "gain": tuple(of_norm(a, 1.0) for a in (operands.gain_encoder, operands.gain_decoder)),
            "shift": tuple(
                of_norm(a, 0.0) for a in (operands.shift_encoder, operands.shift_decoder)
            ),
            "posterior_bias": operands.b_posterior,
            **kept._asdict(),
            "states": kept.states if narrow else None,
            **made._asdict(),
            "clamped": self._clamped,
        }
        if back is not None:
            tensors |= {
                "means_gradient": back.means,
                "log_stds_gradient": back.log_stds,
                **{
                    f"d{name}": a
                    for name, a in back._asdict().items()
                    if name not in ("means", "log_stds")
                },
                "totals": self._totals,
            }
        # The structure holds addresses: these tensors live as long as it.
        self._tensors = tensors
        self._arguments = DrawArguments(
            narrow=narrow,
            kept=len(kept.heads) == glimpses + 1,
            steps=glimpses,
            cases=cases,
            height=height,
            width=width,
            hidden=hidden,
            latents=latents,
            read=settings.read,
            write=settings.write,
            adds_eps=settings.filter_norm == "eps",
            chunk=1 if back is None else len(back.posterior),
            threads=threads,
            eps=settings.filter_eps,
            bound=settings.bound,
            norms=(RowArguments * 2)(*(row_arguments(rows) for rows in plan.norms)),
            **{name: _addresses(name, a) for name, a in tensors.items()},
        )
        self._address = byref(self._arguments)

    def multiply(self, which: int, a: Tensor, out: Tensor) -> None:
        """A product with the weight, or its transpose on the way forward."""
        if self._packed:
            multiply(a, self._packed[which], out, add=False)
        else:
            w = self._weights[which]
            torch.mm(a, w.t() if self._forward else w, out=out)

    def heads(self, states: Tensor, out: Tensor) -> None:
        """What all heads make of h_dec."""
        out.copy_(self._b_heads)
        multiply(states, self._w_heads, out, add=True)

    def heads_back(self, d: Tensor, out: Tensor) -> None:
        """Gradients of h_dec."""
        multiply(d, self._w_heads, out, add=False)

    def read(self, t: int) -> None:
        """Fills in r."""
        self._library.ln_zoo_draw_read(self._address, t)

    def lstm(self, which: int, t: int) -> None:
        """From the sums of the gates to h."""
        self._library.ln_zoo_draw_lstm(self._address, which, t)

    def latent(self, t: int) -> None:
        """From the products of h_enc to z."""
        self._library.ln_zoo_draw_latent(self._address, t)

    def write(self, t: int) -> None:
        """Fills in the next canvas."""
        self._library.ln_zoo_draw_write(self._address, t)

    def read_back(self, t: int) -> None:
        """Fills in the read filters' part of the gradients of heads, goes on with the canvas."""
        self._library.ln_zoo_draw_read_back(self._address, t)

    def lstm_back(self, which: int, t: int) -> None:
        """Fills in the gradients of the sums, and goes on with the cell state."""
        self._library.ln_zoo_draw_lstm_back(self._address, which, t)

    def latent_back(self, t: int) -> None:
        """Fills in the gradients of means and log standard deviations."""
        self._library.ln_zoo_draw_latent_back(self._address, t)

    def write_back(self, t: int) -> None:
        """Fills in the write filters' and the patch's part of the gradients of heads."""
        self._library.ln_zoo_draw_write_back(self._address, t)

    def clamped(self) -> Tensor:
        """How many numbers were clamped."""
        return self._clamped.sum(0)

    def totals(self) -> Sequence[Tensor]:
        """Gradients of vectors, summed in the order of the threads."""
        totals, h = self._totals.sum(0), self._hidden
        return totals.split([4 * h, h, h, 4 * h, h, h, len(totals) - 12 * h])


def _addresses(name: str, a: Tensor | tuple[Tensor, ...] | None) -> int | object | None:
    if isinstance(a, tuple):
        return _Pair(*(_address(name, part) for part in a))
    return None if a is None else _address(name, a)


def _address(name: str, a: Tensor) -> int:
    assert a.is_contiguous(), name
    return a.data_ptr()
