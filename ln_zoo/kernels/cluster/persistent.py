"""Persistent kernels: all time steps of a layer in one launch (`layout.h`).

Operands of products have 16 bits: float32 is split into two halves (22 bits), or one (11 bits) if
``torch.backends.cuda.matmul.allow_tf32`` is set; an initial state above 65504 gives NaN. Results
are bitwise reproducible.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ln_zoo.kernels.cluster import driver
from ln_zoo.kernels.cluster.arguments import (
    AfterLoopArguments,
    BackwardArguments,
    ForwardArguments,
    PackArguments,
    ScaleArguments,
    StatisticsArguments,
)
from ln_zoo.kernels.cluster.choice import layouts, with_tiles
from ln_zoo.kernels.cluster.geometry import (
    MAX_BLOCKS,
    SHARED_LIMIT,
    STORAGE,
    THREADS,
    Layout,
    Problem,
    problem_of,
)
from ln_zoo.ops.engines.base import Chunk, ChunkGrads, Masks, Steps, Sums, centred
from ln_zoo.ops.memory import to_device
from ln_zoo.ops.spec import Operands, Spec
from ln_zoo.ops.time_chunks import dropped_rows

#: Maximum bytes of input products per launch, except for a single step.
CHUNK_BYTES = 2**28
#: Threads of the kernels around the loop.
_SCALE_THREADS, _PACK_THREADS, _STATISTICS_THREADS, _AFTER_THREADS = 1024, 256, 256, 384
_log = logging.getLogger("ln_zoo")


class Compiled:
    """One direction of time, compiled for a GPU; ``index``: source of each weight fragment."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.kernel = load_kernel(
            f"{layout.kernel}.cu",
            layout.kernel,
            layout.macros(),
            THREADS,
            layout.blocks,
            layout.shared_bytes,
        )
        self._device = device

    @functools.cached_property
    def index(self) -> Tensor:
        return self.layout.fragments().to(self._device)


def load_kernel(
    source: str, name: str, macros: dict[str, int], threads: int, cluster: int, shared_bytes: int
) -> Any:
    """A kernel of this package; tests substitute an emulation."""
    return driver.Kernel(source, name, macros, threads, cluster, shared_bytes)


@functools.cache
def resident_clusters(device: torch.device) -> dict[int, int]:
    """Maximum resident clusters of a GPU by number of blocks, one block per multiprocessor."""
    probe = driver.Kernel("probe.cu", "probe", {}, THREADS, MAX_BLOCKS, SHARED_LIMIT)
    with on(device):
        return {blocks: probe.max_clusters(blocks) for blocks in range(1, MAX_BLOCKS + 1)}


@functools.lru_cache(maxsize=256)
def compiled(problem: Problem, backward: bool, examples: int, device: torch.device) -> Compiled:
    """The fastest layout with its kernel; deterministic.

    CudaError if a kernel does not compile, or no layout can run.
    """
    for layout in layouts(problem, backward, examples, resident_clusters(device)):
        found = without_spills(layout, device)
        if found.kernel.max_clusters():
            _log.debug("%s", found.layout)
            return found
    raise driver.CudaError(f"no cluster of {device} can run {problem}")


def without_spills(layout: Layout, device: torch.device) -> Compiled:
    """The layout with as many tiles in registers as the compiler fits."""
    found = Compiled(layout, device)
    tiles = layout.high + layout.low
    while found.kernel.local_bytes and tiles:
        tiles = max(0, tiles - 2)
        smaller = with_tiles(layout, tiles)
        if smaller.shared_bytes > SHARED_LIMIT:
            break
        found = Compiled(smaller, device)
    return found


class Persistent(Steps):
    """Time steps of one call."""

    leaves_constants = True

    def __init__(self, spec: Spec, operands: Operands) -> None:
        first, self._recurrent = spec.products
        super().__init__(centred(operands.w_ih, first))
        self.spec, self.operands = spec, operands
        dtype = operands.x.dtype
        self.hidden = operands.w_hh.shape[1]
        self.problem = problem_of(spec, self.hidden, dtype)
        self.one_gradient = self.problem.merged
        self.chunk_rows = CHUNK_BYTES // (self.w_ih.shape[0] * dtype.itemsize)
        self._device = operands.x.device
        #: Centred weights in float32, and the bits of the largest one.
        self._weights: tuple[Tensor, Tensor] | None = None

    # Launches

    def _launch(self, kernel: Any, grid: int, arguments: Any) -> None:
        kernel(grid, arguments, stream_of(self._device))

    def _rows_kernel(self, name: str, threads: int, shared_bytes: int = 0) -> Any:
        macros = tuple(self.problem.rows_macros().items())
        return kernel_of("rows.cu", name, macros, threads, shared_bytes)

    def _centred_weights(self) -> tuple[Tensor, Tensor]:
        if self._weights is None:
            weight = self.operands.w_hh
            gates, hidden = weight.shape
            total = self._new(gates, hidden)
            largest = torch.zeros(1, dtype=torch.int32, device=self._device)
            kernel = kernel_of(
                "pack.cu", "scale_weights", self._pack_macros(), _SCALE_THREADS, 4096
            )
            groups = len(self.problem.groups)
            arguments = ScaleArguments(
                w=weight,
                centred=total,
                largest=largest,
                G=gates,
                H=hidden,
                groups=groups,
                group_of=self.problem.group_of,
                centre=int(self._recurrent.scale and self._recurrent.center),
                kind=STORAGE[weight.dtype],
            )
            self._launch(kernel, groups * -(-hidden // 32), arguments)
            self._weights = total, largest
        return self._weights

    def _pack_macros(self) -> tuple[tuple[str, int], ...]:
        return ("KIND", self.problem.storage), ("PIECES", self.problem.pieces)

    def _packed(self, found: Compiled) -> dict[str, Tensor]:
        total, largest = self._centred_weights()
        index = found.index
        pieces = torch.empty(
            self.problem.pieces, len(index), dtype=torch.int16, device=self._device
        )
        scale = self._new(1)
        kernel = kernel_of("pack.cu", "pack_weights", self._pack_macros(), _PACK_THREADS, 0)
        arguments = PackArguments(
            centred=total,
            index=index,
            largest=largest,
            high=pieces[0],
            low=pieces[-1],
            unscale=scale,
            count=len(index),
        )
        self._launch(kernel, min(264, -(-len(index) // _PACK_THREADS)), arguments)
        return {"high": pieces[0], "low": pieces[-1], "scale": scale}

    def _new(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)

    def _shared_arguments(self, found: Compiled, sizes: Sequence[int]) -> dict[str, Any]:
        """Arguments of each kernel of time steps."""
        o, ragged = self.operands, found.layout.problem.lengths
        return {
            **self._packed(found),
            "bias": o.bias,
            "bias_candidate": o.bias_hn,
            "gain_input": o.gain_input,
            "gain_recurrent": o.gains(self.spec)[1],
            "gain_out": o.gain_out,
            "shift_out": o.shift_out,
            "first_rows": first_rows(sizes, self._device) if ragged else None,
            "steps": len(sizes),
            "examples": sizes[0],
        }

    def _noise(self, masks: Masks) -> dict[str, Any]:
        share_h, share_c = self.spec.zoneout
        return {
            "dropout": masks.dropout,
            "hold_h": masks.zoneout_h,
            "hold_c": masks.zoneout_c,
            "share_h": share_h,
            "share_c": share_c,
            "reset": masks.reset,
        }

    def _compiled(self, backward: bool, sizes: Sequence[int], masks: Masks) -> Compiled:
        held = masks.zoneout_h is not None or masks.zoneout_c is not None
        problem = replace(
            self.problem,
            dropout=masks.dropout is not None,
            zoneout=held or any(self.spec.zoneout),
            resets=masks.reset is not None,
            lengths=sizes[0] != sizes[-1],
        )
        return compiled(problem, backward, sizes[0], self._device)

    # Directions of time

    def forward(self, chunk: Chunk) -> None:
        sizes, v, h, c, out, saved, _, masks = chunk
        if not len(v):
            return
        p = self.problem
        with on(self._device):
            found = self._compiled(False, sizes, masks)
            stats = saved.stats if saved is not None else None
            if p.input:
                if stats is None:
                    stats = self._new(len(v), p.stats)
                statistics = StatisticsArguments(
                    v=v, stats=stats, rows=len(v), H=self.hidden, stride=p.stats, offset=0,
                    eps=self.spec.input.eps,
                )  # fmt: skip
                kernel = self._rows_kernel("input_statistics", _STATISTICS_THREADS)
                self._launch(kernel, min(2048, -(-len(v) // 8)), statistics)
            arguments = ForwardArguments(
                **self._shared_arguments(found, sizes),
                **self._noise(masks),
                v=v,
                stats=stats,
                h=h,
                c=c,
                out=out,
                u=None if saved is None else saved.u,
                cells=None if saved is None else saved.c,
                eps_recurrent=self._recurrent.eps,
                eps_out=self.spec.out.eps,
            )
            self._launch(found.kernel, _grid(found.layout, sizes[0]), arguments)

    def backward(self, grads: ChunkGrads) -> None:
        sizes, dout, dh, dc, saved, h_prev, c_prev, du, dv, sums, _, masks = grads
        if not len(du):
            return
        p, rows, hidden, examples = self.problem, len(du), self.hidden, sizes[0]
        with on(self._device):
            found = self._compiled(True, sizes, masks)
            parts = 4 if self.spec.cell == "GRU" else p.gates
            work = self._new(rows, parts, hidden) if p.normalized else None
            biases = None if p.normalized else self._new(examples, parts, hidden)
            by_example = self._new(2, examples, hidden) if p.out else None
            dout = None if dout is None else aligned(dout)
            h_before = aligned(h_prev) if self.spec.cell == "GRU" else None
            c_before = None if c_prev is None else aligned(c_prev)
            back = self._back(saved.u, h_prev, sizes, masks)
            arguments = BackwardArguments(
                **self._shared_arguments(found, sizes),
                **self._noise(masks),
                v=saved.v,
                u=saved.u,
                stats=saved.stats,
                dout=dout,
                h_before=h_before,
                c_before=c_before,
                c_after=saved.c,
                back=back,
                dh=dh,
                dc=dc,
                work=work,
                du=du,
                dv=dv,
                bias_sums=biases,
                gain_out_sums=None if by_example is None else by_example[0],
                shift_out_sums=None if by_example is None else by_example[1],
            )
            self._launch(found.kernel, _grid(found.layout, examples), arguments)
            if by_example is not None:
                _add(sums.gain_out, by_example[0])
                _add(sums.shift_out, by_example[1])
            if work is not None:
                self._after_loop(work, saved.v, saved.u, saved.stats, du, dv, sums)
            if biases is not None:
                _add(sums.bias, biases[:, : p.gates].flatten(1))
                _add(sums.bias_hn, biases[:, -1])

    def _back(self, u: Tensor, h_prev: Tensor, sizes: Sequence[int], masks: Masks) -> Tensor | None:
        """R' u of each group of statistics, (rows, groups, H); see backward.cu."""
        if not self.problem.recurrent:
            return None
        total, _ = self._centred_weights()
        sizes_of_groups = [self.hidden * n for n in self.problem.groups]
        groups = total.split(sizes_of_groups)
        if self.spec.merged:
            parts = zip(u.split(sizes_of_groups, 1), groups, strict=True)
            return torch.cat([torch.mm(a, part.to(u.dtype)) for a, part in parts], 1)
        if masks.dropout is not None:
            room = torch.empty_like(h_prev)
            h_prev = dropped_rows(h_prev, masks.dropout, sizes, room)
        squares = torch.cat([torch.mm(part.t(), part) for part in groups], 1)
        return torch.mm(h_prev, squares.to(h_prev.dtype))

    def _after_loop(
        self,
        work: Tensor,
        v: Tensor | None,
        u: Tensor,
        stats: Tensor,
        du: Tensor,
        dv: Tensor,
        sums: Sums,
    ) -> None:
        p, o, rows = self.problem, self.operands, len(work)
        width = p.gates * self.hidden
        blocks = min(132, max(1, rows // 16))  # one block per multiprocessor
        sum_u = sums.gain_out if p.gates == 1 else sums.gain_recurrent
        partial = {
            "bias": (sums.bias, width),
            "bias_hn": (sums.bias_hn, self.hidden),
            "sum_v": (sums.gain_input, width),
            "sum_u": (sum_u, width),
        }
        parts = {
            name: None if total is None else self._new(blocks, n)
            for name, (total, n) in partial.items()
        }
        merged = self.spec.merged
        arguments = AfterLoopArguments(
            work=work,
            v=v,
            u=u,
            stats=stats,
            gain_v=o.gain_input,
            gain_u=o.gains(self.spec)[1],
            dv=None if merged else dv,
            du=du,
            **parts,
            rows=rows,
            H=self.hidden,
            stride=p.stats,
            offset_v=0,
            offset_u=len(p.groups) * p.input,
        )
        shared_bytes = after_loop_bytes(p.gates, self.hidden, len(p.groups))
        kernel = self._rows_kernel("after_loop", _AFTER_THREADS, shared_bytes)
        self._launch(kernel, blocks, arguments)
        for name, (total, _) in partial.items():
            part = parts[name]
            if total is not None and part is not None:
                _add(total, part)

    def add_weight_gradient(self, d: Tensor, a: Tensor, total: Tensor, first: bool) -> None:
        if total.dtype == a.dtype:
            super().add_weight_gradient(d, a, total, first)
            return
        product = _wide_product(d.t(), a, total.dtype)
        _ = total.copy_(product) if first else total.add_(product)


@functools.lru_cache(maxsize=256)
def kernel_of(
    source: str, name: str, macros: tuple[tuple[str, int], ...], threads: int, shared_bytes: int
) -> Any:
    """A kernel without clusters, of one block each."""
    return load_kernel(source, name, dict(macros), threads, 1, shared_bytes)


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))  # only in the emulation


def after_loop_bytes(gates: int, hidden: int, groups: int) -> int:
    """Shared memory of ``after_loop``: partial means and gains, later the sums of all teams."""
    team = next(n for n in (32, 64, 128, _AFTER_THREADS) if 4 * n >= hidden)
    width = gates * hidden
    return max(192 * groups + 8 * (width + 4), 4 * width * (_AFTER_THREADS // team))


def _grid(layout: Layout, examples: int) -> int:
    return -(-examples // layout.rows) * layout.blocks


def _add(total: Tensor | None, parts: Tensor) -> None:
    if total is not None:
        total.add_(parts.sum(0, dtype=total.dtype))


def aligned(a: Tensor) -> Tensor:
    """The tensor, or a copy, at an address aligned for 16-byte copies."""
    return a if a.data_ptr() % 16 == 0 else a.clone()


def first_rows(sizes: Sequence[int], device: torch.device) -> Tensor:
    """First row of each step and the end of the last, int32, (T + 1,); does not synchronise."""
    return to_device(torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32), device)


def stream_of(device: torch.device) -> int:
    """Handle of torch's current stream on a GPU."""
    return torch.cuda.current_stream(device).cuda_stream


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context manager that makes a GPU current."""
    return torch.cuda.device(device)
