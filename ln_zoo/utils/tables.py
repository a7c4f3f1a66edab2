"""Tables of text: Markdown, CSV, and rich for a terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ln_zoo.utils.files import naming

if TYPE_CHECKING:
    from rich.table import Table


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: int = 0) -> str:
    r"""A Markdown table; the last ``numeric`` columns are right-aligned.

    Example:
        >>> print(markdown_table(["name", "size"], [["a", "1"], ["b|c", "2"]], numeric=1))
        | name | size |
        |---|---:|
        | a | 1 |
        | b\|c | 2 |
    """
    rule = "|" + "---|" * (len(head) - numeric) + "---:|" * numeric
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", rule, *lines])


def csv_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Comma-separated values with a header line."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue().rstrip("\n")


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write `csv_table` to a file; its folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        path.write_text(f"{csv_table(head, rows)}\n", encoding="utf-8", newline="")


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """A line for each row, with aligned columns two spaces apart."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def rich_table() -> Table:
    """An empty table for `rich`, as narrow as possible: columns must fit 80 characters."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
