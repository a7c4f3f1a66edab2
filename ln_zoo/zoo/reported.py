"""Numbers that the paper and its sources report, and comparison with measurements.

The numbers live in ``reported.yaml``, one file for all models; this file checks it, looks numbers
up, and compares measurements with them. Only numbers for the same data and split are considered.
The outcome is one of three: the difference, where network and length of training agree too; how far
a run is behind or ahead, where its training had another length; or why the two are not comparable.

    >>> size = {"glimpses": 64, "hidden_size": 256, "latent_size": 100,
    ...         "read_size": 2, "write_size": 5}
    >>> def row(**changed):
    ...     return comparison("DRAW", "LayerNorm", {"bound": 95.5}, data="BinarizedMNIST/test",
    ...                       size=size | changed)[0]
    >>> row(epochs=200).outcome
    '+13.41 nats/image'
    >>> row(epochs=15).outcome
    '13.41 nats/image behind at 15 of 200 epochs'
    >>> row(epochs=200, glimpses=16).outcome
    'not comparable: glimpses 16 here, 64 there'
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import yaml

from ln_zoo.training_runs import Run, totals
from ln_zoo.zoo.schema import read

if TYPE_CHECKING:
    from rich.table import Table

# Keys of the length of training, in runs and in the file.
_LENGTHS = ("epochs", "updates")
# Factors from the logged unit to the unit of the tables.
_SCALES = {("fraction", "%"): 100.0}
#: Tables of sentence vectors by source and place, and what to call them.
_SENTENCE_TABLES = {
    ("ba2016", "Table 3, section 6.3"): "paper, Table 3",
    ("wieting2019", "Table 1"): "Wieting & Kiela 2019, Table 1, by SentEval",
}
#: Methods of Wieting and Kiela in `sentence_scores`.
_SENTENCE_METHODS = ("ST-LN", "random echo state network", "bag of embeddings")


@dataclass(frozen=True)
class Citation:
    """A publication.

    Attributes:
        key: its name in ``reported.yaml``, and in BibTeX.
        authors: ``"Surname, Given Names"`` of each.
        year: of publication.
        title: as printed.
        arxiv: number there, if it has one.
        venue: where it was published, where arXiv does not have it.
        url: of what arXiv does not have.
    """

    key: str
    authors: tuple[str, ...]
    year: int
    title: str
    arxiv: str = ""
    venue: str = ""
    url: str = ""

    def __str__(self) -> str:
        names = ", ".join(name.partition(",")[0] for name in self.authors)
        return f"{names} ({self.year}): {self.title}"

    @property
    def link(self) -> str:
        """The address of the publication; empty if none is known."""
        return f"https://arxiv.org/abs/{self.arxiv}" if self.arxiv else self.url

    @property
    def short(self) -> str:
        """As tables name it: authors and year.

        Example:
            >>> citations()["ba2016"].short
            'Ba et al. 2016'
        """
        names = [name.partition(",")[0] for name in self.authors]
        return f"{' and '.join(names) if len(names) < 3 else f'{names[0]} et al.'} {self.year}"

    @property
    def bibtex(self) -> str:
        """The entry for BibTeX.

        Example:
            >>> print(citations()["ba2016"].bibtex)
            @misc{ba2016,
              author = {Ba, Jimmy Lei and Kiros, Jamie Ryan and Hinton, Geoffrey E.},
              title = {{Layer Normalization}},
              year = {2016},
              eprint = {1607.06450},
              archiveprefix = {arXiv}
            }
        """
        fields = {
            "author": " and ".join(self.authors),
            "title": f"{{{self.title}}}",
            "year": str(self.year),
            "howpublished": self.venue,
            "url": self.url,
            "eprint": self.arxiv,
            "archiveprefix": "arXiv" if self.arxiv else "",
        }
        lines = ",\n".join(f"  {key} = {{{value}}}" for key, value in fields.items() if value)
        return f"@misc{{{self.key},\n{lines}\n}}"


@dataclass(frozen=True)
class MetricUnit:
    """How a metric is to be read.

    Attributes:
        unit: in the tables.
        higher_is_better: which way is better.
        logged: the unit in which tests log it, if another.
        data: data set and split of a metric with fixed data, as ``"MR/10-fold"``.
        examples: of these data.
    """

    unit: str
    higher_is_better: bool
    logged: str = ""
    data: str = ""
    examples: int = 0

    @property
    def scale(self) -> float:
        """Factor from the logged unit to the unit of the tables."""
        return 1.0 if self.logged in ("", self.unit) else _SCALES[self.logged, self.unit]


@dataclass(frozen=True)
class Reported:
    """One number of one source.

    Attributes:
        model: class name of the model, of the zoo or planned for it; ``None``: another network.
        norm: class name of the norm; ``None``: a method outside the zoo (see ``method``).
        method: what the source calls the run.
        metric: name of the metric.
        unit: of ``value``.
        value: as printed.
        higher_is_better: which way is better.
        dataset: name of the data set.
        split: the part of it.
        size: facts that a run must share to be comparable (sizes, batch size, training data).
        stated: facts in which a run may differ; the comparison names them.
        training: ``epochs`` or ``updates`` before the measurement, if the source states them.
        place: table, figure or section of the source.
        source: key of the source in `citations`.
        note: remark on the number.
    """

    model: str | None
    norm: str | None
    method: str
    metric: str
    unit: str
    value: float
    higher_is_better: bool
    dataset: str
    split: str
    place: str
    source: str
    size: Mapping[str, Any] = field(default_factory=dict, hash=False)
    stated: Mapping[str, Any] = field(default_factory=dict, hash=False)
    training: Mapping[str, int] = field(default_factory=dict, hash=False)
    note: str = ""

    @property
    def data(self) -> str:
        """Data set and split, as `comparison` takes them: ``"MNIST/test"``."""
        return f"{self.dataset}/{self.split}"


@dataclass(frozen=True)
class Row:
    """A measurement and the reported number for its data, if any.

    Attributes:
        metric: name of the metric, without the prefix of the split.
        unit: of ``measured``, of the reported value and of ``difference``.
        measured: the measured value, converted to that unit.
        reported: the number it is compared with; ``None``: no source has one for these data.
        difference: measured minus reported; ``None`` where the two cannot be compared.
        reason: why there is no difference; empty if there is one.
        at: length of training of run and source if they differ: ``"15 of 200 epochs"``.
        but: facts of the network that differ without ruling the comparison out.
    """

    metric: str
    unit: str
    measured: float
    reported: Reported | None = None
    difference: float | None = None
    reason: str = ""
    at: str = ""
    but: str = ""

    @property
    def outcome(self) -> str:
        """The difference, how far behind or ahead, or why neither; empty without a number."""
        if self.difference is None:
            return self.reason
        text = self.distance("points" if self.unit == "%" else self.unit)
        return f"{text} ({self.but})" if self.but else text

    def distance(self, unit: str = "") -> str:
        """The difference, or how far behind or ahead; empty without one.

        Args:
            unit: what to write after the number.
        """
        if self.reported is None or self.difference is None:
            return ""
        if not self.at:
            return _with_unit(f"{self.difference:+.4g}", unit)
        if not self.difference:
            return f"equal at {self.at}"
        better = (self.difference > 0) == self.reported.higher_is_better
        side = "ahead" if better else "behind"
        return f"{_with_unit(f'{abs(self.difference):.4g}', unit)} {side} at {self.at}"

    def cells(self) -> tuple[str, str, str, str]:
        """Metric, measured, reported with place and data, outcome; the last two may be empty."""
        measured = with_unit(self.measured, self.unit)
        if self.reported is None:
            return self.metric, measured, "", ""
        value = _with_unit(f"{self.reported.value:g}", self.unit)
        return self.metric, measured, f"{value} ({self.origin})", self.outcome

    @property
    def origin(self) -> str:
        """Method, place and data of the reported number; empty without one."""
        if self.reported is None:
            return ""
        r = self.reported
        return f"{r.method}; {citations()[r.source].short}, {r.place}; {r.data}"


def reported(
    *, model: str | None = None, norm: str | None = None, metric: str | None = None
) -> list[Reported]:
    """The reported numbers that fit all given filters, in the order of the file.

    Args:
        model: class name of a model; ``None``: any.
        norm: class name of a norm; ``None``: any, methods outside the zoo included.
        metric: name of a metric; ``None``: any.

    Example:
        >>> [r.value for r in reported(model="DRAW", metric="bound")]
        [82.36, 82.09, 84.3, 81.98, 81.17]
    """
    return [
        r
        for r in _load().entries
        if model in (None, r.model) and norm in (None, r.norm) and metric in (None, r.metric)
    ]


def sentence_scores() -> dict[str, dict[str, float]]:
    """Reported scores of sentence vectors by metric, by method and table."""
    found: dict[str, dict[str, float]] = {}
    for number in reported(model="SkipThought"):
        table = _SENTENCE_TABLES.get((number.source, number.place))
        theirs = number.source == "wieting2019"
        if table is None or (theirs and not number.method.startswith(_SENTENCE_METHODS)):
            continue
        metric, value = number.metric, number.value
        if metric == "sick_relatedness":  # the same correlation, in per cent
            metric, value = "sick_pearson", value / 100
        found.setdefault(f"{number.method} ({table})", {})[metric] = value
    return found


def citations() -> Mapping[str, Citation]:
    """The sources by the key that `Reported.source` holds."""
    return _load().citations


def cited_for(model: str, norm: str, dataset: str) -> list[Citation]:
    """Publications that a card cites for model, norm and data; the paper is the first.

    Args:
        model: class name of the model.
        norm: class name of the norm.
        dataset: name of the data set, as data modules call it.

    Example:
        >>> [c.key for c in cited_for("SequenceClassifier", "BatchNorm", "mnist")]
        ['ba2016', 'cooijmans2017', 'ioffe2015', 'lecun1998']
        >>> [c.key for c in cited_for("ConvClassifier", "BatchNorm", "mnist")]
        ['ba2016', 'ioffe2015', 'lecun1998']
    """
    cited = _load().cited
    keys = [*cited.always, *cited.models.get(model, ()), *cited.norms.get(norm, ())]
    if model in cited.recurrent_models:
        keys += cited.recurrent_norms.get(norm, ())
    keys += cited.datasets.get(dataset, ())
    return [citations()[key] for key in dict.fromkeys(keys)]


def metric_unit(metric: str) -> MetricUnit | None:
    """The entry of a metric in ``reported.yaml``, or None."""
    return _load().metrics.get(metric)


def comparison(
    model: str,
    norm: str,
    metrics: Mapping[str, float],
    *,
    data: str,
    size: Mapping[str, Any],
    obstacles: Iterable[str] = (),
) -> list[Row]:
    """Compares measured metrics with what the sources report for the same model and norm.

    Args:
        model: class name of the model.
        norm: class name of the norm.
        metrics: measured values by name, as tests log them: fractions for ``error`` and
            ``accuracy``. A prefix ``test/`` or ``test_`` of a name is dropped.
        data: data set and split that were measured, such as ``"MNIST/test"``; capitals and
            underscores do not matter. `measured_on` makes it from a data module's facts. Metrics
            with fixed data keep them.
        size: facts of the run by name, as `run_size` makes them: the model's arguments, facts of
            the data, ``training_data``, and its length in ``epochs`` and ``updates``.
        obstacles: what rules out every comparison, a phrase each.

    Returns:
        For each metric a row per comparable number for the same data. If no number is comparable,
        a row for the closest one with the reason. If there is no number, a row without one.

    Example:
        >>> size = {"in_features": 64, "hidden_sizes": [32, 32], "num_classes": 10}
        >>> comparison("MLPClassifier", "WeightNorm", {"test/error": 0.05},
        ...            data="Digits/test", size=size)[0].cells()
        ('error', '5 %', '', '')
    """
    rows = []
    for name, value in metrics.items():
        metric = bare_metric(name)
        known = metric_unit(metric)
        unit = known.unit if known else ""
        measured = float(value) * (known.scale if known else 1.0)
        candidates = [
            ([*obstacles, *_obstacles(r, size)], r)
            for r in reported(model=model, norm=norm, metric=metric)
            if _same_data((known.data if known else "") or data, r)
        ]
        comparable = _around([r for found, r in candidates if not found], size)
        rows += [_compared(metric, unit, measured, r, size) for r in comparable]
        if not comparable:
            least = min((len(found) for found, _ in candidates), default=0)
            ends = _around([r for found, r in candidates if len(found) == least], {})
            rows += [
                Row(metric, unit, measured, r, reason=f"not comparable: {'; '.join(found)}")
                for found, r in candidates
                if r in ends
            ] or [Row(metric, unit, measured)]
    return rows


def bare_metric(name: str) -> str:
    """A metric's name without the split that tests put before it: ``test/nll`` is ``nll``."""
    for prefix in ("test/", "test_"):
        name = name.removeprefix(prefix)
    return name


def measured_on(data: Mapping[str, Any], split: str = "test", metric: str = "") -> str:
    """Data set and split of an evaluation, as `comparison` takes them.

    Args:
        data: a data module's facts.
        split: ``"test"`` or ``"validation"``.
        metric: a metric, which may have data of its own; default: any that has not.

    Example:
        >>> measured_on({"dataset": "mnist", "batch_size": 128})
        'mnist/test'
    """
    known = metric_unit(bare_metric(metric))
    if known is not None and known.data:
        return known.data
    # Where a source validates and reports on the same set, that is what tests take.
    split = data.get("test_split", split) if split == "test" else split
    return f"{data['dataset']}/{split}"


def run_size(
    hparams: Mapping[str, Any],
    data: Mapping[str, Any],
    runs: Sequence[Run] | None = None,
) -> dict[str, Any]:
    """Facts that decide whether a run's numbers are comparable, for `comparison`.

    Args:
        hparams: the model's arguments; they go before facts of the data of the same name.
        data: a data module's facts, ``dataset`` among them.
        runs: training runs behind the weights (see `ln_zoo.training_runs`), with batch size and
            length; default: unknown runs on the same dataset.

    Example:
        >>> runs = [{"dataset": "mnist", "epochs": 15}, {"dataset": "mnist", "epochs": 5}]
        >>> run_size({"hidden_sizes": [8], "norm": {}}, {"dataset": "mnist"}, runs)
        {'training_data': 'mnist', 'epochs': 20, 'hidden_sizes': [8]}
    """
    facts = {key: value for key, value in data.items() if key != "dataset"}
    if runs is not None:
        facts.pop("batch_size", None)  # of the test
    of_training = {"training_data": data["dataset"]} if runs is None else totals(runs)
    of_model = {k: v for k, v in hparams.items() if k != "norm" and not k.startswith("_")}
    return facts | of_training | of_model


def render(
    rows: Iterable[Row],
    title: str | None = None,
    card: Mapping[str, float] | None = None,
    note: str = "",
) -> Table:
    """The rows as a table for `rich`: metric, unit, measured, reported, difference.

    The last two columns are left out where no row has a reported number. Where a number is from,
    and what keeps it from being compared, stands below the table, so that this fits into a narrow
    terminal.

    Args:
        rows: of the table.
        title: above the table.
        card: values of the card of the tested weights by metric, in the unit of the rows, for
            an extra column.
        note: a line below the table.

    Example:
        >>> size = {"hidden_size": 120}
        >>> rows = comparison("AttentiveReader", "Identity", {"error": 0.46}, data="CNN/test",
        ...                   size=size)
        >>> [column.header for column in render(rows, card={"error": 46.1}).columns]
        ['metric', 'unit', 'measured', 'card', 'reported', 'difference']
    """
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    numbers = any(row.reported for row in rows)
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("metric")
    table.add_column("unit")
    for head in ("measured", *([] if card is None else ["card"])):
        table.add_column(head, justify="right", no_wrap=True)
    if numbers:
        table.add_column("reported", justify="right", no_wrap=True)
        table.add_column("difference")
    notes: dict[str, int] = {}
    for row in rows:
        cells = [row.metric, row.unit, f"{row.measured:.5g}"]
        if card is not None:
            cells.append(f"{card[row.metric]:.5g}" if row.metric in card else "")
        if row.reported is not None:
            why = row.reason or row.but
            text = f"{row.origin}; {why}" if why else row.origin
            number = notes.setdefault(text, len(notes) + 1)
            cells += [f"{row.reported.value:g} [{number}]", row.distance() or "not comparable"]
        # As Text: square brackets would be read as markup.
        table.add_row(*(Text(cell) for cell in cells))
    below = [f"[{number}] {text}" for text, number in notes.items()] + [note] * bool(note)
    table.caption = Text("\n".join(below)) if below else None
    return table


def with_unit(value: float, unit: str) -> str:
    """A measured value to five digits, with its unit.

    Example:
        >>> with_unit(95.466518, "nats/image")
        '95.467 nats/image'
    """
    return _with_unit(f"{value:.5g}", unit)


def _with_unit(number: str, unit: str) -> str:
    return f"{number} {unit}" if unit else number


def _obstacles(r: Reported, size: Mapping[str, Any]) -> list[str]:
    """Reasons why a run on the same data is not comparable with a number."""
    lengths = [
        f"{key} not stated here, {there} there"
        for key, there in r.training.items()
        if key not in size
    ]
    # By default the weights of a reported number were trained on the dataset of its test.
    trained_on = {"training_data": r.dataset} if "training_data" in size else {}
    return _differing({**trained_on, **r.size}, size) + lengths


def _compared(metric: str, unit: str, measured: float, r: Reported, size: Mapping[str, Any]) -> Row:
    """The row of a measurement and a comparable number."""
    at = ", ".join(
        f"{size[key]:,} of {there:,} {key}"
        for key, there in r.training.items()
        if size[key] != there
    )
    but = "; ".join(_differing(r.stated, size))
    return Row(metric, unit, measured, r, measured - r.value, at=at, but=but)


def _around(numbers: Sequence[Reported], size: Mapping[str, Any]) -> list[Reported]:
    """For each curve, the point at the run's length of training, or its two neighbours.

    If the length is unknown, the end of the curve.
    """
    kept = []
    for r in numbers:
        curve = [
            other.training[key]
            for other in numbers
            for key in r.training
            if key in other.training
            and (other.source, other.place, other.method) == (r.source, r.place, r.method)
        ]
        for key, there in r.training.items():
            here = size.get(key, max(curve))
            before = max((n for n in curve if n <= here), default=here)
            after = min((n for n in curve if n >= here), default=here)
            if there in (before, after):
                kept.append(r)
        if not r.training:
            kept.append(r)
    return kept


def _differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Facts in which a run differs, a phrase each."""
    found = []
    for key, value in there.items():
        if key not in here:
            found.append(f"{key} not stated here, {value} there")
        elif _plain(here[key]) != _plain(value):
            found.append(f"{key} {here[key]} here, {value} there")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return _spelling(value)
    return list(value) if isinstance(value, (list, tuple)) else value


def _same_data(data: str, r: Reported) -> bool:
    return _spelling(data) == _spelling(r.data)


def _spelling(name: str) -> str:
    """A name in lower case without separators: ``BinarizedMNIST`` is ``binarized_mnist``."""
    return re.sub(r"[^a-z0-9/+]", "", name.lower())


# The data file


@dataclass(frozen=True)
class _Cited:
    """Keys of the publications that cards cite."""

    always: list[str]
    models: dict[str, list[str]]
    norms: dict[str, list[str]]
    recurrent_models: list[str]
    recurrent_norms: dict[str, list[str]]
    datasets: dict[str, list[str]]


@dataclass(frozen=True)
class _Column:
    metric: str
    dataset: str
    split: str
    training: dict[str, int] | None = None


@dataclass(frozen=True)
class _TableRow:
    method: str
    norm: str | None
    values: list[float | None]


@dataclass(frozen=True)
class _Table:
    source: str
    place: str
    model: str | None
    columns: list[_Column]
    rows: list[_TableRow]
    size: dict[str, Any] = field(default_factory=dict)
    stated: dict[str, Any] = field(default_factory=dict)
    training: dict[str, int] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class _Content:
    citations: dict[str, dict[str, Any]]
    cited: _Cited
    metrics: dict[str, MetricUnit]
    tables: list[_Table]


@dataclass(frozen=True)
class _File:
    citations: Mapping[str, Citation]
    cited: _Cited
    metrics: Mapping[str, MetricUnit]
    entries: tuple[Reported, ...]


@functools.cache
def _load() -> _File:
    text = files("ln_zoo.zoo").joinpath("reported.yaml").read_text(encoding="utf-8")
    return parse(yaml.safe_load(text))


def parse(raw: Any) -> _File:
    """Validate the content of ``reported.yaml`` and list its tables as single numbers.

    Raises:
        ValueError: for unknown or missing keys, unknown names, wrong types, rows of another length
            than their columns, or a number given twice; the message names the entry.
    """
    content = read(_Content, raw, "reported.yaml")
    cited = {}
    for key, value in content.citations.items():
        cited[key] = read(Citation, {"key": key, **value}, f"citation {key}")
        if not cited[key].arxiv and not cited[key].venue:
            raise ValueError(f"citation {key}: neither arxiv nor venue is given")
    by_name = ("models", "norms", "recurrent_norms", "datasets")
    used = [content.cited.always]
    used += [keys for name in by_name for keys in getattr(content.cited, name).values()]
    if unknown := {key for keys in used for key in keys} - cited.keys():
        raise ValueError(f"cited: {sorted(unknown)} are not among {sorted(cited)}")
    for key, unit in content.metrics.items():
        if unit.logged not in ("", unit.unit) and (unit.logged, unit.unit) not in _SCALES:
            raise ValueError(f"metric {key}: no factor from {unit.logged!r} to {unit.unit!r}")
    entries: dict[tuple[Any, ...], Reported] = {}
    for table in content.tables:
        for e in _numbers(table, cited, content.metrics):
            sizes = repr((e.size, e.training))  # they hold lists
            identity = (e.source, e.place, e.model, e.method, e.metric, e.data, sizes)
            if identity in entries:
                raise ValueError(f"{e.source}, {e.place}: {e.method}, {e.metric} appears twice")
            entries[identity] = e
    return _File(cited, content.cited, content.metrics, tuple(entries.values()))


def _numbers(
    table: _Table, cited: Mapping[str, Citation], units: Mapping[str, MetricUnit]
) -> Iterable[Reported]:
    """The numbers of a table, one by one, checked."""
    where = f"{table.source}, {table.place}"
    if table.source not in cited:
        raise ValueError(f"{where}: source is not one of {sorted(cited)}")
    for name in (table.model, *(row.norm for row in table.rows)):
        if name is not None and not re.fullmatch("[A-Z][A-Za-z]*", name):
            raise ValueError(f"{where}: {name!r} is not the name of a class")
    for column in table.columns:
        if column.metric not in units:
            raise ValueError(f"{where}: metric {column.metric!r} is not among the metrics")
    for row in table.rows:
        if len(row.values) != len(table.columns):
            raise ValueError(
                f"{where}, {row.method}: {len(row.values)} values for {len(table.columns)} columns"
            )
        if set(row.values) == {None}:
            raise ValueError(f"{where}, {row.method}: a row without a value")
        for column, value in zip(table.columns, row.values, strict=True):
            if value is None:
                continue
            training = table.training if column.training is None else column.training
            if len(training) > 1 or not all(
                key in _LENGTHS and n > 0 for key, n in training.items()
            ):
                raise ValueError(
                    f"{where}: training must be one of {_LENGTHS} with a positive number, got "
                    f"{training}"
                )
            yield Reported(
                model=table.model,
                norm=row.norm,
                method=row.method,
                metric=column.metric,
                unit=units[column.metric].unit,
                value=float(value),
                higher_is_better=units[column.metric].higher_is_better,
                dataset=column.dataset,
                split=column.split,
                place=table.place,
                source=table.source,
                size=table.size,
                stated=table.stated,
                training=training,
                note=table.note,
            )
