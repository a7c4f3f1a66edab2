"""xlstm's own sLSTM against ours in its place, where xlstm is installed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from cells.xlstm_block import SLSTMBlock
from layer_results import assert_close, gradients, randomised
from torch import Tensor, nn

from ln_zoo import adopt_, from_dialect, to_dialect
from ln_zoo.layers import SLSTM

xlstm = pytest.importorskip("xlstm", reason="xlstm is not installed")
from xlstm.blocks.slstm.cell import sLSTMCell, sLSTMCellConfig  # noqa: E402
from xlstm.blocks.slstm.layer import sLSTMLayer, sLSTMLayerConfig  # noqa: E402

H, T, N = 12, 9, 4
VANILLA: dict[str, Any] = {"backend": "vanilla", "dtype": "float32"}


def cell(heads: int, **options: Any) -> Any:
    torch.manual_seed(0)
    config = sLSTMCellConfig(hidden_size=H, num_heads=heads, **VANILLA, **options)
    return randomised(sLSTMCell(config).double())


def layer(heads: int) -> Any:
    torch.manual_seed(0)
    config = sLSTMLayerConfig(embedding_dim=H, num_heads=heads, **VANILLA)
    return randomised(sLSTMLayer(config).double())


def adopted(module: nn.Module) -> Any:
    holder = nn.ModuleList([copy.deepcopy(module)])
    adopt_(holder)
    return holder[0]


def states() -> Tensor:
    h, c, n, m = torch.randn(4, N, H, dtype=torch.float64)
    return torch.stack([h, c, n.exp(), m])


def assert_same(found: tuple[Any, list[Tensor]], expected: tuple[Any, list[Tensor]]) -> None:
    """Results, and their gradients with respect to these tensors."""
    assert_close(found[0], expected[0], 1e-13)
    for one, two in zip(gradients(*found), gradients(*expected), strict=True):
        assert_close(one.view_as(two), two, 1e-13 * max([1.0, *two.abs().flatten().tolist()]))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("given", [False, True])
def test_cell(heads: int, given: bool) -> None:
    theirs = cell(heads)
    ours = adopted(theirs)
    assert isinstance(ours, type(theirs))
    x = torch.randn(N, T, 4 * H, dtype=torch.float64).requires_grad_()
    state = states().requires_grad_() if given else None
    sources = [x] if state is None else [x, state]
    mine = [ours.layer.weight_hh_l0, ours.layer.bias_ih_l0]
    assert_same(
        (ours(x, state), [*sources, *mine]), (theirs(x, state), [*sources, *theirs.parameters()])
    )


@pytest.mark.parametrize("order", [("SBGNH", "SBH"), ("BSGNH", "BSH"), ("SBGNH", "SBNH")])
def test_orders_of_axes(order: tuple[str, str]) -> None:
    theirs = cell(3, input_shape=order[0], output_shape=order[1])
    x = torch.randn(N, T, 4 * H, dtype=torch.float64)
    assert_close(adopted(theirs)(x), theirs(x), 1e-13)


def test_layer_and_its_steps() -> None:
    theirs = layer(3)
    ours = adopted(theirs)
    x = torch.randn(N, T, H, dtype=torch.float64).requires_grad_()
    common = [name for name, _ in ours.named_parameters() if not name.startswith("slstm_cell")]
    found, expected = ((of(x), [x, *map(of.get_parameter, common)]) for of in (ours, theirs))
    assert_same(found, expected)
    ends: list[dict[str, Any]] = [{}, {}]
    for row in x.split(1, 1):
        outputs = []
        for k, of in enumerate((ours, theirs)):
            output, ends[k] = of.step(row, **ends[k])
            outputs.append(output)
        assert_close(*outputs, 1e-13)


def test_our_layer_in_a_block() -> None:
    theirs, ours = layer(3), SLSTMBlock(H, heads=3).double()
    ours.slstm.load_state_dict(from_dialect("xlstm", theirs.slstm_cell.state_dict()).state_dict())
    # "fgate" and "igate" have changed places in the library.
    gates = [theirs.fgate, theirs.igate, theirs.zgate, theirs.ogate]
    with torch.no_grad():
        for one, two in zip(ours.gates, gates, strict=True):
            one.weight.copy_(two.weight.view_as(one.weight))
        ours.group_norm.weight.copy_(1 + theirs.group_norm.weight)
    ours.convolution.load_state_dict(theirs.conv1d.conv.state_dict())
    x = torch.randn(N, T, H, dtype=torch.float64)
    assert_close(ours(x), x + theirs(ours.norm(x)), 1e-13)


def test_a_whole_stack_in_one_call() -> None:
    config = xlstm.xLSTMBlockStackConfig(
        slstm_block=xlstm.sLSTMBlockConfig(slstm=sLSTMLayerConfig(num_heads=3, **VANILLA)),
        context_length=T,
        num_blocks=2,
        embedding_dim=H,
        slstm_at=[0, 1],
    )
    torch.manual_seed(0)
    theirs = randomised(xlstm.xLSTMBlockStack(config).double())
    ours, keys = copy.deepcopy(theirs), theirs.state_dict()
    report = adopt_(ours)
    assert [of.name for of in report.layers] == [f"blocks.{k}.xlstm.slstm_cell" for k in (0, 1)]
    x = torch.randn(N, T, H, dtype=torch.float64)
    assert_close(ours(x), theirs(x), 1e-13)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(again(x), ours(x))
    written = to_dialect("xlstm", ours)
    assert written.keys() == keys.keys()
    assert all(torch.equal(written[key], value) for key, value in keys.items())
    one = from_dialect("xlstm", keys, prefix="blocks.1.xlstm.slstm_cell.")
    assert isinstance(one, SLSTM)
    assert (one.input_size, one.hidden_size, one.blocks) == (0, H, 3)


def test_another_function_is_refused() -> None:
    with pytest.raises(ValueError, match=r"function.*'lstm'"):
        adopted(cell(3, function="lstm"))
