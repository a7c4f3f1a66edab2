"""The README's chart of speed: its numbers are those of the committed files."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import speed_chart


def test_ratios_are_those_of_the_files() -> None:
    found = speed_chart.ratios(("64", "128", "256", "256"))
    assert list(found) == [speed_chart.GPU, *speed_chart.CPUS.values()]
    with (speed_chart.FIGURES / "rnn_speed.csv").open(newline="") as lines:
        (row,) = (
            row
            for row in csv.DictReader(lines)
            if (row["processor"], row["cell"], row["mode"]) == ("AMD EPYC", "LSTM", "train")
            and (row["T"], row["B"], row["H"]) == ("64", "128", "256")
            and (row["contestant"], row["precision"]) == ("LayerNorm/native", "float32")
        )
    assert found["AMD EPYC, AVX-512\n2 threads"]["LayerNorm/native"] == float(row["wall_ratio"])
    # 1.042 ms by the side of cuDNN's 2.123 ms.
    assert found[speed_chart.GPU] == {"LayerNorm/native": pytest.approx(1.042 / 2.123, abs=1e-3)}


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    assert speed_chart.main(["--out", str(tmp_path / "speed.png")]) == 0
    assert (tmp_path / "speed.png").stat().st_size > 10_000
