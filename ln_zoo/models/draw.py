"""DRAW: a variational autoencoder that draws images glimpse by glimpse (paper, section 6.4)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F

from ln_zoo.layers import DRAWNetwork, DRAWOutput
from ln_zoo.models.base import ZooModule
from ln_zoo.models.legacy_adam import adam
from ln_zoo.models.ratios import add_ratios, log_ratios
from ln_zoo.norms import LayerNorm, Norm, from_config
from ln_zoo.ops import divergence
from ln_zoo.utils.checks import check_at_least, check_positive

#: Metrics by stage, in nats per image; see `DRAW`.
_METRICS = {
    "val": ("bound", "nll", "kl"),
    "test": ("bound", "nll", "kl", "importance_bound"),
}


class DRAW(ZooModule):
    """A variational autoencoder with attention for reading and writing (Gregor et al. 2015).

    The network is `ln_zoo.layers.DRAWNetwork`. The loss is the variational bound on the negative
    log likelihood, in nats: summed over pixels and latents, averaged over images. With
    ``kl_warmup``, the loss weights ``kl``, and ``train_bound`` does not::

        nll = -sum_pixels [x log p + (1 - x) log(1 - p)],   p = sigmoid(C_T)
        kl = sum_t sum_d (mu^2 + s^2 - 2 log s - 1) / 2
        bound = nll + kl

    ``bound``, ``nll`` and ``kl`` are logged; with ``importance_samples`` also
    ``test_importance_bound``, the tighter importance-weighted bound of `Burda et al. (2016)
    <https://arxiv.org/abs/1509.00519>`_, eq. 8. Evaluation noise depends only on ``eval_seed`` and
    the images of a batch, so that models are compared with the same noise. ``train_clamped`` is the
    share of log standard deviations, log variances and log strides beyond ``log_clamp``.

    A batch is a tuple that starts with images (N, 1, B, A) from 0 to 1: binarized, as in the
    sources, or probabilities.

    Args:
        image_size: height B and width A in pixels.
        glimpses: T; the paper has 64.
        hidden_size: H of both LSTMs; the paper has 256.
        latent_size: Z of each glimpse.
        read_size: R; ``None``: the encoder reads whole images.
        write_size: W; ``None``: the decoder writes to all pixels.
        norm: the normalisation, or its ``class_path``/``init_args`` dict; default `LayerNorm`.
        normalize: normalised sites; default: the cell state, as in the paper, or ``["input",
            "recurrent"]`` for norms that act on weights only. See `ln_zoo.layers.DRAWNetwork`.
        peephole: gates see cell states, as in the first released code.
        forget_bias: initial bias of the forget gates, not stated in the sources. ``None``: from
            ``init_std``.
        learn_initial_state: learn the initial states; otherwise zeros.
        learn_initial_canvas: learn the initial canvas; otherwise zeros.
        filter_norm: ``"softmax"`` or ``"eps"``; see `ln_zoo.ops.filterbank`.
        filter_eps: see `ln_zoo.ops.filterbank`.
        log_clamp: bound of logarithms; see `ln_zoo.layers.DRAWNetwork`.
        init_std: standard deviation of initial weights, with biases 0; not stated in the sources.
            With 0.01, as in released code, layer norm at the paper's size does not learn for epochs
            (``docs/results/draw.md``). ``None``: torch's own, with a small map to the latents.
        lr: learning rate of Adam. The paper uses Adam's default, 1e-3; released code has 3e-4.
        clip_norm: bound of the gradient norm, not stated in the sources, or ``None``; initial norms
            are 100 to 300. The trainer's ``gradient_clip_val`` overrides it.
        val_samples: samples of the latents per image in validation; training uses one.
        eval_samples: the same in test.
        importance_samples: samples for the importance-weighted bound in test; 0: not measured.
        eval_seed: seed of the noise in evaluation.
        compile_mode: compile glimpses by `torch.compile` with this mode, such as ``"default"``, or
            ``"reduce-overhead"`` with CUDA graphs; ``None``: use this package's kernels if they
            support the network, else torch functions.
        kl_warmup: updates in which the weight of ``kl`` in the training loss rises from 0 to 1, as
            in `Bowman et al. (2016) <https://arxiv.org/abs/1511.06349>`_, section 3.1; not in the
            paper. Default 0: the loss is the bound. Without a warm-up, some seeds only learn the
            mean of all images (``docs/results/draw.md``).
        read_stride_bias: initial bias of the read's log stride; no source states it. ``None``, as
            the published models: from ``init_std``. With -1 the read window starts inside the
            image, and every seed that was tried learns; see `ln_zoo.layers.DRAWNetwork`.

    Example:
        >>> model = DRAW(image_size=(8, 8), glimpses=3, hidden_size=16, latent_size=4)
        >>> images = torch.rand(2, 1, 8, 8).round()
        >>> values = model.per_example((images,))
        >>> {name: value.shape for name, value in values.items()}
        {'bound': torch.Size([2]), 'nll': torch.Size([2]), 'kl': torch.Size([2])}
    """

    input_kinds = ("images", "labelled images")
    pipeline_tag = "unconditional-image-generation"

    @classmethod
    def card_example(cls, preprocessing: Mapping[str, Any]) -> str:
        return (
            "images = model.generate_samples(4, seed=0).logits.sigmoid()\n"
            "print(images.shape)  # (4, height, width), probabilities of white\n"
        )

    def __init__(
        self,
        image_size: tuple[int, int] = (28, 28),
        glimpses: int = 64,
        hidden_size: int = 256,
        latent_size: int = 100,
        read_size: int | None = 2,
        write_size: int | None = 5,
        norm: Norm | None = None,
        normalize: list[str] | None = None,
        peephole: bool = False,
        forget_bias: float | None = None,
        learn_initial_state: bool = True,
        learn_initial_canvas: bool = True,
        filter_norm: Literal["softmax", "eps"] = "softmax",
        filter_eps: float = 1e-8,
        log_clamp: float = 10.0,
        init_std: float | None = None,
        lr: float = 1e-3,
        clip_norm: float | None = 10.0,
        val_samples: int = 1,
        eval_samples: int = 10,
        importance_samples: int = 0,
        eval_seed: int = 0,
        compile_mode: str | None = None,
        kl_warmup: int = 0,
        read_stride_bias: float | None = None,
    ) -> None:
        super().__init__()
        norm = LayerNorm() if norm is None else from_config(norm)
        height, width = self.image_size = _height_and_width(image_size)
        self.glimpses, self.eval_seed = glimpses, eval_seed
        self.lr, self.clip_norm, self.kl_warmup = lr, clip_norm, kl_warmup
        self.val_samples, self.eval_samples = val_samples, eval_samples
        self.importance_samples = importance_samples
        self._check_arguments()
        self.save_hyperparameters()
        # The mode is not stored: loading the weights must not compile.
        self.resolve_hyperparameters(norm, image_size=[height, width], compile_mode=None)
        self.network = DRAWNetwork(
            height, width, hidden_size=hidden_size, latent_size=latent_size, read_size=read_size,
            write_size=write_size, norm=norm, normalize=normalize, peephole=peephole,
            forget_bias=forget_bias, learn_initial_state=learn_initial_state,
            learn_initial_canvas=learn_initial_canvas, filter_norm=filter_norm,
            filter_eps=filter_eps, log_clamp=log_clamp, init_std=init_std,
            read_stride_bias=read_stride_bias,
        )  # fmt: skip
        if compile_mode is not None:
            self.network.compile_glimpse(compile_mode)
        for stage, names in _METRICS.items():
            add_ratios(self, stage, names)

    def _check_arguments(self) -> None:
        check_at_least(1, glimpses=self.glimpses)
        check_at_least(1, val_samples=self.val_samples, eval_samples=self.eval_samples)
        check_at_least(0, importance_samples=self.importance_samples, kl_warmup=self.kl_warmup)
        if not 0 <= self.eval_seed < 2**32:
            raise ValueError(f"eval_seed must lie between 0 and 2^32 - 1, got {self.eval_seed}")
        check_positive(lr=self.lr, clip_norm=self.clip_norm)

    def forward(self, images: Tensor, noise: Tensor | None = None) -> DRAWOutput:
        """Reconstruct images (N, 1, B, A) with normal noise (T, N, Z); default: sampled."""
        expected = (1, *self.image_size)
        if images.dim() != 4 or tuple(images.shape[1:]) != expected:
            raise ValueError(
                f"images must be (N, {', '.join(map(str, expected))}), got {tuple(images.shape)}: "
                "give the model their size with image_size (--model.image_size)"
            )
        if noise is None:
            noise = self._noise(len(images))
        output: DRAWOutput = self.network(images.squeeze(1), noise)
        return output

    @torch.no_grad()
    def encode(self, images: Tensor, seed: int = 0) -> Tensor:
        """Features of images (N, 1, B, A): the means of the latents at each glimpse, (N, T, Z).

        They depend on the noise of earlier glimpses, set by ``seed``, and on the mode; see
        `generate_samples`.
        """
        noise = self._noise(len(images), torch.Generator().manual_seed(seed))
        means = self(images.to(self.device), noise).means
        assert means is not None
        return means.transpose(0, 1)

    def _noise(self, examples: int, generator: torch.Generator | None = None) -> Tensor:
        shape = (self.glimpses, examples, self.network.latent_size)
        if generator is None:
            return torch.randn(shape, device=self.device)
        # On the CPU: the same numbers on every device.
        return torch.randn(shape, generator=generator).to(self.device)

    # Losses

    @staticmethod
    def kl_by_glimpse(output: DRAWOutput) -> Tensor:
        """KL divergence of the latents from their prior at each glimpse, in nats, (T, N).

        ValueError for generated images.
        """
        if output.means is None or output.log_stds is None:
            raise ValueError("generated images have no divergence: no image was read")
        return divergence(output.means, output.log_stds)

    @staticmethod
    def nll(images: Tensor, output: DRAWOutput) -> Tensor:
        """Negative log likelihood of images (N, 1, B, A) given the canvas, in nats, (N,)."""
        logits = output.logits
        x = images.squeeze(1).to(logits)
        return F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum((1, 2))

    def per_example(self, batch: Any) -> dict[str, Tensor]:
        """``bound``, ``nll`` and ``kl`` of each image with one sample, float64 (N,)."""
        return self._measure(batch[0], 1, 0)

    def _measure(self, images: Tensor, samples: int, importance: int) -> dict[str, Tensor]:
        """Means over samples of the latents, and the importance-weighted bound."""
        pixels = images.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()
        # One seed for each batch, so that results do not depend on the order of batches.
        generator = torch.Generator().manual_seed(zlib.crc32(pixels, self.eval_seed))
        nll, kl, weights = [], [], []
        for i in range(max(samples, importance)):
            noise = self._noise(len(images), generator)
            output = _doubled(self(images, noise))
            if i < samples:
                nll.append(self.nll(images, output))
                kl.append(self.kl_by_glimpse(output).sum(0))
            if i < importance:
                weights.append(self._log_weight(images, output, noise.double()))
        shares = {"nll": torch.stack(nll).mean(0), "kl": torch.stack(kl).mean(0)}
        values = {"bound": shares["nll"] + shares["kl"], **shares}
        if weights:
            mean = torch.stack(weights).logsumexp(0) - math.log(importance)
            values["importance_bound"] = -mean
        return values

    def _log_weight(self, images: Tensor, output: DRAWOutput, noise: Tensor) -> Tensor:
        """log p(x | z) + log p(z) - log q(z | x) of one sample, (N,)."""
        assert output.means is not None
        assert output.log_stds is not None
        z = output.means + output.log_stds.exp() * noise
        ratio = 0.5 * (noise.square() - z.square()) + output.log_stds
        return ratio.sum((0, 2)) - self.nll(images, output)

    # Training

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images = batch[0]
        output = self(images)
        nll, kl = self.nll(images, output).mean(), self.kl_by_glimpse(output).sum(0).mean()
        bound = nll + kl
        assert output.log_stds is not None
        grids = sum(grid is not None for grid in (self.network.read, self.network.write))
        watched = output.log_stds.numel() + 2 * grids * self.glimpses * len(images)
        for name, value in (
            ("bound", bound),
            ("nll", nll),
            ("kl", kl),
            ("clamped", output.clamped / watched),
        ):
            shown = name == "bound"
            self.log(f"train_{name}", value.detach(), prog_bar=shown, batch_size=len(images))
        weight = min(1.0, self.global_step / self.kl_warmup) if self.kl_warmup else 1.0
        return nll + weight * kl

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("val", batch, self.val_samples, 0)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test", batch, self.eval_samples, self.importance_samples)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return self._measure(batch[0], self.eval_samples, self.importance_samples)

    def _evaluate(self, stage: str, batch: Any, samples: int, importance: int) -> None:
        images = batch[0]
        values = self._measure(images, samples, importance)
        sums = {name: (value, value.new_tensor(len(images))) for name, value in values.items()}
        log_ratios(self, stage, sums, len(images))

    def default_clipping(self) -> tuple[float | None, str | None]:
        return self.clip_norm, None

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return adam(self, self.lr)

    # Pictures

    @torch.no_grad()
    def generate_samples(self, number: int, seed: int = 0, trace: bool = False) -> DRAWOutput:
        """Generate images; ``trace`` returns the states of each glimpse.

        Use evaluation mode if the norm is batch-dependent; in training mode the images of one call
        depend on each other.
        """
        check_at_least(1, number=number)
        generator = torch.Generator().manual_seed(seed)
        return self.network.generate(self._noise(number, generator), trace)

    @torch.no_grad()
    def reconstruct(self, images: Tensor, seed: int = 0, trace: bool = False) -> DRAWOutput:
        """Reconstruct images (N, 1, B, A); see `generate_samples` on modes and ``trace``."""
        noise = self._noise(len(images), torch.Generator().manual_seed(seed))
        output: DRAWOutput = self.network(images.to(self.device).squeeze(1), noise, trace)
        return output


def _height_and_width(given: Sequence[int]) -> tuple[int, int]:
    if not isinstance(given, Sequence) or len(given) != 2:
        raise ValueError(f"image_size must be height and width, got {given!r}")
    return given[0], given[1]


def _doubled(output: DRAWOutput) -> DRAWOutput:
    tensors: Sequence[Tensor | None] = (output.logits, output.means, output.log_stds)
    logits, means, log_stds = (None if a is None else a.double() for a in tensors)
    assert logits is not None
    return output._replace(logits=logits, means=means, log_stds=log_stds)
