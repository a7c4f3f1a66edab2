"""The sequence model of DreamerV3 (Hafner et al. 2023, arXiv 2301.04104): a GRU in blocks.

The equations are those of ``RSSM._core`` in the authors' code (github.com/danijar/dreamerv3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

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

    def forward(self, input: Tensor) -> Tensor:
        sums = F.linear(input, self.site.weight(self.weight), self.bias)
        norm = self.site.norm
        if type(norm) is RMSNorm:  # in one call, which matters in single steps
            return self.activation(F.rms_norm(sums, sums.shape[-1:], self.site.gain, norm.eps))
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
        states = None if h is None else (h.unsqueeze(0),)
        x = self._projected(input).unsqueeze(0)
        # Not by `forward`, whose checks take as long as small products.
        _, (after,) = self.recurrence._run_layers(x, None, states, None)
        return after.squeeze(0)

    def _projected(self, input: Tensor) -> Tensor:
        if input.shape[-1] != sum(self.sizes):
            raise RuntimeError(f"input must have {sum(self.sizes)} features, got {input.shape[-1]}")
        if len(self.sizes) == 1:
            found: Tensor = self.inputs[0](input)
            return found
        parts = zip(self.inputs, input.split(self.sizes, dim=-1), strict=True)
        return torch.cat([layer(part) for layer, part in parts], dim=-1)
