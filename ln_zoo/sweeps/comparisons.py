"""Statistics of a sweep over its seeds, and of each norm against the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ln_zoo.sweeps import speed
from ln_zoo.sweeps.grid import Run
from ln_zoo.sweeps.results import Results
from ln_zoo.sweeps.selection import chosen_settings
from ln_zoo.sweeps.statistics import Difference, SeedSummary, paired


@dataclass(frozen=True)
class Reached:
    """Updates and seconds of a run to the best value of the baseline with its seed and settings."""

    run: Run
    metric: str  # of the curve
    best: float  # best value of the baseline
    steps: float  # updates of the run to that value; infinite if it is missed
    baseline_steps: float
    seconds: float  # wall time of the run's training; NaN if unknown
    baseline_seconds: float
    own_best: float  # best value of the run
    own_steps: float  # updates to its own best value

    @property
    def share(self) -> float:
        """Updates relative to the baseline's; NaN if the baseline never improved."""
        return self.steps / self.baseline_steps if self.baseline_steps else math.nan

    @property
    def own_share(self) -> float:
        """Updates to the own best value, relative to the baseline's."""
        return self.own_steps / self.baseline_steps if self.baseline_steps else math.nan


def spreads(results: Results) -> dict[tuple[str, str], SeedSummary]:
    """Summaries over seeds, by label and test metric."""
    return {
        (label, metric): SeedSummary.of(list(values.values()))
        for label in results.labels()
        for metric in results.test_metrics
        if (values := results.by_seed(label, metric))
    }


def differences(results: Results) -> dict[tuple[str, str, str], Difference]:
    """Paired differences by label, label of the baseline, and test metric.

    Compares each label with the baseline at the same settings, then each norm at its best settings
    with the baseline at its best.
    """
    pairs = [(label, results.baseline_of(label)) for label in results.labels()]
    chosen = {each.norm: each.label for each in chosen_settings(results)}
    pairs += [(label, chosen.get(results.baseline)) for label in chosen.values()]
    found = {}
    for label, other in pairs:
        if other is None or label == other:
            continue
        for metric in results.test_metrics:
            difference = paired(results.by_seed(label, metric), results.by_seed(other, metric))
            if difference is not None:
                found[label, other, metric] = difference
    return found


def reached(results: Results, metrics: Sequence[str]) -> list[Reached]:
    """`Reached` of each run with a baseline of its seed and settings, for each metric."""
    return [
        found
        for metric in metrics
        for label in results.labels()
        if (other := results.baseline_of(label)) is not None
        for found in _reached(results, label, other, metric)
    ]


def _reached(results: Results, label: str, baseline: str, metric: str) -> list[Reached]:
    baselines = {each.run.seed: each for each in results.of_label(baseline)}
    found = []
    for each in results.of_label(label):
        base = baselines.get(each.run.seed)
        if base is None:
            continue
        curve, base_curve = each.curve(metric), base.curve(metric)
        own, best = (speed.best_of(metric)(c.values()) for c in (curve, base_curve))
        steps, base_steps = (speed.steps_to(c, metric, best) for c in (curve, base_curve))
        seconds = steps * each.seconds_per_update()
        base_seconds = base_steps * base.seconds_per_update()
        own_steps = speed.steps_to(curve, metric, own)
        found.append(
            Reached(
                each.run, metric, best, steps, base_steps, seconds, base_seconds, own, own_steps
            )
        )
    return found
