"""One direction of one layer on a generated kernel, with autograd.

Double backward and batched gradients run the generic loop.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ln_zoo.kernels.ctypes_arguments import address, addresses, check_steps
from ln_zoo.kernels.generated.direction import FIRST_STATE, Direction, Tensors
from ln_zoo.kernels.generated.kernel import CALL, Kernel
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


def run(d: Direction, tensors: Tensors) -> tuple[Tensor | None, States]:
    """Outputs in the layout of x, or None for a single step; and final states, in float32."""
    if torch.is_grad_enabled():
        flat = tensors.flat()
        if any(a is not None and a.requires_grad for a in flat):
            out, *finals = _Function.apply(d, tensors.addresses, *flat)
            return out, tuple(finals)
    out, finals, _ = passes(d)[0](d, tensors, saves=False)
    return out, tuple(finals)


def passes(d: Direction) -> Any:
    """Forward and backward pass on the kernel's backend."""
    found = (_forward, _backward) if isinstance(d.kernel, Kernel) else d.kernel.passes
    return in_pieces(*found) if d.recompute else found


# Arguments

#: An array for C++; ctypes would make a new type for each size again and again.
_words = functools.partial(array, "q")
_PLACES = {field: i for i, field in enumerate(CALL)}
#: float32 numbers of a cache line.
_LINE = 16
_UNSET = (0,) * (len(CALL) - _PLACES["output"])


def _start(words: Any) -> int:
    return int(words.buffer_info()[0])


@functools.lru_cache(maxsize=64)
def _padded(steps: int, examples: int, saves: bool) -> tuple[Any, int]:
    """Rows of each step of a padded batch, for C++, and of a chunk."""
    return _words([examples] * steps), rows_of_chunk(steps * examples, saves)


class _Call:
    """``Call`` of loop.h, and what it points to."""

    def __init__(self, d: Direction, t: Tensors, saves: bool) -> None:
        lead, examples = t.x.shape[:-1], t.states[0].shape[-2]
        if d.sizes is None:
            sizes, chunk = _padded(1 if t.is_step(d) else lead[0], examples, saves)
        else:
            rows = lead.numel()
            check_steps(d.sizes, rows, examples)
            sizes, chunk = _words(d.sizes), rows_of_chunk(rows, saves)
        given = _words(_given(d, t) if t.addresses is None else t.addresses)
        self._alive: list[Any] = [sizes, given]
        numbers = len(sizes), examples, t.x.shape[-1], d.threads, d.narrow, chunk
        pointers = d.kernel.products, _start(sizes), _start(given)
        self._words = _words((*numbers, *pointers, *_UNSET))
        self.address = _start(self._words)

    def __setitem__(self, field: str, address: int) -> None:
        self._words[_PLACES[field]] = address

    def own(self, field: str, tensors: Sequence[Tensor | None]) -> None:
        """Set an array of addresses of tensors that this module made."""
        words = _words([0 if a is None else a.data_ptr() for a in tensors])
        self._alive += tensors, words
        self[field] = _start(words)

    def keep(self, out: Tensor | None, room: Tensor, t: Tensors) -> None:
        """Set where the forward pass writes what the backward pass reads."""
        self["kept"] = room.data_ptr() + 4 * _own_output(out, t)
        self["output"] = (room if out is None else out).data_ptr()


def _own_output(out: Tensor | None, t: Tensors) -> int:
    """Numbers of the output that a single step keeps: its caller may change the state in place."""
    return 0 if out is not None else -(-t.states[0].numel() // _LINE) * _LINE


def _given(d: Direction, t: Tensors) -> list[int]:
    """Addresses of `Call::given`, checked."""
    trace, lead = d.kernel.trace, tuple(t.x.shape[:-1])
    weights = (t.w_ih, t.w_hh, t.w_hr, *t.parameters)
    columns = t.w_ih.shape[1]  # 0: see `ln_zoo.ops.cells.input_products`
    if d.forms is None:
        known = addresses(d.kernel.weight_names, weights, d.kernel.weight_shapes(columns))
    else:
        known = d.forms.addresses(weights)
    sizes = tuple(t.states[0].shape[:-1])
    names = "x", *("a state",) * len(trace.widths), "the mask of dropout"
    dropped = (sizes[-1], trace.widths[0]) if d.form.drops else None
    shapes = (*lead, columns or trace.gates), *((*sizes, width) for width in trace.widths), dropped
    x, *states, mask = addresses(names, (t.x, *t.states, t.dropped), shapes)
    found = [x, *known[:3], *states, *known[3:], mask]
    found.append(
        0 if t.reset is None else address("resets", t.reset, torch.bool, (math.prod(lead),))
    )
    for a, width in zip(t.held or (None,) * len(trace.widths), trace.widths, strict=True):
        found.append(0 if a is None else address("held", a, torch.bool, (*lead, width)))
    return found


# Passes


def _forward(
    d: Direction, t: Tensors, saves: bool
) -> tuple[Tensor | None, list[Tensor], list[Tensor | None]]:
    call, library = _Call(d, t, saves), d.kernel.library
    finals = [torch.empty_like(a) for a in t.states]
    call.own("finals", finals)
    out = room = None
    if not t.is_step(d):
        width = d.kernel.trace.widths[0]
        out = memory.empty(*t.x.shape[:-1], width, like=t.x, dtype=torch.float32)
    if saves:
        numbers = _own_output(out, t) + library.ln_zoo_cell_keeps(call.address)
        room = memory.pooled_empty(numbers, like=t.x, dtype=torch.float32)
        call.keep(out, room, t)
    else:
        call["output"] = (finals[0] if out is None else out).data_ptr()
    library.ln_zoo_cell_forward(call.address)
    return out, finals, [out, room] if saves else []


def _backward(
    d: Direction,
    t: Tensors,
    kept: Sequence[Any],
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
    later: Operands | None = None,
) -> list[Tensor | None]:
    """Gradients of `Tensors.flat`, where needed; those of weights and parameters by `later`."""
    call, trace = _Call(d, t, saves=True), d.kernel.trace
    out, room = kept
    call.keep(out, room, t)
    d_out, *d_finals = (None if a is None else _dense(a) for a in grads)
    if d_out is not None:
        shape = (*t.x.shape[:-1], trace.widths[0])
        (call["dout"],) = addresses(("the gradient of the output",), (d_out,), (shape,))
    call.own("dfinals", d_finals)
    found = [
        None if allocate is None or a is None or not need else allocate(a)
        for a, need, allocate in zip(t.flat(), needs, d.kernel.allocators, strict=False)
    ]
    if later is not None:
        call.own("rooms", later.take())
        found[FIRST_STATE + len(t.states) :] = later.sums
    call.own("gradients", found)
    d.kernel.library.ln_zoo_cell_backward(call.address)
    return [*found, *[None] * (len(needs) - len(found))]


def _dense(a: Tensor) -> Tensor:
    return a.float().resolve_neg().contiguous()


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, d: Direction, checked: Sequence[int] | None, *flat: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        t = Tensors.of(d, flat)._replace(addresses=checked)
        out, finals, saved = passes(d)[0](d, t, saves=True)
        ctx.direction, ctx.count = d, len(flat)
        ctx.save_for_backward(*flat, *saved)
        ctx.set_materialize_grads(False)
        return out, *finals

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d, flat = ctx.direction, ctx.saved_tensors
        flat, kept = flat[: ctx.count], flat[ctx.count :]
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or batched(grads):
            replayed = differentiable(lambda found: _replay(d, found), flat, grads, needs)
            return None, None, *replayed
        return None, None, *passes(d)[1](d, Tensors.of(d, flat), kept, grads, needs)


class SharedStep(torch.autograd.Function):
    """A single step whose gradients of weights and parameters `Operands` compute."""

    @staticmethod
    def forward(
        ctx: Any, d: Direction, sums: Sums, t: Tensors, x: Tensor, *states: Tensor
    ) -> tuple[Tensor | None, ...]:
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


def _replay(d: Direction, flat: Sequence[Any]) -> tuple[Any, ...]:
    """Outputs, or None for a single step, and final states by the generic loop."""
    t = Tensors.of(d, flat)
    weights, sites = substituted(d.weights, d.sites, d.parameters, t.parameters)
    held: list[Any] = [
        share if share is not None else mask
        for share, mask in zip(d.form.zoneout, t.held, strict=False)
    ]
    noise = Noise(t.dropped, tuple(held))
    weights = weights._replace(ih=t.w_ih, hh=t.w_hh, hr=t.w_hr, noise=noise).of_step
    states = tuple(s.view(s.shape[-2:]) for s in t.states)
    is_step = t.is_step(d)
    x = t.x.unsqueeze(0) if is_step else t.x
    out, finals = scan(d.cell, x, d.sizes, states, weights, sites, False, t.reset)
    return None if is_step else out, *(
        s.view_as(start) for s, start in zip(finals, t.states, strict=True)
    )
