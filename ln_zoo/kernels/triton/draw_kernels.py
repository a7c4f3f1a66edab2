"""Triton kernels between the products of DRAW (equations: `ln_zoo.ops.loops.draw`).

One program per image, in float32; operands of products may be bfloat16. Filters are recomputed
where needed, which costs less than saving them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ln_zoo.kernels.triton.kernels import (
    _forget_back,
    _input_back,
    _next_cell,
    _normalised,
    _normalised_back,
    _output_back,
    _read,
    _read_gates,
    _sigmoid,
    _tanh,
    _write_gates,
)

#: Rows of the heads' weight per tile.
ROWS = tl.constexpr(16)


# Filters F (K, S) of one axis, and their backward


@triton.jit
def _exponential(x, BOUND: tl.constexpr):
    return tl.exp(tl.minimum(tl.maximum(x, -BOUND), BOUND))


@triton.jit
def _filters(
    place, log_variance, log_stride, K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr,
    SP: tl.constexpr, SPAN: tl.constexpr, BOUND: tl.constexpr, EPS: tl.constexpr,
    ADDS_EPS: tl.constexpr,
):  # fmt: skip
    """Filters, distances from the pixel nearest to each centre, and centres relative to it.

    SPAN: pixels between two filters at log stride 0.
    """
    k = tl.arange(0, KP)
    a = tl.arange(0, SP)
    stride = _exponential(log_stride, BOUND) * SPAN
    mean = (S + 1) / 2 * (place + 1.0) - 1.0 + (k - (K - 1) / 2) * stride
    nearest = tl.minimum(tl.maximum(tl.floor(mean + 0.5), 0.0), S - 1.0)
    shift = mean - nearest
    distance = a[None, :] - nearest[:, None]
    gap = distance - shift[:, None]
    square = gap * gap if ADDS_EPS else distance * (gap - shift[:, None])
    sharpness = _exponential(-log_variance, BOUND) / 2
    inside = (a < S)[None, :] & (k < K)[:, None]
    e = tl.where(inside, tl.exp(-sharpness * square), 0.0)
    total = tl.sum(e, 1)
    if ADDS_EPS:
        total += EPS
    return e / tl.where(k < K, total, 1.0)[:, None], distance, shift


@triton.jit
def _filters_back(
    gradient, filters, distance, shift, log_variance, log_stride, K: tl.constexpr,
    KP: tl.constexpr, S: tl.constexpr, SPAN: tl.constexpr, BOUND: tl.constexpr,
    ADDS_EPS: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, KP)
    e = (gradient - tl.sum(filters * gradient, 1)[:, None]) * filters
    first = tl.sum(e * distance, 1)
    second = tl.sum(e * distance * distance, 1)
    dmean = first
    dvariance = second - 2 * shift * first
    if ADDS_EPS:  # otherwise a filter sums to 1, and the gradients of its terms to 0
        zeroth = tl.sum(e, 1)
        dmean -= shift * zeroth
        dvariance += shift * shift * zeroth
    sharpness = _exponential(-log_variance, BOUND) / 2
    stride = _exponential(log_stride, BOUND) * SPAN
    # Padding past the last filter has gradient 0.
    dmean = tl.where(k < K, dmean, 0.0) * (2 * sharpness)
    place = tl.sum(dmean, 0) * ((S + 1) / 2)
    variance = tl.sum(tl.where(k < K, dvariance, 0.0), 0) * sharpness
    spread = tl.sum(dmean * (k - (K - 1) / 2), 0) * stride
    return place, variance, spread


@triton.jit
def _grid(
    numbers, K: tl.constexpr, KP: tl.constexpr, B: tl.constexpr, BP: tl.constexpr, A: tl.constexpr,
    AP: tl.constexpr, SPAN: tl.constexpr, BOUND: tl.constexpr, EPS: tl.constexpr,
    ADDS_EPS: tl.constexpr,
):  # fmt: skip
    """`_filters` of both axes, X before Y, from the numbers that place them."""
    variance, stride = tl.load(numbers + 2), tl.load(numbers + 3)
    f_x, x_distance, x_shift = _filters(
        tl.load(numbers), variance, stride, K, KP, A, AP, SPAN, BOUND, EPS, ADDS_EPS
    )
    f_y, y_distance, y_shift = _filters(
        tl.load(numbers + 1), variance, stride, K, KP, B, BP, SPAN, BOUND, EPS, ADDS_EPS
    )
    return f_x, x_distance, x_shift, f_y, y_distance, y_shift


@triton.jit
def _grid_back(
    numbers, dnumbers, df_x, f_x, x_distance, x_shift, df_y, f_y, y_distance, y_shift,
    K: tl.constexpr, KP: tl.constexpr, B: tl.constexpr, A: tl.constexpr, SPAN: tl.constexpr,
    BOUND: tl.constexpr, ADDS_EPS: tl.constexpr,
):  # fmt: skip
    """Backpropagate from filters to the first four numbers; stores gradients."""
    variance, stride = tl.load(numbers + 2), tl.load(numbers + 3)
    x_place, x_variance, x_stride = _filters_back(
        df_x, f_x, x_distance, x_shift, variance, stride, K, KP, A, SPAN, BOUND, ADDS_EPS
    )
    y_place, y_variance, y_stride = _filters_back(
        df_y, f_y, y_distance, y_shift, variance, stride, K, KP, B, SPAN, BOUND, ADDS_EPS
    )
    tl.store(dnumbers, x_place)
    tl.store(dnumbers + 1, y_place)
    tl.store(dnumbers + 2, _unless_clamped(variance, x_variance + y_variance, BOUND))
    tl.store(dnumbers + 3, _unless_clamped(stride, x_stride + y_stride, BOUND))


@triton.jit
def _unless_clamped(x, d, BOUND: tl.constexpr):
    return tl.where(tl.abs(x) <= BOUND, d, 0.0)


@triton.jit
def _count(hits, numbers, BOUND: tl.constexpr):
    variance = (tl.abs(tl.load(numbers + 2)) > BOUND).to(tl.int64)
    stride = (tl.abs(tl.load(numbers + 3)) > BOUND).to(tl.int64)
    tl.atomic_add(hits + 1, variance)
    tl.atomic_add(hits + 2, stride)


# Products of small matrices as sums, since tensor cores need at least 16 rows


@triton.jit
def _down(f, image):
    """(K, B) and (B, A) to (K, A)."""
    return tl.sum(f[:, :, None] * image[None, :, :], 1)


@triton.jit
def _across(a, f):
    """(K, A) and (L, A) to (K, L), or (K, A) and (B, A) to (K, B)."""
    return tl.sum(a[:, None, :] * f[None, :, :], 2)


@triton.jit
def _up(a, b):
    """(K, L) and (K, M) to (L, M)."""
    return tl.sum(a[:, :, None] * b[:, None, :], 0)


@triton.jit
def _load_matrix(pointer, ROWS: tl.constexpr, RP: tl.constexpr, COLS: tl.constexpr,
                 CP: tl.constexpr):  # fmt: skip
    rows = tl.arange(0, RP)[:, None]
    cols = tl.arange(0, CP)[None, :]
    inside = (rows < ROWS) & (cols < COLS)
    return tl.load(pointer + rows * COLS + cols, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_matrix(pointer, a, ROWS: tl.constexpr, RP: tl.constexpr, COLS: tl.constexpr,
                  CP: tl.constexpr):  # fmt: skip
    rows = tl.arange(0, RP)[:, None]
    cols = tl.arange(0, CP)[None, :]
    inside = (rows < ROWS) & (cols < COLS)
    tl.store(pointer + rows * COLS + cols, a.to(pointer.dtype.element_ty), mask=inside)


# Glimpses. Arguments of image n begin at n times a stride; for inputs, the stride of a row


@triton.jit
def paint(
    states, inputs, w_heads, b_heads, heads, image, canvas, painted, hits,
    STATES_STRIDE: tl.constexpr, INPUTS_STRIDE: tl.constexpr, HEADS: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, B: tl.constexpr, BP: tl.constexpr, A: tl.constexpr,
    AP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
    READ_SPAN: tl.constexpr, WRITE_SPAN: tl.constexpr, BOUND: tl.constexpr, EPS: tl.constexpr,
    ADDS_EPS: tl.constexpr,
    WRITE: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Heads of h_dec, the next canvas, and the patch of the next glimpse.

    WRITE: compute heads and canvas; otherwise both exist. READ: compute the patch.
    """
    n = tl.program_id(0).to(tl.int64)
    numbers = heads + n * HEADS
    painted += n * (B * A)
    if WRITE:
        units = tl.arange(0, HP)
        h = tl.load(states + n * STATES_STRIDE + units, mask=units < H, other=0.0).to(tl.float32)
        for first in tl.static_range(0, HEADS, ROWS):
            rows = first + tl.arange(0, ROWS)
            inside = (rows < HEADS)[:, None] & (units < H)[None, :]
            w = tl.load(w_heads + rows[:, None] * H + units[None, :], mask=inside, other=0.0)
            said = tl.sum(w * h[None, :], 1)
            said += tl.load(b_heads + rows, mask=rows < HEADS, other=0.0)
            tl.store(numbers + rows, said, mask=rows < HEADS)
        tl.debug_barrier()  # other threads read the stored numbers
        side = numbers + 5
        _count(hits, side, BOUND)
        f_x, _, _, f_y, _, _ = _grid(
            side, W, WP, B, BP, A, AP, WRITE_SPAN, BOUND, EPS, ADDS_EPS
        )  # fmt: skip
        patch = _load_matrix(numbers + 10, W, WP, W, WP) * tl.exp(-tl.load(side + 4))
        wide = _down(patch, f_x)
        c = _load_matrix(canvas + n * (B * A), B, BP, A, AP) + _up(f_y, wide)
        _store_matrix(painted, c, B, BP, A, AP)
    else:
        c = _load_matrix(painted, B, BP, A, AP)
    if READ:
        _count(hits, numbers, BOUND)
        g_x, _, _, g_y, _, _ = _grid(
            numbers, R, RP, B, BP, A, AP, READ_SPAN, BOUND, EPS, ADDS_EPS
        )  # fmt: skip
        intensity = tl.exp(tl.load(numbers + 4))
        x = _load_matrix(image + n * (B * A), B, BP, A, AP)
        patches = inputs + n * INPUTS_STRIDE
        _store_matrix(patches, _across(_down(g_y, x), g_x) * intensity, R, RP, R, RP)
        error = x - _sigmoid(c)
        _store_matrix(patches + R * R, _across(_down(g_y, error), g_x) * intensity, R, RP, R, RP)


@triton.jit
def unpaint(
    heads, dheads, dinputs, image, painted, dcanvas,
    INPUTS_STRIDE: tl.constexpr, HEADS: tl.constexpr, B: tl.constexpr, BP: tl.constexpr,
    A: tl.constexpr, AP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, W: tl.constexpr,
    WP: tl.constexpr, READ_SPAN: tl.constexpr, WRITE_SPAN: tl.constexpr, BOUND: tl.constexpr,
    EPS: tl.constexpr,
    ADDS_EPS: tl.constexpr, WRITE: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Backward of `paint`, to the heads and to the canvas."""
    n = tl.program_id(0).to(tl.int64)
    numbers, dnumbers = heads + n * HEADS, dheads + n * HEADS
    dcanvas += n * (B * A)
    d_canvas = _load_matrix(dcanvas, B, BP, A, AP)
    if READ:
        g_x, x_distance, x_shift, g_y, y_distance, y_shift = _grid(
            numbers, R, RP, B, BP, A, AP, READ_SPAN, BOUND, EPS, ADDS_EPS
        )
        intensity = tl.exp(tl.load(numbers + 4))
        x = _load_matrix(image + n * (B * A), B, BP, A, AP)
        seen = _sigmoid(_load_matrix(painted + n * (B * A), B, BP, A, AP))
        # Past the edge, where filters are 0, it is -1/2.
        error = x - seen
        patches = dinputs + n * INPUTS_STRIDE
        d_x = _load_matrix(patches, R, RP, R, RP) * intensity
        d_error = _load_matrix(patches + R * R, R, RP, R, RP) * intensity
        down = _down(g_y, x)
        down_error = _down(g_y, error)
        across = _down(d_x, g_x)
        across_error = _down(d_error, g_x)
        dg_x = _up(d_x, down) + _up(d_error, down_error)
        dg_y = _across(across, x) + _across(across_error, error)
        _grid_back(
            numbers, dnumbers, dg_x, g_x, x_distance, x_shift, dg_y, g_y, y_distance, y_shift,
            R, RP, B, A, READ_SPAN, BOUND, ADDS_EPS,
        )  # fmt: skip
        brightness = tl.sum(tl.sum(across * down + across_error * down_error, 1), 0)
        tl.store(dnumbers + 4, brightness)
        d_canvas -= _up(g_y, across_error) * seen * (1.0 - seen)
        _store_matrix(dcanvas, d_canvas, B, BP, A, AP)
    if WRITE:
        side, dside = numbers + 5, dnumbers + 5
        f_x, x_distance, x_shift, f_y, y_distance, y_shift = _grid(
            side, W, WP, B, BP, A, AP, WRITE_SPAN, BOUND, EPS, ADDS_EPS
        )
        faint = tl.exp(-tl.load(side + 4))
        patch = _load_matrix(numbers + 10, W, WP, W, WP) * faint
        down = _down(f_y, d_canvas)
        d_patch = _across(down, f_x)
        df_x = _up(patch, down)
        df_y = _across(_down(patch, f_x), d_canvas)
        _grid_back(
            side, dside, df_x, f_x, x_distance, x_shift, df_y, f_y, y_distance, y_shift,
            W, WP, B, A, WRITE_SPAN, BOUND, ADDS_EPS,
        )  # fmt: skip
        tl.store(dside + 4, -tl.sum(tl.sum(patch * d_patch, 1), 0))
        _store_matrix(dnumbers + 10, d_patch * faint, W, WP, W, WP)


# LSTMs


@triton.jit
def _vector(pointer, cols, mask, default: tl.constexpr, THERE: tl.constexpr):
    a = default
    if THERE:
        a = tl.load(pointer + cols, mask=mask, other=0.0)
    return a


@triton.jit
def _add(totals, q: tl.constexpr, H: tl.constexpr, cols, mask, a):
    tl.store(totals + q * H + cols, _read(totals, q, H, cols, mask) + a, mask=mask)


@triton.jit
def lstm_forward(
    sums, bias, gain, shift, gates, c_before, c_after, stats, h_1, h_2, h_3,
    STRIDE_1: tl.constexpr, STRIDE_2: tl.constexpr, STRIDE_3: tl.constexpr, H: tl.constexpr,
    HP: tl.constexpr, RULE: tl.constexpr, EPS: tl.constexpr, GAIN: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """From pre-activations to h, stored in up to three places (stride 0: none)."""
    n = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, HP)
    mask = cols < H
    s0, s1, s2, s3 = _read_gates(sums + n * (4 * H), H, cols, mask, 4)
    b0, b1, b2, b3 = _read_gates(bias, H, cols, mask, 4)
    i, f, g, o = _sigmoid(s0 + b0), _sigmoid(s1 + b1), _tanh(s2 + b2), _sigmoid(s3 + b3)
    c = _next_cell(i, f, g, tl.load(c_before + n * H + cols, mask=mask, other=0.0))
    tl.store(c_after + n * H + cols, c, mask=mask)
    _write_gates(gates + n * (4 * H), H, cols, mask, 4, i, f, g, o)
    a = c
    if RULE:
        a, mean, factor = _normalised(c, mask, H, RULE, EPS)
        tl.store(stats + 2 * n, mean)
        tl.store(stats + 2 * n + 1, factor)
    a = a * _vector(gain, cols, mask, 1.0, GAIN) + _vector(shift, cols, mask, 0.0, SHIFT)
    h = o * _tanh(a)
    tl.store(h_1 + n * STRIDE_1 + cols, h.to(h_1.dtype.element_ty), mask=mask)
    if STRIDE_2:
        tl.store(h_2 + n * STRIDE_2 + cols, h.to(h_2.dtype.element_ty), mask=mask)
    if STRIDE_3:
        tl.store(h_3 + n * STRIDE_3 + cols, h.to(h_3.dtype.element_ty), mask=mask)


@triton.jit
def lstm_backward(
    dh_1, dh_2, dheads, w_heads, gain, shift, gates, c_before, c_after, stats, dc, dgates, totals,
    STRIDE_1: tl.constexpr, STRIDE_2: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr,
    HP: tl.constexpr, RULE: tl.constexpr, GAIN: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Backpropagate from h to pre-activations; accumulates sums over glimpses.

    HEADS: outputs of the heads (0: none), whose gradients are backpropagated here.
    """
    n = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, HP)
    mask = cols < H
    dh = tl.load(dh_1 + n * STRIDE_1 + cols, mask=mask, other=0.0).to(tl.float32)
    dh += tl.load(dh_2 + n * STRIDE_2 + cols, mask=mask, other=0.0).to(tl.float32)
    for first in tl.static_range(0, HEADS, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < HEADS)[:, None] & mask[None, :]
        w = tl.load(w_heads + rows[:, None] * H + cols[None, :], mask=inside, other=0.0)
        d = tl.load(dheads + n * HEADS + rows, mask=rows < HEADS, other=0.0)
        dh += tl.sum(w * d[:, None], 0)
    i, f, g, o = _read_gates(gates + n * (4 * H), H, cols, mask, 4)
    c = tl.load(c_after + n * H + cols, mask=mask, other=0.0)
    before = tl.load(c_before + n * H + cols, mask=mask, other=0.0)
    d_c = tl.load(dc + n * H + cols, mask=mask, other=0.0)
    totals += n * (6 * H)
    a = c
    factor = 1.0
    if RULE:
        factor = tl.load(stats + 2 * n + 1)
        a = tl.where(mask, (c - tl.load(stats + 2 * n)) * factor, 0.0)
    scale = _vector(gain, cols, mask, 1.0, GAIN)
    d_o, dm = _output_back(dh, o, _tanh(a * scale + _vector(shift, cols, mask, 0.0, SHIFT)))
    if RULE:
        _add(totals, 4, H, cols, mask, dm * a)
        _add(totals, 5, H, cols, mask, dm)
        d_c += _normalised_back(dm * scale, a, factor, H, RULE)
    else:
        d_c += dm
    d_i, d_g = _input_back(d_c, i, g)
    d_f, d_before = _forget_back(d_c, f, before)
    tl.store(dc + n * H + cols, d_before, mask=mask)
    _write_gates(dgates + n * (4 * H), H, cols, mask, 4, d_i, d_f, d_g, d_o)
    _add(totals, 0, H, cols, mask, d_i)
    _add(totals, 1, H, cols, mask, d_f)
    _add(totals, 2, H, cols, mask, d_g)
    _add(totals, 3, H, cols, mask, d_o)


# Latents


@triton.jit
def latent_forward(
    posterior, bias, noise, means, log_stds, inputs, hits,
    INPUTS_STRIDE: tl.constexpr, Z: tl.constexpr, ZP: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """From the products of h_enc to z."""
    n = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, ZP)
    mask = cols < Z
    posterior += n * (2 * Z) + cols
    bias += cols
    mean = tl.load(posterior, mask=mask, other=0.0) + tl.load(bias, mask=mask, other=0.0)
    spread = tl.load(posterior + Z, mask=mask, other=0.0).to(tl.float32)
    spread += tl.load(bias + Z, mask=mask, other=0.0)
    tl.atomic_add(hits, tl.sum((tl.abs(spread) > BOUND).to(tl.int64), 0))
    spread = tl.minimum(tl.maximum(spread, -BOUND), BOUND)
    tl.store(means + n * Z + cols, mean, mask=mask)
    tl.store(log_stds + n * Z + cols, spread, mask=mask)
    z = mean + tl.exp(spread) * tl.load(noise + n * Z + cols, mask=mask, other=0.0)
    tl.store(inputs + n * INPUTS_STRIDE + cols, z.to(inputs.dtype.element_ty), mask=mask)


@triton.jit
def latent_backward(
    dinputs, means, log_stds_gradient, noise, log_stds, dposterior, totals,
    INPUTS_STRIDE: tl.constexpr, Z: tl.constexpr, ZP: tl.constexpr, BOUND: tl.constexpr,
    OF_MEANS: tl.constexpr, OF_LOG_STDS: tl.constexpr,
):  # fmt: skip
    """Gradients of means and log standard deviations, and their sums over glimpses."""
    n = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, ZP)
    mask = cols < Z
    here = n * Z + cols
    d = tl.load(dinputs + n * INPUTS_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    log_std = tl.load(log_stds + here, mask=mask, other=0.0)
    d_spread = d * tl.exp(log_std) * tl.load(noise + here, mask=mask, other=0.0)
    if OF_LOG_STDS:
        d_spread += tl.load(log_stds_gradient + here, mask=mask, other=0.0)
    d_spread = tl.where(tl.abs(log_std) < BOUND, d_spread, 0.0)
    if OF_MEANS:
        d += tl.load(means + here, mask=mask, other=0.0)
    dposterior += n * (2 * Z) + cols
    tl.store(dposterior, d.to(dposterior.dtype.element_ty), mask=mask)
    tl.store(dposterior + Z, d_spread.to(dposterior.dtype.element_ty), mask=mask)
    totals += n * (2 * Z)
    _add(totals, 0, Z, cols, mask, d)
    _add(totals, 1, Z, cols, mask, d_spread)
