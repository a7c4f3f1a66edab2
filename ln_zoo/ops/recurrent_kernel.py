"""Engines as kernels: all layers and directions of a recurrent layer, one operator for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ln_zoo.ops import operator  # noqa: F401  defines the operators
from ln_zoo.ops.cells import Cell, States, Weights
from ln_zoo.ops.engines.base import Engine, register
from ln_zoo.ops.records import Records
from ln_zoo.ops.recurrence import stack
from ln_zoo.ops.spec import lower, product_dtype, refusal, specify


def untraceable() -> str | None:
    """Why no operator of this package may be called at present, or ``None``."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        return "an exported program must run without this package"
    return transformed()


def transformed() -> str | None:
    """Why no fused loop may be called at present, torch's own included, or ``None``."""
    # torch.compile knows both at the time of tracing, and compiles anew where they change.
    if torch._C._are_functorch_transforms_active():
        return "transforms of torch.func pass through elementary functions of torch alone"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives pass through elementary functions of torch alone"
    return None


class Recurrence:
    """The kernel that an engine makes: cells whose sites are normalised row by row, or not at all.

    Args:
        engine: what runs the time steps; it becomes known to the operators under its name.

    Example:
        >>> from ln_zoo.ops.engines.aten.rows import AtenEngine
        >>> Recurrence(AtenEngine()).name
        'aten'
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = register(engine)
        self.name, self.title = engine.name, engine.title

    def refuses(
        self, cell: Cell, records: Sequence[Records], x: Tensor, weights: Sequence[Weights]
    ) -> str | None:
        """Why this call is not for the engine, or ``None``."""
        reason = untraceable() or refusal(cell, records, weights)
        if reason is not None:
            return reason
        dtype = product_dtype(x)
        for record, w in zip(records, weights, strict=True):
            reason = self.engine.refuses(specify(cell, record, w), x, w.hh, dtype)
            if reason is not None:
                return reason
        return None

    def __call__(
        self,
        cell: Cell,
        records: Sequence[Records],
        x: Tensor,
        batch_sizes: Tensor | None,
        states: States,
        weights: Sequence[Weights],
        *,
        bidirectional: bool,
        dropout: float,
        training: bool,
    ) -> tuple[Tensor, States]:
        """Runs the layers; arguments as `ln_zoo.ops.dispatch.Kernel` has them."""

        def run(
            i: int, x: Tensor, sizes: Sequence[int] | None, states: States
        ) -> tuple[Tensor, States]:
            spec, operands = lower(cell, records[i], weights[i], x, states)
            save = torch.is_grad_enabled() and any(
                a is not None and a.requires_grad for a in operands
            )
            out, h, c, *_ = torch.ops.ln_zoo.recurrence(
                *operands, batch_sizes, spec.encode(), self.name, save
            )
            # A sequence cut in two shall lose nothing: states are as precise as weights.
            final = (h, c) if spec.cell == "LSTM" else (h,)
            return out, tuple(state.to(weights[i].hh.dtype) for state in final)

        return stack(
            run,
            x,
            batch_sizes,
            states,
            bidirectional=bidirectional,
            dropout=dropout,
            training=training,
        )
