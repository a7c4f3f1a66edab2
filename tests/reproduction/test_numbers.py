"""Numbers of pages are found in tables, and changed ones are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import refuses

from ln_zoo.reproduction.numbers import check_pages

CSV = """norm,lr,seed,error,nll
layer,1e-3,0,1.41,0.0553
layer,1e-3,1,1.52,0.0561
layer,1e-3,2,1.37,0.0549
batch,1e-3,0,1.12,0.0392
batch,1e-3,1,1.15,0.0401
batch,1e-3,2,1.19,0.0387
"""
CURVES = """label,run,step,val_nll
layer,0,100,0.91
layer,0,200,0.43
layer,0,300,0.52
layer,1,100,0.93
layer,1,200,0.61
layer,1,300,0.47
"""
PAGE = """# Page

**Layer norm has an error of 1.43 ± 0.08 %.** See [claims](claims.md#convnet-speed).

## Scores

From [scores.csv](../figures/scores.csv).

| | mean | range | seed 0 | seed 1 | seed 2 |
|---|---|---|---|---|---|
| layer, 1e-3 | 1.43 ± 0.08 | 1.41 (1.37 to 1.52) | 1.41 | 1.52 | 1.37 |
| batch | 1.15 ± 0.04 | 1.15 (1.12 to 1.19) | 1.12 | 1.15 | 1.19 |
| others print | *1.99* | `7.77` | *8* | | |

| | difference (95 % interval) | speed |
|---|---|---|
| layer less batch | +0.28 (+0.04 to +0.52) | 1.22 (1.11 to 1.34) |

## Curves

From [curves.csv](../figures/curves.csv), in percent:

| | step 100 | step 300 | lowest | at |
|---|---|---|---|---|
| run 0 | 91 | 52 | 43 % | 200 |
| run 1 | 93 | 47 | 47 % | 300 |

<!-- settings -->

| open | default |
|---|---|
| clipping | 17.3 |
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("docs/figures", "docs/results"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs/figures/scores.csv").write_text(CSV)
    (tmp_path / "docs/figures/curves.csv").write_text(CURVES)
    (tmp_path / "README.md").write_text("# README\n")
    (tmp_path / "docs/results/page.md").write_text(PAGE)
    return tmp_path


def lost(root: Path) -> dict[int, str]:
    (page,) = (each for each in check_pages(root) if each.path == "docs/results/page.md")
    assert page.numbers == 32
    return dict(page.lost)


def test_all_numbers_are_found(root: Path) -> None:
    assert lost(root) == {}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("| 1.15 ± 0.04", "| 1.15 ± 0.05"),
        ("(1.37 to 1.52)", "(1.37 to 1.53)"),
        ("| 1.41 | 1.52 |", "| 1.42 | 1.52 |"),
        ("to +0.52)", "to +0.53)"),
        ("1.22 (1.11 to", "1.21 (1.11 to"),
        ("| 91 | 52 |", "| 91 | 53 |"),
        ("| 47 % | 300 |", "| 46 % | 300 |"),
        ("error of 1.43 ± 0.08", "error of 1.44 ± 0.08"),
    ],
)
def test_a_changed_number_is_named(root: Path, before: str, after: str) -> None:
    assert PAGE.count(before) == 1
    page = PAGE.replace(before, after)
    (root / "docs/results/page.md").write_text(page)
    line = page[: page.index(after)].count("\n") + 1
    assert line in lost(root)


def test_a_changed_table_is_noticed(root: Path) -> None:
    (root / "docs/figures/scores.csv").write_text(CSV.replace("1.19", "1.99"))
    assert {12, 17} <= lost(root).keys()


def test_a_table_that_was_cut_is_named(root: Path) -> None:
    (root / "docs/figures/scores.csv").write_text("norm,error\nlayer\n")
    refuses(r"scores\.csv.*2 columns", lost, root)


def test_tables_of_other_sections_do_not_count(root: Path) -> None:
    (root / "docs/results/page.md").write_text(PAGE.replace("curves.csv", "scores.csv"))
    assert len(lost(root)) == 2
