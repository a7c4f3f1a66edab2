"""DRAW written from the equations of Gregor et al. (2015), for comparisons in float64.

Nothing is imported from the package. Indices count from 1, as in the source; places that are
returned count from 0. Gradients flow.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from reference import Direction, read
from torch import Tensor

Affine = tuple[Tensor, Tensor]


def filters(
    numbers: Tensor, K: int, B: int, A: int, eps: float | None = None, clamp: float = math.inf
) -> tuple[Tensor, Tensor, Tensor]:
    """F_Y (N, K, B), F_X (N, K, A) and x, y, stride, sigma and gamma (N, 5): eq. 19-26.

    Of K filters a side for images (B, A) by the numbers (N, 5) that a linear map gives. ``eps`` is
    added to each filter's sum; None is softmax, which is the same without. ``clamp``: largest
    absolute logarithm of variance and stride.
    """
    g_x, g_y, log_variance, log_delta, log_gamma = numbers.unbind(1)
    variance = log_variance.clamp(-clamp, clamp).exp()
    delta = log_delta.clamp(-clamp, clamp).exp()
    delta = 0 * delta if K == 1 else (max(A, B) - 1) / (K - 1) * delta
    i, banks, centres = torch.arange(1, K + 1), [], []
    for g, size in ((g_y, B), (g_x, A)):
        centre = (size + 1) / 2 * (g + 1)
        mu = centre[:, None] + (i - K / 2 - 0.5) * delta[:, None]
        squares = (torch.arange(1, size + 1) - mu[..., None]) ** 2
        exponent = -squares / (2 * variance[:, None, None])
        if eps is None:
            banks.append(exponent.softmax(2))
        else:
            banks.append(exponent.exp() / (exponent.exp().sum(2, keepdim=True) + eps))
        centres.append(centre - 1)
    places = torch.stack([centres[1], centres[0], delta, variance.sqrt(), log_gamma.exp()], 1)
    return banks[0], banks[1], places


class Network(NamedTuple):
    """Parameters; ``read`` and ``write`` are None without attention."""

    encoder: Direction
    decoder: Direction
    posterior: Affine
    read: Affine | None
    write: Affine | None
    patch: Affine
    #: h and c of the encoder, h and c of the decoder, (H,), and the canvas (B, A).
    start: tuple[Tensor, ...]
    read_size: int | None
    write_size: int | None


class Drawn(NamedTuple):
    """Results; ``canvases`` has the first one, (T + 1, N, B, A)."""

    canvases: Tensor
    means: Tensor | None
    log_stds: Tensor | None
    read: Tensor | None
    write: Tensor | None


def parameters_of(network: Any) -> Network:
    """The parameters of a `DRAWNetwork`."""
    p = dict(network.named_parameters())
    H, canvas = network.hidden_size, (network.height, network.width)
    shapes = dict.fromkeys(("encoder_h", "encoder_c", "decoder_h", "decoder_c"), (H,))
    start = (
        p.get(f"initial.{name}", torch.zeros(shape, dtype=torch.float64))
        for name, shape in {**shapes, "canvas": canvas}.items()
    )
    affine = {
        name: (p[f"{name}.weight"], p[f"{name}.bias"]) if f"{name}.weight" in p else None
        for name in ("posterior", "read", "write", "patch")
    }
    return Network(
        read("LSTM", network.encoder),
        read("LSTM", network.decoder),
        **affine,
        start=tuple(start),
        read_size=network.read_size,
        write_size=network.write_size,
    )


def draw(
    p: Network,
    images: Tensor | None,
    noise: Tensor,
    eps: float | None = None,
    clamp: float = math.inf,
) -> Drawn:
    """Eq. 3-14; without images, section 2.3: the noise (T, N, Z) is the latents."""
    N, Z = noise.shape[1:]
    h_enc, c_enc, h_dec, c_dec = (a.expand(N, -1) for a in p.start[:4])
    B, A = p.start[4].shape
    canvas = p.start[4].expand(N, B, A)

    def affine(of: Affine, h: Tensor) -> Tensor:
        return h @ of[0].T + of[1]

    found: dict[str, list[Tensor]] = {"canvases": [canvas]}
    for t, z in enumerate(noise):
        if images is not None:
            pair = [images, images - canvas.sigmoid()]
            if p.read is not None:
                f_y, f_x, places = filters(affine(p.read, h_dec), p.read_size, B, A, eps, clamp)
                gamma = places[:, 4, None, None]
                pair = [gamma * (f_y @ image @ f_x.mT) for image in pair]
                found.setdefault("read", []).append(places)
            seen = torch.cat([*(a.flatten(1) for a in pair), h_dec], 1)
            h_enc, c_enc = p.encoder.step(seen, h_enc, c_enc, t)  # type: ignore[assignment]
            mean, log_std = affine(p.posterior, h_enc).split(Z, 1)
            log_std = log_std.clamp(-clamp, clamp)
            z = mean + log_std.exp() * z
            found.setdefault("means", []).append(mean)
            found.setdefault("log_stds", []).append(log_std)
        h_dec, c_dec = p.decoder.step(z, h_dec, c_dec, t)  # type: ignore[assignment]
        patch = affine(p.patch, h_dec)
        if p.write is None:
            added = patch.view(N, B, A)
        else:
            W = p.write_size
            f_y, f_x, places = filters(affine(p.write, h_dec), W, B, A, eps, clamp)
            added = f_y.mT @ patch.view(N, W, W) @ f_x / places[:, 4, None, None]
            found.setdefault("write", []).append(places)
        canvas = canvas + added
        found["canvases"].append(canvas)
    stacked = {name: torch.stack(parts) for name, parts in found.items()}
    return Drawn(*(stacked.get(name) for name in Drawn._fields))  # type: ignore[arg-type]
