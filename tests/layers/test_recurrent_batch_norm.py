"""Recurrent batch norm: gradients of equal examples.

Against the equations: `test_against_reference.py`; kernels: tests/ops/test_batch_recurrence.py.
"""

from __future__ import annotations

import pytest
import torch

from ln_zoo.layers import GRU, LSTM
from ln_zoo.norms import BatchNorm


@pytest.mark.parametrize("noise", [0.1, 0.0])
@pytest.mark.parametrize("cls", [LSTM, GRU])
def test_noise_on_the_initial_state_keeps_gradients_finite(
    cls: type, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 units that read the same 784 pixels in all examples, as in images' margins.

    Without noise, float32 overflows (Cooijmans et al. 2017).
    """
    monkeypatch.setenv("LN_ZOO_KERNELS", "native")
    torch.manual_seed(0)
    layer = cls(1, 100, norm=BatchNorm(max_steps=784))
    assert layer.sites["l0"]["input"].norm.recurrent_gain == 0.1
    x = torch.rand(784, 1, 1).expand(784, 8, 1)
    h = noise * torch.randn(1, 8, 100)
    output, _ = layer(x, (h, torch.zeros_like(h)) if cls is LSTM else h)
    assert output.isfinite().all()
    (output[-1] * torch.randn(8, 100)).sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters()) == (noise > 0)
