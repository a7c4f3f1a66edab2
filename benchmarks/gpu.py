"""Layers of ln_zoo on an NVIDIA GPU against cuDNN's, and DRAW: first whether right, then how fast.

``python -m benchmarks.gpu`` fits into ten minutes on an H200. Every line is printed as soon as it
is known, and the table of ratios last; what fails is reported and left out. ``--rehearse`` goes
through all parts on the CPU at tiny sizes, to see that the script itself runs: its times mean
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import contestants, draw
from benchmarks.contestants import CELLS, Size, limited_to
from ln_zoo import layers, norms
from ln_zoo.ops.engines.triton import TritonEngine, steps

SIZES = ("500,8,400,400", "64,128,256,256", "784,100,1,100", "30,64,620,2400")

#: Milliseconds forward and backward of an LSTM, as they were predicted before there was a GPU.
PREDICTED = {
    ("500,8,400,400", "float32"): (3.9, 5.0),
    ("500,8,400,400", "bfloat16"): (3.5, 4.4),
    ("64,128,256,256", "float32"): (0.8, 1.2),
    ("64,128,256,256", "bfloat16"): (0.50, 0.66),
    ("784,100,1,100", "float32"): (5.4, 6.4),
    ("784,100,1,100", "bfloat16"): (5.0, 5.9),
    ("30,64,620,2400", "float32"): (2.6, 5.6),
    ("30,64,620,2400", "bfloat16"): (0.6, 1.0),
}
#: Microseconds of a launch inside a graph, as predicted.
PREDICTED_LAUNCH = 1.0

#: How many times the error of the generic loop, in the same precision on the same inputs, counts as
#: right: both round, in another order.
LIMIT = 5.0

PRECISIONS = ("float32", "tf32", "bfloat16")


@dataclass(frozen=True)
class Stage:
    """Where everything runs, and for how long.

    Args:
        device: ``"cuda"``, or in a rehearsal ``"cpu"``.
        kernels: what runs our layers there, for ``LN_ZOO_KERNELS``.
        sizes: what is timed.
        seconds: when timing has to end, counted from the start.
        start: of the clock.
    """

    device: str
    kernels: str
    sizes: Sequence[Size]
    seconds: float
    start: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def rehearsal(self) -> bool:
        """Whether there is no GPU."""
        return self.device == "cpu"

    def left(self) -> float:
        """Seconds left."""
        return self.seconds - (time.perf_counter() - self.start)

    def wait(self) -> None:
        """Until the GPU has done what it was told."""
        if not self.rehearsal:
            torch.cuda.synchronize()


#: What was found, for the file.
FOUND: dict[str, Any] = {}


def say(*parts: object) -> None:
    """Prints a line at once."""
    print(*parts, flush=True)


@contextlib.contextmanager
def attempt(what: str) -> Iterator[None]:
    """Reports a failure in place of ending with it."""
    try:
        yield
    except Exception as error:
        FOUND.setdefault("failed", []).append(what)
        say(f"FAILED {what}: {type(error).__name__}: {str(error).splitlines()[:1]}")
        frames = traceback.extract_tb(error.__traceback__)[:-6:-1]
        say("   ", " <- ".join(f"{frame.name}:{frame.lineno}" for frame in frames))


@contextlib.contextmanager
def precision_of_products(name: str) -> Iterator[None]:
    """Lets products of float32 matrices, cuDNN's too, run in tf32 or not."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = name == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextlib.contextmanager
def with_graphs(on: bool) -> Iterator[None]:
    """Lets the engine replay recorded graphs or not."""
    with mock.patch.dict(os.environ, {"LN_ZOO_CUDA_GRAPHS": "1" if on else "0"}):
        yield


def dtype_of(precision: str) -> torch.dtype:
    """The precision of parameters: tf32 is one of products only.

    Example:
        >>> dtype_of("tf32"), dtype_of("bfloat16")
        (torch.float32, torch.bfloat16)
    """
    return torch.float32 if precision == "tf32" else getattr(torch, precision)


# 1. What there is


def machine(stage: Stage) -> None:
    """Versions, and rates that everything else is bounded by."""
    say(f"torch {torch.__version__}, python {sys.version.split()[0]}")
    if stage.rehearsal:
        say("a rehearsal on the CPU: no time below means anything")
        return
    import triton

    properties = torch.cuda.get_device_properties(0)
    say(
        f"triton {triton.__version__}, cuDNN {torch.backends.cudnn.version()}, {properties.name}, "
        f"{properties.multi_processor_count} multiprocessors, capability {properties.major}."
        f"{properties.minor}"
    )
    with attempt("driver version"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        say("driver", subprocess.run(query, capture_output=True, text=True).stdout.strip())
    with attempt("rates"):
        a = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        b = torch.empty_like(a)
        say(f"copy {2 * a.numel() / milliseconds(lambda: b.copy_(a), stage) / 1e6:.0f} GB/s")
        for name in PRECISIONS:
            m = torch.randn(8192, 8192, device="cuda", dtype=dtype_of(name))
            with precision_of_products(name):
                rate = 2 * 8192**3 / milliseconds(lambda: m @ m, stage) / 1e9  # noqa: B023
            say(f"product of 8192 x 8192 in {name}: {rate:.0f} TFLOP/s")


# 2. The constants behind the predictions


def constants(stage: Stage) -> None:
    """Microseconds of a launch and of each product of a step, inside a recorded graph."""
    if stage.rehearsal:
        return
    with attempt("empty launches"):
        nothing = torch.zeros(1, device="cuda")
        launch = per_node(lambda: nothing.add_(0), stage)
        say(f"a launch in a graph: {launch:.2f} us (predicted {PREDICTED_LAUNCH})")
    for size in stage.sizes:
        for name in PRECISIONS:
            with attempt(f"products of a step at {size} in {name}"), precision_of_products(name):
                kind = dtype_of(name)
                there = torch.randn(size.B, size.H, device="cuda").to(kind)
                back = torch.randn(size.B, 4 * size.H, device="cuda").to(kind)
                weight = torch.randn(size.H, 4 * size.H, device="cuda").to(kind)
                turned = weight.t().contiguous()
                wide = torch.empty(size.B, 4 * size.H, device="cuda")
                narrow = torch.empty(size.B, size.H, device="cuda")
                multiply = steps._multiply
                forward = per_node(lambda: multiply(there, weight, wide), stage)  # noqa: B023
                backward = per_node(lambda: multiply(back, turned, narrow), stage)  # noqa: B023
                say(f"products of a step, {size} {name}: {forward:.2f} / {backward:.2f} us")


def per_node(launch: Callable[[], object], stage: Stage, nodes: int = 100) -> float:
    """Microseconds of one launch in a chain inside a graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            launch()
    return milliseconds(graph.replay, stage) * 1e3 / nodes


# 3. Whether the numbers are right


def correctness(stage: Stage) -> None:
    """Against float64 on the generic loop, in memory filled with NaN; twice the same; graphs."""
    examples = [  # T, B, I, H, packed; beyond 16 steps gains are 0.5
        (8, 3, 5, 5, False),
        (8, 1, 7, 100, False),
        (8, 3, 3, 257, True),
        (17, 3, 400, 400, False),
        (100, 8, 64, 256, True),
        (256, 2, 16, 128, False),
        (3, 2, 620, 2400, False),
    ]
    if stage.rehearsal:
        examples = [(8, 2, 3, 5, False), (20, 2, 3, 4, True)]
    say("relative errors against float64 (largest of outputs, states and gradients):")
    for cell in ("LSTM", "GRU", "RNN"):
        for case in examples:
            for name in ("float32",) if cell == "RNN" else PRECISIONS:
                for graphs in (False, True):
                    label = f"{cell} T,B,I,H={case[:4]} {'packed' if case[4] else 'padded'} {name}"
                    label += " graphs" if graphs else " eager"
                    with attempt(label), precision_of_products(name), with_graphs(graphs):
                        errors, plain = compare(stage, cell, case, name)
                        worst = max(errors, key=lambda key: errors[key])
                        limit = LIMIT * max(plain.values())
                        good = errors[worst] <= limit
                        say(
                            f"{'ok   ' if good else 'WRONG'} {label}: {errors[worst]:.1e} {worst}, "
                            f"of at most {limit:.1e}"
                        )
                        if not good:
                            FOUND.setdefault("wrong", []).append(label)
    with attempt("graphs give the numbers of plain launches, bit by bit"):
        same_with_graphs(stage)


def compare(
    stage: Stage, cell: str, case: tuple[int, int, int, int, bool], precision: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Relative errors of one layer by name, and those of the generic loop in the same precision."""
    length, batch, inputs, hidden, packed = case
    torch.manual_seed(0)
    # Of gain 1, such a layer is expanding: rounding errors would grow with time.
    norm = norms.LayerNorm(gain=0.5 if length > 16 else 1.0)
    layer = getattr(layers, cell)(inputs, hidden, norm=norm).to(stage.device, dtype_of(precision))
    exact = getattr(layers, cell)(inputs, hidden, norm=norm).to(stage.device, torch.float64)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(length, batch, inputs, device=stage.device).to(dtype_of(precision))
    lengths = [max(1, length - 5 * k) for k in range(batch)] if packed else None
    wanted = outcome(exact, x.double(), lengths, "0")
    # A kind of steps is recorded when it comes for the second time.
    for _ in range(2):
        found = outcome(layer, x, lengths, stage.kernels)
    again = outcome(layer, x, lengths, stage.kernels)
    if not all(torch.equal(found[key], again[key]) for key in found):
        raise AssertionError("two runs differ")
    plain = outcome(layer, x, lengths, "0")

    def errors(values: dict[str, Tensor]) -> dict[str, float]:
        return {
            key: float((value.double() - wanted[key]).norm() / wanted[key].norm())
            for key, value in values.items()
        }

    return errors(found), errors(plain)


def outcome(
    layer: nn.Module, x: Tensor, lengths: list[int] | None, kernels: str
) -> dict[str, Tensor]:
    """Outputs, final states and all gradients of a layer, in memory that was NaN before."""
    x = x.clone().requires_grad_()
    parameters = dict(layer.named_parameters())
    given: Any = x
    if lengths is not None:
        given = nn.utils.rnn.pack_padded_sequence(x, lengths)
    with limited_to(kernels), poisoned():
        output, states = layer(given)
        data = output if lengths is None else output.data
        results = [data, *(states if isinstance(states, tuple) else (states,))]
        generator = torch.Generator(x.device).manual_seed(1)
        gradients = [
            torch.randn(r.shape, device=x.device, generator=generator).to(r.dtype) for r in results
        ]
        found = torch.autograd.grad(results, [x, *parameters.values()], gradients)
    named = {f"result {k}": r.detach() for k, r in enumerate(results)}
    return named | dict(zip(("d x", *(f"d {n}" for n in parameters)), found, strict=True))


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """What torch allocates is NaN before it is written to."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def same_with_graphs(stage: Stage) -> None:
    """Raises unless graphs and plain launches give the same bits, whatever came in between."""
    torch.manual_seed(0)
    layer = layers.LSTM(32, 100, norm=norms.LayerNorm(gain=0.5), bidirectional=True, num_layers=2)
    layer.to(stage.device)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(83, 4, 32, device=stage.device)
        results = []
        for graphs in (False, True):
            with with_graphs(graphs):
                results.append(outcome(layer, x, None, stage.kernels))
        for key in results[0]:
            if not torch.equal(results[0][key], results[1][key]):
                raise AssertionError(f"{key} differs")
        with torch.no_grad():  # as an optimizer's step would
            for parameter in layer.parameters():
                parameter.mul_(0.99)
    say("ok    graphs give the numbers of plain launches, bit by bit")


# 4, 5. How fast


@dataclass(frozen=True)
class Result:
    """Milliseconds of one contestant.

    Args:
        size: as text.
        cell: ``"LSTM"`` or ``"GRU"``.
        name: who.
        precision: of parameters and products.
        inference: of a forward pass without gradients.
        forward: of a forward pass that keeps what a backward needs.
        training: of a forward and a backward pass.
    """

    size: str
    cell: str
    name: str
    precision: str
    inference: float
    forward: float
    training: float


def timings(stage: Stage) -> list[Result]:
    """cuDNN and ours at all sizes, twice, one after the other; the better of both."""
    found: dict[tuple[str, str, str, str], Result] = {}
    for _ in range(2):
        for size in stage.sizes:
            for cell in CELLS:
                for name, precision, graphs in entries(size):
                    if stage.left() < 0:
                        say("out of time: the rest is left out")
                        return list(found.values())
                    label = f"{cell} {size} {name} {precision}"
                    with attempt(label), precision_of_products(precision), with_graphs(graphs):
                        result = timed(stage, size, cell, name, precision)
                        key = (str(size), cell, name, precision)
                        old = found.get(key)
                        found[key] = result if old is None else better(old, result)
                        say(
                            f"{label}: inference {result.inference:.3f}, forward "
                            f"{result.forward:.3f}, with backward {result.training:.3f} ms"
                        )
    return list(found.values())


def entries(size: Size) -> Iterator[tuple[str, str, bool]]:
    """Contestants: name, precision, and whether graphs may be replayed."""
    for precision in (*PRECISIONS, "float16"):
        yield "cuDNN", precision, False
    for precision in PRECISIONS:
        yield "ours, graphs", precision, True
    yield "ours, launched", "float32", False
    yield "ours, launched", "bfloat16", False
    if size.T <= 64:
        yield "naive loop", "float32", False


def timed(stage: Stage, size: Size, cell: str, name: str, precision: str) -> Result:
    """Times one contestant, over three sets of inputs in turn."""
    ours = name.startswith("ours")
    kind = {"cuDNN": contestants.BASELINE, "naive loop": "naive"}.get(name, "LayerNorm/aten")
    module = contestants.layer(kind, cell, size, training=True).module
    module = module.to(stage.device, dtype_of(precision))
    xs = [
        torch.randn(size.T, size.B, size.I, device=stage.device).to(dtype_of(precision))
        for _ in range(3)
    ]
    gradient = torch.randn(size.T, size.B, size.H, device=stage.device).to(dtype_of(precision))
    leaves = list(module.parameters())
    turn = iter(range(10**9))

    def forward() -> Tensor:
        output: Tensor = module(xs[next(turn) % 3])[0]
        return output

    def inference() -> Tensor:
        with torch.no_grad():
            return forward()

    def training() -> None:
        x = xs[next(turn) % 3].requires_grad_()
        torch.autograd.grad(module(x)[0], [x, *leaves], gradient)
        x.requires_grad_(False)

    with limited_to(stage.kernels if ours else None):
        if ours and not stage.rehearsal:
            insist(module, xs[0])
        times = [milliseconds(call, stage) for call in (inference, forward, training)]
    return Result(str(size), cell, name, precision, *times)


def insist(module: nn.Module, x: Tensor) -> None:
    """Raises unless the Triton engine runs the module."""
    prepare = TritonEngine.prepare
    with mock.patch.object(TritonEngine, "prepare", autospec=True, side_effect=prepare) as called:
        module(x)
    if not called.called:
        raise AssertionError("the Triton engine did not take the call")


def better(a: Result, b: Result) -> Result:
    """The smaller of each pair of times."""
    times = {
        field: min(getattr(a, field), getattr(b, field))
        for field in ("inference", "forward", "training")
    }
    return dataclasses.replace(a, **times)


def milliseconds(call: Callable[[], object], stage: Stage) -> float:
    """The median of repeated calls, after a warm-up."""
    if stage.rehearsal:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    from triton.testing import do_bench

    for _ in range(3):  # graphs are recorded when a kind of steps comes again
        call()
    return float(do_bench(call, warmup=50, rep=200, return_mode="median"))


def where_the_time_goes(stage: Stage) -> None:
    """An LSTM's forward and backward without any norm, and with other numbers of warps."""
    for size in stage.sizes:
        if stage.left() < 60:
            say("out of time for what places the time")
            return
        with attempt(f"no norm at {size}"), with_graphs(True), limited_to(stage.kernels):
            none = layers.LSTM(size.I, size.H, norm=norms.LayerNorm(), normalize=("cell",))
            say(f"{size}: cell norm alone: {training_time(stage, none, size):.3f} ms")
        for warps in (1, 2, 4, 8, 16, 32):
            threads = 32 * warps
            if not 1 <= steps.block(size.H) // threads <= 16:
                continue
            with (
                attempt(f"{warps} warps at {size}"),
                with_graphs(True),
                limited_to(stage.kernels),
                mock.patch.object(steps, "warps", lambda hidden, warps=warps: warps),
                mock.patch.object(steps.graphs, "cache", fresh_cache()),
            ):
                layer = layers.LSTM(size.I, size.H, norm=norms.LayerNorm())
                taken = training_time(stage, layer, size)
                default = " (default)" if warps == steps_default(size) else ""
                say(f"{size}: {warps} warps{default}: {taken:.3f} ms")


def steps_default(size: Size) -> int:
    """Warps that the engine would take."""
    return max(1, steps.block(size.H) // 128)


def fresh_cache() -> Callable[[torch.device], steps.graphs.Cache]:
    """Graphs of their own, which do not last: the number of warps is not a part of a key."""
    cache = steps.graphs.Cache()
    return lambda device: cache


def training_time(stage: Stage, layer: nn.Module, size: Size) -> float:
    """Milliseconds of a forward and a backward."""
    layer = layer.to(stage.device)
    x = torch.randn(size.T, size.B, size.I, device=stage.device, requires_grad=True)
    leaves = [x, *layer.parameters()]
    return milliseconds(lambda: torch.autograd.grad(layer(x)[0].sum(), leaves), stage)


# 6. DRAW


def glimpses(stage: Stage) -> None:
    """A training step of DRAW: its gradients against float64, and milliseconds."""
    size = draw.Size(T=3, N=2, side=5, H=4, Z=3) if stage.rehearsal else draw.Size()
    engine = "native" if stage.rehearsal else stage.kernels
    for norm in draw.NORMS:
        for name, precision, kernels, graphs in (
            ("ours, graphs", "float32", engine, True),
            ("ours, graphs", "tf32", engine, True),
            ("ours, launched", "float32", engine, False),
            ("autograd", "float32", None, False),
        ):
            label = f"DRAW {norm} {name} {precision}"
            with (
                attempt(label),
                with_graphs(graphs),
                limited_to(kernels),
                precision_of_products(precision),
            ):
                step = drawing(stage, size, norm, ours=kernels is not None)
                for _ in range(3):  # a kind is recorded when it comes again
                    found = step(torch.float32)
                exact, plain = (
                    drawing(stage, size, norm, ours=False)(dtype)
                    for dtype in (torch.float64, torch.float32)
                )
                errors = [
                    max(float((a - b).norm() / b.norm()) for a, b in zip(g, exact, strict=True))
                    for g in (found, plain)
                ]
                if errors[0] > LIMIT * errors[1]:
                    FOUND.setdefault("wrong", []).append(label)
                taken = milliseconds(lambda: step(torch.float32), stage)  # noqa: B023
                FOUND.setdefault("draw", {})[label] = [taken, *errors]
                say(
                    f"{label}: {taken:.2f} ms; largest relative error of a gradient "
                    f"{errors[0]:.1e}, of autograd's {errors[1]:.1e}"
                )


def drawing(
    stage: Stage, size: draw.Size, norm: str, ours: bool
) -> Callable[[torch.dtype], list[Tensor]]:
    """A training step in a precision, the same for all: gradients of all parameters."""
    torch.manual_seed(0)
    models = {torch.float32: draw.Eager(size, norm).to(stage.device)}
    models[torch.float64] = copy.deepcopy(models[torch.float32]).double()
    x = (torch.rand(size.N, size.side, size.side) < 0.13).float().to(stage.device)
    noise = torch.randn(size.T, size.N, size.Z).to(stage.device)

    def step(dtype: torch.dtype) -> list[Tensor]:
        model = models[dtype]
        forward = draw.ours if ours else draw.Eager.forward
        loss = forward(model, x.to(dtype), noise.to(dtype))
        return [*torch.autograd.grad(loss, list(model.parameters()))]

    return step


# 7. Memory


def memory(stage: Stage) -> None:
    """Peak memory of a training step over that of cuDNN's layer."""
    if stage.rehearsal:
        return
    for size in stage.sizes:
        with attempt(f"memory at {size}"):
            peaks = {}
            for name in ("cuDNN", "ours, graphs"):
                kind = contestants.BASELINE if name == "cuDNN" else "LayerNorm/aten"
                module = contestants.layer(kind, "LSTM", size, training=True).module.cuda()
                x = torch.randn(size.T, size.B, size.I, device="cuda", requires_grad=True)
                with limited_to(stage.kernels if name != "cuDNN" else None):
                    for _ in range(3):
                        module(x)[0].sum().backward()
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    module(x)[0].sum().backward()
                    peaks[name] = torch.cuda.max_memory_allocated() - before
            ratio = peaks["ours, graphs"] / peaks["cuDNN"]
            say(f"peak memory at {size}: {peaks['ours, graphs'] / 2**20:.0f} MiB, {ratio:.2f} of")


# The table


def table(results: Sequence[Result]) -> None:
    """Predicted, measured, and ratios to cuDNN; predictions missed by more than 30 % first."""
    by_key = {(r.size, r.cell, r.name, r.precision): r for r in results}
    lines: list[tuple[bool, str]] = []
    for r in results:
        if not r.name.startswith("ours"):
            continue
        cudnn = by_key.get((r.size, r.cell, "cuDNN", r.precision))
        ratios = f"{'-':>7} {'-':>7}"
        if cudnn is not None:
            ratios = f"{r.inference / cudnn.inference:7.2f} {r.training / cudnn.training:7.2f}"
        predicted, missed = "-", False
        if r.name == "ours, graphs" and r.cell == "LSTM":
            both = PREDICTED.get((r.size, r.precision))
            if both is not None:
                predicted = f"{sum(both):.2f}"
                missed = not 0.7 <= r.training / sum(both) <= 1.3
        lines.append((missed, (
            f"{'!' if missed else ' '} {r.cell:4} {r.size:>15} {r.precision:>8} {r.name:15} "
            f"{predicted:>9} {r.training:9.3f} {ratios}"
        )))  # fmt: skip
    say("\nms of a training step; ratios to cuDNN's layer without norm, inference and training")
    say("  cell      T,B,I,H      type contestant      predicted  measured   infer   train")
    for _, line in sorted(lines, key=lambda pair: not pair[0]):
        say(line)
    quotients = [
        r.training / by_key[r.size, r.cell, "cuDNN", r.precision].training
        for r in results
        if r.name == "ours, graphs" and (r.size, r.cell, "cuDNN", r.precision) in by_key
    ]
    if quotients:
        say(f"median ratio of training steps: {statistics.median(quotients):.2f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all parts; 0 if nothing failed and all numbers were right."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="T,B,I,H", help="what to time")
    parser.add_argument("--seconds", type=float, default=540.0, help="time for all of it")
    parser.add_argument("--out", type=Path, help="a JSON file for all that was found")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at tiny sizes")
    options = parser.parse_args(arguments)
    if options.rehearse:
        stage = Stage("cpu", "aten", [Size(20, 2, 3, 4)], options.seconds)
    elif not torch.cuda.is_available():
        say("torch finds no GPU here; --rehearse runs all parts on the CPU, without meaning")
        return 2
    else:
        sizes = [Size.parse(text) for text in options.sizes]
        stage = Stage("cuda", "triton", sizes, options.seconds)
    FOUND.clear()
    machine(stage)
    constants(stage)
    correctness(stage)
    results = timings(stage)
    glimpses(stage)
    memory(stage)
    where_the_time_goes(stage)
    table(results)
    FOUND["results"] = [dataclasses.asdict(r) for r in results]
    if options.out is not None:
        options.out.write_text(json.dumps(FOUND, indent=1), encoding="utf-8")
    for kind in ("failed", "wrong"):
        for label in FOUND.get(kind, []):
            say(f"{kind}: {label}")
    return 1 if FOUND.get("failed") or FOUND.get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main())
