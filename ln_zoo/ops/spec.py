"""Arguments of a recurrent kernel: the normalisations, and the tensors of one direction.

Records are lowered to kernel arguments by differentiable torch functions, which fold biases where
possible; autograd routes gradients to the parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ln_zoo.ops.cells import CELLS, Cell, Form, States, Weights, kernel_cell
from ln_zoo.ops.norm_records import Record, Records, RowNorm, StepNorm


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

    def encode(self) -> str:
        """Encode as text without ``/``; floats round-trip exactly."""
        groups = ".".join(str(n) for n in self.groups)
        return f"{int(self.scale)},{int(self.center)},{specialized(self.eps)!r},{groups}"

    @staticmethod
    def decode(text: str) -> Rows:
        scale, center, eps, groups = text.split(",")
        return Rows(
            bool(int(scale)),
            bool(int(center)),
            float(eps),
            tuple(int(n) for n in groups.split(".") if n),
        )


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

    def encode(self) -> str:
        source = "batch" if self.batch else "given"
        return f"{source},{specialized(self.eps)!r},{self.correction}"

    @staticmethod
    def decode(text: str) -> Examples:
        source, eps, correction = text.split(",")
        return Examples(source == "batch", float(eps), int(correction))

    @property
    def given(self) -> Examples:
        return Examples(False, self.eps)


@dataclass(frozen=True)
class Spec:
    """Cell and normalisations that a kernel computes.

    Normalised places have either all `Rows` or all `Examples`; ``Rows()`` is the identity.

    Example:
        >>> rows = Rows(scale=True, center=True, eps=1e-5, groups=(2, 1))
        >>> Spec("GRU", rows, rows, Rows()).encode()
        'GRU/1,1,1e-05,2.1/1,1,1e-05,2.1/0,0,0.0,'
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
    def gates(self) -> int:
        return CELLS[self.cell].gates

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
    def scales(self) -> tuple[bool, bool, bool]:
        """Whether the input term, the recurrent term and the output are normalised."""
        return self.input.scale, self.recurrent.scale, self.out.scale

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

    def encode(self) -> str:
        """Encode as text, to pass through the schema of a torch operator."""
        forms = [name for name in ("joint", "carried") if getattr(self, name)]
        parts = ["+".join([self.cell, *forms]), *(place.encode() for place in self.places)]
        if any(self.zoneout):
            parts.append(",".join(repr(specialized(q)) for q in self.zoneout))
        return "/".join(parts)

    @staticmethod
    @functools.cache
    def decode(text: str) -> Spec:
        form, *parts = text.split("/")
        cell, *forms = form.split("+")
        joint, carried = "joint" in forms, "carried" in forms
        first, second, out = (
            (Rows if place[0] in "01" else Examples).decode(place) for place in parts[:3]
        )
        h, c = (float(q) for q in (parts[3] if parts[3:] else "0,0").split(","))
        spec = Spec(cell, first, second, out, (h, c), joint, carried)
        if not (0 <= h <= 1 and 0 <= c <= 1) or (c and cell != "LSTM"):
            raise ValueError(f"{text}: zoneout must be shares in [0, 1], of c in an LSTM alone")
        if (joint and (cell not in ("LSTM", "GRU") or first.scale)) or (
            carried and (cell != "LSTM" or not out.scale)
        ):
            raise ValueError(f"{text}: no kernel has a cell of this form")
        if (joint or carried or cell == "light GRU") and spec.examples:
            raise ValueError(f"{text}: joint and carried norms and a light GRU's are of rows")
        if spec.examples and any(isinstance(place, Rows) and place.scale for place in spec.places):
            raise ValueError(f"{text}: some places normalise rows, others examples")
        for place, gates in zip(spec.places, spec.widths(1), strict=True):
            if isinstance(place, Rows) and place.scale and sum(place.groups) != gates:
                raise ValueError(f"{text}: groups {place.groups} do not make up {gates} gates")
        return spec


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


def unsupported_reason(
    cell: Cell, records: Sequence[Records], weights: Sequence[Weights], batch: bool = False
) -> str | None:
    """Why kernels do not support these directions, or None; ``batch``: allow batch norm."""
    if not cell.has_kernels or cell.form is None:
        return f"no kernel knows this cell, {cell.name}"
    rows_alone = cell.form.joint or cell.form.carried or bool(cell.weights)
    rows_alone = rows_alone or cell.form.arithmetic == "light GRU"
    for direction, w in zip(records, weights, strict=True):
        if w.hr is not None:
            return "the hidden state is projected"
        hidden = w.hh.shape[1]
        over_batch = batch and any(isinstance(r, StepNorm) for r in direction.values())
        for place in cell.places:
            record = direction[place.role]
            if record is None:
                return f"only the norm knows what the {place.role} site does"
            if record.identity:
                continue
            if isinstance(record, StepNorm) and (rows_alone or not batch):
                return f"the {place.role} site normalises over the batch"
            if isinstance(record, RowNorm) and over_batch:
                return f"the {place.role} site normalises each example for itself"
            if not place.sums:
                return f"the {place.role} site normalises a term of the sum"
            if isinstance(record, StepNorm):
                continue
            if any(size % hidden for size in record.groups):
                return f"statistics of the {place.role} site do not run over whole gates"
            if sum(record.groups) != hidden * sum(place.groups):
                return f"the groups of the {place.role} site do not fit"
    return None


def unsupported_places(places: Sequence[Rows | Examples]) -> str | None:
    """Why kernels with a single variance correction do not support these places, or None."""
    corrections = {
        place.correction for place in places if isinstance(place, Examples) and place.batch
    }
    return "places differ in the correction of variances" if len(corrections) > 1 else None


def product_dtype(x: Tensor) -> torch.dtype:
    """Dtype of matrix products with x: autocast's if enabled, else the dtype of x."""
    kind = x.device.type
    if x.dtype == torch.float64 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def make_spec(cell: Cell, records: Records, weights: Weights) -> Spec:
    """Spec of one direction; requires that `unsupported_reason` returned None."""
    hidden = weights.hh.shape[1]

    def place(record: Record) -> Rows | Examples:
        if isinstance(record, StepNorm):
            return Examples(record.batch, record.eps, record.correction)
        if record is None or record.identity:
            return Rows()
        groups = tuple(size // hidden for size in record.groups)
        return Rows(True, record.center, record.eps, groups)

    first, second, out = (place(record) for record in in_slots(cell, records))
    shares = [0.0 if isinstance(d, Tensor) else d for d in weights.noise.zoneout]
    h, c = (*shares, 0.0, 0.0)[:2]
    form = form_of(cell)
    carried = form.carried and out.scale
    return Spec(form.arithmetic, first, second, out, (h, c), form.joint, carried)


def form_of(cell: Cell) -> Form:
    """The form of a cell that kernels run."""
    assert cell.form is not None
    return cell.form


def in_slots(cell: Cell, records: Records) -> tuple[Record, Record, Record]:
    """Norm records in the order of ``Spec.places``; None if the cell has no such place."""
    first, second, out = (None if role is None else records[role] for role in form_of(cell).roles)
    return first, second, out


def kernel_terms(
    cell: Cell, records: Records, weights: Weights, x: Tensor, states: States
) -> tuple[Spec, Operands]:
    """Spec and operands of one direction; requires that `unsupported_reason` returned None.

    x is padded (T, N, I) or packed (total, I); states are (N, H).
    """
    return make_spec(cell, records, weights), kernel_tensors(cell, records, weights, x, states)


def kernel_tensors(
    cell: Cell, records: Records, weights: Weights, x: Tensor, states: States
) -> Operands:
    """The tensors of one direction; arguments as for `kernel_terms`."""
    form, hidden = form_of(cell), weights.hh.shape[1]
    narrow = product_dtype(x)
    wide = torch.promote_types(narrow, torch.float32)

    def gain(record: Record, width: int) -> Tensor | None:
        if record is None or record.identity:
            return None
        if record.gain is None:
            return x.new_ones(width, dtype=wide)
        return record.gain.to(wide).contiguous()

    def shift(record: Record) -> Tensor | None:
        return None if record is None or record.identity else record.shift

    def total(*values: Tensor | None) -> Tensor | None:
        there = [value.to(wide) for value in values if value is not None]
        return sum(there[1:], there[0]).contiguous() if there else None

    first, second, out = in_slots(cell, records)
    w_ih, w_hh, width = weights.ih, weights.hh, len(weights.hh)
    inner = weights.own[0].flatten() if weights.own else None
    of_input: tuple[Tensor | None, ...] = (weights.bias_ih, shift(first))
    of_recurrent = (weights.bias_hh, shift(second))
    if inner is not None and gain(second if form.joint else first, width) is None:
        of_input, inner = (*of_input, inner), None  # no norm between it and the other biases
    gain_input, gain_recurrent = gain(first, width), gain(second, width)
    bias, bias_hn = total(*of_input, *of_recurrent), None
    if form.arithmetic == "GRU":
        gated = (*of_input, *of_recurrent) if form.joint else of_recurrent
        bias, gated_bias = (None if form.joint else total(*of_input)), total(*gated)
        if form.update_offset is not None:
            # The update gate of the new state is 1 minus that of the old.
            sign = torch.cat([w_hh.new_ones(hidden), -w_hh.new_ones(hidden), w_hh.new_ones(hidden)])
            if gain_recurrent is None:
                w_ih, w_hh = w_ih * sign.unsqueeze(1), w_hh * sign.unsqueeze(1)
            else:
                gain_recurrent = gain_recurrent * sign
            offset = form.update_offset * (sign - 1) / 2
            gated_bias = offset.to(wide) if gated_bias is None else gated_bias * sign + offset
        if gated_bias is not None:
            both, bias_hn = gated_bias.split((2 * hidden, hidden))
            bias = total(bias, torch.cat([both, torch.zeros_like(bias_hn)]))
            bias_hn = bias_hn.contiguous()
    elif form.arithmetic != "LSTM":
        bias = total(bias, shift(out))
    gain_out, shift_out = gain(out, hidden), None
    if form.arithmetic == "LSTM" and gain_out is not None:
        shift_out = total(shift(out))
        if shift_out is None:
            shift_out = x.new_zeros(hidden, dtype=wide)
    h, *cells = (state.to(wide).resolve_neg() for state in states)
    return Operands(
        x.to(narrow).resolve_neg(),
        w_ih.to(narrow).contiguous().resolve_neg(),
        w_hh.to(narrow).contiguous().resolve_neg(),
        h,
        next(iter(cells), None),
        bias=bias,
        bias_hn=bias_hn,
        gain_input=gain_input,
        gain_recurrent=gain_recurrent,
        gain_out=gain_out,
        shift_out=shift_out,
        bias_inner=total(inner),
    )
