"""Recurrent policies: the equivalents of what RL libraries do, and the libraries themselves."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from refusals import refuses
from torch import Tensor, nn

from ln_zoo import rl
from ln_zoo.layers import GRU, LSTM
from ln_zoo.norms import Identity, LayerNorm, RMSNorm
from ln_zoo.ops import resets

WITHOUT_SB3 = importlib.util.find_spec("sb3_contrib") is None
needs_sb3 = pytest.mark.skipif(WITHOUT_SB3, reason="needs the package sb3-contrib")
WITHOUT_TORCHRL = importlib.util.find_spec("torchrl") is None
needs_torchrl = pytest.mark.skipif(WITHOUT_TORCHRL, reason="needs the package torchrl")
N, T, E, H = 5, 9, 3, 16


def step_by_step(
    features: Tensor, states: tuple[Tensor, Tensor], starts: Tensor, lstm: Any
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """As sb3-contrib: one call for each step, on states times one minus the flags."""
    number, outputs = states[0].shape[1], []
    steps = features.view(number, -1, features.shape[1]).unbind(1)
    for x, start in zip(steps, starts.view(number, -1).unbind(1), strict=True):
        keep = (1 - start).view(1, number, 1)
        output, states = lstm(x.unsqueeze(0), tuple(keep * s for s in states))
        outputs.append(output)
    return torch.cat(outputs).transpose(0, 1).flatten(0, 1), states


@pytest.mark.parametrize("norm", [Identity(), LayerNorm(gain=0.5)], ids=["none", "layer"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_rollout_in_one_call(norm: Any, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resets, "split_at_resets", lambda *_: pytest.fail("cut into pieces"))
    torch.manual_seed(0)
    lstm = LSTM(E, H, 2, norm=norm)
    x = torch.randn(N * T, E, requires_grad=True)
    states = tuple(torch.randn(2, N, H) for _ in range(2))
    starts = (torch.rand(N * T) < share).float()
    results = []
    for run, layer in (
        (rl.LSTMPolicy._process_sequence, lstm),
        (step_by_step, LSTM(E, H, 2, norm=norm, dtype=torch.float64)),
    ):
        layer.load_state_dict(lstm.state_dict())
        kind = layer.weight_hh_l0.dtype
        given = tuple(s.to(kind) for s in states)
        output, (h, c) = run(x.to(kind), given, starts.to(kind), layer)
        loss = output.square().sum() + (h * c).sum()
        gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
        results.append([a.double() for a in (output, h, c, *gradients)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not WITHOUT_SB3, reason="the package sb3-contrib is here")
def test_a_policy_names_the_package_that_it_needs() -> None:
    refuses("sb3-contrib", rl.LSTMPolicy, error=ImportError)


@pytest.mark.skipif(not WITHOUT_TORCHRL, reason="the package torchrl is here")
def test_a_module_names_the_package_that_it_needs() -> None:
    refuses("torchrl", rl.LSTMModule, lstm=LSTM(E, H, batch_first=True), error=ImportError)


def trained(policy: Any, **options: Any) -> tuple[Any, dict[str, float]]:
    """A model after one rollout and one update, and what it logged of the update."""
    from sb3_contrib import RecurrentPPO

    sizes: dict[str, Any] = {"n_steps": 64, "batch_size": 40, "n_epochs": 2, "seed": 3}
    sizes["policy_kwargs"] = {"lstm_hidden_size": 32, **options}
    model = RecurrentPPO(policy, "CartPole-v1", device="cpu", **sizes)
    logged: dict[str, float] = {}
    train = model.train

    def noted() -> None:
        train()
        logged.update(model.logger.name_to_value)

    model.train = noted
    model.learn(64)
    losses = {k: v for k, v in logged.items() if "loss" in k or k.endswith(("kl", "fraction"))}
    return model, losses


@needs_sb3
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"enable_critic_lstm": False}, {"enable_critic_lstm": False, "shared_lstm": True}],
    ids=str,
)
def test_without_a_norm_it_is_the_policy_of_stable_baselines(options: dict[str, Any]) -> None:
    """The same weights from the same seed, the same rollout, and the same losses of an update."""
    (theirs, expected), (ours, found) = (
        trained(policy, **options) for policy in ("MlpLstmPolicy", rl.LSTMPolicy)
    )
    assert len(expected) == 6
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    weights = ours.policy.state_dict()
    for name, weight in theirs.policy.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-5)
    assert type(theirs.policy.lstm_actor) is nn.LSTM
    assert isinstance(ours.policy.lstm_actor, LSTM)
    assert theirs.rollout_buffer.episode_starts.sum() > 1  # an episode ended inside


@needs_sb3
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"norm": LayerNorm()},
        {"norm": RMSNorm(), "normalize": ["recurrent", "cell"]},
        {"norm": LayerNorm(per_gate=True, per_block=True), "blocks": 4},
        {"norm": LayerNorm(), "recompute": 16},
        {"bias": False, "dropout": 0.1},
    ],
    ids=str,
)
def test_a_policy_learns_and_is_saved(options: dict[str, Any], tmp_path: Any) -> None:
    """A loaded policy acts alike over steps with states and an episode that starts between."""
    from sb3_contrib import RecurrentPPO

    model, _ = trained(rl.LSTMPolicy, lstm_kwargs=options, n_lstm_layers=2)
    lstm = model.policy.lstm_critic
    assert lstm.options == {key: options[key] for key in ("blocks", "recompute") if key in options}
    if "norm" in options:
        gain = lstm.sites["l1"]["cell"].gain
        assert not gain.eq(1).all()  # the optimizer has it
    model.save(tmp_path / "model")
    again = RecurrentPPO.load(tmp_path / "model", device="cpu")
    runs = []
    for policy in (again, model):
        states, steps = None, []
        for step in range(4):
            seen = torch.full((2, 4), 0.1 * step).numpy()
            start = torch.tensor([step == 0, step in (0, 2)]).numpy()
            action, states = policy.predict(seen, states, start, deterministic=True)
            steps += [action, *states]
        runs.append(steps)
    assert all((a == b).all() for a, b in zip(*runs, strict=True))
    h = runs[0][-2][-1]
    assert abs(h[0] - h[1]).max() > 1e-4  # one episode is two steps longer


@needs_sb3
@pytest.mark.parametrize("name", ["batch_first", "bidirectional", "proj_size"])
def test_a_policy_refuses_other_layouts(name: str) -> None:
    refuses(name, trained, rl.LSTMPolicy, lstm_kwargs={name: 1})


@needs_torchrl
@pytest.mark.slow
@pytest.mark.parametrize("cls", [LSTM, GRU])
def test_torchrl_runs_our_layers(cls: type) -> None:
    """Episodes that begin inside a sequence are resets."""
    from tensordict import TensorDict
    from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode

    torch.manual_seed(0)
    layer: Any = cls(E, H, 2, batch_first=True, norm=LayerNorm())
    names = ["h", "c"] if cls is LSTM else ["h"]
    keys = {"in_keys": ["x", *names], "out_keys": ["y", *(("next", n) for n in names)]}
    module = LSTMModule(lstm=layer, **keys) if cls is LSTM else GRUModule(gru=layer, **keys)
    reset = torch.zeros(N, T, dtype=torch.bool)
    reset[1, 4] = reset[2, [0, 3, 4]] = reset[3] = True
    # A collector stores the states before each step, which are zeros where an episode begins.
    states = torch.randn(N, T, 2, H) * ~reset[..., None, None]
    x = torch.randn(N, T, E)
    data = {"x": x, "is_init": reset.unsqueeze(-1), **dict.fromkeys(names, states)}
    with set_recurrent_mode(True):
        found = module(TensorDict(data, [N, T]))
    hx = states[:, 0].transpose(0, 1).contiguous()
    output, final = layer(x, (hx, hx) if cls is LSTM else hx, reset=reset)
    torch.testing.assert_close(found["y"], output, rtol=1e-4, atol=1e-5)
    final = final if cls is LSTM else (final,)
    for name, state in zip(names, final, strict=True):
        last = found["next", name][:, -1].transpose(0, 1)
        torch.testing.assert_close(last, state, rtol=1e-4, atol=1e-5)


@needs_torchrl
@pytest.mark.slow
@pytest.mark.parametrize("lead", [(T,), (N, T), (2, N, T)], ids=str)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_module_of_torchrl_in_one_call(
    kind: str, lead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, gradients, last states and steps are those of torchrl's module."""
    from tensordict import TensorDict
    from torchrl import modules

    torch.manual_seed(0)
    cls, module = {"lstm": (LSTM, "LSTMModule"), "gru": (GRU, "GRUModule")}[kind]
    layer = cls(E, H, 2, batch_first=True, norm=LayerNorm())
    keys = {kind: layer, "in_key": "x", "out_key": "y"}
    ours, theirs = (getattr(place, module)(**keys) for place in (rl, modules))
    assert ours.in_keys == theirs.in_keys
    assert ours.out_keys == theirs.out_keys
    names = [key for key in theirs.in_keys if key.startswith("recurrent_state")]
    reset = torch.rand(*lead, 1) < 0.3
    data = {"x": torch.randn(*lead, E), "is_init": reset}
    data |= {name: torch.randn(*lead, 2, H) * ~reset[..., None] for name in names}
    for given in (data, {key: data[key] for key in ("x", "is_init")}):
        results = []
        for each in (ours, theirs):
            with modules.set_recurrent_mode(True):
                found = each(TensorDict(given, lead))
            gradients = torch.autograd.grad(found["y"].square().sum(), [*layer.parameters()])
            last = [found["next", name][..., -1, :, :] for name in names]
            results.append([found["y"], *last, *gradients])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    step = TensorDict(data, lead)[..., 0]
    acted = [each(step.clone()) for each in (ours, theirs)]
    assert (acted[0] == acted[1]).all()
    specs = [each.make_tensordict_primer().primers for each in (ours, theirs)]
    assert specs[0] == specs[1]
    calls = []
    monkeypatch.setattr(
        layer, "forward", lambda *a, **k: calls.append(a) or cls.forward(layer, *a, **k)
    )
    with modules.set_recurrent_mode(True):
        ours(TensorDict(data, lead))
    assert [a[0].shape[-2] for a in calls] == [T]


@needs_torchrl
@pytest.mark.slow
def test_a_module_of_torchrl_needs_our_layer() -> None:
    for given in ({}, {"lstm": nn.LSTM(E, H, batch_first=True)}, {"lstm": GRU(E, H)}):
        refuses("lstm=", rl.LSTMModule, **given, in_key="x", out_key="y", error=TypeError)
    refuses(
        "batch_first", rl.LSTMModule, lstm=LSTM(E, H), in_key="x", out_key="y", error=ValueError
    )
