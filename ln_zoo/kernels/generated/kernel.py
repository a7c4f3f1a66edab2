"""A generated kernel: its plan, and its compiled library."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable
from ctypes import Structure, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ln_zoo.kernels.generated.emit import source
from ln_zoo.kernels.generated.plan import Plan, plan_of
from ln_zoo.kernels.generated.trace import StepForm, Trace, Unsupported
from ln_zoo.kernels.native import runtime
from ln_zoo.kernels.native.build import NativeLibrary
from ln_zoo.kernels.native.compiler import ABI, Unavailable
from ln_zoo.ops import memory
from ln_zoo.ops.cells import Cell, Sites, Weights

#: Typical seconds of compilation, for messages.
SECONDS = 4
_SOURCE = Path(__file__).with_name("generated.cpp")  # not a file: its text is generated


class ProductFunctions(Structure):
    """``Products`` of loop.h."""

    names = "kind", "size", "pack", "product", "in_place", "outer", "thin", "shares", "parts"
    _fields_ = tuple((name, c_void_p) for name in names)


#: Fields of ``Call`` of loop.h, a word each: numbers, then addresses.
CALL = (
    *("steps", "examples", "inputs", "threads", "narrow", "chunk"),
    *("products", "sizes", "given", "output", "finals", "kept"),
    *("dout", "dfinals", "gradients", "rooms"),
)


@functools.cache
def _functions_of(library: ctypes.CDLL) -> ProductFunctions:
    found = [getattr(library, f"ln_zoo_matrix_{name}") for name in ProductFunctions.names]
    return ProductFunctions(*(ctypes.cast(function, c_void_p).value for function in found))


def product_functions() -> ProductFunctions:
    """The products of the native library."""
    return _functions_of(runtime.library())


@dataclass(frozen=True)
class Kernel:
    """A step compiled for these widths, by `make`."""

    trace: Trace
    plan: Plan
    library: ctypes.CDLL
    text: str
    products: int  # address of `ProductFunctions`, which are never freed
    matrices: tuple[tuple[int, ...] | None, ...]  # shapes of the weights of products

    @functools.cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the parameters."""
        return [tuple(a.shape) for a in self.trace.parameters]

    @functools.cached_property
    def weight_names(self) -> list[str]:
        """Names of weights and parameters, for messages."""
        own = [f"parameter {i}" for i in range(len(self.shapes))]
        return ["w_ih", "w_hh", "w_hr", *own]

    def weight_shapes(self, columns: int) -> list[tuple[int, ...] | None]:
        """Shapes of weights and parameters; ``columns`` are those of w_ih."""
        return [(self.trace.gates, columns), *self.matrices, *self.shapes]

    @functools.cached_property
    def has_gradient(self) -> list[bool]:
        """Whether the step depends on each parameter."""
        there = {*self.trace.outputs, *(f"d_{p.weight}" for p in self.trace.products)}
        return [f"d_p{i}" in there for i in range(len(self.trace.parameters))]

    @functools.cached_property
    def allocators(self) -> list[Callable[[Tensor], Tensor] | None]:
        """Allocate the gradients of `Tensors`, up to the parameters; None: there is none."""

        def of(weight: str, there: bool = True) -> Callable[[Tensor], Tensor] | None:
            if not there:
                return None
            # Gradients of rows that no product uses are zero.
            return torch.empty_like if covered.get(weight, True) else torch.zeros_like

        covered = self._covered()
        own = enumerate(self.has_gradient)
        return [
            lambda x: memory.empty(*x.shape, like=x, dtype=x.dtype),
            of("ih"),
            *(of(weight, weight in covered) for weight in ("hh", "hr")),
            *(torch.empty_like for _ in self.trace.widths),
            *(of(f"p{i}", there) for i, there in own),
        ]

    def _covered(self) -> dict[str, bool]:
        """Whether products use all rows of each weight."""
        shapes = dict(zip(("hh", "hr"), self.matrices, strict=True))
        shapes |= {f"p{i}": shape for i, shape in enumerate(self.shapes)}
        found: dict[str, bool] = {}
        for weight in {p.weight for p in self.trace.products}:
            products = [p for p in self.trace.products if p.weight == weight]
            rows = {row for p in products for row in range(p.first, p.first + p.width)}
            shape = shapes[weight]
            assert shape is not None
            found[weight] = len(rows) == math.prod(shape[:-1])
        return found


_libraries: dict[str, ctypes.CDLL] = {}
_mutex = threading.Lock()


def make(cell: Cell, sites: Sites, weights: Weights, form: StepForm, centres: bool) -> Kernel:
    """Trace, compile and load a kernel; `Unsupported` with a reason.

    ``centres``: whether weights may be centred while packing, which products in bfloat16 exclude.
    """
    planned = plan_of(cell, sites, weights, form, centres)
    traced = planned.trace
    text = f"constexpr long LN_ZOO_ABI = {ABI};\n\n{source(planned)}"
    traced.forget()
    with _mutex:
        if text not in _libraries:
            _libraries[text] = _load(text, cell.name)
        matrices = tuple(None if a is None else tuple(a.shape) for a in (weights.hh, weights.hr))
        products = ctypes.addressof(product_functions())
        return Kernel(traced, planned, _libraries[text], text, products, matrices)


def _load(text: str, cell: str) -> ctypes.CDLL:
    try:
        product_functions()
        what = f"the generated kernel of {cell}"
        library = NativeLibrary(_SOURCE, text=text, what=what, seconds=SECONDS).load()
    except Unavailable as error:
        raise Unsupported(error.reason) from error
    for name, result in (("keeps", c_int64), ("forward", None), ("backward", None)):
        function = getattr(library, f"ln_zoo_cell_{name}")
        function.argtypes, function.restype = (c_void_p,), result
    return library
