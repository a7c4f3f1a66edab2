"""Layers of ln_zoo on an NVIDIA GPU against cuDNN's, which have no norm.

Times are of a training step: forward, and the gradients of x and all parameters from a given
gradient of the output. ``eager`` launches it from Python, ``graph`` replays it as one CUDA graph.
Contestants of one size, cell and precision take turns in one process; a process that says nothing
for some seconds is killed and replaced. Beside each of our times stands the largest relative error
at up to 16 steps, and that of the generic loop in the same precision, both against float64.

``python -m benchmarks.gpu`` takes 150 seconds, with ``--quick`` 40. With ``--device cpu`` it goes
through all parts at tiny sizes, to test itself: those times mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from benchmarks import runner
from benchmarks.contestants import Size, limited_to
from ln_zoo import layers, norms, ops

ROOT = Path(__file__).parents[1]
SIZES = (
    "500,8,400,400", "64,128,256,256", "784,100,1,100", "64,64,512,512", "1024,16,768,768",
    "100,32,512,512", "30,64,620,1024", "30,64,620,2400",
)  # fmt: skip
CUDNN = "cuDNN"
NORMS = {"layer": norms.LayerNorm, "none": norms.Identity, "rms": norms.RMSNorm}
#: Equations that are not the paper's: one norm over Wx + Uh, and the cell state kept normalised.
JOINT = {"LSTM": "LSTM with a joint norm", "GRU": "Dreamer's GRU"}
CONTESTANTS = (CUDNN, *NORMS, "batch", "own", "joint")
#: Calls of cuDNN, which has neither resets nor zoneout, are padded there.
KINDS = ("padded", "packed", "resets", "zoneout")
#: What is measured beyond cuDNN, layer norm and no norm.
MORE = {("batch", "packed")}
#: Precision of parameters, that of autocast, and whether float32 products run in tf32.
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None, bool]] = {
    "float32": (torch.float32, None, False),
    "bfloat16": (torch.bfloat16, None, False),
    "tf32": (torch.float32, None, True),
    "float16": (torch.float16, None, False),
    "bf16-mixed": (torch.float32, torch.bfloat16, False),
}


class Group(NamedTuple):
    """Contestants that take turns."""

    cell: str
    size: str
    precision: str
    kind: str
    contestants: tuple[str, ...]
    device: str
    seconds: float


@dataclass(frozen=True)
class Row:
    """A measurement; the ratio is to cuDNN's time in the same mode."""

    card: str
    torch: str
    date: str
    cell: str
    size: str
    kind: str
    precision: str
    contestant: str
    mode: str
    ms: float
    ratio: float | None = None
    first_call_s: float | None = None
    error: float | None = None
    loop_error: float | None = None


# What is timed


@dataclass(frozen=True)
class OwnNorm(norms.Norm):
    """A user's own, which no kernel takes."""

    def init_params(self, site: norms.Site) -> None:
        site.add_affine(gain=1.0)

    def normalize(self, site: norms.Site, a: Tensor, step: int | None = None) -> Tensor:
        return site.affine(a * torch.rsqrt(site.mean(a * a) + 1e-5))


def made(name: str, cell: str, size: Size, kind: str) -> nn.Module:
    """A layer; all of one cell and size have the same weights."""
    torch.manual_seed(0)
    if name == CUDNN:
        module: nn.Module = getattr(nn, cell)(size.I, size.H)
        return module
    if name == "joint":
        return layers.RecurrentLayer(
            size.I, size.H, cell=ops.CELLS[JOINT[cell]], norm=norms.LayerNorm()
        )
    if name == "own":
        norm: norms.Norm = OwnNorm()
    elif name == "batch":  # in the source, each step has statistics of its own
        norm = norms.BatchNorm(max_steps=size.T)
    else:
        norm = NORMS[name]()
    zoneout = 0.1 if kind == "zoneout" else 0.0
    ours: nn.Module = getattr(layers, cell)(size.I, size.H, norm=norm, zoneout=zoneout)
    return ours


def training_step(
    name: str, group: Group, size: Size, exact: bool = False
) -> Callable[[], list[Tensor]]:
    """Computes the output and all gradients; in float64 if ``exact``, of the same numbers."""
    dtype, autocast, _ = PRECISIONS[group.precision]
    compute = torch.float64 if exact else dtype
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(group.device, compute)

    module = made(name, group.cell, size, group.kind).to(dtype).to(group.device, compute)
    x, gradient = drawn(size.T, size.B, size.I), drawn(size.T, size.B, size.H)
    given: Tensor | PackedSequence = x.requires_grad_()
    options = {}
    if group.kind == "packed":
        lengths = torch.linspace(size.T, 1, size.B).round().long()
        gradient = pack_padded_sequence(gradient, lengths).data
        packed = pack_padded_sequence(x.detach(), lengths)
        x = packed.data.requires_grad_()
        given = PackedSequence(x, packed.batch_sizes)
    if group.kind == "resets" and name != CUDNN:
        flags = torch.rand((size.T, size.B), generator=generator) < 0.03
        options["reset"] = flags.to(group.device)
    leaves = [x, *module.parameters()]
    enabled = autocast is not None and not exact

    def step() -> list[Tensor]:
        with torch.autocast(group.device, autocast, enabled=enabled):
            found = module(given, **options)[0]
        output = found.data if isinstance(found, PackedSequence) else found
        return [output, *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]

    return step


def errors(name: str, group: Group) -> tuple[float | None, float | None]:
    """The largest relative error of a contestant, and that of the generic loop."""
    if name == CUDNN or group.kind == "zoneout":  # masks are drawn anew in each call
        return None, None
    size = Size.parse(group.size)
    size = replace(size, T=min(size.T, 16), B=min(size.B, 16))
    with limited_to("0"):
        exact = [a.double() for a in training_step(name, group, size, exact=True)()]
        loop = training_step(name, group, size)()
    found = training_step(name, group, size)()

    def largest(values: Sequence[Tensor]) -> float:
        gaps = [(a.double() - b).norm() / b.norm() for a, b in zip(values, exact, strict=True)]
        return float(torch.stack(gaps).max())  # NaN if one is

    return largest(found), largest(loop)


def recorded(step: Callable[[], object]) -> Callable[[], object]:
    """The step as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def milliseconds(call: Callable[[], object], device: str) -> float:
    """Of one call, by the device's clock."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def measured(group: Group) -> Iterator[dict[str, Any]]:
    """Each contestant in each mode; a line with ``failed`` for what raises."""
    size, tf32 = Size.parse(group.size), PRECISIONS[group.precision][2]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name in group.contestants:
        try:
            step = training_step(name, group, size)
            begin = time.perf_counter()
            float(step()[0].detach().sum())  # waits
            first = time.perf_counter() - begin
            yield {"alive": name}
            error, loop_error = errors(name, group)
            facts[name] = {"first_call_s": first, "error": error, "loop_error": loop_error}
            step()  # what is recorded when it comes again
            calls[name, "eager"] = step
            yield {"alive": name}
            if group.device == "cuda":
                calls[name, "graph"] = recorded(step)
        except Exception as failure:
            yield {"failed": name, "why": f"{type(failure).__name__}: {failure}"[:300]}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    begin = time.perf_counter()
    while len(next(iter(times.values()), [0] * 99)) < 30:
        for key, call in calls.items():
            times[key].append(milliseconds(call, group.device))
        if time.perf_counter() - begin > group.seconds * len(calls):
            break
    medians = {key: statistics.median(values) for key, values in times.items()}
    for (name, mode), ms in medians.items():
        cudnn = medians.get((CUDNN, mode))
        ratio = ms / cudnn if cudnn else None
        yield {"contestant": name, "mode": mode, "ms": ms, "ratio": ratio, **facts[name]}


def serve() -> None:
    """Measures the groups that stdin asks for, and answers line by line."""
    for line in sys.stdin:
        for answer in measured(Group(*json.loads(line))):
            print(json.dumps(answer), flush=True)
        print(json.dumps({"done": True}), flush=True)


# The process that asks


class Worker:
    """A process that measures, and is replaced when it hangs or dies."""

    #: Seconds that a new process may take to import torch.
    start = 60.0

    def __init__(self, patience: float, options: Sequence[str] = ()) -> None:
        self.patience, self.options = patience, options
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def ask(self, group: Group) -> Iterator[dict[str, Any]]:
        """The answers; the last one is ``failed`` if the process hung or died."""
        fresh = self._process is None
        process = self._process or self._started()
        assert process.stdin is not None
        process.stdin.write(json.dumps(group) + "\n")
        process.stdin.flush()
        while True:
            try:  # a fresh process imports torch first
                line = self._lines.get(timeout=self.patience + fresh * self.start)
            except queue.Empty:
                line = ""
            if not line:
                self.end()
                yield {"failed": "all of it", "why": f"no answer for {self.patience:g} s"}
                return
            fresh = False
            answer = json.loads(line)
            if "done" in answer:
                return
            yield answer

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.gpu", "--serve", *self.options]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        lines: queue.Queue[str] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        self._process, self._lines = process, lines
        return process

    def end(self) -> None:
        """Kills the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def handwriting_epoch(device: str) -> float:
    """Seconds of an epoch of the handwriting quickstart: three epochs less one, halved."""

    def seconds(epochs: int) -> float:
        code = "import sys; from ln_zoo.cli import main; sys.exit(main())"
        config = ROOT / "configs/handwriting/quickstart.yaml"
        accelerator = "gpu" if device == "cuda" else "cpu"
        options = [f"--trainer.max_epochs={epochs}", f"--trainer.accelerator={accelerator}"]
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [sys.executable, "-c", code, "fit", "--config", config, *options],
                cwd=folder, check=True, timeout=100, capture_output=True,
            )  # fmt: skip
        return time.perf_counter() - begin

    one, three = seconds(1), seconds(3)
    return (three - one) / 2


def groups(options: argparse.Namespace) -> list[Group]:
    """What is measured, the most important first."""
    few = [c for c in options.contestants if c in (CUDNN, "layer", "none")]
    lead, *others = options.precisions
    sizes, device, seconds = options.sizes, options.device, options.each

    def of(cell: str, precision: str, kind: str, names: Sequence[str], sizes: list[str]) -> Any:
        return [Group(cell, size, precision, kind, tuple(names), device, seconds) for size in sizes]

    found: list[Group] = []
    for cell in options.cells:
        first = cell == options.cells[0]
        found += of(cell, lead, "padded", options.contestants if first else few, sizes)
        found += [g for p in others[:1] for g in of(cell, p, "padded", few, sizes)]
        if first:
            for kind in options.kinds:
                if kind != "padded":
                    names = [c for c in options.contestants if c in few or (c, kind) in MORE]
                    found += of(cell, lead, kind, names, sizes[:2])
    for cell in options.cells:
        found += [g for p in others[1:] for g in of(cell, p, "padded", few, sizes)]
    return found


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each of our measurements; ``!`` marks errors beyond five times the loop's."""
    yield f"  {'cell':4} {'T,B,I,H':16} {'':8} {'precision':10} {'ours':6} {'mode':5} ms (to cuDNN)"
    for r in rows:
        wrong = False
        if r.error is not None and r.loop_error is not None:
            wrong = not r.error <= 5 * max(r.loop_error, 1e-6)
        ratio = "" if r.ratio is None else f" ({r.ratio:.2f})"
        yield (
            f"{'!' if wrong else ' '} {r.cell:4} {r.size:16} {r.kind:8} {r.precision:10} "
            f"{r.contestant:6} {r.mode:5} {r.ms:.3f}{ratio}"
            + ("" if r.error is None else f" error {r.error:.1e}, loop {r.loop_error:.1e}")
        )


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = found.add_argument
    add("--sizes", nargs="+", metavar="T,B,I,H", default=list(SIZES))
    add("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    add("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    add("--cells", nargs="+", choices=("LSTM", "GRU", "RNN"), default=["LSTM", "GRU"])
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--seconds", type=float, default=150.0, help="after which nothing new is begun")
    add("--each", type=float, default=0.15, help="seconds of timing per contestant and mode")
    add("--patience", type=float, default=20.0, help="seconds without an answer before a kill")
    add("--no-handwriting", action="store_true", help="leave out the epoch of handwriting")
    add("--quick", action="store_true", help="LSTM, three sizes, two precisions, 40 seconds")
    add("--csv", type=Path, help="a file for all rows")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--log", action="store_true", help="say which kernels run, and why others do not")
    add("--serve", action="store_true", help=argparse.SUPPRESS)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; 0 unless something failed or hung."""
    options = parser().parse_args(arguments)
    if options.log:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.serve:
        serve()
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no GPU here; --device cpu tests the script, at tiny sizes")
        return 2
    if options.quick:
        options.sizes, options.precisions = options.sizes[:3], options.precisions[:2]
        options.cells, options.kinds, options.no_handwriting = options.cells[:1], ["padded"], True
        options.contestants = [c for c in options.contestants if c not in ("rms", "batch")]
        options.seconds = min(options.seconds, 40.0)
    if options.device == "cpu":
        options.sizes = ["5,3,4,8", "6,2,3,5"]
    card = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    now = datetime.date.today().isoformat()
    print(f"{card}, torch {torch.__version__}, {now}", flush=True)
    start, failed, rows = time.perf_counter(), False, list[Row]()
    worker = Worker(options.patience, ["--log"] if options.log else [])
    try:
        todo = groups(options)
        for done, group in enumerate(todo):
            if time.perf_counter() - start > options.seconds:
                print(f"out of time: {len(todo) - done} of {len(todo)} groups are left out")
                break
            failed_here = False
            for answer in worker.ask(group):
                what = (group.cell, group.size, group.kind, group.precision)
                if "failed" in answer:
                    failed_here = True
                    print("FAILED", *what, answer["failed"], answer["why"], flush=True)
                elif "ms" in answer:
                    row = Row(card, torch.__version__, now, *what, **answer)
                    rows.append(row)
                    runner.write([asdict(row) for row in rows], options.csv)
            if failed_here:  # an error of CUDA would be met by every later call
                failed = True
                worker.end()
        if not options.no_handwriting:
            try:
                seconds = handwriting_epoch(options.device)
                print(f"an epoch of configs/handwriting/quickstart.yaml: {seconds:.2f} s")
            except subprocess.SubprocessError as error:
                failed = True
                print("FAILED handwriting:", str(error)[-300:])
    finally:
        worker.end()
    print(*table(rows), sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
