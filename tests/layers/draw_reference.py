"""DRAW written once more from the equations, one image, one filter and one pixel at a time.

Nothing here comes from the package under test but the parameters. Everything counts from 1, as in
the source (Gregor et al. 2015); what is given back as places counts from 0. Gradients flow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from reference import Direction, Rule, Statistics, effective, normalize, sigmoid, tanh
from torch import Tensor

F64 = torch.float64


def zero() -> Tensor:
    return torch.zeros((), dtype=F64)


def window(
    said: Tensor, N: int, B: int, A: int, eps: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """F_Y (N, B), F_X (N, A) and (x, y, stride, sigma, gamma) of what a linear map said, (5,).

    ``eps`` is what is added to each filter's sum.
    """
    g_x, g_y = (A + 1) / 2 * (said[0] + 1), (B + 1) / 2 * (said[1] + 1)
    variance, gamma = said[2].exp(), said[4].exp()
    delta = (max(A, B) - 1) / (N - 1) * said[3].exp() if N > 1 else zero()

    def bank(g: Tensor, pixels: int) -> Tensor:
        rows = []
        for i in range(1, N + 1):
            mu = g + (i - N / 2 - 0.5) * delta
            row = [torch.exp(-((a - mu) ** 2) / (2 * variance)) for a in range(1, pixels + 1)]
            total = sum(row, zero() if eps is None else zero() + eps)
            rows.append(torch.stack([value / total for value in row]))
        return torch.stack(rows)

    places = torch.stack([g_x - 1, g_y - 1, delta, variance.sqrt(), gamma])
    return bank(g_y, B), bank(g_x, A), places


def product(left: Tensor, middle: Tensor, right: Tensor) -> Tensor:
    """left middle right, sum by sum."""
    rows = []
    for i in range(left.shape[0]):
        sums = [
            sum(left[i, k] * middle[k, m] for k in range(middle.shape[0]))
            for m in range(middle.shape[1])
        ]
        rows.append(
            torch.stack(
                [
                    sum((s * right[m, j] for m, s in enumerate(sums)), zero())
                    for j in range(right.shape[1])
                ]
            )
        )
    return torch.stack(rows)


def direction(cell: Any, rule: Rule) -> Direction:
    """The parameters of an `LSTMCell`."""
    tensors = dict(cell.named_parameters()) | dict(cell.named_buffers())
    rule.training = cell.training

    def of(kind: str) -> dict[str, Tensor]:
        roles = ("input", "recurrent", "cell")
        names = {role: f"sites.{role}.{kind}" for role in roles}
        return {role: tensors[name] for role, name in names.items() if name in tensors}

    gains, scales = of("gain"), of("scale")
    return Direction(
        "LSTM",
        rule,
        tensors["weight_ih"],
        tensors["weight_hh"],
        tensors["bias_ih"],
        tensors["bias_hh"],
        gain=gains,
        shift=of("shift"),
        scale=scales,
        statistics={
            role: Statistics(
                mean.clone(),
                of("running_var")[role].clone(),
                of("num_batches_tracked")[role].tolist(),
            )
            for role, mean in of("running_mean").items()
        },
        places=(*gains, *scales),
    )


def lstm(
    d: Direction, to_gates: Tensor | None, xs: Any, hs: Any, cs: Any, t: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Paper, eq. 29-31; peepholes as Graves (2013), eq. 7-10."""
    size = d.w_hh.shape[1]
    w, u = effective(d, "input", d.w_ih), effective(d, "recurrent", d.w_hh)
    wx = normalize(d, "input", [w @ x for x in xs], [4 * size], t)
    uh = normalize(d, "recurrent", [u @ h for h in hs], [4 * size], t)
    new, opens = [], []
    assert d.b_ih is not None
    assert d.b_hh is not None
    for a, b, c in zip(wx, uh, cs, strict=True):
        i, f, g, o = (a + b + d.b_ih + d.b_hh).split(size)
        if to_gates is not None:
            i, f = i + to_gates[0] * c, f + to_gates[1] * c
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        opens.append(o if to_gates is None else o + to_gates[2] * c)
        new.append(c)
    shown = normalize(d, "cell", new, [size], t)
    return [sigmoid(o) * tanh(c) for o, c in zip(opens, shown, strict=True)], new


@dataclass
class Drawn:
    """What the equations say; ``canvases`` has the first one, (T + 1, N, B, A)."""

    canvases: Tensor
    means: Tensor | None
    log_stds: Tensor | None
    read: Tensor | None
    write: Tensor | None


def draw(
    network: Any,
    rules: tuple[Direction, Direction],
    images: Tensor | None,
    noise: Tensor,
    eps: float | None = None,
) -> Drawn:
    """Section 3 of the source; without images, section 2.3."""
    p = dict(network.named_parameters())
    (T, N, Z), B, A = noise.shape, network.height, network.width
    H = network.hidden_size

    def linear(name: str) -> Callable[[Tensor], Tensor]:
        return lambda h: p[f"{name}.weight"] @ h + p[f"{name}.bias"]

    def start(name: str, *shape: int) -> list[Tensor]:
        return [p.get(f"initial.{name}", torch.zeros(shape, dtype=F64))] * N

    h_enc, c_enc = start("encoder_h", H), start("encoder_c", H)
    h_dec, c_dec = start("decoder_h", H), start("decoder_c", H)
    canvas = start("canvas", B, A)
    canvases, means, log_stds, reads, writes = [torch.stack(canvas)], [], [], [], []
    for t in range(T):
        z = list(noise[t])
        if images is not None:
            seen, where = [], []
            for x, c, h in zip(images, canvas, h_dec, strict=True):
                error = x - sigmoid(c)
                if network.read is None:
                    r = torch.cat([x.flatten(), error.flatten()])
                else:
                    f_y, f_x, place = window(linear("read")(h), network.read_size, B, A, eps)
                    patches = [product(f_y, image, f_x.T).flatten() for image in (x, error)]
                    r = place[4] * torch.cat(patches)
                    where.append(place)
                seen.append(torch.cat([r, h]))
            to_gates = p.get("encoder.weight_peephole")
            h_enc, c_enc = lstm(rules[0], to_gates, seen, h_enc, c_enc, t)
            posteriors = [linear("posterior")(h) for h in h_enc]
            mu, log_s = zip(*(a.split(Z) for a in posteriors), strict=True)
            z = [m + s.exp() * e for m, s, e in zip(mu, log_s, noise[t], strict=True)]
            means.append(torch.stack(mu))
            log_stds.append(torch.stack(log_s))
            if where:
                reads.append(torch.stack(where))
        h_dec, c_dec = lstm(rules[1], p.get("decoder.weight_peephole"), z, h_dec, c_dec, t)
        added, where = [], []
        for h in h_dec:
            w = linear("patch")(h)
            if network.write is None:
                added.append(w.view(B, A))
            else:
                W = network.write_size
                f_y, f_x, place = window(linear("write")(h), W, B, A, eps)
                added.append(product(f_y.T, w.view(W, W), f_x) / place[4])
                where.append(place)
        canvas = [c + w for c, w in zip(canvas, added, strict=True)]
        canvases.append(torch.stack(canvas))
        if where:
            writes.append(torch.stack(where))
    parts = (torch.stack(a) if a else None for a in (means, log_stds, reads, writes))
    return Drawn(torch.stack(canvases), *parts)
