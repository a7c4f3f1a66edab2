"""Random recurrent layers, inputs and changes between calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from ln_zoo.layers.dreamer_v3 import dreamer_v3_cell
from ln_zoo.layers.slstm import slstm_cell
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.ops import CELLS, Cell, lstm_cell

PEEPHOLE = "LSTM with peepholes"
#: Cells that have no name in `CELLS`, with and without biases.
OTHER_CELLS: dict[str, Callable[[bool], Cell]] = {
    PEEPHOLE: lambda bias: lstm_cell(peephole=True),
    "LSTM with clipped derivatives": lambda bias: lstm_cell(derivative_bound=0.05),
    "sLSTM": lambda bias: slstm_cell("sigmoid"),
    "sLSTM, exponential": lambda bias: slstm_cell("exponential"),
    "DreamerV3's GRU": lambda bias: dreamer_v3_cell(5, dynamics_layers=1, bias=bias),
    "DreamerV3's GRU, two layers": lambda bias: dreamer_v3_cell(3, dynamics_layers=2, bias=bias),
}


@dataclass(frozen=True)
class Case:
    """A layer, an input, and what changes between calls."""

    cell: str = "LSTM"
    norm: Norm = field(default_factory=Identity)
    normalize: tuple[str, ...] | None = None
    inputs: int = 2
    hidden: int = 3
    layers: int = 1
    bias: bool = True
    bidirectional: bool = False
    projection: int = 0
    blocks: int = 1
    batch_first: bool = False
    layout: str = "padded"
    lengths: tuple[int, ...] = (3, 3)
    memory: str = "contiguous"
    precision: str = "float32"
    training: bool = True
    zoneout: tuple[float, ...] = ()
    recurrent_dropout: float = 0.0
    weight_dropout: float = 0.0
    recompute: int = 0
    resets: float = 0.0
    given_states: bool = False
    changes: tuple[str, ...] = ()
    seed: int = 0


def cell_called(name: str, bias: bool) -> Cell:
    return OTHER_CELLS[name](bias) if name in OTHER_CELLS else CELLS[name]


LAYOUTS = ("padded", "unbatched", "packed", "unsorted", "mask")
MEMORY = ("contiguous", "transposed", "strided", "expanded", "offset", "negated")
PRECISIONS = ("float32", "float64", "bfloat16", "float16", "autocast")

_eps = st.sampled_from([1e-5, 1e-3])
NORMS = st.one_of(
    st.just(Identity()),
    st.builds(
        LayerNorm,
        gain=st.sampled_from([1.0, 0.3]),
        eps=_eps,
        per_gate=st.booleans(),
        per_block=st.booleans(),
    ),
    st.builds(RMSNorm, gain=st.sampled_from([1.0, 0.3]), eps=_eps, per_block=st.booleans()),
    st.just(WeightNorm()),
    st.builds(
        BatchNorm,
        max_steps=st.integers(1, 5),
        momentum=st.sampled_from([0.1, 0.5, 1.0]),
        unbiased=st.booleans(),
    ),
)


@st.composite
def cases(draw: Any, changes: list[str]) -> Case:
    """Any case that a layer accepts."""
    some = st.floats(0, 0.9).filter(lambda p: not 0 < p < 2**-10)
    sizes = st.one_of(st.integers(1, 9), st.sampled_from([15, 16, 17, 32, 33, 64]))
    name, bias = draw(st.sampled_from([*CELLS, *OTHER_CELLS])), draw(st.booleans())
    cell, norm = cell_called(name, bias), draw(NORMS)
    precision = draw(st.sampled_from(PRECISIONS))
    if precision not in ("float32", "float64"):
        sizes = sizes.filter(lambda n: n > 3)  # too few numbers for an error by their lengths
    hidden, training = draw(sizes), draw(st.booleans())
    batch = isinstance(norm, BatchNorm)
    layout = draw(st.sampled_from(LAYOUTS))
    if batch and training and layout == "unbatched":
        layout = "padded"
    steps = st.integers(1, 6)
    count = 1 if layout == "unbatched" else draw(st.integers(2 if batch else 1, 6))
    if layout in ("padded", "unbatched"):
        lengths = [draw(st.one_of(steps, st.integers(7, 20)))] * count
    else:
        lengths = draw(st.lists(steps, min_size=count, max_size=count))
        if layout == "packed":
            lengths.sort(reverse=True)
    if batch and count == 1:
        changes = [change for change in changes if change != "train"]
    zoneout = draw(st.one_of(st.just(()), st.tuples(*[some] * len(cell.states))))
    projection = draw(st.integers(0, hidden - 1)) if cell.projects else 0
    # A norm of one unit is a constant.
    least = 2 if getattr(norm, "per_block", False) and hidden > 1 else 1
    divisors = [n for n in range(1, hidden + 1) if hidden % n == 0 and hidden // n >= least]
    return Case(
        cell=name,
        norm=norm,
        normalize=draw(st.none() | st.sets(st.sampled_from(cell.roles)).map(sorted).map(tuple)),
        inputs=draw(sizes),
        hidden=hidden,
        layers=draw(st.sampled_from([1, 1, 2, 3])),
        bias=bias,
        bidirectional=draw(st.booleans()),
        projection=projection,
        blocks=1 if projection else draw(st.just(1) | st.sampled_from(divisors)),
        batch_first=draw(st.booleans()),
        layout=layout,
        lengths=tuple(lengths),
        memory=draw(st.sampled_from(MEMORY)),
        precision=precision,
        training=training,
        zoneout=zoneout,
        recurrent_dropout=draw(st.just(0.0) | some) if cell.drops else 0.0,
        weight_dropout=draw(st.just(0.0) | some),
        recompute=0 if batch else draw(st.sampled_from([0, 0, 0, 1, 2, 3])),
        # Norms that count steps from a reset run pieces as another batch.
        resets=0.0 if batch else draw(st.sampled_from([0.0, 0.0, 0.2, 1.0])),
        given_states=draw(st.booleans()),
        changes=tuple(draw(st.lists(st.sampled_from(changes), max_size=3))),
        seed=draw(st.integers(0, 2**16)),
    )
