"""Truncated backpropagation through time with Lightning: states are carried, gradients are not.

    python examples/truncated_backpropagation.py

Lightning 2 has no option for it. With manual optimisation it is a loop over pieces of a batch, with
a detached state and an update after each piece. The task is to recall the input of ``DELAY`` steps
ago, which is shorter than a piece.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ln_zoo import LSTM, LayerNorm

SYMBOLS, LENGTH, PIECE, DELAY = 4, 200, 20, 3
State = tuple[Tensor, Tensor]


class Delayed(LightningModule):
    """Logits (T, N, 4) of the input some steps ago."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rnn = LSTM(SYMBOLS, hidden, norm=LayerNorm())
        self.out = nn.Linear(hidden, SYMBOLS)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        output, state = self.rnn(F.one_hot(x, SYMBOLS).float(), state)
        return self.out(output), state

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer, state = self.optimizers(), None
        for piece, wanted in pieces(batch):
            logits, state = self(piece, state)
            loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            state = detached(state)
        self.log("train_loss", loss, batch_size=batch.shape[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def pieces(batch: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets (T, N), piece by piece."""
    return list(zip(batch[DELAY:].split(PIECE), batch[:-DELAY].split(PIECE), strict=True))


def detached(state: State) -> State:
    """Detach a state from its graph."""
    h, c = state
    return h.detach(), c.detach()


@torch.no_grad()
def evaluate(model: Delayed, batch: Tensor) -> tuple[float, float]:
    """Accuracy, and difference between pieces with a carried state and the whole sequence."""
    whole, _ = model(batch[DELAY:])
    parts, state = [], None
    for piece, _ in pieces(batch):
        logits, state = model(piece, state)
        parts.append(logits)
    right = (whole.argmax(-1) == batch[:-DELAY])[PIECE:].double().mean().item()
    return right, (torch.cat(parts) - whole).abs().max().item()


def main(batches: int = 20) -> dict[str, float]:
    """Train, and return accuracy, difference and updates."""
    torch.manual_seed(0)
    data = torch.randint(SYMBOLS, (batches + 1, LENGTH + DELAY, 16))
    model = Delayed()
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data[1:], batch_size=None))
    accuracy, difference = evaluate(model.eval(), data[0])
    print(f"{trainer.global_step} updates: {100 * accuracy:.1f} % right, a guess has 25 %")
    print(f"pieces with a carried state and the whole differ by at most {difference:.1e}")
    return {"accuracy": accuracy, "difference": difference, "updates": trainer.global_step}


if __name__ == "__main__":
    main()
