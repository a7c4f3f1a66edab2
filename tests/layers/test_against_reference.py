"""Every recurrent layer and cell with every norm against the equations, in float64."""

from __future__ import annotations

import pytest
import reference
import torch
from reference import Direction, Rule, Statistics
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from ln_zoo.layers import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm

F64 = torch.float64
TOLERANCE = 1e-9
LAYERS = {"LSTM": LSTM, "GRU": GRU, "RNN_TANH": RNN, "RNN_RELU": RNN}
CELLS = {"LSTM": LSTMCell, "GRU": GRUCell, "RNN_TANH": RNNCell, "RNN_RELU": RNNCell}
NORMS: dict[str, tuple[Norm, Rule]] = {
    "layer": (LayerNorm(eps=1e-4), Rule("layer", eps=1e-4)),
    "rms": (RMSNorm(eps=1e-4), Rule("rms", eps=1e-4)),
    "weight": (WeightNorm(), Rule("weight")),
    "batch": (
        BatchNorm(eps=1e-3, max_steps=4, momentum=0.3),
        Rule("batch", eps=1e-3, max_steps=4, momentum=0.3),
    ),
    "batch-unbiased": (
        BatchNorm(eps=1e-3, max_steps=4, unbiased=True),
        Rule("batch", eps=1e-3, max_steps=4, momentum=0.1, unbiased=True),
    ),
    "batch-eval": (
        BatchNorm(eps=1e-3, max_steps=4),
        Rule("batch", eps=1e-3, max_steps=4),
    ),
    "none": (Identity(), Rule("none")),
}
every_cell = pytest.mark.parametrize("cell", LAYERS)
every_norm = pytest.mark.parametrize("norm", NORMS)


def build(cls: type[nn.Module], cell: str, norm: str, **options: object) -> nn.Module:
    """A module with random parameters, gains, shifts, scales and running averages."""
    if cell == "RNN_RELU":
        options["nonlinearity"] = "relu"
    module = cls(3, 4, norm=NORMS[norm][0], dtype=F64, **options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.uniform_(-1, 1)
            if name.endswith(("gain", "scale")):
                parameter.add_(torch.sign(parameter) * 0.2)
        for name, buffer in module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.uniform_(0.5, 1.5)
            elif norm == "batch-eval":
                buffer[:3] = 7  # the last of four rows was never reached
    return module.train(norm != "batch-eval")


def direction(module: nn.Module, cell: str, norm: str, suffix: str = "") -> Direction:
    """What the reference needs, read by the public names of parameters."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    tail = f"_{suffix}" if suffix else ""
    inner = f"sites.{suffix}." if suffix else "sites."
    own = {
        tuple(name.removeprefix(inner).split(".")): tensor
        for name, tensor in tensors.items()
        if name.startswith(inner)
    }
    rule = NORMS[norm][1]
    rule.training = module.training

    def of(kind: str) -> dict[str, Tensor]:
        return {place: tensor for (place, name), tensor in own.items() if name == kind}

    return Direction(
        cell=cell,
        rule=rule,
        w_ih=tensors[f"weight_ih{tail}"],
        w_hh=tensors[f"weight_hh{tail}"],
        b_ih=tensors.get(f"bias_ih{tail}"),
        b_hh=tensors.get(f"bias_hh{tail}"),
        w_hr=tensors.get(f"weight_hr{tail}"),
        gain=of("gain"),
        shift=of("shift"),
        scale=of("scale"),
        statistics={
            place: Statistics(
                mean.clone(),
                own[place, "running_var"].clone(),
                own[place, "num_batches_tracked"].tolist(),
            )
            for place, mean in of("running_mean").items()
        },
        places=tuple(place for place, _ in own),
    )


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def assert_same_statistics(module: nn.Module, suffix: str, d: Direction) -> None:
    inner = f"sites.{suffix}." if suffix else "sites."
    buffers = dict(module.named_buffers())
    assert 3 * len(d.statistics) == sum(name.startswith(inner) for name in buffers)
    for place, statistics in d.statistics.items():
        assert_close(buffers[f"{inner}{place}.running_mean"], statistics.mean)
        assert_close(buffers[f"{inner}{place}.running_var"], statistics.var)
        assert buffers[f"{inner}{place}.num_batches_tracked"].tolist() == statistics.count


LAYOUTS = {
    "one layer, equal lengths": ({}, (6, 6, 6)),
    "stacked, both directions, unsorted lengths": (
        {"num_layers": 2, "bidirectional": True},
        (3, 6, 1, 4, 4),
    ),
    "no biases, lengths": ({"bias": False}, (2, 5, 3)),
}


@every_cell
@every_norm
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer(cell: str, norm: str, layout: str) -> None:
    torch.manual_seed(1)
    options, lengths = LAYOUTS[layout]
    layer = build(LAYERS[cell], cell, norm, **options)
    check_layer(layer, cell, norm, lengths)


@every_norm
def test_lstm_with_projection(norm: str) -> None:
    torch.manual_seed(2)
    layer = build(LSTM, "LSTM", norm, proj_size=2, num_layers=2, bidirectional=True)
    check_layer(layer, "LSTM", norm, (4, 2, 5))


@pytest.mark.parametrize("norm", ["layer", "rms", "weight", "none"])
@pytest.mark.parametrize(
    ("cell", "normalize"),
    [
        ("LSTM", ("cell",)),
        ("LSTM", ("input",)),
        ("LSTM", ("recurrent", "cell")),
        ("LSTM", ()),
        ("GRU", ("recurrent",)),
        ("GRU", ("input",)),
        ("RNN_TANH", ("sum",)),
        ("RNN_TANH", ("input",)),
    ],
)
def test_only_some_places(cell: str, norm: str, normalize: tuple[str, ...]) -> None:
    torch.manual_seed(3)
    layer = build(LAYERS[cell], cell, norm, normalize=normalize)
    touched = {name.split(".")[2] for name in layer.state_dict() if name.startswith("sites.")}
    assert touched <= set(normalize)
    check_layer(layer, cell, norm, (4, 2, 5))


def check_layer(layer: nn.Module, cell: str, norm: str, lengths: tuple[int, ...]) -> None:
    """Outputs, states, running averages and every gradient, over two batches."""
    directions = 2 if layer.bidirectional else 1
    ours = {
        suffix: direction(layer, cell, norm, suffix)
        for k in range(layer.num_layers)
        for suffix in (f"l{k}", f"l{k}_reverse")[:directions]
    }
    flat = list(ours.values())
    layers = [flat[k : k + directions] for k in range(0, len(flat), directions)]
    for _ in range(2):
        sequences = [torch.randn(n, 3, dtype=F64) for n in lengths]
        shape = (len(flat), len(lengths))
        h0 = torch.randn(*shape, layer.proj_size or 4, dtype=F64, requires_grad=True)
        c0 = torch.randn(*shape, 4, dtype=F64, requires_grad=True)

        wanted, wanted_h, wanted_c = reference.run_layers(layers, sequences, h0, c0)
        hx = (h0, c0) if cell == "LSTM" else h0
        if len(set(lengths)) == 1:
            output, state = layer(torch.stack(sequences, dim=1), hx)
            outputs = output.unbind(1)
        else:
            packed, state = layer(pack_sequence(sequences, enforce_sorted=False), hx)
            outputs = unpack_sequence(packed)
        states = state if cell == "LSTM" else (state,)
        wanted_states = (wanted_h, wanted_c)[: len(states)]

        for actual, expected in zip(outputs, wanted, strict=True):
            assert_close(actual, expected)
        for actual, expected in zip(states, wanted_states, strict=True):
            assert_close(actual, expected)
        for suffix, d in ours.items():
            assert_same_statistics(layer, suffix, d)

        sources = [*layer.parameters(), h0] + ([c0] if cell == "LSTM" else [])
        got = gradients([*outputs, *states], sources)
        want = gradients([*wanted, *wanted_states], sources)
        for actual, expected in zip(got, want, strict=True):
            assert_close(actual, expected)


def gradients(results: list[Tensor], sources: list[Tensor]) -> list[Tensor]:
    """Of a sum that weighs every element of the results differently."""
    loss = sum((r * torch.linspace(-1, 1, r.numel(), dtype=F64).view_as(r)).sum() for r in results)
    return [
        torch.zeros_like(source) if g is None else g
        for g, source in zip(
            torch.autograd.grad(loss, sources, allow_unused=True), sources, strict=True
        )
    ]


@every_cell
@every_norm
def test_cell(cell: str, norm: str) -> None:
    torch.manual_seed(4)
    module = build(CELLS[cell], cell, norm)
    d = direction(module, cell, norm)
    n = 5
    h, c = torch.randn(2, n, 4, dtype=F64)
    wanted_h, wanted_c = list(h), list(c)
    state = (h, c) if cell == "LSTM" else h
    for t in range(6):
        x = torch.randn(n, 3, dtype=F64)
        state = module(x, state, step=t)
        wanted_h, wanted_c = reference.one_step(d, list(x), wanted_h, wanted_c, t)
        new_h, new_c = state if cell == "LSTM" else (state, torch.stack(wanted_c))
        assert_close(new_h, torch.stack(wanted_h))
        assert_close(new_c, torch.stack(wanted_c))
    assert_same_statistics(module, "", d)


@every_cell
@every_norm
def test_cell_gradients(cell: str, norm: str) -> None:
    torch.manual_seed(5)
    module = build(CELLS[cell], cell, norm)
    states = [torch.randn(3, 4, dtype=F64, requires_grad=True) for _ in range(2)]
    x = torch.randn(3, 3, dtype=F64, requires_grad=True)
    names, values = zip(*module.named_parameters(), strict=True)

    def run(x: Tensor, h: Tensor, c: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        hx = (h, c) if cell == "LSTM" else h
        arguments = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(module, arguments, (x, hx), {"step": 1})

    assert torch.autograd.gradcheck(run, (x, *states, *values))


@every_cell
@every_norm
def test_layer_gradients(cell: str, norm: str) -> None:
    torch.manual_seed(6)
    layer = build(LAYERS[cell], cell, norm, bidirectional=True)
    # Two examples reach the last step: one alone would meet running averages, which move.
    sequences = [torch.randn(n, 3, dtype=F64) for n in (3, 2, 3)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(data: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        arguments = dict(zip(names, parameters, strict=True))
        output, state = torch.func.functional_call(layer, arguments, (packed._replace(data=data),))
        return output.data, *(state if cell == "LSTM" else (state,))

    data = packed.data.clone().requires_grad_()
    # fast_mode: one random projection of the Jacobian, not each of its some hundred columns.
    assert torch.autograd.gradcheck(run, (data, *values), fast_mode=True)


def test_gru_gates_share_statistics_and_the_candidate_has_its_own() -> None:
    layer = GRU(3, 4, norm=LayerNorm(), dtype=F64)
    site = layer.sites["l0"]["recurrent"]
    a = torch.randn(2, 12, dtype=F64)
    candidate_moved = site(a + torch.cat([torch.zeros(8), torch.ones(4) * 5]))
    gate_moved = site(a + torch.cat([torch.ones(4) * 5, torch.zeros(8)]))
    assert_close(candidate_moved, site(a))  # a shift of a whole run changes nothing
    assert (gate_moved - site(a))[:, :8].abs().min() > 1e-3  # half a run: both gates change
    assert_close(gate_moved[:, 8:], site(a)[:, 8:])
