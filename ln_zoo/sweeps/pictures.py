"""Learning curves of a sweep: the metrics to draw, and their pictures."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ln_zoo.plots import comparison
from ln_zoo.sweeps.grid import SweepError
from ln_zoo.sweeps.results import Results

_SENTENCE_TASKS = ("sick_pearson", "sick_mse", "mr", "cr", "subj", "mpqa")
#: Metrics to draw and their x axis: the first group that all runs logged.
_CURVES = (
    (("epoch_train_nll", "epoch_test_error"), "epoch"),
    (("step_val_bound",), "step"),
    (("step_train_sequence_nll", "step_val_sequence_nll"), "step"),
    (("step_val_token_nll", *(f"step_{name}" for name in _SENTENCE_TASKS)), "step"),
    (("step_train_token_nll", "step_val_token_nll"), "step"),
    (("val_image_r1", "val_image_r5", "val_image_r10"), "step"),
    (("step_train_error", "step_val_error"), "step"),
    (("step_train_nll", "step_train_error"), "step"),
)


def metrics_to_draw(
    results: Results, metrics: Sequence[str] | None = None, x: str | None = None
) -> tuple[list[str], str]:
    """The metrics of the curves, and the x axis, ``"epoch"`` or ``"step"``.

    Defaults to known metrics that all runs logged. SweepError for a metric that some lack.
    """
    logged = results.logged
    if metrics:
        for metric in metrics:
            if not logged & set(metric.split("|")):
                raise SweepError(f"--metric: not all runs in {results.out} logged {metric!r}")
        return list(metrics), x or ("step" if metrics[0].startswith("step_") else "epoch")
    for names, axis in _CURVES:
        if logged >= set(names) and x in (None, axis):
            return list(names), axis
    validation = (n for n in logged if n.startswith("val_") and not n.startswith("val_batch_"))
    return sorted(validation)[:2], x or "epoch"


def draw_curves(results: Results, metrics: Sequence[str], x: str, folder: Path) -> list[str]:
    """Writes ``curves.png`` and its numbers as ``curves.csv``; returns the names of the pictures.

    Also draws ``curves_seconds.png`` if x is ``"step"`` and all runs have timed their training.
    Without matplotlib, only the numbers.
    """
    if not metrics:
        return []
    axes = {"curves": x}
    if x == "step" and all(each.seconds() for each in results.finished):
        axes["curves_seconds"] = "seconds"
    for name, axis in axes.items():
        runs = [
            comparison.LoggedRun(
                each.run.label,
                each.table.parent,
                comparison.read_curves(each.table, metrics, axis),
                comparison.read_seconds(each.table, axis),
            )
            for each in results.finished
        ]
        if drawn := find_spec("matplotlib"):
            comparison.draw(runs, metrics, folder / f"{name}.png", x=axis, band=True)
        comparison.write_csv(runs, metrics, folder / f"{name}.csv", axis)
    return [f"{name}.png" for name in axes] if drawn else []
