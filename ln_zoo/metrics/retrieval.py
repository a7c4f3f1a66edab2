"""Retrieval of images and captions (Vendrov et al. 2016, section 4.2)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from ln_zoo.utils.checks import check_at_least, check_optional

#: Function from captions (M, D) and images (N, D) to penalties (M, N); smaller is better.
Penalty = Callable[[Tensor, Tensor], Tensor]

_K = (1, 5, 10)
#: Captions ranked at a time.
_ROWS = 1024
#: Maximum penalties to store (256 MB); above, they are computed twice.
_KEPT = 2**26


class Ranks(NamedTuple):
    """Ranks of the best correct answers to Q queries, int64 (Q,)."""

    better: Tensor  #: answers with a smaller penalty than the best correct one
    tied: Tensor  #: answers with its penalty, including itself
    own: Tensor  #: correct answers among the tied

    def expected(self) -> Tensor:
        """Expected rank of the best correct answer from 0, float64 (Q,).

        Ties are in random order: the first of s correct answers among t tied ones has the mean
        position (t + 1) / (s + 1), from 1.
        """
        return self.better + (self.tied + 1.0).double() / (self.own + 1) - 1

    def recall(self, k: int) -> Tensor:
        """Probability that the rank is below k, float64 (Q,); 0 or 1 without ties."""
        missed = torch.ones(self.better.shape, dtype=torch.float64, device=self.better.device)
        for place in range(k):
            # Probability that this position has no correct answer either.
            drawn = place - self.better
            left = (self.tied - drawn).clamp(min=1)
            missed = torch.where(drawn >= 0, missed * (left - self.own).clamp(min=0) / left, missed)
        return 1 - missed


def retrieval_ranks(
    captions: Tensor, images: Tensor, penalty: Penalty, rows: int = _ROWS
) -> tuple[Ranks, Ranks]:
    """Rank N images for each caption, and C N captions for each image.

    Penalties of large sets are computed twice, ``rows`` x N at a time, to bound memory.

    Args:
        captions: (C N, D); image i has captions C i to C i + C - 1.
        images: (N, D).
        penalty: function from (M, D) and (N, D) to (M, N); smaller is better.
        rows: captions at a time.

    Returns:
        Ranks of images, C N queries, and of captions, N queries.

    Raises:
        ValueError: if captions are not C per image, ``rows`` is below 1, or penalties are NaN.

    Example:
        >>> points = torch.tensor([[0.0], [1.0], [5.0]])
        >>> of_images, of_captions = retrieval_ranks(points + 0.4, points, torch.cdist)
        >>> of_images.expected().tolist()
        [0.0, 0.0, 0.0]
    """
    each = _captions_per_image(captions, images)
    check_at_least(1, rows=rows)
    chunks = captions.split(rows)
    own = torch.arange(len(captions), device=captions.device) // each
    of_images, mine = [], []
    kept: list[Tensor] = []
    for chunk, right in zip(chunks, own.split(rows), strict=True):
        e = penalty(chunk, images)
        if bool(e.isnan().any()):
            raise ValueError("penalties are NaN: check that embeddings are finite")
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

    Each fold of ``fold_size`` consecutive images and their captions is ranked separately, as in
    Vendrov et al. for the 5,000 test images of COCO; a smaller remainder is not scored. Recalls
    decrease with the size of a fold. Further arguments and errors as `retrieval_ranks`.

    Args:
        fold_size: images per fold; None or more than N: one fold.
        folds: number of folds to score, the first ones; default: all.

    Returns:
        float64 scalars: ``image_r1``, ``image_r5``, ``image_r10``, per cent of captions with their
        image among the first 1, 5 and 10; ``image_median_rank`` (rounded down) and
        ``image_mean_rank`` from 1; ``image_sum``, the sum of the recalls; ``caption_...``, the same
        for the best caption of each image; ``recall_sum``, the sum of all recalls. Ties count as in
        random order, by expectation, so constant embeddings score as guessing.

    Example:
        >>> images = torch.eye(4)
        >>> scores = retrieval_scores(images.repeat_interleave(5, 0), images, torch.cdist)
        >>> float(scores["image_r1"]), float(scores["caption_mean_rank"])
        (100.0, 1.0)
    """
    check_optional(1, fold_size=fold_size, folds=folds)
    each, count = _captions_per_image(captions, images), len(images)
    size = count if fold_size is None else min(fold_size, count)
    scores: dict[str, list[Tensor]] = {}
    for first in range(0, count - size + 1, size)[:folds]:
        ranked = retrieval_ranks(
            captions[each * first : each * (first + size)], images[first : first + size], penalty
        )
        for name, ranks in zip(("image", "caption"), ranked, strict=True):
            for k in _K:
                scores.setdefault(f"{name}_r{k}", []).append(100 * ranks.recall(k).mean())
            expected = ranks.expected()
            # torch.median takes the lower of two middle values.
            median = expected.quantile(0.5).floor() + 1
            scores.setdefault(f"{name}_median_rank", []).append(median)
            scores.setdefault(f"{name}_mean_rank", []).append(expected.mean() + 1)
    means = {name: torch.stack(values).mean() for name, values in scores.items()}
    for name in ("image", "caption"):
        means[f"{name}_sum"] = sum((means[f"{name}_r{k}"] for k in _K), images.new_zeros(()))
    means["recall_sum"] = means["image_sum"] + means["caption_sum"]
    return {name: value.double() for name, value in means.items()}


class Retrieval(Metric):
    """`retrieval_scores` over batches and processes, with its arguments.

    It stores N (C + 1) D numbers. Images of all processes are gathered and sorted by index;
    duplicates of padding samplers count once, so scores do not depend on processes. It warns of
    constant embeddings.

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
        """Add N images (N, D) and their captions (C N, D), as in `retrieval_ranks`.

        ``index`` is the index of each image in its set, int64 (N,). ValueError if sizes do not
        match.
        """
        each = _captions_per_image(captions, images)
        if index.shape != images.shape[:1]:
            raise ValueError(
                f"index must be ({len(images)},), one per image, got {tuple(index.shape)}"
            )
        wide = torch.promote_types(images.dtype, torch.float32)
        self.captions.append(captions.detach().to(wide).view(-1, each, captions.shape[-1]))
        self.images.append(images.detach().to(wide))
        self.index.append(index)

    def compute(self) -> dict[str, Tensor]:
        """The scores; ValueError before the first update."""
        if not len(self.images):
            raise ValueError("no images to rank: call update first")
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
                    f"the embeddings of all {len(found):,} {name} are equal, so scores are those "
                    "of guessing",
                    stacklevel=2,
                )
        return retrieval_scores(
            captions.flatten(0, 1), images, self.penalty, self.fold_size, self.folds
        )


def _captions_per_image(captions: Tensor, images: Tensor) -> int:
    each, rest = divmod(len(captions), max(1, len(images)))
    if rest or not each:
        raise ValueError(
            f"captions must be C per image, got {len(captions):,} captions of "
            f"{len(images):,} images"
        )
    return each
