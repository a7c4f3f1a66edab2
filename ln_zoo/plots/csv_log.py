"""Reader of the ``metrics.csv`` of a `CSVLogger`."""

from __future__ import annotations

import csv
from pathlib import Path


def read_curves(metrics: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Read a ``metrics.csv``: updates and values of each metric, in the order logged."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    with metrics.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                if text and name not in ("step", "epoch"):
                    steps, values = curves.setdefault(name, ([], []))
                    steps.append(int(row["step"]))
                    values.append(float(text))
    return curves
