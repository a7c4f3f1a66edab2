"""Creation of figures, scales of axes, and picture files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ln_zoo.utils.files import naming, quantize_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Pixels per inch of pictures of fixed layout.
DPI = 150


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """Create a figure in inches that places its axes itself.

    It is not registered with pyplot, which keeps global state and may need a display.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title)
    return figure


def save_figure(
    figure: Figure, picture: Path, dpi: int = DPI, quantize: bool = False, title: str = ""
) -> None:
    """Write a figure and create its folder. Equal figures make equal files.

    The suffix of ``picture`` names the format; ValueError if matplotlib does not know it. ``dpi``
    is pixels per inch; ``quantize`` reduces a PNG to 256 colours, as
    `ln_zoo.utils.files.quantize_png`; ``title`` is stored in SVG and PDF.
    """
    import matplotlib
    from matplotlib.backend_bases import FigureCanvasBase

    kind = picture.suffix.lower()
    if kind.removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise ValueError(f"{picture} does not name a picture: end it in .svg, .png or .pdf")
    picture.parent.mkdir(parents=True, exist_ok=True)
    dates: dict[str, dict[str, str | None]]
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    metadata = dates[kind] | ({"Title": title} if title else {}) if kind in dates else None
    with naming(picture), matplotlib.rc_context({"svg.hashsalt": "ln_zoo"}):
        figure.savefig(picture, dpi=dpi, metadata=metadata)
        if quantize:
            quantize_png(picture)


def set_log_scale(axes: Axes, direction: Literal["x", "y"] = "y") -> None:
    """Make an axis logarithmic; ticks of a short axis are plain numbers (6, not 6×10⁰).

    An x axis of less than three decades has ticks at 1, 2 and 5 of each.
    """
    from matplotlib.ticker import LogFormatter, LogLocator, NullFormatter

    class Plain(LogFormatter):
        def __call__(self, value: float, position: int | None = None) -> str:
            # The base class returns an empty label if there is no room.
            return f"{value:g}" if super().__call__(value, position) else ""

    axes.set(**{f"{direction}scale": "log"})
    axis = axes.xaxis if direction == "x" else axes.yaxis
    axis.set_minor_formatter(Plain(minor_thresholds=(1.0, 0.8)))
    low, high = axis.get_view_interval()
    if direction == "x" and high < 1e3 * low:  # labels in a row leave room for three per decade
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    elif low > 1e-3 and high < 1e4:
        axis.set_major_formatter(Plain())
