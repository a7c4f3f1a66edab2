"""Order embeddings against their equations in plain numbers, and the sources' code in the rest."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_results import randomised
from reference import read, run
from refusals import refuses
from torch import Tensor
from training import quiet_trainer

from ln_zoo.data import SyntheticScenes
from ln_zoo.models import OrderEmbedding, order_penalty
from ln_zoo.models.order_penalty import order_violation
from ln_zoo.norms import Identity, LayerNorm, Norm
from ln_zoo.utils.vocabulary import EOS, UNK

WORDS = ["a", "dog", "cat", "black", "sleeps"]
CAPTIONS = [["a", "dog"], ["a", "black", "cat", "sleeps"], ["cat"]]
F64 = torch.float64


def small(**arguments: Any) -> OrderEmbedding:
    torch.manual_seed(0)
    sizes = {"image_features": 6, "embedding_features": 4, "hidden_size": 5}
    return OrderEmbedding(**{"vocabulary": WORDS} | sizes | arguments)


def images(count: int = 3, dtype: torch.dtype = F64) -> Tensor:
    drawn = torch.rand(count, 6, generator=torch.Generator().manual_seed(1), dtype=F64)
    return (drawn / drawn.norm(dim=1, keepdim=True)).to(dtype)


def slow_state(model: OrderEmbedding, words: list[str]) -> Tensor:
    """Eq. 26-28 step by step; z and 1 - z in the places of the code and of torch."""
    x = model.words.weight[torch.tensor([*model.vocabulary.numbers(words), EOS])]
    if model.prenorm_bias:
        x = torch.cat([x, x.new_ones(len(x), 1)], 1)
    _, h, _ = run(read("GRU", model.recurrent, "l0"), [x], x.new_zeros(1, model.hidden_size))
    return h[0]


@pytest.mark.parametrize("prenorm_bias", [False, True])
@pytest.mark.parametrize("norm", [LayerNorm(), Identity()], ids=str)
def test_embeddings_are_the_equations(norm: Norm, prenorm_bias: bool) -> None:
    model = randomised(small(norm=norm, prenorm_bias=prenorm_bias).double()).eval()
    captions = model.embed_captions(*model.encode_words(CAPTIONS))
    for row, words in zip(captions, CAPTIONS, strict=True):
        h = slow_state(model, words)
        torch.testing.assert_close(row, h.abs() / h.norm(), rtol=1e-9, atol=1e-11)
    mapped = images() @ model.image_map.weight.T + model.image_map.bias
    expected = (mapped / mapped.norm(dim=1, keepdim=True)).abs()
    torch.testing.assert_close(model.embed_images(images()), expected, rtol=1e-12, atol=0)


def slow_penalty(s: list[float], v: list[float], measure: str, root: bool) -> float:
    if measure == "cosine":
        return -sum(a * b for a, b in zip(s, v, strict=True))
    if measure == "reversed":
        s, v = v, s
    e = sum(max(0.0, a - b) ** 2 for a, b in zip(s, v, strict=True))
    return math.sqrt(e) if root else e


def slow_loss(
    s: Tensor, v: Tensor, measure: str, root: bool, margin: float, negatives: str, reduction: str
) -> float:
    e = [[slow_penalty(a, b, measure, root) for b in v.tolist()] for a in s.tolist()]
    others = range(len(e))
    total = 0.0
    for i in others:
        wrong_images = [max(0.0, margin + e[i][i] - e[i][j]) for j in others if j != i]
        wrong_captions = [max(0.0, margin + e[i][i] - e[j][i]) for j in others if j != i]
        for hinges in (wrong_images, wrong_captions):
            total += sum(hinges) if negatives == "sum" else max(hinges)
    return total / len(e) if reduction == "mean" else total


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("negatives", ["sum", "hardest"])
@pytest.mark.parametrize("penalty", ["squared", "root"])
@pytest.mark.parametrize("measure", ["order", "reversed", "cosine"])
def test_the_loss_is_the_hinges(measure: str, penalty: str, negatives: str, reduction: str) -> None:
    options = {"measure": measure, "penalty": penalty, "negatives": negatives, "margin": 0.3}
    model = randomised(small(**options, loss_reduction=reduction).double())
    s = model.embed_captions(*model.encode_words(CAPTIONS))
    v = model.embed_images(images())
    expected = slow_loss(s, v, measure, penalty == "root", 0.3, negatives, reduction)
    loss = model.loss(s, v)
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    assert expected > 0
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_defaults_follow_the_measure() -> None:
    assert (small().margin, small().absolute) == (0.05, True)
    cosine = small(measure="cosine").double()
    assert (cosine.margin, cosine.absolute) == (0.2, False)
    assert cosine.hparams["margin"] == 0.2
    assert (randomised(cosine).embed_images(images(9)) < 0).any()
    assert (randomised(small().double()).embed_images(images(9)) >= 0).all()


def test_the_root_has_a_gradient_where_nothing_is_violated() -> None:
    model = small(penalty="root")
    same = torch.rand(3, 5, requires_grad=True)
    model.penalties(same, same).sum().backward()
    assert same.grad.isfinite().all()
    same = torch.rand(3, 4, requires_grad=True)
    violation = order_violation(same, same)
    assert torch.equal(violation.diagonal(), torch.zeros(3))
    (gradient,) = torch.autograd.grad(violation.diagonal().sum(), same)
    assert torch.equal(gradient, torch.zeros(3, 4))


@pytest.mark.parametrize("norm", [LayerNorm(), Identity()], ids=str)
def test_what_fills_a_row_is_not_read(norm: Norm) -> None:
    model = randomised(small(norm=norm).double()).eval()
    captions, lengths = model.encode_words(CAPTIONS)
    together = model.embed_captions(captions, lengths)
    filled = torch.nn.functional.pad(captions, (0, 3), value=4)
    torch.testing.assert_close(model.embed_captions(filled, lengths), together, rtol=0, atol=0)
    for row, words in zip(together, CAPTIONS, strict=True):
        alone = model.embed_captions(*model.encode_words([words]))[0]
        torch.testing.assert_close(row, alone, rtol=1e-12, atol=1e-13)


def test_words_have_numbers_and_are_dropped_in_training_alone() -> None:
    model = small(word_dropout=0.5)
    captions, lengths = model.encode_words([["dog"] * 400])
    seen = []
    model.words.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.embed_captions(captions, lengths)
    model.eval().embed_captions(captions, lengths)
    assert 140 < (seen[0] == UNK).sum() < 260
    assert seen[0][0, -1] == EOS
    assert torch.equal(seen[1], captions)
    captions, lengths = small().encode_words([["a", "unicorn"], [], ["sleeps"]])
    assert captions.tolist() == [[2, UNK, EOS], [EOS, EOS, EOS], [6, EOS, EOS]]
    assert lengths.tolist() == [3, 1, 2]
    refuses("captions", small().encode_words, [])


def test_weights_start_as_in_the_sources_code() -> None:
    torch.manual_seed(0)
    model = OrderEmbedding([f"w{i}" for i in range(500)], hidden_size=64, image_features=200)
    gru = model.recurrent
    for weight, bound in (
        (model.words.weight, 0.1),
        (gru.weight_ih_l0, 0.1),
        (model.image_map.weight, math.sqrt(6 / 264)),
    ):
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    for block in gru.weight_hh_l0.split(64):
        torch.testing.assert_close(block @ block.T, torch.eye(64), rtol=0, atol=1e-5)
    assert not any(b.any() for b in (gru.bias_ih_l0, gru.bias_hh_l0, model.image_map.bias))
    assert (gru.sites["l0"]["input"].gain == 1).all()
    square = OrderEmbedding(WORDS, embedding_features=16, hidden_size=16, prenorm_bias=True)
    for block in square.recurrent.weight_ih_l0.split(16):
        weight, bias = block.split([16, 1], 1)
        torch.testing.assert_close(weight @ weight.T, torch.eye(16), rtol=0, atol=1e-5)
        assert not bias.any()


def gradients(model: OrderEmbedding, size: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.grad = size * torch.randn(p.shape, generator=generator)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 1e3])
def test_each_tensor_of_the_source_is_clipped_by_itself(size: float) -> None:
    """Gates and candidate have weights of their own there, which torch puts into one."""
    model = small(prenorm_bias=True)
    before = gradients(model, size)
    model.configure_gradient_clipping(model.configure_optimizers())  # type: ignore[arg-type]
    for name, p in model.named_parameters():
        rows = [10, 5] if name.startswith("recurrent.") else [len(p)]
        columns = [4, 1] if name.endswith("weight_ih_l0") else [p.numel() // len(p)]

        def pieces(a: Tensor, rows: list[int] = rows, columns: list[int] = columns) -> list[Tensor]:
            return [b for row in a.view(len(a), -1).split(rows) for b in row.split(columns, 1)]

        for was, now in zip(pieces(before[name]), pieces(p.grad), strict=True):
            expected = was if was.norm() <= 2 else was * 2 / was.norm()
            torch.testing.assert_close(now, expected, rtol=1e-6, atol=0)


def test_it_learns_scenes() -> None:
    """Far better than guessing (R@10 of 10 % among 100), with few weights and updates."""
    data = SyntheticScenes(batch_size=32, train_size=400, val_size=100, test_size=100, seed=0)
    torch.manual_seed(0)
    model = OrderEmbedding(data.vocabulary, 256, 24, 48, lr=3e-3)
    learner = quiet_trainer(max_epochs=8, num_sanity_val_steps=0)
    learner.fit(model, datamodule=data)
    scores = learner.callback_metrics
    assert scores["val_image_r10"] > 35
    assert scores["val_caption_r10"] > 35
    assert scores["val_image_mean_rank"] < 30
    (tested,) = learner.test(model, datamodule=data, verbose=False)
    both = tested["test_image_sum"] + tested["test_caption_sum"]
    assert tested["test_recall_sum"] == pytest.approx(both)
    assert tested["test_image_r10"] > 30


@pytest.mark.parametrize(("reduction", "scale"), [("sum", 3), ("mean", 1)])
def test_a_sum_stays_one_where_processes_average(reduction: Any, scale: int) -> None:
    model = small(loss_reduction=reduction).float()
    model.trainer = SimpleNamespace(world_size=3)  # type: ignore[assignment]
    logged = {}
    model.log = lambda name, value, **_: logged.update({name: float(value)})  # type: ignore[method-assign, assignment]
    captions, lengths = model.encode_words([["a"], ["dog", "a"], ["a", "a"]])
    batch = images(dtype=torch.float32), captions, lengths, torch.arange(3)
    loss = model.loss(*model(batch)).item()
    assert model.training_step(batch, 0).item() == pytest.approx(scale * loss)
    assert logged["train_loss"] == pytest.approx(loss)


def test_validation_is_that_of_the_whole_set() -> None:
    data = SyntheticScenes(batch_size=8, train_size=16, val_size=30, test_size=4, eval_batch_size=7)
    model = OrderEmbedding(data.vocabulary, 256, 4, 5, fold_size=10, folds=2)
    (validated,) = quiet_trainer().validate(model, datamodule=data, verbose=False)
    metric = model.val_retrieval
    whole = data.evaluation_set("val")[torch.arange(30)]
    metric.update(*model.eval()(whole), whole.image_index)
    expected = metric.compute()
    for name, value in expected.items():
        assert validated[f"val_{name}"] == pytest.approx(value.item(), rel=1e-6)


def test_predictions_are_the_penalties_of_pairs() -> None:
    data = SyntheticScenes(train_size=16, val_size=4, test_size=6, eval_batch_size=4)
    model = OrderEmbedding(data.vocabulary, 256, 4, 5)
    first, second = quiet_trainer().predict(model, datamodule=data)  # type: ignore[misc]
    assert first["penalty"].shape == (4, 5)  # type: ignore[call-overload, index]
    whole = data.evaluation_set("test")[torch.arange(6)]
    captions, points = model.eval()(whole)
    e = model.penalties(captions, points)
    expected = torch.stack([e[5 * i : 5 * i + 5, i] for i in range(6)])
    found = torch.cat([first["penalty"], second["penalty"]])  # type: ignore[call-overload, index]
    torch.testing.assert_close(found, expected)


def test_sizes_that_do_not_fit() -> None:
    refuses(r"6 .*\(3, 7\)", small().embed_images, torch.rand(3, 7))
    refuses(r"10 .* 2 ", small().loss, torch.rand(10, 5), torch.rand(2, 5))
    two, shapes = torch.zeros(2, 3), r"\(M, D\) and \(N, D\), got"
    refuses(rf"{shapes} \(2, 3\) and \(2, 4\)", order_violation, two, torch.zeros(2, 4))
    refuses(rf"{shapes} \(3,\) and \(2, 3\)", order_violation, torch.zeros(3), two)


def points(m: int, n: int, d: int, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + n)
    above, below = (torch.randn(k, d, generator=generator, dtype=F64).to(dtype) for k in (m, n))
    return above.requires_grad_(), below.requires_grad_()


def all_at_once(above: Tensor, below: Tensor) -> Tensor:
    return (above[:, None] - below).clamp(min=0).square().sum(-1)


@pytest.fixture(params=[1, 60, 2**18])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Differences held at a time: less than a row, some rows, all."""
    monkeypatch.setitem(order_penalty._DIFFERENCES, "cpu", request.param)
    return int(request.param)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 5, 3), (4, 9, 6), (3, 0, 4), (0, 3, 4)], ids=str)
def test_value_and_gradients(sizes: tuple[int, int, int], held: int) -> None:
    above, below = points(*sizes)
    found, expected = order_violation(above, below), all_at_once(above, below)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    weights = torch.randn(expected.shape, dtype=F64, generator=torch.Generator().manual_seed(3))
    ours = torch.autograd.grad(found, (above, below), weights)
    theirs = torch.autograd.grad(expected, (above, below), weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_gradients_of_one_side_and_single_precision() -> None:
    above, below = points(4, 3, 5)
    order_violation(above, below.detach()).sum().backward()
    expected = torch.autograd.grad(all_at_once(above, below.detach()).sum(), above)
    torch.testing.assert_close(above.grad, expected[0], rtol=1e-12, atol=0)
    above, below = points(50, 40, 300)
    exact = all_at_once(above, below)
    few = [a.detach().float() for a in (above, below)]
    plain = (all_at_once(*few) - exact).abs().max()
    assert (order_violation(*few) - exact).abs().max() <= 2 * plain


def test_all_differences_are_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    monkeypatch.setitem(order_penalty._DIFFERENCES, "cpu", 1000)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    above, below = points(30, 20, 25, torch.float32)
    with Watch():
        order_violation(above, below).sum().backward()
    assert 600 <= largest <= 1000 < 30 * 20 * 25
