"""Functions of generated Triton kernels, with the infinities and NaN of torch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pointer(table, slot, kind: tl.constexpr):
    """The address in a slot of the table."""
    return tl.load(table + slot).to(tl.pointer_type(kind))


@triton.jit
def before(table, initial: tl.constexpr, after: tl.constexpr, row, W: tl.constexpr):
    """States before the step: those of the step before it, or ``initial`` before the first."""
    first = row == 0
    start = pointer(table, tl.where(first, initial, after), tl.float32)
    return start + tl.where(first, 0, row - tl.num_programs(0)) * W


@triton.jit
def maximum(a, b):
    """The larger number, or NaN."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def minimum(a, b):
    """The smaller number, or NaN."""
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def largest(a):
    """Maximum over a row."""
    return tl.reduce(a, 0, maximum)


@triton.jit
def relu(a):
    """Zero below zero; NaN stays."""
    return tl.where(a <= 0.0, 0.0, a)


@triton.jit
def sign(a):
    """-1, 0 or 1; NaN stays."""
    return tl.where(a > 0.0, 1.0, tl.where(a < 0.0, -1.0, a))


@triton.jit
def log1p(a):
    """log(1 + a), with the rounding of 1 + a corrected."""
    u = 1.0 + a
    plain = (u == 0.0) | (u == float("inf"))
    return tl.where(plain, tl.log(u), tl.log(u) - ((u - 1.0) - a) / u)


@triton.jit
def expm1(a):
    """e^a - 1, by its series near 0."""
    rest = 1.0 + a / 5 * (1.0 + a / 6 * (1.0 + a / 7))
    series = a * (1.0 + a / 2 * (1.0 + a / 3 * (1.0 + a / 4 * rest)))
    return tl.where(tl.abs(a) < 0.3, series, tl.exp(a) - 1.0)


@triton.jit
def trunc(a):
    """Rounded towards zero."""
    return tl.where(a < 0.0, tl.ceil(a), tl.floor(a))
