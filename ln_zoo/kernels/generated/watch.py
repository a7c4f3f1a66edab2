"""Plain values that a trace depends on: attributes of norms and cells, closures and globals.

A trace repeats the decisions that Python made with them, so a changed value needs a new trace.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ln_zoo.ops.cells import Cell, Sites

#: Entries of a module that say nothing of what it computes.
_BOOKKEEPING = ("_is_full_backward_hook", "_non_persistent_buffers_set")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
#: Packages whose functions are not searched for globals.
_LIBRARIES = ("torch", "ln_zoo", "numpy", "builtins")
_MISSING = object()
_DEPTH = 6


class _Cell:
    """A closure's variable as a mapping."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:
            return default


class Watched:
    """Values found when it was made; see `unchanged`."""

    def __init__(self, cell: Cell, sites: Sites) -> None:
        self._entries: list[tuple[Any, Any, Any]] = []
        self._copies: list[tuple[Any, Any]] = []
        self._sizes: list[tuple[Any, int]] = []
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        self._names: list[Any] = []
        self._add(cell.step, 0)
        for role in sorted(sites):
            self._names.append(role)
            self._add(sites[role], 0)
        # Only while it looks: identities must not be used again.
        self._seen.clear()
        self._alive.clear()

    @property
    def summary(self) -> tuple[Any, ...]:
        """The values; equal for sites that differ in nothing else. Hashable."""
        return tuple(self._names)

    def unchanged(self) -> bool:
        for mapping, key, value in self._entries:
            now = mapping.get(key, _MISSING)
            if now is not value and not _same(now, value):
                return False
        for mapping, size in self._sizes:
            if len(mapping) != size:
                return False
        return all(now == before for now, before in self._copies)

    def _add(self, a: Any, depth: int) -> None:
        if isinstance(a, _PLAIN):
            self._names.append((type(a).__name__, a))
            return
        if isinstance(a, Tensor):
            self._names.append(("tensor", tuple(a.shape), a.dtype))
            return
        if id(a) in self._seen or depth > _DEPTH:
            self._names.append(("again", type(a).__qualname__))
            return
        self._seen.add(id(a))
        self._alive.append(a)
        if isinstance(a, tuple | list | frozenset | set):
            self._add_items(a, depth)
        elif isinstance(a, Mapping):
            self._add_items(list(a.items()), depth)
            self._copies.append((a, copy.copy(a)))
        elif isinstance(a, functools.partial):
            for part in (a.func, a.args, a.keywords):
                self._add(part, depth + 1)
        elif isinstance(a, types.MethodType):
            self._add(a.__func__, depth)
            self._add(a.__self__, depth + 1)
        elif isinstance(a, types.FunctionType):
            self._add_function(a, depth)
        elif isinstance(a, type | types.ModuleType | types.BuiltinFunctionType):
            self._names.append(id(a))
        else:
            self._add_object(a, depth)

    def _add_items(self, a: Any, depth: int) -> None:
        self._names.append((type(a).__name__, len(a)))
        for item in a:
            self._add(item, depth + 1)
        if isinstance(a, list | set):
            self._copies.append((a, copy.copy(a)))

    def _add_entry(self, mapping: Any, key: Any, depth: int) -> None:
        value = mapping.get(key, _MISSING)
        self._entries.append((mapping, key, value))
        self._names.append(key)
        self._add(value, depth + 1)

    def _add_function(self, a: types.FunctionType, depth: int) -> None:
        self._names.append(a.__code__)
        if a.__module__.partition(".")[0] in _LIBRARIES:
            return
        self._add(a.__defaults__, depth + 1)
        self._add(a.__kwdefaults__ or (), depth + 1)
        for cell in a.__closure__ or ():
            self._add_entry(_Cell(cell), "cell", depth)
        for name in _global_names(a.__code__):
            if name in a.__globals__:
                self._add_entry(a.__globals__, name, depth)

    def _add_object(self, a: Any, depth: int) -> None:
        kind = type(a)
        self._names.append(id(kind))
        own = getattr(a, "__dict__", {})
        self._sizes.append((own, len(own)))
        for key in list(own):
            if isinstance(a, nn.Module) and (isinstance(own[key], dict) or key in _BOOKKEEPING):
                continue
            self._add_entry(own, key, depth)
        if isinstance(a, nn.Module):
            for name, module in a.named_children():
                self._names.append(name)
                self._add(module, depth + 1)
            for name, parameter in a.named_parameters(recurse=False):
                self._names.append((name, tuple(parameter.shape)))
        if kind.__module__.partition(".")[0] in _LIBRARIES:
            return
        for owner in kind.__mro__:
            if owner.__module__.partition(".")[0] in _LIBRARIES:
                continue
            for key, value in list(vars(owner).items()):
                if not key.startswith("__") and (isinstance(value, (*_PLAIN, types.FunctionType))):
                    self._add_entry(vars(owner), key, depth)


def _global_names(code: types.CodeType) -> list[str]:
    """Names that a function and those inside it look up."""
    found = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _global_names(constant)
    return found


def _same(now: Any, before: Any) -> bool:
    plain = (*_PLAIN, tuple, frozenset)
    return type(now) is type(before) and isinstance(now, plain) and bool(now == before)
