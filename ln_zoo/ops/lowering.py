"""From a cell, the records of its norms and its weights to the arguments of an engine.

Differentiable torch functions fold biases where possible; autograd routes gradients to the
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ln_zoo.ops.cells import ARITHMETICS, Cell, Form, States, Terms, Weights
from ln_zoo.ops.norm_records import Record, Records, RowNorm, StepNorm
from ln_zoo.ops.precision import product_dtype
from ln_zoo.ops.spec import Examples, Operands, Rows, Spec


def unsupported_reason(
    cell: Cell, records: Sequence[Records], weights: Sequence[Weights], batch: bool = False
) -> str | None:
    """Why no engine supports these directions, or None; ``batch``: allow batch norm."""
    if not cell.has_kernels or cell.form is None:
        return f"no kernel knows this cell, {cell.name}"
    form = cell.form
    batch_too = ARITHMETICS[form.arithmetic].over_examples and not cell.weights
    batch = batch and batch_too and not (form.joint or form.carried)
    for direction, w in zip(records, weights, strict=True):
        if w.hr is not None:
            return "the hidden state is projected"
        if cell.blocks(w) > 1:
            return "the recurrent weight is in blocks"
        hidden = w.hh.shape[1]
        over_batch = batch and any(isinstance(r, StepNorm) for r in direction.values())
        for place in cell.places:
            record = direction[place.role]
            if record is None:
                return f"only the norm knows what the {place.role} site does"
            if record.identity:
                continue
            if isinstance(record, StepNorm) and not batch:
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


def form_of(cell: Cell) -> Form:
    """The form of a cell that engines run."""
    assert cell.form is not None
    return cell.form


def in_slots(cell: Cell, records: Records) -> tuple[Record, Record, Record]:
    """Norm records in the order of ``Spec.places``; None if the cell has no such place."""
    first, second, out = (None if role is None else records[role] for role in form_of(cell).roles)
    return first, second, out


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
    form, narrow = form_of(cell), product_dtype(x)
    wide = torch.promote_types(narrow, torch.float32)
    width, hidden = len(weights.hh), weights.hh.shape[1]
    arithmetic = ARITHMETICS[form.arithmetic]
    first, second, out = in_slots(cell, records)
    gain_input, gain_recurrent, gain_out = (
        _gain(record, size, x, wide)
        for record, size in ((first, width), (second, width), (out, hidden))
    )
    of_input = [weights.bias_ih, _shift(first)]
    of_recurrent = [weights.bias_hh, _shift(second)]
    inner = weights.own[0].flatten() if weights.own else None
    if inner is not None and (gain_recurrent if form.joint else gain_input) is None:
        of_input.append(inner)  # no norm between it and the other biases
        inner = None
    # A reset gate multiplies the recurrent term of a candidate with its bias, not the input term.
    apart = arithmetic.reset_gate and not form.joint
    summed = of_recurrent if apart else [*of_input, *of_recurrent]
    terms = Terms(weights.ih, weights.hh, gain_recurrent, _total(wide, *summed))
    w_ih, w_hh, gain_recurrent, bias = form.lowered(terms)
    bias_hn = None
    if arithmetic.reset_gate and bias is not None:
        both, bias_hn = bias.to(wide).split((2 * hidden, hidden))
        bias, bias_hn = torch.cat([both, torch.zeros_like(bias_hn)]), bias_hn.contiguous()
    shift_out = None
    if not arithmetic.cell_state:
        bias = _total(wide, bias, *(of_input if apart else [_shift(out)]))
    elif gain_out is not None:
        shift_out = _total(wide, _shift(out))
        shift_out = x.new_zeros(hidden, dtype=wide) if shift_out is None else shift_out
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
        bias_inner=_total(wide, inner),
    )


def _gain(record: Record, width: int, x: Tensor, wide: torch.dtype) -> Tensor | None:
    if record is None or record.identity:
        return None
    if record.gain is None:
        return x.new_ones(width, dtype=wide)
    return record.gain.to(wide).contiguous()


def _shift(record: Record) -> Tensor | None:
    return None if record is None or record.identity else record.shift


def _total(dtype: torch.dtype, *values: Tensor | None) -> Tensor | None:
    there = [value.to(dtype) for value in values if value is not None]
    return sum(there[1:], there[0]).contiguous() if there else None
