"""Shared by the native engines: the library, memory and products."""

from __future__ import annotations

import ctypes
import functools
import logging
from ctypes import c_char_p, c_int64, c_void_p

import torch
from torch import Tensor

from ln_zoo.kernels.ctypes_arguments import Packed, address, matrix
from ln_zoo.kernels.native import build
from ln_zoo.ops import memory
from ln_zoo.ops.engines.base import Steps, centred
from ln_zoo.ops.spec import Examples, Rows

# The library

_log = logging.getLogger("ln_zoo")
#: Log level and message by the result of ``ln_zoo_tiles`` (``Tiles`` of amx_products.h).
_TILES = (
    (logging.INFO, "run on AMX tiles"),
    (logging.INFO, "run without AMX tiles: the compiler or the system has none"),
    (logging.INFO, "run without AMX tiles: the processor has none"),
    (logging.INFO, "run without AMX tiles: Linux does not let this process use them"),
    (logging.WARNING, "run without AMX tiles: a product on them was wrong when it was tried"),
)


def library() -> ctypes.CDLL:
    """The library with typed functions; after `build.rebuild`, the new one."""
    return _typed(build.library())


@functools.cache
def _typed(found: ctypes.CDLL) -> ctypes.CDLL:
    i, p = c_int64, c_void_p
    for name in ("packed_size", "shares", "share_packed_size", "call_keeps", "tiles"):
        getattr(found, f"ln_zoo_{name}").restype = i
    for name, types in {
        "packed_size": (i, i, i),
        "pack": (p, i, i, i, i, p, i, p, i, i, i),
        "means": (p, i, i, i, p, p, i),
        "product": (i, i, i, p, i, i, p, p, i, i, i),
        "forward": (p,),
        "backward": (p,),
        "window_forward": (p, p),
        "window_backward": (p, p),
        "call_keeps": (p,),
        "call_forward": (p, c_char_p),
        "call_backward": (p, c_char_p),
        "call_weights": (p, p, i, p, p, i),
        "shares": (i, i, i, i),
        "share_packed_size": (i, i, i, i),
        "share_pack": (i, i, i, i, p, p, p, i),
        "batch_forward": (p, p),
        "batch_backward": (p, p),
        **{f"draw_{name}": (p, i) for name in ("read", "latent", "write")},
        **{f"draw_{name}_back": (p, i) for name in ("read", "latent", "write")},
        **{"draw_lstm": (p, i, i), "draw_lstm_back": (p, i, i)},
    }.items():
        getattr(found, f"ln_zoo_{name}").argtypes = types
    level, text = _TILES[found.ln_zoo_tiles()]
    _log.log(level, "products of bfloat16 %s", text)
    return found


def unavailable_reason() -> str | None:
    """Why there is no library, or None; compiles it at the first call."""
    try:
        library()
    except build.Unavailable as error:
        return error.reason
    return None


# As torch.compiler.assume_constant_result, which would import the whole compiler.
unavailable_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Memory


def scratch_memory(name: str, n: int, dtype: torch.dtype) -> Tensor:
    """`ln_zoo.ops.memory.scratch` of shape (n,), cached."""
    return memory.scratch(f"native {name}", n, dtype=dtype)


@functools.lru_cache(maxsize=64)
def constant(value: float, n: int) -> Tensor:
    """Read-only stand-in for absent gains and biases."""
    return torch.full((n,), value, dtype=torch.float32, device="cpu")


# Products


def rows_of_chunk(rows: int, saved: bool) -> int:
    """Minimum rows of a chunk in a call of this many rows.

    Fewer chunks are faster. A tenth of all rows is small compared with the tensors saved for the
    backward pass; without one, torch's own loop allocates memory for all rows.
    """
    return min(max(256, rows // (10 if saved else 2)), 2048)


def shares_of_units(gates: int, hidden: int, examples: int, noise: bool) -> int:
    """Number of shares of units, one per thread; 1 if threads split the examples (under noise)."""
    if noise:
        return 1
    return int(library().ln_zoo_shares(gates, hidden, examples, torch.get_num_threads()))


class NativeProducts(Steps):
    """Products over all rows of a chunk in C++; centres w_ih (G, I) if the place is."""

    leaves_constants = False

    def __init__(self, w_ih: Tensor, place: Rows | Examples, rows: int) -> None:
        self._raw, self._place = w_ih, place
        self._rows = rows
        self._packed: Packed | None = None

    @functools.cached_property
    def w_ih(self) -> Tensor:  # type: ignore[override]
        return centred(self._raw, self._place).contiguous()

    def rows_of_chunk(self, saved: bool) -> int:
        return rows_of_chunk(self._rows, saved)

    def terms(self, x: Tensor, out: Tensor) -> None:
        if not _suits(x, self._raw.t()):
            super().terms(x, out)
            return
        if self._packed is None:
            self._packed = packed("w_ih", self._raw, self._place, transposed=True)
        multiply(x, self._packed, out, add=False)

    def input_gradient(self, dv: Tensor, out: Tensor) -> None:
        if not _suits(dv, self._raw):
            super().input_gradient(dv, out)
            return
        if self._packed is None:
            self._packed = packed("w_ih", self._raw, self._place, transposed=False)
        multiply(dv, self._packed, out, add=False)

    def add_weight_gradient(self, d: Tensor, a: Tensor, total: Tensor, first: bool) -> None:
        if _suits(d.t(), a):
            multiply(d.t(), packed("rows", a), total, add=not first)
        else:
            super().add_weight_gradient(d, a, total, first)


def _suits(a: Tensor, b: Tensor) -> bool:
    """Whether our product is faster than torch's: not for few rows or columns, nor in bfloat16."""
    return a.dtype == torch.float32 and min([*a.shape, *b.shape[1:]]) >= 16


def multiply(a: Tensor, packed: Packed, out: Tensor, add: bool) -> None:
    """Write or add a (M, K) times `packed` (K, N) to out (M, N), in float32; out may be strided."""
    m, (k, n), kind = a.shape[0], packed.shape, torch.float32
    left = matrix("the left factor", a, kind, (m, k))
    to, row, column = matrix("the product", out, kind, (m, n))
    if column != 1 and out.numel():
        raise RuntimeError(f"rows of the product must be contiguous, got strides {out.stride()}")
    library().ln_zoo_product(
        *(m, n, k, *left, packed.address("the right factor", kind, (k, n))),
        *(to, row, add, torch.get_num_threads()),
    )


def packed(
    name: str, a: Tensor, rows: Rows | Examples | None = None, transposed: bool = False
) -> Packed:
    """Pack a matrix (K, N), or (N, K) if ``transposed``, in scratch memory of that name.

    With ``rows``, the weight is `centred`.
    """
    kind = torch.bfloat16 if a.dtype == torch.bfloat16 else torch.float32
    narrow, means, hidden = kind == torch.bfloat16, None, 1
    if isinstance(rows, Rows) and rows.scale and rows.center:
        if narrow:
            a = centred(a, rows)
        else:
            means, hidden = _means(name, a, rows)
    a = a.t() if transposed else a
    k, n = a.shape
    size = library().ln_zoo_packed_size(k, n, narrow)
    to = scratch_memory(name, size, kind)
    library().ln_zoo_pack(
        *(*matrix(name, a, kind, (k, n)), k, n, address(name, to, kind, (size,)), narrow),
        *(means, hidden, transposed, torch.get_num_threads()),
    )
    return Packed(to, (k, n))


def packed_shares(
    name: str, w_hh: Tensor, rows: Rows | Examples, shares: int, backward: bool
) -> Packed:
    """Pack the recurrent weight (G, H), transposed for the forward pass, share by share.

    Each thread uses its share of the units. ``name`` and ``rows`` as in `packed`.
    """
    width, hidden = w_hh.shape
    gates, kind = width // hidden, torch.float32
    means = None
    if isinstance(rows, Rows) and rows.scale and rows.center:
        means, _ = _means(name, w_hh, rows)
    layout = (gates, hidden, shares, backward)
    size = library().ln_zoo_share_packed_size(*layout)
    to = scratch_memory(name, size, kind)
    library().ln_zoo_share_pack(
        *(*layout, address(name, w_hh, kind, (width, hidden)), address(name, to, kind, (size,))),
        *(means, torch.get_num_threads()),
    )
    return Packed(to, (width, hidden) if backward else (hidden, width))


def _means(name: str, w: Tensor, rows: Rows) -> tuple[int, int]:
    """Address of the mean rows of each group, repeated for every gate, and rows per gate."""
    gates, features, kind = sum(rows.groups), w.shape[1], torch.float32
    hidden = w.shape[0] // gates
    size = gates * features
    means = address("means", scratch_memory("means", size, kind), kind, (size,))
    groups = (c_int64 * gates)(*first_gates(rows))
    # All gates have the same number of rows.
    start = address(name, w, kind, (gates * hidden, features))
    threads = torch.get_num_threads()
    library().ln_zoo_means(start, gates, hidden, features, groups, means, threads)
    return means, hidden


def first_gates(rows: Rows) -> list[int]:
    """Index of the first gate that shares statistics with each gate."""
    found: list[int] = []
    for size in rows.groups:
        found += [len(found)] * size
    return found
