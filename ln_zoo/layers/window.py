"""An LSTM with a soft attention window over a text (Graves 2013, section 5.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn import init

from ln_zoo.layers.cells import LSTMCell, sites_by_role, start_sequence
from ln_zoo.norms import Norm
from ln_zoo.ops import (
    WindowOperands,
    check_devices,
    select_window_kernel,
    window_weights,
    windowed_lstm,
)
from ln_zoo.utils.checks import check_at_least, check_choice

WindowParameters = Literal["exp", "softplus"]
WindowInput = Literal["state", "all"]

#: Initial biases of kappa^: the window moves about as fast as a pen writes.
_KAPPA_BIAS: dict[str, float] = {"exp": -3.0, "softplus": 0.0}
#: Characters by which a unit of ``softplus`` moves the window, and the least width it allows.
_SOFTPLUS_STEP, _LEAST_WIDTH = 1 / 25, 0.01


class WindowState(NamedTuple):
    """State of a `WindowLSTM`."""

    h: Tensor  #: hidden state, (N, H)
    c: Tensor  #: cell state, (N, H)
    kappa: Tensor  #: centres of the Gaussians, in characters, (N, K)
    window: Tensor  #: w, the weighted sum of the character vectors, (N, E)


class WindowOutput(NamedTuple):
    """Output of a `WindowLSTM`."""

    output: Tensor  #: states h, (T, N, H)
    windows: Tensor  #: w, (T, N, E)
    state: WindowState  #: state after the last step
    #: Weight of each character in each window, (T, N, U), without gradients, also past the ends of
    #: texts; None without `trace`.
    phi: Tensor | None


class WindowLSTM(nn.Module):
    r"""An LSTM layer with a soft attention window over a text (Graves 2013, section 5).

    At step t the LSTM (paper, eq. 20-22) reads ``[x_t, w_{t-1}]`` in one matrix, and its state sets
    the window for this step (Graves 2013, eq. 46-51):

    .. math:: \begin{aligned}
        (\hat\alpha, \hat\beta, \hat\kappa) &= W h_t + b \\
        \alpha_t &= \exp \hat\alpha, \quad \beta_t = \exp \hat\beta, \quad
            \kappa_t = \kappa_{t-1} + \exp \hat\kappa \\
        \phi(t, u) &= \sum_k \alpha_k \exp(-\beta_k (\kappa_k - u)^2) \\
        w_t &= \sum_u \phi(t, u)\, c_u
        \end{aligned}

    Layers above read w_t of the same step. With `LayerNorm`, `RMSNorm`, `WeightNorm` or no norm,
    the loop runs on the kernels listed by ``ln-zoo kernels``; with peepholes, clipped derivatives,
    other norms or other forms of the window, on torch functions. Autocast is disabled inside: in
    bfloat16 kappa would not move.

    Args:
        input_size: size I of each input.
        hidden_size: size H of each state.
        character_size: size E of the vector of each character.
        components: number K of Gaussians.
        norm: normalisation of the LSTM; default `Identity`. The window is not normalised.
        normalize: see `LSTMCell`, as for ``peephole`` and ``derivative_bound``.
        window_parameters: ``"exp"`` as above, or ``"softplus"`` as in some released code: softplus
            instead of exp, kappa moves by 1/25 of it, and beta (at least 0.01) divides the square.
        window_input: input of the window's map: ``"state"``, h_t, or ``"all"``: w_{t-1}, x_t, h_t.
        kappa_bias: initial b of kappa^; default -3 for ``"exp"``, a character in 20 steps, and 0
            for ``"softplus"``, a character in 36. (Writers take 22 steps; ``"exp"`` at 0 takes 1.)

    Parameters: as `LSTMCell` under ``cell.``, and ``window.weight`` (3K, H, or E + I + H),
    ``window.bias`` (3K,). Initial biases of alpha^ make the peaks of all Gaussians sum to 1.

    Raises:
        ValueError: for sizes below 1, another ``window_parameters`` or ``window_input``, and as
            `LSTMCell`.

    Example:
        >>> from ln_zoo.norms import LayerNorm
        >>> layer = WindowLSTM(3, 8, character_size=5, components=2, norm=LayerNorm())
        >>> text = torch.eye(5)[torch.tensor([[0, 3, 1], [2, 2, 4]])]
        >>> output, windows, state, _ = layer(torch.randn(20, 2, 3), text)
        >>> output.shape, windows.shape, state.kappa.shape
        (torch.Size([20, 2, 8]), torch.Size([20, 2, 5]), torch.Size([2, 2]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        character_size: int,
        components: int = 10,
        *,
        norm: Norm | None = None,
        normalize: Sequence[str] | None = None,
        peephole: bool = False,
        derivative_bound: float | None = None,
        window_parameters: WindowParameters = "exp",
        window_input: WindowInput = "state",
        kappa_bias: float | None = None,
    ) -> None:
        super().__init__()
        check_at_least(
            1,
            input_size=input_size,
            hidden_size=hidden_size,
            character_size=character_size,
            components=components,
        )
        check_choice("window_parameters", window_parameters, get_args(WindowParameters))
        check_choice("window_input", window_input, get_args(WindowInput))
        self.input_size, self.hidden_size = input_size, hidden_size
        self.character_size, self.components = character_size, components
        self.window_parameters, self.window_input = window_parameters, window_input
        if kappa_bias is None:
            kappa_bias = _KAPPA_BIAS[window_parameters]
        self.kappa_bias = kappa_bias
        self.cell = LSTMCell(
            input_size + character_size,
            hidden_size,
            norm=norm,
            normalize=normalize,
            peephole=peephole,
            derivative_bound=derivative_bound,
        )
        reads = hidden_size + (0 if window_input == "state" else input_size + character_size)
        self.window = nn.Linear(reads, 3 * components)
        self._start_window()

    def reset_parameters(self) -> None:
        """Re-initialise weights, biases and the norm."""
        self.cell.reset_parameters()
        self.window.reset_parameters()
        self._start_window()

    @torch.no_grad()
    def _start_window(self) -> None:
        alpha, beta, kappa = self.window.bias.chunk(3)
        share = 1 / self.components
        # The inverse of softplus: log(e^y - 1).
        exponential = self.window_parameters == "exp"
        alpha.fill_(math.log(share) if exponential else math.log(math.expm1(share)))
        init.zeros_(beta)
        kappa.fill_(self.kappa_bias)

    def start(self, examples: int) -> WindowState:
        """Initial state of N examples: zeros, with the window before the text."""
        sizes = (self.hidden_size, self.hidden_size, self.components, self.character_size)
        return WindowState(*(self.window.weight.new_zeros(examples, size) for size in sizes))

    def forward(
        self,
        input: Tensor,
        text: Tensor,
        state: WindowState | None = None,
        trace: bool = False,
    ) -> WindowOutput:
        """Run the layer over a sequence.

        Args:
            input: x, (T, N, I).
            text: a vector for each character, (N, U, E), zeros after the end of each text.
            state: initial state; default `start`.
            trace: return phi too.

        Raises:
            ValueError: for mismatched sizes.
        """
        if input.dim() != 3 or input.shape[2] != self.input_size or not len(input):
            raise ValueError(
                f"input must be (T, N, {self.input_size}) with T at least 1, got "
                f"{tuple(input.shape)}"
            )
        examples = input.shape[1]
        if text.dim() != 3 or text.shape[0] != examples or text.shape[2] != self.character_size:
            raise ValueError(
                f"text must be ({examples}, U, {self.character_size}), got {tuple(text.shape)}"
            )
        state = self.start(examples) if state is None else state
        self._check_state(state, examples)
        window = {"window.weight": self.window.weight, "window.bias": self.window.bias}
        check_devices(input, text=text, **state._asdict(), **window)
        with torch.autocast(input.device.type, enabled=False):
            dtype = self.window.weight.dtype
            input, text = input.to(dtype), text.to(dtype)
            state = WindowState(*(a.to(dtype) for a in state))
            start_sequence([sites_by_role(self.cell.sites)], len(input))
            found = self._run_kernel(input, text, state, trace)
            return self._run_steps(input, text, state, trace) if found is None else found

    def _check_state(self, state: WindowState, examples: int) -> None:
        sizes = (self.hidden_size, self.hidden_size, self.components, self.character_size)
        for name, a, size in zip(WindowState._fields, state, sizes, strict=True):
            if a.shape != (examples, size):
                raise ValueError(
                    f"state.{name} must be ({examples}, {size}) for an input of {examples} "
                    f"examples, got {tuple(a.shape)}"
                )

    def _run_kernel(
        self, input: Tensor, text: Tensor, state: WindowState, trace: bool
    ) -> WindowOutput | None:
        """`_run_steps` in one call, or None if no kernel supports it."""
        unsupported = None
        if self.window_parameters != "exp":
            unsupported = f"window_parameters is {self.window_parameters!r}"
        elif self.window_input != "state":
            unsupported = f"window_input is {self.window_input!r}"
        elif not self.cell.cell.in_torch:
            unsupported = f"no kernel knows this cell, {self.cell.cell.name}"
        weights = self.cell.effective_weights()
        sites = sites_by_role(self.cell.sites)
        records = {role: site.to_spec() for role, site in sites.items()}
        operands = WindowOperands(
            self.window.weight, self.window.bias, text, state.window, state.kappa
        )
        kernel = select_window_kernel(records, input, weights, operands, unsupported)
        if kernel is None:
            return None
        done = windowed_lstm(kernel, records, input, (state.h, state.c), weights, operands)
        after = WindowState(done.h, done.c, done.kappa, done.windows[-1])
        phi = window_weights(done.terms, text.shape[1]) if trace else None
        return WindowOutput(done.output, done.windows, after, phi)

    def _run_steps(
        self, input: Tensor, text: Tensor, state: WindowState, trace: bool
    ) -> WindowOutput:
        outputs, windows, phis = [], [], []
        for t, x in enumerate(input.unbind()):
            state, phi = self._step(x, text, state, t)
            outputs.append(state.h)
            windows.append(state.window)
            phis.append(phi.detach())
        phis_too = torch.stack(phis) if trace else None
        return WindowOutput(torch.stack(outputs), torch.stack(windows), state, phis_too)

    def _step(
        self, x: Tensor, text: Tensor, state: WindowState, t: int
    ) -> tuple[WindowState, Tensor]:
        """The state after a step, and phi (N, U)."""
        h, c = self.cell(torch.cat([x, state.window], -1), (state.h, state.c), step=t)
        reads = h if self.window_input == "state" else torch.cat([state.window, x, h], -1)
        alpha, beta, moved = self.window(reads).chunk(3, -1)
        if self.window_parameters == "exp":
            alpha, beta, moved = alpha.exp(), beta.exp(), moved.exp()
        else:
            alpha, moved = F.softplus(alpha), _SOFTPLUS_STEP * F.softplus(moved)
            beta = 1 / F.softplus(beta).clamp(min=_LEAST_WIDTH)
        kappa = state.kappa + moved
        terms = torch.stack([alpha, beta, moved, kappa], -2)
        phi = window_weights(terms, text.shape[1])
        window = torch.bmm(phi.unsqueeze(1), text).squeeze(1)
        return WindowState(h, c, kappa, window), phi
