"""The engine for NVIDIA GPUs: each step is one matrix product and one Triton kernel.

At least `graphs.SHORTEST` steps are launched as captured CUDA graphs, unless
``LN_ZOO_CUDA_GRAPHS=0``. Packed sequences are captured with programs for the largest step. Results
are bitwise reproducible on the same device and library versions.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ln_zoo.kernels.ctypes_arguments import address, check_steps
from ln_zoo.kernels.cuda_graphs import graphs
from ln_zoo.kernels.cuda_graphs.graphs import may_replay, on, product_settings
from ln_zoo.ops.engines.base import (
    NO_MASKS,
    Chunk,
    ChunkGrads,
    Masks,
    Saved,
    Sums,
    centred,
)
from ln_zoo.ops.engines.base import Steps as ChunkSteps
from ln_zoo.ops.memory import to_device
from ln_zoo.ops.spec import Operands, Rows, Spec

#: Maximum H for which registers suffice to load all operands of a step first.
EARLY_HIDDEN = 1024

#: Maximum programs that split the rows of a chunk for sums over rows, and their tile of rows and
#: columns.
SHARES, TILE_ROWS, TILE_COLS = 128, 16, 128

#: Memory of the backward pass per chunk, bytes; large, since a GPU idles between chunks.
CHUNK_BYTES = 2**26

#: Launch options of all kernels; defaults differ between versions of triton.
OPTIONS = {"enable_fp_fusion": True}


# State of a call


class Prepared(ChunkSteps):
    """State of one call; ``stats``: elements S saved per row."""

    # The longest graph must fit into a chunk.
    least_steps = graphs.LENGTHS[0]

    def __init__(self, spec: Spec, operands: Operands, backward: bool, stats: int) -> None:
        first, second = spec.products
        super().__init__(centred(operands.w_ih, first))
        weight = centred(operands.w_hh, second)
        self.spec, self.is_backward, self.stats = spec, backward, stats
        self.hidden = hidden = weight.shape[1]
        self.one_gradient = spec.cell == "LSTM" and not (first.scale or second.scale)
        # Right operand of a step: (H, G), or backward (G, H).
        self.weight = weight.contiguous() if backward else weight.t().contiguous()
        gates = spec.gates * hidden
        shape = (gates, hidden) if backward else (hidden, gates)
        self.address = address("w_hh", self.weight, operands.x.dtype, shape, operands.x.device)
        #: Shape of the backward pass's work area per row.
        self.work = (1 if spec.gates == 1 else spec.gates + 1, hidden)
        bias, bias_hn = operands.bias, operands.bias_hn
        if spec.cell == "GRU" and (bias is None) != (bias_hn is None):
            like = operands.h0
            bias = like.new_zeros(3 * hidden) if bias is None else bias
            bias_hn = like.new_zeros(hidden) if bias_hn is None else bias_hn
        self.vectors = {
            "bias": bias,
            "bias_hn": bias_hn,
            "gain_input": operands.gain_input,
            "gain_recurrent": operands.gain_recurrent,
            "gain_out": operands.gain_out,
            "shift_out": operands.shift_out,
        }
        self._choose_kernel(operands.x.dtype, bias is not None)

    def rows_of_chunk(self, saved: bool) -> int:
        """As many as a chunk's memory holds: du, dv, the work area and states before steps."""
        gates, kind = self.spec.gates * self.hidden, self.weight.element_size()
        wide = 4 * (self.work[0] + 1) * self.hidden
        return max(self.chunk_rows, CHUNK_BYTES // max(1, 2 * gates * kind + wide))

    def _choose_kernel(self, dtype: torch.dtype, biased: bool) -> None:
        """Set the kernel, its compile-time arguments, and the slots of its address table."""
        kernels, spec = _kernels(), self.spec
        self.kernel = kernels.STEPS[spec.cell, self.is_backward]
        self.constants = constants(
            spec, self.hidden, kernels.KINDS[dtype], self.is_backward, biased, self.stats
        )
        self.slots: tuple[str, ...] = kernels.SLOTS
        self.warps = warps(self.hidden)

    def forward(self, chunk: Chunk) -> None:
        sizes, v, h, c, out, saved, _, masks = chunk
        if not out.shape[0]:
            return
        check_steps(sizes, len(v), len(h))
        rows: dict[str, Tensor | None] = {"v": v, "out": out}
        if saved is not None:
            rows |= {"u": saved.u, "c_rows": saved.c, "stats": saved.stats}
        flags = {"SAVE": saved is not None}
        steps = Steps(self, rows, {"h_or_work": h, "c": c}, flags, masks)

        def start(buffers: Buffers, examples: int) -> None:
            operand = buffers["operand"][:examples]
            if masks.dropout is None:
                operand.copy_(h[:examples])
            else:
                torch.mul(h[:examples], masks.dropout[:examples], out=operand)

        with on(v):
            steps.run(sizes, start, None)

    def backward(self, grads: ChunkGrads) -> None:
        sizes, dout, dh, dc, saved, h_prev, c_prev, du, dv, sums, _, masks = grads
        if not du.shape[0]:
            return
        check_steps(sizes, len(du), len(dh))
        work = empty((du.shape[0], *self.work), dh)
        if masks.zoneout_c is not None or self.spec.zoneout[1] or self.spec.carried:
            # The kernels recompute the cell states before norm and zoneout.
            saved = saved._replace(c=empty((du.shape[0], self.hidden), dh))
        rows = {
            "v": saved.v,
            "u": saved.u,
            "c_rows": saved.c,
            "stats": saved.stats,
            "out": dout,
            "h_prev": h_prev,
            "c_prev": c_prev,
            "du": du,
            "h_or_work": work,
        }
        passes = (
            self.constants["PASSES"]
            or masks.zoneout_h is not None
            or masks.dropout is not None
            or sizes[0] != sizes[-1]
        )
        flags = {"HAS_DOUT": dout is not None, "PASSES": passes}
        steps = Steps(self, rows, {"c": dc, "passed": dh}, flags, masks)

        def start(buffers: Buffers, examples: int) -> None:
            # Kernels add the part that bypasses products: initially dh itself.
            if passes:
                buffers["product"][:examples].zero_()
            else:
                buffers["product"][:examples].copy_(dh[:examples])

        def end(buffers: Buffers, examples: int) -> None:
            product, target = buffers["product"][:examples], dh[:examples]
            if not passes:
                target.copy_(product)
            elif masks.dropout is None:
                target.add_(product)
            else:
                target.addcmul_(product, masks.dropout[:examples])

        with on(du):
            steps.run(sizes, start, end)
            if saved.v is not None and not self.one_gradient:
                _input_gradient(self, work, saved.v, saved.stats, dv)
            _add_sums(self, work, saved, sums)

    def forms(self) -> dict[str, tuple[Any, ...]]:
        """Dtype of the tensor in each slot, and its shape without rows or examples."""
        kind, wide, hidden = self.weight.dtype, torch.float32, self.hidden
        gates = self.spec.gates * hidden
        return {
            **dict.fromkeys(("v", "u", "du"), (kind, gates)),
            **dict.fromkeys(("out", "h_prev"), (kind, hidden)),
            **dict.fromkeys(("c_rows", "c", "c_prev", "h_or_work"), (wide, hidden)),
            "stats": (wide, self.stats),
            **dict.fromkeys(("passed", "dropout"), (wide, hidden)),
            **dict.fromkeys(("zoneout_h", "zoneout_c"), (torch.bool, hidden)),
            "reset": (torch.bool,),
            **dict.fromkeys(("bias", "gain_input", "gain_recurrent"), (wide, gates)),
            **dict.fromkeys(("bias_hn", "gain_out", "shift_out"), (wide, hidden)),
        }

    def add_weight_gradient(self, d: Tensor, a: Tensor, total: Tensor, first: bool) -> None:
        if total.dtype == a.dtype:
            super().add_weight_gradient(d, a, total, first)
            return
        product = total if first else empty(total.shape, total)
        _multiply(d.t(), a, product)
        if not first:
            total.add_(product)


def constants(
    spec: Spec, hidden: int, kind: Any, backward: bool, biased: bool, stats: int
) -> dict[str, Any]:
    """Compile-time arguments of a step kernel that do not depend on a chunk.

    ``kind`` is Triton's dtype of products, ``stats`` the number of elements S saved per row.
    """
    first, second, out = spec.rows
    found = {
        "H": hidden,
        "BLOCK": block(hidden),
        "KIND": kind,
        "BIASED": biased,
        "OUT_RULE": rule(out),
        "STATS_SIZE": stats,
        "FLAG_ALIGN": 1,
        "HOLD_H": spec.zoneout[0],
        "DROPS": False,
        "RESETS": False,
        "PACKED": False,
    }
    if spec.cell == "LSTM":
        found["HOLD_C"] = spec.zoneout[1]
        found["CARRIED"] = spec.carried
    if spec.gates == 1:
        found["RELU"] = spec.cell == "RNN_RELU"
    else:
        found["JOINT"] = spec.joint
        found["EARLY"] = hidden <= EARLY_HIDDEN
        found["INPUT"] = starts(first)
        found["RECURRENT"] = starts(second)
    if backward:
        found["PASSES"] = spec.cell == "GRU" or spec.zoneout[0] > 0
    else:
        found["OUT_EPS"] = out.eps
        if spec.gates > 1:
            found["INPUT_EPS"] = first.eps
            found["RECURRENT_EPS"] = second.eps
    return found


def noise_constants(masks: Masks) -> dict[str, Any]:
    """Compile-time arguments that depend on masks; see `constants`."""
    found: dict[str, Any] = {}
    if masks.zoneout_h is not None:
        found["HOLD_H"] = -1.0
    if masks.zoneout_c is not None:
        found["HOLD_C"] = -1.0
    if masks.dropout is not None:
        found["DROPS"] = True
    if masks.reset is not None:
        found["RESETS"] = True
    return found


def block(hidden: int) -> int:
    """Lanes of a program: a power of two that holds a row of H."""
    return max(16, 1 << (hidden - 1).bit_length())


def warps(hidden: int) -> int:
    """Warps of a program for a row of H: four units per thread."""
    return max(1, block(hidden) // 128)


def starts(rows: Rows) -> int:
    """Encode groups of statistics: bit q is set if gate q starts a group; the identity is 0.

    With three gates, bits 3 and 4 are set too: the missing gate is a group.

    Example:
        >>> bin(starts(Rows(True, True, 1e-5, (4,)))), bin(starts(Rows(True, True, 1e-5, (2, 1))))
        ('0b1', '0b11101')
    """
    if not rows.scale:
        return 0
    found, gate = 0, 0
    for size in rows.groups:
        found |= 1 << gate
        gate += size
    return found | (0b11000 if gate == 3 else 0)


def rule(rows: Rows) -> int:
    """How kernels normalise a cell state: 0 identity, 1 scaled, 2 scaled and centred."""
    return int(rows.scale) + int(rows.scale and rows.center)


# Launches

#: Buffers at fixed addresses: the table, the operands of a product and its result.
Buffers = dict[str, Tensor]
#: Copies the states of a number of examples into or out of buffers.
Transfer = Callable[[Buffers, int], None]


@dataclass(frozen=True)
class StepRange:
    """Steps launched together; ``row``: the first row, ``sizes``: rows of each step."""

    row: int
    sizes: tuple[int, ...]

    @property
    def equal(self) -> bool:
        return self.sizes[0] == self.sizes[-1]

    def steps(self, backward: bool) -> list[tuple[int, int]]:
        """First row, relative to the run, and rows of each step, in execution order."""
        found, row = [], 0
        for size in self.sizes:
            found.append((row, size))
            row += size
        return found[::-1] if backward else found


class Piece(NamedTuple):
    """Packed steps launched together: index of the first, number, and programs of each."""

    first: int
    length: int
    rows: int

    def steps(self, backward: bool) -> list[tuple[int, int]]:
        """Index and programs of each step, in execution order."""
        numbers = range(self.length)
        return [(k, self.rows) for k in (reversed(numbers) if backward else numbers)]


def _runs(sizes: Sequence[int]) -> list[StepRange]:
    """Split steps into long runs of equal size, which can be captured, and the rest.

    Example:
        >>> _runs([3] * 20 + [2, 1])
        [StepRange(row=0, sizes=(3, 3, ..., 3)), StepRange(row=60, sizes=(2, 1))]
    """
    found: list[StepRange] = []
    row = first = 0
    pending: list[int] = []
    while first < len(sizes):
        last = first
        while last < len(sizes) and sizes[last] == sizes[first]:
            last += 1
        equal = list(sizes[first:last])
        if len(equal) < graphs.SHORTEST:
            pending += equal
        else:
            if pending:
                found.append(StepRange(row - sum(pending), tuple(pending)))
                pending = []
            found.append(StepRange(row, tuple(equal)))
        row += sum(equal)
        first = last
    if pending:
        found.append(StepRange(row - sum(pending), tuple(pending)))
    return found


class Steps:
    """The steps of a chunk, ready to launch.

    Tensors are given by slot: ``rows`` (rows, ...) and ``steps`` (steps, ...) of the chunk,
    ``examples`` (N, H), and further ``vectors``. ``flags`` are compile-time arguments that depend
    on the chunk.
    """

    def __init__(
        self,
        p: Prepared,
        rows: Mapping[str, Tensor | None],
        examples: Mapping[str, Tensor | None],
        flags: Mapping[str, bool],
        masks: Masks = NO_MASKS,
        *,
        steps: Mapping[str, Tensor] = MappingProxyType({}),
        vectors: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.p = p
        dropout, *by_row = masks
        rows = {**rows, **dict(zip(Masks._fields[1:], by_row, strict=True))}
        examples = {**examples, "dropout": dropout}
        # Keeps tensors alive while their addresses are used.
        self._tensors = {**rows, **examples, **p.vectors, **steps, **vectors}
        count = next(len(a) for a in rows.values() if a is not None)
        self.examples = n = next((len(a) for a in examples.values() if a is not None), 0)
        forms = p.forms()
        self._places = []
        self._addresses: list[tuple[int, torch.dtype]] = []
        for slot in p.slots:
            a = self._tensors.get(slot)
            # Never read, but not null: triton specialises on 0.
            place = p.address, 0
            if a is not None and a.numel():
                dtype, *shape = forms[slot]
                if slot in rows:
                    # In the backward pass this slot is the work area.
                    shape = [count, *(p.work if slot == "h_or_work" else shape)]
                elif slot in examples:
                    shape = [n, *shape]
                elif slot in steps:
                    shape = [len(a), *shape]
                start = address(slot, a, dtype, tuple(shape), p.weight.device)
                place = start, a.stride(0) * a.element_size() if slot in rows else 0
                if slot not in ("stats", "reset"):
                    self._addresses.append((start, dtype))
            self._places.append(place)
        self.constants = {**p.constants, **noise_constants(masks), **flags, **self._alignments()}

    def _alignments(self) -> dict[str, int]:
        found = {}
        kinds = {"KIND_ALIGN": self.p.weight.dtype, "WIDE_ALIGN": torch.float32}
        if any(of == torch.bool for _, of in self._addresses):
            kinds["FLAG_ALIGN"] = torch.bool
        for name, dtype in kinds.items():
            row = self.p.hidden * dtype.itemsize
            align = min(16, row & -row)
            fits = all(start % align == 0 for start, of in self._addresses if of == dtype)
            found[name] = align if fits else dtype.itemsize
        return found

    def run(self, sizes: Sequence[int], start: Transfer, end: Transfer | None) -> None:
        """Launch all steps; ``start`` and ``end`` copy states into and out of the buffers."""
        # A captured stream must not read host memory that later calls overwrite.
        if sizes[0] != sizes[-1] and len(sizes) >= graphs.SHORTEST and not _is_recorded(self.p):
            self._run_packed(sizes, start, end)
            return
        runs = _runs(sizes)
        for run in reversed(runs) if self.p.is_backward else runs:
            self.launch(run, start, end)

    def _run_packed(self, sizes: Sequence[int], start: Transfer, end: Transfer | None) -> None:
        """Launch steps of different sizes, with products and programs for the largest.

        One graph then serves steps of any sizes, and results are the same with and without graphs.
        """
        packed, weight = copy.copy(self), self.p.weight
        packed.constants = {**self.constants, "PACKED": True}
        # Few kinds of graphs, few wasted rows.
        grain = 8 * max(1, -(-self.examples // 64))
        room = -(-self.examples // grain) * grain
        pieces = [
            Piece(first, length, max(1, -(-sizes[first] // grain)) * grain)
            for first, length in graphs.pieces(len(sizes))
        ]
        if self.p.is_backward:
            pieces.reverse()
        if may_replay(weight):
            cache = graphs.cache(weight.device)
            with cache.lock:
                entry = cache.get(packed._key(room), lambda: self._buffers(room, fixed=True))
                if entry is not None:
                    buffers = entry.tensors
                    for piece in pieces:
                        packed._record_packed(cache, entry, piece)
                    cache.begin()
                    buffers["weight"].copy_(weight)
                    packed._launch_packed(buffers, sizes, pieces, start, end, entry)
                    cache.end()
                    return
        buffers = self._buffers(room, fixed=False)
        packed._launch_packed(buffers, sizes, pieces, start, end, None)

    def _record_packed(self, cache: graphs.Cache, entry: graphs.Entry, piece: Piece) -> None:
        cache.record(
            entry,
            (piece.length, piece.rows),
            functools.partial(self._warm_up, entry.tensors, piece.rows),
            functools.partial(self._launch, entry.tensors, piece.steps(self.p.is_backward)),
        )

    def _launch_packed(
        self,
        buffers: Buffers,
        sizes: Sequence[int],
        pieces: Sequence[Piece],
        start: Transfer,
        end: Transfer | None,
        entry: graphs.Entry | None,
    ) -> None:
        firsts = itertools.accumulate(sizes, initial=0)
        rows = torch.tensor([*zip(firsts, sizes, strict=False)], dtype=torch.int64, device="cpu")
        rows = to_device(rows, self.p.weight.device)
        slot, stride = self.p.slots.index("sizes"), rows.stride(0) * rows.element_size()
        places = self._places
        start(buffers, sizes[0])
        if self.p.is_backward:
            buffers["operand"].zero_()  # zero products for examples that have not started
        for piece in pieces:
            self._places = [*places]
            self._places[slot] = rows.data_ptr() + piece.first * stride, 0
            self._write_table(buffers["table"], 0, piece.first)
            if entry is None:
                self._launch(buffers, piece.steps(self.p.is_backward))
            else:
                entry.graphs[piece.length, piece.rows].replay()
        if end is not None:
            end(buffers, sizes[0])

    def launch(self, run: StepRange, start: Transfer, end: Transfer | None) -> None:
        examples = run.sizes[0]
        if len(run.sizes) >= graphs.SHORTEST and run.equal and may_replay(self.p.weight):
            cache = graphs.cache(self.p.weight.device)
            with cache.lock:
                entry = cache.get(self._key(examples), lambda: self._buffers(examples, fixed=True))
                if entry is not None:
                    self._replay(cache, entry, run, start, end)
                    return
        buffers = self._buffers(examples, fixed=False)
        start(buffers, examples)
        self._write_table(buffers["table"], run.row)
        self._launch(buffers, run.steps(self.p.is_backward))
        if end is not None:
            end(buffers, examples)

    def _replay(
        self,
        cache: graphs.Cache,
        entry: graphs.Entry,
        run: StepRange,
        start: Transfer,
        end: Transfer | None,
    ) -> None:
        buffers, examples = entry.tensors, run.sizes[0]
        pieces = graphs.pieces(len(run.sizes))
        for length in {length for _, length in pieces}:
            steps = StepRange(0, (examples,) * length).steps(self.p.is_backward)
            cache.record(
                entry,
                length,
                functools.partial(self._warm_up, buffers, examples),
                functools.partial(self._launch, buffers, steps),
            )
        cache.begin()
        buffers["weight"].copy_(self.p.weight)
        start(buffers, examples)
        for first, length in reversed(pieces) if self.p.is_backward else pieces:
            self._write_table(buffers["table"], run.row + first * examples)
            entry.graphs[length].replay()
        if end is not None:
            end(buffers, examples)
        cache.end()

    def _key(self, examples: int) -> tuple[Any, ...]:
        constants = tuple(sorted((name, str(value)) for name, value in self.constants.items()))
        return (self.p.spec.cell, self.p.is_backward, examples, constants, *product_settings())

    def _buffers(self, examples: int, fixed: bool) -> Buffers:
        weight = self.p.weight
        inner, outer = weight.shape
        return {
            "table": empty((len(self._places),), weight, torch.int64),
            "weight": empty(weight.shape, weight) if fixed else weight,
            "product": empty((examples, outer), weight, torch.float32),
            "operand": empty((examples, inner), weight),
        }

    def _write_table(self, table: Tensor, row: int, step: int = 0) -> None:
        """Write addresses of the tensors from a row on, and from a step on."""
        write_table(table, [address + row * stride for address, stride in self._places])

    def _warm_up(self, buffers: Buffers, examples: int) -> None:
        """One step that accesses no tensor of the call."""
        width = max(self.p.stats, (self.p.spec.gates + 1) * self.p.hidden)
        scratch = buffers["product"].new_zeros(examples, width)
        start = address("scratch", scratch, torch.float32, (examples, width), scratch.device)
        write_table(buffers["table"], [start] * len(self._places))
        self._launch(buffers, [(0, examples)])

    def _launch(self, buffers: Buffers, steps: Sequence[tuple[int, int]]) -> None:
        """A product and a kernel for each step, given by its first row, or index, and its rows."""
        p = self.p
        table, weight = buffers["table"], buffers["weight"]
        product, operand = buffers["product"], buffers["operand"]
        for row, examples in steps:
            if not p.is_backward:
                _multiply(operand[:examples], weight, product[:examples])
            p.kernel[examples,](
                table, product, operand, row, **self.constants, num_warps=p.warps, **OPTIONS
            )
            if p.is_backward:
                _multiply(operand[:examples], weight, product[:examples])


def write_table(table: Tensor, addresses: Sequence[int]) -> None:
    """Fill the table of addresses in as many launches as needed."""
    kernels = _kernels()
    width = len(kernels.SLOTS)
    for start in range(0, len(addresses), width):
        # The last launch may overlap the previous one.
        start = min(start, len(addresses) - width)
        part = addresses[start : start + width]
        kernels.write_table[1,](table[start:], *part, num_warps=1, **OPTIONS)


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    else:  # only in triton's interpreter
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


# After the steps of a chunk


def _input_gradient(p: Prepared, work: Tensor, v: Tensor, stats: Tensor, dv: Tensor) -> None:
    gates = p.spec.gates
    first = p.spec.rows[0]
    if not first.scale:
        dv.view(-1, gates, p.hidden).copy_(work[:, :gates])
        return
    _kernels().input_gradient[v.shape[0],](
        work,
        v,
        stats,
        p.vectors["gain_input"],
        dv,
        H=p.hidden,
        BLOCK=block(p.hidden),
        GATES=gates,
        STARTS=starts(first),
        STATS_SIZE=p.stats,
        num_warps=p.warps,
        **OPTIONS,
    )


def _add_sums(p: Prepared, work: Tensor, saved: Saved, sums: Sums) -> None:
    spec, bias, stats = p.spec, sums.bias, saved.stats
    (first, _, out), (_, second) = spec.rows, spec.products
    assert isinstance(second, Rows)
    gain = sums.gain_out if spec.gates == 1 else sums.gain_recurrent
    if saved.v is not None:
        _add_columns(p, work, 0, saved.v, stats, first, bias, sums.gain_input)
        bias, stats = None, stats[:, len(first.groups) :]
    if spec.cell == "GRU":
        # Gradients of R h': of r and z, and the one stored after the gradient of n.
        found = work.new_zeros(3 * p.hidden)
        _add_columns(p, work, 0, saved.u, stats, second, found, gain, skip=2)
        both, candidate = found.split((2 * p.hidden, p.hidden))
        if bias is not None:  # a joint GRU has none in the candidate
            bias[: 2 * p.hidden].add_(both)
        if sums.bias_hn is not None:
            sums.bias_hn.add_(candidate)
        return
    _add_columns(p, work, 0, saved.u, stats, second, bias, gain)
    if spec.cell == "LSTM":
        stats = stats[:, len(second.groups) + rule(out) - 1 :]
        _add_columns(p, work, 4, saved.c, stats, out, sums.shift_out, sums.gain_out, own_mean=True)


def _add_columns(
    p: Prepared,
    work: Tensor,
    first: int,
    a: Tensor | None,
    stats: Tensor,
    norm: Rows,
    bias: Tensor | None,
    gain: Tensor | None,
    *,
    skip: int = 0,
    own_mean: bool = False,
) -> None:
    """Add the sums over rows of d (to ``bias``), and of d times a normalised row (to ``gain``).

    d is in the work area (rows, its gates, H), from gate ``first`` on; after ``skip`` gates, one is
    skipped. The norm of the unnormalised rows ``a`` is ``norm``; ``stats`` starts with their
    reciprocal deviations. ``own_mean``: a row's mean is not 0, and stored before its deviation.
    """
    if a is None or (bias is None and gain is None):
        return
    hidden, count = p.hidden, work.shape[0]
    gates = a.shape[1] // hidden
    # A power of two: a compile-time constant, with few variants.
    share = max(TILE_ROWS, 1 << (-(-count // SHARES) - 1).bit_length())
    partial = empty((-(-count // share), 2, gates * hidden), work)
    columns = min(TILE_COLS, block(hidden))
    _kernels().column_sums[partial.shape[0], gates * -(-hidden // columns)](
        work,
        a,
        stats,
        partial,
        count,
        first,
        H=hidden,
        GATES=gates,
        WIDTH=work.shape[1],
        SKIP=skip,
        STARTS=starts(norm) if gain is not None else 0,
        OWN_MEAN=own_mean and norm.center,
        STATS_SIZE=p.stats,
        SHARE=share,
        ROWS=TILE_ROWS,
        COLS=columns,
        num_warps=4,
        **OPTIONS,
    )
    if bias is not None:
        bias.add_(partial[:, 0].sum(0))
    if gain is not None:
        gain.add_(partial[:, 1].sum(0))


# Support


def empty(size: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised memory on the device and, by default, of the dtype of ``like``."""
    return like.new_empty(size, dtype=dtype)


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("ln_zoo.kernels.triton.kernels")


def _is_recorded(p: Prepared) -> bool:
    return p.weight.is_cuda and torch.cuda.is_current_stream_capturing()
