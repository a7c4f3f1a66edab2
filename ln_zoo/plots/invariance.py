"""What eps costs an invariance."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from ln_zoo.analysis import EpsEffect, eps_deviation


def plot_eps_effect(effects: Sequence[EpsEffect], picture: Path, title: str = "") -> None:
    """Draws measured deviations as marks over the formula's line, a panel for each δ.

    The dotted line is the formula's first term, for a variance much greater than eps.

    Args:
        effects: of any norms and factors.
        picture: the file to write, .png or .svg.
        title: of the picture.
    """
    from matplotlib.figure import Figure  # not pyplot: nothing global, no display

    factors = sorted({effect.factor for effect in effects})
    figure = Figure(figsize=(5.0 * len(factors), 4.2), layout="constrained")
    axes = figure.subplots(1, len(factors), squeeze=False, sharey=True)[0]
    for axis, factor in zip(axes, factors, strict=True):
        shown = [effect for effect in effects if effect.factor == factor]
        ends = torch.stack([effect.ratios.log10() for effect in shown])
        ratios = torch.logspace(float(ends.min()), float(ends.max()), 200, dtype=torch.float64)
        exact = eps_deviation(ratios, 1.0, factor).abs()
        limit = abs(1 - factor**-2) / (2 * ratios)
        axis.plot(ratios, exact, color="black", linewidth=1, label="formula")
        axis.plot(ratios, limit, ":", color="black", linewidth=1, label="its first term")
        # Marks of one place lie within one another.
        for number, (effect, mark) in enumerate(zip(shown, itertools.cycle("osD^v"))):
            size = 9.5 - 3 * number if number < 3 else 3
            style = {"fillstyle": "none", "markersize": size, "markeredgewidth": 1.1}
            axis.plot(effect.ratios, effect.measured, mark, label=effect.norm, **style)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(f"weights times {factor:g}")
        axis.set_xlabel("variance of the pre-activations / eps")
        axis.grid(alpha=0.3)
    # The dotted lines alone would reach far beyond.
    marks = torch.cat([effect.measured for effect in effects])
    axes[0].set_ylim(float(marks[marks > 0].min()) / 3, 10 * float(marks.max()))
    axes[0].set_ylabel("relative change of the normalised pre-activations")
    axes[-1].legend(fontsize="small")
    if title:
        figure.suptitle(title)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
