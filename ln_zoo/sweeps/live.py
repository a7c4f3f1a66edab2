"""A page on a sweep that is written while it runs: states, curves, scores, time left."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any

from ln_zoo.plots.comparison import Curve, read_curves
from ln_zoo.sweeps.grid import Run
from ln_zoo.sweeps.progress import Progress, Watcher, label_rows, summary
from ln_zoo.sweeps.state import BEGUN, FAILED, FINISHED, State, metrics_of
from ln_zoo.utils.files import atomic_write_text
from ln_zoo.utils.package_data import render_template

#: Seconds between two versions of the page.
_EVERY = 10.0
#: Largest share of the time that writing may take.
_SHARE = 0.02
#: Points of a curve that are drawn.
_POINTS = 200
#: Colours of labels, in matplotlib's order; more labels repeat them.
_COLORS = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f",
    "#bcbd22", "#17becf",
)  # fmt: skip


class LivePage(Watcher):
    """Writes ``index.html``, a page without other files, every ten seconds.

    ``metric`` is drawn; default: two of validation, else the training loss. A full disk stops the
    page, not the sweep.
    """

    def __init__(self, out: Path, folder: Path, metric: str | None = None) -> None:
        super().__init__()
        self.out = out
        self.path = folder / "index.html"
        self.metric = metric
        self._next = 0.0
        #: Curves of runs that have ended.
        self._curves: dict[tuple[str, str], Curve] = {}

    def began(self, run: Run, progress: Progress) -> None:
        """Nothing: `checked` writes."""

    def ended(self, run: Run, state: State, seconds: float, progress: Progress) -> None:
        """Nothing: `checked` writes."""

    def stopping(self, runs: int) -> None:
        """Nothing."""

    def checked(self, progress: Progress) -> None:
        if time.monotonic() < self._next:
            return
        began = time.monotonic()
        self.write(progress, refresh=math.ceil(_EVERY))
        self._next = time.monotonic() + max(_EVERY, (time.monotonic() - began) / _SHARE)

    def closed(self, progress: Progress) -> None:
        self.write(progress)

    def write(self, progress: Progress, refresh: int = 0) -> None:
        """Write the page; with ``refresh``, it reloads after as many seconds."""
        labels = list(dict.fromkeys(run.label for run in progress.runs))
        colors = {label: _COLORS[i % len(_COLORS)] for i, label in enumerate(labels)}
        rows = [{"cells": row, "color": colors[row[0]]} for row in label_rows(progress)]
        page = render_template(
            "sweeps/live.html",
            {},
            name=self.out.absolute().name,
            head=summary(progress),
            share=progress.share,
            rows=rows,
            runs=[_run(run, progress) for run in progress.runs],
            plots=[self._plot(metric, progress, colors) for metric in self._metrics(progress)],
            refresh=refresh,
            now=time.strftime("%H:%M:%S"),
        )
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_text(self.path, page)

    def _metrics(self, progress: Progress) -> list[str]:
        if self.metric:
            return [self.metric]
        for run in progress.runs:
            if table := metrics_of(self.out / run.name):
                with contextlib.suppress(OSError), table.open() as file:
                    logged = file.readline().strip().split(",")
                    names = [x for x in logged if x.startswith("val_") and "batch" not in x]
                    return sorted(names)[:2] or [x for x in logged if x == "train_loss"]
        return []

    def _plot(self, metric: str, progress: Progress, colors: dict[str, str]) -> dict[str, Any]:
        found = [(run, self._curve(run, metric, progress)) for run in progress.runs]
        points = [point for _, curve in found for point in curve.items()] or [(0, 0.0)]
        steps, values = zip(*points, strict=True)
        lines = [
            {"name": run.name, "color": colors[run.label], "points": _thinned(curve)}
            for run, curve in found
            if curve
        ]
        ends = {"first": min(steps), "last": max(steps), "low": min(values), "high": max(values)}
        return {"metric": metric, "lines": lines, **ends}

    def _curve(self, run: Run, metric: str, progress: Progress) -> Curve:
        key = (run.name, metric)
        if key in self._curves:
            return self._curves[key]
        table, curve = metrics_of(self.out / run.name), Curve()
        if table is not None:
            with contextlib.suppress(OSError, KeyError, ValueError):  # being written
                found = read_curves(table, [metric], "step")[metric]
                curve = {step: value for step, value in found.items() if math.isfinite(value)}
        state = progress.states.get(run.name)
        if state is not None and state.kind in (FINISHED, FAILED):
            self._curves[key] = curve
        return curve


def _thinned(curve: Curve) -> list[tuple[int, float]]:
    points = sorted(curve.items())
    return points[:: max(1, len(points) // _POINTS)]


def _run(run: Run, progress: Progress) -> dict[str, str]:
    state = progress.states.get(run.name)
    if state is None:
        share = progress.shares.get(run.name, 0.0)
        return {"name": run.name, "kind": "running", "note": f"{share:.0%}"}
    scores = ", ".join(f"{name} {value:.4g}" for name, value in state.metrics.items())
    kind = "waiting" if state.kind == BEGUN else state.kind
    return {"name": run.name, "kind": kind, "note": state.error or scores}
