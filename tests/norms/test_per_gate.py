"""`LayerNorm(per_gate=True)`: each gate of a recurrent layer has a mean and variance of its own.

Against the equations: tests/layers/test_against_reference.py and tests/ops/test_engines.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ln_zoo.layers import GRU, LSTM, RNN, Conv2d, Linear
from ln_zoo.norms import LayerNorm, Site

GATES: dict[Any, tuple[int, ...]] = {LSTM: (24,), GRU: (12, 6), RNN: (6,)}


@pytest.mark.parametrize("cls", GATES)
def test_groups_are_gates(cls: Any) -> None:
    joint, alone = (cls(3, 6, norm=LayerNorm(per_gate=value)) for value in (False, True))
    # One set of weights fits both.
    shapes = [{name: a.shape for name, a in of.state_dict().items()} for of in (joint, alone)]
    assert shapes[0] == shapes[1]
    last = "sum" if cls is RNN else "recurrent"
    for layer, groups in ((joint, GATES[cls]), (alone, (6,) * (sum(GATES[cls]) // 6))):
        assert layer.sites["l0"][last].to_spec().groups == groups


@pytest.mark.parametrize("form", ["channel", "unit", "position"])
def test_it_changes_nothing_without_gates_nor_the_form_without_positions(form: str) -> None:
    x = {Linear: torch.randn(4, 3), Conv2d: torch.randn(2, 3, 5, 5), RNN: torch.randn(5, 4, 3)}
    for cls, given in x.items():
        norms = [LayerNorm(convolution=form, per_gate=per_gate) for per_gate in (False, True)]
        options = {"kernel_size": 3, "positions": (3, 3)} if cls is Conv2d else {}
        outputs = []
        for norm in norms if cls is Conv2d else (LayerNorm(), *norms):
            torch.manual_seed(1)
            found = cls(3, 6, norm=norm, **options)(given)
            outputs.append(found[0] if cls is RNN else found)
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    site = Site(LayerNorm(per_gate=True), "input", 9, groups=(6, 3))
    assert site.to_spec().groups == (6, 3)


def test_gates_of_one_unit_are_their_biases() -> None:
    layer = LSTM(3, 1, norm=LayerNorm(per_gate=True), dtype=torch.float64)
    torch.nn.init.constant_(layer.sites["l0"]["cell"].shift, 0.3)
    o = (layer.bias_ih_l0 + layer.bias_hh_l0)[3].sigmoid()
    expected = (o * torch.tensor(0.3, dtype=torch.float64).tanh()).expand(5, 4, 1)
    torch.testing.assert_close(layer(torch.randn(5, 4, 3, dtype=torch.float64))[0], expected)
