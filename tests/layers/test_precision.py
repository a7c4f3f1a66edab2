"""Autocast, the precision of states, and parameters without storage.

`ln_zoo.testing.NormCase` runs every layer and norm in half and double precision, and
tests/kernels/native/test_mixed_precision.py compares results of autocast with float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from layer_results import CELLS, LAYERS, assert_close, flat
from torch import Tensor, nn

from ln_zoo.layers import LSTM, Conv2d, Linear
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, Site, WeightNorm

NORMS = [Identity(), LayerNorm(), RMSNorm(), BatchNorm(), WeightNorm()]


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("norm", [Identity(), WeightNorm()], ids=["identity", "weight"])
def test_autocast_on_the_fused_loop_is_torchs(cls: type, norm: Norm) -> None:
    torch.manual_seed(18)
    theirs = getattr(nn, cls.__name__)(3, 4)
    torch.manual_seed(18)
    ours = cls(3, 4, norm=norm)
    x = torch.randn(5, 6, 3)
    with torch.autocast("cpu", torch.bfloat16):
        actual = flat(ours(x))
        try:
            expected = flat(theirs(x))
        except RuntimeError as error:
            pytest.skip(f"ours ran, torch's own does not on this processor: {error}")
    assert [t.dtype for t in actual] == [t.dtype for t in expected]
    assert_close([a.float() for a in actual], [a.float() for a in expected], 0, 0.01)


@dataclass(frozen=True)
class Spy(Norm):
    seen: list[torch.dtype] = field(default_factory=list)

    def init_params(self, site: Site) -> None:
        site.add_affine(1.0)

    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        self.seen.append(a.dtype)
        return site.affine(a)


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_see_single_precision(cls: type, dtype: torch.dtype) -> None:
    spy = Spy()
    layer = cls(3, 4, norm=spy)
    with torch.autocast("cpu", dtype):
        output, states = layer(torch.randn(5, 6, 3))
        # States fit back in, and half input is as good.
        layer(output.new_zeros(5, 6, 3), states)
    assert output.dtype == dtype
    assert {s.dtype for s in flat(states)} == {torch.float32}
    layer.to(dtype)(torch.randn(5, 6, 3).to(dtype))
    assert spy.seen
    assert set(spy.seen) == {torch.float32}


@pytest.mark.parametrize("mixed", [True, False], ids=["autocast", "bfloat16 layer"])
def test_the_cell_state_keeps_what_bfloat16_would_drop(mixed: bool) -> None:
    layer = LSTM(1, 1, norm=LayerNorm(), normalize=("cell",))
    with torch.no_grad():
        for parameter in (layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_hh_l0):
            parameter.zero_()
        # Nothing is forgotten, 2^-10 is added at each of 64 steps.
        layer.bias_ih_l0.copy_(torch.tensor([30.0, 30.0, 2**-10, 0.0]))
    dtype = torch.float32 if mixed else torch.bfloat16
    ones = torch.ones(1, 1, 1, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        _, (_, c) = layer.to(dtype)(torch.zeros(64, 1, 1, dtype=dtype), (0 * ones, ones))
    assert c.item() == pytest.approx(1 + 64 * 2**-10, abs=1e-5)


@pytest.mark.parametrize("cls", [Linear, Conv2d, *LAYERS, *CELLS])
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
def test_reset_parameters_fills_a_module_of_the_meta_device(cls: type, norm: Norm) -> None:
    sizes = (3, 4, 2) if cls is Conv2d else (3, 4)
    torch.manual_seed(0)
    real = cls(*sizes, norm=norm)
    module = cls(*sizes, norm=norm, device="meta").to_empty(device="cpu")
    for tensor in module.state_dict().values():
        tensor.fill_(7)
    torch.manual_seed(0)
    module.reset_parameters()
    for name, tensor in real.state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name]), name
