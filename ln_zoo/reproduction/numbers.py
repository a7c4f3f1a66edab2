"""Find every number in the tables of README, result pages and model cards in the tables in git.

A number counts as found if a CSV explains it that is named in its section, or in the text of a
section around that; for README, the CSVs of the pages that the section links to.

- ``a ± b``, ``a (c to d)`` and ``a ± b (c to d)`` are looked up together: the statistics of one
  group of rows, one row's value with its ``_deviation``, ``_low`` and ``_high``, a paired
  difference with its 95 % interval, the outcome of a claim that the section links to, or mean and
  deviation of the numbers in the same row.
- Other numbers must fit in both directions: all of a row, and all of a column, are in one
  selection. That is a series (one column or statistic where up to five other columns have given
  values) or a record (all values of a few such rows). One factor applies to all: sign, percent, or
  thousandths.

Bold headlines are looked up number by number in all CSVs of the page, which is weaker. Labels
(headings and first cells), code, dates and *italics*, which quote other works, are no results, nor
are tables below the line ``<!-- settings -->``. A card must be what its ``results.json`` renders.

A wrong number may be found by chance: settings and counts most easily, numbers with a deviation or
an interval hardly. A changed cell of a CSV is noticed only if a page shows it.
"""

from __future__ import annotations

import csv
import functools
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ln_zoo.reproduction.claims import outcomes
from ln_zoo.sweeps.grid import SweepError
from ln_zoo.sweeps.statistics import paired

SETTINGS = "<!-- settings -->"
#: Pages that are computed, or state rules.
_MADE = ("claims.md", "protocol.md", "protocol_history.md")
_N = r"(?<![\w.,§])[-+\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?(?![\w]|[.,]\d)"
_UNIT = r"(?: %| points)?"
_TUPLE = re.compile(
    rf"({_N}){_UNIT}(?: ± ({_N}){_UNIT})?(?: \(({_N}){_UNIT}(?: to |-|, )({_N}){_UNIT}\))?"
)
_SKIPPED = re.compile(r"`[^`]*`|!?\[[^\]]*\]\([^)]*\)|\d{4}-\d\d-\d\d|(?<!\*)\*[^*]+\*(?!\*)")
_FACTORS = (1.0, -1.0, 100.0, -100.0, 0.01, 1000.0)
#: Factors of the numbers of a line: one for all, or fractions in percent among others.
_SCALES = (*((factor,) for factor in _FACTORS), (1.0, 100.0))
#: Columns that order the rows of a run, tell runs apart, or are no labels.
_PLACES = ("step", "epoch", "t")
_RUN = ("label", "run", "norm", "seed", "start")
_APART = (
    "date", "torch", "card", "processor", "rounds", "failure", "version", "sha256", "last_step",
    "first_call_s",
)  # fmt: skip
#: Values of a label; rows of a series without conditions, of a record, and of a CSV with more
#: conditions.
_LABELS, _SERIES, _RECORD, _SMALL = 24, 100, 6, 400


@dataclass(frozen=True)
class Cell:
    """A number of a table, with deviation and interval as given."""

    row: int
    column: int
    place: int  #: among the numbers of the cell
    parts: tuple[str, ...]  #: value, deviation, low, high

    @property
    def together(self) -> bool:
        return any(self.parts[1:])


@dataclass(frozen=True)
class Table:
    """A table of a page, without heading and rule."""

    line: int  #: of its first row
    rows: list[list[str]]
    around: str  #: the text of its section, and of those that contain it

    @functools.cached_property
    def cells(self) -> list[Cell]:
        """All numbers but those in the first column."""
        return [
            Cell(row, column, place, parts)
            for row, texts in enumerate(self.rows)
            for column, text in enumerate(texts)
            if column
            for place, parts in enumerate(_numbers(text))
        ]


@dataclass
class Checked:
    """How many numbers a page has, and the lines with numbers that are not found."""

    path: str
    numbers: int = 0
    lost: list[tuple[int, str]] = field(default_factory=list)


def check_pages(root: Path) -> Iterator[Checked]:
    """Check README, pages and cards below the root of the repository."""
    for page in (root / "README.md", *sorted((root / "docs/results").glob("*.md"))):
        if page.name not in _MADE:
            yield _check_page(page, root)
    yield _check_cards(root)


def _check_page(page: Path, root: Path) -> Checked:
    text = page.read_text(encoding="utf-8")
    found = Checked(page.relative_to(root).as_posix())
    figures = root / "docs/figures"
    for table in markdown_tables(text):
        around = table.around
        if page.parent == root:
            for linked in {*re.findall(r"\((docs/results/\w+\.md)\)", around)}:
                around += (root / linked).read_text(encoding="utf-8")
        found.numbers += sum(sum(map(bool, cell.parts)) for cell in table.cells)
        for cell in not_found(table, _sources(around, figures)):
            found.lost.append((table.line + cell.row, " ".join(filter(None, cell.parts))))
    if page.parent != root:
        every = _sources(text, figures)
        for line, parts in _headlines(text):
            found.numbers += sum(map(bool, parts))
            if not any(each.explains(parts) for each in every):
                found.lost.append((line, " ".join(filter(None, parts))))
    found.lost.sort()
    return found


def _check_cards(root: Path) -> Checked:
    from ln_zoo.zoo import render_card

    found = Checked("model_cards")
    for card in sorted((root / "model_cards").glob("*/README.md")):
        text = card.read_text(encoding="utf-8")
        found.numbers += sum(len(table.cells) for table in markdown_tables(text))
        if text != render_card(card.parent):
            found.lost.append((1, f"{card.parent.name}: not what results.json renders"))
    return found


def not_found(table: Table, sources: Sequence[Source]) -> list[Cell]:
    """The numbers of a table that no source explains."""
    single = [cell for cell in table.cells if not cell.together]
    fine = set(single)
    for axis in ("row", "column"):
        lines: dict[tuple[int, int], list[Cell]] = {}
        for cell in single:
            lines.setdefault((getattr(cell, axis), cell.place), []).append(cell)
        for line in lines.values():
            if not any(each.has({cell.parts[0] for cell in line}) for each in sources):
                fine.difference_update(line)
    lost = [cell for cell in single if cell not in fine]
    for cell in table.cells:
        if cell.together and not any(each.explains(cell.parts) for each in sources):
            own = [_read(other.parts[0])[0] for other in fine if other.row == cell.row]
            kept = _Kept()
            kept.add_groups(np.array(own), np.zeros(len(own), int))
            if len(own) < 3 or not kept.source().explains(cell.parts):
                lost.append(cell)
    return lost


# Markdown


def markdown_tables(text: str) -> Iterator[Table]:
    """The tables with results."""
    sections: list[tuple[int, list[str]]] = [(0, [])]
    found: list[tuple[int, list[list[str]], list[list[str]]]] = []
    rows: list[list[str]] = []
    settings = fenced = False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fenced ^= line.startswith("```")
        if (heading := re.match("(#+) ", line)) and not fenced:
            level = len(heading[1])
            sections = [each for each in sections if each[0] < level] + [(level, [])]
        sections[-1][1].append(line)
        if line.startswith("|") and not fenced:
            rows.append([cell.strip() for cell in line.strip("|").replace(r"\|", "").split("|")])
            continue
        if len(rows) > 2 and not settings:
            found.append((number - len(rows) + 2, rows[2:], [own for _, own in sections]))
        if line or rows:
            settings = line == SETTINGS
        rows = []
    for first, rows, around in found:
        yield Table(first, rows, "\n".join(itertools.chain(*around)))


def _numbers(text: str) -> Iterator[tuple[str, ...]]:
    for found in _TUPLE.finditer(_SKIPPED.sub("", text)):
        yield tuple(part or "" for part in found.groups())


def _headlines(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Numbers in bold sentences outside tables, whole ones only with an interval."""
    plain = re.sub(r"```.*?```|^\|.*?$", lambda m: re.sub(".", "", m[0]), text, flags=re.S | re.M)
    for bold in re.finditer(r"\*\*(.+?)\*\*(?!\*)", plain, flags=re.S):
        for parts in _numbers(bold[1].replace("\n", " ")):
            if any(parts[1:]) or "." in parts[0]:
                yield plain.count("\n", 0, bold.start()) + 1, parts


def _read(text: str) -> tuple[float, float]:
    """A number and half a unit of its last digit; NaN for no text."""
    if not text:
        return math.nan, math.nan
    plain = text.replace(",", "").replace("\u2212", "-")
    digits, _, exponent = plain.partition("e")
    places = len(digits.partition(".")[2]) - int(exponent or 0)
    return float(plain), 0.5 * 10.0**-places * (1 + 1e-6)


# Sources


@dataclass(frozen=True)
class Source:
    """A CSV, or outcomes of claims, prepared for look-ups."""

    tuples: Any  #: sorted (M, 4): value, deviation, low, high; NaN if not known
    values: Any  #: sorted
    selections: Any  #: the selection of each value

    def explains(self, parts: Sequence[str]) -> bool:
        """Whether one tuple has all given parts."""
        wanted = [(place, *_read(text)) for place, text in enumerate(parts) if text]
        _, value, rounding = wanted[0]
        for factor in _FACTORS:
            ends = sorted((value + sign * rounding) / factor for sign in (1, -1))
            first, last = np.searchsorted(self.tuples[:, 0], ends)
            found = self.tuples[first : last + 1] * factor
            found[:, 1] = abs(found[:, 1])
            if factor < 0:
                found[:, [2, 3]] = found[:, [3, 2]]
            near = [abs(found[:, place] - number) <= half for place, number, half in wanted]
            if np.all(near, axis=0).any():
                return True
        return False

    def has(self, texts: Collection[str]) -> bool:
        """Whether one selection has all numbers."""
        return any(self._has(texts, factors) for factors in _SCALES)

    def _has(self, texts: Collection[str], factors: Sequence[float]) -> bool:
        kept = None
        for text in texts:
            number, rounding = _read(text)
            found = []
            for factor in factors:
                low, high = sorted(((number - rounding) / factor, (number + rounding) / factor))
                first = np.searchsorted(self.values, low)
                found.append(self.selections[first : np.searchsorted(self.values, high, "right")])
            own = np.unique(np.concatenate(found))
            kept = own if kept is None else np.intersect1d(kept, own, assume_unique=True)
            if not kept.size:
                return False
        return True


def _sources(text: str, figures: Path) -> list[Source]:
    """The CSVs that a text names, and the outcomes of claims that it links to."""
    names = sorted({*re.findall(r"([\w.-]+\.csv)", text)})
    claimed = {*re.findall(r"claims\.md#([a-z0-9-]+)", text)}
    ends = [
        (one.estimate, math.nan, one.low, one.high)
        for name, one in outcomes().items()
        if name.partition(":")[0] in claimed and one.estimate is not None
    ]
    kept = _Kept()
    kept.tuples.append(np.array(ends, float).reshape(-1, 4))
    return [*(source(figures / n) for n in names if (figures / n).is_file()), kept.source()]


@functools.cache
def source(path: Path) -> Source:
    """A CSV with the statistics of its groups of rows, and of its runs."""
    with path.open(newline="", encoding="utf-8") as file:
        head, *rows = [*csv.reader(file)] or [[]]
    if not rows or {*map(len, rows)} != {len(head)}:
        raise SweepError(f"{path}: expected a heading and rows of {len(head)} columns")
    columns = dict(zip(head, map(list, zip(*rows, strict=True)), strict=True))
    if columns.keys() >= {*"TBIH"}:
        sizes = zip(*(columns.pop(name) for name in "TBIH"), strict=True)
        columns["size"] = list(map(",".join, sizes))
    kept = _Kept()
    _collect(kept, columns)
    if runs := _runs(columns):
        _collect(kept, runs)
    return kept.source()


def _collect(kept: _Kept, columns: Mapping[str, Sequence[str]]) -> None:
    codes = {name: np.unique(column, return_inverse=True)[1] for name, column in columns.items()}
    data = {
        name: found
        for name, column in columns.items()
        if name not in _PLACES and (found := _numeric(column)) is not None
    }
    if "steps" in data:  # a run without them never gets there
        data["steps"][np.isnan(data["steps"])] = math.inf
    size = len(next(iter(codes.values())))
    distinct = {name: found.max() + 1 for name, found in codes.items() if name not in _APART}
    keys = [
        name
        for name, number in distinct.items()
        if name in (*_PLACES, "seed", "run")
        or 1 < number <= (min(_LABELS, size / 2) if name in data else max(_LABELS, size - 1))
    ]
    words = [
        (row, [_read(part or "")[0] for part in found.groups()])
        for name, column in columns.items()
        if name not in (*data, *_PLACES)
        for row, text in enumerate(column)
        for found in _TUPLE.finditer(text)
    ]
    parts = np.array([found for _, found in words]).reshape(-1, 4)
    lines = np.array([row for row, _ in words], int)
    small = size <= _SMALL
    most = 5 if small and len(keys) <= 6 else 3 if small and len(keys) <= 9 else 2
    numbers = np.array(list(data.values())).reshape(-1, size)
    conditions = {
        names: _groups(names, codes, size)
        for count in range(size > _SERIES, most + 1)
        for names in itertools.combinations(keys, count)
    }
    records = {}
    for names, groups in conditions.items():
        few = np.bincount(groups)[groups] <= _RECORD
        records[names] = kept.reserve(np.where(few, groups, -1))[0]
        kept.add(numbers, kept.reserve(groups, len(data)))
        kept.add(numbers, records[names])
        kept.add(parts.ravel(), np.repeat(kept.reserve(groups)[0, lines], 4))
        kept.add(parts.ravel(), np.repeat(records[names][lines], 4))
    for count in range(3 + (small and len(keys) <= 6)):
        for names in itertools.combinations(keys, count):
            own = _groups(names, codes, size)
            first = np.unique(own, return_index=True)[1]
            within = [
                fewer
                for fewer in conditions
                if count - 1 <= len(fewer) < 3 and set(fewer) <= set(names)
            ]
            for column in data.values():
                stats, groups = kept.add_groups(column, own)
                for fewer in within:
                    kept.add(stats, kept.reserve(conditions[fewer][first[groups]], len(stats)))
                    kept.add(stats, records[fewer][first[groups]])
    kept.tuples += [parts, *_given(data), *_differences(codes, data, keys)]


class _Kept:
    """What is collected of a source."""

    def __init__(self) -> None:
        self.number = 0  # selections so far
        self.values: list[Any] = [np.empty(0)]
        self.places: list[Any] = [np.empty(0)]
        self.tuples: list[Any] = [np.empty((0, 4))]

    def reserve(self, groups: Any, copies: int = 1) -> Any:
        """New selections, one for each copy and group; a negative group has none."""
        number = int(groups.max(initial=-1)) + 1
        starts = self.number + number * np.arange(copies)[:, None]
        self.number += number * copies
        return np.where(groups < 0, -1, groups + starts)

    def add(self, values: Any, places: Any) -> None:
        places = np.broadcast_to(places, values.shape)
        known = np.isfinite(values) & (places >= 0)
        self.values.append(values[known])
        self.places.append(places[known])

    def add_groups(self, column: Any, groups: Any) -> tuple[Any, Any]:
        """Add the groups' tuples; return their statistics and the groups that have them."""
        known = ~np.isnan(column)
        if not known.any():
            return np.empty((0, 0)), groups[:0]
        values, groups = column[known], groups[known]
        order = np.lexsort((values, groups))
        values, groups = values[order], groups[order]
        starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
        sizes = np.diff(np.r_[starts, len(values)])
        least, greatest = values[starts], values[starts + sizes - 1]
        median = (values[starts + (sizes - 1) // 2] + values[starts + sizes // 2]) / 2
        with np.errstate(invalid="ignore"):  # infinite ones
            mean = np.add.reduceat(values, starts) / sizes
            squares = np.add.reduceat((values - np.repeat(mean, sizes)) ** 2, starts)
        deviation = np.sqrt(squares / np.maximum(sizes - 1, 1))
        for middle in (mean, median):
            self.tuples.append(np.stack([middle, deviation, least, greatest], -1))
        stats = np.stack([mean, median, deviation, least, greatest, sizes])
        return stats, groups[starts]

    def source(self) -> Source:
        values, places = np.concatenate(self.values), np.concatenate(self.places)
        order = np.argsort(values)
        tuples = np.concatenate(self.tuples)
        tuples = tuples[np.isfinite(tuples[:, 0])]
        return Source(tuples[np.argsort(tuples[:, 0])], values[order], places[order].astype(int))


def _runs(columns: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Last, least and greatest value of each run, and where it has them; empty without curves."""
    x = next((name for name in ("step", "epoch") if name in columns), "")
    names = [name for name in columns if name in _RUN]
    if not x or not names:
        return {}
    runs: dict[tuple[str, ...], list[int]] = {}
    for number, key in enumerate(zip(*(columns[name] for name in names), strict=True)):
        runs.setdefault(key, []).append(number)
    found = dict(zip(names, map(list, zip(*runs, strict=True)), strict=True))
    for name, column in columns.items():
        values = _numeric(column)
        if name in (x, *names) or values is None:
            continue
        for rows in runs.values():
            known = [row for row in rows if math.isfinite(values[row])] or rows
            picks = {
                "last": known[-1],
                "least": min(known, key=values.__getitem__),
                "greatest": max(known, key=values.__getitem__),
            }
            for kind, row in picks.items():
                found.setdefault(f"{name} {kind}", []).append(column[row])
                found.setdefault(f"{name} {kind} at", []).append(columns[x][row])
    return found


def _numeric(column: Sequence[str]) -> Any:
    """A column as numbers, NaN where it is empty; None if it has other text."""
    try:
        return np.array([float(text or "nan") for text in column])
    except ValueError:
        return None


def _groups(names: Sequence[str], codes: Mapping[str, Any], size: int) -> Any:
    """The number of each row's group, by the values of columns."""
    found = np.zeros(size, int)
    for name in names:
        found = found * (codes[name].max() + 1) + codes[name]
    return np.unique(found, return_inverse=True)[1] if len(names) > 1 else found


def _given(data: Mapping[str, Any]) -> Iterator[Any]:
    """Values with X_deviation, X_low and X_high, or followed by columns low and high."""
    names = list(data)
    for place, name in enumerate(names):
        keys = [f"{name}_{kind}" for kind in ("deviation", "low", "high")]
        if names[place + 1 : place + 3] == ["low", "high"]:
            keys = ["", "low", "high"]
        if data.keys() & {*keys}:
            unknown = data[name] * math.nan
            yield np.stack([data[name], *(data.get(key, unknown) for key in keys)], -1)


def _differences(
    codes: Mapping[str, Any], data: Mapping[str, Any], keys: Sequence[str]
) -> Iterator[Any]:
    """Mean paired differences with their 95 % intervals, of all methods with shared seeds."""
    pair = next((name for name in ("seed", "run") if name in codes), "")
    own = [name for name in keys if name != pair and (name not in data or "." in name)]
    size = len(next(iter(codes.values())))
    if not pair or not own:
        return
    labels = _groups(own, codes, size)
    if labels.max() + 1 > _LABELS or len({*zip(labels, codes[pair], strict=True)}) < size:
        return
    for column in data.values():
        methods: list[dict[int, float]] = [{} for _ in range(labels.max() + 1)]
        for label, seed, value in zip(labels, codes[pair], column, strict=True):
            if math.isfinite(value):
                methods[label][seed] = value
        for first, second in itertools.combinations(methods, 2):
            found = paired(first, second)
            if found and found.number > 1:
                yield np.array([[found.mean, math.nan, found.low, found.high]])
