"""The sequence model of DreamerV3 (Hafner et al. 2023, arXiv 2301.04104): a GRU in blocks.

The equations are those of ``RSSM._core`` in the authors' code (github.com/danijar/dreamerv3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from ln_zoo import ops
from ln_zoo.layers.cells import entries
from ln_zoo.layers.recurrent import RecurrentLayer, RecurrentOptions
from ln_zoo.norms import Identity, Norm, RMSNorm, Site
from ln_zoo.ops import Cell, Place, States, Weights, linear
from ln_zoo.ops.cells import Sites
from ln_zoo.utils.checks import check_at_least

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "tanh": torch.tanh,
    "relu": F.relu,
}
_NORM = RMSNorm(eps=1e-4)


@dataclass(frozen=True)
class _Step:
    """A step with these numbers of layers in blocks; cells with equal steps are equal."""

    dynamics_layers: int
    activation: str
    update_offset: float

    def __call__(
        self, wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None
    ) -> States:
        (h,) = states
        of_state, of_projected, *state_bias = w.own
        rows = w.hh.split([h.shape[-1]] * self.dynamics_layers + [3 * h.shape[-1]])
        biases: Sequence[Tensor | float] = [0.0] * len(rows)
        if w.bias_ih is not None and w.bias_hh is not None:
            biases = w.bias_hh.split([len(each) for each in rows])
            wx = wx + w.bias_ih
        activation = ACTIVATIONS[self.activation]
        # Norms have no shift: biases are added before them.
        projected = linear(h, of_state)
        if state_bias:
            projected = projected + state_bias[0][0]
        projected = activation(sites["projected"](projected, t))
        x = wx + linear(projected, of_projected) + linear(h, rows[0])
        for i, bias in enumerate(biases[:-1]):
            x = x if i == 0 else linear(x, rows[i])
            x = activation(sites[f"dynamics_{i}"](x + bias, t))
        reset, candidate, update = (linear(x, rows[-1]) + biases[-1]).chunk(3, dim=-1)
        candidate = (reset.sigmoid() * candidate).tanh()
        update = (update + self.update_offset).sigmoid()
        return (update * candidate + (1 - update) * h,)


@dataclass(frozen=True)
class _WholeStep:
    """A step of a `DreamerV3SequenceModel`, from the products of its inputs (n, K P)."""

    recurrence: _Step
    own: int  # weights of the recurrence's own
    inputs: int  # K

    def __call__(
        self, wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None
    ) -> States:
        of_inputs, *biases = w.own[self.own :]
        parts = list(wx.chunk(self.inputs, dim=-1))
        for i, part in enumerate(parts):
            biased = part + biases[i] if biases else part
            parts[i] = ACTIVATIONS[self.recurrence.activation](sites[f"inputs_{i}"](biased, t))
        x = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        own = w._replace(own=w.own[: self.own])
        return self.recurrence(linear(x, of_inputs), states, own, sites, t)


def dreamer_v3_cell(
    projection_size: int = 512,
    dynamics_layers: int = 1,
    bias: bool = True,
    activation: str = "silu",
    update_offset: float = -1.0,
) -> Cell:
    """The cell of a `DreamerV3GRU` with these arguments.

    Raises:
        ValueError: for an unknown activation, or a size below 1.
    """
    check_at_least(1, projection_size=projection_size, dynamics_layers=dynamics_layers)
    if activation not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation must be one of {known}, got {activation!r}")
    return Cell(
        "DreamerV3's GRU",
        _Step(dynamics_layers, activation, float(update_offset)),
        places=(
            Place("input", (1,), weight="ih", sums=False),
            Place("recurrent", (dynamics_layers, 3), weight="hh", sums=False),
            Place("projected", (), features=projection_size),
            *(
                Place(f"dynamics_{i}", (1,), products=() if i else ("ih", "hh"))
                for i in range(dynamics_layers)
            ),
        ),
        weights=(
            ("state", projection_size),
            ("projected", (0, projection_size)),
            *((("state_bias", (1, projection_size)),) if bias else ()),
        ),
    )


class DreamerV3GRU(RecurrentLayer):
    r"""The recurrence of `DreamerV3SequenceModel`: a GRU whose gates come from layers in blocks.

    With x the input, act the activation, and weights U, V in blocks of units:

    .. math:: \begin{aligned}
        p &= \operatorname{act}(\operatorname{norm}(W_s h + b_s)) \\
        a &= \operatorname{act}(\operatorname{norm}(W x + W_p p + U h + b)) \\
        r, n, u &= V a + b_v \\
        \bar n &= \tanh(\sigma(r) \odot n) \\
        h' &= \sigma(u - 1) \odot \bar n + (1 - \sigma(u - 1)) \odot h
        \end{aligned}

    Args:
        projection_size: size P of p.
        dynamics_layers: number of layers in blocks between state and gates; each after the first
            computes ``a = act(norm(U a + b))``.
        activation: ``"silu"``, ``"tanh"`` or ``"relu"``.
        update_offset: number that is added to u.
        blocks: number of blocks; must divide H.
        norm: the normalisation; default ``RMSNorm(eps=1e-4)``.

    Further arguments: see `RecurrentLayer`. Parameters: ``weight_ih_l0`` (H, I); ``weight_hh_l0``
    and ``bias_hh_l0`` of U, of further layers, and of r, n, u; ``bias_ih_l0`` (H,), which is added
    to b; ``weight_state_l0`` (P, H), ``weight_state_bias_l0`` (1, P), ``weight_projected_l0``
    (H, P); gains at the sites ``"projected"`` (P,) and ``"dynamics_0"`` (H,), ``"dynamics_1"``, ...

    Raises:
        ValueError: as `RecurrentLayer`, and for an unknown activation, or a size below 1.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"blocks": 8, "norm": _NORM}

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        projection_size: int = 512,
        dynamics_layers: int = 1,
        activation: str = "silu",
        update_offset: float = -1.0,
        **options: Unpack[RecurrentOptions],
    ) -> None:
        given = projection_size, dynamics_layers, bias, activation, update_offset
        shared: Any = {**self.defaults, **options}
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            device=device, dtype=dtype, cell=dreamer_v3_cell(*given), **shared,
        )  # fmt: skip
        self.projection_size, self.dynamics_layers = projection_size, dynamics_layers
        self.update_offset = float(update_offset)


class _InputLayer(nn.Linear):
    """``act(norm(W x + b))``: unlike in `Linear`, the bias is added before the norm."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool, norm: Norm | None, activation: str, **kw: Any
    ) -> None:
        super().__init__(inputs, outputs, bias, **kw)
        norm = Identity() if norm is None else norm
        self.site = Site(norm, "sum", outputs, weight=self.weight, **kw)
        self.activation = ACTIVATIONS[activation]

    @property
    def effective_weight(self) -> Tensor:
        return self.site.weight(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        sums = F.linear(input, self.effective_weight, self.bias)
        return self.activation(self.site(sums).to(sums.dtype))


class DreamerV3SequenceModel(nn.Module):
    r"""The sequence model of DreamerV3: a layer for each of its inputs, and a `DreamerV3GRU`.

    An input layer computes ``act(norm(W x + b))``, for all time steps at once. The GRU reads the
    results of all of them, concatenated.

    Args:
        input_size: size I of the input; or sizes of its parts, each of which gets a layer, such as
            those of a flat stochastic state and of an action.
        hidden_size: size H of the deterministic state.
        projection_size: size P of the results of the input layers, and of `DreamerV3GRU`.
        norm: the normalisation in all layers; default ``RMSNorm(eps=1e-4)``.

    Further arguments: see `DreamerV3GRU` and `RecurrentLayer`; dropout, recomputation and so on
    are those of the GRU. DreamerV3 clips actions to a magnitude of 1 before.

    Parameters: ``inputs.K.weight`` (P, I_K), ``inputs.K.bias``, ``inputs.K.site.gain`` (P,) for
    part K of the input; ``recurrence.NAME`` as in `DreamerV3GRU`.

    Raises:
        ValueError: as `DreamerV3GRU`.

    Example:
        >>> model = DreamerV3SequenceModel((32, 6), 64, projection_size=16)
        >>> z, a = torch.randn(20, 4, 32), torch.randn(20, 4, 6)
        >>> output, h = model(torch.cat([z, a], dim=-1), reset=torch.rand(20, 4) < 0.1)
        >>> output.shape, h.shape
        (torch.Size([20, 4, 64]), torch.Size([1, 4, 64]))
    """

    def __init__(
        self,
        input_size: int | Sequence[int],
        hidden_size: int,
        *,
        projection_size: int = 512,
        bias: bool = True,
        norm: Norm | None = _NORM,
        activation: str = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.sizes = [input_size] if isinstance(input_size, int) else list(input_size)
        self.recurrence = DreamerV3GRU(
            len(self.sizes) * projection_size, hidden_size, bias=bias, norm=norm, device=device,
            dtype=dtype, projection_size=projection_size, activation=activation, **options,
        )  # fmt: skip
        self.inputs = nn.ModuleList(
            _InputLayer(n, projection_size, bias, norm, activation, device=device, dtype=dtype)
            for n in self.sizes
        )
        self._plans = ops.Plans()  # of single steps
        # Statistics of time steps, or other layers, are those of sequences.
        self._in_sequences = len(self.recurrence.sites) > 1 or bool(norm and norm.per_timestep)

    @property
    def cell(self) -> Cell:
        return self.recurrence.cell

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        reset: Tensor | PackedSequence | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Any, Tensor]:
        """Deterministic states and the last ones; see `LSTM.forward` for arguments and errors."""
        if isinstance(input, PackedSequence):
            x: Any = input._replace(data=self._projected(input.data))
        else:
            x = self._projected(input)
        marks = {"reset": reset, "mask": mask}
        given = {name: value for name, value in marks.items() if value is not None}
        output: tuple[Any, Tensor] = self.recurrence(x, hx, **given)
        return output

    def step(self, input: Tensor, h: Tensor | None = None) -> Tensor:
        """The state (N, H) after one step of a single layer; input (N, I), h (N, H) or zeros."""
        layer, cache = self.recurrence, self._plans.cache
        if self._in_sequences or layer._is_noisy or layer.weight_dropout:
            states = None if h is None else (h.unsqueeze(0),)
            x = self._projected(input).unsqueeze(0)
            return layer._run_layers(x, None, states, None)[1][0].squeeze(0)
        # Input layers and recurrence are one cell, and its step is one call of a kernel.
        x, states = self._step_input(input), None if h is None else (h,)
        done = None if cache is None else cache.run(self.__dict__, x, states, 1)
        (after,) = self._run_step(x, states) if done is None else done[1]
        return after

    def _step_input(self, input: Tensor) -> Tensor:
        if len(self.sizes) == 1 and input.shape[-1] == self.sizes[0]:
            return input
        products = [F.linear(part, own.effective_weight) for own, part in self._parts(input)]
        return torch.cat(products, dim=-1)

    def _run_step(self, x: Tensor, states: States | None) -> States:
        layer = self.recurrence
        inputs: list[Any] = list(self.inputs)
        ((suffix, sites),) = layer._directions().items()
        sites = sites | {f"inputs_{i}": own.site for i, own in enumerate(inputs)}
        w = layer._effective_weights(suffix, sites)
        biases = [own.bias for own in inputs if own.bias is not None]
        # Products of several inputs have been computed.
        ih = inputs[0].effective_weight if len(inputs) == 1 else x.new_empty(x.shape[-1], 0)
        size = len(x), layer.hidden_size
        if states is None:
            states = (x.new_zeros(size),)
        ops.check_states(x, states, [size])
        call = ops.RecurrentCall(
            self._whole,
            records=[{role: site.to_spec() for role, site in sites.items()}],
            x=x,
            batch_sizes=None,
            states=states,
            weights=[w._replace(ih=ih, own=(*w.own, w.ih, *biases))],
            sites=[sites],
        )

        def keep(run: ops.Runner, call: ops.RecurrentCall) -> None:
            watched = entries(layer, [f"_{suffix}"], [sites])
            if watched is not None:
                parts: list[Any] = [part._parameters for part in inputs]
                parts += [self._modules, self.inputs._modules]
                watched = [*watched, *((part, name) for part in parts for name in part)]
            self._plans.keep(self.__dict__, watched, run, call)

        return ops.run_step(call, sites, None, keep)

    @functools.cached_property
    def _whole(self) -> Cell:
        """The cell of input layers and recurrence."""
        step: Any = self.cell.step
        step = _WholeStep(step, len(self.cell.weights), len(self.inputs))
        return replace(self.cell, name="DreamerV3's sequence model", step=step)

    def _parts(self, input: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Input layers, and the parts of the input that they read."""
        if input.shape[-1] != sum(self.sizes):
            raise RuntimeError(f"input must have {sum(self.sizes)} features, got {input.shape[-1]}")
        return zip(self.inputs, input.split(self.sizes, dim=-1), strict=True)

    def _projected(self, input: Tensor) -> Tensor:
        parts = [layer(part) for layer, part in self._parts(input)]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
