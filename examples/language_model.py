"""Add layer normalisation to a trained character language model in plain PyTorch.

    python examples/language_model.py

It trains a small LSTM, converts it with `ln_zoo.normalize_`, and prints the perplexity on held-out
text before and after conversion, after calibration on a batch, and after another epoch, compared
with the plain model after the same epoch. The text is a novel from ``LN_ZOO_DATA`` if it has books,
otherwise Python's documentation.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tarfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ln_zoo

BATCH, STEPS = 32, 64


class LanguageModel(nn.Module):
    """An LSTM that predicts the next character, without ln_zoo."""

    def __init__(self, characters: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 64)
        self.rnn = nn.LSTM(64, hidden, batch_first=True)
        self.out = nn.Linear(hidden, characters)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Logits of the next characters, (N, T, V); stores the state for the next batch."""
        output, (h, c) = self.rnn(self.embedding(x), state)
        self.state = (h.detach(), c.detach())
        return self.out(output)


def text() -> tuple[str, str]:
    """Name of the text, and the text."""
    folder = Path(os.environ.get("LN_ZOO_DATA", "")) / "books"
    for path in sorted(folder.glob("*.tar.gz")):
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and member.name.endswith(".txt"):
                    file = archive.extractfile(member)
                    assert file is not None
                    return Path(member.name).stem, file.read().decode(errors="replace")
    from pydoc_data.topics import topics

    return "Python's documentation", "\n".join(topics[name] for name in sorted(topics))


def batches(data: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets, (N, T); each row continues in the next batch."""
    length = (len(data) - 1) // BATCH
    rows = data[: length * BATCH].view(BATCH, length)
    targets = data[1 : length * BATCH + 1].view(BATCH, length)
    return list(zip(rows.split(STEPS, 1), targets.split(STEPS, 1), strict=True))[: length // STEPS]


def loss_of(model: nn.Module, x: Tensor, y: Tensor, state: object) -> Tensor:
    """Nats per character."""
    return F.cross_entropy(model(x, state).flatten(0, 1), y.flatten())


@torch.no_grad()
def perplexity(model: LanguageModel, data: list[tuple[Tensor, Tensor]]) -> float:
    """Perplexity per character on held-out text."""
    model.eval()
    total, state = 0.0, None
    for x, y in data:
        total += loss_of(model, x, y, state).item()
        state = model.state
    return torch.tensor(total / len(data)).exp().item()


def train(
    model: LanguageModel, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]
) -> float:
    """Train for an epoch; return the median time of an update in milliseconds."""
    model.train()
    times, state = [], None
    for x, y in data:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, x, y, state).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state = model.state
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Print the table and return its numbers."""
    parser = argparse.ArgumentParser(description="A plain language model, converted.")
    parser.add_argument("--characters", type=int, default=400_000, help="of text to train on")
    parser.add_argument("--hidden", type=int, default=128, help="units of the LSTM")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)

    name, string = text()
    string = string[: options.characters + options.characters // 10]
    known = sorted(set(string))
    data = torch.tensor([known.index(c) for c in string])
    held_out = batches(data[options.characters :])
    data = data[: options.characters]
    model = LanguageModel(len(known), options.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    train(model, optimizer, batches(data))
    found = {"plain, after an epoch": perplexity(model, held_out)}

    # Only the recurrent layer: normalised logits would lose their scale.
    uncalibrated = copy.deepcopy(model)
    ln_zoo.normalize_(uncalibrated, ln_zoo.LayerNorm(), include="rnn")
    found["converted"] = perplexity(uncalibrated, held_out)

    plain, plain_optimizer = copy.deepcopy((model, optimizer))
    start = time.perf_counter()
    x, _ = batches(data)[-1]
    report = ln_zoo.normalize_(model, ln_zoo.LayerNorm(), include="rnn", calibrate=x)
    found["seconds of calibration"] = time.perf_counter() - start
    found["calibrated"] = perplexity(model, held_out)

    # The optimizer stays valid: parameters are the same objects, and gains are added.
    optimizer.add_param_group({"params": list(report.new_parameters.values())})
    found["ms an update, converted"] = train(model, optimizer, batches(data))
    found["converted, an epoch later"] = perplexity(model, held_out)
    found["ms an update, plain"] = train(plain, plain_optimizer, batches(data))
    found["plain, an epoch later"] = perplexity(plain, held_out)

    print(f"{name}, {len(data):,} characters, {options.hidden} units\n\n{report}\n")
    for what, value in found.items():
        print(f"{what:<28}{value:8.2f}")
    return found


if __name__ == "__main__":
    main()
