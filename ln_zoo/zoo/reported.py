"""What the paper and its sources report, and how a measurement compares with it.

The numbers live in ``reported.yaml``, one file for all models; this file checks it, looks numbers
up, and lays a measurement beside them. Two numbers are set against each other only if they were
measured on the same data with a network of the same size: otherwise the row says why not.

    >>> rows = comparison(
    ...     "DRAW",
    ...     "LayerNorm",
    ...     {"bound": 95.2},
    ...     data="BinarizedMNIST/test",
    ...     size={"glimpses": 16, "hidden_features": 128, "latent_features": 32,
    ...           "read_size": 2, "write_size": 5},
    ... )
    >>> rows[0].reported.value, rows[0].difference
    (82.09, None)
    >>> rows[0].reason
    'not comparable: glimpses 16 here, 64 there; hidden_features 128 here, 256 there; ...'
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from rich.table import Table

#: Models of the zoo, as ``reported.yaml`` may name them.
MODELS = (
    "AttentiveReader",
    "ConvClassifier",
    "DRAW",
    "Handwriting",
    "MLPClassifier",
    "OrderEmbedding",
    "SequenceClassifier",
    "SkipThought",
)
#: Strategies, as ``reported.yaml`` may name them.
NORMS = ("BatchNorm", "Identity", "LayerNorm", "RMSNorm", "WeightNorm")

# Facts of the data without which likelihoods cannot be compared.
_DECISIVE = ("batch_size", "length_mode", "max_points", "scale")
# What a value logged in one unit is multiplied by to stand in the unit of the tables.
_SCALES = {("fraction", "%"): 100.0}


@dataclass(frozen=True)
class Citation:
    """Where numbers come from: authors, year, title and arXiv number."""

    authors: str
    year: int
    title: str
    arxiv: str

    def __str__(self) -> str:
        return f"{self.authors} ({self.year}), {self.title}, arXiv {self.arxiv}"


@dataclass(frozen=True)
class MetricUnit:
    """A metric's unit in the tables, the unit in which tests log it, and which way is better."""

    unit: str
    higher_is_better: bool
    logged: str = ""

    @property
    def scale(self) -> float:
        """What a logged value is multiplied by to stand in the unit of the tables."""
        return 1.0 if self.logged in ("", self.unit) else _SCALES[self.logged, self.unit]


@dataclass(frozen=True)
class Reported:
    """One number of one source, or the statement that the source prints none.

    Attributes:
        model: class name of the model in `ln_zoo.models`; ``None``: the zoo has no such model.
        norm: class name of the strategy; ``None``: a method outside the zoo (see ``method``).
        method: what the source calls the run.
        metric: name of the metric.
        unit: of ``value``.
        value: as printed; ``None`` where the source shows the run but prints no number.
        higher_is_better: which way is better.
        dataset: name of the data set.
        split: the part of it.
        size: facts that a run must share to be comparable (sizes, batch size, training data).
        place: table, figure or section of the source.
        source: key of the source in `citations`.
        note: what a reader should know beside the number.
    """

    model: str | None
    norm: str | None
    method: str
    metric: str
    unit: str
    value: float | None
    higher_is_better: bool
    dataset: str
    split: str
    place: str
    source: str
    size: Mapping[str, Any] = field(default_factory=dict, hash=False)
    note: str = ""

    @property
    def data(self) -> str:
        """Data set and split, as `comparison` takes them: ``"MNIST/test"``."""
        return f"{self.dataset}/{self.split}"


@dataclass(frozen=True)
class Row:
    """A measurement beside one reported number.

    Attributes:
        metric: name of the metric, without the prefix of the split.
        unit: of ``measured``, of the reported value and of ``difference``.
        measured: the measured value, converted to that unit.
        reported: the number it is laid beside; ``None``: the sources say nothing about the run.
        difference: measured minus reported; ``None`` where the two cannot be compared.
        reason: why there is no difference; empty where there is one.
    """

    metric: str
    unit: str
    measured: float
    reported: Reported | None
    difference: float | None
    reason: str

    def cells(self) -> tuple[str, str, str, str]:
        """Metric, measured, reported with its place and data, difference or the reason of none."""
        measured = _with_unit(f"{self.measured:.5g}", self.unit)
        if self.reported is None:
            return self.metric, measured, "—", self.reason
        r = self.reported
        value = "—" if r.value is None else _with_unit(f"{r.value:g}", self.unit)
        where = f"{citations()[r.source].arxiv}, {r.place}"
        reported = f"{value} ({r.method}; {where}; {r.data})"
        difference = self.reason
        if self.difference is not None:
            difference = _with_unit(f"{self.difference:+.4g}", self.unit)
        return self.metric, measured, reported, difference


def reported(
    *, model: str | None = None, norm: str | None = None, metric: str | None = None
) -> list[Reported]:
    """The reported numbers that fit all given filters, in the order of the file.

    Args:
        model: class name of a model; ``None``: any.
        norm: class name of a strategy; ``None``: any, methods outside the zoo included.
        metric: name of a metric; ``None``: any.

    Example:
        >>> [r.value for r in reported(model="DRAW", metric="bound")]
        [82.36, 82.09]
    """
    return [
        r
        for r in _load().entries
        if model in (None, r.model) and norm in (None, r.norm) and metric in (None, r.metric)
    ]


def citations() -> Mapping[str, Citation]:
    """The sources by the key that `Reported.source` holds."""
    return _load().citations


def metric_unit(metric: str) -> MetricUnit | None:
    """What ``reported.yaml`` knows about a metric; ``None`` if it does not know it."""
    return _load().metrics.get(metric)


def comparison(
    model: str,
    norm: str,
    metrics: Mapping[str, float],
    *,
    data: str,
    size: Mapping[str, Any],
) -> list[Row]:
    """Lays measured metrics beside what the sources report for the same model and strategy.

    Args:
        model: class name of the model.
        norm: class name of the strategy.
        metrics: measured values by name, as the test logs them: fractions for ``error`` and
            ``accuracy``. A prefix ``test/`` or ``test_`` of a name is dropped.
        data: data set and split that were measured, such as ``"MNIST/test"``; capitals and
            underscores do not matter. `measured_on` makes it from a data module's facts.
        size: facts of the run by name: the model's arguments, ``batch_size``, ``training_data``.

    Returns:
        A row for each metric and comparable number; where nothing is comparable, one row for the
        metric with the number that comes nearest and the reason.

    Example:
        >>> size = {"in_features": 64, "hidden_features": [32, 32], "num_classes": 10}
        >>> comparison("MLPClassifier", "WeightNorm", {"test/error": 0.05},
        ...            data="Digits/test", size=size)[0].reason
        'no source reports MLPClassifier with WeightNorm'
    """
    rows = []
    for name, value in metrics.items():
        metric = bare_metric(name)
        known = metric_unit(metric)
        unit = known.unit if known else ""
        measured = float(value) * (known.scale if known else 1.0)
        candidates = [
            (obstacles(r, data=data, size=size), r)
            for r in reported(model=model, norm=norm, metric=metric)
        ]
        if not candidates:
            reason = f"no source reports {model} with {norm}"
            if reported(model=model, norm=norm):
                reason = f"no source reports {metric} of {model} with {norm}"
            rows.append(Row(metric, unit, measured, None, None, reason))
            continue
        comparable = [c for c in candidates if not c[0]]
        nearest = min(candidates, key=lambda c: (not _same_data(data, c[1]), len(c[0])))
        for found, r in comparable or [nearest]:
            difference, reason = None, ""
            if found:
                reason = f"not comparable: {'; '.join(found)}"
            elif r.value is None:
                reason = f"no value printed ({r.note})"
            else:
                difference = measured - r.value
            rows.append(Row(metric, unit, measured, r, difference, reason))
    return rows


def bare_metric(name: str) -> str:
    """A metric's name without the split that tests put before it: ``test/nll`` is ``nll``."""
    for prefix in ("test/", "test_"):
        name = name.removeprefix(prefix)
    return name


def measured_on(data: Mapping[str, Any]) -> str:
    """Data set and split of a test, as `comparison` takes them, from a data module's facts.

    Example:
        >>> measured_on({"dataset": "mnist", "batch_size": 128})
        'mnist/test'
    """
    return f"{data['dataset']}/{data.get('test_split', 'test')}"


def run_size(
    hparams: Mapping[str, Any], data: Mapping[str, Any], epochs: int | None = None
) -> dict[str, Any]:
    """What decides whether a run's numbers are comparable, as `comparison` takes it.

    Args:
        hparams: the model's arguments.
        data: a data module's facts, ``dataset`` among them.
        epochs: of training; ``None``: not known.

    Example:
        >>> run_size({"hidden_features": [8], "norm": {}, "lr": 0.1}, {"dataset": "mnist"}, 20)
        {'hidden_features': [8], 'lr': 0.1, 'epochs': 20, 'training_data': 'mnist'}
    """
    facts = {k: v for k, v in hparams.items() if k != "norm" and not k.startswith("_")}
    facts |= {key: data[key] for key in _DECISIVE if key in data}
    if epochs is not None:
        facts["epochs"] = epochs
    return facts | {"training_data": data["dataset"]}


def obstacles(r: Reported, *, data: str, size: Mapping[str, Any]) -> list[str]:
    """What keeps a run from being compared with a reported number, a phrase each; none: empty.

    On other data sizes do not matter any more, and go unmentioned.
    """
    if not _same_data(data, r):
        return [f"{data} here, {r.data} there"]
    found = []
    for key, there in r.size.items():
        if key not in size:
            found.append(f"{key} not stated here, {there} there")
        elif _plain(size[key]) != _plain(there):
            found.append(f"{key} {size[key]} here, {there} there")
    return found


def render(rows: Iterable[Row], title: str | None = None) -> Table:
    """The rows as a table of four columns for `rich`: metric, measured, reported, difference.

    Example:
        >>> rows = comparison("DRAW", "LayerNorm", {"kl": 24.0}, data="Digits/test", size={})
        >>> [column.header for column in render(rows).columns]
        ['metric', 'measured', 'reported', 'difference']
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    table.add_column("metric")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("reported")
    table.add_column("difference")
    for row in rows:
        # As Text: square brackets of sizes would be read as markup.
        table.add_row(*(Text(cell) for cell in row.cells()))
    return table


def _with_unit(number: str, unit: str) -> str:
    return f"{number} {unit}" if unit else number


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return _spelling(value)
    return list(value) if isinstance(value, (list, tuple)) else value


def _same_data(data: str, r: Reported) -> bool:
    return _spelling(data) == _spelling(r.data)


def _spelling(name: str) -> str:
    """The name without what spellings differ in: ``BinarizedMNIST``, ``binarized_mnist``."""
    return re.sub(r"[^a-z0-9/+]", "", name.lower())


# The data file


@dataclass(frozen=True)
class _File:
    citations: Mapping[str, Citation]
    metrics: Mapping[str, MetricUnit]
    entries: tuple[Reported, ...]


@functools.cache
def _load() -> _File:
    text = files("ln_zoo.zoo").joinpath("reported.yaml").read_text(encoding="utf-8")
    return parse(yaml.safe_load(text))


def parse(raw: Any) -> _File:
    """Checks the content of ``reported.yaml`` and lays its tables out as single numbers.

    Raises:
        ValueError: for unknown or missing keys, unknown names, wrong types, rows of another length
            than their columns, or a number given twice; the message names the entry.
    """
    _keys(raw, "reported.yaml", {"citations", "metrics", "tables"})
    cited = {}
    for key, value in raw["citations"].items():
        _keys(value, f"citation {key}", {"authors", "year", "title", "arxiv"})
        cited[key] = Citation(**value)
    units = {}
    for key, value in raw["metrics"].items():
        _keys(value, f"metric {key}", {"unit", "higher_is_better"}, {"logged"})
        units[key] = MetricUnit(**value)
        logged = value.get("logged", value["unit"])
        if logged != value["unit"] and (logged, value["unit"]) not in _SCALES:
            raise ValueError(f"metric {key}: no factor from {logged!r} to {value['unit']!r}")
    entries = [
        entry for table in raw["tables"] for entry in _parse_table(table, cited=cited, units=units)
    ]
    seen: set[tuple[Any, ...]] = set()
    for e in entries:
        # `repr` since sizes hold lists.
        key = (e.source, e.place, e.model, e.method, e.metric, e.data, repr(e.size))
        if key in seen:
            raise ValueError(f"{e.source}, {e.place}: {e.method}, {e.metric} stands there twice")
        seen.add(key)
    return _File(cited, units, tuple(entries))


def _parse_table(
    table: Any, *, cited: Mapping[str, Citation], units: Mapping[str, MetricUnit]
) -> Iterable[Reported]:
    _keys(table, "tables", {"source", "place", "model", "columns", "rows"}, {"size", "note"})
    where = f"{table['source']}, {table['place']}"
    if table["source"] not in cited:
        raise ValueError(f"{where}: source is none of {sorted(cited)}")
    if table["model"] not in (None, *MODELS):
        raise ValueError(f"{where}: model {table['model']!r} is none of {MODELS}")
    columns = table["columns"]
    for column in columns:
        _keys(column, f"{where}, columns", {"metric", "dataset", "split"})
        if column["metric"] not in units:
            raise ValueError(f"{where}: metric {column['metric']!r} is not among the metrics")
    for row in table["rows"]:
        _keys(row, f"{where}, rows", {"method", "norm", "values"})
        if row["norm"] not in (None, *NORMS):
            raise ValueError(f"{where}: norm {row['norm']!r} is none of {NORMS}")
        if len(row["values"]) != len(columns):
            raise ValueError(
                f"{where}, {row['method']}: {len(row['values'])} values for {len(columns)} columns"
            )
        for column, value in zip(columns, row["values"], strict=True):
            if value is not None and type(value) not in (int, float):
                raise ValueError(f"{where}, {row['method']}: {value!r} is no number")
            yield Reported(
                model=table["model"],
                norm=row["norm"],
                method=row["method"],
                metric=column["metric"],
                unit=units[column["metric"]].unit,
                value=None if value is None else float(value),
                higher_is_better=units[column["metric"]].higher_is_better,
                dataset=column["dataset"],
                split=column["split"],
                place=table["place"],
                source=table["source"],
                size=table.get("size", {}),
                note=table.get("note", ""),
            )


def _keys(
    value: Any, where: str, needed: set[str], optional: frozenset[str] | set[str] = frozenset()
) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a mapping, got {value!r}")
    if missing := needed - value.keys():
        raise ValueError(f"{where}: {sorted(missing)} missing")
    if unknown := value.keys() - needed - optional:
        raise ValueError(f"{where}: unknown keys {sorted(unknown)}")
