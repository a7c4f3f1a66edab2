"""Write and run exported files in each format."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from ln_zoo._version import __version__
from ln_zoo.export.errors import ExportError, check_installed
from ln_zoo.export.paths import Path, Sizes, Tensors

#: Key of the metadata in a file.
_FACTS = "ln_zoo"
#: Oldest opset of torch's exporter, newest tested, and default.
OLDEST_OPSET, NEWEST_OPSET, DEFAULT_OPSET = 18, 23, 20
#: Sizes of the traced example: all different, and not 1, which torch would treat as static.
_SIZES = {"N": 3, "T": 7, "S": 5, "U": 6}
#: Upper bound of dynamic axes in ExecuTorch, which plans memory ahead of time.
_MAX_SIZE = 64

#: Runs a written file: inputs by name to outputs by name.
FileRunner = Callable[[Tensors], dict[str, Tensor]]


def write_pt2(path: Path, file: FilePath, facts: dict[str, Any], opset: int) -> None:
    """Write a program for `torch.export.load`, which does not need ln_zoo."""
    with _tracing():
        program = torch.export.export(
            path.module, _example(path), dynamic_shapes=(_free_axes(path),)
        )
        torch.export.save(program, file, extra_files={f"{_FACTS}.json": json.dumps(facts)})


def run_pt2(path: Path, file: FilePath) -> FileRunner:
    """Load the file as a function."""
    with _quiet():
        module = torch.export.load(file).module()

    def run(inputs: Tensors) -> dict[str, Tensor]:
        return dict(zip(path.outputs, module(*inputs.values()), strict=True))

    return run


def write_onnx(path: Path, file: FilePath, facts: dict[str, Any], opset: int) -> None:
    """Write ONNX with this opset and names of inputs, outputs and dynamic axes."""
    with _tracing():
        program = torch.onnx.export(
            path.module,
            _example(path),
            input_names=list(path.inputs),
            output_names=list(path.outputs),
            dynamic_shapes=(_free_axes(path),),
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    found = program.model.opset_imports.get("")
    if found != opset:
        raise ExportError(f"opset must be {found} for this network, got {opset}")
    program.model.metadata_props[_FACTS] = json.dumps(facts)
    program.save(file, external_data=False)


def run_onnx(path: Path, file: FilePath) -> FileRunner:
    """Load the file as a function, in onnxruntime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def run(inputs: Tensors) -> dict[str, Tensor]:
        arrays = {name: a.numpy() for name, a in inputs.items()}
        found = session.run(list(path.outputs), arrays)
        return {name: torch.from_numpy(a) for name, a in zip(path.outputs, found, strict=True)}

    return run


def write_pte(path: Path, file: FilePath, facts: dict[str, Any], opset: int) -> None:
    """Write an ExecuTorch program for portable kernels; dynamic sizes are at most 64."""
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
    from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass

    free = {n for spec in path.inputs.values() for n in spec.shape if isinstance(n, str)}
    facts = facts | {"largest": dict.fromkeys(sorted(free), _MAX_SIZE)}
    with _tracing():
        program = torch.export.export(
            path.module, _example(path), dynamic_shapes=(_free_axes(path, _MAX_SIZE),)
        )
        if any(node.target is torch.ops.higher_order.scan for node in program.graph.nodes):
            raise ExportError("ExecuTorch has no loop over time: give the step form")
        # Its IR check runs the program, which would make dynamic sizes static.
        edge = to_edge(
            program,
            constant_methods={_FACTS: json.dumps(facts)},
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        made = edge.to_executorch(
            ExecutorchBackendConfig(sym_shape_eval_pass=ConstraintBasedSymShapeEvalPass())
        )
    file.write_bytes(made.buffer)


def run_pte(path: Path, file: FilePath) -> FileRunner:
    """Load the file as a function, in ExecuTorch's runtime on the CPU."""
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(file)
    method = program.load_method("forward")

    def run(inputs: Tensors) -> dict[str, Tensor]:
        found = method.execute([a.contiguous() for a in inputs.values()])
        # The next call reuses the memory.
        return {name: a.clone() for name, a in zip(path.outputs, found, strict=True)}

    return run


def read_facts(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Metadata of an exported file: model, form, names, shapes, states.

    Raises:
        ExportError: if the file has no metadata.
    """
    found = None
    if FilePath(file).suffix == ".pte":
        check_installed("reading ExecuTorch", "executorch", extra="executorch")
        from executorch.runtime import Runtime

        program = Runtime.get().load_program(FilePath(file))
        if _FACTS in program.method_names:
            (found,) = program.load_method(_FACTS).execute([])
    elif FilePath(file).suffix == ".onnx":
        check_installed("reading ONNX", "onnx", extra="export")
        import onnx

        properties = onnx.load(os.fspath(file)).metadata_props
        found = {each.key: each.value for each in properties}.get(_FACTS)
    else:
        extra = {f"{_FACTS}.json": ""}
        with _quiet():
            torch.export.load(os.fspath(file), extra_files=extra)
        found = extra[f"{_FACTS}.json"]
    if not found:
        raise ExportError(f"{file} has no metadata: it is not a file of ln-zoo export")
    facts: dict[str, Any] = json.loads(found)
    return facts


def artifact_metadata(path: Path, name: str, form: str, part: str) -> dict[str, Any]:
    """Metadata of a file; see `read_facts`."""
    return {
        "ln_zoo": __version__,
        "model": name,
        "form": form,
        "part": part,
        "inputs": {name: list(spec.shape) for name, spec in path.inputs.items()},
        "outputs": list(path.outputs),
        "states": path.states,
        "initial": {name: value.tolist() for name, value in path.initial.items()},
    }


def examples(path: Path, sizes: Sizes, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs of these sizes, by name."""
    generator = torch.Generator().manual_seed(seed)
    return {name: spec.example(sizes, generator) for name, spec in path.inputs.items()}


def _example(path: Path) -> tuple[Tensor, ...]:
    return tuple(examples(path, _SIZES).values())


def _free_axes(path: Path, most: int | None = None) -> tuple[dict[int, Any], ...]:
    axes = {letter: torch.export.Dim(letter, max=most) for letter in _SIZES}
    return tuple(
        {i: axes[n] for i, n in enumerate(spec.shape) if isinstance(n, str)}
        for spec in path.inputs.values()
    )


@contextmanager
def _tracing() -> Iterator[None]:
    """`_quiet`, after a reset of the compiler.

    Loops share a function of torch, whose guards on sizes of one export fail for the next.
    """
    torch.compiler.reset()
    with _quiet():
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Without gradients and warnings of exporters."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield
