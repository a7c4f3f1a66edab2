"""DRAW (Gregor et al. 2015; paper, section 6.4)."""

from __future__ import annotations

import math
import zlib
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from refusals import refuses
from torch import Tensor
from torch.distributions import Bernoulli, Normal
from torch.utils.data import DataLoader, TensorDataset
from training import Resumable, quiet_trainer

from ln_zoo.kernels.native import build
from ln_zoo.layers import DRAWNetwork, DRAWOutput
from ln_zoo.models import DRAW
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, RMSNorm, WeightNorm

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


def loader(images: Tensor, batch_size: int = 5) -> DataLoader[Any]:
    return DataLoader(TensorDataset(images), batch_size=batch_size)


def parts() -> Resumable:
    return Resumable((part,) for part in pictures(25).split(5))


def test_nats_are_those_of_independent_pixels() -> None:
    model, images = small().double(), pictures()
    output = model(images, noise_of(model))
    expected = -Bernoulli(logits=output.logits).log_prob(images[:, 0].double()).sum((1, 2))
    assert torch.allclose(model.nll(images, output), expected, rtol=1e-12)
    # Of probabilities it is the mean over what may be drawn of them.
    halves = torch.full((5, 1, *SIZE), 0.25)
    p = output.logits.sigmoid()
    expected = -(0.25 * p.log() + 0.75 * (1 - p).log()).sum((1, 2))
    assert torch.allclose(model.nll(halves, output), expected, rtol=1e-10)
    # Logits of 200, at which a float32 probability is 0 or 1.
    logits = torch.full((1, *SIZE), 200.0, requires_grad=True)
    images = torch.zeros(1, 1, *SIZE)
    nats = DRAW.nll(images, DRAWOutput(logits, None, None, torch.tensor(0), None))
    assert nats.item() == 24 * 200
    nats.sum().backward()
    assert logits.grad.eq(1).all()


def test_defaults_and_stored_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (DRAW().glimpses, DRAW().lr, DRAW().clip_norm) == (64, 1e-3, 10.0)
    names = {name for name, _ in small().named_parameters() if "sites" in name}
    cells = ("encoder", "decoder")
    assert names == {f"network.{c}.sites.cell.{p}" for c in cells for p in ("gain", "shift")}
    modes: list[str] = []
    monkeypatch.setattr(DRAWNetwork, "compile_glimpse", lambda network, mode: modes.append(mode))
    assert small(compile_mode="default").hparams["compile_mode"] is None
    assert modes == ["default"]


def test_measures_are_means_over_draws() -> None:
    model, images = small(), pictures()
    found = model._measure(images, 4, 3)
    generator = torch.Generator().manual_seed(zlib.crc32(images.numpy().tobytes()))
    drawn = [torch.randn((3, 5, 2), generator=generator) for _ in range(4)]
    outputs = [(noise, model(images, noise)) for noise in drawn]
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


def test_evaluation_does_not_depend_on_earlier_samples() -> None:
    model = small(importance_samples=5, eval_samples=3)
    data = loader(pictures(12))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(model.per_example((pictures(),)))
        assert torch.equal(torch.get_rng_state(), before)
        (scores,) = quiet_trainer().test(model, data, verbose=False)
        found.append(scores)
    assert all(torch.equal(found[0][name], found[2][name]) for name in ("bound", "nll", "kl"))
    assert found[1] == found[3]
    assert set(found[1]) == {f"test_{n}" for n in ("bound", "nll", "kl", "importance_bound")}
    other = small(eval_seed=7)
    assert not torch.equal(other.per_example((pictures(),))["bound"], found[0]["bound"])


def test_metrics_are_means_over_images() -> None:
    model, images = small(val_samples=2, eval_samples=4), pictures(12)
    data = loader(images)
    with torch.no_grad():
        each = [model.eval()._measure(part, 4, 0) for part in images.split(5)]
    (found,) = quiet_trainer().test(model, data, verbose=False)
    for name in ("bound", "nll", "kl"):
        expected = torch.cat([values[name] for values in each]).mean().item()
        assert found[f"test_{name}"] == pytest.approx(expected, rel=1e-6)
    assert found["test_bound"] == pytest.approx(found["test_nll"] + found["test_kl"], rel=1e-6)
    assert "test_importance_bound" not in found
    (validated,) = quiet_trainer().validate(model, data, verbose=False)
    assert set(validated) == {"val_bound", "val_nll", "val_kl"}
    assert validated["val_bound"] != found["test_bound"]  # of two draws
    predicted = quiet_trainer().predict(model, data)
    for batch, values in zip(predicted, each, strict=True):
        assert torch.equal(batch["bound"], values["bound"])  # type: ignore[index,call-overload]


CHANGES: list[dict[str, Any]] = [
    {"peephole": True}, {"learn_initial_state": False}, {"learn_initial_canvas": False},
    {"norm": LayerNorm(eps=0.1)}, {"norm": RMSNorm()}, {"normalize": ["recurrent", "cell"]},
    {"norm": LayerNorm(per_gate=True), "normalize": ["input", "recurrent", "cell"]},
    {"filter_norm": "eps", "filter_eps": 0.1}, {"log_clamp": 0.05}, {"glimpses": 2},
    {"read_size": 3}, {"read_size": None}, {"write_size": 2}, {"write_size": None},
    {"latent_size": 3}, {"hidden_size": 5},
]  # fmt: skip
#: Changes of the initial weights.
STARTS: list[dict[str, Any]] = [
    {"forget_bias": 1.0}, {"init_std": 0.1}, {"init_std": None}, {"read_stride_bias": -1.0},
]  # fmt: skip


def randomized(model: DRAW) -> DRAW:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.4)
    return model


@pytest.mark.parametrize("options", [*CHANGES, *STARTS], ids=str)
def test_options_change_results(options: dict[str, Any]) -> None:
    models = [small(), small(**options)]
    if options not in STARTS:
        models = [randomized(model) for model in models]
    found = [bound(model, pictures(), noise_of(model)) for model in models]
    assert not torch.allclose(*found, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"norm": BatchNorm(), "filter_norm": "eps"},
        {"norm": WeightNorm(), "peephole": True, "read_size": None, "write_size": None},
        {"normalize": ["input", "recurrent", "cell"], "read_size": 1, "write_size": 1},
        {"norm": RMSNorm(), "learn_initial_state": False, "latent_size": 1},
        {"norm": Identity(), "init_std": None, "clip_norm": None, "glimpses": 1, "in": "64-true"},
        {"in": "bf16-mixed"},
        {"in": "bf16-true"},
    ],
    ids=str,
)
def test_every_option_trains_in_every_precision(options: dict[str, Any]) -> None:
    arguments = {"in": "32-true", "init_std": 0.1} | options
    precision: Any = arguments.pop("in")
    model = small(**arguments, lr=0.02)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    data = loader(pictures(30), 10)
    (first,) = quiet_trainer(precision=precision).validate(model, data, verbose=False)
    run = quiet_trainer(max_epochs=8, limit_val_batches=0, precision=precision)
    run.fit(model, data)
    assert run.global_step == 24
    (last,) = quiet_trainer(precision=precision).validate(model, data, verbose=False)
    assert last["val_bound"] < first["val_bound"] - (0.0 if precision == "32-true" else 0.5)
    # A stride of a single filter has no gradient; the rest of its map moves.
    assert all((p != before[name]).any() for name, p in model.named_parameters())
    assert all(p.isfinite().all() for p in model.parameters())


def bars(size: int = 6) -> Tensor:
    lines = torch.eye(size).unsqueeze(2).expand(size, size, size)
    return torch.cat([lines, lines.mT]).unsqueeze(1).contiguous()


def test_it_learns() -> None:
    """More than what each pixel is by itself: its mean over all images."""
    images = bars()
    mean = images.mean(0)
    pixels = -(mean * mean.log() + (1 - mean) * (1 - mean).log()).sum()
    torch.manual_seed(0)
    model = DRAW(
        image_size=(6, 6), glimpses=3, hidden_size=24, latent_size=4, write_size=4,
        lr=0.02, eval_samples=20, init_std=None,
    )  # fmt: skip
    data = loader(images.repeat(4, 1, 1, 1), 48)
    quiet_trainer(max_epochs=150, limit_val_batches=0).fit(model, data)
    (found,) = quiet_trainer().test(model, loader(images, 12), verbose=False)
    assert pixels > 16
    assert math.log(12) < found["test_bound"] < 0.9 * float(pixels)


def test_each_update_draws_noise_of_its_own(monkeypatch: Any) -> None:
    drawn: list[Tensor] = []
    draw = DRAW._noise

    def seen(self: DRAW, *arguments: Any) -> Tensor:
        drawn.append(draw(self, *arguments))
        return drawn[-1]

    monkeypatch.setattr(DRAW, "_noise", seen)
    quiet_trainer(max_steps=3).fit(small(), parts())
    assert [tuple(a.shape) for a in drawn] == [(3, 5, 2)] * 3
    # Each glimpse and each update its own.
    flat = torch.cat(drawn).flatten()
    assert len(flat.unique()) == len(flat)


class LossRecorder(Callback):
    def __init__(self) -> None:
        self.weights: list[float] = []  # of the divergence, by update

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        nll, kl = (trainer.callback_metrics[f"train_{name}"] for name in ("nll", "kl"))
        self.weights.append(float((outputs["loss"] - nll) / kl))


def test_warm_up_weights_the_divergence() -> None:
    for warm_up, expected in ((0, [1.0] * 5), (4, [0.0, 0.25, 0.5, 0.75, 1.0])):
        recorder = LossRecorder()
        model = small(init_std=0.5, kl_warmup=warm_up)
        quiet_trainer(recorder, max_steps=5, precision="64-true").fit(
            model, loader(pictures(25), 5)
        )
        assert recorder.weights == pytest.approx(expected)
    refuses("kl_warmup.* -1", small, kl_warmup=-1)


def test_training_logs_its_bound_and_the_share_of_clamped_logarithms() -> None:
    """Of 3 glimpses x 5 images: 2 latents' logarithms, 2 of each of 2 grids."""
    for options, share in (({}, 1 / 6), ({"read_size": None}, 0.0), ({"write_size": None}, 0.25)):
        model = small(init_std=1e-3, log_clamp=1.0, **options)
        if model.network.read is not None:
            with torch.no_grad():
                model.network.read.bias[3] = 2.0
        run = quiet_trainer(max_steps=1)
        run.fit(model, parts())
        logged = {name: float(value) for name, value in run.callback_metrics.items()}
        assert set(logged) == {"train_bound", "train_nll", "train_kl", "train_clamped"}
        assert logged["train_bound"] == pytest.approx(logged["train_nll"] + logged["train_kl"])
        assert logged["train_clamped"] == pytest.approx(share)


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
    for traced in (model.generate_samples(4, trace=True), model.reconstruct(images, trace=True)):
        assert torch.equal(traced.trace.canvases[-1], traced.logits)
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(3, 4, 2, generator=generator)
    noise = torch.randn(3, 5, 2, generator=generator.manual_seed(1))
    with torch.no_grad():
        assert torch.equal(made[0].logits, model.network.generate(latents).logits)
        assert torch.equal(drawn[0].logits, model(images, noise).logits)


def test_what_cannot_be_drawn() -> None:
    refuses(r"number.* 0", small().generate_samples, 0)
    refuses(r"images.*\(N, 4, 6\)", small().reconstruct, torch.rand(2, 1, 6, 4))
    # Made-up ones have no divergence.
    refuses("image", DRAW.kl_by_glimpse, small().generate_samples(2))
