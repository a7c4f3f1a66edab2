"""How long weights were trained: in their own run, and in those that it started from.

Both are a mapping: ``dataset``, ``epochs``, ``steps`` (updates), and ``started_from``, a mapping of
the same kind that names its ``weights`` too. What is not known is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ln_zoo.zoo.catalog import Card

#: What tables of numbers call a length of training, and its key here.
_LENGTHS = {"epochs": "epochs", "updates": "steps"}


def of_card(card: Card) -> dict[str, Any]:
    """The training behind a card, with the name and the digest of its weights."""
    training = card.results["training"]
    keys = ("epochs", "steps", "started_from")
    known = {key: training[key] for key in keys if training.get(key) is not None}
    dataset = card.results["data"]["dataset"]
    return {"weights": f"{card.name}, sha256 {card.digest}", "dataset": dataset, **known}


def lengths(training: Mapping[str, Any], dataset: str) -> dict[str, int]:
    """The epochs and updates on a dataset that lie behind weights, without a break.

    Args:
        training: of the weights; its last run was on that dataset.
        dataset: its name.

    Returns:
        ``epochs`` and ``updates``, as far as they are known of each run.

    Example:
        >>> before = {"dataset": "mnist", "epochs": 15, "steps": 6450}
        >>> lengths({"epochs": 5, "steps": 2150, "started_from": before}, "mnist")
        {'epochs': 20, 'updates': 8600}
        >>> lengths({"epochs": 5, "steps": 35, "started_from": before}, "digits")
        {'epochs': 5, 'updates': 35}
    """
    runs = [training]
    while isinstance(start := runs[-1].get("started_from"), Mapping):
        if start.get("dataset") != dataset:
            break
        runs.append(start)
    parts: dict[str, list[Any]] = {
        name: [run.get(key) for run in runs] for name, key in _LENGTHS.items()
    }
    return {name: sum(each) for name, each in parts.items() if None not in each}


def in_words(start: Any) -> str:
    """Weights that a training started from, with the training behind them.

    Args:
        start: the mapping; cards of older versions have a text.

    Example:
        >>> in_words({"weights": "mlp.none", "dataset": "mnist", "epochs": 15, "steps": 6450})
        'mlp.none, after 15 epochs and 6,450 updates on mnist'
    """
    if not isinstance(start, Mapping):
        return str(start)
    text = str(start["weights"])
    known = [(start[key], name) for name, key in _LENGTHS.items() if key in start]
    if known:
        counted = [f"{n:,} {name if n != 1 else name.removesuffix('s')}" for n, name in known]
        text += f", after {' and '.join(counted)}"
    if "dataset" in start:
        text += f" on {start['dataset']}"
    if before := start.get("started_from"):
        text += f", which started from {in_words(before)}"
    return text
