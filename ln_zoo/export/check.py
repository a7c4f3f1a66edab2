"""Compare exported files with their model, up to float32 rounding."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ln_zoo.export.errors import ExportError
from ln_zoo.export.files import FileRunner, examples
from ln_zoo.export.paths import STEP, Path, Sizes, Tensors

#: Sizes of comparisons, including one example and one step.
SIZES: tuple[dict[str, int], ...] = (
    {"N": 1, "T": 1, "S": 1, "U": 1},
    {"N": 2, "T": 5, "S": 4, "U": 3},
    {"N": 4, "T": 12, "S": 7, "U": 9},
)
#: Largest allowed error of a file relative to the model's in float32, and the number of runs that
#: measure the model's: one plain, the others with perturbed last bits of inputs and weights. The
#: largest error over all sizes counts, since a single one may be small by chance. onnxruntime is
#: less exact than torch: on [-8, 8] the error of its tanh is up to 2.6e-7, 8.5 times torch's, of
#: its sigmoid 1.6 times (1.32.0, AVX2, 200,000 random numbers); for DRAW's canvas it was 5.5 times
#: ours.
_FACTOR, _RUNS = 10.0, 4
_ULP = torch.finfo(torch.float32).eps


class Comparison(NamedTuple):
    """Comparison of a file with its model."""

    difference: float  #: largest absolute difference of an output from the model's in float32
    scale: float  #: largest absolute value of the outputs
    #: Largest error of an output against float64, divided by the allowed error: 10 times that of
    #: the model in float32. Above 1 the file is wrong.
    ratio: float
    sizes: tuple[Sizes, ...]  #: sizes of the runs


def compare(
    model: nn.Module, path: Path, run: FileRunner, sizes: tuple[Sizes, ...] = SIZES
) -> Comparison:
    """Compare a file with its model, both on random inputs.

    A step form runs T times, with its states fed back, against the model's run over T steps.

    Raises:
        ExportError: if the file's error against float64 is larger than rounding explains.
    """
    double = copy.deepcopy(model).double()
    difference = scale = 0.0
    errors, allowed = dict.fromkeys(path.outputs, 0.0), dict.fromkeys(path.outputs, _ULP)
    with torch.no_grad():
        for seed, each in enumerate(sizes):
            given = _given(path, each, seed)
            found = _run_file(path, run, given, each)
            exact = path.reference(double, _double(given))
            own = list(_own(model, path, given))
            for name, value in exact.items():
                if found[name].shape != value.shape:
                    raise ExportError(
                        f"the file's output {name} must be {tuple(value.shape)}, got "
                        f"{tuple(found[name].shape)}"
                    )
                difference = max(difference, _largest(found[name] - own[0][name]))
                scale = max(scale, _largest(value))
                errors[name] = max(errors[name], _error(found[name], value))
                allowed[name] = max(allowed[name], *(_error(one[name], value) for one in own))
    ratio = max(errors[name] / (allowed[name] * _FACTOR) for name in errors)
    if not ratio <= 1:
        raise ExportError(
            f"the file differs from the model by up to {difference:.1e} on outputs of up to "
            f"{scale:.1e}, {ratio:.1f} times what rounding explains"
        )
    return Comparison(difference, scale, ratio, sizes)


def _given(path: Path, sizes: Sizes, seed: int) -> dict[str, Tensor]:
    if not path.is_step:
        return examples(path, sizes, seed)
    steps = [examples(path, sizes, seed * 1000 + t) for t in range(sizes["T"])]
    return {
        name: steps[0][name] if spec.constant else torch.stack([step[name] for step in steps])
        for name, spec in path.inputs.items()
        if name not in path.states and name != STEP
    }


def _run_file(path: Path, run: FileRunner, given: Tensors, sizes: Sizes) -> dict[str, Tensor]:
    if not path.is_step:
        return run(given)
    states = path.start(sizes)
    found: dict[str, list[Tensor]] = {name: [] for name in path.outputs}
    for t in range(sizes["T"]):
        inputs = {}
        for name, spec in path.inputs.items():
            if name in states:
                inputs[name] = states[name]
            elif name == STEP:
                inputs[name] = torch.tensor(t)
            else:
                inputs[name] = given[name] if spec.constant else given[name][t]
        for name, value in run(inputs).items():
            found[name].append(value)
        states = {name: found[after][-1] for name, after in path.states.items()}
    last = set(path.states.values())
    return {name: of[-1] if name in last else torch.stack(of) for name, of in found.items()}


def _own(model: nn.Module, path: Path, given: Tensors) -> Iterator[dict[str, Tensor]]:
    """The model's results in float32: plain, then with perturbed last bits."""
    yield path.reference(model, given)
    generator = torch.Generator().manual_seed(0)

    def perturbed(a: Tensor) -> Tensor:
        if not a.is_floating_point():
            return a
        shift = 2 * torch.rand(a.shape, generator=generator, dtype=torch.float64) - 1
        return (a.double() * (1 + _ULP * shift)).float()

    for _ in range(1, _RUNS):
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.copy_(perturbed(parameter))
        yield path.reference(other, {name: perturbed(a) for name, a in given.items()})


def _double(given: Tensors) -> dict[str, Tensor]:
    return {name: a.double() if a.is_floating_point() else a for name, a in given.items()}


def _largest(a: Tensor) -> float:
    return float(a.abs().max())


def _error(found: Tensor, exact: Tensor) -> float:
    """Relative error in the Euclidean norm; infinite for NaN."""
    error = float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))
    return error if error == error else float("inf")
