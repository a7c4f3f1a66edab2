"""Trace one step of a cell, with its norms, as a joint graph of pointwise operations and row sums.

Products with the recurrent weight and the projection are cut out: each becomes an input ``u`` of
the graph, and its left operand an output. The graph contains forward and backward operations in
aten's terms. It is traced below autograd, so functions with their own derivative work.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ln_zoo.kernels.cuda_graphs.recorded import StepNumber, Unrecordable, Watch
from ln_zoo.kernels.generated.recorder import Operation, Recorder
from ln_zoo.ops.cells import Cell, Sites, Weights, block_linear
from ln_zoo.ops.recurrence import next_states
from ln_zoo.ops.regularization import Noise

#: Numbers of examples to trace with; the first that is no other size marks the rows.
_EXAMPLES = (23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103)


class Unsupported(Exception):
    """Why no kernel is generated, in one line; the generic loop runs."""


class StepForm(NamedTuple):
    """What a step depends on besides cell, norms and sizes."""

    drops: bool = False  # whether there is a mask of recurrent dropout
    #: For each state, the expected share of zoneout, or None for a mask; empty without zoneout.
    zoneout: tuple[float | None, ...] = ()
    resets: bool = False

    @classmethod
    def of(cls, noise: Noise, resets: bool) -> StepForm:
        shares = tuple(d if isinstance(d, float) else None for d in noise.zoneout)
        zoneout = shares if any(share != 0.0 for share in shares) else ()
        return cls(noise.dropout is not None, zoneout, resets)


@dataclass(frozen=True)
class Product:
    """``u = left @ weight[first : first + width].T`` for the weight ``"hh"``, ``"hr"`` or ``"p0"``.

    The last is a parameter, a weight of the cell's own.
    In several blocks, these are the rows of `ln_zoo.ops.cells.block_linear`, and the weight is
    stored by blocks (`ln_zoo.ops.cells.blocks_of_rows`).
    """

    weight: str
    first: int
    width: int
    inner: int  # of left
    blocks: int = 1
    rows: int = 0  # of the whole weight

    @property
    def gates(self) -> tuple[int, int]:
        """First gate of H rows, and end, of a product in blocks."""
        return self.first // self.inner, (self.first + self.width) // self.inner


@dataclass
class Trace:
    """A joint graph.

    Inputs by name: ``v`` (input term), ``s0`` (states), ``u0`` (products), ``p0`` (parameters),
    ``dropped``, ``held0``, ``reset`` (noise), ``ds0`` and ``dl0`` (gradients of new states and left
    operands). Outputs: ``n0`` (new states), ``l0`` (left operands), and ``d_`` with the name of an
    input for its gradient.
    """

    operations: list[Operation]
    inputs: dict[str, Operation]
    #: Those that there are; an input without gradient has none.
    outputs: dict[str, Operation]
    products: list[Product]
    parameters: list[Tensor]
    widths: list[int]  # of the states
    hidden: int  # units of a row; with norms of each block, those of a block
    gates: int  # width of v
    examples: int

    @property
    def units(self) -> list[int]:
        """Widths of blocks: of hidden units, and other sizes of states, products and v."""
        of_products = (n for p in self.products for n in (p.width, p.inner))
        sizes = [*self.widths, *of_products, self.gates]
        return list(dict.fromkeys([self.hidden, *(n for n in sizes if n % self.hidden)]))

    def forget(self) -> None:
        """Drop the graph and the values of parameters, which a kernel does not need."""
        self.operations, self.inputs = [], {}
        self.outputs = dict.fromkeys(self.outputs, Operation("forgotten", ()))
        self.parameters = [torch.empty(a.shape, device="meta") for a in self.parameters]


class _CutProducts(TorchFunctionMode):
    """Replace products with these weights by given tensors, or by zeros (dry run)."""

    _PRODUCTS = frozenset(
        {
            F.linear,
            torch.matmul,
            torch.mm,
            Tensor.matmul,
            Tensor.mm,
            Tensor.__matmul__,
            block_linear,
        }
    )

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        examples: int,
        blocks: int,
        given: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._weights, self._examples, self._given = weights, examples, given
        self._blocks = blocks  # of the recurrent weight
        self.products: list[Product] = []
        self.lefts: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self._PRODUCTS or not any(map(self._name, args)):
            return func(*args, **kwargs)
        left, part = args[0], args[1]
        name = self._name(part)
        if name is None or self._name(left):
            raise Unsupported("a weight is the left operand of a product")
        depth, blocks = self._weights[name].shape[1], self._blocks if name == "hh" else 1
        rows = part if func in (F.linear, block_linear) else part.t()
        of_rows = rows.dim() == 2 and rows.stride() == (depth, 1) and rows.shape[1] == depth
        in_blocks = (func is block_linear) == (blocks > 1)
        if not of_rows or not in_blocks or left.shape != (self._examples, blocks * depth):
            raise Unsupported("a product with other than whole rows of a recurrent weight")
        k, first = len(self.products), rows.storage_offset() // depth
        whole = len(self._weights[name])
        self.products.append(Product(name, first, len(rows), blocks * depth, blocks, whole))
        self.lefts.append(left)
        u = left.new_zeros(len(left), len(rows)) if self._given is None else self._given[k]
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        return u if bias is None else u + bias

    def _name(self, a: Any) -> str | None:
        if isinstance(a, Tensor) and type(a) in (Tensor, nn.Parameter):
            for name, weight in self._weights.items():
                if a.untyped_storage()._cdata == weight.untyped_storage()._cdata:
                    return name
        return None


def parameters_of(weights: Weights, sites: Sites) -> list[Tensor]:
    """Tensors that a step reads besides states and products: biases, own weights, those of sites.

    The same tensor may occur once only.
    """
    found: dict[int, Tensor] = {}
    for a in (weights.bias_ih, weights.bias_hh, *weights.own):
        if a is not None:
            found[id(a)] = a
    for site in sites.values():
        for a in (*site.parameters(), *site.buffers()):  # type: ignore[attr-defined]
            found[id(a)] = a
    return list(found.values())


def substituted(
    weights: Weights, sites: Sites, parameters: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Weights, Sites]:
    """Weights and sites with other values of `parameters_of`."""
    memo = {id(a): b for a, b in zip(parameters, values, strict=True)}
    weights = weights._replace(
        bias_ih=memo.get(id(weights.bias_ih)),
        bias_hh=memo.get(id(weights.bias_hh)),
        own=tuple(memo[id(a)] for a in weights.own),
    )
    return weights, copy.deepcopy(dict(sites), dict(memo))


class _Step:
    """A step as a function of tensors by name."""

    def __init__(self, cell: Cell, sites: Sites, weights: Weights, form: StepForm) -> None:
        self.cell, self.sites, self.weights, self.form = cell, sites, weights, form
        self.parameters = parameters_of(weights, sites)
        hh, hr = weights.hh.flatten(0, -2), weights.hr
        self.blocks = cell.blocks(weights)
        hidden = len(hh) // cell.recurrent_gates
        self.widths = [hidden if hr is None else len(hr), *[hidden] * (len(cell.states) - 1)]
        self.hidden, self.gates = hidden, weights.ih.shape[0]
        sizes = {hidden, *self.widths, len(hh), *(n for a in self.parameters for n in a.shape)}
        self.examples = next(n for n in _EXAMPLES if n not in sizes)
        # Tensors of their own, so that a product with one can be told from others.
        self.matrices = {
            name: torch.zeros(a.shape, dtype=torch.float32)
            for name, a in (("hh", hh), ("hr", hr))
            if a is not None
        }

    def inputs(self) -> dict[str, Tensor]:
        """Example inputs by name, without products and gradients."""
        n = self.examples
        found = {"v": torch.randn(n, self.gates)}
        found |= {f"s{i}": torch.randn(n, width) for i, width in enumerate(self.widths)}
        found |= {f"p{i}": a.detach().float().cpu().clone() for i, a in enumerate(self.parameters)}
        if self.form.drops:
            found["dropped"] = torch.rand(n, self.widths[0])
        for i, share in enumerate(self.form.zoneout):
            if share is None:
                found[f"held{i}"] = torch.rand(n, self.widths[i]) < 0.5
        if self.form.resets:
            found["reset"] = torch.rand(n, 1) < 0.5
        return found

    def run(self, given: Mapping[str, Tensor], cut: _CutProducts) -> tuple[Tensor, ...]:
        """The next states."""
        values = [given[f"p{i}"] for i in range(len(self.parameters))]
        weights, sites = substituted(self.weights, self.sites, self.parameters, values)
        weights = weights._replace(
            hh=self.matrices["hh"],
            hr=self.matrices.get("hr"),
            noise=Noise(given.get("dropped")),
        )
        zoneout = [
            given[f"held{i}"] if share is None else share
            for i, share in enumerate(self.form.zoneout)
        ]
        states = tuple(given[f"s{i}"] for i in range(len(self.widths)))
        number: Any = StepNumber()
        with cut:
            wx = sites["input"](given["v"], None)
            flag = given.get("reset")
            after = next_states(self.cell, wx, states, weights, sites, number, zoneout, flag)
        return tuple(after)

    def cut(
        self, values: Mapping[str, Tensor], given: Sequence[Tensor] | None = None
    ) -> _CutProducts:
        own = {id(a) for a in self.weights.own}
        names = [f"p{i}" for i, a in enumerate(self.parameters) if id(a) in own]
        weights = self.matrices | {name: values[name] for name in names}
        return _CutProducts(weights, self.examples, self.blocks, given)


def trace(
    cell: Cell,
    sites: Sites,
    weights: Weights,
    form: StepForm,
    known: Collection[str],
    parts: int = 1,
) -> Trace:
    """The joint graph of one step; `Unsupported` with a reason otherwise.

    ``known``: names of operations that are not decomposed; ``parts``: number of parts of each gate,
    more than one for norms of each block.
    """
    step = _Step(cell, sites, weights, form)
    step.hidden //= parts
    with (
        torch.random.fork_rng(devices=[]),
        torch.autocast("cpu", enabled=False),
        torch.inference_mode(False),
        torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            return _trace(step, known)
        except Unsupported:
            raise
        except Unrecordable as error:
            raise Unsupported(str(error)) from error
        except Exception as error:
            raise Unsupported(_reason(error)) from error


def _reason(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"it cannot be traced: {type(error).__name__}: {text[:200]}"


def _trace(step: _Step, known: Collection[str]) -> Trace:
    given = step.inputs()
    dry = step.cut(given)
    # Stops before anything that outlives the step is changed.
    with torch.no_grad(), Watch([*given.values(), *step.matrices.values()]):
        after = step.run(given, dry)
    expected = [(step.examples, width) for width in step.widths]
    found = [tuple(a.shape) for a in after]
    if found != expected:
        raise Unsupported(f"new states have the shapes {found}, not {expected}")
    if any(a.dtype != torch.float32 for a in (*after, *dry.lefts)):
        raise Unsupported("it computes in another dtype than float32")
    products = dry.products
    given |= {f"u{k}": torch.randn(step.examples, p.width) for k, p in enumerate(products)}
    wanted = [name for name, a in given.items() if _takes_gradient(name, a, step)]
    given |= {f"ds{i}": torch.randn(a.shape) for i, a in enumerate(after)}
    given |= {f"dl{k}": torch.randn(step.examples, p.inner) for k, p in enumerate(products)}
    recorder = Recorder(given, known)
    with recorder:
        joint = _joint(step, given, wanted, products)
        outputs = {name: recorder.of(a) for name, a in joint.items()}
    return Trace(
        recorder.operations,
        {name: recorder.of(a) for name, a in given.items()},
        outputs,
        products,
        step.parameters,
        step.widths,
        step.hidden,
        step.gates,
        step.examples,
    )


def _takes_gradient(name: str, a: Tensor, step: _Step) -> bool:
    if name[0] == "p":
        own = step.parameters[int(name[1:])]
        return isinstance(own, nn.Parameter) or own.requires_grad
    return a.is_floating_point() and name != "dropped"


def _joint(
    step: _Step, given: dict[str, Tensor], wanted: Sequence[str], products: list[Product]
) -> dict[str, Tensor]:
    """New states, left operands, and gradients of the wanted inputs that have one."""
    leaves = {name: given[name].detach().requires_grad_() for name in wanted}
    values = {**given, **leaves}
    here = step.cut(values, [leaves[f"u{k}"] for k in range(len(products))])
    after = step.run(values, here)
    if here.products != products:
        raise Unsupported("its products differ between calls")
    found = {f"n{i}": a for i, a in enumerate(after)}
    found |= {f"l{k}": a for k, a in enumerate(here.lefts)}
    pairs = [(a, given[f"d{'s' if n[0] == 'n' else 'l'}{n[1:]}"]) for n, a in found.items()]
    pairs = [(a, d) for a, d in pairs if a.requires_grad]
    grads: Sequence[Tensor | None] = [None] * len(leaves)
    if pairs:
        # Of one number: torch imports a library of symbols to check gradients that are given.
        # Not stacked: a vector of as many numbers as units would look like units.
        loss = functools.reduce(torch.add, [(a * d).sum() for a, d in pairs])
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = [(name, d) for name, d in zip(leaves, grads, strict=True) if d is not None]
    both = {name for name, _ in named} & {p.weight for p in products}
    if both:
        raise Unsupported("a weight of its own in a product and elsewhere")
    return found | {f"d_{name}": d for name, d in named}
