"""DreamerV3's sequence model: its equations in float64, the contract of a cell, and its kernel."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from accuracy import assert_as_accurate, generic_loop, moved
from block_grus import Deter
from engines import names_of
from kernels.generated.generated_case import assert_exact, packed
from layer_results import randomised
from refusals import refuses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ln_zoo.conversion import from_dialect
from ln_zoo.export.loops import exportable
from ln_zoo.kernels.generated import engine
from ln_zoo.kernels.native.compiler import Unavailable, find_compiler
from ln_zoo.layers import DreamerV3GRU, DreamerV3SequenceModel, RecurrentCell
from ln_zoo.layers.dreamer_v3 import dreamer_v3_cell
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.testing import CellCase

F64 = torch.float64
SIZES = {"projection_size": 6, "dynamics_layers": 2}


class SmallGRU(DreamerV3GRU):
    """With a cell of the class."""

    cell = dreamer_v3_cell(**SIZES)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **SIZES, **({"norm": None} | options))


class SmallStep(RecurrentCell):
    cell = SmallGRU.cell


class TestDreamerV3GRU(CellCase):
    layer, step, blocks = SmallGRU, SmallStep, 2
    norms: tuple[Norm, ...] = (
        Identity(), RMSNorm(eps=1e-4), LayerNorm(eps=1e-2), BatchNorm(), WeightNorm(),
    )  # fmt: skip
    test_without_biases = None  # the step's class has a cell with biases


def test_the_model_is_its_equations() -> None:
    torch.manual_seed(0)
    theirs = randomised(Deter(8, 6, 3, 5, 4, 2).double())
    ours = from_dialect("r2dreamer", theirs.state_dict())
    assert isinstance(ours, DreamerV3SequenceModel)
    z, a, start = (torch.randn(*size, dtype=F64) for size in ((7, 3, 6), (7, 3, 3), (3, 8)))
    a, reset = a.clamp(-1, 1), torch.rand(7, 3) < 0.3
    h, outputs = start, []
    for now, action, first in zip(z, a, reset, strict=True):
        h = theirs(now, torch.where(first.unsqueeze(1), 0.0, h), action)
        outputs.append(h)
    x = torch.cat([z, a], -1)
    found, last = ours(x, start.unsqueeze(0), reset=reset)
    torch.testing.assert_close(found, torch.stack(outputs), rtol=1e-11, atol=1e-12)
    assert torch.equal(last[0], found[-1])
    torch.testing.assert_close(ours.step(x[0], start), theirs(z[0], start, a[0]))
    torch.testing.assert_close(ours.step(x[0]), theirs(z[0], torch.zeros_like(start), a[0]))


@pytest.mark.parametrize("projection", [6, 24, 48])
def test_any_projection_runs_on_the_kernel(projection: int, chosen: list[Any]) -> None:
    try:
        find_compiler()
    except Unavailable as error:
        pytest.skip(error.reason)
    torch.manual_seed(0)
    layer = randomised(DreamerV3GRU(3, 24, projection_size=projection, blocks=4))
    assert_exact(layer, torch.randn(16, 5, 3), [torch.randn(1, 5, 24)], torch.rand(16, 5) < 0.2)
    assert names_of(chosen)[0] == "generated"


def test_a_single_step_of_many_units_runs_on_the_kernel(
    chosen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LEAST_MULTIPLICATIONS", 3000)
    torch.manual_seed(0)
    model = randomised(DreamerV3SequenceModel(3, 24, projection_size=6, blocks=4))
    x, h = torch.randn(3, 3), torch.randn(3, 24)
    found = model.step(x, h)  # of 3,042 multiplications
    model.step(x[:2], h[:2])
    expected = model.double().step(x.double(), h.double())
    torch.testing.assert_close(found, expected.float())
    assert [each and each.name for each in chosen] == ["generated", None, None]


@pytest.mark.parametrize("inputs", [3, (2, 4)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": None, "bias": False},
        {"norm": WeightNorm(), "dynamics_layers": 2},
        {"norm": BatchNorm(), "zoneout": 0.3},
        {"weight_dropout": 0.5, "activation": "tanh"},
    ],
    ids=str,
)
def test_a_step_is_a_sequence_of_one(inputs: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = DreamerV3SequenceModel(inputs, 8, projection_size=6, blocks=2, **options)
    model = randomised(model.double())
    x, h = torch.randn(5, sum(model.sizes), dtype=F64), torch.randn(5, 8, dtype=F64)
    for mode in (True, False):
        model.train(mode)
        for state in (h, None):
            torch.manual_seed(1)
            found = model.step(x, state)
            torch.manual_seed(1)
            expected, _ = model(x.unsqueeze(0), None if state is None else state.unsqueeze(0))
            torch.testing.assert_close(found, expected[0])
    with pytest.raises(RuntimeError, match=r"5, 9|features"):
        model.step(x, torch.randn(5, 9, dtype=F64))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("inputs", [24, (16, 8)])
def test_steps_on_the_kernel_have_the_gradients_of_a_sequence(
    inputs: Any, threads: int, chosen: list[Any]
) -> None:
    """Also of weights, which are computed from the rows of many steps."""
    try:
        find_compiler()
    except Unavailable as error:
        pytest.skip(error.reason)
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model = randomised(DreamerV3SequenceModel(inputs, 64, projection_size=32, blocks=4))
    x, h = torch.randn(4, 150, 24), torch.randn(150, 64)

    def results(model: Any, x: Tensor, by_steps: bool = False) -> dict[str, Tensor]:
        given, state = (a.to(x.dtype, copy=True).requires_grad_() for a in (x, h))
        if by_steps:
            states = [state]
            for row in given:
                states.append(model.step(row, states[-1]))
            output = torch.stack(states[1:])
        else:
            output = model(given, state.unsqueeze(0))[0]
        named = {"input": given, "state": state, **dict(model.named_parameters())}
        found = torch.autograd.grad(output.sin().sum(), [*named.values()])
        return {"output": output.detach(), **dict(zip(named, found, strict=True))}

    for _ in range(2):  # the second time as remembered
        found = results(model, x, by_steps=True)
    assert names_of(chosen)[0] == "generated"

    def generic(model: Any, x: Any) -> dict[str, Tensor]:
        with generic_loop():
            return results(model, x)

    exact = generic(copy.deepcopy(model).double(), x.double())
    assert_as_accurate(found, exact, lambda i: generic(model, moved(x, i)))


@pytest.mark.parametrize("inputs", [24, (16, 8)])
def test_steps_under_transforms(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints, of a first and of later calls, and `torch.compile`."""
    monkeypatch.setattr(engine, "LEAST_MULTIPLICATIONS", 1)
    torch.manual_seed(0)
    model = randomised(DreamerV3SequenceModel(inputs, 16, projection_size=8, blocks=2))
    x, h = torch.randn(3, 5, 24), torch.randn(5, 16, requires_grad=True)

    def gradients(step: Any) -> list[Tensor]:
        state = h.tanh()
        for row in x:
            state = step(row, state)
        return [*torch.autograd.grad(state.sin().sum(), [h, *model.parameters()])]

    kept = functools.partial(checkpoint, model.step, use_reentrant=False)
    first, later = gradients(kept), gradients(kept)
    for found in (first, later, gradients(torch.compile(model.step, fullgraph=True))):
        torch.testing.assert_close(found, gradients(model.step))


def test_packed_and_padded_batches_are_single_sequences() -> None:
    torch.manual_seed(0)
    model = randomised(DreamerV3SequenceModel((4, 2), 8, projection_size=6, blocks=2).double())
    x, lengths = torch.randn(5, 3, 6, dtype=F64), [2, 5, 3]
    output, h = model(packed(x, lengths))
    padded, _ = nn.utils.rnn.pad_packed_sequence(output)
    mask = torch.arange(5).unsqueeze(1) < torch.tensor(lengths)
    masked, _ = model(x, mask=mask)
    for i, length in enumerate(lengths):
        alone, last = model(x[:length, i])
        for found in (padded, masked):
            torch.testing.assert_close(found[:length, i], alone)
        torch.testing.assert_close(h[:, i], last)


def test_recomputed_and_exported_models_compute_the_same() -> None:
    torch.manual_seed(0)
    options = {"projection_size": 6, "blocks": 2, "dynamics_layers": 2}
    model = randomised(DreamerV3SequenceModel(4, 8, **options)).eval()
    again = DreamerV3SequenceModel(4, 8, **options, recompute=2)
    again.load_state_dict(model.state_dict())
    x = torch.randn(5, 3, 4)
    found = [each(x)[0] for each in (model, again, copy.deepcopy(model), exportable(model))]
    for output in found[1:]:
        torch.testing.assert_close(output, found[0])
    grads: list[tuple[Tensor, ...]] = [
        torch.autograd.grad(each(x)[0].sin().sum(), [*each.parameters()]) for each in (model, again)
    ]
    torch.testing.assert_close(*grads)


def test_norms_and_biases_are_arguments() -> None:
    model = DreamerV3SequenceModel(4, 8, projection_size=6, norm=LayerNorm(), bias=False, blocks=2)
    assert not any("bias" in name for name in model.state_dict())
    assert model(torch.randn(5, 3, 4))[0].shape == (5, 3, 8)
    plain = DreamerV3SequenceModel(4, 8, norm=None)
    assert not any("gain" in name for name in plain.state_dict())
    assert repr(RMSNorm(eps=1e-4)) in repr(DreamerV3SequenceModel(4, 8))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"activation": "gelu"}, "activation.*'gelu'"),
        ({"projection_size": 0}, "projection_size.*0"),
        ({"dynamics_layers": 0}, "dynamics_layers.*0"),
        ({"blocks": 3}, "blocks.*3"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], named: str) -> None:
    refuses(named, DreamerV3SequenceModel, 4, 8, **options)
    refuses("6.*4", DreamerV3SequenceModel((4, 2), 8), torch.ones(3, 4), error=RuntimeError)
