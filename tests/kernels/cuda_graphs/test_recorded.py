"""The recorded loop, with a stand-in for CUDA graphs: a replay calls what was recorded again.

What the stand-in shows: chunks, copies to and from fixed memory, gradients, and what is refused.
That CUDA's own recordings give the same numbers is tested on a GPU (`tests/gpu`).
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from layer_results import results_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ln_zoo.kernels.cuda_graphs import graphs
from ln_zoo.kernels.cuda_graphs import recorded as loop
from ln_zoo.layers import GRU, LSTM, RNN
from ln_zoo.layers.recurrent import RecurrentLayer
from ln_zoo.norms import BatchNorm, LayerNorm, Norm, RMSNorm, Site, WeightNorm
from ln_zoo.ops import CELLS, Cell, States, Weights, registry
from ln_zoo.ops.cells import Sites


@pytest.fixture(autouse=True)
def cache(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No kernels, and recordings as if there were a GPU; see `conftest.py`."""
    monkeypatch.setenv("LN_ZOO_KERNELS", "0")
    monkeypatch.setenv("LN_ZOO_CUDA_GRAPHS", "all")
    monkeypatch.setitem(registry.SCANS, "cpu", loop.recorded_scan)
    monkeypatch.setattr(loop, "may_replay", lambda a: True)
    monkeypatch.setattr(loop, "_cache", lambda device: recorded)
    monkeypatch.setattr(graphs, "LENGTHS", (5, 2, 1))
    loop._refused.clear()
    registry._log.cache_clear()
    return recorded


def twice(run: Callable[[], Any]) -> Any:
    run()
    return run()


def by_plain_loop(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(loop, "may_replay", lambda a: False)
        return run()


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, a in wanted.items():
        assert torch.equal(found[name], a), (name, (found[name] - a).abs().max())


@pytest.fixture
def assert_repeated(cache: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Check that a second call is a replay with the numbers of the plain loop."""

    def check(
        run: Callable[[], dict[str, Tensor]],
        compare: Callable[[dict[str, Tensor], dict[str, Tensor]], None] = assert_equal,
    ) -> None:
        wanted, replays = by_plain_loop(monkeypatch, run), cache.replays
        compare(twice(run), wanted)
        assert cache.replays > replays

    return check


def starts(layer: RecurrentLayer, N: int) -> States:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    return tuple(torch.randn(count, N, layer.hidden_size) for _ in layer.cell.states)


def own_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """A cell of the user's own, with a weight of its own."""
    h, m = states
    a = wx + sites["recurrent"](h @ w.hh.T, t) + w.bias
    i, g = a.chunk(2, -1)
    m = 0.5 * m + i.sigmoid() * g.tanh() * w.own[0]
    return m.tanh() + 0.1 * h, m


OWN = Cell("own", own_step, dataclasses.replace(CELLS["GRU"]).places, states=("h", "m"))
OWN = dataclasses.replace(
    OWN,
    places=tuple(dataclasses.replace(place, groups=(2,)) for place in OWN.places),
    weights=(("scale", 1),),
)


class Own(RecurrentLayer):
    cell = OWN

    def forward(self, input: Tensor, hx: States | None = None) -> tuple[Tensor, States]:
        return self._run(input, hx, None)


@dataclass(frozen=True)
class Halved(Norm):
    """A norm of the user's own, with a gain and a buffer."""

    factor: float = 0.5

    def init_params(self, site: Site) -> None:
        site.add_affine(gain=1.0)
        if not hasattr(site, "share"):
            site.register_buffer("share", torch.full((), self.factor))

    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        return site.affine(a * site.share / (1 + a.abs().mean(-1, keepdim=True)))


LAYERS: dict[str, Callable[[], RecurrentLayer]] = {
    "LSTM": lambda: LSTM(3, 6, norm=LayerNorm()),
    "LSTM without a norm": lambda: LSTM(3, 6, bias=False),
    "LSTM of own norm": lambda: LSTM(3, 6, norm=Halved()),
    "LSTM with peepholes, clipped": lambda: LSTM(3, 6, peephole=True, derivative_bound=0.1),
    "LSTM, projected": lambda: LSTM(3, 6, norm=WeightNorm(), num_layers=2, bidirectional=True),
    "GRU": lambda: GRU(3, 6, norm=RMSNorm(), bidirectional=True),
    "RNN": lambda: RNN(3, 6, norm=LayerNorm(), num_layers=2),
    "own": lambda: Own(3, 6, norm=LayerNorm()),
    "own of own norm": lambda: Own(3, 6, norm=Halved(0.25)),
}


@pytest.mark.parametrize(
    ("make", "with_states"),
    [(make, i % 2 == 1) for i, make in enumerate(LAYERS.values())],
    ids=LAYERS,
)
def test_numbers_are_those_of_the_plain_loop_bit_for_bit(
    make: Callable[[], RecurrentLayer],
    with_states: bool,
    cache: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lengths of several chunks, other tensors at each call, and two calls before a backward."""
    torch.manual_seed(0)
    layer = make()
    calls = [(torch.randn(T, 4, 3), starts(layer, 4)) for T in (13, 13, 9, 13)]
    for k, (x, states) in enumerate(calls):
        given = states if with_states else None
        wanted = by_plain_loop(monkeypatch, lambda: results_of(layer, x, given))  # noqa: B023

        def called(x: Tensor, hx: Any, again: bool = k == 3) -> Any:
            found = layer(x, hx)
            _ = layer(x.flip(0) + 1) if again else None
            return found

        replays = cache.replays
        assert_equal(results_of(layer, x, given, call=called), wanted)
        assert (cache.replays > replays) == (k > 0)  # recorded when it comes again
        with torch.no_grad():  # weights change in place, as an optimizer changes them
            for p in layer.parameters():
                p.add_(0.01 * torch.randn_like(p))


NOISE = {
    "zoneout": {"zoneout": (0.3, 0.2)},
    "dropout": {"recurrent_dropout": 0.4},
    "both": {"zoneout": 0.3, "recurrent_dropout": 0.4, "weight_dropout": 0.2},
}


@pytest.mark.parametrize("options", NOISE.values(), ids=NOISE)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_noise_is_drawn_before_the_loop(
    options: dict[str, Any], training: bool, assert_repeated: Callable[..., None]
) -> None:
    layer = LSTM(3, 6, norm=LayerNorm(), **options).train(training)
    x = torch.randn(9, 4, 3)
    assert_repeated(lambda: results_of(layer, x))


def test_resets(assert_repeated: Callable[..., None]) -> None:
    layer = LSTM(3, 6, norm=LayerNorm(), bidirectional=True)
    x, reset = torch.randn(9, 4, 3), torch.rand(9, 4) < 0.3
    assert_repeated(lambda: results_of(layer, x, call=lambda x, hx: layer(x, hx, reset)))


def test_autocast(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are the same; gradients of weights have fewer roundings, in float32."""
    layer = LSTM(3, 6, norm=LayerNorm())
    x = torch.randn(9, 4, 3)

    def run() -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return results_of(layer, x)

    wanted = by_plain_loop(monkeypatch, run)
    found = twice(run)
    assert cache.replays
    assert found["output"].dtype == torch.bfloat16
    for name in ("output", "h", "c"):
        assert torch.equal(found[name], wanted[name])
    exact = by_plain_loop(monkeypatch, lambda: results_of(layer, x))
    for name, a in exact.items():
        scale = a.abs().max()
        error, of_plain = ((b[name] - a).abs().max() / scale for b in (found, wanted))
        assert error <= 2 * of_plain + 2**-9, name


def test_without_gradients(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LSTM(3, 6, norm=LayerNorm())
    x = torch.randn(9, 4, 3)
    wanted = layer(x)[0].detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(3):
                found = layer(x)[0]
        assert torch.equal(found, wanted)
        assert not found.requires_grad
    assert cache.replays
    # What was recorded in inference mode serves others.
    with torch.no_grad():
        assert torch.equal(layer(x)[0], wanted)
    results_of(layer, x)


def test_some_gradients_alone(assert_repeated: Callable[..., None]) -> None:
    layer = LSTM(3, 6, norm=LayerNorm())
    x, wanted = torch.randn(9, 4, 3), ("weight_hh_l0", "sites.l0.cell.gain")
    for name, p in layer.named_parameters():
        p.requires_grad_(name in wanted)

    def run() -> dict[str, Tensor]:
        _, (h, _) = layer(x)
        sources = [layer.get_parameter(name) for name in wanted]
        return dict(zip(wanted, torch.autograd.grad(h.sum(), sources), strict=True))

    assert_repeated(run)


def test_gradients_of_gradients_and_batches_of_gradients(
    assert_repeated: Callable[..., None],
) -> None:
    layer = GRU(3, 6, norm=LayerNorm()).double()
    x = torch.randn(9, 2, 3, dtype=torch.float64, requires_grad=True)

    def second() -> tuple[Tensor, ...]:
        output, h = layer(x)
        leaves = [x, *layer.parameters()]
        first = torch.autograd.grad(output.square().sum() + h.sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(a.square().sum() for a in first), leaves)

    def batch() -> tuple[Tensor, ...]:
        output, _ = layer(x)
        rows = torch.stack([torch.ones_like(output), 2 * torch.ones_like(output)])
        return torch.autograd.grad(output, [x], rows, is_grads_batched=True)

    for run in (second, batch):
        assert_repeated(run, torch.testing.assert_close)


def test_backward_twice(cache: Any) -> None:
    layer = LSTM(3, 6, norm=LayerNorm())
    x = torch.randn(9, 2, 3)
    layer(x)
    loss = layer(x)[0].square().sum()
    first = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
    layer(x + 1)[0].sum().backward()
    second = torch.autograd.grad(loss, list(layer.parameters()))
    assert cache.replays
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_layer_that_changes_is_recorded_anew(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """New parameters, another precision, plain attributes that a norm reads."""
    layer = LSTM(3, 6, norm=Halved())
    x = torch.randn(9, 2, 3)
    results_of(layer, x)
    results_of(layer, x)
    layer.load_state_dict({n: a + 1 for n, a in layer.state_dict().items()}, assign=True)
    assert_equal(results_of(layer, x), by_plain_loop(monkeypatch, lambda: results_of(layer, x)))
    for site in layer.sites["l0"].children():
        site.norm = Halved(3.0)
    for _ in range(3):
        assert_equal(results_of(layer, x), by_plain_loop(monkeypatch, lambda: results_of(layer, x)))
    layer, x = layer.double(), x.double()
    for _ in range(3):
        assert_equal(results_of(layer, x), by_plain_loop(monkeypatch, lambda: results_of(layer, x)))
    twin = copy.deepcopy(layer)
    assert_equal(results_of(twin, x), results_of(layer, x))


def test_threads(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = [LSTM(3, 6, norm=LayerNorm()) for _ in range(3)]
    inputs = [torch.randn(9, 2, 3) for _ in layers]
    pairs = list(zip(layers, inputs, strict=True))
    wanted = by_plain_loop(monkeypatch, lambda: [results_of(a, x) for a, x in pairs])
    found: dict[int, list[dict[str, Tensor]]] = {}

    def work(k: int) -> None:
        found[k] = [results_of(*pairs[k]) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, runs in found.items():
        for run in runs:
            # The cotangents come from one seed in each run.
            assert_equal(run, wanted[k])
    assert cache.replays


def test_layers_that_are_gone_leave_their_recordings_to_others(cache: Any) -> None:
    """As many kinds are kept as the cache holds, and no parameters with them."""
    x = torch.randn(6, 2, 3)
    gone = []

    def come_and_go() -> None:
        layer = LSTM(3, 6, norm=LayerNorm())
        twice(lambda: results_of(layer, x))
        gone.extend([weakref.ref(a) for a in (layer, *layer.sites.modules(), *layer.parameters())])

    for _ in range(cache.size + 4):
        come_and_go()
    assert len(cache._entries) == cache.size
    gc.collect()
    assert all(ref() is None for ref in gone)


def drawing_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    return ((wx + torch.rand_like(wx)).tanh(),)


def reading_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    return (wx.tanh() if float(states[0].sum()) < 1e9 else wx,)


COUNTER = torch.zeros(())


def failing_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    if loop.torch.is_grad_enabled() and not isinstance(t, int):
        raise RuntimeError("not while it is recorded")
    return (wx.tanh(),)


STEPS = {
    "random numbers are drawn": drawing_step,
    "numbers are read back": reading_step,
    "the number of the time step is used": lambda wx, states, w, sites, t: (
        wx.tanh() if t is not None and t % 2 else states[0] + wx,
    ),
    "changed in place": lambda wx, *_: (COUNTER.add_(1), wx.tanh())[1:],
    "neither weight nor state": lambda wx, *_: (wx.tanh() + COUNTER,),
    "not while it is recorded": failing_step,
}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [m for m in caplog.messages if "the generic loop is" in m]


@pytest.mark.parametrize("reason", STEPS)
def test_cells_that_a_recording_cannot_repeat(
    reason: str, cache: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = tuple(dataclasses.replace(place, groups=(1,)) for place in CELLS["GRU"].places)
    cell = Cell(f"cell: {reason}", STEPS[reason], places)

    class Layer(RecurrentLayer):
        def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
            output, (h,) = self._run(input, hx, None)
            return output, h

    layer, x = Layer(3, 6, cell=cell), torch.randn(9, 2, 3)

    def run() -> dict[str, Tensor]:
        torch.manual_seed(7)
        output, _ = layer(x.clone().requires_grad_())
        (d,) = torch.autograd.grad(output.sum(), layer.weight_ih_l0)
        return {"output": output.detach(), "d": d}

    wanted = by_plain_loop(monkeypatch, run)
    with caplog.at_level(logging.INFO, logger="ln_zoo"):
        for _ in range(4):
            found = run()
            if "in place" not in reason:
                assert_equal(found, wanted)
    assert cache.replays == 0
    (message,) = said(caplog)
    assert reason in message


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: LSTM(3, 6, norm=BatchNorm()), "BatchNorm keeps statistics"),
        (lambda: hooked(LSTM(3, 6, norm=LayerNorm())), "there are hooks"),
    ],
    ids=["batch norm", "hooks"],
)
def test_layers_that_are_not_recorded(
    make: Callable[[], LSTM], reason: str, cache: Any, caplog: pytest.LogCaptureFixture
) -> None:
    layer = make()
    with caplog.at_level(logging.INFO, logger="ln_zoo"):
        for _ in range(3):
            layer(torch.randn(9, 2, 3))[0].sum().backward()
    assert cache.replays == cache.recordings == 0
    (message,) = said(caplog)
    assert reason in message


def hooked(layer: LSTM) -> LSTM:
    layer.sites["l0"]["recurrent"].register_forward_hook(lambda *_: None)
    return layer


def test_steps_that_are_the_users_own_are_recorded_on_request(
    cache: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A number that a step reads from elsewhere would stay as it was."""
    monkeypatch.delenv("LN_ZOO_CUDA_GRAPHS")
    x = torch.randn(9, 3, 4)
    with caplog.at_level("INFO", logger="ln_zoo"):
        for _ in range(3):
            Own(4, 5)(x)
    assert not cache.recordings
    assert "own_step" in caplog.text
    layer = LSTM(4, 5, norm=LayerNorm())
    for _ in range(3):
        layer(x)
    assert cache.recordings


def test_calls_that_are_not_recorded(cache: Any) -> None:
    layer = LSTM(3, 6, norm=LayerNorm())
    x = torch.randn(9, 2, 3)
    packed = nn.utils.rnn.pack_padded_sequence(x, [9, 4])
    short = x[:3]
    for _ in range(3):
        layer(packed)
        layer(short)
        checkpoint(layer, x.clone().requires_grad_(), use_reentrant=False)[0].sum().backward()
        torch.func.grad(lambda a: layer(a)[0].sum())(x)
        torch.func.vmap(lambda a: layer(a)[0])(x[None])
        with torch.autograd.detect_anomaly(check_nan=False):
            layer(x)[0].sum().backward()
    assert cache.replays == cache.recordings == 0


def test_large_steps_are_recorded_in_short_chunks_or_not_at_all(
    cache: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layer = LSTM(3, 6, norm=LayerNorm())
    x = torch.randn(10, 2, 3)
    twice(lambda: results_of(layer, x))
    (entry,) = cache._entries.values()
    assert entry.tensors.lengths == [5, 2, 1]
    size = len(entry.tensors.chunks[5].saved)
    monkeypatch.setattr(loop, "CHUNK_BYTES", size // 2)
    layer = copy.deepcopy(layer)
    twice(lambda: results_of(layer, x))
    assert entry is not (other := list(cache._entries.values())[-1])
    assert other.tensors.lengths == [2, 1]
    monkeypatch.setattr(loop, "CHUNK_BYTES", size // 20)
    layer = copy.deepcopy(layer)
    replays = cache.replays
    twice(lambda: results_of(layer, x))
    assert cache.replays == replays


def test_a_recording_that_fails_is_not_tried_again(
    cache: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layer = LSTM(3, 6, norm=LayerNorm())
    x = torch.randn(9, 2, 3)
    tried = []

    def fail(*arguments: Any) -> None:
        tried.append(arguments)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(cache, "record", fail)
    wanted = by_plain_loop(monkeypatch, lambda: results_of(layer, x))
    with caplog.at_level(logging.INFO, logger="ln_zoo"):
        for _ in range(4):
            assert_equal(results_of(layer, x), wanted)
    assert len(tried) == 1
    (message,) = said(caplog)
    assert "out of memory" in message
