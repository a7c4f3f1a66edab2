"""Steps of LSTM, GRUs and RNN in torch functions, for every norm.

Call overhead dominates, so work is batched over steps where possible: normalised input terms
forward; gates and their factors K backward. With D the gradient of a state, that of a
pre-activation is ``D K``. Only products have the weights' dtype; the rest is float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ln_zoo.ops import memory
from ln_zoo.ops.engines.aten.normalization import CellPlace, ExamplePlace, RowPlace, affine
from ln_zoo.ops.engines.base import Chunk, ChunkGrads, Masks, Saved, Steps, Sums, centred
from ln_zoo.ops.spec import Examples, Operands, Rows, Spec
from ln_zoo.ops.time_chunks import EqualSteps, equal_steps, time_chunks

#: Minimum steps for centring weights, and for packing or transposing the recurrent ones.
MANY = 16
#: Elements of one tensor per part of the backward pass, on CPUs.
PIECE = 2**18

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_norm_backward = torch.ops.aten.native_layer_norm_backward.default


class AtenSteps(Steps):
    """State of one call, for all cells.

    ``tanh(a)`` is computed as ``1 - 2 sigmoid(-2 a)``, which is several times faster on CPUs. Gains
    and biases absorb the -2. The derivative is ``4 s (1 - s)``, with s that sigmoid; gains of the
    backward pass (the slopes) absorb the 4.
    """

    #: Factors of each gate's pre-activations and their gradients: see above on tanh.
    signs: tuple[float, ...]
    slopes: tuple[float, ...]

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        like, w_ih, w_hh = operands.h0, operands.w_ih, operands.w_hh
        self.spec = spec
        self.narrow, self.wide = operands.x.dtype, like.dtype
        self.exact = self.narrow == self.wide
        self.hidden = w_hh.shape[1]
        self.one = like.new_ones(1)
        self._memory: dict[tuple[str | int, ...], Tensor] = {}
        self.sign, self.slope = (
            like.new_tensor(factors).repeat_interleave(self.hidden)
            for factors in (self.signs, self.slopes)
        )
        bias = operands.bias
        self.bias = torch.zeros_like(self.sign) if bias is None else bias * self.sign
        many = len(operands.x) // (1 if operands.x.dim() == 3 else max(len(like), 1)) >= MANY
        # The forward pass subtracts means from products if centring the weights costs more, and in
        # half precision, where centred weights would be rounded again.
        through_weights = backward or (self.exact and many)
        if through_weights:
            first, second = spec.products
            w_ih, w_hh = self._centred("w_ih", w_ih, first), self._centred("w_hh", w_hh, second)
        super().__init__(w_ih)
        # Right operand of a step: (G, H) backward, (H, G) forward.
        self.w_hh = w_hh if backward else w_hh.t()
        self.packed: Tensor | None = None
        if many and len(like) >= 4 and _packs(w_hh):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.w_hh.t(), len(like))
        elif many and not backward:
            transposed = self.scratch("transposed", *self.w_hh.shape, dtype=self.narrow)
            self.w_hh = transposed.copy_(self.w_hh)

        def place(of: Rows | Examples, gain: Tensor | None) -> RowPlace | ExamplePlace:
            gain = self.one if gain is None else gain
            both = gain * self.sign, gain * self.slope
            if isinstance(of, Examples):
                return ExamplePlace(of, *both, self.hidden, self.narrow)
            return RowPlace(of, *both, through_weights, self.hidden)

        self.first, self.second = map(place, spec.products, operands.gains(spec))

    def _centred(self, name: str, weight: Tensor, rows: Rows | Examples) -> Tensor:
        if not rows.center:
            return weight
        return centred(weight, rows, self.scratch(name, *weight.shape, dtype=weight.dtype))

    # Memory

    def scratch(self, name: str, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = self.wide if dtype is None else dtype
        if self.one.device.type != "cpu":
            return self.one.new_empty(size, dtype=dtype)
        found = self._memory.get((name, *size))
        if found is None:
            found = memory.scratch(f"aten {name}", *size, dtype=dtype)
            self._memory[(name, *size)] = found
        return found

    def factors(self, saved: Saved) -> tuple[Tensor, Tensor]:
        first = 0 if self.spec.merged else self.first.factors
        return saved.stats[:, :first], saved.stats[:, first:]

    def kept(
        self, sizes: Sequence[int], width: int, saved: Saved | None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Memory for the recurrent rows of each step and their reciprocal deviations."""
        if saved is not None:
            return cut(saved.u, sizes), cut(self.factors(saved)[1], sizes)
        u = self.one.new_empty(sizes[0], width, dtype=self.narrow)
        r = self.scratch("factors", sizes[0], self.second.factors)
        return [u[:n] for n in sizes], [r[:n] for n in sizes]

    def widened(self, name: str, a: Tensor) -> Tensor:
        return a if a.dtype == self.wide else self.scratch(name, *a.shape).copy_(a)

    # Zoneout and dropout

    def held(self, masks: Masks, sizes: Sequence[int]) -> list[Sequence[Tensor] | None]:
        """Shares of h and c that zoneout keeps at each step, or None.

        Masks become zeros and ones; expected zoneout is a single number.
        """
        found: list[Sequence[Tensor] | None] = []
        pairs = zip((masks.zoneout_h, masks.zoneout_c), self.spec.zoneout, strict=True)
        for name, (mask, share) in zip("hc", pairs, strict=True):
            if mask is not None:
                found.append(cut(self.widened(f"zoneout {name}", mask), sizes))
            else:
                found.append([share * self.one] * len(sizes) if share else None)
        return found

    def begun(self, flags: Sequence[Tensor] | None, t: int, state: Tensor) -> Tensor:
        return state if flags is None else state.masked_fill(flags[t], 0)

    def passed(self, name: str, d: Tensor, held: Tensor) -> Tensor:
        """Split off the part of the gradient d (n, H) that bypasses a step by zoneout."""
        room = torch.mul(d, held, out=self.scratch(f"passed {name}", *d.shape))
        d.sub_(room)
        return room

    def dropped(self, h: Tensor, dropout: Tensor | None) -> Tensor:
        if dropout is None:
            return h
        room = self.scratch("dropped", *h.shape, dtype=self.narrow)
        return torch.mul(h, dropout[: len(h)], out=room)

    # Forward

    def input_terms(
        self, v: Tensor, bias: Tensor, pieces: Sequence[EqualSteps], saved: Saved | None
    ) -> Tensor:
        """``gain * normalised v + bias``, bias (G,) or (steps, G); v becomes the saved tensor."""
        terms = v if self.exact and saved is None else self.scratch("terms", *v.shape)
        rows = v if self.exact else terms.copy_(v)
        if saved is None:
            r = self.scratch("factors", len(v), self.first.factors)
        else:
            r, _ = self.factors(saved)
        gain = self.first.normalize_all(rows, r)
        if self.first.factors and not self.exact:
            v.copy_(rows)
        bias = bias if self.first.offset is None else bias + self.first.offset
        return affine(rows, gain, bias, pieces, terms)

    def product(self, a: Tensor, out: Tensor) -> Tensor:
        if self.packed is None:
            return torch.mm(a, self.w_hh, out=out)
        return torch.ops.mkldnn._linear_pointwise(a, self.packed, None, "none", [], "")

    def summed(self, a: Tensor, terms: Tensor) -> Tensor:
        """Input terms of a step plus its product, in place; rounded once."""
        if self.packed is None:
            return terms.addmm_(a, self.w_hh)
        return terms.add_(self.product(a, terms))

    def recurrent_rows(
        self, t: int, product: Tensor, u: Tensor, r: Tensor, wide: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Normalised products (n, G) of step t, and the remaining factor.

        Writes the saved u (n, G) and reciprocal deviations r (n, groups); ``wide`` is scratch
        memory, (n, G), in the dtype of states.
        """
        if self.exact:
            return u, self.second.normalize(t, product, r, u)
        rows = wide.copy_(product)
        gain = self.second.normalize(t, rows, r, rows)
        if self.second.factors:
            u.copy_(rows)
        return rows, gain

    # Backward

    def backward(self, grads: ChunkGrads) -> None:
        count, width = grads.du.shape
        limit = PIECE // max(width, 1) if grads.du.device.type == "cpu" else count
        for span in reversed(time_chunks(grads.sizes, limit)):
            self.backward_part(grads.part(span))

    def backward_part(self, grads: ChunkGrads) -> None:
        raise NotImplementedError

    def states_gradient(self, d_u: Tensor, du: Tensor, dh: Tensor, dropout: Tensor | None) -> None:
        """Write to dh (n, H) the gradient of previous states, from d_u (n, G) of the products.

        ``du`` is the same memory, or another in the dtype of products.
        """
        product = self.product(d_u, dh) if self.exact else torch.mm(du.copy_(d_u), self.w_hh)
        if dropout is not None:
            torch.mul(product, dropout[: len(dh)], out=dh)
        elif product is not dh:
            dh.copy_(product)
        if self.second.batch:
            dh.sub_(dh.sum(0), alpha=1 / len(dh))

    def add_row_sums(
        self,
        d: Tensor,
        rows: Tensor,
        of_d: Tensor | None,
        of_products: Tensor | None,
        factor: Tensor,
    ) -> None:
        """Add row sums of d and of ``d * rows``, times a factor, to outputs that are not None."""
        if of_d is None and of_products is None:
            return
        # A single pass, as for shift and gain of a layer norm.
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
        """Backpropagate from pre-activations, d (rows, G), to bias, gain and inputs (dv).

        Overwrites d. ``rows`` are normalised products of the inputs, r reciprocal deviations.
        """
        self.add_row_sums(d, rows, sums.bias, sums.gain_input, self.slope)
        target = dv if self.exact else self.scratch("du", *d.shape)
        self.first.all_back(d, rows, r, target)
        if not self.exact:
            dv.copy_(target)


def _packs(w: Tensor) -> bool:
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
    """`torch.Tensor.split` without its overhead in Python."""
    return a.split_with_sizes(sizes)


def flags_of(masks: Masks, sizes: Sequence[int]) -> Sequence[Tensor] | None:
    """Reset flags of each step, (n, 1)."""
    return None if masks.reset is None else cut(masks.reset.unsqueeze(1), sizes)


def by_step(vector: Tensor, offset: Tensor | None, steps: int) -> Sequence[Tensor]:
    """The vector of each step, plus an offset (steps, F) if given."""
    return [vector] * steps if offset is None else (vector + offset).unbind(0)


def finish(state: Tensor, after: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Write the state of each example after its last step to the state (N, H)."""
    for t, (size, following) in enumerate(zip(sizes, (*sizes[1:], 0), strict=True)):
        if following < size:
            state[following:size].copy_(after[t][following:])


class LSTMSteps(AtenSteps):
    """Gates i, f, g, o."""

    signs = (1.0, 1.0, -2.0, 1.0)
    slopes = (1.0, 1.0, 4.0, 1.0)

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        super().__init__(spec, operands, backward)
        self.four = 4 * self.one
        gain, shift = operands.gain_out, operands.shift_out
        gain = operands.h0.new_ones(self.hidden) if gain is None else gain
        self.cell = CellPlace(spec.out, -2 * gain, 4 * gain, None if shift is None else -2 * shift)

    def forward(self, chunk: Chunk) -> None:
        sizes, v, h, c, out, saved, places, masks = chunk
        assert c is not None
        cell, second, one, pieces = self.cell, self.second, self.one, equal_steps(sizes)
        self.first.begin(places.input, pieces, forward=True)
        second.begin(places.recurrent, pieces, forward=True)
        cell.begin(places.out, pieces, forward=True)
        held_h, held_c = self.held(masks, sizes)
        flags = flags_of(masks, sizes)
        bias = self.bias if second.offset is None else self.bias + second.offset
        us, factors = self.kept(sizes, v.shape[1], saved)
        joint, carried = self.spec.joint, self.spec.carried
        terms: Sequence[Tensor]
        if joint:
            terms, us = [bias] * len(sizes), cut(v, sizes)
        else:
            terms = cut(self.input_terms(v, bias, pieces, saved), sizes)
        outs = cut(out, sizes)
        cells = None if saved is None or saved.c is None else cut(saved.c, sizes)
        buffer = self.scratch("sums", sizes[0], v.shape[1])
        # Operand of products and state: the same memory if dtypes agree.
        before, state, c_before = h.to(self.narrow), h, c
        active = -1
        for t, n in enumerate(sizes):
            if n != active:
                active, sums = n, buffer[:n]
                i, f, g, o = sums.chunk(4, 1)
                before, c_before, h_now, c_now = before[:n], c_before[:n], h[:n], c[:n]
                state = state[:n]
            if cells is not None:
                c_now = cells[t]
            before, state, c_before = (self.begun(flags, t, a) for a in (before, state, c_before))
            operand = second.operand(t, state, self.dropped(before, masks.dropout))
            product = (self.summed if joint else self.product)(operand, us[t])
            rows, gain = self.recurrent_rows(t, product, us[t], factors[t], sums)
            torch.addcmul(terms[t], rows, gain, out=sums).sigmoid_()
            torch.sub(one, g, alpha=2, out=g)
            c_new = f if carried or held_c is not None else c_now
            torch.mul(c_before, f, out=c_new).addcmul_(i, g)
            shown = cell.sums(t, c_new)
            if carried:
                c_new = torch.mul(shown, -0.5, out=c_now if held_c is None else f)
            torch.sub(one, shown.sigmoid_(), alpha=2, out=shown)
            if held_c is not None:
                torch.lerp(c_new, c_before, held_c[t], out=c_now)
            old, state = state, outs[t] if self.exact else h_now
            if held_h is None:
                torch.mul(o, shown, out=state)
            else:
                torch.lerp(torch.mul(o, shown, out=shown), old, held_h[t], out=state)
            before, c_before = outs[t], c_now
            if not self.exact:
                before.copy_(state)
        if self.exact:
            finish(h, outs, sizes)
        if cells is not None:
            finish(c, cells, sizes)
        second.finish(self.w_hh)
        cell.finish()

    def backward_part(self, grads: ChunkGrads) -> None:
        sizes, saved, c_prev, sums = grads.sizes, grads.saved, grads.c_prev, grads.sums
        assert saved.c is not None
        assert c_prev is not None
        pieces, cell, scratch = equal_steps(sizes), self.cell, self.scratch
        self.first.begin(grads.places.input, pieces, forward=False)
        self.second.begin(grads.places.recurrent, pieces, forward=False)
        cell.begin(grads.places.out, pieces, forward=False)
        rows = self.second.restored(saved.u, "rows", scratch)
        gates = scratch("gates", *grads.du.shape)
        torch.addcmul(self.bias, rows, self.second.gain, out=gates)
        terms = None
        if saved.v is not None:
            terms = self.first.restored(saved.v, "terms", scratch)
            gates.addcmul_(terms, self.first.gain)
        i, f, g, _ = gates.sigmoid_().chunk(4, 1)
        cells = saved.c
        if self.spec.carried or self.spec.zoneout[1] or grads.masks.zoneout_c is not None:
            # Cell states before norm and zoneout, from which h was computed.
            cells = torch.mul(c_prev, f, out=scratch("new cells", *f.shape))
            cells.add_(i).addcmul_(i, g, value=-2)
        c_rows = cell.normalize_all(cells, scratch)
        shown = cell.shown(c_rows, scratch("shown", *f.shape)).sigmoid_()
        slopes, show = self._slopes(gates, shown, c_prev)
        through = _ThroughCell(self, show, c_rows, sizes)
        states = self._backward_loop(grads, slopes, rows, cut(f, sizes), through)

        if cell.scale:
            show.mul_(states)
            if through.carries is not None:
                show.add_(through.carries, alpha=0.25)
            self.add_row_sums(show, c_rows, sums.shift_out, sums.gain_out, self.four)
        bias = sums.bias if terms is None else None
        self.add_row_sums(slopes, rows, bias, sums.gain_recurrent, self.slope)
        if terms is not None:
            self.input_gradients(slopes, terms, self.factors(saved)[0], grads.dv, sums)

    def _slopes(self, gates: Tensor, shown: Tensor, c_prev: Tensor) -> tuple[Tensor, Tensor]:
        """K of all gates, (rows, G), and of the normalised cell state; overwrites g and ``shown``.

        The gradient of the normalised cell state, with gain and shift, is D times 4 of the second
        result, (rows, H).
        """
        i, f, g, o = gates.chunk(4, 1)
        slopes = self.scratch("slopes", *gates.shape)
        slope_i, slope_f, slope_g, slope_o = slopes.chunk(4, 1)
        show = _sigmoid_backward(o, shown, grad_input=self.scratch("show", *shown.shape))
        torch.sub(self.one, shown, alpha=2, out=shown)
        _sigmoid_backward(shown, o, grad_input=slope_o)
        _sigmoid_backward(c_prev, f, grad_input=slope_f)
        _sigmoid_backward(i, g, grad_input=slope_g)
        torch.sub(self.one, g, alpha=2, out=g)
        _sigmoid_backward(g, i, grad_input=slope_i)
        return slopes, show

    def _backward_loop(
        self,
        grads: ChunkGrads,
        slopes: Tensor,
        rows: Tensor,
        keep: Sequence[Tensor],
        through: _ThroughCell,
    ) -> Tensor:
        """The sequential part of the backward pass; returns D, (rows, H), without zoneout's bypass.

        ``slopes`` is K, (rows, G), replaced by the gradients of pre-activations; ``rows`` are
        normalised products R h'; ``keep`` are the forget gates of each step.
        """
        sizes, dh, dc, du, masks = grads.sizes, grads.dh, grads.dc, grads.du, grads.masks
        assert dc is not None
        hidden, second, scratch, (count, width) = self.hidden, self.second, self.scratch, du.shape
        _, factors = self.factors(grads.saved)
        of_gates = slopes.view(count, 4, hidden)
        inner, outer = cut(of_gates[:, :3], sizes), cut(of_gates[:, 3], sizes)
        slopes_at, rows_at, factors_at = cut(slopes, sizes), cut(rows, sizes), cut(factors, sizes)
        backs, products = second.backs(len(sizes)), scratch("products", sizes[0], width)
        states = scratch("states", count, hidden)
        d_hs, dus = cut(states, sizes), cut(du, sizes)
        douts = None if grads.dout is None else cut(grads.dout, sizes)
        d_sums = dus if self.exact else cut(scratch("du", count, width), sizes)
        held_h, held_c = self.held(masks, sizes)
        flags = flags_of(masks, sizes)
        active = -1
        for t in range(len(sizes) - 1, -1, -1):
            n = sizes[t]
            if n != active:
                active, dh_now, d_c, products_now = n, dh[:n], dc[:n], products[:n]
                d_c_3 = d_c.unsqueeze(1)
            d_h = d_hs[t]
            if douts is None:
                d_h.copy_(dh_now)
            else:
                torch.add(dh_now, douts[t], out=d_h)
            by_h = None if held_h is None else self.passed("h", d_h, held_h[t])
            by_c = None if held_c is None else self.passed("c", d_c, held_c[t])
            through.add(t, d_h, d_c)
            inner[t].mul_(d_c_3)
            outer[t].mul_(d_h)
            d_u = torch.mul(slopes_at[t], backs[t], out=d_sums[t])
            second.adjoint(d_u, rows_at[t], factors_at[t], products_now)
            d_c.mul_(keep[t])
            self.states_gradient(d_u, dus[t], dh_now, masks.dropout)
            if by_h is not None:
                dh_now.add_(by_h)
            if by_c is not None:
                d_c.add_(by_c)
            if flags is not None:
                dh_now.masked_fill_(flags[t], 0)
                d_c.masked_fill_(flags[t], 0)
        return states


class _ThroughCell:
    """Effect of D on the gradient of c: directly, and through the normalisation of c.

    ``show`` is from `LSTMSteps._slopes`; ``c_rows`` are the normalised cell states, (rows, H).
    """

    def __init__(
        self, steps: LSTMSteps, show: Tensor, c_rows: Tensor, sizes: Sequence[int]
    ) -> None:
        count, hidden = c_rows.shape
        cell, scratch = steps.cell, steps.scratch
        ways = scratch("ways", count, 1 + cell.own, hidden)
        cell.through(show, ways[:, 0])
        #: Gradients of the carried cell states, if they are normalised.
        self.carries: Tensor | None = None
        if steps.spec.carried:
            self.carries, through_carry = (scratch(f"carry {i}", count, hidden) for i in range(2))
            cell.through(self.carries.fill_(0.25), through_carry)
            self._carries, self._carry = cut(self.carries, sizes), cut(through_carry, sizes)
        if cell.own:
            torch.mul(ways[:, 0], c_rows, out=ways[:, 1])
        self._cell, self._ways, self._first = cell, cut(ways, sizes), cut(ways[:, 0], sizes)
        self._c_rows = cut(c_rows, sizes)
        self._passed = scratch("passed", sizes[0], 2, hidden)

    def add(self, t: int, d_h: Tensor, d_c: Tensor) -> None:
        """Add the effect of D (n, H) at step t to the gradient of c."""
        cell, c_rows = self._cell, self._c_rows[t]
        if self.carries is not None:
            passed = self._passed[: len(d_h)]
            first = passed[:, 0]
            self._carries[t].copy_(d_c)
            torch.mul(d_h, self._first[t], out=first)
            first.addcmul_(d_c, self._carry[t])
            torch.mul(first, c_rows, out=passed[:, 1])
            cell.add_back(d_c.zero_(), passed, c_rows)
        elif cell.own:
            passed = torch.mul(d_h.unsqueeze(1), self._ways[t], out=self._passed[: len(d_h)])
            cell.add_back(d_c, passed, c_rows)
        else:
            d_c.addcmul_(d_h, self._first[t])


class _OneState(AtenSteps):
    """Cells without a cell state: with D the gradient of h, that of a pre-activation is ``D K``."""

    def backward_loop(
        self,
        grads: ChunkGrads,
        slopes: Tensor,
        rows: Tensor,
        carry: Tensor | None,
    ) -> Tensor:
        """The sequential part of the backward pass; returns D, (rows, H), without zoneout's bypass.

        ``slopes`` is K, (rows, G), replaced by the gradients of pre-activations; ``rows`` are
        normalised products R h'; ``carry``, (rows, H) or None for 0, is the factor of D that
        bypasses the products.
        """
        sizes, dh, du, dropout = grads.sizes, grads.dh, grads.du, grads.masks.dropout
        hidden, second, count, scratch = self.hidden, self.second, len(rows), self.scratch
        gates = cut(slopes.view(count, self.spec.gates, hidden), sizes)
        _, r = self.factors(grads.saved)
        slopes_at, rows_at, r_at = cut(slopes, sizes), cut(rows, sizes), cut(r, sizes)
        carried = None if carry is None else cut(carry, sizes)
        backs, products = second.backs(len(sizes)), scratch("products", sizes[0], du.shape[1])
        states = scratch("states", count, hidden)
        # With an axis for the gates that it affects
        d_hs, d_hs_n = cut(states, sizes), cut(states.unsqueeze(1), sizes)
        douts = None if grads.dout is None else cut(grads.dout, sizes)
        dus = cut(du, sizes)
        d_sums = dus if self.exact else cut(scratch("du", *du.shape), sizes)
        held, _ = self.held(grads.masks, sizes)
        flags = flags_of(grads.masks, sizes)
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
            d_u = torch.mul(slopes_at[t], backs[t], out=d_sums[t])
            second.adjoint(d_u, rows_at[t], r_at[t], products_now)
            self.states_gradient(d_u, dus[t], dh_now, dropout)
            if carried is not None:
                dh_now.addcmul_(d_h, carried[t])
            if by_h is not None:
                dh_now.add_(by_h)
            if flags is not None:
                dh_now.masked_fill_(flags[t], 0)
        return states


class GRUSteps(_OneState):
    """Gates r, z, n; n = tanh(y + r w) with input term y and recurrent term w."""

    signs = (1.0, 1.0, -2.0)
    slopes = (1.0, 1.0, 4.0)

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        super().__init__(spec, operands, backward)
        self.four = 4 * self.one
        bias = operands.bias_hn
        self.bias_hn = -2 * (operands.h0.new_zeros(self.hidden) if bias is None else bias)

    def forward(self, chunk: Chunk) -> None:
        sizes, v, h, _c, out, saved, places, masks = chunk
        second, one, split, pieces = self.second, self.one, 2 * self.hidden, equal_steps(sizes)
        self.first.begin(places.input, pieces, forward=True)
        second.begin(places.recurrent, pieces, forward=True)
        held, _ = self.held(masks, sizes)
        flags = flags_of(masks, sizes)
        bias, offset = self.bias, second.offset
        if offset is not None:  # the candidate's part is multiplied by r
            both, offset = offset.split((split, self.hidden), 1)
            bias = bias + torch.cat([both, torch.zeros_like(offset)], 1)
        biases_hn = by_step(self.bias_hn, offset, len(sizes))
        us, factors = self.kept(sizes, v.shape[1], saved)
        joint = self.spec.joint
        terms_rz: Sequence[Tensor]
        terms_n: Sequence[Tensor]
        if joint:
            us = cut(v, sizes)
            terms_rz, terms_n = ([part] * len(sizes) for part in (bias[:split], bias[split:]))
        else:
            terms = self.input_terms(v, bias, pieces, saved)
            terms_rz, terms_n = cut(terms[:, :split], sizes), cut(terms[:, split:], sizes)
        outs = cut(out, sizes)
        buffer = self.scratch("sums", sizes[0], v.shape[1])
        # Operand of products and state: the same memory if dtypes agree.
        before, state = h.to(self.narrow), h
        active = -1
        for t, n in enumerate(sizes):
            if n != active:
                active, sums = n, buffer[:n]
                rz, new = sums[:, :split], sums[:, split:]
                r, z = rz.chunk(2, 1)
                before, state, h_now = before[:n], state[:n], h[:n]
            before, state = (self.begun(flags, t, a) for a in (before, state))
            operand = second.operand(t, state, self.dropped(before, masks.dropout))
            product = (self.summed if joint else self.product)(operand, us[t])
            rows, gain = self.recurrent_rows(t, product, us[t], factors[t], sums)
            torch.addcmul(terms_rz[t], rows[:, :split], gain[:split], out=rz).sigmoid_()
            torch.addcmul(biases_hn[t], rows[:, split:], gain[split:], out=new)
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
        second.finish(self.w_hh)

    def backward_part(self, grads: ChunkGrads) -> None:
        sizes, _, _, _, saved, h_prev, _, du, dv, sums, places, _ = grads
        hidden, scratch, one, second = self.hidden, self.scratch, self.one, self.second
        pieces, (count, width) = equal_steps(sizes), du.shape
        self.first.begin(places.input, pieces, forward=False)
        second.begin(places.recurrent, pieces, forward=False)
        split, gain = 2 * hidden, second.gain
        rows = second.restored(saved.u, "rows", scratch)
        gates = scratch("gates", count, width)
        terms = None
        if saved.v is None:
            gates.copy_(self.bias.expand_as(gates))
        else:
            terms = self.first.restored(saved.v, "terms", scratch)
            torch.addcmul(self.bias, terms, self.first.gain, out=gates)
        gates[:, :split].addcmul_(rows[:, :split], gain[:split]).sigmoid_()
        r, z, new = gates.chunk(3, 1)
        w = scratch("w", count, hidden)
        torch.addcmul(self.bias_hn, rows[:, split:], gain[split:], out=w)
        new.addcmul_(r, w).sigmoid_()

        # K of r, z, w and y; of w and y without a factor of 4.
        slopes = scratch("slopes", count, width)
        slope_r, slope_z, slope_w = slopes.chunk(3, 1)
        slope_y = scratch("slope y", count, hidden)
        torch.sub(one, z, out=slope_w)
        _sigmoid_backward(slope_w, new, grad_input=slope_y)
        torch.sub(one, new, alpha=2, out=new)
        torch.sub(h_prev, new, out=new)
        _sigmoid_backward(new, z, grad_input=slope_z)
        torch.mul(slope_y, r, out=slope_w)
        # w is scaled by -2.
        _sigmoid_backward(w.mul_(-2).mul_(slope_y), r, grad_input=slope_r)

        states = self.backward_loop(grads, slopes, rows, z)
        if sums.bias_hn is not None:
            sums.bias_hn.addcmul_(slope_w.sum(0), self.four)
        bias = sums.bias if terms is None else None
        self.add_row_sums(slopes, rows, bias, sums.gain_recurrent, self.slope)
        if terms is not None:
            torch.mul(slope_y, states, out=slope_w)
            self.input_gradients(slopes, terms, self.factors(saved)[0], dv, sums)


class LightGRUSteps(_OneState):
    """Gates a, z with candidate relu(a); normalises rows only."""

    signs = slopes = (1.0, 1.0)

    def forward(self, chunk: Chunk) -> None:
        sizes, v, h, _c, out, saved, _places, masks = chunk
        held, _ = self.held(masks, sizes)
        flags = flags_of(masks, sizes)
        us, factors = self.kept(sizes, v.shape[1], saved)
        terms = cut(self.input_terms(v, self.bias, equal_steps(sizes), saved), sizes)
        outs = cut(out, sizes)
        buffer = self.scratch("sums", sizes[0], v.shape[1])
        # Operand of products and state: the same memory if dtypes agree.
        before, state = h.to(self.narrow), h
        active = -1
        for t, n in enumerate(sizes):
            if n != active:
                active, sums = n, buffer[:n]
                new, z = sums.chunk(2, 1)
                before, state, h_now = before[:n], state[:n], h[:n]
            before, state = (self.begun(flags, t, a) for a in (before, state))
            product = self.product(self.dropped(before, masks.dropout), us[t])
            rows, gain = self.recurrent_rows(t, product, us[t], factors[t], sums)
            torch.addcmul(terms[t], rows, gain, out=sums)
            new.clamp_min_(0), z.sigmoid_()
            if held is not None:
                torch.lerp(z, self.one, held[t], out=z)
            before = outs[t]
            state = torch.lerp(new, state, z, out=before if self.exact else h_now)
            if not self.exact:
                before.copy_(state)
        if self.exact:
            finish(h, outs, sizes)

    def backward_part(self, grads: ChunkGrads) -> None:
        saved, sums, second, scratch = grads.saved, grads.sums, self.second, self.scratch
        assert saved.v is not None
        rows = second.restored(saved.u, "rows", scratch)
        terms = self.first.restored(saved.v, "terms", scratch)
        gates = torch.addcmul(
            self.bias, terms, self.first.gain, out=scratch("gates", *grads.du.shape)
        )
        a, z = gates.addcmul_(rows, second.gain).chunk(2, 1)
        z.sigmoid_()
        slopes = scratch("slopes", *grads.du.shape)
        slope_a, slope_z = slopes.chunk(2, 1)
        torch.sub(self.one, z, out=slope_a).mul_(a > 0)
        torch.sub(grads.h_prev, a.clamp_min_(0), out=a)
        _sigmoid_backward(a, z, grad_input=slope_z)
        self.backward_loop(grads, slopes, rows, z)
        self.add_row_sums(slopes, rows, None, sums.gain_recurrent, self.slope)
        self.input_gradients(slopes, terms, self.factors(saved)[0], grads.dv, sums)


class RNNSteps(_OneState):
    """One pre-activation, the sum of both terms, and tanh or ReLU."""

    def __init__(self, spec: Spec, operands: Operands, backward: bool) -> None:
        self.relu = spec.arithmetic.relu
        self.signs, self.slopes = ((1.0,), (1.0,)) if self.relu else ((-2.0,), (4.0,))
        super().__init__(spec, operands, backward)

    def forward(self, chunk: Chunk) -> None:
        sizes, v, h, _c, out, saved, places, masks = chunk
        second = self.second
        second.begin(places.out, equal_steps(sizes), forward=True)
        biases = by_step(self.bias, second.offset, len(sizes))
        held, _ = self.held(masks, sizes)
        flags = flags_of(masks, sizes)
        us, outs = cut(v, sizes), cut(out, sizes)
        _, factors = self.kept(sizes, v.shape[1], saved)
        buffer = self.scratch("sums", sizes[0], v.shape[1])
        # Operand of products and state: the same memory if dtypes agree.
        before, state = h.to(self.narrow), h
        active = -1
        for t, n in enumerate(sizes):
            if n != active:
                active, sums = n, buffer[:n]
                before, state, h_now = before[:n], state[:n], h[:n]
            before, state = (self.begun(flags, t, a) for a in (before, state))
            operand = second.operand(t, state, self.dropped(before, masks.dropout))
            product = self.summed(operand, us[t])
            rows, gain = self.recurrent_rows(t, product, product, factors[t], sums)
            torch.addcmul(biases[t], rows, gain, out=sums)
            old, before = state, outs[t]
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
        second.finish(self.w_hh)

    def backward_part(self, grads: ChunkGrads) -> None:
        second, sums = self.second, grads.sums
        second.begin(grads.places.out, equal_steps(grads.sizes), forward=False)
        rows = second.restored(grads.saved.u, "rows", self.scratch)
        slopes = self.scratch("slopes", *grads.du.shape)
        torch.addcmul(self.bias, rows, second.gain, out=slopes)
        if self.relu:
            slopes.gt_(0)
        else:
            slopes.sigmoid_()
            _sigmoid_backward(self.one.expand(slopes.shape), slopes, grad_input=slopes)
        self.backward_loop(grads, slopes, rows, None)
        self.add_row_sums(slopes, rows, sums.bias, sums.gain_out, self.slope)
