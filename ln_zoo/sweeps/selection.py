"""Which settings of a norm, and which seed, are best by validation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from ln_zoo.sweeps import speed
from ln_zoo.sweeps.grid import SweepError, norm_name
from ln_zoo.sweeps.results import FinishedRun, Results


@dataclass(frozen=True)
class Chosen:
    """The best settings of a norm by validation."""

    norm: str
    label: str  # of its best runs
    score: float  # mean over the seeds
    edges: list[str]  # options whose best value is the smallest or largest of the grid
    tied: list[str]  # labels of other settings with the same score
    finished: int  # settings with a finished run
    settings: int  # all settings


def chosen_settings(results: Results) -> list[Chosen]:
    """The best settings of each norm by validation; empty for a single setting.

    Means are over the seeds that have finished with all settings of the norm, or over all seeds if
    no seed has.
    """
    several = any(len(values) > 1 for values in results.grid.settings.values())
    if not results.select or not several:
        return []
    scores: dict[str, dict[str, dict[int, float]]] = {}
    for each in results.finished:
        labels = scores.setdefault(norm_name(each.run.norm), {})
        labels.setdefault(each.run.label, {})[each.run.seed] = _score(results, each)
    found = []
    for norm, labels in scores.items():
        shared = set.intersection(*map(set, labels.values()))
        means = {
            label: statistics.fmean(values[seed] for seed in shared or values)
            for label, values in labels.items()
        }
        label = speed.best_of(results.select)(means, key=means.__getitem__)
        tied = [
            each
            for each, mean in means.items()
            if each != label and math.isclose(mean, means[label], rel_tol=1e-9)
        ]
        edges = _edges(results, results.of_label(label)[0].run.settings)
        settings = math.prod(map(len, results.grid.settings.values()))
        settings = len(means) if results.grid.search else settings
        found.append(Chosen(norm, label, means[label], edges, tied, len(means), settings))
    return found


def best_label(results: Results, norm: str) -> str:
    """The label of a norm at its best settings; SweepError if nothing chooses among them."""
    chosen = {each.norm: each.label for each in chosen_settings(results)}
    labels = {each.run.label for each in results.finished if norm_name(each.run.norm) == norm}
    if not labels:
        raise SweepError(f"{results.out}: no run of {norm} has finished")
    if norm not in chosen and len(labels) > 1:
        raise SweepError(f"{results.out}: no validation metric chooses among settings of {norm}")
    return chosen.get(norm, min(labels))


def median_seed(results: Results, label: str) -> int | None:
    """The seed with the median validation score, the run to publish; None without a score.

    For an even number of runs, the worse of the two in the middle.
    """
    if not results.select:
        return None
    sign = -1 if speed.higher_is_better(results.select) else 1
    ordered = sorted(
        results.of_label(label), key=lambda each: (sign * _score(results, each), each.run.seed)
    )
    return ordered[len(ordered) // 2].run.seed


def _score(results: Results, finished: FinishedRun) -> float:
    assert results.select is not None
    return validation_score(finished, results.select, results.grid.test)


def validation_score(finished: FinishedRun, metric: str, test: str) -> float:
    """The validation score of the weights that were tested: the best, or the last."""
    curve = finished.curve(metric, "epoch")
    best: float = speed.best_of(metric)(curve.values())
    return best if test == "best" else curve[max(curve)]


def _edges(results: Results, settings: Mapping[str, str]) -> list[str]:
    edges = []
    for option, values in results.grid.settings.items():
        try:
            numbers = sorted(map(float, values))
            here = float(settings[option])
        except ValueError:
            continue
        if len(numbers) > 1 and here in (numbers[0], numbers[-1]):
            edges.append(f"{option}={settings[option]}")
    return edges
