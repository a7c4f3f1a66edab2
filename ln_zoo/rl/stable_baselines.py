"""A recurrent policy with normalised LSTMs for `RecurrentPPO` of Stable-Baselines3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ln_zoo.layers import LSTM

try:
    from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
except ImportError:
    RecurrentActorCriticPolicy = None

#: Arguments of an LSTM that change the layout of sequences or states.
_LAYOUT = {"batch_first", "bidirectional", "proj_size"}


class LSTMPolicy(RecurrentActorCriticPolicy or object):  # type: ignore[misc]
    """``MlpLstmPolicy`` of sb3-contrib, with LSTMs of this package.

    A batch with episodes that start inside a sequence is one call with resets; sb3-contrib calls
    its LSTM once per step. Without a norm, initial weights, outputs and gradients are the same.

    Args:
        *arguments: arguments of ``MlpLstmPolicy``. For images, set
            ``features_extractor_class=NatureCNN``; for dictionaries, ``CombinedExtractor``.
        lstm_kwargs: further arguments of both LSTMs, such as ``{"norm": LayerNorm()}``, ``blocks``
            or ``recompute``.
        **options: keyword arguments of ``MlpLstmPolicy``.

    Raises:
        ImportError: if sb3-contrib is not installed.
        ValueError: for ``batch_first``, ``bidirectional`` or ``proj_size`` in ``lstm_kwargs``.
    """

    optimizer: torch.optim.Optimizer

    def __init__(
        self, *arguments: Any, lstm_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        if RecurrentActorCriticPolicy is None:
            raise ImportError("LSTMPolicy needs the package sb3_contrib: pip install sb3-contrib")
        kwargs = dict(lstm_kwargs or {})
        if refused := sorted(_LAYOUT & kwargs.keys()):
            raise ValueError(
                f"lstm_kwargs must not have {', '.join(refused)}: the policy reads sequences "
                "forward, and keeps states of lstm_hidden_size"
            )
        super().__init__(*arguments, **options)
        self.lstm_kwargs = kwargs
        for name in ("lstm_actor", "lstm_critic"):
            plain = getattr(self, name)
            if plain is None:
                continue
            sizes = plain.input_size, plain.hidden_size, plain.num_layers
            with torch.random.fork_rng(devices=()):  # keeps later random numbers
                lstm = LSTM(*sizes, **self.lstm_kwargs)
            own = lstm.state_dict()
            # A weight in blocks has another shape, and keeps its own draw.
            for key, weight in plain.state_dict().items():
                if key in own and own[key].shape == weight.shape:
                    own[key] = weight
            lstm.load_state_dict(own)
            lstm.reset_norm()
            setattr(self, name, lstm)
        lr = self.optimizer.defaults["lr"]
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr, **self.optimizer_kwargs)

    @staticmethod
    def _process_sequence(
        features: Tensor,
        lstm_states: tuple[Tensor, Tensor],
        episode_starts: Tensor,
        lstm: LSTM,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Outputs (N * T, H) and final states for features (N * T, F), sequence by sequence."""
        lead = lstm_states[0].shape[1], -1
        steps = features.reshape(*lead, lstm.input_size).transpose(0, 1)
        starts = episode_starts.reshape(lead).transpose(0, 1)
        output, states = lstm(steps, lstm_states, reset=starts != 0)
        return output.transpose(0, 1).flatten(0, 1), states
