"""``ln-zoo export``: writes models for other runtimes and checks the files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ln_zoo.cli.commands import OwnModules
from ln_zoo.utils.files import relative


def export(
    model: str,
    *,
    out: Path,
    import_: OwnModules = [],  # noqa: B006
    format: str = "onnx",
    form: Literal["step", "sequence"] = "step",
    part: str | None = None,
    opset: int | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a model's inference to a file that runs without ln_zoo.

    Before the file is kept, its outputs are compared with the model's on random inputs of several
    lengths and batch sizes.

    Args:
        model: a published model's name, a card folder, a hub id or a .ckpt file
        out: file to write
        import_: module that defines a checkpoint's own class
        format: file format: onnx, pt2 for torch.export, or pte for ExecuTorch
        form: step: one time step, with states as inputs and outputs; sequence: any number of steps
        part: which part to export, for models with several, such as captions; default: the first
        opset: ONNX opset; default: 20
        overwrite: replace an existing file
    """
    from ln_zoo.export import check_request
    from ln_zoo.export import export as write

    check_request(out, format, form, opset, overwrite)
    from ln_zoo.zoo.loading import load_model

    done = write(
        load_model(model), out, format=format, form=form, part=part, opset=opset,
        overwrite=overwrite, name=model,
    )  # fmt: skip
    facts, found = done.facts, done.comparison
    print(f"{format}: {relative(out)} ({out.stat().st_size:,} bytes)")
    states = facts["states"]
    for name, shape in facts["inputs"].items():
        kind = f"state, next: {states[name]}" if name in states else "input"
        print(f"  {kind:28} {name} ({', '.join(map(str, shape))})")
    outputs = [name for name in facts["outputs"] if name not in states.values()]
    print(f"  {'outputs':28} {', '.join(outputs)}")
    runs = "; ".join(", ".join(f"{axis}={n}" for axis, n in each.items()) for each in found.sizes)
    print(
        f"largest difference from the model: {found.difference:.1e} on values up to "
        f"{found.scale:.2g}; error against float64: {found.ratio:.2f} of the tolerance "
        f"(random inputs, {runs})"
    )
