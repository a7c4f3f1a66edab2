"""Handwriting prediction and synthesis (Graves 2013, sections 4 and 5; paper, section 6.5)."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from reference import pen_mixture, read, run, run_window
from refusals import refuses
from torch import Tensor
from torch.distributions import Bernoulli
from torch.utils.data import DataLoader
from training import Resumable, quiet_trainer
from unchanged import unchanged

from ln_zoo.models import Handwriting
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm

Batch = tuple[Tensor, Tensor, tuple[str, ...], bool]
NORMS = [LayerNorm(), RMSNorm(), WeightNorm(), Identity(), BatchNorm(max_steps=64)]
TEXTS = ("Hello wo", "a b c", "Xyz?")


def small(**arguments: Any) -> Handwriting:
    torch.manual_seed(0)
    sizes = {"hidden_size": 7, "window_components": 3, "mixture_components": 2}
    return Handwriting(**sizes | arguments)


def make_batch(
    steps: int = 40, lengths: tuple[int, ...] = (40, 31, 17), first: bool = True, seed: int = 1
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    offsets = 30 * torch.randn(len(lengths), steps + 1, 3, generator=generator)
    offsets[..., 2] = (offsets[..., 2] > 45).float()
    if first:
        offsets[:, 0] = 0
    for row, length in zip(offsets, lengths, strict=True):
        row[length + 1 :] = 0
    return offsets, torch.tensor(lengths), TEXTS[: len(lengths)], first


def scaled(model: Handwriting) -> Handwriting:
    model.offset_mean.copy_(torch.tensor([8.0, -0.5]))
    model.offset_std.copy_(torch.tensor([40.0, 35.0]))
    return model


def by_the_equations(model: Handwriting, batch: Batch) -> tuple[Tensor, Tensor]:
    """Nats and squared errors of each target, (N, T) of float64, zeros behind a line's end.

    For a network of three layers without norm, peepholes or anything else special.
    """
    p = {name: a.detach().double() for name, a in model.state_dict().items()}
    offsets, lengths, texts, _ = batch
    points = offsets.double().clone()
    points[..., :2] = (points[..., :2] - p["offset_mean"]) / p["offset_std"]
    nats = torch.zeros(len(texts), points.shape[1] - 1, dtype=torch.float64)
    errors = torch.zeros_like(nats)

    cell = read("LSTM", model.window.cell)
    components = len(p["window.window.bias"]) // 3
    zeros = torch.zeros(1, model.window.hidden_size, dtype=torch.float64)
    for n, text in enumerate(texts):
        characters = torch.zeros(1, len(text), len(model.alphabet) + 1, dtype=torch.float64)
        for u, character in enumerate(text):
            place = model.alphabet.find(character)
            characters[0, u, place if place >= 0 else len(model.alphabet)] = 1
        x = points[n, : int(lengths[n]), None].clone()
        x[0] = 0
        state = zeros, zeros, zeros[:, :components], torch.zeros_like(characters[:, 0])
        affine = p["window.window.weight"], p["window.window.bias"]
        output, windows, *_ = run_window(cell, *affine, x, characters, state)
        h = [output]
        for layer in model.layers:
            below = torch.cat([x, h[-1], windows], 2)
            (row,), *_ = run(read("LSTM", layer, "l0"), [below[:, 0]], zeros, zeros)
            h.append(row.unsqueeze(1))
        y = torch.cat(h, 2)[:, 0].detach() @ p["output.weight"].T + p["output.bias"]
        target, mixture = points[n, 1 : len(y) + 1], pen_mixture(y)
        lifts = Bernoulli(logits=y[:, 0]).log_prob(target[:, 2])
        nats[n, : len(y)] = -mixture.log_prob(target[:, :2]) - lifts
        errors[n, : len(y)] = (target[:, :2] - mixture.mean).square().sum(1)
    return nats, errors


def test_losses_are_those_of_the_equations() -> None:
    model = scaled(small(norm=Identity())).double()
    batch = make_batch()
    nats, errors = by_the_equations(model, batch)
    nll, distances, mask = model._score(batch, "test")
    assert mask.sum() == 88
    assert torch.allclose(nll.T, nats, rtol=1e-9, atol=1e-9)
    assert torch.allclose(distances.T, errors, rtol=1e-9, atol=1e-9)
    assert torch.allclose(model.loss(batch), nats.sum() / 88)
    found = model.per_example(batch)
    assert torch.allclose(found["sequence_nll"], nats.sum(1))
    assert found["points"].tolist() == [40, 31, 17]
    per_line = scaled(small(norm=Identity(), loss_reduction="line")).double()
    assert torch.allclose(per_line.loss(batch), nats.sum() / 3)


@pytest.mark.parametrize(
    ("norm", "text"), [*zip(NORMS, (True, False, True, False, True), strict=True)], ids=repr
)
def test_what_comes_after_a_line_changes_nothing(norm: Norm, text: bool) -> None:
    model = scaled(small(norm=norm, text=text)).eval()
    offsets, lengths, texts, _ = make_batch()
    alone = model.per_example((offsets[1:2, :32], lengths[1:2], texts[1:2], True))
    filled = offsets.clone()
    filled[1, 32:] = 1e3
    together = model.per_example((filled, lengths, texts, True))
    for name, value in alone.items():
        assert torch.allclose(together[name][1:2], value, rtol=1e-5), name


@pytest.mark.parametrize(
    ("norm", "text", "cut"),
    [(n, i % 2 == k, (1, 16, 23)[(i + k) % 3]) for i, n in enumerate(NORMS[:-1]) for k in (0, 1)],
    ids=repr,
)
def test_chunks_with_states_carried_are_the_whole_line(norm: Norm, text: bool, cut: int) -> None:
    model = scaled(small(norm=norm, text=text, num_layers=2)).double()
    offsets, _, texts, _ = make_batch(lengths=(40, 40, 40))
    whole = model.per_example((offsets.double(), torch.full((3,), 40), texts, True))
    parts = [
        model.per_example((part.double(), torch.full((3,), part.shape[1] - 1), texts, first))
        for part, first in ((offsets[:, : cut + 1], True), (offsets[:, cut:], False))
    ]
    for name, value in whole.items():
        assert torch.allclose(parts[0][name] + parts[1][name], value, rtol=1e-12), name


def test_states_of_chunks() -> None:
    model = scaled(small())
    offsets, lengths, texts, _ = make_batch(lengths=(40, 40, 40))
    model.loss((offsets, lengths, texts, True))
    state = model._carried["train"]
    tensors = [*state.window, *(a for pair in state.layers for a in pair)]
    assert len(tensors) == 8
    assert not any(a.requires_grad for a in tensors)
    model.loss((offsets, lengths, texts, False)).backward()
    # A chunk without its beginning is an error.
    model = small()
    offsets, lengths, texts, _ = make_batch()
    refuses(r" 3 .* 0\b", model.loss, (offsets, lengths, texts, False))
    model.loss((offsets, lengths, texts, True))
    refuses(r" 2 .* 3\b", model.loss, (offsets[:2], lengths[:2], texts[:2], False))


OPTIONS: list[dict[str, Any]] = [
    {"peephole": True}, {"window_parameters": "softplus"}, {"window_input": "all"},
    {"output_from": "top"}, {"num_layers": 1}, {"forget_bias": None},
    {"clip_mode": "graves", "loss_reduction": "line"},
    {"norm": LayerNorm(per_gate=True)}, {"norm": BatchNorm(max_steps=20)},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_trains(options: dict[str, Any]) -> None:
    model = scaled(small(**options))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    batch = make_batch()
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_options_change_results() -> None:
    batch, base = make_batch(), scaled(small())
    for options in (
        {"window_parameters": "softplus"}, {"kappa_bias": 0.0}, {"forget_bias": 2.0},
        {"norm": LayerNorm(per_gate=True)}, {"norm": LayerNorm(eps=0.1)},
        {"min_log_std": 0.5}, {"max_correlation": 1e-3},
    ):  # fmt: skip
        other = small(**options)
        if not {"kappa_bias", "forget_bias"} & options.keys():
            other.load_state_dict(base.state_dict())
        assert not torch.isclose(scaled(other).loss(batch), base.loss(batch), rtol=1e-6), options


def test_forget_gates_start_open() -> None:
    model = small(forget_bias=2.0)
    for layer in model.layers:
        assert layer.bias_ih_l0.view(4, -1).eq(2).all(1).tolist() == [False, True, False, False]
        assert layer.bias_hh_l0.chunk(4)[1].eq(0).all()  # type: ignore[operator]
    assert model.window.cell.bias_ih.chunk(4)[1].eq(2).all()
    assert not small(forget_bias=None).window.cell.bias_ih.chunk(4)[1].eq(2).any()  # type: ignore


def test_alphabets(tmp_path: Path) -> None:
    model = small(alphabet="ab")
    assert model.num_characters == 3
    with pytest.warns(UserWarning, match="'ab'.*'c' 'd'"):
        code = model.encode(["acd", "b"])
    assert code.argmax(-1).tolist() == [[0, 2, 2], [1, 0, 0]]
    assert code.sum(-1).tolist() == [[1, 1, 1], [1, 0, 0]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.encode(["de"]).argmax(-1).tolist() == [[2, 2]]
    refuses("'1' '7'", small(strict_text=True).encode, ["ab", "17"])
    # An alphabet may lie in a file.
    (tmp_path / "alphabet.txt").write_text("abc\nåé ß\n", encoding="utf-8")
    model = small(alphabet=str(tmp_path / "alphabet.txt"))
    assert model.alphabet == model.hparams["alphabet"] == "abcåé ß"


def test_graves_bounds_want_sums() -> None:
    with pytest.warns(UserWarning, match="clip_mode.*loss_reduction"):
        small(clip_mode="graves")
    for mode, clipped in (("graves", True), ("none", False)):
        model = small(clip_mode=mode, clip_bound=1e-4, loss_reduction="line")
        model.loss(make_batch()).backward()
        # The output's bias has a gradient of at most 10 bounds from each of 88 points.
        largest = max(float(p.grad.abs().max()) for p in model.parameters())  # type: ignore
        assert (largest < 88 * 1e-3) is clipped


class Lines(LightningDataModule):
    offset_statistics = (torch.tensor([8.0, -0.5]), torch.tensor([40.0, 35.0]))

    def __init__(self, *batches: Batch) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> Resumable:
        return Resumable(self.batches)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]

    predict_dataloader = test_dataloader


def test_metrics_are_ratios_of_sums() -> None:
    first, second = make_batch(), make_batch(20, (20, 9, 5), seed=2)
    offsets, lengths, texts, _ = make_batch(lengths=(40, 40, 40), seed=3)
    # Two batches of lines and one line in two chunks.
    chunks = [
        (offsets[:, :26], torch.tensor([25, 25, 25]), texts, True),
        (offsets[:, 25:], torch.tensor([15, 15, 15]), texts, False),
    ]
    model = small()
    found = quiet_trainer().test(model, Lines(first, second, *chunks), verbose=False)[0]
    assert model.offset_std.tolist() == [40, 35]
    lines = [model.per_example(batch) for batch in (first, second, (offsets, lengths, texts, True))]
    nats = sum(line["sequence_nll"].sum().item() for line in lines)
    points = sum(float(line["points"].sum()) for line in lines)
    assert points == 88 + 34 + 120
    assert found["test_point_nll"] == pytest.approx(nats / points, rel=1e-6)
    assert found["test_sequence_nll"] == pytest.approx(nats / 9, rel=1e-6)
    assert found["test_sse"] > 0
    predicted = quiet_trainer().predict(model, Lines(first, second))
    assert torch.allclose(predicted[0]["nats"], lines[0]["sequence_nll"])  # type: ignore
    assert predicted[1]["points"].tolist() == [20, 9, 5]  # type: ignore


def test_the_scale_is_the_checkpoints(tmp_path: Path) -> None:
    model = small()
    run = quiet_trainer(max_epochs=1)
    run.fit(model, Lines(make_batch()))
    assert model.offset_mean.tolist() == [8.0, -0.5]
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = Handwriting.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert again.offset_std.tolist() == [40, 35]
    # Other data: the model keeps its own.
    other = Lines(make_batch())
    other.offset_statistics = (torch.zeros(2), torch.ones(2))
    quiet_trainer().test(again, other, verbose=False)
    assert again.offset_std.tolist() == [40, 35]


def test_weight_noise_is_gone_when_the_step_is_taken() -> None:
    model = small(weight_noise=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen: list[Tensor] = []
    model.output.register_forward_pre_hook(lambda of, _: seen.append(of.weight.detach().clone()))
    model.lr = 1e-12  # nothing moves but for the noise
    quiet_trainer(max_epochs=1).fit(model, Lines(make_batch()))
    noise = seen[-1] - before["output.weight"]  # type: ignore[operator]
    assert 0.05 < float(noise.std()) < 0.2
    for name, p in model.named_parameters():
        assert torch.allclose(p, before[name], atol=1e-6), name


def test_precisions_and_graves_optimizer() -> None:
    model = scaled(small())
    batch = make_batch()
    exact = model.loss(batch)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.loss(batch)
        y, state = model(torch.randn(20, 1, 3), model.encode(["abc"]))
    assert rounded.dtype == y.dtype == torch.float32
    assert state.window.kappa.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=0.02)
    graves = {"optimizer": "graves", "lr": 1e-4}
    for arguments, precision in ((graves, "32-true"), ({}, "bf16-mixed"), ({}, "64-true")):
        model = small(**arguments)
        quiet_trainer(max_epochs=1, precision=precision).fit(model, Lines(make_batch()))
        assert all(p.isfinite().all() for p in model.parameters())


def decided(model: Handwriting) -> Handwriting:
    """One component is by far the likeliest, and no stroke ends."""
    with torch.no_grad():
        model.output.bias[:2] = torch.tensor([-50.0, 20.0])
    return model


def with_window_speed(model: Handwriting, speed: float) -> Handwriting:
    """All Gaussians are narrow and move so many characters a step."""
    with torch.no_grad():
        model.window.window.weight.zero_()
        parts = model.window.window.bias.chunk(3)
        for part, value in zip(parts, (1.0, 4.0, speed), strict=True):  # alpha, beta, kappa
            part.fill_(math.log(value))
    return model


def test_writing_ends_when_the_window_passes_the_text() -> None:
    model = with_window_speed(scaled(small()), 0.2)
    short, long = model.write(["abc", "abcdef"])
    # kappa is 0.2 t, and beyond U + 1/2 nearer to U + 1 than to U: the first such step writes no
    # more points.
    assert [(len(line.offsets), line.finished) for line in (short, long)] == [(17, 1), (32, 1)]
    assert short.phi.shape == (17, 3)
    assert long.text == "abcdef"
    # What the window shows at step t, by hand.
    kappa = 0.2 * torch.arange(1, 18).unsqueeze(1)
    expected = 3 * torch.exp(-4 * (kappa - torch.arange(1, 4)).square())
    assert torch.allclose(short.phi, expected, atol=1e-5)
    # A window may jump past the text: then it shows neither a character nor the place behind.
    (jumped,) = with_window_speed(scaled(small()), 20.0).write(["ab"])
    assert jumped.finished
    assert len(jumped.offsets) == 0
    # Writing that never ends is cut.
    model = with_window_speed(scaled(small()), 1e-6)
    a, b = model.write(["a", "abc"])
    assert (len(a.offsets), len(b.offsets)) == (40, 120)
    assert not a.finished
    assert [len(line.offsets) for line in model.write(["a", "abc"], max_points=7)] == [7, 7]


def test_texts_are_written_as_each_alone() -> None:
    """But for the random numbers, of which there are none at a large bias."""
    model = decided(with_window_speed(scaled(small()).double(), 0.3))
    together = model.write(["ab", "abcd"], bias=40.0)
    for text, line in zip(("ab", "abcd"), together, strict=True):
        (alone,) = model.write([text], bias=40.0)
        assert torch.allclose(alone.offsets, line.offsets, atol=1e-6)
        assert torch.allclose(alone.phi, line.phi)


def test_a_primed_continuation_is_teacher_forcing() -> None:
    """The first offset after the given ones has the mean that the whole pass says."""
    model = decided(with_window_speed(scaled(small(norm=Identity())).double(), 0.1))
    offsets, *_ = make_batch(30, (30,))
    given = offsets[0, 1:].double()
    (line,) = model.write(["cd"], bias=45.0, prime=(given, "ab"), max_points=3)
    points = model.standardize(torch.cat([torch.zeros(1, 3).double(), given, line.offsets]))
    points[0] = 0
    y, _ = model(points[:-1].unsqueeze(1), model.encode(["abcd"]))
    mixture = model.mixture(y[:, 0])
    likeliest = mixture.log_weights.argmax(-1)
    means = mixture.mean[torch.arange(len(likeliest)), likeliest]
    written = model.standardize(line.offsets)
    assert torch.allclose(written[:, :2], means[len(given) :], atol=1e-6)
    assert line.phi.shape == (3, 2)  # of the new text alone


def test_writing_draws_from_its_generator_in_the_datas_scale() -> None:
    model = scaled(small())
    with unchanged(model):
        first, second = (
            model.write(["ab"], max_points=20, generator=torch.Generator().manual_seed(1))[0]
            for _ in range(2)
        )
    assert torch.equal(first.offsets, second.offsets)
    # The same numbers drawn by a model that knows a scale and by one that knows none.
    lines = [
        model.write(["ab"], max_points=30, generator=torch.Generator().manual_seed(3))[0]
        for model in (small(), scaled(small()))
    ]
    mean, std = torch.tensor([8.0, -0.5]), torch.tensor([40.0, 35.0])
    assert torch.allclose(lines[1].offsets[:, :2], lines[0].offsets[:, :2] * std + mean, atol=1e-3)
    assert torch.equal(lines[1].offsets[:, 2], lines[0].offsets[:, 2])


def test_what_cannot_be_written() -> None:
    write = small().write
    refuses("text 1 of 2 is empty", write, ["a", ""])
    refuses("bias must be at least 0, got -0.5", write, ["a"], bias=-0.5)
    refuses("there is no point to begin with", write, ["a"], prime=(torch.zeros(0, 3), "b"))
    refuses("text=False", small(text=False).write, ["a"])
    refuses("text=", small(), torch.zeros(3, 1, 3))
    diverged = small()
    torch.nn.init.constant_(diverged.output.weight, math.nan)
    refuses("finite", diverged.write, ["ab"])
