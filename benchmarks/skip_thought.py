"""A training step of skip-thoughts with layer normalisation against `torch.nn.GRU`, on the CPU.

``python -m benchmarks.skip_thought`` times, in turn, the forward and backward pass of the model
with layer normalisation, without, and with `torch.nn.GRU` in place of our layers; the rest of the
model is the same. It prints ratios by round; see ``benchmarks/README.md``. ``--shares`` tells what
the step spends on recurrence, input projections and softmax instead; ``--bfloat16`` adds what the
softmax takes with its products in bfloat16.

Sources have 16 tokens, the sentences around them 2 to 30, 16 on average.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import runner
from ln_zoo.models import SkipThought
from ln_zoo.norms import Identity, LayerNorm, Norm

BASELINE = "torch.nn"
NORMS: dict[str, Norm] = {"LayerNorm": LayerNorm(), "none": Identity(), BASELINE: Identity()}
_LAYERS = ("encoder", "next_decoder", "previous_decoder")
_SOURCE, _LONGEST = 16, 30
IN_BFLOAT16 = "softmax, products in bfloat16"


def build(name: str, hidden: int, embedding: int, words: int) -> SkipThought:
    """The model of a contestant, with random weights."""
    with torch.device("meta"):
        vocabulary = [f"w{i}" for i in range(words - 2)]
        model = SkipThought(vocabulary, hidden, embedding, NORMS[name])
        if name == BASELINE:
            for layer in _LAYERS:
                ours = getattr(model, layer)
                setattr(model, layer, nn.GRU(*_sizes(ours), batch_first=ours.batch_first))
    # Drawing orthogonal matrices of the full size would take minutes.
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("gain"):
                parameter.fill_(1.0)
            else:
                parameter.uniform_(-0.03, 0.03)
    return model


def make_batch(examples: int, words: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """A training batch, the same for all contestants."""
    generator = torch.Generator().manual_seed(0)
    lengths = [torch.full((examples,), _SOURCE)]
    lengths += [torch.randint(2, _LONGEST + 1, (examples,), generator=generator) for _ in range(2)]
    parts = []
    for of_part in lengths:
        tokens = torch.randint(1, words, (examples, int(of_part.max())), generator=generator)
        for row, length in zip(tokens, of_part.tolist(), strict=True):
            row[length - 1 :] = 0
        parts.append((tokens, of_part))
    return tuple(parts)


def contestants(
    examples: int, hidden: int, embedding: int, words: int
) -> dict[str, Callable[[], object]]:
    """A training step of each, by name: forward and backward, gradients of all parameters."""
    batch = make_batch(examples, words)
    calls: dict[str, Callable[[], object]] = {}
    for name in NORMS:
        model = build(name, hidden, embedding, words)
        calls[name] = runner.training_step(model, functools.partial(model.loss, batch))
    return calls


def shares(
    name: str,
    examples: int,
    hidden: int,
    embedding: int,
    words: int,
    rounds: int,
    bfloat16: bool = False,
) -> dict[str, float]:
    """Processor seconds of a step, and of its parts, each timed alone on inputs of its own.

    What layers take beyond their input projections counts as recurrence.
    """
    model, batch = build(name, hidden, embedding, words), make_batch(examples, words)
    tokens = [int(lengths.sum()) for _, lengths in batch]
    said = sum(tokens[1:])
    states = torch.randn(said, hidden).mul_(0.3).requires_grad_()
    targets = torch.cat([t[torch.arange(t.shape[1]) < n.unsqueeze(1)] for t, n in batch[1:]])
    inputs = [torch.randn(n, embedding).mul_(0.1).requires_grad_() for n in tokens]
    weights = [getattr(model, layer).weight_ih_l0 for layer in _LAYERS]
    upstream = [torch.randn(n, 3 * hidden) for n in tokens]

    def layers() -> Tensor:
        vectors = model(*batch[0])
        told = model._decode(model.next_decoder, vectors, *batch[1])
        other = model._decode(model.previous_decoder, vectors, *batch[2])
        return told.states.sum() + other.states.sum()

    def projections() -> Tensor:
        sums = [F.linear(x, w) for x, w in zip(inputs, weights, strict=True)]
        return torch.stack([(a * b).sum() for a, b in zip(sums, upstream, strict=True)]).sum()

    def softmax_in_bfloat16() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.softmax.loss(states, targets)

    calls = {
        "step": runner.training_step(model, functools.partial(model.loss, batch)),
        "layers": runner.training_step(model, layers),
        "projections": runner.training_step(model, projections),
        "softmax": runner.training_step(
            model, functools.partial(model.softmax.loss, states, targets)
        ),
    }
    if bfloat16:
        calls[IN_BFLOAT16] = runner.training_step(model, softmax_in_bfloat16)
    found: dict[str, list[float]] = {part: [] for part in calls}
    for round_ in range(rounds + 1):
        for part, call in calls.items():
            start = time.process_time()
            call()
            if round_:  # the first is to warm up
                found[part].append(time.process_time() - start)
    seconds = {part: statistics.median(times) for part, times in found.items()}
    recurrence = seconds["layers"] - seconds["projections"]
    rest = seconds["step"] - seconds["layers"] - seconds["softmax"]
    return {
        "recurrence": recurrence,
        "input projections": seconds["projections"],
        "softmax": seconds["softmax"],
        "the rest": rest,
        "whole step": seconds["step"],
        **({IN_BFLOAT16: seconds[IN_BFLOAT16]} if bfloat16 else {}),
    }


def _sizes(layer: nn.RNNBase) -> tuple[int, int]:
    return layer.input_size, layer.hidden_size


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code."""
    parser = runner.parser("skip_thought", __doc__, rounds=3, seconds=300)
    parser.add_argument("--batch", type=int, default=64, help="triples N")
    parser.add_argument("--hidden", type=int, default=2400, help="size D of a sentence's vector")
    parser.add_argument("--embedding", type=int, default=620, help="size E of a word's vector")
    parser.add_argument("--words", type=int, default=20_000, help="words V")
    parser.add_argument("--shares", action="store_true", help="tell what takes the time of a step")
    parser.add_argument(
        "--bfloat16", action="store_true", help="with --shares: the softmax in bfloat16 too"
    )
    arguments = runner.parse(parser, argv)
    torch.set_flush_denormal(True)
    size = (arguments.batch, arguments.hidden, arguments.embedding, arguments.words)
    if arguments.shares:
        options = (arguments.rounds, arguments.bfloat16)
        _print_shares({name: shares(name, *size, *options) for name in NORMS})
        return 0
    sizes = dict(zip(("N", "D", "E", "V"), size, strict=True))
    found = runner.compare(contestants(*size), BASELINE, sizes, arguments)
    runner.report(found, sizes, arguments.csv)
    return 0


def _print_shares(found: dict[str, dict[str, float]]) -> None:
    table = Table(title="processor seconds of a training step, and shares")
    table.add_column("")
    for name in found:
        table.add_column(name)
    for part in next(iter(found.values())):
        cells = []
        for seconds in found.values():
            share = 100 * seconds[part] / seconds["whole step"]
            cells.append(f"{seconds[part]:.3f} ({share:.0f} %)")
        table.add_row(part, *cells)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
