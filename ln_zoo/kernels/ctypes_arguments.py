"""Checked tensor addresses for C++ code, which reads and writes memory without bounds checks.

A structure passed to C++ subclasses `Arguments`, which states the form of each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Structure
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

_CPU = torch.device("cpu")
#: Dtypes in a `TensorForm`; ``"kind"`` is that of products.
_PRECISIONS = {"wide": torch.float32, "whole": torch.int64, "flag": torch.bool}

#: A dtype (``"wide"``: float32, ``"kind"``: that of products, ``"whole"``: int64, ``"flag"``: bool)
#: and a shape as names of sizes; or ``"packed"``, rows and columns of a packed matrix.
TensorForm = tuple[str, ...]


def address(
    name: str, a: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device = _CPU
) -> int:
    """Address of a contiguous tensor.

    RuntimeError, with ``name``, for another dtype, shape or device, or without contiguous memory.
    """
    if (
        a.device != device
        or a.dtype != dtype
        or a.shape != shape
        or not a.is_contiguous()
        or a.is_neg()
    ):
        raise RuntimeError(_wrong(name, a, dtype, shape, device))
    return _start(name, a)


def addresses(
    names: Sequence[str],
    tensors: Sequence[Tensor | None],
    shapes: Sequence[tuple[int, ...] | None],
) -> list[int]:
    """Addresses of float32 tensors on the CPU, 0 for None; a fast path of `address`.

    RuntimeError as for `address`, and if only one of tensor and shape is None.
    """
    found: list[int] = []
    for a, shape in zip(tensors, shapes, strict=True):
        if a is None or shape is None:
            if a is not shape:
                got = "none" if a is None else list(a.shape)
                raise RuntimeError(f"Expected {names[len(found)]} size {shape}, got {got}")
            found.append(0)
            continue
        start = 0
        if (
            a.is_cpu
            and a.dtype is torch.float32
            and a.shape == shape
            and a.is_contiguous()
            and not a.is_neg()
        ):
            start = a.data_ptr()
        found.append(start or address(names[len(found)], a, torch.float32, shape))
    return found


class KnownForms:
    """Forms of the float32 tensors on the CPU that calls have in common.

    Raises:
        RuntimeError: as `addresses`.
    """

    def __init__(
        self,
        names: Sequence[str],
        tensors: Sequence[Tensor | None],
        shapes: Sequence[tuple[int, ...] | None],
    ) -> None:
        self._names, self._shapes = names, shapes
        addresses(names, tensors, shapes)
        there = [a for a in tensors if a is not None]
        sizes: list[Any] = [[*a.shape] for a in there]
        strides: list[Any] = [[*a.stride()] for a in there]
        #: One call in place of six for each tensor. In another mode (inference, autocast) it fails,
        #: and `addresses` decides.
        self._guards = TensorGuards(*there, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def addresses(self, tensors: Sequence[Tensor | None]) -> list[int]:
        """As `addresses`."""
        if self._guards.check(*[a for a in tensors if a is not None]):
            return [0 if a is None else a.data_ptr() for a in tensors]
        return addresses(self._names, tensors, self._shapes)


def matrix(name: str, a: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Address and strides of a matrix on the CPU; see `address`."""
    if a.device != _CPU or a.dtype != dtype or a.shape != shape or a.is_neg():
        raise RuntimeError(_wrong(name, a, dtype, shape, _CPU))
    return _start(name, a), *a.stride()


def _start(name: str, a: Tensor) -> int:
    found = a.data_ptr()
    if not found and a.numel():
        raise RuntimeError(
            f"{name} has a shape, {tuple(a.shape)}, but no memory: it is fake, or its storage was "
            "freed"
        )
    return found


def _wrong(
    name: str, a: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> str:
    if a.device != device:
        return (
            f"Expected all tensors to be on the same device, but got {name} is on {a.device}, "
            f"different from other tensors on {device}"
        )
    if a.dtype != dtype:
        return f"Expected {name} to have dtype {dtype}, got {a.dtype}"
    if a.shape != shape:
        return f"Expected {name} size {tuple(shape)}, got {list(a.shape)}"
    if a.is_neg():
        return f"{name} is a negated view: call .resolve_neg()"
    return f"Expected {name} to be contiguous, got strides {a.stride()} of size {tuple(a.shape)}"


class Packed(NamedTuple):
    """A matrix of this shape, packed for the C++ products."""

    memory: Tensor
    shape: tuple[int, int]

    def address(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        if self.shape != shape:
            raise RuntimeError(f"Expected {name} size {tuple(shape)}, got {list(self.shape)}")
        return address(name, self.memory, dtype, tuple(self.memory.shape))


class Arguments(Structure):
    """A ctypes structure whose fields named in ``tensors`` hold addresses; see `fill`."""

    #: Form of each tensor by its address field.
    tensors: ClassVar[Mapping[str, TensorForm]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.tensors:
            raise TypeError(f"{type(self).__name__}.{name} is an address: use fill")
        super().__setattr__(name, value)

    def fill(
        self,
        tensors: Mapping[str, Tensor | Packed | None],
        sizes: Mapping[str, int],
        kind: torch.dtype = torch.float32,
    ) -> None:
        """Set addresses; None leaves a field unchanged. The caller keeps the tensors alive.

        ``sizes`` are the names in shapes, ``kind`` is the dtype of products. RuntimeError for a
        tensor of another form.
        """
        for name, a in tensors.items():
            if a is not None:
                super().__setattr__(name, self._address(name, a, sizes, kind))

    def _address(
        self,
        name: str,
        a: Tensor | Packed,
        sizes: Mapping[str, int],
        kind: torch.dtype,
    ) -> int:
        precision, *letters = self.tensors[name]
        shape = tuple([sizes[letter] for letter in letters])
        if isinstance(a, Packed):
            assert precision == "packed", name
            return a.address(name, kind, shape)
        return address(name, a, _PRECISIONS.get(precision, kind), shape)


def check_steps(sizes: Sequence[int], rows: int, examples: int) -> None:
    """Validate rows n_t of each time step, from which kernels compute offsets.

    RuntimeError if they grow, exceed ``examples``, or do not sum to ``rows``.
    """
    sizes = list(sizes)
    if (
        sum(sizes) != rows
        or sizes != sorted(sizes, reverse=True)
        or (sizes and (sizes[0] > examples or sizes[-1] < 0))
    ):
        raise RuntimeError(
            f"sizes of {len(sizes)} steps must never grow, be {examples} at most and sum to {rows}"
        )
