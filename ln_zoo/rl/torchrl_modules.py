"""Recurrent modules of TorchRL that run a rollout in one call."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ln_zoo.layers import GRU, LSTM

try:
    from torchrl import modules
except ImportError:
    modules = None


class _OneCall:
    """Recurrent mode by ``reset`` of the layer, the argument `name`, of class `kind`."""

    name: ClassVar[str]
    kind: ClassVar[type]

    def __init__(self, **options: Any) -> None:
        if modules is None:
            raise ImportError(f"{type(self).__name__} needs the package torchrl")
        layer = options.get(self.name)
        if not isinstance(layer, self.kind):
            raise TypeError(
                f"{type(self).__name__} needs {self.name}=, an ln_zoo.{self.kind.__name__} with "
                f"batch_first=True; got {layer!r}"
            )
        super().__init__(**options)

    def forward(self, tensordict: Any) -> Any:
        shape: tuple[int, ...] = tuple(tensordict.shape)
        if not (self.recurrent_mode and shape):  # type: ignore[attr-defined]
            return super().forward(tensordict)  # type: ignore[misc]

        def rows(a: Tensor) -> Tensor:
            return a.reshape(-1, *shape[-1:], *a.shape[len(shape) :])

        names = [key for key in self.in_keys if key != "is_init"]  # type: ignore[attr-defined]
        x, *given = (tensordict.get(key, None) for key in names)
        hx = tuple(rows(s)[:, 0].transpose(0, 1).contiguous() for s in given if s is not None)
        output, final = getattr(self, self.name)(
            rows(x),
            hx if len(hx) > 1 else hx[0] if hx else None,
            reset=rows(tensordict["is_init"]).squeeze(-1),
        )
        out_key, *state_keys = self.out_keys  # type: ignore[attr-defined]
        tensordict.set(out_key, output.reshape(*shape, -1))
        finals = final if isinstance(final, tuple) else (final,)
        for key, state in zip(state_keys, finals, strict=True):
            last = state.transpose(0, 1)
            # As torchrl: only the state after the last step is known.
            states = last.new_zeros(len(last), *shape[-1:], *last.shape[1:])
            states[:, -1] = last
            tensordict.set(key, states.reshape(*shape, *last.shape[1:]))
        return tensordict


class LSTMModule(_OneCall, modules.LSTMModule if modules else object):  # type: ignore[misc]
    """TorchRL's ``LSTMModule`` of a layer of this package.

    In recurrent mode a rollout is one call with resets where ``is_init`` is true; torchrl cuts and
    pads it. An episode that starts inside a rollout starts from zeros, the default of
    ``make_tensordict_primer``. States after a step are zeros but for the last step of a rollout.
    Acting, keys and primers are torchrl's.

    Args:
        **options: arguments of torchrl's ``LSTMModule``: ``lstm``, an `ln_zoo.layers.LSTM` with
            ``batch_first=True``, and keys.

    Raises:
        ImportError: if torchrl is not installed.
        TypeError: if ``lstm`` is not a layer of this package.
        ValueError: as torchrl.
    """

    name, kind = "lstm", LSTM


class GRUModule(_OneCall, modules.GRUModule if modules else object):  # type: ignore[misc]
    """TorchRL's ``GRUModule`` of an `ln_zoo.layers.GRU`, the argument ``gru``; see `LSTMModule`."""

    name, kind = "gru", GRU
