"""Export models to other runtimes: `torch.export` programs, ONNX and ExecuTorch.

A *step form* maps the input of one time step and named states to outputs and the next states, for
streams and devices. A *sequence form* takes a sequence; its length and the number of examples are
dynamic. Each file is read back and compared with the model before it is kept.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import torch
from torch import nn

from ln_zoo.export import files
from ln_zoo.export.check import SIZES, Comparison, compare
from ln_zoo.export.errors import ExportError, check_installed
from ln_zoo.export.files import read_facts
from ln_zoo.export.loops import exportable
from ln_zoo.export.parts import Part, export_parts, map_path, parts_of, path_of, text_path
from ln_zoo.export.paths import FORMS, Form, Parts, Path, Sizes

__all__ = [
    "FORMATS",
    "FORMS",
    "Comparison",
    "ExportError",
    "Exported",
    "Part",
    "Parts",
    "Path",
    "check_request",
    "export",
    "export_parts",
    "exportable",
    "map_path",
    "parts_of",
    "path_of",
    "read_facts",
    "text_path",
]


class _Format(NamedTuple):
    suffix: str
    packages: tuple[str, ...]
    extra: str
    write: Any
    run: Any


_FORMATS = {
    "pt2": _Format(".pt2", (), "", files.write_pt2, files.run_pt2),
    "onnx": _Format(
        ".onnx", ("onnx", "onnxscript", "onnxruntime"), "export", files.write_onnx, files.run_onnx
    ),
    "pte": _Format(".pte", ("executorch",), "executorch", files.write_pte, files.run_pte),
}
FORMATS = tuple(_FORMATS)


class Exported(NamedTuple):
    """An exported file."""

    file: FilePath
    facts: dict[str, Any]  # its metadata; see `read_facts`
    comparison: Comparison  # the comparison with the model


def export(
    model: nn.Module,
    file: str | os.PathLike[str],
    *,
    format: str = "onnx",
    form: Form = "step",
    part: str | None = None,
    opset: int | None = None,
    overwrite: bool = False,
    name: str | None = None,
    sizes: tuple[Sizes, ...] = SIZES,
) -> Exported:
    """Export a model for inference, and check the file against the model.

    Args:
        model: a model with ``export_parts``, or a recurrent layer or cell of `ln_zoo.layers`; in
            evaluation mode, in float32, on the CPU.
        file: path of the file; written only after the check.
        format: ``"pt2"`` (`torch.export`; does not need ln_zoo), ``"onnx"``, or ``"pte"``
            (ExecuTorch; recurrent networks in step form only, at most 64 examples).
        form: ``"step"`` or ``"sequence"``.
        part: part of the model (`parts_of`); default: the first.
        opset: ONNX opset, 18 to 23; default 20.
        overwrite: replace an existing file.
        name: name of the model in the metadata; default: its class.
        sizes: sizes of each comparison: examples N, steps T, and others.

    Returns:
        The file, its metadata, and the comparison.

    Raises:
        ExportError: for an unknown format, form or part; an opset out of range; an existing file; a
            model in training mode or without this form; missing packages; if results differ by more
            than rounding.

    Example:
        >>> from ln_zoo.layers import GRU
        >>> from ln_zoo.norms import LayerNorm
        >>> layer = GRU(3, 5, norm=LayerNorm()).eval()
        >>> file = FilePath(tempfile.mkdtemp()) / "gru.pt2"
        >>> done = export(layer, file, format="pt2", form="step")
        >>> done.facts["inputs"]
        {'input': ['N', 3], 'h': [1, 'N', 5]}
        >>> program = torch.export.load(file).module()
        >>> output, h = program(torch.randn(2, 3), torch.zeros(1, 2, 5))
    """
    file = FilePath(file)
    check_request(file, format, form, opset, overwrite)
    kind = _FORMATS[format]
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for p in model.parameters()):
        raise ExportError("export needs a model in float32 on the CPU: call .float().cpu() first")
    makes = parts_of(model)
    path = path_of(model, form, part, operators=format == "onnx")
    facts = files.artifact_metadata(path, name or type(model).__name__, form, part or makes[0])
    with tempfile.TemporaryDirectory(dir=file.absolute().parent, prefix=".export-") as folder:
        written = FilePath(folder) / f"model{kind.suffix}"
        kind.write(path, written, facts, opset or files.DEFAULT_OPSET)
        comparison = compare(model, path, kind.run(path, written), sizes)
        os.replace(written, file)
    return Exported(file, facts, comparison)


def check_request(
    file: FilePath, format: str, form: str, opset: int | None, overwrite: bool
) -> None:
    """Check the arguments of `export` that do not need the model; raises `ExportError`."""
    for what, given, known in (("format", format, FORMATS), ("form", form, FORMS)):
        if given not in known:
            raise ExportError(f"{what} must be one of {', '.join(known)}, got {given!r}")
    if opset is not None and format != "onnx":
        raise ExportError(f"opset requires format onnx, got format {format}")
    oldest, newest = files.OLDEST_OPSET, files.NEWEST_OPSET
    if opset is not None and not oldest <= opset <= newest:
        raise ExportError(f"opset must be from {oldest} to {newest}, got {opset}")
    if file.is_dir() or (file.exists() and not overwrite):
        raise ExportError(f"{file} exists: choose another file, or allow overwriting")
    if not file.absolute().parent.is_dir():
        raise ExportError(f"no folder {file.parent} for {file.name}")
    kind = _FORMATS[format]
    if kind.packages:
        check_installed(f"the format {format}", *kind.packages, extra=kind.extra)
