"""Recurrent policies of RL libraries, with their LSTM and with ours.

``python -m benchmarks.policies sb3`` prints frames a second of RecurrentPPO on CartPole, and
``python -m benchmarks.policies torchrl`` the time of a training step on a rollout. They need the
packages ``sb3-contrib`` and ``torchrl``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import runner
from ln_zoo import LSTM, LayerNorm

#: Calls of one contestant by name.
Calls = dict[str, Callable[[], object]]


def stable_baselines() -> tuple[Calls, int]:
    """One rollout and update each, all settings by default, and its frames."""
    from sb3_contrib import RecurrentPPO

    from ln_zoo.rl import LSTMPolicy

    policies: dict[str, tuple[Any, dict[str, Any]]] = {
        "MlpLstmPolicy": ("MlpLstmPolicy", {}),
        "LSTMPolicy": (LSTMPolicy, {}),
        "LSTMPolicy, layer norm": (LSTMPolicy, {"lstm_kwargs": {"norm": LayerNorm()}}),
    }
    calls: Calls = {}
    for name, (policy, options) in policies.items():
        model = RecurrentPPO(policy, "CartPole-v1", seed=0, device="cpu", policy_kwargs=options)
        calls[name] = partial(model.learn, model.n_steps, reset_num_timesteps=False)
    return calls, model.n_steps


def torchrl(
    examples: int = 16, steps: int = 128, inputs: int = 8, hidden: int = 128
) -> tuple[Calls, int]:
    """A training step each on a rollout where one step of 50 begins an episode, and its frames."""
    from tensordict import TensorDict
    from torchrl.modules import LSTMModule, set_recurrent_mode

    from ln_zoo import rl

    names, lead = ["recurrent_state_h", "recurrent_state_c"], (examples, steps)
    data = {name: torch.zeros(*lead, 1, hidden) for name in names}
    data |= {"observation": torch.randn(*lead, inputs), "is_init": torch.rand(*lead, 1) < 0.02}
    rollout = TensorDict(data, lead)
    layers: dict[str, Any] = {
        "torch.nn.LSTM": nn.LSTM(inputs, hidden, batch_first=True),
        "ln_zoo.LSTM": LSTM(inputs, hidden, batch_first=True),
        "ln_zoo.LSTM, layer norm": LSTM(inputs, hidden, batch_first=True, norm=LayerNorm()),
    }
    modules: dict[str, Any] = {
        f"LSTMModule, {name}": LSTMModule(lstm=layer, in_key="observation", out_key="features")
        for name, layer in layers.items()
    }
    for name in list(layers)[1:]:
        ours = rl.LSTMModule(lstm=layers[name], in_key="observation", out_key="features")
        modules[f"ours, {name}"] = ours

    def step(module: Any) -> None:
        with set_recurrent_mode(True):
            module(rollout.clone())["features"].square().sum().backward()

    return {name: partial(step, module) for name, module in modules.items()}, examples * steps


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = runner.parser("policies", __doc__, rounds=9, seconds=60.0, threads=1)
    parser.add_argument("library", choices=("sb3", "torchrl"))
    given = runner.parse(parser, arguments)
    torch.manual_seed(0)
    calls, frames = stable_baselines() if given.library == "sb3" else torchrl()
    found = runner.compare(calls, next(iter(calls)), {"frames": frames}, given)
    runner.print_head(["contestant", "frames a second", "ratio"])
    for row in found:
        speeds = frames / row["seconds"], 1 / row["wall_ratio"]
        runner.print_row([row["contestant"], f"{speeds[0]:.0f}", f"{speeds[1]:.1f}"])
    runner.write(found, given.csv)


if __name__ == "__main__":
    main()
