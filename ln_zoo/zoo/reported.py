"""Numbers that the paper and its sources report, and comparison with measurements.

The numbers are in ``reported.yaml``, one file for all models; ``tests/zoo/test_reported.py`` checks
it. Only numbers for the same data and split are compared. The outcome is one of three: the
difference, if network and length of training agree too; how far a run is behind or ahead, if its
training had another length; or why the two are not comparable.

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

if TYPE_CHECKING:
    from rich.table import Table


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
        """The entry for BibTeX."""
        entry = {
            "author": " and ".join(self.authors),
            "title": f"{{{self.title}}}",
            "year": str(self.year),
            "howpublished": self.venue,
            "url": self.url,
            "eprint": self.arxiv,
            "archiveprefix": "arXiv" if self.arxiv else "",
        }
        lines = ",\n".join(f"  {key} = {{{value}}}" for key, value in entry.items() if value)
        return f"@misc{{{self.key},\n{lines}\n}}"


@dataclass(frozen=True)
class MetricUnit:
    """Unit and direction of a metric; the defaults are those of an unknown one.

    Attributes:
        unit: in the tables.
        higher_is_better: which way is better.
        logged: the unit in which tests log it, if another.
        data: data set and split of a metric with fixed data, as ``"MR/10-fold"``.
        examples: of these data.
    """

    unit: str = ""
    higher_is_better: bool = False
    logged: str = ""
    data: str = ""
    examples: int = 0

    @property
    def scale(self) -> float:
        """Factor from the logged unit to the unit of the tables: fractions become per cent."""
        return 100.0 if self.logged == "fraction" else 1.0


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
        """The difference, or how far behind or ahead, with a unit; empty without one."""
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
        measured = _with_unit(f"{self.measured:.5g}", self.unit)
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
        for r in _numbers()
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


@functools.cache
def citations() -> Mapping[str, Citation]:
    """The sources by the key that `Reported.source` holds."""
    stored = _content()["citations"]
    return {
        k: Citation(k, **each | {"authors": tuple(each["authors"])}) for k, each in stored.items()
    }


def cited_for(model: str, norm: str, dataset: str) -> list[Citation]:
    """Publications that a card cites for model, norm and data; the paper is the first.

    Example:
        >>> [c.key for c in cited_for("SequenceClassifier", "BatchNorm", "mnist")]
        ['ba2016', 'cooijmans2017', 'ioffe2015', 'lecun1998']
        >>> [c.key for c in cited_for("ConvClassifier", "BatchNorm", "mnist")]
        ['ba2016', 'ioffe2015', 'lecun1998']
    """
    cited = _content()["cited"]
    keys = [*cited["always"], *cited["models"].get(model, ()), *cited["norms"].get(norm, ())]
    if model in cited["recurrent_models"]:
        keys += cited["recurrent_norms"].get(norm, ())
    keys += cited["datasets"].get(dataset, ())
    return [citations()[key] for key in dict.fromkeys(keys)]


def metric_unit(metric: str) -> MetricUnit:
    """The entry of a metric in ``reported.yaml``; the default `MetricUnit` for an unknown one."""
    return _metrics().get(metric, MetricUnit())


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
        obstacles: reasons that rule out every comparison.

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
        unit, measured = known.unit, float(value) * known.scale
        candidates = [
            ([*obstacles, *_obstacles(r, size)], r)
            for r in reported(model=model, norm=norm, metric=metric)
            if _spelling(known.data or data) == _spelling(r.data)
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

    Example:
        >>> measured_on({"dataset": "mnist", "batch_size": 128})
        'mnist/test'
    """
    if fixed := metric_unit(bare_metric(metric)).data:
        return fixed
    # Some sources report their validation set.
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

    Sources and reasons are numbered notes below the table, which fits 80 columns.

    Args:
        rows: of the table; without reported numbers the last two columns are left out.
        title: above the table.
        card: values on the card of the tested weights by metric, in the unit of the rows.
        note: a line below the table.
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

    def is_neighbour(r: Reported, key: str, there: int) -> bool:
        same = (r.source, r.place, r.method)
        curve = [
            other.training[key]
            for other in numbers
            if key in other.training and (other.source, other.place, other.method) == same
        ]
        here = size.get(key, max(curve))
        below, above = [n for n in curve if n <= here], [n for n in curve if n >= here]
        return there in (max(below, default=None), min(above, default=None))

    return [r for r in numbers if all(is_neighbour(r, *item) for item in r.training.items())]


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


def _spelling(name: str) -> str:
    """A name in lower case without separators: ``BinarizedMNIST`` is ``binarized_mnist``."""
    return re.sub(r"[^a-z0-9/+]", "", name.lower())


# The data file


@functools.cache
def _content() -> dict[str, Any]:
    text = files("ln_zoo.zoo").joinpath("reported.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


@functools.cache
def _metrics() -> dict[str, MetricUnit]:
    return {name: MetricUnit(**stored) for name, stored in _content()["metrics"].items()}


@functools.cache
def _numbers() -> tuple[Reported, ...]:
    """The tables of the file as single numbers."""
    found = []
    for table in _content()["tables"]:
        shared = {key: value for key, value in table.items() if key not in ("columns", "rows")}
        for row in table["rows"]:
            for column, value in zip(table["columns"], row["values"], strict=True):
                if value is not None:
                    unit = _metrics()[column["metric"]]
                    facts = shared | column | {"method": row["method"], "norm": row["norm"]}
                    better = unit.higher_is_better
                    found.append(
                        Reported(
                            **facts, unit=unit.unit, value=float(value), higher_is_better=better
                        )
                    )
    return tuple(found)
