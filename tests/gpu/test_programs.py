"""Layers within torch's tools: compilation, checkpointing, streams, graphs, mixed precision."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accuracy import FACTOR, error
from outcomes import (
    CELLS,
    NORMS,
    Problem,
    assert_as_exact,
    assert_right,
    check_all,
    devices,
    gpu,
    limited_to,
    outcome,
    ways,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ln_zoo.layers import LSTM
from ln_zoo.norms import LayerNorm

every_cell = pytest.mark.parametrize("cell", CELLS)
some_norms = pytest.mark.parametrize("norm", ["none", "layer", "batch"])
everything = ways(["1"], ["1", "cluster", "triton"])


@everything
@every_cell
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.usefixtures("compiler")
def test_compiles_whole(device: str, kernels: str, cell: str, norm: str) -> None:
    if kernels != "1" and norm != "layer":
        pytest.skip("one norm is enough for engines that are asked for")

    def compiled(layer: nn.Module, *arguments: Any) -> Any:
        return torch.compile(layer, fullgraph=True, backend="aot_eager")(*arguments)

    # More steps would only be more nodes where the generic loop is traced.
    problem = Problem(cell, norm, sizes=(5, 3, 6, 24), hx="strided")
    assert_right(problem, device, kernels, compiled)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize(("cell", "norm"), [("LSTM", "layer"), ("GRU", "none")])
@pytest.mark.usefixtures("compiler")
def test_compiles_with_inductor(device: str, cell: str, norm: str) -> None:
    def compiled(layer: nn.Module, *arguments: Any) -> Any:
        return torch.compile(layer, fullgraph=True)(*arguments)

    assert_right(Problem(cell, norm), device, "1", compiled)


@everything
@every_cell
@some_norms
def test_checkpointing(device: str, kernels: str, cell: str, norm: str) -> None:
    if norm == "batch":
        pytest.skip("statistics would be collected twice, as those of torch.nn.BatchNorm1d")

    def again(layer: nn.Module, *arguments: Any) -> Any:
        return checkpoint(layer, *arguments, use_reentrant=False)

    assert_right(Problem(cell, norm), device, kernels, again)


@everything
@every_cell
@some_norms
def test_moved_to_the_cpu_and_back(device: str, kernels: str, cell: str, norm: str) -> None:
    """What a layer remembers of a device is forgotten when it moves."""
    problem = Problem(cell, norm, training=norm != "batch")

    def moved(layer: nn.Module, x: Tensor, *arguments: Any) -> Any:
        layer(x)
        layer.cpu()
        layer(x.detach().cpu())
        return layer.to(device)(x, *arguments)

    assert_right(problem, device, kernels, moved)


@everything
@every_cell
def test_weights_change_between_calls(device: str, kernels: str, cell: str) -> None:
    """In place, as an optimizer changes them: nothing made of old weights is used again."""

    def changed(layer: nn.Module, *arguments: Any) -> Any:
        for factor in (0.5, 2.0):
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.mul_(factor)
            found = layer(*arguments)
        return found

    assert_right(Problem(cell, "layer"), device, kernels, changed)


@ways(["1"], ["1", "cluster", "triton"])
@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
@some_norms
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
@pytest.mark.parametrize("where", ["a side stream", "two streams"])
def test_streams(
    device: str, kernels: str, where: str, cell: str, norm: str, precision: str
) -> None:
    if device == "cpu":
        pytest.skip("CPUs have no streams")
    if norm == "none" and kernels == "1":
        pytest.skip("which of cuDNN's algorithms runs is not ours to say")
    problem = Problem(cell, norm, precision, sizes=(64, 8, 6, 24))
    if where == "a side stream":
        outcome(problem, device, kernels)  # kernels may be compiled on another stream
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = outcome(problem, device, kernels)
        assert_as_exact(problem, device, found)
        return
    layer = problem.layer().to(device).eval()
    xs = [torch.randn(64, 8, 6, device=device, requires_grad=True) for _ in range(2)]

    def step(x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16-mixed"):
            output = layer(x)[0]
        return output, *torch.autograd.grad(output.float().square().sum(), [x])

    with limited_to(kernels):
        alone = [step(x) for x in xs for _ in range(3)][2::3]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in xs]
        for _ in range(5):
            both = []
            for x, stream in zip(xs, streams, strict=True):
                with torch.cuda.stream(stream):
                    both.append(step(x))
            torch.cuda.synchronize()
            for own, other in zip(alone, both, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))


@gpu
@pytest.mark.parametrize("kernels", ["1", "cluster", "triton"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("norm", ["none", "layer", "rms"])
@every_cell
def test_a_users_graph_of_a_training_step(
    kernels: str, cell: str, norm: str, precision: str
) -> None:
    """Captured whole, and replayed with other numbers in the same memory."""
    problem = Problem(cell, norm, precision, sizes=(40, 8, 6, 24))
    layer = problem.layer().cuda()
    dtype = next(layer.parameters()).dtype
    x = torch.randn(40, 8, 6, device="cuda").to(dtype).requires_grad_()
    upstream = torch.randn(40, 8, 24, device="cuda").to(dtype)

    def step() -> tuple[Tensor, ...]:
        output = layer(x)[0]
        return output, *torch.autograd.grad(output, [x, *layer.parameters()], upstream)

    with limited_to(kernels):
        replay, captured = recorded(step)
        for seed in range(2):
            torch.manual_seed(seed)
            with torch.no_grad():
                x.copy_(torch.randn(40, 8, 6))
                for parameter in layer.parameters():
                    parameter.mul_(0.9)
            replay()
            found = [a.clone() for a in captured]
            expected = step()
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b)


def recorded(step: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], None], Any]:
    """A step as a CUDA graph: its replay, and the tensors that it fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph.replay, captured


@devices
@every_cell
@some_norms
def test_a_gradient_scaler(device: str, cell: str, norm: str) -> None:
    """Three steps in float16 autocast: no infinity, and weights near those of float32."""
    if device == "cpu":
        pytest.skip("float16 is for GPUs")
    problem = Problem(cell, norm, sizes=(16, 8, 6, 24))
    ends = []
    for enabled in (True, False):
        layer = copy.deepcopy(problem.layer()).to(device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, enabled=enabled)
        generator = torch.Generator().manual_seed(2)
        for _ in range(3):
            x = torch.randn(16, 8, 6, generator=generator).to(device)
            optimizer.zero_grad()
            with torch.autocast(device, torch.float16, enabled=enabled):
                loss = layer(x)[0].float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if enabled:
            assert scaler.get_scale() == 1024.0, "gradients were infinite"
        pairs = zip(layer.parameters(), start(problem, device), strict=True)
        ends.append([after.detach() - before for after, before in pairs])
    mixed, full = (torch.cat([a.flatten() for a in end]) for end in ends)
    assert float((mixed - full).norm() / full.norm()) < 0.1
    assert float(full.norm()) > 0


def start(problem: Problem, device: str) -> list[Tensor]:
    """The weights before training."""
    return [p.detach().to(device) for p in problem.layer().parameters()]


@ways(["1"], ["1", "cluster", "triton", "aten"])
def test_only_some_gradients_are_asked_for(device: str, kernels: str) -> None:
    """Frozen weights, an input without gradient, and an output that no loss reads."""

    def of(layer: nn.Module, x: Tensor, kernels: str) -> Tensor:
        with limited_to(kernels):
            _, (_, c) = layer(x)
        (gradient,) = torch.autograd.grad(c.sum(), [layer.weight_hh_l0])
        return gradient

    torch.manual_seed(0)
    layer = LSTM(6, 24, norm=LayerNorm())
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name == "weight_hh_l0")
    x = torch.randn(19, 5, 6)
    exact = of(copy.deepcopy(layer).double(), x.double(), "0")
    found = of(copy.deepcopy(layer).to(device), x.to(device), kernels)
    plain = of(copy.deepcopy(layer).to(device), x.to(device), "0")
    assert error(found.cpu(), exact) <= FACTOR * max(error(plain.cpu(), exact), 1e-7)


@everything
@every_cell
def test_no_gradients(device: str, kernels: str, cell: str) -> None:
    checks = {}
    for norm in NORMS:
        layer = Problem(cell, norm, training=False).layer().to(device)
        x = torch.randn(19, 5, 6, device=device)

        def check(layer: nn.Module = layer, x: Tensor = x) -> None:
            with limited_to(kernels):
                expected, _ = layer(x)
                for mode in (torch.no_grad, torch.inference_mode):
                    with mode():
                        found, _ = layer(x)
                    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)

        checks[norm] = functools.partial(check)
    check_all(checks)
