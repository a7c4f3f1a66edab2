"""Learning curves of one run."""

from __future__ import annotations

from pathlib import Path

from ln_zoo.plots.csv_log import read_curves
from ln_zoo.plots.figures import new_figure, save_figure, set_log_scale
from ln_zoo.plots.weight_geometry import parse_name

#: Labels of logarithmic axes, by the suffix of a metric's name.
_AXES = {
    "point_nll": "NLL (nats per point)",
    "sequence_nll": "NLL (nats per sequence)",
    "token_nll": "NLL (nats per token)",
    "next_nll": "NLL, next sentence (nats per token)",
    "previous_nll": "NLL, previous sentence (nats per token)",
    "nll": "loss, NLL (nats per example)",
}


def plot_curves(metrics: Path, picture: Path) -> bool:
    """Draw a ``metrics.csv``: a panel per kind of metric, a colour per set.

    Metrics under batch statistics, such as ``val_batch_nll``, are dashed. Metrics of
    `WeightGeometry` are drawn by `plot_weight_geometry` instead. Returns False if there is nothing
    to draw.
    """
    curves = read_curves(metrics)
    panels: dict[str, list[str]] = {}
    for name in sorted(curves):
        kind = _kind_of(name)
        if kind != "seconds" and parse_name(name) is None:
            # The training loss of the models is the NLL of one batch.
            panels.setdefault("nll" if kind == "loss" else kind, []).append(name)
    if not panels:
        return False
    sets = dict.fromkeys(_set_of(name) for names in panels.values() for name in names)
    colours = {name: f"C{number}" for number, name in enumerate(sets)}
    figure = new_figure(6 * len(panels), 4)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (kind, names) in zip(axes, panels.items(), strict=True):
        for name in names:
            steps, values = curves[name]
            of_batches = name.endswith("_loss")
            axis.plot(
                steps,
                values,
                label=name,
                color=colours[_set_of(name)],
                linestyle="--" if "_batch_" in name else "-",
                linewidth=0.8 if of_batches else 1.6,
                alpha=0.6 if of_batches else 1.0,
                marker=None if of_batches else ".",
            )
        positive = min(min(curves[name][1]) for name in names) > 0
        if kind in _AXES and positive:
            set_log_scale(axis)
        axis.set(xlabel="update", ylabel=_AXES.get(kind, kind))
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize="small")
    save_figure(figure, picture, dpi=120)
    return True


def _kind_of(name: str) -> str:
    """Kind of a metric: ``"nll"`` for ``val_nll``, ``"point_nll"`` for ``val_point_nll``."""
    known = (kind for kind in _AXES if name.endswith(f"_{kind}"))
    return next(known, name.rpartition("_")[2])


def _set_of(name: str) -> str:
    """Set of a metric: ``"val"`` for ``val_nll`` and ``val_batch_nll``."""
    return name.removesuffix(f"_{_kind_of(name)}").removesuffix("_batch")
