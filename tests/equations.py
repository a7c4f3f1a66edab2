"""The equations for operands of kernels, padded or packed, with noise and resets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from reference import Direction, Site, Statistics, run
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ln_zoo.ops.engines.base import NO_MASKS, Masks
from ln_zoo.ops.spec import Examples, Operands, Rows, Spec

#: What `masks_for` makes.
NOISE = ("zoneout", "expected zoneout", "recurrent dropout", "all")
FixedStatistics = Sequence[Tensor | None]


def label(spec: Any) -> str:
    """A specification, or another parameter of a test, in its name."""
    if not isinstance(spec, Spec):
        return str(spec)
    kinds = []
    for place in spec.places:
        if isinstance(place, Examples):
            kinds.append(f"{'batch' if place.batch else 'given'}{place.correction}")
        else:
            groups = ".".join(map(str, place.groups))
            kinds.append(f"{'centred' * place.center}{groups}" if place.scale else "none")
    forms = [name for name in ("joint", "carried") if getattr(spec, name)]
    zoneout = [f"zoneout{spec.zoneout}"] if any(spec.zoneout) else []
    return "/".join(["+".join([spec.cell, *forms]), *kinds, *zoneout])


def direction(
    spec: Spec, o: Operands, steps: int, given: FixedStatistics = (None,) * 3
) -> Direction:
    """The reference for a specification and its operands over a number of steps.

    ``given``: means and variances (2, rows, F) for each place that does not use the batch's.
    """

    def site(rows: Rows | Examples, gain: Any, shift: Any, given: Tensor | None) -> Site:
        if isinstance(rows, Rows):
            return Site("layer" if rows.center else "rms", gain, shift, rows.eps, rows.groups)
        if given is None:
            given = gain.new_zeros(2, steps, len(gain))
        counts = [int(not rows.batch)] * given.shape[1]
        mean, var = given.to(o.h0.dtype).clone()
        # With momentum 1 running averages are the statistics of the last batch.
        statistics = Statistics(mean, var, counts, rows.batch, 1.0, bool(rows.correction))
        return Site("batch", gain, shift, rows.eps, statistics=statistics)

    last = {"LSTM": "cell", "RNN_TANH": "sum", "RNN_RELU": "sum"}.get(spec.cell, "")
    gains = (o.gain_input, o.gain_recurrent, o.gain_out)
    places = zip(("input", "recurrent", last), spec.places, gains, given, strict=True)
    shifts = {"cell": o.shift_out}
    b_hh = None
    if o.bias_hn is not None:
        b_hh = torch.cat([o.bias_hn.new_zeros(2 * len(o.bias_hn)), o.bias_hn])
    return Direction(
        *(spec.cell, o.w_ih, o.w_hh, without_input_bias(spec, o).bias, b_hh),
        b_inner=o.bias_inner,
        joint=spec.joint,
        carried=spec.carried,
        sites={
            name: site(rows, gain, shifts.get(name), own)
            for name, rows, gain, own in places
            if rows.scale
        },
    )


def equations(
    spec: Spec,
    o: Operands,
    masks: Masks = NO_MASKS,
    sizes: Sequence[int] | None = None,
    d: Direction | None = None,
) -> tuple[Tensor, ...]:
    """Outputs (T, N, H) and last states, (N, H) each, by `direction` unless given another.

    ``sizes``: examples of each step of packed rows: x is (total, I), as are masks and outputs.
    """
    packed = sizes is not None
    steps = list(sizes) if sizes is not None else [o.x.shape[1]] * o.x.shape[0]
    there = torch.arange(steps[0]) < torch.tensor(steps).unsqueeze(1)

    def padded(a: Tensor) -> Tensor:
        a = a if packed else a.reshape(-1, *a.shape[2:])
        room = a.new_zeros(*there.shape, *a.shape[1:])
        return room.index_put(there.nonzero(as_tuple=True), a)

    def held(mask: Tensor | None, share: float) -> Tensor | float:
        return share if mask is None else padded(mask.to(o.h0.dtype))

    reset = None
    if masks.reset is not None:
        reset = padded(masks.reset if packed else masks.reset.view(there.shape))
    x = padded(o.x)
    outputs, h, c = run(
        direction(spec, o, len(steps)) if d is None else d,
        [x[:length, n] for n, length in enumerate(there.sum(0).tolist())],
        o.h0,
        o.c0,
        None if masks.dropout is None else masks.dropout.to(o.h0.dtype),
        (held(masks.zoneout_h, spec.zoneout[0]), held(masks.zoneout_c, spec.zoneout[1])),
        reset,
    )
    out = pad_sequence(outputs)
    found = out[there] if packed else out
    return (found, h) if c is None else (found, h, c)


def random_operands(
    spec: Spec,
    lead: Sequence[int],
    examples: int,
    features: int,
    hidden: int,
    *,
    gain: float = 0.5,
    offset: float = 0.0,
    seed: int = 0,
) -> Operands:
    """Random operands in float64, such as float32 can hold; all vectors that the cell may have.

    ``lead`` is the shape of x without its features, ``gain`` the mean of the gains, ``offset`` that
    of the recurrent weights, which centring has to take off.
    """
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) * 2 - 1

    width, k = spec.gates * hidden, hidden**-0.5
    lstm = spec.cell == "LSTM"
    operands = Operands(
        x=rand(*lead, features) * 2,
        w_ih=rand(width, features) * k,
        w_hh=rand(width, hidden) * k + offset,
        h0=rand(examples, hidden),
        c0=rand(examples, hidden) if lstm else None,
        bias=rand(width) / 2,
        bias_hn=rand(hidden) / 2 if spec.cell == "GRU" else None,
        gain_input=gain + rand(width) / 10 if spec.input.scale else None,
        gain_recurrent=gain + rand(width) / 10 if spec.recurrent.scale else None,
        gain_out=gain + rand(hidden) / 10 if spec.out.scale else None,
        shift_out=rand(hidden) / 10 if lstm and spec.out.scale else None,
        bias_inner=rand(width) / 2 if spec.joint else None,
    )
    return Operands(*(None if a is None else a.double() for a in operands))


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
