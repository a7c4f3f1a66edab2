"""Triton kernels of a window over a text (equations: `ln_zoo.ops.loops.window`).

They run between the step kernels of an LSTM. Addresses and the length of the texts come from a
table, so that a captured graph serves texts of every length.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ln_zoo.kernels.triton.kernels import (
    _kept,
    _read_gates,
    _through_deviations,
    _write_gates,
)
from ln_zoo.kernels.triton.window_slots import BACKWARD_SLOTS, FORWARD_SLOTS

# In the order of FORWARD_SLOTS
(V, INPUT_WEIGHT, WEIGHT, BIAS, TEXT, CHARACTERS, WINDOW, KAPPA, SHOWN, TERMS) = (
    tl.constexpr(slot) for slot in range(len(FORWARD_SLOTS))
)  # fmt: skip
# In the order of BACKWARD_SLOTS
(B_V, B_STATS, B_GAIN_INPUT, B_WORK, B_DV, B_WEIGHT, B_TEXT, B_CHARACTERS, B_DSHOWN, B_DKAPPA,
 B_TERMS, B_PARAMETERS) = (tl.constexpr(slot) for slot in range(len(BACKWARD_SLOTS)))  # fmt: skip


@triton.jit
def _pointer(table, slot: tl.constexpr):
    return tl.load(table + slot).to(tl.pointer_type(tl.float32))


@triton.jit
def _distances(kappa, places):
    return kappa[:, None] - (places + 1).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["row", "examples"])
def add_window(
    table, row, examples, G: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add the product of the windows and their input weight to v; one tile per program."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    here, inside = (rows < examples)[:, None], (cols < G)[None, :]
    window = _pointer(table, WINDOW) + rows[:, None] * E
    weight = _pointer(table, INPUT_WEIGHT) + cols[None, :]
    v = _pointer(table, V) + (row.to(tl.int64) + rows)[:, None] * G + cols[None, :]
    total = tl.load(v, mask=here & inside, other=0.0)
    for first in range(0, E, DEPTH):
        letters = first + tl.arange(0, DEPTH)
        there = letters < E
        a = tl.load(window + letters[None, :], mask=here & there[None, :], other=0.0)
        b = tl.load(weight + letters[:, None] * G, mask=there[:, None] & inside, other=0.0)
        total += tl.dot(a, b, input_precision="ieee")
    tl.store(v, total, mask=here & inside)


@triton.jit(do_not_specialize=["row"])
def window_forward(
    table, h, row, H: tl.constexpr, UNITS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The window of each row of h; one program per row."""
    n = tl.program_id(0).to(tl.int64)
    line = row.to(tl.int64) + n
    k = tl.arange(0, KP)
    there = k < K

    weight = _pointer(table, WEIGHT) + k[:, None] * H
    alpha = tl.zeros((KP, UNITS), dtype=tl.float32)
    beta = tl.zeros((KP, UNITS), dtype=tl.float32)
    moved = tl.zeros((KP, UNITS), dtype=tl.float32)
    for first in range(0, H, UNITS):
        units = first + tl.arange(0, UNITS)
        mask = there[:, None] & (units < H)[None, :]
        state = tl.load(h + n * H + units, mask=units < H, other=0.0)[None, :]
        alpha += state * tl.load(weight + units[None, :], mask=mask, other=0.0)
        beta += state * tl.load(weight + (K * H + units)[None, :], mask=mask, other=0.0)
        moved += state * tl.load(weight + (2 * K * H + units)[None, :], mask=mask, other=0.0)
    bias = _pointer(table, BIAS) + k
    alpha = tl.exp(tl.sum(alpha, 1) + tl.load(bias, mask=there, other=0.0))
    beta = tl.exp(tl.sum(beta, 1) + tl.load(bias + K, mask=there, other=0.0))
    moved = tl.exp(tl.sum(moved, 1) + tl.load(bias + 2 * K, mask=there, other=0.0))
    centres = _pointer(table, KAPPA) + n * K + k
    kappa = tl.load(centres, mask=there, other=0.0) + moved
    tl.store(centres, kappa, mask=there)
    terms = _pointer(table, TERMS) + line * (4 * K) + k
    tl.store(terms, alpha, mask=there)
    tl.store(terms + K, beta, mask=there)
    tl.store(terms + 2 * K, moved, mask=there)
    tl.store(terms + 3 * K, kappa, mask=there)

    characters = tl.load(table + CHARACTERS)
    letters = tl.arange(0, EP)
    text = _pointer(table, TEXT) + n * characters * E + letters[None, :]
    shown = tl.zeros((PLACES, EP), dtype=tl.float32)
    for first in range(0, characters, PLACES):
        places = first + tl.arange(0, PLACES)
        d = _distances(kappa, places)
        phi = alpha[:, None] * tl.exp(-beta[:, None] * d * d)
        # Padding Gaussians and characters may be infinite.
        phi = tl.sum(tl.where(there[:, None] & (places < characters)[None, :], phi, 0.0), 0)
        mask = (places < characters)[:, None] & (letters < E)[None, :]
        shown += phi[:, None] * tl.load(text + places[:, None] * E, mask=mask, other=0.0)
    w = tl.sum(shown, 0)
    tl.store(_pointer(table, WINDOW) + n * E + letters, w, mask=letters < E)
    tl.store(_pointer(table, SHOWN) + line * E + letters, w, mask=letters < E)


@triton.jit(do_not_specialize=["row"])
def window_backward(
    table, gradient, dwindow, row, H: tl.constexpr, UNITS: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, PLACES: tl.constexpr,
    HAS_DSHOWN: tl.constexpr,
):  # fmt: skip
    """Gradients of a window's parameters, from the window's; also added to the gradient of h."""
    n = tl.program_id(0).to(tl.int64)
    line = row.to(tl.int64) + n
    k = tl.arange(0, KP)
    there = k < K
    letters = tl.arange(0, EP)
    dw = tl.load(dwindow + n * E + letters, mask=letters < E, other=0.0)
    if HAS_DSHOWN:
        dshown = _pointer(table, B_DSHOWN) + line * E + letters
        dw += tl.load(dshown, mask=letters < E, other=0.0)
    terms = _pointer(table, B_TERMS) + line * (4 * K) + k
    alpha = tl.load(terms, mask=there, other=0.0)
    beta = tl.load(terms + K, mask=there, other=0.0)
    moved = tl.load(terms + 2 * K, mask=there, other=0.0)
    kappa = tl.load(terms + 3 * K, mask=there, other=0.0)

    characters = tl.load(table + B_CHARACTERS)
    text = _pointer(table, B_TEXT) + n * characters * E + letters[None, :]
    sums = tl.zeros((KP, PLACES), dtype=tl.float32)
    firsts = tl.zeros((KP, PLACES), dtype=tl.float32)
    seconds = tl.zeros((KP, PLACES), dtype=tl.float32)
    for first in range(0, characters, PLACES):
        places = first + tl.arange(0, PLACES)
        mask = (places < characters)[:, None] & (letters < E)[None, :]
        dphi = tl.sum(dw[None, :] * tl.load(text + places[:, None] * E, mask=mask, other=0.0), 1)
        d = _distances(kappa, places)
        p = tl.exp(-beta[:, None] * d * d) * dphi[None, :]
        p = tl.where((places < characters)[None, :], p, 0.0)
        sums += p
        firsts += p * d
        seconds += p * d * d
    centres = _pointer(table, B_DKAPPA) + n * K + k
    dkappa = tl.load(centres, mask=there, other=0.0) - 2.0 * alpha * beta * tl.sum(firsts, 1)
    dalpha = alpha * tl.sum(sums, 1)
    dbeta = -alpha * beta * tl.sum(seconds, 1)
    dmoved = dkappa * moved
    tl.store(centres, dkappa, mask=there)
    parameters = _pointer(table, B_PARAMETERS) + line * (3 * K) + k
    tl.store(parameters, dalpha, mask=there)
    tl.store(parameters + K, dbeta, mask=there)
    tl.store(parameters + 2 * K, dmoved, mask=there)

    weight = _pointer(table, B_WEIGHT) + k[:, None] * H
    for first in range(0, H, UNITS):
        units = first + tl.arange(0, UNITS)
        mask = there[:, None] & (units < H)[None, :]
        d = dalpha[:, None] * tl.load(weight + units[None, :], mask=mask, other=0.0)
        d += dbeta[:, None] * tl.load(weight + (K * H + units)[None, :], mask=mask, other=0.0)
        d += dmoved[:, None] * tl.load(weight + (2 * K * H + units)[None, :], mask=mask, other=0.0)
        at = gradient + n * H + units
        before = tl.load(at, mask=units < H, other=0.0)
        tl.store(at, before + tl.sum(tl.where(there[:, None], d, 0.0), 0), mask=units < H)


@triton.jit(do_not_specialize=["row"])
def input_gradient_of_step(
    table, operand, row, H: tl.constexpr, BLOCK: tl.constexpr, STARTS: tl.constexpr,
    STATS_SIZE: tl.constexpr,
):  # fmt: skip
    """A row of dv, also written to `operand` for the product with the window's weight.

    STARTS: groups of statistics; 0: no normalisation.
    """
    n = tl.program_id(0).to(tl.int64)
    line = row.to(tl.int64) + n
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    work = _pointer(table, B_WORK) + line * (5 * H)
    d0, d1, d2, d3 = _read_gates(work, H, cols, mask, 4)
    if STARTS:
        r0, r1, r2, r3 = _kept(_pointer(table, B_STATS) + line * STATS_SIZE, 4, STARTS)
        d0, d1, d2, d3 = _through_deviations(
            d0, d1, d2, d3, _pointer(table, B_V) + line * (4 * H), r0, r1, r2, r3,
            _pointer(table, B_GAIN_INPUT), H, cols, mask, 4, STARTS,
        )  # fmt: skip
    _write_gates(_pointer(table, B_DV) + line * (4 * H), H, cols, mask, 4, d0, d1, d2, d3)
    _write_gates(operand + n * (4 * H), H, cols, mask, 4, d0, d1, d2, d3)
