"""The layer with a window over a text, and DRAW."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from accuracy import Results, assert_within, limits, moved
from outcomes import NORMS, check_all, devices, limited_to
from torch import Tensor, nn

from ln_zoo.layers import DRAWNetwork, WindowLSTM

every_norm = pytest.mark.parametrize("norm", NORMS)


def assert_right(
    template: nn.Module, inputs: dict[str, Tensor], device: str, kernels: str, autocast: bool
) -> None:
    """As exact as autograd's own loop in float32 on the same device, against float64 on the CPU."""

    def outcome(device: str, dtype: torch.dtype, kernels: str, run: int = 0) -> Results:
        layer = copy.deepcopy(template)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(moved(parameter, run))
        layer.to(device, dtype)
        given = {k: moved(a, run).to(device, dtype) for k, a in inputs.items()}
        leaves = dict(layer.named_parameters())
        enabled = autocast and dtype == torch.float32
        with limited_to(kernels), torch.autocast(device, torch.bfloat16, enabled=enabled):
            found = layer(*given.values())
        results = {k: a for k, a in tensors(found).items() if a.requires_grad}
        generator = torch.Generator().manual_seed(1)
        upstream = [
            torch.randn(a.shape, generator=generator, dtype=torch.float64).to(a)
            for a in results.values()
        ]
        gradients = torch.autograd.grad(
            [*results.values()], [*leaves.values()], upstream, allow_unused=True
        )
        results |= {f"d {n}": g for n, g in zip(leaves, gradients, strict=True) if g is not None}
        return {name: a.detach().double().cpu() for name, a in results.items()}

    exact = outcome("cpu", torch.float64, "0")
    found = outcome(device, torch.float32, kernels)
    allowed = limits(exact, lambda k: outcome(device, torch.float32, "0", k))
    assert_within(found, exact, allowed)


def tensors(found: Any, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of a named tuple, by name."""
    if isinstance(found, Tensor):
        return {prefix: found}
    if not isinstance(found, tuple):
        return {}
    names = getattr(found, "_fields", range(len(found)))
    return {
        k: a
        for name, part in zip(names, found, strict=True)
        for k, a in tensors(part, f"{prefix}.{name}").items()
    }


def window(norm: str, **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    steps, examples, characters = 40, 5, 12
    layer = WindowLSTM(3, 24, character_size=9, components=4, norm=NORMS[norm], **options)
    text = torch.eye(9)[torch.randint(9, (examples, characters))]
    text[1, 7:] = 0
    return layer, {"x": torch.randn(steps, examples, 3), "text": text}


def drawing(norm: str, **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 24, "latent_size": 4, "read_size": 3, "write_size": 4}
    layer = DRAWNetwork(9, 11, norm=NORMS[norm], **sizes | options)
    return layer, {"images": torch.rand(5, 9, 11), "noise": torch.randn(6, 5, 4)}


KINDS = {
    "window": lambda norm: window(norm),
    "window, softplus of all": lambda norm: window(
        norm, window_parameters="softplus", window_input="all"
    ),
    "window, peephole": lambda norm: window(norm, peephole=True),
    "DRAW": lambda norm: drawing(norm),
    "DRAW without attention": lambda norm: drawing(norm, read_size=None, write_size=None),
    "DRAW, peephole": lambda norm: drawing(norm, peephole=True),
}


@devices
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@every_norm
def test_as_exact_as_autograd(device: str, norm: str, kind: str, autocast: bool) -> None:
    layer, inputs = KINDS[kind](norm)
    if autocast and kind.startswith("DRAW"):
        pytest.skip("DRAW's products are in bfloat16 there, in another order in each engine")
    checks = {
        name: functools.partial(assert_right, layer.train(training), inputs, device, "1", autocast)
        for name, training in (("training", True), ("evaluation", False))
    }
    check_all(checks)
