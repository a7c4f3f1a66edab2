"""Standard errors, tables and files of sentence scores."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ln_zoo.utils import tables

if TYPE_CHECKING:
    from rich.table import Table

#: The columns of the paper's Table 3: metric, heading, digits.
COLUMNS = {
    "sick_pearson": ("SICK r", 3),
    "sick_spearman": ("SICK rho", 3),
    "sick_mse": ("SICK MSE", 3),
    "mr": ("MR", 1),
    "cr": ("CR", 1),
    "subj": ("SUBJ", 1),
    "mpqa": ("MPQA", 1),
}


@dataclass(frozen=True)
class Score:
    """A score of an encoder, a row of the CSV file."""

    encoder: str
    metric: str  # such as "mr"
    value: float  # per cent, a correlation, or a mean squared error
    # Binomial for accuracies, by Fisher's transformation for Pearson's r.
    standard_error: float | None
    items: int  # number of sentences or test pairs
    unknown: float | None  # share of unknown words; None without a vocabulary
    protocol: str  # "fast" or "original"
    seconds: float  # of encoding and scoring


def score_of(
    label: str,
    metric: str,
    value: float,
    *,
    items: int,
    protocol: str,
    unknown: float | None = None,
    seconds: float = math.nan,
) -> Score:
    """A score with its standard error; arguments as in `Score`."""
    error = standard_error(metric, value, items)
    return Score(label, metric, value, error, items, unknown, protocol, seconds)


def standard_error(metric: str, value: float, items: int) -> float | None:
    """Standard error of an accuracy in per cent or a Pearson correlation, from the items.

    Example:
        >>> round(standard_error("mr", 77.3, 10_662), 2)
        0.41
    """
    if metric == "sick_pearson":
        return (1 - value**2) / math.sqrt(items - 3)
    if metric.startswith("sick"):
        return None
    share = value / 100
    return 100 * math.sqrt(share * (1 - share) / items)


def table(scores: Sequence[Score], beside: Mapping[str, Mapping[str, float]] = {}) -> Table:
    """Scores of encoders by one protocol in the layout of the paper's Table 3.

    ``beside`` has reported values by label and metric, for further rows.
    """
    from rich import box
    from rich.table import Table as RichTable

    head, ours, reported_rows = _rows(scores, beside)
    shown = RichTable(box=box.SIMPLE, pad_edge=False, title=_title(scores), caption=_CAPTION)
    for name in head:
        shown.add_column(name, justify="left" if name == head[0] else "right")
    for number, row in enumerate([*ours, *reported_rows], 1):
        shown.add_row(*row, end_section=number == len(ours))
    return shown


def markdown(scores: Sequence[Score], beside: Mapping[str, Mapping[str, float]] = {}) -> str:
    """`table` in Markdown, with reported rows in italics."""
    head, ours, reported_rows = _rows(scores, beside)
    italic = [[f"*{cell}*" if cell else "" for cell in row] for row in reported_rows]
    return f"{_title(scores)}. {_CAPTION}.\n\n{tables.markdown_table(head, [*ours, *italic])}\n"


_CAPTION = (
    "± one standard error by the number of items; reported rows are not comparable: trained on "
    "BookCorpus, for much longer"
)


def _title(scores: Sequence[Score]) -> str:
    return f"Sentence vectors, {scores[0].protocol} protocol"


def _rows(
    scores: Sequence[Score], beside: Mapping[str, Mapping[str, float]]
) -> tuple[list[str], list[list[str]], list[list[str]]]:
    metrics = [metric for metric in COLUMNS if any(s.metric == metric for s in scores)]
    cells = {(score.encoder, score.metric): _cell(score) for score in scores}
    ours = [
        [label, *(cells.get((label, metric), "") for metric in metrics)]
        for label in dict.fromkeys(score.encoder for score in scores)
    ]
    theirs = [
        [label, *(f"{found[m]:.{COLUMNS[m][1]}f}" if m in found else "" for m in metrics)]
        for label, found in beside.items()
        if found.keys() & set(metrics)
    ]
    return ["encoder", *(COLUMNS[metric][0] for metric in metrics)], ours, theirs


def _cell(score: Score) -> str:
    if math.isnan(score.value):
        return "-"
    digits = COLUMNS[score.metric][1]
    error = "" if score.standard_error is None else f" ± {score.standard_error:.{digits}f}"
    return f"{score.value:.{digits}f}{error}"


# Files


def as_text(scores: Sequence[Score], suffix: str, beside: Mapping[str, Any], **facts: Any) -> str:
    """Content of a file of scores with this suffix: ``".csv"``, ``".json"`` or ``".md"``.

    ``scores`` and ``beside`` as in `table`; ``facts`` are further keys of a JSON file.
    """
    if suffix == ".md":
        return markdown(scores, beside)
    rows = [_plain(asdict(score)) for score in scores]
    if suffix == ".csv":
        return _csv(rows)
    return json.dumps({**facts, "scores": rows}, indent=2, allow_nan=False) + "\n"


def read_tested(path: Path, protocol: str) -> dict[str, float]:
    """Read the scores of a run's test by metric; ValueError if there are none of this protocol."""
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))["metrics"]
        # SICK has one protocol.
        names = {
            m: m if m.startswith("sick") or protocol != "fast" else f"{m}_fast" for m in COLUMNS
        }
        found = {metric: float(metrics[name]) for metric, name in names.items() if name in metrics}
    except (ValueError, KeyError, TypeError):
        found = {}
    if not found:
        raise ValueError(
            f"{path} has no scores by the {protocol} protocol: test a run with the callback "
            "SentenceEvaluation"
        )
    return found


def read_csv(path: Path) -> list[Score]:
    """Read a CSV of scores; ValueError if the file has another format."""

    def score(row: dict[str, Any]) -> Score:
        names = ("value", "standard_error", "unknown", "seconds")
        numbers = {name: float(row[name]) if row[name] else None for name in names}
        value = math.nan if numbers["value"] is None else numbers["value"]
        return Score(**row | numbers | {"value": value, "items": int(row["items"])})

    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [score(row) for row in csv.DictReader(file)]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a table of scores as --out writes them") from error


def curve_csv(scores: Sequence[Score], updates: Mapping[str, int]) -> str:
    """Scores by update as CSV, with the names logged by `SentenceEvaluation`."""
    rows: dict[int, dict[str, Any]] = {}
    for score in scores:
        row = rows.setdefault(updates[score.encoder], {"step": updates[score.encoder]})
        row[f"step_{score.metric}"] = _plain({"value": score.value})["value"]
    return _csv([rows[step] for step in sorted(rows)])


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    head = max(map(list, rows), key=len)
    return tables.csv_table(head, [[row.get(name) for name in head] for row in rows]) + "\n"


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Round floats to six digits and replace NaN by None."""
    return {
        name: (None if math.isnan(value) else float(f"{value:.6g}"))
        if isinstance(value, float)
        else value
        for name, value in row.items()
    }
