"""Train a layer on whole sequences, then run its cell sample by sample.

    python examples/stream_steps.py

The network predicts the next sample of a sum of two sines. The cell has the layer's weights and a
state, and gives the same predictions. Only the recurrent term is normalised: layer norm would
reduce an input of one number to its sign.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ln_zoo import GRU, LayerNorm

HIDDEN = 32


def signals(number: int, samples: int, generator: torch.Generator) -> Tensor:
    """Sums of two sines of random phases, (samples, number, 1)."""
    t = torch.arange(samples).view(-1, 1)
    phases = torch.rand(2, 1, number, generator=generator) * 2 * torch.pi
    return ((0.2 * t + phases[0]).sin() + (0.31 * t + phases[1]).sin()).unsqueeze(-1) / 2


class Predictor(nn.Module):
    """The next sample after each sample of whole sequences, (T, N, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = GRU(1, HIDDEN, norm=LayerNorm(), normalize=("recurrent",))
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(x)
        return self.out(output)


class Stream:
    """The predictor, sample by sample."""

    def __init__(self, trained: Predictor) -> None:
        self.cell = trained.rnn.to_cell()
        self.out = trained.out
        self.state: Tensor | None = None

    @torch.no_grad()
    def push(self, sample: Tensor) -> Tensor:
        """Predict the next sample from a sample (N, 1)."""
        self.state = self.cell(sample, self.state)
        return self.out(self.state)


def main(updates: int = 100) -> dict[str, float]:
    """Train and stream; return the error and the largest difference."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Predictor()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(updates):
        x = signals(16, 41, generator)
        loss = F.mse_loss(model(x[:-1]), x[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    x = signals(1, 201, generator)
    with torch.no_grad():
        whole = model(x[:-1])
    stream, steps, seconds = Stream(model), [], []
    for sample in x[:-1]:
        start = time.perf_counter()
        steps.append(stream.push(sample))
        seconds.append(time.perf_counter() - start)
    predicted = torch.stack(steps)
    # The first samples are needed to infer the phases.
    error = F.mse_loss(predicted[50:], x[51:]).sqrt().item()
    difference = (predicted - whole).abs().max().item()
    print(f"root mean square error from sample 50 on: {error:.3f}; the signal's: 0.5")
    print(f"streamed and whole differ by at most {difference:.1e}")
    print(f"a step takes {1e6 * statistics.median(seconds):.0f} microseconds")
    return {"error": error, "difference": difference}


if __name__ == "__main__":
    main()
