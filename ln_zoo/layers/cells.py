"""Recurrent cells: one time step, for models that write their own loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.utils.parametrize import is_parametrized

from ln_zoo.norms import Identity, Norm, Site
from ln_zoo.norms.arguments import check_no_norm
from ln_zoo.ops import (
    CELLS,
    Cell,
    Entries,
    Plans,
    RecurrentCall,
    Runner,
    States,
    Weights,
    blocks_of_rows,
    check_parameters,
    check_states,
    full_weight,
    lstm_cell,
    recurrent_shape,
    rows_of_blocks,
    run_step,
)
from ln_zoo.utils.checks import check_at_least


def cell_sites(
    cell: Cell,
    hidden_size: int,
    weights: dict[str, Tensor],
    norm: Norm | None,
    normalize: Sequence[str] | None,
    factory: dict[str, Any],
    blocks: int,
) -> nn.ModuleDict:
    """The sites of one cell, by role, for initialised weights ``"ih"`` and ``"hh"``.

    Sites whose role is not in ``normalize`` (None: all) get `Identity`. ``factory`` holds device
    and dtype of the parameters, ``blocks`` is the number of blocks of the recurrent weight.

    Raises:
        ValueError: for an unknown role in ``normalize``.
    """
    known = ", ".join(map(repr, cell.roles))
    if isinstance(normalize, str):
        raise ValueError(f"normalize must be a tuple of names, got {normalize!r}; valid: {known}")
    unknown = [role for role in normalize or () if role not in cell.roles]
    if unknown:
        raise ValueError(
            f"normalize names {', '.join(map(repr, unknown))}, but this layer's places are {known}"
        )
    norm = Identity() if norm is None else norm
    weights = {**weights, "hh": recurrent_rows(weights["hh"])}
    return nn.ModuleDict(
        {
            place.role: Site(
                norm if normalize is None or place.role in normalize else Identity(),
                place.role,
                sum(place.sizes(hidden_size)),
                groups=place.sizes(hidden_size),
                recurrent=True,
                gate_size=place.features or hidden_size,
                blocks=1 if place.features else blocks,
                own_shift=place.own_shift,
                weight=None if place.weight is None else weights[place.weight],
                sums=place.sums,
                **factory,
            )
            for place in cell.places
        }
    )


def check_blocks(owner: object, hidden_size: int, blocks: int, proj_size: int = 0) -> None:
    """Validate the number of blocks of the recurrent weight of a layer or cell."""
    check_at_least(1, blocks=blocks)
    name = type(owner).__name__
    if hidden_size % blocks:
        raise ValueError(
            f"{name}: blocks must divide hidden_size={hidden_size}, got blocks={blocks}"
        )
    if blocks > 1 and proj_size:
        raise ValueError(
            f"{name}: blocks must be 1 with proj_size={proj_size}, got {blocks}: projected outputs "
            "have no blocks"
        )


def recurrent_rows(weight: Tensor) -> Tensor:
    """A recurrent weight as steps and norms read it."""
    return weight if weight.dim() == 2 else rows_of_blocks(weight)


def effective_recurrent(site: Site, weight: Tensor) -> Tensor:
    """The effective recurrent weight, in the form of the parameter."""
    if weight.dim() == 2 or type(site.norm).weight is Norm.weight:
        return site.weight(weight)
    return blocks_of_rows(site.weight(rows_of_blocks(weight)), len(weight))


@torch.no_grad()
def draw_weights(parameters: Iterable[tuple[str, Tensor]], hidden_size: int, blocks: int) -> None:
    """Draw parameters as torch does, within 1 / sqrt(H); recurrent weights 1 / sqrt(H / blocks)."""
    for name, parameter in parameters:
        inputs = hidden_size // blocks if name.startswith("weight_hh") else hidden_size
        bound = 1.0 / math.sqrt(inputs)
        init.uniform_(parameter, -bound, bound)


def sites_by_role(sites: nn.Module) -> dict[str, Site]:
    """The result of `cell_sites` as a dict, typed."""
    return cast("dict[str, Site]", dict(cast(nn.ModuleDict, sites).items()))


def entries(
    module: nn.Module, suffixes: Sequence[str], directions: Sequence[dict[str, Site]]
) -> Entries | None:
    """Dict entries that weights and records of a layer depend on, or None; see `Site.entries`.

    ``suffixes`` end the parameter names, one per direction.
    """
    parameters: dict[str, Any] = module._parameters
    kinds = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if module.bias else ()))
    if not all(f"{kind}{suffix}" in parameters for suffix in suffixes for kind in kinds):
        return None  # parametrised
    found: list[tuple[dict[str, Any], str]] = [(parameters, name) for name in parameters]
    for sites in directions:
        for site in sites.values():
            of_site = site.entries()
            if of_site is None:
                return None
            found += of_site
    modules: dict[str, Any] = module._modules
    for part in modules["sites"].modules():
        found += [(part._modules, name) for name in part._modules]
    return [*found, (modules, "sites")]


def start_sequence(directions: Iterable[dict[str, Site]], steps: int) -> None:
    """Call `Norm.on_sequence_start` of all sites; every engine needs it."""
    for sites in directions:
        for site in sites.values():
            if site.normalizes:
                site.norm.on_sequence_start(site, steps)


def as_states(owner: str, cell: Cell, hx: Tensor | States | None) -> States | None:
    """Convert ``hx`` to a tuple of states; TypeError unless it is a tuple, or a single tensor."""
    if hx is None:
        return None
    states: States
    if isinstance(hx, Tensor):
        states, got = (hx,), "a tensor"
    elif isinstance(hx, tuple | list):
        states, got = tuple(hx), f"a {type(hx).__name__} of {len(hx)}"
    else:
        states, got = (), type(hx).__name__
    if len(states) != len(cell.states) or (len(states) == 1) != isinstance(hx, Tensor):
        names, count = ", ".join(cell.states), len(cell.states)
        number = "two" if count == 2 else count
        wanted = f"a tensor {names}" if count == 1 else f"a tuple ({names}) of {number} tensors"
        raise TypeError(f"{owner}: hx must be {wanted}, got {got}")
    return states


def chosen_cell(layer: type, cell: Cell | None) -> Cell:
    """The cell argument, or the attribute of the class; TypeError if neither is a `Cell`."""
    cell = getattr(layer, "cell", None) if cell is None else cell
    if not isinstance(cell, Cell):
        raise TypeError(
            f"{layer.__name__} needs a cell, an instance of ln_zoo.ops.Cell: as the attribute "
            f"cell of the class, or as the argument cell; got {cell!r}"
        )
    return cell


class NoQuantiser:
    """Descriptor that refuses ``qconfig``: torch's quantisers would silently leave ours in float.

    None is allowed and excludes a layer from quantisation.
    """

    def __get__(self, layer: nn.Module | None, kind: type) -> None:
        raise AttributeError("qconfig")  # like any layer without a qconfig

    def __set__(self, layer: nn.Module, value: object) -> None:
        if value is not None:
            raise TypeError(
                f"torch has no quantised form of ln_zoo's {type(layer).__name__}: without a norm, "
                "or with WeightNorm, first convert such layers to torch's own with "
                "ln_zoo.denormalize_; exclude layers that normalise summed inputs from quantisation"
            )

    def __delete__(self, layer: nn.Module) -> None:
        """Quantisers delete the attribute at their end."""


class RecurrentCell(nn.RNNCellBase):
    """One step of any recurrent cell, with any norm; see `RecurrentLayer`.

    `LSTMCell`, `GRUCell` and `RNNCell` are subclasses. Your own sets an `ln_zoo.ops.Cell`::

        class MyCell(RecurrentCell):
            cell = MY_CELL

    Further arguments as in `torch.nn.RNNCell`; biases are added after normalisation.

    Args:
        norm: the normalisation; default `Identity`.
        normalize: roles of the cell's sites to normalise; default all.
        cell: the cell; default: the attribute of the class.
        blocks: number of blocks of the recurrent weight; see `RecurrentLayer`.

    Shapes: input (N, I) or (I,), states (N, H) or (H,), returned in the dtype of the parameters,
    under autocast too.

    Parameters: ``weight_ih`` (G, I) with G = gates * H, ``weight_hh`` (G, H), or
    (B, G / B, H / B) in B blocks, ``bias_ih``, ``bias_hh`` (G,), the cell's own, and the norm's,
    ``sites.ROLE.gain``, ``.shift`` or ``.scale``. They are initialised as in torch.

    Raises:
        TypeError: if neither the class nor the argument sets a cell.
        ValueError: for an unknown role in ``normalize``, or ``blocks`` that do not divide
            ``hidden_size``.
    """

    cell: Cell
    qconfig = NoQuantiser()
    blocks: int = 1  # also of cells that earlier versions pickled

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm: Norm | None = None,
        normalize: Sequence[str] | None = None,
        cell: Cell | None = None,
        blocks: int = 1,
    ) -> None:
        check_no_norm(self, bias=bias)
        cell = chosen_cell(type(self), cell)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, bias, cell.gates, **factory)
        check_blocks(self, hidden_size, blocks)
        self.cell, self.blocks = cell, blocks
        self._plans = Plans()
        for name, own in cell.own_shapes(hidden_size).items():
            weight = nn.Parameter(torch.empty(own, **factory))
            self.register_parameter(f"weight_{name}", weight)
        rows = cell.recurrent_gates * hidden_size
        shape = recurrent_shape(rows, hidden_size, blocks)
        others = self.weight_hh.shape != shape
        if others:
            self.weight_hh = nn.Parameter(torch.empty(shape, **factory))
            if bias:
                self.bias_hh = nn.Parameter(torch.empty(rows, **factory))
        if cell.weights or others:
            self.reset_parameters()
        weights: dict[str, Tensor] = {"ih": self.weight_ih, "hh": self.weight_hh}
        self.sites = cell_sites(cell, hidden_size, weights, norm, normalize, factory, blocks)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        former = self.__dict__.pop("_cell", None)
        if former is not None:  # pickled by version 0.1
            bound = state.get("derivative_bound")
            peephole = state["_parameters"].get("weight_peephole") is not None
            cell = CELLS.get(former.name)
            if cell is None or len(cell.states) > 1:
                cell = lstm_cell(peephole, bound)
            self.cell = cell
            if not peephole:
                self._parameters.pop("weight_peephole", None)

    def reset_parameters(self) -> None:
        """Re-initialise weights and biases, as torch does, and the norm."""
        there = [(name, p) for name, p in self._parameters.items() if p is not None]
        draw_weights(there, self.hidden_size, self.blocks)
        if "sites" in self._modules:  # torch's constructor calls this first
            for site in sites_by_role(self.sites).values():
                site.reset_parameters()
            self.reset_norm()

    def reset_norm(self) -> None:
        """Recompute norm parameters that depend on the weights; call it after changing weights."""
        sites = sites_by_role(self.sites)
        sites["input"].reset_weight(self.weight_ih)
        sites["recurrent"].reset_weight(recurrent_rows(self.weight_hh))

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        return shown if self.blocks == 1 else f"{shown}, blocks={self.blocks}"

    def effective_weights(self) -> Weights:
        """Weights of a step, normalised by norms that act on weights."""
        sites = sites_by_role(self.sites)
        return Weights(
            sites["input"].weight(self.weight_ih),
            effective_recurrent(sites["recurrent"], self.weight_hh),
            self.bias_ih,
            self.bias_hh,
            own=tuple(getattr(self, f"weight_{name}") for name, _ in self.cell.weights),
        )

    def forward(self, input: Tensor, hx: Any = None, step: int | None = None) -> Any:
        """The next state, or a tuple of several; see `LSTMCell.forward`."""
        states = self._next(input, hx, step)
        return states if len(states) > 1 else states[0]

    def _next(self, input: Tensor, hx: Tensor | States | None, step: int | None) -> States:
        cell = self.cell
        states = as_states(type(self).__name__, cell, hx)
        if input.dim() == 2 and (step is None or step >= 0):
            cache = self._plans.cache
            count = len(cell.states)
            done = None if cache is None else cache.run(self.__dict__, input, states, count)
            if done is not None:
                return done[1]
        sites = sites_by_role(self.sites)
        self._check_input(input, states)
        self._check_step(step, sites)
        batched = input.dim() == 2
        if not batched:
            input = input.unsqueeze(0)
        if states is None:
            zeros = input.new_zeros(input.shape[0], self.hidden_size)
            states = (zeros,) * len(cell.states)
        elif not batched:
            states = tuple(s.unsqueeze(0) for s in states)
        weights = self.effective_weights()
        records = {role: site.to_spec() for role, site in sites.items()}
        sizes = self.input_size, self.hidden_size, self.hidden_size
        check_parameters(cell, records, weights, input, sizes, blocks=self.blocks)
        call = RecurrentCall(cell, [records], input, None, states, [weights], sites=[sites])

        def keep(run: Runner, call: RecurrentCall) -> None:
            self._plans.keep(self.__dict__, entries(self, [""], [sites]), run, call)

        states = run_step(call, sites, step, keep)
        return states if batched else tuple(s.squeeze(0) for s in states)

    @property
    def _input_features(self) -> int:
        return self.input_size

    def _check_input(self, input: Tensor, states: States | None) -> None:
        name = type(self).__name__
        if input.dim() not in (1, 2):
            raise ValueError(f"{name}: Expected input to be 1D or 2D, got {input.dim()}D instead")
        if input.shape[-1] != self._input_features:
            raise RuntimeError(
                f"input has inconsistent input_size: got {input.shape[-1]}, "
                f"expected {self._input_features}"
            )
        if states is not None:
            expected = (*input.shape[:-1], self.hidden_size)
            check_states(input, states, [expected] * len(states))

    def _check_step(self, step: int | None, sites: dict[str, Site]) -> None:
        if step is not None and step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        for site in sites.values():
            if step is None and site.norm.per_timestep:
                raise ValueError(
                    f"{type(site.norm).__name__} keeps statistics for each time step: call the "
                    "cell with step=t, counted from 0"
                )


class LSTMCell(RecurrentCell):
    """One step of an LSTM (paper, eq. 20-22, 29-31 for DRAW): `torch.nn.LSTMCell` with a norm.

    Equations as in `LSTM`; further arguments, shapes and parameters (G = 4H) as in
    `RecurrentCell`. Sites are ``"input"``, ``"recurrent"`` and ``"cell"``. With peepholes there is
    ``weight_peephole`` (3, H) to i, f, o.

    Args:
        peephole: gates see cell states; see `LSTM`.
        derivative_bound: clip the derivative of the loss with respect to gate sums; see `LSTM`.

    Raises:
        ValueError: as `RecurrentCell`, and for a ``derivative_bound`` that is not positive.

    Example:
        >>> from ln_zoo.norms import LayerNorm
        >>> cell = LSTMCell(3, 5, norm=LayerNorm())
        >>> state = None
        >>> for t, x in enumerate(torch.randn(4, 2, 3)):
        ...     state = cell(x, state, step=t)
        >>> state[0].shape
        torch.Size([2, 5])
    """

    cell = CELLS["LSTM"]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm: Norm | None = None,
        normalize: Sequence[str] | None = None,
        peephole: bool = False,
        derivative_bound: float | None = None,
        blocks: int = 1,
    ) -> None:
        cell = lstm_cell(peephole, derivative_bound)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {"norm": norm, "normalize": normalize, "blocks": blocks}
        super().__init__(input_size, hidden_size, bias, **factory, **options, cell=cell)
        self.derivative_bound = derivative_bound

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None, step: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The next states (h, c).

        Args:
            input: (N, I) or (I,).
            hx: states (h, c), each (N, H) or (H,); default zeros.
            step: time step, counted from 0; used by norms with statistics per step (`BatchNorm`).

        Raises:
            RuntimeError: for mismatched sizes.
            TypeError: if ``hx`` is not a tuple of two.
            ValueError: if the input is neither 1D nor 2D; if ``step`` is negative, or missing for a
                norm that needs it; under batch norm in training, for a batch of one at step 0.
        """
        h, c = self._next(input, hx, step)
        return h, c


class GRUCell(RecurrentCell):
    """One step of a GRU (paper, eq. 26-28): `torch.nn.GRUCell` with a norm.

    Equations as in `GRU`; arguments, shapes, parameters (G = 3H) and errors as in
    `RecurrentCell`. Sites are ``"input"`` and ``"recurrent"``.
    """

    cell = CELLS["GRU"]


class RNNCell(RecurrentCell):
    """One step of a simple RNN (paper, eq. 4): `torch.nn.RNNCell` with a norm.

    Equation as in `RNN`; further arguments, shapes and parameters (G = H) as in `RecurrentCell`.
    Sites are ``"sum"``, and for norms that act on weights ``"input"`` and ``"recurrent"``.

    Args:
        nonlinearity: f, ``"tanh"`` or ``"relu"``; otherwise ValueError.
    """

    cell = CELLS["RNN_TANH"]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm: Norm | None = None,
        normalize: Sequence[str] | None = None,
        blocks: int = 1,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {"norm": norm, "normalize": normalize, "blocks": blocks}
        cell = rnn_cell(nonlinearity)
        super().__init__(input_size, hidden_size, bias, **factory, **options, cell=cell)
        self.nonlinearity = nonlinearity


def rnn_cell(nonlinearity: str) -> Cell:
    """The simple RNN with a nonlinearity; ValueError unless it is ``"tanh"`` or ``"relu"``."""
    if nonlinearity not in ("tanh", "relu"):
        raise ValueError(f"Unknown nonlinearity {nonlinearity!r}. Select from 'tanh' or 'relu'.")
    return CELLS[f"RNN_{nonlinearity.upper()}"]


def without_blocks(module: nn.Module) -> nn.Module:
    """A copy of a recurrent layer or cell with ``blocks=1`` that computes the same.

    Its recurrent weights are block-diagonal. Norms of each block (``per_block``) keep their blocks.

    Raises:
        TypeError: if it is neither a `RecurrentLayer` nor a `RecurrentCell`.
        ValueError: if its recurrent weights are parametrised.

    Example:
        >>> cell, x = GRUCell(3, 8, blocks=4), torch.randn(2, 3)
        >>> full = without_blocks(cell)
        >>> cell.weight_hh.shape, full.weight_hh.shape
        (torch.Size([4, 6, 2]), torch.Size([24, 8]))
        >>> torch.allclose(full(x, torch.ones(2, 8)), cell(x, torch.ones(2, 8)), atol=1e-6)
        True
    """
    blocks = getattr(module, "blocks", None)
    if not isinstance(blocks, int) or not isinstance(module, nn.RNNBase | nn.RNNCellBase):
        raise TypeError(
            f"module must be a RecurrentLayer or a RecurrentCell, got {type(module).__name__}"
        )
    if is_parametrized(module):
        raise ValueError(
            f"the weights of this {type(module).__name__} are parametrised: "
            "torch.nn.utils.parametrize.remove_parametrizations first"
        )
    full = copy.deepcopy(module)
    for name, weight in list(full.named_parameters(recurse=False)):
        if name.startswith("weight_hh") and blocks > 1:
            rows = full_weight(rows_of_blocks(weight.detach()), blocks)
            setattr(full, name, nn.Parameter(rows, weight.requires_grad))
    full.__dict__["blocks"] = 1
    return full
