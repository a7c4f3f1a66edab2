"""Files of sentence scores: what is written is read again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ln_zoo.metrics.sentence_scores import Score, as_text, markdown, read_csv, score_of

SCORES = [
    score_of("mean", "mr", 77.3, items=10_662, protocol="fast", unknown=0.25, seconds=1.5),
    score_of("mean", "sick_pearson", 0.842, items=4927, protocol="fast", seconds=2.0),
    Score("other", "mr", math.nan, None, 10, None, "fast", 3.0),
]


def test_a_table_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    path.write_text(as_text(SCORES, ".csv", {}), encoding="utf-8")
    assert as_text(read_csv(path), ".csv", {}) == path.read_text(encoding="utf-8")
    path.write_text("encoder,metric\nmean,mr\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"scores\.csv"):
        read_csv(path)


def test_markdown_has_reported_rows_in_italics() -> None:
    lines = markdown(
        SCORES, {"paper": {"mr": 79.5, "trec": 1.0}, "none": {"trec": 1.0}}
    ).splitlines()
    # Pearson: (1 - r^2) / sqrt(n - 3).
    assert lines[2:] == [
        "| encoder | SICK r | MR |",
        "|---|---|---|",
        "| mean | 0.842 ± 0.004 | 77.3 ± 0.4 |",
        "| other |  | - |",
        "| *paper* |  | *79.5* |",
    ]
