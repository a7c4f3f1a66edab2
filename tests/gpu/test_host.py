"""No host in the loop: nothing waits for the GPU, and no time step costs a launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from outcomes import CELLS, Problem, gpu, limited_to
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from ln_zoo.kernels.cuda_graphs import graphs
from ln_zoo.layers import DRAWNetwork, WindowLSTM
from ln_zoo.norms import LayerNorm

T, N, INPUTS, H = 128, 8, 6, 64
STEPS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packed": True},
    "resets": {"reset": True},
    "zoneout": {"options": {"zoneout": 0.2}},
    "recurrent dropout": {"options": {"recurrent_dropout": 0.3}},
    "bidirectional packed": {"packed": True, "options": {"bidirectional": True}},
}
PATHS = [
    *((cell, norm, "padded") for cell in CELLS for norm in ("none", "layer", "rms", "batch")),
    *(("LSTM", norm, kind) for norm in ("none", "layer") for kind in list(STEPS)[1:]),
    ("LSTM", "batch", "packed"),
]


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds of steps that other tests have recorded leave no room."""
    monkeypatch.setattr(graphs, "_CACHES", {})


def training_step(cell: str, norm: str, kind: str, precision: str, T: int) -> Callable[[], Any]:
    """A forward and a backward of a layer on the GPU."""
    problem = Problem(cell, norm, precision, sizes=(T, N, INPUTS, H), **STEPS[kind])
    layer = problem.layer().cuda()
    dtype = next(layer.parameters()).dtype
    x = torch.randn(T, N, INPUTS, device="cuda").to(dtype).requires_grad_()
    options = {}
    if problem.reset:
        options["reset"] = torch.rand(T, N, device="cuda") < 0.03
    leaves = [x, *layer.parameters()]

    def step() -> None:
        given: Any = x
        if problem.packed:
            given = pack_padded_sequence(x, torch.arange(T, T - 8 * N, -8))
        output = layer(given, **options)[0]
        data = output.data if problem.packed else output
        torch.autograd.grad(data, leaves, torch.ones_like(data))

    return step


def window_step(norm: Any, T: int) -> Callable[[], Any]:
    layer = WindowLSTM(3, H, character_size=9, components=5, norm=norm).cuda()
    x = torch.randn(T, N, 3, device="cuda", requires_grad=True)
    text = torch.eye(9, device="cuda")[torch.randint(9, (N, 20), device="cuda")]
    leaves = [x, *layer.parameters()]

    def step() -> None:
        found = layer(x, text)
        torch.autograd.grad(found.output.sum() + found.windows.sum(), leaves)

    return step


def draw_step(norm: Any, T: int) -> Callable[[], Any]:
    layer = DRAWNetwork(14, 14, hidden_size=H, latent_size=8, norm=norm).cuda()
    images = torch.rand(N, 14, 14, device="cuda")
    noise = torch.randn(T, N, 8, device="cuda")

    def step() -> None:
        found = layer(images, noise)
        sums = sum(a.float().sum() for a in found if isinstance(a, Tensor) and a.requires_grad)
        torch.autograd.grad(sums, list(layer.parameters()), allow_unused=True)

    return step


def never_waits(step: Callable[[], Any]) -> None:
    """Raises where torch waits for the GPU; what runs once per process has run before."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def profile(step: Callable[[], Any]) -> dict[str, int]:
    """How often the CUDA runtime and driver were called, by name, and copies to the host."""
    kinds = torch.profiler.ProfilerActivity
    for _ in range(3):  # the second one records graphs
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profiler:
        step()
    counts: dict[str, int] = {}
    for event in profiler.key_averages():
        counts[event.key] = event.count
    return counts


WAITS = ("StreamSynchronize", "EventSynchronize", "Memcpy DtoH")
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")


def count(counts: dict[str, int], words: tuple[str, ...]) -> int:
    """Calls whose name contains one of some words.

    >>> count({"cudaLaunchKernel": 3, "cuLaunchKernelEx": 2, "aten::mm": 9}, LAUNCHES)
    5
    """
    return sum(n for name, n in counts.items() if any(word in name for word in words))


def steps_of_all() -> dict[str, Callable[[int], Callable[[], Any]]]:
    """What makes a training step of a number of time steps, by name."""
    found: dict[str, Callable[[int], Callable[[], Any]]] = {}
    for precision in ("float32", "bfloat16"):
        for cell, norm, kind in PATHS:
            if precision == "bfloat16" and (cell != "LSTM" or norm not in ("none", "layer")):
                continue
            name = f"{cell} {norm} {kind} {precision}"
            found[name] = functools.partial(training_step, cell, norm, kind, precision)
    for name, norm in (("none", None), ("layer", LayerNorm())):
        found[f"window {name}"] = functools.partial(window_step, norm)
        found[f"DRAW {name}"] = functools.partial(draw_step, norm)
    return found


ALL = steps_of_all()


@gpu
@pytest.mark.parametrize("name", ALL)
def test_nothing_waits_for_the_gpu(name: str) -> None:
    never_waits(ALL[name](T))


@gpu
@pytest.mark.parametrize("name", ALL)
def test_no_launch_for_each_time_step(name: str) -> None:
    """Twice as many steps, forward and backward, take few more launches."""
    launches = []
    for steps in (T, 2 * T):
        counts = profile(ALL[name](steps))
        assert count(counts, WAITS) == 0, counts
        launches.append(count(counts, LAUNCHES))
    assert launches[0] > 0
    directions = 2 if "bidirectional" in name else 1
    assert launches[1] - launches[0] < directions * T / 2, launches


@gpu
@pytest.mark.parametrize("kernels", ["cluster", "triton"])
def test_masks_are_drawn_on_the_gpu(kernels: str) -> None:
    """Zoneout and dropout differ from call to call, and repeat with the seed."""
    problem = Problem(
        "LSTM", "layer", options={"zoneout": 0.3, "recurrent_dropout": 0.3}, sizes=(T, N, INPUTS, H)
    )
    layer, x = problem.layer().cuda(), torch.randn(T, N, INPUTS, device="cuda")
    with limited_to(kernels):
        found = []
        for seed in (0, 1, 0):
            torch.manual_seed(seed)
            found.append(layer(x)[0])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
