"""Steps in functions of torch, of cells whose sites normalise over examples.

They compute as those in `ln_zoo.ops.engines.aten.rows` do (all gates of a chunk anew in the
backward). With r the reciprocal deviations of a step, u^ = r u the normalised rows and K the
product of gates that a gradient of the state is multiplied by, the gradient of u is, up to a
constant per feature,

    x - u^ sum_n(x u^) / (n - correction),   x = r gain K D.

A reduction over examples is fast where the features lie in rows, but not by torch's functions for
variances, so squares are summed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ln_zoo.ops.engines.aten.shared import AtenSteps
from ln_zoo.ops.engines.base import Chunk, ChunkGrads, Statistics, Sums
from ln_zoo.ops.spans import Run, runs, sum_examples
from ln_zoo.ops.spec import Cases, Operands, Rows, Spec


class Place:
    """One place, with a gain of its own and the sign that the cell puts on it.

    Args:
        examples: what happens there: `Cases`, or the identity.
        gain: (F,), with the sign of the cell.
        slope: (F,), what gradients of normalised rows are multiplied by.
    """

    def __init__(self, examples: Rows | Cases, gain: Tensor, slope: Tensor) -> None:
        self.batch = examples.batch
        self.correction = examples.correction if isinstance(examples, Cases) else 0
        self.given = examples.scale and not examples.batch
        self.gain, self.slope = gain, slope
        self.eps = gain.new_tensor(examples.eps)

    # All steps of a chunk at once

    def reciprocals(self, statistics: Statistics | None, pieces: Sequence[Run]) -> Tensor | None:
        """Reciprocal deviations r of each step, (steps, F); ``None``: the identity."""
        if statistics is None:
            return None
        r = statistics.var.clone()
        if self.batch and self.correction:
            for run in pieces:
                r[run.steps].mul_(run.examples / (run.examples - self.correction))
        return r.add_(self.eps).rsqrt_()

    def linear(
        self, statistics: Statistics | None, pieces: Sequence[Run]
    ) -> tuple[Tensor, Tensor | None]:
        """Scale and offset that make what leaves the place of products as they are saved.

        Each is (steps, F); for the identity the scale is (F,). An offset ``None`` is 0.
        """
        r = self.reciprocals(statistics, pieces)
        if r is None or statistics is None:
            return self.gain, None
        scale = r.mul_(self.gain)
        if not self.given or statistics.mean is None:
            return scale, None
        return scale, (statistics.mean * scale).neg_()

    def normalized(
        self,
        a: Tensor,
        statistics: Statistics | None,
        r: Tensor | None,
        pieces: Sequence[Run],
        rows: Tensor,
    ) -> Tensor:
        """Fills rows with normalised products a, which are as they are saved."""
        if r is None or statistics is None:
            return rows.copy_(a)
        shift = (statistics.mean * r).neg_() if self.given and statistics.mean is not None else None
        for run in pieces:
            if shift is None:
                torch.mul(run.of(a), run.each(r), out=run.of(rows))
            else:
                torch.addcmul(run.each(shift), run.of(a), run.each(r), out=run.of(rows))
        return rows

    # One step, of a place that uses the batch

    def scale(self, squares: Tensor, examples: int, out: Tensor) -> Tensor:
        """Fills out (F,) with ``gain * r``, of the sums of squares (F,) over examples."""
        torch.add(self.eps, squares, alpha=1 / (examples - self.correction), out=out)
        return out.rsqrt_().mul_(self.gain)


def square_sums(a: Tensor, buffer: Tensor, out: Tensor) -> None:
    """Fills out (F,) with the sums over examples of the squares of a (n, F)."""
    torch.mul(a, a, out=buffer)
    torch.sum(buffer, 0, out=out)


def affine(a: Tensor, scale: Tensor, offset: Tensor, pieces: Sequence[Run], out: Tensor) -> Tensor:
    """Fills out with ``scale * a + offset``, a (rows, F), each factor (F,) or (steps, F)."""
    for run in pieces:
        torch.addcmul(run.each(offset), run.of(a), run.each(scale), out=run.of(out))
    return out


def over_examples(sums: Tensor, pieces: Sequence[Run]) -> None:
    """Divides sums (steps, F) over examples by their number."""
    for run in pieces:
        sums[run.steps].div_(run.examples)


class Loop:
    """The recurrent place in the steps of one chunk, forward.

    Args:
        place: the place.
        statistics: of it.
        pieces: the runs of steps.
        h: states, (N, H).
        narrow: the precision of products.
        sizes: rows of each step.
    """

    #: What is added to normalised products where statistics are given, (steps, G).
    offset: Tensor | None = None

    def __init__(
        self,
        place: Place,
        statistics: Statistics | None,
        pieces: Sequence[Run],
        h: Tensor,
        narrow: torch.dtype,
        sizes: Sequence[int],
    ) -> None:
        self._place, self._statistics, self._pieces = place, statistics, pieces
        if not place.batch:
            self._gain, self.offset = place.linear(statistics, pieces)
            return
        examples, hidden = sizes[0], h.shape[1]
        self._gain = torch.empty_like(place.gain)
        self._sums = h.new_empty(len(sizes), hidden)
        self._state = h.new_empty(examples, hidden)
        self._narrow = None if narrow == h.dtype else h.new_empty(examples, hidden, dtype=narrow)
        self._products = h.new_empty(examples, len(place.gain))

    def operand(self, t: int, state: Tensor, operand: Tensor) -> Tensor:
        """What step t multiplies by the weights: that operand, or the state less its mean."""
        if not self._place.batch:
            return operand
        n = len(state)
        torch.sum(state, 0, out=self._sums[t])
        rows = torch.sub(state, self._sums[t], alpha=1 / n, out=self._state[:n])
        return rows if self._narrow is None else self._narrow[:n].copy_(rows)

    def scale(self, t: int, u: Tensor) -> Tensor:
        """What the products u (n, G) of step t are multiplied by, (G,)."""
        if self._place.batch and self._statistics is not None:
            n, squares = len(u), self._statistics.var[t]
            square_sums(u, self._products[:n], squares)
            return self._place.scale(squares, n, self._gain)
        return self._gain[t] if self._gain.dim() > 1 else self._gain

    def finish(self, weight: Tensor) -> None:
        """Turns sums into statistics; weight is (H, G)."""
        found = self._statistics
        if self._place.batch and found is not None and found.mean is not None:
            over_examples(found.var, self._pieces)
            over_examples(self._sums, self._pieces)
            found.mean.addmm_(self._sums, weight.to(self._sums.dtype))


class BatchSteps(AtenSteps):
    """What all cells share; made once per call.

    Args:
        spec: what is to be computed.
        operands: the tensors.
        backward: whether it is for the backward pass.
    """

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        super().__init__(spec, operands, operands.w_ih)
        w_hh = operands.w_hh
        self.w_hh = w_hh if backward else w_hh.t().contiguous()
        self.first, self.second = (
            Place(place, gain * self.sign, gain * self.slope)
            for place, gain in zip(spec.products, self.gains, strict=True)
        )

    # Forward

    def input_terms(
        self,
        v: Tensor,
        statistics: Statistics | None,
        pieces: Sequence[Run],
        bias: Tensor,
        measure: bool,
    ) -> Tensor:
        """``gain * normalised v + bias`` in scratch memory (rows, G).

        Args:
            v: products.
            statistics: of their place.
            pieces: the runs of steps.
            bias: (G,) or (steps, G).
            measure: whether the variances of the batch are still to be found.
        """
        v = v.to(self.wide)
        terms = self.scratch("gates", *v.shape)
        if measure and self.first.batch and statistics is not None:
            sum_examples(torch.mul(v, v, out=terms), pieces, statistics.var)
            over_examples(statistics.var, pieces)
        scale, offset = self.first.linear(statistics, pieces)
        return affine(v, scale, bias if offset is None else offset + bias, pieces, terms)

    # Backward

    def row_sums(self, sums: Tensor | None, d: Tensor, factor: Tensor) -> None:
        """Adds the sum of the rows d, times a factor, where it is wanted."""
        if sums is not None:
            sums.addcmul_(d.sum(0), factor)

    def weighted(self, slopes: Tensor, r: Tensor | None, pieces: Sequence[Run]) -> Tensor:
        """``r gain K`` of the recurrent products, scratch memory (rows, G), for slopes K."""
        weights = self.scratch("weights", *slopes.shape)
        if r is None:
            return torch.mul(slopes, self.second.slope, out=weights)
        scale = r * self.second.slope
        for run in pieces:
            torch.mul(run.of(slopes), run.each(scale), out=run.of(weights))
        return weights

    def through_recurrent(
        self,
        d_u: Tensor,
        rows: Tensor,
        products: Tensor,
        totals: Tensor,
        narrow: Tensor | None,
        back: Tensor | None,
        dh: Tensor,
        keep: Tensor | None,
    ) -> None:
        """One step: the gradients of u and of the state before it.

        Args:
            d_u: ``x`` of the module's text, (n, G), in float32 at least; becomes the gradient.
            rows: normalised rows, (n, G).
            products: scratch memory, (n, G).
            totals: scratch memory, (G,).
            narrow: where a copy of the gradient in the precision of products goes, if that is
                another one.
            back: scratch memory (n, H) in that precision.
            dh: to be filled with the gradient of the state, (n, H).
            keep: what of it does not pass by the products, (n, H).
        """
        n = len(d_u)
        if self.second.batch:
            torch.mul(d_u, rows, out=products)
            torch.sum(products, 0, out=totals)
            d_u.addcmul_(rows, totals, value=-1 / (n - self.second.correction))
        if narrow is None or back is None:
            torch.mm(d_u, self.w_hh, out=dh)
        else:
            torch.mm(narrow.copy_(d_u), self.w_hh, out=back)
            dh.copy_(back)
        if self.second.batch:
            state_totals = totals[: self.hidden]
            torch.sum(dh, 0, out=state_totals)
            dh.sub_(state_totals, alpha=1 / n)
        if keep is not None:
            dh.add_(keep)

    def input_gradients(
        self,
        v: Tensor,
        statistics: Statistics | None,
        pieces: Sequence[Run],
        d: Tensor,
        dv: Tensor,
        sums: Sums,
    ) -> None:
        """What the gradients d (rows, G) of all sums mean for bias, gain and v; d is used up."""
        first = self.first
        self.row_sums(sums.bias, d, self.slope)
        r = first.reciprocals(statistics, pieces)
        if r is None:
            torch.mul(d, first.slope, out=dv)
            return
        # What the recurrent products needed is done with.
        rows = first.normalized(v, statistics, r, pieces, self.scratch("rows", *d.shape))
        products = torch.mul(d, rows, out=self.scratch("weights", *d.shape))
        self.row_sums(sums.gain_input, products, self.slope)
        if first.batch:
            totals = sum_examples(products, pieces, torch.empty_like(r))
            for run in pieces:
                share = -1 / (run.examples - first.correction)
                run.of(d).addcmul_(run.of(rows), run.each(totals), value=share)
        scale = r.mul_(first.slope)
        for run in pieces:
            torch.mul(run.of(d), run.each(scale), out=run.of(dv))


def finish(state: Tensor, after: Sequence[Tensor], pieces: Sequence[Run]) -> None:
    """Puts what each example had after its last step into the state (N, H)."""
    for run, following in itertools.zip_longest(pieces, pieces[1:]):
        ended = slice(0 if following is None else following.examples, run.examples)
        state[ended].copy_(after[run.steps.stop - 1][ended])


class BatchLSTM(BatchSteps):
    """Gates i, f, g, o."""

    signs = (1.0, 1.0, -2.0, 1.0)
    slopes = (1.0, 1.0, 4.0, 1.0)

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        super().__init__(spec, operands, backward)
        gain, shift = operands.gain_out, operands.shift_out
        slope = operands.h0.new_ones(self.hidden) if gain is None else gain
        self.cell = Place(spec.out, -2 * slope, slope)
        self.shift_out = torch.zeros_like(slope) if shift is None else -2 * shift

    def forward(self, chunk: Chunk) -> None:
        sizes, v, h, c, out, saved, places, _ = chunk
        assert c is not None
        first, second, cell, pieces = places.input, self.second, self.cell, runs(sizes)
        width, hidden, weight = v.shape[1], self.hidden, self.w_hh
        loop = Loop(second, places.recurrent, pieces, h, self.narrow, sizes)
        bias = self.bias if loop.offset is None else self.bias + loop.offset
        terms = self.input_terms(v, first, pieces, bias, measure=True).split(sizes)
        cell_gain, cell_shift = cell.gain, self.shift_out
        if cell.given:
            cell_gain, offset = cell.linear(places.out, pieces)
            assert offset is not None
            cell_shift = self.shift_out + offset

        outs = out.split(sizes)
        cells = None if saved is None or saved.c is None else saved.c.split(sizes)
        us = None if saved is None else saved.u.split(sizes)
        u_buffer = None if us else v.new_empty(sizes[0], width)
        buffer = h.new_empty(sizes[0], width)
        small, small_too = h.new_empty(2, sizes[0], hidden).unbind(0)
        cell_scale = torch.empty_like(cell.gain)
        cell_means, cell_squares = (None, None) if places.out is None else places.out
        state, before, c_before = h, h.to(self.narrow), c
        active = -1
        for t, n in enumerate(sizes):
            if n != active:
                active, rows = n, buffer[:n]
                i, f, g, o = rows.chunk(4, 1)
                state, before, c_before = state[:n], before[:n], c_before[:n]
                h_now, c_now, a_now, b_now = h[:n], c[:n], small[:n], small_too[:n]
                if u_buffer is not None:
                    u = u_buffer[:n]
            if us is not None and cells is not None:
                u, c_now = us[t], cells[t]
            torch.mm(loop.operand(t, state, before), weight, out=u)
            a = u if self.exact else rows.copy_(u)
            torch.addcmul(terms[t], a, loop.scale(t, a), out=rows).sigmoid_()
            # c = f c + i (1 - 2 g)
            torch.mul(c_before, f, out=c_now).add_(i).addcmul_(i, g, value=-2)
            if cell.batch:
                assert cell_means is not None
                assert cell_squares is not None
                torch.sum(c_now, 0, out=cell_means[t])
                torch.sub(c_now, cell_means[t], alpha=1 / n, out=a_now)
                square_sums(a_now, b_now, cell_squares[t])
                cell.scale(cell_squares[t], n, cell_scale)
                shown = torch.addcmul(self.shift_out, a_now, cell_scale, out=b_now)
            elif cell.given:
                shown = torch.addcmul(cell_shift[t], c_now, cell_gain[t], out=b_now)
            else:
                shown = torch.mul(c_now, cell_gain, out=b_now)
            shown.sigmoid_()
            # h = o (1 - 2 s)
            c_before = c_now
            if self.exact:
                state = before = torch.addcmul(o, o, shown, value=-2, out=outs[t])
            else:
                state = torch.addcmul(o, o, shown, value=-2, out=h_now)
                before = outs[t].copy_(state)
        if self.exact:
            finish(h, outs, pieces)
        if cells is not None:
            finish(c, cells, pieces)
        loop.finish(weight)
        if cell.batch and cell_means is not None and cell_squares is not None:
            over_examples(cell_means, pieces)
            over_examples(cell_squares, pieces)

    def backward_part(self, grads: ChunkGrads) -> None:
        sizes, dout, dh, dc, saved, _h_prev, c_prev, du, dv, sums, places, _ = grads
        assert saved.v is not None
        assert saved.c is not None
        assert c_prev is not None
        assert dc is not None
        hidden, second, cell, pieces = self.hidden, self.second, self.cell, runs(sizes)
        count, width = du.shape

        # All gates of the chunk
        r = second.reciprocals(places.recurrent, pieces)
        rows = self.scratch("rows", count, width)
        second.normalized(saved.u, places.recurrent, r, pieces, rows)
        gates = self.input_terms(saved.v, places.input, pieces, self.bias, measure=False)
        gates.addcmul_(rows, second.gain).sigmoid_()
        slopes = self.scratch("slopes", count, width)
        torch.addcmul(gates, gates, gates, value=-1, out=slopes)
        i, f, g, o = gates.chunk(4, 1)
        slope_i, slope_f, slope_g, slope_o = slopes.chunk(4, 1)
        c_rows, c_r = self._cell_rows(saved.c, places.out, pieces)
        shown = torch.addcmul(self.shift_out, c_rows, cell.gain).sigmoid_()

        # The output: dm, the gradient of the normalised cell state with gain and shift, is D * show
        show = torch.addcmul(shown, shown, shown, value=-1).mul_(o).mul_(4)
        slope_i.mul_(g.mul_(-2).add_(1))
        slope_f.mul_(c_prev)
        slope_g.mul_(i)
        slope_o.mul_(shown.mul_(-2).add_(1))
        if cell.batch:
            ways = self.scratch("ways", count, 2, hidden)
            self._weighted_cell(show, c_r, pieces, ways[:, 0])
            torch.mul(ways[:, 0], c_rows, out=ways[:, 1])
            ways_by_step = ways.split(sizes)
            c_rows_by_step = c_rows.split(sizes)
            passed = show.new_empty(sizes[0], 2, hidden)
            c_totals = show.new_empty(2, hidden)
            c_mean, c_turned = c_totals.unbind(0)
        else:
            way = show
            if c_r is not None:
                way = torch.empty_like(show)
                self._weighted_cell(show, c_r, pieces, way)
            way_by_step = way.split(sizes)

        # The gates
        weights = self.weighted(slopes, r, pieces)
        inner = weights.view(count, 4, hidden)[:, :3].split(sizes)
        outer = weights[:, 3 * hidden :].split(sizes)
        rows_by_step = rows.split(sizes)
        keep = f.split(sizes)

        both = self.scratch("states", count, 2, hidden)  # gradients of c and h
        d_cells, d_states = (both[:, k : k + 1].split(sizes) for k in (0, 1))
        douts = None if dout is None else dout.split(sizes)
        dus = du.split(sizes)
        target = None if self.exact else show.new_empty(sizes[0], width)
        back = None if self.exact else du.new_empty(sizes[0], hidden)
        products, totals = show.new_empty(sizes[0], width), show.new_empty(width)
        active = -1
        for t in range(len(sizes) - 1, -1, -1):
            n = sizes[t]
            if n != active:
                active, dh_now, dc_now, products_now = n, dh[:n], dc[:n], products[:n]
                if cell.batch:
                    passed_now = passed[:n]
                    through = passed_now[:, 0]
            dual_c, dual_h = d_cells[t], d_states[t]
            d_c, d_h = dual_c.squeeze(1), dual_h.squeeze(1)
            if douts is None:
                d_h.copy_(dh_now)
            else:
                torch.add(dh_now, douts[t], out=d_h)
            if cell.batch:
                torch.mul(dual_h, ways_by_step[t], out=passed_now)
                torch.sum(passed_now, 0, out=c_totals)
                torch.add(dc_now, through, out=d_c).sub_(c_mean, alpha=1 / n)
                d_c.addcmul_(c_rows_by_step[t], c_turned, value=-1 / (n - cell.correction))
            else:
                torch.addcmul(dc_now, d_h, way_by_step[t], out=d_c)
            d_u = dus[t] if target is None else target[:n]
            torch.mul(inner[t], dual_c, out=d_u[:, : 3 * hidden].view(n, 3, hidden))
            torch.mul(outer[t], d_h, out=d_u[:, 3 * hidden :])
            narrow = None if target is None else dus[t]
            self.through_recurrent(
                d_u,
                rows_by_step[t],
                products_now,
                totals,
                narrow,
                None if back is None else back[:n],
                dh_now,
                None,
            )
            torch.mul(d_c, keep[t], out=dc_now)

        # What adds up over rows
        d_cell, d_state = both.unbind(1)
        if c_r is not None:
            show.mul_(d_state)
            self.row_sums(sums.shift_out, show, show.new_ones(()))
            self.row_sums(sums.gain_out, show.mul_(c_rows), show.new_ones(()))
        slopes.view(count, 4, hidden)[:, :3].mul_(d_cell.unsqueeze(1))
        slope_o.mul_(d_state)
        if r is not None:
            self.row_sums(sums.gain_recurrent, rows.mul_(slopes), self.slope)
        self.input_gradients(saved.v, places.input, pieces, slopes, dv, sums)

    def _cell_rows(
        self, c: Tensor, statistics: Statistics | None, pieces: Sequence[Run]
    ) -> tuple[Tensor, Tensor | None]:
        """Normalised cell states, in new memory but for the identity, and r."""
        r = self.cell.reciprocals(statistics, pieces)
        if r is None or statistics is None or statistics.mean is None:
            return c, None
        rows = torch.empty_like(c)
        for run in pieces:
            torch.sub(run.of(c), run.each(statistics.mean), out=run.of(rows))
            run.of(rows).mul_(run.each(r))
        return rows, r

    def _weighted_cell(
        self, show: Tensor, r: Tensor | None, pieces: Sequence[Run], out: Tensor
    ) -> None:
        """Fills out (rows, H) with ``r gain show``."""
        assert r is not None
        scale = r * self.cell.slope
        for run in pieces:
            torch.mul(run.of(show), run.each(scale), out=run.of(out))


class _OneState(BatchSteps):
    """Cells without a cell state: with D the gradient of h, that of each sum is ``D K``."""

    def backward_loop(
        self,
        sizes: Sequence[int],
        dout: Tensor | None,
        dh: Tensor,
        slopes: Tensor,
        rows: Tensor,
        r: Tensor | None,
        carry: Tensor | None,
        pieces: Sequence[Run],
        du: Tensor,
    ) -> Tensor:
        """The dependent part of the way back.

        Args:
            sizes: rows of each step.
            dout: gradient of the outputs.
            dh: gradient of the state after the last step; becomes that before the first.
            slopes: K, (rows, G), to be multiplied by gains.
            rows: normalised products R h'.
            r: their reciprocal deviations, (steps, G).
            carry: what of D passes by the products, (rows, H); ``None``: nothing.
            pieces: the runs of steps.
            du: to be filled.

        Returns:
            D of all rows, (rows, H).
        """
        hidden, (count, width) = self.hidden, du.shape
        weights_by_step = self.weighted(slopes, r, pieces).view(count, -1, hidden).split(sizes)
        rows_by_step = rows.split(sizes)
        carried = None if carry is None else carry.split(sizes)
        states = self.scratch("states", count, hidden)
        states_by_step, duals = states.split(sizes), states.unsqueeze(1).split(sizes)
        douts = None if dout is None else dout.split(sizes)
        dus = du.split(sizes)
        target = None if self.exact else rows.new_empty(sizes[0], width)
        back = None if self.exact else du.new_empty(sizes[0], hidden)
        products, totals = rows.new_empty(sizes[0], width), rows.new_empty(width)
        for t in range(len(sizes) - 1, -1, -1):
            n = sizes[t]
            dh_now, d_h = dh[:n], states_by_step[t]
            if douts is None:
                d_h.copy_(dh_now)
            else:
                torch.add(dh_now, douts[t], out=d_h)
            d_u = dus[t] if target is None else target[:n]
            torch.mul(weights_by_step[t], duals[t], out=d_u.view(n, -1, hidden))
            self.through_recurrent(
                d_u,
                rows_by_step[t],
                products[:n],
                totals,
                None if target is None else dus[t],
                None if back is None else back[:n],
                dh_now,
                None if carried is None else carried[t].mul_(d_h),
            )
        return states


class BatchGRU(_OneState):
    """Gates r, z, n; with y the input term of n and w its recurrent term, n = tanh(y + r w)."""

    signs = (1.0, 1.0, -2.0)
    slopes = (1.0, 1.0, 4.0)

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        super().__init__(spec, operands, backward)
        bias = operands.bias_hn
        self.bias_hn = -2 * (operands.h0.new_zeros(self.hidden) if bias is None else bias)

    def forward(self, chunk: Chunk) -> None:
        sizes, v, h, _c, out, saved, places, _ = chunk
        second, weight, hidden, pieces = self.second, self.w_hh, self.hidden, runs(sizes)
        width, both = v.shape[1], 2 * self.hidden
        loop = Loop(second, places.recurrent, pieces, h, self.narrow, sizes)
        shift = torch.cat([torch.zeros_like(self.bias[:both]), self.bias_hn])
        shift = shift if loop.offset is None else shift + loop.offset
        terms = self.input_terms(v, places.input, pieces, self.bias, measure=True).split(sizes)
        outs = out.split(sizes)
        us = None if saved is None else saved.u.split(sizes)
        u_buffer = None if us else v.new_empty(sizes[0], width)
        buffer = h.new_empty(sizes[0], width)
        state, before = h, h.to(self.narrow)
        active = -1
        for t, n in enumerate(sizes):
            if n != active:
                active, rows = n, buffer[:n]
                rz, w = rows.split((both, hidden), 1)
                r, z = rz.chunk(2, 1)
                state, before, h_now = state[:n], before[:n], h[:n]
                if u_buffer is not None:
                    u = u_buffer[:n]
            if us is not None:
                u = us[t]
            torch.mm(loop.operand(t, state, before), weight, out=u)
            a = u if self.exact else rows.copy_(u)
            now = shift[t] if shift.dim() > 1 else shift
            torch.addcmul(now, a, loop.scale(t, a), out=rows)
            rz.add_(terms[t][:, :both]).sigmoid_()
            new = torch.addcmul(terms[t][:, both:], r, w, out=w).sigmoid_().mul_(-2).add_(1)
            if self.exact:
                state = before = torch.lerp(new, state, z, out=outs[t])
            else:
                state = torch.lerp(new, state, z, out=h_now)
                before = outs[t].copy_(state)
        if self.exact:
            finish(h, outs, pieces)
        loop.finish(weight)

    def backward_part(self, grads: ChunkGrads) -> None:
        sizes, dout, dh, _dc, saved, h_prev, _c_prev, du, dv, sums, places, _ = grads
        assert saved.v is not None
        hidden, second, pieces = self.hidden, self.second, runs(sizes)
        count, both = len(du), 2 * self.hidden
        factors = second.reciprocals(places.recurrent, pieces)
        rows = self.scratch("rows", count, 3 * hidden)
        second.normalized(saved.u, places.recurrent, factors, pieces, rows)
        sums_x = self.input_terms(saved.v, places.input, pieces, self.bias, measure=False)
        w = torch.addcmul(self.bias_hn, rows[:, both:], second.gain[both:])
        gates = sums_x[:, :both].addcmul_(rows[:, :both], second.gain[:both])
        r, z = gates.sigmoid_().chunk(2, 1)
        new = sums_x[:, both:].addcmul_(r, w).sigmoid_()
        # What D has to be multiplied by for the gradients of r, z, w and, slope_x, y; but for the 4
        # of tanh that is in the slopes of w and y
        slopes = self.scratch("slopes", count, 3, hidden)
        slope_r, slope_z, slope_w = slopes.unbind(1)
        slope_x = torch.addcmul(new, new, new, value=-1).mul_(1 - z)
        torch.mul(slope_x, r, out=slope_w)
        # w has its sign and factor -2.
        torch.mul(slope_w, w.mul_(-2), out=slope_r).mul_(1 - r)
        new.mul_(-2).add_(1)
        torch.sub(h_prev, new, out=slope_z)
        slope_z.mul_(z).mul_(1 - z)
        flat = slopes.view(count, -1)
        states = self.backward_loop(sizes, dout, dh, flat, rows, factors, z, pieces, du)
        slopes.mul_(states.unsqueeze(1))
        self.row_sums(sums.bias_hn, slope_w, self.slope[both:])
        if factors is not None:
            self.row_sums(sums.gain_recurrent, rows.mul_(flat), self.slope)
        torch.mul(slope_x, states, out=slope_w)
        self.input_gradients(saved.v, places.input, pieces, flat, dv, sums)


class BatchRNN(_OneState):
    """One sum, of both terms, and tanh or ReLU."""

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        self.relu = spec.cell == "RNN_RELU"
        self.signs, self.slopes = ((1.0,), (1.0,)) if self.relu else ((-2.0,), (4.0,))
        super().__init__(spec, operands, backward)

    def forward(self, chunk: Chunk) -> None:
        sizes, v, h, _c, out, _saved, places, _ = chunk
        second, weight, pieces = self.second, self.w_hh, runs(sizes)
        loop = Loop(second, places.out, pieces, h, self.narrow, sizes)
        shift = self.bias if loop.offset is None else self.bias + loop.offset
        terms, outs = v.split(sizes), out.split(sizes)
        buffer = h.new_empty(sizes[0], self.hidden)
        state, before = h, h.to(self.narrow)
        active = -1
        for t, n in enumerate(sizes):
            if n != active:
                active, rows = n, buffer[:n]
                state, before, h_now = state[:n], before[:n], h[:n]
            u = terms[t].addmm_(loop.operand(t, state, before), weight)
            a = u if self.exact else rows.copy_(u)
            now = shift[t] if shift.dim() > 1 else shift
            torch.addcmul(now, a, loop.scale(t, a), out=rows)
            state = outs[t] if self.exact else h_now
            if self.relu:
                torch.clamp_min(rows, 0, out=state)
            else:
                torch.sub(self.one, rows.sigmoid_(), alpha=2, out=state)
            before = state if self.exact else outs[t].copy_(state)
        if self.exact:
            finish(h, outs, pieces)
        loop.finish(weight)

    def backward_part(self, grads: ChunkGrads) -> None:
        sizes, dout, dh, _dc, saved, _h_prev, _c_prev, du, _dv, sums, places, _ = grads
        pieces = runs(sizes)
        r = self.second.reciprocals(places.out, pieces)
        rows = self.scratch("rows", *du.shape)
        self.second.normalized(saved.u, places.out, r, pieces, rows)
        slopes = self.scratch("slopes", *du.shape)
        torch.addcmul(self.bias, rows, self.second.gain, out=slopes)
        if self.relu:
            slopes.copy_(slopes > 0)
        else:
            slopes.sigmoid_()
            slopes.addcmul_(slopes, slopes, value=-1)
        states = self.backward_loop(sizes, dout, dh, slopes, rows, r, None, pieces, du)
        slopes.mul_(states)
        self.row_sums(sums.bias, slopes, self.slope)
        if r is not None:
            self.row_sums(sums.gain_out, rows.mul_(slopes), self.slope)
