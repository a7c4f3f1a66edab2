"""Cache of how float32 calls on the CPU run, also under autocast.

A small call costs less than its checks, records and the selection of a kernel. A plan skips them
while all values that they depend on are the same objects; addresses are checked at each call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ln_zoo.kernels.ctypes_arguments import KnownForms, addresses
from ln_zoo.kernels.generated.engine import GeneratedLayers, as_layer, run_bound
from ln_zoo.kernels.native.engine import NativeLayers
from ln_zoo.kernels.native.layers import Parameters, Prepared, without_tensors
from ln_zoo.kernels.native.mixed_precision import MixedPrecision
from ln_zoo.ops import registry
from ln_zoo.ops.cells import States
from ln_zoo.ops.norm_records import RowNorm
from ln_zoo.ops.plans import Entries, Runner
from ln_zoo.ops.precision import no_autocast, product_dtype
from ln_zoo.ops.recurrence import RecurrentCall
from ln_zoo.ops.recurrent_kernel import no_custom_ops_reason
from ln_zoo.ops.regularization import Noise

#: Maximum plans per layer, one per input shape.
_MAX_PLANS = 64
#: Dtypes of inputs with plans.
_PLANNED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Plan(Protocol):
    """How calls of one form run."""

    def check(self) -> Any:
        """Addresses of the parameters, or None; RuntimeError if one has changed its form."""

    def __call__(
        self,
        found: Any,
        x: Tensor,
        starts: Sequence[int] | None,
        states: States,
        dropout: float,
        training: bool,
        noise: Sequence[Noise] | None,
        reset: Tensor | None,
        /,
    ) -> tuple[Any, States]:
        """Output and final states; ``found`` is the result of `check`, see `Prepared`."""


class _KernelPlan:
    """Runs the kernel that was selected, with the weights and records of then."""

    def __init__(self, run: Runner, call: RecurrentCall) -> None:
        self._run, self._call = run, without_tensors(call)
        pairs = zip(call.records, call.weights, strict=True)
        self._tensors = [a for pair in pairs for a in Parameters.of(call.cell, *pair)]
        shapes = [None if a is None else tuple(a.shape) for a in self._tensors]
        self._forms = KnownForms(Parameters._fields * len(shapes), self._tensors, shapes)

    def check(self) -> Any:
        return self._forms.addresses(self._tensors)

    def __call__(
        self,
        found: Any,
        x: Tensor,
        starts: Sequence[int] | None,
        states: States,
        dropout: float,
        training: bool,
        noise: Sequence[Noise] | None,
        reset: Tensor | None,
    ) -> tuple[Any, States]:
        call = self._call._replace(
            x=x, states=states, dropout=dropout, training=training, reset=reset
        )
        if noise is not None:
            pairs = zip(call.weights, noise, strict=True)
            call = call._replace(weights=[w._replace(noise=n) for w, n in pairs])
        return self._run(call)


class _GeneratedPlan(_KernelPlan):
    """Runs generated kernels, as long as nothing changes that their traces depend on."""

    def __init__(self, run: GeneratedLayers, call: RecurrentCall) -> None:
        from ln_zoo.kernels.generated.binding import single

        self._bound = bound = run.bound_to(call)
        self._single = single(as_layer(call), bound)
        self._run, self._call = lambda call: run_bound(call, bound), without_tensors(call)

    def check(self) -> Any:
        if not all(bound.unchanged() for bound in self._bound):
            raise RuntimeError("an attribute of a norm or cell has changed")
        return None if self._single is None else self._single.check()

    def __call__(
        self, found: Any, x: Tensor, starts: Any, states: States, *rest: Any
    ) -> tuple[Any, States]:
        if self._single is None:
            return super().__call__(found, x, starts, states, *rest)
        *_, reset = rest
        return self._single(found, x, starts, states, reset)


class _AutocastPlan:
    """Runs a plan in float32 and rounds its output to the dtype of autocast."""

    def __init__(self, plan: Plan, dtype: torch.dtype) -> None:
        self._plan, self._dtype = plan, dtype
        self.check = plan.check

    def __call__(self, found: Any, x: Tensor, *arguments: Any) -> tuple[Any, States]:
        with no_autocast(x):
            output, states = self._plan(found, x.float(), *arguments)
        return output if output is None else output.to(self._dtype), states


def _plan_of(run: Runner, call: RecurrentCall) -> Plan:
    if isinstance(run, GeneratedLayers):
        return _GeneratedPlan(run, call)
    call = call._replace(sites=())
    inner = run.kernel if isinstance(run, MixedPrecision) else run
    plan = Prepared(call) if isinstance(inner, NativeLayers) else _KernelPlan(inner, call)
    return plan if inner is run else _AutocastPlan(plan, product_dtype(call.x))


class _Kept(NamedTuple):
    """Plans of a layer, and what they depend on; never changed, so that threads may share it."""

    owner: dict[str, Any] | None
    #: Dict, key and value, which must still be the same object.
    watched: Sequence[tuple[dict[str, Any], str, Any]]
    #: Plan and shape of states, by `_key`.
    plans: dict[Any, tuple[Plan, tuple[int, ...]]]


class CallCache:
    """A `ln_zoo.ops.plans.CallCache` for CPUs."""

    def __init__(self) -> None:
        self._kept = _Kept(None, (), {})

    def run(
        self,
        owner: dict[str, Any],
        x: Tensor,
        states: States | None,
        count: int,
        dropout: float = 0.0,
        training: bool = False,
        draw: Callable[[States], Sequence[Noise]] | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Any, States] | None:
        kept_owner, watched, plans = self._kept
        key = _key(x, draw is not None, reset is not None)
        known = plans.get(key)
        if known is None or key is None or kept_owner is not owner:
            return None
        for entries, name, value in watched:
            if entries.get(name) is not value:
                return None
        plan, state = known
        try:
            found = plan.check()
            if states is None:
                states = (x.new_zeros(state, dtype=torch.float32),) * count
            starts = addresses(("a state",) * count, states, (state,) * count)
        except RuntimeError:
            return None  # the path without a plan reports errors
        noise = None if draw is None else draw(states)
        return plan(found, x, starts, states, dropout, training, noise, reset)

    def keep(
        self, owner: dict[str, Any], entries: Entries | None, run: Runner, call: RecurrentCall
    ) -> None:
        key = _key(call.x, any(w.noise.sampled for w in call.weights), call.reset is not None)
        if key is None or entries is None or not _is_plannable(run, call):
            return
        watched = [(where, name, where.get(name)) for where, name in entries]
        # Computed tensors (`functional_call`) would keep their graph alive.
        if any(isinstance(a, Tensor) and a.grad_fn is not None for *_, a in watched):
            return
        # A plan would not see that weights which a layer computes have changed.
        values = {id(value) for *_, value in watched}
        weights = (a for w in call.weights for a in w.tensors)
        if any(a is not None and a.numel() and id(a) not in values for a in weights):
            return
        kept = self._kept
        plans = kept.plans if kept.owner is owner and _are_same(kept.watched, watched) else {}
        if len(plans) >= _MAX_PLANS:
            plans = {}
        x, hidden = call.x, call.states[0].shape[-1]
        state = (len(call.weights), x.shape[1], hidden) if x.dim() == 3 else (x.shape[0], hidden)
        try:
            plan = _plan_of(run, call)
        except RuntimeError:
            return  # a parameter of a form that needs a copy at each call
        self._kept = _Kept(owner, watched, plans | {key: (plan, state)})


def _is_plannable(run: Runner, call: RecurrentCall) -> bool:
    """Whether a plan can run calls like this one, with padded inputs."""
    if any(w.hr is not None for w in call.weights):
        return False
    if isinstance(run, GeneratedLayers):
        return call.x.dtype == torch.float32 and all(
            w.hh.dtype == torch.float32 for w in call.weights
        )
    if not call.cell.has_kernels:
        return False
    norms = [record for records in call.records for record in records.values()]
    if not all(isinstance(norm, RowNorm) for norm in norms):
        return False
    # Plans use weights, and usually inputs, without conversion.
    needed = [w.hh for w in call.weights] if isinstance(run, MixedPrecision) else [call.x]
    return all(a.dtype == torch.float32 for a in needed)


def _are_same(first: Sequence[Sequence[Any]], second: Sequence[Sequence[Any]]) -> bool:
    """Whether the dicts, keys and values of watched entries are the same objects."""
    return len(first) == len(second) and all(
        a[0] is b[0] and a[1] == b[1] and a[2] is b[2] for a, b in zip(first, second, strict=True)
    )


def _key(x: Tensor, drawn: bool, resets: bool) -> tuple[Any, ...] | None:
    """Everything that kernel selection depends on, except the layer; None: no plan."""
    if (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, nn.Parameter)
        or not x.is_cpu
        or x.dtype not in _PLANNED_DTYPES
        or x.is_neg()
        or torch._C._len_torch_dispatch_stack()
        or no_custom_ops_reason() is not None
    ):
        return None
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return (
        x.shape,
        x.dtype,
        drawn,
        resets,
        os.environ.get("LN_ZOO_KERNELS"),
        autocast,
        torch.get_num_threads(),
        *registry.KERNELS,
    )
