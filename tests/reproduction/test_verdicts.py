"""Verdicts on curves with a known answer, and their error rate without an effect."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import product

import pytest
from refusals import refuses

from ln_zoo.reproduction import claims
from ln_zoo.reproduction.claims import Rule
from ln_zoo.reproduction.speed_ups import Speed, speeds
from ln_zoo.reproduction.statistics import seeds_to_decide, signed_rank
from ln_zoo.reproduction.verdicts import Finding, judge_growth, judge_rule, judge_speed, log_odds

Curve = dict[int, float]


def exponential(time: float, noise: float = 0.0, seed: int = 0, end: int = 400) -> Curve:
    """A loss that falls to 1/e in ``time`` updates."""
    draw = random.Random(seed)
    steps = range(0, end, 2)
    return {step: math.exp(-step / time) * (1 + noise * draw.gauss(0, 1)) for step in steps}


def levelling(time: float, level: float) -> Curve:
    """The same, but never below ``level``."""
    return {step: max(value, level) for step, value in exponential(time).items()}


def test_targets_are_shares_of_the_median_fall_of_the_baseline() -> None:
    theirs = {0: {0: 10.0, 1: 2.0}, 1: {0: 12.0, 1: 0.0}, 2: {0: 11.0, 1: 1.0}}
    found = speeds(theirs, theirs, "nll")
    assert [each.target for each in found] == pytest.approx([2.0, 1.5, 1.1])
    found = speeds(theirs, theirs, "nll", start=21.0)
    assert [each.target for each in found] == pytest.approx([3.0, 2.0, 1.2])
    # Where higher is better the curves rise.
    up = {0: {0: 0.0, 1: 50.0, 2: 100.0}}
    (first, *_) = speeds(up, up, "accuracy")
    assert (first.target, first.steps) == (90.0, {0: 2})


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_the_ratio_is_that_of_the_curves(ratio: float) -> None:
    mine = {seed: exponential(40 / ratio, 0.01, seed) for seed in range(5)}
    theirs = {seed: exponential(40, 0.01, 100 + seed) for seed in range(5)}
    for each in speeds(mine, theirs, "nll")[:2]:
        assert math.exp(-each.difference.mean) == pytest.approx(ratio, rel=0.06)
    verdict = {0.5: claims.DOES_NOT_HOLD, 1.0: claims.UNDECIDED, 2.0: claims.HOLDS}[ratio]
    assert judge_speed(mine, theirs, "nll").verdict == verdict
    # Of equal speeds the intervals exclude half as much again.
    verdict = {1.0: claims.DOES_NOT_HOLD}.get(ratio, verdict)
    assert judge_speed(mine, theirs, "nll", matters=1.5).verdict == verdict


def test_faster_at_first_and_slower_afterwards_holds_in_part() -> None:
    mine = {seed: {0: 1.0, 10 + seed: 0.09, 800 + seed: 0.0} for seed in range(4)}
    theirs = {seed: {0: 1.0, 100 + seed: 0.09, 200 + seed: 0.0} for seed in range(4)}
    # Scored often, so that rounding plays no part.
    for curves in (mine, theirs):
        for curve in curves.values():
            for step in [place for place in curve if place]:
                curve[step - 1] = 1.0 if curve[step] == 0.09 else 0.09
    assert judge_speed(mine, theirs, "nll").verdict == claims.IN_PART


@pytest.mark.parametrize(("number", "needed"), [(4, 6), (7, None)])
def test_what_a_rank_test_needs_is_unknown_from_six_seeds_on(
    number: int, needed: int | None
) -> None:
    theirs = {seed: exponential(40, 0.01, seed) for seed in range(number)}
    mine = theirs | {number - 1: levelling(40, 0.02)}
    assert judge_speed(mine, theirs, "nll", matters=1.5).seeds_needed == needed


def test_a_miss_takes_longest_and_decides_from_six_seeds_on() -> None:
    never, soon = levelling(40, 0.4), exponential(20)
    for number in range(1, 9):
        mine, theirs = dict.fromkeys(range(number), soon), dict.fromkeys(range(number), never)
        late = speeds(mine, theirs | {0: soon}, "nll")[-1]
        assert late.logs[0] == 0
        late = speeds(theirs, mine, "nll")[-1]
        assert (late.missed, late.logs) == (True, [math.inf] * number)
        assert (late.verdict() == claims.DOES_NOT_HOLD) == (number >= 6)
        steps = dict.fromkeys(range(number), 10.0)
        faster = Speed(0.9, 0.1, dict.fromkeys(range(number), 5.0), steps | {0: math.inf}, 0.0)
        assert (faster.verdict() == claims.HOLDS) == (number >= 6)
    assert "met by 0 of 8, baseline 8 of 8" in late.text


def test_a_run_that_ended_early_is_no_miss() -> None:
    """It is one up to its end; nothing is known of what it would have reached later."""
    theirs = dict.fromkeys(range(6), exponential(40))
    mine = dict.fromkeys(range(6), exponential(30, end=100))
    first, second, third = speeds(mine, theirs, "nll")
    assert not first.missed
    assert not second.missed
    assert (third.missed, third.logs) == (True, [])
    assert third.verdict(1.25) == claims.UNDECIDED
    # The other run reached the target before that.
    soon = dict.fromkeys(range(6), exponential(20))
    assert speeds(mine, soon, "nll")[-1].verdict() == claims.DOES_NOT_HOLD


def test_targets_that_the_baseline_misses_are_not_asked() -> None:
    mine = dict.fromkeys(range(10), exponential(20))
    for stopped in (1, 2):
        # At their end these have fallen by 92 %.
        theirs = {s: exponential(40, end=104 if s < stopped else 400) for s in range(10)}
        found = speeds(mine, theirs, "nll")
        assert [each.asked for each in found] == [True, stopped == 1, stopped == 1]
    # A norm that misses them too may still be faster to the first.
    soon = {seed: exponential(20, end=50) for seed in range(10)}
    assert judge_speed(soon, theirs, "nll").verdict == claims.HOLDS


def test_a_rank_test_asks_whether_what_matters_is_excluded() -> None:
    steps = dict.fromkeys(range(7), 10.0)
    late = Speed(0.9, 0.1, steps | {0: math.inf}, steps, 0.0)
    assert late.verdict() == claims.UNDECIDED
    assert late.verdict(1.5) == claims.DOES_NOT_HOLD
    # Two runs that both miss say nothing.
    both = Speed(0.9, 0.1, dict.fromkeys(range(7), math.inf), dict.fromkeys(range(7), math.inf), 0)
    assert both.verdict(1.5) == claims.UNDECIDED


def test_the_lowest_value_of_each_run() -> None:
    mine = {seed: {0: 1.0, 1: 0.2 + 0.01 * seed, 2: 0.9} for seed in range(3)}
    theirs = {seed: {0: 1.0, 1: 0.5, 2: 0.6} for seed in range(3)}
    curves = {"a": mine, "b": theirs}
    rule = Rule("lower_best", "nll", "a", "b")

    def judged() -> Finding:
        return judge_rule(rule, ("a", "b"), curves.__getitem__, lambda _: {}, lambda *_: {})

    assert judged().verdict == claims.HOLDS
    assert judged().interval == pytest.approx((-0.315, -0.265), abs=1e-3)
    mine[0] = {0: math.nan} | mine[0]
    assert judged().verdict == claims.HOLDS
    mine[0] = {0: math.nan}
    refuses("nll of seed 0", judged)


def test_an_interval_is_not_narrower_than_rounding() -> None:
    """Equal counts of updates come from rare scores, not from certainty."""
    curves = ({0: 1.0, 500 - gap: 0.95, 500: 0.0} for gap in (1, 500))
    often, rarely = (dict.fromkeys((0, 1), curve) for curve in curves)
    slow = {seed: {0: 1.0, 1499: 0.95, 1500: 0.0} for seed in (0, 1)}
    assert speeds(often, slow, "nll")[0].verdict() == claims.HOLDS
    wide = speeds(rarely, slow, "nll")[0]
    assert wide.verdict() == claims.UNDECIDED
    assert wide.rounding == pytest.approx(math.sqrt((1 + 1 / 1500**2) / 12))


def test_errors_are_as_rare_as_the_rule_says() -> None:
    """Methods that are alike are called faster, or slower, in at most 2.5 % of sweeps."""
    counts: Counter[str] = Counter()
    number = 400
    for trial in range(number):
        chance = {(s, k): random.Random(f"{trial} {s} {k}") for s in range(4) for k in (0, 1)}
        mine, theirs = (
            {seed: exponential(chance[seed, k].uniform(20, 40)) for seed in range(4)}
            for k in (0, 1)
        )
        counts[judge_speed(mine, theirs, "nll").verdict] += 1
    # 2.5 % of 400 and three standard deviations.
    assert max(counts[claims.HOLDS], counts[claims.DOES_NOT_HOLD]) <= 10 + 3 * math.sqrt(10)
    assert counts[claims.UNDECIDED] >= 0.9 * number


def test_no_seed_in_common() -> None:
    refuses("no seed has runs of both", speeds, {0: exponential(3)}, {1: exponential(3)}, "nll")


@pytest.mark.parametrize("flat", [{0: 1.0, 1: 1.0}, {0: 1.0, 1: 2.0}])
def test_a_baseline_that_never_improves(flat: Curve) -> None:
    refuses("nll never improves", speeds, {0: exponential(3)}, {0: flat}, "nll")


def test_growth_on_both_scales() -> None:
    less, more = {0: 1.0, 1: 1.1, 2: 0.9}, {0: 2.0, 1: 2.2, 2: 1.9}
    assert judge_growth(less, more, "accuracy", None).verdict == claims.HOLDS
    assert judge_growth(less, more, "accuracy", None, (less, more)).verdict == claims.HOLDS
    assert judge_growth(more, more, "accuracy", 0.5).verdict == claims.DOES_NOT_HOLD
    assert judge_growth(less, {0: 2.0, 1: 0.1, 2: 0.9}, "accuracy", 0.5).verdict == claims.UNDECIDED
    apart = judge_growth(less, more, "accuracy", None, (more, less))
    assert apart.verdict == claims.UNDECIDED
    assert "in log-odds -1" in apart.number
    # The lead is the same in points, within half a point: only growing log-odds contradict that.
    level = more, {0: 2.1, 1: 2.1, 2: 1.9}
    assert judge_growth(*level, "accuracy", 0.5, level).verdict == claims.DOES_NOT_HOLD
    assert judge_growth(*level, "accuracy", 0.5, (less, more)).verdict == claims.UNDECIDED
    assert log_odds(75.0) == pytest.approx(math.log(3))
    refuses("100 %", log_odds, 100.0)


@pytest.mark.parametrize("number", [1, 2, 5, 7])
def test_signed_rank_against_all_signs(number: int) -> None:
    """By enumeration of the signs of ranks with ties."""
    sizes = [1.0, 2.0, 2.0, math.inf, math.inf, 3.5, 0.5][:number]
    ranks = [sum(other < size for other in sizes) + (sizes.count(size) + 1) / 2 for size in sizes]
    totals = [
        sum(rank for rank, up in zip(ranks, signs, strict=True) if up)
        for signs in product((False, True), repeat=number)
    ]
    for signs in product((-1, 1), repeat=number):
        here = sum(rank for rank, sign in zip(ranks, signs, strict=True) if sign > 0)
        below, above = signed_rank([s * size for s, size in zip(signs, sizes, strict=True)])
        assert below == sum(total <= here for total in totals) / 2**number
        assert above == sum(total >= here for total in totals) / 2**number
    assert signed_rank([0.0]) == (1.0, 1.0)


def test_power() -> None:
    """Of simulated t tests with that many seeds, four in five find the effect."""
    from scipy.stats import t

    number = seeds_to_decide(1.0, 1.2)
    assert number == 8
    draw, found = random.Random(0), 0
    for _ in range(2000):
        values = [draw.gauss(1.2, 1.0) for _ in range(number)]
        mean = sum(values) / number
        deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (number - 1))
        found += mean > t.ppf(0.975, number - 1) * deviation / math.sqrt(number)
    assert 0.77 < found / 2000 < 0.87
    assert seeds_to_decide(1.0, 0.001) is None
    assert seeds_to_decide(math.nan, 1.0) is None
