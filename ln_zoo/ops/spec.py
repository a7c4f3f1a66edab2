"""Arguments of an engine: the normalisations of a cell, and the tensors of one direction."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ln_zoo.ops.cells import ARITHMETICS, Arithmetic, Cell, kernel_cell


def specialized(value: float) -> float:
    """Specialise torch.compile on a norm's hyperparameter; another value recompiles."""
    if not torch.compiler.is_compiling():
        return value
    # Imported here, since it imports sympy.
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return float(guard_scalar(value))


@dataclass(frozen=True)
class Rows:
    """How the rows of one place are normalised, without gain and shift.

    Fields as in `RowNorm`, but ``groups`` are in units of H. The identity has defaults.
    """

    scale: bool = False
    center: bool = False
    eps: float = 0.0
    groups: tuple[int, ...] = ()

    #: See `Examples.batch`.
    batch: ClassVar[bool] = False


@dataclass(frozen=True)
class Examples:
    """How one place is normalised over examples, at each step separately, without gain and shift.

    ``batch``: by batch statistics or given ones; ``eps`` is added to the variance, inside the root;
    the sum of squares over n examples is divided by n minus ``correction``.
    """

    batch: bool
    eps: float
    correction: int = 0

    #: As in `Rows`: not the identity, and weights are not centred.
    scale: ClassVar[bool] = True
    center: ClassVar[bool] = False

    @property
    def given(self) -> Examples:
        return Examples(False, self.eps)


#: Integers of one place: its kind, one more number (see `_integers`), and the size of each group.
_PLACE = 2 + max(arithmetic.gates for arithmetic in ARITHMETICS.values())
_ROWS, _GIVEN, _BATCH = 1, 2, 3
_NUMBERS = range(len(ARITHMETICS))


def _integers(place: Rows | Examples) -> tuple[int, ...]:
    if isinstance(place, Examples):
        kind = _BATCH if place.batch else _GIVEN
        return kind, place.correction, *(0,) * (_PLACE - 2)
    unused = _PLACE - 2 - len(place.groups)
    return _ROWS * place.scale, int(place.center), *place.groups, *(0,) * unused


def _place_of(integers: Sequence[int], eps: float) -> Rows | Examples:
    kind, number, *groups = integers
    if kind in (_GIVEN, _BATCH):
        return Examples(kind == _BATCH, eps, number)
    return Rows(kind == _ROWS, bool(number), eps, tuple(n for n in groups if n))


@dataclass(frozen=True)
class Spec:
    """Cell and normalisations that an engine computes.

    Normalised places have either all `Rows` or all `Examples`; ``Rows()`` is the identity.

    Example:
        >>> rows = Rows(scale=True, center=True, eps=1e-5, groups=(2, 1))
        >>> spec = Spec("GRU", rows, rows, Rows())
        >>> spec.gates, spec.merged, Spec.of_numbers(*spec.numbers()) == spec
        (3, False, True)
    """

    cell: str  # `Form.arithmetic`
    input: Rows | Examples  # at the input term; the identity in an RNN and in joint cells
    # At the recurrent term, in joint cells the sum; the identity in an RNN.
    recurrent: Rows | Examples
    # At an LSTM's cell state on its way to the output, or an RNN's sum; otherwise the identity.
    out: Rows | Examples
    # Expected zoneout of h and of an LSTM's c, as in evaluation; sampled masks are arguments of the
    # operator.
    zoneout: tuple[float, float] = (0.0, 0.0)
    joint: bool = False  # `Form.joint` of an LSTM or a GRU; `Rows` only
    carried: bool = False  # `Form.carried` of an LSTM with normalised output; `Rows` only

    @property
    def arithmetic(self) -> Arithmetic:
        return ARITHMETICS[self.cell]

    @property
    def gates(self) -> int:
        return self.arithmetic.gates

    @property
    def places(self) -> tuple[Rows | Examples, Rows | Examples, Rows | Examples]:
        return self.input, self.recurrent, self.out

    @property
    def rows(self) -> tuple[Rows, Rows, Rows]:
        """The three places, if all normalise rows."""
        first, second, out = (place for place in self.places if isinstance(place, Rows))
        return first, second, out

    @property
    def examples(self) -> bool:
        return any(isinstance(place, Examples) for place in self.places)

    @property
    def merged(self) -> bool:
        """Whether the terms are added before anything else, as in an RNN; only the sum is saved."""
        return self.joint or self.gates == 1

    @property
    def products(self) -> tuple[Rows | Examples, Rows | Examples]:
        """Places of the products with w_ih and w_hh; if `merged`, the place of their sum twice."""
        first, second = (self.places[i] for i in self.product_places)
        return first, second

    @property
    def product_places(self) -> tuple[int, int]:
        return (2, 2) if self.gates == 1 else (1, 1) if self.joint else (0, 1)

    @property
    def computed(self) -> Cell:
        return kernel_cell(self.cell, self.joint, self.carried)

    def widths(self, hidden: int) -> tuple[int, int, int]:
        return self.gates * hidden, self.gates * hidden, hidden

    # The schema of a torch operator has no dataclasses.

    def numbers(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """All fields as integers and floats."""
        number = list(ARITHMETICS).index(self.cell)
        places = [n for place in self.places for n in _integers(place)]
        floats = (*(place.eps for place in self.places), *self.zoneout)
        integers = number, int(self.joint), int(self.carried), *places
        return integers, tuple(map(specialized, floats))

    @staticmethod
    @functools.cache
    def of_numbers(integers: tuple[int, ...], floats: tuple[float, ...]) -> Spec:
        """Inverse of `numbers`; ValueError if no engine computes it."""
        if len(integers) != 3 + 3 * _PLACE or len(floats) != 5 or integers[0] not in _NUMBERS:
            raise ValueError(f"{integers} and {floats} are not the numbers of a Spec")
        number, joint, carried, *rest = integers
        parts = (rest[i * _PLACE : (i + 1) * _PLACE] for i in range(3))
        first, second, out = map(_place_of, parts, floats[:3])
        cell, zoneout = list(ARITHMETICS)[number], (floats[3], floats[4])
        spec = Spec(cell, first, second, out, zoneout, bool(joint), bool(carried))
        spec.check()
        return spec

    def check(self) -> None:
        """Raise a ValueError if no engine computes it."""
        arithmetic, (h, c) = self.arithmetic, self.zoneout
        if not (0 <= h <= 1 and 0 <= c <= 1) or (c and not arithmetic.cell_state):
            raise ValueError(f"{self}: zoneout must be shares in [0, 1], of c only if there is a c")
        if self.joint and (not arithmetic.joint or self.input.scale):
            raise ValueError(f"{self}: no engine has a joint norm in this cell")
        if self.carried and not (arithmetic.cell_state and self.out.scale):
            raise ValueError(f"{self}: only a normalised cell state can be carried")
        if self.examples and (self.joint or self.carried or not arithmetic.over_examples):
            raise ValueError(f"{self}: no engine normalises this cell over examples")
        for place, gates in zip(self.places, self.widths(1), strict=True):
            if isinstance(place, Rows) and place.scale:
                if self.examples:
                    raise ValueError(f"{self}: some places normalise rows, others examples")
                if sum(place.groups) != gates:
                    raise ValueError(f"{self}: {place.groups} do not make up {gates} gates")


class Operands(NamedTuple):
    """The tensors of one direction of one layer, with G = gates * H.

    The first three have the dtype of matrix products; the others have the same or float32,
    whichever is wider. A gain is present if and only if its place is scaled.
    """

    x: Tensor  # padded (T, N, I) or packed (total, I)
    w_ih: Tensor  # (G, I)
    w_hh: Tensor  # (G, H)
    h0: Tensor  # initial state, (N, H)
    c0: Tensor | None = None  # initial cell state of an LSTM, (N, H)
    # Sum of all biases outside norms, (G,). A GRU's candidate has only the input term's here, a
    # joint GRU's none.
    bias: Tensor | None = None
    bias_hn: Tensor | None = None  # bias of the recurrent term of a GRU's candidate, (H,)
    gain_input: Tensor | None = None  # (G,)
    gain_recurrent: Tensor | None = None  # (G,)
    gain_out: Tensor | None = None  # (H,)
    shift_out: Tensor | None = None  # (H,), of an LSTM
    bias_inner: Tensor | None = None  # added to the products with w_ih before normalisation, (G,)

    def gains(self, spec: Spec) -> tuple[Tensor | None, Tensor | None]:
        """Gains of the products with w_ih and w_hh; if ``spec.merged``, of their sum."""
        gains = self.gain_input, self.gain_recurrent, self.gain_out
        first, second = spec.product_places
        return gains[first], gains[second]
