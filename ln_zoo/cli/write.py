"""``ln-zoo write``: text in handwriting, as a picture or as strokes."""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ln_zoo.cli.checks import check_file, check_seed
from ln_zoo.zoo import trust

if TYPE_CHECKING:
    from torch import Tensor

    from ln_zoo.models import Handwriting
    from ln_zoo.models.handwriting import Line


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    trust.import_own(arguments)
    _write(arguments)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ln-zoo write",
        description="Writes text as handwriting with a trained model: a page of lines, wrapped "
        "between words. Line breaks and blank lines of the text are kept.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "text", nargs="*", metavar="TEXT", help="texts to write, each on a new line"
    )
    parser.add_argument("--file", help="a text file to use instead of TEXT")
    parser.add_argument(
        "--model",
        required=True,
        help="a published model's name, a card folder, a hub id or a .ckpt file",
    )
    trust.add_import_option(parser)
    parser.add_argument("--out", default="writing.svg", help="picture to write (.svg, .png, .pdf)")
    parser.add_argument(
        "--bias",
        type=float,
        default=0.7,
        help="how strongly to prefer likely strokes: 0 samples from the model as it is, "
        "1 is very neat; default 0.7",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers; default 0")
    parser.add_argument("--samples", type=int, default=1, help="how many versions to write")
    parser.add_argument(
        "--width",
        type=int,
        default=40,
        metavar="CHARACTERS",
        help="largest number of characters in a line; default 40, more than in most "
        "handwritten lines",
    )
    parser.add_argument("--thickness", type=float, default=1.2, help="width of the pen, in points")
    parser.add_argument(
        "--prime",
        metavar="LINE",
        help="continue in the handwriting of a line: its id in IAM-OnDB, or a .npy or "
        ".npz file of its offsets (T, 3): dx, dy (upwards), and 1 where the pen is "
        "lifted",
    )
    parser.add_argument("--prime_text", help="text of the line in such a file")
    parser.add_argument("--data", help="folder of IAM-OnDB; default: $LN_ZOO_DATA/iam_ondb")
    parser.add_argument(
        "--show_prime", action="store_true", help="also draw that line, in grey, before each"
    )
    parser.add_argument(
        "--attention",
        metavar="FILE",
        help="picture to write of the window on the text, for the first line",
    )
    parser.add_argument(
        "--strokes",
        metavar="FILE",
        help="file to write with the offsets, in the units of the data: .json for all "
        "lines, .npy for one",
    )
    return parser


def _write(arguments: argparse.Namespace) -> None:
    _check_numbers(arguments)
    texts = _lines(arguments)
    out = Path(arguments.out)
    attention, strokes = (
        Path(given) if given else None for given in (arguments.attention, arguments.strokes)
    )
    number = sum(text is not None for text in texts)
    if strokes and strokes.suffix not in (".json", ".npy"):
        raise ValueError(f"--strokes {strokes} must end in .json or .npy")
    if strokes and strokes.suffix == ".npy" and number > 1:
        raise ValueError(f"--strokes {strokes} holds one line, and these are {number}: give .json")

    # Here, since it takes seconds to import torch.
    from ln_zoo.cli import stored
    from ln_zoo.cli.outputs import relative
    from ln_zoo.models import Handwriting
    from ln_zoo.plots.pen import check_picture, page, save
    from ln_zoo.plots.pen_maps import plot_window

    for picture in filter(None, (out, attention)):
        check_picture(picture)
    for path in filter(None, (out, attention, strokes)):
        check_file(path)
    model = stored.load_model_of(Handwriting, arguments.model, "does not write")
    prime = _prime(arguments, model)
    given = None if prime is None else prime[0]
    lines = _lines_written(model, texts, prime, arguments)
    rows = iter(lines)
    drawn = page(
        [None if text is None else next(rows).offsets for text in texts],
        given=given,
        show_given=arguments.show_prime,
        title="\n".join(text or "" for text in texts),
    )
    drawn.save(out, arguments.thickness)
    points = sum(len(line.offsets) for line in lines)
    count = f"{number} line{'s' * (number > 1)}"
    print(f"writing: {relative(out)} ({count}, {points:,} points)")
    if attention:
        first = lines[0]
        save(plot_window(first.offsets, first.phi, first.text, given=given), attention)
        print(f"attention: {relative(attention)}")
    if strokes:
        _save_strokes(lines, strokes)
        print(f"strokes: {relative(strokes)}")
    _tell_cut(lines)


def _check_numbers(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.bias < math.inf:
        raise ValueError(f"--bias must be at least 0, got {arguments.bias}")
    if not 0 < arguments.thickness < math.inf:
        raise ValueError(f"--thickness must be a positive number, got {arguments.thickness}")
    check_seed(arguments)
    for name in ("width", "samples"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(arguments, name)}")


def _lines(arguments: argparse.Namespace) -> list[str | None]:
    """What each line of the page is to say; ``None`` is a blank one."""
    if bool(arguments.text) == bool(arguments.file):
        raise ValueError("give either the text to write, or a text file with --file")
    text = "\n".join(arguments.text)
    if arguments.file:
        try:
            text = Path(arguments.file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{arguments.file} is not text in UTF-8: {error}") from error
    lines: list[str | None] = []
    for paragraph in text.splitlines():
        wrapped = textwrap.wrap(paragraph.strip(), arguments.width, break_long_words=False)
        lines += wrapped or [None]
    if not any(lines):
        raise ValueError("there is nothing to write: the text is empty")
    # Versions of a page are set apart, those of a line lie one below the other.
    between: list[str | None] = [None] if len(lines) > 1 else []
    return lines + (arguments.samples - 1) * (between + lines)


def _lines_written(
    model: Handwriting,
    texts: Sequence[str | None],
    prime: tuple[Tensor, str] | None,
    arguments: argparse.Namespace,
) -> list[Line]:
    """The lines that are not blank; what the model warns of is said in one line each."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines = model.write(
            [text for text in texts if text is not None],
            bias=arguments.bias,
            prime=prime,
            generator=torch.Generator().manual_seed(arguments.seed),
        )
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            print(f"note: {warning.message}", file=sys.stderr)
    return lines


def _prime(arguments: argparse.Namespace, model: Handwriting) -> tuple[Tensor, str] | None:
    """The offsets and the text of the line whose hand is to be taken."""
    if arguments.prime is None:
        if arguments.prime_text or arguments.show_prime:
            raise ValueError("--prime_text and --show_prime need a line given with --prime")
        return None
    path, text = Path(arguments.prime), arguments.prime_text
    if path.suffix in (".npy", ".npz"):
        offsets = _read_offsets(path)
    else:
        offsets, known = _stored_line(arguments.prime, arguments.data, model)
        text = text or known
    if not text:
        raise ValueError(f"--prime {path} needs --prime_text: what that line says")
    # The next text is a word of its own.
    return offsets, f"{text.rstrip()} "


def _stored_line(name: str, folder: str | None, model: Handwriting) -> tuple[Tensor, str]:
    """Offsets and text of a line of IAM-OnDB, in the units that the model was trained on."""
    from ln_zoo.cli.names import nearest
    from ln_zoo.data.handwriting import LineSet
    from ln_zoo.data.iam_ondb import IAMOnDB

    data = IAMOnDB(folder)
    sets = data.read()
    # Offsets that were not scaled had been divided by the median step of their line.
    per_line = bool((model.offset_mean == 0).all() and (model.offset_std == 1).all())
    for lines in sets.values():
        if name in lines.line_id:
            i = lines.line_id.index(name)
            return LineSet(lines, per_line=per_line).offsets(i)[1:], lines.text[i]
    known = (line for lines in sets.values() for line in lines.line_id)
    raise ValueError(f"{data.root} has no line {name!r}{nearest(name, known)}")


def _read_offsets(path: Path) -> Tensor:
    """Offsets (T, 3) of a file, the end of strokes last, without the null vector at the start."""
    import numpy as np
    import torch

    from ln_zoo.data.stroke_arrays import end_of_stroke_column

    try:
        content = np.load(path, allow_pickle=False)
        if path.suffix == ".npz":
            if len(content.files) != 1:
                raise ValueError(f"expected one array, it holds {content.files}")
            content = content[content.files[0]]
        line = np.asarray(content, np.float64)
    except (EOFError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as an array of offsets: {error}") from error
    if line.ndim != 2 or line.shape[1] != 3 or not np.isfinite(line).all():
        raise ValueError(f"{path} must hold finite offsets (T, 3), got {line.shape}")
    lift = end_of_stroke_column([line], str(path))
    line = line[:, [*(column for column in range(3) if column != lift), lift]]
    return torch.tensor(line if line[0, :2].any() else line[1:], dtype=torch.float32)


def _save_strokes(lines: Sequence[Line], path: Path) -> None:
    if path.suffix == ".npy":
        import numpy as np

        np.save(path, lines[0].offsets.numpy())
        return
    content = [
        {
            "text": line.text,
            "finished": line.finished,
            "offsets": [
                [round(dx, 4), round(dy, 4), int(up)] for dx, dy, up in line.offsets.tolist()
            ],
        }
        for line in lines
    ]
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def _tell_cut(lines: Sequence[Line]) -> None:
    for number, line in enumerate(lines, start=1):
        points = len(line.offsets)
        if not line.finished:
            print(
                f"note: line {number}, {line.text!r}, was cut at {points:,} points, before the end "
                "of its text",
                file=sys.stderr,
            )
        elif not points:
            print(f"note: line {number}, {line.text!r}, is empty", file=sys.stderr)
