"""DRAW on NVIDIA GPUs: Triton kernels between the products, and whole runs as CUDA graphs.

The three products and four kernels of a glimpse take less time than their launches, so all glimpses
are captured when a call of the same sizes repeats (`ln_zoo.kernels.cuda_graphs.graphs`).
"""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ln_zoo.kernels.cuda_graphs import graphs
from ln_zoo.kernels.cuda_graphs.graphs import may_replay, on, product_settings
from ln_zoo.kernels.draw import (
    Back,
    DrawOperands,
    DrawPlan,
    DrawRun,
    DrawSteps,
    Kept,
    Made,
)
from ln_zoo.kernels.triton.steps import OPTIONS, block, rule
from ln_zoo.ops.loops.draw import DrawWeights

_ENCODER, _DECODER = 0, 1
#: Warps of a program for an image, and for a row of states.
IMAGE_WARPS, ROW_WARPS = 8, 4
#: Maximum elements of a program's product, limited by registers.
MAX_NUMBERS = 2**16
#: Maximum captured runs of one kind that await gradients at the same time.
PLACES = 2


def image_refusal(height: int, width: int, filters: int) -> str | None:
    """Why a program cannot hold an image, or None; ``filters``: the larger number along an axis.

    Example:
        >>> image_refusal(28, 28, 5)
        >>> image_refusal(256, 256, 12)
        'images of 256 x 256 pixels under 12 x 12 filters are more than a program can hold'
    """
    if _power(height) * _power(width) * _power(filters) <= MAX_NUMBERS:
        return None
    return (
        f"images of {height} x {width} pixels under {filters} x {filters} filters are more than a "
        "program can hold"
    )


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


class TritonDraw(DrawSteps):
    """`DrawSteps` as kernels, and whole runs as captured graphs.

    `write` launches one kernel for the heads, the canvas and the next glimpse's patch. Their
    gradients are one launch as well, except for the part from heads to h_dec (`lstm_back`).
    """

    @staticmethod
    def unsupported_reason(images: Tensor, weights: DrawWeights) -> str | None:
        _, height, width = images.shape
        ih, hh = weights.encoder.weights[:2]
        largest = max((ih.shape[1] - hh.shape[1]) // 2, len(weights.patch.weight))
        return image_refusal(height, width, math.isqrt(max(largest, 1)))

    @staticmethod
    def replayed(
        plan: DrawPlan, operands: DrawOperands, save: bool, forward: Forward
    ) -> tuple[tuple[Tensor, ...], Replay] | None:
        return replayed(plan, operands, save, forward)

    def __init__(
        self,
        plan: DrawPlan,
        operands: DrawOperands,
        weights: Sequence[Tensor],
        kept: Kept,
        made: Made,
        back: Back | None,
    ) -> None:
        self.operands, self.kept, self.made, self._back = operands, kept, made, back
        self.weights = weights if back is not None else [w.t() for w in weights]
        self.norms, settings = plan.norms, plan.settings
        self.slots, self.glimpses = len(kept.cells[0]), len(operands.noise)
        self.hidden, self.latents = len(operands.h_decoder), operands.noise.shape[2]
        self.examples, height, width = operands.images.shape
        self.wide = plan.narrow == operands.noise.dtype
        self.bias = (operands.b_encoder, operands.b_decoder)
        self.gain = (operands.gain_encoder, operands.gain_decoder)
        self.shift = (operands.shift_encoder, operands.shift_decoder)
        self.strides = tuple(a.shape[2] for a in kept.inputs)
        longest = max(height, width) - 1
        self.heads_count = len(operands.b_heads)
        self.image: dict[str, Any] = {
            "INPUTS_STRIDE": self.strides[_ENCODER],
            "HEADS": self.heads_count,
            "B": height,
            "BP": _power(height),
            "A": width,
            "AP": _power(width),
            "R": settings.read,
            "RP": _power(settings.read),
            "W": settings.write,
            "WP": _power(settings.write),
            "READ_SPAN": longest / max(settings.read - 1, 1),
            "WRITE_SPAN": longest / max(settings.write - 1, 1),
            "BOUND": float(settings.log_clamp),
            "EPS": settings.filter_eps,
            "ADDS_EPS": settings.filter_norm == "eps",
            "num_warps": IMAGE_WARPS,
            **OPTIONS,
        }
        self.row = {"H": self.hidden, "HP": block(self.hidden), "num_warps": ROW_WARPS, **OPTIONS}
        self.latent_options = {
            "INPUTS_STRIDE": self.strides[_DECODER],
            "Z": self.latents,
            "ZP": block(self.latents),
            "BOUND": float(settings.log_clamp),
            "num_warps": 1,
            **OPTIONS,
        }
        new = operands.noise.new_zeros
        self.hits = new(3, dtype=torch.int64)
        if back is not None:
            self.sums = [new(self.examples, 6 * self.hidden) for _ in range(2)]
            self.posterior_sums = new(self.examples, 2 * self.latents)
        self._kernels = importlib.import_module("ln_zoo.kernels.triton.draw_kernels")

    @property
    def back(self) -> Back:
        assert self._back is not None
        return self._back

    def _canvas(self, t: int) -> Tensor:
        return self.made.logits if t == self.glimpses else self.kept.canvases[t % self.slots]

    def multiply(self, which: int, a: Tensor, out: Tensor) -> None:
        torch.mm(a, self.weights[which], out=out)

    def read(self, t: int) -> None:
        """Compute r of the first glimpse; `write` computes the others."""
        if t == 0:
            self._paint(0, write=False, read=True)

    def write(self, t: int) -> None:
        self._paint(t + 1, write=True, read=t + 1 < self.glimpses)

    def _paint(self, t: int, write: bool, read: bool) -> None:
        slot = t % self.slots
        states = self.kept.states[slot]
        self._kernels.paint[self.examples,](
            states,
            self.kept.inputs[_ENCODER][slot],
            self.operands.w_heads,
            self.operands.b_heads,
            self.kept.heads[slot],
            self.operands.images,
            self._canvas(t - 1) if write else self._canvas(t),
            self._canvas(t),
            self.hits,
            STATES_STRIDE=states.stride(0),
            WRITE=write,
            READ=read,
            H=self.hidden,
            HP=block(self.hidden),
            **self.image,
        )

    def lstm(self, which: int, t: int) -> None:
        kept, hidden = self.kept, self.hidden
        before, after = t % self.slots, (t + 1) % self.slots
        inputs = kept.inputs[_ENCODER][after]
        if which == _ENCODER:
            places = [inputs[:, -hidden:]]
        else:
            places = [inputs[:, -2 * hidden : -hidden], kept.inputs[_DECODER][after][:, -hidden:]]
            if not self.wide:
                places.append(kept.states[after])
        strides = [place.stride(0) for place in places] + [0] * (3 - len(places))
        places += places[:1] * (3 - len(places))
        gates = kept.gates[which][before]
        gain, shift = self.gain[which], self.shift[which]
        self._kernels.lstm_forward[self.examples,](
            gates if self.made.sums is None else self.made.sums,
            self.bias[which],
            self.bias[which] if gain is None else gain,
            self.bias[which] if shift is None else shift,
            gates,
            kept.cells[which][before],
            kept.cells[which][after],
            kept.stats[which][before],
            *places,
            STRIDE_1=strides[0],
            STRIDE_2=strides[1],
            STRIDE_3=strides[2],
            RULE=rule(self.norms[which]),
            EPS=self.norms[which].eps,
            GAIN=gain is not None,
            SHIFT=shift is not None,
            **self.row,
        )

    def latent(self, t: int) -> None:
        self._kernels.latent_forward[self.examples,](
            self.made.posterior,
            self.operands.b_posterior,
            self.operands.noise[t],
            self.made.means[t],
            self.made.log_stds[t],
            self.kept.inputs[_DECODER][t % self.slots],
            self.hits,
            **self.latent_options,
        )

    def write_back(self, t: int) -> None:
        """Gradients of the heads of glimpse t, and of the patch read from its canvas."""
        self._unpaint(t + 1, write=True, read=t + 1 < self.glimpses)

    def read_back(self, t: int) -> None:
        """Gradient of the first patch; `write_back` handles the others."""
        if t == 0:
            self._unpaint(0, write=False, read=True)

    def _unpaint(self, t: int, write: bool, read: bool) -> None:
        self._kernels.unpaint[self.examples,](
            self.kept.heads[t % self.slots],
            self.back.heads[t],
            self.back.inputs[_ENCODER],
            self.operands.images,
            # The last canvas is not read.
            self.kept.canvases[t % self.slots],
            self.back.canvas,
            WRITE=write,
            READ=read,
            **self.image,
        )

    def latent_back(self, t: int) -> None:
        back, log_stds = self.back, self.made.log_stds[t]
        self._kernels.latent_backward[self.examples,](
            back.inputs[_DECODER],
            log_stds if back.means is None else back.means[t],
            log_stds if back.log_stds is None else back.log_stds[t],
            self.operands.noise[t],
            log_stds,
            back.posterior[t % len(back.posterior)],
            self.posterior_sums,
            OF_MEANS=back.means is not None,
            OF_LOG_STDS=back.log_stds is not None,
            **self.latent_options,
        )

    def lstm_back(self, which: int, t: int) -> None:
        back, kept, hidden, before = self.back, self.kept, self.hidden, t % self.slots
        inputs = back.inputs[_ENCODER]
        if which == _ENCODER:
            first, second = back.encoded, inputs[:, -hidden:]
        else:
            first, second = inputs[:, -2 * hidden : -hidden], back.inputs[_DECODER][:, -hidden:]
        gain, shift = self.gain[which], self.shift[which]
        self._kernels.lstm_backward[self.examples,](
            first,
            second,
            back.heads[t + 1],
            self.operands.w_heads,
            self.bias[which] if gain is None else gain,
            self.bias[which] if shift is None else shift,
            kept.gates[which][before],
            kept.cells[which][before],
            kept.cells[which][(t + 1) % self.slots],
            kept.stats[which][before],
            back.cells[which],
            back.gates[which][t % len(back.posterior)],
            self.sums[which],
            STRIDE_1=first.stride(0),
            STRIDE_2=second.stride(0),
            HEADS=self.heads_count if which == _DECODER else 0,
            RULE=rule(self.norms[which]),
            GAIN=gain is not None,
            SHIFT=shift is not None,
            **self.row,
        )

    def clamped(self) -> Tensor:
        return self.hits

    def totals(self) -> Sequence[Tensor]:
        sizes = [4 * self.hidden, self.hidden, self.hidden]
        encoder, decoder = (a.sum(0).split(sizes) for a in self.sums)
        return (*encoder, *decoder, self.posterior_sums.sum(0))


# Captured runs

Forward = Callable[[DrawOperands], DrawRun]
Backward = Callable[[DrawOperands, DrawRun, Sequence[Tensor | None]], DrawOperands]


class _Ticket:
    """Alive while gradients may still be requested."""


class _Recording:
    def __init__(self, like: DrawOperands) -> None:
        self.operands = _empty_like(like)
        self.run: DrawRun | None = None
        #: Gradients of results and operands, by which results have one.
        self.back: dict[Hashable, tuple[list[Tensor | None], DrawOperands | None]] = {}
        self._user: weakref.ref[_Ticket] | None = None

    @property
    def free(self) -> bool:
        return self._user is None or self._user() is None

    def take(self) -> _Ticket:
        ticket = _Ticket()
        self._user = weakref.ref(ticket)
        return ticket


class Replay(NamedTuple):
    """State for the gradients of a replayed run.

    The results hold it; holding them would be a reference cycle.
    """

    entry: graphs.Entry
    ticket: _Ticket

    def gradients(self, grads: Sequence[Tensor | None], backward: Backward) -> DrawOperands:
        """Gradients of the operands, in new memory; ``backward`` is captured on first use."""
        recording: _Recording = self.entry.tensors
        device = recording.operands.noise.device
        cache = graphs.cache(device)
        name = tuple(d is not None for d in grads)
        with cache.lock, on(recording.operands.noise):
            if name not in recording.back:
                fixed = [None if d is None else torch.empty_like(d) for d in grads]
                recording.back[name] = fixed, None
            fixed = recording.back[name][0]
            cache.begin()
            _copy(grads, fixed)

            def work() -> DrawOperands:
                assert recording.run is not None
                return backward(recording.operands, recording.run, fixed)

            def record() -> None:
                recording.back[name] = fixed, work()

            cache.record(self.entry, name, work, record)
            self.entry.graphs[name].replay()
            found = recording.back[name][1]
            assert found is not None
            copied = _empty_like(found)
            _copy(found, copied)
            cache.end()
        return copied


def replayed(
    plan: Hashable, operands: DrawOperands, save: bool, forward: Forward
) -> tuple[tuple[Tensor, ...], Replay] | None:
    """Run all glimpses as a CUDA graph; None if none is available.

    ``plan`` is everything besides operands that the run depends on. ``forward`` is captured when a
    call of the same sizes repeats. Returns the results, and the state for their gradients.
    """
    noise = operands.noise
    if not may_replay(noise):
        return None
    shapes = tuple(None if a is None else (a.shape, a.dtype) for a in operands)
    cache = graphs.cache(noise.device)
    with cache.lock, on(noise):
        for place in range(PLACES if save else 1):
            key = ("DRAW", place, plan, save, shapes, product_settings())
            entry = cache.get(key, lambda: _Recording(operands))
            if entry is None:
                return None
            recording: _Recording = entry.tensors
            if recording.free:
                break
        else:
            return None
        cache.begin()
        _copy(operands, recording.operands)

        def record() -> None:
            recording.run = forward(recording.operands)

        cache.record(entry, "forward", lambda: forward(recording.operands), record)
        entry.graphs["forward"].replay()
        assert recording.run is not None
        results = tuple(a.clone() for a in recording.run.results)
        cache.end()
        return results, Replay(entry, recording.take())


def _empty_like(operands: DrawOperands) -> DrawOperands:
    found: list[Any] = [None if a is None else torch.empty_like(a) for a in operands]
    return type(operands)(*found)


def _copy(sources: Sequence[Tensor | None], targets: Sequence[Tensor | None]) -> None:
    pairs = [(a, b) for a, b in zip(sources, targets, strict=True) if a is not None]
    torch._foreach_copy_([b for _, b in pairs if b is not None], [a for a, _ in pairs])
