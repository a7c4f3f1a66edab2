"""Outcomes from small tables with a known answer, and from the tables in git."""

from __future__ import annotations

import csv
import math
import re
import statistics
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from refusals import refuses

from ln_zoo.reproduction import claims, evidence
from ln_zoo.reproduction.claims import Claim, Comparison, Outcome
from ln_zoo.reproduction.evidence import compare, end_effects, recompute_all, speed_effects
from ln_zoo.reproduction.statistics import power
from ln_zoo.sweeps.grid import SweepError

ROOT = Path(__file__).parents[2]
AFTER = "2026-11-28T23:00:00+00:00"


def table(**curves: list[dict[int, float]]) -> list[dict[str, str]]:
    """Rows of loss curves: by label, one curve a seed."""
    return [
        {"label": label, "seed": str(seed), "step": str(step), "loss": str(value)}
        for label, runs in curves.items()
        for seed, curve in enumerate(runs)
        for step, value in curve.items()
    ]


def speed(target: float | str = 0.1, **keys: Any) -> Comparison:
    return Comparison("speed", norm="x", baseline="y", metric="loss", target=target, **keys)


def fall(step: int, end: int = 100) -> dict[int, float]:
    """Scored at every update, at the target from ``step`` on."""
    return {place: 1.0 if place < step else 0.1 for place in range(end)}


def test_the_effect_is_the_log_ratio_of_updates_to_the_target() -> None:
    rows = table(x=[fall(10), fall(20)], y=[fall(20), fall(10)])
    effects, _, rounding = speed_effects(speed(), rows)
    assert effects == pytest.approx([math.log(2), -math.log(2)])
    assert rounding == pytest.approx(math.sqrt((1 / 10**2 + 1 / 20**2) / 12))
    back, *_ = speed_effects(replace(speed(), norm="y", baseline="x"), rows)
    assert back == [-each for each in effects]


def test_rounding_is_that_of_the_last_score_before() -> None:
    rows = table(x=[{0: 1.0, 500: 0.0}], y=[{0: 1.0, 1499: 0.9, 1500: 0.0}])
    *_, rounding = speed_effects(speed(), rows)
    assert rounding == pytest.approx(math.sqrt((1 + 1 / 1500**2) / 12))


def test_misses_are_censored() -> None:
    never, soon = fall(1000), fall(10)
    rows = table(x=[soon, never, never], y=[never, soon, never])
    assert speed_effects(speed(), rows)[:2] == ([math.inf, -math.inf, 0.0], 3)
    # A run that ended before the other reached the target says nothing.
    rows = table(x=[fall(1000, end=5), soon], y=[soon, fall(1000, end=5)])
    assert speed_effects(speed(), rows)[0] == []


def test_own_best_and_another_axis() -> None:
    rows = table(x=[{0: 1.0, 5: 0.5, 9: 0.6}], y=[{0: 1.0, 5: 0.7, 20: 0.2}])
    assert speed_effects(speed("own"), rows)[0] == pytest.approx([math.log(4)])
    for row in rows:
        row["seconds"] = str(2 * float(row["step"]) if row["label"] == "x" else row["step"])
    effects, *_ = speed_effects(speed("own", x="seconds"), rows)
    assert effects == pytest.approx([math.log(2)])


#: Group a: 1.0, 1.1 and 0.9 above; group b: as much below.
SCORES = """\
group,method,seed,value
a,x,0,2.0
a,x,1,2.2
a,x,2,2.1
a,y,0,1.0
a,y,1,1.1
a,y,2,1.2
b,x,0,1.0
b,x,1,1.1
b,x,2,1.2
b,y,0,2.0
b,y,1,2.2
b,y,2,2.1
"""


def scores() -> list[dict[str, str]]:
    return list(csv.DictReader(SCORES.splitlines()))


def end(**keys: Any) -> Comparison:
    given = {"norm": "x", "baseline": "y", "metric": "value", "lower": False} | keys
    return Comparison("end", **given)


A = {"group": "a"}


@pytest.mark.parametrize(
    ("keys", "effects"),
    [
        ({"norm": A | {"method": "x"}, "baseline": A | {"method": "y"}}, [1.0, 1.1, 0.9]),
        ({"norm": A | {"method": "x"}, "baseline": 2.0}, [0.0, 0.2, 0.1]),
        ({"score": "mean"}, [0.0, 0.0, 0.0]),
        ({"score": "best"}, [0.0, 0.0, 0.0]),
        ({}, [-1.0, -1.1, -0.9]),  # the last
        ({"metric": "100*value+value"}, [-101.0, -111.1, -90.9]),
        ({"scale": 2.0}, [-2.0, -2.2, -1.8]),
        ({"log": True}, [-math.log(2), -math.log(2), -math.log(1.75)]),
        ({"lower": True}, [1.0, 1.1, 0.9]),
        (
            {
                "norm": [A | {"method": "x"}, A | {"method": "y"}],
                "baseline": [{"group": "b", "method": m} for m in "xy"],
            },
            [2.0, 2.2, 1.8],
        ),
    ],
)
def test_effects_of_ends(keys: dict[str, Any], effects: list[float]) -> None:
    assert end_effects(end(**keys), scores()) == pytest.approx(effects)


def test_numbers_are_shown_with_their_units() -> None:
    assert compare(end(), scores())[0].number == "-1 (-1.25 to -0.752)"
    log = compare(end(log=True, margin=1.1), scores())[0]
    assert (log.word, log.estimate) == ("worse", pytest.approx(0.5228, abs=1e-3))
    rows = table(x=[fall(10)] * 6, y=[fall(1000)] * 6)
    missed = compare(speed(), rows)[0]
    assert (missed.word, missed.estimate, missed.pairs) == ("better", None, 6)
    assert "6 of 6" in missed.number


def test_two_misses_are_a_tie_by_ranks() -> None:
    """A ratio of 1 that nobody measured must not enter the mean of a t test."""
    rows = table(x=[fall(10)] * 7 + [fall(1000)], y=[fall(30)] * 7 + [fall(1000)])
    found = compare(speed(), rows)[0]
    assert (found.word, found.estimate) == ("better", pytest.approx(3, abs=1e-4))
    assert "1 of 8" in found.number


@pytest.mark.parametrize("keys", [{"norm": "no"}, {"baseline": {"group": "no"}}])
def test_what_a_table_lacks_is_named(keys: dict[str, Any]) -> None:
    refuses("no", end_effects, end(**keys), scores())


# Files, and runs that are judged


def claim_of(*rows: Comparison) -> Claim:
    return Claim("c", "1", "q", "c", "p", rows)


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a table of judged runs and recomputes a claim whose outcome it decides."""
    (tmp_path / "docs/figures").mkdir(parents=True)
    row = speed(primary="c", file="new.csv", pairs=8, floor=0.5)
    monkeypatch.setattr(evidence, "claims", lambda: (claim_of(row),))

    def write(rows: list[dict[str, str]], begun: str = AFTER, first: int = 100) -> Outcome:
        with (tmp_path / "docs/figures/new.csv").open("w", newline="") as file:
            out = csv.DictWriter(file, [*rows[0], "begun"])
            out.writeheader()
            out.writerows(x | {"seed": str(first + int(x["seed"])), "begun": begun} for x in rows)
        return recompute_all(tmp_path)["c"]

    return write


def test_a_judged_outcome(judged: Any) -> None:
    found = judged(table(x=[fall(10)] * 8, y=[fall(30)] * 8))
    assert (found.word, found.judged, found.pairs) == ("better", True, 8)


def test_a_weak_outcome_does_not_survive_holm(judged: Any) -> None:
    others = [fall(step) for step in (30, 8, 30, 30, 30, 9, 30, 30)]
    found = judged(table(x=[fall(10)] * 8, y=others))
    assert (found.word, found.uncorrected) == ("undecided", "better")


def test_a_run_that_began_before_the_protocol_is_not_judged(judged: Any) -> None:
    rows = table(x=[fall(10)] * 8, y=[fall(30)] * 8)
    for keys, says in (
        ({"begun": "2026-11-28T22:04:59+00:00"}, "2026-11-28T22:04:59"),
        ({"first": 99}, "99"),
    ):
        refuses([says], judged, rows, error=SweepError, **keys)


def test_no_outcome_before_all_pairs_are_complete(judged: Any) -> None:
    rows = table(x=[fall(10)] * 7, y=[fall(30)] * 8)
    refuses(["8 pairs", "new.csv"], judged, rows, error=SweepError)


def test_methods_that_do_not_learn_are_not_compared(judged: Any) -> None:
    found = judged(table(x=[fall(10)] * 8, y=[*[fall(30)] * 6, *[fall(1000)] * 2]))
    assert (found.word, found.judged, found.number[:7]) == ("undecided", True, "0 and 2")


def test_theory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs/figures").mkdir(parents=True)
    lines = ["claim,case,measured,agrees", "a,1,0.5,yes", "a,2,0.25,no", "b,1,0,yes", "c,1,0,no"]
    (tmp_path / "docs/figures/t.csv").write_text("\n".join(lines))
    rows = [Comparison("theory", of=of, file="t.csv", where={"claim": of}) for of in "abc"]
    monkeypatch.setattr(evidence, "claims", lambda: (claim_of(*rows),))
    found = recompute_all(tmp_path)
    words = [each.word for each in found.values()]
    assert words == ["in part", "confirmed", "refuted"]
    assert "2: 0.25" in found["c: a"].number


def test_a_missing_table_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Comparison("end", file="missing.csv", norm="x", baseline="y", metric="value")
    monkeypatch.setattr(evidence, "claims", lambda: (claim_of(row),))
    refuses(["docs/figures/missing.csv"], recompute_all, tmp_path, error=SweepError)


# The tables in git


def test_outcomes_are_those_of_the_tables() -> None:
    """`ln-zoo reproduce --write docs/results/claims.md` computes them anew."""
    found = {n: o for n, o in recompute_all(ROOT).items() if o.word != claims.NOT_MEASURED}
    assert found == claims.outcomes()


def test_the_protocol_is_older_than_the_runs_it_judges() -> None:
    page = (ROOT / "docs/results/protocol.md").read_text(encoding="utf-8")
    date = claims.protocol_date()
    assert f"{date:%Y-%m-%d} at {date:%H:%M} UTC" in page
    # The last commit that added the page: another one had its path before.
    log = ["git", "log", "-1", "--diff-filter=A", "--format=%cI", "--", "docs/results/protocol.md"]
    done = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=False)
    if committed := done.stdout.split():
        assert datetime(2026, 11, 28, tzinfo=UTC) <= datetime.fromisoformat(committed[0]) <= date
    for path in (ROOT / "docs/figures").glob("protocol_*.csv"):
        with path.open(newline="") as file:
            begun = {row["begun"] for row in csv.DictReader(file)}
        assert min(map(datetime.fromisoformat, begun)) >= date, path.name


def planned() -> dict[str, list[str]]:
    """Cells of the protocol's tables, by outcome."""
    page = (ROOT / "docs/results/protocol.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    cells = [[cell.strip(" `") for cell in line.strip("| ").split("|")] for line in lines]
    found: dict[str, list[str]] = {}
    for name, *rest in cells:
        found.setdefault(name, []).extend(rest)
    return found


def test_the_claims_follow_the_protocol() -> None:
    plan = planned()
    rows = {row.primary: row for each in claims.claims() for row in each.rows if row.primary}
    assert plan.keys() == rows.keys()
    assert len(rows) == claims.content()["primary"]
    for name, row in rows.items():
        assert float(plan[name][3]) == pytest.approx(float(row.target)), name
        assert f"100 to {99 + row.pairs}" in plan[name], name
        assert row.kind == "speed", name


def test_a_reproduction_has_the_settings_of_the_protocol() -> None:
    page = (ROOT / "docs/results/protocol.md").read_text(encoding="utf-8")
    (steps,) = re.findall('^STEPS="(.*)"$', page, re.MULTILINE)
    plans = re.findall(r"^\| `(\S+)` \| (\S+\.yaml) \| (.*)\|$", page, re.MULTILINE)
    (example,) = re.findall(r"^  -- (.*\$STEPS.*)$", page, re.MULTILINE)
    plans.append(("mnist-4", "mlp/paper.yaml", example))
    found = {row.primary: each for each in claims.claims() for row in each.rows if row.primary}
    assert {name for name, *_ in plans} == found.keys()
    for name, config, options in plans:
        sweep = found[name].sweep["reduced"]
        assert f"configs/{config} " in sweep, name
        (pairs,) = [row.pairs for row in found[name].rows if row.primary]
        assert f"--seeds {','.join(str(100 + n) for n in range(pairs))} " in sweep + " ", name
        for option in options.replace("$STEPS", steps).replace("`", "").split("--")[1:]:
            assert f"--{option.strip(' ,')}" in sweep, name


#: What differs in the earlier tables of outcomes: labels and metrics.
EARLIER: dict[str, dict[str, str]] = {
    "convnet": {"norm": "layer norm 1e-3", "baseline": "no norm 3e-3"},
    "handwriting": {},
    "order-embeddings": {
        "norm": "layer, legacy",
        "baseline": "none, legacy",
        "metric": "val_image_r1+val_image_r5+val_image_r10",
    },
    "attentive-reader": {},
}


@pytest.mark.parametrize("name", EARLIER)
def test_targets_spread_and_power_are_those_of_the_earlier_tables(name: str) -> None:
    plan = planned()[name]
    (row,) = [row for each in claims.claims() for row in each.rows if row.primary == name]
    pairs, row = row.pairs, replace(row, file=plan[4], **EARLIER[name])
    rows = list(evidence._rows(row, ROOT))
    best, start = [], []
    sign = 1 if name == "order-embeddings" else -1
    methods = [evidence._curves(rows, method, row) for method in (row.norm, row.baseline)]
    for curves in methods:
        shared = [curve for seed, curve in curves.items() if seed in methods[1]]
        best.append(statistics.median(max(sign * v for v in curve.values()) for curve in shared))
        start += [sign * curve[min(curve)] for curve in shared]
    first = 0.0 if name == "order-embeddings" else statistics.median(start)
    target = sign * (first + 0.95 * (min(best) - first))
    assert float(row.target) == pytest.approx(target, rel=5e-3)
    effects, *_ = speed_effects(replace(row, target=target), rows)
    spread, mean = statistics.stdev(effects), statistics.fmean(effects)
    assert float(plan[10]) == pytest.approx(spread, abs=0.01)
    for alpha, shown in zip((0.05 / 8, 0.05), plan[12].split(", "), strict=True):
        found = power(spread, mean, pairs, alpha)
        assert found == pytest.approx(float(shown), abs=0.02)


def test_seconds_are_updates_times_those_of_an_update() -> None:
    (claim,) = [each for each in claims.claims() if each.name == "training-time"]
    timed = [row for row in claim.rows if row.timed]
    with (ROOT / "docs/figures/update_seconds.csv").open(newline="") as file:
        costs = {
            (each["experiment"], each["contestant"]): float(each["wall_ratio"])
            for each in csv.DictReader(file)
        }
    assert timed
    for row in timed:
        pairs: dict[str, list[dict[str, str]]] = {}
        for each in evidence._rows(row, ROOT):
            pairs.setdefault(each["seed"], []).append(each)
        cost = math.log(costs[row.timed, row.baseline])
        met = 0
        for rows in pairs.values():
            seconds, updates = (speed_effects(replace(row, x=x), rows) for x in ("seconds", "step"))
            if updates[0] and not updates[1]:
                assert seconds[0][0] - updates[0][0] == pytest.approx(cost, abs=1e-9), row.of
                met += 1
        assert met
