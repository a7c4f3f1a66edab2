"""Choose the layout of a persistent kernel: layouts that fit, ranked by a model of a step's time.

Costs are cycles on an H200 (1.98 GHz), 2026-11-26. Only their ranking matters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from ln_zoo.kernels.cluster.geometry import (
    MAX_BLOCKS,
    SHARED_LIMIT,
    WARPS,
    BatchLayout,
    Layout,
    Problem,
)

AnyLayout = TypeVar("AnyLayout", bound=Layout)

#: Maximum resident clusters of an H200 (132 multiprocessors) by number of blocks.
RESIDENT: Mapping[int, int] = MappingProxyType(
    {1: 132, 2: 66, 3: 40, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15, 9: 9, 10: 8, 11: 7, 12: 7}
    | dict.fromkeys((13, 14, 15, 16), 7)
)
#: Registers per thread, and the approximate number not available for weights.
_REGISTERS, _NEEDED_FORWARD, _NEEDED_BACKWARD = 255, 88, 100
#: With batch statistics: maximum rows of a thread, whose values stay in registers, and tiles
#: of eight rows, each of which has a thread.
MAX_MINE, MAX_EIGHTS = 4, 32


def layouts(
    problem: Problem,
    backward: bool,
    examples: int,
    resident: Mapping[int, int] = RESIDENT,
) -> Sequence[Layout]:
    """All layouts that fit, fastest first.

    ``resident`` is the maximum of resident clusters by number of blocks; further clusters wait for
    the first ones to finish.
    """
    if problem.batch:
        over_batch = _batch_layouts(problem, backward, _ceil(examples, 8), resident)
        return sorted(over_batch, key=batch_step_cycles)
    found = []
    for blocks, rows in itertools.product(range(1, MAX_BLOCKS + 1), (4, 8)):
        units = _ceil(_ceil(problem.hidden, blocks), 4) * 4
        # Skip layouts with idle blocks.
        if (blocks - 1) * units >= problem.hidden:
            continue
        clusters = _ceil(examples, rows)
        if not resident[blocks]:
            continue
        waves = _ceil(clusters, resident[blocks])
        layout = min(_warps(problem, backward, blocks, units, rows), key=step_cycles, default=None)
        if layout is not None:
            found.append((waves * step_cycles(layout), layout))
    return [layout for _, layout in sorted(found, key=lambda pair: pair[0])]


def _warps(
    problem: Problem, backward: bool, blocks: int, units: int, rows: int
) -> Iterator[Layout]:
    for warps_m, warps_k in itertools.product(range(1, WARPS + 1), repeat=2):
        if warps_m * warps_k > WARPS:
            continue
        layout = Layout(problem, backward, blocks, units, rows, warps_m, warps_k, 0, 0)
        m, k = layout.tiles
        if warps_m > m or warps_k > k:
            continue
        layout = with_tiles(layout, register_tiles(layout))
        if layout.shared_bytes <= SHARED_LIMIT:
            yield layout


def _batch_layouts(
    problem: Problem, backward: bool, eights: int, resident: Mapping[int, int]
) -> Iterator[BatchLayout]:
    numbers = range(1, WARPS + 1)
    for blocks, warps_m, warps_k in itertools.product(range(1, MAX_BLOCKS + 1), numbers, numbers):
        units = _ceil(_ceil(problem.hidden, blocks), 4) * 4
        idle = (blocks - 1) * units >= problem.hidden
        if idle or not resident[blocks] or warps_m * warps_k > WARPS or units > 4 * WARPS:
            continue
        layout = BatchLayout(problem, backward, blocks, units, 8, warps_m, warps_k, 0, 0, eights)
        m, k = layout.tiles
        if warps_m > m or warps_k > k or layout.mine > MAX_MINE or eights > MAX_EIGHTS:
            continue
        # A thread keeps its rows' values.
        more = 24 * layout.mine if backward else 16 * layout.mine + 8
        layout = with_tiles(layout, register_tiles(layout, more))
        if layout.shared_bytes <= SHARED_LIMIT:
            yield layout


def register_tiles(layout: Layout, more: int = 0) -> int:
    """Approximate number of tiles, second pieces included, that fit into a warp's registers.

    ``more``: registers that a kernel needs besides.
    """
    p = layout.problem
    pairs = _ceil(layout.units * layout.rows, 256)
    m = layout.warp_tiles[0]
    needed = more + (_NEEDED_BACKWARD if layout.backward else _NEEDED_FORWARD)
    needed += 12 * (pairs - 1) + 4 * (m - 1) * p.pieces + 4 * (p.dropout + p.zoneout + p.lengths)
    return max(0, (_REGISTERS - needed) // 4)


def with_tiles(layout: AnyLayout, tiles: int) -> AnyLayout:
    """The layout with at most ``tiles`` tiles in registers, high pieces first."""
    high = min(tiles, layout.count)
    low = min(tiles - high, layout.count) if layout.problem.pieces == 2 else 0
    return replace(layout, high=high, low=low)


def step_cycles(layout: Layout) -> float:
    """Approximate cycles of a step."""
    p, backward = layout.problem, layout.backward
    pairs = _ceil(layout.units * layout.rows, 256)
    gates = 900 + 500 * pairs
    if backward:
        exchange = exchange_cycles(layout, layout.warps_k * layout.rows * 4)
        gates += 6 * layout.blocks * layout.warps_k * pairs if layout.blocks > 1 else 0
    else:
        exchange = exchange_cycles(layout, layout.rows * 2 * p.pieces)
        gates += 40 * (layout.warps_k - 1) * pairs
    between = (p.out > 0) + (p.recurrent and not backward)
    return product_cycles(layout) + gates + exchange + between * exchange_cycles(layout, 0)


def batch_step_cycles(layout: BatchLayout) -> float:
    """The same where one cluster has all rows."""
    together = min(layout.eights, 2)  # tiles of a product
    rounds = _ceil(layout.eights, together * (WARPS // (layout.warps_m * layout.warps_k)))
    width = 4 * layout.warps_k if layout.backward else 2 * layout.problem.pieces
    return (
        product_cycles(layout) * (1 if together == 1 else 1.3) * rounds
        + 900
        + 500 * layout.mine
        + exchange_cycles(layout, width * 8 * layout.eights)
    )


def product_cycles(layout: Layout) -> float:
    """Approximate cycles of a warp's product with one tile of rows."""
    p = layout.problem
    products = 1 if p.pieces == 1 else 2 if layout.rows == 4 else 3
    in_memory = layout.count - layout.high + (layout.count - layout.low) * (p.pieces == 2)
    return 150 + 12 * products * layout.count + 28 * in_memory + 10 * layout.warp_tiles[1]


def exchange_cycles(layout: Layout, width: int) -> float:
    """Approximate cycles of an exchange of ``width`` bytes of each unit."""
    if layout.blocks == 1:
        return 0.0
    return 200 + 10 * layout.blocks + 0.25 * layout.units * width * layout.blocks / 4


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
