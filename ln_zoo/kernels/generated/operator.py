"""One direction of one layer on a generated kernel, with autograd.

Double backward and batched gradients run the generic loop.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import addressof, byref, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ln_zoo.kernels.ctypes_arguments import address, addresses, check_steps
from ln_zoo.kernels.generated.kernel import CallArguments, Kernel
from ln_zoo.kernels.generated.trace import StepForm, substituted
from ln_zoo.kernels.native.runtime import rows_of_chunk
from ln_zoo.ops import memory
from ln_zoo.ops.cells import Cell, Sites, States, Weights
from ln_zoo.ops.recurrence import scan
from ln_zoo.ops.regularization import Noise
from ln_zoo.ops.replay import batched, differentiable


@dataclass(frozen=True)
class Direction:
    """A call of one direction, except for its tensors."""

    kernel: Any  # `Kernel`, or `TritonKernel` on a GPU
    cell: Cell
    sites: Sites
    weights: Weights  # the original ones, for their identities
    parameters: Sequence[Tensor]  # original ones, in the order of `parameters_of`
    form: StepForm
    sizes: Sequence[int] | None  # of packed data
    narrow: bool  # whether products are in bfloat16


@dataclass(frozen=True)
class Tensors:
    """Tensors of a call, in float32; `flat` and `of` convert to a sequence and back."""

    x: Tensor
    w_ih: Tensor
    w_hh: Tensor
    w_hr: Tensor | None
    states: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]
    dropped: Tensor | None = None
    reset: Tensor | None = None
    held: tuple[Tensor | None, ...] = ()  # in the layout of x

    def flat(self) -> list[Tensor | None]:
        first = [self.x, self.w_ih, self.w_hh, self.w_hr]
        return [*first, *self.states, *self.parameters, self.dropped, self.reset, *self.held]

    @classmethod
    def of(cls, d: Direction, flat: Sequence[Any]) -> Tensors:
        states = len(d.cell.states)
        last = 4 + states + len(d.parameters)
        x, w_ih, w_hh, w_hr = flat[:4]
        starts, own = tuple(flat[4 : 4 + states]), tuple(flat[4 + states : last])
        held = tuple(flat[last + 2 :])
        return cls(x, w_ih, w_hh, w_hr, starts, own, flat[last], flat[last + 1], held)


def run(d: Direction, tensors: Tensors) -> tuple[Tensor, States]:
    """Outputs in the layout of x, and final states, in float32."""
    flat = tensors.flat()
    if torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in flat):
        out, *finals = _Function.apply(d, *flat)
    else:
        with torch.no_grad():
            out, finals, _ = passes(d)[0](d, tensors, saves=False)
    return out, tuple(finals)


def passes(d: Direction) -> Any:
    """Forward and backward pass on the kernel's backend."""
    return (_forward, _backward) if isinstance(d.kernel, Kernel) else d.kernel.passes


# Arguments


@functools.lru_cache(maxsize=64)
def _equal_sizes(steps: int, examples: int) -> Any:
    """Rows of each step of a padded batch, for C++."""
    return (c_int64 * steps)(*[examples] * steps)


class _Arguments:
    """A structure for C++, which holds what it points to."""

    def __init__(self, d: Direction, t: Tensors, saves: bool) -> None:
        trace = d.kernel.trace
        steps, examples = t.x.shape[0], t.states[0].shape[0]
        self.lead = t.x.shape[:-1]
        rows, inputs = self.lead.numel(), t.x.shape[-1]
        if d.sizes is None:
            sizes = _equal_sizes(steps, examples)
        else:
            check_steps(d.sizes, rows, examples)
            sizes = (c_int64 * len(d.sizes))(*d.sizes)
        self._alive: list[Any] = [t]
        s = self.structure = CallArguments(
            steps=len(sizes),
            examples=examples,
            inputs=inputs,
            threads=torch.get_num_threads(),
            saves=saves,
            narrow=d.narrow,
            chunk=rows_of_chunk(rows, saves),
            products=d.kernel.products,
        )
        self._keep("sizes", sizes)
        s.x, s.w_ih = addresses(
            ("x", "w_ih"), (t.x, t.w_ih), ((*self.lead, inputs), (trace.gates, inputs))
        )
        self.many("weights", (t.w_hh, t.w_hr), d.kernel.matrices)
        self.many("initial", t.states, [(examples, w) for w in trace.widths])
        self.many("parameters", t.parameters, d.kernel.shapes)
        if d.form.drops:
            (s.dropped,) = addresses(("dropped",), (t.dropped,), ((examples, trace.widths[0]),))
        if t.reset is not None:
            s.reset = address("reset", t.reset, torch.bool, (rows,))
        held = t.held or (None,) * len(trace.widths)
        found = [
            None if a is None else address("held", a, torch.bool, (*self.lead, w))
            for a, w in zip(held, trace.widths, strict=True)
        ]
        self._keep("held", (c_void_p * len(found))(*found))

    def many(
        self,
        name: str,
        tensors: Sequence[Tensor | None],
        shapes: Sequence[tuple[int, ...] | None],
    ) -> None:
        """Set an array of addresses of tensors that this module did not make."""
        found = addresses([name] * len(tensors), tensors, shapes)
        self._keep(name, (c_void_p * (len(found) or 1))(*found))

    def own(self, name: str, tensors: Sequence[Tensor | None]) -> None:
        """Set an array of addresses of tensors that this module made."""
        found = [None if a is None else a.data_ptr() for a in tensors]
        self._alive.append(tensors)
        self._keep(name, (c_void_p * (len(found) or 1))(*found))

    def _keep(self, name: str, array: Any) -> None:
        self._alive.append(array)
        setattr(self.structure, name, addressof(array))

    def saved(self, d: Direction, s: _Saved) -> None:
        """What the forward pass writes and the backward pass reads."""
        kept = d.kernel.kept_states(bool(self.structure.saves))
        self._keep("kept", (c_int64 * len(kept))(*kept))
        self.own("states", (s.out, *s.states))
        self.own("terms", s.terms)
        self.own("lefts", s.lefts)
        self.structure.stats = s.stats.data_ptr()
        if s.v is not None:
            self.structure.v = s.v.data_ptr()


@dataclass(frozen=True)
class _Saved:
    """Tensors between the passes."""

    out: Tensor
    v: Tensor | None
    stats: Tensor
    states: tuple[Tensor, ...]  # without the first
    terms: tuple[Tensor, ...]
    lefts: tuple[Tensor | None, ...]

    def flat(self) -> list[Tensor | None]:
        return [self.out, self.v, self.stats, *self.states, *self.terms, *self.lefts]

    @classmethod
    def of(cls, kernel: Kernel, flat: Sequence[Any]) -> _Saved:
        states, count = len(kernel.trace.widths) - 1, len(kernel.trace.products)
        cuts = 3 + states, 3 + states + count
        parts = flat[3 : cuts[0]], flat[cuts[0] : cuts[1]], flat[cuts[1] :]
        return cls(*flat[:3], *map(tuple, parts))

    @classmethod
    def empty(cls, d: Direction, x: Tensor, examples: int, saves: bool) -> _Saved:
        trace, plan, lead = d.kernel.trace, d.kernel.plan, x.shape[:-1]
        total = lead.numel()
        rows = total if saves else examples

        def new(*size: int) -> Tensor:
            if not saves:
                return x.new_empty(size)
            return memory.pooled_empty(*size, like=x, dtype=torch.float32)

        kept = d.kernel.kept_states(saves)
        states = zip(kept[1:], trace.widths[1:], strict=True)
        return cls(
            out=memory.empty(*lead, trace.widths[0], like=x, dtype=torch.float32),
            v=new(rows, trace.gates) if saves else None,
            stats=new(rows, max(1, plan.stats)),
            states=tuple(new(total if all_of else 2 * examples, w) for all_of, w in states),
            terms=tuple(new(rows, p.width) for p in trace.products),
            lefts=tuple(
                None if k in plan.left_states else new(rows, p.inner)
                for k, p in enumerate(trace.products)
            ),
        )


# Passes


def _forward(
    d: Direction, t: Tensors, saves: bool
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    arguments = _Arguments(d, t, saves)
    saved = _Saved.empty(d, t.x, t.states[0].shape[0], saves)
    arguments.saved(d, saved)
    finals = [torch.empty_like(s) for s in t.states]
    arguments.own("finals", finals)
    d.kernel.library.ln_zoo_cell_forward(byref(arguments.structure))
    return saved.out, finals, saved.flat()


def _backward(
    d: Direction,
    t: Tensors,
    kept: Sequence[Any],
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of `Tensors.flat`, where needed."""
    arguments = _Arguments(d, t, saves=True)
    arguments.saved(d, _Saved.of(d.kernel, kept))
    s, trace = arguments.structure, d.kernel.trace
    d_out, *d_finals = grads
    wanted = Tensors.of(d, needs)
    if d_out is not None:
        d_out = d_out.float().resolve_neg().contiguous()
        shape = (*arguments.lead, trace.widths[0])
        (s.dout,) = addresses(("the gradient of the output",), (d_out,), (shape,))
    gradients = [a.new_empty(2, *a.shape) for a in t.states]
    for a, final in zip(gradients, d_finals, strict=True):
        a.zero_() if final is None else a.copy_(final)
    arguments.own("gradients", gradients)
    dx = memory.empty(*t.x.shape, like=t.x, dtype=t.x.dtype) if wanted.x else None
    dw_ih = torch.empty_like(t.w_ih) if wanted.w_ih else None
    s.dx = None if dx is None else dx.data_ptr()
    s.dw_ih = None if dw_ih is None else dw_ih.data_ptr()
    d_weights = [
        _gradient_of(d, name, a) if need else None
        for name, a, need in (("hh", t.w_hh, wanted.w_hh), ("hr", t.w_hr, wanted.w_hr))
    ]
    arguments.own("dweights", d_weights)
    used = zip(t.parameters, d.kernel.has_gradient, wanted.parameters, strict=True)
    d_own = [torch.empty_like(a) if there and need else None for a, there, need in used]
    arguments.own("dparameters", d_own)
    d.kernel.library.ln_zoo_cell_backward(byref(s))
    d_states = [a[0] if need else None for a, need in zip(gradients, wanted.states, strict=True)]
    masks = len(needs) - 4 - len(t.states) - len(t.parameters)
    return [dx, dw_ih, *d_weights, *d_states, *d_own, *[None] * masks]


def _gradient_of(d: Direction, name: str, weight: Tensor | None) -> Tensor | None:
    """Memory for the gradient of a weight, zero where no product uses its rows."""
    products = [p for p in d.kernel.trace.products if p.weight == name]
    if weight is None or not products:
        return None
    rows = {row for p in products for row in range(p.first, p.first + p.width)}
    return torch.empty_like(weight) if len(rows) == len(weight) else torch.zeros_like(weight)


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


def _replay(d: Direction, flat: Sequence[Any]) -> tuple[Tensor, ...]:
    """Outputs and final states by the generic loop."""
    t = Tensors.of(d, flat)
    weights, sites = substituted(d.weights, d.sites, d.parameters, t.parameters)
    held: list[Any] = [
        share if share is not None else mask
        for share, mask in zip(d.form.zoneout, t.held, strict=False)
    ]
    noise = Noise(t.dropped, tuple(held))
    weights = weights._replace(ih=t.w_ih, hh=t.w_hh, hr=t.w_hr, noise=noise)
    out, finals = scan(d.cell, t.x, d.sizes, t.states, weights, sites, False, t.reset)
    return out, *finals
