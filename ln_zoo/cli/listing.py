"""Published models as text: lists, tables and cards for the command line and the pages.

Imports no torch. Text from cards is made safe for a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable

from ln_zoo.utils import tables
from ln_zoo.utils.errors import CardError, printable
from ln_zoo.utils.training_runs import totals
from ln_zoo.zoo import catalog
from ln_zoo.zoo.catalog import Metric, card_folders, describe

#: Maximum characters of a cell of the table.
_WIDEST = 100
#: Metrics of a model in the README.
_MOST_METRICS = 5


def table(names: Iterable[str]) -> str:
    """Published models as plain text, one per line; the line of a damaged card has the error."""
    rows = [["name", "model", "norm", "dataset", "main metric", "parameters"]]
    broken = []
    for name in names:
        try:
            card = describe(name)
        except CardError as error:
            broken.append(f"{_cell(name)}: {_one_line(str(error))}")
            continue
        dataset, value = str(card.results.data.get("dataset", "")), "not measured"
        if card.metrics:
            main = card.metrics[0]
            dataset, value = main.dataset, f"{main.name} {_value(main)}"
        cells = (name, card.model, card.norm, dataset, value, f"{card.parameters:,}")
        rows.append(list(map(_cell, cells)))
    return "\n".join([*(tables.aligned(rows) if len(rows) > 1 else []), *broken])


def _cell(text: str) -> str:
    line = _one_line(printable(text))
    return line if len(line) <= _WIDEST else f"{line[: _WIDEST - 3]}..."


def _one_line(text: str) -> str:
    return " ".join(text.split())


def markdown_table(filter: str = "*") -> str:
    """Published models with their first metrics as a Markdown table, for the project's README."""
    rows = []
    for name in catalog.list_models(filter):
        card = describe(name)
        shown = [f"{m.name} {_value(m)}" for m in card.metrics[:_MOST_METRICS]]
        measured = ", ".join([*shown, *["..."] * (len(card.metrics) > _MOST_METRICS)])
        classes = (f"`{name}`", f"`{card.model}`", f"`{card.norm}`", ", ".join(card.datasets))
        rows.append([*classes, measured, f"{card.parameters:,}"])
    return tables.markdown_table(["name", "model", "norm", "data", "measured", "parameters"], rows)


#: Columns of `results_csv`.
_COLUMNS = (
    "name", "model", "norm", "dataset", "split", "metric", "value", "unit", "parameters", "epochs",
    "steps", "seed", "date", "version", "sha256",
)  # fmt: skip


def results_csv(names: Iterable[str]) -> str:
    """Every measured metric of published models, a row each, as comma-separated values."""
    rows = []
    for name in names:
        card = describe(name)
        evaluation, trained = card.results.evaluation, totals(card.training_runs)
        length = trained.get("epochs"), trained.get("updates")
        tested = evaluation.get("seed"), evaluation.get("date")
        for m in card.metrics:
            measured = (name, card.model, card.norm, m.dataset, m.split, m.name, m.value, m.unit)
            row = (*measured, card.parameters, *length, *tested, card.version, card.digest)
            rows.append([printable(v) if isinstance(v, str) else v for v in row])
    return tables.csv_table(_COLUMNS, rows) + "\n"


def _value(metric: Metric) -> str:
    if metric.unit == "fraction":
        return f"{100 * metric.value:.5g} %"
    return f"{metric.value:.5g} {metric.unit}".strip()


def list_text(
    filter: str = "*",
    *,
    model: str | None = None,
    norm: str | None = None,
    dataset: str | None = None,
) -> str:
    """Output of ``ln-zoo list``: the table of `list_models`, and errors of damaged cards."""
    names, broken = catalog.fitting(filter, model, norm, dataset)
    if names or broken:
        return table([*names, *broken])
    known = card_folders()
    if not known:
        return (
            "no published models on this machine; "
            f"set {catalog.MODELS_VARIABLE} to a folder of card folders"
        )
    return f"no model matches; there are {', '.join(map(_cell, known))}"


def cards_text(name: str | None = None) -> str:
    """Output of ``ln-zoo cards``: one model's card, or the folders of all."""
    if name is None:
        folders = card_folders()
        if not folders:
            return list_text()
        lines = tables.aligned((name, str(path)) for name, path in folders.items())
        return "\n".join(printable(line).replace("\n", "\\n") for line in lines)
    path = catalog.folder(name) / catalog.README
    try:
        return printable(catalog.read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise CardError(f"{path} cannot be read: {error}") from error
