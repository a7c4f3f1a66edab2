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

from ln_zoo.ops import memory
from ln_zoo.ops.engine import Products, Saved, Sums, centred
from ln_zoo.ops.spec import Operands, Rows, Spec

#: Numbers of one kind that are in work at a time on the way back, on CPUs.
PIECE = 2**18


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

    def normalized(self, a: Tensor, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Fills rows with normalised rows, and gives them and their factors.

        The identity gives the rows a themselves where they have that precision.
        """
        if not self.scale:
            return (a if a.dtype == rows.dtype else rows.copy_(a)), None
        if self.center or a.dtype != rows.dtype:
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
            out: to be filled; may be d.
        """
        torch.mul(d, gain, out=out)
        if r is None:
            return
        for columns, features in zip(self.columns, self.features, strict=True):
            mean = torch.mv(products[:, columns], gain[columns]).div_(features).unsqueeze(1)
            out[:, columns].addcmul_(rows[:, columns], mean, value=-1)
        self.times(out, r, out)


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
        """Takes gradients back, in pieces short enough that their numbers stay in the cache."""
        limit = PIECE // du.shape[1] if du.device.type == "cpu" else len(du)
        ends = [0]
        row = 0
        for t, size in enumerate(sizes):
            row += size
            if t == len(sizes) - 1 or row - sum(sizes[: ends[-1]]) >= limit:
                ends.append(t + 1)
        for first, last in reversed(list(itertools.pairwise(ends))):
            start = sum(sizes[:first])
            rows = slice(start, start + sum(sizes[first:last]))
            kept = Saved(
                None if saved.v is None else saved.v[rows],
                saved.u[rows],
                None if saved.c is None else saved.c[rows],
                saved.stats[rows],
            )
            self.backward_piece(
                sizes[first:last],
                None if dout is None else dout[rows],
                dh,
                dc,
                kept,
                h_prev[rows],
                None if c_prev is None else c_prev[rows],
                du[rows],
                dv[rows],
                sums,
            )

    def backward_piece(
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
        """The same for all steps at once that it is given."""
        raise NotImplementedError

    def scratch(self, name: str, *size: int) -> Tensor:
        """Memory of that name for one piece, not filled."""
        if self.one.device.type == "cpu":
            return memory.scratch(f"aten {name}", *size, dtype=self.wide)
        return self.one.new_empty(size)

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

    def input_gradients(
        self, d: Tensor, rows: Tensor, r: Tensor | None, dv: Tensor, sums: Sums
    ) -> None:
        """What the gradients of all sums mean for bias, gain and inputs.

        Args:
            d: the gradients, (rows, G); used up.
            rows: normalised products of the inputs.
            r: their factors.
            dv: to be filled.
            sums: to be added to.
        """
        self.row_sums(sums.bias, d, self.slope)
        products = d
        if r is not None:
            products = torch.mul(d, rows, out=self.scratch("products", *d.shape))
            self.row_sums(sums.gain_input, products, self.slope)
        if self.exact:
            self.first.adjoint(d, self.back_input, rows, r, products, dv)
        else:
            self.first.adjoint(d, self.back_input, rows, r, products, d)
            dv.copy_(d)


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
        rows, _ = self.last.normalized(c, torch.empty_like(c))
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

    def backward_piece(
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
        hidden, second, scratch = self.hidden, self.second, self.scratch
        count, width = du.shape

        # All gates
        rows, r = second.normalized(saved.u, scratch("rows", count, width))
        gates = torch.addcmul(
            self.bias, rows, self.gain_recurrent, out=scratch("gates", count, width)
        )
        terms, factors_x = self.first.normalized(saved.v, scratch("input rows", count, width))
        gates.addcmul_(terms, self.gain_input).sigmoid_()
        slopes = torch.sub(self.one, gates, out=scratch("slopes", count, width)).mul_(gates)
        i, f, g, o = gates.chunk(4, 1)
        slope_i, slope_f, slope_g, slope_o = slopes.chunk(4, 1)
        shown = self.cell_sums(saved.c).sigmoid_()

        # The output: dm, the gradient of the normalised cell state with gain and shift, is D * show
        show = torch.sub(self.one, shown, out=scratch("show", count, hidden))
        show.mul_(shown).mul_(o).mul_(4)
        slope_i.mul_(torch.sub(self.one, g, alpha=2, out=g))
        slope_f.mul_(c_prev)
        slope_g.mul_(i)
        slope_o.mul_(torch.sub(self.one, shown, alpha=2, out=shown))
        if self.cell.scale:
            c_rows, c_factors = self.last.normalized(saved.c, scratch("cells", count, hidden))
            assert c_factors is not None
            ways = scratch("ways", count, 2, hidden)
            torch.mul(show, self.back_out, out=ways[:, 0]).mul_(c_factors)
            torch.mul(ways[:, 0], c_rows, out=ways[:, 1])
            ways_at, c_rows_at = ways.split(sizes), c_rows.split(sizes)
            passed = scratch("passed", sizes[0], 2, hidden)
            totals = scratch("totals", sizes[0], 2)
        else:
            show_at = show.split(sizes)

        # The gates
        weights = torch.mul(slopes, self.back_recurrent, out=scratch("weights", count, width))
        if r is not None:
            second.times(weights, r, weights)
            shares_at = self._shares(weights, rows).split(sizes)
            mixed = scratch("mixed", sizes[0], len(second.columns), 2 * hidden)
            parts = scratch("parts", sizes[0], len(second.columns))
            rows_at = [rows[:, columns].split(sizes) for columns in second.columns]
        inner = weights.view(count, 4, hidden)[:, :3].split(sizes)
        outer = weights[:, 3 * hidden :].split(sizes)
        keep = f.split(sizes)

        # Gradients of c and h; each once more with an axis for the gates that it goes into
        both = scratch("both", count, 2, hidden)
        d_cell, d_state = both.unbind(1)
        d_cs, d_hs = d_cell.split(sizes), d_state.split(sizes)
        d_cs_3, d_hs_2 = d_cell.unsqueeze(1).split(sizes), d_state.unsqueeze(1).split(sizes)
        both_at = both.view(count, 1, 2 * hidden).split(sizes)
        douts = None if dout is None else dout.split(sizes)
        d_sums = du if self.exact else scratch("sums", count, width)
        d_sums_at = d_sums.split(sizes)
        inner_out = d_sums.view(count, 4, hidden)[:, :3].split(sizes)
        outer_out = d_sums[:, 3 * hidden :].split(sizes)
        groups_out = [d_sums[:, columns].split(sizes) for columns in second.columns]
        dus = du.split(sizes)
        back = None if self.exact else du.new_empty(sizes[0], hidden)
        active = -1
        for t in range(len(sizes) - 1, -1, -1):
            n = sizes[t]
            if n != active:
                active, dh_now, dc_now = n, dh[:n], dc[:n]
                if self.cell.scale:
                    passed_now, totals_now = passed[:n], totals[:n]
                    through = passed_now[:, 0]
                    total, turned = totals_now.split(1, 1)
                if r is not None:
                    mixed_now, parts_now = mixed[:n], parts[:n]
                    parts_each = parts_now.split(1, 1)
            d_c, d_h = d_cs[t], d_hs[t]
            if douts is None:
                d_h.copy_(dh_now)
            else:
                torch.add(dh_now, douts[t], out=d_h)
            if self.cell.scale:
                torch.mul(d_hs_2[t], ways_at[t], out=passed_now)
                torch.sum(passed_now, 2, out=totals_now)
                torch.add(dc_now, through, out=d_c)
                if self.cell.center:
                    d_c.sub_(total, alpha=1 / hidden)
                d_c.addcmul_(c_rows_at[t], turned, value=-1 / hidden)
            else:
                torch.addcmul(dc_now, d_h, show_at[t], out=d_c)
            torch.mul(inner[t], d_cs_3[t], out=inner_out[t])
            torch.mul(outer[t], d_h, out=outer_out[t])
            if r is not None:
                torch.mul(both_at[t], shares_at[t], out=mixed_now)
                torch.sum(mixed_now, 2, out=parts_now)
                for group, part, of_group in zip(groups_out, parts_each, rows_at, strict=True):
                    group[t].addcmul_(of_group[t], part, value=-1)
            torch.mul(d_c, keep[t], out=dc_now)
            if back is None:
                torch.mm(dus[t], self.w_hh, out=dh_now)
            else:
                torch.mm(dus[t].copy_(d_sums_at[t]), self.w_hh, out=back[:n])
                dh_now.copy_(back[:n])

        # What adds up over rows
        if self.cell.scale:
            show.mul_(d_state)
            self.row_sums(sums.shift_out, show, self.one)
            if sums.gain_out is not None:
                self.row_sums(sums.gain_out, show.mul_(c_rows), self.one)
        slopes.view(count, 4, hidden)[:, :3].mul_(d_cell.unsqueeze(1))
        slope_o.mul_(d_state)
        if r is not None and sums.gain_recurrent is not None:
            self.row_sums(sums.gain_recurrent, rows.mul_(slopes), self.slope)
        self.input_gradients(slopes, terms, factors_x, dv, sums)

    def _shares(self, weights: Tensor, rows: Tensor) -> Tensor:
        """Q, for each group of statistics what belongs to dc and to D: (rows, groups, 2 H)."""
        count, hidden, groups = len(rows), self.hidden, self.second.gates
        products = torch.mul(weights, rows, out=self.scratch("products", *rows.shape))
        gates = products.view(count, 4, hidden)
        shares = self.scratch("shares", count, len(groups), 2, hidden)
        for k, (members, features) in enumerate(zip(groups, self.second.features, strict=True)):
            for share, last in zip(shares[:, k].unbind(1), (False, True), strict=True):
                mine = [gate for gate in members if (gate == 3) == last]
                if mine:
                    torch.sum(gates[:, mine[0] : mine[-1] + 1], 1, out=share).div_(features)
                else:
                    share.zero_()
        return shares.view(count, len(groups), 2 * hidden)


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
        scratch = self.scratch
        weights = torch.mul(slopes, self.back_recurrent, out=scratch("weights", *slopes.shape))
        if r is not None:
            second.times(weights, r, weights)
            products = torch.mul(weights, rows, out=scratch("products", *rows.shape))
            products = products.view(count, gates, hidden)
            shares = scratch("shares", count, len(second.columns), hidden)
            for k, (members, features) in enumerate(
                zip(second.gates, second.features, strict=True)
            ):
                mine = products[:, members[0] : members[-1] + 1]
                torch.sum(mine, 1, out=shares[:, k]).div_(features)
            shares_at = shares.split(sizes)
            mixed = scratch("mixed", sizes[0], *shares.shape[1:])
            parts = scratch("parts", sizes[0], len(second.columns))
            rows_at = [rows[:, columns].split(sizes) for columns in second.columns]
        weights_at = weights.view(count, gates, hidden).split(sizes)
        carried = None if carry is None else carry.split(sizes)
        states = scratch("states", count, hidden)
        d_hs = states.split(sizes)
        # Once more with an axis for the gates that it goes into
        d_hs_n = states.unsqueeze(1).split(sizes)
        douts = None if dout is None else dout.split(sizes)
        d_sums = du if self.exact else scratch("sums", *du.shape)
        d_sums_at = d_sums.split(sizes)
        gates_out = d_sums.view(count, gates, hidden).split(sizes)
        groups_out = [d_sums[:, columns].split(sizes) for columns in second.columns]
        dus = du.split(sizes)
        back = None if self.exact else du.new_empty(sizes[0], hidden)
        active = -1
        for t in range(len(sizes) - 1, -1, -1):
            n = sizes[t]
            if n != active:
                active, dh_now = n, dh[:n]
                if r is not None:
                    mixed_now, parts_now = mixed[:n], parts[:n]
                    parts_each = parts_now.split(1, 1)
            d_h = d_hs[t]
            if douts is None:
                d_h.copy_(dh_now)
            else:
                torch.add(dh_now, douts[t], out=d_h)
            torch.mul(weights_at[t], d_hs_n[t], out=gates_out[t])
            if r is not None:
                torch.mul(d_hs_n[t], shares_at[t], out=mixed_now)
                torch.sum(mixed_now, 2, out=parts_now)
                for group, part, of_group in zip(groups_out, parts_each, rows_at, strict=True):
                    group[t].addcmul_(of_group[t], part, value=-1)
            if back is not None:
                torch.mm(dus[t].copy_(d_sums_at[t]), self.w_hh, out=back[:n])
                dh_now.copy_(back[:n])
                if carried is not None:
                    dh_now.addcmul_(d_h, carried[t])
            elif carried is not None:
                torch.mul(d_h, carried[t], out=dh_now).addmm_(dus[t], self.w_hh)
            else:
                torch.mm(dus[t], self.w_hh, out=dh_now)
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

    def backward_piece(
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
        hidden, scratch, one = self.hidden, self.scratch, self.one
        count, width = du.shape
        split, gain = 2 * hidden, self.gain_recurrent
        rows, factors = self.second.normalized(saved.u, scratch("rows", count, width))
        terms, factors_x = self.first.normalized(saved.v, scratch("input rows", count, width))
        gates = torch.addcmul(self.bias, terms, self.gain_input, out=scratch("gates", count, width))
        gates[:, :split].addcmul_(rows[:, :split], gain[:split]).sigmoid_()
        r, z, new = gates.chunk(3, 1)
        w = scratch("w", count, hidden)
        torch.addcmul(self.bias_hn, rows[:, split:], gain[split:], out=w)
        new.addcmul_(r, w).sigmoid_()

        # What D has to be multiplied by for the gradients of r, z, w and, slope_y, y
        slopes = scratch("slopes", count, width)
        slope_r, slope_z, slope_w = slopes.chunk(3, 1)
        others = torch.sub(one, gates[:, :split], out=scratch("others", count, split))
        not_r, not_z = others.chunk(2, 1)
        slope_y = torch.sub(one, new, out=scratch("slope y", count, hidden))
        slope_y.mul_(new).mul_(4).mul_(not_z)
        torch.mul(slope_y, r, out=slope_w)
        # w comes times -2.
        torch.mul(slope_w, w.mul_(-0.5), out=slope_r).mul_(not_r)
        torch.sub(one, new, alpha=2, out=new)
        torch.sub(h_prev, new, out=slope_z).mul_(z).mul_(not_z)

        d_state = self.backward_loop(sizes, dout, dh, slopes, rows, factors, z, du)
        slopes.view(count, 3, hidden).mul_(d_state.unsqueeze(1))
        self.row_sums(sums.bias_hn, slope_w, one)
        if factors is not None and sums.gain_recurrent is not None:
            self.row_sums(sums.gain_recurrent, rows.mul_(slopes), one)
        torch.mul(slope_y, d_state, out=slope_w)
        self.input_gradients(slopes, terms, factors_x, dv, sums)


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

    def backward_piece(
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
        rows, r = self.second.normalized(saved.u, self.scratch("rows", *du.shape))
        slopes = self.scratch("slopes", *du.shape)
        torch.addcmul(self.bias, rows, self.gain_recurrent, out=slopes)
        if self.relu:
            slopes.gt_(0)
        else:
            shown = slopes.sigmoid_()
            slopes = torch.sub(self.one, shown, out=self.scratch("others", *du.shape)).mul_(shown)
        d_state = self.backward_loop(sizes, dout, dh, slopes, rows, r, None, du)
        slopes.mul_(d_state)
        self.row_sums(sums.bias, slopes, self.slope)
        if r is not None and sums.gain_out is not None:
            self.row_sums(sums.gain_out, rows.mul_(slopes), self.slope)
