"""A recurrent layer with a soft window over a text (Graves 2013, section 5.1).

At each step the layer reads x_t and the previous window w_{t-1}, and its state h_t moves the
window. With K Gaussians and a text of vectors c_1 ... c_U::

    (alpha^, beta^, kappa^) = W h_t + b                                          (eq. 48)
    alpha_t = exp alpha^,  beta_t = exp beta^,  kappa_t = kappa_{t-1} + exp kappa^   (49-51)
    phi(t, u) = sum_k alpha_k exp(-beta_k (kappa_k - u)^2)                       (eq. 46)
    w_t = sum_u phi(t, u) c_u                                                    (eq. 47)
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ln_zoo.ops.cells import CELLS, Weights
from ln_zoo.ops.checks import check_parameters, check_states
from ln_zoo.ops.norm_records import Records
from ln_zoo.ops.registry import Kernel, say_unsupported, select


class WindowOperands(NamedTuple):
    """Tensors of the window, in the dtype of the layer."""

    weight: Tensor  # W, (3K, H), in the order alpha, beta, kappa
    bias: Tensor  # b, (3K,)
    text: Tensor  # the vectors c, (N, U, E), zero-padded
    window: Tensor  # w_0, (N, E)
    kappa: Tensor  # kappa_0, (N, K)


class Windowed(NamedTuple):
    """Results of `windowed_lstm`."""

    output: Tensor  # states h, (T, N, H)
    windows: Tensor  # w, (T, N, E)
    h: Tensor  # (N, H)
    c: Tensor  # (N, H)
    kappa: Tensor  # final positions, (N, K)
    terms: Tensor  # alpha, beta, exp kappa^ and kappa, (T, N, 4, K); without gradients


def window_weights(terms: Tensor, characters: int) -> Tensor:
    r"""phi, the weight of each character in each window (eq. 46) at u = 1 ... U, (\*, U).

    ``terms``, (\*, 4, K), are those of `Windowed`; U is ``characters``.
    """
    alpha, beta, _, kappa = (part.unsqueeze(-1) for part in terms.unbind(-2))
    places = torch.arange(1, characters + 1, dtype=terms.dtype, device=terms.device)
    return (alpha * torch.exp(-beta * (kappa - places).square())).sum(-2)


class WindowKernel(Kernel, Protocol):
    """A kernel of the task ``"window"``."""

    def run(
        self,
        records: Records,
        x: Tensor,
        states: tuple[Tensor, Tensor],
        weights: Weights,
        windows: WindowOperands,
    ) -> Windowed:
        """`windowed_lstm` of a call that it supports, with sizes that fit."""


def select_window_kernel(
    records: Records,
    x: Tensor,
    weights: Weights,
    windows: WindowOperands,
    unsupported: str | None = None,
) -> WindowKernel | None:
    """Select the kernel for `windowed_lstm`, as `select_kernel` does; None if none supports it.

    x is (T, N, I), ``weights.ih`` is (4H, I + E). ``unsupported`` is why `windowed_lstm` cannot
    compute the layer.
    """
    what, otherwise = "an LSTM with a window", "functions of torch"
    if unsupported is not None:
        say_unsupported(what, otherwise, f": {unsupported}")
        return None
    found: WindowKernel | None = select("window", what, (records, x, weights, windows), otherwise)
    return found


def windowed_lstm(
    kernel: WindowKernel,
    records: Records,
    x: Tensor,
    states: tuple[Tensor, Tensor],
    weights: Weights,
    windows: WindowOperands,
) -> Windowed:
    """Run the layer over a sequence; no double backward, no batched gradients.

    ``kernel`` is from `select_window_kernel`; ``states`` are h_0 and c_0, each (N, H). RuntimeError
    for mismatched sizes, dtypes or devices.
    """
    hidden = weights.hh.shape[1]
    sizes = x.shape[2] + windows.window.shape[1], hidden, hidden
    check_states(x, states, [(x.shape[1], hidden)] * 2)
    check_parameters(CELLS["LSTM"], records, weights, x, sizes)
    return kernel.run(records, x, states, weights, windows)
