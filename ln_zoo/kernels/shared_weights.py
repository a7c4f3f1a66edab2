"""Gradients of a cell's weights for all steps of a graph at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ln_zoo.ops.cells import States

#: Rows of several steps for one product of weight gradients.
ROWS_AT_ONCE = 512


class StepRows(ABC):
    """Rows that steps leave in a backward pass, and the gradients computed from them.

    ``examples`` are those of a step.
    """

    #: Of all parameters; None where not needed.
    gradients: list[Tensor | None]

    def __init__(self, examples: int) -> None:
        self._examples, self._rows = examples, 0
        #: Rows that there is memory for.
        self.room = examples * max(1, ROWS_AT_ONCE // examples)

    def place(self) -> int:
        """The first of the rows of another step."""
        if self._rows == self.room:
            self._flush()
        self._rows += self._examples
        return self._rows - self._examples

    def end(self) -> list[Tensor | None]:
        self._flush()
        return self.gradients

    def _flush(self) -> None:
        rows, self._rows = self._rows, 0
        self.add(rows)

    @abstractmethod
    def add(self, rows: int) -> None:
        """Add the products of the first rows to the gradients of weights."""


#: Makes `StepRows`, for whether each parameter needs a gradient, and the tensors of a step.
MakeRows = Callable[[Sequence[bool], Any], StepRows]


class SharedWeights:
    """The parameters of a cell as one autograd node shared by all steps of a graph.

    Autograd would accumulate weight gradients step by step, which costs more than a step of few
    rows. This node runs after all steps of a backward pass and computes them with one product.
    """

    def __init__(self, make: MakeRows, parameters: Sequence[Tensor | None]) -> None:
        self.sums = Sums(make, _needs(parameters))
        #: Empty tensor through which steps depend on the node.
        self.token: Tensor = _Node.apply(self.sums, *parameters)

    @classmethod
    def of_step(
        cls,
        latest: SharedWeights | None,
        states: States,
        make: MakeRows,
        parameters: Sequence[Tensor | None],
    ) -> SharedWeights | None:
        """The node of a step from these states, if it continues a graph.

        ``latest`` is that of the step before.
        """
        if all(state.grad_fn is None for state in states):
            return None
        if latest is None or not latest._suits(parameters):
            return cls(make, parameters)
        return latest

    def _suits(self, parameters: Sequence[Tensor | None]) -> bool:
        """Whether a backward pass through the same parameters may still follow."""
        return not self.sums.used and self.sums.needs == _needs(parameters)


def _needs(parameters: Sequence[Tensor | None]) -> list[bool]:
    return [a is not None and a.requires_grad for a in parameters]


class _Node(torch.autograd.Function):
    """Parameters, on which steps depend through an empty tensor."""

    @staticmethod
    def forward(ctx: Any, sums: Sums, *parameters: Tensor | None) -> Tensor:
        ctx.sums = sums
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.sums.end()


class Sums:
    """Gradients of the needed parameters, for each backward pass in progress."""

    def __init__(self, make: MakeRows, needs: list[bool]) -> None:
        self._make, self.needs, self.used = make, needs, False
        self._passes: dict[int, _Pass] = {}

    def now(self) -> _Pass:
        task = torch._C._current_graph_task_id()
        found = self._passes.get(task)
        if found is None:
            found = self._passes[task] = _Pass(self._make, self.needs)
        return found

    def end(self) -> Sequence[Tensor | None]:
        self.used = True
        found = self._passes.pop(torch._C._current_graph_task_id(), None)
        return [None] * len(self.needs) if found is None else found.end()


class _Pass:
    def __init__(self, make: MakeRows, needs: list[bool]) -> None:
        self._make, self._needs = make, needs
        self._rows: StepRows | None = None
        self._added: list[Tensor | None] = [None] * len(needs)

    def rows(self, of_step: Any) -> Any:
        if self._rows is None:
            self._rows = self._make(self._needs, of_step)
        return self._rows

    def add(self, grads: Sequence[Tensor | None]) -> None:
        self._added = [
            b if a is None else a if b is None else a + b
            for a, b in zip(self._added, grads, strict=True)
        ]

    def end(self) -> list[Tensor | None]:
        if self._rows is not None:
            self.add(self._rows.end())
        return self._added
