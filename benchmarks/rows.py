"""Rows of the tables that benchmarks of whole models print and write."""

from __future__ import annotations

import csv
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Times, ratios
from ln_zoo.ops.engines.native import build


def row(
    threads: int, size: Mapping[str, int], contestant: str, found: Times, base: Times
) -> dict[str, Any]:
    """What was measured of a contestant, where, and its ratios to the baseline."""
    wall, cpu = ratios(found.wall, base.wall), ratios(found.cpu, base.cpu)
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "processor": build.status().cpu,
        "threads": threads,
        **size,
        "contestant": contestant,
        "rounds": len(found.wall),
        "seconds": sorted(found.wall)[len(found.wall) // 2],
        "wall_ratio": wall.median,
        "wall_ratio_low": wall.low,
        "wall_ratio_high": wall.high,
        "cpu_ratio": cpu.median,
        "cpu_ratio_low": cpu.low,
        "cpu_ratio_high": cpu.high,
    }


def title(row: Mapping[str, Any], size: Mapping[str, int]) -> str:
    """Of the table that has this row."""
    sizes = ", ".join(f"{name} {number}" for name, number in size.items())
    where = f"{row['threads']} thread(s), torch {row['torch']}, {row['processor']}"
    return f"training step, {sizes}, {where}"


def write(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
