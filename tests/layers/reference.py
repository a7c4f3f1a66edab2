"""The normalised recurrent layers, written once more from the equations, one example at a time.

Nothing here comes from the package under test. A batch is a list of sequences (T_b, I), so there is
no padding and no packing; gradients flow, so that they can be compared too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Rule:
    """What a norm does: ``kind`` is "none", "layer", "rms", "batch" or "weight"."""

    kind: str
    eps: float = 1e-5
    training: bool = False
    max_steps: int = 256
    momentum: float = 0.1
    unbiased: bool = False


@dataclass
class Statistics:
    """Running averages of one batch-normalised place, one row for each time step."""

    mean: Tensor
    var: Tensor
    count: list[int] = field(default_factory=list)


@dataclass
class Direction:
    """One direction of one layer; ``gain``, ``shift``, ``scale``, ``statistics`` go by place."""

    cell: str
    rule: Rule
    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    w_hr: Tensor | None = None
    gain: dict[str, Tensor] = field(default_factory=dict)
    shift: dict[str, Tensor] = field(default_factory=dict)
    scale: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Statistics] = field(default_factory=dict)
    places: tuple[str, ...] = ()


def mean_and_variance(values: Tensor) -> tuple[Tensor, Tensor]:
    """Of a list of numbers, or of vectors feature by feature; the variance is biased."""
    n = values.shape[0]
    mean = sum(values[k] for k in range(n)) / n
    return mean, sum((values[k] - mean) ** 2 for k in range(n)) / n


def normalize(
    d: Direction, place: str, rows: list[Tensor], runs: list[int], t: int
) -> list[Tensor]:
    """Normalises the summed inputs of the examples active at step t."""
    rule = d.rule
    if rule.kind in ("none", "weight") or place not in d.places:
        return rows
    if rule.kind == "batch":
        rows = batch_normalize(rule, d.statistics[place], rows, t)
    else:
        rows = [example_normalize(rule, row, runs) for row in rows]
    gain, shift = d.gain[place], d.shift.get(place)
    rows = [gain * row for row in rows]
    return rows if shift is None else [row + shift for row in rows]


def example_normalize(rule: Rule, row: Tensor, runs: list[int]) -> Tensor:
    parts, start = [], 0
    for n in runs:
        a = row[start : start + n]
        if rule.kind == "layer":
            mean, var = mean_and_variance(a)
            parts.append((a - mean) / (var + rule.eps) ** 0.5)
        else:
            parts.append(a / ((a * a).sum() / n + rule.eps) ** 0.5)
        start += n
    assert start == row.shape[0]
    return torch.cat(parts)


def batch_normalize(rule: Rule, statistics: Statistics, rows: list[Tensor], t: int) -> list[Tensor]:
    n = len(rows)
    if rule.training and n > 1:
        mean, var = mean_and_variance(torch.stack(rows))
        unbiased = var * n / (n - 1)
        k = min(t, rule.max_steps - 1)
        statistics.count[k] += 1
        weight = max(1 / statistics.count[k], rule.momentum)
        with torch.no_grad():
            statistics.mean[k] += weight * (mean - statistics.mean[k])
            statistics.var[k] += weight * (unbiased - statistics.var[k])
        if rule.unbiased:
            var = unbiased
    else:
        reached = max((k for k, count in enumerate(statistics.count) if count), default=0)
        k = min(t, reached)
        mean, var = statistics.mean[k].clone(), statistics.var[k].clone()
    return [(row - mean) / (var + rule.eps) ** 0.5 for row in rows]


def effective(d: Direction, place: str, weight: Tensor) -> Tensor:
    """Weight normalisation: each row w becomes g w / |w|."""
    if d.rule.kind != "weight" or place not in d.places:
        return weight
    return torch.stack(
        [g * w / (w * w).sum() ** 0.5 for g, w in zip(d.scale[place], weight, strict=True)]
    )


def sigmoid(a: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-a))


def tanh(a: Tensor) -> Tensor:
    return 2 * sigmoid(2 * a) - 1


def one_step(
    d: Direction, xs: list[Tensor], hs: list[Tensor], cs: list[Tensor], t: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Equations 4, 20-22 and 26-28 for the examples active at step t."""
    size = d.w_hh.shape[0] // {"LSTM": 4, "GRU": 3}.get(d.cell, 1)
    w, u = effective(d, "input", d.w_ih), effective(d, "recurrent", d.w_hh)
    zeros = torch.zeros(d.w_hh.shape[0], dtype=d.w_hh.dtype)
    b_ih = zeros if d.b_ih is None else d.b_ih
    b_hh = zeros if d.b_hh is None else d.b_hh
    wx, uh = [w @ x for x in xs], [u @ h for h in hs]
    if d.cell == "LSTM":
        wx = normalize(d, "input", wx, [4 * size], t)
        uh = normalize(d, "recurrent", uh, [4 * size], t)
        gates = []
        for k in range(len(xs)):
            a = wx[k] + uh[k] + b_ih + b_hh
            gates.append([a[j * size : (j + 1) * size] for j in range(4)])
        cs = [
            sigmoid(f) * c + sigmoid(i) * tanh(g) for (i, f, g, _), c in zip(gates, cs, strict=True)
        ]
        shown = normalize(d, "cell", cs, [size], t)
        hs = [sigmoid(o) * tanh(a) for (_, _, _, o), a in zip(gates, shown, strict=True)]
        if d.w_hr is not None:
            hs = [d.w_hr @ h for h in hs]
    elif d.cell == "GRU":
        wx = normalize(d, "input", wx, [2 * size, size], t)
        uh = normalize(d, "recurrent", uh, [2 * size, size], t)
        new = []
        for k, h in enumerate(hs):
            x_term, h_term = wx[k] + b_ih, uh[k] + b_hh
            r = sigmoid(x_term[:size] + h_term[:size])
            z = sigmoid(x_term[size : 2 * size] + h_term[size : 2 * size])
            n = tanh(x_term[2 * size :] + r * h_term[2 * size :])
            new.append((1 - z) * n + z * h)
        hs = new
    else:
        f = tanh if d.cell == "RNN_TANH" else lambda a: a.clamp(min=0)
        sums = normalize(d, "sum", [a + b for a, b in zip(wx, uh, strict=True)], [size], t)
        hs = [f(a + b_ih + b_hh) for a in sums]
    return hs, cs


def run_direction(
    d: Direction, sequences: list[Tensor], hs: list[Tensor], cs: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Outputs (T_b, H) and final states of each example."""
    hs, cs = list(hs), list(cs)
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    for t in range(max(len(x) for x in sequences)):
        active = [k for k, x in enumerate(sequences) if len(x) > t]
        new_h, new_c = one_step(
            d,
            [sequences[k][t] for k in active],
            [hs[k] for k in active],
            [cs[k] for k in active],
            t,
        )
        for k, h, c in zip(active, new_h, new_c, strict=True):
            hs[k], cs[k] = h, c
            outputs[k].append(h)
    return [torch.stack(rows) for rows in outputs], hs, cs


def run_layers(
    layers: list[list[Direction]], sequences: list[Tensor], h0: Tensor, c0: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """All layers, each a list of one or two directions; h0, c0 (layers * directions, N, H)."""
    final_h, final_c = [], []
    for directions in layers:
        sides = []
        for k, d in enumerate(directions):
            i = len(final_h)
            xs = [x.flip(0) for x in sequences] if k else sequences
            ys, hs, cs = run_direction(d, xs, list(h0[i]), list(c0[i]))
            sides.append([y.flip(0) for y in ys] if k else ys)
            final_h.append(torch.stack(hs))
            final_c.append(torch.stack(cs))
        sequences = [torch.cat(parts, dim=1) for parts in zip(*sides, strict=True)]
    return sequences, torch.stack(final_h), torch.stack(final_c)
