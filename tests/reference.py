"""Recurrent layers written from the equations, for comparisons in float64.

Nothing is imported from the package. Summed inputs are rows (N, F) of N examples; gradients flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

# Norms


def layer_norm(a: Tensor, eps: float, groups: Sequence[int] = (1,), center: bool = True) -> Tensor:
    """Eq. 3 and 4 of the paper; RMS norm without ``center``.

    Statistics are those of consecutive parts of the features, whose sizes are as ``groups``.
    """
    unit = a.shape[-1] // sum(groups)
    parts = []
    for part in a.split([n * unit for n in groups], -1):
        part = part - part.mean(-1, keepdim=True) if center else part
        parts.append(part / (part.square().mean(-1, keepdim=True) + eps) ** 0.5)
    return torch.cat(parts, -1)


def batch_norm(a: Tensor, eps: float, mean: Tensor, var: Tensor) -> Tensor:
    return (a - mean) / (var + eps) ** 0.5


def weight_norm(w: Tensor, scale: Tensor) -> Tensor:
    """Each row w becomes g w / |w|."""
    return scale.unsqueeze(1) * w / w.square().sum(1, keepdim=True) ** 0.5


@dataclass
class Statistics:
    """Batch statistics of one site, and their running averages (rows, F) by time step."""

    mean: Tensor
    var: Tensor
    count: list[int]
    training: bool = True
    momentum: float = 0.1
    unbiased: bool = False

    def at(self, a: Tensor, t: int) -> tuple[Tensor, Tensor]:
        n = len(a)
        if n < 2 or not self.training:
            reached = max((k for k, count in enumerate(self.count) if count), default=0)
            k = min(t, reached)
            return self.mean[k].clone(), self.var[k].clone()
        mean, var = a.mean(0), a.var(0, correction=0)
        unbiased = var * n / (n - 1)
        k = min(t, len(self.count) - 1)
        self.count[k] += 1
        weight = max(1 / self.count[k], self.momentum)
        with torch.no_grad():
            self.mean[k] += weight * (mean - self.mean[k])
            self.var[k] += weight * (unbiased - self.var[k])
        return mean, unbiased if self.unbiased else var


@dataclass
class Site:
    """A place in a cell: ``kind`` is "none", "layer", "rms" or "batch"."""

    kind: str = "none"
    gain: Tensor | None = None
    shift: Tensor | None = None
    eps: float = 1e-5
    groups: Sequence[int] = (1,)
    statistics: Statistics | None = None

    def __call__(self, a: Tensor, t: int) -> Tensor:
        if self.statistics is not None:
            a = batch_norm(a, self.eps, *self.statistics.at(a, t))
        elif self.kind != "none":
            a = layer_norm(a, self.eps, self.groups, self.kind == "layer")
        a = a if self.gain is None else a * self.gain
        return a if self.shift is None else a + self.shift


@dataclass
class Direction:
    """One direction of one layer, with effective weights.

    Args:
        cell: "LSTM", "GRU", "light GRU", "RNN_TANH" or "RNN_RELU".
        b_inner: a bias inside the norm of the input term.
        joint: whether the recurrent site normalises the sum of both terms.
        carried: whether an LSTM carries on the normalised cell state.
        sites: what is normalised, by role; other sums stay as they are.
    """

    cell: str
    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    w_hr: Tensor | None = None
    peephole: Tensor | None = None
    b_inner: Tensor | None = None
    joint: bool = False
    carried: bool = False
    sites: dict[str, Site] = field(default_factory=dict)

    def at(self, role: str, a: Tensor, t: int) -> Tensor:
        return self.sites[role](a, t) if role in self.sites else a

    def step(
        self, x: Tensor, h: Tensor, c: Tensor | None, t: int, dropout: Tensor | float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """Eq. 4, 20-22 and 26-28 of the paper; the light GRU of Ravanelli et al. (2018)."""
        v, u = x @ self.w_ih.T, (dropout * h) @ self.w_hh.T
        v = v if self.b_inner is None else v + self.b_inner
        if self.joint or self.cell.startswith("RNN"):
            v, u = torch.zeros_like(v), v + u
        v, u = self.at("input", v, t), self.at("recurrent", u, t)
        if self.cell.startswith("RNN"):
            u = self.at("sum", u, t)
        v = v if self.b_ih is None else v + self.b_ih
        u = u if self.b_hh is None else u + self.b_hh
        if self.cell == "LSTM":
            return self._lstm(v + u, c, t)
        if self.cell == "GRU":
            (xr, xz, xn), (hr, hz, hn) = v.chunk(3, 1), u.chunk(3, 1)
            n, z = (xn + (xr + hr).sigmoid() * hn).tanh(), (xz + hz).sigmoid()
            return (1 - z) * n + z * h, None
        if self.cell == "light GRU":
            a, z = (v + u).chunk(2, 1)
            return (1 - z.sigmoid()) * a.clamp(min=0) + z.sigmoid() * h, None
        return (v + u).tanh() if self.cell == "RNN_TANH" else (v + u).clamp(min=0), None

    def _lstm(self, sums: Tensor, c: Tensor | None, t: int) -> tuple[Tensor, Tensor]:
        """With peepholes, eq. 7-11 of Graves (2013)."""
        i, f, g, o = sums.chunk(4, 1)
        p = torch.zeros_like(c[:1]).expand(3, -1) if self.peephole is None else self.peephole
        c = (f + p[1] * c).sigmoid() * c + (i + p[0] * c).sigmoid() * g.tanh()
        shown = self.at("cell", c, t)
        h = (o + p[2] * c).sigmoid() * shown.tanh()
        return h if self.w_hr is None else h @ self.w_hr.T, shown if self.carried else c


Share = Tensor | float


def run(
    d: Direction,
    sequences: Sequence[Tensor],
    h: Tensor,
    c: Tensor | None = None,
    dropout: Tensor | None = None,
    held: tuple[Share, Share] = (0.0, 0.0),
    reset: Tensor | None = None,
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Outputs (T_n, H) of sequences (T_n, I), and last states; h and c are the first, (N, H).

    ``dropout``: factors of h in recurrent products, (N, H) (Gal and Ghahramani 2016, section 4);
    ``held``: the parts of h and of c that zoneout keeps, numbers or (T, N, H) (Krueger et al. 2017,
    section 3); ``reset``: whether states before a step are zeros, (T, N).
    """
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    for t in range(max(map(len, sequences))):
        active = [n for n, x in enumerate(sequences) if len(x) > t]
        x, at = torch.stack([sequences[n][t] for n in active]), torch.tensor(active)
        before = [None if s is None else s[at] for s in (h, c)]
        if reset is not None:
            on = ~reset[t, at].unsqueeze(1)
            before = [None if s is None else s * on for s in before]
        factor = 1.0 if dropout is None else dropout[at]
        after = d.step(x, *before, t, factor)  # type: ignore[arg-type]
        parts = [q[t, at] if isinstance(q, Tensor) else q for q in held]
        h, c = (
            None if s is None else s.index_put((at,), q * old + (1 - q) * new)
            for s, old, new, q in zip((h, c), before, after, parts, strict=True)
        )
        for n in active:
            outputs[n].append(h[n])
    return [torch.stack(rows) for rows in outputs], h, c


def run_layers(
    layers: Sequence[Sequence[Direction]],
    sequences: Sequence[Tensor],
    h0: Tensor,
    c0: Tensor | None = None,
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Layers of one or two directions; states (layers * directions, N, H)."""
    finals = []
    for directions in layers:
        sides = []
        for k, d in enumerate(directions):
            i = len(finals)
            xs = [x.flip(0) for x in sequences] if k else sequences
            ys, *final = run(d, xs, h0[i], None if c0 is None else c0[i])
            sides.append([y.flip(0) for y in ys] if k else ys)
            finals.append(final)
        sequences = [torch.cat(parts, 1) for parts in zip(*sides, strict=True)]
    h, c = zip(*finals, strict=True)
    return list(sequences), torch.stack(h), None if c0 is None else torch.stack(c)


KINDS = {"LayerNorm": "layer", "RMSNorm": "rms", "BatchNorm": "batch"}


def read(cell: str, module: Any, suffix: str = "") -> Direction:
    """The parameters of a cell, or of a direction of a layer such as "l0_reverse"."""
    tail = f"_{suffix}" if suffix else ""
    of_sites = module.sites[suffix] if suffix else module.sites
    gates = {"LSTM": (4,), "GRU": (2, 1)}.get(cell, (1,))
    tensors = dict(module.named_parameters())
    weights = {name: tensors[f"weight_{name}{tail}"] for name in ("ih", "hh")}
    sites = {}
    for role, site in of_sites.items():
        norm, kind = site.norm, KINDS.get(type(site.norm).__name__)
        if getattr(site, "scale", None) is not None:
            name = {"input": "ih", "recurrent": "hh"}[role]
            weights[name] = weight_norm(weights[name], site.scale)
        if site.gain is None or kind is None:
            continue
        groups = (1,) if role in ("cell", "sum") else gates
        groups = (1,) * sum(groups) if getattr(norm, "per_gate", False) else groups
        sites[role] = Site(kind, site.gain, site.shift, norm.eps, groups)
        if kind == "batch":
            rows = site.running_mean.clone(), site.running_var.clone()
            counts = site.num_batches_tracked.tolist()
            options = module.training, norm.momentum, norm.unbiased
            sites[role].statistics = Statistics(*rows, counts, *options)
    names = ("bias_ih", "bias_hh", "weight_hr", "weight_peephole")
    rest = (tensors.get(name + tail) for name in names)
    return Direction(cell, weights["ih"], weights["hh"], *rest, sites=sites)


def window(
    a: Tensor, kappa: Tensor, text: Tensor, form: str = "exp"
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 47-51 of Graves (2013): the window (N, E), kappa (N, K) and phi (N, U).

    From what the network asks for, a (N, 3 K), the places before and vectors of characters, text
    (N, U, E). ``form``: the positive function, "exp" or "softplus" (Graves' later demonstration).
    """
    if form == "exp":
        alpha, beta, moved = a.exp().chunk(3, 1)
    else:
        alpha, beta, moved = (1 + a.exp()).log().chunk(3, 1)
        beta, moved = 1 / beta.clamp(min=0.01), moved / 25
    kappa = kappa + moved
    gaps = kappa.unsqueeze(2) - torch.arange(1, text.shape[1] + 1)
    phi = (alpha.unsqueeze(2) * (-beta.unsqueeze(2) * gaps**2).exp()).sum(1)
    return torch.einsum("nu,nue->ne", phi, text), kappa, phi


def run_window(
    d: Direction,
    weight: Tensor,
    bias: Tensor,
    x: Tensor,
    text: Tensor,
    state: Sequence[Tensor],
    form: str = "exp",
    reads: str = "state",
) -> tuple[Tensor, ...]:
    """An LSTM that reads the window of the step before: outputs, windows, state and phi (T, N, U).

    Of inputs x (T, N, I) and the state h, c, kappa and window, by the weight and bias of the map to
    the window's parameters. ``reads``: what that sees: "state" or "all" (window, input, state).
    """
    h, c, kappa, w = state
    steps = []
    for t, row in enumerate(x):
        h, c = d.step(torch.cat([row, w], 1), h, c, t)  # type: ignore[assignment]
        seen = h if reads == "state" else torch.cat([w, row, h], 1)
        w, kappa, phi = window(seen @ weight.T + bias, kappa, text, form)
        steps.append((h, w, phi))
    outputs, windows, phis = (torch.stack(parts) for parts in zip(*steps, strict=True))
    return outputs, windows, h, c, kappa, w, phis


def covariance(std: Tensor, rho: Tensor) -> Tensor:
    """Covariance matrices (..., 2, 2) of deviations (..., 2) and correlations."""
    x, y = std.unbind(-1)
    rows = [torch.stack([x * x, rho * x * y], -1), torch.stack([rho * x * y, y * y], -1)]
    return torch.stack(rows, -2)


def pen_mixture(raw: Tensor) -> MixtureSameFamily:
    """Eq. 19-22 of Graves (2013) for outputs (..., 1 + 6 M), with eq. 24 and 25 left to torch."""
    M = (raw.shape[-1] - 1) // 6
    pi, dx, dy, sx, sy, rho = raw[..., 1:].split(M, -1)
    pi = pi.exp() / pi.exp().sum(-1, keepdim=True)
    matrix = covariance(torch.stack([sx.exp(), sy.exp()], -1), rho.tanh())
    normal = MultivariateNormal(torch.stack([dx, dy], -1), covariance_matrix=matrix)
    return MixtureSameFamily(Categorical(pi), normal)
