"""One direction of one layer on a generated kernel, with autograd.

Double backward and batched gradients run the generic loop.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Sequence
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from ln_zoo.kernels.ctypes_arguments import address, addresses, check_steps
from ln_zoo.kernels.generated.direction import FIRST_STATE, Direction, Tensors
from ln_zoo.kernels.generated.kernel import CallArguments, Kernel
from ln_zoo.kernels.generated.pieces import in_pieces
from ln_zoo.kernels.generated.products import add_weight_gradient
from ln_zoo.kernels.generated.trace import substituted
from ln_zoo.kernels.native.runtime import rows_of_chunk
from ln_zoo.kernels.shared_weights import StepRows, Sums
from ln_zoo.ops import memory
from ln_zoo.ops.cells import States
from ln_zoo.ops.recurrence import scan
from ln_zoo.ops.regularization import Noise
from ln_zoo.ops.replay import batched, differentiable


def run(d: Direction, tensors: Tensors) -> tuple[Tensor, States]:
    """Outputs in the layout of x, and final states, in float32."""
    flat = tensors.flat()
    if torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in flat):
        out, *finals = _Function.apply(d, *flat)
    else:
        out, finals, _ = passes(d)[0](d, tensors, saves=False)
    return out, tuple(finals)


def passes(d: Direction) -> Any:
    """Forward and backward pass on the kernel's backend."""
    found = (_forward, _backward) if isinstance(d.kernel, Kernel) else d.kernel.passes
    return in_pieces(*found) if d.recompute else found


# Arguments

#: An array for C++; ctypes would make a new type for each size again and again.
_words = functools.partial(array, "q")


@functools.lru_cache(maxsize=64)
def _equal_sizes(steps: int, examples: int) -> Any:
    """Rows of each step of a padded batch, for C++."""
    return _words([examples] * steps)


class _Arguments:
    """A structure for C++, which holds what it points to."""

    def __init__(
        self, d: Direction, t: Tensors, saves: bool, given: Sequence[int] | None = None
    ) -> None:
        lead = t.x.shape[:-1]
        examples, rows, inputs = t.states[0].shape[-2], lead.numel(), t.x.shape[-1]
        if d.sizes is None:
            sizes = _equal_sizes(t.x.shape[0], examples)
        else:
            check_steps(d.sizes, rows, examples)
            sizes = _words(d.sizes)
        self._alive: list[Any] = []
        self.structure = CallArguments(
            steps=len(sizes),
            examples=examples,
            inputs=inputs,
            threads=d.threads,
            narrow=d.narrow,
            chunk=rows_of_chunk(rows, saves),
            products=d.kernel.products,
        )
        self._keep("sizes", sizes)
        self._keep("given", _words(_given(d, t) if given is None else given))

    def own(self, name: str, tensors: Sequence[Tensor | None]) -> None:
        """Set an array of addresses of tensors that this module made."""
        self._alive.append(tensors)
        self._keep(name, _words([0 if a is None else a.data_ptr() for a in tensors]))

    def _keep(self, name: str, words: Any) -> None:
        self._alive.append(words)
        setattr(self.structure, name, words.buffer_info()[0])


def _given(d: Direction, t: Tensors) -> list[int]:
    """Addresses of `Call::given`, checked."""
    kernel, trace, lead = d.kernel, d.kernel.trace, tuple(t.x.shape[:-1])
    sizes = tuple(t.states[0].shape[:-1])
    states = [(*sizes, width) for width in trace.widths]
    columns = t.w_ih.shape[1]  # 0: see `ln_zoo.ops.cells.input_products`
    inputs = (*lead, columns or trace.gates), (trace.gates, columns)
    shapes = (*inputs, *kernel.matrices, *states)
    dropped = (sizes[-1], trace.widths[0]) if d.form.drops else None
    wide = (t.x, t.w_ih, t.w_hh, t.w_hr, *t.states, *t.parameters, t.dropped)
    found = addresses(kernel.names, wide, (*shapes, *kernel.shapes, dropped))
    found.append(
        0 if t.reset is None else address("resets", t.reset, torch.bool, (math.prod(lead),))
    )
    for a, width in zip(t.held or (None,) * len(states), trace.widths, strict=True):
        found.append(0 if a is None else address("held", a, torch.bool, (*lead, width)))
    return found


# Passes


def _forward(
    d: Direction, t: Tensors, saves: bool
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    arguments, library = _Arguments(d, t, saves, d.given), d.kernel.library
    s = arguments.structure
    out = memory.empty(*t.x.shape[:-1], d.kernel.trace.widths[0], like=t.x, dtype=torch.float32)
    s.output = out.data_ptr()
    finals = [torch.empty_like(a) for a in t.states]
    arguments.own("finals", finals)
    kept: list[Tensor | None] = []
    if saves:
        numbers = library.ln_zoo_cell_keeps(byref(s))
        room = memory.pooled_empty(numbers, like=t.x, dtype=torch.float32)
        s.kept, kept = room.data_ptr(), [out, room]
    library.ln_zoo_cell_forward(byref(s))
    return out, finals, kept


def _backward(
    d: Direction,
    t: Tensors,
    kept: Sequence[Any],
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
    later: Operands | None = None,
) -> list[Tensor | None]:
    """Gradients of `Tensors.flat`, where needed; those of weights and parameters by `later`."""
    arguments = _Arguments(d, t, saves=True)
    s, trace = arguments.structure, d.kernel.trace
    s.output, s.kept = (a.data_ptr() for a in kept)
    d_out, *d_finals = (None if a is None else _dense(a) for a in grads)
    if d_out is not None:
        shape = (*t.x.shape[:-1], trace.widths[0])
        (s.dout,) = addresses(("the gradient of the output",), (d_out,), (shape,))
    arguments.own("dfinals", d_finals)
    wanted: Any = Tensors.of(d, needs)
    covered = d.kernel.covered

    def room(name: str, a: Tensor | None, need: bool) -> Tensor | None:
        if a is None or not need:
            return None
        return torch.empty_like(a) if covered.get(name, True) else torch.zeros_like(a)

    used = zip(t.parameters, d.kernel.has_gradient, wanted.parameters, strict=True)
    found = [
        memory.empty(*t.x.shape, like=t.x, dtype=t.x.dtype) if wanted.x else None,
        room("ih", t.w_ih, wanted.w_ih),
        room("hh", t.w_hh, wanted.w_hh and "hh" in covered),
        room("hr", t.w_hr, wanted.w_hr and "hr" in covered),
        *(room("states", *each) for each in zip(t.states, wanted.states, strict=True)),
        *(room(f"p{i}", a, there and need) for i, (a, there, need) in enumerate(used)),
    ]
    if later is not None:
        arguments.own("rooms", later.take())
        found[FIRST_STATE + len(t.states) :] = later.sums
    arguments.own("gradients", found)
    d.kernel.library.ln_zoo_cell_backward(byref(s))
    return [*found, *[None] * (len(needs) - len(found))]


def _dense(a: Tensor) -> Tensor:
    return a.float().resolve_neg().contiguous()


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, d: Direction, *flat: Tensor | None) -> tuple[Tensor, ...]:
        out, finals, saved = passes(d)[0](d, Tensors.of(d, flat), saves=True)
        ctx.direction, ctx.count = d, len(flat)
        ctx.save_for_backward(*flat, *saved)
        ctx.set_materialize_grads(False)
        return out, *finals

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d, flat = ctx.direction, ctx.saved_tensors
        flat, kept = flat[: ctx.count], flat[ctx.count :]
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or batched(grads):
            replayed = differentiable(lambda found: _replay(d, found), flat, grads, needs)
            return None, *replayed
        return None, *passes(d)[1](d, Tensors.of(d, flat), kept, grads, needs)


class SharedStep(torch.autograd.Function):
    """A single step whose gradients of weights and parameters `Operands` compute."""

    @staticmethod
    def forward(
        ctx: Any, d: Direction, sums: Sums, t: Tensors, x: Tensor, *states: Tensor
    ) -> tuple[Tensor, ...]:
        """The last of ``states`` is the token of `SharedWeights`."""
        out, finals, saved = _forward(d, t, saves=True)
        ctx.direction, ctx.sums, flat = d, sums, t.flat()
        ctx.count = len(flat)
        ctx.save_for_backward(*flat, *saved)
        ctx.set_materialize_grads(False)
        return out, *finals

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d, sums, flat = ctx.direction, ctx.sums, ctx.saved_tensors
        t, kept = Tensors.of(d, flat[: ctx.count]), flat[ctx.count :]
        x, *states, _ = ctx.needs_input_grad[3:]
        node = ctx.next_functions[-1][0]
        wanted = node is not None and torch._C._will_engine_execute_node(node)
        if torch.is_grad_enabled() or batched(grads):
            ih, hh, hr, *own = (need and wanted for need in sums.needs)
            needs = [x, ih, hh, hr, *states, *own, *[False] * (2 + len(t.held))]
            replayed = differentiable(lambda a: _replay(d, a), t.flat(), grads, needs)
            found = Tensors.of(d, replayed)
            if wanted:
                sums.now().add([found.w_ih, found.w_hh, found.w_hr, *found.parameters])
        else:
            later = sums.now().rows(t) if wanted else None
            none = [False] * (len(t.parameters) + 2 + len(t.held))
            needs = [x, False, False, False, *states, *none]
            found = Tensors.of(d, _backward(d, t, kept, grads, needs, later))
        return None, None, None, found.x, *found.states, None


class Operands(StepRows):
    """Operands of the products of several steps: in place of gradients of weights, see ``rooms``.

    ``needs`` are those of w_ih, w_hh, w_hr and the parameters, ``t`` the tensors of a step.
    """

    def __init__(self, kernel: Kernel, needs: Sequence[bool], t: Tensors) -> None:
        super().__init__(t.x.shape[-2])
        self._products = kernel.trace.products
        widths = [kernel.trace.gates, t.x.shape[-1]]
        for p in self._products:
            widths += p.width, p.inner
        self._memory = [
            memory.pooled_empty(self.room, n, like=t.x, dtype=torch.float32) for n in widths
        ]
        of_call = t.w_ih, t.w_hh, t.w_hr, *t.parameters
        self.gradients = [
            None if a is None or not need else torch.zeros_like(a)
            for a, need in zip(of_call, needs, strict=True)
        ]
        names = "ih", "hh", "hr", *(f"p{i}" for i in range(len(t.parameters)))
        self._by_name = dict(zip(names, self.gradients, strict=True))
        used = {p.weight for p in self._products}
        own = zip(names[3:], self.gradients[3:], kernel.has_gradient, strict=True)
        #: Gradients of parameters outside products, to which each step adds.
        self.sums = [None if name in used or not there else a for name, a, there in own]

    def take(self) -> list[Tensor]:
        """Memory for another step."""
        place = self.place()
        return [a[place:] for a in self._memory]

    def add(self, rows: int) -> None:
        dv, x, *others = (a[:rows] for a in self._memory)
        d_ih = self.gradients[0]
        if d_ih is not None and d_ih.numel():
            d_ih.addmm_(dv.t(), x)
        for p, du, left in zip(self._products, others[::2], others[1::2], strict=True):
            to = self._by_name[p.weight]
            if to is not None:
                add_weight_gradient(p, to, du, left)


def _replay(d: Direction, flat: Sequence[Any]) -> tuple[Tensor, ...]:
    """Outputs and final states by the generic loop."""
    t = Tensors.of(d, flat)
    weights, sites = substituted(d.weights, d.sites, d.parameters, t.parameters)
    held: list[Any] = [
        share if share is not None else mask
        for share, mask in zip(d.form.zoneout, t.held, strict=False)
    ]
    noise = Noise(t.dropped, tuple(held))
    weights = weights._replace(ih=t.w_ih, hh=t.w_hh, hr=t.w_hr, noise=noise).of_step
    states = tuple(s.view(s.shape[-2:]) for s in t.states)
    out, finals = scan(d.cell, t.x, d.sizes, states, weights, sites, False, t.reset)
    return out, *(s.view_as(start) for s, start in zip(finals, t.states, strict=True))
