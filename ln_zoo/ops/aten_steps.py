"""The engine that is written in functions of torch: for every device, and where no other runs.

A step is a chain of dependent operations on few numbers, where a call costs as much as what it
computes. So whatever does not depend on the step before is done for a whole chunk of steps: on the
way there the normalised input terms; on the way back all gates anew from the kept products, and
with them the coefficients of a step, which is linear:

* With D the gradient of a state (dc that of a cell state), the gradient of what goes into a gate is
  ``D K`` (or ``dc K``), K a product of gates.
* The adjoint of a normalisation, ``J(d) = r (d - u^ mean(d u^))`` with u^ the normalised row and r
  its factor, makes ``D K^ - u^ sum(D Q)`` of that: ``K^ = r gain K``, and Q the sum of ``K^ u^``
  over the gates that share statistics, divided by their number of features.

``tanh(a)`` is computed as ``1 - 2 sigmoid(-2 a)``, several times as fast on CPUs. The factor -2
goes into gains and biases; the derivative is ``4 s (1 - s)``, with s that sigmoid, and its 4 goes
into gains on the way back (the slopes).

Products are in the precision of the weights, all else in float32 at least.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ln_zoo.ops.engine import Products, Saved, Sums, centred
from ln_zoo.ops.spec import Operands, Rows, Spec


class AtenEngine:
    """Time steps in functions of torch."""

    name = "aten"
    title = "steps in functions of torch"

    def refuses(self, spec: Spec, x: Tensor, w_hh: Tensor, dtype: torch.dtype) -> str | None:
        """Nothing is refused."""
        return None

    def stats(self, spec: Spec) -> int:
        """None are kept: those of a chunk are soon computed anew."""
        return 0

    def empty(self, *size: int, like: Tensor, dtype: torch.dtype, scratch: str = "") -> Tensor:
        """Fresh memory, scratch or not."""
        return like.new_empty(size, dtype=dtype)

    def prepare(self, spec: Spec, operands: Operands, backward: bool) -> Steps:
        """Centred weights, vectors with their factors, and the loops of the cell."""
        kinds: dict[str, type[Steps]] = {"LSTM": LSTMSteps, "GRU": GRUSteps}
        return kinds.get(spec.cell, RNNSteps)(spec, operands, backward)

    def forward_steps(
        self,
        p: Steps,
        v: Tensor,
        sizes: Sequence[int],
        h: Tensor,
        c: Tensor | None,
        out: Tensor,
        saved: Saved | None,
    ) -> None:
        """Runs consecutive steps; see `ln_zoo.ops.engine.Engine.forward_steps`."""
        p.forward(v, sizes, h, c, out, saved)

    def backward_steps(
        self,
        p: Steps,
        sizes: Sequence[int],
        dout: Tensor | None,
        dh: Tensor,
        dc: Tensor | None,
        saved: Saved,
        h_prev: Tensor,
        c_prev: Tensor | None,
        du: Tensor,
        dv: Tensor,
        sums: Sums,
    ) -> None:
        """Takes gradients back; see `ln_zoo.ops.engine.Engine.backward_steps`."""
        p.backward(sizes, dout, dh, dc, saved, h_prev, c_prev, du, dv, sums)


class Scale:
    """The normalisation of rows (n, F), group by group.

    Args:
        rows: what happens at the place.
        centred: whether rows come with their means off, where means are to be taken off.
        hidden: H.
        like: a tensor of the device and precision of the rows.
    """

    def __init__(self, rows: Rows, centred: bool, hidden: int, like: Tensor) -> None:
        self.scale, self.center = rows.scale, rows.scale and rows.center and not centred
        ends = list(itertools.accumulate((hidden * n for n in rows.groups), initial=0))
        self.columns = [slice(a, b) for a, b in itertools.pairwise(ends)]
        self.features = [b - a for a, b in itertools.pairwise(ends)]
        self.gates = [range(a // hidden, b // hidden) for a, b in itertools.pairwise(ends)]
        self.eps = like.new_tensor([rows.eps])
        self.roots = like.new_tensor([n**-0.5 for n in self.features])

    def empty(self, a: Tensor) -> Tensor:
        """Memory for the factors of the rows a, (n, groups)."""
        return a.new_empty(a.shape[0], len(self.columns))

    def factors(self, a: Tensor, r: Tensor) -> None:
        """Fills r with 1 / root mean square of each group of each row, and centres a if need be."""
        if self.center:
            for columns in self.columns:
                part = a[:, columns]
                part.sub_(part.mean(1, keepdim=True))
        if len(self.columns) == 1:
            torch.linalg.vector_norm(a, dim=1, keepdim=True, out=r)
            torch.addcmul(self.eps, r, r, value=1 / self.features[0], out=r).rsqrt_()
            return
        for k, columns in enumerate(self.columns):
            torch.linalg.vector_norm(a[:, columns], dim=1, keepdim=True, out=r[:, k : k + 1])
        r.mul_(self.roots)
        torch.addcmul(self.eps, r, r, out=r).rsqrt_()

    def times(self, a: Tensor, r: Tensor, out: Tensor) -> None:
        """Multiplies each group of each row by its factor."""
        if len(self.columns) == 1:
            torch.mul(a, r, out=out)
            return
        for k, columns in enumerate(self.columns):
            torch.mul(a[:, columns], r[:, k : k + 1], out=out[:, columns])

    def normalized(self, a: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Normalised rows in new memory, but for the identity, and the factors."""
        if not self.scale:
            return a.to(dtype), None
        rows = torch.empty_like(a, dtype=dtype)
        if self.center or a.dtype != dtype:
            a = rows.copy_(a)
        r = self.empty(rows)
        self.factors(a, r)
        self.times(a, r, rows)
        return rows, r

    def adjoint(
        self, d: Tensor, gain: Tensor, rows: Tensor, r: Tensor | None, products: Tensor, out: Tensor
    ) -> None:
        """The gradient of the rows before normalisation.

        Args:
            d: gradient of ``gain * rows``, (n, F).
            gain: (F,).
            rows: normalised rows.
            r: their factors; ``None``: the identity.
            products: ``d * rows``.
            out: to be filled.
        """
        if r is None:
            torch.mul(d, gain, out=out)
            return
        target = out if out.dtype == d.dtype else torch.empty_like(d)
        torch.mul(d, gain, out=target)
        for columns, features in zip(self.columns, self.features, strict=True):
            mean = torch.mv(products[:, columns], gain[columns]).div_(features).unsqueeze(1)
            target[:, columns].addcmul_(rows[:, columns], mean, value=-1)
        self.times(target, r, target)
        if target is not out:
            out.copy_(target)


class Steps(Products):
    """What all cells share; made once per call.

    Args:
        spec: what is to be computed.
        operands: the tensors.
        backward: whether it is for the backward pass.
    """

    #: Factors of the sums of each gate, forward, and of their gradients: see above on tanh.
    signs: tuple[float, ...]
    slopes: tuple[float, ...]

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        self.spec = spec
        self.narrow, self.wide = operands.x.dtype, operands.h0.dtype
        self.exact = self.narrow == self.wide
        self.hidden = operands.w_hh.shape[1]
        first, second = spec.products
        w_ih, w_hh = operands.w_ih, operands.w_hh
        # In half precision centred weights are rounded once more: there means come off the products
        # forward. (Backward it is the gradients that are rounded, to the same precision.)
        if self.exact or backward:
            w_ih, w_hh = centred(w_ih, first), centred(w_hh, second)
        super().__init__(w_ih)
        self.w_hh = w_hh if backward else w_hh.t().contiguous()
        like = operands.h0
        self.one = like.new_ones(1)
        self.first, self.second = (
            Scale(rows, self.exact, self.hidden, like) for rows in (first, second)
        )
        sign, self.slope = (
            like.new_tensor(factors).repeat_interleave(self.hidden)
            for factors in (self.signs, self.slopes)
        )
        gains = [operands.gain_out] * 2 if spec.merged else operands[7:9]
        first_gain, second_gain = (like.new_ones(()) if g is None else g for g in gains)
        self.gain_input, self.gain_recurrent = first_gain * sign, second_gain * sign
        self.back_input, self.back_recurrent = first_gain * self.slope, second_gain * self.slope
        self.bias = torch.zeros_like(sign) if operands.bias is None else operands.bias * sign

    def forward(
        self,
        v: Tensor,
        sizes: Sequence[int],
        h: Tensor,
        c: Tensor | None,
        out: Tensor,
        saved: Saved | None,
    ) -> None:
        """Runs consecutive steps."""
        raise NotImplementedError

    def backward(
        self,
        sizes: Sequence[int],
        dout: Tensor | None,
        dh: Tensor,
        dc: Tensor | None,
        saved: Saved,
        h_prev: Tensor,
        c_prev: Tensor | None,
        du: Tensor,
        dv: Tensor,
        sums: Sums,
    ) -> None:
        """Takes gradients back."""
        raise NotImplementedError

    def input_terms(self, v: Tensor, scratch: bool) -> Tensor:
        """``gain * normalised v + bias``, in the memory of v where that is scratch."""
        terms = v if scratch and self.exact else torch.empty_like(v, dtype=self.wide)
        if not self.first.scale:
            return torch.addcmul(self.bias, v.to(self.wide), self.gain_input, out=terms)
        if not self.exact:
            v = terms.copy_(v)
        r = self.first.empty(terms)
        self.first.factors(v, r)
        self.first.times(v, r, terms)
        return torch.addcmul(self.bias, terms, self.gain_input, out=terms)

    def row_sums(self, sums: Tensor | None, d: Tensor, factor: Tensor) -> None:
        """Adds the sum of the rows d, times a factor, where it is wanted."""
        if sums is not None:
            sums.addcmul_(d.sum(0), factor)

    def input_gradients(self, v: Tensor, d: Tensor, dv: Tensor, sums: Sums) -> None:
        """What the gradients d (rows, G) of all sums mean for bias, gain and v; d is used up."""
        self.row_sums(sums.bias, d, self.slope)
        rows, r = self.first.normalized(v, self.wide)
        products = d
        if r is not None:
            products = d * rows
            self.row_sums(sums.gain_input, products, self.slope)
        self.first.adjoint(d, self.back_input, rows, r, products, dv)


def finish(state: Tensor, after: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Puts what each case had after its last step into the state (N, H)."""
    for t, (size, following) in enumerate(zip(sizes, (*sizes[1:], 0), strict=True)):
        if following < size:
            state[following:size].copy_(after[t][following:])


class LSTMSteps(Steps):
    """Gates i, f, g, o."""

    signs = (1.0, 1.0, -2.0, 1.0)
    slopes = (1.0, 1.0, 4.0, 1.0)

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        super().__init__(spec, operands, backward)
        self.cell = spec.out
        gain, shift = operands.gain_out, operands.shift_out
        self.back_out = operands.h0.new_ones(self.hidden) if gain is None else gain
        self.gain_out = -2 * self.back_out
        self.shift_out = None if shift is None else -2 * shift
        self.last = Scale(spec.out, False, self.hidden, operands.h0)

    def cell_sums(self, c: Tensor) -> Tensor:
        """What goes into the sigmoid of the output's tanh, for rows c (n, H)."""
        if not self.cell.scale:
            return c * -2
        if self.cell.center:
            return torch.native_layer_norm(
                c, (self.hidden,), self.gain_out, self.shift_out, self.cell.eps
            )[0]
        rows, _ = self.last.normalized(c, self.wide)
        assert self.shift_out is not None
        return torch.addcmul(self.shift_out, rows, self.gain_out)

    def forward(
        self,
        v: Tensor,
        sizes: Sequence[int],
        h: Tensor,
        c: Tensor | None,
        out: Tensor,
        saved: Saved | None,
    ) -> None:
        assert c is not None
        second, gain, weight, one = self.second, self.gain_recurrent, self.w_hh, self.one
        terms = self.input_terms(v, saved is None).split(sizes)
        outs = out.split(sizes)
        cells = None if saved is None or saved.c is None else saved.c.split(sizes)
        kept = None if saved is None else saved.u.split(sizes)
        products = None if kept else v.new_empty(sizes[0], v.shape[1])
        buffer = h.new_empty(sizes[0], v.shape[1])
        factors = second.empty(buffer)
        before, c_before = h.to(self.narrow), c
        active = -1
        for t, n in enumerate(sizes):
            if n != active:
                active, rows, r = n, buffer[:n], factors[:n]
                i, f, g, o = rows.chunk(4, 1)
                before, c_before, h_now, c_now = before[:n], c_before[:n], h[:n], c[:n]
                if products is not None:
                    u = products[:n]
            if kept is not None and cells is not None:
                u, c_now = kept[t], cells[t]
            torch.mm(before, weight, out=u)
            a = u if self.exact else rows.copy_(u)
            if second.scale:
                second.factors(a, r)
                second.times(a, r, rows)
                a = rows
            torch.addcmul(terms[t], a, gain, out=rows).sigmoid_()
            torch.sub(one, g, alpha=2, out=g)
            torch.mul(c_before, f, out=c_now).addcmul_(i, g)
            shown = self.cell_sums(c_now).sigmoid_()
            torch.sub(one, shown, alpha=2, out=shown)
            before, c_before = outs[t], c_now
            if self.exact:
                torch.mul(o, shown, out=before)
            else:
                before.copy_(torch.mul(o, shown, out=h_now))
        if self.exact:
            finish(h, outs, sizes)
        if cells is not None:
            finish(c, cells, sizes)

    def backward(
        self,
        sizes: Sequence[int],
        dout: Tensor | None,
        dh: Tensor,
        dc: Tensor | None,
        saved: Saved,
        h_prev: Tensor,
        c_prev: Tensor | None,
        du: Tensor,
        dv: Tensor,
        sums: Sums,
    ) -> None:
        assert saved.v is not None
        assert saved.c is not None
        assert c_prev is not None
        assert dc is not None
        hidden, second = self.hidden, self.second
        count, width = du.shape

        # All gates of the chunk
        rows, r = second.normalized(saved.u, self.wide)
        gates = torch.addcmul(self.bias, rows, self.gain_recurrent)
        gates.addcmul_(self.first.normalized(saved.v, self.wide)[0], self.gain_input).sigmoid_()
        slopes = torch.sub(self.one, gates).mul_(gates)
        i, f, g, o = gates.chunk(4, 1)
        slope_i, slope_f, slope_g, slope_o = slopes.chunk(4, 1)
        shown = self.cell_sums(saved.c).sigmoid_()

        # The output: dm, the gradient of the normalised cell state with gain and shift, is D * show
        show = torch.sub(self.one, shown).mul_(shown).mul_(o).mul_(4)
        slope_i.mul_(g.mul_(-2).add_(1))
        slope_f.mul_(c_prev)
        slope_g.mul_(i)
        slope_o.mul_(shown.mul_(-2).add_(1))
        if self.cell.scale:
            c_rows, c_factors = self.last.normalized(saved.c, self.wide)
            assert c_factors is not None
            ways = show.new_empty(count, 2, hidden)
            torch.mul(show, self.back_out, out=ways[:, 0]).mul_(c_factors)
            torch.mul(ways[:, 0], c_rows, out=ways[:, 1])
            ways_by_step = ways.split(sizes)
            c_rows_by_step = c_rows.split(sizes)
            passed = show.new_empty(sizes[0], 2, hidden)
            totals = show.new_empty(sizes[0], 2)
        else:
            show_by_step = show.split(sizes)

        # The gates
        weights = slopes * self.back_recurrent
        if r is not None:
            second.times(weights, r, weights)
            shares = self._shares(weights, rows)
            shares_by_step = shares.split(sizes)
            mixed = show.new_empty(sizes[0], *shares.shape[1:])
            parts = show.new_empty(sizes[0], len(second.columns))
        inner = weights.view(count, 4, hidden)[:, :3].split(sizes)
        outer = weights[:, 3 * hidden :].split(sizes)
        rows_by_step = rows.split(sizes)
        keep = f.split(sizes)

        both = show.new_empty(count, 2, hidden)  # gradients of c and h
        both_by_step = both.unsqueeze(1).split(sizes)
        d_cells, d_states = (both[:, k : k + 1].split(sizes) for k in (0, 1))
        douts = None if dout is None else dout.split(sizes)
        dus = du.split(sizes)
        target = None if self.exact else show.new_empty(sizes[0], width)
        back = None if self.exact else du.new_empty(sizes[0], hidden)
        active = -1
        for t in range(len(sizes) - 1, -1, -1):
            n = sizes[t]
            if n != active:
                active, dh_now, dc_now = n, dh[:n], dc[:n]
                if self.cell.scale:
                    passed_now, totals_now = passed[:n], totals[:n]
                    through, total, turned = (
                        passed_now[:, 0],
                        totals_now[:, :1],
                        totals_now[:, 1:],
                    )
                if r is not None:
                    mixed_now, parts_now = mixed[:n], parts[:n]
                    flat = mixed_now.flatten(2)
                    parts_each = parts_now.split(1, 1)
            dual_c, dual_h = d_cells[t], d_states[t]
            d_c, d_h = dual_c.squeeze(1), dual_h.squeeze(1)
            if douts is None:
                d_h.copy_(dh_now)
            else:
                torch.add(dh_now, douts[t], out=d_h)
            if self.cell.scale:
                torch.mul(dual_h, ways_by_step[t], out=passed_now)
                torch.sum(passed_now, 2, out=totals_now)
                torch.add(dc_now, through, out=d_c)
                if self.cell.center:
                    d_c.sub_(total, alpha=1 / hidden)
                d_c.addcmul_(c_rows_by_step[t], turned, value=-1 / hidden)
            else:
                torch.addcmul(dc_now, d_h, show_by_step[t], out=d_c)
            d_u = dus[t] if target is None else target[:n]
            torch.mul(inner[t], dual_c, out=d_u[:, : 3 * hidden].view(n, 3, hidden))
            torch.mul(outer[t], d_h, out=d_u[:, 3 * hidden :])
            if r is not None:
                torch.mul(both_by_step[t], shares_by_step[t], out=mixed_now)
                torch.sum(flat, 2, out=parts_now)
                for columns, part in zip(second.columns, parts_each, strict=True):
                    d_u[:, columns].addcmul_(rows_by_step[t][:, columns], part, value=-1)
            torch.mul(d_c, keep[t], out=dc_now)
            if back is None:
                torch.mm(d_u, self.w_hh, out=dh_now)
            else:
                torch.mm(dus[t].copy_(d_u), self.w_hh, out=back[:n])
                dh_now.copy_(back[:n])

        # What adds up over rows
        d_cell, d_state = both.unbind(1)
        if self.cell.scale:
            show.mul_(d_state)
            self.row_sums(sums.shift_out, show, show.new_ones(()))
            self.row_sums(sums.gain_out, show.mul_(c_rows), show.new_ones(()))
        slopes.view(count, 4, hidden)[:, :3].mul_(d_cell.unsqueeze(1))
        slope_o.mul_(d_state)
        if r is not None and sums.gain_recurrent is not None:
            self.row_sums(sums.gain_recurrent, rows.mul_(slopes), self.slope)
        self.input_gradients(saved.v, slopes, dv, sums)

    def _shares(self, weights: Tensor, rows: Tensor) -> Tensor:
        """Q, for each group of statistics what belongs to dc and to D: (rows, groups, 2, H)."""
        products = (weights * rows).view(-1, 4, self.hidden)
        shares = weights.new_zeros(weights.shape[0], len(self.second.columns), 2, self.hidden)
        for k, gates in enumerate(self.second.gates):
            for gate in gates:
                shares[:, k, gate // 3].add_(products[:, gate], alpha=1 / self.second.features[k])
        return shares


class _OneState(Steps):
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
        du: Tensor,
    ) -> Tensor:
        """The dependent part of the way back.

        Args:
            sizes: rows of each step.
            dout: gradient of the outputs.
            dh: gradient of the state after the last step; becomes that before the first.
            slopes: K, (rows, G), to be multiplied by gains.
            rows: normalised products R h'.
            r: their factors.
            carry: what of D passes by the products, (rows, H); ``None``: nothing.
            du: to be filled.

        Returns:
            D of all rows, (rows, H).
        """
        hidden, second, count = self.hidden, self.second, len(rows)
        gates = self.spec.gates
        weights = slopes * self.back_recurrent
        if r is not None:
            second.times(weights, r, weights)
            products = (weights * rows).view(count, gates, hidden)
            shares = weights.new_zeros(count, len(second.columns), hidden)
            for k, (members, features) in enumerate(
                zip(second.gates, second.features, strict=True)
            ):
                for gate in members:
                    shares[:, k].add_(products[:, gate], alpha=1 / features)
            shares_by_step = shares.split(sizes)
            mixed = shares.new_empty(sizes[0], *shares.shape[1:])
            parts = shares.new_empty(sizes[0], len(second.columns))
        weights_by_step = weights.view(count, gates, hidden).split(sizes)
        rows_by_step = rows.split(sizes)
        carried = None if carry is None else carry.split(sizes)
        states = weights.new_empty(count, hidden)
        states_by_step = states.split(sizes)
        duals = states.unsqueeze(1).split(sizes)
        douts = None if dout is None else dout.split(sizes)
        dus = du.split(sizes)
        target = None if self.exact else weights.new_empty(sizes[0], du.shape[1])
        back = None if self.exact else du.new_empty(sizes[0], hidden)
        active = -1
        for t in range(len(sizes) - 1, -1, -1):
            n = sizes[t]
            if n != active:
                active, dh_now = n, dh[:n]
                if r is not None:
                    mixed_now, parts_now = mixed[:n], parts[:n]
                    parts_each = parts_now.split(1, 1)
            d_h, dual = states_by_step[t], duals[t]
            if douts is None:
                d_h.copy_(dh_now)
            else:
                torch.add(dh_now, douts[t], out=d_h)
            d_u = dus[t] if target is None else target[:n]
            torch.mul(weights_by_step[t], dual, out=d_u.view(n, gates, hidden))
            if r is not None:
                torch.mul(dual, shares_by_step[t], out=mixed_now)
                torch.sum(mixed_now, 2, out=parts_now)
                for columns, part in zip(second.columns, parts_each, strict=True):
                    d_u[:, columns].addcmul_(rows_by_step[t][:, columns], part, value=-1)
            if back is not None:
                torch.mm(dus[t].copy_(d_u), self.w_hh, out=back[:n])
                dh_now.copy_(back[:n])
                if carried is not None:
                    dh_now.addcmul_(d_h, carried[t])
            elif carried is not None:
                torch.mul(d_h, carried[t], out=dh_now).addmm_(d_u, self.w_hh)
            else:
                torch.mm(d_u, self.w_hh, out=dh_now)
        return states


class GRUSteps(_OneState):
    """Gates r, z, n; with y the input term of n and w its recurrent term, n = tanh(y + r w)."""

    signs = (1.0, 1.0, -2.0)
    slopes = (1.0, 1.0, 1.0)

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        super().__init__(spec, operands, backward)
        bias = operands.bias_hn
        self.bias_hn = -2 * (operands.h0.new_zeros(self.hidden) if bias is None else bias)

    def forward(
        self,
        v: Tensor,
        sizes: Sequence[int],
        h: Tensor,
        c: Tensor | None,
        out: Tensor,
        saved: Saved | None,
    ) -> None:
        second, weight, hidden, one = self.second, self.w_hh, self.hidden, self.one
        gain, gain_n = self.gain_recurrent.split((2 * hidden, hidden))
        terms = self.input_terms(v, saved is None)
        terms_rz, terms_n = (part.split(sizes) for part in terms.split((2 * hidden, hidden), 1))
        outs = out.split(sizes)
        kept = None if saved is None else saved.u.split(sizes)
        products = None if kept else v.new_empty(sizes[0], v.shape[1])
        buffer = h.new_empty(sizes[0], v.shape[1])
        factors = second.empty(buffer)
        # The operand of products, and the state: the same memory where precisions are.
        before, state = h.to(self.narrow), h
        active = -1
        for t, n in enumerate(sizes):
            if n != active:
                active, rows, factor = n, buffer[:n], factors[:n]
                rz, w = rows.split((2 * hidden, hidden), 1)
                r, z = rz.chunk(2, 1)
                before, state, h_now = before[:n], state[:n], h[:n]
                if products is not None:
                    u = products[:n]
            if kept is not None:
                u = kept[t]
            torch.mm(before, weight, out=u)
            a = u if self.exact else rows.copy_(u)
            if second.scale:
                second.factors(a, factor)
                second.times(a, factor, rows)
                a = rows
            torch.addcmul(terms_rz[t], a[:, : 2 * hidden], gain, out=rz).sigmoid_()
            torch.addcmul(self.bias_hn, a[:, 2 * hidden :], gain_n, out=w)
            new = torch.addcmul(terms_n[t], r, w, out=w).sigmoid_()
            torch.sub(one, new, alpha=2, out=new)
            before = outs[t]
            if self.exact:
                state = torch.lerp(new, state, z, out=before)
            else:
                state = torch.lerp(new, state, z, out=h_now)
                before.copy_(state)
        if self.exact:
            finish(h, outs, sizes)

    def backward(
        self,
        sizes: Sequence[int],
        dout: Tensor | None,
        dh: Tensor,
        dc: Tensor | None,
        saved: Saved,
        h_prev: Tensor,
        c_prev: Tensor | None,
        du: Tensor,
        dv: Tensor,
        sums: Sums,
    ) -> None:
        assert saved.v is not None
        hidden, count = self.hidden, len(du)
        rows, factors = self.second.normalized(saved.u, self.wide)
        sums_x = torch.addcmul(
            self.bias, self.first.normalized(saved.v, self.wide)[0], self.gain_input
        )
        gain = self.gain_recurrent
        w = torch.addcmul(self.bias_hn, rows[:, 2 * hidden :], gain[2 * hidden :])
        gates = sums_x[:, : 2 * hidden].addcmul_(rows[:, : 2 * hidden], gain[: 2 * hidden])
        r, z = gates.sigmoid_().chunk(2, 1)
        new = sums_x[:, 2 * hidden :].addcmul_(r, w).sigmoid_()
        # What D has to be multiplied by for the gradients of r, z, w and, slope_x, y
        slopes = new.new_empty(count, 3, hidden)
        slope_r, slope_z, slope_w = slopes.unbind(1)
        slope_x = torch.sub(self.one, new).mul_(new).mul_(4).mul_(1 - z)
        torch.mul(slope_x, r, out=slope_w)
        # w has its sign and factor -2.
        torch.mul(slope_w, w.mul_(-0.5), out=slope_r).mul_(1 - r)
        new.mul_(-2).add_(1)
        torch.sub(h_prev, new, out=slope_z)
        slope_z.mul_(z).mul_(1 - z)
        flat = slopes.view(count, -1)
        states = self.backward_loop(sizes, dout, dh, flat, rows, factors, z, du)
        slopes.mul_(states.unsqueeze(1))
        one = states.new_ones(())
        self.row_sums(sums.bias_hn, slope_w, one)
        if factors is not None and sums.gain_recurrent is not None:
            self.row_sums(sums.gain_recurrent, rows.mul_(flat), one)
        torch.mul(slope_x, states, out=slope_w)
        self.input_gradients(saved.v, flat, dv, sums)


class RNNSteps(_OneState):
    """One sum, of both terms, and tanh or ReLU."""

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        self.relu = spec.cell == "RNN_RELU"
        self.signs, self.slopes = ((1.0,), (1.0,)) if self.relu else ((-2.0,), (4.0,))
        super().__init__(spec, operands, backward)

    def forward(
        self,
        v: Tensor,
        sizes: Sequence[int],
        h: Tensor,
        c: Tensor | None,
        out: Tensor,
        saved: Saved | None,
    ) -> None:
        second, weight = self.second, self.w_hh
        terms, outs = v.split(sizes), out.split(sizes)
        buffer = h.new_empty(sizes[0], v.shape[1])
        factors = second.empty(buffer)
        before = h.to(self.narrow)
        active = -1
        for t, n in enumerate(sizes):
            if n != active:
                active, rows, factor = n, buffer[:n], factors[:n]
                before, h_now = before[:n], h[:n]
            u = terms[t].addmm_(before, weight)
            a = u if self.exact else rows.copy_(u)
            if second.scale:
                second.factors(a, factor)
                second.times(a, factor, rows)
                a = rows
            torch.addcmul(self.bias, a, self.gain_recurrent, out=rows)
            before = outs[t]
            state = before if self.exact else h_now
            if self.relu:
                torch.clamp_min(rows, 0, out=state)
            else:
                torch.sub(self.one, rows.sigmoid_(), alpha=2, out=state)
            if not self.exact:
                before.copy_(state)
        if self.exact:
            finish(h, outs, sizes)

    def backward(
        self,
        sizes: Sequence[int],
        dout: Tensor | None,
        dh: Tensor,
        dc: Tensor | None,
        saved: Saved,
        h_prev: Tensor,
        c_prev: Tensor | None,
        du: Tensor,
        dv: Tensor,
        sums: Sums,
    ) -> None:
        rows, r = self.second.normalized(saved.u, self.wide)
        slopes = torch.addcmul(self.bias, rows, self.gain_recurrent)
        if self.relu:
            slopes = (slopes > 0).to(self.wide)
        else:
            shown = slopes.sigmoid_()
            slopes = torch.sub(self.one, shown).mul_(shown)
        states = self.backward_loop(sizes, dout, dh, slopes, rows, r, None, du)
        slopes.mul_(states)
        self.row_sums(sums.bias, slopes, self.slope)
        if r is not None:
            self.row_sums(sums.gain_out, rows.mul_(slopes), self.slope)
