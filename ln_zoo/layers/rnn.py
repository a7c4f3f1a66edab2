"""Recurrent layers: any cell with any strategy, with torch's semantics."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.utils.rnn import PackedSequence

from ln_zoo import ops
from ln_zoo.layers.cells import (
    as_states,
    cell_sites,
    chosen_cell,
    entries,
    rnn_cell,
    sites_by_role,
)
from ln_zoo.norms import Norm, Site
from ln_zoo.norms.checks import check_no_norm
from ln_zoo.ops import CELLS, Cell, Plans, Records, States, Weights, lstm_cell


class RecurrentLayer(nn.RNNBase):
    """Layers of any recurrent cell with any strategy, with torch's semantics.

    `LSTM`, `GRU` and `RNN` are such layers. One of your own names its `ln_zoo.ops.Cell`, and has
    all that they have (layers, directions, packed sequences, dropout, every strategy)::

        class MyLayer(RecurrentLayer):
            cell = MY_CELL

    It runs on the generic loop; the logger ``ln_zoo`` says so.

    It is a `torch.nn.RNNBase`, but no `torch.nn.LSTM`, `GRU` or `RNN`, since torch.compile refuses
    to trace those.

    Args:
        input_size: size I of each input.
        hidden_size: size H of each state.
        num_layers: layers; each reads the outputs of the one before.
        bias: whether there are biases.
        batch_first: whether input and output are (N, T, \\*) in place of (T, N, \\*).
        dropout: probability with which an output between two layers is set to zero in training.
        bidirectional: whether each layer has a second direction, which reads each sequence
            backwards from its own end.
        proj_size: size P of the outputs, if they are projected; 0 for no projection.
        device: of the parameters, as in torch.
        dtype: of the parameters, as in torch.
        norm: the strategy; default `Identity`.
        normalize: roles of the cell's places to act on; default all.
        cell: the cell; default: that of the class.

    Parameters: ``weight_ih_l0`` (G, I) with G = gates * H, ``weight_hh_l0`` (G, H or P),
    ``bias_ih_l0``, ``bias_hh_l0`` (G,), ``weight_hr_l0`` (P, H), ``..._reverse``; the cell's own,
    ``weight_NAME_l0`` (rows, H); and the strategy's, under ``sites.l0.ROLE``. They are drawn as
    torch does.

    Raises:
        TypeError: if neither the class nor the argument names a cell, and as torch does.
        ValueError: for a name in ``normalize`` that is none of the places, for a projection that
            the cell has none of, and as torch does.
    """

    cell: Cell

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm: Norm | None = None,
        normalize: Sequence[str] | None = None,
        cell: Cell | None = None,
    ) -> None:
        check_no_norm(self, num_layers=num_layers, bias=bias)
        self.cell = cell = chosen_cell(type(self), cell)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        # torch checks the sizes and names the parameters, of which it knows the shapes for its own
        # cells alone. On that device nothing is drawn or stored.
        super().__init__(
            "RNN_TANH",
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            proj_size,
            device="meta",
        )
        if proj_size and not cell.projects:
            raise ValueError(
                f"{type(self).__name__} cannot project its outputs: the step of its cell, "
                f"{cell.name}, has no projection; set proj_size=0, got {proj_size}"
            )
        self.mode = cell.name
        self._plans = Plans()
        for name in self._flat_weights_names:
            rows, *columns = self.get_parameter(name).shape
            rows *= 1 if name.startswith("weight_hr") else cell.gates
            setattr(self, name, nn.Parameter(torch.empty(rows, *columns, **factory)))
        for suffix in self._suffixes():
            for name, rows in cell.weights:
                weight = nn.Parameter(torch.empty(rows, hidden_size, **factory))
                self.register_parameter(f"weight_{name}_{suffix}", weight)
        self._init_flat_weights()
        self._draw_weights()
        self.sites = nn.ModuleDict()
        for suffix in self._suffixes():
            weights = {kind: getattr(self, f"weight_{kind}_{suffix}") for kind in ("ih", "hh")}
            self.sites[suffix] = cell_sites(cell, hidden_size, weights, norm, normalize, factory)

    def flatten_parameters(self) -> None:
        """Lays weights out for cuDNN, as torch does; a cell that is none of torch's has no need."""
        if self.cell.has_kernels and self.mode == self.cell.name:
            super().flatten_parameters()

    def _suffixes(self) -> Iterator[str]:
        """What ends the parameter names of each direction of each layer, in torch's order."""
        for layer in range(self.num_layers):
            yield f"l{layer}"
            if self.bidirectional:
                yield f"l{layer}_reverse"

    def _directions(self) -> dict[str, dict[str, Site]]:
        """The sites of each direction of each layer, by the end of its parameters' names."""
        return {suffix: sites_by_role(sites) for suffix, sites in self.sites.items()}

    def reset_parameters(self) -> None:
        """Draws weights and biases anew, as torch does, and starts the strategy anew."""
        if "sites" not in self._modules:
            return  # torch's constructor calls this before there is anything
        self._draw_weights()
        for sites in self._directions().values():
            for site in sites.values():
                site.reset_parameters()
        self.reset_norm()

    def _draw_weights(self) -> None:
        bound = 1.0 / math.sqrt(self.hidden_size)
        kinds = [f"weight_{name}" for name, _ in self.cell.weights]
        of_cell = [f"{kind}_{suffix}" for suffix in self._suffixes() for kind in kinds]
        for name in (*self._flat_weights_names, *of_cell):
            init.uniform_(getattr(self, name), -bound, bound)

    def reset_norm(self) -> None:
        """Takes again what the strategy took from the weights, after they were re-initialised."""
        for suffix, sites in self._directions().items():
            sites["input"].reset_weight(getattr(self, f"weight_ih_{suffix}"))
            sites["recurrent"].reset_weight(getattr(self, f"weight_hh_{suffix}"))

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        """Outputs and final states, of which a single one is a tensor; see `LSTM.forward`."""
        output, states = self._run(input, hx)
        return output, states if len(states) > 1 else states[0]

    def _run(
        self, input: Tensor | PackedSequence, hx: Tensor | States | None
    ) -> tuple[Tensor | PackedSequence, States]:
        """Outputs and final states, in the layout of the input."""
        states = as_states(type(self).__name__, self.cell, hx)
        if isinstance(input, PackedSequence):
            data, batch_sizes, order, back = input
            ops.check_packed(data, batch_sizes)
            ops.check_devices(data, sorted_indices=order, unsorted_indices=back)
            if states is not None and order is not None:
                self._check_states(data, batch_sizes, states)
                states = tuple(s.index_select(1, order) for s in states)
            # Steps of no example, which torch allows at the end, are none.
            active = batch_sizes if batch_sizes[-1] else batch_sizes[batch_sizes > 0]
            output, states = self._run_layers(data, active, states)
            if back is not None:
                states = tuple(s.index_select(1, back) for s in states)
            return PackedSequence(output, batch_sizes, order, back), states

        if input.dim() not in (2, 3):
            raise ValueError(
                f"{type(self).__name__}: Expected input to be 2D or 3D, got {input.dim()}D instead"
            )
        self._check_batching(input, states)
        if input.dim() == 2:
            if states is not None:
                states = tuple(s.unsqueeze(1) for s in states)
            output, states = self._run_layers(input.unsqueeze(1), None, states)
            return output.squeeze(1), tuple(s.squeeze(1) for s in states)
        output, states = self._run_layers(
            input.transpose(0, 1) if self.batch_first else input, None, states
        )
        return output.transpose(0, 1) if self.batch_first else output, states

    def _run_layers(
        self, x: Tensor, batch_sizes: Tensor | None, states: States | None
    ) -> tuple[Tensor, States]:
        """The same for time-major input (T, N, I) or packed data (total, I)."""
        if batch_sizes is None:
            options = len(self.cell.states), self.dropout, self.training
            done = self._plans.run(self._parameters, x, states, *options)
            if done is not None:
                return done
        self.check_input(x, batch_sizes)
        if x.shape[0] == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        if states is None:
            states = tuple(x.new_zeros(size) for size in self._state_sizes(x, batch_sizes))
        else:
            self._check_states(x, batch_sizes, states)
        cell = self.cell
        directions = self._directions()
        all_sites = list(directions.values())
        steps = x.shape[0] if batch_sizes is None else len(batch_sizes)
        for sites in directions.values():
            for site in sites.values():
                if site.normalizes:
                    site.norm.on_sequence_start(site, steps)
        weights = [self._effective_weights(*direction) for direction in directions.items()]
        records = [
            {role: site.to_spec() for role, site in sites.items()} for sites in directions.values()
        ]
        bidirectional, dropout, training = self.bidirectional, self.dropout, self.training
        self._check_parameters(x, records, weights)

        kernel = ops.pick(cell, records, x, weights)
        if kernel is not None:
            if batch_sizes is None:
                watched = entries(self, [f"_{name}" for name in directions], all_sites)
                self._plans.keep(
                    self._parameters, watched, kernel, cell, records, x, weights, bidirectional
                )
            return kernel(
                cell,
                records,
                x,
                batch_sizes,
                states,
                weights,
                bidirectional=bidirectional,
                dropout=dropout,
                training=training,
            )

        def run(
            i: int, x: Tensor, sizes: Sequence[int] | None, states: States
        ) -> tuple[Tensor, States]:
            per_timestep = all_sites[i]["input"].norm.per_timestep
            return ops.scan(cell, x, sizes, states, weights[i], all_sites[i], per_timestep)

        return ops.stack(
            run,
            x,
            batch_sizes,
            states,
            bidirectional=bidirectional,
            dropout=dropout,
            training=training,
        )

    def _effective_weights(self, suffix: str, sites: dict[str, Site]) -> Weights:
        return Weights(
            sites["input"].weight(getattr(self, f"weight_ih_{suffix}")),
            sites["recurrent"].weight(getattr(self, f"weight_hh_{suffix}")),
            getattr(self, f"bias_ih_{suffix}", None),
            getattr(self, f"bias_hh_{suffix}", None),
            getattr(self, f"weight_hr_{suffix}", None),
            tuple(getattr(self, f"weight_{name}_{suffix}") for name, _ in self.cell.weights),
        )

    # Checks

    def _state_sizes(self, x: Tensor, batch_sizes: Tensor | None) -> list[tuple[int, ...]]:
        examples = x.shape[1] if batch_sizes is None else int(batch_sizes[0])
        others = [self.hidden_size] * (len(self.cell.states) - 1)
        widths = (self.proj_size or self.hidden_size, *others)
        return [(len(self.sites), examples, width) for width in widths]

    def _check_states(self, x: Tensor, batch_sizes: Tensor | None, states: States) -> None:
        ops.check_states(x, states, self._state_sizes(x, batch_sizes))

    def _check_parameters(
        self, x: Tensor, records: Sequence[Records], weights: Sequence[Weights]
    ) -> None:
        cell, hidden = self.cell, self.hidden_size
        outputs = self.proj_size or hidden
        directions = 2 if self.bidirectional else 1
        for i, (suffix, record, weight) in enumerate(
            zip(self._suffixes(), records, weights, strict=True)
        ):
            inputs = self.input_size if i < directions else directions * outputs
            sizes = (inputs, hidden, outputs)
            ops.check_parameters(cell, record, weight, x, sizes, suffix)

    def _check_batching(self, input: Tensor, states: States | None) -> None:
        if states is None or all(s.dim() == input.dim() for s in states):
            return
        kind = "batched" if input.dim() == 3 else "unbatched"
        which, got, noun = "hx", f"{states[0].dim()}-D", "tensor"
        if len(states) > 1:
            which, noun = " and ".join(f"{name}x" for name in self.cell.states), "tensors"
            got = "(" + ", ".join(f"{s.dim()}-D" for s in states) + ")"
        raise RuntimeError(
            f"For {kind} {input.dim()}-D input, {which} should also be {input.dim()}-D "
            f"but got {got} {noun}"
        )


class LSTM(RecurrentLayer):
    """Layers of long short-term memory (paper, eq. 20-22): `torch.nn.LSTM` with a strategy.

    With gates i, f, g, o cut from ``input(W x) + recurrent(U h) + b_ih + b_hh``, where ``input``,
    ``recurrent`` and ``cell`` are the strategy at those sites::

        c' = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h' = sigmoid(o) * tanh(cell(c'))

    The carried c' is never normalised. With ``proj_size``, ``h' = W_hr h'``.

    Differences from the paper: there are two biases as in torch, both added after normalisation
    (the paper's b), and the gates come in torch's order.

    Args:
        input_size: size I of each input.
        hidden_size: size H of each cell state.
        num_layers: layers; each reads the outputs of the one before.
        bias: whether there are biases.
        batch_first: whether input and output are (N, T, \\*) in place of (T, N, \\*).
        dropout: probability with which an output between two layers is set to zero in training.
        bidirectional: whether each layer has a second direction, which reads each sequence
            backwards from its own end.
        proj_size: size P of the outputs, if they are projected; 0 for no projection.
        device: of the parameters, as in torch.
        dtype: of the parameters, as in torch.
        norm: the strategy; default `Identity`, which makes this layer torch's own.
        normalize: the sites to act on, of ``"input"``, ``"recurrent"``, ``"cell"``; default all.
        peephole: whether gates see cell states (Graves 2013, eq. 7-10): i and f the one before, o
            the new one, each by a weight per unit. Such a layer runs on the generic loop.
        derivative_bound: clips the derivative of the loss by each gate's sum to this size (Graves
            2013, section 2.1), on the generic loop; default: no clipping.

    Parameters: torch's own, drawn as torch does (``weight_ih_l0`` (4H, I), ``weight_hh_l0``
    (4H, H or P), ``bias_ih_l0``, ``bias_hh_l0`` (4H,), ``weight_hr_l0`` (P, H), ``..._reverse``),
    ``weight_peephole_l0`` (3, H) to i, f, o;
    and, as far as the strategy has them, ``sites.l0.input.gain``, ``sites.l0.recurrent.gain``
    (4H,), ``sites.l0.cell.gain``, ``sites.l0.cell.shift`` (H,), ``sites.l0.input.scale``,
    ``sites.l0.recurrent.scale`` (4H,), ``sites.l0_reverse...``.

    Precision: states are carried in float32 at least. Under autocast the output has autocast's
    precision and the final states that of the parameters, so that a sequence can be cut in two
    without rounding; where torch's fused loop runs, its own rules hold.

    Raises:
        ValueError: for a name in ``normalize`` that is none of the sites, a bound that is not
            positive, and as torch does.

    Example:
        >>> from ln_zoo.norms import LayerNorm
        >>> layer = LSTM(3, 5, num_layers=2, batch_first=True, norm=LayerNorm())
        >>> output, (h, c) = layer(torch.randn(4, 7, 3))
        >>> output.shape, h.shape, c.shape
        (torch.Size([4, 7, 5]), torch.Size([2, 4, 5]), torch.Size([2, 4, 5]))
    """

    cell = CELLS["LSTM"]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm: Norm | None = None,
        normalize: Sequence[str] | None = None,
        peephole: bool = False,
        derivative_bound: float | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            proj_size,
            device,
            dtype,
            norm=norm,
            normalize=normalize,
            cell=lstm_cell(peephole, derivative_bound),
        )
        self.derivative_bound = derivative_bound

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "cell" not in state:  # pickled by version 0.1
            peephole = "weight_peephole_l0" in self._parameters
            self.cell = lstm_cell(peephole, state.get("derivative_bound"))

    def forward(
        self, input: Tensor | PackedSequence, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, Tensor]]:
        """Outputs and final states.

        Args:
            input: (T, N, I), (N, T, I) with ``batch_first``, (T, I) for one example, or packed.
            hx: initial (h, c), (L, N, H or P) and (L, N, H), or (L, H or P) and (L, H) for one
                example, with L = layers * directions; default zeros.

        Returns:
            The output, (T, N, D * H) for D directions, or in the layout of the input, and the final
            states (h, c) in the shapes of ``hx``.

        Raises:
            RuntimeError: if sizes do not fit.
            TypeError: if ``hx`` is no tuple of two.
            ValueError: if the input is neither 2D nor 3D; under batch normalisation in training,
                for a batch of one.
        """
        output, (h, c) = self._run(input, hx)
        return output, (h, c)


class GRU(RecurrentLayer):
    """Layers of gated recurrent units (paper, eq. 26-28): `torch.nn.GRU` with a strategy.

    With r, z, n cut from ``input(W x) + b_ih`` and, marked ', from ``recurrent(U h) + b_hh``::

        n = tanh(n + sigmoid(r + r') * n')
        h = (1 - sigmoid(z + z')) * n + sigmoid(z + z') * h

    The two gates share statistics over 2H features, the candidate n has its own.

    Differences from the paper: there are two biases as in torch, both added after normalisation,
    and z and 1 - z have torch's places.

    Args:
        input_size: size I of each input.
        hidden_size: size H of each state.
        num_layers: layers; each reads the outputs of the one before.
        bias: whether there are biases.
        batch_first: whether input and output are (N, T, \\*) in place of (T, N, \\*).
        dropout: probability with which an output between two layers is set to zero in training.
        bidirectional: whether each layer has a second direction, which reads each sequence
            backwards from its own end.
        device: of the parameters, as in torch.
        dtype: of the parameters, as in torch.
        norm: the strategy; default `Identity`, which makes this layer torch's own.
        normalize: the sites to act on, out of ``"input"``, ``"recurrent"``; default both.

    Parameters: torch's own, drawn as torch does (``weight_ih_l0`` (3H, I), ``weight_hh_l0``
    (3H, H), ``bias_ih_l0``, ``bias_hh_l0`` (3H,), ``..._reverse``); and, as far as the strategy has
    them, ``sites.l0.input.gain``, ``sites.l0.recurrent.gain``, ``sites.l0.input.scale``,
    ``sites.l0.recurrent.scale`` (3H,), ``sites.l0_reverse...``.

    Precision: as `LSTM`.

    Raises:
        ValueError: for a name in ``normalize`` that is none of the sites, and as torch does.

    Example:
        >>> from ln_zoo.norms import LayerNorm
        >>> output, h = GRU(3, 5, bidirectional=True, norm=LayerNorm())(torch.randn(7, 4, 3))
        >>> output.shape, h.shape
        (torch.Size([7, 4, 10]), torch.Size([2, 4, 5]))
    """

    cell = CELLS["GRU"]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm: Norm | None = None,
        normalize: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            0,
            device,
            dtype,
            norm=norm,
            normalize=normalize,
        )

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Outputs and final state; arguments as for `LSTM.forward`, the state being h alone."""
        output, (h,) = self._run(input, hx)
        return output, h


class RNN(RecurrentLayer):
    """Layers of simple recurrent units (paper, eq. 4): `torch.nn.RNN` with a strategy.

    ``h' = f(sum(W x + U h) + b_ih + b_hh)``: the sum of both terms is normalised.

    Args:
        input_size: size I of each input.
        hidden_size: size H of each state.
        num_layers: layers; each reads the outputs of the one before.
        nonlinearity: f, ``"tanh"`` or ``"relu"``.
        bias: whether there are biases.
        batch_first: whether input and output are (N, T, \\*) in place of (T, N, \\*).
        dropout: probability with which an output between two layers is set to zero in training.
        bidirectional: whether each layer has a second direction, which reads each sequence
            backwards from its own end.
        device: of the parameters, as in torch.
        dtype: of the parameters, as in torch.
        norm: the strategy; default `Identity`, which makes this layer torch's own.
        normalize: the sites to act on, out of ``"input"``, ``"recurrent"`` (whose weights alone a
            strategy can act on) and ``"sum"``; default all.

    Parameters: torch's own, drawn as torch does (``weight_ih_l0`` (H, I), ``weight_hh_l0`` (H, H),
    ``bias_ih_l0``, ``bias_hh_l0`` (H,), ``..._reverse``); and, as far as the strategy has them,
    ``sites.l0.sum.gain``, ``sites.l0.input.scale``, ``sites.l0.recurrent.scale`` (H,),
    ``sites.l0_reverse...``.

    Precision: as `LSTM`.

    Raises:
        ValueError: for another nonlinearity, a name in ``normalize`` that is none of the sites, and
            as torch does.

    Example:
        >>> from ln_zoo.norms import LayerNorm
        >>> output, h = RNN(3, 5, nonlinearity="relu", norm=LayerNorm())(torch.randn(7, 4, 3))
        >>> output.shape, h.shape
        (torch.Size([7, 4, 5]), torch.Size([1, 4, 5]))
    """

    cell = CELLS["RNN_TANH"]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm: Norm | None = None,
        normalize: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            0,
            device,
            dtype,
            norm=norm,
            normalize=normalize,
            cell=rnn_cell(nonlinearity),
        )
        self.nonlinearity = nonlinearity

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "cell" not in state:  # pickled by version 0.1
            self.cell = rnn_cell(self.nonlinearity)

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Outputs and final state; arguments as for `LSTM.forward`, the state being h alone."""
        output, (h,) = self._run(input, hx)
        return output, h


def recurrent_layer(kind: str | Mapping[str, str] | type[RecurrentLayer]) -> type[RecurrentLayer]:
    """A class of recurrent layers, by what an argument or a checkpoint calls it.

    Args:
        kind: ``"lstm"``, ``"gru"`` or ``"rnn"``, in capitals too; a class; or what `layer_config`
            wrote down. Its class path is imported: use that on your own files and checkpoints only.

    Raises:
        ValueError: for another name, or a path that leads to no such class.

    Example:
        >>> recurrent_layer("gru").__name__
        'GRU'
        >>> recurrent_layer({"class_path": "ln_zoo.layers.LSTM"}).__name__
        'LSTM'
    """
    found: Any = kind
    if isinstance(kind, str):
        found = {cls.__name__: cls for cls in (LSTM, GRU, RNN)}.get(kind.upper())
    elif isinstance(kind, Mapping):
        module, _, name = str(kind.get("class_path")).rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"cell {kind['class_path']!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, RecurrentLayer)):
        raise ValueError(
            "cell must be one of ['gru', 'lstm', 'rnn'], or a class of ln_zoo.layers."
            f"RecurrentLayer or its class_path; got {kind!r}"
        )
    return found


def layer_config(kind: str | Mapping[str, str] | type[RecurrentLayer]) -> str | dict[str, str]:
    """A class of recurrent layers in plain values: ``"lstm"`` or ``{"class_path": ...}``.

    Example:
        >>> layer_config(GRU)
        'gru'
    """
    cls = recurrent_layer(kind)
    if cls in (LSTM, GRU, RNN):
        return cls.__name__.lower()
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}"}
