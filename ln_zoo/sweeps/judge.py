"""The verdict of a claim's rule on the finished runs of a sweep."""

from __future__ import annotations

from collections.abc import Callable

from ln_zoo.plots.comparison import read_curves
from ln_zoo.sweeps import claims
from ln_zoo.sweeps.claims import Rule
from ln_zoo.sweeps.grid import SweepError
from ln_zoo.sweeps.report import Report
from ln_zoo.sweeps.verdicts import Curves, Finding, Scores, judge_rule


def judge(report: Report, rule: Rule) -> Finding:
    """The verdict of a rule on the finished runs of a sweep."""
    names = rule.norm, rule.baseline

    def curves(norm: str) -> Curves:
        return {
            member.run.seed: read_curves(member.curves, [rule.metric], "step")[rule.metric]
            for member in report.of_label(report.best_label(norm))
        }

    def scores(norm: str) -> Scores:
        return report.by_seed(report.best_label(norm), rule.metric)

    def leads(value: str, scale: Callable[[float], float]) -> Scores:
        return report.leads(names, rule.metric, rule.setting, value, scale)

    try:
        if rule.kind not in claims.OF_CURVES and rule.metric not in report.test_metrics:
            known = ", ".join(report.test_metrics)
            raise SweepError(f"the test has no {rule.metric!r}: {known}")
        return judge_rule(rule, names, curves, scores, leads)
    except ValueError as error:
        raise SweepError(f"{report.out}: {error}") from error
