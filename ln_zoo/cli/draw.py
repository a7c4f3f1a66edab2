"""``ln-zoo draw``: samples of a DRAW model, as a picture or as an array."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ln_zoo.cli.commands import Count, OwnModules, Picture, Seed, at_least, suffix
from ln_zoo.utils.files import relative

#: Images of MNIST then fill 2,800 x 2,800 pixels.
_MOST = 10_000
#: Rows of a filmstrip.
_STRIPS = 5


def draw(
    *,
    model: str = "draw.layernorm",
    import_: OwnModules = [],  # noqa: B006
    number: Annotated[int, at_least(1, most=_MOST)] = 25,
    out: Picture = Path("samples.png"),
    seed: Seed = 0,
    columns: Count | None = None,
    binary: bool = False,
    filmstrip: Picture | None = None,
    numbers: Annotated[Path, suffix(".npy")] | None = None,
) -> None:
    """Draws samples of a DRAW model, in rows and columns of one picture.

    Each pixel is the probability of white.

    Args:
        model: a published model's name, a card folder, a hub id or a .ckpt file
        import_: module that defines a checkpoint's own class
        number: number of images
        out: picture to write (.png, .svg, .pdf)
        seed: seed of the random numbers
        columns: images per row; default: as many as rows
        binary: sample each pixel as white or black
        filmstrip: picture of the canvas along the glimpses, of the first 5 images
        numbers: .npy file to write with the images, float32 (number, height, width)
    """
    import numpy as np

    from ln_zoo.callbacks.draw_samples import windows_of
    from ln_zoo.models import DRAW
    from ln_zoo.plots.draw import bernoulli, plot_filmstrip, plot_grid
    from ln_zoo.plots.figures import save_figure
    from ln_zoo.zoo import loading

    network = loading.load_model_of(DRAW, model, "generates no images")
    drawn = network.generate_samples(number, seed, trace=filmstrip is not None)
    images = drawn.logits.sigmoid()
    if binary:
        images = bernoulli(images, seed)
    save_figure(plot_grid(images, columns), out)
    print(f"picture: {relative(out)} ({len(images)} images)")
    if filmstrip is not None:
        assert drawn.trace is not None
        first = slice(_STRIPS)
        windows = windows_of(drawn.trace.write, network.network.write_size, first)
        save_figure(plot_filmstrip(drawn.trace.canvases[:, first], windows), filmstrip)
        print(f"filmstrip: {relative(filmstrip)}")
    if numbers is not None:
        np.save(numbers, images.numpy())
        print(f"numbers: {relative(numbers)}")
