"""``ln-zoo data``: conversion of datasets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ln_zoo.utils.errors import printable

if TYPE_CHECKING:
    from ln_zoo.data.pen.conversion import Conversion


def iam_ondb(src: Path, dst: Path) -> None:
    """Converts the official distribution of IAM-OnDB to memory-mapped arrays, once.

    If it is interrupted, the same command starts again. Damaged files are listed and skipped; more
    than 1 % of them is an error. Use the result with --data IAMOnDB --data.root DST, or as the
    folder iam_ondb in $LN_ZOO_DATA.

    Args:
        src: folder with lineStrokes, ascii and the lists trainset.txt, testset_v.txt,
            testset_t.txt, testset_f.txt, as files or archives (.tar, .tar.gz, .zip)
        dst: folder to write
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from ln_zoo.data.pen.conversion import convert

    source, target = src.expanduser(), dst.expanduser()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("stroke files", total=None, visible=False)

        def show(read: int, of: int) -> None:
            progress.update(task, completed=read, total=of, visible=True)

        found = convert(source, target, show)
    _print_report(found, target)


def _print_report(found: Conversion, target: Path) -> None:
    from ln_zoo.data.pen.files import first_names

    print(f"{'set':10}{'lines':>10}{'points':>14}")
    for name, lines in found.lines.items():
        print(f"{name:10}{lines:>10,}{found.points[name]:>14,}")
    damaged = [f"{name} ({why})" for name, why in found.left_out.items()]
    for what, names in {
        "damaged stroke files, skipped": damaged,
        "lines without text": found.without_text,
        "listed forms without stroke files": found.missing_forms,
    }.items():
        if names:
            print(printable(f"{what}: {len(names):,} ({first_names(names)})"))
    if found.unlisted:
        print(f"stroke files of unlisted forms, skipped: {found.unlisted:,}")
    print(f"converted: {target} (--data IAMOnDB --data.root {target})")
