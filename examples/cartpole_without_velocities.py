"""CartPole without velocities, by RecurrentPPO of sb3-contrib and a layer-normalised LSTM.

    python examples/cartpole_without_velocities.py --seed 0

The policy sees the position of the cart and the angle of the pole, and needs memory to infer how
fast they change. It prints the mean return of 100 fresh episodes; CartPole-v1 is solved at 475.
``--plain`` trains sb3-contrib's own policy with the same settings.
"""

from __future__ import annotations

import argparse
import time

import gymnasium
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

from ln_zoo import LayerNorm
from ln_zoo.rl import LSTMPolicy


class WithoutVelocities(gymnasium.ObservationWrapper):
    """CartPole whose observations (2,) are the position and the angle."""

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        space = self.env.observation_space
        self.observation_space = gymnasium.spaces.Box(space.low[::2], space.high[::2])

    def observation(self, observation):
        return observation[::2]


class Encoder(BaseFeaturesExtractor):
    """Layer norm of two numbers alone would keep little but their ratio."""

    def __init__(self, space, features=64):
        super().__init__(space, features)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(space.shape[0], features), torch.nn.Tanh()
        )

    def forward(self, observations):
        return self.network(observations)


def train(steps, seed=0, plain=False):
    """A trained model; plain: with the policy of sb3-contrib."""
    policy = {"features_extractor_class": Encoder, "lstm_hidden_size": 64}
    if not plain:
        policy["lstm_kwargs"] = {"norm": LayerNorm()}
    environments = make_vec_env(WithoutVelocities, n_envs=8, seed=seed)
    model = RecurrentPPO(
        "MlpLstmPolicy" if plain else LSTMPolicy,
        environments,
        policy_kwargs=policy,
        seed=seed,
        learning_rate=lambda left: 1e-3 * left,
        batch_size=256,
        device="cpu",
    )
    return model.learn(steps)


def score(model, episodes=100, seed=1000):
    """Mean and standard deviation of the returns of fresh episodes."""
    fresh = make_vec_env(WithoutVelocities, n_envs=8, seed=seed)
    return evaluate_policy(model, fresh, episodes)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, and return the mean return of fresh episodes and the minutes of training."""
    parser = argparse.ArgumentParser(description="CartPole without velocities.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100_000, help="of all environments")
    parser.add_argument("--episodes", type=int, default=100, help="fresh ones to score it by")
    parser.add_argument("--plain", action="store_true", help="MlpLstmPolicy")
    given = parser.parse_args(arguments)
    clock, processor = time.perf_counter(), time.process_time()
    model = train(given.steps, given.seed, given.plain)
    found = {
        "minutes": (time.perf_counter() - clock) / 60,
        "processor": (time.process_time() - processor) / 60,
    }
    found["return"], found["deviation"] = map(float, score(model, given.episodes))
    print(", ".join(f"{name} {value:.2f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()
