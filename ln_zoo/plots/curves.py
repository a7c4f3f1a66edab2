"""The curves of a run, from the file that its `CSVLogger` writes."""

from __future__ import annotations

from pathlib import Path

from ln_zoo.plots.axes import set_log_scale
from ln_zoo.plots.csv_log import read_curves
from ln_zoo.plots.weight_geometry import parse_name

#: By the ending of a logged name: what its axis is called; these axes are logarithmic.
_AXES = {
    "point_nll": "NLL (nats per point)",
    "sequence_nll": "NLL (nats per sequence)",
    "token_nll": "NLL (nats per token)",
    "next_nll": "NLL, next sentence (nats per token)",
    "previous_nll": "NLL, previous sentence (nats per token)",
    "nll": "loss, NLL (nats per example)",
}


def plot_curves(metrics: Path, picture: Path) -> bool:
    """Draws a ``metrics.csv``: one panel for each kind of metric, each set in one colour.

    What was measured with batch statistics, such as ``val_batch_nll``, is dashed. What
    `WeightGeometry` says of each weight has a picture of its own.

    Returns:
        Whether there was anything to draw.
    """
    from matplotlib.figure import Figure  # not pyplot: nothing global, no display

    curves = read_curves(metrics)
    panels: dict[str, list[str]] = {}
    for name in sorted(curves):
        kind = _kind_of(name)
        if kind != "seconds" and parse_name(name) is None:
            # The training loss of the zoo's models is their NLL, of one batch.
            panels.setdefault("nll" if kind == "loss" else kind, []).append(name)
    if not panels:
        return False
    sets = dict.fromkeys(_set_of(name) for names in panels.values() for name in names)
    colours = {name: f"C{number}" for number, name in enumerate(sets)}
    figure = Figure(figsize=(6 * len(panels), 4), layout="constrained")
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
        axis.set_xlabel("update")
        axis.set_ylabel(_AXES.get(kind, kind))
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize="small")
    figure.savefig(picture, dpi=120)
    return True


def _kind_of(name: str) -> str:
    """What was measured: ``"nll"`` for ``val_nll``, ``"point_nll"`` for ``val_point_nll``."""
    known = (kind for kind in _AXES if name.endswith(f"_{kind}"))
    return next(known, name.rpartition("_")[2])


def _set_of(name: str) -> str:
    """What a metric was measured on: ``"val"`` for ``val_nll`` and ``val_batch_nll``."""
    return name.removesuffix(f"_{_kind_of(name)}").removesuffix("_batch")
