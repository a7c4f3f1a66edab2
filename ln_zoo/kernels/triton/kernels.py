"""Triton kernels of one time step of LSTM, GRU and RNN, forward and backward, and sums over rows.

One program per row, in float32 for products of any dtype (KIND); centred weights make rows of
products have mean 0. Addresses come from a table in device memory, so that a captured CUDA graph
serves different tensors. H and alignments are constants, for 128-bit accesses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Slots of the address table, by name; some differ between forward and backward pass.
SLOTS = (
    "v",
    "u",
    "c_rows",  # cell states after each step
    "stats",
    "bias",
    "bias_hn",
    "gain_input",
    "gain_recurrent",
    "gain_out",
    "shift_out",
    "c",  # an LSTM's cell state; backward: its gradient
    "h_or_work",  # the state h; backward: the work area
    "out",  # outputs; backward: their gradient
    "dropout",
    "zoneout_h",
    "zoneout_c",
    "reset",
    "sizes",  # first row and rows of each step, int64, of packed sequences
    "h_prev",  # backward only, as all that follow
    "c_prev",
    "du",
    "passed",  # the part of the gradient of h that bypasses the product
)

# In the order of SLOTS
(V, U, C_ROWS, STATS, BIAS, BIAS_HN, GAIN_INPUT, GAIN_RECURRENT, GAIN_OUT, SHIFT_OUT, C, H_OR_WORK,
 OUT, DROPOUT, ZONEOUT_H, ZONEOUT_C, RESET, SIZES, H_PREV, C_PREV, DU, PASSED) = (
    tl.constexpr(slot) for slot in range(len(SLOTS))
)  # fmt: skip


@triton.jit(do_not_specialize=[f"a{i}" for i in range(22)])
def write_table(
    table, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16, a17, a18, a19,
    a20, a21,
):  # fmt: skip
    """Fill the table of addresses; a launch can be captured, unlike a copy from the host."""
    tl.store(table + 0, a0.to(tl.int64))
    tl.store(table + 1, a1.to(tl.int64))
    tl.store(table + 2, a2.to(tl.int64))
    tl.store(table + 3, a3.to(tl.int64))
    tl.store(table + 4, a4.to(tl.int64))
    tl.store(table + 5, a5.to(tl.int64))
    tl.store(table + 6, a6.to(tl.int64))
    tl.store(table + 7, a7.to(tl.int64))
    tl.store(table + 8, a8.to(tl.int64))
    tl.store(table + 9, a9.to(tl.int64))
    tl.store(table + 10, a10.to(tl.int64))
    tl.store(table + 11, a11.to(tl.int64))
    tl.store(table + 12, a12.to(tl.int64))
    tl.store(table + 13, a13.to(tl.int64))
    tl.store(table + 14, a14.to(tl.int64))
    tl.store(table + 15, a15.to(tl.int64))
    tl.store(table + 16, a16.to(tl.int64))
    tl.store(table + 17, a17.to(tl.int64))
    tl.store(table + 18, a18.to(tl.int64))
    tl.store(table + 19, a19.to(tl.int64))
    tl.store(table + 20, a20.to(tl.int64))
    tl.store(table + 21, a21.to(tl.int64))


# Parts


@triton.jit
def _address(table, slot: tl.constexpr, kind: tl.constexpr, ALIGN: tl.constexpr):
    # The compiler cannot see the alignment, and would fall back to narrow accesses.
    return tl.multiple_of(tl.load(table + slot).to(tl.pointer_type(kind)), ALIGN)


@triton.jit
def _read(pointer, q: tl.constexpr, H: tl.constexpr, cols, mask):
    return tl.load(pointer + q * H + cols, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _write(pointer, q: tl.constexpr, H: tl.constexpr, cols, mask, a):
    tl.store(pointer + q * H + cols, a.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _read_gates(pointer, H: tl.constexpr, cols, mask, GATES: tl.constexpr):
    """Parts of all gates; the fourth of three is zero."""
    a0 = _read(pointer, 0, H, cols, mask)
    a1 = _read(pointer, 1, H, cols, mask)
    a2 = _read(pointer, 2, H, cols, mask)
    if GATES == 4:
        return a0, a1, a2, _read(pointer, 3, H, cols, mask)
    else:
        return a0, a1, a2, tl.zeros_like(a0)


@triton.jit
def _write_gates(pointer, H: tl.constexpr, cols, mask, GATES: tl.constexpr, a0, a1, a2, a3):
    _write(pointer, 0, H, cols, mask, a0)
    _write(pointer, 1, H, cols, mask, a1)
    _write(pointer, 2, H, cols, mask, a2)
    if GATES == 4:
        _write(pointer, 3, H, cols, mask, a3)


@triton.jit
def _lanes(table, row, H: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Example, row and units of a program, and the mask of units.

    `row` is the first row of the step, or, if PACKED, the index of the step.
    """
    n = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    first = row.to(tl.int64)
    if PACKED:
        first = tl.load(tl.load(table + SIZES).to(tl.pointer_type(tl.int64)) + 2 * first)
    return n, first + n, cols, cols < H


@triton.jit
def _is_over(table, step):
    """Whether the program's example has ended before this step of packed sequences."""
    sizes = tl.load(table + SIZES).to(tl.pointer_type(tl.int64))
    return tl.program_id(0) >= tl.load(sizes + 2 * step + 1)


@triton.jit
def _seen(table, line, H: tl.constexpr, cols, mask, RESETS: tl.constexpr):
    if RESETS:
        flag = tl.load(tl.load(table + RESET).to(tl.pointer_type(tl.int8)) + line)
        return cols < H * (flag == 0).to(tl.int32)
    else:
        return mask


@triton.jit
def _stays(
    table, slot: tl.constexpr, line, H: tl.constexpr, cols, mask, FLAG_ALIGN: tl.constexpr
):  # fmt: skip
    flags = _address(table, slot, tl.int8, FLAG_ALIGN) + line * H
    return tl.load(flags + cols, mask=mask, other=0) != 0


# HOLD: share of a state that zoneout keeps; -1: a mask.


@triton.jit
def _held(
    before, after, table, slot: tl.constexpr, line, H: tl.constexpr, cols, mask,
    HOLD: tl.constexpr, FLAG_ALIGN: tl.constexpr,
):  # fmt: skip
    if HOLD < 0:
        return tl.where(_stays(table, slot, line, H, cols, mask, FLAG_ALIGN), before, after)
    else:
        return after + HOLD * (before - after)


@triton.jit
def _held_back(
    d, table, slot: tl.constexpr, line, H: tl.constexpr, cols, mask,
    HOLD: tl.constexpr, FLAG_ALIGN: tl.constexpr,
):  # fmt: skip
    """Split a state's gradient: the part through the step, and the part that bypasses it."""
    if HOLD < 0:
        stays = _stays(table, slot, line, H, cols, mask, FLAG_ALIGN)
        return tl.where(stays, 0.0, d), tl.where(stays, d, 0.0)
    else:
        return d - HOLD * d, HOLD * d


@triton.jit
def _carry(
    before, after, state, table, line, H: tl.constexpr, cols, mask, HOLD: tl.constexpr,
    FLAG_ALIGN: tl.constexpr,
):  # fmt: skip
    """Apply zoneout to an LSTM's new cell state, and store it."""
    if HOLD != 0:
        after = _held(before, after, table, ZONEOUT_C, line, H, cols, mask, HOLD, FLAG_ALIGN)
    _write(state, 0, H, cols, mask, after)
    return after


@triton.jit
def _cell_back(
    d, table, line, H: tl.constexpr, cols, mask, HOLD: tl.constexpr, FLAG_ALIGN: tl.constexpr
):  # fmt: skip
    if HOLD != 0:
        return _held_back(d, table, ZONEOUT_C, line, H, cols, mask, HOLD, FLAG_ALIGN)
    else:
        return d, tl.zeros_like(d)


@triton.jit
def _dropped(
    a, table, n, H: tl.constexpr, cols, mask, WIDE_ALIGN: tl.constexpr, DROPS: tl.constexpr
):  # fmt: skip
    if DROPS:
        a *= _read(_address(table, DROPOUT, tl.float32, WIDE_ALIGN) + n * H, 0, H, cols, mask)
    return a


@triton.jit
def _incoming(
    table, gradient, n, line, H: tl.constexpr, cols, mask, KIND: tl.constexpr,
    KIND_ALIGN: tl.constexpr, WIDE_ALIGN: tl.constexpr, DROPS: tl.constexpr,
    PASSES: tl.constexpr, HAS_DOUT: tl.constexpr,
):  # fmt: skip
    d = _read(gradient + n * H, 0, H, cols, mask)
    d = _dropped(d, table, n, H, cols, mask, WIDE_ALIGN, DROPS)
    if PASSES:
        d += _read(_address(table, PASSED, tl.float32, WIDE_ALIGN) + n * H, 0, H, cols, mask)
    if HAS_DOUT:
        d += _read(_address(table, OUT, KIND, KIND_ALIGN) + line * H, 0, H, cols, mask)
    return d


@triton.jit
def _leaving(a0, a1, a2, a3, seen, RESETS: tl.constexpr):
    if RESETS:
        a0, a1 = tl.where(seen, a0, 0.0), tl.where(seen, a1, 0.0)
        a2, a3 = tl.where(seen, a2, 0.0), tl.where(seen, a3, 0.0)
    return a0, a1, a2, a3


@triton.jit
def _vector(table, slot: tl.constexpr, other, THERE: tl.constexpr, WIDE_ALIGN: tl.constexpr):
    """Address of a vector, or a dummy that is never read."""
    if THERE:
        return _address(table, slot, tl.float32, WIDE_ALIGN)
    else:
        return other


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    # 1 - 2 / (e^2x + 1) cancels for small x: use an odd polynomial (fitted to |x| <= 0.625).
    square = x * x
    p = -5.70498872745e-3 * square + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    far = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return tl.where(square < 0.390625, p * square * x + x, far)


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _add8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return (
        a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7,
    )  # fmt: skip


@triton.jit
def _merge(s0, s1, s2, s3, STARTS: tl.constexpr):
    """Sum gates to groups; bit q of STARTS: a group starts with gate q.

    Bit 4: there are three gates, and the fourth is 0.
    """
    if not STARTS & 2:
        s1 += s0
    if not STARTS & 4:
        s2 += s1
    if not STARTS & 8:
        s3 += s2
        s2 = s3
    if not STARTS & 4:
        s1 = s2
    if not STARTS & 2:
        s0 = s1
    return s0, s1, s2, s3


@triton.jit
def _sums(
    x0, x1, x2, x3, y0, y1, y2, y3, X_STARTS: tl.constexpr, Y_STARTS: tl.constexpr
):  # fmt: skip
    """Sums over groups of two rows of four gates; one reduction, since each costs barriers."""
    if X_STARTS == 1 and Y_STARTS == 1:
        a, b = tl.reduce(((x0 + x1) + (x2 + x3), (y0 + y1) + (y2 + y3)), 0, _add2)
        return a, a, a, a, b, b, b, b
    elif X_STARTS == 29 and Y_STARTS == 29:  # a GRU's: two gates and the candidate
        a, b, c, d = tl.reduce((x0 + x1, x2, y0 + y1, y2), 0, _add4)
        return a, a, b, b, c, c, d, d
    else:
        a, b, c, d, e, f, g, h = tl.reduce((x0, x1, x2, x3, y0, y1, y2, y3), 0, _add8)
        a, b, c, d = _merge(a, b, c, d, X_STARTS)
        e, f, g, h = _merge(e, f, g, h, Y_STARTS)
        return a, b, c, d, e, f, g, h


@triton.jit
def _sums_of_one(x0, x1, x2, x3, STARTS: tl.constexpr):
    if STARTS == 1:
        a = tl.sum((x0 + x1) + (x2 + x3), 0)
        return a, a, a, a
    elif STARTS == 29:
        a, b = tl.reduce((x0 + x1, x2), 0, _add2)
        return a, a, b, b
    else:
        a, b, c, d = tl.reduce((x0, x1, x2, x3), 0, _add4)
        return _merge(a, b, c, d, STARTS)


@triton.jit
def _deviations(s0, s1, s2, s3, H: tl.constexpr, EPS: tl.constexpr, STARTS: tl.constexpr):
    n0, n1, n2, n3 = _merge(H, H, H, H, STARTS)
    return (
        tl.rsqrt(s0 / n0 + EPS),
        tl.rsqrt(s1 / n1 + EPS),
        tl.rsqrt(s2 / n2 + EPS),
        tl.rsqrt(s3 / n3 + EPS),
    )


@triton.jit
def _place(q: tl.constexpr, STARTS: tl.constexpr):
    if q == 0:
        return 0
    elif q == 1:
        return STARTS // 2 % 2
    elif q == 2:
        return STARTS // 2 % 2 + STARTS // 4 % 2
    else:
        return STARTS // 2 % 2 + STARTS // 4 % 2 + STARTS // 8 % 2


@triton.jit
def _keep(stats, r0, r1, r2, r3, GATES: tl.constexpr, STARTS: tl.constexpr):
    tl.store(stats, r0)
    if STARTS & 2:
        tl.store(stats + _place(1, STARTS), r1)
    if STARTS & 4:
        tl.store(stats + _place(2, STARTS), r2)
    if GATES == 4 and STARTS & 8:
        tl.store(stats + _place(3, STARTS), r3)


@triton.jit
def _kept(stats, GATES: tl.constexpr, STARTS: tl.constexpr):
    r0 = tl.load(stats)
    r1 = tl.load(stats + _place(1, STARTS)) if STARTS & 2 else r0
    r2 = tl.load(stats + _place(2, STARTS)) if STARTS & 4 else r1
    r3 = tl.load(stats + _place(3, STARTS)) if GATES == 4 and STARTS & 8 else r2
    return r0, r1, r2, r3


@triton.jit
def _vectors(
    gain_v, gain_u, bias, q: tl.constexpr, H: tl.constexpr, cols, mask,
    INPUT: tl.constexpr, RECURRENT: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    a, b, c = 1.0, 1.0, 0.0
    if INPUT:
        a = _read(gain_v, q, H, cols, mask)
    if RECURRENT:
        b = _read(gain_u, q, H, cols, mask)
    if BIASED:
        c = _read(bias, q, H, cols, mask)
    return a, b, c


@triton.jit
def _vectors_of_gates(
    gain_v, gain_u, bias, H: tl.constexpr, cols, mask,
    INPUT: tl.constexpr, RECURRENT: tl.constexpr, BIASED: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """`_vectors` of all gates; the fourth of three repeats the third."""
    a0, b0, c0 = _vectors(gain_v, gain_u, bias, 0, H, cols, mask, INPUT, RECURRENT, BIASED)
    a1, b1, c1 = _vectors(gain_v, gain_u, bias, 1, H, cols, mask, INPUT, RECURRENT, BIASED)
    a2, b2, c2 = _vectors(gain_v, gain_u, bias, 2, H, cols, mask, INPUT, RECURRENT, BIASED)
    if GATES == 4:
        a3, b3, c3 = _vectors(gain_v, gain_u, bias, 3, H, cols, mask, INPUT, RECURRENT, BIASED)
        return a0, b0, c0, a1, b1, c1, a2, b2, c2, a3, b3, c3
    else:
        return a0, b0, c0, a1, b1, c1, a2, b2, c2, a2, b2, c2


@triton.jit
def _gate(
    v, u, rv, ru, gain_v, gain_u, bias, q: tl.constexpr, H: tl.constexpr, cols, mask,
    INPUT: tl.constexpr, RECURRENT: tl.constexpr, BIASED: tl.constexpr, JOINT: tl.constexpr,
):  # fmt: skip
    """Pre-activation of gate q, from unnormalised rows in memory."""
    a, b, c = _vectors(gain_v, gain_u, bias, q, H, cols, mask, INPUT, RECURRENT, BIASED)
    if JOINT:
        return _read(u, q, H, cols, mask) * ru * b + c
    else:
        return _read(v, q, H, cols, mask) * rv * a + c + _read(u, q, H, cols, mask) * ru * b


@triton.jit
def _first_gates(
    v, u, rv0, rv1, rv2, ru0, ru1, ru2, gain_v, gain_u, bias, H: tl.constexpr, cols, mask,
    INPUT: tl.constexpr, RECURRENT: tl.constexpr, BIASED: tl.constexpr, JOINT: tl.constexpr,
):  # fmt: skip
    p0 = _gate(
        v, u, rv0, ru0, gain_v, gain_u, bias, 0, H, cols, mask, INPUT, RECURRENT, BIASED, JOINT
    )
    p1 = _gate(
        v, u, rv1, ru1, gain_v, gain_u, bias, 1, H, cols, mask, INPUT, RECURRENT, BIASED, JOINT
    )
    p2 = _gate(
        v, u, rv2, ru2, gain_v, gain_u, bias, 2, H, cols, mask, INPUT, RECURRENT, BIASED, JOINT
    )
    return p0, p1, p2


@triton.jit
def _adjoint(d, a, r, mean):
    """Backward of a row's division by its deviation: a is the divided row, mean that of d * a."""
    return r * (d - a * mean)


@triton.jit
def _reciprocals(
    v0, v1, v2, v3, u0, u1, u2, u3, H: tl.constexpr, INPUT: tl.constexpr, RECURRENT: tl.constexpr,
    INPUT_EPS: tl.constexpr, RECURRENT_EPS: tl.constexpr,
):  # fmt: skip
    """Reciprocal deviations of both rows of products, gate by gate; 1 for the identity."""
    rv0, rv1, rv2, rv3 = 1.0, 1.0, 1.0, 1.0
    ru0, ru1, ru2, ru3 = 1.0, 1.0, 1.0, 1.0
    if INPUT and RECURRENT:
        s0, s1, s2, s3, t0, t1, t2, t3 = _sums(
            v0 * v0, v1 * v1, v2 * v2, v3 * v3, u0 * u0, u1 * u1, u2 * u2, u3 * u3,
            INPUT, RECURRENT,
        )  # fmt: skip
        rv0, rv1, rv2, rv3 = _deviations(s0, s1, s2, s3, H, INPUT_EPS, INPUT)
        ru0, ru1, ru2, ru3 = _deviations(t0, t1, t2, t3, H, RECURRENT_EPS, RECURRENT)
    elif INPUT:
        s0, s1, s2, s3 = _sums_of_one(v0 * v0, v1 * v1, v2 * v2, v3 * v3, INPUT)
        rv0, rv1, rv2, rv3 = _deviations(s0, s1, s2, s3, H, INPUT_EPS, INPUT)
    elif RECURRENT:
        t0, t1, t2, t3 = _sums_of_one(u0 * u0, u1 * u1, u2 * u2, u3 * u3, RECURRENT)
        ru0, ru1, ru2, ru3 = _deviations(t0, t1, t2, t3, H, RECURRENT_EPS, RECURRENT)
    return rv0, rv1, rv2, rv3, ru0, ru1, ru2, ru3


@triton.jit
def _keep_reciprocals(
    stats, rv0, rv1, rv2, rv3, ru0, ru1, ru2, ru3,
    GATES: tl.constexpr, INPUT: tl.constexpr, RECURRENT: tl.constexpr,
):  # fmt: skip
    if INPUT:
        _keep(stats, rv0, rv1, rv2, rv3, GATES, INPUT)
        stats += _place(GATES - 1, INPUT) + 1
    if RECURRENT:
        _keep(stats, ru0, ru1, ru2, ru3, GATES, RECURRENT)
        stats += _place(GATES - 1, RECURRENT) + 1
    return stats


@triton.jit
def _kept_reciprocals(
    stats, GATES: tl.constexpr, INPUT: tl.constexpr, RECURRENT: tl.constexpr
):  # fmt: skip
    rv0, rv1, rv2, rv3 = 1.0, 1.0, 1.0, 1.0
    ru0, ru1, ru2, ru3 = 1.0, 1.0, 1.0, 1.0
    if INPUT:
        rv0, rv1, rv2, rv3 = _kept(stats, GATES, INPUT)
        stats += _place(GATES - 1, INPUT) + 1
    if RECURRENT:
        ru0, ru1, ru2, ru3 = _kept(stats, GATES, RECURRENT)
        stats += _place(GATES - 1, RECURRENT) + 1
    return rv0, rv1, rv2, rv3, ru0, ru1, ru2, ru3, stats


@triton.jit
def _normalised_terms(
    table, v, product, line, state, H: tl.constexpr, cols, mask, seen, EARLY: tl.constexpr,
    READS_STATE: tl.constexpr, KIND: tl.constexpr, KIND_ALIGN: tl.constexpr,
    WIDE_ALIGN: tl.constexpr, BIASED: tl.constexpr, INPUT: tl.constexpr, RECURRENT: tl.constexpr,
    JOINT: tl.constexpr, INPUT_EPS: tl.constexpr, RECURRENT_EPS: tl.constexpr, SAVE: tl.constexpr,
    STATS_SIZE: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """Input terms with biases and recurrent terms; stores the tensors for the backward pass.

    Optionally loads a state between products and vectors, which fixes the order of loads. The last
    value is the address after the stored statistics.
    """
    bias = _vector(table, BIAS, v, BIASED, WIDE_ALIGN)
    gain_v = _vector(table, GAIN_INPUT, v, INPUT, WIDE_ALIGN)
    gain_u = _vector(table, GAIN_RECURRENT, v, RECURRENT, WIDE_ALIGN)
    v0, v1, v2, v3 = _read_gates(v, H, cols, mask, GATES)
    u0, u1, u2, u3 = _read_gates(product, H, cols, seen, GATES)
    if JOINT:
        u0, u1, u2, u3 = v0 + u0, v1 + u1, v2 + u2, v3 + u3
        v0, v1, v2, v3 = 0.0, 0.0, 0.0, 0.0
    before = 0.0
    if READS_STATE:
        before = _read(state, 0, H, cols, seen)
    if EARLY:
        gv0, gu0, b0, gv1, gu1, b1, gv2, gu2, b2, gv3, gu3, b3 = _vectors_of_gates(
            gain_v, gain_u, bias, H, cols, mask, INPUT, RECURRENT, BIASED, GATES
        )
    if SAVE:
        kept = _address(table, U, KIND, KIND_ALIGN) + line * (GATES * H)
        _write_gates(kept, H, cols, mask, GATES, u0, u1, u2, u3)
    stats = _address(table, STATS, tl.float32, 4) + line * STATS_SIZE
    rv0, rv1, rv2, rv3, ru0, ru1, ru2, ru3 = _reciprocals(
        v0, v1, v2, v3, u0, u1, u2, u3, H, INPUT, RECURRENT, INPUT_EPS, RECURRENT_EPS
    )
    if SAVE:
        stats = _keep_reciprocals(
            stats, rv0, rv1, rv2, rv3, ru0, ru1, ru2, ru3, GATES, INPUT, RECURRENT
        )
    if not EARLY:
        gv0, gu0, b0, gv1, gu1, b1, gv2, gu2, b2, gv3, gu3, b3 = _vectors_of_gates(
            gain_v, gain_u, bias, H, cols, mask, INPUT, RECURRENT, BIASED, GATES
        )
    return (
        v0 * rv0 * gv0 + b0, v1 * rv1 * gv1 + b1, v2 * rv2 * gv2 + b2, v3 * rv3 * gv3 + b3,
        u0 * ru0 * gu0, u1 * ru1 * gu1, u2 * ru2 * gu2, u3 * ru3 * gu3, before, stats,
    )  # fmt: skip


@triton.jit
def _through_deviations(
    d0, d1, d2, d3, a, r0, r1, r2, r3, gain, H: tl.constexpr, cols, mask,
    GATES: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Backpropagate from normalised rows with gain to the rows in memory at a."""
    a0, a1, a2, a3 = _read_gates(a, H, cols, mask, GATES)
    a0, a1, a2, a3 = a0 * r0, a1 * r1, a2 * r2, a3 * r3
    g0, g1, g2, g3 = _read_gates(gain, H, cols, mask, GATES)
    d0, d1, d2, d3 = d0 * g0, d1 * g1, d2 * g2, d3 * g3
    s0, s1, s2, s3 = _sums_of_one(d0 * a0, d1 * a1, d2 * a2, d3 * a3, STARTS)
    n0, n1, n2, n3 = _merge(H, H, H, H, STARTS)
    d0, d1 = _adjoint(d0, a0, r0, s0 / n0), _adjoint(d1, a1, r1, s1 / n1)
    return d0, d1, _adjoint(d2, a2, r2, s2 / n2), _adjoint(d3, a3, r3, s3 / n3)


# LSTM (paper, eq. 20-22), gates i, f, g, o: its arithmetic, for layers and for DRAW


@triton.jit
def _next_cell(i, f, g, c):
    return f * c + i * g


@triton.jit
def _normalised(c, mask, H: tl.constexpr, RULE: tl.constexpr, EPS: tl.constexpr):
    """Normalised cell state, its mean, and the reciprocal deviation."""
    c = tl.where(mask, c, 0.0)
    mean = 0.0
    if RULE == 2:
        mean = tl.sum(c, 0) / H
    # Centred, since the difference of two sums of squares cancels.
    a = tl.where(mask, c - mean, 0.0)
    factor = tl.rsqrt(tl.sum(a * a, 0) / H + EPS)
    return a * factor, mean, factor


@triton.jit
def _normalised_back(e, a, factor, H: tl.constexpr, RULE: tl.constexpr):
    """Gradients of the cell state, from gradients e of the normalised one, a."""
    if RULE == 2:
        s0, s1 = tl.reduce((e, e * a), 0, _add2)
        return factor * (e - s0 / H - a * (s1 / H))
    else:
        return _adjoint(e, a, factor, tl.sum(e * a, 0) / H)


@triton.jit
def _output_back(d, o, tau):
    """Backpropagate from h = o tau to o's pre-activation and tanh's argument."""
    return d * tau * o * (1.0 - o), d * o * (1.0 - tau * tau)


@triton.jit
def _input_back(dc, i, g):
    """Backpropagate from c to the pre-activations of i and g."""
    return dc * g * i * (1.0 - i), dc * i * (1.0 - g * g)


@triton.jit
def _forget_back(dc, f, c_before):
    """Backpropagate from c to f's pre-activation and the previous cell state."""
    return dc * c_before * f * (1.0 - f), dc * f


# Forward steps. Row n of `product` is R h' of example n; row n of `operand` receives h for the next
# product. `row`: first row of the step. INPUT, RECURRENT: groups of statistics (see `_merge`), 0
# for the identity. OUT_RULE: see `rule` in steps.py. EARLY: enough registers to load everything
# first. DROPS, RESETS: recurrent dropout, resets. JOINT: the sum of both products is normalised, by
# RECURRENT. CARRIED: the normalised cell state is carried on. PACKED: step sizes are in device
# memory, and there are programs for the largest.


@triton.jit(do_not_specialize=["row"])
def lstm_forward(
    table, product, operand, row,
    H: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, KIND: tl.constexpr,
    KIND_ALIGN: tl.constexpr, WIDE_ALIGN: tl.constexpr, BIASED: tl.constexpr, INPUT: tl.constexpr,
    RECURRENT: tl.constexpr, JOINT: tl.constexpr, CARRIED: tl.constexpr, OUT_RULE: tl.constexpr,
    INPUT_EPS: tl.constexpr, RECURRENT_EPS: tl.constexpr, OUT_EPS: tl.constexpr,
    SAVE: tl.constexpr, STATS_SIZE: tl.constexpr, FLAG_ALIGN: tl.constexpr, HOLD_H: tl.constexpr,
    HOLD_C: tl.constexpr, DROPS: tl.constexpr, RESETS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """LSTM step, gates i, f, g, o (paper, eq. 20-22)."""
    if PACKED:  # noqa: SIM102 (the compiler must not see the other condition)
        if _is_over(table, row):
            return
    n, line, cols, mask = _lanes(table, row, H, BLOCK, PACKED)
    seen = _seen(table, line, H, cols, mask, RESETS)
    v = _address(table, V, KIND, KIND_ALIGN) + line * (4 * H)
    u = product + n * (4 * H)
    c_state = _address(table, C, tl.float32, WIDE_ALIGN) + n * H
    h_state = _address(table, H_OR_WORK, tl.float32, WIDE_ALIGN) + n * H
    out = _address(table, OUT, KIND, KIND_ALIGN) + line * H
    x0, x1, x2, x3, y0, y1, y2, y3, c_before, stats = _normalised_terms(
        table, v, u, line, c_state, H, cols, mask, seen, EARLY, EARLY, KIND, KIND_ALIGN,
        WIDE_ALIGN, BIASED, INPUT, RECURRENT, JOINT, INPUT_EPS, RECURRENT_EPS, SAVE, STATS_SIZE, 4,
    )  # fmt: skip
    i, f, g, o = _sigmoid(x0 + y0), _sigmoid(x1 + y1), _tanh(x2 + y2), _sigmoid(x3 + y3)
    if not EARLY:
        c_before = _read(c_state, 0, H, cols, seen)
    c = _next_cell(i, f, g, c_before)
    shown = c
    if not CARRIED:
        c_after = _carry(c_before, c, c_state, table, line, H, cols, mask, HOLD_C, FLAG_ALIGN)
    if OUT_RULE:
        a, mean, r = _normalised(c, mask, H, OUT_RULE, OUT_EPS)
        gain_c = _address(table, GAIN_OUT, tl.float32, WIDE_ALIGN)
        shift_c = _address(table, SHIFT_OUT, tl.float32, WIDE_ALIGN)
        shown = a * _read(gain_c, 0, H, cols, mask) + _read(shift_c, 0, H, cols, mask)
        if SAVE:
            if OUT_RULE == 2:
                tl.store(stats, mean)
                stats += 1
            tl.store(stats, r)
    if CARRIED:
        c_after = _carry(c_before, shown, c_state, table, line, H, cols, mask, HOLD_C, FLAG_ALIGN)
    if SAVE:
        c_row = _address(table, C_ROWS, tl.float32, WIDE_ALIGN) + line * H
        _write(c_row, 0, H, cols, mask, c_after)
    h = o * _tanh(shown)
    if HOLD_H != 0:
        before = _read(h_state, 0, H, cols, seen)
        h = _held(before, h, table, ZONEOUT_H, line, H, cols, mask, HOLD_H, FLAG_ALIGN)
    into = _dropped(h, table, n, H, cols, mask, WIDE_ALIGN, DROPS)
    _write(operand + n * H, 0, H, cols, mask, into)
    _write(h_state, 0, H, cols, mask, h)
    _write(out, 0, H, cols, mask, h)


@triton.jit(do_not_specialize=["row"])
def gru_forward(
    table, product, operand, row,
    H: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, KIND: tl.constexpr,
    KIND_ALIGN: tl.constexpr, WIDE_ALIGN: tl.constexpr, BIASED: tl.constexpr, INPUT: tl.constexpr,
    RECURRENT: tl.constexpr, JOINT: tl.constexpr, OUT_RULE: tl.constexpr, INPUT_EPS: tl.constexpr,
    RECURRENT_EPS: tl.constexpr, OUT_EPS: tl.constexpr, SAVE: tl.constexpr,
    STATS_SIZE: tl.constexpr, FLAG_ALIGN: tl.constexpr, HOLD_H: tl.constexpr, DROPS: tl.constexpr,
    RESETS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """GRU step, gates r, z, n (paper, eq. 26-28)."""
    if PACKED:  # noqa: SIM102 (the compiler must not see the other condition)
        if _is_over(table, row):
            return
    n, line, cols, mask = _lanes(table, row, H, BLOCK, PACKED)
    seen = _seen(table, line, H, cols, mask, RESETS)
    v = _address(table, V, KIND, KIND_ALIGN) + line * (3 * H)
    u = product + n * (3 * H)
    h_state = _address(table, H_OR_WORK, tl.float32, WIDE_ALIGN) + n * H
    out = _address(table, OUT, KIND, KIND_ALIGN) + line * H
    bias_hn = _vector(table, BIAS_HN, v, BIASED, WIDE_ALIGN)
    x0, x1, x2, _, y0, y1, w, _, before, _ = _normalised_terms(
        table, v, u, line, h_state, H, cols, mask, seen, EARLY, True, KIND, KIND_ALIGN,
        WIDE_ALIGN, BIASED, INPUT, RECURRENT, JOINT, INPUT_EPS, RECURRENT_EPS, SAVE, STATS_SIZE, 3,
    )  # fmt: skip
    r, z = _sigmoid(x0 + y0), _sigmoid(x1 + y1)
    if BIASED:
        w += _read(bias_hn, 0, H, cols, mask)
    candidate = _tanh(x2 + r * w)
    h = candidate + z * (before - candidate)
    if HOLD_H != 0:
        h = _held(before, h, table, ZONEOUT_H, line, H, cols, mask, HOLD_H, FLAG_ALIGN)
    into = _dropped(h, table, n, H, cols, mask, WIDE_ALIGN, DROPS)
    _write(operand + n * H, 0, H, cols, mask, into)
    _write(h_state, 0, H, cols, mask, h)
    _write(out, 0, H, cols, mask, h)


@triton.jit(do_not_specialize=["row"])
def rnn_forward(
    table, product, operand, row,
    H: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, KIND_ALIGN: tl.constexpr,
    WIDE_ALIGN: tl.constexpr, BIASED: tl.constexpr, RELU: tl.constexpr, OUT_RULE: tl.constexpr,
    OUT_EPS: tl.constexpr, SAVE: tl.constexpr, STATS_SIZE: tl.constexpr,
    FLAG_ALIGN: tl.constexpr, HOLD_H: tl.constexpr, DROPS: tl.constexpr, RESETS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Simple RNN step (paper, eq. 4); the sum of both terms is normalised and saved."""
    if PACKED:  # noqa: SIM102 (the compiler must not see the other condition)
        if _is_over(table, row):
            return
    n, line, cols, mask = _lanes(table, row, H, BLOCK, PACKED)
    seen = _seen(table, line, H, cols, mask, RESETS)
    v = _address(table, V, KIND, KIND_ALIGN) + line * H
    h_state = _address(table, H_OR_WORK, tl.float32, WIDE_ALIGN) + n * H
    out = _address(table, OUT, KIND, KIND_ALIGN) + line * H
    a = _read(v, 0, H, cols, mask) + _read(product + n * H, 0, H, cols, seen)
    if SAVE:
        _write(_address(table, U, KIND, KIND_ALIGN) + line * H, 0, H, cols, mask, a)
    if OUT_RULE:
        r = tl.rsqrt(tl.sum(a * a, 0) / H + OUT_EPS)
        if SAVE:
            tl.store(_address(table, STATS, tl.float32, 4) + line * STATS_SIZE, r)
        a *= r * _read(_address(table, GAIN_OUT, tl.float32, WIDE_ALIGN), 0, H, cols, mask)
    if BIASED:
        a += _read(_address(table, BIAS, tl.float32, WIDE_ALIGN), 0, H, cols, mask)
    # Propagates NaN.
    h = tl.where(a <= 0.0, 0.0, a) if RELU else _tanh(a)
    if HOLD_H != 0:
        before = _read(h_state, 0, H, cols, seen)
        h = _held(before, h, table, ZONEOUT_H, line, H, cols, mask, HOLD_H, FLAG_ALIGN)
    into = _dropped(h, table, n, H, cols, mask, WIDE_ALIGN, DROPS)
    _write(operand + n * H, 0, H, cols, mask, into)
    _write(h_state, 0, H, cols, mask, h)
    _write(out, 0, H, cols, mask, h)


# Backward steps. `gradient` (examples, H) is the gradient of h, replaced by the product after the
# step; `operand` receives du for that product. PASSES: a part of the gradient bypasses the product;
# it is added and replaced in place, as is the gradient of the cell state. Operands of the sums over
# rows go to the work area, (rows, gates + 1, H) for LSTM and GRU. Gradients of rows with centred
# weights may contain any constant.


@triton.jit(do_not_specialize=["row"])
def lstm_backward(
    table, gradient, operand, row,
    H: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, KIND: tl.constexpr,
    KIND_ALIGN: tl.constexpr, WIDE_ALIGN: tl.constexpr, BIASED: tl.constexpr, INPUT: tl.constexpr,
    RECURRENT: tl.constexpr, JOINT: tl.constexpr, CARRIED: tl.constexpr, OUT_RULE: tl.constexpr,
    HAS_DOUT: tl.constexpr, STATS_SIZE: tl.constexpr, FLAG_ALIGN: tl.constexpr,
    HOLD_H: tl.constexpr, HOLD_C: tl.constexpr, DROPS: tl.constexpr, RESETS: tl.constexpr,
    PACKED: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    """Backward of an LSTM step; fills the work area with gradients of i, f, g, o and tanh."""
    if PACKED:  # noqa: SIM102 (the compiler must not see the other condition)
        if _is_over(table, row):
            return
    n, line, cols, mask = _lanes(table, row, H, BLOCK, PACKED)
    seen = _seen(table, line, H, cols, mask, RESETS)
    v = _address(table, V, KIND, KIND_ALIGN) + line * (4 * H)
    u = _address(table, U, KIND, KIND_ALIGN) + line * (4 * H)
    stats = _address(table, STATS, tl.float32, 4) + line * STATS_SIZE
    c_row = _address(table, C_ROWS, tl.float32, WIDE_ALIGN) + line * H
    dc_state = _address(table, C, tl.float32, WIDE_ALIGN) + n * H
    work = _address(table, H_OR_WORK, tl.float32, WIDE_ALIGN) + line * (5 * H)
    bias = _vector(table, BIAS, v, BIASED, WIDE_ALIGN)
    gain_v = _vector(table, GAIN_INPUT, v, INPUT, WIDE_ALIGN)
    gain_u = _vector(table, GAIN_RECURRENT, v, RECURRENT, WIDE_ALIGN)

    rv0, rv1, rv2, rv3, ru0, ru1, ru2, ru3, stats = _kept_reciprocals(stats, 4, INPUT, RECURRENT)

    # With few registers, load each gate when needed: the compiler does not move loads ahead of
    # earlier stores.
    if EARLY:
        p0, p1, p2 = _first_gates(
            v, u, rv0, rv1, rv2, ru0, ru1, ru2, gain_v, gain_u, bias, H, cols, mask, INPUT,
            RECURRENT, BIASED, JOINT,
        )  # fmt: skip
        c_prev = _address(table, C_PREV, tl.float32, WIDE_ALIGN) + line * H
        c_before = _read(c_prev, 0, H, cols, mask)
        dc = _read(dc_state, 0, H, cols, mask)
    p3 = _gate(
        v, u, rv3, ru3, gain_v, gain_u, bias, 3, H, cols, mask, INPUT, RECURRENT, BIASED, JOINT
    )
    o = _sigmoid(p3)
    d = _incoming(
        table, gradient, n, line, H, cols, mask, KIND, KIND_ALIGN, WIDE_ALIGN, DROPS, PASSES,
        HAS_DOUT,
    )  # fmt: skip
    bypass = tl.zeros_like(d)
    if HOLD_H != 0:
        d, bypass = _held_back(d, table, ZONEOUT_H, line, H, cols, mask, HOLD_H, FLAG_ALIGN)
    if PASSES:
        passed = _address(table, PASSED, tl.float32, WIDE_ALIGN) + n * H
        _write(passed, 0, H, cols, mask, tl.where(seen, bypass, 0.0) if RESETS else bypass)
    if HOLD_C != 0 or CARRIED:
        # Saved is the cell state after its norm and zoneout; h was computed before them.
        if not EARLY:
            p0, p1, p2 = _first_gates(
                v, u, rv0, rv1, rv2, ru0, ru1, ru2, gain_v, gain_u, bias, H, cols, mask, INPUT,
                RECURRENT, BIASED, JOINT,
            )  # fmt: skip
            c_prev = _address(table, C_PREV, tl.float32, WIDE_ALIGN) + line * H
            c_before = _read(c_prev, 0, H, cols, mask)
        c = _next_cell(_sigmoid(p0), _sigmoid(p1), _tanh(p2), c_before)
        if OUT_RULE:
            _write(c_row, 0, H, cols, mask, c)
    else:
        c = _read(c_row, 0, H, cols, mask)
    if OUT_RULE:
        mean = 0.0
        if OUT_RULE == 2:
            mean = tl.load(stats)
            stats += 1
        r = tl.load(stats)
        gain_c = _read(_address(table, GAIN_OUT, tl.float32, WIDE_ALIGN), 0, H, cols, mask)
        shift_c = _read(_address(table, SHIFT_OUT, tl.float32, WIDE_ALIGN), 0, H, cols, mask)
        shown = tl.where(mask, (c - mean) * r, 0.0)
        dp3, dm = _output_back(d, o, _tanh(gain_c * shown + shift_c))
        if CARRIED:
            if not EARLY:
                dc = _read(dc_state, 0, H, cols, mask)
            dc, bypass_c = _cell_back(dc, table, line, H, cols, mask, HOLD_C, FLAG_ALIGN)
            dm += dc
        through = _normalised_back(gain_c * dm, shown, r, H, OUT_RULE)
    else:
        dp3, dm = _output_back(d, o, _tanh(c))
        through = dm
    _write(work, 3, H, cols, mask, dp3)
    _write(work, 4, H, cols, mask, dm)

    if not EARLY:
        if not CARRIED:
            dc = _read(dc_state, 0, H, cols, mask)
        p0 = _gate(
            v, u, rv0, ru0, gain_v, gain_u, bias, 0, H, cols, mask, INPUT, RECURRENT, BIASED, JOINT
        )
        p2 = _gate(
            v, u, rv2, ru2, gain_v, gain_u, bias, 2, H, cols, mask, INPUT, RECURRENT, BIASED, JOINT
        )
    if CARRIED:
        dc = through
    else:
        dc, bypass_c = _cell_back(dc, table, line, H, cols, mask, HOLD_C, FLAG_ALIGN)
        dc += through
    i, g = _sigmoid(p0), _tanh(p2)
    dp0, dp2 = _input_back(dc, i, g)
    _write(work, 0, H, cols, mask, dp0)
    _write(work, 2, H, cols, mask, dp2)
    if not EARLY:
        p1 = _gate(
            v, u, rv1, ru1, gain_v, gain_u, bias, 1, H, cols, mask, INPUT, RECURRENT, BIASED, JOINT
        )
        c_prev = _address(table, C_PREV, tl.float32, WIDE_ALIGN) + line * H
        c_before = _read(c_prev, 0, H, cols, mask)
    f = _sigmoid(p1)
    dp1, dc = _forget_back(dc, f, c_before)
    if HOLD_C != 0:
        dc += bypass_c
    _write(work, 1, H, cols, mask, dp1)
    _write(dc_state, 0, H, cols, mask, tl.where(seen, dc, 0.0) if RESETS else dc)

    if RECURRENT:
        dp0, dp1, dp2, dp3 = _through_deviations(
            dp0, dp1, dp2, dp3, u, ru0, ru1, ru2, ru3, gain_u, H, cols, mask, 4, RECURRENT
        )
    du = _address(table, DU, KIND, KIND_ALIGN) + line * (4 * H)
    _write_gates(du, H, cols, mask, 4, dp0, dp1, dp2, dp3)
    dp0, dp1, dp2, dp3 = _leaving(dp0, dp1, dp2, dp3, seen, RESETS)
    _write_gates(operand + n * (4 * H), H, cols, mask, 4, dp0, dp1, dp2, dp3)


@triton.jit(do_not_specialize=["row"])
def gru_backward(
    table, gradient, operand, row,
    H: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, KIND: tl.constexpr,
    KIND_ALIGN: tl.constexpr, WIDE_ALIGN: tl.constexpr, BIASED: tl.constexpr, INPUT: tl.constexpr,
    RECURRENT: tl.constexpr, JOINT: tl.constexpr, OUT_RULE: tl.constexpr, HAS_DOUT: tl.constexpr,
    STATS_SIZE: tl.constexpr, FLAG_ALIGN: tl.constexpr, HOLD_H: tl.constexpr,
    DROPS: tl.constexpr, RESETS: tl.constexpr, PACKED: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    """Backward of a GRU step; fills the work area with gradients of r, z, n and of R h' in n."""
    if PACKED:  # noqa: SIM102 (the compiler must not see the other condition)
        if _is_over(table, row):
            return
    n, line, cols, mask = _lanes(table, row, H, BLOCK, PACKED)
    seen = _seen(table, line, H, cols, mask, RESETS)
    v = _address(table, V, KIND, KIND_ALIGN) + line * (3 * H)
    u = _address(table, U, KIND, KIND_ALIGN) + line * (3 * H)
    stats = _address(table, STATS, tl.float32, 4) + line * STATS_SIZE
    h_prev = _address(table, H_PREV, KIND, KIND_ALIGN) + line * H
    work = _address(table, H_OR_WORK, tl.float32, WIDE_ALIGN) + line * (4 * H)
    du = _address(table, DU, KIND, KIND_ALIGN) + line * (3 * H)
    bias = _vector(table, BIAS, v, BIASED, WIDE_ALIGN)
    bias_hn = _vector(table, BIAS_HN, v, BIASED, WIDE_ALIGN)
    gain_v = _vector(table, GAIN_INPUT, v, INPUT, WIDE_ALIGN)
    gain_u = _vector(table, GAIN_RECURRENT, v, RECURRENT, WIDE_ALIGN)

    rv0, rv1, rv2, _, ru0, ru1, ru2, ru3, stats = _kept_reciprocals(stats, 3, INPUT, RECURRENT)

    p0 = _gate(
        v, u, rv0, ru0, gain_v, gain_u, bias, 0, H, cols, mask, INPUT, RECURRENT, BIASED, JOINT
    )
    p1 = _gate(
        v, u, rv1, ru1, gain_v, gain_u, bias, 1, H, cols, mask, INPUT, RECURRENT, BIASED, JOINT
    )
    r, z = _sigmoid(p0), _sigmoid(p1)
    a, b, c = _vectors(gain_v, gain_u, bias, 2, H, cols, mask, INPUT, RECURRENT, BIASED)
    w = _read(u, 2, H, cols, mask) * ru2 * b
    if BIASED:
        w += _read(bias_hn, 0, H, cols, mask)
    p2 = c
    if not JOINT:
        p2 += _read(v, 2, H, cols, mask) * rv2 * a
    candidate = _tanh(p2 + r * w)

    d = _incoming(
        table, gradient, n, line, H, cols, mask, KIND, KIND_ALIGN, WIDE_ALIGN, DROPS, PASSES,
        HAS_DOUT,
    )  # fmt: skip
    bypass = tl.zeros_like(d)
    if HOLD_H != 0:
        d, bypass = _held_back(d, table, ZONEOUT_H, line, H, cols, mask, HOLD_H, FLAG_ALIGN)
    bypass += d * z
    passed = _address(table, PASSED, tl.float32, WIDE_ALIGN) + n * H
    _write(passed, 0, H, cols, mask, tl.where(seen, bypass, 0.0) if RESETS else bypass)
    dn = d * (1.0 - z) * (1.0 - candidate * candidate)
    dp0 = dn * w * r * (1.0 - r)
    dp1 = d * (_read(h_prev, 0, H, cols, mask) - candidate) * z * (1.0 - z)
    dp2 = dn * r
    _write_gates(work, H, cols, mask, 4, dp0, dp1, dn, dp2)

    dp3 = tl.zeros_like(dp0)
    if RECURRENT:
        dp0, dp1, dp2, dp3 = _through_deviations(
            dp0, dp1, dp2, dp3, u, ru0, ru1, ru2, ru3, gain_u, H, cols, mask, 3, RECURRENT
        )
    _write_gates(du, H, cols, mask, 3, dp0, dp1, dp2, dp3)
    dp0, dp1, dp2, dp3 = _leaving(dp0, dp1, dp2, dp3, seen, RESETS)
    _write_gates(operand + n * (3 * H), H, cols, mask, 3, dp0, dp1, dp2, dp3)


@triton.jit(do_not_specialize=["row"])
def rnn_backward(
    table, gradient, operand, row,
    H: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, KIND_ALIGN: tl.constexpr,
    WIDE_ALIGN: tl.constexpr, BIASED: tl.constexpr, RELU: tl.constexpr, OUT_RULE: tl.constexpr,
    HAS_DOUT: tl.constexpr, STATS_SIZE: tl.constexpr, FLAG_ALIGN: tl.constexpr,
    HOLD_H: tl.constexpr, DROPS: tl.constexpr, RESETS: tl.constexpr, PACKED: tl.constexpr,
    PASSES: tl.constexpr,
):  # fmt: skip
    """Backward of a simple RNN step; fills the work area (rows, H) with the gradient of the sum."""
    if PACKED:  # noqa: SIM102 (the compiler must not see the other condition)
        if _is_over(table, row):
            return
    n, line, cols, mask = _lanes(table, row, H, BLOCK, PACKED)
    seen = _seen(table, line, H, cols, mask, RESETS)
    a = _read(_address(table, U, KIND, KIND_ALIGN) + line * H, 0, H, cols, mask)
    p = a
    if OUT_RULE:
        r = tl.load(_address(table, STATS, tl.float32, 4) + line * STATS_SIZE)
        a *= r
        gain = _read(_address(table, GAIN_OUT, tl.float32, WIDE_ALIGN), 0, H, cols, mask)
        p = a * gain
    if BIASED:
        p += _read(_address(table, BIAS, tl.float32, WIDE_ALIGN), 0, H, cols, mask)
    d = _incoming(
        table, gradient, n, line, H, cols, mask, KIND, KIND_ALIGN, WIDE_ALIGN, DROPS, PASSES,
        HAS_DOUT,
    )  # fmt: skip
    bypass = tl.zeros_like(d)
    if HOLD_H != 0:
        d, bypass = _held_back(d, table, ZONEOUT_H, line, H, cols, mask, HOLD_H, FLAG_ALIGN)
    if PASSES:
        passed = _address(table, PASSED, tl.float32, WIDE_ALIGN) + n * H
        _write(passed, 0, H, cols, mask, tl.where(seen, bypass, 0.0) if RESETS else bypass)
    if RELU:
        d = tl.where(p <= 0.0, 0.0, d)
    else:
        h = _tanh(p)
        d *= 1.0 - h * h
    work = _address(table, H_OR_WORK, tl.float32, WIDE_ALIGN) + line * H
    _write(work, 0, H, cols, mask, d)
    if OUT_RULE:
        d *= gain
        d = _adjoint(d, a, r, tl.sum(d * a, 0) / H)
    _write(_address(table, DU, KIND, KIND_ALIGN) + line * H, 0, H, cols, mask, d)
    _write(operand + n * H, 0, H, cols, mask, tl.where(seen, d, 0.0) if RESETS else d)


# After the steps of a chunk


@triton.jit
def input_gradient(
    work, v, stats, gain, dv,
    H: tl.constexpr, BLOCK: tl.constexpr, GATES: tl.constexpr, STARTS: tl.constexpr,
    STATS_SIZE: tl.constexpr,
):  # fmt: skip
    """Backpropagate from the normalised input term to dv (rows, G); one program per row."""
    line = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    work += line * ((GATES + 1) * H)
    v += line * (GATES * H)
    dv += line * (GATES * H)
    r0, r1, r2, r3 = _kept(stats + line * STATS_SIZE, GATES, STARTS)
    d0, d1, d2, d3 = _read_gates(work, H, cols, mask, GATES)
    d0, d1, d2, d3 = _through_deviations(
        d0, d1, d2, d3, v, r0, r1, r2, r3, gain, H, cols, mask, GATES, STARTS
    )
    _write_gates(dv, H, cols, mask, GATES, d0, d1, d2, d3)


@triton.jit(do_not_specialize=["rows", "first"])
def column_sums(
    work, a, stats, partial, rows, first,
    H: tl.constexpr, GATES: tl.constexpr, WIDTH: tl.constexpr, SKIP: tl.constexpr,
    STARTS: tl.constexpr, OWN_MEAN: tl.constexpr, STATS_SIZE: tl.constexpr, SHARE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Sums over rows of d and of d times a normalised row: gradients of a bias and of a gain.

    Program (k, j) sums rows k * SHARE to (k + 1) * SHARE of some columns of one gate, ROWS at a
    time, into ``partial[k]``, (2, GATES, H); the order of additions is fixed. ``work`` has d,
    (rows, WIDTH, H): gate q of a, unnormalised (rows, GATES, H), has gate first + q, one more after
    SKIP gates. ``stats`` has reciprocal deviations, with a row stride of STATS_SIZE. STARTS: see
    `_merge`; 0: no second sum. OWN_MEAN: subtract the row's mean, stored before its deviation.
    """
    k = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (H + COLS - 1) // COLS
    q = tl.program_id(1) // blocks
    cols = tl.program_id(1) % blocks * COLS + tl.arange(0, COLS)
    inside = cols < H
    gate = first + q
    if SKIP:
        gate += (q >= SKIP).to(tl.int32)
    # Groups that start with gates 1 to q
    place = (q > 0) & (STARTS // 2 % 2)
    place += (q > 1) & (STARTS // 4 % 2)
    place += (q > 2) & (STARTS // 8 % 2)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    scaled = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(0, SHARE, ROWS):
        lines = k * SHARE + start + tl.arange(0, ROWS)
        there = lines < rows
        mask = there[:, None] & inside[None, :]
        d = work + lines[:, None] * (WIDTH * H) + (gate * H + cols[None, :])
        d = tl.load(d, mask=mask, other=0.0)
        total += d
        if STARTS:
            x = a + lines[:, None] * (GATES * H) + (q * H + cols[None, :])
            x = tl.load(x, mask=mask, other=0.0).to(tl.float32)
            at = stats + lines * STATS_SIZE + place
            if OWN_MEAN:
                x -= tl.load(at - 1, mask=there, other=0.0)[:, None]
            scaled += d * (x * tl.load(at, mask=there, other=0.0)[:, None])
    partial += k * (2 * GATES * H) + (q * H + cols)
    tl.store(partial, tl.sum(total, 0), mask=inside)
    if STARTS:
        tl.store(partial + GATES * H, tl.sum(scaled, 0), mask=inside)


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

#: Triton's dtypes of products.
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
