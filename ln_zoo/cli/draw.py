"""``ln-zoo draw``: images that a DRAW model generates, as a picture or as numbers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ln_zoo.cli.checks import check_file, check_least, check_picture, check_seed
from ln_zoo.zoo import trust

#: Images at once: those of MNIST then fill a picture of 2,800 pixels on a side.
_MOST = 10_000
#: Rows of a filmstrip.
_STRIPS = 5


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    trust.import_own(arguments)
    _draw(arguments)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ln-zoo draw",
        description="Draws samples of a DRAW model, in rows and columns of one picture. Each "
        "pixel is the probability of white.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        default="draw.layernorm",
        help="a published model's name, a card folder, a hub id or a .ckpt file; default "
        "draw.layernorm",
    )
    trust.add_import_option(parser)
    parser.add_argument("--number", type=int, default=25, help="number of images; default 25")
    parser.add_argument("--out", default="samples.png", help="picture to write (.png, .svg, .pdf)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers; default 0")
    parser.add_argument("--columns", type=int, help="images per row; default: as many as rows")
    parser.add_argument("--binary", action="store_true", help="sample each pixel as white or black")
    parser.add_argument(
        "--filmstrip",
        metavar="FILE",
        help=f"picture of the canvas along the glimpses, of the first {_STRIPS} images",
    )
    parser.add_argument(
        "--numbers",
        metavar="FILE",
        help=".npy file to write with the images, float32 (number, height, width)",
    )
    return parser


def _draw(arguments: argparse.Namespace) -> None:
    check_least(arguments, number=1)
    if arguments.number > _MOST:
        raise ValueError(f"--number must be at most {_MOST:,}, got {arguments.number}")
    if arguments.columns is not None:
        check_least(arguments, columns=1)
    check_seed(arguments)
    out = Path(arguments.out)
    filmstrip, numbers = (
        Path(given) if given else None for given in (arguments.filmstrip, arguments.numbers)
    )
    if numbers is not None:
        if numbers.suffix != ".npy":
            raise ValueError(f"--numbers {numbers} must end in .npy")
        check_file(numbers)
    check_picture("--out", out)
    if filmstrip is not None:
        check_picture("--filmstrip", filmstrip)

    # Here, since it takes seconds to import torch.
    import numpy as np

    from ln_zoo.callbacks.draw_samples import windows_of
    from ln_zoo.cli import stored
    from ln_zoo.cli.outputs import relative
    from ln_zoo.models import DRAW
    from ln_zoo.plots.draw import bernoulli, plot_filmstrip, plot_grid
    from ln_zoo.plots.pen import save

    model = stored.load_model_of(DRAW, arguments.model, "generates no images")
    drawn = model.generate_samples(arguments.number, arguments.seed, trace=filmstrip is not None)
    images = drawn.logits.sigmoid()
    if arguments.binary:
        images = bernoulli(images, arguments.seed)
    save(plot_grid(images, arguments.columns), out)
    print(f"picture: {relative(out)} ({len(images)} images)")
    if filmstrip is not None:
        assert drawn.trace is not None
        first = slice(_STRIPS)
        windows = windows_of(drawn.trace.write, model.network.write_size, first)
        save(plot_filmstrip(drawn.trace.canvases[:, first], windows), filmstrip)
        print(f"filmstrip: {relative(filmstrip)}")
    if numbers is not None:
        np.save(numbers, images.numpy())
        print(f"numbers: {relative(numbers)}")
