"""A single step in C++, for online use."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from ln_zoo.ops.addresses import address, identity
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
        (cases, inputs), hidden = x.shape, weights.hh.shape[1]
        width = spec.gates * hidden
        self._sizes = {"N": cases, "H": hidden, "G": width}
        self._inputs = cases, inputs
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
            cases=cases,
            hidden=hidden,
            threads=torch.get_num_threads(),
            input=row_arguments(spec.input),
            recurrent=row_arguments(spec.recurrent),
            out=row_arguments(spec.out),
        )
        self._arguments.fill(self._vectors, self._sizes)
        kind = torch.float32
        biases = (("bias_ih", weights.bias_ih), ("bias_hh", weights.bias_hh))
        self._others = (
            inputs,
            address("weight_ih", weights.ih, kind, (width, inputs)),
            address("weight_hh", weights.hh, kind, (width, hidden)),
            *(None if b is None else address(name, b, kind, (width,)) for name, b in biases),
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
        if not all(a.is_contiguous() and a.data_ptr() for a in tensors):
            return None  # Fake tensors have no memory.
        return cls(cell, records, x, weights, step_key(records, x, weights, switch))

    def suits(self, records: Records, x: Tensor, weights: Weights, switch: str) -> bool:
        """Whether this is the step for these tensors, whose numbers may have changed."""
        return self._key == step_key(records, x, weights, switch)

    def __call__(self, x: Tensor, states: States) -> States:
        """The next states; they and x are checked."""
        after = tuple([state.clone(memory_format=torch.contiguous_format) for state in states])
        # A copy: several threads may run one cell.
        arguments = StepsArguments.from_buffer_copy(self._arguments)
        arguments.fill({"h": after[0], "c": after[-1]}, self._sizes)
        x = x.contiguous()
        inputs = address("input", x, torch.float32, self._inputs)
        self._run(byref(arguments), inputs, *self._others)
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
            key += (identity(record.gain), identity(record.shift))
    key += [identity(a) for a in weights]
    return tuple(key)
