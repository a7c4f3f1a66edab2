"""Reinforcement learning with a recurrent policy whose episodes end inside a rollout.

    python examples/reinforcement_learning.py

Each of many environments shows one of two cues, waits, and then asks for it, so the policy needs
memory. Episodes end at different steps, and the next one starts at once. ``reset=`` marks the steps
at which states are reset, so learning runs a rollout in one call and computes the logits of acting.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ln_zoo import GRU, LayerNorm

ENVIRONMENTS, STEPS, LONGEST_WAIT = 32, 24, 5


class Cues:
    """Environments (N) with observations (N, 4): two cues, waiting, and the question.

    Args:
        number: number N of environments.
        generator: random generator of cues and waits.
    """

    def __init__(self, number: int, generator: torch.Generator) -> None:
        self.generator = generator
        self.cue = torch.zeros(number, dtype=torch.long)
        self.left = torch.zeros(number, dtype=torch.long)
        self.begin(torch.ones(number, dtype=torch.bool))

    def begin(self, which: Tensor) -> None:
        """Start new episodes in some environments."""
        number = (len(which),)
        cue = torch.randint(2, number, generator=self.generator)
        wait = torch.randint(2, LONGEST_WAIT + 1, number, generator=self.generator)
        self.cue, self.left = torch.where(which, cue, self.cue), torch.where(which, wait, self.left)
        self.first = which

    def observe(self) -> tuple[Tensor, Tensor]:
        """Observations, and whether an answer is due."""
        asked = self.left == 0
        seen = torch.where(self.first, self.cue, torch.where(asked, 3, 2))
        return F.one_hot(seen, 4).float(), asked

    def step(self, action: Tensor) -> Tensor:
        """Apply actions (N,); rewards are 1 for right answers."""
        asked = self.left == 0
        reward = (asked & (action == self.cue)).float()
        self.left = self.left - 1
        self.begin(asked)
        return reward


class Policy(nn.Module):
    """Logits of two actions and a value, (T, N, 2) and (T, N)."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.rnn = GRU(4, hidden, norm=LayerNorm())
        self.actor, self.critic = nn.Linear(hidden, 2), nn.Linear(hidden, 1)

    def forward(
        self, seen: Tensor, state: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        output, state = self.rnn(seen, state, reset=reset)
        return self.actor(output), self.critic(output).squeeze(-1), state


@torch.no_grad()
def rollout(policy: Policy, cues: Cues, state: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
    """Act for some steps; return the trajectory, (T, N, ...) each, and the last state."""
    happened: dict[str, list[Tensor]] = {}
    for _ in range(STEPS):
        seen, asked = cues.observe()
        reset = cues.first
        logits, _, state = policy(seen[None], state, reset[None])
        action = torch.multinomial(logits[0].softmax(-1), 1, generator=cues.generator).squeeze(1)
        reward = cues.step(action)
        now = {"seen": seen, "asked": asked, "reset": reset, "logits": logits[0]}
        for name, value in (now | {"action": action, "reward": reward}).items():
            happened.setdefault(name, []).append(value)
    assert state is not None
    return {name: torch.stack(values) for name, values in happened.items()}, state


def main(updates: int = 60) -> dict[str, float]:
    """Train; return the success rate and the difference of logits in learning and acting."""
    torch.manual_seed(0)
    policy = Policy()
    cues = Cues(ENVIRONMENTS, torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    state, rates, difference, leaking = None, [], 0.0, 0.0
    for _ in range(updates):
        before = state
        acted, state = rollout(policy, cues, state)
        logits, values, _ = policy(acted["seen"], before, acted["reset"])
        difference = max(difference, (logits - acted["logits"]).abs().max().item())
        asked, reward = acted["asked"], acted["reward"]
        # An answer ends its episode: its reward is the return.
        gain = (reward - values.detach())[asked]
        chosen = F.cross_entropy(logits[asked], acted["action"][asked], reduction="none")
        loss = (gain * chosen).mean() + F.mse_loss(values[asked], reward[asked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.append(reward[asked].mean().item())
    with torch.no_grad():
        acted, _ = rollout(policy, cues, state)
        leaking = (policy(acted["seen"], state, None)[0] - acted["logits"]).abs().max().item()
    success = sum(rates[-10:]) / 10
    print(f"answers right: {100 * rates[0]:.0f} % at first, {100 * success:.0f} % in the end")
    print(f"logits learned from differ from those acted with by at most {difference:.1e}")
    print(f"without reset= they would by {leaking:.1e}")
    return {"success": success, "difference": difference, "leaking": leaking}


if __name__ == "__main__":
    main()
