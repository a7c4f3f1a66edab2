"""Attention window and predicted pen positions of a handwriting network.

Offsets are (T, 3) as in `ln_zoo.plots.pen`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ln_zoo.metrics import PenMixture
from ln_zoo.plots.figures import new_figure
from ln_zoo.plots.pen import THICKNESS, Offsets, as_array, draw, extent, inks, printable, strokes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Width of a picture, and of a map without axis and colour bar, inches.
_WIDTH, _MAP_WIDTH = 10.0, 8.7
#: Points on the longer side of the grid of a density.
_GRID = 1500
#: Standard deviation of the blur of a density, in grid steps. Sums over the grid then equal
#: integrals to a few parts in ten thousand for any width of a Gaussian.
_BLUR = 0.7
#: Radius of a drawn Gaussian, in standard deviations.
_REACH = 5.0


def plot_window(
    offsets: Offsets, phi: Tensor, text: str, title: str = "", given: Offsets | None = None
) -> Figure:
    """Draw the window weights above the line written (Graves 2013, figure 13).

    The x axis is the point index in the map, and the position in the line; they align only as far
    as the pen moves evenly.

    Args:
        offsets: (T, 3).
        phi: window weights of the characters, (T, U).
        text: U characters.
        title: title of the map.
        given: offsets (T, 3) of priming strokes; they are not drawn.
    """
    steps, characters = len(offsets), len(text)
    if tuple(phi.shape) != (steps, characters) or not characters:
        raise ValueError(
            f"phi must be ({steps}, {characters}) for {steps} offsets and the text {text!r}, got "
            f"{tuple(phi.shape)}"
        )
    drawn = inks(offsets, given)
    low, high = extent(drawn) if drawn else (np.zeros(2), np.ones(2))
    wide, tall = high - low
    height = min(max(0.17 * characters, 1.5), 9.0)
    below = 1.2 * _MAP_WIDTH * tall / wide if wide else 0.0
    figure, (map_axis, line_axis) = _panels(height, min(max(below, 0.5), 2.5))
    image = map_axis.imshow(
        as_array(phi).T if steps else np.zeros((characters, 1)),
        aspect="auto",
        cmap="gray_r",
        interpolation="nearest",
        vmin=0,
        extent=(0.5, max(steps, 1) + 0.5, characters - 0.5, -0.5),
    )
    figure.colorbar(image, ax=map_axis, label="φ(t, u)", pad=0.01)
    # Letters of a long text would overlap.
    size = min(8.0, 0.8 * 72 * height / characters)
    letters = [printable(c) if c != " " else "␣" for c in text]
    map_axis.set_yticks(range(characters), letters, size=size, parse_math=False)
    map_axis.set(xlabel="point t", ylabel="character u", title=title)
    line_axis.set_axis_off()
    margin = 0.01 * max(wide, tall) or 1.0
    line_axis.set_xlim(low[0] - margin, high[0] + margin)
    line_axis.set_ylim(low[1] - margin, high[1] + margin)
    draw(line_axis, drawn, THICKNESS)
    return figure


def position_density(
    mixture: PenMixture,
    offsets: Offsets,
    x: np.ndarray,
    y: np.ndarray,
    mean: Sequence[float] | Tensor = (0.0, 0.0),
    std: Sequence[float] | Tensor = (1.0, 1.0),
) -> np.ndarray:
    """Density of the next pen position, given the true previous ones, summed over all steps.

    See Graves 2013, figure 10. The density is blurred by 0.7 grid steps, since narrow Gaussians
    would fall between grid points; its integral over a wide grid is the number of steps.

    ``mixture`` predicts the T standardised offsets; ``offsets`` (T, 3), the evenly spaced x (X,)
    and y (Y,), relative to the start of the line, and the result (Y, X) are in units of the data.
    ``mean`` and ``std`` (2,) standardised the offsets; see `ln_zoo.models.Handwriting`.
    """
    strokes(offsets)  # validates
    shift, scale = as_array(mean), as_array(std)
    moves = as_array(offsets)[:, :2]
    before = np.concatenate([np.zeros((1, 2)), np.cumsum(moves, axis=0)])[:-1]
    weights = as_array(mixture.log_weights.exp()).ravel()
    centres = (before[:, None] + as_array(mixture.mean) * scale + shift).reshape(-1, 2)
    stds = (as_array(mixture.log_std.exp()) * scale).reshape(-1, 2)
    covariances = as_array(mixture.correlation.tanh()).ravel() * stds.prod(-1)
    blur = _BLUR * np.array([x[1] - x[0], y[1] - y[0]])
    variances = np.square(stds) + np.square(blur)

    total = np.zeros((len(y), len(x)))
    for weight, centre, variance, covariance in zip(
        weights, centres, variances, covariances, strict=True
    ):
        low, high = centre - _REACH * np.sqrt(variance), centre + _REACH * np.sqrt(variance)
        columns, rows = (
            slice(*np.searchsorted(places, ends))
            for places, ends in ((x, (low[0], high[0])), (y, (low[1], high[1])))
        )
        dx, dy = x[columns] - centre[0], (y[rows] - centre[1])[:, None]
        determinant = variance.prod() - covariance**2
        z = variance[1] * dx**2 - 2 * covariance * dx * dy + variance[0] * dy**2
        peak = weight / (2 * np.pi * np.sqrt(determinant))
        total[rows, columns] += peak * np.exp(-z / (2 * determinant))
    return total


def plot_density(
    mixture: PenMixture,
    offsets: Offsets,
    mean: Sequence[float] | Tensor = (0.0, 0.0),
    std: Sequence[float] | Tensor = (1.0, 1.0),
    title: str = "",
) -> Figure:
    """Draw `position_density` along a line, and the weights of the components by time step.

    Arguments as `position_density`, T at least 1.

    Example:
        For a model, and ``offsets`` (T, 3) and ``text`` of a line::

            points = model.standardize(offsets)
            inputs = torch.cat([torch.zeros_like(points[:1]), points[:-1]])
            outputs, _ = model(inputs.unsqueeze(1), model.encode([text]))
            mixture = model.mixture(outputs[:, 0])
            plot_density(mixture, offsets, model.offset_mean, model.offset_std)
    """
    from matplotlib.colors import PowerNorm

    drawn = inks(offsets)
    low, high = extent(drawn)
    margin = 0.06 * (high - low).max() or 1.0
    low, high = low - margin, high + margin
    step = (high - low).max() / _GRID
    x, y = (np.arange(first, last + step, step) for first, last in zip(low, high, strict=True))
    density = position_density(mixture, offsets, x, y, mean, std)
    wide, tall = high - low
    figure, (map_axis, weights_axis) = _panels(min(max(_MAP_WIDTH * tall / wide, 1.0), 8.0), 2.2)
    image = map_axis.imshow(
        density,
        cmap="magma",
        # Jumps between strokes have about a thousandth of the peak density.
        norm=PowerNorm(0.35, vmin=0),
        origin="lower",
        extent=(x[0] - step / 2, x[-1] + step / 2, y[0] - step / 2, y[-1] + step / 2),
        aspect="equal",
    )
    figure.colorbar(image, ax=map_axis, label="density, summed", shrink=0.9, pad=0.01)
    map_axis.set(title=title, xlabel="x", ylabel="y")
    weights = weights_axis.imshow(
        as_array(mixture.log_weights.exp()).T,
        aspect="auto",
        cmap="magma",
        interpolation="nearest",
        vmin=0,
        vmax=1,
        extent=(0.5, len(offsets) + 0.5, mixture.log_weights.shape[-1] + 0.5, 0.5),
    )
    figure.colorbar(weights, ax=weights_axis, label="weight", shrink=0.9, pad=0.01)
    weights_axis.set(xlabel="point t", ylabel="component")
    return figure


def _panels(above: float, below: float) -> tuple[Figure, Any]:
    figure = new_figure(_WIDTH, above + below + 0.9)
    return figure, figure.subplots(2, 1, height_ratios=[above, below])
