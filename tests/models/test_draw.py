"""DRAW (Gregor et al. 2015; paper, section 6.4)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributions import Bernoulli, Normal, kl_divergence
from torch.utils.data import DataLoader, Dataset

from ln_zoo.layers import DRAWNetwork, DRAWOutput
from ln_zoo.models import DRAW, ZooModule
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.ops.engines.native import build

NORMS = [LayerNorm(), RMSNorm(), WeightNorm(), Identity(), BatchNorm()]
SIZE = (4, 6)


def small(**arguments: Any) -> DRAW:
    """With weights so large that everything has an effect."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "image_size": SIZE, "glimpses": 3, "hidden_size": 6, "latent_size": 2,
        "write_size": 3, "init_std": 0.4,
    }  # fmt: skip
    return DRAW(**sizes | arguments)


def pictures(examples: int = 5, seed: int = 1, size: tuple[int, int] = SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(examples, 1, *size, generator=generator) < 0.3).float()


def noise_of(model: DRAW, examples: int = 5, seed: int = 2) -> Tensor:
    shape = (model.glimpses, examples, model.network.latent_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bound(model: DRAW, images: Tensor, noise: Tensor) -> Tensor:
    output = model(images, noise)
    return model.nll(images, output) + model.kl_by_glimpse(output).sum(0)


class Images(Dataset[Any]):
    """Batches are tuples of one tensor."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (self.images[index],)


class Pictures(LightningDataModule):
    def __init__(self, images: Tensor, batch_size: int = 5) -> None:
        super().__init__()
        self.images, self.batch_size = images, batch_size

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Images(self.images), batch_size=self.batch_size)

    train_dataloader = test_dataloader = predict_dataloader = val_dataloader


def trainer(folder: Path, **arguments: Any) -> Trainer:
    options: dict[str, Any] = {
        "default_root_dir": folder, "accelerator": "cpu", "logger": False, "max_epochs": 1,
        "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": "callbacks" in arguments,
    }  # fmt: skip
    return Trainer(**options | arguments)


# Losses


def test_the_divergence_is_that_of_normal_distributions() -> None:
    mean, log_std = torch.randn(3, 5, 2).double(), torch.randn(3, 5, 2).double()

    def output(mean: Tensor, log_std: Tensor) -> DRAWOutput:
        return DRAWOutput(torch.zeros(5, 4, 6), mean, log_std, torch.tensor(0), None)

    found = DRAW.kl_by_glimpse(output(mean, log_std))
    expected = kl_divergence(Normal(mean, log_std.exp()), Normal(0.0, 1.0)).sum(-1)
    assert found.shape == (3, 5)
    assert torch.allclose(found, expected, rtol=1e-12)
    zeros = torch.zeros(3, 5, 2)
    assert DRAW.kl_by_glimpse(output(zeros, zeros)).eq(0).all()
    # Of the sources' unit variance: half the square of the mean, for each latent.
    assert DRAW.kl_by_glimpse(output(zeros + 2, zeros)).eq(4).all()


def test_made_up_images_have_no_divergence() -> None:
    with pytest.raises(ValueError, match="image"):
        DRAW.kl_by_glimpse(small().generate_samples(2))


def test_nats_are_those_of_independent_pixels() -> None:
    model, images = small().double(), pictures()
    output = model(images, noise_of(model))
    expected = -Bernoulli(logits=output.logits).log_prob(images[:, 0].double()).sum((1, 2))
    assert torch.allclose(model.nll(images, output), expected, rtol=1e-12)
    # Of probabilities it is the mean over what may be drawn of them.
    halves = torch.full((5, 1, *SIZE), 0.25)
    expected = -(
        0.25 * output.logits.sigmoid().log() + 0.75 * (1 - output.logits.sigmoid()).log()
    ).sum((1, 2))
    assert torch.allclose(model.nll(halves, output), expected, rtol=1e-10)


def test_nats_of_pixels_beyond_doubt() -> None:
    """Logits of 200, at which a float32 probability is 0 or 1."""
    logits = torch.full((1, *SIZE), 200.0, requires_grad=True)
    images = torch.zeros(1, 1, *SIZE)
    nats = DRAW.nll(images, DRAWOutput(logits, None, None, torch.tensor(0), None))
    assert nats.item() == 24 * 200
    nats.sum().backward()
    assert logits.grad is not None
    assert logits.grad.eq(1).all()


@pytest.mark.parametrize("norm", [LayerNorm(), Identity()], ids=str)
def test_start_values_at_the_sources_size(norm: Norm) -> None:
    """784 ln 2 = 543.4 nats of pixels; the divergence is 25 with layer norm, 0.006 without.

    Over 24 seeds and 4 images each, means and deviations were 543.76, 0.75 and 24.3, 0.50 with it,
    543.44, 0.06 and 0.0056, 0.0006 without. Here are four seeds: four standard errors, and what
    25 and 0.006 are rounded by.
    """
    nats, divergences = [], []
    for seed in range(4):
        torch.manual_seed(seed)
        model = DRAW(norm=norm, init_std=0.01)
        images = (torch.rand(4, 1, 28, 28) < 0.13).float()
        with torch.no_grad():
            output = model(images)
        nats.append(model.nll(images, output).mean())
        divergences.append(model.kl_by_glimpse(output).sum(0).mean())
    nll, kl = float(torch.stack(nats).mean()), float(torch.stack(divergences).mean())
    if isinstance(norm, LayerNorm):
        assert abs(nll - 784 * math.log(2)) < 4 * 0.75 / 2
        assert abs(kl - 25) < 0.5 + 4 * 0.50 / 2
    else:
        assert abs(nll - 784 * math.log(2)) < 4 * 0.06 / 2
        assert abs(kl - 0.006) < 0.0005 + 4 * 0.0006 / 2


@pytest.mark.parametrize(
    ("norm", "nats", "divergence"),
    [(LayerNorm(), (545.6, 7.0), (25.2, 0.92)), (Identity(), (543.6, 4.8), (0.351, 0.035))],
    ids=str,
)
def test_start_values_with_torchs_weights(
    norm: Norm, nats: tuple[float, float], divergence: tuple[float, float]
) -> None:
    """Means and deviations over 24 seeds of 4 images; here are four other seeds."""
    found = []
    for seed in range(100, 104):
        torch.manual_seed(seed)
        model = DRAW(norm=norm)
        images = (torch.rand(4, 1, 28, 28) < 0.13).float()
        with torch.no_grad():
            output = model(images)
        kl = model.kl_by_glimpse(output).sum(0).mean()
        found.append(torch.stack([model.nll(images, output).mean(), kl]))
    for value, (mean, deviation) in zip(
        torch.stack(found).mean(0), (nats, divergence), strict=True
    ):
        assert abs(value - mean) < 4 * deviation / 2


@pytest.mark.parametrize(("norm", "count"), [(Identity(), 963_323), (LayerNorm(), 964_347)])
def test_number_of_parameters_at_the_sources_size(norm: Norm, count: int) -> None:
    model = DRAW(norm=norm)
    assert sum(p.numel() for p in model.parameters()) == count
    assert (model.glimpses, model.lr, model.clip_norm) == (64, 1e-3, 10.0)


def test_default_norm_is_layer_norm_at_the_cell() -> None:
    model = small()
    assert model.hparams["norm"]["class_path"] == "ln_zoo.norms.LayerNorm"
    names = {name for name, _ in model.named_parameters() if "sites" in name}
    cells = ("encoder", "decoder")
    assert names == {f"network.{c}.sites.cell.{p}" for c in cells for p in ("gain", "shift")}


# Bounds


def tiny() -> DRAW:
    """One latent number and 2 x 3 pixels: what is likely can be summed up."""
    torch.manual_seed(0)
    return DRAW(
        image_size=(2, 3), glimpses=1, hidden_size=4, latent_size=1, write_size=2,
        init_std=0.5,
    ).double()  # fmt: skip


def log_likelihoods(model: DRAW, images: Tensor) -> Tensor:
    """log p(x), by quadrature over z from -9 to 9."""
    z = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    with torch.no_grad():
        logits = model.network.generate(z.view(1, -1, 1)).logits
    log_prior = Normal(0.0, 1.0).log_prob(z) + math.log(18 / 4000)
    given = Bernoulli(logits=logits).log_prob(images.double()).sum((2, 3))  # (N, z)
    return (given + log_prior).logsumexp(1)


def all_pictures() -> Tensor:
    codes = torch.arange(64).unsqueeze(1) >> torch.arange(6)
    return (codes & 1).float().view(64, 1, 2, 3)


def test_likelihoods_of_all_images_sum_to_1() -> None:
    """The quadrature is right."""
    assert log_likelihoods(tiny(), all_pictures()).exp().sum().item() == pytest.approx(1, abs=1e-9)


def test_bounds_are_bounds_and_the_importance_weighted_one_is_tight() -> None:
    model, images = tiny(), all_pictures()
    exact = -log_likelihoods(model, images)
    draws = 4000
    with torch.no_grad():
        few, many = (model._measure(images, 100, count) for count in (5, 100))
        each, noise = images.repeat(draws, 1, 1, 1), noise_of(model, 64 * draws)
        output = model(each, noise)
        log_weights = model._log_weight(each, output, noise.double()).view(draws, 64)
        bounds = model.nll(each, output) + model.kl_by_glimpse(output).sum(0)
    # Each weight has p(x) for its mean; these 64 means are 1, each with its own standard error.
    weights = (log_weights + exact).exp()
    error = weights.std(0) / draws**0.5
    assert error.max() < 0.03
    assert ((weights.mean(0) - 1) / error).square().mean() < 1.7  # of 64: 1 +- 0.18
    gaps = bounds.view(draws, 64).mean(0) - exact
    assert gaps.min() > 0
    assert gaps.mean() > 0.1
    # The model's own measures, of fewer draws.
    weights = (exact - many["importance_bound"]).exp()
    assert ((weights - 1) / (error * (draws / 100) ** 0.5)).square().mean() < 1.7
    off = many["importance_bound"].mean() - exact.mean()
    assert off.abs() < 4 * float(error.square().mean().sqrt()) * (draws / 100) ** 0.5 / 64**0.5
    for values in (few, many):
        assert values["importance_bound"].mean() < values["bound"].mean()


def test_with_one_draw_the_importance_weighted_bound_is_the_bound_on_average() -> None:
    model, images = tiny(), all_pictures()
    with torch.no_grad():
        found = [model._measure(images[torch.randperm(64)], 1, 1) for _ in range(100)]
    gaps = torch.stack([values["importance_bound"] - values["bound"] for values in found])
    error = gaps.mean(1).std() / 10
    assert gaps.std() > 0.01  # the divergence of one is drawn, of the other known
    assert gaps.mean().abs() < 4 * error


def test_measures_are_means_over_draws() -> None:
    model, images = small(), pictures()
    found = model._measure(images, 4, 3)
    generator = torch.Generator().manual_seed(zlib.crc32(images.numpy().tobytes()))
    shape = (3, 5, 2)
    outputs = [(n, model(images, n)) for n in (torch.randn(shape, generator=generator),)]
    for _ in range(3):
        noise = torch.randn(shape, generator=generator)
        outputs.append((noise, model(images, noise)))
    nll = torch.stack([model.nll(images, output) for _, output in outputs])
    kl = torch.stack([model.kl_by_glimpse(output).sum(0) for _, output in outputs])
    assert torch.allclose(found["nll"], nll.mean(0).double(), rtol=1e-5)
    assert torch.allclose(found["kl"], kl.mean(0).double(), rtol=1e-5)
    assert torch.equal(found["bound"], found["nll"] + found["kl"])
    weights = []
    for i, (noise, output) in enumerate(outputs[:3]):
        mean, std = output.means.double(), output.log_stds.double().exp()
        z = mean + std * noise
        ratio = Normal(0.0, 1.0).log_prob(z) - Normal(mean, std).log_prob(z)
        weights.append(ratio.sum((0, 2)) - nll[i].double())
    expected = -(torch.stack(weights).exp().mean(0)).log()
    assert torch.allclose(found["importance_bound"], expected, rtol=1e-5)
    assert {value.dtype for value in found.values()} == {torch.float64}


# Evaluation


def test_evaluation_gives_the_same_numbers_whatever_was_drawn_before(tmp_path: Path) -> None:
    model = small(importance_samples=5, eval_samples=3)
    data = Pictures(pictures(12))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(model.per_example((pictures(),)))
        assert torch.equal(torch.get_rng_state(), before)
        (scores,) = trainer(tmp_path).test(model, data, verbose=False)
        found.append(scores)
    assert all(torch.equal(found[0][name], found[2][name]) for name in ("bound", "nll", "kl"))
    assert found[1] == found[3]
    assert set(found[1]) == {f"test_{n}" for n in ("bound", "nll", "kl", "importance_bound")}
    other = small(eval_seed=7)
    assert not torch.equal(other.per_example((pictures(),))["bound"], found[0]["bound"])


@pytest.mark.parametrize("norm", NORMS[1:], ids=lambda norm: type(norm).__name__)
def test_models_are_compared_with_the_same_noise(
    norm: Norm, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Tensor] = []
    forward = DRAW.forward

    def seen(self: DRAW, images: Tensor, noise: Tensor | None = None) -> DRAWOutput:
        assert noise is not None
        drawn.append(noise)
        return forward(self, images, noise)

    monkeypatch.setattr(DRAW, "forward", seen)
    for either in (norm, LayerNorm()):
        model = small(norm=either, eval_samples=2).eval()
        model.test_step((pictures(),), 0)
    assert len(drawn) == 4
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
    model.per_example((pictures(seed=5),))
    assert not torch.equal(drawn[0], drawn[4])


def test_metrics_are_means_over_images(tmp_path: Path) -> None:
    """The last batch is smaller."""
    model, images = small(val_samples=2, eval_samples=4), pictures(12)
    data = Pictures(images)
    with torch.no_grad():
        each = [model.eval()._measure(part, 4, 0) for part in images.split(5)]
    (found,) = trainer(tmp_path).test(model, data, verbose=False)
    for name in ("bound", "nll", "kl"):
        expected = torch.cat([values[name] for values in each]).mean().item()
        assert found[f"test_{name}"] == pytest.approx(expected, rel=1e-6)
    assert found["test_bound"] == pytest.approx(found["test_nll"] + found["test_kl"], rel=1e-6)
    assert "test_importance_bound" not in found
    (validated,) = trainer(tmp_path).validate(model, data, verbose=False)
    assert set(validated) == {"val_bound", "val_nll", "val_kl"}
    assert validated["val_bound"] != found["test_bound"]  # of two draws
    predicted = trainer(tmp_path).predict(model, data)
    assert predicted is not None
    for batch, values in zip(predicted, each, strict=True):
        assert torch.equal(batch["bound"], values["bound"])  # type: ignore[index,call-overload]


# Options


CHANGES: list[dict[str, Any]] = [
    {"peephole": True},
    {"normalize": ["recurrent", "cell"]},
    {"norm": LayerNorm(eps=0.1)},
    {"norm": LayerNorm(per_gate=True), "normalize": ["input", "recurrent", "cell"]},
    {"norm": RMSNorm()},
    {"learn_initial_state": False},
    {"learn_initial_canvas": False},
    {"filter_norm": "eps", "filter_eps": 0.1},
    {"log_clamp": 0.05},
    {"glimpses": 2},
    {"read_size": 3},
    {"read_size": None},
    {"write_size": 2},
    {"write_size": None},
    {"latent_size": 3},
    {"hidden_size": 5},
]


def randomized(model: DRAW) -> DRAW:
    """The same weights where names and shapes are."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.4)
    return model


@pytest.mark.parametrize("options", CHANGES, ids=str)
def test_options_change_results(options: dict[str, Any]) -> None:
    base, other = randomized(small()), randomized(small(**options))
    found = [bound(model, pictures(), noise_of(model)) for model in (base, other)]
    assert not torch.allclose(*found, rtol=1e-5)


@pytest.mark.parametrize("options", [{"forget_bias": 1.0}, {"init_std": 0.1}, {"init_std": None}])
def test_options_change_the_start(options: dict[str, Any]) -> None:
    base, other = small(), small(**options)
    assert not torch.allclose(
        bound(base, pictures(), noise_of(base)), bound(other, pictures(), noise_of(base)), rtol=1e-5
    )


@pytest.mark.parametrize(
    "options",
    [
        *({"norm": norm} for norm in NORMS),
        {"peephole": True},
        {"normalize": ["input", "recurrent", "cell"]},
        {"filter_norm": "eps"},
        {"learn_initial_state": False, "learn_initial_canvas": False},
        {"read_size": None, "write_size": None},
        {"read_size": 1, "write_size": 1},
        {"forget_bias": 1.0, "init_std": None},
        {"clip_norm": None},
        {"glimpses": 1, "latent_size": 1},
    ],
    ids=str,
)
def test_every_option_trains(options: dict[str, Any], tmp_path: Path) -> None:
    model = small(**{"init_std": 0.1} | options, lr=0.02)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    data = Pictures(pictures(30), 10)
    (first,) = trainer(tmp_path).validate(model, data, verbose=False)
    run = trainer(tmp_path, max_epochs=8, limit_val_batches=0)
    run.fit(model, data)
    assert run.global_step == 24
    (last,) = trainer(tmp_path).validate(model, data, verbose=False)
    assert last["val_bound"] < first["val_bound"]
    # A stride of a single filter has no gradient; the rest of its map moves.
    assert all((p != before[name]).any() for name, p in model.named_parameters())
    assert all(p.isfinite().all() for p in model.parameters())


def test_batch_statistics_are_each_glimpses_own() -> None:
    """In training of the batch, in evaluation of the population: other examples do not matter."""
    model = small(norm=BatchNorm(max_steps=3))
    site = model.network.decoder.sites["cell"]  # type: ignore[index]
    images, noise = pictures(), noise_of(small())
    model(images, noise)
    assert site.num_batches_tracked.tolist() == [1, 1, 1]
    assert site.running_mean.unique(dim=0).shape[0] == 3
    trained = model(images, noise).logits
    changed = images.clone()
    changed[1:] = 1 - changed[1:]
    assert not torch.allclose(model(changed, noise).logits[0], trained[0], rtol=1e-4)
    model.eval()
    kept = site.running_mean.clone()
    found = [model(batch, noise).logits[0] for batch in (images, changed)]
    assert torch.allclose(*found, atol=1e-6)
    assert torch.equal(site.running_mean, kept)
    model(images[:1], noise[:, :1])


def test_stored_arguments_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(DRAWNetwork, "compile_glimpse", lambda network, mode: modes.append(mode))
    assert small(compile_mode="default").hparams["compile_mode"] is None
    assert modes == ["default"]


@pytest.mark.parametrize("shape", [(2, 1, 6, 4), (2, 4, 6), (2, 2, 4, 6), (2, 1, 24)])
def test_images_of_another_size(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(N, 1, 4, 6\).*--model.image_size"):
        small()(torch.rand(shape))


def test_noise_of_another_size() -> None:
    for shape in ((0, 5, 2), (3, 4, 2), (3, 5, 1)):
        with pytest.raises(ValueError, match=r"noise.*\(T, 5, 2\)"):
            small()(pictures(), torch.zeros(shape))


# Training


def bars(size: int = 6) -> Tensor:
    """All images with one line or one column lit."""
    lines = torch.eye(size).unsqueeze(2).expand(size, size, size)
    return torch.cat([lines, lines.mT]).unsqueeze(1).contiguous()


@pytest.mark.parametrize(
    "norm", [LayerNorm(), pytest.param(Identity(), marks=pytest.mark.slow)], ids=str
)
def test_it_learns(norm: Norm, tmp_path: Path) -> None:
    """More than what each pixel is by itself: its mean over all images."""
    images = bars()
    mean = images.mean(0)
    pixels = -(mean * mean.log() + (1 - mean) * (1 - mean).log()).sum()
    torch.manual_seed(0)
    model = DRAW(
        image_size=(6, 6), glimpses=3, hidden_size=24, latent_size=4, write_size=4,
        lr=0.02, norm=norm, eval_samples=20, init_std=None,
    )  # fmt: skip
    data = Pictures(images.repeat(4, 1, 1, 1), 48)
    trainer(tmp_path, max_epochs=150, limit_val_batches=0).fit(model, data)
    (found,) = trainer(tmp_path).test(model, Pictures(images, 12), verbose=False)
    assert pixels > 16
    assert math.log(12) < found["test_bound"] < 0.9 * float(pixels)


class Resumable(list[tuple[Tensor]]):
    """Batches of which a resumed run gets those that were not handed out."""

    first = 0

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        begin, self.first = self.first, 0
        for i in range(begin, len(self)):
            self.given = i + 1
            yield self[i]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["given"]


class Parts(LightningDataModule):
    def train_dataloader(self) -> Resumable:
        return Resumable((part,) for part in pictures(25).split(5))


@pytest.mark.parametrize("norm", [LayerNorm(), BatchNorm(max_steps=3)], ids=str)
def test_a_run_resumed_is_one_never_interrupted(norm: Norm, tmp_path: Path) -> None:
    whole = small(norm=norm)
    torch.manual_seed(5)
    trainer(tmp_path, max_steps=4).fit(whole, Parts())
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    stopped = small(norm=norm)
    torch.manual_seed(5)
    trainer(tmp_path, max_steps=3, callbacks=[keep]).fit(stopped, Parts())
    resumed = small(norm=norm)
    torch.manual_seed(99)
    rest = trainer(tmp_path, max_steps=4)
    rest.fit(resumed, Parts(), ckpt_path=tmp_path / "step=2.ckpt", weights_only=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_each_update_draws_noise_of_its_own(tmp_path: Path, monkeypatch: Any) -> None:
    drawn: list[Tensor] = []
    draw = DRAW._noise

    def seen(self: DRAW, *arguments: Any) -> Tensor:
        drawn.append(draw(self, *arguments))
        return drawn[-1]

    monkeypatch.setattr(DRAW, "_noise", seen)
    trainer(tmp_path, max_steps=3).fit(small(), Parts())
    assert [tuple(a.shape) for a in drawn] == [(3, 5, 2)] * 3
    # Each glimpse and each update its own.
    flat = torch.cat(drawn).flatten()
    assert len(flat.unique()) == len(flat)


def test_what_training_logs(tmp_path: Path) -> None:
    model = small()
    run = trainer(tmp_path, max_steps=1)
    torch.manual_seed(8)
    run.fit(model, Parts())
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    assert set(logged) == {"train_bound", "train_nll", "train_kl", "train_clamped"}
    assert logged["train_bound"] == pytest.approx(logged["train_nll"] + logged["train_kl"])
    assert logged["train_clamped"] == 0


def test_the_share_of_clamped_logarithms(tmp_path: Path) -> None:
    """Of 3 glimpses x 5 images: 2 latents' logarithms, 2 of each of 2 grids."""
    for options, share in (({}, 1 / 6), ({"read_size": None}, 0.0), ({"write_size": None}, 0.25)):
        model = small(init_std=1e-3, log_clamp=1.0, **options)
        if model.network.read is not None:
            with torch.no_grad():
                model.network.read.bias[3] = 2.0
        run = trainer(tmp_path, max_steps=1)
        run.fit(model, Parts())
        assert float(run.callback_metrics["train_clamped"]) == pytest.approx(share)


@pytest.mark.parametrize(
    ("options", "of_trainer", "expected"),
    [
        ({"clip_norm": 0.5}, None, 0.5),
        ({"clip_norm": None}, None, None),
        ({"clip_norm": 100.0}, 0.25, 0.25),
        ({}, None, 10.0),
    ],
)
def test_gradients_are_clipped(
    tmp_path: Path, options: dict[str, Any], of_trainer: float | None, expected: float | None
) -> None:
    norms: list[float] = []

    class Spy(DRAW):
        def configure_gradient_clipping(self, *given: Any, **named: Any) -> None:
            super().configure_gradient_clipping(*given, **named)
            flat = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
            norms.append(float(torch.cat(flat).norm()))

    model = small(init_std=1.0, **options)
    model.__class__ = Spy
    trainer(tmp_path, max_steps=1, gradient_clip_val=of_trainer).fit(model, Parts())
    if expected is None:
        assert norms[0] > 10
    else:
        assert norms == [pytest.approx(expected, rel=1e-4)]


def test_adam_is_the_sources() -> None:
    optimizer = small().configure_optimizers()
    assert isinstance(optimizer, torch.optim.Adam)
    settings = optimizer.param_groups[0]
    assert (settings["lr"], settings["betas"], settings["eps"]) == (1e-3, (0.9, 0.999), 1e-8)
    assert small(lr=3e-4).configure_optimizers().param_groups[0]["lr"] == 3e-4  # type: ignore


@pytest.mark.parametrize(
    ("precision", "norm"),
    [
        ("32-true", Identity()),
        ("bf16-mixed", LayerNorm()),
        ("bf16-true", LayerNorm()),
        ("64-true", Identity()),
        pytest.param("32-true", LayerNorm(), marks=pytest.mark.slow),
        pytest.param("bf16-mixed", Identity(), marks=pytest.mark.slow),
        pytest.param("bf16-true", Identity(), marks=pytest.mark.slow),
        pytest.param("64-true", LayerNorm(), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_precision_trains(tmp_path: Path, precision: Any, norm: Norm) -> None:
    model = small(norm=norm, init_std=0.1, lr=0.02)
    data = Pictures(pictures(30), 10)
    (first,) = trainer(tmp_path, precision=precision).validate(model, data, verbose=False)
    trainer(tmp_path, precision=precision, max_epochs=8, limit_val_batches=0).fit(model, data)
    (last,) = trainer(tmp_path, precision=precision).validate(model, data, verbose=False)
    assert last["val_bound"] < first["val_bound"] - 0.5


def test_in_mixed_precision_losses_are_precise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "bfloat16_pays", lambda: True)  # else nothing is rounded
    model, images = small(), pictures()
    noise = noise_of(model)
    exact = bound(model, images, noise)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(images, noise)
        rounded, kl = bound(model, images, noise), model.kl_by_glimpse(output)
    assert {a.dtype for a in (rounded, kl, output.logits, output.means)} == {torch.float32}
    assert not torch.equal(rounded, exact)
    assert torch.allclose(rounded, exact, rtol=0.02)


def test_checkpoints_come_back(tmp_path: Path) -> None:
    norm = RMSNorm(eps=1e-3)
    model = small(norm=norm, peephole=True, filter_norm="eps", read_size=None)
    keep = ModelCheckpoint(tmp_path, "kept")
    trainer(tmp_path, callbacks=[keep]).fit(model, Pictures(pictures()))
    stored = torch.load(tmp_path / "kept.ckpt", weights_only=True)["hyper_parameters"]
    assert stored["_class_path"] == "ln_zoo.models.DRAW"
    assert stored["image_size"] == [4, 6]
    expected = model.per_example((pictures(),))
    for again in (
        DRAW.load_from_checkpoint(tmp_path / "kept.ckpt", weights_only=True),
        ZooModule.load_from_checkpoint(tmp_path / "kept.ckpt"),
        DRAW(**model.hparams),
    ):
        assert type(again) is DRAW
        assert again.hparams == model.hparams
        assert again.network.encoder.sites["cell"].norm == norm  # type: ignore[index]
        again.load_state_dict(model.state_dict())
        found = again.per_example((pictures(),))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


# Pictures


def test_pictures_depend_on_their_seed_alone() -> None:
    model, images = small(), pictures()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    made = [model.generate_samples(4, seed) for seed in (1, 1, 2)]
    drawn = [model.reconstruct(images, seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    for a, b, c in (made, drawn):
        assert torch.equal(a.logits, b.logits)
        assert not torch.equal(a.logits, c.logits)
        assert not a.logits.requires_grad
        assert a.trace is None
    assert made[0].logits.shape == (4, *SIZE)
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(3, 4, 2, generator=generator)
    noise = torch.randn(3, 5, 2, generator=generator.manual_seed(1))
    with torch.no_grad():
        assert torch.equal(made[0].logits, model.network.generate(latents).logits)
        assert torch.equal(drawn[0].logits, model(images, noise).logits)


def test_pictures_with_their_traces() -> None:
    model = small()
    made = model.generate_samples(4, trace=True).trace
    assert made is not None
    assert made.canvases.shape == (4, 4, *SIZE)
    assert made.read is None
    assert made.write is not None
    assert made.write.shape == (3, 4, 5)
    drawn = model.reconstruct(pictures(), trace=True).trace
    assert drawn is not None
    assert drawn.read is not None
    assert drawn.read.shape == (3, 5, 5)
    # Gregor et al.'s stride of 2 filters: the distance between them; it is positive.
    assert drawn.read[..., 2:].gt(0).all()
    plain = small(read_size=None, write_size=None).reconstruct(pictures(), trace=True).trace
    assert plain is not None
    assert plain.read is plain.write is None


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match=r"number.* 0"):
        small().generate_samples(0)
    with pytest.raises(ValueError, match=r"images.*\(N, 4, 6\)"):
        small().reconstruct(torch.rand(2, 1, 6, 4))


def test_samples_have_the_likelihoods_of_the_model() -> None:
    """Images drawn of made-up canvases are as frequent as quadrature says."""
    model = tiny()
    logits = model.generate_samples(20_000, seed=3).logits
    torch.manual_seed(0)
    drawn = logits.sigmoid().bernoulli().flatten(1).long()
    codes = (drawn << torch.arange(6)).sum(1)
    share = codes.bincount(minlength=64) / 20_000
    expected = log_likelihoods(model, all_pictures()).exp()
    error = (expected * (1 - expected) / 20_000).sqrt()
    assert ((share - expected) / error).square().mean() < 1.7  # 64 shares: 1 +- 0.18
