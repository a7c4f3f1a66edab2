"""The verdict of a claim's rule on the finished runs of a sweep."""

from __future__ import annotations

from ln_zoo.plots.comparison import read_curves
from ln_zoo.sweeps.grid import SweepError
from ln_zoo.sweeps.report import Report
from ln_zoo.sweeps.verdicts import (
    Finding,
    judge_growth,
    judge_own_best,
    judge_scores,
    judge_speed,
    log_odds,
)
from ln_zoo.zoo import claims
from ln_zoo.zoo.claims import Rule


def judge(report: Report, rule: Rule) -> Finding:
    """The verdict of a rule on what has finished of a sweep.

    Raises:
        SweepError: if no seed has runs of both norms, or if there is no such metric.
    """
    try:
        if rule.kind in claims.OF_CURVES:
            return _judge_curves(report, rule)
        if rule.metric not in report.test_metrics:
            known = ", ".join(report.test_metrics)
            raise SweepError(f"the test has no {rule.metric!r}: {known}")
        if rule.kind == "grows":
            return _judge_growth(report, rule)
        mine, theirs = (
            report.by_seed(report.best_label(norm), rule.metric)
            for norm in (rule.norm, rule.baseline)
        )
        return judge_scores(mine, theirs, rule.metric, rule.kind, rule.margin, rule.matters)
    except ValueError as error:
        raise SweepError(f"{report.out}: {error}") from error


def _judge_curves(report: Report, rule: Rule) -> Finding:
    mine, theirs = (
        {
            member.run.seed: read_curves(member.curves, [rule.metric], "step")[rule.metric]
            for member in report.of_label(report.best_label(norm))
        }
        for norm in (rule.norm, rule.baseline)
    )
    if rule.kind == "own_best":
        assert rule.value is not None
        return judge_own_best(mine, theirs, rule.metric, rule.value)
    return judge_speed(mine, theirs, rule.metric, matters=rule.matters)


def _judge_growth(report: Report, rule: Rule) -> Finding:
    names = rule.norm, rule.baseline, rule.metric, rule.setting
    less, more = (report.leads(*names, value) for value in (rule.less, rule.more))
    odds = None
    if rule.log_odds:
        odds = (
            report.leads(*names, rule.less, log_odds),
            report.leads(*names, rule.more, log_odds),
        )
    return judge_growth(less, more, rule.metric, rule.matters, odds)
