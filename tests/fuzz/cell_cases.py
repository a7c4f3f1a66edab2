"""Random cells: step functions of products, gates, norms and several states, by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ln_zoo.layers import RecurrentLayer
from ln_zoo.norms import Identity, LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.ops import Cell, Place, States, Weights, linear

UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.sigmoid,
    torch.tanh,
    torch.relu,
    torch.abs,
    F.softplus,
    F.silu,
    F.gelu,
    F.elu,
    torch.sin,
    torch.cos,
    torch.square,
    lambda a: (0.5 * a.tanh()).exp(),
    lambda a: (a * a + 0.5).log(),
    lambda a: torch.log1p(a * a),
    lambda a: torch.rsqrt(a * a + 0.5),
    lambda a: torch.sqrt(a * a + 0.2),
    lambda a: a.clamp(-0.7, 0.9),
    lambda a: torch.expm1(0.5 * a.tanh()),
    lambda a: (a.abs() + 0.3) ** 1.5,
    lambda a: a.softmax(-1),
    lambda a: a.softmax(-1).cumsum(-1),
    lambda a: a - a.logsumexp(-1, keepdim=True),
    lambda a: a - a.mean(-1, keepdim=True),
    lambda a: a / (1 + a.abs().sum(-1, keepdim=True)),
)
BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    torch.minimum,
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: a / (1 + b * b),
    lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b: a * b.sigmoid(),
)


@dataclass(frozen=True)
class OwnNorm(Norm):
    """A norm without a record."""

    def init_params(self, site: Any) -> None:
        site.add_affine(gain=1.0)

    def normalize(self, site: Any, a: Tensor, step: int | None = None) -> Tensor:
        return site.affine(a / (0.3 + site.mean(a.abs())))


NORMS = (Identity(), LayerNorm(), LayerNorm(per_gate=True), RMSNorm(), WeightNorm(), OwnNorm())


class RandomStep:
    """A step of ``gates`` gates and ``states`` states, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.gates, self.states = draw.randint(1, 4), draw.randint(1, 3)
        #: Gates of a first product, whose results the second product's left operand has; 0: one.
        self.first = (
            draw.randint(1, self.gates - 1) if self.gates > 1 and draw.random() < 0.4 else 0
        )
        self.own = draw.randint(0, 2)
        self.program: list[tuple[Any, int, int]] = []
        size = 2 * self.gates + self.states + self.own
        for _ in range(draw.randint(2, 8)):
            function = draw.choice(UNARY if draw.random() < 0.5 else BINARY)
            # Later values are likelier, so that functions are nested.
            first, second = (int(size * draw.random() ** 0.5) for _ in range(2))
            self.program.append((function, first, second))
            size += 1
        self.ends = [(draw.randrange(size), draw.randrange(size)) for _ in range(self.states)]
        # The output depends on the input.
        self.ends[0] = draw.randrange(self.gates), self.ends[0][1]

    def places(self) -> tuple[Place, ...]:
        whole = Place("input", (self.gates,), weight="ih")
        if not self.first:
            return whole, Place("recurrent", (self.gates,), weight="hh")
        return (
            whole,
            Place("recurrent", (self.gates,), weight="hh", sums=False),
            Place("first", (self.first,), products=("hh",)),
            Place("second", (self.gates - self.first,), products=("hh",)),
        )

    def __call__(self, wx: Tensor, states: States, w: Weights, sites: Any, t: int | None) -> States:
        h, hidden = states[0], states[0].shape[-1]
        pool = list((wx + w.bias).chunk(self.gates, -1))
        if self.first:
            rows = self.first * hidden
            u = sites["first"](linear(w.dropped(h), w.hh[:rows]), t).chunk(self.first, -1)
            left = w.dropped(h * u[0].sigmoid())
            v = sites["second"](linear(left, w.hh[rows:]), t).chunk(self.gates - self.first, -1)
            pool += [*u, *v]
        else:
            pool += sites["recurrent"](linear(w.dropped(h), w.hh), t).chunk(self.gates, -1)
        pool += [*states, *(a[0].expand_as(h) for a in w.own)]
        for function, first, second in self.program:
            arguments = [pool[first]] if function in UNARY else [pool[first], pool[second]]
            pool.append(function(*arguments))
        # Bounded, so that errors are not multiplied without end.
        return tuple(
            pool[gate].sigmoid() * s + (1 - pool[gate].sigmoid()) * pool[new].tanh()
            for s, (gate, new) in zip(states, self.ends, strict=True)
        )


def random_layer(seed: int) -> RecurrentLayer:
    """A layer of a random cell, norm and noise."""
    draw = random.Random(-seed - 1)
    step = RandomStep(seed)
    cell = Cell(
        f"random {seed}",
        step,
        step.places(),
        states=("h", "c", "n")[: step.states],
        weights=tuple((f"own{i}", 1) for i in range(step.own)),
        drops=True,
    )
    options: dict[str, Any] = {}
    if draw.random() < 0.3:
        options["zoneout"] = 0.3
    if draw.random() < 0.2:
        options["recurrent_dropout"] = 0.3
    hidden = draw.choice((1, 2, 3, 5, 8, 16, 21, 33))
    options |= {"norm": draw.choice(NORMS), "bidirectional": draw.random() < 0.2}
    blocks = draw.choice([n for n in range(1, hidden + 1) if hidden % n == 0])
    if draw.random() < 0.3:
        options["blocks"] = blocks
    layer = RecurrentLayer(3, hidden, cell=cell, **options)
    return layer.train(draw.random() < 0.7)
