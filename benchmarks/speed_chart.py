"""Draws the README's chart of speed from the committed CSV files.

A training step of an LSTM, layer-normalised, as a ratio to torch's LSTM without normalisation on
the same processor: a loop as people write it, torch's TorchScript example, and ours. Nothing is
measured here: ``python -m benchmarks.speed_chart`` only draws. What was not measured on a processor
has no bar.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
#: T, B, I, H, and what stands above the panel.
SIZES = {
    ("64", "128", "256", "256"): "64 steps, batch 128, 256 units",
    ("500", "8", "400", "400"): "500 steps, batch 8, 400 units",
}
#: File and processor of each CPU, and what it is called.
CPUS = {
    ("rnn_speed.csv", "AMD EPYC"): "AMD EPYC, AVX-512\n2 threads",
    ("rnn_speed_avx2.csv", "AMD EPYC"): "AMD EPYC, AVX2\n1 thread",
    ("rnn_speed_intel.csv", "Intel(R) Xeon(R) Processor"): "Intel Xeon, AVX-512\n2 threads",
    ("rnn_speed_amx.csv", "Intel(R) Xeon(R) Processor"): "Intel Xeon, AMX\n2 threads",
}
GPU = "NVIDIA H200\nCUDA graphs"
CONTESTANTS = {
    "naive": "Python loop",
    "torchscript": "TorchScript",
    "LayerNorm/native": "ln_zoo",
}
_COLORS = {"naive": "#b0b0b0", "torchscript": "#808080", "LayerNorm/native": "#3f51b5"}
#: Where the axis ends; a longer bar is cut, with its value beside it.
_END = 5.0


def ratios(size: Sequence[str]) -> dict[str, dict[str, float]]:
    """For each processor the ratio of each contestant that was measured there.

    Args:
        size: T, B, I and H, as in the files.

    Example:
        >>> found = ratios(("500", "8", "400", "400"))
        >>> {name: round(value, 2) for name, value in found["Intel Xeon, AMX\\n2 threads"].items()}
        {'LayerNorm/native': 0.89, 'naive': 4.75, 'torchscript': 4.49}
    """
    found: dict[str, dict[str, float]] = {GPU: {}}
    for row in _rows("gpu_speed.csv"):
        ours = row["contestant"] == "layer" and (row["kind"], row["mode"]) == ("padded", "graph")
        if ours and row["size"] == ",".join(size):
            found[GPU].setdefault("LayerNorm/native", float(row["ratio"]))
    for (file, processor), title in CPUS.items():
        for row in _rows(file):
            if tuple(row[name] for name in "TBIH") != tuple(size):
                continue
            if row["processor"] != processor or row["mode"] != "train":
                continue
            # One thread was measured on a busy machine, by processor time.
            column = "cpu_ratio" if row["threads"] == "1" else "wall_ratio"
            if row["contestant"] in CONTESTANTS:
                found.setdefault(title, {})[row["contestant"]] = float(row[column])
    return found


def _rows(file: str) -> list[dict[str, str]]:
    with (FIGURES / file).open(newline="", encoding="utf-8") as lines:
        return [
            row
            for row in csv.DictReader(lines)
            if (row["cell"], row["precision"]) == ("LSTM", "float32")
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the chart; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed_chart", description=__doc__)
    parser.add_argument("--out", default=str(FIGURES / "speed.png"), help="default: %(default)s")
    arguments = parser.parse_args(argv)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    panels = figure.subplots(1, len(SIZES), sharey=True)
    for axes, (size, title) in zip(panels, SIZES.items(), strict=True):
        measured = ratios(size)
        for group, found in enumerate(measured.values()):
            for place, contestant in enumerate(CONTESTANTS):
                if contestant in found:
                    ratio, y = found[contestant], group + 0.27 * (place - 1)
                    axes.barh(y, min(ratio, _END), 0.25, color=_COLORS[contestant])
                    axes.text(
                        max(1, min(ratio, _END)) + 0.06, y, f"{ratio:.2f}", va="center", fontsize=8
                    )
        axes.set_yticks(range(len(measured)), list(measured))
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set(title=title, xlim=(0, _END + 0.7))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.supxlabel("time of a training step; torch's LSTM without normalisation = 1", fontsize=9)
    figure.legend(
        handles=[
            panels[0].barh(0, 0, color=_COLORS[name], label=f"layer norm, {title}")
            for name, title in CONTESTANTS.items()
        ],
        loc="outside upper center",
        ncols=len(CONTESTANTS),
        frameon=False,
    )
    figure.savefig(arguments.out, dpi=150)
    print(arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
