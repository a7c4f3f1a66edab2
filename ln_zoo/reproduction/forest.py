"""The picture of all primary outcomes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from ln_zoo.plots.figures import new_figure, save_figure, set_log_scale
from ln_zoo.reproduction.claims import NOT_STATED, PAPER, REDUCED, Comparison, Outcome
from ln_zoo.reproduction.claims_page import entries

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Limits of the ratio; arrows mark what lies beyond.
_LOW, _HIGH = 0.25, 16.0
#: The margin of every speed.
_MARGIN = (0.8, 1.25)
#: Markers by size.
_MARKERS = {PAPER: "s", NOT_STATED: "D", REDUCED: "o"}


def plot_forest(picture: Path) -> None:
    """Draw estimate and 95 % interval of each primary outcome on a log scale.

    Filled markers are judged, hollow ones exploratory; squares are of the paper's size, circles of
    a reduced one, diamonds where the paper states none. The margin is shaded.
    """
    rows = [each for each in entries() if each.row.primary]
    figure = new_figure(10.5, 1.5 + 0.42 * len(rows))
    axis = figure.subplots()
    axis.axvspan(*_MARGIN, color="0.9", zorder=0)
    axis.axvline(1, color="0.4", linewidth=0.8, zorder=1)
    for place, (_, row, outcome) in enumerate(rows):
        _draw(axis, place, row, outcome)
    labels = [f"{claim.section}  {row.primary}, {claim.compared_with}" for claim, row, _ in rows]
    axis.set(ylim=(len(rows) - 0.4, -0.6), xlim=(_LOW, _HIGH))
    axis.set_yticks(range(len(rows)), labels)
    set_log_scale(axis, "x")
    axis.set_xlabel(
        "updates to one target, other method / layer norm (right of 1: layer norm is faster)"
    )
    axis.set_title(
        "filled: fresh runs, which decide; hollow: exploratory\n"
        "square: the paper's network and data; circle: smaller; diamond: the paper states none\n"
        "better, worse: the 95 % interval excludes 1; same: it lies in the shaded margin; after "
        "Holm's correction",
        fontsize="small", loc="left",
    )  # fmt: skip
    right = axis.secondary_yaxis("right")
    right.set_yticks(range(len(rows)), [_words(outcome) for *_, outcome in rows])
    for side in (axis, right):
        side.tick_params(axis="y", length=0, pad=8)
    save_figure(figure, picture, dpi=110, quantize=picture.suffix == ".png")


def _words(outcome: Outcome) -> str:
    if not outcome.number:
        return "no run yet"
    kind = "" if outcome.judged else ", exploratory"
    numbers = outcome.number.replace(" times as fast", "").partition(",")[0]
    return f"{numbers}, n = {outcome.pairs}: {outcome.word}{kind}"


def _draw(axis: Axes, place: int, row: Comparison, outcome: Outcome) -> None:
    if not outcome.number:
        return
    color = "C0"
    marker = _MARKERS[row.size]
    low = outcome.low if outcome.low is not None else _LOW
    high = outcome.high if outcome.high is not None else _HIGH
    axis.plot([max(low, _LOW), min(high, _HIGH)], [place] * 2, color=color, linewidth=1.5, zorder=2)
    for end, beyond, arrow in ((low, low <= _LOW, "<"), (high, high >= _HIGH, ">")):
        if beyond:
            axis.plot([min(max(end, _LOW), _HIGH)], [place], arrow, color=color, clip_on=False)
    estimate = math.inf if outcome.estimate is None else outcome.estimate
    axis.plot(
        [min(max(estimate, _LOW), _HIGH)], [place], marker, color=color, markersize=8,
        markerfacecolor=color if outcome.judged else "white", zorder=3,
    )  # fmt: skip
