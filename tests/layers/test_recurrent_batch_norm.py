"""Recurrent batch norm: gradients of equal examples, and the time step of a cell.

Against the equations: `test_against_reference.py`; kernels: tests/ops/test_batch_recurrence.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ln_zoo.layers import GRU, LSTM, LSTMCell
from ln_zoo.norms import BatchNorm


def gradients_of_equal_examples(cls: type, steps: int, noise: float) -> list[Tensor]:
    """Gradients of 100 units that read the same pixels in all examples, as in images' margins."""
    torch.manual_seed(0)
    layer = cls(1, 100, norm=BatchNorm(max_steps=steps))
    assert next(iter(layer.sites["l0"].values())).norm.recurrent_gain == 0.1
    x = torch.rand(steps, 1, 1).expand(steps, 8, 1)
    h = noise * torch.randn(1, 8, 100)
    output, _ = layer(x, (h, torch.zeros_like(h)) if cls is LSTM else h)
    assert output.isfinite().all()
    (output[-1] * torch.randn(8, 100)).sum().backward()
    return [p.grad for p in layer.parameters()]


@pytest.mark.parametrize("cls", [LSTM, GRU])
def test_noise_on_the_initial_state_keeps_gradients_finite(
    cls: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the 784 pixels of an image, where float32 overflows without (Cooijmans et al. 2017)."""
    monkeypatch.setenv("LN_ZOO_KERNELS", "native")
    found = gradients_of_equal_examples(cls, 784, noise=0.1)
    assert all(grad.isfinite().all() for grad in found)
    found = gradients_of_equal_examples(cls, 784, noise=0.0)
    assert not all(grad.isfinite().all() for grad in found)


def test_a_cell_needs_the_step() -> None:
    cell = LSTMCell(3, 4, norm=BatchNorm())
    x = torch.randn(5, 3)
    with pytest.raises(ValueError, match=r"BatchNorm .*step=t"):
        cell(x)
    with pytest.raises(ValueError, match=r"step .*-1"):
        cell(x, step=-1)
    cell(x, step=3)
    assert cell.sites["input"].num_batches_tracked[:5].tolist() == [0, 0, 0, 1, 0]
    # No step is needed where the norm does not act.
    LSTMCell(3, 4, norm=BatchNorm(), normalize=())(x)
