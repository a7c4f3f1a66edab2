"""Grids of Gaussian filters, against their equations with indices from 1."""

from __future__ import annotations

import itertools

import draw_reference
import pytest
import torch
from torch import Tensor

from ln_zoo.ops import FilterNorm, attention, filterbank

F64 = torch.float64
#: Grid, height and width.
SIZES = [(2, 28, 28), (5, 28, 28), (3, 7, 4), (4, 3, 9), (1, 6, 5), (2, 1, 1)]
NORMS: list[FilterNorm] = ["softmax", "eps"]


def said(*shape: int, seed: int = 0) -> Tensor:
    """What a linear map may say; windows of all places and widths, some beyond the image."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, 5, generator=generator, dtype=F64)


def filters(
    parameters: Tensor, size: tuple[int, int, int], norm: FilterNorm = "softmax", eps: float = 1e-8
) -> tuple[Tensor, Tensor]:
    places = attention(parameters, *size, 10.0)
    return filterbank(places, *size, norm, eps)


@pytest.mark.parametrize("eps", [None, 1e-8, 0.3])
@pytest.mark.parametrize("size", SIZES)
def test_filters_and_gradients_are_those_of_the_equations(
    size: tuple[int, int, int], eps: float | None
) -> None:
    # Farther out the equations divide 0 by 0, even in float64.
    parameters = said(6) * torch.tensor([0.5, 0.5, 0.5, 0.2, 1.0], dtype=F64)
    parameters.requires_grad_()
    places = attention(parameters, *size, 10.0)
    found = filterbank(places, *size, *(("softmax",) if eps is None else ("eps", eps)))
    f_y, f_x, expected = draw_reference.filters(parameters, *size, eps)
    of_one_filter = [0, 1, 3, 4] if size[0] == 1 else list(range(5))
    for one, two in (
        (found[0], f_y),
        (found[1], f_x),
        (places[:, of_one_filter], expected[:, of_one_filter]),
    ):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-13)
        weights = torch.randn(one.shape, dtype=F64)
        gradients = (
            torch.autograd.grad((a * weights).sum(), parameters, retain_graph=True)[0]
            for a in (one, two)
        )
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_any_number_of_dimensions_before() -> None:
    parameters = said(3, 4)
    f_y, f_x = filters(parameters, (2, 7, 4))
    assert (f_y.shape, f_x.shape) == ((3, 4, 2, 7), (3, 4, 2, 4))
    alone = filters(parameters[1, 2], (2, 7, 4))
    assert torch.allclose(f_y[1, 2], alone[0], rtol=1e-14)
    assert torch.allclose(f_x[1, 2], alone[1], rtol=1e-14)


@pytest.mark.parametrize(
    ("grid", "stride", "centres"),
    [
        (2, 27.0, [0.0, 27.0]),
        (5, 6.75, [0.0, 6.75, 13.5, 20.25, 27.0]),
        (28, 1.0, list(range(28))),
    ],
)
def test_a_map_of_zeros_covers_the_whole_image(
    grid: int, stride: float, centres: list[float]
) -> None:
    """Centred at 13.5 of the pixels 0 to 27, with sigma 1."""
    places = attention(torch.zeros(5, dtype=F64), grid, 28, 28, 10.0)
    assert places.tolist() == [13.5, 13.5, stride, 1.0, 1.0]
    pixels = torch.arange(28.0, dtype=F64)
    places[3] = 0.6
    for bank in filterbank(places, grid, 28, 28):
        # Within the image the mean of a filter is its centre; at the edge half of it is cut off.
        means = bank @ pixels
        assert torch.allclose(means[1:-1], torch.tensor(centres[1:-1], dtype=F64), atol=0.01)
        nearest = [{int(c), int(c + 0.5)} for c in centres]
        assert all(int(row.argmax()) in near for row, near in zip(bank, nearest, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("norm", NORMS)
def test_windows_beyond_the_image_and_between_pixels(norm: FilterNorm, dtype: torch.dtype) -> None:
    """By softmax all of a filter falls to the nearest edge; eps leaves nothing of it."""
    rows = [
        (x, y, log_variance, log_stride, 0.0)
        for x, y in itertools.product((-4.0, 4.0), repeat=2)
        for log_variance, log_stride in ((0.0, -3.0), (-7.0, -3.0), (-30.0, 30.0))
    ]
    parameters = torch.tensor(rows, dtype=dtype, requires_grad=True)
    f_y, f_x = filters(parameters, (2, 7, 9), norm)
    if norm == "softmax":
        near = parameters[:, 3] < 0  # of wide strides only one filter lies on that side
        edge = torch.where(parameters[:, 0] < 0, 0, 8)[near]
        assert (f_x[near].argmax(-1) == edge.unsqueeze(-1)).all()
        assert (f_x[near].amax(-1) > 0.99).all()
    else:
        for bank in (f_y, f_x):
            assert bank.abs().max() < 1e-6
    generator = torch.Generator().manual_seed(0)
    loss = sum((a * torch.rand(a.shape, generator=generator).to(a)).sum() for a in (f_y, f_x))
    loss.backward()
    assert parameters.grad.isfinite().all()


def test_the_smallest_sigma_between_two_pixels() -> None:
    """In float32 both weights are 0 before they are normalised (sigma 0.03: exp(-139))."""
    log_variance = 2 * torch.tensor(0.03).log()
    parameters = torch.zeros(5)
    parameters[2] = log_variance
    (_, f_x) = filters(parameters, (1, 1, 4))
    assert f_x.tolist() == [[0.0, 0.5, 0.5, 0.0]]
    (_, f_x) = filters(parameters, (1, 1, 4), "eps")
    assert f_x.tolist() == [[0.0, 0.0, 0.0, 0.0]]


def test_logarithms_are_clamped() -> None:
    parameters = torch.zeros(2, 5, dtype=F64)
    parameters[0, 2:4] = torch.tensor([7.0, -9.0])
    parameters[1, 2:4] = torch.tensor([-50.0, 800.0])
    parameters.requires_grad_()
    places = attention(parameters, 5, 28, 28, 3.0)
    expected = torch.tensor([[6.75 * 0.049787, 4.481689], [6.75 * 20.085537, 0.223130]], dtype=F64)
    assert torch.allclose(places[:, 2:4], expected, rtol=1e-5)
    places.sum().backward()
    assert parameters.grad[:, 2:4].eq(0).all()
    assert parameters.grad[:, [0, 1, 4]].ne(0).all()


@pytest.mark.parametrize("norm", NORMS)
def test_derivatives_of_derivatives(norm: FilterNorm) -> None:
    parameters = 0.5 * said(2)
    parameters.requires_grad_()

    def banks(a: Tensor) -> tuple[Tensor, Tensor]:
        return filters(a, (2, 4, 3), norm)

    assert torch.autograd.gradcheck(banks, parameters)
    assert torch.autograd.gradgradcheck(banks, parameters)
