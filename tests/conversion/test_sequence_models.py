"""Other libraries' models of DreamerV3 run on ours in place."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from block_grus import (
    BlockGRU,
    BlockGRUCell,
    Deter,
    LatentModel,
    RootMeanSquareInFloat32,
)
from refusals import refuses
from torch import Tensor, nn

from ln_zoo import adopt_, to_dialect
from ln_zoo.conversion import from_dialect
from ln_zoo.conversion.adopt import KeepsFloat64
from ln_zoo.layers import DreamerV3GRU, DreamerV3SequenceModel
from ln_zoo.norms import LayerNorm

F64 = torch.float64
CLASSES: dict[type[nn.Module], str] = {
    BlockGRU: "torchrl", BlockGRUCell: "torchrl", LatentModel: "torchrl", Deter: "r2dreamer",
}  # fmt: skip
#: Rounding of float32 in a few steps.
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}
MODULES: dict[str, Any] = {
    "BlockGRU": lambda: BlockGRU(5, 8, 6, 4, norm=RootMeanSquareInFloat32),
    "BlockGRU, other arguments": lambda: BlockGRU(
        5, 8, 12, 1, 3, nn.Tanh(), norm_eps=1e-2, update_bias=0.5
    ),
    "BlockGRUCell": lambda: BlockGRUCell(5, 8, 6, 2, 2, nn.ReLU()),
    "LatentModel": lambda: LatentModel(6, 3, 5, 8, 2, 2),
    "Deter": lambda: Deter(8, 6, 3, 5, 4, 2),
}


def drawn(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape)))


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = MODULES[name]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def calls(name: str) -> list[tuple[Any, ...]]:
    """Arguments of calls."""
    if name.startswith("BlockGRU,") or name == "BlockGRU":
        starts = drawn(3, 20, 1) > 1
        return [
            (drawn(3, 20, 5), drawn(3, 8), starts),
            (drawn(3, 20, 5), None, starts.squeeze(2)),
            (drawn(3, 2, 5),),
        ]
    if name == "BlockGRUCell":
        return [(drawn(3, 5), drawn(3, 8)), (drawn(2, 3, 5),), (drawn(5), drawn(8))]
    state = drawn(3, 2, 3) if name == "Deter" else drawn(3, 6)
    return [(state, drawn(3, 8), 3 * drawn(3, 3))]


@pytest.mark.parametrize("name", MODULES)
def test_adopted_models_keep_calls_results_and_gradients(name: str) -> None:
    model = nn.ModuleDict({"one": made(name)}).double()
    ours = copy.deepcopy(model)
    (report,) = adopt_(ours, classes=CLASSES).layers
    assert report.dialect == CLASSES[type(made(name))]
    for arguments in calls(name):
        results = []
        for module in (model, ours):
            given = [
                a.clone().requires_grad_() if isinstance(a, Tensor) and a.dtype is F64 else a
                for a in arguments
            ]
            module.zero_grad()
            with KeepsFloat64():
                found = module["one"](*given)
            parts = found if isinstance(found, tuple) else (found,)
            torch.autograd.backward([a.sin().sum() for a in parts])
            gradients = [a.grad for a in given if isinstance(a, Tensor) and a.requires_grad]
            results.append([*parts, *gradients])
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
        # A model whose weights are our gradients has theirs in their form.
        of_gradients = copy.deepcopy(ours)
        with torch.no_grad():
            for one, two in zip(of_gradients.parameters(), ours.parameters(), strict=True):
                one.copy_(torch.zeros_like(two) if two.grad is None else two.grad)
        written = to_dialect(report.dialect, of_gradients)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(written[key], parameter.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", MODULES)
def test_adopted_models_train_as_the_librarys_own(name: str) -> None:
    """Weights after updates in float32, of which all but the first run as the first did."""
    exact = nn.ModuleDict({"one": made(name)}).double()
    theirs, ours = copy.deepcopy(exact).float(), copy.deepcopy(exact).float()
    (report,) = adopt_(ours, classes=CLASSES).layers
    for model in (exact, theirs, ours):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        dtype = next(model.parameters()).dtype
        given = [a.to(dtype) if a is not None and a.dtype is F64 else a for a in calls(name)[0]]
        for _ in range(4):
            optimizer.zero_grad()
            found = model["one"](*given)
            (found[0] if isinstance(found, tuple) else found).sin().sum().backward()
            optimizer.step()
    written = to_dialect(report.dialect, ours)
    for key, wanted in exact.named_parameters():
        own = (theirs.get_parameter(key) - wanted).abs().max()
        error = (written[key] - wanted).abs().max()
        assert error <= 20 * own + 1e-6, (key, error, own)


@pytest.mark.parametrize("name", MODULES)
def test_weights_go_back_bit_by_bit(name: str) -> None:
    model = nn.ModuleDict({"one": made(name)})
    state = {key: value.clone() for key, value in model.state_dict().items()}
    report = adopt_(model, classes=CLASSES)
    written = to_dialect(report.layers[0].dialect, model)
    assert written.keys() == state.keys()
    assert all(torch.equal(written[key], value) for key, value in state.items())


def test_half_precision_gives_the_dtype_of_the_library() -> None:
    layer = made("BlockGRU")
    adopt_(layer, classes=CLASSES)
    half = drawn(3, 20, 5).bfloat16()
    output, h = layer(half)
    assert output.dtype == h.dtype == torch.bfloat16
    wide, _ = layer(half.float(), torch.zeros(3, 8))
    torch.testing.assert_close(output, wide.bfloat16())


def test_another_function_is_refused() -> None:
    """The activation is not among ours; or the norm differs from its attribute."""
    unknown, other = made("BlockGRU"), made("BlockGRU")
    unknown.get_submodule("cell").activation = nn.GELU()  # type: ignore[assignment]
    other.get_submodule("cell.hidden_norm").eps = 0.1  # type: ignore[assignment]
    model = nn.ModuleDict({"unknown": unknown, "other": other, "good": made("BlockGRUCell")})
    report = adopt_(model, classes=CLASSES)
    reasons = {each.name: each.reason for each in report.refused}
    assert [layer.name for layer in report.layers] == ["good"]
    assert "'gelu'" in reasons["unknown"]
    assert "differs" in reasons["other"]


@pytest.mark.parametrize(
    ("layer", "dialect", "reason"),
    [
        (DreamerV3GRU(4, 8), "torchrl", "without layers of its inputs"),
        (DreamerV3SequenceModel(4, 8), "r2dreamer", "1 inputs, but of 2"),
        (DreamerV3SequenceModel((4, 2), 8, num_layers=2), "r2dreamer", "several layers"),
        (DreamerV3SequenceModel((4, 2), 8, update_offset=0.0), "r2dreamer", "update offset"),
        (DreamerV3SequenceModel(4, 8, norm=LayerNorm()), "torchrl", "RMSNorm"),
        (DreamerV3SequenceModel(4, 8), "haste", "DreamerV3's GRU"),
    ],
)
def test_models_that_a_library_does_not_have(layer: Any, dialect: str, reason: str) -> None:
    refuses(reason, to_dialect, dialect, layer)


@pytest.mark.parametrize("kind", ["DreamerV3BlockGRU", "DreamerV3BlockGRUCell", "in the RSSM"])
def test_torchrls_own(kind: str) -> None:
    modules: Any = pytest.importorskip("torchrl.modules.models.model_based")
    torch.manual_seed(0)
    if kind == "in the RSSM":
        sizes = {"state_dim": 6, "action_dim": 3, "hidden_dim": 5, "belief_dim": 8}
        theirs = modules._DreamerV3BlockGRU(**sizes, num_blocks=4, num_layers=2, norm_eps=1e-3)
        arguments = [(drawn(7, 6), drawn(7, 8), 3 * drawn(7, 3))]
    else:
        options = {"projection_size": 6, "num_blocks": 4, "num_layers": 2, "norm_eps": 1e-3}
        theirs = getattr(modules, kind)(5, 8, activation_class=nn.Tanh, **options)
        arguments = calls("BlockGRUCell" if kind.endswith("Cell") else "BlockGRU")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs = nn.ModuleDict({"one": theirs}).double()
    ours = copy.deepcopy(theirs)
    adopt_(ours)
    for given in arguments:
        with KeepsFloat64():
            expected = theirs["one"](*given)
        torch.testing.assert_close(ours["one"](*given), expected, rtol=1e-12, atol=1e-13)
    written = to_dialect("torchrl", ours)
    assert written.keys() == theirs.state_dict().keys()


def test_arguments_follow_from_weights_or_are_given() -> None:
    theirs = made("BlockGRU, other arguments").double()
    layer = from_dialect(
        "torchrl", theirs.state_dict(), eps=1e-2, activation="tanh", update_offset=0.5,
        recompute=4, batch_first=True,
    )  # fmt: skip
    assert isinstance(layer, DreamerV3SequenceModel)
    x = drawn(3, 20, 5)
    output, h = layer(x)
    torch.testing.assert_close(output, theirs(x)[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(h[0], theirs(x)[1], rtol=1e-11, atol=1e-12)
    assert math.isclose(layer.recurrence.update_offset, 0.5)
    refuses("'gelu'", from_dialect, "torchrl", theirs.state_dict(), activation="gelu")
