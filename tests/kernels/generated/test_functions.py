"""What people write in cells and norms, each function forward and backward, and infinities."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accuracy import generic_loop
from engines import names_of
from kernels.generated.generated_case import assert_exact, gated_cell
from layer_results import randomised
from torch import Tensor
from torch.nn import functional as F

from ln_zoo.layers import RecurrentLayer
from ln_zoo.norms import Identity, LayerNorm

Function = Callable[[Tensor], Tensor]
#: By groups, each of which compiles once.
FUNCTIONS: dict[str, dict[str, Function]] = {
    "limits": {
        "abs": torch.abs,
        "sign": lambda a: torch.sign(a) * a * a,
        "clamp": lambda a: a.clamp(-0.3, 0.4),
        "minimum": lambda a: torch.minimum(a, a * a),
        "maximum": lambda a: torch.maximum(a, -0.3 * a),
        "where": lambda a: torch.where(a > 0.1, a, a * a),
        "masked_fill": lambda a: a.masked_fill(a < 0, 0.3),
        "conditions": lambda a: a * ((a > 0) & (a < 0.5)).float(),
    },
    "powers": {
        "exp": torch.exp,
        "log": lambda a: torch.log(a.abs() + 0.5),
        "log1p": lambda a: torch.log1p(a * a),
        "log1p of negative numbers": lambda a: torch.log1p(-torch.sigmoid(a)),
        "expm1": torch.expm1,
        "sqrt": lambda a: torch.sqrt(a * a + 0.1),
        "rsqrt": lambda a: torch.rsqrt(a * a + 0.1),
        "pow": lambda a: (a.abs() + 0.1) ** 1.7 + a**3 + (a.abs() + 0.5) ** -2,
        "sin": torch.sin,
        "cos": torch.cos,
        "erf": torch.erf,
    },
    "activations": {
        "softplus": F.softplus,
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu tanh": lambda a: F.gelu(a, approximate="tanh"),
        "elu": F.elu,
        "hardswish": F.hardswish,
        "leaky_relu": F.leaky_relu,
        "mish": F.mish,
        "in place": lambda a: (a * 2).add_(1).tanh_(),
        "a number in the code": lambda a: a * torch.tensor(0.3),
    },
    "rows": {
        "softmax": lambda a: a.softmax(-1),
        "logsumexp": lambda a: a - a.logsumexp(-1, keepdim=True),
        "cumax": lambda a: a.softmax(-1).cumsum(-1),
        "cumsum from the end": lambda a: 0.1 * a.flip(-1).cumsum(-1).flip(-1),
        "std": lambda a: a / a.std(-1, keepdim=True),
        "norm": lambda a: a / (a.norm(dim=-1, keepdim=True) + 0.1),
        "layer_norm": lambda a: F.layer_norm(a, a.shape[-1:]),
        "rms_norm": lambda a: F.rms_norm(a, a.shape[-1:]),
    },
}
ALONE = [(group, name) for group, functions in FUNCTIONS.items() for name in functions]


def check(function: Function, name: str) -> None:
    torch.manual_seed(0)
    layer = RecurrentLayer(3, 21, cell=gated_cell(function, name), norm=LayerNorm())
    assert_exact(randomised(layer, 0.4), torch.randn(5, 4, 3))


@pytest.mark.parametrize("group", FUNCTIONS)
def test_functions_together(group: str, chosen: list[Any]) -> None:
    functions = FUNCTIONS[group].values()
    check(lambda a: sum(f(a + 0.01 * i) for i, f in enumerate(functions)) / 4, group)
    assert "generated" in names_of(chosen)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), ALONE)
def test_functions_alone(group: str, name: str, chosen: list[Any]) -> None:
    check(FUNCTIONS[group][name], name)
    assert "generated" in names_of(chosen)


def test_infinity_and_nan_reach_the_same_results() -> None:
    """Pre-activations beyond the range of exp, infinite and NaN."""

    def function(a: Tensor) -> Tensor:
        return (a.exp() + a.expm1() + F.softplus(a) + a.sigmoid() + (a * a).log() + a.tanh()).abs()

    torch.manual_seed(0)
    layer = RecurrentLayer(3, 20, cell=gated_cell(function, "infinite"), norm=Identity())
    for value in (torch.inf, -torch.inf, torch.nan, 300.0, -300.0, 0.0):
        x = torch.randn(4, 3, 3)
        x[2, 1] = value
        found = []
        for run in (layer, generic_loop()(copy.deepcopy(layer))):
            given = x.clone().requires_grad_()
            out, _ = run(given)
            out.sum().backward()
            found.append((out.detach(), given.grad))
        for one, two in zip(*found, strict=True):
            assert torch.equal(one.isnan(), two.isnan()), value
            assert torch.equal(one.isinf(), two.isinf()), value
