"""Recurrent layers of ln_zoo against torch.nn's and against loops written by hand, on the CPU.

``python -m benchmarks.rnn`` prints tables and writes ``rnn.csv`` and ``rnn.png``; see
``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import contestants, memory, modes, runner
from benchmarks.contestants import ALL_CELLS, BASELINE, CELLS, Absent, Size
from benchmarks.timing import Spread, compared, interleave
from ln_zoo.kernels.native import build

SIZES = (
    "50,64,256,256",
    "100,8,400,400",
    "500,8,400,400",
    "64,128,256,256",
    "30,64,620,2400",
    "784,100,1,100",
    "1,1,400,400",
)
#: What ``--small`` measures: calls that take less than a millisecond.
SMALL = ("1,1,16,16", "1,8,16,16", "20,1,16,16", "20,8,32,32", "1,1,256,256")
_TITLES = {
    "train": "training step, time",
    "last": "training step with a loss of the last time step, time",
    "infer": "inference, time",
    "step": "one step of one example, time",
    "memory": "peak memory of a training step",
}
MODES = tuple(_TITLES)
#: Bytes of outputs from which on memory is measured: less drowns in the pages of the process.
_WEIGHABLE = 2**20


@dataclass(frozen=True)
class Row:
    """One line of the CSV file: a contestant in one mode, of one cell and size.

    Ratios are to ``baseline`` of the same cell, size and mode: to torch's layer (mode ``step``: to
    its cell) in float32; in another precision, to the contestant itself in float32. ``low`` and
    ``high`` are quartiles over the rounds.
    """

    date: str
    torch: str
    processor: str
    threads: int
    cell: str
    mode: str
    T: int
    B: int
    I: int  # noqa: E741
    H: int
    contestant: str
    precision: str
    baseline: str
    rounds: int
    ms: float | None = None
    wall_ratio: float | None = None
    wall_ratio_low: float | None = None
    wall_ratio_high: float | None = None
    cpu_ratio: float | None = None
    cpu_ratio_low: float | None = None
    cpu_ratio_high: float | None = None
    peak_mib: float | None = None
    peak_ratio: float | None = None

    @property
    def size(self) -> Size:
        """T, B, I and H."""
        return Size(self.T, self.B, self.I, self.H)

    @property
    def label(self) -> str:
        """The contestant, and its precision unless that is float32."""
        return _label(self.contestant, self.precision)


@dataclass(frozen=True)
class Job:
    """What is measured together: contestants in one mode, of one cell and size."""

    cell: str
    mode: str
    size: Size
    names: Sequence[str]
    precisions: Sequence[str]
    threads: int
    rounds: int
    seconds: float

    def row(self, contestant: str, precision: str, **measured: Any) -> Row:
        """A line of the CSV file."""
        return Row(
            date=datetime.date.today().isoformat(),
            torch=torch.__version__,
            processor=build.status().cpu,
            threads=self.threads,
            cell=self.cell,
            mode=self.mode,
            **dataclasses.asdict(self.size),
            contestant=contestant,
            precision=precision,
            baseline=_label(*_baseline(contestant, precision)),
            **measured,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.small:
        parser.set_defaults(
            sizes=[Size.parse(text) for text in SMALL],
            modes=["infer", "train", "step"],
            contestants=["naive", "LayerNorm", "Identity"],
            threads=1,
        )
        arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    console = Console()
    known = build.status()
    console.print(
        f"torch {torch.__version__}, {arguments.threads} threads, {known.cpu} "
        f"({' '.join(known.features)})"
    )
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for job in _jobs(arguments):
        report(f"{job.cell} {job.mode} {job.size}")
        rows += _weigh(job) if job.mode == "memory" else _time(job)
        # After each size, so that a run that is stopped leaves what it has.
        runner.write([dataclasses.asdict(row) for row in rows], out / "rnn.csv")
    for table in tables(rows):
        console.print(table)
    draw(rows, out / "rnn.png")
    console.print(f"{out / 'rnn.csv'}, {out / 'rnn.png'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rnn",
        description="Times ln_zoo's recurrent layers, torch.nn's and loops written by hand, "
        "interleaved in one process; prints ratios to torch.nn (median and quartiles of ratios "
        "within a round).",
    )
    parser.add_argument("--cells", nargs="+", choices=ALL_CELLS, default=list(CELLS))
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=Size.parse,
        default=[Size.parse(text) for text in SIZES],
        metavar="T,B,I,H",
        help=f"steps, examples, inputs, hidden units; default: {' '.join(SIZES)}",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=[mode for mode in MODES if mode != "last"],
        help="train: forward and backward; last (only if named): the same with a loss of the last "
        "time step; infer: forward without gradients; step: a cell on one example, step by step; "
        "memory: peak memory of a training step, each in its own process",
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=modes.PRECISIONS,
        default=["float32"],
        help="bf16-mixed is compared with the same contestant in float32",
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help=f"small calls, where other options say nothing else: sizes {' '.join(SMALL)}, layers "
        "and steps, naive, LayerNorm and Identity as ln_zoo runs them, one thread",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15, help="rounds at most")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="per contestant and size at most, about"
    )
    parser.add_argument(
        "--norms", nargs="+", default=["LayerNorm", "BatchNorm"], help="norms of ln_zoo"
    )
    parser.add_argument(
        "--contestants",
        nargs="+",
        metavar="NAME",
        help="only these, such as naive or LayerNorm/native; torch takes part in any case",
    )
    parser.add_argument("--out", default="runs/benchmarks", help="folder of rnn.csv and rnn.png")
    return parser


def _jobs(arguments: argparse.Namespace) -> Iterator[Job]:
    """Each cell, mode and size in turn."""
    for cell in arguments.cells:
        for mode in arguments.modes:
            names = arguments.contestants or contestants.names(arguments.norms, mode)
            sizes = arguments.sizes
            if mode == "step":  # T and B are 1, so that some sizes fall together
                sizes = dict.fromkeys(Size(1, 1, size.I, size.H) for size in sizes)
            for size in sizes:
                yield Job(
                    cell,
                    mode,
                    size,
                    names=list(dict.fromkeys([BASELINE, *names])),
                    precisions=list(dict.fromkeys(["float32", *arguments.precision])),
                    threads=arguments.threads,
                    rounds=arguments.repeats,
                    seconds=arguments.seconds,
                )


def _time(job: Job) -> Iterator[Row]:
    make: dict[str, Callable[..., Callable[[], Tensor]]] = {
        "train": modes.training_step,
        "last": functools.partial(modes.training_step, last=True),
        "infer": modes.inference,
        "step": modes.streaming,
    }
    calls: dict[tuple[str, str], Callable[[], Tensor]] = {}
    for name in job.names:
        try:
            for precision in job.precisions:
                if job.mode == "step":
                    contestant = contestants.cell_step(name, job.cell, job.size)
                else:
                    training = job.mode in ("train", "last")
                    contestant = contestants.layer(name, job.cell, job.size, training)
                calls[name, precision] = make[job.mode](contestant, job.size, precision)
        except Absent as reason:
            report(f"  left out: {reason}")
    times = interleave(calls, job.rounds, job.seconds)
    for (name, precision), found in times.items():
        baseline = times[_baseline(name, precision)]
        steps = modes.STEPS if job.mode == "step" else 1
        yield job.row(
            name,
            precision,
            rounds=len(found.wall),
            ms=1000 * Spread.of(found.wall).median / steps,
            **compared(found, baseline),
        )


def _weigh(job: Job) -> Iterator[Row]:
    size, peaks = job.size, dict[tuple[str, str], int]()
    if not memory.AVAILABLE:
        report("  left out: peak memory is read from /proc, which this system does not have")
        return
    if 4 * size.T * size.B * size.H < _WEIGHABLE:
        report("  left out: too small to tell its memory from that of the process")
        return
    for name in job.names:
        try:
            contestants.layer(name, job.cell, job.size, training=True)
        except Absent as reason:
            report(f"  left out: {reason}")
            continue
        for precision in job.precisions:
            peaks[name, precision] = memory.peak(job.cell, str(size), name, precision, job.threads)
    for (name, precision), peak in peaks.items():
        ratio = peak / peaks[_baseline(name, precision)]
        yield job.row(name, precision, rounds=1, peak_mib=peak / 2**20, peak_ratio=ratio)


def report(text: str) -> None:
    """Says how far it is."""
    print(text, file=sys.stderr, flush=True)


def _label(contestant: str, precision: str) -> str:
    return contestant if precision == "float32" else f"{contestant} {precision}"


def _baseline(contestant: str, precision: str) -> tuple[str, str]:
    return (BASELINE if precision == "float32" else contestant), "float32"


# What is shown


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """A table for each cell and mode, with a section for each size."""
    for cell, mode, panel in _panels(rows):
        weighed = mode == "memory"
        table = Table(
            title=f"{cell}: {_TITLES[mode]}", title_justify="left", box=box.SIMPLE, pad_edge=False
        )
        table.add_column("T,B,I,H", no_wrap=True)
        table.add_column("contestant", no_wrap=True)
        table.add_column("MiB" if weighed else "ms", justify="right", no_wrap=True)
        table.add_column("ratio" if weighed else "ratio (quartiles)", no_wrap=True)
        if not weighed:
            table.add_column("cpu", no_wrap=True)
        for size in dict.fromkeys(row.size for row in panel):
            members = [row for row in panel if row.size == size]
            for i, row in enumerate(members):
                ratio, low, high = _ratio_and_quartiles(row)
                first = ["" if i else str(size), row.label]
                if weighed:
                    table.add_row(*first, f"{row.peak_mib:.1f}", f"{ratio:.2f}")
                else:
                    spread = "" if row.label == row.baseline else f" ({low:.2f}-{high:.2f})"
                    cpu = f"{row.cpu_ratio:.2f}"
                    table.add_row(*first, f"{row.ms:.4g}", f"{ratio:.2f}{spread}", cpu)
            table.add_section()
        yield table


def draw(rows: Sequence[Row], picture: Path) -> None:
    """Draws a panel for each cell and mode: ratios over sizes, with quartiles, and a line at 1."""
    from matplotlib.figure import Figure  # not pyplot: nothing global, no display

    panels = list(_panels(rows))
    everyone = list(dict.fromkeys(row.label for row in rows))
    figure = Figure(figsize=(11, 3.4 * len(panels)), layout="constrained")
    for axis, (cell, mode, panel) in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
    ):
        sizes = list(dict.fromkeys(row.size for row in panel))
        labels = [x for x in dict.fromkeys(row.label for row in panel) if x != BASELINE]
        for i, label in enumerate(labels):
            points = [row for row in panel if row.label == label]
            places = [sizes.index(row.size) + (i - (len(labels) - 1) / 2) * 0.1 for row in points]
            ends = [_ratio_and_quartiles(row) for row in points]
            medians = [median for median, _, _ in ends]
            bars = [[m - low for m, low, _ in ends], [high - m for m, _, high in ends]]
            color = f"C{everyone.index(label)}"
            axis.errorbar(places, medians, bars, fmt="o", color=color, capsize=2, label=label)
        axis.axhline(1, color="black", linewidth=1)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axis.set_xlabel("steps T, examples B, inputs I, hidden units H")
        axis.set_ylabel("peak memory ratio" if mode == "memory" else "time ratio")
        axis.set_title(f"{cell}, {mode}: ratio to torch.nn (bf16-mixed: to float32)")
        axis.grid(alpha=0.3, which="both", axis="y")
        if labels:
            axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(picture, dpi=120)


def _ratio_and_quartiles(row: Row) -> tuple[float, float, float]:
    if row.peak_ratio is not None:
        return row.peak_ratio, row.peak_ratio, row.peak_ratio
    assert row.wall_ratio is not None
    assert row.wall_ratio_low is not None
    assert row.wall_ratio_high is not None
    return row.wall_ratio, row.wall_ratio_low, row.wall_ratio_high


def _panels(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    for cell, mode in dict.fromkeys((row.cell, row.mode) for row in rows):
        yield cell, mode, [row for row in rows if (row.cell, row.mode) == (cell, mode)]


if __name__ == "__main__":
    sys.exit(main())
