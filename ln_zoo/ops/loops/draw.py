"""DRAW: two LSTMs that paint an image glimpse by glimpse (Gregor et al. 2015; paper, eq. 29-31).

With an image x (B, A), a canvas C of logits and noise e_t, at each of T glimpses::

    x^ = x - sigmoid(C_t)
    r_t = gamma [F_Y x F_X^T; F_Y x^ F_X^T]        filters from W_r h_dec, R of them per axis
    h_enc = LSTM([r_t; h_dec], h_enc)
    mu_t, log s_t = W_q h_enc + b
    z_t = mu_t + s_t e_t
    h_dec = LSTM(z_t, h_dec)
    C_t+1 = C_t + F_Y^T w_t F_X / gamma            filters and w_t (W, W) from W_w h_dec

The filters follow from (g_X, g_Y, log sigma^2, log delta, log gamma); see
`ln_zoo.ops.loops.glimpse`. A cell state may be normalised on its way to h; pre-activations are not.
Under autocast, products of the LSTMs and of the posterior run in bfloat16, the rest in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ln_zoo.ops.cells import Weights
from ln_zoo.ops.checks import check_devices
from ln_zoo.ops.loops.glimpse import FilterNorm
from ln_zoo.ops.norm_records import Records, RowNorm
from ln_zoo.ops.registry import Kernel, say_unsupported, select

#: Numbers that place the filters of reader or writer.
NUMBERS = 5


@dataclass(frozen=True)
class DrawSettings:
    """Hyperparameters of DRAW; ``filter_norm`` and ``filter_eps`` as in `filterbank`.

    Args:
        read: filters R along each axis of the patch that is read.
        write: filters W along each axis of the patch that is written.
        log_clamp: log s, log sigma^2 and log delta are clamped to +-log_clamp; no gradient beyond.
    """

    read: int
    write: int
    filter_norm: FilterNorm = "softmax"
    filter_eps: float = 1e-8
    log_clamp: float = 10.0


class Affine(NamedTuple):
    """Weight (O, H) and bias (O,)."""

    weight: Tensor
    bias: Tensor


class DrawLSTM(NamedTuple):
    """Encoder or decoder.

    ``weights.ih`` is (4H, 2R^2 + H) in the encoder, with r before h_dec; (4H, Z) in the decoder.
    """

    weights: Weights
    records: Records  # by role
    h: Tensor  # initial state of all examples, (H,)
    c: Tensor  # initial cell state, (H,)


class DrawWeights(NamedTuple):
    """Parameters of DRAW."""

    encoder: DrawLSTM
    decoder: DrawLSTM
    posterior: Affine  # h_enc to Z means, then Z log standard deviations
    read: Affine  # h_dec to the five numbers that place the read filters
    write: Affine  # the same for the write filters
    patch: Affine  # h_dec to W * W pixels, row by row
    canvas: Tensor  # initial logits of all examples, (B, A)


class Drawn(NamedTuple):
    """Results of `draw_forward`, in the dtype of the weights."""

    logits: Tensor  # the last canvas, (N, B, A)
    means: Tensor  # mu, (T, N, Z)
    log_stds: Tensor  # log s, clamped, (T, N, Z)
    clamped: Tensor  # how many log s, log sigma^2 and log delta were clamped, (3,), integers


class DrawKernel(Kernel, Protocol):
    """A kernel of the task ``"DRAW"``."""

    def run(
        self, settings: DrawSettings, images: Tensor, noise: Tensor, weights: DrawWeights
    ) -> Drawn:
        """`draw_forward` of a call that it supports, with sizes that fit."""


def select_draw_kernel(
    images: Tensor, noise: Tensor, weights: DrawWeights | None, unsupported: str | None = None
) -> DrawKernel | None:
    """Select the kernel for `draw_forward`, as `select_kernel` does; None if none supports it.

    ``unsupported`` is why `draw_forward` cannot compute the model, with weights None.
    """
    if unsupported is not None or weights is None:
        say_unsupported("DRAW", "functions of torch", f": {unsupported}")
        return None
    call = (images, noise, weights)
    found: DrawKernel | None = select("DRAW", "DRAW", call, "functions of torch")
    return found


def draw_forward(
    kernel: DrawKernel, settings: DrawSettings, images: Tensor, noise: Tensor, weights: DrawWeights
) -> Drawn:
    """Run all glimpses of images (N, B, A) from 0 to 1, with noise (T, N, Z), T at least 1.

    ``kernel`` is from `select_draw_kernel`. No double backward, no batched gradients. ValueError
    for mismatched sizes, RuntimeError for mismatched devices or dtypes.
    """
    _check(settings, images, noise, weights)
    return kernel.run(settings, images, noise, weights)


def _check(settings: DrawSettings, images: Tensor, noise: Tensor, weights: DrawWeights) -> None:
    for name, a, form in (("images", images, "(N, B, A)"), ("noise", noise, "(T, N, Z)")):
        if a.dim() != 3 or (name == "noise" and not len(a)):
            raise ValueError(f"{name} must be {form}, T at least 1, got {tuple(a.shape)}")
    (examples, *size), latents = images.shape, noise.shape[2]
    hidden = weights.encoder.weights.hh.shape[1]
    expected: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("noise", noise, (len(noise), examples, latents)),
        ("canvas", weights.canvas, tuple(size)),
    ]
    inputs = {"encoder": 2 * settings.read**2 + hidden, "decoder": latents}
    for name, columns in inputs.items():
        lstm = cast(DrawLSTM, getattr(weights, name))
        record = lstm.records["cell"]
        expected += [
            (f"{name}.weights.ih", lstm.weights.ih, (4 * hidden, columns)),
            (f"{name}.weights.hh", lstm.weights.hh, (4 * hidden, hidden)),
            (f"{name}.weights.bias_ih", lstm.weights.bias_ih, (4 * hidden,)),
            (f"{name}.weights.bias_hh", lstm.weights.bias_hh, (4 * hidden,)),
            (f"{name}.h", lstm.h, (hidden,)),
            (f"{name}.c", lstm.c, (hidden,)),
        ]
        if isinstance(record, RowNorm) and not record.identity:
            expected += [
                (f"the gain of {name}'s cell", record.gain, (hidden,)),
                (f"the shift of {name}'s cell", record.shift, (hidden,)),
            ]
    outputs = {
        "posterior": 2 * latents,
        "read": NUMBERS,
        "write": NUMBERS,
        "patch": settings.write**2,
    }
    for name, rows in outputs.items():
        affine = cast(Affine, getattr(weights, name))
        expected.append((f"{name}.weight", affine.weight, (rows, hidden)))
        expected.append((f"{name}.bias", affine.bias, (rows,)))
    check_devices(images, **{name: there for name, there, _ in expected})
    for name, there, shape in expected:
        if there is not None and there.shape != shape:
            raise ValueError(
                f"{name} must be {shape} beside {examples} images of {size[0]} x {size[1]} pixels, "
                f"{latents} latents, {hidden} hidden units and patches of {settings.read} and "
                f"{settings.write} a side, got {tuple(there.shape)}"
            )


def divergence(means: Tensor, log_stds: Tensor) -> Tensor:
    """KL(N(mu, s^2) || N(0, 1)) = sum_z (mu^2 + s^2 - 2 log s - 1) / 2, in nats.

    Gregor et al. 2015, eq. 11, with the -1 for each latent. Means mu and log s are (..., Z), the
    result is (...).
    """
    return (torch.expm1(2 * log_stds) - 2 * log_stds + means.square()).sum(-1) / 2
