"""sLSTM (Beck et al. 2024, arXiv 2405.04517): exponential gating, a normaliser, a stabiliser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ln_zoo.layers.cells import RecurrentCell
from ln_zoo.layers.recurrent import RecurrentLayer, RecurrentOptions
from ln_zoo.norms import Norm
from ln_zoo.ops import Cell, Place, States, Weights, linear
from ln_zoo.ops.cells import Sites
from ln_zoo.utils.checks import check_choice


def _step(
    wx: Tensor,
    states: States,
    w: Weights,
    sites: Sites,
    t: int | None,
    log_forget: Callable[[Tensor], Tensor],
) -> States:
    h, c, n, m = states
    uh = sites["recurrent"](linear(w.dropped(h), w.hh), t)
    i, f, z, o = (wx + uh + w.bias).chunk(4, dim=-1)
    # Logarithm of the weight of the past, relative to the input's. One of both weights is 1 after
    # stabilisation, so a single exponential is left.
    past = log_forget(f) + m
    ahead = past - i
    behind = ahead < 0
    small = torch.where(behind, ahead, -ahead).exp()
    new = behind | (n == 0)  # n is 0 before the first step alone: m is then i
    forget, gate = torch.where(behind, small, 1.0), torch.where(new, 1.0, small)
    c, n, m = forget * c + gate * z.tanh(), forget * n + gate, torch.where(new, i, past)
    return o.sigmoid() * sites["cell"](c / n, t), c, n, m


def slstm_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """sLSTM whose forget gate is a sigmoid, gates i, f, z, o; see `SLSTM`."""
    return _step(wx, states, w, sites, t, F.logsigmoid)


def exponential_slstm_step(
    wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None
) -> States:
    """sLSTM whose forget gate is an exponential function; see `SLSTM`."""
    return _step(wx, states, w, sites, t, lambda f: f)


SLSTM_CELL = Cell(
    "sLSTM",
    slstm_step,
    places=(
        Place("input", (4,), weight="ih"),
        Place("recurrent", (4,), weight="hh"),
        Place("cell", (1,), own_shift=True),
    ),
    states=("h", "c", "n", "m"),
    candidates=(2,),
    forget=(1,),
    drops=True,
)
EXPONENTIAL_SLSTM_CELL = replace(
    SLSTM_CELL, name="sLSTM with an exponential forget gate", step=exponential_slstm_step
)


def slstm_cell(forget_gate: str) -> Cell:
    """The sLSTM with a forget gate; ValueError unless ``"sigmoid"`` or ``"exponential"``."""
    check_choice("forget_gate", forget_gate, ("sigmoid", "exponential"))
    return SLSTM_CELL if forget_gate == "sigmoid" else EXPONENTIAL_SLSTM_CELL


class SLSTM(RecurrentLayer):
    r"""sLSTM (Beck et al. 2024, arXiv 2405.04517, section 2.2), with a norm.

    With i, f, z, o cut from ``input(W x) + recurrent(U h) + b_ih + b_hh``, where ``input``,
    ``recurrent`` and ``cell`` are the normalised sites:

    .. math:: \begin{aligned}
        m' &= \max(\log \phi(f) + m, i), \qquad m' = i \text{ where } n = 0 \\
        c' &= \phi(f) e^{m - m'} \odot c + e^{i - m'} \odot \tanh(z) \\
        n' &= \phi(f) e^{m - m'} \odot n + e^{i - m'} \\
        h' &= \sigma(o) \odot \operatorname{cell}(c' / n')
        \end{aligned}

    :math:`\phi` is the sigmoid or the exponential function. The input gate is exponential, and n
    sums up the weights of all steps. The stabiliser m keeps both exponents at 0 or below, so that
    nothing overflows; h does not depend on it. n is 0 before the first step and after a reset.

    The paper's heads are ``blocks``: the recurrent weight is block-diagonal. Its group norm over
    heads acts on outputs, ``torch.nn.GroupNorm(blocks, hidden_size)``, and its causal convolution
    on inputs: docs/how-to/xlstm.md has a block of all three.

    Args:
        input_size: size I of each input. 0: there is no input weight, and inputs are (T, N, 4H),
            the input terms of the gates i, f, z, o.
        forget_gate: :math:`\phi`, ``"sigmoid"`` or ``"exponential"``.

    Further arguments: see `RecurrentLayer`; zone out h alone, ``zoneout=(p, 0, 0, 0)``, since c and
    n have the scale of m. Parameters: as there, with G = 4H; gains (4H,) at the sites ``"input"``
    and ``"recurrent"``, gain and shift (H,) at ``"cell"``.

    Raises:
        ValueError: as `RecurrentLayer`, and for another ``forget_gate``.

    Example:
        >>> from ln_zoo.norms import LayerNorm
        >>> layer = SLSTM(3, 8, blocks=2, norm=LayerNorm())
        >>> output, (h, c, n, m) = layer(torch.randn(7, 4, 3))
        >>> output.shape, m.shape
        (torch.Size([7, 4, 8]), torch.Size([1, 4, 8]))
    """

    cell = SLSTM_CELL

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
        forget_gate: str = "sigmoid",
        **options: Unpack[RecurrentOptions],
    ) -> None:
        # torch refuses 0 inputs.
        super().__init__(
            1 if input_size == 0 else input_size, hidden_size, num_layers, bias, batch_first,
            dropout, bidirectional, device=device, dtype=dtype, cell=slstm_cell(forget_gate),
            **options,
        )  # fmt: skip
        self.forget_gate = forget_gate
        if input_size == 0:
            self.input_size = 0
            for suffix in ("l0", "l0_reverse")[: 1 + bidirectional]:
                none = self.get_parameter(f"weight_ih_{suffix}").detach()[:, :0].clone()
                setattr(self, f"weight_ih_{suffix}", nn.Parameter(none))

    def _new_cell(self, **arguments: Any) -> RecurrentCell:
        return SLSTMCell(forget_gate=self.forget_gate, **arguments)

    def check_input(self, input: Tensor, batch_sizes: Tensor | None) -> None:
        """Validate the shape of the input (T, N, I) or (total, I), as torch does."""
        if self.input_size:
            super().check_input(input, batch_sizes)
        elif input.shape[-1] != 4 * self.hidden_size:
            raise RuntimeError(
                "input.size(-1) must be equal to 4 * hidden_size, since input_size is 0. Expected "
                f"{4 * self.hidden_size}, got {input.shape[-1]}"
            )


class SLSTMCell(RecurrentCell):
    """One step of an sLSTM; equations, ``input_size`` and ``forget_gate`` as in `SLSTM`.

    Further arguments, shapes, parameters (G = 4H) and errors as in `RecurrentCell`. Sites are
    ``"input"``, ``"recurrent"`` and ``"cell"``.
    """

    cell = SLSTM_CELL

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
        forget_gate: str = "sigmoid",
        blocks: int = 1,
    ) -> None:
        cell = slstm_cell(forget_gate)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {"norm": norm, "normalize": normalize, "blocks": blocks}
        super().__init__(input_size, hidden_size, bias, **factory, **options, cell=cell)
        self.forget_gate = forget_gate

    @property
    def _input_features(self) -> int:
        return self.input_size or 4 * self.hidden_size
