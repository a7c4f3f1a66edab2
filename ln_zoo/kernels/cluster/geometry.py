"""Layout of a persistent kernel over blocks, warps, threads and memory.

`layout.h`, `forward.cu` and `backward.cu` fail to compile if theirs differs from
`Layout.shared_bytes`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from ln_zoo.ops.spec import Examples, Spec

#: Threads of a block, and its warps.
THREADS, WARPS = 256, 8
#: Maximum shared memory of a block, bytes (compute capability 9).
SHARED_LIMIT = 227 * 1024
#: Maximum blocks of a cluster, and the largest H of ``after_loop``.
MAX_BLOCKS, MAX_HIDDEN = 16, 1536
CELLS = {"LSTM": 0, "GRU": 1, "RNN_TANH": 2}
GATES = (4, 3, 1)
#: Gates that share statistics in the paper's equations.
GROUPS = ((4,), (2, 1), (1,))
STORAGE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Problem:
    """Compile-time properties of a kernel other than its layout."""

    cell: int  # one of `CELLS`
    hidden: int
    storage: int  # one of `STORAGE`: dtype of v, u, outputs and their gradients
    pieces: int  # halves of a product's operand: 2 for float32
    input: bool = False  # whether the input term is normalised
    recurrent: bool = False  # whether the recurrent term (of an RNN, the sum) is normalised
    out: int = 0  # an LSTM's cell state to the output: 0 unchanged, 1 scaled, 2 scaled and centred
    joint: bool = False  # whether both terms are added before normalisation; requires `recurrent`
    carried: bool = False  # whether an LSTM carries on the normalised cell state
    groups: tuple[int, ...] = ()  # runs of gates that share statistics; default: `GROUPS`
    batch: bool = False  # whether statistics run over the rows of a step (`BatchLayout`)
    given: bool = False  # whether these are given
    dropout: bool = False
    zoneout: bool = False
    resets: bool = False
    lengths: bool = False  # whether the number of rows varies between steps

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", self.groups or GROUPS[self.cell])

    @property
    def gates(self) -> int:
        return GATES[self.cell]

    @property
    def group_of(self) -> int:
        """Group index of each gate, two bits each, first gate lowest."""
        numbers = [number for number, size in enumerate(self.groups) for _ in range(size)]
        return sum(number << 2 * gate for gate, number in enumerate(numbers))

    @property
    def stats(self) -> int:
        return 0 if self.batch else len(self.groups) * (self.input + self.recurrent) + self.out

    @property
    def merged(self) -> bool:
        plain = self.cell == 0 and not self.input and not self.recurrent
        return self.joint or self.cell == 2 or plain

    @property
    def normalized(self) -> bool:
        """Whether a product is normalised, so that `rows.cu` computes gradients."""
        return self.input or self.recurrent

    def rows_macros(self) -> dict[str, int]:
        return {
            "KIND": self.storage,
            "CELL": self.cell,
            "GROUP_OF": self.group_of,
            "INPUT": int(self.input),
            "RECURRENT": int(self.recurrent),
        }


def problem_of(spec: Spec, hidden: int, dtype: torch.dtype) -> Problem:
    """Compile-time properties of kernels, without noise, resets and lengths."""
    return _problem(spec, hidden, dtype, dtype != torch.float32 or _single_tf32())


@functools.lru_cache(maxsize=256)
def _problem(spec: Spec, hidden: int, dtype: torch.dtype, single: bool) -> Problem:
    _, recurrent = spec.products
    over_batch = [place for place in spec.places if isinstance(place, Examples)]
    out = 0
    if spec.cell == "LSTM":
        out = 2 if spec.out in over_batch else int(spec.out.scale) + int(spec.out.center)
    return Problem(
        CELLS[spec.cell],
        hidden,
        STORAGE[dtype],
        1 if single else 2,
        input=not spec.merged and spec.input.scale,
        recurrent=recurrent.scale,
        out=out,
        joint=spec.joint,
        carried=spec.carried,
        groups=() if over_batch else next(iter(groups_of(spec)), ()),
        batch=bool(over_batch),
        given=any(not place.batch for place in over_batch),
    )


def groups_of(spec: Spec) -> list[tuple[int, ...]]:
    """Statistics groups of each distinct normalised product."""
    places = (spec.rows[i] for i in spec.product_places)
    return list(dict.fromkeys(rows.groups for rows in places if rows.scale))


def _single_tf32() -> bool:
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # torch 2.9
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


@dataclass(frozen=True)
class Layout:
    """Layout of one direction of time."""

    problem: Problem
    backward: bool
    blocks: int  # of a cluster
    units: int  # hidden units of a block, a multiple of 4
    rows: int  # of the batch per cluster, 4 or 8
    warps_m: int  # warps that split the outputs of a product
    warps_k: int  # warps that split the contracted dimension
    high: int  # weight tiles in a warp's registers; the others are in shared memory
    low: int  # the same for their second pieces

    @property
    def kernel(self) -> str:
        """Name of the kernel, and of its source without suffix."""
        return "backward" if self.backward else "forward"

    @cached_property
    def tiles(self) -> tuple[int, int]:
        """Tiles of 16 x 16 weights of a block, along outputs and along the contracted dimension."""
        own, hidden = self.problem.gates * self.units, self.problem.hidden
        return (
            (_ceil(hidden, 16), _ceil(own, 16))
            if self.backward
            else (_ceil(own, 16), _ceil(hidden, 16))
        )

    @cached_property
    def warp_tiles(self) -> tuple[int, int]:
        m, k = self.tiles
        return _ceil(m, self.warps_m), _ceil(k, self.warps_k)

    @property
    def count(self) -> int:
        m, k = self.warp_tiles
        return m * k

    @cached_property
    def weights_bytes(self) -> int:
        low = self.count - self.low if self.problem.pieces == 2 else 0
        return self.warps_m * self.warps_k * (self.count - self.high + low) * 512

    @cached_property
    def shared_bytes(self) -> int:
        p, units, rows = self.problem, self.units, self.rows
        groups = len(p.groups)
        pitch = _ceil(units, 32) * 32 + 4
        stored = pitch if p.storage == 0 else _ceil(units, 64) * 64 + 8
        size = 4 if p.storage == 0 else 2
        fragment = 16 if p.pieces == 2 and rows == 8 else 8
        operands = self.warps_k * self.warp_tiles[1] * 32 * fragment
        vectors = (3 * p.gates + 2) * pitch * 4
        parts, everyone = WARPS * rows * 4, self.blocks * rows * 4
        if self.backward:
            planes = p.gates * (1 if p.merged else 2) + 1 + (p.cell == 1) + groups * p.recurrent
            kept = p.out > 0 and not p.zoneout and not p.carried
            cells = 1 + kept if p.cell == 0 else 0
            stage = _after(planes * rows * stored * size, cells * rows * pitch * 4)
            regions = [
                2 * operands,
                2 * self.blocks * self.warps_k * units * rows * 4,
                vectors,
                3 * _after(stage, rows * p.stats * 4),
                2 * parts * groups,
                parts * 2,
                2 * everyone * groups,
                everyone * 2,
                64,
                64,
            ]
        else:
            gate_pitch = 8 * pitch + 4
            stage = _after(p.gates * rows * stored * size, rows * groups * p.input * 4)
            regions = [
                2 * operands,
                self.warps_k * p.gates * gate_pitch * 4,
                vectors,
                3 * stage,
                parts * groups,
                parts * 2,
                everyone * groups,
                everyone * 2,
            ]
        return regions_bytes([*regions, 64]) + self.weights_bytes

    def macros(self) -> dict[str, int]:
        p = self.problem
        return {
            "BACKWARD": int(self.backward),
            **p.rows_macros(),
            "JOINT": int(p.joint),
            "CARRIED": int(p.carried),
            "HIDDEN": p.hidden,
            "PIECES": p.pieces,
            "OUT": p.out,
            "DROPOUT": int(p.dropout),
            "ZONEOUT": int(p.zoneout),
            "RESETS": int(p.resets),
            "LENGTHS": int(p.lengths),
            "BLOCKS": self.blocks,
            "UNITS": self.units,
            "ROWS": self.rows,
            "WARPS_M": self.warps_m,
            "WARPS_K": self.warps_k,
            "HIGH": self.high,
            "LOW": self.low,
            "SHARED_BYTES": self.shared_bytes,
        }

    def fragments(self) -> torch.Tensor:
        """Index of each fragment's weight in the flat (G, H) matrix; -1 for zero.

        int32, [block][warp][tile][lane][element], with eight 16-bit elements per lane.
        """
        gates, units, hidden = self.problem.gates, self.units, self.problem.hidden
        own_m, own_k = self.warp_tiles
        shape = (self.blocks, self.warps_m * self.warps_k, own_m * own_k, 32, 4, 2)
        block, warp, tile, lane, register, element = torch.meshgrid(
            *(torch.arange(n, dtype=torch.int32) for n in shape), indexing="ij"
        )
        m = (warp % self.warps_m) * own_m + tile % own_m
        k = (warp // self.warps_m) * own_k + tile // own_m
        # A lane's four elements along k are adjacent, as in the operands.
        m = m * 16 + lane // 4 + 8 * (register % 2)
        k = k * 16 + 4 * (lane % 4) + 2 * (register // 2) + element
        if self.backward:
            gate, unit, column = k % gates, block * units + k // gates, m
            there = (k < gates * units) & (unit < hidden) & (column < hidden)
        else:
            gate, unit, column = m // units, block * units + m % units, k
            there = (m < gates * units) & (unit < hidden) & (column < hidden)
        # By rounding up, warps may share tiles.
        mine, all_tiles = self.tiles
        tile_m = (warp % self.warps_m) * own_m + tile % own_m
        tile_k = (warp // self.warps_m) * own_k + tile // own_m
        there &= (tile_m < mine) & (tile_k < all_tiles)
        index = (gate * hidden + unit) * hidden + column
        return torch.where(there, index, -1).flatten()


@dataclass(frozen=True)
class BatchLayout(Layout):
    """Layout of one direction of time, with ``eights`` tiles of eight rows."""

    eights: int = 1

    @property
    def kernel(self) -> str:
        return f"batch_{super().kernel}"

    @property
    def line(self) -> int:
        """Units of a warp."""
        return 8 if self.units % 8 == 0 and self.eights > 1 else 4

    @property
    def parts(self) -> int:
        """Warps that share the same units."""
        return WARPS // (self.units // self.line)

    @property
    def mine(self) -> int:
        """Rows of a thread."""
        return _ceil(8 * self.eights, 32 // self.line * self.parts)

    @property
    def shared_bytes(self) -> int:
        p, units, eights = self.problem, self.units, self.eights
        operands = self.warps_k * self.warp_tiles[1] * 32 * (8 * p.pieces)
        pitch = _ceil(units, 32) * 32 + 4
        vectors = (3 * p.gates + 2) * pitch * 4
        one = self.parts * units * 4 if self.parts > 1 else 0  # of a sum over rows
        if self.backward:
            sums = p.gates * (1 + p.input + p.recurrent) + (p.cell == 1)
            regions = [
                2 * eights * operands,
                2 * eights * self.blocks * self.warps_k * units * 8 * 4,
                vectors,
                2 * one,
                sums * one,
                2 * eights * 8 * 4,
                2 * eights * 8 * 4,
            ]
        else:
            terms = self.warps_k * p.gates * eights * 8 * (units // self.line | 1) * self.line * 4
            first = p.gates * (1 + p.input) * one
            regions = [2 * eights * operands, terms, vectors, first, p.gates * one, one, one]
        return regions_bytes([*regions, 64]) + self.weights_bytes

    def macros(self) -> dict[str, int]:
        return super().macros() | {"EIGHTS": self.eights, "GIVEN": int(self.problem.given)}


def regions_bytes(regions: Iterable[int]) -> int:
    """Shared memory of consecutive regions, each aligned to 16 bytes."""
    return functools.reduce(_after, regions, 0)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _after(offset: int, size: int) -> int:
    return (offset + size + 15) & ~15
