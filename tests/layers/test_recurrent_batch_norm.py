"""Batch normalisation inside recurrent layers: a row of statistics for each time step."""

from __future__ import annotations

import pytest
import torch
from engines import cpu_engines
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from ln_zoo.layers import GRU, LSTM, RNN, LSTMCell
from ln_zoo.norms import BatchNorm

F64 = torch.float64


def input_statistics(layer: torch.nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of W x at each time step, (T, 4H)."""
    products = x @ layer.weight_ih_l0.T
    return products.mean(1), products.var(1)


def test_running_averages_after_two_batches() -> None:
    layer = LSTM(3, 4, norm=BatchNorm(max_steps=5, momentum=0.4), dtype=F64)
    first, second = torch.randn(2, 3, 6, 3, dtype=F64)
    site = layer.sites["l0"]["input"]
    layer(first)
    mean, var = input_statistics(layer, first)
    torch.testing.assert_close(site.running_mean[:3], mean)
    torch.testing.assert_close(site.running_var[:3], var)
    layer(second)
    mean2, var2 = input_statistics(layer, second)
    # The second of 1 / 0.4 = 2.5 batches still counts as one half.
    torch.testing.assert_close(site.running_mean[:3], (mean + mean2) / 2)
    torch.testing.assert_close(site.running_var[:3], (var + var2) / 2)
    third = torch.randn(3, 6, 3, dtype=F64)
    layer(third)
    mean3, _ = input_statistics(layer, third)
    torch.testing.assert_close(site.running_mean[:3], 0.6 * (mean + mean2) / 2 + 0.4 * mean3)
    assert site.num_batches_tracked.tolist() == [3, 3, 3, 0, 0]
    assert torch.equal(site.running_mean[3:], torch.zeros(2, 16, dtype=F64))
    assert torch.equal(site.running_var[3:], torch.ones(2, 16, dtype=F64))


@pytest.mark.parametrize("cls", [LSTM, GRU, RNN])
def test_sequences_longer_than_max_steps(cls: type) -> None:
    layer = cls(3, 4, norm=BatchNorm(max_steps=2), dtype=F64)
    x = torch.randn(7, 5, 3, dtype=F64)
    output, _ = layer(x)
    assert output.isfinite().all()
    site = next(s for s in layer.sites["l0"].values() if s.normalizes)
    assert site.running_mean.shape[0] == 2
    assert site.num_batches_tracked.tolist() == [1, 6]  # steps 1 to 6 share the last row
    evaluated, _ = layer.eval()(x)
    assert evaluated.isfinite().all()


@pytest.mark.parametrize("cls", [LSTM, GRU, RNN])
def test_the_last_row_serves_all_steps_beyond_max_steps(loop: str, cls: type) -> None:
    layer = cls(3, 4, num_layers=2, norm=BatchNorm(max_steps=3), dtype=F64)
    for _ in range(2):
        layer(torch.randn(7, 5, 3, dtype=F64))
    # The same with rows enough, of which the later ones are copies of the last.
    wide = cls(3, 4, num_layers=2, norm=BatchNorm(max_steps=11), dtype=F64)
    state = layer.state_dict()
    for name, rows in state.items():
        if name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            state[name] = torch.cat([rows, *[rows[-1:]] * 8])
    wide.load_state_dict(state)
    long = torch.randn(11, 5, 3, dtype=F64)
    output, _ = layer.eval()(long)
    expected, _ = wide.eval()(long)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


def test_evaluation_beyond_the_trained_length_uses_the_last_row_reached() -> None:
    layer = LSTM(3, 4, norm=BatchNorm(max_steps=50), dtype=F64)
    layer(torch.randn(4, 6, 3, dtype=F64))
    layer.eval()
    long = torch.randn(9, 6, 3, dtype=F64)
    expected, _ = layer(long)
    # Filling the later rows with the last one reached, by hand, changes nothing ...
    for site in layer.sites["l0"].values():
        site.running_mean[4:] = site.running_mean[3]
        site.running_var[4:] = site.running_var[3]
        site.num_batches_tracked[4:] = 1
    output, _ = layer(long)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    # ... and other rows there would.
    for site in layer.sites["l0"].values():
        site.running_mean[4:] += 1
    output, _ = layer(long)
    torch.testing.assert_close(output[:4], expected[:4], rtol=0, atol=0)
    assert (output[4:] - expected[4:]).abs().amax(dim=(1, 2)).min() > 1e-6


def test_evaluation_treats_each_example_alone() -> None:
    layer = LSTM(3, 4, norm=BatchNorm(), dtype=F64)
    x = torch.randn(5, 6, 3, dtype=F64)
    layer(x)
    output, _ = layer.eval()(x)
    alone, _ = layer(x[:, 2])
    torch.testing.assert_close(alone, output[:, 2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_padding_never_enters(bidirectional: bool) -> None:
    lengths = [5, 3, 3, 2]
    layer = LSTM(3, 4, bidirectional=bidirectional, norm=BatchNorm(), dtype=F64)
    x = torch.randn(5, 4, 3, dtype=F64)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    results = []
    for padding in (0.0, 1e6):
        layer.load_state_dict(state)
        padded = x.clone()
        for example, length in enumerate(lengths):
            padded[length:, example] = padding
        output, _ = layer(pack_padded_sequence(padded, lengths))
        results.append(
            (pad_packed_sequence(output)[0], layer.state_dict()["sites.l0.input.running_mean"])
        )
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_the_statistics_of_a_step_are_those_of_the_examples_active_then() -> None:
    layer = LSTM(3, 4, bidirectional=True, norm=BatchNorm(), dtype=F64)
    sequences = [torch.randn(n, 3, dtype=F64) for n in (4, 2, 2)]
    layer(pack_sequence(sequences))
    forward, reverse = (layer.sites[name]["input"] for name in ("l0", "l0_reverse"))
    at_0 = torch.stack([s[0] for s in sequences]) @ layer.weight_ih_l0.T
    torch.testing.assert_close(forward.running_mean[0], at_0.mean(0))
    # In the reverse direction step 0 is each sequence's own last element.
    at_end = torch.stack([s[-1] for s in sequences]) @ layer.weight_ih_l0_reverse.T
    torch.testing.assert_close(reverse.running_mean[0], at_end.mean(0))
    # One example is not a batch: steps 2 and 3 leave no trace.
    assert forward.num_batches_tracked[:5].tolist() == [1, 1, 0, 0, 0]


def test_gains_start_at_a_tenth() -> None:
    gains = [p for n, p in LSTM(3, 4, norm=BatchNorm()).named_parameters() if n.endswith("gain")]
    assert len(gains) == 3
    assert all((gain == 0.1).all() for gain in gains)


def test_a_batch_of_one_cannot_train() -> None:
    layer = LSTM(3, 4, norm=BatchNorm())
    for x in (torch.randn(5, 1, 3), torch.randn(5, 3), pack_sequence([torch.randn(5, 3)])):
        with pytest.raises(ValueError, match="BatchNorm needs at least 2 examples"):
            layer(x)
    layer.eval()(torch.randn(5, 3))


def gradients_of_equal_examples(cls: type, steps: int, noise: float) -> list[Tensor]:
    """Of a layer of 100 units that reads the same pixels in all examples, as in images' margins.

    Each example has a loss of its own, so that gradients differ where nothing else does.
    """
    torch.manual_seed(0)
    layer = cls(1, 100, norm=BatchNorm(max_steps=steps))
    assert next(iter(layer.sites["l0"].values())).norm.recurrent_gain == 0.1
    x = torch.rand(steps, 1, 1).expand(steps, 8, 1)
    h = noise * torch.randn(1, 8, 100)
    output, _ = layer(x, (h, torch.zeros_like(h)) if cls is LSTM else h)
    assert output.isfinite().all()
    (output[-1] * torch.randn(8, 100)).sum().backward()
    return [p.grad for p in layer.parameters()]


@pytest.mark.parametrize("kernels", [*cpu_engines(), "0"])
@pytest.mark.parametrize("cls", [LSTM, GRU, RNN])
def test_a_batch_of_equal_examples_has_finite_gradients(
    cls: type, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without variance every step back may multiply by 0.1 / sqrt(eps), which is 32."""
    monkeypatch.setenv("LN_ZOO_KERNELS", kernels)
    found = gradients_of_equal_examples(cls, 16, noise=0.0)
    assert all(grad.isfinite().all() for grad in found)
    assert max(grad.abs().max() for grad in found) > 0


@pytest.mark.parametrize("cls", [LSTM, GRU, RNN])
def test_noise_on_the_initial_state_keeps_gradients_finite(
    cls: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the 784 pixels of an image, where float32 overflows without (Cooijmans et al. 2017)."""
    monkeypatch.setenv("LN_ZOO_KERNELS", "native")
    found = gradients_of_equal_examples(cls, 784, noise=0.1)
    assert all(grad.isfinite().all() for grad in found)
    found = gradients_of_equal_examples(cls, 784, noise=0.0)
    assert not all(grad.isfinite().all() for grad in found)


def test_a_cell_wants_to_know_the_step() -> None:
    cell = LSTMCell(3, 4, norm=BatchNorm())
    x = torch.randn(5, 3)
    with pytest.raises(ValueError, match=r"BatchNorm keeps statistics for each time step.*step=t"):
        cell(x)
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        cell(x, step=-1)
    cell(x, step=3)
    assert cell.sites["input"].num_batches_tracked[:5].tolist() == [0, 0, 0, 1, 0]
    # Where the norm does not act, nothing is asked.
    LSTMCell(3, 4, norm=BatchNorm(), normalize=())(x)


def test_state_dicts_hold_a_row_for_each_step() -> None:
    state = LSTM(3, 4, norm=BatchNorm(max_steps=7)).state_dict()
    assert state["sites.l0.recurrent.running_mean"].shape == (7, 16)
    assert state["sites.l0.cell.running_var"].shape == (7, 4)
