"""Choose the layout of a persistent kernel: layouts that fit, ranked by a model of a step's time.

Costs are cycles on an H200 (1.98 GHz), 2026-11-26. Only their ranking matters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from ln_zoo.ops.engines.cluster.geometry import (
    MAX_BLOCKS,
    SHARED_LIMIT,
    WARPS,
    Layout,
    Problem,
)

#: Maximum resident clusters of an H200 (132 multiprocessors) by number of blocks.
RESIDENT: Mapping[int, int] = MappingProxyType(
    {1: 132, 2: 66, 3: 40, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15, 9: 9, 10: 8, 11: 7, 12: 7}
    | dict.fromkeys((13, 14, 15, 16), 7)
)
#: Registers per thread, and the approximate number not available for weights.
_REGISTERS, _NEEDED_FORWARD, _NEEDED_BACKWARD = 255, 88, 100


def layouts(
    problem: Problem,
    backward: bool,
    examples: int,
    resident: Mapping[int, int] = RESIDENT,
) -> list[Layout]:
    """All layouts that fit, fastest first.

    ``resident`` is the maximum of resident clusters by number of blocks; further clusters wait for
    the first ones to finish.
    """
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


def register_tiles(layout: Layout) -> int:
    """Approximate number of tiles, second pieces included, that fit into a warp's registers."""
    p = layout.problem
    pairs = _ceil(layout.units * layout.rows, 256)
    m = layout.warp_tiles[0]
    needed = _NEEDED_BACKWARD if layout.backward else _NEEDED_FORWARD
    needed += 12 * (pairs - 1) + 4 * (m - 1) * p.pieces + 4 * (p.dropout + p.zoneout + p.lengths)
    return max(0, (_REGISTERS - needed) // 4)


def with_tiles(layout: Layout, tiles: int) -> Layout:
    """The layout with at most ``tiles`` tiles in registers, high pieces first."""
    high = min(tiles, layout.count)
    low = min(tiles - high, layout.count) if layout.problem.pieces == 2 else 0
    return replace(layout, high=high, low=low)


def step_cycles(layout: Layout) -> float:
    """Approximate cycles of a step."""
    p, blocks, backward = layout.problem, layout.blocks, layout.backward
    pairs = _ceil(layout.units * layout.rows, 256)
    _, k = layout.warp_tiles
    products = 1 if p.pieces == 1 else 2 if layout.rows == 4 else 3
    in_memory = layout.count - layout.high + (layout.count - layout.low) * (p.pieces == 2)
    product = 150 + 12 * products * layout.count + 28 * in_memory + 10 * k
    gates = 900 + 500 * pairs
    exchange = 0.0
    if blocks > 1:
        small = 200 + 10 * blocks
        bytes_per_pair = layout.units * layout.rows * 2 * p.pieces
        large = small + 0.25 * bytes_per_pair * blocks / 4
        if backward:
            bytes_per_pair = layout.warps_k * layout.units * layout.rows * 4
            large = small + 0.25 * bytes_per_pair * blocks / 4
            gates += 6 * blocks * layout.warps_k * pairs
        between = (p.out > 0) + (p.recurrent and not backward)
        exchange = large + between * small
    if not backward:
        gates += 40 * (layout.warps_k - 1) * pairs
    return product + gates + exchange


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
