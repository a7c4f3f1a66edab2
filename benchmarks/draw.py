"""A training step of DRAW against its matrix products alone, and against code as people write it.

``python -m benchmarks.draw`` times, in turn, forward pass, loss and backward pass of the glimpses
in one function (`ln_zoo.ops.draw_forward`), of a loop of modules with autograd (`Eager`), and the
matrix products alone, same shapes and number. It prints ratios by round; see
``benchmarks/README.md``. ``--profile`` tells what takes the time of our step instead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import memory, runner
from benchmarks.timing import interleave, ratios
from ln_zoo.kernels import draw
from ln_zoo.ops import (
    KERNELS,
    Affine,
    DrawLSTM,
    DrawSettings,
    DrawWeights,
    RowNorm,
    Weights,
    divergence,
    draw_forward,
    select_draw_kernel,
)

BASELINE = "products"
NORMS = ("LayerNorm", "none")
PRECISIONS = ("float32", "bf16-mixed")


@dataclass(frozen=True)
class Size:
    """Glimpses, examples, pixels along each side, hidden units, latents, filters that read and
    write.

    Example:
        >>> Size(read=2, H=256).inputs
        264
    """

    T: int = 64
    N: int = 128
    side: int = 28
    H: int = 256
    Z: int = 100
    read: int = 2
    write: int = 5

    @property
    def inputs(self) -> int:
        """Of the encoder."""
        return 2 * self.read**2 + self.H


# The loop as people write it


class LayerNormLSTMCell(nn.LSTMCell):
    """`nn.LSTMCell` whose cell state is normalised on its way to h, by hand."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.norm = nn.LayerNorm(hidden_size)

    def forward(  # type: ignore[override]
        self, input: Tensor, hx: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The next h and c."""
        h, c = hx
        sums = F.linear(input, self.weight_ih, self.bias_ih)
        sums = sums + F.linear(h, self.weight_hh, self.bias_hh)
        i, f, g, o = sums.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(self.norm(c)), c


class Eager(nn.Module):
    """DRAW with modules, `torch.bmm` and autograd.

    Args:
        size: all sizes.
        norm: ``"LayerNorm"``, of cell states, or ``"none"``.
    """

    def __init__(self, size: Size, norm: str) -> None:
        super().__init__()
        cell = LayerNormLSTMCell if norm == "LayerNorm" else nn.LSTMCell
        self.size = size
        self.encoder, self.decoder = cell(size.inputs, size.H), cell(size.Z, size.H)
        self.mean, self.log_std = nn.Linear(size.H, size.Z), nn.Linear(size.H, size.Z)
        self.read, self.write = nn.Linear(size.H, 5), nn.Linear(size.H, 5)
        self.patch = nn.Linear(size.H, size.write**2)
        self.states = nn.Parameter(torch.zeros(4, size.H))
        self.canvas = nn.Parameter(torch.zeros(size.side, size.side))

    def filters(self, numbers: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """F_Y and F_X, (N, K, pixels), and gamma, (N, 1, 1)."""
        side = self.size.side
        g_x, g_y, log_variance, log_delta, log_gamma = numbers.chunk(5, 1)
        log_variance, log_delta = log_variance.clamp(-10, 10), log_delta.clamp(-10, 10)
        delta = (side - 1) / max(count - 1, 1) * torch.exp(log_delta)
        offsets = torch.arange(count, device=numbers.device) - (count - 1) / 2
        pixels = torch.arange(side, device=numbers.device)
        found = []
        for g in (g_y, g_x):
            mu = (side + 1) / 2 * (g + 1) - 1 + offsets * delta
            square = (pixels - mu.unsqueeze(2)) ** 2
            found.append(F.softmax(-square / (2 * torch.exp(log_variance).unsqueeze(2)), 2))
        return found[0], found[1], torch.exp(log_gamma).unsqueeze(2)

    def glimpse(self, x: Tensor, error: Tensor, h: Tensor) -> Tensor:
        """What the encoder reads, (N, 2 R^2)."""
        f_y, f_x, gamma = self.filters(self.read(h), self.size.read)
        patches = [
            gamma * torch.bmm(torch.bmm(f_y, image), f_x.transpose(1, 2)) for image in (x, error)
        ]
        return torch.cat([patch.flatten(1) for patch in patches], 1)

    def stroke(self, h: Tensor) -> Tensor:
        """What is added to the canvas, (N, pixels, pixels)."""
        f_y, f_x, gamma = self.filters(self.write(h), self.size.write)
        patch = self.patch(h).view(-1, self.size.write, self.size.write)
        return torch.bmm(torch.bmm(f_y.transpose(1, 2), patch), f_x) / gamma

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        """The variational bound in nats per image, of images (N, pixels, pixels)."""
        h_enc, c_enc, h_dec, c_dec = (s.expand(len(x), -1) for s in self.states)
        canvas, divergences = self.canvas.expand_as(x), []
        for e in noise:
            r = self.glimpse(x, x - torch.sigmoid(canvas), h_dec)
            h_enc, c_enc = self.encoder(torch.cat([r, h_dec], 1), (h_enc, c_enc))
            mean, log_std = self.mean(h_enc), self.log_std(h_enc).clamp(-10, 10)
            std = torch.exp(log_std)
            z = mean + std * e
            h_dec, c_dec = self.decoder(z, (h_dec, c_dec))
            canvas = canvas + self.stroke(h_dec)
            divergences.append(0.5 * (mean**2 + std**2 - 2 * log_std - 1).sum(1))
        pixels = F.binary_cross_entropy_with_logits(canvas, x, reduction="sum")
        return (pixels + torch.stack(divergences).sum()) / len(x)


# Ours, with the same parameters


def weights_of(model: Eager) -> DrawWeights:
    """The parameters of a model, as `draw_forward` takes them."""
    width = model.size.H

    def lstm(cell: nn.LSTMCell, h: Tensor, c: Tensor) -> DrawLSTM:
        state = RowNorm((width,))
        if isinstance(cell, LayerNormLSTMCell):
            norm = cell.norm
            state = RowNorm((width,), True, True, norm.eps, norm.weight, norm.bias)
        sums = RowNorm((4 * width,))
        weights = Weights(cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
        return DrawLSTM(weights, {"input": sums, "recurrent": sums, "cell": state}, h, c)

    def affine(*maps: nn.Linear) -> Affine:
        return Affine(torch.cat([m.weight for m in maps]), torch.cat([m.bias for m in maps]))

    h_enc, c_enc, h_dec, c_dec = model.states
    return DrawWeights(
        lstm(model.encoder, h_enc, c_enc),
        lstm(model.decoder, h_dec, c_dec),
        affine(model.mean, model.log_std),
        affine(model.read),
        affine(model.write),
        affine(model.patch),
        model.canvas,
    )


def ours(model: Eager, x: Tensor, noise: Tensor) -> Tensor:
    """As `Eager.forward`."""
    settings, weights = DrawSettings(model.size.read, model.size.write), weights_of(model)
    kernel = select_draw_kernel(x, noise, weights)
    assert kernel is not None
    logits, means, log_stds, _ = draw_forward(kernel, settings, x, noise, weights)
    pixels = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    return (pixels + divergence(means, log_stds).sum()) / len(x)


# The products alone


def products(size: Size, precision: str) -> Callable[[], None]:
    """All matrix products of a step: at each glimpse there and back, and those of weights."""
    narrow = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    shapes = (
        (size.inputs + size.H, 4 * size.H, narrow),
        (size.H, 2 * size.Z, narrow),
        (size.Z + size.H, 4 * size.H, narrow),
        (size.H, 10 + size.write**2, torch.float32),
    )
    calls = []
    for inputs, outputs, dtype in shapes:
        x, y = (torch.randn(size.T, size.N, n).to(dtype) for n in (inputs, outputs))
        w = torch.randn(outputs, inputs).to(dtype)
        calls.append((x, w, y, torch.empty_like(y[0]), torch.empty_like(x[0])))

    def run() -> None:
        for t in range(size.T):
            for x, w, _, out, _ in calls:
                torch.mm(x[t], w.t(), out=out)
        for t in range(size.T):
            for _, w, y, _, back in calls:
                torch.mm(y[t], w, out=back)
        for x, _, y, _, _ in calls:
            torch.mm(y.flatten(0, 1).t(), x.flatten(0, 1))

    return run


# Runs


def contestants(size: Size) -> dict[str, Callable[[], object]]:
    """A training step of each, by name and precision."""
    calls: dict[str, Callable[[], object]] = {}
    for precision in PRECISIONS:
        calls[f"{BASELINE} {precision}"] = products(size, precision)
        for norm in NORMS:
            calls[f"ours {norm} {precision}"] = step(size, ours, norm, precision)
            calls[f"eager {norm} {precision}"] = step(size, Eager.forward, norm, precision)
    return calls


def step(
    size: Size,
    forward: Callable[[Eager, Tensor, Tensor], Tensor],
    norm: str,
    precision: str,
) -> Callable[[], Tensor]:
    """Forward, loss, and gradients of all parameters; gives the loss."""
    torch.manual_seed(0)
    model = Eager(size, norm)
    x = (torch.rand(size.N, size.side, size.side) < 0.13).float()
    noise = torch.randn(size.T, size.N, size.Z)

    def run() -> Tensor:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = forward(model, x, noise)
        loss.backward()
        return loss.detach()

    return run


class Timed:
    """Steps of a glimpse, with the processor time that each kind takes.

    Args:
        steps: as `ln_zoo.kernels.draw.DrawSteps`.
        seconds: to be added to, by the name of the function.
    """

    def __init__(self, steps: Any, seconds: dict[str, float]) -> None:
        self._steps, self._seconds = steps, seconds

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._steps, name)

        def timed(*arguments: Any) -> Any:
            start = time.process_time()
            found = function(*arguments)
            self._seconds[name] = self._seconds.get(name, 0) + time.process_time() - start
            return found

        return timed


def profile(size: Size, norm: str, precision: str, rounds: int) -> dict[str, float]:
    """Processor seconds of a step of ours, by what takes them."""
    seconds: dict[str, float] = {}
    call = step(size, ours, norm, precision)
    call()
    found = []
    kernels = {k: k.steps for k in KERNELS if isinstance(k, draw.DrawKernel)}
    for kernel, maker in kernels.items():

        class TimedSteps(Timed):
            unsupported_reason, replayed = maker.unsupported_reason, maker.replayed
            product_dtype = maker.product_dtype

            def __init__(self, *given: Any, maker: Any = maker) -> None:
                super().__init__(maker(*given), seconds)

        kernel.steps = cast(Any, TimedSteps)
    # Products for gradients of weights stand outside of the steps.
    add_product = draw._add_product
    draw._add_product = Timed(draw, seconds)._add_product
    try:
        for _ in range(rounds):
            seconds.clear()
            start = time.process_time()
            call()
            whole = time.process_time() - start
            found.append(dict(seconds) | {"the rest": whole - sum(seconds.values())})
    finally:
        for kernel, maker in kernels.items():
            kernel.steps = maker
        draw._add_product = add_product
    return {name: sorted(f[name] for f in found)[rounds // 2] for name in found[0]}


def peak(name: str, size: Size) -> int:
    """Peak bytes of a training step, above what the process held before."""
    # What is made once per process (threads, compiled code, tables of libraries) does not count.
    contestants(Size(2, 2, size.side, size.H, size.Z, size.read, size.write))[name]()
    return memory.of_step(contestants(size)[name])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code."""
    parser = runner.parser("draw", __doc__, rounds=9, seconds=60)
    parser.add_argument("--steps", type=int, default=Size.T, help="glimpses T")
    parser.add_argument("--batch", type=int, default=Size.N, help="images N")
    parser.add_argument("--hidden", type=int, default=Size.H, help="units H of each LSTM")
    parser.add_argument("--latents", type=int, default=Size.Z, help="latents Z")
    parser.add_argument("--profile", action="store_true", help="tell what takes the time of ours")
    parser.add_argument("--no-peaks", action="store_true", help="do without peak memory")
    parser.add_argument("--peak", metavar="NAME", help="print the bytes that one takes, and end")
    arguments = runner.parse(parser, argv)
    size = Size(T=arguments.steps, N=arguments.batch, H=arguments.hidden, Z=arguments.latents)
    if arguments.peak:
        print(peak(arguments.peak, size))
        return 0
    if arguments.profile:
        for precision in PRECISIONS:
            _print_profile(precision, profile(size, NORMS[0], precision, arguments.rounds))
        return 0
    times = interleave(contestants(size), arguments.rounds, arguments.seconds)
    options = ("steps", "batch", "hidden", "latents", "threads")
    measured = () if arguments.no_peaks else times
    peaks = memory.of_contestants("benchmarks.draw", measured, options, arguments)
    sizes = {"T": size.T, "N": size.N, "H": size.H, "Z": size.Z}
    found = []
    for name in times:
        base = times[f"{BASELINE} {name.split()[-1]}"]
        in_float32 = times[name.replace(PRECISIONS[1], PRECISIONS[0])]
        found.append(
            runner.row(sizes, name, times[name], base)
            | {
                "faster_than_float32": ratios(in_float32.cpu, times[name].cpu).median,
                "peak_mib": peaks[name] / 2**20 if peaks else None,
            }
        )
    more = {
        "faster than float32": ("faster_than_float32", ".2f"),
        "peak MiB": ("peak_mib", ".0f"),
    }
    caption = "ratios are to the products alone in the same precision"
    runner.report(found, sizes, arguments.csv, more, caption)
    return 0


def _print_profile(precision: str, seconds: dict[str, float]) -> None:
    whole = sum(seconds.values())
    table = Table(title=f"our training step with {NORMS[0]}, {precision}: {whole:.3f} s")
    for column in ("", "ms", "%"):
        table.add_column(column)
    for name, part in sorted(seconds.items(), key=lambda pair: -pair[1]):
        table.add_row(name, f"{part * 1000:.1f}", f"{100 * part / whole:.1f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
