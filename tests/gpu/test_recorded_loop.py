"""The generic loop from CUDA graphs: the same numbers as launched, and no harm where it fails."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from kernels.cuda_graphs.test_recorded import Halved, Own, drawing_step, reading_step
from torch import Tensor

from ln_zoo.kernels.cuda_graphs import recorded
from ln_zoo.layers import GRU, LSTM
from ln_zoo.layers.recurrent import RecurrentLayer
from ln_zoo.norms import LayerNorm, RMSNorm
from ln_zoo.ops import CELLS, Cell, States, Weights, registry
from ln_zoo.ops.cells import Sites

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LN_ZOO_KERNELS", "0")
    monkeypatch.setenv("LN_ZOO_CUDA_GRAPHS", "all")
    monkeypatch.setattr(recorded, "_CACHES", {})
    recorded._refused.clear()
    registry._log.cache_clear()
    yield
    torch.cuda.synchronize()
    # Neither stream nor generator is left as if something were being recorded.
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.randn(3, device="cuda").isfinite().all()


def step(layer: RecurrentLayer, x: Tensor, autocast: bool = False) -> dict[str, Tensor]:
    """Output, final states and gradients."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        output, final = layer(x)
    finals = final if isinstance(final, tuple) else (final,)
    sum((a.float() ** 2).sum() for a in (output, *finals)).backward()
    found = {"output": output, "dx": x.grad}
    found |= {f"state {k}": a for k, a in enumerate(finals)}
    found |= {f"d {name}": p.grad for name, p in layer.named_parameters()}
    return {name: a.detach().clone() for name, a in found.items() if a is not None}


def launched(monkeypatch: pytest.MonkeyPatch, run: Callable[[], dict[str, Tensor]]) -> dict:
    with monkeypatch.context() as patch:
        patch.setenv("LN_ZOO_CUDA_GRAPHS", "0")
        return run()


LAYERS: dict[str, Callable[[], RecurrentLayer]] = {
    "LSTM": lambda: LSTM(12, 40, norm=LayerNorm()),
    "peepholes, clipped": lambda: LSTM(
        12, 40, norm=LayerNorm(), peephole=True, derivative_bound=1.0
    ),
    "GRU": lambda: GRU(12, 40, norm=RMSNorm(), bidirectional=True, num_layers=2),
    "zoneout": lambda: LSTM(12, 40, norm=LayerNorm(), zoneout=0.2, recurrent_dropout=0.3),
    "own": lambda: Own(12, 40, norm=LayerNorm()),
    "own norm": lambda: LSTM(12, 40, norm=Halved()),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_numbers_are_those_of_the_launched_loop(
    make: Callable[[], RecurrentLayer], autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = make().cuda()
    for k, T in enumerate((85, 85, 21, 85)):
        x = torch.randn(T, 5, 12, device="cuda")

        def run(x: Tensor = x) -> dict[str, Tensor]:
            torch.manual_seed(1)
            return step(layer, x, autocast)

        wanted, found = launched(monkeypatch, run), run()
        for name, a in wanted.items():
            # Under autocast gradients of weights are summed in float32, in place of bfloat16.
            if autocast and name.startswith("d "):
                scale = a.abs().max()
                assert (found[name] - a).abs().max() <= 2**-5 * scale, name
            else:
                assert torch.equal(found[name], a), (name, (found[name] - a).abs().max())
        (cache,) = recorded._CACHES.values()
        assert bool(cache._entries) == (k > 0)
        if k == 1:  # to other memory and back
            layer.cpu().cuda()


def test_no_synchronisation() -> None:
    layer = LSTM(12, 40, norm=LayerNorm(), peephole=True).cuda()
    x = torch.randn(85, 5, 12, device="cuda")
    for _ in range(3):
        step(layer, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(layer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def synchronising_step(
    wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None
) -> States:
    torch.cuda.synchronize()  # no operation of torch: it makes the recording itself fail
    return (wx.tanh() + 0.5 * states[0],)


@pytest.mark.parametrize("own", [reading_step, synchronising_step, drawing_step])
def test_cells_that_cannot_be_recorded_run_as_before(
    own: Callable[..., States], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    places = tuple(dataclasses.replace(place, groups=(1,)) for place in CELLS["GRU"].places)
    layer = Own(12, 40, cell=Cell(own.__name__, own, places)).cuda()
    x = torch.randn(20, 5, 12, device="cuda")

    def run() -> dict[str, Tensor]:
        torch.manual_seed(1)
        return step(layer, x)

    wanted = launched(monkeypatch, run)
    with caplog.at_level(logging.INFO, logger="ln_zoo"):
        for _ in range(4):
            found = run()
            assert all(torch.equal(found[name], a) for name, a in wanted.items())
    assert len([m for m in caplog.messages if "launched step by step" in m]) == 1
    # Others are recorded as ever.
    other = LSTM(12, 40, norm=LayerNorm()).cuda()
    wanted = launched(monkeypatch, lambda: step(other, x))
    for _ in range(3):
        found = step(other, x)
    assert all(torch.equal(found[name], a) for name, a in wanted.items())
    assert any(e.graphs for cache in recorded._CACHES.values() for e in cache._entries.values())


def test_streams_of_the_users_own() -> None:
    layer = LSTM(12, 40, norm=LayerNorm()).cuda()
    x = torch.randn(21, 5, 12, device="cuda")
    wanted = [step(layer, x) for _ in range(3)][-1]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = [step(layer, x) for _ in range(3)][-1]
    stream.synchronize()
    assert all(torch.equal(found[name], a) for name, a in wanted.items())


def test_in_a_recording_of_the_users_own() -> None:
    """It is launched there, and so becomes part of that recording."""
    layer = LSTM(12, 40, norm=LayerNorm()).cuda()
    x = torch.randn(9, 5, 12, device="cuda")
    with torch.no_grad():
        wanted = [layer(x)[0] for _ in range(3)][-1]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layer(x)[0]
        graph.replay()
    assert torch.equal(found, wanted)


def recorded_product() -> tuple[torch.cuda.CUDAGraph, Tensor]:
    a, b = torch.randn(16, 8192, device="cuda"), torch.randn(8192, 16, device="cuda")
    a @ b
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = a @ b
    return graph, found


def used_blocks() -> set[tuple[int, int]]:
    torch.cuda.synchronize()
    return {
        (block["address"], block["size"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def test_recording_frees_nothing_that_graphs_of_the_user_may_need() -> None:
    first = recorded_product()  # its pool holds the workspace of the second as well
    second, product = recorded_product()
    second.replay()
    wanted = product.clone()
    layer = LSTM(12, 40, norm=LayerNorm()).cuda()
    x = torch.randn(21, 5, 12, device="cuda")
    step(layer, x)
    layer.zero_grad()
    gc.collect()
    before = used_blocks()
    kept = step(layer, x)
    assert any(e.graphs for cache in recorded._CACHES.values() for e in cache._entries.values())
    assert before <= used_blocks()
    del first
    torch.cuda.empty_cache()
    others = [torch.zeros(2**23, device="cuda") for _ in range(16)]
    second.replay()
    assert torch.equal(product, wanted)
    assert not any(a.any() for a in others)
    assert all(torch.equal(step(layer, x)[name], a) for name, a in kept.items())


def test_others_may_free_the_memory_of_their_products() -> None:
    layer = LSTM(12, 40, norm=LayerNorm()).cuda()
    x = torch.randn(21, 5, 12, device="cuda")
    wanted = [step(layer, x) for _ in range(3)][-1]
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.zeros(2**23, device="cuda") for _ in range(16)]
    found = step(layer, x)
    assert all(torch.equal(found[name], a) for name, a in wanted.items())
    assert not any(a.any() for a in others)
    # Recorded afterwards.
    longer = torch.randn(85, 5, 12, device="cuda")
    for _ in range(3):
        step(layer, longer)
    assert all(torch.equal(step(layer, x)[name], a) for name, a in wanted.items())


FRESH = """
import torch
from ln_zoo.kernels.cuda_graphs import recorded
from kernels.cuda_graphs.test_recorded import LSTM, Halved

layer = LSTM(12, 40, norm=Halved()).cuda()
x = torch.randn(85, 5, 12, device="cuda", requires_grad=True)
for _ in range(3):
    output = layer(x)[0]
    torch.autograd.grad(output, [x, *layer.parameters()], torch.ones_like(output))
assert not recorded._refused, recorded._refused
assert any(e.graphs for cache in recorded._CACHES.values() for e in cache._entries.values())
"""


def test_in_a_process_that_records_nothing_else() -> None:
    own = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", FRESH], check=True, timeout=100, env=own)
