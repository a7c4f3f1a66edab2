"""Retrieval ranks against slow loops and against all orders of ties, folds, processes, copies."""

from __future__ import annotations

import itertools
import pickle
import statistics
from collections.abc import Iterator

import pytest
import torch
from refusals import refuses
from torch import Tensor

from ln_zoo.metrics import Retrieval, retrieval_ranks, retrieval_scores


def embeddings(images: int, each: int = 5, size: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Captions near their images, so that ranks are neither all 0 nor those of guessing."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(images, size, generator=generator)
    noise = torch.randn(images * each, size, generator=generator)
    return points.repeat_interleave(each, 0) + noise, points


def whole_numbers(images: int, each: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points on a small grid: there are many ties."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 3, (images * each, 2), generator=generator).float(),
        torch.randint(0, 3, (images, 2), generator=generator).float(),
    )


def squares(captions: Tensor, images: Tensor) -> Tensor:
    """Exact for whole numbers, whatever the order of the additions."""
    return (captions[:, None] - images).square().sum(-1)


def queries(captions: Tensor, images: Tensor) -> Iterator[tuple[str, list[float], set[int]]]:
    """The direction, penalties of all answers, and which answers are right, in plain numbers."""
    each = len(captions) // len(images)
    e = squares(captions, images).tolist()
    for i, row in enumerate(e):
        yield "image", row, {i // each}
    for j in range(len(images)):
        yield "caption", [row[j] for row in e], set(range(each * j, each * j + each))


def slow_ranks(captions: Tensor, images: Tensor) -> dict[str, list[int]]:
    """Without ties: sorts, and looks for the first right answer."""
    found: dict[str, list[int]] = {"image": [], "caption": []}
    for direction, penalties, right in queries(captions, images):
        order = sorted(range(len(penalties)), key=penalties.__getitem__)
        found[direction].append(min(order.index(answer) for answer in right))
    return found


def over_all_orders(penalties: list[float], right: set[int]) -> list[int]:
    """The rank under each order of the answers that a stable sort could have met."""
    found = []
    best = min(penalties[answer] for answer in right)
    tied = [answer for answer, e in enumerate(penalties) if e == best]
    ahead = sum(e < best for e in penalties)
    for order in itertools.permutations(tied):
        found.append(ahead + min(place for place, answer in enumerate(order) if answer in right))
    return found


@pytest.mark.parametrize("rows", [1, 7, 1024])
def test_ranks_are_those_of_a_sort(rows: int) -> None:
    captions, images = embeddings(23)
    slow = slow_ranks(captions, images)
    found = retrieval_ranks(captions, images, squares, rows)
    for expected, ranks in zip(slow.values(), found, strict=True):
        assert ranks.expected().tolist() == expected
        for k in (1, 5, 10):
            assert ranks.recall(k).tolist() == [float(rank < k) for rank in expected]
    assert 0 < statistics.mean(slow["image"]) < 10


@pytest.mark.parametrize("seed", range(4))
def test_ties_are_in_random_order(seed: int) -> None:
    """Recalls and mean ranks are the means over all orders of the tied answers."""
    captions, images = whole_numbers(5, 2, seed)
    of_images, of_captions = retrieval_ranks(captions, images, squares)
    orders = [over_all_orders(e, right) for _, e, right in queries(captions, images)]
    found = torch.cat([of_images.expected(), of_captions.expected()]).tolist()
    assert found == pytest.approx([statistics.mean(ranks) for ranks in orders])
    for k in (1, 2, 5):
        shares = [statistics.mean(float(rank < k) for rank in ranks) for ranks in orders]
        found = torch.cat([of_images.recall(k), of_captions.recall(k)]).tolist()
        assert found == pytest.approx(shares)
    assert sum(len(ranks) > 1 for ranks in orders) > 5


def test_many_images_and_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where penalties are computed twice in place of being kept."""
    captions, images = embeddings(30)
    kept = retrieval_scores(captions, images, squares)
    monkeypatch.setattr("ln_zoo.metrics.retrieval._KEPT", 0)
    assert retrieval_scores(captions, images, squares) == kept
    captions, images = embeddings(9)
    metric = Retrieval(squares)
    metric.update(captions.bfloat16(), images.bfloat16(), torch.arange(9))
    rounded = retrieval_scores(captions.bfloat16().float(), images.bfloat16().float(), squares)
    assert metric.compute() == rounded


def test_scores_by_their_definitions() -> None:
    captions, images = embeddings(40, each=3)
    scores = {k: v.item() for k, v in retrieval_scores(captions, images, squares).items()}
    expected = {}
    for direction, ranks in slow_ranks(captions, images).items():
        recalls = [100 * statistics.mean(float(rank < k) for rank in ranks) for k in (1, 5, 10)]
        expected |= {f"{direction}_r{k}": r for k, r in zip((1, 5, 10), recalls, strict=True)}
        expected[f"{direction}_median_rank"] = int(statistics.median(ranks)) + 1
        expected[f"{direction}_mean_rank"] = statistics.mean(ranks) + 1
        expected[f"{direction}_sum"] = sum(recalls)
    expected["recall_sum"] = expected["image_sum"] + expected["caption_sum"]
    assert scores == pytest.approx(expected, rel=1e-12)


def test_folds_are_ranked_among_themselves() -> None:
    captions, images = embeddings(25)
    scores = retrieval_scores(captions, images, squares, fold_size=10)
    parts = ((captions[5 * i : 5 * i + 50], images[i : i + 10]) for i in (0, 10))
    alone = [retrieval_scores(*part, squares) for part in parts]
    for name, value in scores.items():
        assert value.item() == pytest.approx((alone[0][name] + alone[1][name]).item() / 2)
    assert retrieval_scores(captions, images, squares, fold_size=10, folds=1) == alone[0]
    whole = retrieval_scores(captions, images, squares, fold_size=None)
    assert whole == retrieval_scores(captions, images, squares, fold_size=1000)
    assert whole["image_r1"] < scores["image_r1"]


def test_collapsed_embeddings_score_as_guessing_does() -> None:
    metric = Retrieval(squares)
    metric.update(torch.ones(100, 3), torch.ones(20, 3), torch.arange(20))
    with pytest.warns(UserWarning, match="all 100 captions") as told:
        scores = {k: v.item() for k, v in metric.compute().items()}
    assert any("all 20 images" in str(each.message) for each in told)
    assert [scores[f"image_r{k}"] for k in (1, 5, 10)] == pytest.approx([5, 25, 50])
    assert scores["image_mean_rank"] == pytest.approx(10.5)
    assert scores["image_median_rank"] == 10
    # The first of 5 among 100 in random order.
    assert scores["caption_r1"] == pytest.approx(5)
    assert scores["caption_mean_rank"] == pytest.approx(101 / 6)


def filled(order: Tensor, batch: int = 4) -> Retrieval:
    captions, images = embeddings(13)
    grouped = captions.view(13, 5, -1)
    metric = Retrieval(squares, fold_size=6)
    for part in order.split(batch):
        metric.update(grouped[part].flatten(0, 1), images[part], part)
    return metric


def test_batches_and_their_order_do_not_matter() -> None:
    captions, images = embeddings(13)
    expected = retrieval_scores(captions, images, squares, fold_size=6)
    for seed in range(3):
        order = torch.randperm(13, generator=torch.Generator().manual_seed(seed))
        assert filled(order, batch=5).compute() == expected
    # An image that a sampler repeats counts once.
    order = torch.cat([torch.arange(13), torch.tensor([0, 1, 2])])
    assert filled(order).compute() == filled(torch.arange(13)).compute()


def test_processes_add_up() -> None:
    """Two processes with shares of different sizes, the second of which repeats an image."""
    shares = [filled(torch.arange(0, 13, 2)), filled(torch.tensor([1, 3, 5, 7, 9, 11, 0]))]
    first, second = shares
    others = [torch.cat(getattr(second, name)) for name in ("captions", "images", "index")]
    first.dist_sync_fn = lambda a, group: [a, others.pop(0)]
    first.distributed_available_fn = lambda: True
    assert first.compute() == filled(torch.arange(13)).compute()
    assert not others


def test_copies_and_reset() -> None:
    metric = filled(torch.arange(13))
    scores = metric.compute()
    metric.reset()
    told = pytest.warns(UserWarning, match="before the ``update`` method")
    with told, pytest.raises(ValueError, match="update"):
        metric.compute()
    again = pickle.loads(pickle.dumps(filled(torch.arange(13))))
    assert again.compute() == scores
    assert scores["image_r1"].dtype == torch.float64


def test_wrong_input_is_told() -> None:
    captions, images = embeddings(4)
    refuses(r"captions .*19 .*4", retrieval_ranks, captions[:19], images, squares)
    refuses(r"captions .*0 .*4", Retrieval(squares).update, captions[:0], images, torch.arange(4))
    refuses(r"index .*\(4,\).*\(3,\)", Retrieval(squares).update, captions, images, torch.arange(3))
    captions[7] = float("nan")
    refuses("penalties are NaN", retrieval_ranks, captions, images, squares)
    for options in ({"fold_size": 0}, {"folds": 0}):
        refuses(rf"{next(iter(options))} .*0", retrieval_scores, *embeddings(4), squares, **options)
    refuses(r"rows .*0", retrieval_ranks, *embeddings(4), squares, rows=0)
