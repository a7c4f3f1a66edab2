"""``ln-zoo export``: a model as a file for other runtimes, checked against the model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ln_zoo.zoo import trust


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    trust.import_own(arguments)
    # Here, since it takes seconds to import torch, and wrong arguments are told before that.
    from ln_zoo.cli.outputs import relative
    from ln_zoo.export import check_request, export

    file = Path(arguments.out)
    check_request(file, arguments.format, arguments.form, arguments.opset, arguments.overwrite)
    from ln_zoo.cli import stored

    done = export(
        stored.load_model(arguments.model),
        file,
        format=arguments.format,
        form=arguments.form,
        part=arguments.part,
        opset=arguments.opset,
        overwrite=arguments.overwrite,
        name=arguments.model,
    )
    facts, found = done.facts, done.comparison
    print(f"{arguments.format}: {relative(file)} ({file.stat().st_size:,} bytes)")
    states = facts["states"]
    for name, shape in facts["inputs"].items():
        kind = f"state, next: {states[name]}" if name in states else "input"
        print(f"  {kind:28} {name} ({', '.join(map(str, shape))})")
    outputs = [name for name in facts["outputs"] if name not in states.values()]
    print(f"  {'outputs':28} {', '.join(outputs)}")
    runs = "; ".join(", ".join(f"{axis}={n}" for axis, n in each.items()) for each in found.sizes)
    print(
        f"largest difference from the model: {found.difference:.1e} on values up to "
        f"{found.scale:.2g}; error against float64 {found.ratio:.2f} of what is allowed "
        f"(random inputs, {runs})"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ln-zoo export",
        description="Writes a model's inference to a file that runs without ln_zoo. The file is "
        "run on random inputs of several lengths and batch sizes and compared with the model "
        "before it is kept.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", help="a published model's name, a card folder, a hub id or a .ckpt file"
    )
    trust.add_import_option(parser)
    parser.add_argument(
        "--format",
        default="onnx",
        help="file format: onnx, pt2 for torch.export, or pte for ExecuTorch; default onnx",
    )
    parser.add_argument(
        "--form",
        default="step",
        help="step: one time step, with states as inputs and outputs; sequence: all "
        "steps, any number of them; default step",
    )
    parser.add_argument(
        "--part",
        help="which part to export, for models with several, such as captions; default: the first",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="file to write")
    parser.add_argument("--opset", type=int, help="ONNX opset; default 20")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    return parser
