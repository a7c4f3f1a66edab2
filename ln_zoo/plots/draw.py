"""Pictures of DRAW, glimpse by glimpse (Gregor et al. 2015, figures 1, 6, 7).

Images (N, B, A) are 0 (black) to 1 (white) and never rescaled. Canvases are logits (T + 1, N, B,
A), the empty one first, as in `ln_zoo.layers.draw.DRAWTrace`; an image is their sigmoid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ln_zoo.plots.figures import DPI, new_figure
from ln_zoo.plots.pen import as_array
from ln_zoo.utils.checks import check_at_least

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Images = Tensor | np.ndarray

#: Colour of windows.
WINDOW = "#ff0000"

#: Approximate side of a drawn image, pixels of the picture.
_TILE = 84
#: Gaps between images and between groups of images, pixels of an image.
_GAP, _WIDE_GAP = 1, 4
#: Margin and height of a line of text, inches.
_MARGIN, _LINE = 0.08, 0.17
#: Font sizes, points, and the approximate width of a letter, inches per point.
_SMALL, _LARGE, _LETTER = 7, 9, 0.0085
#: Smallest drawn side of a window, pixels of an image; grids of one filter have side 0.
_SMALLEST = 1.0
#: Images searched at a time.
_CHUNK = 4096
#: Frames per second of an animation, and frames for which the last picture is held.
_FPS, _HOLD = 10, 15


class Windows(NamedTuple):
    """Read or write windows."""

    #: (T, N, 5): x and y of the centre, stride and sigma in pixels from 0, and the intensity, which
    #: is not drawn.
    places: Tensor
    size: int  #: filters per side, N in the paper


class Nearest(NamedTuple):
    """Result of `nearest_images`."""

    images: np.ndarray  # nearest image of each sample, (N, B, A) float64, 0 to 1
    distances: np.ndarray  # Euclidean distances, (N,) float64


def chosen_glimpses(glimpses: int, number: int = 9) -> list[int]:
    """At most ``number`` evenly spaced glimpses, including the first and the last."""
    check_at_least(1, glimpses=glimpses)
    check_at_least(2, number=number)
    spaces = number - 1
    # Integer arithmetic, with halves rounded up: equal on every machine.
    even = [(2 * k * glimpses + spaces) // (2 * spaces) for k in range(number)]
    return sorted({max(1, t) for t in even})


def bernoulli(images: Images, seed: int) -> Tensor:
    """Sample binary images from pixel probabilities (N, B, A), with a generator of its own."""
    probabilities = torch.from_numpy(_images("images", images))
    return torch.bernoulli(probabilities, generator=torch.Generator().manual_seed(seed))


def nearest_images(samples: Images, images: Images | Iterable[Images]) -> Nearest:
    """Find the nearest image of each sample in Euclidean distance; ties go to the first.

    The search runs in float64, a part of the images at a time.

    Args:
        samples: (N, B, A), 0 to 1.
        images: (M, B, A) of any type, or an iterable of such arrays.

    Example:
        >>> images = np.array([[[0, 0]], [[1, 0]]], dtype=np.uint8)
        >>> nearest_images(torch.tensor([[[0.75, 0.0]]]), images).distances
        array([0.25])
    """
    from scipy.spatial.distance import cdist  # slow to import

    wanted = _images("samples", samples)
    rows = wanted.reshape(len(wanted), -1)
    parts = []
    for part in _parts(images):
        others = _numbers(part)
        distances = cdist(rows, others.reshape(len(others), -1))
        parts.append(Nearest(others[distances.argmin(1)], distances.min(1)))
    if not parts:
        raise ValueError("images is empty: give at least one")
    return closest(parts)


def closest(found: Sequence[Nearest]) -> Nearest:
    """Combine the nearest images of the same samples found in several sets.

    Example:
        >>> one, other = (
        ...     Nearest(np.full((2, 1, 1), shade), np.array(distances))
        ...     for shade, distances in ((0.0, [1.0, 3.0]), (1.0, [2.0, 2.0]))
        ... )
        >>> closest([one, other]).images.ravel(), closest([one, other]).distances
        (array([0., 1.]), array([1., 2.]))
    """
    distances = np.stack([share.distances for share in found])
    which, samples = distances.argmin(0), np.arange(distances.shape[1])
    images = np.stack([share.images for share in found])
    return Nearest(images[which, samples], distances[which, samples])


# Pictures


def plot_grid(images: Images, columns: int | None = None, title: str = "") -> Figure:
    """Draw images (N, B, A) row by row, such as `bernoulli` samples.

    ``columns``: images per row; default: about as many as rows.
    """
    tiles = _images("images", images)
    columns = math.isqrt(len(tiles) - 1) + 1 if columns is None else columns
    return _Sheet(_in_rows(tiles, columns), title=title).figure()


def plot_filmstrip(
    canvases: Tensor,
    windows: Windows | None = None,
    *,
    images: Images | None = None,
    glimpses: Sequence[int] | None = None,
    title: str = "",
) -> Figure:
    """Draw canvases after some glimpses, a row per image (Gregor et al. 2015, figure 1).

    Windows are red. Their sides pass through the centres of the outermost filters, and the line
    width grows with sigma.

    Args:
        canvases: logits, (T + 1, N, B, A), the empty one first.
        windows: windows of the glimpses, if they are to be drawn.
        images: input images (N, B, A), drawn before each row.
        glimpses: glimpses to draw, from 0 (the empty canvas) to T; default: `chosen_glimpses`.
        title: title of the picture.
    """
    drawn = _canvases(canvases)
    places = _places(windows, drawn)
    glimpses = chosen_glimpses(len(drawn) - 1) if glimpses is None else list(glimpses)
    tiles, boxes = drawn[glimpses], places[glimpses]
    headings = [f"t = {t}" for t in glimpses]
    if images is not None:
        seen = _images("images", images)
        tiles = np.concatenate([seen[None], tiles])
        boxes = np.concatenate([np.full_like(boxes[:1], np.nan), boxes])
        headings = ["image", *headings]
    return _Sheet(
        tiles.swapaxes(0, 1), boxes.swapaxes(0, 1), headings=headings, title=title
    ).figure()


def save_animation(
    canvases: Tensor,
    picture: Path,
    windows: Windows | None = None,
    *,
    columns: int | None = None,
    title: str = "",
) -> None:
    """Write a GIF of canvases from the empty one to the last, which is held.

    Each frame has its own palette of 256 colours, so shades are approximate. Arguments as
    `plot_filmstrip` and `plot_grid`; the number of the glimpse follows the title.
    """
    from matplotlib.animation import PillowWriter
    from matplotlib.figure import Figure

    if picture.suffix.lower() != ".gif":
        raise ValueError(f"{picture} does not name an animation: end it in .gif")
    drawn = _canvases(canvases)
    places = _places(windows, drawn)
    columns = math.isqrt(drawn.shape[1] - 1) + 1 if columns is None else columns
    last = len(drawn) - 1
    sheets = [
        _Sheet(
            _in_rows(tiles, columns),
            _in_rows(boxes, columns),
            title=f"{title}{', ' if title else ''}t = {t} of {last}",
            # A longer number must not move the images.
            title_letters=len(f"{title}, t = {last} of {last}"),
        )
        for t, (tiles, boxes) in enumerate(zip(drawn, places, strict=True))
    ]
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure()
    writer = PillowWriter(fps=_FPS)
    figure.set_size_inches(sheets[0].inches)
    with writer.saving(figure, picture, DPI):
        for sheet in sheets:
            figure.clear()
            sheet.draw(figure)
            writer.grab_frame()
        for _ in range(_HOLD - 1):
            writer.grab_frame()


def plot_pairs(
    images: Images, reconstructions: Images, columns: int | None = None, title: str = ""
) -> Figure:
    """Draw images (N, B, A), each above its reconstruction; other arguments as `plot_grid`."""
    upper, lower = _images("images", images), _images("reconstructions", reconstructions)
    columns = math.isqrt(2 * len(upper) - 1) + 1 if columns is None else columns
    above, below = _in_rows(upper, columns), _in_rows(lower, columns)
    tiles = np.stack([above, below], 1).reshape(2 * len(above), *above.shape[1:])
    labels = ["image", "drawn"] * len(above)
    return _Sheet(tiles, groups=(2, 1), labels=labels, title=title).figure()


def plot_nearest(
    samples: Images, nearest: Nearest, columns: int | None = None, title: str = ""
) -> Figure:
    """Draw samples (N, B, A), each next to its nearest training image, with the distance.

    ``columns``: pairs per row; default: about half as many as rows.
    """
    left, right = _images("samples", samples), _images("nearest images", nearest.images)
    columns = math.isqrt((len(left) - 1) // 2) + 1 if columns is None else columns
    pairs = np.stack([_in_rows(left, columns), _in_rows(right, columns)], 2)
    tiles = pairs.reshape(len(pairs), -1, *left.shape[1:])
    distances = [f"L2 {distance:.2f}" for distance in nearest.distances]
    return _Sheet(
        tiles,
        groups=(1, 2),
        headings=["sample", "nearest"] * pairs.shape[1],
        captions=[distances[i : i + columns] for i in range(0, len(distances), columns)],
        title=title,
    ).figure()


def plot_divergence(
    divergence: Tensor | Sequence[float], epochs: Sequence[float] | None = None, title: str = ""
) -> Figure:
    """Draw the KL of each glimpse as bars, and its history over epochs as a map.

    ``divergence`` is in nats, (T,), or (E, T) after several ``epochs``, by default 1 to E.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    nats = np.atleast_2d(as_array(divergence))
    rows, glimpses = nats.shape
    epochs = list(range(1, rows + 1)) if epochs is None else list(epochs)
    several = rows > 1
    figure = new_figure(7, 6 if several else 3)
    axes = figure.subplots(1 + several, 1, squeeze=False, sharex=True)[:, 0]
    bars = axes[-1]
    bars.bar(range(1, glimpses + 1), nats[-1], width=0.8, color="C0")
    bars.set(xlabel="glimpse t", ylabel="KL (nats)", xlim=(0.5, glimpses + 0.5))
    bars.set_title(f"{nats[-1].sum():.4g} nats in total", size=_LARGE)
    bars.xaxis.set_major_locator(MaxNLocator(integer=True))
    bars.set_axisbelow(True)
    bars.grid(axis="y", alpha=0.3)
    if several:
        image = axes[0].imshow(
            nats,
            aspect="auto",
            cmap="viridis",
            interpolation="nearest",
            vmin=0,
            origin="lower",
            extent=(0.5, glimpses + 0.5, -0.5, rows - 0.5),
        )
        figure.colorbar(image, ax=axes[0], label="KL (nats)", pad=0.01)

        def epoch(row: float, _: Any) -> str:
            return f"{epochs[round(row)]:.4g}" if 0 <= round(row) < rows else ""

        axes[0].yaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0].yaxis.set_major_formatter(FuncFormatter(epoch))
        axes[0].set_ylabel("epoch")
    if title:
        figure.suptitle(title, size=_LARGE + 1)
    return figure


def line_width(sigma: float) -> float:
    """Line width of a window, pixels of an image: grows with sigma, below 2."""
    return 2 * sigma / (1 + sigma)


# Layout


@dataclass(frozen=True)
class _Sheet:
    """A layout of images in rows and columns, with text and windows.

    Positions are in pixels of the images from the upper left corner, so that each pixel of an image
    covers whole pixels of the picture.
    """

    tiles: np.ndarray  # (R, C, B, A), 0 to 1; NaN for missing images
    windows: np.ndarray | None = None  # x, y, side and sigma, (R, C, 4); NaN for missing windows
    groups: tuple[int, int] = (1, 1)  # rows and columns of a group
    headings: Sequence[str] = ()
    labels: Sequence[str] = ()
    captions: Sequence[Sequence[str]] = ()  # by row, below each group of columns
    title: str = ""
    title_letters: int = 0  # minimum letters of the title to reserve room for

    @property
    def scale(self) -> int:
        """Pixels of the picture per pixel of an image."""
        return max(1, round(_TILE / max(self.tiles.shape[2:])))

    @property
    def tops(self) -> list[int]:
        first = self._pixels(_MARGIN + _LINE * (bool(self.title) + bool(self.headings)))
        rows, _, height, _ = self.tiles.shape
        beneath = self._pixels(_LINE) if self.captions else 0
        return _starts(rows, height + beneath, self.groups[0], first)

    @property
    def lefts(self) -> list[int]:
        longest = max(map(len, self.labels), default=0)
        # One letter of space between labels and images.
        first = self._pixels(_MARGIN + _SMALL * _LETTER * (longest + bool(longest)))
        return _starts(self.tiles.shape[1], self.tiles.shape[3], self.groups[1], first)

    @property
    def size(self) -> tuple[int, int]:
        height, width = self.tiles.shape[2:]
        margin, letters = self._pixels(_MARGIN), max(len(self.title), self.title_letters)
        beneath = self._pixels(_LINE) if self.captions else 0
        right = max(self.lefts[-1] + width, margin + self._pixels(_LARGE * _LETTER * letters))
        return right + margin, self.tops[-1] + height + beneath + margin

    @property
    def inches(self) -> tuple[float, float]:
        # Rounded up a little: a little less would lose a pixel.
        width, height = ((self.scale * pixels + 1e-3) / DPI for pixels in self.size)
        return width, height

    def figure(self) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=self.inches)
        self.draw(figure)
        return figure

    def draw(self, figure: Figure) -> None:
        axis = figure.add_axes((0, 0, 1, 1))
        axis.set_axis_off()
        width, height = self.size
        # One image of all tiles: hundreds of images would take seconds. 255 is the background.
        page = np.full((height, width), 255, np.uint8)
        for row, top in zip(self.tiles, self.tops, strict=True):
            for tile, left in zip(row, self.lefts, strict=True):
                if not np.isnan(tile).any():
                    shades = np.rint(255 * tile).astype(np.uint8)
                    page[top : top + tile.shape[0], left : left + tile.shape[1]] = shades
        extent = (0, width, height, 0)
        # RGB: a colour map may be off by one shade.
        axis.imshow(
            page[..., None].repeat(3, -1), interpolation="none", extent=extent, aspect="auto"
        )
        axis.set(xlim=extent[:2], ylim=extent[2:])
        if self.windows is not None:
            self._plot_windows(axis, self.windows)
        self._print(axis)

    def _plot_windows(self, axis: Axes, windows: np.ndarray) -> None:
        from matplotlib.patches import Rectangle
        from matplotlib.transforms import Bbox, TransformedBbox

        height, width = self.tiles.shape[2:]
        # Clipped, since renderers reject very large coordinates.
        outside = np.array([width, height]) + 10.0
        for top, row in zip(self.tops, windows, strict=True):
            for left, (x, y, side, sigma) in zip(self.lefts, row, strict=True):
                if math.isnan(x):
                    continue
                # The centre of a pixel is half a pixel from its corner.
                centre, half = np.array([x, y]) + 0.5, max(side, _SMALLEST) / 2
                low, high = (
                    np.clip(corner, -10.0, outside) for corner in (centre - half, centre + half)
                )
                box = Rectangle(
                    (left + low[0], top + low[1]),
                    *(high - low),
                    fill=False,
                    edgecolor=WINDOW,
                    linewidth=72 * self.scale * line_width(sigma) / DPI,
                    joinstyle="miter",
                )
                axis.add_patch(box)
                tile = Bbox([[left, top], [left + width, top + height]])
                box.set_clip_path(None)
                box.set_clip_box(TransformedBbox(tile, axis.transData))

    def _print(self, axis: Axes) -> None:
        margin, line = self._pixels(_MARGIN), self._pixels(_LINE)
        tile_height, tile_width = self.tiles.shape[2:]

        def write(x: float, y: float, text: str, size: float, **options: Any) -> None:
            axis.text(x, y, text, size=size, parse_math=False, **options)

        if self.title:
            write(margin, margin + line / 2, self.title, _LARGE, va="center")
        for left, text in zip(self.lefts, self.headings, strict=False):
            middle = left + tile_width / 2
            write(middle, self.tops[0] - line / 2, text, _SMALL, va="center", ha="center")
        for top, text in zip(self.tops, self.labels, strict=False):
            write(margin, top + tile_height / 2, text, _SMALL, va="center")
        for top, texts in zip(self.tops, self.captions, strict=False):
            below = top + tile_height + line / 2
            for left, text in zip(self.lefts[:: self.groups[1]], texts, strict=False):
                write(left, below, text, _SMALL, va="center")

    def _pixels(self, inches: float) -> int:
        return math.ceil(inches * DPI / self.scale)


def _starts(number: int, size: int, group: int, first: int) -> list[int]:
    """Starts of ``number`` tiles of one size, with wider gaps between groups."""
    wide = _WIDE_GAP - _GAP if group > 1 else 0
    return [first + i * (size + _GAP) + i // group * wide for i in range(number)]


def _in_rows(tiles: np.ndarray, columns: int) -> np.ndarray:
    """Arrange (N, \\*) as (R, C, \\*), padded with NaN, in at most N columns."""
    check_at_least(1, columns=columns)
    columns = min(columns, len(tiles))
    rows = -(-len(tiles) // columns)
    filled = np.full((rows * columns, *tiles.shape[1:]), np.nan)
    filled[: len(tiles)] = tiles
    return filled.reshape(rows, columns, *tiles.shape[1:])


def _numbers(values: Images) -> np.ndarray:
    # torch warns of read-only arrays, such as mapped files.
    return as_array(values) if isinstance(values, Tensor) else np.asarray(values, np.float64)


def _images(name: str, images: Images) -> np.ndarray:
    tiles = _numbers(images)
    if tiles.ndim != 3 or not tiles.size:
        raise ValueError(f"{name} must be (N, B, A) with at least one pixel, got {tiles.shape}")
    _check_finite(name, tiles)
    if tiles.min() < 0 or tiles.max() > 1:
        raise ValueError(
            f"{name} must be from 0 to 1, got {tiles.min():.4g} to {tiles.max():.4g}: give the "
            "sigmoid of logits"
        )
    return tiles


def _canvases(canvases: Tensor) -> np.ndarray:
    if canvases.dim() != 4 or len(canvases) < 2 or not canvases.numel():
        raise ValueError(
            f"canvases must be (T + 1, N, B, A) with at least one glimpse, got "
            f"{tuple(canvases.shape)}"
        )
    drawn = as_array(canvases.detach().double().sigmoid())
    for t, canvas in enumerate(drawn):
        _check_finite(f"canvases at t = {t}", canvas)
    return drawn


def _check_finite(name: str, tiles: np.ndarray) -> None:
    wrong = np.flatnonzero(~np.isfinite(tiles).all((1, 2)))
    if len(wrong):
        raise ValueError(
            f"{name}: {len(wrong)} of {len(tiles)} images are not finite, first number {wrong[0]}: "
            "remove them"
        )


def _places(windows: Windows | None, drawn: np.ndarray) -> np.ndarray:
    """x, y, side and sigma in each canvas, (T + 1, N, 4); NaN in the empty one."""
    boxes = np.full((*drawn.shape[:2], 4), np.nan)
    if windows is None:
        return boxes
    places = as_array(windows.places)
    # The stride of a single filter has no effect.
    side = (windows.size - 1) * places[..., 2]
    boxes[1:] = np.stack([places[..., 0], places[..., 1], side, places[..., 3]], -1)
    return boxes


def _parts(images: Images | Iterable[Images]) -> Iterator[Images]:
    arrays = [images] if isinstance(images, Tensor | np.ndarray) else images
    for array in arrays:
        for first in range(0, len(array), _CHUNK):
            yield array[first : first + _CHUNK]
