"""Verdicts of rules on the finished runs of a sweep."""

from __future__ import annotations

from collections.abc import Callable

from ln_zoo.plots import comparison
from ln_zoo.reproduction import claims
from ln_zoo.reproduction.claims import Rule
from ln_zoo.reproduction.verdicts import Curves, Finding, Scores, judge_rule, mean_leads
from ln_zoo.sweeps.grid import SweepError, norm_name
from ln_zoo.sweeps.report import Report


def judge(report: Report, rule: Rule) -> Finding:
    """The verdict of a rule on the finished runs of a sweep."""
    names = rule.norm, rule.baseline

    def curves(norm: str) -> Curves:
        members = report.of_label(report.best_label(norm))
        return {
            each.run.seed: comparison.read_curves(each.curves, [rule.metric], "step")[rule.metric]
            for each in members
        }

    def scores(norm: str) -> Scores:
        return report.by_seed(report.best_label(norm), rule.metric)

    def leads(value: str, scale: Callable[[float], float]) -> Scores:
        return _leads(report, rule, value, scale)

    try:
        if rule.kind not in claims.OF_CURVES and rule.metric not in report.test_metrics:
            known = ", ".join(report.test_metrics)
            raise SweepError(f"the test has no {rule.metric!r}: {known}")
        return judge_rule(rule, names, curves, scores, leads)
    except SweepError:
        raise
    except ValueError as error:
        raise SweepError(f"{report.out}: {error}") from error


def _leads(report: Report, rule: Rule, value: str, scale: Callable[[float], float]) -> Scores:
    """`mean_leads` of the rule's norm at one value of its setting."""
    scores = {
        (norm_name(m.run.norm), tuple(m.run.settings.items()), m.run.seed): scale(
            m.metrics[rule.metric]
        )
        for m in report.members
        if m.run.settings.get(rule.setting) == value and rule.metric in m.metrics
    }
    runs = [run for run in report.runs if run.settings.get(rule.setting) == value]
    settings = {tuple(run.settings.items()) for run in runs}
    return mean_leads(scores, settings, (rule.norm, rule.baseline), rule.metric)
