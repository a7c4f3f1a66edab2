"""Pictures of drawn images: pixels as they are, windows where they were, files that can be read."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from PIL import Image
from refusals import refuses

from ln_zoo.plots import draw as draw_pictures
from ln_zoo.plots.draw import (
    Nearest,
    Windows,
    _Sheet,
    bernoulli,
    chosen_glimpses,
    line_width,
    nearest_images,
    plot_divergence,
    plot_filmstrip,
    plot_grid,
    plot_nearest,
    plot_pairs,
    save_animation,
)
from ln_zoo.plots.figures import save_figure

SIZE = 7, 9
ONE = torch.zeros(1, 28, 28)


def images(number: int, seed: int = 0, size: tuple[int, int] = SIZE) -> torch.Tensor:
    return torch.rand(number, *size, generator=torch.Generator().manual_seed(seed)).double()


def black(glimpses: int, number: int, size: tuple[int, int] = (28, 28)) -> torch.Tensor:
    return torch.full((glimpses + 1, number, *size), -1e4)


def places(*boxes: tuple[float, float, float, float], glimpses: int = 1) -> torch.Tensor:
    """x, y, stride and sigma of each image, the same at each glimpse."""
    rows = torch.tensor([[*box, 1.0] for box in boxes], dtype=torch.float64)
    return rows.expand(glimpses, -1, -1)


def pixels(figure, folder: Path) -> np.ndarray:
    """Of the picture, whole numbers (Y, X, 3)."""
    save_figure(figure, folder / "picture.png")
    return np.rint(255 * imread(folder / "picture.png")[..., :3]).astype(int)


def tiles(picture: np.ndarray, sheet: _Sheet) -> np.ndarray:
    """The parts of a picture where images belong, (R, C, Y, X, 3)."""
    scale, (height, width) = sheet.scale, sheet.tiles.shape[2:]
    rows = (picture[scale * y :][: scale * height] for y in sheet.tops)
    cut = ([row[:, scale * x :][:, : scale * width] for x in sheet.lefts] for row in rows)
    return np.array(list(cut))


def enlarged(image: np.ndarray | torch.Tensor, scale: int) -> np.ndarray:
    """An image as it should be in a picture, (Y, X, 3)."""
    shades = np.rint(255 * np.asarray(image)).astype(int)
    return np.kron(shades, np.ones((scale, scale), int))[..., None].repeat(3, -1)


def red(picture: np.ndarray) -> np.ndarray:
    return picture[..., 0] - picture[..., 1] > 127


def test_pixels_are_as_they_are(tmp_path: Path) -> None:
    """Faint images stay faint, each pixel is a square, and nothing else is drawn."""
    given = images(5)
    given[1] *= 0.1
    given[2, 0, 0], given[2, 0, 1] = 0.0, 1.0
    figure = plot_grid(given, columns=3)
    sheet = _Sheet(np.full((2, 3, *SIZE), 0.0))
    picture = pixels(figure, tmp_path)
    assert picture.shape[:2] == tuple(sheet.scale * n for n in reversed(sheet.size))
    found = tiles(picture, sheet)
    blank = np.full_like(found[0, 0], 255)
    for number, tile in enumerate(found.reshape(6, *found.shape[2:])):
        expected = enlarged(given[number], sheet.scale) if number < 5 else blank
        np.testing.assert_array_equal(tile, expected, err_msg=str(number))
    ink = sum((enlarged(image, sheet.scale) != 255).sum() for image in given)
    assert (picture != 255).sum() == ink


@pytest.mark.parametrize("size", [(28, 28), (8, 8), (1, 1), (3, 200)])
def test_images_of_any_size(tmp_path: Path, size: tuple[int, int]) -> None:
    given = images(2, size=size)
    sheet = _Sheet(np.full((1, 2, *size), 0.0))
    found = tiles(pixels(plot_grid(given, 2), tmp_path), sheet)
    np.testing.assert_array_equal(found[0, 1], enlarged(given[1], sheet.scale))
    assert 50 < max(found.shape[2:4]) < 210


def test_a_title_has_room_and_a_grid_is_about_square(tmp_path: Path) -> None:
    title = "as long as titles are, update 12,345, $1 and 2$"
    picture = pixels(plot_grid(torch.zeros(1, 28, 28), title=title), tmp_path)
    beside = pixels(plot_grid(torch.zeros(1, 28, 28), title=title + " or more"), tmp_path)
    printed = (picture != 255).any((0, 2)).nonzero()[0]
    assert printed.min() > 0
    assert 0.75 * picture.shape[1] < printed.max() < picture.shape[1] - 5
    assert beside.shape[1] > picture.shape[1]
    for number, rows, columns in ((1, 1, 1), (4, 2, 2), (5, 2, 3), (10, 3, 4), (100, 10, 10)):
        picture = pixels(plot_grid(torch.zeros(number, *SIZE)), tmp_path)
        sheet = _Sheet(np.full((rows, columns, *SIZE), 0.0))
        assert picture.shape[:2] == tuple(sheet.scale * n for n in reversed(sheet.size))


def test_drawn_pixels_have_their_probability() -> None:
    p = torch.tensor([0.0, 0.1, 0.5, 1.0]).reshape(1, 2, 2).expand(20_000, 2, 2)
    state = torch.get_rng_state()
    drawn = bernoulli(p, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    assert drawn.mean(0).flatten().tolist() == pytest.approx([0, 0.1, 0.5, 1], abs=0.015)
    assert torch.equal(drawn, bernoulli(p.numpy(), seed=3))
    assert not torch.equal(drawn, bernoulli(p, seed=4))


def test_the_same_numbers_make_the_same_file(tmp_path: Path) -> None:
    windows = Windows(places((3, 3, 2, 1), (4, 5, 1, 2), glimpses=4), 2)
    canvases = 4 * torch.randn(5, 2, *SIZE, generator=torch.Generator().manual_seed(0))
    for kind in ("png", "svg", "gif"):
        one, two = (tmp_path / f"{name}.{kind}" for name in ("one", "two"))
        for path in (one, two):
            if kind == "gif":
                save_animation(canvases, path, windows)
            else:
                save_figure(plot_filmstrip(canvases, windows, title="a title"), path)
        assert one.read_bytes() == two.read_bytes()


def box(picture: np.ndarray) -> tuple[list[float], list[float]]:
    """Centre and sides of a window's middle line, x first."""
    mask = red(picture)
    y, x = np.nonzero(mask)
    # From the middle of the left line to that of the right one, across the centre.
    ends = []
    for across in (mask[(y.min() + y.max()) // 2], mask[:, (x.min() + x.max()) // 2]):
        line = across.nonzero()[0]
        first, last = np.split(line, [int(np.argmax(np.diff(line))) + 1])
        ends.append((first.mean(), last.mean()))
    return [(first + last) / 2 for first, last in ends], [last - first for first, last in ends]


@pytest.mark.parametrize(
    ("place", "size"),
    [((13.5, 13.5, 4.0, 1.0), 5), ((10.0, 15.0, 9.0, 0.5), 2), ((14.25, 12.5, 1.5, 0.3), 4)],
)
def test_windows_lie_where_filters_were(tmp_path: Path, place, size: int) -> None:
    """Sides go through the outermost filters; pixel 0 has its centre half a pixel from the edge."""
    _, (tile,), scale = shown(Windows(places(place), size), tmp_path)
    centre, sides = box(tile)
    x, y, stride, _ = place
    # A pixel of the picture lies at its middle, too; lines are drawn to the nearest one.
    assert centre == pytest.approx([scale * (c + 0.5) - 0.5 for c in (x, y)], abs=0.75)
    assert sides == pytest.approx([scale * (size - 1) * stride] * 2, abs=1)


def shown(windows: Windows, folder: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """A picture of one glimpse, the tile of each image, and the scale."""
    number = windows.places.shape[1]
    sheet = _Sheet(np.zeros((number, 1, 28, 28)), headings=["t = 1"])
    picture = pixels(plot_filmstrip(black(1, number), windows), folder)
    return picture, tiles(picture, sheet)[:, 0], sheet.scale


def test_lines_are_thicker_for_larger_sigma(tmp_path: Path) -> None:
    sigmas = [0.02, 0.2, 0.6, 1.0, 2.0, 8.0, 1e6]
    _, found, _ = shown(Windows(places(*((13.5, 13.5, 3, s) for s in sigmas)), 5), tmp_path)
    shares = (found[..., 0] - found[..., 1]).sum((1, 2)).tolist()
    assert shares == sorted(set(shares))
    assert shares[-1] / shares[3] == pytest.approx(2, rel=0.2)
    assert line_width(0.02) < line_width(0.2) < line_width(1.0) == 1.0 < line_width(1e6) < 2.0001
    # A window of one filter is visible at any stride.
    _, (tile,), scale = shown(Windows(places((10, 20, 999, 0.5)), 1), tmp_path)
    y, x = np.nonzero(red(tile))
    assert [x.mean(), y.mean()] == pytest.approx([10.5 * scale, 20.5 * scale], abs=1)
    assert np.ptp(x) < 3 * scale


def test_windows_do_not_leave_their_image(tmp_path: Path) -> None:
    inner = (0, 0, 3, 2), (27, 27, 3, 2), (13, 13, 6.9, 3)
    outside = places(*inner, (500, 13, 3, 1), (13, 13, 1e30, 1))
    picture, found, _ = shown(Windows(outside, 5), tmp_path)
    inside = red(found)
    assert inside.any((1, 2)).tolist() == [True, True, True, False, False]
    assert red(picture).sum() == inside.sum()


@pytest.mark.parametrize("total", [1, 2, 5, 8, 9, 10, 16, 63, 64, 65, 200])
def test_glimpses_are_chosen_evenly(total: int) -> None:
    chosen = chosen_glimpses(total)
    if total <= 8:
        assert chosen == list(range(1, total + 1))
        return
    assert (chosen[0], chosen[-1]) == (1, total)
    assert len(chosen) <= 9
    assert set(np.diff([0, *chosen])) <= set(range(1, total // 8 + 2))


def test_a_filmstrip_has_a_row_for_each_image(tmp_path: Path) -> None:
    canvases = 3 * torch.randn(17, 2, *SIZE, generator=torch.Generator().manual_seed(0))
    seen = images(2, seed=1)
    figure = plot_filmstrip(canvases, images=seen, title="a title")
    chosen = [1, 2, 4, 6, 8, 10, 12, 14, 16]
    sheet = _Sheet(np.zeros((2, 10, *SIZE)), headings=["t"] * 10, title="a title")
    found = tiles(pixels(figure, tmp_path), sheet)
    for row in range(2):
        shown = [seen[row], *(1 / (1 + (-canvases[t, row].double()).exp()) for t in chosen)]
        for column, image in enumerate(shown):
            np.testing.assert_array_equal(found[row, column], enlarged(image, sheet.scale))
    printed = [text.get_text() for text in figure.axes[0].texts]
    assert printed == ["a title", "image", *(f"t = {t}" for t in chosen)]


def test_each_canvas_has_the_window_of_the_glimpse_that_left_it(tmp_path: Path) -> None:
    centres = torch.tensor([4.0, 9.0, 14.0, 19.0])
    boxes = torch.stack([centres, 27 - centres, *torch.tensor([[2.0], [0.5], [1.0]]).expand(3, 4)])
    windows = Windows(boxes.T[:, None], 2)
    figure = plot_filmstrip(black(4, 1), windows, images=ONE, glimpses=[0, 2, 4, 1])
    sheet = _Sheet(np.zeros((1, 5, 28, 28)), headings=["t"] * 5)
    found = red(tiles(pixels(figure, tmp_path), sheet)[0])
    assert found.any((1, 2)).tolist() == [False, False, True, True, True]
    for tile, x in zip(found[2:], (9.0, 19.0, 4.0), strict=True):
        at = [axis.mean() / sheet.scale - 0.5 for axis in np.nonzero(tile)]
        assert at == pytest.approx([27 - x, x], abs=0.4)


def test_an_animation_shows_every_canvas(tmp_path: Path) -> None:
    """In its place and shade, with its window, and the last one for longer."""
    glimpses, number = 11, 3
    canvases = torch.linspace(-3, 3, glimpses + 1)[:, None, None, None].expand(-1, number, 28, 28)
    x = torch.arange(4.0, 4 + glimpses)
    boxes = torch.stack([x, x, *torch.tensor([[4.0], [1.0], [1.0]]).expand(3, glimpses)])
    windows = Windows(boxes.T[:, None].expand(-1, number, -1), 2)
    save_animation(canvases, tmp_path / "new/drawing.gif", windows, columns=2, title="a title")
    film = Image.open(tmp_path / "new/drawing.gif")
    assert (film.n_frames, film.info["loop"]) == (glimpses + 1, 0)
    sheet = _Sheet(np.zeros((2, 2, 28, 28)), title=" " * len("a title, t = 11 of 11"))
    durations = []
    for t in range(film.n_frames):
        film.seek(t)
        durations.append(film.info["duration"])
        frame = np.asarray(film.convert("RGB")).astype(int)
        assert frame.shape[:2] == tuple(sheet.scale * n for n in reversed(sheet.size))
        found = tiles(frame, sheet).reshape(4, -1, 28 * sheet.scale, 3)
        assert (found[3] == 255).all()
        for tile in found[:3]:
            shade = 255 / (1 + math.exp(-canvases[t, 0, 0, 0]))
            assert np.abs(tile[-5:, :5] - shade).max() < 1
            mask = red(tile)
            assert mask.any() == (t > 0)
            if t:
                at = [axis.mean() / sheet.scale - 0.5 for axis in np.nonzero(mask)]
                assert at == pytest.approx([float(x[t - 1])] * 2, abs=0.4)
    assert durations == [100] * glimpses + [1500]


def test_reconstructions_are_beneath_their_images(tmp_path: Path) -> None:
    upper, lower = images(5), images(5, seed=1)
    figure = plot_pairs(upper, lower, columns=3)
    sheet = _Sheet(np.zeros((4, 3, *SIZE)), groups=(2, 1), labels=["image", "drawn"])
    found = tiles(pixels(figure, tmp_path), sheet)
    for number in range(5):
        row, column = 2 * (number // 3), number % 3
        for tile, image in ((found[row], upper), (found[row + 1], lower)):
            np.testing.assert_array_equal(tile[column], enlarged(image[number], sheet.scale))
    assert (found[2:, 2] == 255).all()
    between = np.diff(sheet.tops) - SIZE[0]
    assert between[1] > between[0] == between[2] == 1


@pytest.mark.parametrize("columns", [2, 9])
def test_nearest_images_are_beside_their_samples(tmp_path: Path, columns: int) -> None:
    left, right = images(3), images(3, seed=1)
    found = Nearest(right.numpy(), np.array([0.5, 12.3456, 0.0]))
    figure = plot_nearest(left, found, columns)
    in_row = min(columns, 3)
    beside = {"groups": (1, 2), "headings": ["sample"], "captions": ["L2"]}
    sheet = _Sheet(np.zeros((-(-3 // in_row), 2 * in_row, *SIZE)), **beside)
    shown = tiles(pixels(figure, tmp_path), sheet)
    for number in range(3):
        row, column = number // in_row, 2 * (number % in_row)
        for tile, image in ((shown[row, column], left), (shown[row, column + 1], right)):
            np.testing.assert_array_equal(tile, enlarged(image[number], sheet.scale))
    printed = [text.get_text() for text in figure.axes[0].texts]
    assert printed == [*["sample", "nearest"] * in_row, "L2 0.50", "L2 12.35", "L2 0.00"]


@pytest.mark.parametrize(
    ("kind", "chunk"), [("tensor", 1), ("array", 3), ("parts", 3), ("file", 100), ("parts", 1)]
)
def test_nearest_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, kind: str
) -> None:
    monkeypatch.setattr(draw_pictures, "_CHUNK", chunk)
    samples = images(6)
    levels = torch.randint(0, 256, (20, *SIZE), generator=torch.Generator().manual_seed(2))
    np.save(tmp_path / "levels.npy", levels.numpy().astype(np.uint8))
    given = {
        "tensor": lambda: levels.to(torch.uint8),
        "array": lambda: levels.numpy().astype(np.uint8),
        "parts": lambda: iter(levels.float().split(7)),
        "file": lambda: np.load(tmp_path / "levels.npy", mmap_mode="r"),
    }[kind]()
    found = nearest_images(samples.float(), given)
    differences = samples.float().double()[:, None] - levels.double()
    distances, numbers = differences.square().sum((2, 3)).sqrt().min(1)
    np.testing.assert_allclose(found.distances, distances, rtol=1e-12)
    np.testing.assert_array_equal(found.images, levels[numbers].double().numpy())
    # The first of equal images, also where another part of the set has the other.
    monkeypatch.setattr(draw_pictures, "_CHUNK", 2)
    others = torch.tensor([[1.0, 1.0], [1, 0], [0, 1], [1, 0]]).reshape(4, 1, 2)
    found = nearest_images(torch.tensor([[[0.5, 0.5]], [[0.9, 0.0]]]), others)
    assert found.images.tolist() == [[[1, 1]], [[1, 0]]]


def test_divergence(tmp_path: Path) -> None:
    nats = images(1, size=(5, 3))[0]
    epochs = [2, 4, 6.5, 8, 10]
    figure = plot_divergence(nats, epochs)
    heat, bars = figure.axes[:2]
    np.testing.assert_array_equal(heat.images[0].get_array(), nats.numpy())
    assert heat.images[0].get_clim()[0] == 0
    assert [bar.get_height() for bar in bars.patches] == nats[-1].tolist()
    save_figure(figure, tmp_path / "kl.png")
    # The first epoch is at the bottom.
    shown = {text.get_position()[1]: text.get_text() for text in heat.get_yticklabels()}
    found = {row: text for row, text in shown.items() if text}
    assert found == {row: f"{epochs[int(row)]:g}" for row in found} != {}
    low, high = heat.get_ylim()
    assert low < high
    # Of one epoch.
    nats = [3.0, 0.5, 0.0, 1.25]
    figure = plot_divergence(nats, title="a title")
    (bars,) = figure.axes
    assert [bar.get_height() for bar in bars.patches] == nats
    assert [bar.get_x() + bar.get_width() / 2 for bar in bars.patches] == [1, 2, 3, 4]
    assert bars.get_title() == "4.75 nats in total"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plot_grid(torch.zeros(2, 1, 4, 4)), r"images must be \(N, B, A\).*\(2, 1, 4, 4\)"),
        (lambda: plot_grid(torch.zeros(0, 4, 4)), "at least one pixel"),
        (lambda: plot_grid(torch.tensor([[[0.0, 1.5]]])), "from 0 to 1, got 0 to 1.5: give the"),
        (lambda: plot_grid(torch.tensor([[[-2.0, 0.5]]])), "from 0 to 1, got -2 to 0.5"),
        (lambda: plot_grid(torch.zeros(2, 4, 4), 0), "columns must .*got 0"),
        (lambda: plot_filmstrip(torch.zeros(1, 2, 4, 4)), "canvases must .* least one glimpse"),
        (lambda: plot_filmstrip(torch.zeros(3, 4, 4)), r"canvases must be .*\(3, 4, 4\)"),
        (lambda: nearest_images(images(2), []), "images is empty"),
        (lambda: nearest_images(images(2), torch.zeros(0, *SIZE)), "images is empty"),
        (lambda: chosen_glimpses(0), r"glimpses .*got 0"),
        (lambda: chosen_glimpses(4, 1), r"number .*got 1"),
        (lambda: save_animation(black(2, 2), Path("a.png")), "a.png does not name an animation"),
    ],
)
def test_what_cannot_be_drawn(make, message: str) -> None:
    refuses(message, make)


@pytest.mark.parametrize(
    "make",
    [
        lambda: plot_filmstrip(black(2, 2), Windows(torch.zeros(3, 2, 5), 2)),
        lambda: plot_filmstrip(black(2, 2), glimpses=[1, 3]),
        lambda: plot_filmstrip(black(2, 2), images=ONE),
        lambda: plot_pairs(images(2), images(3)),
        lambda: nearest_images(images(2), torch.zeros(4, 7, 8)),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_numpy(make) -> None:
    with pytest.raises((ValueError, IndexError), match=r"shape|size|dimension|out of bounds"):
        make()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite(value: float) -> None:
    given = images(4)
    given[2, 3, 3] = given[3, 0, 0] = value
    message = "2 of 4 images are not finite, first number 2"
    for make in (
        lambda: plot_grid(given),
        lambda: plot_pairs(given, images(4)),
        lambda: bernoulli(given, 0),
        lambda: nearest_images(given, images(4)),
    ):
        refuses(message, make)

    canvases = black(3, 2)
    canvases[1] = math.inf  # black or white
    plot_filmstrip(canvases)
    canvases[2, 1, 0, 0] = math.nan
    refuses("canvases at t = 2: 1 of 2", plot_filmstrip, canvases)
