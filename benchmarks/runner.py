"""Shared by the benchmarks: options, interleaved contestants, tables and CSV files."""

from __future__ import annotations

import argparse
import csv
import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.timing import Spread, Times, compared, interleave
from ln_zoo.kernels.native import build

Row = dict[str, Any]


def parser(
    name: str, doc: str | None, *, rounds: int, seconds: float, threads: int | None = None
) -> argparse.ArgumentParser:
    """Parser with the options of every benchmark: threads, rounds, seconds and CSV file.

    Args:
        name: of the module in `benchmarks`.
        doc: its docstring.
        rounds: default of ``--rounds``.
        seconds: default of ``--seconds``.
        threads: default of ``--threads``; ``None``: torch's.
    """
    found = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc)
    found.add_argument("--threads", type=int, default=threads or torch.get_num_threads())
    found.add_argument("--rounds", type=int, default=rounds, help="at most")
    found.add_argument(
        "--seconds", type=float, default=seconds, help="per contestant, at most, on average"
    )
    found.add_argument("--csv", type=Path, help="table to write")
    return found


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options and set torch's number of threads."""
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    return given


def where() -> str:
    """Threads, torch's version and the processor, for titles of tables."""
    threads = torch.get_num_threads()
    return f"{threads} thread(s), torch {torch.__version__}, {build.status().cpu}"


def training_step(module: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """A call that computes a loss and the gradients of all parameters."""

    def step() -> None:
        module.zero_grad(set_to_none=True)
        loss().backward()

    return step


def compare(
    calls: Mapping[str, Callable[[], object]],
    baseline: str,
    size: Mapping[str, int],
    given: argparse.Namespace,
) -> list[Row]:
    """Time contestants in interleaved rounds; returns a `row` for each.

    Args:
        calls: the contestants by name.
        baseline: name of the contestant that ratios are relative to.
        size: columns that say what is measured.
        given: with ``rounds`` and ``seconds``.
    """
    times = interleave(calls, given.rounds, given.seconds)
    return [row(size, name, times[name], times[baseline]) for name in times]


def row(size: Mapping[str, int], contestant: str, found: Times, base: Times) -> Row:
    """Times of a contestant, where they were measured, and its ratios to the baseline."""
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "processor": build.status().cpu,
        "threads": torch.get_num_threads(),
        **size,
        "contestant": contestant,
        "rounds": len(found.wall),
        "seconds": Spread.of(found.wall).median,
        "fastest": min(found.wall),
        "fastest_ratio": min(found.wall) / min(base.wall),
        **compared(found, base),
    }


def ratio(row: Mapping[str, Any], kind: str = "wall", digits: int = 2) -> str:
    """Median and quartiles of the ratio of a row; ``kind`` is ``"wall"`` or ``"cpu"``."""
    middle, low, high = (f"{row[f'{kind}_ratio{end}']:.{digits}f}" for end in ("", "_low", "_high"))
    return f"{middle} ({low}-{high})"


def report(
    rows: Sequence[Mapping[str, Any]],
    size: Mapping[str, int],
    path: Path | None,
    more: Mapping[str, tuple[str, str]] | None = None,
    caption: str | None = None,
) -> None:
    """Print a table of training steps, and write it as CSV if a path is given.

    Args:
        rows: as `row` gives them.
        size: what was measured.
        path: of the CSV file.
        more: further columns: by title, the key in a row and the format of its values.
        caption: below the table.
    """
    sizes = ", ".join(f"{name} {number}" for name, number in size.items())
    table = Table(title=f"training step, {sizes}, {where()}", caption=caption)
    more = {"of the fastest round": ("fastest_ratio", ".2f")} | dict(more or {})
    for column in ("", "seconds", "ratio (quartiles)", "of processor time (quartiles)", *more):
        table.add_column(column, overflow="fold")
    for row in rows:
        others = ("" if row[key] is None else f"{row[key]:{form}}" for key, form in more.values())
        table.add_row(
            row["contestant"], f"{row['seconds']:.4g}", ratio(row), ratio(row, "cpu"), *others
        )
    Console().print(table)
    write(rows, path)


def print_head(columns: Sequence[str]) -> None:
    """Print where it is measured and the head of a table in Markdown."""
    print(f"{where()}\n")
    print_row(columns)
    print("|---" * len(columns) + "|")


def print_row(cells: Sequence[object]) -> None:
    """Print a row of a table in Markdown."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def write(rows: Sequence[Mapping[str, Any]], path: Path | None) -> None:
    """Write a CSV file with numbers of five digits; no-op without rows or a path."""
    if not rows or path is None:
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0])
        for row in rows:
            values = row.values()
            writer.writerow([f"{v:.5g}" if isinstance(v, float) else v for v in values])
