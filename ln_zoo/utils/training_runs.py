"""Training history of weights: a sequence of runs, stored in checkpoints and cards.

A run maps ``dataset`` (name), ``train_size`` (examples), ``batch_size`` (per update over all
processes), ``epochs`` (complete passes), ``steps`` (updates), and ``weights`` (name of the result,
if another run started from it). Unknown values are omitted. Random weights have no runs; weights of
unknown origin have one run without values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TrainingRun = Mapping[str, Any]

#: A run without known values.
UNKNOWN: TrainingRun = {}

_TEXTS = ("dataset", "weights")
_COUNTS = ("train_size", "batch_size", "epochs", "steps")
#: Upper bounds for untrusted files.
_MOST_RUNS = 100
_LONGEST_TEXT = 300
_LARGEST_COUNT = 2**53


def dataset_metadata(data: Any) -> dict[str, Any]:
    """The ``metadata`` mapping of any data module, if present, with a default of ``dataset``."""
    given = getattr(data, "metadata", None)
    metadata = dict(given) if isinstance(given, Mapping) else {}
    if not isinstance(metadata.get("dataset"), str):
        metadata["dataset"] = type(data).__name__
    return metadata


def read_run(stored: Any) -> TrainingRun:
    """Validate a stored run; `UNKNOWN` if it is invalid."""
    if not isinstance(stored, Mapping):
        return UNKNOWN
    known = {k: stored[k] for k in (*_TEXTS, *_COUNTS) if stored.get(k) is not None}
    whole = all(_is_text(known[k]) for k in _TEXTS if k in known) and all(
        _is_count(known[k]) for k in _COUNTS if k in known
    )
    return known if whole else UNKNOWN


def read_runs(stored: Any) -> tuple[TrainingRun, ...]:
    """Validate stored runs; one `UNKNOWN` run if they are not a list of runs."""
    if not isinstance(stored, Sequence) or isinstance(stored, str) or len(stored) > _MOST_RUNS:
        return (UNKNOWN,)
    return tuple(read_run(run) for run in stored)


def named(runs: Sequence[TrainingRun], weights: str) -> tuple[TrainingRun, ...]:
    """The runs, with the name of the resulting weights in the last one."""
    return (*runs[:-1], {**runs[-1], "weights": weights}) if runs else ()


def same_data(first: TrainingRun, second: TrainingRun) -> bool:
    """Whether two runs agree in dataset, training size and batch size."""
    return all(first.get(key) == second.get(key) for key in ("dataset", "train_size", "batch_size"))


def totals(runs: Sequence[TrainingRun]) -> dict[str, Any]:
    """Total training over all runs, oldest first, to decide whether numbers are comparable.

    ``training_data``: the datasets, or ``nothing``; if known for all runs, ``batch_size`` (a
    number, or different numbers as text) and ``updates``; and ``epochs``, if there is one training
    set.

    Example:
        >>> first = {"dataset": "mnist", "epochs": 15, "steps": 6450, "batch_size": 128}
        >>> totals([first, {"dataset": "digits", "epochs": 5, "steps": 35, "batch_size": 50}])
        {'training_data': 'mnist, digits', 'batch_size': '128, 50', 'updates': 6485}
    """
    datasets = _each(runs, "dataset", "unknown")
    found: dict[str, Any] = {"training_data": ", ".join(datasets) or "nothing"}
    sizes = _each(runs, "batch_size", None)
    if sizes and None not in sizes:
        found["batch_size"] = sizes[0] if len(sizes) == 1 else ", ".join(map(str, sizes))
    updates = [run.get("steps") for run in runs]
    if None not in updates:
        found["updates"] = sum(updates)
    epochs = [run.get("epochs") for run in runs]
    if None not in epochs and len(datasets) < 2 and len(_each(runs, "train_size", None)) < 2:
        found["epochs"] = sum(epochs)
    return found


def format_run(run: TrainingRun) -> str:
    """Format a run as text.

    Example:
        >>> format_run({"weights": "mlp.none", "dataset": "mnist", "epochs": 15, "steps": 6450})
        'mlp.none: 15 epochs, 6,450 updates, on mnist'
    """
    parts = []
    for key, name in (("epochs", "epoch"), ("steps", "update")):
        if key in run:
            parts.append(f"{run[key]:,} {name}{'' if run[key] == 1 else 's'}")
    if "dataset" in run:
        parts.append(f"on {run['dataset']}")
    how = ", ".join(parts) or "a training of which nothing is known"
    return f"{run.get('weights', 'unknown weights')}: {how}"


def _each(runs: Sequence[TrainingRun], key: str, missing: Any) -> list[Any]:
    return list(dict.fromkeys(run.get(key, missing) for run in runs))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= _LONGEST_TEXT


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_COUNT
