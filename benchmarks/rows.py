"""Rows of the tables that benchmarks of whole models print and write."""

from __future__ import annotations

import csv
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.timing import Times, ratios
from ln_zoo.kernels.native import build


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


def report(
    rows: Sequence[Mapping[str, Any]],
    size: Mapping[str, int],
    path: Path | None,
    more: Mapping[str, tuple[str, str]] | None = None,
    caption: str | None = None,
) -> None:
    """Prints a table of training steps, and writes it where a path is given.

    Args:
        rows: as `row` gives them.
        size: what was measured.
        path: of the CSV file.
        more: further columns: by title, the key in a row and the format of its values.
        caption: below the table.
    """
    sizes = ", ".join(f"{name} {number}" for name, number in size.items())
    where = f"{rows[0]['threads']} thread(s), torch {rows[0]['torch']}, {rows[0]['processor']}"
    table = Table(title=f"training step, {sizes}, {where}", caption=caption)
    more = more or {}
    for column in ("", "seconds", "ratio (quartiles)", "of processor time (quartiles)", *more):
        table.add_column(column, overflow="fold")

    def ratio(row: Mapping[str, Any], kind: str) -> str:
        middle, low, high = (row[f"{kind}_ratio{end}"] for end in ("", "_low", "_high"))
        return f"{middle:.3g} ({low:.3g}-{high:.3g})"

    for row in rows:
        others = ("" if row[key] is None else f"{row[key]:{form}}" for key, form in more.values())
        cells = (f"{row['seconds']:.4g}", ratio(row, "wall"), ratio(row, "cpu"), *others)
        table.add_row(row["contestant"], *cells)
    Console().print(table)
    if path:
        write(rows, path)


def write(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
