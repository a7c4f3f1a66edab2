"""Zoneout, recurrent dropout and DropConnect of recurrent weights, against their papers."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from own_cell import MGU, MGU_CELL
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from ln_zoo.analysis import gradient_norms
from ln_zoo.conversion import denormalize_
from ln_zoo.export.loops import ExportError, exportable
from ln_zoo.layers import GRU, LSTM, RNN, GRUCell, LSTMCell, RecurrentLayer, RNNCell
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, WeightNorm
from ln_zoo.ops import draw_noise, dropout_mask, registry

F64 = torch.float64
T, N, E, H = 6, 4, 3, 5
PAIRS = [(LSTM, LSTMCell), (GRU, GRUCell), (RNN, RNNCell)]
every_pair = pytest.mark.parametrize(("cls", "step"), PAIRS)
NOISE = [
    {"zoneout": 0.3},
    {"recurrent_dropout": 0.4},
    {"weight_dropout": 0.5},
    {"zoneout": 0.2, "recurrent_dropout": 0.3, "weight_dropout": 0.4},
]
every_noise = pytest.mark.parametrize("noise", NOISE, ids=str)


def made(cls: type, norm: Norm | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = cls(E, H, norm=LayerNorm(eps=1e-3) if norm is None else norm, dtype=F64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer


def single(layer: Any, step: type) -> Any:
    """The single steps of a layer, which know of no noise."""
    cell = step(E, H, norm=layer.sites["l0"]["input"].norm, dtype=F64)
    names = {name: name.replace("_l0", "").replace("l0.", "") for name in layer.state_dict()}
    cell.load_state_dict({names[name]: a for name, a in layer.state_dict().items()})
    return cell.train(layer.training)


def next_of(cell: Any, x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    after = cell(x, states if len(states) > 1 else states[0])
    return after if isinstance(after, tuple) else (after,)


def flat(result: Any) -> list[Tensor]:
    output, states = result
    return [output, *(states if isinstance(states, tuple) else (states,))]


def assert_close(one: Any, two: Any, tolerance: float = 1e-11) -> None:
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def gradients(results: list[Tensor], sources: list[Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    total = sum((a * torch.randn(a.shape, generator=generator, dtype=F64)).sum() for a in results)
    return torch.autograd.grad(total, sources)


# Zoneout (Krueger et al. 2017, section 3 and 3.2)


@every_pair
@pytest.mark.parametrize("training", [True, False])
def test_zoneout_is_its_equations(cls: type, step: type, training: bool, loop: str) -> None:
    """``s' = d * s + (1 - d) * new``; an LSTM's new h is that of the whole new c."""
    p = (0.4, 0.2)[: 2 if cls is LSTM else 1]
    layer = made(cls, zoneout=p).train(training)
    cell = single(layer, step)
    x = torch.randn(T, N, E, dtype=F64, requires_grad=True)
    states = tuple(torch.randn(N, H, dtype=F64) for _ in p)
    torch.manual_seed(7)
    (drawn,) = draw_noise(p, 0.0, [s.unsqueeze(0) for s in states], (T, N), training=True)
    kept = [d.double() for d in drawn.zoneout]
    if not training:
        kept = [torch.full((T, N, H), q, dtype=F64) for q in p]
    outputs, now = [], states
    for t in range(T):
        new = next_of(cell, x[t], now)
        now = tuple(d[t] * s + (1 - d[t]) * a for d, s, a in zip(kept, now, new, strict=True))
        outputs.append(now[0])
    torch.manual_seed(7)
    given = tuple(s.unsqueeze(0) for s in states)
    output, *finals = flat(layer(x, given if cls is LSTM else given[0]))
    assert_close([output, *(s[0] for s in finals)], [torch.stack(outputs), *now])
    assert_close(gradients([output], [x]), gradients([torch.stack(outputs)], [x]))


def test_zoneout_keeps_as_many_numbers_as_it_says() -> None:
    layer = LSTM(E, 200, zoneout=(0.1, 0.6))
    h, c = torch.randn(1, 50, 200), torch.randn(1, 50, 200)
    _, (h_n, c_n) = layer(torch.randn(1, 50, E), (h, c))
    assert (h_n == h).float().mean() == pytest.approx(0.1, abs=0.02)
    assert (c_n == c).float().mean() == pytest.approx(0.6, abs=0.02)


def test_zoneout_of_one_state_alone() -> None:
    layer = made(LSTM, zoneout=(0.0, 0.5))
    x, h, c = (torch.randn(size, dtype=F64) for size in ((1, N, E), (1, N, H), (1, N, H)))
    _, (h_n, c_n) = layer(x, (h, c))
    plain = made(LSTM)
    _, (h_p, c_p) = plain(x, (h, c))
    assert_close([h_n], [h_p])
    same = c_n == c
    assert 0 < same.sum() < same.numel()
    assert_close([c_n[~same]], [c_p[~same]])


def test_zoneout_of_packed_sequences_and_directions() -> None:
    """In evaluation, where nothing is drawn, each example is as it is alone."""
    layer = made(GRU, zoneout=0.3, num_layers=2, bidirectional=True).eval()
    x, lengths = torch.randn(T, N, E, dtype=F64), [2, 6, 1, 4]
    packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    _, h = layer(packed)
    for n, length in enumerate(lengths):
        assert_close([h[:, n]], [layer(x[:length, n])[1]])
    layer.train()
    output, _ = layer(packed)
    assert output.data.isfinite().all()


# Recurrent dropout (Gal and Ghahramani 2016, section 4)


def normalized(a: Tensor, site: Any) -> Tensor:
    parts = []
    for part in a.split(site.groups, 1):
        part = part - part.mean(1, keepdim=True)
        parts.append(part / (part.square().mean(1, keepdim=True) + 1e-3).sqrt())
    return torch.cat(parts, 1) * site.gain


def gru_step(layer: Any, x: Tensor, h: Tensor, mask: Tensor) -> Tensor:
    """The paper's eq. 26-28; the recurrent product alone sees the mask."""
    sites = layer.sites["l0"]
    xs = normalized(x @ layer.weight_ih_l0.T, sites["input"]) + layer.bias_ih_l0
    hs = normalized((mask * h) @ layer.weight_hh_l0.T, sites["recurrent"]) + layer.bias_hh_l0
    (xr, xz, xn), (hr, hz, hn) = xs.chunk(3, 1), hs.chunk(3, 1)
    n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
    z = torch.sigmoid(xz + hz)
    return (1 - z) * n + z * h


@every_pair
def test_recurrent_dropout_is_one_mask_on_the_product(cls: type, step: type, loop: str) -> None:
    layer = made(cls, recurrent_dropout=0.4)
    cell = single(layer, step)
    x = torch.randn(T, N, E, dtype=F64, requires_grad=True)
    torch.manual_seed(7)
    states = tuple(torch.zeros(N, H, dtype=F64) for _ in layer.cell.states)
    (drawn,) = draw_noise([0.0], 0.4, [states[0].unsqueeze(0)], (T, N), training=True)
    mask = drawn.dropout
    torch.testing.assert_close(mask, (mask > 0) / torch.tensor(0.6, dtype=F64))
    outputs = []
    for t in range(T):
        if cls is GRU:
            states = (gru_step(layer, x[t], states[0], mask),)
        else:  # h is read by the product alone
            states = next_of(cell, x[t], (mask * states[0], *states[1:]))
        outputs.append(states[0])
    torch.manual_seed(7)
    output, *finals = flat(layer(x))
    assert_close([output, *(s[0] for s in finals)], [torch.stack(outputs), *states])
    assert_close(gradients([output], [x]), gradients([torch.stack(outputs)], [x]))


def test_each_sequence_layer_and_direction_has_a_mask_of_its_own() -> None:
    layer = LSTM(E, 40, 2, recurrent_dropout=0.5, bidirectional=True, norm=LayerNorm())
    x = torch.randn(T, 1, E).expand(T, N, E)
    output, (h, _) = layer(x)
    assert not torch.isclose(output[:, 0], output[:, 1]).all()
    assert len({tuple(row.tolist()) for row in h.flatten(0, 1)}) == 4 * N


# DropConnect (Merity et al. 2018, section 2)


@every_pair
@pytest.mark.parametrize(
    "norm",
    [Identity(), LayerNorm(), WeightNorm(), BatchNorm()],
    ids=["none", "layer", "weight", "batch"],
)
def test_weight_dropout_is_one_mask_on_the_weight(
    cls: type, step: type, norm: Norm, loop: str
) -> None:
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


@pytest.mark.parametrize("shape", [(3, 2), (64, 40)])
def test_masks_are_the_same_on_every_kernel(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = GRU(E, 16, 2, weight_dropout=0.3, dropout=0.2, norm=LayerNorm())
    x, outputs = torch.randn(*shape, E), []
    for kernels in ("1", "0"):
        monkeypatch.setenv("LN_ZOO_KERNELS", kernels)
        torch.manual_seed(3)
        outputs.append(layer(x)[0])
    # Another mask moves outputs by tenths, rounding by millionths, on any processor.
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-3)


# All three


@every_noise
def test_evaluation_draws_nothing(noise: dict[str, Any], loop: str) -> None:
    layer, plain = made(LSTM, **noise).eval(), made(LSTM).eval()
    x = torch.randn(T, N, E, dtype=F64)
    before = torch.get_rng_state()
    one, two = layer(x)[0], layer(x)[0]
    assert torch.equal(one, two)
    assert torch.equal(before, torch.get_rng_state())
    if "zoneout" not in noise:
        assert torch.equal(one, plain(x)[0])
    layer.train()
    assert not torch.equal(layer(x)[0], layer(x)[0])


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
def test_each_draw_is_one_function(noise: dict[str, Any]) -> None:
    """With the same draws gradients are those of finite differences."""
    layer = made(GRU, num_layers=2, bidirectional=True, **noise)
    x = torch.randn(3, 2, E, dtype=F64, requires_grad=True)

    def drawn(*_: Tensor) -> Tensor:
        torch.manual_seed(1)
        output: Tensor = layer(x)[0]
        return output

    assert torch.autograd.gradcheck(drawn, (x, *layer.parameters()), fast_mode=True)


@every_noise
def test_resets_and_packed_sequences(noise: dict[str, Any]) -> None:
    """Each piece is a sequence of its own; in evaluation it is as it is alone."""
    layer = made(LSTM, **noise)
    x, reset = torch.randn(T, N, E, dtype=F64), torch.zeros(T, N, dtype=torch.bool)
    reset[2, 1] = reset[4, 3] = True
    assert layer(x, reset=reset)[0].isfinite().all()
    layer.eval()
    output = layer(x, reset=reset)[0]
    assert_close([output[2:, 1]], [layer(x[2:, 1])[0]])
    assert_close([output[:4, 3]], [layer(x[:4, 3])[0]])


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


@every_noise
def test_half_precision(noise: dict[str, Any]) -> None:
    layer = LSTM(E, H, norm=LayerNorm(), **noise)
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = layer(torch.randn(T, N, E))
    assert output.dtype == torch.bfloat16
    assert layer.bfloat16()(torch.randn(T, N, E).bfloat16())[0].dtype == torch.bfloat16


def test_a_cell_of_ones_own_has_them_too() -> None:
    layer = made(MGU, zoneout=0.2, recurrent_dropout=0.3, weight_dropout=0.4)
    x = torch.randn(T, N, E, dtype=F64)
    assert not torch.equal(layer(x)[0], layer(x)[0])

    class Undropped(RecurrentLayer):
        cell = MGU_CELL.__class__("undropped", MGU_CELL.step, MGU_CELL.places)

    with pytest.raises(ValueError, match="Undropped: recurrent_dropout"):
        Undropped(E, H, recurrent_dropout=0.1)


def test_the_log_says_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    class Other(RecurrentLayer):
        cell = MGU_CELL.__class__("logged", MGU_CELL.step, MGU_CELL.places, drops=True)

    with caplog.at_level(logging.INFO, "ln_zoo"):
        Other(E, H, zoneout=0.1, recurrent_dropout=0.1)(torch.randn(T, N, E))
    assert "logged with recurrent dropout and zoneout: runs on the generic loop" in caplog.text


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
    if cls is LSTM:
        assert "not run by torch (torch's fused loop): torch has no recurrent dro" in caplog.text
    if cls is RNN:
        assert "its steps over a batch have no zoneout" in caplog.text


@pytest.mark.parametrize("name", ["zoneout", "recurrent_dropout", "weight_dropout"])
@pytest.mark.parametrize("p", [1.0, -0.1, float("nan"), True, "0.1", None])
def test_probabilities_that_are_none(name: str, p: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be a probability in \[0, 1\), got"):
        LSTM(3, 4, **{name: p})


def test_zoneout_of_another_number_of_states() -> None:
    for cls, p in ((LSTM, (0.1, 0.1, 0.1)), (GRU, (0.1, 0.1))):
        with pytest.raises(ValueError, match=r"zoneout must be one probability, or one for each"):
            cls(3, 4, zoneout=p)


def test_who_does_not_take_them() -> None:
    with pytest.raises(ValueError, match=r"takes layers without zoneout, .* zoneout=\(0.1,\)"):
        gradient_norms(made(GRU, zoneout=0.1), torch.randn(T, N, E, dtype=F64))
    with pytest.raises(ExportError, match=r"GRU with zoneout=\(0.1,\) cannot be exported"):
        exportable(made(GRU, zoneout=0.1).eval(), operators=False)
    model = nn.Sequential(made(GRU, Identity(), zoneout=0.1, weight_dropout=0.1))
    with pytest.raises(ValueError, match="torch has no zoneout or weight_dropout"):
        denormalize_(model)
