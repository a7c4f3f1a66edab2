"""GPU time steps for places that normalise over examples.

As in `ln_zoo.kernels.triton.steps`, but each program owns some units of all rows of a step. It
therefore has their statistics and, in the backward pass, the sums over rows.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ln_zoo.kernels.ctypes_arguments import check_steps
from ln_zoo.kernels.triton import steps
from ln_zoo.kernels.triton.steps import OPTIONS, Buffers, Prepared
from ln_zoo.ops.engines.base import Chunk, ChunkGrads, Places, Sums
from ln_zoo.ops.memory import to_device
from ln_zoo.ops.spec import Examples, Rows, Spec


class Tile(NamedTuple):
    """The part of a step that a program processes at a time; sizes are powers of two."""

    rows: int
    units: int
    many: bool  # whether a step has more rows
    warps: int


#: Maximum rows in a program's registers, tile for more rows, and tile of programs that split the
#: rows of a step.
MAX_ROWS, MANY, SHARED_ROWS = 512, Tile(128, 4, True, 8), 64


def tile(examples: int) -> Tile:
    """Tile for the rows of a step: up to four elements of each tensor per thread.

    More units make wider accesses, fewer units more programs.
    """
    rows = max(4, 1 << (examples - 1).bit_length())
    if rows > MAX_ROWS:
        return MANY
    units = 8 if rows <= 64 else 4 if rows <= 256 else 2
    return Tile(rows, units, False, max(1, rows * units // 128))


class PreparedBatch(Prepared):
    """`Prepared` for places that normalise over examples."""

    def _choose_kernel(self, dtype: torch.dtype, biased: bool) -> None:
        kernels = _kernels()
        self.kernel = kernels.STEPS[self.spec.cell, self.is_backward]
        self.slots = kernels.SLOTS
        self.constants = constants(self.spec, self.hidden, kernels.KINDS[dtype], biased)
        # With given statistics rows are independent, except for sums in the backward pass.
        self.splits = not self.is_backward and not any(place.batch for place in self.spec.places)

    def forms(self) -> dict[str, tuple[Any, ...]]:
        found = super().forms()
        found |= {"h": found["c"], "passed": found["c"], "dv": found["v"]}
        for place, like in zip(Places._fields, ("bias", "bias", "gain_out"), strict=True):
            found |= dict.fromkeys((f"mean_{place}", f"var_{place}"), found[like])
        return found | {f"d_{name}": found[name] for name in Sums._fields}

    def forward(self, chunk: Chunk) -> None:
        sizes, v, h, c, out, saved, places, _ = chunk
        if not out.shape[0]:
            return
        check_steps(sizes, len(v), len(h))
        rows: dict[str, Tensor | None] = {"v": v, "out": out}
        if saved is not None:
            rows |= {"u": saved.u, "c_rows": saved.c}
        states, flags = {"h": h, "c": c}, {"SAVE": saved is not None}
        launched = Steps(self, rows, states, flags, _of_steps(places), {}, sizes)

        def start(buffers: Buffers, examples: int) -> None:
            buffers["operand"][:examples].copy_(h[:examples])

        with steps.on(v):
            launched.run(sizes, start, None)

    def backward(self, grads: ChunkGrads) -> None:
        sizes, dout, dh, dc, saved, h_prev, c_prev, du, dv, sums, places, _ = grads
        if not du.shape[0]:
            return
        check_steps(sizes, len(du), len(dh))
        rows = {
            "v": saved.v,
            "u": saved.u,
            "c_rows": saved.c,
            "out": dout,
            "h_prev": h_prev,
            "c_prev": c_prev,
            "du": du,
            "dv": None if self.spec.merged else dv,
        }
        states, flags = {"c": dc, "passed": dh}, {"HAS_DOUT": dout is not None}
        totals = self._totals(sums)
        launched = Steps(self, rows, states, flags, _of_steps(places), totals, sizes)

        def start(buffers: Buffers, examples: int) -> None:
            # Kernels add the part that bypasses products: initially dh itself.
            buffers["product"][:examples].zero_()

        def end(buffers: Buffers, examples: int) -> None:
            dh[:examples].add_(buffers["product"][:examples])

        with steps.on(du):
            launched.run(sizes, start, end)

    def without_means(
        self, a: Tensor, sizes: Sequence[int], wide: torch.dtype, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        packed = sizes[0] != sizes[-1]
        if packed and steps._is_recorded(self):
            return super().without_means(a, sizes, wide, out)
        (_, width), out = a.shape, steps.empty(a.shape, a) if out is None else out
        means = steps.empty((len(sizes), width), a, torch.float32)
        where = means
        if packed:
            firsts = itertools.accumulate(sizes, initial=0)
            where = torch.tensor([*zip(firsts, sizes, strict=False)], dtype=torch.int64)
            where = to_device(where, a.device)
        rows, columns = 16, min(64, max(4, 1 << (width - 1).bit_length()))
        with steps.on(a):
            _kernels().rows_less_means[len(sizes), -(-width // columns)](
                a.contiguous(),
                where,
                out,
                means,
                sizes[0],
                width,
                ROWS=rows,
                COLS=columns,
                PACKED=packed,
                num_warps=4,
                **OPTIONS,
            )
        return out, means

    def _totals(self, sums: Sums) -> dict[str, Tensor]:
        found = {}
        for name, total in sums._asdict().items():
            vector = self.vectors[name]
            if vector is not None:
                total = steps.empty(vector.shape, vector).zero_() if total is None else total
                found[f"d_{name}"] = total
        return found


def constants(spec: Spec, hidden: int, kind: Any, biased: bool) -> dict[str, Any]:
    """Compile-time arguments of a step kernel that depend neither on chunk nor rows.

    ``kind`` is Triton's dtype of products.
    """
    found = {"H": hidden, "KIND": kind, "BIASED": biased, "PACKED": False}
    found["CORRECTION"] = max(
        place.correction * place.batch for place in spec.places if isinstance(place, Examples)
    )
    if spec.merged:
        found["RELU"] = spec.cell == "RNN_RELU"
    first, second, last = spec.places
    places: dict[str, Rows | Examples] = {"LAST": last} if spec.cell != "GRU" else {}
    if not spec.merged:
        places |= {"INPUT": first, "RECURRENT": second}
    for name, place in places.items():
        found |= {name: int(place.scale) + int(place.batch), f"{name}_EPS": place.eps}
    return found


def _of_steps(places: Places) -> dict[str, Tensor]:
    found = {}
    for name, place in places._asdict().items():
        if place is not None:
            found[f"var_{name}"] = place.var
            if place.mean is not None:
                found[f"mean_{name}"] = place.mean
    return found


class Steps(steps.Steps):
    """The steps of a chunk, ready to launch.

    Tensors are given by slot: ``rows`` (rows, ...) and ``statistics`` (steps, ...) of the chunk,
    ``examples`` (N, H), ``totals`` for gradients of vectors. ``flags`` are compile-time arguments
    that depend on the chunk.
    """

    p: PreparedBatch

    def __init__(
        self,
        p: PreparedBatch,
        rows: Mapping[str, Tensor | None],
        examples: Mapping[str, Tensor | None],
        flags: Mapping[str, bool],
        statistics: Mapping[str, Tensor],
        totals: Mapping[str, Tensor],
        sizes: Sequence[int],
    ) -> None:
        super().__init__(p, rows, examples, flags, steps=statistics, vectors=totals)
        self._strides = [
            a.stride(0) * a.element_size() if (a := statistics.get(slot)) is not None else 0
            for slot in p.slots
        ]
        #: Index of each step by its first row.
        self._numbers = {row: t for t, row in enumerate(itertools.accumulate(sizes, initial=0))}

    def _write_table(self, table: Tensor, row: int, step: int = 0) -> None:
        number = step + self._numbers[row]
        places = zip(self._places, self._strides, strict=True)
        steps.write_table(table, [at + row * a + number * b for (at, a), b in places])

    def _launch(self, buffers: Buffers, run: Sequence[tuple[int, int]]) -> None:
        p = self.p
        table, weight = buffers["table"], buffers["weight"]
        product, operand = buffers["product"], buffers["operand"]
        # The table starts with the first of them in time.
        numbers = range(len(run))[:: -1 if p.is_backward else 1]
        for number, (row, examples) in zip(numbers, run, strict=True):
            if not p.is_backward:
                steps._multiply(operand[:examples], weight, product[:examples])
            rows, units, many, warps = tile(min(examples, SHARED_ROWS) if p.splits else examples)
            p.kernel[-(-p.hidden // units), -(-examples // rows) if p.splits else 1](
                table,
                product,
                operand,
                row,
                number,
                examples,
                ROWS=rows,
                UNITS=units,
                MANY=many,
                **self.constants,
                num_warps=warps,
                **OPTIONS,
            )
            if p.is_backward:
                steps._multiply(operand[:examples], weight, product[:examples])


def _kernels() -> Any:
    return importlib.import_module("ln_zoo.kernels.triton.batch_kernels")
