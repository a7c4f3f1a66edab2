"""``ln-zoo write``: text as handwriting, in a picture or as offsets."""

from __future__ import annotations

import json
import sys
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ln_zoo.cli.commands import Count, OwnModules, Picture, Seed, at_least, positive, suffix
from ln_zoo.utils.files import read_bounded, relative

if TYPE_CHECKING:
    from torch import Tensor

    from ln_zoo.models import Handwriting
    from ln_zoo.models.handwriting import Line

_MAX_SAMPLES = 1_000
#: Characters from which writing takes long enough for a note: some ten seconds.
_LONG = 500
#: Bytes of a text file.
_LONGEST = 1_000_000


def write(
    text: list[str] = [],  # noqa: B006
    *,
    model: str,
    file: Path | None = None,
    import_: OwnModules = [],  # noqa: B006
    out: Picture = Path("writing.svg"),
    bias: Annotated[float, at_least(0)] = 0.7,
    seed: Seed = 0,
    samples: Annotated[int, at_least(1, most=_MAX_SAMPLES)] = 1,
    width: Count = 40,
    thickness: Annotated[float, positive] = 1.2,
    prime: str | None = None,
    prime_text: str | None = None,
    data: str | None = None,
    show_prime: bool = False,
    attention: Picture | None = None,
    strokes: Annotated[Path, suffix(".json", ".npy")] | None = None,
) -> None:
    """Writes text as handwriting with a trained model: a page of lines, wrapped between words.

    Line breaks and blank lines of the text are kept.

    Args:
        text: texts to write, each on a new line
        model: a published model's name, a card folder, a hub id or a .ckpt file
        file: a text file, in place of TEXT
        import_: module that defines a checkpoint's own class
        out: picture to write (.svg, .png, .pdf)
        bias: how strongly to prefer likely strokes: 0 samples from the model as it is, 1 is very
            neat
        seed: seed of the random numbers
        samples: how many versions to write
        width: largest number of characters in a line
        thickness: width of the pen, in points
        prime: continue in the handwriting of a line: its id in IAM-OnDB, or a .npy or .npz file of
            offsets (T, 3): dx, dy (upwards), and 1 if the pen is lifted
        prime_text: text of the line in such a file
        data: folder of IAM-OnDB; default: $LN_ZOO_DATA/iam_ondb
        show_prime: also draw that line, in grey, before each
        attention: picture of the window on the text, for the first line
        strokes: file of the offsets, in the units of the data: .json, or .npy for a single line
    """
    texts = _lines(text, file, width, samples)
    number = sum(text is not None for text in texts)
    if strokes and strokes.suffix == ".npy" and number > 1:
        raise ValueError(f"--strokes {strokes} can store one line, got {number}: give a .json file")
    if attention == out:
        raise ValueError(f"--attention and --out are both {out}: give two files")

    from ln_zoo.models import Handwriting
    from ln_zoo.plots.figures import save_figure
    from ln_zoo.plots.pen import page
    from ln_zoo.plots.pen_maps import plot_window
    from ln_zoo.zoo import loading

    characters = sum(len(text) for text in texts if text)
    if characters > _LONG:
        print(f"note: {characters:,} characters, which may take minutes", file=sys.stderr)
    network = loading.load_model_of(Handwriting, model, "does not write")
    start = _prime(prime, prime_text, show_prime, data, network)
    given = None if start is None else start[0]
    lines = _lines_written(network, texts, start, bias, seed)
    rows = iter(lines)
    drawn = page(
        [None if text is None else next(rows).offsets for text in texts],
        given=given,
        show_given=show_prime,
        title="\n".join(text or "" for text in texts),
    )
    drawn.save(out, thickness)
    points = sum(len(line.offsets) for line in lines)
    count = f"{number} line{'s' * (number > 1)}"
    print(f"writing: {relative(out)} ({count}, {points:,} points)")
    if attention:
        first = lines[0]
        save_figure(plot_window(first.offsets, first.phi, first.text, given=given), attention)
        print(f"attention: {relative(attention)}")
    if strokes:
        _save_strokes(lines, strokes)
        print(f"strokes: {relative(strokes)}")
    _note_cut(lines)


def _lines(given: list[str], file: Path | None, width: int, samples: int) -> list[str | None]:
    if bool(given) == bool(file):
        raise ValueError("give either the text to write, or a text file with --file")
    text = "\n".join(given)
    if file:
        try:
            text = read_bounded(file, _LONGEST).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--file {file} cannot be read as text in UTF-8: {error}") from error
    lines: list[str | None] = []
    for paragraph in text.splitlines():
        wrapped = textwrap.wrap(paragraph.strip(), width, break_long_words=False)
        lines += wrapped or [None]
    if not any(lines):
        raise ValueError("the text is empty")
    # A blank line separates versions of several lines.
    between: list[str | None] = [None] if len(lines) > 1 else []
    return lines + (samples - 1) * (between + lines)


def _lines_written(
    model: Handwriting,
    texts: Sequence[str | None],
    prime: tuple[Tensor, str] | None,
    bias: float,
    seed: int,
) -> list[Line]:
    """Write the lines that are not blank; print warnings of the model as notes."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines = model.write(
            [text for text in texts if text is not None],
            bias=bias,
            prime=prime,
            generator=torch.Generator().manual_seed(seed),
        )
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            print(f"note: {warning.message}", file=sys.stderr)
    return lines


def _prime(
    prime: str | None, text: str | None, show: bool, folder: str | None, model: Handwriting
) -> tuple[Tensor, str] | None:
    if prime is None:
        if text or show:
            raise ValueError("--prime_text and --show_prime need --prime")
        return None
    path = Path(prime)
    if path.suffix in (".npy", ".npz"):
        from ln_zoo.data.pen.files import read_offsets

        offsets = read_offsets(path)
    else:
        offsets, known = _stored_line(prime, folder, model)
        text = text or known
    if not text:
        raise ValueError(f"--prime {path} needs --prime_text, the text of that line")
    # A space separates it from the next word.
    return offsets, f"{text.rstrip()} "


def _stored_line(name: str, folder: str | None, model: Handwriting) -> tuple[Tensor, str]:
    """Offsets and text of a line of IAM-OnDB, in the units that the model was trained on."""
    from ln_zoo.data import IAMOnDB, LineSet
    from ln_zoo.utils.names import nearest

    data = IAMOnDB(folder)
    sets = data.read()
    # Without scaling, offsets were divided by the median step of their line.
    per_line = bool((model.offset_mean == 0).all() and (model.offset_std == 1).all())
    for lines in sets.values():
        if name in lines.line_id:
            i = lines.line_id.index(name)
            return LineSet(lines, per_line=per_line).offsets(i)[1:], lines.text[i]
    known = (line for lines in sets.values() for line in lines.line_id)
    raise ValueError(f"{data.root} has no line {name!r}{nearest(name, known)}")


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


def _note_cut(lines: Sequence[Line]) -> None:
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
