"""The runs of training behind weights, one after another: on which data, and for how long.

A run is a plain mapping: ``dataset``, its name; ``train_size``, in examples; ``batch_size``, the
examples of an update over all processes; ``epochs``, whole passes over the data; ``steps``,
updates; and ``weights``, the name of the weights it made, where another run started from them. What
is not known is left out.

Weights that were drawn have no run behind them, and those of unknown origin have one of which
nothing is known. Checkpoints and cards hold runs, so that what is compared with reported numbers is
the whole training of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Run = Mapping[str, Any]

#: A run of which nothing is known.
UNKNOWN: Run = {}

_TEXTS = ("dataset", "weights")
_COUNTS = ("train_size", "batch_size", "epochs", "steps")
#: More than anybody makes; a file may say anything.
_MOST_RUNS = 100
_LONGEST_TEXT = 300
_LARGEST_COUNT = 2**53


def facts_of(data: Any) -> dict[str, Any]:
    """What a data module says of itself, its class's name for ``dataset`` where it says nothing.

    Args:
        data: any data module; ours have a mapping ``facts``.

    Example:
        >>> from lightning.pytorch import LightningDataModule
        >>> facts_of(LightningDataModule())
        {'dataset': 'LightningDataModule'}
    """
    facts = getattr(data, "facts", None)
    facts = dict(facts) if isinstance(facts, Mapping) else {}
    if not isinstance(facts.get("dataset"), str):
        facts["dataset"] = type(data).__name__
    return facts


def read_run(stored: Any) -> Run:
    """A run as a file says it, or `UNKNOWN` if that is no run.

    Example:
        >>> read_run({"dataset": "mnist", "epochs": 15, "steps": None, "lr": 0.001})
        {'dataset': 'mnist', 'epochs': 15}
        >>> read_run({"dataset": "mnist", "epochs": -1})
        {}
    """
    if not isinstance(stored, Mapping):
        return UNKNOWN
    known = {k: stored[k] for k in (*_TEXTS, *_COUNTS) if stored.get(k) is not None}
    whole = all(_is_text(known[k]) for k in _TEXTS if k in known) and all(
        _is_count(known[k]) for k in _COUNTS if k in known
    )
    return known if whole else UNKNOWN


def read_runs(stored: Any) -> tuple[Run, ...]:
    """The runs that a file says, or one of which nothing is known if the file is damaged.

    Example:
        >>> read_runs([]), read_runs(None)
        ((), ({},))
    """
    if not isinstance(stored, Sequence) or isinstance(stored, str) or len(stored) > _MOST_RUNS:
        return (UNKNOWN,)
    return tuple(read_run(run) for run in stored)


def named(runs: Sequence[Run], weights: str) -> tuple[Run, ...]:
    """The same runs, the last of which made weights of that name.

    Example:
        >>> named([{"epochs": 3}], "last.ckpt")
        ({'epochs': 3, 'weights': 'last.ckpt'},)
    """
    return (*runs[:-1], {**runs[-1], "weights": weights}) if runs else ()


def same_data(first: Run, second: Run) -> bool:
    """Whether two runs took the same examples in batches of the same size, as far as is known."""
    return all(first.get(key) == second.get(key) for key in ("dataset", "train_size", "batch_size"))


def totals(runs: Sequence[Run]) -> dict[str, Any]:
    """What decides whether numbers are comparable, over all runs behind the weights.

    Args:
        runs: oldest first.

    Returns:
        ``training_data``: the datasets, or ``nothing``; ``batch_size``, where it is known of every
        run: the number, or the numbers as a text; ``updates``, where they are known of every run;
        and ``epochs`` likewise, but of one training set only.

    Example:
        >>> first = {"dataset": "mnist", "epochs": 15, "steps": 6450, "batch_size": 128}
        >>> totals([first, {"dataset": "mnist", "epochs": 5, "steps": 2150, "batch_size": 128}])
        {'training_data': 'mnist', 'batch_size': 128, 'updates': 8600, 'epochs': 20}
        >>> totals([first, {"dataset": "digits", "epochs": 5, "steps": 35, "batch_size": 50}])
        {'training_data': 'mnist, digits', 'batch_size': '128, 50', 'updates': 6485}
        >>> totals([{}, first])
        {'training_data': 'unknown, mnist'}
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


def in_words(run: Run) -> str:
    """The weights that a run made, and the run.

    Example:
        >>> in_words({"weights": "mlp.none", "dataset": "mnist", "epochs": 15, "steps": 6450})
        'mlp.none: 15 epochs, 6,450 updates, on mnist'
        >>> in_words({})
        'unknown weights: a training of which nothing is known'
    """
    parts = []
    for key, name in (("epochs", "epoch"), ("steps", "update")):
        if key in run:
            parts.append(f"{run[key]:,} {name}{'' if run[key] == 1 else 's'}")
    if "dataset" in run:
        parts.append(f"on {run['dataset']}")
    how = ", ".join(parts) or "a training of which nothing is known"
    return f"{run.get('weights', 'unknown weights')}: {how}"


def _each(runs: Sequence[Run], key: str, missing: Any) -> list[Any]:
    """The different values of a key, in their order."""
    return list(dict.fromkeys(run.get(key, missing) for run in runs))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= _LONGEST_TEXT


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_COUNT
