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
from typing import TYPE_CHECKING, Any

from ln_zoo.utils import schema
from ln_zoo.utils.package_data import read_data
from ln_zoo.utils.training_runs import TrainingRun, totals

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Citation:
    """A publication."""

    key: str  #: its name in ``reported.yaml``, and in BibTeX
    authors: tuple[str, ...]  #: ``"Surname, Given Names"`` of each
    year: int
    title: str
    arxiv: str = ""  #: number there
    venue: str = ""  #: of a publication that arXiv does not have
    url: str = ""  #: of a publication that arXiv does not have

    def __str__(self) -> str:
        names = ", ".join(name.partition(",")[0] for name in self.authors)
        return f"{names} ({self.year}): {self.title}"

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
    """Unit and direction of a metric; the defaults are for an unknown one."""

    unit: str = ""  #: in the tables
    higher_is_better: bool = False
    logged: str = ""  #: unit in which tests log it, if another
    data: str = ""  #: data set and split of a metric with fixed data, as ``"MR/10-fold"``
    examples: int = 0  #: number of examples of these data

    @property
    def scale(self) -> float:
        """Factor from the logged unit to the unit of the tables: fractions become per cent."""
        return 100.0 if self.logged == "fraction" else 1.0


@dataclass(frozen=True)
class Reported:
    """One number of one source."""

    model: str | None  #: class name, of the zoo or planned for it; None for another network
    norm: str | None  #: class name; None for a method outside the zoo
    method: str  #: name of the run in the source
    metric: str
    unit: str
    value: float  #: as printed
    higher_is_better: bool
    dataset: str
    split: str
    place: str  #: table, figure or section of the source
    source: str  #: key in `citations`
    #: Facts that a comparable run must share: sizes, batch size, training data.
    size: dict[str, Any] = field(default_factory=dict, hash=False)
    #: Facts in which a run may differ; the comparison names them.
    stated: dict[str, Any] = field(default_factory=dict, hash=False)
    #: ``epochs`` or ``updates`` before the measurement, if the source states them.
    training: dict[str, int] = field(default_factory=dict, hash=False)
    note: str = ""  #: remark on the number

    @property
    def data(self) -> str:
        """Data set and split, as `comparison` takes them: ``"MNIST/test"``."""
        return f"{self.dataset}/{self.split}"


@dataclass(frozen=True)
class Row:
    """A measurement and the reported number for its data, if any."""

    metric: str  #: without the prefix of the split
    unit: str  #: of all three numbers
    measured: float
    reported: Reported | None = None  #: None if no source has a number for these data
    difference: float | None = None  #: measured minus reported; None if not comparable
    reason: str = ""  #: why there is no difference
    at: str = ""  #: lengths of training if they differ: ``"15 of 200 epochs"``
    but: str = ""  #: facts of the network that differ without ruling the comparison out

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
            return f"{self.difference:+.4g} {unit}".strip()
        if not self.difference:
            return f"equal at {self.at}"
        better = (self.difference > 0) == self.reported.higher_is_better
        distance = f"{abs(self.difference):.4g} {unit}".strip()
        return f"{distance} {'ahead' if better else 'behind'} at {self.at}"

    def cells(self) -> tuple[str, str, str, str]:
        """Metric, measured, reported with place and data, outcome; the last two may be empty."""
        measured = f"{self.measured:.5g} {self.unit}".strip()
        if self.reported is None:
            return self.metric, measured, "", ""
        value = f"{self.reported.value:g} {self.unit}".strip()
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

    Example:
        >>> [r.value for r in reported(model="DRAW", metric="bound")]
        [82.36, 82.09, 84.3, 81.98, 81.17]
    """
    return [
        r
        for r in _numbers()
        if model in (None, r.model) and norm in (None, r.norm) and metric in (None, r.metric)
    ]


@functools.cache
def citations() -> Mapping[str, Citation]:
    """The sources by the key that `Reported.source` holds."""
    stored = read_data("zoo/reported.yaml")["citations"]
    return {k: schema.read(Citation, {"key": k, **each}, k) for k, each in stored.items()}


def cited_for(model: str, norm: str, dataset: str) -> list[Citation]:
    """Publications that a card cites for model, norm and data; the paper is the first.

    Example:
        >>> [c.key for c in cited_for("SequenceClassifier", "BatchNorm", "mnist")]
        ['ba2016', 'cooijmans2017', 'ioffe2015', 'lecun1998']
        >>> [c.key for c in cited_for("ConvClassifier", "BatchNorm", "mnist")]
        ['ba2016', 'ioffe2015', 'lecun1998']
    """
    cited = read_data("zoo/reported.yaml")["cited"]
    keys = [*cited["always"], *cited["models"].get(model, ()), *cited["norms"].get(norm, ())]
    if model in cited["recurrent_models"]:
        keys += cited["recurrent_norms"].get(norm, ())
    keys += cited["datasets"].get(dataset, ())
    return [citations()[key] for key in dict.fromkeys(keys)]


@functools.cache
def metric_unit(metric: str) -> MetricUnit:
    """The entry of a metric in ``reported.yaml``; the default `MetricUnit` for an unknown one."""
    stored = read_data("zoo/reported.yaml")["metrics"].get(metric, {})
    return schema.read(MetricUnit, stored, metric)


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
            underscores do not matter. Metrics with fixed data keep them.
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
        measured = float(value) * known.scale
        found = [
            (r, [*obstacles, *_obstacles(r, size)])
            for r in reported(model=model, norm=norm, metric=metric)
            if _spelling(known.data or data) == _spelling(r.data)
        ]
        least = min((len(reasons) for _, reasons in found), default=0)
        closest = [(r, reasons) for r, reasons in found if len(reasons) == least]
        shown = _around([r for r, _ in closest], {} if least else size)
        rows += [_row(measured, r, reasons, size) for r, reasons in closest if r in shown] or [
            Row(metric, known.unit, measured)
        ]
    return rows


def bare_metric(name: str) -> str:
    """A metric's name without the split that tests put before it: ``test/nll`` is ``nll``."""
    return re.sub("^test[/_]", "", name)


def measured_on(data: Mapping[str, Any], split: str = "test", metric: str = "") -> str:
    """Data set and split of an evaluation, as `comparison` takes them: ``"mnist/test"``."""
    if fixed := metric_unit(bare_metric(metric)).data:
        return fixed
    # Some sources report their validation set.
    split = data.get("test_split", split) if split == "test" else split
    return f"{data['dataset']}/{split}"


def model_size(model: Any) -> dict[str, Any]:
    """A model's arguments for `run_size`; the size of a vocabulary in place of its words."""
    plain = int | float | str | list | tuple | dict | None
    size = {
        name: value
        for name, value in model.hparams.items()
        if name != "norm" and not name.startswith("_") and isinstance(value, plain)
    }
    if isinstance(words := size.get("vocabulary"), list):
        del size["vocabulary"]
        size["vocab_size"] = getattr(getattr(model, "vocabulary", None), "size", len(words))
    return size


def run_size(
    hparams: Mapping[str, Any],
    data: Mapping[str, Any],
    runs: Sequence[TrainingRun] | None = None,
) -> dict[str, Any]:
    """Facts that decide whether a run's numbers are comparable, for `comparison`.

    The model's arguments go before facts of the data of the same name. ``runs`` are those behind
    the weights, with batch size and length; by default unknown ones on the same dataset.

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

    Sources and reasons are numbered notes below the table, which fits 80 columns. Without reported
    numbers the last two columns are left out.

    Args:
        rows: of the table.
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


def _obstacles(r: Reported, size: Mapping[str, Any]) -> list[str]:
    """Reasons why a run on the same data is not comparable with a number."""
    # By default the weights of a reported number were trained on the dataset of its test.
    trained_on = {"training_data": r.dataset} if "training_data" in size else {}
    unstated = {key: there for key, there in r.training.items() if key not in size}
    return _differing({**trained_on, **r.size, **unstated}, size)


def _row(measured: float, r: Reported, reasons: list[str], size: Mapping[str, Any]) -> Row:
    """The row of a measurement and a number of the same metric."""
    if reasons:
        why = f"not comparable: {'; '.join(reasons)}"
        return Row(r.metric, r.unit, measured, r, reason=why)
    at = ", ".join(
        f"{size[key]:,} of {there:,} {key}"
        for key, there in r.training.items()
        if size[key] != there
    )
    but = "; ".join(_differing(r.stated, size))
    return Row(r.metric, r.unit, measured, r, measured - r.value, at=at, but=but)


def _around(numbers: Sequence[Reported], size: Mapping[str, Any]) -> list[Reported]:
    """For each curve, the point at the run's length of training, or its two neighbours.

    If the length is unknown, the end of the curve.
    """

    def is_neighbour(r: Reported, unit: str) -> bool:
        curve = [
            other.training[unit]
            for other in numbers
            if unit in other.training
            and (other.source, other.place, other.method) == (r.source, r.place, r.method)
        ]
        here = size.get(unit, max(curve))
        below, above = [n for n in curve if n <= here], [n for n in curve if n >= here]
        return r.training[unit] in (max(below, default=None), min(above, default=None))

    return [r for r in numbers if all(is_neighbour(r, unit) for unit in r.training)]


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


@functools.cache
def _numbers() -> tuple[Reported, ...]:
    """The tables of the file as single numbers."""
    found = []
    for table in read_data("zoo/reported.yaml")["tables"]:
        shared = {key: value for key, value in table.items() if key not in ("columns", "rows")}
        for row in table["rows"]:
            for column, value in zip(table["columns"], row["values"], strict=True):
                if value is not None:
                    known = metric_unit(column["metric"])
                    facts = shared | column | {"method": row["method"], "norm": row["norm"]}
                    facts |= {"unit": known.unit, "higher_is_better": known.higher_is_better}
                    found.append(schema.read(Reported, facts | {"value": value}, table["place"]))
    return tuple(found)
