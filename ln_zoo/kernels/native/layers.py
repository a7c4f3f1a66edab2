"""Padded float32 calls on the CPU: one C++ call each for the forward and the backward pass.

In small calls a torch function costs as much as its computation, and between chunks all threads but
one would wait. So C++ receives the layer's tensors directly, and `Prepared` computes the rest once.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from ctypes import Structure, addressof, c_double, c_int64
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ln_zoo.kernels.ctypes_arguments import KnownForms, address, addresses
from ln_zoo.kernels.native.batch import shares_under_batch_norm
from ln_zoo.kernels.native.runtime import (
    library,
    rows_of_chunk,
    shares_of_units,
)
from ln_zoo.kernels.native.steps import CELLS as NUMBERS
from ln_zoo.kernels.native.steps import RowArguments, row_arguments
from ln_zoo.kernels.shared_weights import SharedWeights, StepRows, Sums
from ln_zoo.ops import memory
from ln_zoo.ops.cells import Cell, States, Weights
from ln_zoo.ops.chunks import statistics_size
from ln_zoo.ops.engines.base import NO_MASKS, NO_STATISTICS, FixedStatistics, Masks
from ln_zoo.ops.lowering import form_of, in_slots, kernel_tensors, make_spec
from ln_zoo.ops.norm_records import Record, Records, StepNorm
from ln_zoo.ops.recurrence import RecurrentCall, run_layers
from ln_zoo.ops.recurrent_kernel import (
    given_statistics,
    masks_of,
    update_running_statistics,
)
from ln_zoo.ops.regularization import Noise
from ln_zoo.ops.replay import batched, differentiable, replay
from ln_zoo.ops.spec import Examples, Rows, Spec


def _source(place: Rows | Examples) -> int:
    if isinstance(place, Rows):
        return 0
    return 2 if place.batch else 1


class Parameters(NamedTuple):
    """Parameters of one direction: weights (G, I) and (G, H), other vectors (G,) unless noted."""

    w_ih: Tensor
    w_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    gain_input: Tensor | None
    gain_recurrent: Tensor | None
    gain_out: Tensor | None  # (H,), of an LSTM's cell state or an RNN's sum
    shift_out: Tensor | None  # (H,), of an LSTM's cell state
    bias_inner: Tensor | None  # (gates, H), in the norm of the input term, or of the sum

    @staticmethod
    def of(cell: Cell, records: Records, weights: Weights) -> Parameters:
        places = in_slots(cell, records)
        first, second, out = (None if r is None or r.identity else r.gain for r in places)
        last = places[2]
        shift = None if last is None or last.identity else last.shift
        inner = weights.own[0] if weights.own else None
        return Parameters(*weights[:4], first, second, out, shift, inner)


class _Constants(Structure):
    """``Call`` of arguments.h."""

    _fields_ = (
        *((name, c_int64) for name in ("cell", "steps", "examples", "inputs", "hidden", "threads")),
        *((name, c_int64) for name in ("shares", "chunk_kept", "chunk_alone")),
        *((name, RowArguments) for name in ("input", "recurrent", "out")),
        *((name, c_double) for name in ("share_h", "share_c")),
        ("sources", c_int64 * 3),
        *((name, c_int64) for name in ("correction", "joint", "carried", "negated")),
        ("update_offset", c_double),
    )


_INPUTS = ("x", "h0", "c0")
#: ``Tensors`` of arguments.h: addresses of inputs, parameters, outputs, saved tensors, gradients,
#: masks, and statistics over examples (the batch's, and given ones of three places with their
#: rows).
_NAMES = (*_INPUTS, *Parameters._fields, "output", "h", "c", "kept", "d_output", "d_h", "d_c")
_GIVEN = len(_INPUTS) + len(Parameters._fields)
_NO_STATISTICS = (0,) * (1 + 2 * len(NO_STATISTICS))
#: Dtypes of `Masks`.
_MASKS = (torch.float32, torch.bool, torch.bool, torch.bool)
#: Addresses of ``Rooms`` of arguments.h.
_NO_ROOMS = (0,) * 4
_PACK = struct.Struct(
    f"{len(_NAMES) + _GIVEN + len(_MASKS) + len(_NO_STATISTICS) + len(_NO_ROOMS)}P"
).pack
_PACK_ROOMS = struct.Struct(f"{len(_NO_ROOMS)}P").pack
_NO_ADDRESSES = (0,) * len(_MASKS)
#: Null addresses of gradients, for the forward pass.
_ABSENT = (0,) * (3 + _GIVEN)


class _Direction:
    """One direction of one layer, for tensors of fixed shapes.

    ``lead`` is T and N, or N for a single step, which returns only states. ``state`` is the shape
    of states, (N, H) or (1, N, H). ``noise``: whether masks are sampled for each call.
    """

    def __init__(
        self,
        cell: Cell,
        spec: Spec,
        lead: tuple[int, ...],
        inputs: int,
        hidden: int,
        state: tuple[int, ...],
        parameters: Parameters,
        noise: bool,
        norms: Sequence[Record],
    ) -> None:
        self.spec, self.hidden, self._state = spec, hidden, state
        self._cell, self._norms = cell, norms
        self._steps = 1 if len(lead) == 1 else lead[0]
        self._lstm = spec.cell == "LSTM"
        self.output = None if len(lead) == 1 else (*lead, hidden)
        c = state if self._lstm else None
        self.inputs = ((*lead, inputs), state, c)
        width = spec.gates * hidden
        row, vector, inner = (hidden,), (width,), (spec.gates, hidden)
        of_all = ((width, inputs), (width, hidden), *[vector] * 4, row, row, inner)
        self.parameters = tuple(
            None if a is None else shape for a, shape in zip(parameters, of_all, strict=True)
        )
        offset = form_of(cell).update_offset
        self._constants = _Constants(
            cell=NUMBERS[spec.cell],
            steps=self._steps,
            examples=lead[-1],
            inputs=inputs,
            hidden=hidden,
            threads=torch.get_num_threads(),
            shares=shares_under_batch_norm(hidden)
            if spec.examples
            else shares_of_units(spec.gates, hidden, lead[-1], noise or any(spec.zoneout)),
            chunk_kept=rows_of_chunk(math.prod(lead), saved=True),
            chunk_alone=rows_of_chunk(math.prod(lead), saved=False),
            input=row_arguments(spec.input),
            recurrent=row_arguments(spec.recurrent),
            out=row_arguments(spec.out),
            share_h=spec.zoneout[0],
            share_c=spec.zoneout[1],
            sources=(c_int64 * 3)(*map(_source, spec.places)),
            correction=max(getattr(place, "correction", 0) for place in spec.places),
            joint=self.merged and spec.gates > 1,
            carried=spec.carried,
            negated=offset is not None,
            update_offset=offset or 0.0,
        )
        self._masks = (lead[-1], hidden), (*lead, hidden), (*lead, hidden), (math.prod(lead),)
        self._address = addressof(self._constants)
        found = library()
        self._forward, self._backward = found.ln_zoo_call_forward, found.ln_zoo_call_backward
        self._weights = found.ln_zoo_call_weights
        #: Node in the graph of the latest step.
        self._shared: SharedWeights | None = None
        self._kept = (found.ln_zoo_call_keeps(self._address),)
        self._read_back = (*self.inputs, *self.parameters, self.output, None, None, self._kept)

    def __call__(
        self,
        x: Tensor,
        states: States,
        parameters: Parameters,
        starts: Sequence[int] | None,
        found: Sequence[int],
        masks: Masks,
    ) -> tuple[Any, States]:
        """Output and final states.

        ``starts`` are the `addresses` of the states, or None if not yet computed; ``found`` are the
        parameters'. Masks have the shapes of x.
        """
        again = starts is not None and self.output is None
        if starts is None:
            starts = addresses(_INPUTS[1:], states, self.inputs[1 : len(states) + 1])
        tensors: tuple[Tensor | None, ...]
        if self._lstm:
            tensors, first = (x, *states, *parameters), starts
        else:
            tensors, first = (x, *states, None, *parameters), (*starts, 0)
        found = (*addresses(_INPUTS, (x,), self.inputs[:1]), *first, *found)
        if torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in tensors):
            shared = None
            if again:
                make = functools.partial(_StepRows, self)
                shared = SharedWeights.of_step(self._shared, states, make, parameters)
                self._shared = shared
            if shared is None:
                output, h, c = _Call.apply(self, found, masks, None, (), *tensors)
            else:
                operands = (*tensors[: len(_INPUTS)], shared.token)
                output, h, c = _Call.apply(self, found, masks, shared.sums, parameters, *operands)
        else:
            output, h, c, *_ = self.forward(x, found, masks, save=False)
        return output, (h, c) if self._lstm else (h,)

    def _addresses_of(self, masks: Masks) -> Sequence[int]:
        if masks is NO_MASKS:
            return _NO_ADDRESSES
        fields = zip(Masks._fields, masks, _MASKS, self._masks, strict=True)
        return [
            0 if a is None else address(name, a, kind, shape) for name, a, kind, shape in fields
        ]

    def _statistics(self, x: Tensor) -> tuple[Tensor | None, FixedStatistics]:
        if not self.spec.examples:
            return None, NO_STATISTICS
        steps, examples, _ = x.shape
        for norm in self._norms:
            if isinstance(norm, StepNorm) and norm.batch:
                norm.check(examples)
        own = x.new_empty(statistics_size(self.spec, steps, self.hidden))
        return own, given_statistics(self.spec, self._norms, 0, steps, x.dtype)

    def _addresses_of_statistics(self, own: Tensor | None, given: FixedStatistics) -> Sequence[int]:
        if own is None:
            return _NO_STATISTICS
        shapes = [
            None if rows is None else (2, min(max(rows.shape[1], 1), self._steps), width)
            for rows, width in zip(given, self.spec.widths(self.hidden), strict=True)
        ]
        size = statistics_size(self.spec, self._steps, self.hidden)
        found = addresses(
            ("statistics", *FixedStatistics._fields), (own, *given), ((size,), *shapes)
        )
        return (*found, *(0 if rows is None else rows.shape[1] for rows in given))

    def forward(self, x: Tensor, found: Sequence[int], masks: Masks, save: bool) -> tuple[Any, ...]:
        """Output, final states, and saved tensors, the last of which is a `FixedStatistics`."""
        output = None if self.output is None else x.new_empty(self.output)
        h = x.new_empty(self._state)
        c = x.new_empty(self._state) if self._lstm else None
        kept = memory.pooled_empty(*self._kept, like=x, dtype=torch.float32) if save else None
        to = [0 if a is None else a.data_ptr() for a in (output, h, c, kept)]
        own, given = self._statistics(x)
        last = (*self._addresses_of(masks), *self._addresses_of_statistics(own, given))
        self._forward(self._address, _PACK(*found, *to, *_ABSENT, *last, *_NO_ROOMS))
        if own is not None:
            sizes = [x.shape[1]] * self._steps
            update_running_statistics(self.spec, self._norms, 0, sizes, own, self.hidden)
        return output, h, c, kept, own, given

    def backward(
        self,
        saved: Sequence[Tensor | None],
        masks: Masks,
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
        later: _StepRows | None = None,
    ) -> list[Tensor | None]:
        """Gradients of inputs and parameters.

        If given, ``later`` collects rows from which parameter gradients are computed later.
        """
        inputs, (output, kept, own, *given) = saved[:_GIVEN], saved[_GIVEN:]
        found = addresses(_NAMES, (*inputs, output, None, None, kept), self._read_back)
        grads = [None if d is None else d.contiguous() for d in grads]
        shapes = [
            None if d is None else shape
            for d, shape in zip(grads, (self.output, *self.inputs[1:]), strict=True)
        ]
        found += addresses(_NAMES[-3:], grads, shapes)
        made = [
            memory.empty(*a.shape, like=a, dtype=torch.float32) if a is not None and need else None
            for a, need in zip(inputs, needs, strict=True)
        ]
        to = [0 if a is None else a.data_ptr() for a in made]
        if later is not None:
            to[len(_INPUTS) :] = later.vectors
        to += self._addresses_of(masks)
        to += self._addresses_of_statistics(own, FixedStatistics(*given))
        rooms = _NO_ROOMS if later is None else later.take()
        self._backward(self._address, _PACK(*found, *to, *rooms))
        return made

    def add_weights(self, rooms: Sequence[int], rows: int, to: Sequence[int], more: bool) -> None:
        """Write, or add if ``more``, the gradients of both weights to these addresses."""
        self._weights(self._address, _PACK_ROOMS(*rooms), rows, *to, more)

    @property
    def examples(self) -> int:
        return int(self._constants.examples)

    @property
    def merged(self) -> bool:
        """Whether the terms are added before anything else; an LSTM's without norms may be."""
        spec = self.spec
        plain = spec.cell == "LSTM" and not (spec.input.scale or spec.recurrent.scale)
        return spec.merged or (plain and not spec.examples)

    def replay(
        self, tensors: Sequence[Any], masks: Masks, given: FixedStatistics
    ) -> tuple[Tensor | None, ...]:
        """Output and final states by the generic loop; supports all transforms."""
        (x, h0, c0), p = tensors[:3], Parameters(*tensors[3:])
        states = tuple(s.view(-1, self.hidden) for s in (h0, c0) if s is not None)
        affine = (p.gain_input, None), (p.gain_recurrent, None), (p.gain_out, p.shift_out)
        records = {
            role: r if r is None else replace(r, gain=gain, shift=shift)
            for role, r, (gain, shift) in zip(
                form_of(self._cell).roles, self._norms, affine, strict=True
            )
            if role is not None
        }
        weights = Weights(*p[:4], own=() if p.bias_inner is None else (p.bias_inner,))
        x = x.unsqueeze(0) if self.output is None else x
        operands = kernel_tensors(self._cell, records, weights, x, states)
        output, *final = replay(self.spec, operands, None, given, masks)
        return None if self.output is None else output, *(s.view(self._state) for s in final)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        direction: _Direction,
        found: Sequence[int],
        masks: Masks,
        sums: Sums | None,
        parameters: Parameters | tuple[()],
        *tensors: Any,
    ) -> tuple[Tensor | None, ...]:
        output, h, c, kept, own, given = direction.forward(tensors[0], found, masks, save=True)
        ctx.direction, ctx.sums = direction, sums
        ctx.set_materialize_grads(False)
        operands = tensors if sums is None else (*tensors[: len(_INPUTS)], *parameters)
        ctx.save_for_backward(*masks, *operands, output, kept, own, *given)
        return output, h, c

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        direction: _Direction = ctx.direction
        sums: Sums | None = ctx.sums
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[5:]
        masks, saved = Masks(*saved[: len(NO_MASKS)]), saved[len(NO_MASKS) :]
        if sums is not None:
            wanted = torch._C._will_engine_execute_node(ctx.next_functions[-1][0])
            needs = (*needs[: len(_INPUTS)], *(need and wanted for need in sums.needs))
        if torch.is_grad_enabled() or batched(grads):
            tensors, given = (
                saved[:_GIVEN],
                FixedStatistics(*saved[-len(FixedStatistics._fields) :]),
            )
            found = differentiable(
                lambda operands: direction.replay(operands, masks, given), tensors, grads, needs
            )
            if sums is not None and wanted:
                sums.now().add(found[len(_INPUTS) :])
        elif sums is not None and wanted:
            needs = (*needs[: len(_INPUTS)], *(False for _ in sums.needs))
            found = direction.backward(saved, masks, grads, needs, sums.now().rows(saved[0]))
        else:
            found = direction.backward(saved, masks, grads, needs)
        if sums is not None:
            found = [*found[: len(_INPUTS)], None]
        return (None, None, None, None, None, *found)


class _StepRows(StepRows):
    """Rows of several steps, from which C++ computes gradients of weights; see ``Rooms``."""

    def __init__(self, direction: _Direction, needs: Sequence[bool], like: Tensor) -> None:
        super().__init__(direction.examples)
        self._direction = direction
        width, (_, inputs) = direction.spec.gates * direction.hidden, direction.inputs[0]
        widths = (0 if direction.merged else width, width, inputs, direction.hidden)
        self._memory = [
            memory.pooled_empty(self.room, n, like=like, dtype=torch.float32) if n else None
            for n in widths
        ]
        self._strides = [4 * n for n in widths]
        self._starts = [0 if a is None else a.data_ptr() for a in self._memory]
        self.gradients = [
            None
            if not need or shape is None
            else memory.empty(*shape, like=like, dtype=torch.float32)
            if name.startswith("w_")
            else like.new_zeros(shape)
            for name, need, shape in zip(
                Parameters._fields, needs, direction.parameters, strict=True
            )
        ]
        found = [0 if a is None else a.data_ptr() for a in self.gradients]
        self._weights, self.vectors = found[:2], (0, 0, *found[2:])
        self._more = False

    def take(self) -> list[int]:
        place = self.place()
        pairs = zip(self._starts, self._strides, strict=True)
        return [start + place * stride for start, stride in pairs]

    def add(self, rows: int) -> None:
        self._direction.add_weights(self._starts, rows, self._weights, self._more)
        self._more = True


def without_tensors(call: RecurrentCall) -> RecurrentCall:
    """A copy of the call without inputs, states, resets and masks, which it would keep alive."""
    weights = [w._replace(noise=w.noise.shares) for w in call.weights]
    return call._replace(x=torch.empty(0), states=(), weights=weights, reset=None)


class Prepared:
    """All directions of a layer, or a single step of a cell, for inputs of one shape."""

    def __init__(self, call: RecurrentCall) -> None:
        cell, records, x, _, _, weights, bidirectional, *_ = call
        self._call = without_tensors(call)
        pairs = zip(records, weights, strict=True)
        self._parameters = [Parameters.of(cell, *pair) for pair in pairs]
        lead, hidden = tuple(x.shape[:-1]), weights[0].hh.shape[1]
        single = len(records) == 1
        # A single direction needs no stacking.
        state = (1, lead[-1], hidden) if single and len(lead) == 2 else (lead[-1], hidden)
        each = 2 if bidirectional else 1
        self._directions = [
            _Direction(
                cell,
                make_spec(cell, record, w),
                lead,
                x.shape[-1] if i < each else each * hidden,
                hidden,
                state,
                parameters,
                w.noise.sampled,
                in_slots(cell, record),
            )
            for i, (record, w, parameters) in enumerate(
                zip(records, weights, self._parameters, strict=True)
            )
        ]
        both = zip(self._parameters, self._directions, strict=True)
        self._forms = [KnownForms(Parameters._fields, a, d.parameters) for a, d in both]

    def check(self) -> list[list[int]]:
        """Addresses of each direction's parameters; RuntimeError if one has changed its form."""
        pairs = zip(self._forms, self._parameters, strict=True)
        return [forms.addresses(parameters) for forms, parameters in pairs]

    def __call__(
        self,
        found: list[list[int]],
        x: Tensor,
        starts: Sequence[int] | None,
        states: States,
        dropout: float,
        training: bool,
        noise: Sequence[Noise] | None,
        reset: Tensor | None,
    ) -> tuple[Any, States]:
        """Output and final states.

        ``found`` is the result of `check`, ``starts`` are the `addresses` of the states, or None if
        not yet computed. States are (layers * directions, N, H), or (N, H) for a single step;
        ``reset`` is (T * N,).
        """
        masks = [NO_MASKS] * len(self._directions) if noise is None else [*map(masks_of, noise)]
        if len(self._directions) == 1:
            only, parameters = self._directions[0], self._parameters[0]
            own = _with_resets(masks[0], reset)
            return only(x.contiguous(), states, parameters, starts, found[0], own)

        def run(
            i: int, x: Tensor, sizes: Any, states: States, reset: Tensor | None
        ) -> tuple[Tensor, States]:
            own = (self._parameters[i], None, found[i], _with_resets(masks[i], reset))
            return self._directions[i](x.contiguous(), states, *own)

        now = self._call._replace(
            x=x, states=states, dropout=dropout, training=training, reset=reset
        )
        return run_layers(run, now)


def _with_resets(masks: Masks, reset: Tensor | None) -> Masks:
    return masks if reset is None else masks._replace(reset=reset.contiguous())
