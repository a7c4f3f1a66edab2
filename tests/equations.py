"""The equations of recurrent layers for a batch, with noise and resets; no engine is involved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ln_zoo.ops.engines.base import NO_MASKS, Masks
from ln_zoo.ops.spec import Operands, Rows, Spec

#: What `masks_for` makes.
NOISE = ("zoneout", "expected zoneout", "recurrent dropout", "all")


def normalized(a: Tensor, rows: Rows, gain: Tensor | None, shift: Tensor | None = None) -> Tensor:
    if not rows.scale:
        return a
    hidden = a.shape[1] // sum(rows.groups)
    parts = []
    for part in a.split([n * hidden for n in rows.groups], 1):
        centre = part.mean(1, keepdim=True) if rows.center else 0
        square = ((part - centre) ** 2).mean(1, keepdim=True)
        parts.append((part - centre) / (square + rows.eps).sqrt())
    a = torch.cat(parts, 1) * gain
    return a if shift is None else a + shift


def equations(spec: Spec, o: Operands, masks: Masks = NO_MASKS) -> tuple[Tensor, ...]:
    """Equations 4, 20-22 and 26-28, and a light GRU's, for a batch: outputs (T, N, H), last states.

    A joint cell normalises the sum of both terms, and all of a joint GRU's candidate is multiplied
    by the reset gate. A carried LSTM carries on the normalised cell state.

    Recurrent dropout as Gal and Ghahramani (2016, section 4) have it, one mask for all steps, and
    zoneout as Krueger et al. (2017, section 3): ``d * before + (1 - d) * after``. Before a step
    that is reset, states are zeros.
    """
    h, c, outputs = o.h0, o.c0, []
    o = without_input_bias(spec, o)
    bias = torch.zeros(len(o.w_hh), dtype=h.dtype) if o.bias is None else o.bias
    one = h.new_ones(len(o.x), *h.shape)
    pairs = zip((masks.zoneout_h, masks.zoneout_c), spec.zoneout, strict=True)
    d_h, d_c = (q * one if mask is None else mask.to(h.dtype) for mask, q in pairs)
    dropout = 1 if masks.dropout is None else masks.dropout.to(h.dtype)
    for t, x in enumerate(o.x):
        if masks.reset is not None:
            on = ~masks.reset.view(o.x.shape[:2])[t].unsqueeze(1)
            h, c = h * on, c if c is None else c * on
        h_before, c_before = h, c
        v, u = x @ o.w_ih.T, (dropout * h) @ o.w_hh.T
        if o.bias_inner is not None:
            v = v + o.bias_inner
        if spec.joint:
            v, u = torch.zeros_like(v), v + u
        if spec.cell == "LSTM":
            p = normalized(v, spec.input, o.gain_input) + bias
            p = p + normalized(u, spec.recurrent, o.gain_recurrent)
            i, f, g, out = p.chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            z = normalized(c, spec.out, o.gain_out, o.shift_out)
            h = out.sigmoid() * z.tanh()
            c = z if spec.carried else c
        elif spec.cell == "GRU":
            xr, xz, xn = (normalized(v, spec.input, o.gain_input) + bias).chunk(3, 1)
            hr, hz, hn = normalized(u, spec.recurrent, o.gain_recurrent).chunk(3, 1)
            r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
            n = (xn + r * (hn if o.bias_hn is None else hn + o.bias_hn)).tanh()
            h = (1 - z) * n + z * h
        elif spec.cell == "light GRU":
            terms = normalized(v, spec.input, o.gain_input) + bias
            a, z = (terms + normalized(u, spec.recurrent, o.gain_recurrent)).chunk(2, 1)
            h = (1 - z.sigmoid()) * a.clamp(min=0) + z.sigmoid() * h
        else:
            a = normalized(v + u, spec.out, o.gain_out) + bias
            h = a.tanh() if spec.cell == "RNN_TANH" else a.clamp(min=0)
        h = d_h[t] * h_before + (1 - d_h[t]) * h
        c = c if c is None else d_c[t] * c_before + (1 - d_c[t]) * c
        outputs.append(h)
    return (torch.stack(outputs), h) if c is None else (torch.stack(outputs), h, c)


def without_input_bias(spec: Spec, o: Operands) -> Operands:
    """Without the bias of the input's part of a joint GRU's candidate, which has no such part."""
    if not spec.joint or spec.cell != "GRU" or o.bias is None:
        return o
    gates = 2 * o.h0.shape[1]
    return o._replace(bias=torch.cat([o.bias[:gates], torch.zeros_like(o.bias[gates:])]))


def masks_for(spec: Spec, noise: str, lead: tuple[int, ...], N: int, H: int) -> tuple[Spec, Masks]:
    """What is drawn, and the specification where nothing is; shares and factors are exact."""
    generator = torch.Generator().manual_seed(3)

    def mask(*size: int) -> Tensor:
        return torch.rand(size, generator=generator) < 0.25

    lstm = spec.cell == "LSTM"
    held = Masks(None, mask(*lead, H), mask(*lead, H) if lstm else None)
    dropout = mask(N, H).logical_not() * 2.0
    if noise == "expected zoneout":
        return replace(spec, zoneout=(0.25, 0.125 if lstm else 0.0)), NO_MASKS
    if noise == "all":  # of c alone in evaluation
        return replace(spec, zoneout=(0.0, 0.5 if lstm else 0.0)), Masks(dropout, held.zoneout_h)
    return spec, held if noise == "zoneout" else Masks(dropout)


def resets_for(T: int, N: int) -> Tensor:
    """A third of all rows, (T * N,), and two resets in turn of the first example."""
    reset = torch.rand(T, N, generator=torch.Generator().manual_seed(4)) < 0.3
    reset[1:3, 0] = True
    return reset.flatten()


def resetting(layer: Any, reset: Any) -> Any:
    """The layer, whose calls on input and states, and those of its copies, have these resets."""
    layer.register_forward_pre_hook(lambda _, arguments: (*arguments, reset))
    return layer
