"""What stands between the products of DRAW, by functions of torch (`ln_zoo.ops.loops.draw`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ln_zoo.ops.loops.draw import (
    DECODER,
    ENCODER,
    NUMBERS,
    Back,
    DrawOperands,
    DrawPlan,
    DrawSettings,
    DrawSteps,
    Kept,
    Made,
)


class _Axes:
    """What all filters of a call share; made once, since a GPU waits for numbers from the host."""

    def __init__(self, settings: DrawSettings, images: Tensor) -> None:
        self.height, self.width = images.shape[1:]
        sizes = images.new_tensor([self.width, self.height])
        self.half, self.last = (sizes + 1) / 2, (sizes - 1)[:, None, None]
        options: dict[str, Any] = {"dtype": images.dtype, "device": images.device}
        self.places = torch.arange(max(self.height, self.width), **options)
        self.offsets = {
            n: torch.arange(n, **options) - (n - 1) / 2 for n in {settings.read, settings.write}
        }


class _Bank:
    """Filters of both axes at once, as `ln_zoo.ops.loops.glimpse` has them, and their gradients.

    Distances u are taken from the pixel that is nearest to a filter's centre, m away: there, an
    exponent of 0 is the largest, and however far off the image a window is, nothing is lost to
    rounding. Tensors are (N, 2, K, S), X before Y, S the longer axis.
    """

    def __init__(self, settings: DrawSettings, axes: _Axes, numbers: Tensor, filters: int) -> None:
        longest, log_clamp = max(axes.height, axes.width), settings.log_clamp
        self.adds_eps = settings.filter_norm == "eps"
        self.half = axes.half
        self.numbers, self.log_clamp = numbers, log_clamp
        clamped = numbers[:, 2:4].clamp(-log_clamp, log_clamp)
        self.sharpness = torch.exp(-clamped[:, 0])[:, None, None, None] / 2
        self.stride = torch.exp(clamped[:, 1]) * ((longest - 1) / max(filters - 1, 1))
        self.offsets = axes.offsets[filters]
        centers = self.half * (numbers[:, :2] + 1) - 1
        means = (centers[:, :, None] + self.offsets * self.stride[:, None, None]).unsqueeze(3)
        nearest = torch.minimum(means.detach().round().clamp(min=0), axes.last)
        self.shift, self.distance = means - nearest, axes.places - nearest
        gap = self.distance - self.shift
        square = gap.square() if self.adds_eps else self.distance * (gap - self.shift)
        e = torch.exp(-self.sharpness * square)
        if axes.height != axes.width:
            e = torch.where(axes.places <= axes.last, e, 0.0)
        self.filters = e / (e.sum(3, keepdim=True) + (settings.filter_eps * self.adds_eps))

    def back(self, gradient: Tensor) -> Tensor:
        """Gradients of the first four numbers, (N, 4), from those of the filters."""
        e = gradient - (self.filters * gradient).sum(3, keepdim=True)
        e *= self.filters
        m, sharpness = self.shift.squeeze(3), self.sharpness.squeeze(3)
        e_u = e * self.distance
        first, second = e_u.sum(3), (e_u * self.distance).sum(3)
        dmeans, dvariance = first, second - 2 * m * first
        if self.adds_eps:  # otherwise a filter sums to 1, and the gradients of its terms to 0
            zeroth = e.sum(3)
            dmeans, dvariance = dmeans - m * zeroth, dvariance + m.square() * zeroth
        dmeans = dmeans * sharpness * 2
        found = torch.empty_like(self.numbers[:, :4])
        torch.mul(dmeans.sum(2), self.half, out=found[:, :2])
        found[:, 2] = (dvariance * sharpness).sum((1, 2))
        found[:, 3] = (dmeans * self.offsets).sum((1, 2)) * self.stride
        found[:, 2:] *= self.numbers[:, 2:4].abs() <= self.log_clamp
        return found


class AtenDraw(DrawSteps):
    """The steps of a glimpse by functions of torch, in place."""

    def __init__(
        self,
        plan: DrawPlan,
        operands: DrawOperands,
        weights: Sequence[Tensor],
        kept: Kept,
        made: Made,
        back: Back | None,
    ) -> None:
        self.settings, self.norms, self.operands = plan.settings, plan.norms, operands
        self.kept, self.made, self._back = kept, made, back
        self.weights = weights if back is not None else [w.t() for w in weights]
        self.slots, self.hidden = len(kept.cells[0]), len(operands.h_decoder)
        self.patches = 2 * plan.settings.read**2
        self.examples, self.height, self.width = operands.images.shape
        self.axes = _Axes(plan.settings, operands.images)
        self.bias = (operands.b_encoder, operands.b_decoder)
        self.gain = (operands.gain_encoder, operands.gain_decoder)
        self.shift = (operands.shift_encoder, operands.shift_decoder)
        # The image and its error, row by row side by side.
        self.pair = operands.images.new_empty(self.examples, self.height, 2, self.width)
        self.pair[:, :, 0] = operands.images
        self.hits = torch.zeros(3, dtype=torch.int64, device=operands.images.device)
        # Of encoder and decoder: gain and shift; bias.
        self.norm_totals = operands.h_decoder.new_zeros(2, 2, self.hidden)
        self.bias_totals = operands.h_decoder.new_zeros(2, 4 * self.hidden)
        self.posterior_total = torch.zeros_like(operands.b_posterior)

    @property
    def back(self) -> Back:
        """What is for the way back."""
        assert self._back is not None
        return self._back

    def _canvas(self, t: int) -> Tensor:
        last = t == len(self.operands.noise)
        return self.made.logits if last else self.kept.canvases[t % self.slots]

    def _bank(self, numbers: Tensor, filters: int) -> tuple[_Bank, Tensor, Tensor]:
        bank = _Bank(self.settings, self.axes, numbers, filters)
        return bank, bank.filters[:, 1, :, : self.height], bank.filters[:, 0, :, : self.width]

    def _count(self, numbers: Tensor) -> None:
        self.hits[1:] += (numbers[:, 2:4].abs() > self.settings.log_clamp).sum(0)

    def _look(self, t: int) -> Tensor:
        """Fills in the error; gives sigmoid of the canvas."""
        seen = torch.sigmoid(self._canvas(t))
        torch.sub(self.operands.images, seen, out=self.pair[:, :, 1])
        return seen

    def multiply(self, which: int, a: Tensor, out: Tensor) -> None:
        """A product with the weight, or its transpose on the way forward."""
        torch.mm(a, self.weights[which], out=out)

    def heads(self, states: Tensor, out: Tensor) -> None:
        """What all heads make of h_dec."""
        torch.addmm(self.operands.b_heads, states, self.operands.w_heads.t(), out=out)

    def heads_back(self, d: Tensor, out: Tensor) -> None:
        """Gradients of h_dec."""
        torch.mm(d, self.operands.w_heads, out=out)

    def read(self, t: int) -> None:
        """Fills in r."""
        side, n = self.settings.read, self.examples
        numbers = self.kept.heads[t % self.slots][:, :NUMBERS]
        self._count(numbers)
        _, f_y, f_x = self._bank(numbers, side)
        self._look(t)
        down = torch.bmm(f_y, self.pair.view(n, self.height, 2 * self.width))
        both = torch.bmm(down.view(n, 2 * side, self.width), f_x.mT)
        both *= torch.exp(numbers[:, 4])[:, None, None]
        r = both.view(n, side, 2, side).transpose(1, 2).reshape(n, self.patches)
        self.kept.inputs[ENCODER][t % self.slots][:, : self.patches] = r

    def lstm(self, which: int, t: int) -> None:
        """From the sums of the gates to h."""
        kept, hidden, before, after = self.kept, self.hidden, t % self.slots, (t + 1) % self.slots
        gates = kept.gates[which][before]
        sums = gates if self.made.sums is None else self.made.sums
        torch.add(sums, self.bias[which], out=gates)
        gates[:, : 2 * hidden].sigmoid_()
        gates[:, 2 * hidden : 3 * hidden].tanh_()
        gates[:, 3 * hidden :].sigmoid_()
        i, f, g, o = gates.chunk(4, 1)
        c = kept.cells[which][after]
        torch.mul(f, kept.cells[which][before], out=c)
        c.addcmul_(i, g)
        a = c
        rows, stats = self.norms[which], kept.stats[which][before]
        if rows.scale:
            mean, factor = stats[:, :1], stats[:, 1:]
            if rows.center:
                torch.mean(c, 1, keepdim=True, out=mean)
            else:
                mean.zero_()
            a = c - mean
            factor.copy_(a.square().mean(1, keepdim=True).add_(rows.eps).rsqrt_())
            a *= factor
        h = o * self._scaled(which, a).tanh_()
        if which == ENCODER:
            kept.inputs[ENCODER][after][:, -hidden:] = h
            return
        kept.inputs[ENCODER][after][:, -2 * hidden : -hidden] = h
        kept.inputs[DECODER][after][:, -hidden:] = h
        if self.made.sums is not None:
            kept.states[after] = h

    def _scaled(self, which: int, a: Tensor) -> Tensor:
        """Normalised cell states with gain and shift; new memory."""
        gain, shift = self.gain[which], self.shift[which]
        scaled = a.clone() if gain is None else a * gain
        return scaled if shift is None else scaled.add_(shift)

    def latent(self, t: int) -> None:
        """From the products of h_enc to z."""
        assert self.made.posterior is not None
        p = self.made.posterior + self.operands.b_posterior
        mean, spread = p.chunk(2, 1)
        log_clamp = self.settings.log_clamp
        self.hits[0] += (spread.abs() > log_clamp).sum()
        self.made.means[t] = mean
        torch.clamp(spread, -log_clamp, log_clamp, out=self.made.log_stds[t])
        z = torch.addcmul(mean, torch.exp(self.made.log_stds[t]), self.operands.noise[t])
        self.kept.inputs[DECODER][t % self.slots][:, : -self.hidden] = z

    def write(self, t: int) -> None:
        """Fills in the next canvas."""
        side = self.settings.write
        heads = self.kept.heads[(t + 1) % self.slots]
        numbers = heads[:, NUMBERS : 2 * NUMBERS]
        self._count(numbers)
        _, f_y, f_x = self._bank(numbers, side)
        wide = torch.bmm(self._patch(heads), f_x)
        torch.baddbmm(self._canvas(t), f_y.mT, wide, out=self._canvas(t + 1))

    def _patch(self, heads: Tensor) -> Tensor:
        """What is written, over gamma, (N, W, W)."""
        side = self.settings.write
        pixels = heads[:, 2 * NUMBERS :] * torch.exp(-heads[:, 2 * NUMBERS - 1 : 2 * NUMBERS])
        return pixels.view(-1, side, side)

    def write_back(self, t: int) -> None:
        """Fills in the write filters' and the patch's part of the gradients of heads."""
        heads = self.kept.heads[(t + 1) % self.slots]
        dheads = self.back.heads[t + 1]
        bank, f_y, f_x = self._bank(heads[:, NUMBERS : 2 * NUMBERS], self.settings.write)
        patch = self._patch(heads)
        canvas = self.back.canvas
        down = torch.bmm(f_y, canvas)
        dpatch = torch.bmm(down, f_x.mT)
        dfilters = torch.zeros_like(bank.filters)
        dfilters[:, 0, :, : self.width] = torch.bmm(patch.mT, down)
        dfilters[:, 1, :, : self.height] = torch.bmm(torch.bmm(patch, f_x), canvas.mT)
        dheads[:, NUMBERS : 2 * NUMBERS - 1] = bank.back(dfilters)
        dheads[:, 2 * NUMBERS - 1] = -(patch * dpatch).sum((1, 2))
        inverse = torch.exp(-heads[:, 2 * NUMBERS - 1 : 2 * NUMBERS])
        torch.mul(dpatch.flatten(1), inverse, out=dheads[:, 2 * NUMBERS :])

    def latent_back(self, t: int) -> None:
        """Fills in the gradients of means and log standard deviations."""
        back, log_stds = self.back, self.made.log_stds[t]
        d = back.inputs[DECODER][:, : -self.hidden].to(log_stds.dtype)
        row = back.posterior[t % len(back.posterior)]
        dmean, dspread = row.chunk(2, 1)
        spread = d * torch.exp(log_stds) * self.operands.noise[t]
        if back.log_stds is not None:
            spread += back.log_stds[t]
        spread *= log_stds.abs() < self.settings.log_clamp
        dspread.copy_(spread)
        dmean.copy_(d if back.means is None else d + back.means[t])
        self.posterior_total += row.sum(0, dtype=d.dtype)

    def lstm_back(self, which: int, t: int) -> None:
        """Fills in the gradients of the sums, and goes on with the cell state."""
        back, kept, hidden, before = self.back, self.kept, self.hidden, t % self.slots
        if which == ENCODER:
            dh = back.encoded.to(kept.stats[which].dtype) + back.inputs[ENCODER][:, -hidden:]
        else:
            dh = back.states + back.inputs[ENCODER][:, -2 * hidden : -hidden]
            dh += back.inputs[DECODER][:, -hidden:]
        i, f, g, o = kept.gates[which][before].chunk(4, 1)
        c, c_prev = kept.cells[which][(t + 1) % self.slots], kept.cells[which][before]
        dc, rows = back.cells[which], self.norms[which]
        a, factor = c, None
        if rows.scale:
            mean, factor = kept.stats[which][before].split(1, 1)
            a = (c - mean).mul_(factor)
        tau = self._scaled(which, a).tanh_()
        d_o = dh * tau * o * (1 - o)
        dm = (dh * o).mul_(1 - tau.square())
        if factor is None:
            dc += dm
        else:
            gain = self.gain[which]
            self.norm_totals[which, 0] += (dm * a).sum(0)
            self.norm_totals[which, 1] += dm.sum(0)
            e = dm if gain is None else dm * gain
            d = torch.addcmul(e, a, (e * a).mean(1, keepdim=True), value=-1)
            if rows.center:
                d -= e.mean(1, keepdim=True)
            dc.addcmul_(d, factor)
        row = t % len(back.posterior)
        to = back.gates[which][row].chunk(4, 1)
        to[0].copy_(dc * g * i * (1 - i))
        to[1].copy_(dc * c_prev * f * (1 - f))
        to[2].copy_(dc * i * (1 - g.square()))
        to[3].copy_(d_o)
        self.bias_totals[which] += back.gates[which][row].sum(0, dtype=dc.dtype)
        dc *= f

    def read_back(self, t: int) -> None:
        """Fills in the read filters' part of the gradients of heads, goes on with the canvas."""
        side, n, back = self.settings.read, self.examples, self.back
        numbers = self.kept.heads[t % self.slots][:, :NUMBERS]
        bank, f_y, f_x = self._bank(numbers, side)
        seen = self._look(t)
        pair = self.pair.view(n, self.height, 2 * self.width)
        down = torch.bmm(f_y, pair).view(n, 2 * side, self.width)
        dr = back.inputs[ENCODER][:, : self.patches].to(numbers.dtype)
        d = dr * torch.exp(numbers[:, 4:])
        d = d.view(n, 2, side, side).transpose(1, 2).reshape(n, 2 * side, side)
        across = torch.bmm(d, f_x)
        wide = across.view(n, side, 2 * self.width)
        dfilters = torch.zeros_like(bank.filters)
        dfilters[:, 0, :, : self.width] = torch.bmm(d.mT, down)
        dfilters[:, 1, :, : self.height] = torch.bmm(wide, pair.mT)
        dnumbers = back.heads[t][:, :NUMBERS]
        dnumbers[:, :4] = bank.back(dfilters)
        dnumbers[:, 4] = (across * down).sum((1, 2))
        derror = torch.bmm(f_y.mT, wide[:, :, self.width :])
        back.canvas.sub_(derror.mul_(seen).mul_(1 - seen))

    def clamped(self) -> Tensor:
        """How many numbers were clamped."""
        return self.hits

    def totals(self) -> Sequence[Tensor]:
        """Gradients of vectors."""
        (gain_e, shift_e), (gain_d, shift_d) = self.norm_totals
        encoder, decoder = self.bias_totals
        return encoder, gain_e, shift_e, decoder, gain_d, shift_d, self.posterior_total
