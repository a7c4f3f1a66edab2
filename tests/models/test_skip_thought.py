"""Skip-thought vectors (Kiros et al. 2015; paper, section 6.3 and supplement, eq. 26-28)."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from accuracy import DOUBLE, assert_as_accurate, error, generic_loop, moved
from lightning.pytorch import LightningDataModule
from reference import read, run
from refusals import refuses
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training import quiet_trainer

from ln_zoo.callbacks.evaluation_loop import score
from ln_zoo.models import CombinedSkipThoughts, SkipThought, word_softmax
from ln_zoo.models.word_softmax import AdaptiveSoftmax, FullSoftmax, SampledSoftmax
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm

WORDS = [f"w{i}" for i in range(28)]
Sentences = tuple[Tensor, Tensor]
Batch = tuple[Sentences, Sentences, Sentences]


def small(**arguments: Any) -> SkipThought:
    torch.manual_seed(0)
    sizes = {"vocabulary": WORDS, "hidden_size": 8, "embedding_features": 5}
    model = SkipThought(**sizes | arguments)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "gain" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            if model.prenorm_bias and "weight_ih" in name:
                parameter[:, -1] += 0.3 * torch.randn(len(parameter))
    return model


def sentences(lengths: tuple[int, ...], seed: int) -> Sentences:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 30, (len(lengths), max(lengths)), generator=generator)
    for row, length in zip(tokens, lengths, strict=True):
        row[length - 1 :] = 0
    return tokens, torch.tensor(lengths)


def make_batch(source: tuple[int, ...] = (4, 4, 4)) -> Batch:
    return sentences(source, 1), sentences((3, 6, 1), 2), sentences((5, 2, 4), 3)


class Equations:
    """The model by eq. 26-28 of the supplement, word by word in float64.

    W_h h and W_x x are normalised apart, the two gates together; z and 1 - z are in torch's places.
    """

    def __init__(self, model: SkipThought) -> None:
        self.model = copy.deepcopy(model).double().requires_grad_(False)
        self.embedding = self.model.embedding.weight

    def run(self, x: Tensor, h: Tensor, layer: str, end: str = "l0") -> tuple[Tensor, Tensor]:
        if self.model.prenorm_bias:
            x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        (states,), last, _ = run(read("GRU", getattr(self.model, layer), end), [x], h[None])
        return states, last[0]

    def vector(self, words: list[int]) -> Tensor:
        x, encoder = self.embedding[words], self.model.encoder
        start = x.new_zeros(encoder.hidden_size)
        ends = {"l0": x, "l0_reverse": x.flip(0)}
        return torch.cat([self.run(ends[end], start, "encoder", end)[1] for end in encoder.sites])

    def nats(self, words: list[int], vector: Tensor, layer: str) -> float:
        x = torch.cat([torch.zeros_like(self.embedding[:1]), self.embedding[words[:-1]]])
        if self.model.conditioning == "every_step":
            x = torch.cat([x, vector.expand(len(x), -1)], 1)
        states, _ = self.run(x, vector, layer)
        logits = states @ self.model.softmax.weight.T + self.model.softmax.bias
        return float(nn.functional.cross_entropy(logits, torch.tensor(words), reduction="sum"))

    def of(self, batch: Batch) -> tuple[list[float], list[float]]:
        source, following, preceding = (
            [row[: int(n)].tolist() for row, n in zip(*part, strict=True)] for part in batch
        )
        vectors = [self.vector(words) for words in source]

        def nats(part: list[list[int]], layer: str) -> list[float]:
            return [self.nats(w, h, layer) for w, h in zip(part, vectors, strict=True)]

        return nats(following, "next_decoder"), nats(preceding, "previous_decoder")


@pytest.mark.parametrize("source", [(4, 4, 4), (2, 5, 3)], ids=["equal", "unequal"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"norm": Identity()},
        {"encoder": "bi"},
        {"conditioning": "every_step"},
        {"prenorm_bias": True, "conditioning": "every_step"},
    ],
    ids=["layer norm", "none", "bi", "every step", "bias inside"],
)
def test_loss_is_that_of_the_equations(arguments: dict[str, Any], source: tuple[int, ...]) -> None:
    model, batch = small(**arguments), make_batch(source)
    following, preceding = Equations(model).of(batch)
    exact = {"loss": torch.tensor(sum(following) + sum(preceding), dtype=torch.float64)}
    double = copy.deepcopy(model).double()
    assert_as_accurate({"loss": double.loss(batch)}, exact, lambda _: exact)

    def loop(k: int) -> dict[str, Tensor]:
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.data = moved(parameter, k)
        with generic_loop():
            return {"loss": other.loss(batch)}

    assert_as_accurate({"loss": model.loss(batch)}, exact, loop)

    scores = double.per_example(batch)
    assert scores["next_nll"][0].tolist() == pytest.approx(following, rel=1e-12)
    assert scores["previous_nll"][0].tolist() == pytest.approx(preceding, rel=1e-12)
    total = exact["loss"].item()
    assert scores["token_nll"][0].sum().item() == pytest.approx(total, rel=1e-12)
    assert scores["next_nll"][1].tolist() == [3, 6, 1]
    assert scores["token_nll"][1].tolist() == [8, 8, 5]
    found = double.predict_step(batch, 0)
    assert found["next_nats"].equal(scores["next_nll"][0])
    assert found["next_nats"].dtype == torch.float64
    assert found["previous_tokens"].tolist() == [5, 2, 4]

    model.loss_reduction = "token_mean"
    assert model.loss(batch).item() == pytest.approx(total / 21, rel=1e-5)


@pytest.mark.parametrize("conditioning", ["init", "every_step"])
def test_decoders_may_go_on_past_the_end(
    conditioning: Literal["init", "every_step"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they do on a GPU: the same loss and gradients as of packed sentences."""
    model = small(conditioning=conditioning, prenorm_bias=True).double()
    batch, parameters = make_batch((2, 5, 3)), list(model.parameters())
    loss = model.loss(batch)
    gradients = torch.autograd.grad(loss, parameters)
    asked = []
    monkeypatch.setattr(SkipThought, "_decodes_padding", lambda *given: not asked.append(given))
    padded = model.loss(batch)
    assert len(asked) == 2
    torch.testing.assert_close(padded, loss, rtol=1e-12, atol=0.0)
    found = torch.autograd.grad(padded, parameters)
    torch.testing.assert_close(found, gradients, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("norm", [LayerNorm(), BatchNorm()], ids=["layer norm", "batch norm"])
def test_statistics_over_a_batch_see_no_padding(norm: Norm) -> None:
    model, vectors = small(norm=norm), torch.empty(2, 3, device="meta")
    on_gpu = SimpleNamespace(is_cuda=True)
    assert not model._decodes_padding(model.next_decoder, vectors)
    says = model._decodes_padding(model.next_decoder, on_gpu)  # type: ignore[arg-type]
    assert says == (norm == LayerNorm())


@pytest.mark.parametrize("norm", [LayerNorm(), Identity()], ids=["layer norm", "none"])
def test_what_lies_behind_a_sentence_changes_nothing(norm: Norm) -> None:
    model = small(norm=norm).double()
    batch = make_batch((2, 5, 3))
    filled: list[Sentences] = []
    for tokens, lengths in batch:
        longer = nn.functional.pad(tokens, (0, 3))
        beyond = torch.arange(longer.shape[1]) >= lengths.unsqueeze(1)
        filled.append((longer.masked_fill(beyond, 17), lengths))
    losses = model.loss(batch), model.loss(tuple(filled))
    torch.testing.assert_close(*losses, rtol=1e-13, atol=0.0)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("prenorm_bias", [False, True])
def test_weights_start_as_in_the_released_code(prenorm_bias: bool) -> None:
    model = SkipThought(WORDS, 8, 8, prenorm_bias=prenorm_bias)
    for layer in (model.encoder, model.next_decoder, model.previous_decoder):
        if prenorm_bias:
            assert not layer.weight_ih_l0[:, 8:].any()
        for name in ("weight_ih_l0", "weight_hh_l0"):  # both square here
            for block in getattr(layer, name).detach()[:, :8].double().chunk(3):
                assert torch.allclose(block @ block.T, torch.eye(8).double(), atol=1e-5)
        assert not layer.bias_ih_l0.any()
        assert not layer.bias_hh_l0.any()
    wide = SkipThought(WORDS, hidden_size=64, embedding_features=50)
    for weight in (wide.embedding.weight, wide.encoder.weight_ih_l0, wide.softmax.weight):
        assert 0.09 < weight.abs().max() <= 0.1
        assert abs(weight.std() - 0.2 / math.sqrt(12)) < 0.006


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("encoder", ["uni", "bi"])
def test_vectors_are_those_of_step_by_step(encoder: str, eos: bool) -> None:
    model = small(encoder=encoder).double()
    texts = ["w3 w4 nowhere w5", "w1", "w9 " * 60, "w3 w4"]
    expected = []
    for text in texts:
        numbers = model.vocabulary.numbers(text.split()) + ([0] if eos else [])
        vector = Equations(model).vector(numbers)
        expected.append((vector / vector.norm()).numpy())
    found = model.encode(texts, batch_size=3, eos=eos)
    assert found.dtype == np.float32
    assert np.allclose(found, expected, atol=1e-7)
    # Neither the order nor the company of a sentence matters.
    assert np.allclose(model.encode(texts[::-1], batch_size=1, eos=eos)[::-1], found, atol=1e-7)
    raw = model.encode(texts, eos=eos, normalize=False)
    assert np.allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), found, atol=1e-6)
    assert not np.allclose(model.encode(texts, eos=not eos), found, atol=1e-3)


def test_encoding_leaves_the_mode_tells_unknown_words_once_and_refuses_others() -> None:
    model = small()
    model.encode(["w1"])
    assert model.training
    assert model.encode([]).shape == (0, 8)
    refuses("sentences", model.encode, "w1 w2", error=TypeError)
    refuses("sentence 1", model.encode, ["w1", " "])
    model = small()
    with pytest.warns(UserWarning, match="2 of 3"):
        found = model.encode(["foreign words", "w1 foreign", "palabras ajenas"])
    assert np.array_equal(found[0], found[2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.encode(["foreign"])


def test_combined_vectors_are_those_of_each_model_side_by_side() -> None:
    one, two = small(), small(encoder="bi", hidden_size=6)
    both = CombinedSkipThoughts(one, two)
    texts = ["w1 w2", "w3"]
    found = both.encode(texts, eos=False)
    assert np.array_equal(found[:, :8], one.encode(texts, eos=False))
    assert np.array_equal(found[:, 8:], two.encode(texts, eos=False))
    refuses("two", CombinedSkipThoughts, one)


def test_loss_in_blocks_is_that_of_all_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_softmax, "_BLOCK", (60, 60))  # two tokens of 30 words, and one left
    torch.manual_seed(0)
    softmax = FullSoftmax(6, 30).double()
    states = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    states.data[3] *= 3000  # a token that is next to impossible
    targets = torch.tensor([0, 29, 3, 3, 7])
    inputs = [states, *softmax.parameters()]
    found, exact = 2 * softmax.loss(states, targets), 2 * softmax.nll(states, targets).sum()
    assert exact > 200
    assert error(found, exact) < DOUBLE
    for pair in zip(*(torch.autograd.grad(loss, inputs) for loss in (found, exact)), strict=True):
        assert error(*pair) < DOUBLE


def test_adaptive_and_sampled_softmax() -> None:
    torch.manual_seed(0)
    softmax = AdaptiveSoftmax(8, 30, [5, 15])
    states = torch.randn(1, 8).expand(30, 8)
    assert (-softmax.nll(states, torch.arange(30))).exp().sum().item() == pytest.approx(1, abs=1e-5)
    assert softmax.loss(states, torch.arange(30)) == softmax.nll(states, torch.arange(30)).sum()
    torch.manual_seed(0)
    full, sampled = FullSoftmax(6, 50), SampledSoftmax(6, 50, samples=20_000)
    sampled.load_state_dict(full.state_dict())
    states, targets = torch.randn(40, 6), torch.randint(50, (40,))
    assert torch.equal(sampled.nll(states, targets), full.nll(states, targets))

    def gradients(softmax: FullSoftmax) -> Tensor:
        loss = softmax.loss(states, targets)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, softmax.parameters())])

    assert error(gradients(sampled), gradients(full)) < 0.05
    sampled.samples = 5
    assert error(gradients(sampled), gradients(full)) > 0.1
    for softmax in ("adaptive", "sampled"):
        model = small(softmax=softmax, softmax_samples=8)
        model.loss(make_batch()).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


class Triples(LightningDataModule):
    """Three batches, of which the last has other lengths."""

    def train_dataloader(self) -> DataLoader:
        batches = [make_batch(), make_batch((2, 2, 2)), make_batch((3, 3, 3))]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    val_dataloader = test_dataloader = train_dataloader

    def train_eval_dataloader(self, examples: int) -> DataLoader:
        return self.train_dataloader()


def test_training_lowers_what_validation_and_test_measure() -> None:
    torch.manual_seed(0)
    model = SkipThought(WORDS, hidden_size=16, embedding_features=8, lr=0.02)
    trainer = quiet_trainer(max_epochs=20, gradient_clip_val=5.0)
    data = Triples()
    before = trainer.validate(model, data, verbose=False)[0]
    with torch.no_grad():
        expected = [model.per_example(batch) for batch in data.val_dataloader()]
    for name in ("token_nll", "next_nll", "previous_nll"):
        nats, tokens = (torch.cat([s[name][i] for s in expected]).sum().item() for i in (0, 1))
        assert before[f"val_{name}"] == pytest.approx(nats / tokens, rel=1e-6)
    trainer.fit(model, data)
    assert trainer.callback_metrics["val_token_nll"] < 0.5 * before["val_token_nll"]
    tested = trainer.test(model, data, verbose=False)[0]
    # The ratio over the whole set, whatever the batches.
    assert score(trainer, data.test_dataloader(), "test") == pytest.approx(tested, rel=1e-6)


OWN = [f"w{i}" for i in range(20)]


@pytest.fixture
def model() -> SkipThought:
    return SkipThought(OWN, hidden_size=8, embedding_features=6)


def write(path: Path, vectors: dict[str, np.ndarray], header: bool = False) -> Path:
    lines = [f"{len(vectors)} {len(next(iter(vectors.values())))}"] if header else []
    lines += [" ".join([word, *(f"{x:.9g}" for x in vector)]) for word, vector in vectors.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("header", [True, False], ids=["word2vec", "GloVe"])
def test_words_of_others_are_mapped(model: SkipThought, tmp_path: Path, header: bool) -> None:
    """Where vectors are an affine map of the model's own, least squares find the inverse."""
    random = np.random.default_rng(0)
    away, shift = random.normal(size=(6, 6)), random.normal(size=6)
    own = model.embedding.weight.detach().double().numpy()
    given = {word: own[i + 2] @ away + shift for i, word in enumerate(OWN)}
    meant = {"neu": random.normal(size=6) / 10, "été": random.normal(size=6) / 10}
    given |= {word: vector @ away + shift for word, vector in meant.items()}
    given |= {"a_phrase": shift, "w3": given["w3"]}
    path = write(tmp_path / "vectors.txt", given, header)
    before = model.encode(["w1 neu été", "w3 w4"])
    assert model.expand_vocabulary(path) == 2
    found = model.expansion.vectors[[model.expansion.rows[word] for word in meant]]
    assert np.allclose(found.numpy(), list(meant.values()), atol=1e-4)

    # The encoder reads them like words of its own.
    other = SkipThought([*OWN, *meant], hidden_size=8, embedding_features=6)
    state = model.state_dict()
    for name, value in other.state_dict().items():
        value[: len(state[name])] = state[name]
    other.state_dict()["embedding.weight"][22:] = found
    after = model.encode(["w1 neu été", "w3 w4"])
    assert np.allclose(after, other.encode(["w1 neu été", "w3 w4"]), atol=1e-6)
    assert not np.allclose(after[0], before[0], atol=1e-3)
    assert np.array_equal(after[1], before[1])


def test_few_common_words_are_told_and_none_refused(model: SkipThought, tmp_path: Path) -> None:
    path = write(tmp_path / "vectors.txt", {"neu": np.ones(2)})
    message = "has no word that the model knows"
    assert str(path) in refuses(message, model.expand_vocabulary, path)
    assert model.expansion is None
    vectors = {word: np.ones(4) * i for i, word in enumerate(["w1", "w2", "neu"])}
    with pytest.warns(UserWarning, match=r"2 .* 5 "):
        model.expand_vocabulary(write(path, vectors))
