"""What the penalty of order embeddings costs beside the encoder, on the CPU.

``python -m benchmarks.order_embedding`` times, in turn, the encoder of captions alone (word
vectors, GRU, last states), the loss of given embeddings (`order_violation` and the hinges), and
the loss with all differences at once, as one would write it in torch; forward and backward each.
It prints ratios to the encoder by round; see ``benchmarks/README.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks import runner
from ln_zoo.models import OrderEmbedding
from ln_zoo.norms import Identity, LayerNorm

BASELINE = "encoder, none"


def all_at_once(captions: Tensor, images: Tensor) -> Tensor:
    """The penalties (M, N) by a tensor of all differences, (M, N, D)."""
    return (captions.unsqueeze(1) - images).clamp(min=0).square().sum(-1)


def contestants(
    batch: int, tokens: int, words: int, hidden: int
) -> dict[str, Callable[[], object]]:
    """A forward and backward pass of each, by name."""
    torch.manual_seed(0)
    captions = torch.randint(2, words, (batch, tokens))
    lengths = torch.full((batch,), tokens)
    calls: dict[str, Callable[[], object]] = {}

    def total(model: OrderEmbedding) -> Tensor:
        return model.embed_captions(captions, lengths).sum()

    vocabulary = [f"w{i}" for i in range(words)]
    for name, norm in {"none": Identity(), "LayerNorm": LayerNorm()}.items():
        model = OrderEmbedding(vocabulary, hidden_size=hidden, norm=norm)
        calls[f"encoder, {name}"] = runner.training_step(model, partial(total, model))
    s, v = (torch.rand(batch, hidden).div(hidden**0.5).requires_grad_() for _ in range(2))
    calls["loss"] = _loss(model, s, v)
    plain = OrderEmbedding(vocabulary, hidden_size=hidden)
    plain.penalties = all_at_once  # type: ignore[assignment]
    calls["loss, all differences at once"] = _loss(plain, s, v)
    return calls


def _loss(model: OrderEmbedding, s: Tensor, v: Tensor) -> Callable[[], object]:
    def call() -> None:
        torch.autograd.grad(model.loss(s, v), (s, v))

    return call


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code."""
    parser = runner.parser("order_embedding", __doc__, rounds=9, seconds=60)
    parser.add_argument("--batch", type=int, default=128, help="captions N, and images")
    parser.add_argument("--tokens", type=int, default=12, help="tokens T of each caption")
    parser.add_argument("--words", type=int, default=10_000, help="words of the vocabulary")
    parser.add_argument("--hidden", type=int, default=1024, help="units H, and size of the space")
    arguments = runner.parse(parser, argv)
    calls = contestants(arguments.batch, arguments.tokens, arguments.words, arguments.hidden)
    sizes = {"T": arguments.tokens, "N": arguments.batch, "H": arguments.hidden}
    found = runner.compare(calls, BASELINE, sizes, arguments)
    runner.report(found, sizes, arguments.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
