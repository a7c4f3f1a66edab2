"""``ln-zoo data``: datasets converted to the form in which they are read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ln_zoo.zoo.catalog import printable

if TYPE_CHECKING:
    from ln_zoo.data.iam_ondb_files import Conversion

_NAMED = 20


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 1 if it failed, 130 if it was interrupted."""
    parser = argparse.ArgumentParser(
        prog="ln-zoo data",
        description="Converts a dataset from the form in which its owners distribute it to the "
        "one that ln_zoo reads.",
        allow_abbrev=False,
    )
    datasets = parser.add_subparsers(dest="dataset", metavar="DATASET", required=True)
    _add_iam_ondb(datasets)
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except KeyboardInterrupt:
        print(
            f"ln-zoo data {arguments.dataset}: interrupted; the same command goes on where it was",
            file=sys.stderr,
        )
        return 130
    return 0


def _add_iam_ondb(datasets: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = datasets.add_parser(
        "iam_ondb",
        help="IAM-OnDB, handwritten lines, from its XML files",
        description="Converts the official distribution of IAM-OnDB to memory-mapped arrays, "
        "once. If it is interrupted, the same command resumes it. Damaged files "
        "are named and left out; more than 1 % of them is an error.",
        epilog="Then: --data IAMOnDB --data.root DST, or a folder iam_ondb in $LN_ZOO_DATA.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        type=Path,
        help="folder with lineStrokes, ascii and the lists trainset.txt, testset_v.txt, "
        "testset_t.txt, testset_f.txt, as files or archives (.tar, .tar.gz, .zip)",
    )
    parser.add_argument("target", metavar="DST", type=Path, help="folder to write")
    parser.set_defaults(run=_iam_ondb)


def _iam_ondb(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from ln_zoo.data.iam_ondb_files import convert

    source, target = arguments.source.expanduser(), arguments.target.expanduser()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("stroke files", total=None, visible=False)

        def show(read: int, of: int) -> None:
            progress.update(task, completed=read, total=of, visible=True)

        found = convert(source, target, show)
    _report(found, target)


def _report(found: Conversion, target: Path) -> None:
    """What a conversion found, or one that was done before."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("set")
    for heading in ("lines", "points"):
        table.add_column(heading, justify="right")
    for name, lines in found.lines.items():
        table.add_row(name, f"{lines:,}", f"{found.points[name]:,}")
    Console(highlight=False, markup=False).print(table)
    damaged = [f"{name} ({why})" for name, why in found.left_out.items()]
    for what, names in {
        "damaged stroke files, left out": damaged,
        "lines without text": found.without_text,
        "listed forms without stroke files": found.missing_forms,
    }.items():
        if names:
            more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
            print(printable(f"{what}: {len(names):,} ({', '.join(names[:_NAMED])}{more})"))
    if found.unlisted:
        print(f"stroke files of forms in no list, left out: {found.unlisted:,}")
    print(f"converted: {target} (--data IAMOnDB --data.root {target})")
