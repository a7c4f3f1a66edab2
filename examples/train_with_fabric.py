"""Your own training loop with Lightning Fabric, in mixed precision and on several devices.

    python examples/train_with_fabric.py
    python examples/train_with_fabric.py --precision bf16-mixed

An LSTM with layer normalisation reads scikit-learn's digits row by row. The layers do not depend on
Lightning; statistics stay in float32 under mixed precision.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from ln_zoo import LSTM, LayerNorm
from ln_zoo.data import Digits


class RowReader(nn.Module):
    """Logits (N, 10) of images (N, 1, 8, 8), one row per step."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = LSTM(8, 64, batch_first=True, norm=LayerNorm())
        self.out = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        output, _ = self.rnn(images.squeeze(1))
        return self.out(output[:, -1])


def main(argv: Sequence[str] = ()) -> dict[str, float]:
    """Train, and return the error on the test images."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args(argv)
    fabric = Fabric(accelerator="cpu", devices=arguments.devices, precision=arguments.precision)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    data = Digits(batch_size=32)
    data.setup()
    model = RowReader()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    # The loaders of the data module distribute examples over processes.
    for _ in range(arguments.epochs):
        for images, labels in data.train_dataloader():
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()

    model.eval()
    wrong = total = 0
    with torch.no_grad():
        for images, labels in data.test_dataloader():
            wrong += int((model(images).argmax(-1) != labels).sum())
            total += len(labels)
    counts = fabric.all_reduce(torch.tensor([wrong, total]), reduce_op="sum")
    error = counts[0].item() / counts[1].item()
    fabric.print(f"{arguments.precision}: {100 * error:.1f} % of {counts[1]} test images wrong")
    return {"error": error, "examples": counts[1].item()}


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
