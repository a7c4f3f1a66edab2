"""Record the operations of torch below autograd, forward and backward, as a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
#: Decompositions beside the core set.
_DECOMPOSED = (
    "addcdiv", "celu", "gelu", "gelu_backward", "glu", "glu_backward", "hardsigmoid",
    "hardsigmoid_backward", "hardswish", "hardswish_backward", "hardtanh", "hardtanh_backward",
    "leaky_relu", "leaky_relu_backward", "logit", "logit_backward", "mish", "mish_backward",
    "selu", "std", "elu", "elu_backward", "threshold", "_fused_rms_norm",
    "_fused_rms_norm_backward", "_log_softmax", "_log_softmax_backward_data", "logsumexp",
    "var_mean",
)  # fmt: skip


class Operation:
    """A recorded operation, an input, or a tensor that is neither.

    ``args`` and ``kwargs`` have operations in place of tensors. An operation with several results
    is followed by one with the name ``getitem`` for each.
    """

    __slots__ = ("args", "constant", "kwargs", "name", "shape", "target")

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        target: Any = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        constant: Tensor | None = None,
    ) -> None:
        self.name, self.shape, self.target = name, shape, target
        self.args, self.kwargs, self.constant = args, dict(kwargs or {}), constant

    @property
    def inputs(self) -> list[Operation]:
        """The operations that it reads."""
        leaves = torch.utils._pytree.tree_leaves((self.args, self.kwargs))
        return [a for a in leaves if isinstance(a, Operation)]

    @property
    def mutable(self) -> bool:
        return self.target is not None and bool(self.target._schema.is_mutable)


class Recorder(TorchDispatchMode):
    """Records operations; those without a name in ``known`` are decomposed, if possible."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its whole compiler at the first operation.
        return False

    def __init__(self, inputs: Mapping[str, Tensor], known: Collection[str]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._known = known
        self._of: dict[int, Operation] = {}
        self._alive: list[Tensor] = []  # so that identities are not used again
        for name, a in inputs.items():
            self._add(a, Operation(name, tuple(a.shape)))

    def of(self, a: Tensor) -> Operation:
        """The operation that made a tensor."""
        if id(a) not in self._of:
            self._add(a, Operation("constant", tuple(a.shape), constant=a))
        return self._of[id(a)]

    def _add(self, a: Tensor, operation: Operation) -> None:
        self._of[id(a)] = operation
        self._alive.append(a)
        self.operations.append(operation)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if not func._schema.is_mutable and name not in self._known:
            rule = _rules().get(func) or getattr(func, "decompose", None)
            if rule is not None:
                with self:
                    found = rule(*args, **kwargs)
                if found is not NotImplemented:
                    return found
        found = func(*args, **kwargs)
        self._record(func, name, args, kwargs, found)
        return found

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, found: Any) -> None:
        def operations(a: Any) -> Any:
            return torch.utils._pytree.tree_map_only(Tensor, self.of, a)

        given, named = tuple(operations(list(args))), operations(kwargs)
        if isinstance(found, Tensor):
            operation = Operation(name, tuple(found.shape), func, given, named)
            if id(found) in self._of and name != "lift_fresh":  # changed in place
                self.operations.append(operation)
            else:
                self._add(found, operation)
            return
        operation = Operation(name, (), func, given, named)
        self.operations.append(operation)
        results: Sequence[Any] = found if isinstance(found, list | tuple) else ()
        for i, a in enumerate(results):
            if isinstance(a, Tensor):
                self._add(a, Operation("getitem", tuple(a.shape), args=(operation, i)))


@functools.cache
def _rules() -> Mapping[Any, Callable[..., Any]]:
    """Decompositions of torch, whose import takes a second."""
    from torch._decomp import core_aten_decompositions, get_decompositions

    known = [getattr(aten, name) for name in _DECOMPOSED if hasattr(aten, name)]
    return dict(core_aten_decompositions()) | dict(get_decompositions(known))
