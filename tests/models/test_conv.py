"""The convolutional classifier (paper, section 6.7)."""

from __future__ import annotations

import pytest
import torch
from layer_results import randomised
from torch import Tensor, nn
from torch.nn import functional as F

from ln_zoo.models import ConvClassifier
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm

F64 = torch.float64
FORMS = [LayerNorm(), LayerNorm(convolution="unit"), LayerNorm(convolution="position")]
EVERY = [*FORMS, RMSNorm(), BatchNorm(), WeightNorm(), Identity()]


def small(norm: Norm, **arguments) -> ConvClassifier:
    torch.manual_seed(0)
    model = ConvClassifier((2, 9, 11), 4, ((3, 5), (6,)), 7, norm, **arguments).double()
    return randomised(model, 0.2)


def images(examples: int = 5) -> Tensor:
    return torch.randn(examples, 2, 9, 11, dtype=F64)


def normalised(a: Tensor, norm: Norm, layer: nn.Module) -> Tensor:
    if isinstance(norm, (WeightNorm, Identity)):
        return a
    dims = [d for d in range(a.dim()) if d != (1 if isinstance(norm, BatchNorm) else 0)]
    dims = [1] if norm == FORMS[2] else dims
    mean = 0 if isinstance(norm, RMSNorm) else a.mean(dims, keepdim=True)
    variance = (a - mean).square().mean(dims, keepdim=True)
    gain, shift = layer.site.gain, layer.site.shift
    if gain.dim() == 1 and a.dim() == 4:
        gain = gain[:, None, None]
    return (a - mean) / (variance + norm.eps) ** 0.5 * gain + (0 if shift is None else shift)


def effective(layer: nn.Module, norm: Norm) -> Tensor:
    if not isinstance(norm, WeightNorm):
        return layer.weight
    rows = zip(layer.site.scale, layer.weight, strict=True)
    return torch.stack([g * w / w.square().sum() ** 0.5 for g, w in rows])


@pytest.mark.parametrize("norm", EVERY, ids=repr)
def test_equals_the_equations(norm: Norm) -> None:
    """Of every layer but the logits the sums are normalised.

    The features go to the dense layer channel by channel, row by row.
    """
    model, x = small(norm), images()
    h = x
    for number in (0, 2, 5):
        layer = model.network[number]
        a = F.conv2d(h, effective(layer, norm), padding=1)
        h = (normalised(a, norm, layer) + layer.bias[:, None, None]).clamp(min=0)
        if number in (2, 5):
            rows, columns = h.shape[2] // 2, h.shape[3] // 2
            h = h[:, :, : 2 * rows, : 2 * columns].unfold(2, 2, 2).unfold(3, 2, 2).amax((4, 5))
    dense, logits = model.network[9], model.network[11]
    assert h.shape == (5, 6, 2, 2)
    a = h.contiguous().view(5, 24) @ effective(dense, norm).T
    h = (normalised(a, norm, dense) + dense.bias).clamp(min=0)
    expected = h @ logits.weight.T + logits.bias
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)


def test_without_normalisation_it_is_torchs_own_network() -> None:
    """Whose memory is in rows: the format of ours changes neither logits nor gradients."""
    model = small(Identity())
    twin = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(5, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(24, 7), nn.ReLU(), nn.Linear(7, 4),
    ).double()  # fmt: skip
    twin.load_state_dict(model.network.state_dict())
    x, labels = images(), torch.tensor([0, 1, 2, 3, 0])
    seen = []
    model.network[2].register_forward_hook(lambda module, args, output: seen.append(output))
    torch.testing.assert_close(model(x), twin(x), rtol=1e-12, atol=1e-12)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    for network in (model, twin):
        F.cross_entropy(network(x), labels).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-12)
    # Cards store tensors that lie in rows only.
    assert all(value.is_contiguous() for value in model.state_dict().values())


@pytest.mark.parametrize("size", [4, 5, 8, 28])
def test_sizes_of_images(size: int) -> None:
    model = ConvClassifier((1, size, size), norm=FORMS[1]).eval()
    assert model(torch.rand(2, 1, size, size)).shape == (2, 10)
