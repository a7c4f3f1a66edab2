"""The choice of a fast way to run a recurrent layer."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ln_zoo.ops.batch_recurrence import BatchRecurrence
from ln_zoo.ops.cells import Cell, States, Weights
from ln_zoo.ops.engines.aten.batch import BatchAtenEngine
from ln_zoo.ops.engines.aten.rows import AtenEngine
from ln_zoo.ops.engines.native.batch import NativeBatchEngine
from ln_zoo.ops.engines.native.one_call import ONE_CALL_ROWS, OneCall
from ln_zoo.ops.engines.native.steps import NativeEngine
from ln_zoo.ops.engines.torch_rnn import TorchRNN
from ln_zoo.ops.engines.triton import TritonEngine
from ln_zoo.ops.records import Records
from ln_zoo.ops.recurrent_kernel import Recurrence


class Kernel(Protocol):
    """A fast way to run all layers and directions of a recurrent layer.

    One that runs a single direction becomes a kernel through `ln_zoo.ops.recurrence.stack`.
    """

    @property
    def name(self) -> str:
        """A short identifier, for ``LN_ZOO_KERNELS`` and the log."""

    @property
    def title(self) -> str:
        """What it is, in a few words for the log."""

    def refuses(
        self, cell: Cell, records: Sequence[Records], x: Tensor, weights: Sequence[Weights]
    ) -> str | None:
        """The reason why it cannot take this call, or ``None``; arguments as for `pick`."""

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
        """Outputs and final states.

        Args:
            cell: the cell.
            records: what happens to summed inputs, by role, for each direction of each layer.
            x: padded (T, N, I) or packed (total, I).
            batch_sizes: of packed data, (T,); ``None`` says that x is padded.
            states: initial states, each (layers * directions, N, H).
            weights: effective weights, one for each direction of each layer.
            bidirectional: whether each layer has a reverse direction.
            dropout: probability of a zero between two layers.
            training: whether the layer is in training mode.
        """


#: Multiplications of all steps from which our own loop of a GRU is faster than torch's.
_LARGE = 2**21
#: Kernels in order of preference: the first that does not refuse is taken.
KERNELS: list[Kernel] = [
    TorchRNN(),
    Recurrence(TritonEngine()),
    OneCall(),
    Recurrence(NativeEngine()),
    Recurrence(AtenEngine()),
    BatchRecurrence(NativeBatchEngine()),
    BatchRecurrence(BatchAtenEngine()),
]


def pick(
    cell: Cell, records: Sequence[Records], x: Tensor, weights: Sequence[Weights]
) -> Kernel | None:
    """The kernel for this call; ``None`` stands for the generic loop, which can do everything.

    The environment variable ``LN_ZOO_KERNELS``, read at each call, chooses among kernels: ``0``
    turns all off, ``1`` (the default) allows all, and names with commas between them allow those
    alone. What runs a cell, and each reason for a refusal, is logged once, to the logger
    ``ln_zoo``.

    Args:
        cell: the cell.
        records: what happens to summed inputs, by role, for each direction of each layer; a record
            ``None`` says that only the strategy knows.
        x: padded (T, N, I) or packed (total, I) input.
        weights: effective weights, one for each direction of each layer.

    Raises:
        ValueError: if ``LN_ZOO_KERNELS`` names no kernel.

    Example:
        >>> from ln_zoo.ops.cells import CELLS
        >>> from ln_zoo.ops.records import RowNorm
        >>> x, weights = torch.randn(500, 2, 3), Weights(torch.randn(6, 3), torch.randn(6, 2))
        >>> plain, scaled = RowNorm((4, 2)), RowNorm((4, 2), scale=True)
        >>> pick(CELLS["GRU"], [{"input": plain, "recurrent": plain}], x, [weights]).name
        'torch'
        >>> pick(CELLS["GRU"], [{"input": None, "recurrent": scaled}], x, [weights])
    """
    kernels, why = allowed(os.environ.get("LN_ZOO_KERNELS", ""))
    if _ours_is_faster(cell, x, weights):
        last = ("torch", "aten")
        kernels = sorted(kernels, key=lambda k: k.name in last and 1 + last.index(k.name))
    generic = f"the generic loop{why}"
    return _first(cell.name, kernels, generic, (cell, records, x, weights))


def pick_step(cell: Cell, records: Records, x: Tensor, weights: Weights) -> Kernel | None:
    """The same for a single step of a cell; ``None`` stands for functions of torch.

    Args:
        cell: the cell.
        records: what happens to summed inputs, by role.
        x: input, (N, I).
        weights: the effective weights.
    """
    kernels, why = allowed(os.environ.get("LN_ZOO_KERNELS", ""))
    kernels = [kernel for kernel in kernels if isinstance(kernel, OneCall)]
    arguments = (cell, [records], x.unsqueeze(0), [weights])
    return _first(f"a step of {cell.name}", kernels, f"functions of torch{why}", arguments)


def _first(what: str, kernels: Sequence[Kernel], else_: str, arguments: Any) -> Kernel | None:
    """The first kernel that does not refuse."""
    for kernel in kernels:
        reason = kernel.refuses(*arguments)
        if reason is None:
            _log_once(f"{what}: runs on {kernel.name} ({kernel.title})")
            return kernel
        _log_once(f"{what}: not run by {kernel.name} ({kernel.title}): {reason}")
    _log_once(f"{what}: runs on {else_}")
    return None


def _ours_is_faster(cell: Cell, x: Tensor, weights: Sequence[Weights]) -> bool:
    """Whether the native kernels beat torch's own loop where nothing is normalised.

    On CPUs a call in one piece does, and the loops take 0.5 to 0.9 of the time for a GRU
    (docs/results/performance.md), but not where calls are so small that they cost what their
    Python costs. For an LSTM the two are equal. Nothing was measured in half precision.
    """
    if x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    if torch.compiler.is_compiling():
        return False  # torch's loop is out there anyhow, and sizes may be symbols
    rows = x.numel() // max(1, x.shape[-1])
    if x.dim() == 3 and rows <= ONE_CALL_ROWS:
        return True
    return cell.name == "GRU" and rows * weights[0].hh.numel() >= _LARGE


def allowed(value: str) -> tuple[list[Kernel], str]:
    """The kernels that a value of ``LN_ZOO_KERNELS`` allows, and how to say so."""
    if value in ("", "1"):
        return KERNELS, ""
    why = f": LN_ZOO_KERNELS={value}"
    if value == "0":
        return [], why
    names = [name.strip() for name in value.split(",")]
    known = dict.fromkeys(kernel.name for kernel in KERNELS)
    for name in names:
        if name not in known:
            raise ValueError(
                f"LN_ZOO_KERNELS={value}: there is no kernel called {name!r}; expected 0 (none), "
                f"1 (all) or names out of {', '.join(known)} with commas between them"
            )
    return [kernel for kernel in KERNELS if kernel.name in names], why


def _log_once(message: str) -> None:
    if not torch.compiler.is_compiling():
        _log(message)


@functools.cache
def _log(message: str) -> None:
    logging.getLogger("ln_zoo").info(message)
