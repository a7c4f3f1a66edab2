"""A single step in C++, for online use."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from ln_zoo.ops.cells import Cell, States, Weights
from ln_zoo.ops.native.runtime import constant, library
from ln_zoo.ops.native.steps import CELLS, StepsArguments, row_arguments
from ln_zoo.ops.records import Record, Records, RowNorm
from ln_zoo.ops.spec import specify


class NativeStep:
    """Steps of a few cases in float32, without gradients, on certain tensors.

    What C++ is told of them is made once; `suits` says whether it still holds.

    Args:
        cell: the cell.
        records: what happens to summed inputs, by role.
        x: inputs, (N, I).
        weights: the effective weights.
        key: what `step_key` says of all of them.
    """

    def __init__(
        self, cell: Cell, records: Records, x: Tensor, weights: Weights, key: tuple[object, ...]
    ) -> None:
        self._key = key
        spec = specify(cell, records, weights)
        width, hidden = weights.hh.shape
        last = records.get("cell") or records.get("sum")
        # Held here, since the structure has addresses alone.
        self._vectors = {
            "gain_input": _vector(records["input"], "gain", 1.0, width),
            "gain_recurrent": _vector(records["recurrent"], "gain", 1.0, width),
            "gain_out": _vector(last, "gain", 1.0, hidden),
            "shift_out": _vector(last, "shift", 0.0, hidden),
        }
        self._arguments = StepsArguments(
            cell=CELLS[spec.cell],
            cases=x.shape[0],
            hidden=hidden,
            threads=torch.get_num_threads(),
            input=row_arguments(spec.input),
            recurrent=row_arguments(spec.recurrent),
            out=row_arguments(spec.out),
            **{name: a.data_ptr() for name, a in self._vectors.items()},
        )
        biases = (weights.bias_ih, weights.bias_hh)
        self._others = (
            *(x.shape[1], weights.ih.data_ptr(), weights.hh.data_ptr()),
            *(None if b is None else b.data_ptr() for b in biases),
        )
        self._run = library().ln_zoo_step

    @classmethod
    def of(
        cls,
        cell: Cell,
        records: Records,
        x: Tensor,
        states: States,
        weights: Weights,
        switch: str,
    ) -> NativeStep | None:
        """The step, or ``None`` where C++ has none for these tensors."""
        shifts = [r.shift for role, r in records.items() if r is not None and role != "cell"]
        gains = [r.gain for r in records.values() if r is not None]
        tensors = [a for a in (x, *states, *weights, *gains, *shifts) if a is not None]
        if any(shift is not None for shift in shifts) or any(
            a.dtype != torch.float32 or a.device.type != "cpu" for a in tensors
        ):
            return None
        if not all(a.is_contiguous() for a in tensors):
            return None
        return cls(cell, records, x, weights, step_key(records, x, weights, switch))

    def suits(
        self, records: Records, x: Tensor, states: States, weights: Weights, switch: str
    ) -> bool:
        """Whether this is the step for these tensors, whose numbers may have changed."""
        return (
            self._key == step_key(records, x, weights, switch)
            and all(s.dtype == torch.float32 and s.is_contiguous() for s in states)
            and x.is_contiguous()
        )

    def __call__(self, x: Tensor, states: States) -> States:
        """The next states."""
        after = tuple(state.clone() for state in states)
        # A copy: several threads may run one cell.
        arguments = StepsArguments.from_buffer_copy(self._arguments)
        arguments.h, arguments.c = after[0].data_ptr(), after[-1].data_ptr()
        self._run(byref(arguments), x.data_ptr(), *self._others)
        return after


def _vector(record: Record, name: str, default: float, size: int) -> Tensor:
    a = None if record is None or record.identity else getattr(record, name)
    return constant(default, size) if a is None else a


def step_key(records: Records, x: Tensor, weights: Weights, switch: str) -> tuple[object, ...]:
    """All that a step depends on but its states; of tensors the addresses, not the numbers."""
    key: list[object] = [switch, x.shape, x.dtype, x.device, torch.get_num_threads()]
    for record in records.values():
        if isinstance(record, RowNorm):
            key += (record.groups, record.scale, record.center, record.eps)
            key += (_where(record.gain), _where(record.shift))
    key += [_where(a) for a in weights]
    return tuple(key)


def _where(a: Tensor | None) -> tuple[object, ...] | None:
    return None if a is None else (a.data_ptr(), a.shape, a.dtype, a.is_contiguous())
