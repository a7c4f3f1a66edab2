"""The generic loop as CUDA graphs, for cells and norms without a kernel.

When a call of the same form repeats, it is captured in chunks of steps. Not captured, with the
reason logged once: packed sequences; running or batch statistics; cells and norms that use the time
step, sample random numbers, modify tensors in place or synchronise; hooks and transforms. Graphs
repeat the Python decisions made at capture, so user-defined cells and norms, which may read global
state, are captured only with ``LN_ZOO_CUDA_GRAPHS=all``; ``0`` disables capture.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ln_zoo.kernels.cuda_graphs import graphs
from ln_zoo.kernels.cuda_graphs.graphs import may_replay, on, product_settings
from ln_zoo.ops import registry
from ln_zoo.ops.cells import Cell, Sites, States, Weights, input_products
from ln_zoo.ops.precision import no_autocast
from ln_zoo.ops.recurrence import next_states, scan
from ln_zoo.ops.recurrent_kernel import no_custom_ops_reason
from ln_zoo.ops.regularization import Noise
from ln_zoo.ops.replay import batched, differentiable

#: Minimum steps of a captured call.
LEAST_STEPS = 4
#: Maximum bytes saved by autograd per chunk; larger steps are bound by the device anyway.
CHUNK_BYTES = 2**28
#: Maximum number of remembered refusals.
REFUSALS = 256


class Unrecordable(Exception):
    """The loop does something that a CUDA graph cannot repeat."""


def recorded_scan(
    cell: Cell,
    x: Tensor,
    sizes: Sequence[int] | None,
    states: States,
    weights: Weights,
    sites: Sites,
    per_timestep: bool = False,
    reset: Tensor | None = None,
) -> tuple[Tensor, States]:
    """`ln_zoo.ops.recurrence.scan` as CUDA graphs if possible, otherwise eagerly.

    Under autocast, gradients of weights are accumulated in the dtype of the weights.
    """

    def plain() -> tuple[Tensor, States]:
        return scan(cell, x, sizes, states, weights, sites, per_timestep, reset)

    if torch.compiler.is_compiling() or not may_replay(x):
        return plain()
    reason = _foreign(cell, sites) or _unsupported(x, sizes, states, weights, sites)
    if reason is not None:
        _say(cell, f"launched step by step: {reason}")
        return plain()
    products = input_products(x, weights.ih)
    terms = sites["input"](products, None)
    wide = tuple(s.to(torch.promote_types(s.dtype, torch.float32)) for s in states)
    loop = _Loop(cell, sites, weights, len(states), reset is not None)
    sequences = loop.sequences(terms, weights, reset)
    constants = loop.constants(weights, sites)
    found = _entry(loop, sequences, wide, constants)
    if found is None:
        return plain()
    output, *final = _Recorded.apply(loop, *found, *sequences, *wide, *constants)
    return output.to(products.dtype), tuple(s.to(weights.hh.dtype) for s in final)


# Supported calls

_tokens: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_lock = threading.Lock()


def _foreign(cell: Cell, sites: Sites) -> str | None:
    if os.environ.get("LN_ZOO_CUDA_GRAPHS") == "all":
        return None
    step: Any = cell.step
    while isinstance(step, functools.partial):
        step = step.func
    for owner in (step, *(type(getattr(site, "norm", None)) for site in sites.values())):
        if owner is not type(None) and owner.__module__.partition(".")[0] != "ln_zoo":
            return f"{owner.__qualname__} is your own; set LN_ZOO_CUDA_GRAPHS=all to record it"
    return None


def _unsupported(
    x: Tensor, sizes: Sequence[int] | None, states: States, weights: Weights, sites: Sites
) -> str | None:
    """Why a call cannot be captured, as far as known before it runs, or None."""
    reason = no_custom_ops_reason()
    if reason is not None:
        return reason
    if sizes is not None:
        return "sequences are packed"
    if len(x) < LEAST_STEPS or not x.numel():
        return f"it has fewer than {LEAST_STEPS} steps, or no examples"
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return "each operation is watched by a mode of torch"
    if torch.is_anomaly_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True):
        return "what autograd saves is watched, as by activation checkpointing"
    if any(type(a) not in (Tensor, nn.Parameter) for a in (x, *states, *_present(weights))):
        return "tensors are of other classes than torch's own"
    for role, site in sites.items():
        reason = unsupported_site(site)
        if reason is not None:
            return f"at the place {role!r} {reason}"
    return None


def unsupported_site(site: Any) -> str | None:
    """Why what happens at a place cannot be repeated from a trace, or None."""
    if not isinstance(site, nn.Module):
        return "there is no module"
    norm = getattr(site, "norm", None)
    if any(
        getattr(norm, a, False) for a in ("per_timestep", "keeps_statistics", "batch_dependent")
    ):
        return f"{type(norm).__name__} keeps statistics or uses the batch"
    if getattr(site, "observer", None) is not None:
        return "statistics are observed"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(m, name) for m in site.modules() for name in hooks):
        return "there are hooks"
    if nn.modules.module._has_any_global_hook():
        return "there are hooks of all modules"
    return None


def _present(weights: Weights) -> list[Tensor]:
    return [a for a in weights.tensors if a is not None]


class Watch(TorchDispatchMode):
    """Raise `Unrecordable` for operations that a CUDA graph, or a trace, cannot repeat.

    The loop may read the ``given`` tensors, and write only to tensors that it created.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its whole compiler at the first operation.
        return False

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self._given = _storages(given)
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Unrecordable(f"random numbers are drawn ({func})")
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}:
            raise Unrecordable(f"numbers are read back from the device ({func})")
        read, written = _storages((args, kwargs)), set()
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                a = args[i] if i < len(args) else kwargs.get(argument.name)
                written |= _storages(a)
        if not written <= self._made:
            raise Unrecordable(f"a tensor that outlives the loop is changed in place ({func})")
        # Constants in the code of a cell are created at each call.
        if not read <= self._made | self._given and func != torch.ops.aten.lift_fresh.default:
            raise Unrecordable(f"a tensor is read that is neither weight nor state ({func})")
        found = func(*args, **kwargs)
        moves = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if moves and len({a.device for a in _tensors((args, found))}) > 1:
            raise Unrecordable(f"tensors are moved between devices ({func})")
        self._made |= _storages(found) - self._given
        return found


def _storages(a: Any) -> set[int]:
    return {b.untyped_storage()._cdata for b in _tensors(a)}


def _tensors(a: Any) -> list[Tensor]:
    return [b for b in torch.utils._pytree.tree_leaves(a) if isinstance(b, Tensor)]


class StepNumber:
    """Placeholder for the time step, which a graph does not know."""

    def _used(self, *others: Any) -> Any:
        raise Unrecordable("the number of the time step is used")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _used
    __index__ = __int__ = __float__ = __hash__ = __getattr__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = _used


# The loop as a function of tensors


class _Loop:
    """A call as a function of tensors only: sequences, states and constants."""

    def __init__(
        self, cell: Cell, sites: Sites, weights: Weights, states: int, resets: bool
    ) -> None:
        self.cell, self.sites, self.resets, self.states = cell, sites, resets, states
        self._there = [a is not None for a in weights[:5]]
        self._own, self._drops = len(weights.own), weights.noise.dropout is not None
        # Sampled zoneout is a mask.
        self.zoneout = [d if isinstance(d, float) else None for d in weights.noise.zoneout]

    def sequences(self, terms: Tensor, weights: Weights, reset: Tensor | None) -> list[Tensor]:
        drawn = [d for d in weights.noise.zoneout if isinstance(d, Tensor)]
        flags = [] if reset is None else [reset.view(terms.shape[:2]).unsqueeze(-1)]
        return [terms, *drawn, *flags]

    def constants(self, weights: Weights, sites: Sites) -> list[Tensor]:
        """Tensors shared by all steps: weights, dropout mask, parameters and buffers of sites."""
        mask = weights.noise.dropout
        return [*_present(weights), *([] if mask is None else [mask]), *_of_sites(sites)]

    def with_constants(self, constants: Sequence[Tensor]) -> tuple[Weights, Sites]:
        left = iter(constants)
        first: list[Any] = [next(left) if there else None for there in self._there]
        own = tuple(itertools.islice(left, self._own))
        mask = next(left) if self._drops else None
        weights = Weights(*first)._replace(own=own, noise=Noise(mask))
        memo = {id(a): b for a, b in zip(_of_sites(self.sites), left, strict=True)}
        return weights, copy.deepcopy(dict(self.sites), memo)

    def run(
        self, sequences: Sequence[Tensor], states: States, weights: Weights, sites: Sites
    ) -> tuple[Tensor, States]:
        number: Any = StepNumber()
        terms, *masks = (a.unbind(0) for a in sequences)
        flags = masks.pop() if self.resets else None
        outputs = []
        for k, wx in enumerate(terms):
            drawn = iter(masks)
            zoneout = [next(drawn)[k] if d is None else d for d in self.zoneout]
            flag = None if flags is None else flags[k]
            states = next_states(self.cell, wx, states, weights, sites, number, zoneout, flag)
            outputs.append(states[0])
        return torch.stack(outputs), states

    def key(self) -> tuple[Any, ...]:
        """Cache key, besides shapes and dtypes."""
        plain = []
        for role, site in self.sites.items():
            for name, module in site.named_modules():  # type: ignore[attr-defined]
                with _lock:
                    token = _tokens.setdefault(module, next(_numbers))
                # Plain attributes are baked into the graph.
                own = tuple(
                    (key, value if isinstance(value, int | float | str | tuple) else id(value))
                    for key, value in _attributes(module)
                )
                plain.append((role, name, token, own))
        zoneout = tuple(self.zoneout)
        return (self.cell, tuple(plain), zoneout, self._own, self._drops, self.resets)


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in vars(module).items() if not isinstance(value, dict)]


def _of_sites(sites: Sites) -> list[Tensor]:
    found = {}
    for site in sites.values():
        for a in (*site.parameters(), *site.buffers()):  # type: ignore[attr-defined]
            found[id(a)] = a
    return list(found.values())


# Captured graphs


class _Form(NamedTuple):
    """Shapes, dtypes and settings that a graph depends on, besides the loop."""

    save: bool
    precision: torch.dtype | None
    sequences: tuple[Any, ...]
    states: tuple[Any, ...]
    constants: tuple[Any, ...]
    settings: tuple[Any, ...]


def _form(sequences: Sequence[Tensor], states: States, constants: Sequence[Tensor]) -> _Form:
    device = sequences[0].device.type
    of_calls = (sequences, states, constants)
    save = torch.is_grad_enabled() and any(a.requires_grad for part in of_calls for a in part)
    precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def form(a: Tensor, shape: tuple[int, ...]) -> tuple[Any, ...]:
        return shape, a.dtype, save and a.requires_grad

    return _Form(
        save,
        precision,
        tuple(form(a, tuple(a.shape[1:])) for a in sequences),
        # After the first chunk, states depend on all that came before.
        tuple((tuple(a.shape), a.dtype, save and a.is_floating_point()) for a in states),
        tuple(form(a, tuple(a.shape)) for a in constants),
        (sequences[0].device, *product_settings()),
    )


class _Fixed:
    """Fixed-address memory shared by the chunks of calls of one form."""

    def __init__(self, loop: _Loop, form: _Form) -> None:
        # Without the layer's sites, which would be kept alive.
        self.loop, self.form = copy.copy(loop), form
        self.loop.sites = {}
        self.device = form.settings[0]
        with torch.inference_mode(False):
            self.constants = [self.new(*each) for each in form.constants]
            self.states = [self.new(*each) for each in form.states]
            #: Accumulated gradients of constants; gradients of states after, then before a chunk.
            self.totals = [torch.zeros_like(a) for a in self.needed]
            self.d_states = [torch.zeros_like(a) for a in self.wide]
            #: Gradient of the output of the step before a chunk.
            self.d_before = torch.zeros_like(self.states[0])
            self.weights, self.sites = loop.with_constants(self.constants)
        self.chunks: dict[int, _Chunk] = {}
        self.lengths: list[int] = []
        # Their addresses are in the key and must not be reused.
        self._kept = [
            value
            for site in loop.sites.values()
            for module in site.modules()  # type: ignore[attr-defined]
            for _, value in _attributes(module)
        ]

    def new(self, shape: tuple[int, ...], dtype: torch.dtype, needs: bool) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device).requires_grad_(needs)

    @property
    def needed(self) -> list[Tensor]:
        return [a for a in self.constants if a.requires_grad]

    @property
    def wide(self) -> list[Tensor]:
        return [a for a in self.states if a.is_floating_point()]


class _Chunk:
    def __init__(self, fixed: _Fixed, steps: int) -> None:
        self.fixed, self.steps = fixed, steps
        form = fixed.form
        with torch.inference_mode(False):
            self.sequences = [
                fixed.new((steps, *shape), dtype, needs) for shape, dtype, needs in form.sequences
            ]
            like = fixed.states[0]
            self.d_out = torch.zeros((steps, *like.shape), dtype=like.dtype, device=fixed.device)
        #: Tensors saved by autograd, as bytes.
        self.saved = torch.empty(0, dtype=torch.uint8, device=fixed.device)
        self._places: list[Tensor] = []

    @property
    def given(self) -> list[Tensor]:
        fixed = self.fixed
        of_loop = [*self.sequences, *fixed.states, *fixed.constants]
        return [*of_loop, self.d_out, *fixed.d_states, fixed.d_before, *fixed.totals]

    def forward(self, watch: Watch | None = None) -> None:
        """Run the loop, and concatenate the tensors that autograd saved."""
        fixed, form = self.fixed, self.fixed.form
        kept: dict[int, Tensor] = {}

        def pack(a: Tensor) -> Tensor:
            if a.device == fixed.device:
                kept[a.untyped_storage()._cdata] = a
            return a

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(form.save))
            kind = fixed.device.type
            enabled = form.precision is not None
            # Autocast's weight cache would outlive the capture.
            stack.enter_context(torch.autocast(kind, form.precision, enabled, cache_enabled=False))
            stack.enter_context(saved_tensors_hooks(pack, lambda a: a))
            stack.enter_context(watch or contextlib.nullcontext())
            states = tuple(fixed.states)
            self.out, self.after = fixed.loop.run(
                self.sequences, states, fixed.weights, fixed.sites
            )
            # As in autograd, gradients of later chunks are added first.
            self._before = states[0].view_as(states[0])
            self._aliases = [a.view_as(a) for a in fixed.needed]
        if not form.save:
            return
        for storage in _storages((self.sequences, fixed.states, fixed.constants)):
            kept.pop(storage, None)
        self._places = [_bytes(a) for a in kept.values()]
        if self._places:
            self.saved = torch.cat(self._places)

    def backward(self, watch: Watch | None = None) -> None:
        """Backpropagate: accumulate into the totals, and replace the gradients of states."""
        fixed = self.fixed
        if self._places:
            sizes = [len(a) for a in self._places]
            torch._foreach_copy_(self._places, list(self.saved.split(sizes)))
        after = [a for a in self.after if a.is_floating_point()]
        roots = [self.out, *after, self._before, *self._aliases]
        grads = [self.d_out, *fixed.d_states, fixed.d_before, *fixed.totals]
        pairs = [(a, d) for a, d in zip(roots, grads, strict=True) if a.requires_grad]
        leaves = [a for a in self.sequences if a.requires_grad]
        with no_autocast(self.d_out), watch or contextlib.nullcontext():
            found = torch.autograd.grad(
                [a for a, _ in pairs],
                [*leaves, *fixed.wide, *fixed.needed],
                [d for _, d in pairs],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        self.d_sequences = found[: len(leaves)]
        targets = [*fixed.d_states, *fixed.totals]
        torch._foreach_copy_(targets, list(found[len(leaves) :]))


def _bytes(a: Tensor) -> Tensor:
    storage = a.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=a.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )


_CACHES: dict[torch.device, graphs.Cache] = {}
#: Why calls of a form cannot be captured.
_refused: dict[Any, str] = {}


def _cache(device: torch.device) -> graphs.Cache:
    with _lock:
        return _CACHES.setdefault(device, graphs.Cache())


def _entry(
    loop: _Loop, sequences: Sequence[Tensor], states: States, constants: Sequence[Tensor]
) -> tuple[graphs.Cache, graphs.Entry] | None:
    form = _form(sequences, states, constants)
    key = (loop.key(), form)
    try:
        if key in _refused:
            return None
    except TypeError as error:  # not hashable
        _say(loop.cell, f"launched step by step: {error}")
        return None
    cache = _cache(sequences[0].device)
    with cache.lock, on(sequences[0]):
        try:
            entry = cache.get(key, lambda: _Fixed(loop, form))
            if entry is None:
                return None
            if not _is_recorded(entry, len(sequences[0])):
                # Nodes of autograd remember the stream that they were created on.
                with cache.stream():
                    _record(cache, entry, len(sequences[0]), (sequences, states, constants))
        except Exception as error:
            # Ending a capture fails as well after an error in it.
            reason = str(error.__context__ or error)
            if len(_refused) >= REFUSALS:
                _refused.clear()
            _refused[key] = reason
            _say(loop.cell, f"launched step by step: {reason}")
            return None
    _say(loop.cell, "launched as recorded CUDA graphs")
    return cache, entry


def _is_recorded(entry: graphs.Entry, steps: int) -> bool:
    lengths = {length for _, length in _pieces(steps, entry.tensors.lengths)}
    last = "backward" if entry.tensors.form.save else "forward"
    return bool(lengths) and all((length, last) in entry.graphs for length in lengths)


def _record(
    cache: graphs.Cache, entry: graphs.Entry, steps: int, tensors: tuple[Sequence[Tensor], ...]
) -> None:
    fixed: _Fixed = entry.tensors
    save = fixed.form.save
    if not fixed.lengths:
        # Values of this call, in case the loop checks them.
        chunk = _Chunk(fixed, 1)
        _copy([a[:1] for a in tensors[0]], chunk.sequences)
        _copy(tensors[1], fixed.states)
        _copy(tensors[2], fixed.constants)
        watch = Watch(chunk.given)
        chunk.forward(watch)
        if save:
            chunk.backward(watch)
        size = max(1, len(chunk.saved))
        fixed.lengths = [n for n in graphs.LENGTHS if n * size <= CHUNK_BYTES]
        if 1 not in fixed.lengths:
            raise Unrecordable("steps are so large that the CPU keeps up")
    for _, length in _pieces(steps, fixed.lengths):
        chunk = fixed.chunks.setdefault(length, _Chunk(fixed, length))
        cache.record(entry, (length, "forward"), chunk.forward, chunk.forward)
        if save:
            cache.record(entry, (length, "backward"), chunk.backward, chunk.backward)


def _pieces(steps: int, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = 0
    for length in lengths:
        while steps - first >= length:
            yield first, length
            first += length


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for a, b in zip(sources, targets, strict=True):
            b.copy_(a)


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loop: _Loop, cache: graphs.Cache, entry: graphs.Entry, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        fixed: _Fixed = entry.tensors
        sequences, states, constants = _split(fixed.form, tensors)
        like = fixed.states[0]
        steps, save = len(sequences[0]), fixed.form.save
        out = torch.empty((steps, *like.shape), dtype=like.dtype, device=like.device)
        befores: list[Tensor] = []
        kept: list[Tensor] = []
        with cache.lock, on(out):
            cache.begin()
            _copy(constants, fixed.constants)
            _copy(states, fixed.states)
            for first, length in _pieces(steps, fixed.lengths):
                chunk = fixed.chunks[length]
                _copy([a[first : first + length] for a in sequences], chunk.sequences)
                if save:
                    befores += [a.detach().clone() for a in fixed.states]
                entry.graphs[length, "forward"].replay()
                _copy([chunk.out], [out[first : first + length]])
                _copy(chunk.after, fixed.states)
                if save:
                    kept.append(chunk.saved.clone())
            final = [a.detach().clone() for a in fixed.states]
            cache.end()
        ctx.loop, ctx.cache, ctx.entry = loop, cache, entry
        ctx.save_for_backward(*tensors, *befores, *kept)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(a for a in final if not a.is_floating_point()))
        return out, *final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        fixed: _Fixed = ctx.entry.tensors
        form, cache = fixed.form, ctx.cache
        saved: Sequence[Tensor] = ctx.saved_tensors
        count = len(form.sequences) + len(form.states) + len(form.constants)
        tensors, saved = saved[:count], saved[count:]
        if torch.is_grad_enabled() or batched(grads):
            return (None, None, None, *_by_plain_loop(ctx, form, tensors, grads))
        sequences, states, constants = _split(form, tensors)
        steps = len(sequences[0])
        pieces = list(_pieces(steps, fixed.lengths))
        befores, kept = saved[: len(pieces) * len(states)], saved[len(pieces) * len(states) :]
        d_out, *d_states = grads
        d_sequences = [
            torch.empty_like(a) if n else None
            for a, (*_, n) in zip(sequences, form.sequences, strict=True)
        ]
        with cache.lock, on(sequences[0]):
            cache.begin()
            _copy(constants, fixed.constants)
            wide = [d for d, s in zip(d_states, states, strict=True) if s.is_floating_point()]
            for d, target in zip(wide, fixed.d_states, strict=True):
                target.zero_() if d is None else target.copy_(d)
            for total in fixed.totals:
                total.zero_()
            for i, (first, length) in reversed([*enumerate(pieces)]):
                chunk = fixed.chunks[length]
                last = first + length
                _copy([a[first:last] for a in sequences], chunk.sequences)
                _copy(befores[i * len(states) : (i + 1) * len(states)], fixed.states)
                _copy([kept[i]], [chunk.saved])
                # The output of a chunk's last step has its own gradient added by the next chunk,
                # before all others, as in one loop.
                chunk.d_out.zero_()
                fixed.d_before.zero_()
                if d_out is not None:
                    rows = length if last == steps else length - 1
                    chunk.d_out[:rows].copy_(d_out[first : first + rows])
                    if first:
                        fixed.d_before.copy_(d_out[first - 1])
                ctx.entry.graphs[length, "backward"].replay()
                found = iter(chunk.d_sequences)
                for d_rows in d_sequences:
                    if d_rows is not None:
                        d_rows[first:last].copy_(next(found))
            left, totals = iter(fixed.d_states), iter(fixed.totals)
            d_starts = [next(left).clone() if s.is_floating_point() else None for s in states]
            d_constants = [next(totals).clone() if n else None for *_, n in form.constants]
            cache.end()
        return (None, None, None, *d_sequences, *d_starts, *d_constants)


def _by_plain_loop(
    ctx: Any, form: _Form, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients through the eager loop, for double backward and batched gradients."""
    kind = tensors[0].device.type

    def run(aliases: Sequence[Any]) -> Sequence[Tensor]:
        precision = form.precision
        with torch.autocast(kind, precision, precision is not None, cache_enabled=False):
            sequences, states, constants = _split(form, aliases)
            of_call = ctx.loop.with_constants(constants)
            out, final = ctx.loop.run(sequences, tuple(states), *of_call)
        return out, *final

    return differentiable(run, tensors, grads, [a.requires_grad for a in tensors])


def _split(
    form: _Form, tensors: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    first, second = len(form.sequences), len(form.sequences) + len(form.states)
    return tensors[:first], tensors[first:second], tensors[second:]


def _say(cell: Cell, what: str) -> None:
    registry._log_once(f"{cell.name}: the generic loop is {what}")
