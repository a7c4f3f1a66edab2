"""Argument structures of the kernels, field by field as in their sources."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from ln_zoo.ops.engines.base import Places, Statistics

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float


class Arguments(ctypes.Structure):
    """A structure of pointers and numbers; keeps its tensors alive. None is a null pointer."""

    def __init__(self, **values: Any) -> None:
        self.values = values
        super().__init__(
            **{
                name: value.data_ptr() if isinstance(value, Tensor) else value
                for name, value in values.items()
                if value is not None
            }
        )


_Fields = list[tuple[str, Any]]
_OPERANDS: _Fields = [
    (name, _P)
    for name in (
        "bias",
        "bias_candidate",
        "gain_input",
        "gain_recurrent",
        "gain_out",
        "shift_out",
    )
]
_NOISE: _Fields = [
    ("dropout", _P),
    ("hold_h", _P),
    ("hold_c", _P),
    ("share_h", _F),
    ("share_c", _F),
    ("reset", _P),
]
_SEQUENCE: _Fields = [("first_rows", _P), ("steps", _I), ("examples", _I)]
_STATISTICS: _Fields = [
    *((f"{name}_{place}", _P) for place in Places._fields for name in Statistics._fields),
    *((f"eps_{place}", _F) for place in Places._fields),
    ("correction", _I),
]


class ForwardArguments(Arguments):
    """Argument of ``forward`` in forward.cu."""

    _fields_ = [
        *((name, _P) for name in ("high", "low", "scale", "v", "stats")),
        *_OPERANDS,
        *_NOISE,
        *_SEQUENCE,
        *((name, _P) for name in ("h", "c", "out", "u", "cells")),
        ("eps_recurrent", _F),
        ("eps_out", _F),
    ]


class BackwardArguments(Arguments):
    """Argument of ``backward`` in backward.cu."""

    _fields_ = [
        *((name, _P) for name in ("high", "low", "scale", "v", "u", "stats")),
        *_OPERANDS,
        *_NOISE,
        *_SEQUENCE,
        *((name, _P) for name in ("dout", "h_before", "c_before", "c_after")),
        *((name, _P) for name in ("back", "dh", "dc", "work", "du", "dv")),
        *((name, _P) for name in ("bias_sums", "gain_out_sums", "shift_out_sums")),
    ]


class BatchForwardArguments(Arguments):
    """Argument of ``batch_forward`` in batch_forward.cu."""

    _fields_ = [
        *((name, _P) for name in ("high", "low", "scale", "v")),
        *_OPERANDS,
        *_SEQUENCE,
        *((name, _P) for name in ("h", "c", "out", "u", "cells")),
        *_STATISTICS,
    ]


class BatchBackwardArguments(Arguments):
    """Argument of ``batch_backward`` in batch_backward.cu."""

    _fields_ = [
        *((name, _P) for name in ("high", "low", "scale", "v", "u")),
        *_OPERANDS,
        *_SEQUENCE,
        *((name, _P) for name in ("dout", "h_before", "c_before", "c_after")),
        *((name, _P) for name in ("dh", "dc", "du", "dv")),
        *((f"sum_{name}", kind) for name, kind in _OPERANDS),
        *_STATISTICS,
    ]


class RowsLessMeansArguments(Arguments):
    """Argument of ``rows_less_means`` in batch_rows.cu."""

    _fields_ = [
        *((name, _P) for name in ("a", "out", "means", "first_rows")),
        *((name, _I) for name in ("n", "width", "kind")),
    ]


class StatisticsArguments(Arguments):
    """Argument of ``input_statistics`` in rows.cu."""

    _fields_ = [
        ("v", _P),
        ("stats", _P),
        ("rows", _L),
        ("H", _I),
        ("stride", _I),
        ("offset", _I),
        ("eps", _F),
    ]


class AfterLoopArguments(Arguments):
    """Argument of ``after_loop`` in rows.cu."""

    _fields_ = [
        *((name, _P) for name in ("work", "v", "u", "stats", "gain_v", "gain_u", "dv", "du")),
        *((name, _P) for name in ("bias", "bias_hn", "sum_v", "sum_u")),
        ("rows", _L),
        ("H", _I),
        ("stride", _I),
        ("offset_v", _I),
        ("offset_u", _I),
    ]


class ScaleArguments(Arguments):
    """Argument of ``scale_weights`` in pack.cu."""

    _fields_ = [
        ("w", _P),
        ("centred", _P),
        ("largest", _P),
        ("G", _I),
        ("H", _I),
        ("groups", _I),
        ("group_of", _I),
        ("centre", _I),
        ("kind", _I),
    ]


class PackArguments(Arguments):
    """Argument of ``pack_weights`` in pack.cu."""

    _fields_ = [
        *((name, _P) for name in ("centred", "index", "largest", "high", "low", "unscale")),
        ("count", _I),
    ]
