"""Chunks of consecutive time steps, and the rows of packed data that belong to them.

Step t owns ``sizes[t]`` rows. Sizes never grow; a padded batch has equal sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TimeChunk:
    """Consecutive time steps, ``sizes`` rows each."""

    first: int  # row of the first step's first example
    last: int  # one past the last row
    sizes: tuple[int, ...]
    before: int  # rows of the previous step; for the first step, the number of examples
    step: int  # index of the first step

    @property
    def rows(self) -> slice:
        return slice(self.first, self.last)

    @property
    def count(self) -> int:
        return self.last - self.first

    @property
    def steps(self) -> slice:
        return slice(self.step, self.step + len(self.sizes))


def time_chunks(sizes: Sequence[int], least_rows: int, least_steps: int = 1) -> list[TimeChunk]:
    """Split time into chunks of at least these rows and steps, except the last."""
    found: list[TimeChunk] = []
    first = row = step = 0
    before = sizes[0]
    for t, size in enumerate(sizes):
        row += size
        full = row - first >= least_rows and t + 1 - step >= least_steps
        if full or t == len(sizes) - 1:
            found.append(TimeChunk(first, row, tuple(sizes[step : t + 1]), before, step))
            first, step, before = row, t + 1, size
    return found


def step_sizes(x: Tensor, batch_sizes: Tensor | None) -> list[int]:
    """Rows of each step."""
    return [x.shape[1]] * x.shape[0] if batch_sizes is None else batch_sizes.tolist()


def rows_of(a: Tensor, packed: bool, span: TimeChunk) -> Tensor:
    """Rows (rows, F) of a span, contiguous, of a padded (T, N, F) or packed (total, F)."""
    if packed:
        return a[span.first : span.last].contiguous()
    examples = a.shape[1]
    start, steps = span.first // max(examples, 1), len(span.sizes)
    return a[start : start + steps].reshape(steps * examples, a.shape[2]).contiguous()


def previous_rows(
    start: Tensor, after: Tensor, span: TimeChunk, reset: Tensor | None = None
) -> Tensor:
    """Values of the previous step for each row of a chunk, (rows, F).

    ``start`` (N, F) precedes the first step; ``after`` (total, F) follows the step of each row;
    ``reset`` (rows,) marks rows of the chunk whose values are zeros.
    """
    if span.first and span.sizes[-1] == span.before:
        rows = after[span.first - span.before : span.last - span.before]
        return rows if reset is None else rows.masked_fill(reset.unsqueeze(1), 0)
    parts = []
    before = span.before
    for run in equal_steps(span.sizes):
        first, last, n = run.rows.start + span.first, run.rows.stop + span.first, run.examples
        # Its first step follows a step of another size.
        parts.append(after[first - before : first - before + n] if first else start[:n])
        parts.append(after[first : last - n])
        before = n
    rows = torch.cat([part.to(after.dtype) for part in parts if len(part)] or [start[:0]])
    return rows if reset is None else rows.masked_fill_(reset.unsqueeze(1), 0)


@dataclass(frozen=True)
class EqualSteps:
    """Consecutive steps with the same number of examples; ``rows`` and ``steps`` are slices."""

    rows: slice
    steps: slice
    examples: int

    def of(self, a: Tensor) -> Tensor:
        """Its rows of a (rows, F), as (steps, examples, F)."""
        return a[self.rows].unflatten(0, (self.steps.stop - self.steps.start, self.examples))

    def each(self, a: Tensor) -> Tensor:
        """Its part of (steps, F), as (steps, 1, F); or a vector (F,) for all."""
        return a if a.dim() < 2 else a[self.steps].unsqueeze(1)


def equal_steps(sizes: Sequence[int]) -> list[EqualSteps]:
    """Split steps where the number of examples changes."""
    found: list[EqualSteps] = []
    row = start = 0
    for size, equal in itertools.groupby(sizes):
        steps = len(list(equal))
        rows = slice(row, row + size * steps)
        found.append(EqualSteps(rows, slice(start, start + steps), size))
        row, start = rows.stop, start + steps
    return found


def sum_examples(a: Tensor, pieces: Iterable[EqualSteps], out: Tensor) -> Tensor:
    """Write the sums over examples of a (rows, F) to out (steps, F), and return it."""
    for run in pieces:
        torch.sum(run.of(a), 1, dtype=out.dtype, out=out[run.steps])
    return out


def dropped_rows(a: Tensor, mask: Tensor, sizes: Sequence[int], out: Tensor) -> Tensor:
    """Write rows a (rows, F) times the mask of their examples, (N, F), to out, and return it."""
    for run in equal_steps(sizes):
        torch.mul(run.of(a), mask[: run.examples], out=run.of(out))
    return out


def without_means(
    a: Tensor, sizes: Sequence[int], wide: torch.dtype, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Subtract from rows a (rows, F) their mean over the examples of each step.

    Returns the centred rows, in ``out`` (which may be a) or new memory, and the means, (steps, F),
    of dtype ``wide``.
    """
    pieces = equal_steps(sizes)
    means = sum_examples(a, pieces, a.new_empty(len(sizes), a.shape[1], dtype=wide))
    out = torch.empty_like(a) if out is None else out
    for run in pieces:
        means[run.steps].div_(run.examples)
        torch.sub(run.of(a), run.each(means), out=run.of(out))
    return out, means
