"""The permutation-invariant MNIST classifier (paper, section 6.6)."""

from __future__ import annotations

import pytest
import torch
from reference import layer_norm
from torch import Tensor
from torch.nn import functional as F
from training import quiet_trainer

from ln_zoo.data import BatchLoader, Tensors
from ln_zoo.layers import Linear
from ln_zoo.models import MLPClassifier
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm


def layers(model: MLPClassifier) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm(), WeightNorm(), BatchNorm(), Identity()])
@pytest.mark.parametrize("given", [None, True, False])
def test_which_layers_the_norm_acts_on(norm: Norm, given: bool | None) -> None:
    model = MLPClassifier(20, [6, 5], 4, norm=norm, normalize_logits=given)
    last = isinstance(norm, BatchNorm) if given is None else given
    at_last = norm if last else Identity()
    assert [layer.site.norm for layer in layers(model)] == [norm, norm, at_last]


def test_equals_the_papers_equations() -> None:
    torch.manual_seed(0)
    model = MLPClassifier(20, [6, 5], 4, norm=LayerNorm(eps=0.0)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(7, 1, 4, 5, dtype=torch.float64)
    h = x.reshape(7, 20)
    *hidden, last = layers(model)
    for layer in hidden:
        h = (layer.site.gain * layer_norm(h @ layer.weight.T, 0.0) + layer.bias).clamp(min=0)
    expected = h @ last.weight.T + last.bias
    assert (model(x) - expected).abs().max() < 1e-12


def test_losses_where_float32_has_none_left() -> None:
    class Sure(MLPClassifier):
        """Logits so far apart that the loss of float32 is 0."""

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.tensor([[20.0, 0.0]]).expand(len(inputs), 2)

    model = Sure(2, [], 2)
    batch = (torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    assert float(F.cross_entropy(model(batch[0]), batch[1])) == 0.0
    scores = model.per_example(batch)
    assert scores["nll"].dtype == torch.float64
    expected = torch.log1p(torch.exp(torch.tensor(-20.0, dtype=torch.float64)))
    # 20 less the logarithm of exp(20) + 1: to the resolution of float64 at 20.
    assert (scores["nll"] - expected).abs().max() < 4e-15

    # As the trainer logs it: not rounded on the way either.
    (logged,) = quiet_trainer().test(model, BatchLoader(Tensors(*batch), 2), verbose=False)
    assert abs(logged["test_nll"] - float(expected)) < 4e-15


def test_tanh_and_no_hidden_layer() -> None:
    model = MLPClassifier(6, [5], 3, norm=Identity(), activation="tanh")
    x = torch.randn(2, 6)
    first, last = layers(model)
    assert torch.allclose(model(x), last(torch.tanh(first(x))))
    # Without a hidden layer it is logistic regression.
    (last,) = layers(MLPClassifier(6, [], 3))
    assert last.site.norm == Identity()
