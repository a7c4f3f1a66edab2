"""What layers remember from call to call: how calls of the same form run.

The cost of a small call is that of deciding how to run it. A `Plans` is not part of a layer's
state: copies start with an empty one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ln_zoo.ops import registry
from ln_zoo.ops.cells import States
from ln_zoo.ops.ctypes_arguments import addresses
from ln_zoo.ops.engines.native.layers import NativeLayers, Parameters, Prepared, without_tensors
from ln_zoo.ops.engines.native.mixed_precision import MixedPrecision
from ln_zoo.ops.norm_records import RowNorm
from ln_zoo.ops.operator import no_autocast
from ln_zoo.ops.recurrence import RecurrentCall
from ln_zoo.ops.recurrent_kernel import no_custom_ops_reason
from ln_zoo.ops.regularization import Noise
from ln_zoo.ops.spec import product_dtype

#: Places where a layer keeps what its calls depend on: a dictionary and a key in it.
Entries = Sequence[tuple[dict[str, Any], str]]
Run = Callable[[RecurrentCall], tuple[Any, States]]
Draw = Callable[[States], Sequence[Noise]]
#: Plans that one layer keeps: for as many shapes of inputs.
_MAX_PLANS = 64
#: Of inputs of which there may be plans.
_PLANNED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Plan:
    """How one kind of call runs on a kernel that has nothing to prepare."""

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
    """How calls of one layer or cell run, by the form of its input.

    They hold for calls in float32 on the CPU, under autocast too, as long as nothing that a call
    depends on was replaced; where tensors have changed their form, `run` notices.
    """

    def __init__(self) -> None:
        #: Owner, what is watched, and plans: in one tuple, since other threads may replace it.
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
        """Output and last states, or ``None`` where there is no plan for such a call.

        Args:
            owner: ``__dict__`` of the layer, which shallow copies do not share.
            x: inputs, (T, N, I), or (N, I) for a single step.
            states: initial states; ``None`` for zeros.
            count: how many states there are.
            dropout: probability of a zero between two layers.
            training: whether the layer is in training mode.
            draw: draws the noise of a call, from its initial states; ``None``: there is none.
            reset: rows before which states start anew, (T * N,); ``None``: none.
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
            return None  # What is wrong, if anything is, is reported where there is no plan.
        noise = None if draw is None else draw(states)
        return plan(found, x, starts, states, dropout, training, noise, reset)

    def keep(
        self,
        owner: dict[str, Any],
        entries: Entries | None,
        kernel: Run,
        call: RecurrentCall,
    ) -> None:
        """Makes a plan for calls such as one that was just checked, where that is possible.

        Args:
            owner: ``__dict__`` of the layer.
            entries: the places that hold all that records and weights depend on; ``None``: not
                known.
            kernel: what runs it.
            call: such a call, of padded inputs.
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
        # The graph of tensors that were computed, as for `functional_call`, would stay alive.
        if any(isinstance(a, Tensor) and a.grad_fn is not None for _, _, a in watched):
            return
        whose, before, plans = self._kept
        same = whose is owner and len(before) == len(watched)
        for old, new in zip(before, watched, strict=False):
            same = same and old[0] is new[0] and old[1] == new[1] and old[2] is new[2]
        # Plans take weights as they are, and inputs too where nothing widens them.
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
    """All that the choice of a kernel depends on, but for the layer; ``None``: there is no plan."""
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
