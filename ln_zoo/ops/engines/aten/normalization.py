"""Normalisation at the places of a cell in torch functions, forward and backward.

With x a normalised row (over examples: column) of m elements and r its reciprocal deviation, the
gradient d of x becomes ``r (d - mean(d) - x sum(d x) / (m - correction))``. Means are not
subtracted from products: weights, or the states they multiply, are centred.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ln_zoo.ops.engines.base import Statistics
from ln_zoo.ops.spec import Examples, Rows
from ln_zoo.ops.time_chunks import EqualSteps, sum_examples

#: Uninitialised memory by name and shape.
Scratch = Callable[..., Tensor]


def affine(
    a: Tensor, scale: Tensor, offset: Tensor, pieces: Sequence[EqualSteps], out: Tensor
) -> Tensor:
    """Write ``scale * a + offset`` to out, a (rows, F), scale and offset (F,) or (steps, F)."""
    if scale.dim() == offset.dim() == 1:
        return torch.addcmul(offset, a, scale, out=out)
    for run in pieces:
        torch.addcmul(run.each(offset), run.of(a), run.each(scale), out=run.of(out))
    return out


class Groups:
    """Normalise rows (n, F) group by group; ``centred``: their means are already 0.

    ``like`` is a tensor of the rows' device and dtype.
    """

    def __init__(self, rows: Rows, centred: bool, hidden: int, like: Tensor) -> None:
        self.scale, self.center = rows.scale, rows.scale and rows.center and not centred
        ends = list(itertools.accumulate((hidden * n for n in rows.groups), initial=0))
        self.columns = [slice(a, b) for a, b in itertools.pairwise(ends)]
        self.features = [b - a for a, b in itertools.pairwise(ends)]
        self.eps = like.new_tensor([rows.eps])
        self.roots = like.new_tensor([n**-0.5 for n in self.features])

    def normalize(self, a: Tensor, r: Tensor, out: Tensor) -> None:
        """Write normalised rows to out and reciprocal deviations to r, (n, groups).

        Overwrites a unless it is centred; out may be a.
        """
        if self.center:
            for columns in self.columns:
                part = a[:, columns]
                part.sub_(part.mean(1, keepdim=True))
        if len(self.columns) == 1:
            torch.linalg.vector_norm(a, dim=1, keepdim=True, out=r)
            torch.addcmul(self.eps, r, r, value=1 / self.features[0], out=r).rsqrt_()
            torch.mul(a, r, out=out)
            return
        for k, columns in enumerate(self.columns):
            torch.linalg.vector_norm(a[:, columns], dim=1, keepdim=True, out=r[:, k : k + 1])
        r.mul_(self.roots)
        torch.addcmul(self.eps, r, r, out=r).rsqrt_()
        for k, columns in enumerate(self.columns):
            torch.mul(a[:, columns], r[:, k : k + 1], out=out[:, columns])

    def adjoint(self, d: Tensor, rows: Tensor, r: Tensor, products: Tensor) -> None:
        """Replace the gradient d (n, F) of normalised rows by their input's."""
        torch.mul(d, rows, out=products)
        if len(self.columns) == 1:
            d.addcmul_(rows, products.sum(1, keepdim=True), value=-1 / self.features[0]).mul_(r)
            return
        for k, columns in enumerate(self.columns):
            mean = products[:, columns].mean(1, keepdim=True)
            part = d[:, columns]
            part.addcmul_(rows[:, columns], mean, value=-1).mul_(r[:, k : k + 1])


class RowPlace:
    """A place that normalises rows, or the identity; normalised rows are saved.

    ``gain`` (G,) includes the signs of the cell; ``back`` (G,) is the factor of the gradients of
    normalised rows. ``centred``: means to subtract are already 0.
    """

    batch = False
    #: Columns of ``Saved.stats`` that it writes; 0: saved rows are not normalised.
    factors: int
    #: Added to scaled products, (steps, G); ``None`` for 0.
    offset: Tensor | None = None

    def __init__(self, rows: Rows, gain: Tensor, back: Tensor, centred: bool, hidden: int) -> None:
        self.gain, self._back = gain, back
        self._groups = Groups(rows, centred, hidden, gain)
        self.factors = len(rows.groups)

    def begin(
        self, statistics: Statistics | None, pieces: Sequence[EqualSteps], forward: bool
    ) -> None:
        """Prepare for consecutive steps."""

    # Forward

    def operand(self, t: int, state: Tensor, operand: Tensor) -> Tensor:
        return operand

    def normalize(self, t: int, rows: Tensor, r: Tensor, out: Tensor) -> Tensor:
        """Write the normalised rows of step t to out; returns the remaining factor, (G,)."""
        if self.factors:
            self._groups.normalize(rows, r, out)
        elif out is not rows:
            out.copy_(rows)
        return self.gain

    def normalize_all(self, rows: Tensor, r: Tensor) -> Tensor:
        """`normalize` for all steps, in place."""
        if self.factors:
            self._groups.normalize(rows, r, rows)
        return self.gain

    def finish(self, weight: Tensor) -> None:
        """After the last step, with the weight (H, G)."""

    # Backward

    def restored(self, kept: Tensor, name: str, scratch: Scratch) -> Tensor:
        """Normalised rows from saved ones, or in scratch memory of that name."""
        wide = kept.dtype == self.gain.dtype
        return kept if wide else scratch(name, *kept.shape).copy_(kept)

    def backs(self, steps: int) -> Sequence[Tensor]:
        """Factors of the gradients of normalised rows, per step."""
        return [self._back] * steps

    def adjoint(self, d: Tensor, rows: Tensor, r: Tensor, products: Tensor) -> None:
        """Backpropagate gradients d (n, G) of one step through the division, in place."""
        if self.factors:
            self._groups.adjoint(d, rows, r, products)

    def all_back(self, d: Tensor, rows: Tensor, r: Tensor, out: Tensor) -> None:
        """`adjoint` for all steps, from gradients d of ``gain * rows``; d is overwritten."""
        torch.mul(d, self._back, out=out)
        self.adjoint(out, rows, r, d)


class ExamplePlace:
    """A place that normalises over examples; see `RowPlace`. Rows are saved centred.

    Squares are summed explicitly: torch's variance functions are slow over rows. ``narrow`` is the
    dtype of products.
    """

    factors = 0
    offset: Tensor | None

    def __init__(
        self, place: Examples, gain: Tensor, back: Tensor, hidden: int, narrow: torch.dtype
    ) -> None:
        self.batch, self.correction = place.batch, place.correction
        self.gain, self._back, self._hidden, self._narrow = gain, back, hidden, narrow
        self._eps = gain.new_tensor(place.eps)

    def begin(
        self, statistics: Statistics | None, pieces: Sequence[EqualSteps], forward: bool
    ) -> None:
        """Prepare for consecutive steps, whose statistics are read or written."""
        assert statistics is not None
        self._statistics, self._pieces = statistics, pieces
        self.offset = None
        if not self.batch or not forward:
            self._r = reciprocals(statistics, pieces, self._eps, self.batch * self.correction)
            self._scale = self._r * self.gain
            if not self.batch:
                assert statistics.mean is not None
                self.offset = (statistics.mean * self._scale).neg_()
            return
        examples, like, width = pieces[0].examples, self.gain, len(self.gain)
        self._scale, self._products = torch.empty_like(like), like.new_empty(examples, width)
        self._sums = like.new_empty(pieces[-1].steps.stop, self._hidden)
        self._state = like.new_empty(examples, self._hidden)
        self._operand = None
        if self._narrow != like.dtype:
            self._operand = like.new_empty(examples, self._hidden, dtype=self._narrow)

    # Forward

    def operand(self, t: int, state: Tensor, operand: Tensor) -> Tensor:
        if not self.batch:
            return operand
        n = len(state)
        torch.sum(state, 0, out=self._sums[t])
        rows = torch.sub(state, self._sums[t], alpha=1 / n, out=self._state[:n])
        return rows if self._operand is None else self._operand[:n].copy_(rows)

    def normalize(self, t: int, rows: Tensor, r: Tensor, out: Tensor) -> Tensor:
        if out is not rows:
            out.copy_(rows)
        if not self.batch:
            return self._scale[t]
        n, squares = len(out), self._statistics.var[t]
        products = torch.mul(rows, rows, out=self._products[:n])
        torch.sum(products, 0, out=squares)
        return batch_scale(squares, n, self.correction, self._eps, self.gain, self._scale)

    def normalize_all(self, rows: Tensor, r: Tensor) -> Tensor:
        """Factors of the rows of each step, (steps, G)."""
        if self.batch:
            sum_examples(rows * rows, self._pieces, self._statistics.var)
            over_examples(self._statistics.var, self._pieces)
            found = reciprocals(self._statistics, self._pieces, self._eps, self.correction)
            self._scale = found.mul_(self.gain)
        return self._scale

    def finish(self, weight: Tensor) -> None:
        """Turn sums into statistics, with the weight (H, G)."""
        found = self._statistics
        if self.batch and found.mean is not None:
            over_examples(found.var, self._pieces)
            over_examples(self._sums, self._pieces)
            found.mean.addmm_(self._sums, weight.to(self._sums.dtype))

    # Backward

    def restored(self, kept: Tensor, name: str, scratch: Scratch) -> Tensor:
        out, mean = scratch(name, *kept.shape), self._statistics.mean
        for run in self._pieces:
            if mean is None:
                torch.mul(run.of(kept), run.each(self._r), out=run.of(out))
            else:
                torch.sub(run.of(kept), run.each(mean), out=run.of(out)).mul_(run.each(self._r))
        return out

    def backs(self, steps: int) -> Sequence[Tensor]:
        return (self._r * self._back).unbind(0)

    def adjoint(self, d: Tensor, rows: Tensor, r: Tensor, products: Tensor) -> None:
        if self.batch:
            torch.mul(d, rows, out=products)
            d.addcmul_(rows, products.sum(0), value=-1 / (len(d) - self.correction))

    def all_back(self, d: Tensor, rows: Tensor, r: Tensor, out: Tensor) -> None:
        back = self._r * self._back
        if self.batch:
            products = torch.mul(d, rows, out=out)
            totals = sum_examples(products, self._pieces, torch.empty_like(back))
            for run in self._pieces:
                share = -1 / (run.examples - self.correction)
                run.of(d).addcmul_(run.of(rows), run.each(totals), value=share)
        for run in self._pieces:
            torch.mul(run.of(d), run.each(back), out=run.of(out))


class CellPlace:
    """The normalised cell state of an LSTM on its way to the output.

    ``gain`` and ``shift`` (H,) include the sign of the cell; ``back`` (H,) is the factor of the
    gradients of normalised rows.
    """

    def __init__(
        self, place: Rows | Examples, gain: Tensor, back: Tensor, shift: Tensor | None
    ) -> None:
        self.scale, self.batch = place.scale, place.batch
        self._place, self._gain, self._back = place, gain, back
        self._shift = torch.zeros_like(gain) if shift is None else shift
        self._eps = gain.new_tensor(place.eps)
        self._groups = Groups(place, False, len(gain), gain) if isinstance(place, Rows) else None
        self._correction = place.correction if isinstance(place, Examples) else 0
        #: Whether rows, or the examples of a step, use their own statistics.
        self.own = place.scale and (place.batch or self._groups is not None)
        self._centers = place.batch or place.center

    def begin(
        self, statistics: Statistics | None, pieces: Sequence[EqualSteps], forward: bool
    ) -> None:
        self._statistics, self._pieces = statistics, pieces
        if statistics is None:
            return
        if self.batch and forward:
            self._scale = torch.empty_like(self._gain)
            return
        assert statistics.mean is not None
        self._r = reciprocals(statistics, pieces, self._eps, self.batch * self._correction)
        self._scale = self._r * self._gain
        self._offset = self._shift - statistics.mean * self._scale

    # Forward

    def sums(self, t: int, c: Tensor) -> Tensor:
        """Argument of the output's sigmoid for c (n, H) of step t, in new memory."""
        if not self.scale:
            return c * self._gain
        if self._groups is None:
            return self._over_examples(t, c)
        if self._groups.center:
            return torch.native_layer_norm(
                c, c.shape[1:], self._gain, self._shift, self._place.eps
            )[0]
        rows = torch.empty_like(c)
        self._groups.normalize(c, c.new_empty(len(c), 1), rows)
        return torch.addcmul(self._shift, rows, self._gain, out=rows)

    def _over_examples(self, t: int, c: Tensor) -> Tensor:
        found = self._statistics
        assert found is not None
        assert found.mean is not None
        if not self.batch:
            return torch.addcmul(self._offset[t], c, self._scale[t])
        n, mean, squares = len(c), found.mean[t], found.var[t]
        torch.sum(c, 0, out=mean)
        rows = torch.sub(c, mean, alpha=1 / n)
        torch.sum(rows * rows, 0, out=squares)
        scale = batch_scale(squares, n, self._correction, self._eps, self._gain, self._scale)
        return torch.addcmul(self._shift, rows, scale, out=rows)

    def finish(self) -> None:
        found = self._statistics
        if self.batch and found is not None and found.mean is not None:
            over_examples(found.mean, self._pieces)
            over_examples(found.var, self._pieces)

    # Backward

    def normalize_all(self, c: Tensor, scratch: Scratch) -> Tensor:
        """Normalised cell states of c (rows, H); may be c itself."""
        if not self.scale:
            return c
        out = scratch("cells", *c.shape)
        if self._groups is not None:
            self._factors = scratch("cell factors", len(c), 1)
            self._groups.normalize(out.copy_(c), self._factors, out)
            return out
        assert self._statistics is not None
        assert self._statistics.mean is not None
        for run in self._pieces:
            torch.sub(run.of(c), run.each(self._statistics.mean), out=run.of(out))
            run.of(out).mul_(run.each(self._r))
        return out

    def shown(self, rows: Tensor, out: Tensor) -> Tensor:
        return torch.addcmul(self._shift, rows, self._gain, out=out)

    def through(self, show: Tensor, out: Tensor) -> None:
        """Write the direct factor of the gradient of c to out."""
        if self.scale and self._groups is None:
            back = self._r * self._back
            for run in self._pieces:
                torch.mul(run.of(show), run.each(back), out=run.of(out))
            return
        torch.mul(show, self._back, out=out)
        if self.scale:
            out.mul_(self._factors)

    def add_back(self, d_c: Tensor, passed: Tensor, rows: Tensor) -> None:
        """Add to d_c (n, H) the gradient through the normalisation.

        ``passed`` (n, 2, H) is `through` times the gradient of h, and the same times the normalised
        cell states ``rows``.
        """
        axis, count = (0, len(d_c)) if self.batch else (2, d_c.shape[1])
        totals = passed.sum(axis, keepdim=True)
        d_c.add_(passed[:, 0])
        if self._centers:
            d_c.sub_(totals[:, 0], alpha=1 / count)
        d_c.addcmul_(rows, totals[:, 1], value=-1 / (count - self._correction))


def reciprocals(
    statistics: Statistics, pieces: Sequence[EqualSteps], eps: Tensor, correction: int
) -> Tensor:
    """Reciprocal deviations of each step, (steps, F)."""
    r = statistics.var.clone()
    if correction:
        for run in pieces:
            r[run.steps].mul_(run.examples / (run.examples - correction))
    return r.add_(eps).rsqrt_()


def batch_scale(
    squares: Tensor, examples: int, correction: int, eps: Tensor, gain: Tensor, out: Tensor
) -> Tensor:
    """Write ``gain * r`` to out (F,), from sums of squares (F,) over examples."""
    torch.add(eps, squares, alpha=1 / (examples - correction), out=out)
    return out.rsqrt_().mul_(gain)


def over_examples(sums: Tensor, pieces: Sequence[EqualSteps]) -> None:
    """Divide sums (steps, F) over examples by the number of examples."""
    for run in pieces:
        sums[run.steps].div_(run.examples)
