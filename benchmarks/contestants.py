"""What is measured: torch's layers, loops written by hand, and ln_zoo's layers with each engine.

All contestants of one cell and size have the same weights.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.naive import LayerNormGRUCell, LayerNormLSTMCell, Loop
from benchmarks.scripted import ScriptedLSTM
from ln_zoo import layers, norms, ops
from ln_zoo.kernels.native import build
from ln_zoo.ops.recurrent_kernel import Recurrence

CELLS = ("LSTM", "GRU")
#: Those that are measured when asked for, too.
ALL_CELLS = (*CELLS, "RNN")
#: The kernels on CPUs that a norm which normalises row by row is measured with; `gpu` has others.
ENGINES = tuple(
    k.name for k in ops.KERNELS if isinstance(k, Recurrence) and k.engine.device in (None, "cpu")
)
#: What ratios are taken to.
BASELINE = "torch"

_NAIVE: dict[str, Callable[[int, int], LayerNormLSTMCell | LayerNormGRUCell]] = {
    "LSTM": LayerNormLSTMCell,
    "GRU": LayerNormGRUCell,
}


class Absent(Exception):
    """A contestant cannot take part; the message says why."""


@dataclass(frozen=True)
class Size:
    """Steps T, examples B, inputs I, hidden units H."""

    T: int
    B: int
    I: int  # noqa: E741
    H: int

    @classmethod
    def parse(cls, text: str) -> Size:
        """Reads ``T,B,I,H``.

        Raises:
            ValueError: unless it is four whole numbers above zero.
        """
        numbers = [int(part) for part in text.split(",")]
        if len(numbers) != 4 or min(numbers) < 1:
            raise ValueError(f"a size is T,B,I,H, four whole numbers above zero; got {text!r}")
        return cls(*numbers)

    def __str__(self) -> str:
        return f"{self.T},{self.B},{self.I},{self.H}"


@dataclass(frozen=True)
class Contestant:
    """A module under a name.

    Args:
        name: ``torch``, ``cell-loop``, ``naive``, ``torchscript``, ``LayerNorm/native``, ...
        module: a layer, from x (T, N, I) to the outputs and the final state; or a cell, from x
            (N, I) and a state to the next state.
        kernels: what ``LN_ZOO_KERNELS`` is during its calls; ``None``: not set.
        counts: whether it is a cell that is told the number of the step, after the state.
    """

    name: str
    module: nn.Module
    kernels: str | None = None
    counts: bool = False


@contextlib.contextmanager
def limited_to(kernels: str | None) -> Iterator[None]:
    """Sets the environment variable by which ln_zoo chooses its kernels, at each call."""
    before = os.environ.pop("LN_ZOO_KERNELS", None)
    if kernels is not None:
        os.environ["LN_ZOO_KERNELS"] = kernels
    try:
        yield
    finally:
        os.environ.pop("LN_ZOO_KERNELS", None)
        if before is not None:
            os.environ["LN_ZOO_KERNELS"] = before


def names(norm_names: Sequence[str], mode: str) -> list[str]:
    """Names of all contestants.

    Args:
        norm_names: class names of `ln_zoo.norms`.
        mode: ``"step"`` for cells, anything else for layers.

    Example:
        >>> names(["LayerNorm"], "train")
        ['torch', 'cell-loop', 'naive', 'torchscript', 'LayerNorm/native', 'LayerNorm/aten']
    """
    ours: list[str] = []
    for norm in norm_names:
        if _by_rows(norm):
            ours += [f"{norm}/{engine}" for engine in ENGINES]
        else:
            ours.append(norm)
    if mode == "step":
        return [BASELINE, "naive", *ours]
    return [BASELINE, "cell-loop", "naive", "torchscript", *ours]


def layer(name: str, cell: str, size: Size, training: bool) -> Contestant:
    """A layer, with the weights that all layers of this cell and size have.

    Raises:
        Absent: if ln_zoo would not run it with the engine that the name asks for, or it cannot be
            trained at this size.
    """
    weights = _weights(cell, size)
    if name == BASELINE:
        module = getattr(nn, cell)(size.I, size.H)
        module.load_state_dict({f"{key}_l0": value for key, value in weights.items()})
        return Contestant(name, module)
    if name in ("cell-loop", "naive"):
        return Contestant(name, Loop(_foreign_cell(name, cell, size, weights)))
    if name == "torchscript":
        if cell != "LSTM":
            raise Absent(f"{name}: torch's example has an LSTM, no {cell}")
        scripted = ScriptedLSTM(size.I, size.H)
        scripted.load(weights)
        return Contestant(name, torch.jit.script(scripted))
    norm, engine = _parts(name)
    if training and norm.batch_dependent and size.B == 1:
        raise Absent(f"{name}: a batch of one example has no statistics")
    module = getattr(layers, cell)(size.I, size.H, norm=norm)
    _load(module, {f"{key}_l0": value for key, value in weights.items()})
    contestant = Contestant(name, module, engine)
    if engine is not None:
        _insist(contestant, torch.zeros(min(2, size.T), size.B, size.I))
    return contestant


def cell_step(name: str, cell: str, size: Size) -> Contestant:
    """A cell, for one step at a time, with the weights that all of this size have.

    Raises:
        Absent: if it is to run on the native kernels, and there are none.
    """
    weights = _weights(cell, size)
    if name in (BASELINE, "naive"):
        return Contestant(name, _foreign_cell(name, cell, size, weights))
    norm, engine = _parts(name)
    native = build.status(build=engine == "native")
    if engine == "native" and not native.available:
        raise Absent(f"{name}: {native.reason}")
    module = getattr(layers, f"{cell}Cell")(size.I, size.H, norm=norm)
    _load(module, weights)
    return Contestant(name, module, engine, counts=norm.per_timestep)


def _weights(cell: str, size: Size) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gates = ops.CELLS[cell if cell in ops.CELLS else f"{cell}_TANH"].gates * size.H
    shapes = {
        "weight_ih": (gates, size.I),
        "weight_hh": (gates, size.H),
        "bias_ih": (gates,),
        "bias_hh": (gates,),
    }
    bound = size.H**-0.5
    return {
        key: torch.empty(shape).uniform_(-bound, bound, generator=generator)
        for key, shape in shapes.items()
    }


def _foreign_cell(name: str, cell: str, size: Size, weights: Mapping[str, Tensor]) -> nn.Module:
    if name == "naive":
        if cell not in _NAIVE:
            raise Absent(f"{name}: no {cell} was written by hand")
        naive = _NAIVE[cell](size.I, size.H)
        naive.load(weights)
        return naive
    module: nn.Module = getattr(nn, f"{cell}Cell")(size.I, size.H)
    module.load_state_dict(dict(weights))
    return module


def _load(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads torch's parameters; what a norm adds keeps its initial values."""
    module.load_state_dict({**module.state_dict(), **weights})


def _parts(name: str) -> tuple[norms.Norm, str | None]:
    """The norm and the engine of a name such as ``LayerNorm/native``.

    Raises:
        Absent: if there is no such norm.
    """
    norm, _, engine = name.partition("/")
    made = getattr(norms, norm, None)
    if not (isinstance(made, type) and issubclass(made, norms.Norm)):
        raise Absent(f"{name} is not a contestant: there is no norm {norm!r}")
    return made(), engine or None


def _by_rows(norm: str) -> bool:
    """Whether the norm normalises row by row, which is what those engines can do."""
    sites = layers.GRU(1, 1, norm=_parts(norm)[0]).get_submodule("sites.l0")
    records = [cast(norms.Site, site).to_spec() for site in sites.children()]
    return all(isinstance(record, ops.RowNorm) for record in records)


class _Engines(TorchDispatchMode):
    """Notes which engines the operators of ln_zoo are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "ln_zoo":
            self.seen |= {a for a in args if isinstance(a, str) and a in ENGINES}
        return func(*args, **kwargs or {})


def _insist(contestant: Contestant, x: Tensor) -> None:
    """Makes sure that nothing else is measured under an engine's name.

    Raises:
        Absent: if the engine does not run it.
    """
    with _Engines() as engines, torch.no_grad(), limited_to(contestant.kernels):
        contestant.module(x)
    if engines.seen != {contestant.kernels}:
        raise Absent(f"{contestant.name}: {contestant.kernels} does not take the call")
