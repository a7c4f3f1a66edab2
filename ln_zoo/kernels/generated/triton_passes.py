"""Passes of a step on a GPU: products by cuBLAS, and a generated Triton kernel for each level.

Long runs of steps with the same number of examples are launched as CUDA graphs.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ln_zoo.kernels.ctypes_arguments import address, check_steps
from ln_zoo.kernels.cuda_graphs import graphs
from ln_zoo.kernels.cuda_graphs.graphs import may_replay, on, product_settings
from ln_zoo.kernels.generated import emit_triton
from ln_zoo.kernels.generated.plan import Plan, blocks_of, plan_of
from ln_zoo.kernels.generated.products import add_weight_gradient, by_blocks, rows_of
from ln_zoo.kernels.generated.trace import Product, StepForm, Trace
from ln_zoo.kernels.triton import steps
from ln_zoo.ops.cells import Cell, Sites, Weights, input_products
from ln_zoo.ops.time_chunks import EqualSteps, TimeChunk, equal_steps, previous_rows

if TYPE_CHECKING:
    from ln_zoo.kernels.generated.direction import Direction, Tensors

#: Addresses that a launch of `steps.write_table` writes.
_TABLE = 22
Buffers = dict[str, Tensor]


@dataclass(frozen=True)
class TritonKernel:
    """Kernels of a step for these widths, by `make`."""

    trace: Trace
    plan: Plan
    text: str
    functions: dict[str, Any]

    @property
    def passes(self) -> tuple[Any, Any]:
        """Forward and backward pass of a call."""
        return forward, backward

    @functools.cached_property
    def slots(self) -> dict[str, int]:
        return emit_triton.slots(self.plan)

    @functools.cached_property
    def sum_places(self) -> dict[str, int]:
        return emit_triton.sum_places(self.plan)

    @functools.cached_property
    def units(self) -> int:
        return emit_triton.units(self.plan)


def make(
    cell: Cell, sites: Sites, weights: Weights, form: StepForm, centres: bool = True
) -> TritonKernel:
    """Trace a step and load its kernels; `Unsupported` with a reason."""
    planned = plan_of(cell, sites, weights, form, centres)
    text = emit_triton.source(planned)
    return TritonKernel(planned.trace, planned, text, _functions(text))


@functools.lru_cache(256)
def _functions(text: str) -> dict[str, Any]:
    """The functions of a source, which Triton finds in `linecache`."""
    name = f"generated_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    file = f"<{name}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    namespace: dict[str, Any] = {"__name__": name}
    code: CodeType = compile(text, file, "exec")
    exec(code, namespace)  # its text is made by emit_triton.py
    return namespace


# Launches


@dataclass
class _Pass:
    """All steps of a pass; tensors by slot."""

    kernel: TritonKernel
    backward: bool
    like: Tensor
    rows: dict[str, Tensor]  # (rows, F)
    shared: dict[str, Tensor]
    initial: Sequence[Tensor]  # states (N, width)
    weights: Sequence[Tensor]  # right operands of products
    has_dout: bool = False
    saves: bool = True
    #: Gradients of states after odd and after even steps, (2, N, width); both start as the last.
    gradients: Sequence[Tensor] = ()

    def run(self, sizes: Sequence[int]) -> None:
        runs = equal_steps(sizes)
        own = self._buffers(sizes[0], self.gradients, self.weights)
        with on(self.like):
            self._fill(own, {name: a.data_ptr() for name, a in self.shared.items()}, 0)
            launch(self.kernel, "hoist", 1, own["table"], 0, 0, self)
            for i in reversed(range(len(runs))) if self.backward else range(len(runs)):
                previous = runs[i - 1].examples if i else 0
                if not self._replayed(runs[i], previous):
                    self._enter(own, runs[i], previous)
                    self._write_table(own, runs[i], previous, 0)
                    first, last = runs[i].steps.start, runs[i].steps.stop
                    self._launch(own, runs[i].examples, last - first, first % 2)

    def _buffers(self, n: int, gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Buffers:
        """Memory at fixed addresses for n examples."""
        found = {"table": self._empty(max(_TABLE, len(self.kernel.slots)), dtype=torch.int64)}
        for k, p in enumerate(self.kernel.trace.products):
            found[f"product{k}"] = self._empty(n, p.width)
            found[f"operand{k}"] = self._empty(n, p.width if self.backward else p.inner)
            found[f"dl{k}"] = self._empty(n, p.inner)
            found[f"weight{k}"] = weights[k]
        return found | {f"gradient{i}": a for i, a in enumerate(gradients)}

    def _empty(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return steps.empty(size, self.like, dtype)

    def _replayed(self, run: EqualSteps, previous: int) -> bool:
        """Run steps as CUDA graphs, if possible."""
        count, n = run.steps.stop - run.steps.start, run.examples
        if count < graphs.SHORTEST or not may_replay(self.like):
            return False
        cache = graphs.cache(self.like.device)
        key = (self.kernel.text, self.backward, n, self.saves, self.has_dout, *product_settings())

        def make() -> Buffers:
            gradients = [self._empty(2, n, a.shape[2]) for a in self.gradients]
            weights = [torch.empty_like(w) for w in self.weights]
            return self._buffers(n, gradients, weights)

        with cache.lock:
            entry = cache.get(key, make)
            if entry is None:
                return False
            pieces = graphs.pieces(count)
            parities = [(run.steps.start + first) % 2 for first, _ in pieces]
            for (_, length), now in zip(pieces, parities, strict=True):
                cache.record(
                    entry,
                    (length, now),
                    functools.partial(self._warm_up, entry.tensors, n),
                    functools.partial(self._launch, entry.tensors, n, length, now),
                )
            cache.begin()
            for k, weight in enumerate(self.weights):
                entry.tensors[f"weight{k}"].copy_(weight)
            for i, a in enumerate(self.gradients):
                entry.tensors[f"gradient{i}"].copy_(a[:, :n])
            self._enter(entry.tensors, run, previous)
            order = [*zip(pieces, parities, strict=True)]
            for (first, length), now in reversed(order) if self.backward else order:
                self._write_table(entry.tensors, run, previous, first)
                entry.graphs[length, now].replay()
            for i, a in enumerate(self.gradients):
                a[:, :n].copy_(entry.tensors[f"gradient{i}"])
            cache.end()
        return True

    def _enter(self, buffers: Buffers, run: EqualSteps, previous: int) -> None:
        """Copy states that are operands of the first step's products."""
        if self.backward:
            return
        n, row = run.examples, run.rows.start - previous
        for k, i in self.kernel.plan.left_states.items():
            source = self.rows[f"n{i}"][row : row + n] if run.steps.start else self.initial[i][:n]
            buffers[f"operand{k}"][:n].copy_(source)

    def _write_table(self, buffers: Buffers, run: EqualSteps, previous: int, step: int) -> None:
        """Write addresses for a step of a run and those after it."""
        row, found = run.rows.start + step * run.examples, {}
        before = row - (run.examples if step else previous)
        for name, a in self.rows.items():
            found[name] = a.data_ptr() + row * a.stride(0) * a.element_size()
        for i, start in enumerate(self.initial):
            after = self.rows[f"n{i}"]
            moved = after.data_ptr() + before * after.stride(0) * after.element_size()
            found[f"first{i}"] = moved if row else start.data_ptr()
        found |= {name: a.data_ptr() for name, a in self.shared.items()}
        self._fill(buffers, found, found["n0"])

    def _fill(self, buffers: Buffers, found: dict[str, int], other: int) -> None:
        for name, a in buffers.items():
            if name.startswith("gradient"):
                i = name.removeprefix("gradient")
                found[f"even{i}"], found[f"odd{i}"] = a[0].data_ptr(), a[1].data_ptr()
            elif name in self.kernel.slots:
                found[name] = a.data_ptr()
        table = [found.get(name, other) for name in self.kernel.slots]
        steps.write_table(buffers["table"], table + [other] * (_TABLE - len(table)))

    def _warm_up(self, buffers: Buffers, n: int) -> None:
        """One step that accesses no tensor of the call."""
        sizes = [n * a.stride(0) for a in (*self.rows.values(), *self.initial)]
        sizes += [a.numel() for a in self.shared.values()]
        scratch = torch.zeros(max(sizes), device=self.like.device)
        for name, a in buffers.items():
            if name.startswith(("operand", "gradient")):
                a.zero_()
        self._fill(buffers, {}, scratch.data_ptr())
        self._launch(buffers, n, 1, 0)

    def _launch(self, buffers: Buffers, n: int, count: int, now: int) -> None:
        """Steps in turn; ``now``: whether the number of the first in time is odd."""
        products = len(self.weights)
        name = "backward" if self.backward else "forward"
        for step in reversed(range(count)) if self.backward else range(count):
            odd = (now + step) % 2
            for level in range(products + 1):
                launch(self.kernel, f"{name}_{level}", n, buffers["table"], step * n, odd, self)
                k = products - 1 - level if self.backward else level
                if 0 <= k < products:
                    self._multiply(buffers, k, n, odd)

    def _multiply(self, buffers: Buffers, k: int, n: int, odd: int) -> None:
        operand, weight = buffers[f"operand{k}"][:n], buffers[f"weight{k}"]
        to, adds = buffers[f"{'dl' if self.backward else 'product'}{k}"], False
        if self.backward and k in self.kernel.plan.added:
            state, adds = self.kernel.plan.added[k]
            to = buffers[f"gradient{state}"][odd]
        product = self.kernel.trace.products[k]
        if product.blocks > 1:
            _multiply_blocks(product, operand, weight, to[:n], self.backward, adds)
        elif adds:
            to[:n].addmm_(operand, weight)
        else:
            torch.mm(operand, weight, out=to[:n])


def _multiply_blocks(
    product: Product, operand: Tensor, weight: Tensor, to: Tensor, backward: bool, adds: bool
) -> None:
    """A product by blocks, or with ``backward`` that of its gradient, one gate after the other."""
    left, right = by_blocks(product, operand), by_blocks(product, to)
    for gate, w in enumerate(weight):
        if not backward:
            torch.bmm(left[0], w.mT, out=right[gate])
        elif adds or gate:
            right[0].baddbmm_(left[gate], w)
        else:
            torch.bmm(left[gate], w, out=right[0])


def launch(
    kernel: TritonKernel, name: str, programs: int, table: Tensor, row: int, now: int, of: Any
) -> None:
    """Launch a kernel, if it does anything."""
    function = kernel.functions.get(name)
    if function is not None:
        function[programs,](
            table,
            row,
            now,
            SAVES=of.saves,
            HAS_DOUT=of.has_dout,
            num_warps=emit_triton.warps(kernel.plan),
            **steps.OPTIONS,
        )


# Passes of a call


def forward(
    d: Direction, t: Tensors, saves: bool
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """Outputs, final states, and what `backward` needs."""
    call = _Call(d, t)
    kernel, x = d.kernel, call.x
    products, widths = kernel.trace.products, kernel.trace.widths
    w_ih = _centred(kernel.plan, t.w_ih, "v", kernel.trace.gates)
    rows = {"v": input_products(x, w_ih)}
    rows |= {f"n{i}": call.empty(call.count, width) for i, width in enumerate(widths)}
    if saves:
        rows["stats"] = call.empty(call.count, max(1, kernel.plan.stats))
        for k, p in enumerate(products):
            rows[f"u{k}"] = call.empty(call.count, p.width)
            if k not in kernel.plan.left_states:
                rows[f"l{k}"] = call.empty(call.count, p.inner)
    weights = [
        call.weight(p)
        if p.blocks > 1
        else _centred(kernel.plan, call.weight(p), f"u{k}", p.width).t()
        for k, p in enumerate(products)
    ]
    call.run(False, rows, weights, saves=saves)
    after = [rows[f"n{i}"] for i in range(len(widths))]
    finals = call.finals(after)
    out = after[0].view(*t.x.shape[:-1], widths[0])
    names = _saved_names(kernel)
    return out, finals, [rows.get(name) for name in names] if saves else []


def backward(
    d: Direction,
    t: Tensors,
    saved: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of `Tensors.flat`, where needed."""
    call, kernel = _Call(d, t), d.kernel
    trace, plan = kernel.trace, kernel.plan
    wanted = type(t).of(d, needs)
    rows = {n: a for n, a in zip(_saved_names(kernel), saved, strict=True) if a is not None}
    rows["dv"] = call.empty(call.count, trace.gates)
    rows |= {f"du{k}": call.empty(call.count, p.width) for k, p in enumerate(trace.products)}
    d_out, *d_finals = grads
    if d_out is not None:
        rows["dout"] = d_out.float().resolve_neg().reshape(call.count, -1).contiguous()
    gradients = [a.new_zeros(2, *a.shape) for a in t.states]
    for a, final in zip(gradients, d_finals, strict=True):
        if final is not None:
            a.copy_(final)
    sums = t.x.new_zeros(call.examples, max(1, kernel.sum_places[""]))
    weights = [call.weight(p) for p in trace.products]
    call.run(True, rows, weights, gradients=gradients, sums=sums)
    pairs = {"hh": (t.w_hh, wanted.w_hh), "hr": (t.w_hr, wanted.w_hr)}
    own = zip(t.parameters, wanted.parameters, strict=True)
    pairs |= {f"p{i}": pair for i, pair in enumerate(own)}
    d_weights = {
        name: torch.zeros_like(w) if w is not None and need else None
        for name, (w, need) in pairs.items()
        if name[0] == "h" or any(p.weight == name for p in trace.products)
    }
    for k, p in enumerate(trace.products):
        to = d_weights[p.weight]
        if to is not None:
            add_weight_gradient(p, to, rows[f"du{k}"], call.left(k, rows))
    dv = rows["dv"]
    weighted = t.w_ih.shape[1] > 0  # see `input_products`
    dx = (dv @ t.w_ih if weighted else dv).view(t.x.shape) if wanted.x else None
    dw_ih = dv.t() @ call.x if wanted.w_ih and weighted else None
    d_states = [a[0] if need else None for a, need in zip(gradients, wanted.states, strict=True)]
    total, d_own = sums.sum(0), []
    for i, (a, need) in enumerate(zip(t.parameters, wanted.parameters, strict=True)):
        if f"p{i}" in d_weights:
            d_own.append(d_weights[f"p{i}"])
            continue
        there = need and f"d_p{i}" in trace.outputs
        start = kernel.sum_places[f"d_{plan.same_sums.get(f'p{i}', f'p{i}')}"]
        d_own.append(total[start : start + a.numel()].view(a.shape).clone() if there else None)
    masks = len(needs) - 4 - len(t.states) - len(t.parameters)
    return [dx, dw_ih, d_weights["hh"], d_weights["hr"], *d_states, *d_own, *[None] * masks]


def _saved_names(kernel: TritonKernel) -> list[str]:
    products = range(len(kernel.trace.products))
    states = [f"n{i}" for i in range(len(kernel.trace.widths))]
    return ["v", "stats", *states, *(f"u{k}" for k in products), *(f"l{k}" for k in products)]


def _centred(plan: Plan, weight: Tensor, name: str, width: int) -> Tensor:
    """A weight without the means over groups of rows whose product is used without its mean."""
    _, unit = blocks_of(plan.trace, width)
    parts = plan.groups.get(name, ())
    if parts:
        weight = weight.clone()
    for first, end in parts:
        part = weight[first * unit : end * unit]
        part -= part.mean(0)
    return weight


class _Call:
    """What both passes of a call share."""

    def __init__(self, d: Direction, t: Tensors) -> None:
        self.d, self.t = d, t
        self.x = t.x.reshape(-1, t.x.shape[-1])
        self.count, self.examples = len(self.x), len(t.states[0])
        self.sizes = [self.examples] * len(t.x) if d.sizes is None else list(d.sizes)
        check_steps(self.sizes, self.count, self.examples)
        device, trace = t.x.device, d.kernel.trace
        for state, width in zip(t.states, trace.widths, strict=True):
            address("a state", state, torch.float32, (self.examples, width), device)
        for a, own in zip(t.parameters, trace.parameters, strict=True):
            address("a parameter", a, torch.float32, tuple(own.shape), device)
        self.rows: dict[str, Tensor] = {}
        self.shared = {f"p{i}": a for i, a in enumerate(t.parameters)}
        if t.dropped is not None:
            shape = (self.examples, trace.widths[0])
            address("dropped", t.dropped, torch.float32, shape, device)
            self.shared["dropped"] = t.dropped
        if t.reset is not None:
            address("reset", t.reset, torch.bool, (self.count,), device)
            self.rows["reset"] = t.reset
        for i, mask in enumerate(t.held):
            if mask is not None:
                shape = (*t.x.shape[:-1], trace.widths[i])
                address("held", mask, torch.bool, shape, device)
                self.rows[f"held{i}"] = mask.view(self.count, trace.widths[i])

    def empty(self, *size: int) -> Tensor:
        return steps.empty(size, self.t.x, torch.float32)

    def weight(self, p: Product) -> Tensor:
        """Rows of the weight of a product."""
        if p.weight[0] == "p":
            whole: Tensor | None = self.t.parameters[int(p.weight[1:])]
        else:
            whole = self.t.w_hh if p.weight == "hh" else self.t.w_hr
        assert whole is not None
        return rows_of(p, whole)

    def run(
        self,
        backward: bool,
        rows: dict[str, Tensor],
        weights: Sequence[Tensor],
        saves: bool = True,
        gradients: Sequence[Tensor] = (),
        sums: Tensor | None = None,
    ) -> None:
        kernel: TritonKernel = self.d.kernel
        schedule = kernel.plan.backward if backward else kernel.plan.forward
        shared = dict(self.shared)
        shared["hoisted"] = self.empty(max(1, len(kernel.plan.hoisted) * kernel.units))
        spills = max(1, len(schedule.spilled)) * kernel.units
        shared["spill"] = self.empty(self.examples, spills)
        shared["crossing"] = self.empty(self.examples, max(1, len(schedule.crossing)))
        if sums is not None:
            shared["sums"] = sums
        all_rows = {**self.rows, **rows}
        found = _Pass(
            kernel, backward, self.t.x, all_rows, shared, self.t.states, weights,
            "dout" in rows, saves, gradients,
        )  # fmt: skip
        found.run(self.sizes)

    def finals(self, after: Sequence[Tensor]) -> list[Tensor]:
        """States after the last step of each example."""
        found = [torch.empty_like(s) for s in self.t.states]
        runs = equal_steps(self.sizes)
        for run, following in zip(runs, [*(r.examples for r in runs[1:]), 0], strict=True):
            last = run.rows.stop - run.examples
            for final, a in zip(found, after, strict=True):
                final[following : run.examples] = a[last + following : run.rows.stop]
        return found

    def left(self, k: int, rows: dict[str, Tensor]) -> Tensor:
        """Left operands of a product, (rows, inner)."""
        state = self.d.kernel.plan.left_states.get(k)
        if state is None:
            return rows[f"l{k}"]
        span = TimeChunk(0, self.count, tuple(self.sizes), self.examples, 0)
        return previous_rows(self.t.states[state], rows[f"n{state}"], span)
