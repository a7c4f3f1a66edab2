"""What a recurrent layer computes on a device, held against the generic loop in float64 on the CPU.

The same tests run on the CPU, where they show that they are right themselves, and on a GPU.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from accuracy import FACTOR, Results, assert_within, error, limits_by_run, moved
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from ln_zoo import ops
from ln_zoo.layers import GRU, LSTM, RNN, RecurrentLayer
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.ops.regularization import Noise

CELLS: dict[str, Callable[..., nn.Module]] = {
    "LSTM": LSTM,
    "GRU": GRU,
    "RNN_TANH": RNN,
    "RNN_RELU": lambda *sizes, **options: RNN(*sizes, nonlinearity="relu", **options),
}
#: The kernels' cells that are not torch's.
OTHER_CELLS: dict[str, Callable[..., nn.Module]] = {
    name: functools.partial(RecurrentLayer, cell=cell)
    for name, cell in ops.CELLS.items()
    if not cell.in_torch
}
NORMS: dict[str, Norm] = {
    "none": Identity(),
    "layer": LayerNorm(),
    "rms": RMSNorm(),
    "weight": WeightNorm(),
    "batch": BatchNorm(max_steps=16),
}
OTHER_NORMS: dict[str, Norm] = {"layer, each gate": LayerNorm(per_gate=True)}
#: Precision of the parameters, and of autocast.
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "float32": (torch.float32, None),
    "float64": (torch.float64, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
}
gpu, slow = pytest.mark.gpu, pytest.mark.slow
#: Where a test runs: once here, and once on a card.
devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=slow), pytest.param("cuda", marks=gpu)]
)


def ways(on_cpu: Sequence[str], on_gpu: Sequence[str]) -> pytest.MarkDecorator:
    """Devices with values of ``LN_ZOO_KERNELS``."""
    found = [pytest.param("cpu", kernels, marks=slow) for kernels in on_cpu]
    found += [pytest.param("cuda", kernels, marks=gpu) for kernels in on_gpu]
    return pytest.mark.parametrize(("device", "kernels"), found)


@dataclass(frozen=True)
class Problem:
    """A call of a layer.

    Args:
        cell: a name of `CELLS` or `OTHER_CELLS`.
        norm: a name of `NORMS` or `OTHER_NORMS`.
        precision: a name of `PRECISIONS`.
        options: further arguments of the layer.
        packed: whether the input is packed; the longest sequence is not the first.
        reset: whether some steps are.
        hx: ``"expanded"`` or ``"strided"`` initial states; ``""`` for none.
        training: the layer's mode. Gradients are taken in both.
        sizes: T, N, I, H.
    """

    cell: str
    norm: str
    precision: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    reset: bool = False
    hx: str = ""
    training: bool = True
    sizes: tuple[int, int, int, int] = (19, 5, 6, 24)

    def layer(self) -> nn.Module:
        """The layer, on the CPU; what a norm has learnt is not what it starts from."""
        *_, inputs, hidden = self.sizes
        torch.manual_seed(3)
        norm = (NORMS | OTHER_NORMS)[self.norm]
        layer = (CELLS | OTHER_CELLS)[self.cell](inputs, hidden, norm=norm, **self.options)
        with torch.no_grad():
            for name, a in [*layer.named_parameters(), *layer.named_buffers()]:
                if "sites." in name and a.is_floating_point():
                    a.add_(0.2 * torch.rand_like(a))
                elif "sites." in name:
                    a.fill_(7)  # steps that the norm has seen
        return layer.to(PRECISIONS[self.precision][0]).train(self.training)


#: Situations of a call, as arguments of `Problem`.
SITUATIONS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packed": True},
    "resets": {"reset": True},
    "packed resets": {"packed": True, "reset": True},
    "zoneout": {"options": {"zoneout": 0.2}},
    "packed zoneout": {"packed": True, "options": {"zoneout": 0.2}},
    "zoneout in evaluation": {"options": {"zoneout": 0.2}, "training": False},
    "recurrent dropout": {"options": {"recurrent_dropout": 0.3}},
    "all of it": {
        "packed": True,
        "reset": True,
        "hx": "strided",
        "options": {"recurrent_dropout": 0.3, "zoneout": 0.2},
    },
    "bidirectional": {"options": {"bidirectional": True, "num_layers": 2}},
    "bidirectional packed": {"packed": True, "options": {"bidirectional": True}},
    "no bias": {"options": {"bias": False, "batch_first": True}},
    "hx expanded": {"hx": "expanded"},
    "hx strided": {"hx": "strided", "packed": True},
    "evaluation": {"training": False},
    "one example": {"sizes": (19, 1, 6, 24), "training": False},
}
PROJECTED: dict[str, dict[str, Any]] = {
    "projected": {"options": {"proj_size": 10}, "hx": "strided"},
    "projected packed": {"packed": True, "options": {"proj_size": 10, "bidirectional": True}},
}


def situations(cell: str, names: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Those of a cell, or some of them."""
    found = SITUATIONS | (PROJECTED if cell == "LSTM" else {})
    return {name: found[name] for name in names or found}


@contextlib.contextmanager
def limited_to(kernels: str) -> Iterator[None]:
    """Sets ``LN_ZOO_KERNELS``."""
    with mock.patch.dict(os.environ, LN_ZOO_KERNELS=kernels):
        yield


class Cut(Exception):
    """A call was cut at its resets before masks were drawn, so that they fit no other call."""


@contextlib.contextmanager
def same_noise(examples: int) -> Iterator[None]:
    """Masks are drawn on the CPU and alike in each call: devices draw other numbers."""
    draw = ops.draw_noise

    def drawn(
        zoneout: Any, dropout: float, states: Sequence[Tensor], lead: Any, training: bool
    ) -> list[Noise]:
        like = states[0]
        if like.shape[1] != examples:
            raise Cut
        wide = torch.promote_types(like.dtype, torch.float32)
        torch.manual_seed(5)
        noise = draw(zoneout, dropout, [torch.zeros(s.shape) for s in states], lead, training)
        return [
            Noise(
                None if mask is None else mask.to(like.device, wide),
                tuple(d.to(like.device) if isinstance(d, Tensor) else d for d in held),
            )
            for mask, held in noise
        ]

    with mock.patch.object(ops, "draw_noise", drawn):
        yield


def lengths_of(problem: Problem) -> list[int]:
    """Lengths of the sequences of a packed problem."""
    steps, examples, *_ = problem.sizes
    return [max(1, steps - 4 * ((k + 1) % examples)) for k in range(examples)]


def outcome(
    problem: Problem,
    device: str,
    kernels: str,
    *,
    double: bool = False,
    run: int = 0,
    call: Callable[..., Any] | None = None,
    template: nn.Module | None = None,
) -> Results:
    """Outputs, states, statistics and all gradients, as float64 on the CPU.

    Args:
        problem: the call.
        device: where the layer is.
        kernels: the value of ``LN_ZOO_KERNELS``.
        double: whether to compute in float64 in place of the problem's precision.
        run: moves last bits of inputs and parameters; see `accuracy.moved`.
        call: calls the layer: ``call(layer, x, hx, **options)``.
        template: a layer to copy in place of ``problem.layer()``.
    """
    steps, examples, inputs, _ = problem.sizes
    dtype, autocast = PRECISIONS[problem.precision]
    layer = copy.deepcopy(template or problem.layer())
    with torch.no_grad():
        for parameter in layer.parameters():
            # Autocast would round smaller shifts away.
            parameter.copy_(moved(parameter, run, autocast or dtype))
    layer.to(device, torch.float64 if double else dtype)
    compute = torch.float64 if double else dtype

    generator = torch.Generator().manual_seed(1)

    def leaf(*size: int) -> Tensor:
        a = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        return moved(a, run, autocast or dtype).to(device, compute).requires_grad_()

    x = leaf(steps, examples, inputs)
    leaves = {"x": x}
    options: dict[str, Any] = {}
    flags = torch.rand((steps, examples), generator=generator) < 0.15
    given: Tensor | PackedSequence = x
    if problem.options.get("batch_first"):
        given, flags = x.transpose(0, 1), flags.t()
    if problem.packed:
        given = pack_padded_sequence(x, torch.tensor(lengths_of(problem)), enforce_sorted=False)
    if problem.reset:
        options["reset"] = flags.to(device)
        if problem.packed:
            options["reset"] = pack_padded_sequence(
                flags.to(device), torch.tensor(lengths_of(problem)), enforce_sorted=False
            )
    hx: Any = None
    if problem.hx:
        hx, leaves = _states(problem, layer, leaf, leaves)
    context: Any = contextlib.nullcontext()
    if autocast is not None and not double:
        context = torch.autocast(device, autocast)
    with limited_to(kernels), same_noise(examples), context:
        if call is None:
            output, states = layer(given, hx, **options)
        else:
            output, states = call(layer, given, hx, **options)
    data = output.data if isinstance(output, PackedSequence) else output
    results = {"output": data}
    results |= dict(zip("hc", states if isinstance(states, tuple) else (states,), strict=False))
    upstream = [
        torch.randn(r.shape, generator=generator, dtype=torch.float64).to(device, r.dtype)
        for r in results.values()
    ]
    leaves |= dict(layer.named_parameters())
    # Activation checkpointing runs the layer again, on the same kernels.
    with limited_to(kernels):
        gradients = torch.autograd.grad([*results.values()], [*leaves.values()], upstream)
    found = results | {f"d {n}": g for n, g in zip(leaves, gradients, strict=True)}
    if problem.training:
        found |= {n: b for n, b in layer.named_buffers() if b.is_floating_point()}
    return {name: a.detach().double().cpu() for name, a in found.items()}


def _states(
    problem: Problem, layer: Any, leaf: Callable[..., Tensor], leaves: dict[str, Tensor]
) -> tuple[Any, dict[str, Tensor]]:
    examples, hidden = problem.sizes[1], problem.sizes[3]
    runs = len(layer.sites)
    widths = [problem.options.get("proj_size") or hidden, hidden][: len(layer.cell.states)]
    if problem.hx == "expanded":
        own = [leaf(runs, 1, width) for width in widths]
        states = [a.expand(-1, examples, -1) for a in own]
    else:
        own = [leaf(runs, width, examples) for width in widths]
        states = [a.transpose(1, 2) for a in own]
    assert not any(a.is_contiguous() for a in states)
    leaves = leaves | dict(zip(("h0", "c0"), own, strict=False))
    return (tuple(states) if len(states) > 1 else states[0]), leaves


def limits(problem: Problem, device: str, exact: Results) -> Iterator[dict[str, float]]:
    """What errors are allowed: those of the generic loop in the same precision and place."""
    dtype, autocast = PRECISIONS[problem.precision]
    if problem.precision == "float64":
        yield dict.fromkeys(exact, 1e-10)
        return
    least = FACTOR * torch.finfo(autocast or dtype).eps
    yield from limits_by_run(exact, lambda k: outcome(problem, device, "0", run=k), least=least)


def assert_right(
    problem: Problem,
    device: str,
    kernels: str,
    call: Callable[..., Any] | None = None,
    template: nn.Module | None = None,
) -> None:
    """The layer is about as exact as the generic loop; the reference is float64 on the CPU."""
    found = outcome(problem, device, kernels, call=call, template=template)
    assert_as_exact(problem, device, found)


def assert_as_exact(problem: Problem, device: str, found: Results) -> None:
    """As `assert_right`, of results that are there."""
    exact = outcome(problem, "cpu", "0", double=True)
    if problem.cell == "RNN_RELU" and problem.precision not in ("float32", "float64"):
        # Rounding to 16 bits moves sums across 0, where gradients of the ReLU jump.
        exact = {name: a for name, a in exact.items() if not name.startswith("d ")}
    allowed: dict[str, float] = {}
    for allowed in limits(problem, device, exact):
        # Where the loop itself overflows, any result is within its error.
        if all(error(found[n], a) <= allowed[n] for n, a in exact.items()):
            return
    assert_within({name: found[name] for name in exact}, exact, allowed)


def check_all(checks: dict[str, Callable[[], None]]) -> None:
    """Runs all checks, also after one has failed; the failure has a line for each that did."""
    lines = []
    for name, check in checks.items():
        try:
            check()
        except Exception as reason:
            text = str(reason).strip().splitlines() or [""]
            lines.append(f"{name}: {type(reason).__name__}: {text[0][:300]}")
    assert not lines, "\n".join(lines)
