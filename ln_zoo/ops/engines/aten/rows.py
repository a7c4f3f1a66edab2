"""Steps in functions of torch, of cells whose sites normalise rows.

A step is a chain of dependent operations on few numbers, where a call costs as much as what it
computes. So whatever does not depend on the step before is done for many steps at once: on the way
there the normalised input terms; on the way back all gates anew from the normalised rows that were
kept, and with them coefficients K, products of gates: with D the gradient of a state (dc that of a
cell state), that of what goes into a gate is ``D K`` (or ``dc K``).

Products are in the precision of the weights, all else in float32 at least. In place of the products
u and v the normalised rows are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ln_zoo.ops.engines.aten.shared import AtenSteps
from ln_zoo.ops.engines.base import Chunk, ChunkGrads, Masks, Saved, Sums, centred
from ln_zoo.ops.spec import Operands, Rows, Spec

#: Steps from which it pays to centre weights, and to pack or transpose the recurrent ones.
MANY = 16

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_norm_backward = torch.ops.aten.native_layer_norm_backward.default


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
        self.eps = like.new_tensor([rows.eps])
        self.roots = like.new_tensor([n**-0.5 for n in self.features])

    def normalize(self, a: Tensor, r: Tensor, out: Tensor) -> None:
        """Fills out with the rows a normalised, and r, (n, groups), with their factors.

        Where a has to be centred it is used up; out may be a.
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
        """Turns the gradient d of normalised rows into that of the rows before, in place.

        With u^ the normalised row and r its factor: ``r (d - u^ mean(d u^))``.

        Args:
            d: the gradient, (n, F).
            rows: normalised rows.
            r: their factors.
            products: scratch memory, (n, F).
        """
        torch.mul(d, rows, out=products)
        if len(self.columns) == 1:
            d.addcmul_(rows, products.sum(1, keepdim=True), value=-1 / self.features[0]).mul_(r)
            return
        for k, columns in enumerate(self.columns):
            mean = products[:, columns].mean(1, keepdim=True)
            part = d[:, columns]
            part.addcmul_(rows[:, columns], mean, value=-1).mul_(r[:, k : k + 1])


class RowSteps(AtenSteps):
    """What all cells share; made once per call.

    Args:
        spec: what is to be computed.
        operands: the tensors.
        backward: whether it is for the backward pass.
    """

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        super().__init__(spec, operands, operands.w_ih)
        first, second = (place for place in spec.products if isinstance(place, Rows))
        w_hh, like = operands.w_hh, operands.h0
        many = len(operands.x) // (1 if operands.x.dim() == 3 else max(len(like), 1)) >= MANY
        # Forward, means come off the products where centred weights would cost more than they save,
        # and in half precision, where they would be rounded once more. (Backward it is gradients
        # that are rounded, to the same precision.)
        through_weights = backward or (self.exact and many)
        if through_weights:
            self.w_ih = self.centred("w_ih", self.w_ih, first)
            w_hh = self.centred("w_hh", w_hh, second)
        # What a step multiplies by: (G, H) on the way back, (H, G) on the way there.
        self.w_hh = w_hh if backward else w_hh.t()
        self.packed: Tensor | None = None
        if many and len(like) >= 4 and _packs(w_hh):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.w_hh.t(), len(like))
        elif many and not backward:
            transposed = self.scratch("transposed", *self.w_hh.shape, dtype=self.narrow)
            self.w_hh = transposed.copy_(self.w_hh)
        self.first, self.second = (
            Scale(rows, through_weights, self.hidden, like) for rows in (first, second)
        )
        self.gain_input, self.gain_recurrent = (gain * self.sign for gain in self.gains)
        self.back_input, self.back_recurrent = (gain * self.slope for gain in self.gains)

    def centred(self, name: str, weight: Tensor, rows: Rows) -> Tensor:
        """`ln_zoo.ops.engines.base.centred` in scratch memory."""
        if not (rows.scale and rows.center):
            return weight
        return centred(weight, rows, self.scratch(name, *weight.shape, dtype=weight.dtype))

    def held(self, masks: Masks, sizes: Sequence[int]) -> list[Sequence[Tensor] | None]:
        """The shares of h and of c that zoneout keeps at each step; ``None``: none is kept.

        Of masks they are zeros and ones in the precision of states, or else the same numbers for
        all.
        """
        found: list[Sequence[Tensor] | None] = []
        pairs = zip((masks.zoneout_h, masks.zoneout_c), self.spec.zoneout, strict=True)
        for name, (mask, share) in zip("hc", pairs, strict=True):
            if mask is not None:
                found.append(cut(self.widened(f"zoneout {name}", mask), sizes))
            else:
                found.append([share * self.one] * len(sizes) if share else None)
        return found

    def passed(self, name: str, d: Tensor, held: Tensor) -> Tensor:
        """What of the gradient d (n, H) zoneout passes by a step; it is taken off d."""
        room = torch.mul(d, held, out=self.scratch(f"passed {name}", *d.shape))
        d.sub_(room)
        return room

    def dropped(self, h: Tensor, dropout: Tensor | None) -> Tensor:
        """States h (n, H) as recurrent products see them."""
        if dropout is None:
            return h
        room = self.scratch("dropped", *h.shape, dtype=self.narrow)
        return torch.mul(h, dropout[: len(h)], out=room)

    def product(self, a: Tensor, out: Tensor) -> Tensor:
        """A step's product, in the memory that is given or in new memory."""
        if self.packed is None:
            return torch.mm(a, self.w_hh, out=out)
        return torch.ops.mkldnn._linear_pointwise(a, self.packed, None, "none", [], "")

    def recurrent_rows(self, before: Tensor, u: Tensor, r: Tensor, wide: Tensor) -> Tensor:
        """Normalised products of a step; u takes them and r their factors, to be kept.

        Args:
            before: states before the step, (n, H), in the precision of products.
            u: to be filled, (n, G), in that precision.
            r: to be filled, (n, groups).
            wide: scratch memory, (n, G), in the precision of states.

        Returns:
            They themselves, in the precision of states.
        """
        rows = self.product(before, u)
        if self.exact and self.second.scale:
            self.second.normalize(rows, r, u)
            return u
        if self.exact:
            return rows if rows is u else u.copy_(rows)
        rows = wide.copy_(rows)
        if self.second.scale:
            self.second.normalize(rows, r, rows)
            u.copy_(rows)
        return rows

    def widened(self, name: str, a: Tensor) -> Tensor:
        """Rows as they are computed with: a itself, or a copy in the precision of states."""
        return a if a.dtype == self.wide else self.scratch(name, *a.shape).copy_(a)

    def factors(self, saved: Saved) -> tuple[Tensor, Tensor]:
        """What rows were multiplied by, (rows, groups): input terms, recurrent terms."""
        first = 0 if self.spec.merged else len(self.first.columns)
        return saved.stats[:, :first], saved.stats[:, first:]

    def input_terms(self, v: Tensor, saved: Saved | None) -> Tensor:
        """``gain * normalised v + bias``; normalised rows take the place of v."""
        terms = v if self.exact and saved is None else self.scratch("terms", *v.shape)
        rows = v if self.exact else terms.copy_(v)
        if self.first.scale:
            groups = len(self.first.columns)
            r = self.scratch("factors", len(v), groups) if saved is None else self.factors(saved)[0]
            self.first.normalize(rows, r, rows)
            if not self.exact:
                v.copy_(rows)
        return torch.addcmul(self.bias, rows, self.gain_input, out=terms)

    def kept(
        self, sizes: Sequence[int], width: int, saved: Saved | None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Where the recurrent rows of each step go, and their factors."""
        if saved is not None:
            return cut(saved.u, sizes), cut(self.factors(saved)[1], sizes)
        u = self.one.new_empty(sizes[0], width, dtype=self.narrow)
        r = self.scratch("factors", sizes[0], len(self.second.columns))
        return [u[:n] for n in sizes], [r[:n] for n in sizes]

    def states_gradient(self, d_u: Tensor, du: Tensor, dh: Tensor, dropout: Tensor | None) -> None:
        """What the gradient of a step's products means for the states before it.

        Args:
            d_u: the gradient, (n, G), in the precision of states.
            du: the same memory, or to be filled with it in the precision of products.
            dh: to be filled, (n, H).
            dropout: what the states were multiplied by, (N, H).
        """
        product = self.product(d_u, dh) if self.exact else torch.mm(du.copy_(d_u), self.w_hh)
        if dropout is not None:
            torch.mul(product, dropout[: len(dh)], out=dh)
        elif product is not dh:
            dh.copy_(product)

    def add_row_sums(
        self,
        d: Tensor,
        rows: Tensor,
        of_d: Tensor | None,
        of_products: Tensor | None,
        factor: Tensor,
    ) -> None:
        """Adds the sums of the rows d, and of ``d * rows``, times a factor, where it is wanted."""
        if of_d is None and of_products is None:
            return
        # As the gradients of shift and gain of a layer norm: in a single pass.
        mean, factors = d.new_zeros(len(d), 1), d.new_ones(len(d), 1)
        gain = self.slope[: d.shape[1]]
        _, products, sums = _norm_backward(
            *(d, rows, [d.shape[1]], mean, factors, gain, gain),
            [False, of_products is not None, of_d is not None],
        )
        if of_d is not None:
            of_d.addcmul_(sums, factor)
        if of_products is not None:
            of_products.addcmul_(products, factor)

    def input_gradients(self, d: Tensor, rows: Tensor, r: Tensor, dv: Tensor, sums: Sums) -> None:
        """What the gradients of all sums mean for bias, gain and inputs.

        Args:
            d: the gradients, (rows, G); used up.
            rows: normalised products of the inputs.
            r: their factors.
            dv: to be filled.
            sums: to be added to.
        """
        self.add_row_sums(d, rows, sums.bias, sums.gain_input, self.slope)
        target = dv if self.exact else self.scratch("du", *d.shape)
        torch.mul(d, self.back_input, out=target)
        if self.first.scale:
            self.first.adjoint(target, rows, r, d)
        if not self.exact:
            dv.copy_(target)


def _packs(w: Tensor) -> bool:
    """Whether oneDNN's products with a packed weight are to be had, and faster than others."""
    return (
        w.device.type == "cpu"
        and w.dtype == torch.float32
        and w.numel() >= 2**17
        and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and torch.backends.mkldnn.is_available()
        and torch._C._get_mkldnn_enabled()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def cut(a: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """The rows of each step: `torch.Tensor.split`, without what that does in Python."""
    return a.split_with_sizes(sizes)


def finish(state: Tensor, after: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Puts what each example had after its last step into the state (N, H)."""
    for t, (size, following) in enumerate(zip(sizes, (*sizes[1:], 0), strict=True)):
        if following < size:
            state[following:size].copy_(after[t][following:])


class LSTMSteps(RowSteps):
    """Gates i, f, g, o."""

    signs = (1.0, 1.0, -2.0, 1.0)
    slopes = (1.0, 1.0, 4.0, 1.0)

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        super().__init__(spec, operands, backward)
        assert isinstance(spec.out, Rows)
        self.cell = spec.out
        self.four = 4 * self.one
        gain, shift = operands.gain_out, operands.shift_out
        gain = operands.h0.new_ones(self.hidden) if gain is None else gain
        self.gain_out, self.back_out = -2 * gain, 4 * gain
        self.shift_out = None if shift is None else -2 * shift
        self.last = Scale(spec.out, False, self.hidden, operands.h0)

    def cell_sums(self, c: Tensor) -> Tensor:
        """What goes into the sigmoid of the output's tanh, for rows c (n, H)."""
        if not self.cell.scale:
            return c * self.gain_out
        if self.cell.center:
            return torch.native_layer_norm(
                c, (self.hidden,), self.gain_out, self.shift_out, self.cell.eps
            )[0]
        rows = c.clone()
        self.last.normalize(rows, c.new_empty(len(c), 1), rows)
        assert self.shift_out is not None
        return torch.addcmul(self.shift_out, rows, self.gain_out, out=rows)

    def forward(self, chunk: Chunk) -> None:
        sizes, v, h, c, out, saved, _, masks = chunk
        assert c is not None
        gain, one = self.gain_recurrent, self.one
        held_h, held_c = self.held(masks, sizes)
        terms = cut(self.input_terms(v, saved), sizes)
        outs = cut(out, sizes)
        cells = None if saved is None or saved.c is None else cut(saved.c, sizes)
        us, factors = self.kept(sizes, v.shape[1], saved)
        buffer = self.scratch("sums", sizes[0], v.shape[1])
        before, c_before = h.to(self.narrow), c
        active = -1
        for t, n in enumerate(sizes):
            if n != active:
                active, sums = n, buffer[:n]
                i, f, g, o = sums.chunk(4, 1)
                before, c_before, h_now, c_now = before[:n], c_before[:n], h[:n], c[:n]
            if cells is not None:
                c_now = cells[t]
            dropped = self.dropped(before, masks.dropout)
            rows = self.recurrent_rows(dropped, us[t], factors[t], sums)
            torch.addcmul(terms[t], rows, gain, out=sums).sigmoid_()
            torch.sub(one, g, alpha=2, out=g)
            c_new = c_now if held_c is None else f
            torch.mul(c_before, f, out=c_new).addcmul_(i, g)
            shown = self.cell_sums(c_new).sigmoid_()
            torch.sub(one, shown, alpha=2, out=shown)
            if held_c is not None:
                torch.lerp(c_new, c_before, held_c[t], out=c_now)
            state = outs[t] if self.exact else h_now
            if held_h is None:
                torch.mul(o, shown, out=state)
            else:
                old = before if self.exact else h_now
                torch.lerp(torch.mul(o, shown, out=shown), old, held_h[t], out=state)
            before, c_before = outs[t], c_now
            if not self.exact:
                before.copy_(state)
        if self.exact:
            finish(h, outs, sizes)
        if cells is not None:
            finish(c, cells, sizes)

    def backward_part(self, grads: ChunkGrads) -> None:
        sizes, dout, dh, dc, saved, _h_prev, c_prev, du, dv, sums, _, masks = grads
        assert saved.v is not None
        assert saved.c is not None
        assert c_prev is not None
        assert dc is not None
        hidden, second, scratch = self.hidden, self.second, self.scratch
        count, width = du.shape

        # All gates
        rows, terms = self.widened("rows", saved.u), self.widened("terms", saved.v)
        factors_x, factors = self.factors(saved)
        gates = scratch("gates", count, width)
        torch.addcmul(self.bias, rows, self.gain_recurrent, out=gates)
        gates.addcmul_(terms, self.gain_input).sigmoid_()
        i, f, g, o = gates.chunk(4, 1)
        held_h, held_c = self.held(masks, sizes)
        cells = saved.c
        if held_c is not None:
            # Those of before zoneout, of which alone h was made.
            cells = torch.mul(c_prev, f, out=scratch("new cells", count, hidden))
            cells.add_(i).addcmul_(i, g, value=-2)
        shown = self.cell_sums(cells).sigmoid_()

        # K. The gradient dm of the normalised cell state, with gain and shift, is D * 4 show.
        slopes = scratch("slopes", count, width)
        slope_i, slope_f, slope_g, slope_o = slopes.chunk(4, 1)
        show = _sigmoid_backward(o, shown, grad_input=scratch("show", count, hidden))
        torch.sub(self.one, shown, alpha=2, out=shown)
        _sigmoid_backward(shown, o, grad_input=slope_o)
        _sigmoid_backward(c_prev, f, grad_input=slope_f)
        _sigmoid_backward(i, g, grad_input=slope_g)
        torch.sub(self.one, g, alpha=2, out=g)
        _sigmoid_backward(g, i, grad_input=slope_i)
        keep = cut(f, sizes)

        # What D does to dc: by itself, and through the mean that c was divided by.
        if self.cell.scale:
            c_rows = scratch("cells", count, hidden).copy_(cells)
            c_factors = scratch("cell factors", count, 1)
            self.last.normalize(c_rows, c_factors, c_rows)
            ways = scratch("ways", count, 2, hidden)
            torch.mul(show, self.back_out, out=ways[:, 0]).mul_(c_factors)
            torch.mul(ways[:, 0], c_rows, out=ways[:, 1])
            ways_at, c_rows_at = cut(ways, sizes), cut(c_rows, sizes)
            passed = scratch("passed", sizes[0], 2, hidden)
            totals = scratch("totals", sizes[0], 2)
        else:
            ways_at = cut(torch.mul(show, self.back_out, out=scratch("ways", *show.shape)), sizes)

        # Step by step slopes become gradients of sums.
        inner, outer = (
            cut(slopes.view(count, 4, hidden)[:, :3], sizes),
            cut(slope_o, sizes),
        )
        slopes_at, rows_at, factors_at = (
            cut(slopes, sizes),
            cut(rows, sizes),
            cut(factors, sizes),
        )
        products = scratch("products", sizes[0], width)
        states = scratch("states", count, hidden)
        d_hs, d_hs_2 = cut(states, sizes), cut(states.unsqueeze(1), sizes)
        douts = None if dout is None else cut(dout, sizes)
        dus = cut(du, sizes)
        d_sums = dus if self.exact else cut(scratch("du", count, width), sizes)
        active = -1
        for t in range(len(sizes) - 1, -1, -1):
            n = sizes[t]
            if n != active:
                active, dh_now, d_c = n, dh[:n], dc[:n]
                d_c_3, products_now = d_c.unsqueeze(1), products[:n]
                if self.cell.scale:
                    passed_now, totals_now = passed[:n], totals[:n]
                    through = passed_now[:, 0]
                    total, turned = totals_now.split(1, 1)
            d_h = d_hs[t]
            if douts is None:
                d_h.copy_(dh_now)
            else:
                torch.add(dh_now, douts[t], out=d_h)
            by_h = None if held_h is None else self.passed("h", d_h, held_h[t])
            by_c = None if held_c is None else self.passed("c", d_c, held_c[t])
            if self.cell.scale:
                torch.mul(d_hs_2[t], ways_at[t], out=passed_now)
                torch.sum(passed_now, 2, out=totals_now)
                d_c.add_(through)
                if self.cell.center:
                    d_c.sub_(total, alpha=1 / hidden)
                d_c.addcmul_(c_rows_at[t], turned, value=-1 / hidden)
            else:
                d_c.addcmul_(d_h, ways_at[t])
            inner[t].mul_(d_c_3)
            outer[t].mul_(d_h)
            d_u = torch.mul(slopes_at[t], self.back_recurrent, out=d_sums[t])
            if second.scale:
                second.adjoint(d_u, rows_at[t], factors_at[t], products_now)
            d_c.mul_(keep[t])
            self.states_gradient(d_u, dus[t], dh_now, masks.dropout)
            if by_h is not None:
                dh_now.add_(by_h)
            if by_c is not None:
                d_c.add_(by_c)

        # What adds up over rows
        if self.cell.scale:
            show.mul_(states)
            self.add_row_sums(show, c_rows, sums.shift_out, sums.gain_out, self.four)
        self.add_row_sums(slopes, rows, None, sums.gain_recurrent, self.slope)
        self.input_gradients(slopes, terms, factors_x, dv, sums)


class _OneState(RowSteps):
    """Cells without a cell state: with D the gradient of h, that of each sum is ``D K``."""

    def backward_loop(
        self,
        sizes: Sequence[int],
        dout: Tensor | None,
        dh: Tensor,
        slopes: Tensor,
        rows: Tensor,
        r: Tensor,
        carry: Tensor | None,
        du: Tensor,
        masks: Masks,
    ) -> Tensor:
        """The dependent part of the way back.

        Args:
            sizes: rows of each step.
            dout: gradient of the outputs.
            dh: gradient of the state after the last step; becomes that before the first.
            slopes: K, (rows, G); becomes the gradients of sums.
            rows: normalised products R h'.
            r: their factors.
            carry: what of D passes by the products, (rows, H); ``None``: nothing.
            du: to be filled.
            masks: what was drawn.

        Returns:
            D of all rows, (rows, H), less what zoneout passes by.
        """
        hidden, second, count, scratch = self.hidden, self.second, len(rows), self.scratch
        gates = cut(slopes.view(count, self.spec.gates, hidden), sizes)
        slopes_at, rows_at, r_at = (
            cut(slopes, sizes),
            cut(rows, sizes),
            cut(r, sizes),
        )
        carried = None if carry is None else cut(carry, sizes)
        products = scratch("products", sizes[0], du.shape[1])
        states = scratch("states", count, hidden)
        # Once more with an axis for the gates that it goes into
        d_hs, d_hs_n = cut(states, sizes), cut(states.unsqueeze(1), sizes)
        douts = None if dout is None else cut(dout, sizes)
        dus = cut(du, sizes)
        d_sums = dus if self.exact else cut(scratch("du", *du.shape), sizes)
        held, _ = self.held(masks, sizes)
        active = -1
        for t in range(len(sizes) - 1, -1, -1):
            n = sizes[t]
            if n != active:
                active, dh_now, products_now = n, dh[:n], products[:n]
            d_h = d_hs[t]
            if douts is None:
                d_h.copy_(dh_now)
            else:
                torch.add(dh_now, douts[t], out=d_h)
            by_h = None if held is None else self.passed("h", d_h, held[t])
            gates[t].mul_(d_hs_n[t])
            d_u = torch.mul(slopes_at[t], self.back_recurrent, out=d_sums[t])
            if second.scale:
                second.adjoint(d_u, rows_at[t], r_at[t], products_now)
            self.states_gradient(d_u, dus[t], dh_now, masks.dropout)
            if carried is not None:
                dh_now.addcmul_(d_h, carried[t])
            if by_h is not None:
                dh_now.add_(by_h)
        return states


class GRUSteps(_OneState):
    """Gates r, z, n; with y the input term of n and w its recurrent term, n = tanh(y + r w)."""

    signs = (1.0, 1.0, -2.0)
    slopes = (1.0, 1.0, 4.0)

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        super().__init__(spec, operands, backward)
        self.four = 4 * self.one
        bias = operands.bias_hn
        self.bias_hn = -2 * (operands.h0.new_zeros(self.hidden) if bias is None else bias)

    def forward(self, chunk: Chunk) -> None:
        sizes, v, h, _c, out, saved, _, masks = chunk
        one, split = self.one, 2 * self.hidden
        held, _ = self.held(masks, sizes)
        gain, gain_n = self.gain_recurrent.split((split, self.hidden))
        terms = self.input_terms(v, saved)
        terms_rz, terms_n = (
            cut(terms[:, :split], sizes),
            cut(terms[:, split:], sizes),
        )
        outs = cut(out, sizes)
        us, factors = self.kept(sizes, v.shape[1], saved)
        buffer = self.scratch("sums", sizes[0], v.shape[1])
        # The operand of products, and the state: the same memory where precisions are.
        before, state = h.to(self.narrow), h
        active = -1
        for t, n in enumerate(sizes):
            if n != active:
                active, sums = n, buffer[:n]
                rz, new = sums[:, :split], sums[:, split:]
                r, z = rz.chunk(2, 1)
                before, state, h_now = before[:n], state[:n], h[:n]
            dropped = self.dropped(before, masks.dropout)
            rows = self.recurrent_rows(dropped, us[t], factors[t], sums)
            torch.addcmul(terms_rz[t], rows[:, :split], gain, out=rz).sigmoid_()
            torch.addcmul(self.bias_hn, rows[:, split:], gain_n, out=new)
            torch.addcmul(terms_n[t], r, new, out=new).sigmoid_()
            torch.sub(one, new, alpha=2, out=new)
            if held is not None:
                torch.lerp(z, one, held[t], out=z)
            before = outs[t]
            if self.exact:
                state = torch.lerp(new, state, z, out=before)
            else:
                state = torch.lerp(new, state, z, out=h_now)
                before.copy_(state)
        if self.exact:
            finish(h, outs, sizes)

    def backward_part(self, grads: ChunkGrads) -> None:
        sizes, dout, dh, _dc, saved, h_prev, _c_prev, du, dv, sums, _, masks = grads
        assert saved.v is not None
        hidden, scratch, one = self.hidden, self.scratch, self.one
        count, width = du.shape
        split, gain = 2 * hidden, self.gain_recurrent
        rows, terms = self.widened("rows", saved.u), self.widened("terms", saved.v)
        factors_x, factors = self.factors(saved)
        gates = scratch("gates", count, width)
        torch.addcmul(self.bias, terms, self.gain_input, out=gates)
        gates[:, :split].addcmul_(rows[:, :split], gain[:split]).sigmoid_()
        r, z, new = gates.chunk(3, 1)
        w = scratch("w", count, hidden)
        torch.addcmul(self.bias_hn, rows[:, split:], gain[split:], out=w)
        new.addcmul_(r, w).sigmoid_()

        # K: of r, z, w, and of y; those of w and y less a factor of 4.
        slopes = scratch("slopes", count, width)
        slope_r, slope_z, slope_w = slopes.chunk(3, 1)
        slope_y = scratch("slope y", count, hidden)
        torch.sub(one, z, out=slope_w)
        _sigmoid_backward(slope_w, new, grad_input=slope_y)
        torch.sub(one, new, alpha=2, out=new)
        torch.sub(h_prev, new, out=new)
        _sigmoid_backward(new, z, grad_input=slope_z)
        torch.mul(slope_y, r, out=slope_w)
        # w comes times -2.
        _sigmoid_backward(w.mul_(-2).mul_(slope_y), r, grad_input=slope_r)

        states = self.backward_loop(sizes, dout, dh, slopes, rows, factors, z, du, masks)
        if sums.bias_hn is not None:
            sums.bias_hn.addcmul_(slope_w.sum(0), self.four)
        self.add_row_sums(slopes, rows, None, sums.gain_recurrent, self.slope)
        torch.mul(slope_y, states, out=slope_w)
        self.input_gradients(slopes, terms, factors_x, dv, sums)


class RNNSteps(_OneState):
    """One sum, of both terms, and tanh or ReLU."""

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        self.relu = spec.cell == "RNN_RELU"
        self.signs, self.slopes = ((1.0,), (1.0,)) if self.relu else ((-2.0,), (4.0,))
        super().__init__(spec, operands, backward)

    def forward(self, chunk: Chunk) -> None:
        sizes, v, h, _c, out, saved, _, masks = chunk
        held, _ = self.held(masks, sizes)
        us, outs = cut(v, sizes), cut(out, sizes)
        _, factors = self.kept(sizes, v.shape[1], saved)
        buffer = self.scratch("sums", sizes[0], v.shape[1])
        before = h.to(self.narrow)
        active = -1
        for t, n in enumerate(sizes):
            if n != active:
                active, sums = n, buffer[:n]
                before, h_now = before[:n], h[:n]
            dropped = self.dropped(before, masks.dropout)
            # Of half-precision terms the sum is rounded, not the term.
            if self.packed is None:
                rows = us[t].addmm_(dropped, self.w_hh)
            else:
                rows = us[t].add_(self.product(dropped, us[t]))
            if not self.exact:
                rows = sums.copy_(rows)
            if self.second.scale:
                self.second.normalize(rows, factors[t], rows)
                if not self.exact:
                    us[t].copy_(rows)
            torch.addcmul(self.bias, rows, self.gain_recurrent, out=sums)
            old, before = before if self.exact else h_now, outs[t]
            state = before if self.exact else h_now
            new = state if held is None else sums
            if self.relu:
                torch.clamp_min(sums, 0, out=new)
            else:
                torch.sub(self.one, sums.sigmoid_(), alpha=2, out=new)
            if held is not None:
                torch.lerp(new, old, held[t], out=state)
            if not self.exact:
                before.copy_(state)
        if self.exact:
            finish(h, outs, sizes)

    def backward_part(self, grads: ChunkGrads) -> None:
        sizes, dout, dh, _dc, saved, _h_prev, _c_prev, du, _dv, sums, _, masks = grads
        rows, (_, factors) = self.widened("rows", saved.u), self.factors(saved)
        slopes = self.scratch("slopes", *du.shape)
        torch.addcmul(self.bias, rows, self.gain_recurrent, out=slopes)
        if self.relu:
            slopes.gt_(0)
        else:
            slopes.sigmoid_()
            _sigmoid_backward(self.one.expand(slopes.shape), slopes, grad_input=slopes)
        self.backward_loop(sizes, dout, dh, slopes, rows, factors, None, du, masks)
        self.add_row_sums(slopes, rows, sums.bias, sums.gain_out, self.slope)
