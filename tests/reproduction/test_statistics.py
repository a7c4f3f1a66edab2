"""The rule of every comparison: four words, their errors, and Holm's correction."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import product

import pytest

from ln_zoo.reproduction.statistics import Verdict, decide, holm, power, signed_rank


@pytest.mark.parametrize(
    ("effects", "word"),
    [
        ([1.0, 1.1, 0.9], "better"),
        ([-0.02, 0.0, 0.01], "same"),
        ([0.02, 0.03, 0.04], "same"),  # above 0, but within the margin
        ([0.0, 0.9, 0.3], "undecided"),
        ([1.0], "undecided"),
        ([], "undecided"),
        ([math.inf] * 6, "better"),
        ([math.inf] * 5, "undecided"),  # no rank test reaches 2.5 %
        ([math.inf, *[0.0] * 8], "undecided"),
        ([1.0, 1.0, 1.0], "better"),
    ],
)
def test_words_are_symmetric(effects: list[float], word: str) -> None:
    opposite = {"better": "worse"}.get(word, word)
    censored = math.inf in effects
    assert decide(effects, 0.2, censored=censored).word() == word
    assert decide([-each for each in effects], 0.2, censored=censored).word() == opposite


def test_equal_effects_of_none_show_nothing_without_a_margin() -> None:
    assert decide([0.0, 0.0, 0.0], 0.0).word() == "undecided"
    assert decide([0.0, 0.0, 0.0], 0.2).word() == "same"


def test_the_words_are_those_of_the_interval() -> None:
    draw = random.Random(0)
    for _ in range(300):
        middle, spread = draw.uniform(-0.5, 0.5), draw.uniform(0.01, 0.4)
        found = decide([draw.gauss(middle, spread) for _ in range(5)], 0.22)
        expected = "undecided"
        if found.low > -0.22 and found.high < 0.22:
            expected = "same"
        elif found.low > 0 or found.high < 0:
            expected = "better" if found.low > 0 else "worse"
        assert found.word() == expected


def test_an_interval_is_not_narrower_than_rounding() -> None:
    """Equal counts of updates come from rare scores, not from certainty."""
    assert decide([1.0, 1.0], 0.2).word() == "better"
    assert decide([1.0, 1.0], 0.2, least_deviation=0.5).word() == "undecided"


@pytest.mark.parametrize("effect", [0.0, 0.25])
def test_errors_are_as_rare_as_the_rule_says(effect: float) -> None:
    """Without an effect, or with one outside the margin: no false word in more than 5 %."""
    counts: Counter[str] = Counter()
    draw, number = random.Random(1), 1000
    for _ in range(number):
        effects = [draw.gauss(effect, 0.3) for _ in range(6)]
        counts[decide(effects, 0.25).word()] += 1
    wrong = ("better", "worse") if effect == 0 else ("same", "worse")
    expected = 0.05 * number
    assert sum(counts[word] for word in wrong) <= expected + 3 * math.sqrt(expected)
    assert counts[wrong[0]] < counts["undecided"]


def test_a_miss_gives_an_interval_without_an_end() -> None:
    found = decide([math.inf, *[1.0 + 0.01 * k for k in range(7)]], 0.2, censored=True)
    assert (found.word(), found.high) == ("better", math.inf)
    assert 1.0 <= found.low <= found.estimate <= 1.1


@pytest.mark.parametrize("number", [6, 8, 11])
@pytest.mark.parametrize("missing", [[], [math.inf], [math.inf, -math.inf], [-math.inf] * 2])
def test_the_interval_of_ranks_is_what_their_test_does_not_reject(
    number: int, missing: list[float]
) -> None:
    draw = random.Random(number)
    effects = [*missing, *(draw.gauss(0.3, 0.5) for _ in range(number - len(missing)))]
    found = decide(effects, 0.2, censored=True)
    kept = [
        shift / 1000
        for shift in range(-4000, 4001)
        if 2 * min(signed_rank([each - shift / 1000 for each in effects])) > 0.05
    ]
    assert min(kept) == pytest.approx(max(found.low, -4), abs=1e-3)
    assert max(kept) == pytest.approx(min(found.high, 4), abs=1e-3)


def of(p: float) -> Verdict:
    return Verdict(1.0, 0.5, 1.5, p / 2, 1.0, 1.0)


def test_holm() -> None:
    """Thresholds of 0.05/4, 0.05/3, ..., which end at the first that is missed."""
    found = {"a": of(0.012), "b": of(0.016), "c": of(0.026), "d": of(0.001)}
    words = holm(found, 4)
    assert words == {"a": "better", "b": "better", "c": "better", "d": "better"}
    words = holm(found | {"c": of(0.06)}, 4)
    assert words["c"] == "undecided"
    # With an outcome that is not there yet, the thresholds are stricter.
    words = holm({"a": of(0.012)}, 5)
    assert words["a"] == "undecided"
    assert holm({"a": of(0.03), "b": of(0.03)}, 2) == {"a": "undecided", "b": "undecided"}
    assert of(0.03).word() == "better"


def test_power() -> None:
    """Of simulated t tests as many find the effect."""
    from scipy.stats import t

    draw, found, number = random.Random(0), 0, 8
    for _ in range(2000):
        values = [draw.gauss(1.2, 1.0) for _ in range(number)]
        mean = sum(values) / number
        deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (number - 1))
        found += mean > t.ppf(0.975, number - 1) * deviation / math.sqrt(number)
    assert found / 2000 == pytest.approx(power(1.0, 1.2, number), abs=0.03)


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


def test_a_correction_takes_a_word_and_never_gives_another() -> None:
    """An interval within the margin that excludes no effect is *same*, or nothing."""
    found = {"a": Verdict(0.9, 0.85, 0.95, 1.0, 1e-6, 0.01)}
    assert found["a"].word() == "same"
    assert holm(found, 1) == {"a": "same"}
    assert holm(found, 8) == {"a": "undecided"}
