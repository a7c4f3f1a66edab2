"""Triton kernels of one time step, for places that normalise over examples.

A program owns UNITS hidden units, with all their gates, of all rows of the step, in tiles of ROWS x
UNITS; more than ROWS rows (MANY) are read again for each pass. A place is 0 (identity), 1 (given
statistics) or 2 (batch statistics; products are saved centred).
"""

# triton does not support starred tuples.
# ruff: noqa: RUF005
# mypy: disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl

from ln_zoo.kernels.triton.kernels import (
    KINDS,
    _add2,
    _add4,
    _add8,
    _address,
    _forget_back,
    _input_back,
    _next_cell,
    _output_back,
    _sigmoid,
    _tanh,
)

#: Slots of the table of addresses, by name.
SLOTS = (
    "v",
    "u",
    "c_rows",  # cell states after each step
    "bias",
    "bias_hn",
    "gain_input",
    "gain_recurrent",
    "gain_out",
    "shift_out",
    "c",  # an LSTM's cell state; backward: its gradient
    "h",  # the state; forward only
    "out",  # outputs; backward: their gradient
    "mean_input",
    "var_input",
    "mean_recurrent",
    "var_recurrent",
    "mean_out",
    "var_out",
    "sizes",  # first row and rows of each step, int64, of packed sequences
    "h_prev",  # backward only, as all that follow
    "c_prev",
    "du",
    "dv",
    "passed",  # the part of the gradient of h that bypasses the product
    "d_bias",
    "d_bias_hn",
    "d_gain_input",
    "d_gain_recurrent",
    "d_gain_out",
    "d_shift_out",
)

# In the order of SLOTS
(V, U, C_ROWS, BIAS, BIAS_HN, GAIN_INPUT, GAIN_RECURRENT, GAIN_OUT, SHIFT_OUT, C, H_STATE, OUT,
 MEAN_INPUT, VAR_INPUT, MEAN_RECURRENT, VAR_RECURRENT, MEAN_OUT, VAR_OUT, SIZES, H_PREV, C_PREV,
 DU, DV, PASSED, D_BIAS, D_BIAS_HN, D_GAIN_INPUT, D_GAIN_RECURRENT, D_GAIN_OUT, D_SHIFT_OUT) = (
    tl.constexpr(slot) for slot in range(len(SLOTS))
)  # fmt: skip


@triton.jit
def _step(table, row, step, n, PACKED: tl.constexpr):
    if PACKED:
        entry = tl.load(table + SIZES).to(tl.pointer_type(tl.int64)) + 2 * step
        return tl.load(entry), tl.load(entry + 1).to(tl.int32)
    else:
        return row.to(tl.int64), n


# Tiles, and tuples of them with one for each gate


@triton.jit
def _tile(n, H: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """Rows and units of a program's first tile, and masks of valid units and elements."""
    lines = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(0) * UNITS + tl.arange(0, UNITS)[None, :]
    lines, cols = tl.broadcast_to(lines, (ROWS, UNITS)), tl.broadcast_to(cols, (ROWS, UNITS))
    inside = cols < H
    return lines, cols, inside, inside & (lines < n)


@triton.jit
def _at(lines, cols, H: tl.constexpr, GATES: tl.constexpr):
    # Alignment of rows of H only: with a stronger hint for the first gate, the compiler would place
    # its tile in the registers of other threads, and exchange it.
    rows = tl.multiple_of(lines * (GATES * H), [H & -H, H & -H])
    return rows + cols


@triton.jit
def _read(pointer, at, mask):
    return tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _write(pointer, at, mask, a):
    tl.store(pointer + at, a.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _read_gates(pointer, at, mask, H: tl.constexpr, GATES: tl.constexpr):
    found = ()
    for q in tl.static_range(GATES):
        found = found + (_read(pointer + q * H, at, mask),)
    return found


@triton.jit
def _write_gates(pointer, at, mask, H: tl.constexpr, a):
    for q in tl.static_range(len(a)):
        _write(pointer + q * H, at, mask, a[q])


@triton.jit
def _fill(value, GATES: tl.constexpr):
    found = ()
    for _ in tl.static_range(GATES):
        found = found + (value,)
    return found


@triton.jit
def _plus(a, b):
    found = ()
    for q in tl.static_range(len(a)):
        found = found + (a[q] + b[q],)
    return found


@triton.jit
def _times(a, b):
    found = ()
    for q in tl.static_range(len(a)):
        found = found + (a[q] * b[q],)
    return found


@triton.jit
def _over(a, count):
    found = ()
    for q in tl.static_range(len(a)):
        found = found + (a[q] / count,)
    return found


@triton.jit
def _less(a, mean, mask):
    found = ()
    for q in tl.static_range(len(a)):
        found = found + (tl.where(mask, a[q] - mean[q], 0.0),)
    return found


@triton.jit
def _part(a, FIRST: tl.constexpr, COUNT: tl.constexpr):
    found = ()
    for q in tl.static_range(COUNT):
        found = found + (a[FIRST + q],)
    return found


# Sums over rows


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _add12(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11,
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11,
):  # fmt: skip
    return (
        a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5,
        a6 + b6, a7 + b7, a8 + b8, a9 + b9, a10 + b10, a11 + b11,
    )  # fmt: skip


@triton.jit
def _sums(a):
    """Sums over rows of each tile, padded with zeros; one reduction, since each costs barriers."""
    if len(a) == 1:
        return (tl.sum(a[0], 0, keep_dims=True),)
    elif len(a) == 2:
        return tl.reduce(a, 0, _add2, keep_dims=True)
    elif len(a) == 3:
        return tl.reduce(a, 0, _add3, keep_dims=True)
    elif len(a) == 4:
        return tl.reduce(a, 0, _add4, keep_dims=True)
    elif len(a) <= 8:
        return tl.reduce(a + _fill(tl.zeros_like(a[0]), 8 - len(a)), 0, _add8, keep_dims=True)
    else:
        return tl.reduce(a + _fill(tl.zeros_like(a[0]), 12 - len(a)), 0, _add12, keep_dims=True)


@triton.jit
def _sums_in_memory(
    a, mean, n, cols, inside, H: tl.constexpr, GATES: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    """`_sums` of rows in memory less a mean, or of their squares, tile by tile."""
    totals = _fill(tl.zeros((ROWS, UNITS), tl.float32), GATES)
    for start in range(0, n, ROWS):
        lines = start + tl.arange(0, ROWS)[:, None]
        mask = inside & (lines < n)
        x = _less(_read_gates(a, _at(lines, cols, H, GATES), mask, H, GATES), mean, mask)
        if SQUARED:
            x = _times(x, x)
        totals = _plus(totals, x)
    return _sums(totals)


# Statistics


@triton.jit
def _factors(var, spread, EPS: tl.constexpr):
    found = ()
    for q in tl.static_range(len(var)):
        found = found + (tl.rsqrt(var[q] * spread + EPS),)
    return found


@triton.jit
def _vector(
    table, slot: tl.constexpr, at, inside, H: tl.constexpr, GATES: tl.constexpr,
    WIDE_ALIGN: tl.constexpr, THERE: tl.constexpr, OTHERWISE: tl.constexpr,
):  # fmt: skip
    """A vector of the call, gate by gate, or a constant if absent."""
    if THERE:
        return _read_gates(_address(table, slot, tl.float32, WIDE_ALIGN), at, inside, H, GATES)
    else:
        return _fill(OTHERWISE, GATES)


@triton.jit
def _statistics(
    table, mean: tl.constexpr, var: tl.constexpr, a, tiles, at, n, cols, inside, mask, first,
    H: tl.constexpr, GATES: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
    MANY: tl.constexpr, PLACE: tl.constexpr, EPS: tl.constexpr, CORRECTION: tl.constexpr,
    CENTRED: tl.constexpr, WIDE_ALIGN: tl.constexpr,
):  # fmt: skip
    """Means and reciprocal deviations of a step at a place; stores batch statistics.

    Rows are read from memory at ``a`` if MANY, otherwise they are ``tiles``. ``mean`` and ``var``
    are slots, ``at`` is the offset of the step. CENTRED: means are zero, and not stored.
    """
    if PLACE == 2:
        means = _fill(0.0, GATES)
        if not CENTRED:
            of_means = _address(table, mean, tl.float32, WIDE_ALIGN)
            there = _read_gates(of_means, at, first, H, GATES)
            if MANY:
                sums = _sums_in_memory(a, means, n, cols, inside, H, GATES, ROWS, UNITS, False)
            else:
                sums = _sums(tiles)
            means = _over(_part(sums, 0, GATES), n)
            _write_gates(of_means, at, first, H, _plus(there, means))
        if MANY:
            squares = _sums_in_memory(a, means, n, cols, inside, H, GATES, ROWS, UNITS, True)
        else:
            tiles = _less(tiles, means, mask)
            squares = _sums(_times(tiles, tiles))
        found = _over(_part(squares, 0, GATES), n)
        _write_gates(_address(table, var, tl.float32, WIDE_ALIGN), at, first, H, found)
        return means, _factors(found, n / (n - CORRECTION), EPS)
    else:
        return _kept_statistics(
            table, mean, var, at, n, inside, H, GATES, PLACE, EPS, CORRECTION, CENTRED, WIDE_ALIGN
        )


@triton.jit
def _kept_statistics(
    table, mean: tl.constexpr, var: tl.constexpr, at, n, inside, H: tl.constexpr,
    GATES: tl.constexpr, PLACE: tl.constexpr, EPS: tl.constexpr, CORRECTION: tl.constexpr,
    CENTRED: tl.constexpr, WIDE_ALIGN: tl.constexpr,
):  # fmt: skip
    means, factors = _fill(0.0, GATES), _fill(1.0, GATES)
    if PLACE:
        variances = _address(table, var, tl.float32, WIDE_ALIGN)
        spread = n / (n - CORRECTION) if PLACE == 2 else 1.0
        factors = _factors(_read_gates(variances, at, inside, H, GATES), spread, EPS)
        if not (PLACE == 2 and CENTRED):
            known = _address(table, mean, tl.float32, WIDE_ALIGN)
            means = _read_gates(known, at, inside, H, GATES)
    return means, factors


@triton.jit
def _normalised(a, mean, factor):
    found = ()
    for q in tl.static_range(len(a)):
        found = found + ((a[q] - mean[q]) * factor[q],)
    return found


@triton.jit
def _through(
    d, a, factor, gain, sums, n, PLACE: tl.constexpr, CORRECTION: tl.constexpr
):  # fmt: skip
    """Gradient before normalisation, from the gradient d of the normalised tile a times its gain.

    ``factor``: reciprocal deviations; ``sums``: sums over rows of d and of d times a.
    """
    if PLACE == 2:
        d = d - sums[0] / n - a * (sums[1] / (n - CORRECTION))
    return d * (factor[0] * gain[0])


@triton.jit
def _through_gates(
    d, a, factor, gain, sums, scaled, n, PLACE: tl.constexpr, CORRECTION: tl.constexpr
):  # fmt: skip
    found = ()
    for q in tl.static_range(len(d)):
        x = _through(
            d[q], a[q], (factor[q],), (gain[q],), (sums[q], scaled[q]), n, PLACE, CORRECTION
        )
        found = found + (x,)
    return found


@triton.jit
def _accumulate(
    table, slot: tl.constexpr, cols, first, H: tl.constexpr, WIDE_ALIGN: tl.constexpr, a
):  # fmt: skip
    """Add to a vector of the call; in every step, the same program owns the units."""
    to = _address(table, slot, tl.float32, WIDE_ALIGN)
    _write_gates(to, cols, first, H, _plus(_read_gates(to, cols, first, H, len(a)), a))


# Forward steps. Row k of `product` is R h' of example k; row k of `operand` receives h for the next
# product. The step has n rows from `row` on (PACKED: read from the table); `step` is its index
# among the steps with statistics in the table.


@triton.jit(do_not_specialize=["row", "step", "n"])
def lstm_forward(
    table, product, operand, row, step, n,
    H: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, MANY: tl.constexpr,
    KIND: tl.constexpr, KIND_ALIGN: tl.constexpr, WIDE_ALIGN: tl.constexpr, BIASED: tl.constexpr,
    PACKED: tl.constexpr, INPUT: tl.constexpr, RECURRENT: tl.constexpr, LAST: tl.constexpr,
    INPUT_EPS: tl.constexpr, RECURRENT_EPS: tl.constexpr, LAST_EPS: tl.constexpr,
    CORRECTION: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """LSTM step, gates i, f, g, o."""
    row, n = _step(table, row, step, n, PACKED)
    lines, cols, inside, mask = _tile(n, H, ROWS, UNITS)
    first = inside & (lines == 0)
    at = step * (4 * H) + cols
    v = _address(table, V, KIND, KIND_ALIGN) + row * (4 * H)
    c_state = _address(table, C, tl.float32, WIDE_ALIGN)
    h_state = _address(table, H_STATE, tl.float32, WIDE_ALIGN)
    out = _address(table, OUT, KIND, KIND_ALIGN) + row * H
    kept, c_rows = v, c_state
    if SAVE:
        kept = _address(table, U, KIND, KIND_ALIGN) + row * (4 * H)
        c_rows = _address(table, C_ROWS, tl.float32, WIDE_ALIGN) + row * H
    tiles_v, tiles_u = (), ()
    if not MANY:
        tiles_u = _read_gates(product, _at(lines, cols, H, 4), mask, H, 4)
        tiles_v = _read_gates(v, _at(lines, cols, H, 4), mask, H, 4)
        c = _read(c_state, lines * H + cols, mask)
    bias = _vector(table, BIAS, cols, inside, H, 4, WIDE_ALIGN, BIASED, 0.0)
    gain_v = _vector(table, GAIN_INPUT, cols, inside, H, 4, WIDE_ALIGN, INPUT, 1.0)
    gain_u = _vector(table, GAIN_RECURRENT, cols, inside, H, 4, WIDE_ALIGN, RECURRENT, 1.0)
    gain_c = _vector(table, GAIN_OUT, cols, inside, H, 1, WIDE_ALIGN, LAST, 1.0)
    shift_c = _vector(table, SHIFT_OUT, cols, inside, H, 1, WIDE_ALIGN, LAST, 0.0)
    mean_v, factor_v = _statistics(
        table, MEAN_INPUT, VAR_INPUT, v, tiles_v, at, n, cols, inside, mask, first, H, 4, ROWS,
        UNITS, MANY, INPUT, INPUT_EPS, CORRECTION, True, WIDE_ALIGN,
    )  # fmt: skip
    mean_u, factor_u = _statistics(
        table, MEAN_RECURRENT, VAR_RECURRENT, product, tiles_u, at, n, cols, inside, mask, first,
        H, 4, ROWS, UNITS, MANY, RECURRENT, RECURRENT_EPS, CORRECTION, False, WIDE_ALIGN,
    )  # fmt: skip
    factor_v, factor_u = _times(factor_v, gain_v), _times(factor_u, gain_u)
    tiles_c = ()
    if MANY:
        for start in range(0, n, ROWS):
            there = inside & (start + lines < n)
            wide, narrow = _at(start + lines, cols, H, 4), (start + lines) * H + cols
            c, o = _lstm_gates(
                _read_gates(v, wide, there, H, 4), _read_gates(product, wide, there, H, 4),
                _read(c_state, narrow, there), mean_v, factor_v, mean_u, factor_u, bias,
                kept, wide, c_rows, narrow, there, H, RECURRENT, SAVE,
            )  # fmt: skip
            _write(c_state, narrow, there, c)
            _write(h_state, narrow, there, o)  # until h takes its place
        tl.debug_barrier()
    else:
        c, o = _lstm_gates(
            tiles_v, tiles_u, c, mean_v, factor_v, mean_u, factor_u, bias,
            kept, _at(lines, cols, H, 4), c_rows, lines * H + cols, mask, H, RECURRENT, SAVE,
        )  # fmt: skip
        _write(c_state, lines * H + cols, mask, c)
        tiles_c = (tl.where(mask, c, 0.0),)
    mean_c, factor_c = _statistics(
        table, MEAN_OUT, VAR_OUT, c_state, tiles_c, step * H + cols, n, cols, inside, mask, first,
        H, 1, ROWS, UNITS, MANY, LAST, LAST_EPS, CORRECTION, False, WIDE_ALIGN,
    )  # fmt: skip
    factor_c = _times(factor_c, gain_c)
    if MANY:
        for start in range(0, n, ROWS):
            narrow, there = (start + lines) * H + cols, inside & (start + lines < n)
            shown = (_read(c_state, narrow, there) - mean_c[0]) * factor_c[0] + shift_c[0]
            h = _read(h_state, narrow, there) * _tanh(shown)
            _write_state(operand, h_state, out, narrow, there, h)
    else:
        h = o * _tanh((c - mean_c[0]) * factor_c[0] + shift_c[0])
        _write_state(operand, h_state, out, lines * H + cols, mask, h)


@triton.jit
def _lstm_gates(
    v, u, c, mean_v, factor_v, mean_u, factor_u, bias, kept, wide, c_rows, narrow, mask,
    H: tl.constexpr, RECURRENT: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Next cell state of a tile, and its output gate; stores tensors for the backward pass."""
    _keep(kept, wide, mask, H, u, mean_u, RECURRENT, SAVE)
    a, b = _normalised(v, mean_v, factor_v), _normalised(u, mean_u, factor_u)
    p = _plus(_plus(a, b), bias)
    c = _next_cell(_sigmoid(p[0]), _sigmoid(p[1]), _tanh(p[2]), c)
    if SAVE:
        _write(c_rows, narrow, mask, c)
    return c, _sigmoid(p[3])


@triton.jit
def _keep(
    kept, at, mask, H: tl.constexpr, u, mean, PLACE: tl.constexpr, SAVE: tl.constexpr
):  # fmt: skip
    if SAVE:
        if PLACE == 2:
            u = _less(u, mean, mask)
        _write_gates(kept, at, mask, H, u)


@triton.jit
def _write_state(operand, h_state, out, at, mask, h):
    _write(operand, at, mask, h)
    _write(h_state, at, mask, h)
    _write(out, at, mask, h)


@triton.jit(do_not_specialize=["row", "step", "n"])
def gru_forward(
    table, product, operand, row, step, n,
    H: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, MANY: tl.constexpr,
    KIND: tl.constexpr, KIND_ALIGN: tl.constexpr, WIDE_ALIGN: tl.constexpr, BIASED: tl.constexpr,
    PACKED: tl.constexpr, INPUT: tl.constexpr, RECURRENT: tl.constexpr, INPUT_EPS: tl.constexpr,
    RECURRENT_EPS: tl.constexpr, CORRECTION: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """GRU step, gates r, z, n."""
    row, n = _step(table, row, step, n, PACKED)
    lines, cols, inside, mask = _tile(n, H, ROWS, UNITS)
    first = inside & (lines == 0)
    at = step * (3 * H) + cols
    v = _address(table, V, KIND, KIND_ALIGN) + row * (3 * H)
    h_state = _address(table, H_STATE, tl.float32, WIDE_ALIGN)
    out = _address(table, OUT, KIND, KIND_ALIGN) + row * H
    kept = v
    if SAVE:
        kept = _address(table, U, KIND, KIND_ALIGN) + row * (3 * H)
    tiles_v, tiles_u = (), ()
    if not MANY:
        tiles_u = _read_gates(product, _at(lines, cols, H, 3), mask, H, 3)
        tiles_v = _read_gates(v, _at(lines, cols, H, 3), mask, H, 3)
        h = _read(h_state, lines * H + cols, mask)
    bias = _vector(table, BIAS, cols, inside, H, 3, WIDE_ALIGN, BIASED, 0.0)
    bias_hn = _vector(table, BIAS_HN, cols, inside, H, 1, WIDE_ALIGN, BIASED, 0.0)
    gain_v = _vector(table, GAIN_INPUT, cols, inside, H, 3, WIDE_ALIGN, INPUT, 1.0)
    gain_u = _vector(table, GAIN_RECURRENT, cols, inside, H, 3, WIDE_ALIGN, RECURRENT, 1.0)
    mean_v, factor_v = _statistics(
        table, MEAN_INPUT, VAR_INPUT, v, tiles_v, at, n, cols, inside, mask, first, H, 3, ROWS,
        UNITS, MANY, INPUT, INPUT_EPS, CORRECTION, True, WIDE_ALIGN,
    )  # fmt: skip
    mean_u, factor_u = _statistics(
        table, MEAN_RECURRENT, VAR_RECURRENT, product, tiles_u, at, n, cols, inside, mask, first,
        H, 3, ROWS, UNITS, MANY, RECURRENT, RECURRENT_EPS, CORRECTION, False, WIDE_ALIGN,
    )  # fmt: skip
    factor_v, factor_u = _times(factor_v, gain_v), _times(factor_u, gain_u)
    if MANY:
        for start in range(0, n, ROWS):
            there = inside & (start + lines < n)
            wide, narrow = _at(start + lines, cols, H, 3), (start + lines) * H + cols
            h = _gru_gates(
                _read_gates(v, wide, there, H, 3), _read_gates(product, wide, there, H, 3),
                _read(h_state, narrow, there), mean_v, factor_v, mean_u, factor_u, bias, bias_hn,
                kept, wide, there, H, RECURRENT, SAVE,
            )  # fmt: skip
            _write_state(operand, h_state, out, narrow, there, h)
    else:
        h = _gru_gates(
            tiles_v, tiles_u, h, mean_v, factor_v, mean_u, factor_u, bias, bias_hn,
            kept, _at(lines, cols, H, 3), mask, H, RECURRENT, SAVE,
        )  # fmt: skip
        _write_state(operand, h_state, out, lines * H + cols, mask, h)


@triton.jit
def _gru_gates(
    v, u, h, mean_v, factor_v, mean_u, factor_u, bias, bias_hn, kept, at, mask,
    H: tl.constexpr, RECURRENT: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Next state of a tile; stores tensors for the backward pass."""
    _keep(kept, at, mask, H, u, mean_u, RECURRENT, SAVE)
    a, b = _normalised(v, mean_v, factor_v), _normalised(u, mean_u, factor_u)
    a = _plus(a, bias)
    candidate = _tanh(a[2] + _sigmoid(a[0] + b[0]) * (b[2] + bias_hn[0]))
    return candidate + _sigmoid(a[1] + b[1]) * (h - candidate)


@triton.jit(do_not_specialize=["row", "step", "n"])
def rnn_forward(
    table, product, operand, row, step, n,
    H: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, MANY: tl.constexpr,
    KIND: tl.constexpr, KIND_ALIGN: tl.constexpr, WIDE_ALIGN: tl.constexpr, BIASED: tl.constexpr,
    PACKED: tl.constexpr, LAST: tl.constexpr, LAST_EPS: tl.constexpr, CORRECTION: tl.constexpr,
    SAVE: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Simple RNN step; the sum of both terms is normalised and saved."""
    row, n = _step(table, row, step, n, PACKED)
    lines, cols, inside, mask = _tile(n, H, ROWS, UNITS)
    first = inside & (lines == 0)
    v = _address(table, V, KIND, KIND_ALIGN) + row * H
    h_state = _address(table, H_STATE, tl.float32, WIDE_ALIGN)
    out = _address(table, OUT, KIND, KIND_ALIGN) + row * H
    kept = v
    if SAVE:
        kept = _address(table, U, KIND, KIND_ALIGN) + row * H
    tiles = ()
    if MANY:
        for start in range(0, n, ROWS):
            at, there = (start + lines) * H + cols, inside & (start + lines < n)
            _write(product, at, there, _read(product, at, there) + _read(v, at, there))
        tl.debug_barrier()
    else:
        a = _read(product, lines * H + cols, mask) + _read(v, lines * H + cols, mask)
        tiles = (a,)
    bias = _vector(table, BIAS, cols, inside, H, 1, WIDE_ALIGN, BIASED, 0.0)
    gain = _vector(table, GAIN_OUT, cols, inside, H, 1, WIDE_ALIGN, LAST, 1.0)
    mean, factor = _statistics(
        table, MEAN_OUT, VAR_OUT, product, tiles, step * H + cols, n, cols, inside, mask, first,
        H, 1, ROWS, UNITS, MANY, LAST, LAST_EPS, CORRECTION, False, WIDE_ALIGN,
    )  # fmt: skip
    factor = _times(factor, gain)
    if MANY:
        for start in range(0, n, ROWS):
            at, there = (start + lines) * H + cols, inside & (start + lines < n)
            a = _read(product, at, there)
            _keep(kept, at, there, H, (a,), mean, LAST, SAVE)
            h = _activated((a - mean[0]) * factor[0] + bias[0], RELU)
            _write_state(operand, h_state, out, at, there, h)
    else:
        _keep(kept, lines * H + cols, mask, H, (a,), mean, LAST, SAVE)
        h = _activated((a - mean[0]) * factor[0] + bias[0], RELU)
        _write_state(operand, h_state, out, lines * H + cols, mask, h)


@triton.jit
def _activated(a, RELU: tl.constexpr):
    # Propagates NaN.
    return tl.where(a <= 0.0, 0.0, a) if RELU else _tanh(a)


# Backward steps. `gradient` (examples, H) is the gradient of h, replaced by the product after the
# step; the part that bypasses the product and the gradient of the cell state are replaced in place.
# `operand` receives du. Gradients of vectors are accumulated in the memory of the call.


@triton.jit(do_not_specialize=["row", "step", "n"])
def lstm_backward(
    table, gradient, operand, row, step, n,
    H: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, MANY: tl.constexpr,
    KIND: tl.constexpr, KIND_ALIGN: tl.constexpr, WIDE_ALIGN: tl.constexpr, BIASED: tl.constexpr,
    PACKED: tl.constexpr, INPUT: tl.constexpr, RECURRENT: tl.constexpr, LAST: tl.constexpr,
    INPUT_EPS: tl.constexpr, RECURRENT_EPS: tl.constexpr, LAST_EPS: tl.constexpr,
    CORRECTION: tl.constexpr, HAS_DOUT: tl.constexpr,
):  # fmt: skip
    """Backward of an LSTM step."""
    row, n = _step(table, row, step, n, PACKED)
    lines, cols, inside, mask = _tile(n, H, ROWS, UNITS)
    at = step * (4 * H) + cols
    v = _address(table, V, KIND, KIND_ALIGN) + row * (4 * H)
    dc_state = _address(table, C, tl.float32, WIDE_ALIGN)
    passed = _address(table, PASSED, tl.float32, WIDE_ALIGN)
    dout = v
    if HAS_DOUT:
        dout = _address(table, OUT, KIND, KIND_ALIGN) + row * H
    memory = (
        v,
        _address(table, U, KIND, KIND_ALIGN) + row * (4 * H),
        _address(table, C_ROWS, tl.float32, WIDE_ALIGN) + row * H,
        _address(table, C_PREV, tl.float32, WIDE_ALIGN) + row * H,
        dc_state,
        gradient,
        passed,
        dout,
    )
    if not MANY:
        tiles = _read_lstm(memory, lines, cols, mask, H, HAS_DOUT)
    mean_v, factor_v = _kept_statistics(
        table, MEAN_INPUT, VAR_INPUT, at, n, inside, H, 4, INPUT, INPUT_EPS, CORRECTION, True,
        WIDE_ALIGN,
    )  # fmt: skip
    mean_u, factor_u = _kept_statistics(
        table, MEAN_RECURRENT, VAR_RECURRENT, at, n, inside, H, 4, RECURRENT, RECURRENT_EPS,
        CORRECTION, True, WIDE_ALIGN,
    )  # fmt: skip
    mean_c, factor_c = _kept_statistics(
        table, MEAN_OUT, VAR_OUT, step * H + cols, n, inside, H, 1, LAST, LAST_EPS, CORRECTION,
        False, WIDE_ALIGN,
    )  # fmt: skip
    gain_v = _vector(table, GAIN_INPUT, cols, inside, H, 4, WIDE_ALIGN, INPUT, 1.0)
    gain_u = _vector(table, GAIN_RECURRENT, cols, inside, H, 4, WIDE_ALIGN, RECURRENT, 1.0)
    bias = _vector(table, BIAS, cols, inside, H, 4, WIDE_ALIGN, BIASED, 0.0)
    gain_c = _vector(table, GAIN_OUT, cols, inside, H, 1, WIDE_ALIGN, LAST, 1.0)
    shift_c = _vector(table, SHIFT_OUT, cols, inside, H, 1, WIDE_ALIGN, LAST, 0.0)
    of_c = (mean_c, factor_c, gain_c, shift_c)
    places = (mean_v, factor_v, gain_v, mean_u, factor_u, gain_u, bias)

    sums_c = (0.0, 0.0)
    if MANY:
        if LAST:
            partial = _fill(tl.zeros((ROWS, UNITS), tl.float32), 2)
            for start in range(0, n, ROWS):
                there = inside & (start + lines < n)
                tiles = _read_lstm(memory, start + lines, cols, there, H, HAS_DOUT)
                _, _, _, _, dm, shown = _lstm_out_back(tiles, places, of_c)
                partial = _plus(partial, (dm, dm * shown))
            sums_c = _sums(partial)
        count: tl.constexpr = 4 + (4 if INPUT else 0) + (4 if RECURRENT else 0)
        sums = _fill(tl.zeros((ROWS, UNITS), tl.float32), count)
        for start in range(0, n, ROWS):
            there = inside & (start + lines < n)
            tiles = _read_lstm(memory, start + lines, cols, there, H, HAS_DOUT)
            found = _lstm_out_back(tiles, places, of_c)
            dp, _ = _lstm_gates_back(tiles, found, of_c, sums_c, n, there, LAST, CORRECTION)
            sums = _plus(sums, _summed(dp, dp, found[0], found[1], INPUT, RECURRENT))
        sums = _sums(sums)
        for start in range(0, n, ROWS):
            there = inside & (start + lines < n)
            tiles = _read_lstm(memory, start + lines, cols, there, H, HAS_DOUT)
            found = _lstm_out_back(tiles, places, of_c)
            dp, dc = _lstm_gates_back(tiles, found, of_c, sums_c, n, there, LAST, CORRECTION)
            _write(dc_state, (start + lines) * H + cols, there, dc)
            _write(passed, (start + lines) * H + cols, there, tl.zeros_like(dc))
            _write_back(
                table, operand, row, start + lines, cols, there, dp, dp, found[0], found[1],
                places, sums, n, H, 4, KIND, KIND_ALIGN, INPUT, RECURRENT, CORRECTION,
            )  # fmt: skip
    else:
        found = _lstm_out_back(tiles, places, of_c)
        if LAST:
            sums_c = _sums((found[4], found[4] * found[5]))
        dp, dc = _lstm_gates_back(tiles, found, of_c, sums_c, n, mask, LAST, CORRECTION)
        sums = _sums(_summed(dp, dp, found[0], found[1], INPUT, RECURRENT))
        _write(dc_state, lines * H + cols, mask, dc)
        _write(passed, lines * H + cols, mask, tl.zeros_like(dc))
        _write_back(
            table, operand, row, lines, cols, mask, dp, dp, found[0], found[1],
            places, sums, n, H, 4, KIND, KIND_ALIGN, INPUT, RECURRENT, CORRECTION,
        )  # fmt: skip

    first = inside & (lines == 0)
    _accumulate_terms(table, cols, first, sums, H, 4, WIDE_ALIGN, BIASED, INPUT, RECURRENT)
    if LAST:
        _accumulate(table, D_SHIFT_OUT, cols, first, H, WIDE_ALIGN, _part(sums_c, 0, 1))
        _accumulate(table, D_GAIN_OUT, cols, first, H, WIDE_ALIGN, _part(sums_c, 1, 1))


@triton.jit
def _incoming(gradient, passed, dout, at, mask, HAS_DOUT: tl.constexpr):
    d = _read(gradient, at, mask) + _read(passed, at, mask)
    if HAS_DOUT:
        d += _read(dout, at, mask)
    return d


@triton.jit
def _read_lstm(memory, lines, cols, mask, H: tl.constexpr, HAS_DOUT: tl.constexpr):
    """Load v, u, the gradient of h, c, c before the step, and the gradient of c."""
    v, u, c_rows, c_prev, dc_state, gradient, passed, dout = memory
    wide, narrow = _at(lines, cols, H, 4), lines * H + cols
    return (
        _read_gates(v, wide, mask, H, 4),
        _read_gates(u, wide, mask, H, 4),
        _incoming(gradient, passed, dout, narrow, mask, HAS_DOUT),
        _read(c_rows, narrow, mask),
        _read(c_prev, narrow, mask),
        _read(dc_state, narrow, mask),
    )


@triton.jit
def _lstm_out_back(tiles, places, of_c):
    """Normalised terms, pre-activations, gradients of o and of the shown c; normalised c."""
    v, u, d, c, _, _ = tiles
    mean_v, factor_v, gain_v, mean_u, factor_u, gain_u, bias = places
    mean_c, factor_c, gain_c, shift_c = of_c
    a, b = _normalised(v, mean_v, factor_v), _normalised(u, mean_u, factor_u)
    p = _plus(_plus(_times(a, gain_v), _times(b, gain_u)), bias)
    shown = (c - mean_c[0]) * factor_c[0]
    dp3, dm = _output_back(d, _sigmoid(p[3]), _tanh(gain_c[0] * shown + shift_c[0]))
    return a, b, p, dp3, dm, shown


@triton.jit
def _lstm_gates_back(
    tiles, found, of_c, sums_c, n, mask, LAST: tl.constexpr, CORRECTION: tl.constexpr
):  # fmt: skip
    _, _, _, _, c_before, dc = tiles
    _, _, p, dp3, dm, shown = found
    _, factor_c, gain_c, _ = of_c
    through = _through(dm, shown, factor_c, gain_c, sums_c, n, LAST, CORRECTION)
    # Masked rows would otherwise receive the means.
    dc = tl.where(mask, dc + through, 0.0)
    dp0, dp2 = _input_back(dc, _sigmoid(p[0]), _tanh(p[2]))
    dp1, dc = _forget_back(dc, _sigmoid(p[1]), c_before)
    return (dp0, dp1, dp2, dp3), dc


@triton.jit
def _summed(dv, du, a, b, INPUT: tl.constexpr, RECURRENT: tl.constexpr):
    """Summands over rows: for biases (four tiles), input gains and recurrent gains."""
    found = dv
    if len(dv) == 3:  # a GRU's bias_hn
        found = found + (du[2],)
    if INPUT:
        found = found + _times(dv, a)
    if RECURRENT:
        found = found + _times(du, b)
    return found


@triton.jit
def _write_back(
    table, operand, row, lines, cols, mask, d_v, d_u, a, b, places, sums, n, H: tl.constexpr,
    GATES: tl.constexpr, KIND: tl.constexpr, KIND_ALIGN: tl.constexpr, INPUT: tl.constexpr,
    RECURRENT: tl.constexpr, CORRECTION: tl.constexpr,
):  # fmt: skip
    """Backpropagate from normalised products times gains to both products; stores gradients."""
    _, factor_v, gain_v, _, factor_u, gain_u, _ = places
    at = _at(lines, cols, H, GATES)
    sums_v = _part(sums, 0, GATES)
    sums_u = sums_v
    if GATES == 3:
        sums_u = (sums[0], sums[1], sums[3])
    scaled_v, scaled_u = sums_v, sums_u
    if INPUT:
        scaled_v = _part(sums, 4, GATES)
    if RECURRENT:
        scaled_u = _part(sums, 4 + (GATES if INPUT else 0), GATES)
    d_v = _through_gates(d_v, a, factor_v, gain_v, sums_v, scaled_v, n, INPUT, CORRECTION)
    d_u = _through_gates(d_u, b, factor_u, gain_u, sums_u, scaled_u, n, RECURRENT, CORRECTION)
    _write_gates(operand, at, mask, H, d_u)
    row *= GATES * H
    _write_gates(_address(table, DU, KIND, KIND_ALIGN) + row, at, mask, H, d_u)
    _write_gates(_address(table, DV, KIND, KIND_ALIGN) + row, at, mask, H, d_v)


@triton.jit
def _accumulate_terms(
    table, cols, first, sums, H: tl.constexpr, GATES: tl.constexpr, WIDE_ALIGN: tl.constexpr,
    BIASED: tl.constexpr, INPUT: tl.constexpr, RECURRENT: tl.constexpr,
):  # fmt: skip
    if BIASED:
        _accumulate(table, D_BIAS, cols, first, H, WIDE_ALIGN, _part(sums, 0, GATES))
        if GATES == 3:
            _accumulate(table, D_BIAS_HN, cols, first, H, WIDE_ALIGN, _part(sums, 3, 1))
    if INPUT:
        _accumulate(table, D_GAIN_INPUT, cols, first, H, WIDE_ALIGN, _part(sums, 4, GATES))
    if RECURRENT:
        gains = _part(sums, 4 + (GATES if INPUT else 0), GATES)
        _accumulate(table, D_GAIN_RECURRENT, cols, first, H, WIDE_ALIGN, gains)


@triton.jit(do_not_specialize=["row", "step", "n"])
def gru_backward(
    table, gradient, operand, row, step, n,
    H: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, MANY: tl.constexpr,
    KIND: tl.constexpr, KIND_ALIGN: tl.constexpr, WIDE_ALIGN: tl.constexpr, BIASED: tl.constexpr,
    PACKED: tl.constexpr, INPUT: tl.constexpr, RECURRENT: tl.constexpr, INPUT_EPS: tl.constexpr,
    RECURRENT_EPS: tl.constexpr, CORRECTION: tl.constexpr, HAS_DOUT: tl.constexpr,
):  # fmt: skip
    """Backward of a GRU step."""
    row, n = _step(table, row, step, n, PACKED)
    lines, cols, inside, mask = _tile(n, H, ROWS, UNITS)
    at = step * (3 * H) + cols
    v = _address(table, V, KIND, KIND_ALIGN) + row * (3 * H)
    passed = _address(table, PASSED, tl.float32, WIDE_ALIGN)
    dout = v
    if HAS_DOUT:
        dout = _address(table, OUT, KIND, KIND_ALIGN) + row * H
    u = _address(table, U, KIND, KIND_ALIGN) + row * (3 * H)
    h_prev = _address(table, H_PREV, KIND, KIND_ALIGN) + row * H
    memory = (v, u, h_prev, gradient, passed, dout)
    if not MANY:
        tiles = _read_gru(memory, lines, cols, mask, H, HAS_DOUT)
    mean_v, factor_v = _kept_statistics(
        table, MEAN_INPUT, VAR_INPUT, at, n, inside, H, 3, INPUT, INPUT_EPS, CORRECTION, True,
        WIDE_ALIGN,
    )  # fmt: skip
    mean_u, factor_u = _kept_statistics(
        table, MEAN_RECURRENT, VAR_RECURRENT, at, n, inside, H, 3, RECURRENT, RECURRENT_EPS,
        CORRECTION, True, WIDE_ALIGN,
    )  # fmt: skip
    gain_v = _vector(table, GAIN_INPUT, cols, inside, H, 3, WIDE_ALIGN, INPUT, 1.0)
    gain_u = _vector(table, GAIN_RECURRENT, cols, inside, H, 3, WIDE_ALIGN, RECURRENT, 1.0)
    bias = _vector(table, BIAS, cols, inside, H, 3, WIDE_ALIGN, BIASED, 0.0)
    bias_hn = _vector(table, BIAS_HN, cols, inside, H, 1, WIDE_ALIGN, BIASED, 0.0)
    places = (mean_v, factor_v, gain_v, mean_u, factor_u, gain_u, bias)

    if MANY:
        count: tl.constexpr = 4 + (3 if INPUT else 0) + (3 if RECURRENT else 0)
        sums = _fill(tl.zeros((ROWS, UNITS), tl.float32), count)
        for start in range(0, n, ROWS):
            there = inside & (start + lines < n)
            tiles = _read_gru(memory, start + lines, cols, there, H, HAS_DOUT)
            a, b, dv, du, _ = _gru_gates_back(tiles, places, bias_hn)
            sums = _plus(sums, _summed(dv, du, a, b, INPUT, RECURRENT))
        sums = _sums(sums)
        for start in range(0, n, ROWS):
            there = inside & (start + lines < n)
            tiles = _read_gru(memory, start + lines, cols, there, H, HAS_DOUT)
            a, b, dv, du, past = _gru_gates_back(tiles, places, bias_hn)
            _write(passed, (start + lines) * H + cols, there, past)
            _write_back(
                table, operand, row, start + lines, cols, there, dv, du, a, b, places, sums, n,
                H, 3, KIND, KIND_ALIGN, INPUT, RECURRENT, CORRECTION,
            )  # fmt: skip
    else:
        a, b, dv, du, past = _gru_gates_back(tiles, places, bias_hn)
        sums = _sums(_summed(dv, du, a, b, INPUT, RECURRENT))
        _write(passed, lines * H + cols, mask, past)
        _write_back(
            table, operand, row, lines, cols, mask, dv, du, a, b, places, sums, n,
            H, 3, KIND, KIND_ALIGN, INPUT, RECURRENT, CORRECTION,
        )  # fmt: skip

    first = inside & (lines == 0)
    _accumulate_terms(table, cols, first, sums, H, 3, WIDE_ALIGN, BIASED, INPUT, RECURRENT)


@triton.jit
def _read_gru(memory, lines, cols, mask, H: tl.constexpr, HAS_DOUT: tl.constexpr):
    v, u, h_prev, gradient, passed, dout = memory
    wide, narrow = _at(lines, cols, H, 3), lines * H + cols
    return (
        _read_gates(v, wide, mask, H, 3),
        _read_gates(u, wide, mask, H, 3),
        _incoming(gradient, passed, dout, narrow, mask, HAS_DOUT),
        _read(h_prev, narrow, mask),
    )


@triton.jit
def _gru_gates_back(tiles, places, bias_hn):
    """Normalised terms, their gradients times gains, and the part that bypasses the gates."""
    v, u, d, h = tiles
    mean_v, factor_v, gain_v, mean_u, factor_u, gain_u, bias = places
    a, b = _normalised(v, mean_v, factor_v), _normalised(u, mean_u, factor_u)
    x, y = _plus(_times(a, gain_v), bias), _times(b, gain_u)
    r, z = _sigmoid(x[0] + y[0]), _sigmoid(x[1] + y[1])
    w = y[2] + bias_hn[0]
    candidate = _tanh(x[2] + r * w)
    dn = d * (1.0 - z) * (1.0 - candidate * candidate)
    dr = dn * w * r * (1.0 - r)
    dz = d * (h - candidate) * z * (1.0 - z)
    return a, b, (dr, dz, dn), (dr, dz, dn * r), d * z


@triton.jit(do_not_specialize=["row", "step", "n"])
def rnn_backward(
    table, gradient, operand, row, step, n,
    H: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, MANY: tl.constexpr,
    KIND: tl.constexpr, KIND_ALIGN: tl.constexpr, WIDE_ALIGN: tl.constexpr, BIASED: tl.constexpr,
    PACKED: tl.constexpr, LAST: tl.constexpr, LAST_EPS: tl.constexpr, CORRECTION: tl.constexpr,
    HAS_DOUT: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Backward of a simple RNN step."""
    row, n = _step(table, row, step, n, PACKED)
    lines, cols, inside, mask = _tile(n, H, ROWS, UNITS)
    a = _address(table, U, KIND, KIND_ALIGN) + row * H
    du = _address(table, DU, KIND, KIND_ALIGN) + row * H
    passed = _address(table, PASSED, tl.float32, WIDE_ALIGN)
    dout = a
    if HAS_DOUT:
        dout = _address(table, OUT, KIND, KIND_ALIGN) + row * H
    mean, factor = _kept_statistics(
        table, MEAN_OUT, VAR_OUT, step * H + cols, n, inside, H, 1, LAST, LAST_EPS, CORRECTION,
        True, WIDE_ALIGN,
    )  # fmt: skip
    gain = _vector(table, GAIN_OUT, cols, inside, H, 1, WIDE_ALIGN, LAST, 1.0)
    bias = _vector(table, BIAS, cols, inside, H, 1, WIDE_ALIGN, BIASED, 0.0)
    vectors = (mean[0], factor[0], gain[0], bias[0])
    if MANY:
        sums = _fill(tl.zeros((ROWS, UNITS), tl.float32), 2)
        for start in range(0, n, ROWS):
            at, there = (start + lines) * H + cols, inside & (start + lines < n)
            d = _incoming(gradient, passed, dout, at, there, HAS_DOUT)
            d, x = _rnn_back(_read(a, at, there), d, vectors, RELU)
            sums = _plus(sums, (d, d * x))
        sums = _sums(sums)
        for start in range(0, n, ROWS):
            at, there = (start + lines) * H + cols, inside & (start + lines < n)
            d = _incoming(gradient, passed, dout, at, there, HAS_DOUT)
            d, x = _rnn_back(_read(a, at, there), d, vectors, RELU)
            d = _through(d, x, factor, gain, sums, n, LAST, CORRECTION)
            _write(operand, at, there, d)
            _write(du, at, there, d)
            _write(passed, at, there, tl.zeros_like(d))
    else:
        at = lines * H + cols
        d = _incoming(gradient, passed, dout, at, mask, HAS_DOUT)
        d, x = _rnn_back(_read(a, at, mask), d, vectors, RELU)
        sums = _sums((d, d * x))
        d = _through(d, x, factor, gain, sums, n, LAST, CORRECTION)
        _write(operand, at, mask, d)
        _write(du, at, mask, d)
        _write(passed, at, mask, tl.zeros_like(d))

    first = inside & (lines == 0)
    if BIASED:
        _accumulate(table, D_BIAS, cols, first, H, WIDE_ALIGN, _part(sums, 0, 1))
    if LAST:
        _accumulate(table, D_GAIN_OUT, cols, first, H, WIDE_ALIGN, _part(sums, 1, 1))


@triton.jit
def _rnn_back(a, d, vectors, RELU: tl.constexpr):
    """Gradient of the normalised sum times its gain, and the normalised sum."""
    mean, factor, gain, bias = vectors
    x = (a - mean) * factor
    p = x * gain + bias
    if RELU:
        d = tl.where(p <= 0.0, 0.0, d)
    else:
        h = _tanh(p)
        d *= 1.0 - h * h
    return d, x


# Between steps: rows less their means


@triton.jit(do_not_specialize=["n"])
def rows_less_means(
    a, sizes, out, means, n, width,
    ROWS: tl.constexpr, COLS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Subtract from rows a (n rows per step, width) their means over each step, (steps, width).

    Program (t, j) has some columns of step t. If PACKED, ``sizes`` has the first row and number of
    rows of each step. ``out`` may be a.
    """
    t = tl.program_id(0).to(tl.int64)
    first = t * n
    if PACKED:
        first = tl.load(sizes + 2 * t)
        n = tl.load(sizes + 2 * t + 1).to(tl.int32)
    lines = tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    inside = cols < width
    a += first * width
    out += first * width
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, n, ROWS):
        total += _read(a, (start + lines) * width + cols, inside & (start + lines < n))
    mean = tl.sum(total, 0, keep_dims=True) / n
    tl.store(means + t * width + cols, mean, mask=inside)
    for start in range(0, n, ROWS):
        at, there = (start + lines) * width + cols, inside & (start + lines < n)
        _write(out, at, there, _read(a, at, there) - mean)


__all__ = ["KINDS", "SLOTS", "STEPS"]

#: Step kernels by (cell, backward).
STEPS = {
    ("LSTM", False): lstm_forward,
    ("LSTM", True): lstm_backward,
    ("GRU", False): gru_forward,
    ("GRU", True): gru_backward,
    ("RNN_TANH", False): rnn_forward,
    ("RNN_TANH", True): rnn_backward,
    ("RNN_RELU", False): rnn_forward,
    ("RNN_RELU", True): rnn_backward,
}
