"""Packed sequences of different lengths in a bidirectional LSTM with layer normalisation.

    python examples/packed_sequences.py

A network learns which of four symbols a sequence starts with. It takes packed sequences like
`torch.nn.LSTM`; outputs do not depend on padding or on other examples.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from ln_zoo import LSTM, LayerNorm

SYMBOLS, SHORTEST, LONGEST = 4, 2, 20


class FirstSymbol(nn.Module):
    """Logits (N, 4) from packed sequences of numbers of symbols."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, 16)
        self.rnn = LSTM(16, hidden, bidirectional=True, norm=LayerNorm())
        self.out = nn.Linear(2 * hidden, SYMBOLS)

    def forward(self, sequences: PackedSequence) -> Tensor:
        embedded = sequences._replace(data=self.embedding(sequences.data))
        _, (h, _) = self.rnn(embedded)  # the last state of each sequence, in the order given
        return self.out(torch.cat([h[0], h[1]], -1))


def batch(generator: torch.Generator, size: int = 16) -> tuple[list[Tensor], Tensor]:
    """Sequences of lengths 2 to 20, unsorted, and their first symbols."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (size,), generator=generator).tolist()
    found = [torch.randint(SYMBOLS, (n,), generator=generator) for n in lengths]
    return found, torch.stack([sequence[0] for sequence in found])


def packed(sequences: list[Tensor]) -> PackedSequence:
    """Pack sequences in any order."""
    return pack_sequence(sequences, enforce_sorted=False)


@torch.no_grad()
def padding_is_not_seen(model: FirstSymbol, sequences: list[Tensor]) -> float:
    """Largest difference between outputs in a batch and outputs of each sequence alone."""
    vectors = packed(sequences)
    output, _ = model.rnn(vectors._replace(data=model.embedding(vectors.data)))
    padded, lengths = pad_packed_sequence(output)
    alone = [model.rnn(model.embedding(sequence))[0] for sequence in sequences]
    return max(
        (padded[:n, i] - alone[i]).abs().max().item() for i, n in enumerate(lengths.tolist())
    )


def main(updates: int = 100) -> dict[str, float]:
    """Train, and return the accuracy and the largest difference."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = FirstSymbol()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    start = time.perf_counter()
    for _ in range(updates):
        sequences, first = batch(generator)
        loss = F.cross_entropy(model(packed(sequences)), first)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    sequences, first = batch(generator, 256)
    model.eval()
    right = (model(packed(sequences)).argmax(-1) == first).double().mean().item()
    difference = padding_is_not_seen(model, sequences[:16])
    print(f"{updates} updates in {seconds:.1f} s: {100 * right:.1f} % of 256 new sequences right")
    print(f"outputs in a batch and alone differ by at most {difference:.1e}")
    return {"accuracy": right, "difference": difference}


if __name__ == "__main__":
    main()
