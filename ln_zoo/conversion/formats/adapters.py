"""Adapters: our layers with the call signatures and state formats of other libraries.

`adopt_` gives a layer of another library a class derived from an adapter and the layer's class:
``isinstance``, attributes and methods still work; ``forward`` is the adapter's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ln_zoo.layers import DreamerV3SequenceModel, RecurrentCell, RecurrentLayer

#: Steps and sequences of the random input for comparison and timing.
STEPS, BATCH = 20, 8


class Adapter(nn.Module):
    """A layer of another library that runs ``layer``, one of ours; ``dialect``: the library."""

    #: Wraps a cell, which runs one step.
    stepwise: ClassVar[bool] = False
    #: Converts states (N, H) of each layer to arguments of the library's call.
    state_arguments: ClassVar[staticmethod[[list[list[Tensor]]], tuple[Any, ...]]]
    #: Start of keys of the whole layer, which this part of it lacks.
    lead: ClassVar[str] = ""
    layer: RecurrentLayer | RecurrentCell | DreamerV3SequenceModel
    dialect: str

    @classmethod
    def example(cls, layer: Any) -> tuple[Any, ...]:
        """Random arguments in float64 for our layer or cell: the input, then states."""
        sizes = (BATCH, layer.input_size) if cls.stepwise else (STEPS, BATCH, layer.input_size)
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        states = [
            [draw(BATCH, layer.hidden_size) for _ in layer.cell.states]
            for _ in range(getattr(layer, "num_layers", 1))
        ]
        return (draw(*sizes), *cls.state_arguments(states))

    def extra_repr(self) -> str:
        return f"ln_zoo, dialect {self.dialect}"


def _stacked(states: Iterable[Iterable[Tensor]]) -> tuple[Tensor, ...]:
    """Convert states by layer to our states, each (layers, N, H)."""
    return tuple(torch.stack(list(parts)) for parts in zip(*states, strict=True))


class LayerOfLists(Adapter):
    """One layer: ``(input, [h, c]) -> (output, [h, c])``, states (N, H); torchaudio."""

    def forward(
        self, input: Tensor, state: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        output, states = self.layer(input, None if state is None else _stacked([state]))
        return output, [s.squeeze(0) for s in states]

    state_arguments = staticmethod(lambda states: (states[0],))


class LayerOfTuples(Adapter):
    """One layer: ``(input, (h, c)) -> (output, (h, c))``, states (N, H); TorchScript's example."""

    def forward(self, input: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        output, states = self.layer(input, _stacked([state]))
        return output, tuple(s.squeeze(0) for s in states)

    state_arguments = staticmethod(lambda states: (tuple(states[0]),))


class StackOfTuples(Adapter):
    """Layers: ``(input, [(h, c), ...]) -> (output, [(h, c), ...])``, states (N, H); NeMo."""

    def forward(
        self, input: Tensor, states: list[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, list[Any]]:
        output, found = self.layer(input, None if states is None else _stacked(states))
        return output, list(zip(*(s.unbind(0) for s in found), strict=True))

    state_arguments = staticmethod(lambda states: ([tuple(state) for state in states],))


class CellOfTuples(Adapter):
    """A step: ``(input, (h, c)) -> (h, (h, c))``; the cell of TorchScript's example."""

    stepwise = True

    def forward(self, input: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        states = self.layer(input, tuple(state))
        return states[0], states

    state_arguments = staticmethod(lambda states: (tuple(states[0]),))


class DiEngineLayer(Adapter):
    """DI-engine's LSTM: states as a dict or a list of dicts, converted by its own methods."""

    def forward(
        self, inputs: Tensor, prev_state: Any, list_next_state: bool = True
    ) -> tuple[Tensor, Any]:
        of_library: Any = self
        states = tuple(of_library._before_forward(inputs, prev_state))
        output, states = self.layer(inputs, states)
        return output, of_library._after_forward(list(states), list_next_state)

    state_arguments = staticmethod(lambda states: (dict(zip("hc", _stacked(states), strict=True)),))


class CellOfList(Adapter):
    """A step: ``(input, [h]) -> (h, [h])``; Dreamer's GRU in dreamerv3-torch and DI-engine."""

    stepwise = True

    def forward(self, inputs: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        h = _flat_step(self.layer, inputs, state[0])
        return h, [h]

    state_arguments = staticmethod(lambda states: (states[0],))


class CellOfPair(Adapter):
    """A step: ``(x, h) -> (h, h)``; Dreamer's GRU in RLlib."""

    stepwise = True

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = _flat_step(self.layer, x, h)
        return h, h

    state_arguments = staticmethod(lambda states: tuple(states[0]))


def _flat_step(cell: nn.Module, x: Tensor, h: Tensor) -> Tensor:
    found: Tensor = cell(x.reshape(-1, x.shape[-1]), h.reshape(-1, h.shape[-1]))
    return found.reshape(h.shape)


class SheeprlCell(Adapter):
    """sheeprl's GRU: a step of (N, I), (I,), or a sequence of length 1."""

    stepwise = True

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        of_library: Any = self
        step = input.dim() == 3
        if step:
            axis = int(of_library.batch_first)
            if input.shape[axis] != 1:
                raise ValueError(
                    f"input must have one time step along dimension {axis}, got shape "
                    f"{tuple(input.shape)}"
                )
            input = input.squeeze(axis)
        if hx is not None and hx.dim() == 3:
            hx = hx.squeeze(0)
        h: Tensor = self.layer(input, hx)
        return h.unsqueeze(0) if step else h

    state_arguments = staticmethod(lambda states: tuple(states[0]))


class SpeechBrainLayer(Adapter):
    """SpeechBrain's layers of light GRUs: (N, T, I), both directions with the same weights."""

    def forward(self, x: Tensor, hx: Tensor | None = None) -> Tensor:
        both = bool(getattr(self, "bidirectional", False))
        x = x.transpose(0, 1)
        if both:
            x = torch.cat([x, x.flip(0)], 1)
        output, _ = self.layer(x, None if hx is None else hx.expand(1, x.shape[1], -1))
        if both:
            there, back = output.chunk(2, 1)
            output = torch.cat([there, back.flip(0)], 2)
        return output.transpose(0, 1)

    state_arguments = staticmethod(lambda states: ())


class TorchRLLayer(Adapter):
    """TorchRL's block GRU: ``(input, hidden, is_init) -> (output, hidden)``, (N, T, I), (N, H)."""

    def forward(
        self, input: Tensor, hidden: Tensor | None = None, is_init: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if is_init is not None:
            is_init = is_init.view(input.shape[:2]).t()
        found, dtype = _in_one_dtype(self.layer, input, hidden)
        h = None if hidden is None else found[1].unsqueeze(0)
        output, h = self.layer(found[0].transpose(0, 1), h, is_init)
        return output.transpose(0, 1).to(dtype), h.squeeze(0).to(dtype)

    @classmethod
    def example(cls, layer: Any) -> tuple[Any, ...]:
        x, h = _random((BATCH, STEPS, sum(layer.sizes)), (BATCH, layer.recurrence.hidden_size))
        return x, h, x[..., :1] > 1


class _SequenceModelStep(Adapter):
    """A step of a sequence model, of examples along any number of axes."""

    def _step(self, h: Tensor, *parts: Tensor) -> Tensor:
        model: Any = self.layer
        given, dtype = _in_one_dtype(model, *parts, h)
        is_flat = all(a.dim() == 2 for a in given)
        *found, start = given if is_flat else [a.reshape(-1, a.shape[-1]) for a in given]
        after: Tensor = model.step(torch.cat(found, -1) if len(found) > 1 else found[0], start)
        return (after if is_flat else after.view(h.shape)).to(dtype)


class TorchRLStep(_SequenceModelStep):
    """A step of TorchRL's block GRU: ``(input, hidden) -> hidden``."""

    lead = "cell."

    def forward(self, input: Tensor, hidden: Tensor | None = None) -> Tensor:
        if hidden is None:
            of_library: Any = self
            hidden = input.new_zeros(*input.shape[:-1], of_library.hidden_size)
        return self._step(hidden, input)

    @classmethod
    def example(cls, layer: Any) -> tuple[Any, ...]:
        return _random((BATCH, *layer.sizes), (BATCH, layer.recurrence.hidden_size))


class TorchRLModel(_SequenceModelStep):
    """The model in TorchRL's RSSM: ``(state, belief, action) -> belief``."""

    def forward(self, state: Tensor, belief: Tensor, action: Tensor) -> Tensor:
        return self._step(belief, state, action / action.detach().abs().clamp(min=1))

    @classmethod
    def example(cls, layer: Any) -> tuple[Any, ...]:
        state, action = layer.sizes
        units = layer.recurrence.hidden_size
        return _random((BATCH, state), (BATCH, units), (BATCH, action))


class R2DreamerStep(TorchRLModel):
    """R2-Dreamer's: ``(stoch, deter, action) -> deter``, stoch (N, S, K) or (N, S * K)."""

    def forward(self, stoch: Tensor, deter: Tensor, action: Tensor) -> Tensor:
        return super().forward(stoch.reshape(len(action), -1), deter, action)


def _random(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)


def _in_one_dtype(layer: Any, *given: Tensor | None) -> tuple[Sequence[Any], torch.dtype]:
    """Tensors in the dtype of the layer, and the dtype to which the given ones promote."""
    dtypes = {a.dtype for a in given if a is not None}
    own = layer.recurrence.weight_ih_l0.dtype
    if dtypes == {own}:
        return given, own
    found = [None if a is None else a.to(own) for a in given]
    return found, functools.reduce(torch.promote_types, dtypes)


class XLSTMCell(Adapter):
    """xlstm's sLSTMCell: ``(terms, state) -> (output, state)``, state (4, N, H) of h, c, n, m.

    Terms and output have the shapes of its ``config``, by default (N, T, 4H), (N, heads, T, units).
    """

    @classmethod
    def example(cls, layer: Any) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(0)
        rows = 1 + STEPS  # as many steps as sequences: configs differ in their order
        sizes = (rows, rows, 4 * layer.hidden_size), (4, rows, layer.hidden_size)
        terms, state = (torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes)
        return terms, torch.stack([state[0], state[1], state[2].exp(), state[3]])

    def forward(
        self, input: Tensor, state: Tensor | None = None, lengths: Any = None
    ) -> tuple[Tensor, Tensor]:
        of_library: Any = self
        x = input.transpose(0, 1) if of_library.config.input_shape == "BSGNH" else input
        output, states = self.layer(x, None if state is None else state.unsqueeze(1).unbind())
        found: Tensor = of_library._permute_output(output)
        return found, torch.cat(states)


_classes: dict[tuple[type, type | None], type[nn.Module]] = {}


def adopted_class(base: type[nn.Module], adopted: type[nn.Module] | None) -> type[nn.Module]:
    """The class of an adopted layer, cached.

    ``base`` is an `Adapter`, whose methods override the adopted class's; or a layer of
    `ln_zoo.conversion.layers.ADOPTED`, whose methods override torch's only. ``adopted`` is None for
    `torch.jit` modules without a class.
    """
    if (base, adopted) not in _classes:
        bases: tuple[type, ...] = (base,)
        if adopted is not None:
            bases = (base, adopted) if issubclass(base, Adapter) else (adopted, base)
        own = {
            "__module__": "ln_zoo.conversion",
            "__reduce_ex__": lambda self, protocol: (_new, (base, adopted), self.__getstate__()),
        }
        _classes[base, adopted] = type((adopted or base).__name__, bases, own)
    return _classes[base, adopted]


def _new(base: type[nn.Module], adopted: type[nn.Module] | None) -> nn.Module:
    """Create an adopted layer for pickle, which then sets its state."""
    cls = adopted_class(base, adopted)
    return cls.__new__(cls)
