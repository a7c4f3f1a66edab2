"""Cache of how calls of the same form run, since small calls cost less than selecting a kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ln_zoo.kernels.ctypes_arguments import addresses
from ln_zoo.kernels.native.layers import NativeLayers, Parameters, Prepared, without_tensors
from ln_zoo.kernels.native.mixed_precision import MixedPrecision
from ln_zoo.ops import registry
from ln_zoo.ops.cells import States
from ln_zoo.ops.norm_records import RowNorm
from ln_zoo.ops.operator import no_autocast
from ln_zoo.ops.recurrence import RecurrentCall
from ln_zoo.ops.recurrent_kernel import no_custom_ops_reason
from ln_zoo.ops.regularization import Noise
from ln_zoo.ops.spec import product_dtype

#: Dictionary entries (dict, key) that calls of a layer depend on.
Entries = Sequence[tuple[dict[str, Any], str]]
Run = Callable[[RecurrentCall], tuple[Any, States]]
Draw = Callable[[States], Sequence[Noise]]
#: Maximum plans per layer, one per input shape.
_MAX_PLANS = 64
#: Dtypes of inputs with plans.
_PLANNED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Plan:
    """How one kind of call runs on a kernel without preparation."""

    def __init__(self, kernel: Run, call: RecurrentCall) -> None:
        self._kernel, self._call = kernel, without_tensors(call)
        pairs = zip(call.records, call.weights, strict=True)
        self._tensors = [a for pair in pairs for a in Parameters.of(call.cell, *pair)]
        self._shapes = [None if a is None else tuple(a.shape) for a in self._tensors]

    def check(self) -> None:
        addresses(Parameters._fields * len(self._tensors), self._tensors, self._shapes)

    def __call__(
        self,
        found: None,
        x: Tensor,
        starts: Sequence[int],
        states: States,
        dropout: float,
        training: bool,
        noise: Sequence[Noise] | None,
        reset: Tensor | None,
    ) -> tuple[Any, States]:
        now = self._call._replace(
            x=x, states=states, dropout=dropout, training=training, reset=reset
        )
        if noise is not None:
            pairs = zip(now.weights, noise, strict=True)
            now = now._replace(weights=[w._replace(noise=n) for w, n in pairs])
        return self._kernel(now)


class _AutocastPlan:
    """How one kind of call runs in float32 under autocast: only its output is rounded."""

    def __init__(self, plan: _Plan | Prepared, dtype: torch.dtype) -> None:
        self._plan, self._dtype = plan, dtype
        self.check = plan.check

    def __call__(self, found: Any, x: Tensor, *arguments: Any) -> tuple[Any, States]:
        with no_autocast(x):
            output, states = self._plan(found, x.float(), *arguments)
        return output if output is None else output.to(self._dtype), states


def _plan_of(kernel: Run, call: RecurrentCall) -> _Plan | Prepared | _AutocastPlan:
    inner = kernel.kernel if isinstance(kernel, MixedPrecision) else kernel
    plan = Prepared(call) if isinstance(inner, NativeLayers) else _Plan(inner, call)
    return plan if inner is kernel else _AutocastPlan(plan, product_dtype(call.x))


class Plans:
    """How calls of one layer or cell run, by the form of the input; not copied with the layer.

    For float32 calls on the CPU, also under autocast. Valid until something that the call depends
    on is replaced; `run` detects tensors that have changed their form.
    """

    def __init__(self) -> None:
        #: Owner, watched entries and plans: one tuple, replaced atomically by other threads.
        self._kept: tuple[Any, list[tuple[dict[str, Any], str, Any]], dict[Any, Any]]
        self._kept = (None, [], {})

    def __reduce__(self) -> tuple[Any, ...]:
        return Plans, ()

    def run(
        self,
        owner: dict[str, Any],
        x: Tensor,
        states: States | None,
        count: int,
        dropout: float = 0.0,
        training: bool = False,
        draw: Draw | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Any, States] | None:
        """Output and final states, or None without a plan.

        ``owner`` is the layer's ``__dict__``, which shallow copies do not share. x is (T, N, I), or
        (N, I) for a single step; ``reset`` is (T * N,). ``draw`` samples the noise of a call, given
        its ``count`` initial states.
        """
        whose, watched, plans = self._kept
        key = _key(x, draw is not None, reset is not None)
        plan = plans.get(key)
        if plan is None or key is None or whose is not owner:
            return None
        for where, name, a in watched:
            if where.get(name) is not a:
                return None
        plan, state = plan
        try:
            found = plan.check()
            if states is None:
                states = (x.new_zeros(state, dtype=torch.float32),) * count
            starts = addresses(("h", "c"), states, (state,) * count)
        except RuntimeError:
            return None  # the path without a plan reports errors
        noise = None if draw is None else draw(states)
        return plan(found, x, starts, states, dropout, training, noise, reset)

    def keep(
        self,
        owner: dict[str, Any],
        entries: Entries | None,
        kernel: Run,
        call: RecurrentCall,
    ) -> None:
        """Plan calls like this one, with padded inputs, if possible.

        ``entries``: where records and weights are stored, or None if unknown.
        """
        cell, records, x, _, _, weights, *_ = call
        key = _key(x, any(w.noise.sampled for w in weights), call.reset is not None)
        if key is None or entries is None:
            return
        if not cell.has_kernels or any(w.hr is not None for w in weights):
            return
        if not all(isinstance(r, RowNorm) for direction in records for r in direction.values()):
            return
        watched = [(where, name, where.get(name)) for where, name in entries]
        # Computed tensors (`functional_call`) would keep their graph alive.
        if any(isinstance(a, Tensor) and a.grad_fn is not None for _, _, a in watched):
            return
        whose, before, plans = self._kept
        same = whose is owner and len(before) == len(watched)
        for old, new in zip(before, watched, strict=False):
            same = same and old[0] is new[0] and old[1] == new[1] and old[2] is new[2]
        # Plans use weights, and usually inputs, without conversion.
        needed = [w.hh for w in weights] if isinstance(kernel, MixedPrecision) else [x]
        if any(a.dtype != torch.float32 for a in needed):
            return
        plan = _plan_of(kernel, call)
        hidden = weights[0].hh.shape[1]
        state = (len(weights), x.shape[1], hidden) if x.dim() == 3 else (x.shape[0], hidden)
        kept = dict(plans) if same and len(plans) < _MAX_PLANS else {}
        kept[key] = plan, state
        self._kept = owner, watched, kept


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
    value = os.environ.get("LN_ZOO_KERNELS")
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return (
        x.shape,
        x.dtype,
        drawn,
        resets,
        value,
        autocast,
        torch.get_num_threads(),
        *registry.KERNELS,
    )
