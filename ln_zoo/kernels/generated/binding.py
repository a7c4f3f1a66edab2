"""Kernels of the directions of layers: found again at each call, or made."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ln_zoo.kernels.ctypes_arguments import KnownForms, address
from ln_zoo.kernels.cuda_graphs.recorded import unsupported_site
from ln_zoo.kernels.generated.check import difference
from ln_zoo.kernels.generated.direction import Direction, Tensors
from ln_zoo.kernels.generated.kernel import Kernel, make
from ln_zoo.kernels.generated.operator import Operands, SharedStep, run
from ln_zoo.kernels.generated.trace import StepForm, Unsupported, parameters_of
from ln_zoo.kernels.generated.watch import Watched
from ln_zoo.kernels.shared_weights import ROWS_AT_ONCE, SharedWeights
from ln_zoo.ops.cells import Cell, Sites, States, Weights
from ln_zoo.ops.precision import product_dtype
from ln_zoo.ops.recurrence import RecurrentCall

#: Makes a kernel: cell, sites, weights, form, whether weights may be centred.
Maker = Callable[..., Any]
_log = logging.getLogger("ln_zoo")
#: Traces of one layer's direction, after which its values are taken to change with each call.
MOST_TRACES = 16
#: Traces remembered.
_REMEMBERED = 256
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Binding:
    """A kernel of one direction of a layer, or why there is none, while values are the same."""

    def __init__(self, call: RecurrentCall, i: int, form: StepForm, key: Any) -> None:
        self._cell, sites = call.cell, call.sites[i]
        self.form, self.key = form, key
        self._modules = {role: vars(site) for role, site in sites.items()}
        self.watched = Watched(call.cell, sites)
        self._hooks = [
            getattr(module, name)
            for site in sites.values()
            for module in site.modules()  # type: ignore[attr-defined]
            for name in _HOOKS
        ]
        self.kernel: Any = ""  # a kernel, or why there is none

    def fits(self, cell: Cell, sites: Sites, key: Any) -> bool:
        return (
            self._cell is cell
            and self.key == key
            and all(vars(site) is self._modules.get(role) for role, site in sites.items())
            and self.unchanged()
        )

    def unchanged(self) -> bool:
        return not any(self._hooks) and self.watched.unchanged()


class Bound(NamedTuple):
    """A kernel with the parameters of a call."""

    kernel: Any
    form: StepForm
    parameters: Sequence[Tensor]
    narrow: bool
    binding: Binding

    def unchanged(self) -> bool:
        """Whether the next call may use it too, with the same parameters, sites and noise."""
        return self.binding.unchanged()


_bindings: weakref.WeakKeyDictionary[Any, list[Binding]] = weakref.WeakKeyDictionary()
_made: dict[Any, Any] = {}
_checked: set[str] = set()
_mutex = threading.RLock()


def bound_to(call: RecurrentCall, i: int, make: Maker = make) -> Bound | str:
    """The kernel of direction i by this backend, or why there is none."""
    cell, sites, weights = call.cell, call.sites[i], call.weights[i]
    if not all(isinstance(site, nn.Module) for site in sites.values()):
        return "a place has no module"
    parameters = parameters_of(weights, sites)
    form = StepForm.of(weights.noise, call.reset is not None)
    hr = None if weights.hr is None else weights.hr.shape
    there = weights.bias_ih is None, weights.bias_hh is None
    shapes = [(a.shape, a.dtype, a.requires_grad) for a in parameters]
    narrow = is_narrow(call)
    sizes = weights.ih.shape[0], weights.ih.shape[1] > 0, weights.hh.shape
    key = (make.__module__, form, *sizes, hr, there, narrow, shapes)
    with _mutex:
        known = _bindings.setdefault(sites["input"], [])
        for binding in known:
            if binding.fits(cell, sites, key):
                break
        else:
            reason = _refused(call, i, key, known)
            if reason is not None:
                return reason
            binding = _bind(call, i, form, key, make)
            known.append(binding)
    found = binding.kernel
    return found if isinstance(found, str) else Bound(found, form, parameters, narrow, binding)


def _refused(call: RecurrentCall, i: int, key: Any, known: list[Binding]) -> str | None:
    """Why a direction is not traced anew, or None."""
    for role, site in call.sites[i].items():
        reason = unsupported_site(site)
        if reason is not None:
            return f"at the place {role!r} {reason}"
    if call.x.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a stream is captured"  # the check reads numbers back
    if len(known) < MOST_TRACES:
        return None
    if all(binding.key == key for binding in known):
        return "attributes that it reads change from call to call"
    del known[0]
    return None


def _bind(call: RecurrentCall, i: int, form: StepForm, key: Any, make: Maker) -> Binding:
    binding = Binding(call, i, form, key)
    whole = (call.cell.name, len(call.cell.states), str(key), binding.watched.summary)
    kernel = _made.get(whole)
    if kernel is None:
        # Hooks, such as those of a checkpoint, must not see what trace and check save.
        with saved_tensors_hooks(lambda a: a, lambda a: a):
            kernel = _make(call, i, form, binding, make)
        if len(_made) >= _REMEMBERED:
            _made.clear()
        _made[whole] = kernel
    binding.kernel = kernel
    return binding


def _make(call: RecurrentCall, i: int, form: StepForm, binding: Binding, make: Maker) -> Any:
    """A checked kernel, or why there is none."""
    cell, weights, narrow = call.cell, call.weights[i], is_narrow(call)
    try:
        centres = not narrow and weights.ih.shape[1] > 0
        kernel = make(cell, call.sites[i], weights, form, centres=centres)
        if kernel.text not in _checked:
            parameters = parameters_of(weights, call.sites[i])
            starts = tuple(s[i] for s in call.states)
            found = prepared(
                call, i, Bound(kernel, form, parameters, narrow, binding), call.x[:1], None, starts
            )
            wrong = difference(*found)
            if wrong is not None:
                reason = f"{wrong} differs from the generic loop"
                _log.warning(
                    "%s: the generated kernel is not used, since %s; please report the cell",
                    *(cell.name, reason),
                )
                return reason
            _checked.add(kernel.text)
    except Unsupported as error:
        return str(error)
    except Exception as error:
        # A step may do what nobody foresaw; the generic loop is right in any case.
        reason = f"generating it failed: {type(error).__name__}: {error}".partition("\n")[0]
        _log.warning("%s: %s; please report the cell", cell.name, reason, exc_info=True)
        return reason
    return kernel


def is_narrow(call: RecurrentCall) -> bool:
    """Whether products are in bfloat16."""
    if call.x.device.type != "cpu" or product_dtype(call.x) != torch.bfloat16:
        return False
    from ln_zoo.kernels.native import build
    from ln_zoo.kernels.native.mixed_precision import MIN_MULTIPLICATIONS

    rows = call.x.shape[:-1].numel()
    most = max(w.ih.numel() + w.hh.numel() for w in call.weights)
    return build.bfloat16_pays() and rows * most >= MIN_MULTIPLICATIONS["layers"]


def prepared(
    call: RecurrentCall,
    i: int,
    bound: Bound,
    x: Tensor,
    sizes: Sequence[int] | None,
    states: States,
    reset: Tensor | None = None,
) -> tuple[Direction, Tensors]:
    """Direction and tensors of a call, in float32 and contiguous."""
    kernel, form, parameters, narrow, _ = bound
    weights: Weights = call.weights[i]
    noise = weights.noise
    held: tuple[Any, ...] = ()
    if form.zoneout:
        pairs = zip(form.zoneout, noise.zoneout, strict=True)
        held = tuple(
            d.contiguous().view(*x.shape[:-1], -1) if share is None else None  # type: ignore[union-attr]
            for share, d in pairs
        )
    if noise.sampled:
        weights = weights._replace(noise=noise._replace(dropout=None, zoneout=()))
    threads = torch.get_num_threads()
    direction = Direction(
        kernel, call.cell, call.sites[i], weights, parameters, form, sizes, narrow, threads,
        recompute=call.recompute,
    )  # fmt: skip
    tensors = Tensors(
        _plain(x),
        _plain(weights.ih),
        _plain(weights.hh),
        None if weights.hr is None else _plain(weights.hr),
        tuple([_plain(s) for s in states]),
        tuple([_plain(a) for a in parameters]),
        None if noise.dropout is None else _plain(noise.dropout),
        None if reset is None else reset.contiguous().view(-1),
        held,
    )
    return direction, tensors


class Single:
    """The direction of a call, for calls that differ in x, states and resets; see `single`."""

    def __init__(self, direction: Direction, tensors: Tensors) -> None:
        kernel, self._tensors = direction.kernel, tensors
        self._weights = (*tensors[1:4], *tensors.parameters)
        shapes = kernel.weight_shapes(tensors.w_ih.shape[1])
        forms = KnownForms(kernel.weight_names, self._weights, shapes)
        self._forms, self._direction = forms, direction._replace(forms=forms)
        self._absent = (0,) * len(tensors.states)
        self._make = functools.partial(Operands, kernel)
        #: Node in the graph of the latest step.
        self._shared: SharedWeights | None = None

    def check(self) -> list[int]:
        """Addresses of weights and parameters; RuntimeError if one has changed its form."""
        return self._forms.addresses(self._weights)

    def __call__(
        self,
        found: Sequence[int],
        x: Tensor,
        starts: Sequence[int],
        states: States,
        reset: Tensor | None,
    ) -> tuple[Tensor | None, States]:
        """As `run`; ``found`` is the result of `check`, ``starts`` are addresses."""
        x, flags, lead = x.contiguous(), 0, x.shape[:-1]
        if reset is not None:
            reset = reset.contiguous().view(-1)
            flags = address("resets", reset, torch.bool, (lead.numel(),))
        given = (x.data_ptr(), *found[:3], *starts, *found[3:], 0, flags, *self._absent)
        direction, (_, ih, hh, hr, _, parameters, *_) = self._direction, self._tensors
        tensors = Tensors(x, ih, hh, hr, states, parameters, None, reset, (), given)
        if torch.is_grad_enabled() and lead[:-1] in ((), (1,)) and lead[-1] < ROWS_AT_ONCE:
            self._shared = SharedWeights.of_step(self._shared, states, self._make, self._weights)
            if self._shared is not None:
                sums, token = self._shared.sums, self._shared.token
                out, *finals = SharedStep.apply(direction, sums, tensors, x, *states, token)
                return out, tuple(finals)
        return run(direction, tensors)


def single(call: RecurrentCall, bound: Sequence[Bound]) -> Single | None:
    """A call of one direction on padded float32 data, on a CPU and without sampled noise."""
    weights = call.weights[0]
    if (
        len(bound) > 1
        or not isinstance(bound[0].kernel, Kernel)
        or product_dtype(call.x) is not torch.float32
        or weights.noise.sampled
    ):
        return None
    starts = tuple(s[0] for s in call.states)
    direction, tensors = prepared(call, 0, bound[0], call.x, None, starts, call.reset)
    used = (*tensors[1:4], *tensors.parameters)
    originals = (weights.ih, weights.hh, weights.hr, *bound[0].parameters)
    if any(a is not b for a, b in zip(used, originals, strict=True)):
        return None  # copies, which would not change with the weights
    none = torch.empty(0)
    return Single(direction, tensors._replace(x=none, states=(none,) * len(starts), reset=None))


def _plain(a: Tensor) -> Tensor:
    """In float32, contiguous and not negated."""
    if a.dtype is torch.float32 and a.is_contiguous() and not a.is_neg():
        return a
    return a.float().resolve_neg().contiguous()
