"""`LayerNorm(per_gate=True)`: each gate of a recurrent layer has a mean and variance of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accuracy import assert_as_accurate, generic_loop, moved
from engines import cpu_engines
from torch import Tensor

from ln_zoo.layers import GRU, LSTM, RNN, Conv2d, GRUCell, Linear, LSTMCell, RNNCell
from ln_zoo.norms import LayerNorm, Site
from ln_zoo.ops.engines.native.runtime import unavailable_reason

F64 = torch.float64
NORM = LayerNorm(gain=0.6, eps=1e-3, per_gate=True)
LAYERS: dict[str, tuple[type, type]] = {
    "LSTM": (LSTM, LSTMCell),
    "GRU": (GRU, GRUCell),
    "RNN": (RNN, RNNCell),
}
every_cell = pytest.mark.parametrize("cell", LAYERS)


@pytest.fixture(params=[*cpu_engines(), "0"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native" and unavailable_reason() is not None:
        pytest.skip(f"no native kernels: {unavailable_reason()}")
    monkeypatch.setenv("LN_ZOO_KERNELS", request.param)
    return request.param


def build(cls: type, norm: LayerNorm = NORM, **options: Any) -> Any:
    torch.manual_seed(8)
    module = cls(3, 6, norm=norm, dtype=F64, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            # Such as float32 can hold.
            parameter.copy_((parameter + 0.4 * torch.rand_like(parameter) - 0.2).float())
    return module


def normalized(a: Tensor, gain: Tensor, shift: Tensor | None = None) -> Tensor:
    """Eq. 4 for one gate (N, H)."""
    mean = a.sum(1, keepdim=True) / a.shape[1]
    variance = ((a - mean) ** 2).sum(1, keepdim=True) / a.shape[1]
    a = gain * (a - mean) / (variance + NORM.eps).sqrt()
    return a if shift is None else a + shift


def equations(layer: Any, x: Tensor) -> Tensor:
    """Outputs (T, N, H), gate by gate."""
    sites, H = layer.sites["l0"], layer.hidden_size
    h = c = x.new_zeros(x.shape[1], H)
    outputs = []
    count = len(layer.weight_hh_l0) // H
    gates = [slice(k * H, (k + 1) * H) for k in range(count)]

    def terms(role: str, weight: Tensor, a: Tensor) -> list[Tensor]:
        return [normalized(a @ weight[rows].T, sites[role].gain[rows]) for rows in gates]

    b_ih, b_hh = layer.bias_ih_l0.split(H), layer.bias_hh_l0.split(H)
    for now in x:
        if count == 1:
            sums = now @ layer.weight_ih_l0.T + h @ layer.weight_hh_l0.T
            h = (normalized(sums, sites["sum"].gain) + b_ih[0] + b_hh[0]).tanh()
            outputs.append(h)
            continue
        v = [a + b for a, b in zip(terms("input", layer.weight_ih_l0, now), b_ih, strict=True)]
        u = [a + b for a, b in zip(terms("recurrent", layer.weight_hh_l0, h), b_hh, strict=True)]
        if count == 4:
            i, f, g, o = (a + b for a, b in zip(v, u, strict=True))
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * normalized(c, sites["cell"].gain, sites["cell"].shift).tanh()
        else:
            r, z = (v[0] + u[0]).sigmoid(), (v[1] + u[1]).sigmoid()
            h = (1 - z) * (v[2] + r * u[2]).tanh() + z * h
        outputs.append(h)
    return torch.stack(outputs)


def results(function: Callable[[Tensor], Tensor], layer: Any, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    output = function(x)
    generator = torch.Generator().manual_seed(5)
    cotangent = torch.randn(output.shape, generator=generator, dtype=F64).to(output.dtype)
    gradients = torch.autograd.grad(output, [x, *layer.parameters()], cotangent)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    return {"out": output.detach(), **dict(zip(names, gradients, strict=True))}


def shifted(module: Any, k: int, dtype: torch.dtype = torch.float32) -> Any:
    """A copy for a run of the generic loop."""
    module = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(moved(parameter, k))
    return module.to(dtype)


@every_cell
def test_a_layer_is_the_equations(cell: str, kernels: str) -> None:
    exact = build(LAYERS[cell][0])
    x = torch.randn(7, 4, 3).double()
    expected = results(lambda x: equations(exact, x), exact, x)
    # The native kernels have no float64.
    dtype = torch.float32 if kernels == "native" else F64

    def by_layer(dtype: torch.dtype, k: int = 0) -> dict[str, Tensor]:
        layer = shifted(exact, k, dtype)
        return results(lambda x: layer(x)[0], layer, moved(x, k).to(dtype))

    def loop(k: int) -> dict[str, Tensor]:
        with generic_loop():
            return by_layer(torch.float32, k)

    found = by_layer(dtype)
    assert all(a.dtype == dtype for a in found.values())
    assert_as_accurate(found, expected, loop)


@every_cell
def test_a_cell_is_a_step_of_the_layer(cell: str, kernels: str) -> None:
    """With gradients and, the other way that steps are made, without."""
    layer, module = (build(cls) for cls in LAYERS[cell])
    for name, a in module.state_dict().items():
        start, *rest = name.split(".")
        wanted = f"{start}.l0.{'.'.join(rest)}" if rest else f"{start}_l0"
        a.copy_(layer.state_dict()[wanted])
    x = torch.randn(5, 4, 3).double()
    expected = {"out": equations(layer, x)}

    def by_steps(dtype: torch.dtype, grad: bool, k: int = 0) -> dict[str, Tensor]:
        stepped, state, outputs = shifted(module, k, dtype), None, []
        with torch.set_grad_enabled(grad):
            for now in moved(x, k).to(dtype):
                state = stepped(now, state)
                outputs.append(state[0] if cell == "LSTM" else state)
        return {"out": torch.stack(outputs)}

    def loop(k: int) -> dict[str, Tensor]:
        with generic_loop():
            return by_steps(torch.float32, True, k)

    for dtype in (F64, torch.float32):
        for grad in (True, False):
            assert_as_accurate(by_steps(dtype, grad), expected, loop)


@every_cell
def test_sites_have_gates_as_groups(cell: str) -> None:
    sites = build(LAYERS[cell][0]).sites["l0"]
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[cell]
    expected = {"input": gates, "recurrent": gates, "cell": 1, "sum": 1}
    for role, site in sites.items():
        assert site.to_spec().groups == (6,) * expected[role]
        # Parameters are the same: one set of weights fits both.
        if site.normalizes:
            assert site.gain.shape == (6 * expected[role],)
    joint = build(LAYERS[cell][0], LayerNorm())
    shapes = {name: a.shape for name, a in joint.state_dict().items()}
    assert shapes == {n: a.shape for n, a in build(LAYERS[cell][0]).state_dict().items()}


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_it_is_not_the_paper_s(cell: str) -> None:
    joint, alone = (
        build(LAYERS[cell][0], LayerNorm(per_gate=per_gate)) for per_gate in (False, True)
    )
    x = torch.randn(5, 4, 3, dtype=F64)
    assert not torch.allclose(joint(x)[0], alone(x)[0], atol=1e-2)
    groups = {"LSTM": (24,), "GRU": (12, 6)}[cell]
    assert joint.sites["l0"]["input"].to_spec().groups == groups


@pytest.mark.parametrize("form", ["channel", "unit", "position"])
def test_elsewhere_it_changes_nothing(form: str) -> None:
    x = {Linear: torch.randn(4, 3), Conv2d: torch.randn(2, 3, 5, 5), RNN: torch.randn(5, 4, 3)}
    arguments: dict[type, dict[str, Any]] = {
        Linear: {},
        Conv2d: {"kernel_size": 3, "positions": (3, 3)},
        RNN: {},
    }
    for cls, given in x.items():
        outputs = []
        for per_gate in (False, True):
            torch.manual_seed(1)
            module = cls(
                3, 6, norm=LayerNorm(convolution=form, per_gate=per_gate), **arguments[cls]
            )
            found = module(given)
            outputs.append(found[0] if cls is RNN else found)
        assert torch.equal(*outputs)
    # Groups of a site that is not a recurrent layer's stay what they are.
    assert Site(NORM, "input", 9, groups=(6, 3)).to_spec().groups == (6, 3)


def test_all_gates_of_one_unit_are_their_shifts() -> None:
    """Statistics of a single number leave nothing of it."""
    layer = LSTM(3, 1, norm=LayerNorm(per_gate=True), dtype=F64)
    with torch.no_grad():
        layer.sites["l0"]["cell"].shift.fill_(0.3)
    x = torch.randn(5, 4, 3, dtype=F64)
    o = (layer.bias_ih_l0 + layer.bias_hh_l0)[3].sigmoid()
    expected = (o * torch.tensor(0.3, dtype=F64).tanh()).expand(5, 4, 1)
    torch.testing.assert_close(layer(x)[0], expected)
