"""Zoneout, recurrent dropout and DropConnect of recurrent weights, against their papers."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import reference
import torch
from accuracy import generic_loop
from engines import cpu_engines, names_of, needs_native
from layer_results import assert_close, flat, gradients, made
from refusals import refuses
from torch import nn

from ln_zoo.analysis import gradient_norms
from ln_zoo.conversion import denormalize_
from ln_zoo.export.loops import ExportError, exportable
from ln_zoo.layers import GRU, LSTM, RNN
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, WeightNorm
from ln_zoo.ops import Noise, draw_noise, dropout_mask, registry

F64 = torch.float64
T, N, E, H = 6, 4, 3, 5
#: The reference's names, and numbers of states.
CELLS: dict[type, tuple[str, int]] = {LSTM: ("LSTM", 2), GRU: ("GRU", 1), RNN: ("RNN_TANH", 1)}
every_layer = pytest.mark.parametrize("cls", CELLS)
NOISE = [
    {"zoneout": 0.3},
    {"recurrent_dropout": 0.4},
    {"weight_dropout": 0.5},
    {"zoneout": 0.2, "recurrent_dropout": 0.3, "weight_dropout": 0.4},
]
every_noise = pytest.mark.parametrize("noise", NOISE, ids=str)


# Zoneout (Krueger et al. 2017, section 3 and 3.2)


def drawn_as_layer_draws(cls: type, p: Any, dropout: float) -> Noise:
    states = [torch.zeros(1, N, H, dtype=F64)] * CELLS[cls][1]
    torch.manual_seed(7)
    (found,) = draw_noise(p, dropout, states, (T, N), training=True)
    torch.manual_seed(7)
    return found


def check(layer: Any, states: tuple[torch.Tensor, ...], noise: dict[str, Any]) -> None:
    """Outputs, states and gradients against the equations with this noise."""
    d = reference.read(CELLS[type(layer)][0], layer, "l0")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, N, E, dtype=F64, generator=generator, requires_grad=True)
    given = tuple(s.unsqueeze(0) for s in states)
    output, *finals = flat(layer(x, given if len(given) > 1 else given[0]))
    outputs, *wanted = reference.run(d, x.unbind(1), *states, **noise)
    expected = flat((torch.stack(outputs, 1), wanted))
    found = [output, *(s[0] for s in finals)]
    assert_close(found, expected)
    sources = [x, *layer.parameters()]
    assert_close(gradients(found, sources), gradients(expected, sources))


@every_layer
@pytest.mark.parametrize("training", [True, False])
def test_zoneout_is_its_equations(cls: type, training: bool, loop: str) -> None:
    """``s' = d * s + (1 - d) * new``; an LSTM's new h is that of the whole new c."""
    count = CELLS[cls][1]
    p = (0.4, 0.2)[:count]
    layer = made(cls, zoneout=p).train(training)
    states = tuple(torch.randn(N, H, dtype=F64) for _ in p)
    drawn = drawn_as_layer_draws(cls, p, 0.0)
    held = tuple(d.double() for d in drawn.zoneout) if training else p
    check(layer, states, {"held": (*held, 0.0)[:2]})


@needs_native
@pytest.mark.parametrize("kernels", [*cpu_engines(), "generated"])
def test_each_state_has_its_own_expected_zoneout(
    kernels: str, chosen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = made(LSTM, zoneout=(0.4, 0.2)).float().eval()
    x = torch.randn(16, N, E)  # generated kernels run calls of 16 steps or more
    with generic_loop():
        expected = flat(layer(x))
    monkeypatch.setenv("LN_ZOO_KERNELS", kernels)
    chosen.clear()
    assert_close(flat(layer(x)), expected, 1e-4)
    assert names_of(chosen) == [kernels]


# Recurrent dropout (Gal and Ghahramani 2016, section 4)


@every_layer
def test_recurrent_dropout_is_one_mask_on_the_product(cls: type, loop: str) -> None:
    layer = made(cls, recurrent_dropout=0.4)
    mask = drawn_as_layer_draws(cls, [0.0] * CELLS[cls][1], 0.4).dropout
    torch.testing.assert_close(mask, (mask > 0) / torch.tensor(0.6, dtype=F64))
    check(layer, (torch.zeros(N, H, dtype=F64),) * CELLS[cls][1], {"dropout": mask})


def test_each_sequence_layer_and_direction_has_a_mask_of_its_own() -> None:
    layer = LSTM(E, 40, 2, recurrent_dropout=0.5, bidirectional=True, norm=LayerNorm())
    x = torch.randn(T, 1, E).expand(T, N, E)
    output, (h, _) = layer(x)
    assert not torch.isclose(output[:, 0], output[:, 1]).all()
    assert len({tuple(row.tolist()) for row in h.flatten(0, 1)}) == 4 * N


# DropConnect (Merity et al. 2018, section 2)


@pytest.mark.parametrize(
    ("cls", "norm"),
    [(GRU, Identity()), (LSTM, LayerNorm()), (RNN, WeightNorm()), (LSTM, BatchNorm())],
    ids=["none", "layer", "weight", "batch"],
)
def test_weight_dropout_is_one_mask_on_the_weight(cls: type, norm: Norm, loop: str) -> None:
    layer = made(cls, norm, weight_dropout=0.5, bidirectional=True)
    x = torch.randn(T, N, E, dtype=F64, requires_grad=True)
    torch.manual_seed(7)
    masks = [dropout_mask(0.5, torch.ones(len(layer.weight_hh_l0), H, dtype=F64)) for _ in range(2)]
    torch.manual_seed(7)
    found = flat(layer(x))
    plain = made(cls, norm, bidirectional=True)
    sites = [plain.sites[suffix]["recurrent"] for suffix in ("l0", "l0_reverse")]
    for site, mask in zip(sites, masks, strict=True):
        original = site.weight
        site.weight = lambda w, original=original, mask=mask: original(w) * mask
    expected = flat(plain(x))
    assert_close(found, expected)
    names = ["weight_hh_l0", "weight_ih_l0_reverse", "bias_ih_l0"]
    d_found, d_expected = (
        gradients(results, [of.get_parameter(name) for name in names])
        for results, of in ((found, layer), (expected, plain))
    )
    assert_close(d_found, d_expected)


@every_noise
def test_a_layer_remembers_no_draw(noise: dict[str, Any]) -> None:
    """What it keeps of a call in evaluation must not be in the way of training."""
    layer = LSTM(E, H, norm=LayerNorm(), **noise)
    x = torch.randn(2, 1, E)
    for _ in range(3):
        layer.eval()
        quiet = [layer(x)[0] for _ in range(2)]
        assert torch.equal(*quiet)
        layer.train()
        loud = [layer(x)[0] for _ in range(4)]
        assert any(not torch.equal(loud[0], other) for other in loud[1:])


@every_noise
def test_copies_and_text(noise: dict[str, Any]) -> None:
    layer = made(LSTM, **noise).eval()
    x = torch.randn(T, N, E, dtype=F64)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.noise == layer.noise
        assert torch.equal(twin(x)[0], layer(x)[0])
    assert list(layer.state_dict()) == list(made(LSTM).state_dict())
    assert all(f"{name}=" in repr(layer) for name in noise)
    assert repr(LSTM(3, 4)).startswith("LSTM(\n  3, 4\n")


@pytest.mark.parametrize(
    ("cls", "norm", "runs"),
    [(GRU, LayerNorm(), "aten"), (LSTM, Identity(), "aten"), (RNN, BatchNorm(), "the generic")],
    ids=["layer", "none", "batch"],
)
def test_kernels_take_it_or_say_why_not(
    cls: type,
    norm: Norm,
    runs: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry._log.cache_clear()
    monkeypatch.setenv("LN_ZOO_KERNELS", "torch,aten")
    x = torch.randn(T, N, E, dtype=F64)
    with caplog.at_level(logging.INFO, "ln_zoo"):
        made(cls, norm, zoneout=0.1)(x)
        made(cls, norm, recurrent_dropout=0.1)(x)
    assert f"with zoneout: runs on {runs}" in caplog.text
    assert cls is not LSTM or "torch has no recurrent dropout" in caplog.text


@pytest.mark.parametrize("name", ["zoneout", "recurrent_dropout", "weight_dropout"])
@pytest.mark.parametrize("p", [1.0, -0.1, float("nan"), True, "0.1", None])
def test_wrong_probabilities(name: str, p: Any) -> None:
    refuses(rf"{name} must be a probability .*{p!r}", LSTM, 3, 4, **{name: p})


@pytest.mark.parametrize(("cls", "p"), [(LSTM, (0.1, 0.1, 0.1)), (GRU, (0.1, 0.1))])
def test_zoneout_of_another_number_of_states(cls: type, p: tuple[float, ...]) -> None:
    refuses("zoneout", cls, 3, 4, zoneout=p)


def test_functions_that_take_no_noise() -> None:
    with pytest.raises(ValueError, match=r"zoneout=\(0.1,\)"):
        gradient_norms(made(GRU, zoneout=0.1), torch.randn(T, N, E, dtype=F64))
    with pytest.raises(ExportError, match=r"zoneout=\(0.1,\)"):
        exportable(made(GRU, zoneout=0.1).eval(), operators=False)
    model = nn.Sequential(made(GRU, Identity(), zoneout=0.1, weight_dropout=0.1))
    refuses("zoneout or weight_dropout", denormalize_, model)
