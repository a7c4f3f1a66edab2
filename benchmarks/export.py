"""Exported files: how far each is from its model, and how long a step takes in each runtime.

python -m benchmarks.export table --csv docs/figures/export.csv
python -m benchmarks.export steps --csv docs/figures/export_steps.csv
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ln_zoo
from benchmarks import runner
from ln_zoo import GRU, LSTM, GRUCell, LayerNorm, LSTMCell
from ln_zoo.export import FORMATS, FORMS, ExportError, export, parts_of
from ln_zoo.zoo.catalog import card_folders

#: Examples N and hidden units H, which are the inputs too.
SIZES = ((1, 128), (16, 128))
BASELINE = "torch"


def table(names: Sequence[str], path: Path) -> None:
    """Exports published models in every part, form and format; adds a row to a CSV file for each.

    Rows that the file holds already are left as they are.
    """
    done = set()
    if path.exists():
        with path.open(newline="") as file:
            done = {(r["model"], r["part"], r["form"], r["format"]) for r in csv.DictReader(file)}
    for name in names:
        model = ln_zoo.load(name)
        for part in parts_of(model):
            for form in FORMS:
                for format in FORMATS:
                    if (name, part, form, format) in done:
                        continue
                    row = _exported(model, name, part, form, format)
                    print(row, flush=True)
                    new = not path.exists()
                    with path.open("a", newline="") as file:
                        writer = csv.DictWriter(file, fieldnames=list(row), lineterminator="\n")
                        if new:
                            writer.writeheader()
                        writer.writerow(row)


def _exported(model: nn.Module, name: str, part: str, form: str, format: str) -> dict[str, Any]:
    row = {"model": name, "part": part, "form": form, "format": format}
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = export(model, Path(folder) / "a", format=format, form=form, part=part)  # type: ignore[arg-type]
        except ExportError as error:
            return row | {"difference": "", "largest": "", "note": str(error)}
        found = done.comparison
        return row | {
            "difference": f"{found.difference:.1e}",
            "largest": f"{found.scale:.2g}",
            "note": "",
        }


def steps(sizes: Sequence[tuple[int, int]], given: argparse.Namespace) -> Iterator[runner.Row]:
    """Times one step of each contestant, interleaved; ratios are to torch's own cell."""
    for cell in ("LSTM", "GRU"):
        for examples, hidden in sizes:
            with tempfile.TemporaryDirectory() as folder:
                calls = _contestants(cell, examples, hidden, Path(folder))
                size = {"N": examples, "H": hidden}
                for row in runner.compare(calls, BASELINE, size, given):
                    yield {"cell": cell} | row


def _contestants(
    cell: str, examples: int, hidden: int, folder: Path
) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    layers: dict[str, Any] = {
        "LSTM": (nn.LSTMCell, LSTMCell, LSTM),
        "GRU": (nn.GRUCell, GRUCell, GRU),
    }
    theirs, ours, layer = layers[cell]
    x = torch.randn(examples, hidden)
    h = torch.zeros(examples, hidden)
    state = (h, h.clone()) if cell == "LSTM" else h

    def step(module: nn.Module) -> Callable[[], object]:
        module = module.eval()

        def call() -> object:
            with torch.no_grad():
                return module(x, state)

        return call

    return {
        BASELINE: step(theirs(hidden, hidden)),
        "LayerNorm, ln_zoo": step(ours(hidden, hidden, norm=LayerNorm())),
        "LayerNorm, onnxruntime": _in_onnxruntime(
            ours(hidden, hidden, norm=LayerNorm()).eval(), x, state, folder / "a.onnx"
        ),
        "none, onnxruntime": _in_onnxruntime(
            layer(hidden, hidden).eval(), x, state, folder / "b.onnx"
        ),
    }


def _in_onnxruntime(module: nn.Module, x: Tensor, state: Any, file: Path) -> Callable[[], object]:
    import onnxruntime

    export(module, file, format="onnx", form="step")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    states = state if isinstance(state, tuple) else (state,)
    if not isinstance(module, nn.RNNCellBase):
        states = tuple(s.unsqueeze(0) for s in states)
    names = [each.name for each in session.get_inputs()]
    arrays = dict(zip(names, (a.numpy() for a in (x, *states)), strict=True))
    return lambda: session.run(None, arrays)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one of the two from the command line."""
    parser = runner.parser("export", __doc__, rounds=200, seconds=20.0)
    parser.add_argument("what", choices=("table", "steps"))
    parser.add_argument("--models", nargs="*", help="published models; default: all")
    arguments = runner.parse(parser, argv)
    if arguments.what == "table":
        if arguments.csv is None:
            parser.error("table needs --csv FILE: rows that the file has are not measured again")
        table(arguments.models or sorted(card_folders()), arguments.csv)
    else:
        found = list(steps(SIZES, arguments))
        runner.write(found, arguments.csv)
        runner.print_head(["cell", "N", "H", "contestant", "us", "ratio (quartiles)"])
        for row in found:
            first = [row[column] for column in ("cell", "N", "H", "contestant")]
            runner.print_row([*first, f"{1e6 * row['seconds']:.0f}", runner.ratio(row)])


if __name__ == "__main__":
    main()
