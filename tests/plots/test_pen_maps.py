"""Maps of the window and of expected positions, against numbers that are found another way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from refusals import refuses
from torch.distributions import MultivariateNormal

from ln_zoo.metrics import PenMixture
from ln_zoo.plots.pen import strokes
from ln_zoo.plots.pen_maps import plot_density, plot_window, position_density

MEAN, STD = torch.tensor([8.0, -1.0]), torch.tensor([40.0, 30.0])


def mixture(steps: int, components: int = 3, log_std: float = -0.5) -> PenMixture:
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    return PenMixture(
        random(steps),
        random(steps, components).log_softmax(-1),
        random(steps, components, 2),
        log_std + 0.3 * random(steps, components, 2),
        random(steps, components),
    )


def line(steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    moves = torch.randn(steps, 2, generator=generator, dtype=torch.float64) * STD + MEAN
    return torch.cat([moves, torch.zeros(steps, 1)], 1)


def grid(count: int = 500, size: float = 600.0) -> np.ndarray:
    return np.linspace(-size, size, count)


def test_densities_are_those_of_the_restored_mixture() -> None:
    steps = 4
    found, x = mixture(steps), grid(41)
    density = position_density(found, line(steps), x, x, MEAN, STD)
    # From where the pen was; component by component, in units of the data, with the blur.
    blur = (0.7 * (x[1] - x[0])) ** 2
    points = torch.tensor(np.stack(np.meshgrid(x, x), -1))
    expected = torch.zeros(41, 41, dtype=torch.float64)
    pen = torch.zeros(2, dtype=torch.float64)
    for t in range(steps):
        for m in range(3):
            sx, sy = (found.log_std[t, m].exp() * STD).tolist()
            xy = float(found.correlation[t, m].tanh()) * sx * sy
            covariance = torch.tensor([[sx**2 + blur, xy], [xy, sy**2 + blur]]).double()
            normal = MultivariateNormal(pen + MEAN + STD * found.mean[t, m], covariance)
            expected += found.log_weights[t, m].exp() * normal.log_prob(points).exp()
        pen = pen + line(steps)[t, :2]
    # What is beyond five standard deviations is left out: there it is e^-12.5 of a peak.
    np.testing.assert_allclose(density, expected.numpy(), rtol=1e-9, atol=4e-6 * expected.max())


@pytest.mark.parametrize("log_std", [-0.5, -6.0])
def test_densities_integrate_to_the_number_of_steps(log_std: float) -> None:
    """Also those of Gaussians that are a thirtieth as wide as the grid's step."""
    steps = 6
    x, y = grid(300), grid(400)
    density = position_density(mixture(steps, log_std=log_std), line(steps), x, y, MEAN, STD)
    integral = density.sum() * (x[1] - x[0]) * (y[1] - y[0])
    assert integral == pytest.approx(steps, rel=1e-3)


def test_the_density_picture() -> None:
    steps = 7
    found, offsets = mixture(steps), line(steps)
    figure = plot_density(found, offsets, MEAN, STD, title="expected")
    density, weights = figure.axes[:2]
    assert (density.get_title(), density.get_aspect()) == ("expected", 1)
    (image,) = density.images
    left, right, bottom, top = image.get_extent()
    points = np.concatenate(strokes(offsets))
    assert left < points[:, 0].min() < points[:, 0].max() < right
    assert bottom < points[:, 1].min() < points[:, 1].max() < top
    assert density.get_ylim() == (bottom, top)  # upwards
    assert image.origin == "lower"
    # Its numbers are those of the middles of its squares.
    rows, columns = image.get_size()
    edges = np.linspace(left, right, columns + 1), np.linspace(bottom, top, rows + 1)
    x, y = ((edge[1:] + edge[:-1]) / 2 for edge in edges)
    expected = position_density(found, offsets, x, y, MEAN, STD)
    np.testing.assert_allclose(image.get_array(), expected, rtol=1e-6, atol=1e-9)
    (shares,) = weights.images
    np.testing.assert_allclose(shares.get_array(), found.log_weights.exp().T)
    # Points and components are numbered from 1.
    assert shares.get_extent() == [0.5, steps + 0.5, 3.5, 0.5]
    # A line that stands still.
    (image,) = plot_density(mixture(2), torch.zeros(2, 3)).axes[0].images
    assert np.isfinite(image.get_array()).all()
    left, right, bottom, top = image.get_extent()
    assert max(left, bottom) < 0 < min(right, top)


def test_densities_of_wrong_input() -> None:
    arguments = {"mixture": mixture(3), "mean": MEAN, "std": STD}
    refuses("3 of 3 offsets are not finite", plot_density, offsets=line(3) * torch.nan, **arguments)
    with pytest.raises(ValueError, match="broadcast"):
        plot_density(offsets=line(4), **arguments)


def test_the_window_picture() -> None:
    offsets, phi = line(9), torch.rand(9, 4)
    figure = plot_window(offsets, phi, "a $b", "title")
    window, writing = figure.axes[:2]
    (image,) = window.images
    np.testing.assert_allclose(image.get_array(), phi.T)
    # The text reads downwards, a letter for each row; points are numbered from 1.
    assert image.get_extent() == [0.5, 9.5, 3.5, -0.5]
    labels = [(label.get_position()[1], label.get_text()) for label in window.get_yticklabels()]
    assert labels == [(0, "a"), (1, "␣"), (2, "$"), (3, "b")]
    assert window.get_title() == "title"
    assert writing.get_aspect() == 1
    (segment,) = writing.collections[0].get_segments()
    np.testing.assert_array_equal(segment, strokes(offsets)[0])
    below, above = (axis.get_position() for axis in (writing, window))
    assert below.y1 <= above.y0
    nothing = plot_window(torch.zeros(0, 3), torch.zeros(0, 2), "ab")
    assert nothing.axes[0].images[0].get_array().shape == (2, 1)
    # The writing begins where given strokes end; they are not drawn.
    given = torch.tensor([[3.0, 4.0, 0.0], [1.0, 1.0, 1.0]])
    figure = plot_window(line(9), torch.rand(9, 1), "a", given=given)
    (segment,) = figure.axes[1].collections[0].get_segments()
    np.testing.assert_allclose(segment, strokes(line(9))[0][1:] + np.array([4, 5]))


@pytest.mark.parametrize(("shape", "text"), [((9, 3), "ab"), ((8, 2), "ab"), ((9, 0), "")])
def test_windows_that_do_not_fit(shape: tuple[int, int], text: str) -> None:
    with pytest.raises(ValueError, match=rf"phi must be \(9, {len(text)}\) for 9 offsets"):
        plot_window(line(9), torch.rand(shape), text)
