"""How well images and captions find each other (Vendrov et al. 2016, section 4.2)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

#: What ranks: penalties (M, N) of captions (M, D) and images (N, D), the smaller the better.
Penalty = Callable[[Tensor, Tensor], Tensor]

_K = (1, 5, 10)
#: Captions ranked at a time.
_ROWS = 1024
#: Penalties that are kept rather than computed a second time: a quarter of a gigabyte.
_KEPT = 2**26


class Ranks(NamedTuple):
    """Where the right answer to each of Q queries stands.

    Attributes:
        better: wrong answers ahead of the best of the right ones, int64 (Q,).
        tied: answers that share the penalty of that one, itself among them, int64 (Q,).
        own: how many of the tied are right answers, int64 (Q,).
    """

    better: Tensor
    tied: Tensor
    own: Tensor

    def expected(self) -> Tensor:
        """Rank from 0 of the best right answer, its mean where there are ties, float64 (Q,).

        Ties are in random order: of s right answers among t tied ones, the first is at
        (t + 1) / (s + 1) on average, counted from 1.
        """
        return self.better + (self.tied + 1.0).double() / (self.own + 1) - 1

    def recall(self, k: int) -> Tensor:
        """Probability that the rank is below k, float64 (Q,); 0 or 1 where there are no ties.

        Example:
            >>> one = torch.ones(1, dtype=torch.int64)
            >>> Ranks(0 * one, 4 * one, one).recall(1)
            tensor([0.2500], dtype=torch.float64)
        """
        missed = torch.ones(self.better.shape, dtype=torch.float64, device=self.better.device)
        for place in range(k):
            # The share of orders in which no right answer stands at this place either.
            drawn = place - self.better
            left = (self.tied - drawn).clamp(min=1)
            missed = torch.where(drawn >= 0, missed * (left - self.own).clamp(min=0) / left, missed)
        return 1 - missed


def retrieval_ranks(
    captions: Tensor, images: Tensor, penalty: Penalty, rows: int = _ROWS
) -> tuple[Ranks, Ranks]:
    """Ranks in both directions, of C captions per image.

    All N images are ranked for each caption, and all C N captions for each image, of which the
    best-placed of its C counts. Of many images the penalties are computed twice, ``rows`` x N at a
    time, so that any number of them fits into memory.

    Args:
        captions: (C N, D); those of image i are C i to C i + C - 1.
        images: (N, D).
        penalty: gives (M, N) for (M, D) and (N, D), the smaller the better.
        rows: captions at a time.

    Returns:
        Ranks of the images, (C N,) queries, and of the captions, (N,) queries.

    Raises:
        ValueError: if the number of captions is not a multiple of the number of images, for
            ``rows`` below 1, and for penalties that are NaN.

    Example:
        >>> points = torch.tensor([[0.0], [1.0], [5.0]])
        >>> of_images, of_captions = retrieval_ranks(points + 0.4, points, torch.cdist)
        >>> of_images.expected().tolist()
        [0.0, 0.0, 0.0]
    """
    each = _captions_per_image(captions, images)
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    chunks = captions.split(rows)
    own = torch.arange(len(captions), device=captions.device) // each
    of_images, mine = [], []
    kept: list[Tensor] = []
    for chunk, right in zip(chunks, own.split(rows), strict=True):
        e = penalty(chunk, images)
        if bool(e.isnan().any()):
            raise ValueError("penalties are NaN: look for embeddings that are not finite")
        if len(captions) * len(images) <= _KEPT:
            kept.append(e)
        right_one = e.gather(1, right[:, None])
        mine.append(right_one[:, 0])
        better, tied = (e < right_one).sum(1), (e == right_one).sum(1)
        of_images.append(Ranks(better, tied, torch.ones_like(tied)))
    of_own = torch.cat(mine).view(-1, each)
    bar = of_own.min(1).values
    better, tied = (torch.zeros_like(own[: len(images)]) for _ in range(2))
    for e in kept or (penalty(chunk, images) for chunk in chunks):
        better += (e < bar).sum(0)
        tied += (e == bar).sum(0)
    columns = (torch.cat(column) for column in zip(*of_images, strict=True))
    return Ranks(*columns), Ranks(better, tied, (of_own == bar[:, None]).sum(1))


def retrieval_scores(
    captions: Tensor,
    images: Tensor,
    penalty: Penalty,
    fold_size: int | None = 1000,
    folds: int | None = None,
) -> dict[str, Tensor]:
    """Recalls, median and mean ranks in both directions, averaged over folds.

    Fold k holds images ``k fold_size`` to ``(k + 1) fold_size - 1`` and their captions, which are
    ranked among themselves; so do Vendrov et al. with the 5,000 test images of COCO. Images left
    over after the last whole fold are not scored. Recalls depend on the size of a fold: among fewer
    images each is found more easily.

    Args:
        captions: (C N, D); those of image i are C i to C i + C - 1.
        images: (N, D).
        penalty: gives (M, N) for (M, D) and (N, D), the smaller the better.
        fold_size: images of a fold; ``None``, or more than there are: all in one.
        folds: how many of the first folds; default: all.

    Returns:
        float64 scalars: ``image_r1``, ``image_r5``, ``image_r10``, the share of captions in per
        cent whose image is among the first 1, 5 and 10; ``image_median_rank``, rounded down, and
        ``image_mean_rank``, both from 1; ``image_sum``, the three recalls added up; the same as
        ``caption_...`` for images, of which the best-placed caption counts; ``recall_sum``, all
        six. Where penalties are equal the order is taken as random, and recalls and mean ranks
        are their expectations: embeddings that are all the same score as guessing does.

    Raises:
        ValueError: as `retrieval_ranks`; for a ``fold_size`` or ``folds`` below 1.

    Example:
        >>> images = torch.eye(4)
        >>> scores = retrieval_scores(images.repeat_interleave(5, 0), images, torch.cdist)
        >>> float(scores["image_r1"]), float(scores["caption_mean_rank"])
        (100.0, 1.0)
    """
    each, count = _captions_per_image(captions, images), len(images)
    size = count if fold_size is None else min(fold_size, count)
    for name, number in (("fold_size", size), ("folds", 1 if folds is None else folds)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    scores: dict[str, list[Tensor]] = {}
    for first in range(0, count - size + 1, size)[:folds]:
        ranked = retrieval_ranks(
            captions[each * first : each * (first + size)], images[first : first + size], penalty
        )
        for name, ranks in zip(("image", "caption"), ranked, strict=True):
            for k in _K:
                scores.setdefault(f"{name}_r{k}", []).append(100 * ranks.recall(k).mean())
            expected = ranks.expected()
            # torch's own takes the lower of the two in the middle.
            median = expected.quantile(0.5).floor() + 1
            scores.setdefault(f"{name}_median_rank", []).append(median)
            scores.setdefault(f"{name}_mean_rank", []).append(expected.mean() + 1)
    means = {name: torch.stack(values).mean() for name, values in scores.items()}
    for name in ("image", "caption"):
        means[f"{name}_sum"] = sum((means[f"{name}_r{k}"] for k in _K), images.new_zeros(()))
    means["recall_sum"] = means["image_sum"] + means["caption_sum"]
    return {name: value.double() for name, value in means.items()}


class Retrieval(Metric):
    """`retrieval_scores` of a whole set, over batches and processes.

    It keeps the embeddings, N (C + 1) D numbers. With several processes all images are gathered
    and put in the order of their indices; one that was scored twice, as samplers repeat some to
    make shares equal, counts once. So the scores are those of one process.

    Embeddings that are all the same are told of by a warning: their scores are those of guessing.

    Args:
        penalty: gives (M, N) for (M, D) and (N, D), the smaller the better.
        fold_size: images of a fold; ``None``: all in one.
        folds: how many of the first folds; default: all.

    Example:
        >>> metric = Retrieval(torch.cdist)
        >>> images = torch.randn(6, 3)
        >>> for part in torch.arange(6).split(4):
        ...     metric.update(images[part].repeat_interleave(5, 0), images[part], part)
        >>> float(metric.compute()["image_r1"])
        100.0
    """

    full_state_update = False
    captions: list[Tensor]
    images: list[Tensor]
    index: list[Tensor]

    def __init__(
        self,
        penalty: Penalty,
        fold_size: int | None = 1000,
        folds: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.penalty = penalty
        self.fold_size = fold_size
        self.folds = folds
        for name in ("captions", "images", "index"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, captions: Tensor, images: Tensor, index: Tensor) -> None:
        """Adds N images and their captions.

        Args:
            captions: (C N, D); those of image i are C i to C i + C - 1.
            images: (N, D).
            index: the number of each image in its set, int64 (N,).

        Raises:
            ValueError: if the counts do not fit.
        """
        each = _captions_per_image(captions, images)
        if index.shape != images.shape[:1]:
            raise ValueError(
                f"index must number {len(images)} images, got a tensor {tuple(index.shape)}"
            )
        wide = torch.promote_types(images.dtype, torch.float32)
        self.captions.append(captions.detach().to(wide).view(-1, each, captions.shape[-1]))
        self.images.append(images.detach().to(wide))
        self.index.append(index)

    def compute(self) -> dict[str, Tensor]:
        """The scores so far.

        Raises:
            ValueError: before the first update.
        """
        if not len(self.images):
            raise ValueError("there are no images to rank: call update first")
        captions, images, index = (
            dim_zero_cat(state) for state in (self.captions, self.images, self.index)
        )
        different, place = index.unique(return_inverse=True)
        one = torch.empty_like(different)
        one[place] = torch.arange(len(index), device=index.device)
        captions, images = captions[one], images[one]
        for name, found in (("captions", captions.flatten(0, 1)), ("images", images)):
            if len(found) > 1 and bool((found == found[0]).all()):
                warnings.warn(
                    f"the embeddings of all {len(found):,} {name} are the same: the scores are "
                    "those of guessing",
                    stacklevel=2,
                )
        return retrieval_scores(
            captions.flatten(0, 1), images, self.penalty, self.fold_size, self.folds
        )


def _captions_per_image(captions: Tensor, images: Tensor) -> int:
    each, rest = divmod(len(captions), max(1, len(images)))
    if rest or not each:
        raise ValueError(
            f"captions must be C for each image, got {len(captions):,} captions of "
            f"{len(images):,} images"
        )
    return each
