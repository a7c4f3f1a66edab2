"""Pixel-by-pixel MNIST (Cooijmans et al. 2017, section 5.1)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from training import quiet_trainer

from ln_zoo.data import BatchLoader, Tensors
from ln_zoo.models import SequenceClassifier
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm

NORMS = [LayerNorm(), RMSNorm(), WeightNorm(), Identity(), BatchNorm(max_steps=784)]


def small(**arguments: Any) -> SequenceClassifier:
    return SequenceClassifier(**{"in_features": 12, "hidden_size": 5} | arguments)


@pytest.mark.parametrize(
    ("cell", "norm"), [*zip(["lstm", "gru", "rnn", "lstm", "gru"], NORMS, strict=True)], ids=repr
)
def test_initial_weights(cell: Any, norm: Norm) -> None:
    torch.manual_seed(0)
    layer = (model := SequenceClassifier(norm=norm, cell=cell, num_layers=2)).recurrent
    for number, inputs in ((0, 1), (1, 100)):
        w_ih = getattr(layer, f"weight_ih_l{number}").double()
        assert w_ih.shape[1] == inputs
        # (gates * H, I) with orthonormal columns
        assert torch.allclose(w_ih.T @ w_ih, torch.eye(inputs).double(), atol=1e-5)
        blocks = list(getattr(layer, f"weight_hh_l{number}").double().split(100))
        candidate = blocks.pop({"lstm": 2, "gru": 2, "rnn": 0}[cell])
        assert candidate.equal(torch.eye(100).double())
        if blocks:
            # side by side they are H orthonormal rows of an H x (gates * H) matrix
            together = torch.cat([block.T for block in blocks], 1)
            assert torch.allclose(together @ together.T, torch.eye(100).double(), atol=1e-5)
        biases = getattr(layer, f"bias_ih_l{number}").split(100)
        for gate, bias in enumerate(biases):
            assert (bias == (1.0 if cell == "lstm" and gate == 1 else 0.0)).all()
        assert (getattr(layer, f"bias_hh_l{number}") == 0).all()
    assert torch.allclose(model.readout.weight @ model.readout.weight.T, torch.eye(10), atol=1e-5)
    assert 0.08 < model.initial_states.std() < 0.12


def test_weights_are_drawn_anew_in_half_precision() -> None:
    model = small(norm=LayerNorm(), hidden_size=20).bfloat16()
    model.reset_parameters()
    readout = model.readout.weight
    assert readout.dtype == torch.bfloat16
    product = readout.double() @ readout.double().T
    assert torch.allclose(product, torch.eye(10).double(), atol=0.02)


def test_pixels_in_order_rows_and_permuted() -> None:
    """Against torch's own LSTM."""
    images = torch.rand(4, 1, 3, 4, dtype=torch.float64)
    for arguments, sequence in (
        ({}, images.reshape(4, 12, 1)),
        ({"step_features": 4}, images.reshape(4, 3, 4)),
        ({"permuted": True, "permutation_seed": 3}, None),
        ({"permuted": True, "permutation_seed": 3, "step_features": 2}, None),
    ):
        model = small(norm=Identity(), **arguments).double()
        if sequence is None:
            order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
            pixels = images.reshape(4, 12)[:, order]
            sequence = pixels.reshape(4, -1, arguments.get("step_features", 1))
        lstm = torch.nn.LSTM(sequence.shape[2], 5, batch_first=True, dtype=torch.float64)
        lstm.load_state_dict(model.recurrent.state_dict())
        start = (state.expand(1, 4, 5).contiguous() for state in model.initial_states[:, 0])
        _, (h, _) = lstm(sequence, tuple(start))
        expected = h[0] @ model.readout.weight.T + model.readout.bias
        assert (model(images) - expected).abs().max() < 1e-12


def test_permutation_is_a_true_one_and_travels_with_the_weights() -> None:
    torch.manual_seed(0)
    model = SequenceClassifier(permuted=True, permutation_seed=1)
    assert model.permutation.sort().values.equal(torch.arange(784))
    torch.manual_seed(0)
    other = SequenceClassifier(permuted=True, permutation_seed=2)
    assert not other.permutation.equal(model.permutation)
    # Models of one seed differ in nothing but the order.
    assert other.recurrent.weight_hh_l0.equal(model.recurrent.weight_hh_l0)
    other.load_state_dict(model.state_dict())
    assert other.permutation.equal(model.permutation)
    state = SequenceClassifier().state_dict()
    assert "permutation" not in state
    with pytest.raises(RuntimeError, match="permutation"):  # another task's weights
        model.load_state_dict(state)


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
@pytest.mark.parametrize("permuted", [False, True])
def test_noise_on_the_initial_state_is_for_batch_statistics(norm: Norm, permuted: bool) -> None:
    model = small(norm=norm, permuted=permuted)
    assert model.initial_noise == (0.1 if isinstance(norm, BatchNorm) else 0.0)
    assert model.hparams["initial_noise"] == model.initial_noise
    assert small(norm=norm, initial_noise=0.3).initial_noise == 0.3
    x = torch.rand(3, 12)
    assert model(x).equal(model(x)) != isinstance(norm, BatchNorm)
    model.eval()
    assert model(x).equal(model(x))
    model.recurrent.sites.train()  # batch statistics in evaluation mode
    assert model(x).equal(model(x)) != isinstance(norm, BatchNorm)


def test_noise_has_the_deviation_asked_for() -> None:
    """With weights of zero and an open output gate, the logits show the initial state of an RNN."""
    torch.manual_seed(0)
    model = small(in_features=1, num_classes=5, cell="rnn", norm=Identity(), initial_noise=0.01)
    model.double()
    with torch.no_grad():
        model.recurrent.weight_ih_l0.zero_()
        model.initial_states.zero_()
        model.readout.weight.copy_(torch.eye(5))
    # h1 = tanh(h0) of small noise
    h = model(torch.zeros(20_000, 1, dtype=torch.float64))
    assert abs(float(h.detach().std()) / 0.01 - 1) < 0.02


@pytest.mark.parametrize(
    ("cell", "norm"), [("lstm", BatchNorm()), ("gru", LayerNorm()), ("rnn", BatchNorm())], ids=repr
)
def test_blank_first_pixels_have_finite_gradients(norm: Norm, cell: Any) -> None:
    """As in MNIST in order of the rows, where a hundred steps pass before the first stroke."""
    torch.manual_seed(0)
    model = SequenceClassifier(norm=norm, cell=cell, hidden_size=20)
    images = torch.zeros(8, 1, 28, 28)
    images[:, :, 5:20, 6:20] = torch.rand(8, 1, 15, 14)
    loss = F.cross_entropy(model(images), torch.randint(10, (8,)))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_where_and_when_norms_act() -> None:
    with pytest.warns(UserWarning, match="max_steps=12"):
        small(norm=BatchNorm(max_steps=5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small(norm=BatchNorm(max_steps=12))
        small(norm=BatchNorm(max_steps=4), step_features=3)
    model = small(normalize=["recurrent"])
    assert model.hparams["normalize"] == ["recurrent"]
    gains = [name for name, _ in model.named_parameters() if "gain" in name]
    assert gains == ["recurrent.sites.l0.recurrent.gain"]


@pytest.mark.parametrize("norm", [LayerNorm(), BatchNorm()], ids=["layer", "batch"])
def test_it_learns(norm: Norm) -> None:
    """Which of four rows is bright, read row by row; all but one in a hundred after training."""
    torch.manual_seed(0)

    def examples(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(4, (count,))
        rows = 0.3 * torch.rand(count, 4, 6)
        rows[torch.arange(count), labels] += 0.7
        return rows, labels

    sizes = {"in_features": 24, "num_classes": 4, "hidden_size": 16, "step_features": 6}
    model = SequenceClassifier(**sizes, norm=norm, lr=3e-3, permuted=True)
    loader = BatchLoader(Tensors(*examples(640)), 32, training=True, shuffle=True)
    trainer = quiet_trainer(max_epochs=8, gradient_clip_val=1.0)
    trainer.fit(model, loader)
    (scores,) = trainer.test(model, BatchLoader(Tensors(*examples(300)), 100), verbose=False)
    assert scores["test_accuracy"] > 0.99
    assert 0 < scores["test_nll"] < math.log(4) / 5
