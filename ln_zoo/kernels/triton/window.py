"""An LSTM with a window over a text on NVIDIA GPUs (equations: `ln_zoo.ops.loops.window`).

Before an LSTM step, the window's product is added to its input term; after it, one program per row
moves the window. The backward pass mirrors this.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ln_zoo.kernels.ctypes_arguments import address, check_steps
from ln_zoo.kernels.triton import steps
from ln_zoo.kernels.triton.steps import OPTIONS, Buffers, Prepared, block, starts
from ln_zoo.kernels.triton.window_slots import BACKWARD_SLOTS, FORWARD_SLOTS
from ln_zoo.kernels.window import WindowChunk, WindowGrads
from ln_zoo.ops.engines.base import Chunk, ChunkGrads
from ln_zoo.ops.loops.window import WindowOperands
from ln_zoo.ops.spec import Operands, Spec

#: Warps of a program of a window, and of a tile of a product.
WARPS = 4
#: Elements of each matrix per program at a time.
NUMBERS = 2048
#: Rows, columns and depth of a tile of a product.
TILE_ROWS, TILE_COLS, TILE_DEPTH = 16, 64, 32


class TritonWindow:
    """`ln_zoo.kernels.window.WindowSteps` as kernels; ``operands`` are the layer's."""

    def __init__(
        self,
        steps: Prepared,
        spec: Spec,
        operands: Operands,
        windows: WindowOperands,
        backward: bool,
    ) -> None:
        self.p, self.windows = steps, windows
        w_window = steps.w_ih[:, operands.x.shape[2] :]
        #: Input weight of windows, (E, 4H); in the backward pass its transpose.
        self.input_weight = (w_window if backward else w_window.t()).contiguous()

    def forward(self, chunk: Chunk, window: WindowChunk) -> None:
        sizes, v, h, c, out, saved, *_ = chunk
        if not len(out):
            return
        self._check(sizes, len(v), len(h))
        rows: dict[str, Tensor | None] = {"v": v, "out": out}
        if saved is not None:
            rows |= {"u": saved.u, "c_rows": saved.c, "stats": saved.stats}
        tensors = {
            "v": v,
            "input_weight": self.input_weight,
            **{"weight": self.windows.weight, "bias": self.windows.bias},
            **window._asdict(),
        }
        states = {"h_or_work": h, "c": c}
        launched = _Forward(self, rows, states, {"SAVE": saved is not None}, tensors)

        def start(buffers: Buffers, examples: int) -> None:
            buffers["operand"].copy_(h)

        with steps.on(v):
            launched.run(sizes, start, None)

    def backward(self, grads: ChunkGrads, window: WindowGrads) -> None:
        sizes, dout, dh, dc, saved, _, c_prev, du, dv, sums, *_ = grads
        if not len(du):
            return
        self._check(sizes, len(du), len(dh))
        p = self.p
        work = steps.empty((len(du), *p.work), dh)
        rows = {
            "v": saved.v,
            "u": saved.u,
            "c_rows": saved.c,
            "stats": saved.stats,
            "out": dout,
            "c_prev": c_prev,
            "du": du,
            "h_or_work": work,
        }
        tensors = {
            **{"v": saved.v, "stats": saved.stats, "gain_input": p.vectors["gain_input"]},
            **{"work": work, "dv": dv, "weight": self.windows.weight},
            **{"dshown": window.dshown, "dkappa": window.dkappa},
            **{"terms": window.terms, "parameters": window.parameters},
        }
        launched = _Backward(self, rows, {"c": dc}, {"HAS_DOUT": dout is not None}, tensors)

        def start(buffers: Buffers, examples: int) -> None:
            buffers["product"].copy_(dh)
            buffers["dwindow"].copy_(window.dwindow)
            buffers["input_weight"].copy_(self.input_weight)

        def end(buffers: Buffers, examples: int) -> None:
            dh.copy_(buffers["product"])
            window.dwindow.copy_(buffers["dwindow"])

        with steps.on(du):
            launched.run(sizes, start, end)
            steps._add_sums(p, work, saved, sums)

    def _check(self, sizes: Sequence[int], rows: int, examples: int) -> None:
        check_steps(sizes, rows, examples)
        of_text = len(self.windows.text)
        if {*sizes, examples} != {of_text}:
            raise RuntimeError(f"Expected {of_text} examples as in the text, got {examples}")


class _Steps(steps.Steps):
    """Steps of a chunk with a window, ready to launch; see `steps.Steps`.

    ``tensors`` of the window's kernels, except for the text, are given by slot.
    """

    #: Slots of the window kernels' table, in order.
    slots: tuple[str, ...]

    def __init__(
        self,
        of: TritonWindow,
        rows: Mapping[str, Tensor | None],
        examples: Mapping[str, Tensor | None],
        flags: Mapping[str, bool],
        tensors: Mapping[str, Tensor | None],
    ) -> None:
        super().__init__(of.p, rows, examples, flags)
        text = of.windows.text.contiguous()
        n, self.characters, letters = text.shape
        kinds, units = of.windows.kappa.shape[1], of.p.hidden
        self._own_tensors = {**tensors, "text": text}
        count = next(len(a) for a in rows.values() if a is not None)
        of_rows: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("v", "dv"), (4 * units,)),
            "stats": (of.p.stats,),
            "work": of.p.work,
            **dict.fromkeys(("shown", "dshown"), (letters,)),
            **{"terms": (4 * kinds,), "parameters": (3 * kinds,)},
        }
        of_call = {
            **{"gain_input": (4 * units,), "input_weight": (letters, 4 * units)},
            **{"weight": (3 * kinds, units), "bias": (3 * kinds,)},
            **{"text": (n, self.characters, letters), "window": (n, letters)},
            **dict.fromkeys(("kappa", "dkappa"), (n, kinds)),
        }
        shapes = of_call | {slot: (count, *shape) for slot, shape in of_rows.items()}
        self._own_places = []
        for slot in self.slots:
            a = self._own_tensors.get(slot)
            place = of.p.address, 0  # never read
            if slot == "characters":
                place = self.characters, 0
            elif a is not None and a.numel():
                start = address(slot, a, torch.float32, shapes[slot], of.p.weight.device)
                place = start, a.stride(0) * a.element_size() if slot in of_rows else 0
            self._own_places.append(place)
        #: Compile-time arguments of the window's own kernels.
        self.of_window = constants(kinds, letters, units)

    def _key(self, examples: int) -> tuple[Any, ...]:
        # Without the length of texts, which is in the table.
        return ("window", *sorted(self.of_window.items()), *super()._key(examples))

    def _buffers(self, examples: int, fixed: bool) -> Buffers:
        # Both tables in one buffer: captured kernels need a fixed address.
        buffers = super()._buffers(examples, fixed)
        table = buffers["table"]
        return {**buffers, "table": steps.empty((len(table) + len(self.slots),), table)}

    def _write_table(self, table: Tensor, row: int, step: int = 0) -> None:
        places = (*self._places, *self._own_places)
        steps.write_table(table, [at + row * stride for at, stride in places])

    def _own(self, table: Tensor) -> Tensor:
        return table[-len(self.slots) :]

    def _warm_up(self, buffers: Buffers, examples: int) -> None:
        of = self.of_window
        width = max(5 * of["H"], 4 * of["K"], of["E"], self.p.stats)
        largest = max(examples * width, 4 * of["H"] * max(of["E"], of["K"]))
        scratch = buffers["product"].new_zeros(largest)
        start = address("scratch", scratch, torch.float32, (largest,), scratch.device)
        # Empty texts.
        entries = [0 if slot == "characters" else start for slot in self.slots]
        steps.write_table(buffers["table"], [start] * len(self._places) + entries)
        super()._warm_up(buffers, examples)


class _Forward(_Steps):
    slots = FORWARD_SLOTS

    def _launch(self, buffers: Buffers, run: Sequence[tuple[int, int]]) -> None:
        table, width = self._own(buffers["table"]), 4 * self.p.hidden
        letters = self.of_window["E"]
        for row, examples in run:
            _kernels().add_window[-(-examples // TILE_ROWS), -(-width // TILE_COLS)](
                table,
                row,
                examples,
                G=width,
                E=letters,
                ROWS=TILE_ROWS,
                COLS=TILE_COLS,
                DEPTH=TILE_DEPTH,
                num_warps=WARPS,
                **OPTIONS,
            )
            super()._launch(buffers, [(row, examples)])
            _kernels().window_forward[examples,](
                table, buffers["operand"], row, **self.of_window, num_warps=WARPS, **OPTIONS
            )


class _Backward(_Steps):
    slots = BACKWARD_SLOTS

    def _key(self, examples: int) -> tuple[Any, ...]:
        return (self._has_dshown, *super()._key(examples))

    @property
    def _has_dshown(self) -> bool:
        return self._own_tensors["dshown"] is not None

    def _buffers(self, examples: int, fixed: bool) -> Buffers:
        buffers = super()._buffers(examples, fixed)
        like, width = buffers["product"], 4 * self.p.hidden
        letters = self.of_window["E"]
        return {
            **buffers,
            "dv": steps.empty((examples, width), like),
            "input_weight": steps.empty((width, letters), like),
            "dwindow": steps.empty((examples, letters), like),
        }

    def _launch(self, buffers: Buffers, run: Sequence[tuple[int, int]]) -> None:
        p, table = self.p, self._own(buffers["table"])
        gradient, dwindow, dv = (buffers[name] for name in ("product", "dwindow", "dv"))
        for row, examples in run:
            _kernels().window_backward[examples,](
                table,
                gradient,
                dwindow,
                row,
                **self.of_window,
                HAS_DSHOWN=self._has_dshown,
                num_warps=WARPS,
                **OPTIONS,
            )
            super()._launch(buffers, [(row, examples)])
            _kernels().input_gradient_of_step[examples,](
                table,
                dv,
                row,
                H=p.hidden,
                BLOCK=block(p.hidden),
                STARTS=starts(p.spec.rows[0]),
                STATS_SIZE=p.stats,
                num_warps=p.warps,
                **OPTIONS,
            )
            torch.mm(dv, buffers["input_weight"], out=dwindow)


def constants(kinds: int, letters: int, units: int) -> dict[str, int]:
    """Compile-time arguments for K Gaussians, character vectors of size E, and H units."""
    kp, ep = _power(kinds), _power(letters)
    return {
        **{"H": units, "K": kinds, "KP": kp, "E": letters, "EP": ep},
        "UNITS": max(2, min(128, NUMBERS // kp)),
        "PLACES": max(2, min(32, NUMBERS // max(kp, ep))),
    }


def _power(n: int) -> int:
    return 1 << max(1, (n - 1).bit_length())


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("ln_zoo.kernels.triton.window_kernels")
