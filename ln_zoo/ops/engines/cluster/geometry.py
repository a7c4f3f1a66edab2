"""How the work of a persistent kernel is laid out: over blocks, warps and threads, and in memory.

`layout.h`, `forward.cu` and `backward.cu` compute the same layout from the same numbers, and do not
compile if it differs from `Layout.shared_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

#: Threads of a block, and its warps.
THREADS, WARPS = 256, 8
#: Shared memory that a block can have, in bytes (compute capability 9).
SHARED_LIMIT = 227 * 1024
#: Blocks of a cluster at most.
MAX_BLOCKS = 16
CELLS = {"LSTM": 0, "GRU": 1, "RNN_TANH": 2}
GATES = (4, 3, 1)
#: Gates that share statistics in the paper's equations.
GROUPS = ((4,), (2, 1), (1,))
STORAGE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Problem:
    """What is fixed when a kernel is compiled, but for the layout.

    Args:
        cell: of `CELLS`.
        hidden: H.
        storage: of `STORAGE`: the precision of v, u, outputs and their gradients.
        pieces: halves that an operand of a product is split into: 2 for float32.
        input: whether the input term is normalised.
        recurrent: whether the recurrent term is; of an RNN, the sum.
        out: an LSTM's cell state on its way to the output: 0 as it is, 1 scaled, 2 centred too.
        joint: whether both terms are added before they are normalised, as ``recurrent`` says.
        carried: whether an LSTM carries on the normalised cell state.
        groups: runs of gates that share statistics; default: `GROUPS`.
        dropout: whether there is recurrent dropout.
        zoneout: whether there is zoneout.
        resets: whether there are resets.
        lengths: whether the number of rows changes from step to step.
    """

    cell: int
    hidden: int
    storage: int
    pieces: int
    input: bool = False
    recurrent: bool = False
    out: int = 0
    joint: bool = False
    carried: bool = False
    groups: tuple[int, ...] = ()
    dropout: bool = False
    zoneout: bool = False
    resets: bool = False
    lengths: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", self.groups or GROUPS[self.cell])

    @property
    def gates(self) -> int:
        """Summed inputs per unit."""
        return GATES[self.cell]

    @property
    def group_of(self) -> int:
        """The number of each gate's group, two bits each, the first gate lowest."""
        numbers = [number for number, size in enumerate(self.groups) for _ in range(size)]
        return sum(number << 2 * gate for gate, number in enumerate(numbers))

    @property
    def stats(self) -> int:
        """Statistics kept per row."""
        return len(self.groups) * (self.input + self.recurrent) + self.out

    @property
    def merged(self) -> bool:
        """Whether only the sum of both terms is kept."""
        plain = self.cell == 0 and not self.input and not self.recurrent
        return self.joint or self.cell == 2 or plain

    @property
    def normalized(self) -> bool:
        """Whether a product is normalised, so that `rows.cu` has gradients to compute."""
        return self.input or self.recurrent

    def rows_macros(self) -> dict[str, int]:
        """What `rows.cu` is compiled with."""
        return {
            "KIND": self.storage,
            "CELL": self.cell,
            "GROUP_OF": self.group_of,
            "INPUT": int(self.input),
            "RECURRENT": int(self.recurrent),
        }


@dataclass(frozen=True)
class Layout:
    """One direction of a problem on clusters of a certain size.

    Args:
        problem: what is computed.
        backward: in which direction of time.
        blocks: of a cluster.
        units: hidden units of a block, a multiple of 4.
        rows: of the batch, per cluster: 4 or 8.
        warps_m: warps that share the outputs of a product.
        warps_k: warps that share the numbers that are contracted.
        high: tiles of weights that a warp keeps in registers; the others are in shared memory.
        low: the same of their second pieces.
    """

    problem: Problem
    backward: bool
    blocks: int
    units: int
    rows: int
    warps_m: int
    warps_k: int
    high: int
    low: int

    @cached_property
    def tiles(self) -> tuple[int, int]:
        """Tiles of 16 x 16 weights of a block: over outputs, and over what is contracted."""
        own, hidden = self.problem.gates * self.units, self.problem.hidden
        return (
            (_ceil(hidden, 16), _ceil(own, 16))
            if self.backward
            else (_ceil(own, 16), _ceil(hidden, 16))
        )

    @cached_property
    def warp_tiles(self) -> tuple[int, int]:
        """The same of a warp."""
        m, k = self.tiles
        return _ceil(m, self.warps_m), _ceil(k, self.warps_k)

    @property
    def count(self) -> int:
        """Tiles of a warp."""
        m, k = self.warp_tiles
        return m * k

    @cached_property
    def weights_bytes(self) -> int:
        """Shared memory for weights."""
        low = self.count - self.low if self.problem.pieces == 2 else 0
        return self.warps_m * self.warps_k * (self.count - self.high + low) * 512

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
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
        total = 0
        for region in (*regions, 64):
            total = _after(total, region)
        return total + self.weights_bytes

    def macros(self) -> dict[str, int]:
        """What kernels are compiled with."""
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
        """Where each weight of the fragments comes from in the flat (G, H) matrix; -1: zero.

        Returns:
            int32, [block][warp][tile][lane][element]: eight elements of 16 bits per lane.
        """
        gates, units, hidden = self.problem.gates, self.units, self.problem.hidden
        own_m, own_k = self.warp_tiles
        shape = (self.blocks, self.warps_m * self.warps_k, own_m * own_k, 32, 4, 2)
        block, warp, tile, lane, register, element = torch.meshgrid(
            *(torch.arange(n, dtype=torch.int32) for n in shape), indexing="ij"
        )
        m = (warp % self.warps_m) * own_m + tile % own_m
        k = (warp // self.warps_m) * own_k + tile // own_m
        # A lane's four elements along k are neighbours, as those of the operands are.
        m = m * 16 + lane // 4 + 8 * (register % 2)
        k = k * 16 + 4 * (lane % 4) + 2 * (register // 2) + element
        if self.backward:
            gate, unit, column = k % gates, block * units + k // gates, m
            there = (k < gates * units) & (unit < hidden) & (column < hidden)
        else:
            gate, unit, column = m // units, block * units + m % units, k
            there = (m < gates * units) & (unit < hidden) & (column < hidden)
        # Rounded up, a warp may have tiles that another one has too.
        mine, all_tiles = self.tiles
        tile_m = (warp % self.warps_m) * own_m + tile % own_m
        tile_k = (warp // self.warps_m) * own_k + tile // own_m
        there &= (tile_m < mine) & (tile_k < all_tiles)
        index = (gate * hidden + unit) * hidden + column
        return torch.where(there, index, -1).flatten()


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _after(offset: int, size: int) -> int:
    return (offset + size + 15) & ~15
