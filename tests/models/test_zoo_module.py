"""What every model shares: arguments in plain values, checkpoints, noise that goes on, clipping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_support import same
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from refusals import refuses
from torch import Tensor
from training import quiet_trainer

import ln_zoo.data
from ln_zoo.models import (
    DRAW,
    AttentiveReader,
    ConvClassifier,
    Handwriting,
    MLPClassifier,
    OrderEmbedding,
    SequenceClassifier,
    SkipThought,
    ZooModule,
)
from ln_zoo.models.base import fused_on_cpu
from ln_zoo.models.run_counter import RunCounter
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm, to_config


class Noisy(MLPClassifier):
    """A model that draws numbers while it trains, and has an argument of its own."""

    def __init__(self, noise: float, norm: Norm | None = None, lr: float = 1e-2) -> None:
        super().__init__(64, [8], norm=norm, lr=lr)
        self.noise = noise

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        images = images + self.noise * torch.randn_like(images)
        return super().training_step((images, labels), batch_idx)


class Doubled(DRAW):
    """A model that passes its parent another value of an argument with the same name."""

    def __init__(self, glimpses: int, norm: Norm | None = None) -> None:
        super().__init__((8, 8), 2 * glimpses, 6, 2, norm=norm, kl_warmup=5)


@dataclass(frozen=True)
class OwnNorm(Norm):
    scale: float = 2.0

    def normalize(self, site, a, step=None):
        return a * self.scale


data = partial(ln_zoo.data.Digits, batch_size=20, train_size=100)


def test_stores_what_is_in_use_not_what_was_given() -> None:
    for norm, logits in ((None, False), (BatchNorm(momentum=0.3), True)):
        model = MLPClassifier(norm=norm)
        assert model.hparams["normalize_logits"] is logits
        assert model.hparams["hidden_sizes"] == [1000, 1000]
        assert model.hparams["norm"]["class_path"].startswith("ln_zoo.norms.")
        assert model.hparams_initial == model.hparams
    assert model.hparams["norm"]["init_args"]["momentum"] == 0.3
    # Loggers get the size of a vocabulary.
    model = OrderEmbedding(["a", "cat"], hidden_size=4)
    assert model.hparams["vocabulary"] == ["a", "cat"]
    assert model.hparams_initial["vocabulary"] == "2 words"
    assert model.hparams_initial["margin"] == model.margin


def test_stores_the_arguments_of_a_subclass_and_uses_those_of_its_parent() -> None:
    model = Doubled(2)
    assert (model.glimpses, model.kl_warmup) == (4, 5)
    assert model.hparams == {"glimpses": 2, "norm": to_config(LayerNorm())}


def test_refuses_a_norm_that_cannot_be_stored_and_is_abstract() -> None:
    refuses(r"ZooModule.*configure_optimizers", ZooModule, error=TypeError)

    class Plain(Norm):
        pass

    refuses("dataclass", MLPClassifier, norm=Plain(), error=TypeError)


draw = partial(DRAW, (8, 8), glimpses=3, hidden_size=6, latent_size=2, write_size=3)
images = partial(ln_zoo.data.BinarizedDigits, 8, batch_size=5, train_size=15)
#: Three parts of most lines, over which a model carries its state.
lines = partial(
    ln_zoo.data.SyntheticHandwriting, batch_size=4, length_mode="tbptt", max_points=20,
    train_size=12, val_size=4, test_size=4, characters=3,
)  # fmt: skip
books = partial(ln_zoo.data.SyntheticBooks, books=5, paragraphs=3, batch_size=4)
questions = partial(
    ln_zoo.data.SyntheticClozeQA, batch_size=8, num_entities=4, passage_sentences=2,
    train_size=24, val_size=10, test_size=10,
)  # fmt: skip
scenes = partial(ln_zoo.data.SyntheticScenes, batch_size=8, train_size=16, val_size=4, test_size=4)
small_order = partial(OrderEmbedding, image_features=256, embedding_features=4, hidden_size=5)
small_skip_thought = partial(SkipThought, hidden_size=8, embedding_features=5)
LEGACY = {"softmax": "sampled", "adam_bias_correction": "legacy"}


@pytest.mark.filterwarnings("ignore:the alphabet")
@pytest.mark.parametrize(
    ("data", "model"),
    [
        (data, lambda data: Noisy(0.5, norm=RMSNorm())),
        # Dropout and the names of entities.
        (questions, lambda data: AttentiveReader(data.vocabulary, 4, dropout=0.5)),
        (images, lambda data: draw()),
        (images, lambda data: draw(norm=BatchNorm(max_steps=3))),
        (lines, lambda data: Handwriting(7, 2, mixture_components=2, weight_noise=0.1)),
        (books, lambda data: small_skip_thought(data.vocabulary, **LEGACY)),
        (scenes, lambda data: small_order(data.vocabulary, word_dropout=0.5)),
    ],
    ids=["noise", "dropout", "draw", "draw-batch-norm", "lines", "softmax", "words"],
)
def test_a_resumed_run_is_one_never_interrupted(
    tmp_path: Path, data: Callable[[], Any], model: Callable[[Any], ZooModule]
) -> None:
    def fit(seed: int, start: Path | None = None) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        given = data()
        trained = model(given)
        keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
        runner = quiet_trainer(keep, max_steps=8)
        runner.fit(trained, datamodule=given, ckpt_path=start, weights_only=True)
        return trained.state_dict()

    whole = fit(1)
    for step in (2, 3, 5, 7):  # within epochs of two to five steps, and at their ends
        resumed = fit(99, tmp_path / f"step={step}.ckpt")
        assert same(whole, resumed), step


@pytest.mark.parametrize(
    ("data", "model"),
    [
        (questions, AttentiveReader([*questions().vocabulary, "another"], 4)),
        (scenes, small_order(["a", "dog"])),
        (books, small_skip_thought(["a", "dog"])),
    ],
    ids=["passages", "captions", "sentences"],
)
def test_data_with_other_words_fail(data: Callable[[], Any], model: ZooModule) -> None:
    refuses("vocabulary=", quiet_trainer(max_steps=1).fit, model, datamodule=data())


#: The largest derivative is clipped, not the norm.
VALUE = {"clip_mode": "value", "clip_bound": 0.01}


class Gradients(Callback):
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.found = torch.cat([p.grad.flatten() for p in pl_module.parameters()])


@pytest.mark.filterwarnings("ignore:the alphabet")
@pytest.mark.parametrize(
    ("data", "model", "of_trainer", "expected"),
    [
        (images, draw(init_std=1.0), None, 10.0),
        (images, draw(init_std=1.0, clip_norm=0.5), None, 0.5),
        (images, draw(init_std=1.0, clip_norm=100.0), 0.25, 0.25),
        (images, draw(init_std=1.0, clip_norm=None), None, None),
        (lines, Handwriting(7, clip_bound=0.5, loss_reduction="line"), None, 0.5),
        (lines, Handwriting(7, clip_bound=100.0, loss_reduction="line"), 0.5, 0.5),
        (lines, Handwriting(7, clip_mode="none", loss_reduction="line"), None, None),
        (lines, Handwriting(7, **VALUE, loss_reduction="line"), None, 0.01),
        (scenes, small_order(scenes().vocabulary, clip="global"), None, 2.0),
        (scenes, small_order(scenes().vocabulary, clip="global", clip_norm=0.5), None, 0.5),
        (scenes, small_order(scenes().vocabulary, clip="per_tensor"), 0.25, 0.25),
        (scenes, small_order(scenes().vocabulary, clip="none"), 0.125, 0.125),
        (scenes, small_order(scenes().vocabulary, clip="none"), None, None),
    ],
)
def test_gradients_are_clipped(
    data: Callable[[], Any], model: ZooModule, of_trainer: float | None, expected: float | None
) -> None:
    """By the model's bound, over which the trainer's has priority."""
    seen = Gradients()
    quiet_trainer(seen, max_steps=1, gradient_clip_val=of_trainer).fit(model, datamodule=data())
    largest = model.hparams.get("clip_mode") == "value"
    found = (seen.found.abs().max() if largest else seen.found.norm()).item()
    assert found > 3 if expected is None else found == pytest.approx(expected, rel=1e-4)


POSITION, OTHERS = LayerNorm(convolution="position"), (RMSNorm(), BatchNorm(), WeightNorm())
LETTERS = "".join(map(chr, range(33, 112)))
HANDWRITING = 3_650_151 + 4_800  # torch's second biases of three layers are not in the sources
PIXELS = 42_410
MLP = 784 * 1000 + 1000 * 1000 + 1000 * 10 + 2010
#: Four convolutions, 7 x 7 positions of 64 channels into the dense layer, the logits.
CONV = 320 + 32 * 289 + 64 * 289 + 64 * 577 + (64 * 49 + 1) * 256 + 2570
CONV_UNITS = 2 * 32 * 28 * 28 + 2 * 64 * 14 * 14
#: Tables, LSTMs, square matrices and biases for 65,830 words and d = 240; torch's second biases.
READER = 2 * 65_830 * 240 + 65_830 + 4 * (4 * 240 * 240 + 480) + 6 * 240 * 240 + 720 + 1920
READER_WORDS = [*(f"w{i}" for i in range(65_300)), *(f"@entity{i}" for i in range(528))]
#: Table, three GRUs and softmax of the released code, 125.7 M.
SKIP = 20_000 * 620 + 3 * (620 + 2400 + 1) * 7200 + 2401 * 20_000
SKIP_STEPS = SKIP + 3 * 7200 + 2 * 2400 * 7200
SKIP_WORDS = [f"w{i}" for i in range(19_998)]
#: GRU 4.07 M with torch's second bias, image map 4.20 M, vectors of the two special tokens.
ORDER = 4_070_400 + 3_072 + 4_195_328 + 600


@pytest.mark.parametrize(
    ("cls", "arguments", "count"),
    [
        (MLPClassifier, {"norm": Identity()}, MLP),
        # Gains of the two hidden layers; under batch norm of all three.
        *((MLPClassifier, {"norm": n}, MLP + 2000) for n in (None, RMSNorm(), WeightNorm())),
        (MLPClassifier, {"norm": BatchNorm()}, MLP + 2010),
        (ConvClassifier, {"norm": Identity()}, CONV),
        *((ConvClassifier, {"norm": norm}, CONV + 448) for norm in (None, POSITION, *OTHERS)),
        # A gain and a shift for each unit of the convolutions, gains of the dense layer.
        (ConvClassifier, {"norm": LayerNorm(convolution="unit")}, CONV + 2 * CONV_UNITS + 256),
        # 4 x 100 x (1 + 100) weights, 800 biases, 2 x 100 initial states, 1,010 of the softmax.
        (SequenceClassifier, {"norm": Identity()}, PIXELS),
        # Gains of both terms (400 each), gain and shift of the cell (100 each).
        (SequenceClassifier, {}, PIXELS + 1000),
        (SequenceClassifier, {"norm": RMSNorm()}, PIXELS + 1000),
        (SequenceClassifier, {"norm": BatchNorm(max_steps=784)}, PIXELS + 1000),
        # A scale for each row of both weights.
        (SequenceClassifier, {"norm": WeightNorm()}, PIXELS + 800),
        (Handwriting, {"norm": Identity()}, HANDWRITING),
        (Handwriting, {"norm": Identity(), "peephole": True}, HANDWRITING + 3_600),
        # Gains of both sums (1600 each), gain and shift of the cell (400 each), for 3 layers; the
        # paper's shifts of both sums are the two biases.
        (Handwriting, {}, HANDWRITING + 12_000),
        (Handwriting, {"peephole": True}, HANDWRITING + 15_600),
        (Handwriting, {"norm": Identity(), "output_from": "top"}, 3_553_351 + 4_800),
        (Handwriting, {"norm": Identity(), "text": False}, 3_364_521 + 4_800),
        # Each further character has a column in the gates of three layers.
        (Handwriting, {"norm": Identity(), "alphabet": LETTERS}, HANDWRITING + 4_800 * 23),
        (AttentiveReader, {"norm": Identity()}, READER),
        (AttentiveReader, {"norm": Identity(), "initial_state": "learned"}, READER + 480),
        # For each LSTM gains of both terms (960 each), gain and shift of the cell; the paper's
        # shifts of both terms are the two biases.
        (AttentiveReader, {}, READER + 2 * 2_400),
        (AttentiveReader, {"norm": BatchNorm()}, READER + 2 * 2_400),
        (AttentiveReader, {"norm": BatchNorm(), "everywhere": True}, READER + 2 * 2_400 + 1_200),
        (SkipThought, {"norm": Identity()}, SKIP + 3 * 7200),
        # Four gains and biases, 12 D in each GRU; here the two biases of torch are the latter.
        (SkipThought, {}, SKIP - 3 * 7200 + 3 * 12 * 2400),
        # The code's own biases inside the normalisation are 3 D more.
        (SkipThought, {"prenorm_bias": True}, SKIP + 3 * 12 * 2400),
        # Two encoders of half the size; matrices of the vector in both decoders.
        (SkipThought, {"norm": Identity(), "encoder": "bi"}, SKIP + 3 * 7200 - 1200 * 7200),
        (SkipThought, {"norm": Identity(), "conditioning": "every_step"}, SKIP_STEPS),
        (OrderEmbedding, {"norm": Identity()}, ORDER),
        # 12,288 in the source: gains of both sums, and biases in place of which torch's two stand.
        (OrderEmbedding, {}, ORDER + 6_144),
        (OrderEmbedding, {"prenorm_bias": True}, ORDER + 6_144 + 3_072),
    ],
)
def test_numbers_of_parameters(cls: Any, arguments: dict[str, Any], count: int) -> None:
    words = {AttentiveReader: READER_WORDS, SkipThought: SKIP_WORDS}
    vocabulary = {"vocabulary": words[cls]} if cls in words else {}
    with torch.device("meta"):
        model = cls(**vocabulary, **arguments)
    assert sum(p.numel() for p in model.parameters()) == count


def test_a_subclass_keeps_its_own_arguments_and_a_users_norm(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, "kept")
    quiet_trainer(keep, max_epochs=1).fit(Noisy(0.25, norm=OwnNorm(3.0)), datamodule=data())
    hparams = torch.load(tmp_path / "kept.ckpt", weights_only=True)["hyper_parameters"]
    assert (hparams["noise"], hparams["_class_path"]) == (0.25, f"{__name__}.Noisy")
    model = ZooModule.load_from_checkpoint(tmp_path / "kept.ckpt")
    assert type(model) is Noisy
    assert (model.noise, model.network[1].site.norm) == (0.25, OwnNorm(3.0))

    # A model that was merely loaded has no past noise.
    def continued(seed: int) -> Tensor:
        model = Noisy.load_from_checkpoint(tmp_path / "kept.ckpt")
        torch.manual_seed(seed)
        quiet_trainer(max_epochs=1).fit(model, datamodule=data())
        return model.network[1].weight

    assert not torch.equal(continued(1), continued(2))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rmsprop"])
def test_optimizers_precisions_and_clipping(tmp_path: Path, optimizer: str, precision: str) -> None:
    """On a CPU; and from a checkpoint of the other precision, which says "fused" or not."""

    def run(model: SequenceClassifier, epochs: int, precision: str, **resumed) -> Trainer:
        options = {"max_epochs": epochs, "precision": precision, "gradient_clip_val": 1e-3}
        runner = quiet_trainer(ModelCheckpoint(tmp_path, precision), limit_val_batches=0, **options)
        runner.fit(model, datamodule=data(), **resumed)
        return runner

    def model() -> SequenceClassifier:
        torch.manual_seed(0)
        return SequenceClassifier(64, hidden_size=4, step_features=16, optimizer=optimizer)

    trained = model()
    start = {name: value.clone() for name, value in trained.state_dict().items()}
    runner = run(trained, 1, precision)
    fused = runner.optimizers[0].defaults.get("fused")
    assert bool(fused) is (precision == "32-true" and optimizer != "rmsprop")
    assert all((value != start[name]).any() for name, value in trained.state_dict().items())
    other = {"32-true": "bf16-mixed", "bf16-mixed": "32-true"}[precision]
    resumed = run(model(), 2, other, ckpt_path=tmp_path / f"{precision}.ckpt")
    assert resumed.global_step == 2 * runner.global_step
    # Without a trainer the fused form is for the CPU.
    assert fused_on_cpu(model()) == {"fused": True}
    assert fused_on_cpu(model().to("meta")) == {}


def test_every_process_has_noise_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """All begin with one seed; the first goes on as if it were alone."""
    monkeypatch.setattr(RunCounter, "begin", lambda *arguments: None)  # it reads a whole trainer
    drawn = []
    for rank in range(3):
        model = Noisy(0.1)
        model.trainer = SimpleNamespace(  # type: ignore[assignment]
            global_rank=rank, world_size=3, ckpt_path=None
        )
        torch.manual_seed(5)
        torch.rand(7)
        alone = torch.get_rng_state()
        model.on_train_start()
        drawn.append(torch.randn(4))
        if rank == 0:
            torch.set_rng_state(alone)
            assert torch.equal(torch.randn(4), drawn[0])
    assert not any(torch.equal(drawn[i], drawn[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_no_norm_is_stored_as_the_norm_that_does_nothing() -> None:
    class Plain(MLPClassifier):
        def __init__(self, norm: Norm | None = None) -> None:
            ZooModule.__init__(self)
            self.save_hyperparameters()
            self.resolve_hyperparameters(norm)

    assert Plain().hparams["norm"] == {"class_path": "ln_zoo.norms.Identity", "init_args": {}}


def test_names_of_0_1_still_work() -> None:
    with pytest.warns(DeprecationWarning, match="input_kinds"):

        class Old(MLPClassifier):
            takes = ("letters",)

            def __init__(self, width: int, norm: Norm | None = None) -> None:
                super().__init__(64, [width])
                self.remember(norm, width=width + 1)

    assert Old.input_kinds == ("letters",)
    with pytest.warns(DeprecationWarning, match="resolve_hyperparameters"):
        model = Old(8, RMSNorm())
    norm = {"class_path": "ln_zoo.norms.RMSNorm", "init_args": RMSNorm().__dict__}
    assert dict(model.hparams) == {"width": 9, "norm": norm}
