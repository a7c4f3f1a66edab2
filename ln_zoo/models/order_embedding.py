"""Order embeddings of images and captions (Vendrov et al. 2016; paper, section 6.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn import init
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from ln_zoo.layers import GRU, orthogonal_
from ln_zoo.metrics import Retrieval
from ln_zoo.models.arguments import check_vocabulary
from ln_zoo.models.base import ZooModule
from ln_zoo.models.legacy_adam import AdamBiasCorrection, adam
from ln_zoo.models.order_penalty import order_violation
from ln_zoo.norms import LayerNorm, Norm, from_config
from ln_zoo.utils.checks import (
    check_at_least,
    check_choice,
    check_optional,
    check_positive,
    check_probability,
)
from ln_zoo.utils.files import UserFile
from ln_zoo.utils.vocabulary import EOS, UNK, Vocabulary

Measure = Literal["order", "reversed", "cosine"]
PenaltyPower = Literal["squared", "root"]
Negatives = Literal["sum", "hardest"]
LossReduction = Literal["sum", "mean"]
ClipMode = Literal["per_tensor", "global", "none"]

#: By the measure: 0.05 for order embeddings, 0.2 for the symmetric similarity.
_MARGINS = {"order": 0.05, "reversed": 0.05, "cosine": 0.2}
_IMAGE_FEATURES = 4096


class OrderEmbedding(ZooModule):
    r"""Embed captions and images in one partially ordered space, captions above their images.

    A GRU reads the words of a caption and its end; image features are mapped by a matrix. Both
    become nonnegative unit vectors, s and v in R^D. A caption is more abstract than an image if
    none of its coordinates is larger. The penalty (Vendrov et al. 2016, eq. 2) measures the
    violation:

    .. math:: E(s, v) = \sum_k \max(0, s_k - v_k)^2

    Training sums hinges with a margin: E of each pair should be below E of the caption with every
    other image of the batch, and of the image with every other caption (eq. 4). The norm acts
    in the GRU (paper, eq. 26-28), not on embeddings.

    Evaluation ranks all images for each caption and all captions for each image
    (`ln_zoo.metrics.Retrieval`): ``image_r1``, ``image_r5``, ``image_r10``, their sum
    ``image_sum``, ``image_median_rank``, ``image_mean_rank``, the same with ``caption_``, and
    ``recall_sum``. The sources select weights by ``val_image_sum``.

    Defaults follow the code behind the paper's numbers, except for Adam (its Adam is
    ``adam_bias_correction="legacy"``) and the GRU's biases, which are torch's: one at the input and
    one at the state, both after normalisation. The code has one more inside the norm
    (``prenorm_bias``), and without normalisation none at the state.

    A batch is a tuple: features (N, I); captions (C N, T), word indices with an end each; lengths
    (C N,), including the end; the index of each image in its set, (N,). Rows C i to C i + C - 1 are
    captions of image i. In training C is 1.

    Args:
        vocabulary: the known words, or a file with one per line; other words share one unknown
            token. Default: no known words.
        image_features: features I of an image; default: 4,096, of VGG-19.
        embedding_features: size of a word's vector.
        hidden_size: size D of the state and of the space.
        norm: the normalisation, or its ``class_path``/``init_args`` dict; default `LayerNorm`.
        prenorm_bias: add a bias inside the norm of the GRU's input.
        measure: ``"order"``; ``"reversed"``, which puts images above captions; or ``"cosine"``, the
            symmetric similarity, E = -s v.
        penalty: ``"squared"``, E as above, or ``"root"``, the distance.
        absolute: make coordinates positive; default: except for ``"cosine"``.
        margin: margin of the hinges; default: 0.05, and 0.2 for ``"cosine"``.
        negatives: ``"sum"`` over all others of the batch, or the ``"hardest"`` one.
        loss_reduction: ``"sum"`` over the pairs of a batch, or ``"mean"``. As gradients are
            clipped, this changes training. Each process takes negatives from its own batch; the sum
            is over all their batches.
        word_dropout: probability of replacing a word by the unknown token in training, which trains
            its vector.
        lr: learning rate.
        adam_bias_correction: ``"standard"``, or ``"legacy"`` as in the sources' code; see
            `ln_zoo.models.legacy_adam.LegacyAdam`.
        clip: ``"per_tensor"`` clips the gradient norm of each tensor (the GRU's gates and candidate
            are separate tensors), ``"global"`` the norm of all parameters together, ``"none"``
            disables clipping. The trainer's ``gradient_clip_val`` overrides it.
        clip_norm: the largest gradient norm allowed by ``clip``; default 2.
        fold_size: images that are ranked together; ``None``: all. Recalls depend on it.
        folds: number of folds to score, from the first; ``None``: all.

    Raises:
        ValueError: for features of another size, and data with another vocabulary.
        OSError: if a vocabulary file cannot be read.

    Example:
        >>> model = OrderEmbedding(["a", "cat", "dog"], image_features=8, hidden_size=16)
        >>> captions, lengths = model.encode_words([["a", "dog"], ["a", "black", "cat"]])
        >>> s, v = model.embed_captions(captions, lengths), model.embed_images(torch.rand(3, 8))
        >>> model.penalties(s, v).shape
        torch.Size([2, 3])
    """

    input_kinds = ("captioned images",)
    pipeline_tag = "feature-extraction"
    val_retrieval: Retrieval
    test_retrieval: Retrieval

    @classmethod
    def card_example(cls, preprocessing: Mapping[str, Any]) -> str:
        return (
            'captions = model.encode_words(["a dog runs".split(), "two men on a boat".split()])\n'
            "images = torch.rand(3, model.image_features)  # your features go here\n"
            "images /= images.norm(dim=1, keepdim=True)\n"
            "with torch.no_grad():\n"
            "    e = model.penalties(model.embed_captions(*captions), model.embed_images(images))\n"
            "print(e.argsort(1))  # for each caption the images, the nearest first\n"
        )

    def __init__(
        self,
        vocabulary: list[str] | UserFile | None = None,
        image_features: int | None = None,
        embedding_features: int = 300,
        hidden_size: int = 1024,
        norm: Norm | None = None,
        prenorm_bias: bool = False,
        measure: Measure = "order",
        penalty: PenaltyPower = "squared",
        absolute: bool | None = None,
        margin: float | None = None,
        negatives: Negatives = "sum",
        loss_reduction: LossReduction = "sum",
        word_dropout: float = 0.0,
        lr: float = 1e-3,
        adam_bias_correction: AdamBiasCorrection = "standard",
        clip: ClipMode = "per_tensor",
        clip_norm: float = 2.0,
        fold_size: int | None = 1000,
        folds: int | None = None,
    ) -> None:
        super().__init__()
        norm = LayerNorm() if norm is None else from_config(norm)
        check_choice("measure", measure, get_args(Measure))
        check_choice("penalty", penalty, get_args(PenaltyPower))
        check_optional(1, fold_size=fold_size, folds=folds)
        self.vocabulary = Vocabulary.of([] if vocabulary is None else vocabulary)
        self.image_features = _IMAGE_FEATURES if image_features is None else image_features
        self.embedding_features, self.hidden_size = embedding_features, hidden_size
        self.absolute = measure != "cosine" if absolute is None else absolute
        self.margin = _MARGINS[measure] if margin is None else margin
        self.negatives, self.loss_reduction = negatives, loss_reduction
        self.prenorm_bias, self.word_dropout = prenorm_bias, word_dropout
        self.lr, self.adam_bias_correction = lr, adam_bias_correction
        self.clip, self.clip_norm = clip, clip_norm
        self._check_arguments()
        self.save_hyperparameters()
        chosen = {name: getattr(self, name) for name in ("image_features", "absolute", "margin")}
        self.resolve_hyperparameters(norm, vocabulary=list(self.vocabulary), **chosen)
        self.penalties = partial(_penalties, measure=measure, root=penalty == "root")
        self.words = nn.Embedding(self.vocabulary.size, embedding_features)
        inputs = embedding_features + prenorm_bias
        self.recurrent = GRU(inputs, hidden_size, batch_first=True, norm=norm)
        self.image_map = nn.Linear(self.image_features, hidden_size)
        for stage in ("val", "test"):
            setattr(self, f"{stage}_retrieval", Retrieval(self.penalties, fold_size, folds))
        self.reset_parameters()

    def _check_arguments(self) -> None:
        check_at_least(1, image_features=self.image_features, hidden_size=self.hidden_size)
        check_at_least(1, embedding_features=self.embedding_features)
        check_choice("negatives", self.negatives, get_args(Negatives))
        check_choice("loss_reduction", self.loss_reduction, get_args(LossReduction))
        check_choice(
            "adam_bias_correction", self.adam_bias_correction, get_args(AdamBiasCorrection)
        )
        check_choice("clip", self.clip, get_args(ClipMode))
        check_positive(margin=self.margin, lr=self.lr, clip_norm=self.clip_norm)
        check_probability(word_dropout=self.word_dropout)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Re-initialise weights, as the sources' code does, and the norm."""
        self.recurrent.reset_parameters()
        w_ih, w_hh, *biases = (
            self.recurrent.get_parameter(f"{name}_l0")
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        init.uniform_(self.words.weight, -0.1, 0.1)
        init.uniform_(w_ih, -0.1, 0.1)
        blocks = list(w_hh.split(self.hidden_size))
        if self.embedding_features == self.hidden_size:
            blocks += w_ih[:, : self.hidden_size].split(self.hidden_size)
        for block in blocks:
            orthogonal_(block)
        for bias in biases:
            init.zeros_(bias)
        if self.prenorm_bias:
            init.zeros_(w_ih[:, -1])
        self.recurrent.reset_norm()
        init.xavier_uniform_(self.image_map.weight)
        init.zeros_(self.image_map.bias)

    # The network

    def encode_words(self, captions: list[list[str]]) -> tuple[Tensor, Tensor]:
        """Word indices (M, T) of captions, each padded with at least one `EOS`, and lengths (M,).

        Words are in lower case and without punctuation.
        """
        if not captions:
            raise ValueError("there are no captions to read: give at least one list of words")
        ended = [torch.tensor([*self.vocabulary.numbers(words), EOS]) for words in captions]
        lengths = torch.tensor([len(caption) for caption in ended])
        return pad_sequence(ended, True, EOS).to(self.device), lengths.to(self.device)

    def embed_captions(self, captions: Tensor, lengths: Tensor) -> Tensor:
        """Unit vectors s, (M, D), float32 or wider, of word indices (M, T) and lengths (M,), int64.

        Lengths include the final `EOS`.
        """
        if self.training and self.word_dropout:
            drop = torch.rand(captions.shape, device=captions.device) < self.word_dropout
            captions = captions.masked_fill(drop & (captions != EOS), UNK)
        words = self._inputs(captions)
        packed = pack_padded_sequence(words, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, h = self.recurrent(packed)
        return self._unit(h[0])

    def _inputs(self, captions: Tensor) -> Tensor:
        words: Tensor = self.words(captions)
        return F.pad(words, (0, 1), value=1.0) if self.prenorm_bias else words

    def embed_images(self, images: Tensor) -> Tensor:
        """Unit vectors v, (N, D), float32 or wider, of image features of unit length, (N, I)."""
        if images.shape[-1] != self.image_features:
            raise ValueError(
                f"this model reads {self.image_features:,} features per image, got "
                f"{tuple(images.shape)}: take features of the same network, or set image_features"
            )
        return self._unit(self.image_map(images.to(self.image_map.weight.dtype)))

    def _unit(self, points: Tensor) -> Tensor:
        with torch.autocast(points.device.type, enabled=False):
            wide = points.to(torch.promote_types(points.dtype, torch.float32))
            unit = F.normalize(wide, dim=-1)
            return unit.abs() if self.absolute else unit

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Unit vectors of the captions, (C N, D), and of the images, (N, D), of a batch."""
        images, captions, lengths, _ = batch
        return self.embed_captions(captions, lengths), self.embed_images(images)

    # Training

    def loss(self, captions: Tensor, images: Tensor) -> Tensor:
        """Hinge loss of B pairs, unit vectors (B, D) each; a pair is a negative of all others."""
        if len(captions) != len(images):
            raise ValueError(
                f"training takes one caption per image, got {len(captions)} captions of "
                f"{len(images)} images"
            )
        e = self.penalties(captions, images)
        own = e.diagonal()
        itself = torch.eye(len(e), dtype=torch.bool, device=e.device)
        wrong_images, wrong_captions = (
            (self.margin + right - e).clamp(min=0).masked_fill(itself, 0.0)
            for right in (own.unsqueeze(1), own)
        )
        if self.negatives == "hardest":
            total = wrong_images.amax(1).sum() + wrong_captions.amax(0).sum()
        else:
            total = wrong_images.sum() + wrong_captions.sum()
        return total if self.loss_reduction == "sum" else total / len(e)

    def setup(self, stage: str) -> None:
        check_vocabulary(self.vocabulary, self.trainer)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        captions, images = self(batch)
        loss = self.loss(captions, images)
        self.log("train_loss", loss.detach(), prog_bar=True, batch_size=len(images))
        if self.loss_reduction == "mean":
            return loss
        # Several processes average their gradients.
        return loss * self.trainer.world_size

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if gradient_clip_val is None and self.clip == "per_tensor":
            for gradient in self._gradients():
                # Not torch's clip_grad_norm_, which adds an eps to the norm.
                gradient.mul_((self.clip_norm / gradient.norm()).clamp(max=1))
            return
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def default_clipping(self) -> tuple[float | None, str | None]:
        return (self.clip_norm, "norm") if self.clip == "global" else (None, None)

    def _gradients(self) -> Iterator[Tensor]:
        """Gradients split into the separate tensors of the sources' code."""
        size = self.hidden_size
        for name, parameter in self.named_parameters():
            if parameter.grad is None:
                continue
            if not name.startswith("recurrent.") or len(parameter) != 3 * size:
                yield parameter.grad
                continue
            for part in parameter.grad.split([2 * size, size]):
                if self.prenorm_bias and name == "recurrent.weight_ih_l0":
                    yield from part.split([self.embedding_features, 1], dim=1)
                else:
                    yield part

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return adam(self, self.lr, self.adam_bias_correction)

    # Evaluation

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        captions, images = self(batch)
        self.val_retrieval.update(captions, images, batch[3])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        captions, images = self(batch)
        self.test_retrieval.update(captions, images, batch[3])

    def on_validation_epoch_end(self) -> None:
        self._log_scores("val", self.val_retrieval)

    def on_test_epoch_end(self) -> None:
        self._log_scores("test", self.test_retrieval)

    def _log_scores(self, stage: str, metric: Retrieval) -> None:
        for name, value in metric.compute().items():
            shown = stage == "val" and name == "image_sum"
            # All processes have the same value; `sync_dist` avoids Lightning's warning.
            self.log(f"{stage}_{name}", value, prog_bar=shown, batch_size=1, sync_dist=True)
        metric.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """E of each image with each of its captions, (N, C)."""
        captions, images = self(batch)
        own = captions.view(len(images), -1, captions.shape[-1])
        pairs = zip(own, images.unsqueeze(1), strict=True)
        return {"penalty": torch.cat([self.penalties(*pair).T for pair in pairs])}


def _penalties(captions: Tensor, images: Tensor, measure: Measure, root: bool) -> Tensor:
    """E of M captions (M, D) with N images (N, D), (M, N)."""
    if measure == "cosine":
        return -captions @ images.T
    if measure == "order":
        violation = order_violation(captions, images)
    else:
        violation = order_violation(images, captions).T
    # The root has no finite gradient at 0.
    tiny = torch.finfo(violation.dtype).tiny
    return violation.clamp(min=tiny).sqrt() if root else violation
