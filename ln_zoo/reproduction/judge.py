"""Verdicts of rules on the finished runs of a sweep."""

from __future__ import annotations

from collections.abc import Callable

from ln_zoo.reproduction.claims import OF_CURVES, Rule
from ln_zoo.reproduction.speed_ups import Curves
from ln_zoo.reproduction.verdicts import Finding, Scores, judge_rule, mean_leads
from ln_zoo.sweeps.grid import SweepError, norm_name
from ln_zoo.sweeps.results import Results
from ln_zoo.sweeps.selection import best_label


def judge(results: Results, rule: Rule) -> Finding:
    """The verdict of a rule on the finished runs of a sweep."""
    names = rule.norm, rule.baseline

    def curves(norm: str) -> Curves:
        finished = results.of_label(best_label(results, norm))
        return {each.run.seed: each.curve(rule.metric) for each in finished}

    def scores(norm: str) -> Scores:
        return results.by_seed(best_label(results, norm), rule.metric)

    def leads(value: str, scale: Callable[[float], float]) -> Scores:
        return _leads(results, rule, value, scale)

    try:
        if rule.kind not in OF_CURVES and rule.metric not in results.test_metrics:
            known = ", ".join(results.test_metrics)
            raise SweepError(f"the test has no {rule.metric!r}: {known}")
        return judge_rule(rule, names, curves, scores, leads)
    except SweepError:
        raise
    except ValueError as error:
        raise SweepError(f"{results.out}: {error}") from error


def _leads(results: Results, rule: Rule, value: str, scale: Callable[[float], float]) -> Scores:
    """`mean_leads` of the rule's norm at one value of its setting."""
    scores = {
        (norm_name(each.run.norm), tuple(each.run.settings.items()), each.run.seed): scale(
            each.metrics[rule.metric]
        )
        for each in results.finished
        if each.run.settings.get(rule.setting) == value and rule.metric in each.metrics
    }
    runs = [run for run in results.grid.runs() if run.settings.get(rule.setting) == value]
    settings = {tuple(run.settings.items()) for run in runs}
    return mean_leads(scores, settings, (rule.norm, rule.baseline), rule.metric)
