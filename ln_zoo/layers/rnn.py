"""Recurrent layers: any cell with any norm, with torch's semantics."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ln_zoo import ops
from ln_zoo.layers.cells import (
    GRUCell,
    LSTMCell,
    NoQuantiser,
    RecurrentCell,
    RNNCell,
    as_states,
    cell_sites,
    chosen_cell,
    entries,
    rnn_cell,
    sites_by_role,
    start_sequence,
)
from ln_zoo.norms import Norm, Site
from ln_zoo.norms.arguments import check_no_norm
from ln_zoo.ops import CELLS, Cell, Plans, Records, States, Weights, lstm_cell, registry


class RecurrentOptions(TypedDict, total=False):
    """Keyword arguments that all recurrent layers share; see `RecurrentLayer`."""

    norm: Norm | None
    normalize: Sequence[str] | None
    zoneout: float | Sequence[float]
    recurrent_dropout: float
    weight_dropout: float


class RecurrentLayer(nn.RNNBase):
    r"""Layers of any recurrent cell with any norm, with torch's semantics.

    `LSTM`, `GRU` and `RNN` are subclasses. Your own sets an `ln_zoo.ops.Cell` and inherits layers,
    directions, packed sequences, dropout and every norm::

        class MyLayer(RecurrentLayer):
            cell = MY_CELL

    It runs on the generic loop, which the logger ``ln_zoo`` reports. The base is
    `torch.nn.RNNBase`, not `torch.nn.LSTM`, `GRU` or `RNN`, which torch.compile does not trace.

    Args:
        input_size: size I of each input.
        hidden_size: size H of each state.
        num_layers: stacked layers.
        bias: use biases, added after normalisation.
        batch_first: input and output are (N, T, \*) instead of (T, N, \*).
        dropout: dropout probability between layers, in training.
        bidirectional: add a second direction, which reads each sequence backwards from its own end.
        proj_size: size P of the projected outputs; 0: no projection.
        device: device of the parameters.
        dtype: dtype of the parameters.
        norm: the normalisation; default `Identity`, with which `LSTM`, `GRU` and `RNN` are torch's.
        normalize: roles of the cell's sites to normalise; default all.
        zoneout: probability that an element of a state keeps its previous value (Krueger et al.
            2017, arXiv 1606.01305): one for all states, or one for each (in the cell's order).
            Evaluation uses the expected value.
        recurrent_dropout: probability that an element of h is zero in recurrent products, in
            training: one mask for each sequence, for all steps and gates (Gal and Ghahramani 2016,
            arXiv 1512.05287). The carried h is not masked.
        weight_dropout: probability that a recurrent weight is zero, in training: one mask for each
            call (Merity et al. 2018, arXiv 1708.02182, section 2).
        cell: the cell; default: the attribute of the class.

    Parameters: ``weight_ih_l0`` (G, I) with G = gates * H, ``weight_hh_l0`` (G, H or P),
    ``bias_ih_l0``, ``bias_hh_l0`` (G,), ``weight_hr_l0`` (P, H), ``..._reverse``; the cell's own,
    ``weight_NAME_l0`` (rows, H); and the norm's, ``sites.l0.ROLE.gain``, ``.shift`` or ``.scale``.
    They are initialised as in torch.

    Precision: states are carried in float32 or wider. Under autocast the output has autocast's
    dtype and the final states that of the parameters, so splitting a sequence does not round.
    torch's fused loop, where it runs, follows its own rules.

    Raises:
        TypeError: if neither the class nor the argument sets a cell, and as torch does.
        ValueError: for an unknown role in ``normalize``, ``proj_size`` with a cell that does not
            project, a probability outside [0, 1), ``recurrent_dropout`` with a cell that does not
            support it, and as torch does.
    """

    cell: Cell
    qconfig = NoQuantiser()
    #: Defaults for layers that version 0.1 pickled.
    zoneout: tuple[float, ...] = ()
    recurrent_dropout: float = 0.0
    weight_dropout: float = 0.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = _signature(cls)  # type: ignore[attr-defined]

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
        zoneout: float | Sequence[float] = 0.0,
        recurrent_dropout: float = 0.0,
        weight_dropout: float = 0.0,
        cell: Cell | None = None,
    ) -> None:
        check_no_norm(self, num_layers=num_layers, bias=bias)
        self.cell = cell = chosen_cell(type(self), cell)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        # torch checks the sizes and names the parameters, but knows only its own cells' shapes.
        # The meta device neither draws nor stores.
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
                f"{type(self).__name__}: proj_size must be 0, got {proj_size}: the cell "
                f"{cell.name} has no projection"
            )
        self.mode = cell.name
        self._set_noise(zoneout, recurrent_dropout, weight_dropout)
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

    def _set_noise(
        self,
        zoneout: float | Sequence[float],
        recurrent_dropout: float,
        weight_dropout: float,
    ) -> None:
        states = self.cell.states
        given: tuple[Any, ...] = (zoneout,) * len(states)
        if isinstance(zoneout, tuple | list):
            given = tuple(zoneout)
        if len(given) != len(states):
            raise ValueError(
                f"zoneout must be one probability, or one for each of the states "
                f"({', '.join(states)}); got {zoneout!r}"
            )
        for name, values in (
            ("zoneout", given),
            ("recurrent_dropout", (recurrent_dropout,)),
            ("weight_dropout", (weight_dropout,)),
        ):
            for p in values:
                if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
                    raise ValueError(f"{name} must be a probability in [0, 1), got {p!r}")
        if recurrent_dropout and not self.cell.drops:
            raise ValueError(
                f"{type(self).__name__}: recurrent_dropout must be 0, got {recurrent_dropout}: the "
                f"step of the cell {self.cell.name} does not call weights.dropped"
            )
        self.zoneout = tuple(map(float, given))
        self.recurrent_dropout = float(recurrent_dropout)
        self.weight_dropout = float(weight_dropout)

    @property
    def noise(self) -> dict[str, Any]:
        """Nonzero probabilities of zoneout, recurrent_dropout and weight_dropout, by name."""
        found = {
            "zoneout": self.zoneout if any(self.zoneout) else 0.0,
            "recurrent_dropout": self.recurrent_dropout,
            "weight_dropout": self.weight_dropout,
        }
        return {name: p for name, p in found.items() if p}

    def extra_repr(self) -> str:
        return ", ".join([super().extra_repr(), *(f"{k}={p}" for k, p in self.noise.items())])

    def flatten_parameters(self) -> None:
        """Lay out weights for cuDNN, as torch does; a no-op for cells that torch lacks."""
        if self.cell.in_torch and self.mode == self.cell.name:
            super().flatten_parameters()

    def _suffixes(self) -> Iterator[str]:
        for layer in range(self.num_layers):
            yield f"l{layer}"
            if self.bidirectional:
                yield f"l{layer}_reverse"

    def _directions(self) -> dict[str, dict[str, Site]]:
        return {suffix: sites_by_role(sites) for suffix, sites in self.sites.items()}

    def reset_parameters(self) -> None:
        """Re-initialise weights and biases, as torch does, and the norm."""
        if "sites" not in self._modules:
            return  # torch's constructor calls this first
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
        """Recompute norm parameters that depend on the weights; call it after changing weights."""
        for suffix, sites in self._directions().items():
            sites["input"].reset_weight(getattr(self, f"weight_ih_{suffix}"))
            sites["recurrent"].reset_weight(getattr(self, f"weight_hh_{suffix}"))

    def to_cell(self, layer: int = 0, reverse: bool = False) -> RecurrentCell:
        """The cell of one layer, with copies of its weights and its norm's parameters.

        Parametrised weights (`torch.nn.utils.parametrize`) are copied by value. Cells have no
        dropout, which acts only in training.

        Raises:
            ValueError: for a missing layer or direction, ``proj_size`` or zoneout.

        Example:
            >>> rnn = LSTM(3, 5)
            >>> cell, x = rnn.to_cell(), torch.randn(1, 2, 3)
            >>> type(cell).__name__, torch.allclose(cell(x[0])[0], rnn(x)[0][0], atol=1e-6)
            ('LSTMCell', True)
        """
        suffix = f"l{layer}_reverse" if reverse else f"l{layer}"
        if suffix not in self.sites:
            known = ", ".join(self.sites)
            raise ValueError(f"this {type(self).__name__} has no {suffix}; it has {known}")
        if self.proj_size:
            raise ValueError("a cell does not project its outputs: there is none with proj_size")
        if any(self.zoneout):
            raise ValueError(f"a cell has no zoneout, and this layer has zoneout={self.zoneout}")
        # Not from _parameters: a parametrised weight is computed.
        weight: Tensor = getattr(self, f"weight_ih_{suffix}")
        with torch.random.fork_rng(devices=[weight.get_device()] if weight.is_cuda else []):
            cell = self._new_cell(
                input_size=weight.shape[1],
                hidden_size=self.hidden_size,
                bias=self.bias,
                device=weight.device,
                dtype=weight.dtype,
            )
        sites: Any = copy.deepcopy(self.sites[suffix])
        cell.sites = sites
        with torch.no_grad():
            for key, parameter in cell._parameters.items():
                if parameter is not None:
                    parameter.copy_(getattr(self, f"{key}_{suffix}"))
        return cell.train(self.training)

    def _new_cell(self, **arguments: Any) -> RecurrentCell:
        return RecurrentCell(cell=self.cell, **arguments)

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Any = None,
        reset: Tensor | PackedSequence | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Any, Any]:
        """Output and final states (one state as a tensor); see `LSTM.forward`."""
        output, states = self._run(input, hx, reset, mask)
        return output, states if len(states) > 1 else states[0]

    def _run(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | States | None,
        reset: Tensor | PackedSequence | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, States]:
        if mask is not None:
            return self._run_padded(input, hx, reset, mask)
        states = as_states(type(self).__name__, self.cell, hx)
        if isinstance(input, PackedSequence):
            data, batch_sizes, order, back = input
            ops.check_packed(data, batch_sizes)
            ops.check_devices(data, sorted_indices=order, unsorted_indices=back)
            if states is not None and order is not None:
                self._check_states(data, batch_sizes, states)
                states = tuple(s.index_select(1, order) for s in states)
            # torch allows steps without examples at the end; skip them.
            active = batch_sizes if batch_sizes[-1] else batch_sizes[batch_sizes > 0]
            flags = None if reset is None else self._packed_reset(input, reset)
            output, states = self._run_layers(data, active, states, flags)
            if back is not None:
                states = tuple(s.index_select(1, back) for s in states)
            return PackedSequence(output, batch_sizes, order, back), states

        if input.dim() not in (2, 3):
            raise ValueError(
                f"{type(self).__name__}: Expected input to be 2D or 3D, got {input.dim()}D instead"
            )
        self._check_batching(input, states)
        flags = None if reset is None else self._padded_reset(input, reset)
        if input.dim() == 2:
            if states is not None:
                states = tuple(s.unsqueeze(1) for s in states)
            output, states = self._run_layers(input.unsqueeze(1), None, states, flags)
            return output.squeeze(1), tuple(s.squeeze(1) for s in states)
        output, states = self._run_layers(
            input.transpose(0, 1) if self.batch_first else input, None, states, flags
        )
        return output.transpose(0, 1) if self.batch_first else output, states

    def _run_padded(
        self, input: Tensor | PackedSequence, hx: Any, reset: Any, mask: Tensor
    ) -> tuple[Tensor, States]:
        """`_run` for sequences padded at their ends, by packing them."""
        name, first = type(self).__name__, self.batch_first
        if not isinstance(input, Tensor) or input.dim() != 3:
            raise ValueError(f"{name}: mask is for padded 3D input; leave it out for other input")
        if mask.dtype != torch.bool or mask.shape != input.shape[:-1]:
            raise ValueError(
                f"{name}: mask must be boolean, {tuple(input.shape[:-1])}, as this input has "
                f"steps; got {tuple(mask.shape)} in {mask.dtype}"
            )
        by_example = mask.cpu() if first else mask.cpu().t()
        steps, lengths = by_example.shape[1], by_example.sum(1)
        ended = torch.arange(steps, device="cpu") >= lengths.unsqueeze(1)
        wrong = ((by_example & ended).any(1) | (lengths == 0)).nonzero().flatten().tolist()
        if wrong:
            raise ValueError(
                f"{name}: mask must be true at the first steps of each sequence, at least at one, "
                f"and false at all later ones; it is not in the sequences {wrong}"
            )

        def packed(a: Tensor) -> PackedSequence:
            return pack_padded_sequence(a, lengths, first, enforce_sorted=False)

        if reset is not None:
            reset = packed(self._checked_reset(reset, input, mask.shape))
        output, states = self._run(packed(input), hx, reset)
        assert isinstance(output, PackedSequence)
        return pad_packed_sequence(output, first, total_length=steps)[0], states

    def _packed_reset(self, input: PackedSequence, reset: Tensor | PackedSequence) -> Tensor:
        name = type(self).__name__
        if not isinstance(reset, PackedSequence):
            raise TypeError(
                f"{name}: reset must be packed, as the input is, got a {type(reset).__name__}"
            )
        order, given = input.sorted_indices, reset.sorted_indices
        message = f"{name}: reset must have the lengths and the order of the input"
        same = (order is None) == (given is None) and input.batch_sizes.equal(reset.batch_sizes)
        if same and order is not None and given is not None and order is not given:
            if order.is_cuda:  # asynchronous: comparing here would synchronise
                torch._assert_async(order.eq(given).all(), message)
            else:
                same = order.equal(given)
        if not same:
            raise ValueError(message)
        return self._checked_reset(reset.data, input.data, (len(input.data),))

    def _padded_reset(self, input: Tensor, reset: Tensor | PackedSequence) -> Tensor:
        if not isinstance(reset, Tensor):
            raise TypeError(
                f"{type(self).__name__}: reset must be a tensor, as the input is, got "
                f"{type(reset).__name__}"
            )
        flags = self._checked_reset(reset, input, input.shape[:-1])
        return (flags.t() if self.batch_first and flags.dim() == 2 else flags).flatten()

    def _checked_reset(self, reset: Tensor, input: Tensor, shape: Sequence[int]) -> Tensor:
        if reset.dtype != torch.bool or tuple(reset.shape) != tuple(shape):
            raise ValueError(
                f"{type(self).__name__}: reset must be boolean, {tuple(shape)}, as this input has "
                f"steps; got {tuple(reset.shape)} in {reset.dtype}"
            )
        ops.check_devices(input, reset=reset)
        return reset

    def _run_layers(
        self, x: Tensor, batch_sizes: Tensor | None, states: States | None, reset: Tensor | None
    ) -> tuple[Tensor, States]:
        """Outputs and final states.

        x is time-major (T, N, I), or packed (total, I); rows to reset are (T * N,) or (total,).
        """
        noise = self.noise
        noisy = "zoneout" in noise or "recurrent_dropout" in noise
        # Weight dropout gives every call other weights.
        planned = batch_sizes is None and not (self.training and "weight_dropout" in noise)

        def draw(states: States, lead: Sequence[int]) -> list[ops.Noise]:
            both = self.zoneout, self.recurrent_dropout
            return ops.draw_noise(*both, states, lead, self.training)

        if planned:
            lead = x.shape[:-1]
            by_plan = (lambda states: draw(states, lead)) if noisy and self.training else None
            options = len(self.cell.states), self.dropout, self.training, by_plan, reset
            cache = self._plans.cache
            done = None if cache is None else cache.run(self.__dict__, x, states, *options)
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
        bidirectional, dropout, training = self.bidirectional, self.dropout, self.training
        call = ops.RecurrentCall(
            cell, (), x, batch_sizes, states, (), bidirectional, dropout, training, reset
        )
        pieces = None
        counts = any(site.norm.per_timestep for sites in all_sites for site in sites.values())
        if reset is not None and counts:
            call, pieces = ops.split_call_at_resets(
                call
            )  # such norms count time steps from a reset
        start_sequence(all_sites, len(call.x if call.batch_sizes is None else call.batch_sizes))
        weights = [self._effective_weights(*direction) for direction in directions.items()]
        records = [
            {role: site.to_spec() for role, site in sites.items()} for sites in directions.values()
        ]
        self._check_parameters(x, records, weights)
        call = call._replace(records=records, weights=weights)
        if noisy:
            pairs = zip(weights, draw(call.states, call.x.shape[:-1]), strict=True)
            call = call._replace(weights=[w._replace(noise=n) for w, n in pairs])
        kernel = ops.select_kernel(call)
        if kernel is None and _runs_in_pieces(call):
            call, pieces = ops.split_call_at_resets(call)
            kernel = ops.select_kernel(call)
        if kernel is not None and planned and call.reset is reset:
            watched = entries(self, [f"_{name}" for name in directions], all_sites)
            if watched is not None:
                watched = [*watched, (self.__dict__, "zoneout")]
            self._plans.keep(self.__dict__, watched, kernel, call)

        def run(
            i: int,
            x: Tensor,
            sizes: Sequence[int] | None,
            states: States,
            reset: Tensor | None,
        ) -> tuple[Tensor, States]:
            sites, own = all_sites[i], call.weights[i]
            per_timestep = sites["input"].norm.per_timestep
            scan = registry.SCANS.get(x.device.type, ops.scan)
            return scan(cell, x, sizes, states, own, sites, per_timestep, reset)

        output, states = ops.run_layers(run, call) if kernel is None else kernel(call)
        if pieces is not None:
            output, states = ops.join_segments(output, states, pieces, bidirectional)
            output = output.reshape(*x.shape[:-1], output.shape[-1])
        return output, states

    def _effective_weights(self, suffix: str, sites: dict[str, Site]) -> Weights:
        recurrent = sites["recurrent"].weight(getattr(self, f"weight_hh_{suffix}"))
        if self.weight_dropout and self.training:
            mask = ops.dropout_mask(self.weight_dropout, recurrent)
            recurrent = recurrent * mask.to(recurrent.dtype)
        return Weights(
            sites["input"].weight(getattr(self, f"weight_ih_{suffix}")),
            recurrent,
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


RecurrentOptions.__doc__ = RecurrentLayer.__doc__  # where jsonargparse reads descriptions


def _signature(cls: type[RecurrentLayer]) -> inspect.Signature:
    """The constructor's signature, with `RecurrentOptions` in place of ``**options``."""
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    if parameters and "RecurrentOptions" in str(parameters[-1].annotation):
        shared = inspect.signature(RecurrentLayer.__init__).parameters
        parameters[-1:] = [shared[name] for name in RecurrentOptions.__annotations__]
    return inspect.Signature(parameters)


class LSTM(RecurrentLayer):
    """Long short-term memory (paper, eq. 20-22): `torch.nn.LSTM` with a norm.

    With gates i, f, g, o cut from ``input(W x) + recurrent(U h) + b_ih + b_hh``, where ``input``,
    ``recurrent`` and ``cell`` are the normalised sites::

        c' = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h' = sigmoid(o) * tanh(cell(c'))

    The carried c' is not normalised. With ``proj_size``, ``h' = W_hr h'``. As in torch and unlike
    the paper, there are two biases (their sum is the paper's b), and gates are in torch's order.

    Args:
        peephole: gates see cell states (Graves 2013, eq. 7-10): i and f the previous one, o the new
            one, each by a weight per unit. Runs on the generic loop.
        derivative_bound: clip the derivative of the loss with respect to each gate's sum to this
            size (Graves 2013, section 2.1), on the generic loop; default: no clipping.

    Further arguments: see `RecurrentLayer`. Parameters: as there, with G = 4H; gains (4H,) at the
    sites ``"input"`` and ``"recurrent"``, gain and shift (H,) at ``"cell"``; ``weight_peephole_l0``
    (3, H) to i, f, o.

    Raises:
        ValueError: as `RecurrentLayer`, and for a ``derivative_bound`` that is not positive.

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
        peephole: bool = False,
        derivative_bound: float | None = None,
        **options: Unpack[RecurrentOptions],
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            proj_size, device, dtype, cell=lstm_cell(peephole, derivative_bound), **options,
        )  # fmt: skip
        self.derivative_bound = derivative_bound

    def _new_cell(self, **arguments: Any) -> RecurrentCell:
        peephole = bool(self.cell.weights)
        return LSTMCell(peephole=peephole, derivative_bound=self.derivative_bound, **arguments)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "cell" not in state:  # pickled by version 0.1
            peephole = "weight_peephole_l0" in self._parameters
            self.cell = lstm_cell(peephole, state.get("derivative_bound"))

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: tuple[Tensor, Tensor] | None = None,
        reset: Tensor | PackedSequence | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, Tensor]]:
        """Outputs and final states.

        Args:
            input: (T, N, I), (N, T, I) with ``batch_first``, (T, I) for one example, or packed.
            hx: initial (h, c), (L, N, H or P) and (L, N, H), or (L, H or P) and (L, H) for one
                example, with L = layers * directions; default zeros.
            reset: steps before which states are set to zero: boolean, (T, N), (N, T) with
                ``batch_first``, (T,) for one example, or packed as the input is. The result equals
                running the pieces as separate sequences; only the first one starts from ``hx``,
                unless it is reset too. A second direction reads each piece backwards, and only the
                last one starts from ``hx``. Norms with statistics per time step (`BatchNorm`) count
                steps from the start of a piece. Then all pieces run as one packed batch, and
                recurrent dropout draws a mask for each piece, otherwise for each sequence.
            mask: valid steps of padded sequences: boolean, (T, N), or (N, T) with ``batch_first``,
                true at the first steps of each sequence. Such a call runs the sequences packed,
                which synchronises with the device. Outputs are zero where the mask is false; final
                states are taken after the last valid step.

        Returns:
            The output, (T, N, D * H) for D directions, or (T, N, D * P) with ``proj_size``, in the
            layout of the input; and the final states (h, c) in the shapes of ``hx``.

        Raises:
            RuntimeError: for mismatched sizes.
            TypeError: if ``hx`` is not a tuple of two, or only one of ``reset`` and the input is
                packed.
            ValueError: if the input is neither 2D nor 3D, or ``reset`` or ``mask`` does not fit it;
                under batch normalisation in training, for a batch of one.
        """
        output, (h, c) = self._run(input, hx, reset, mask)
        return output, (h, c)


class GRU(RecurrentLayer):
    """Gated recurrent units (paper, eq. 26-28): `torch.nn.GRU` with a norm.

    With r, z, n cut from ``input(W x) + b_ih`` and, marked ', from ``recurrent(U h) + b_hh``::

        n = tanh(n + sigmoid(r + r') * n')
        h = (1 - sigmoid(z + z')) * n + sigmoid(z + z') * h

    The two gates share statistics over 2H features, the candidate n has its own. As in torch and
    unlike the paper, there are two biases, added after normalisation, and z weights the old state.

    Arguments and errors: see `RecurrentLayer`. Parameters: as there, with G = 3H and gains (3H,) at
    the sites ``"input"`` and ``"recurrent"``.

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
        **options: Unpack[RecurrentOptions],
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            device=device, dtype=dtype, **options,
        )  # fmt: skip

    def _new_cell(self, **arguments: Any) -> RecurrentCell:
        return GRUCell(**arguments)

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        reset: Tensor | PackedSequence | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Output and final state; see `LSTM.forward`, with h as the only state."""
        output, (h,) = self._run(input, hx, reset, mask)
        return output, h


class RNN(RecurrentLayer):
    """Simple recurrent units (paper, eq. 4): `torch.nn.RNN` with a norm.

    ``h' = f(sum(W x + U h) + b_ih + b_hh)``: the sum of both terms is normalised.

    Args:
        nonlinearity: f, ``"tanh"`` or ``"relu"``.

    Further arguments: see `RecurrentLayer`. Parameters: as there, with G = H; gain (H,) at the site
    ``"sum"``. Norms that act on weights have scales (H,) at ``"input"`` and ``"recurrent"``
    instead.

    Raises:
        ValueError: as `RecurrentLayer`, and for another nonlinearity.
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
        **options: Unpack[RecurrentOptions],
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            device=device, dtype=dtype, cell=rnn_cell(nonlinearity), **options,
        )  # fmt: skip
        self.nonlinearity = nonlinearity

    def _new_cell(self, **arguments: Any) -> RecurrentCell:
        return RNNCell(nonlinearity=self.nonlinearity, **arguments)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "cell" not in state:  # pickled by version 0.1
            self.cell = rnn_cell(self.nonlinearity)

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        reset: Tensor | PackedSequence | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Output and final state; see `LSTM.forward`, with h as the only state."""
        output, (h,) = self._run(input, hx, reset, mask)
        return output, h


def _runs_in_pieces(call: ops.RecurrentCall) -> bool:
    """Whether a CPU kernel runs the call once it is split at resets."""
    if call.reset is None or call.x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    # Noise masks belong to whole sequences.
    if any(w.noise.kinds for w in call.weights):
        return False
    return ops.select_kernel(call._replace(reset=None)) is not None


def recurrent_layer(kind: str | Mapping[str, str] | type[RecurrentLayer]) -> type[RecurrentLayer]:
    """Resolve a name, class or config to a class of recurrent layers.

    ``kind`` is ``"lstm"``, ``"gru"`` or ``"rnn"``, in any case; a class; or a value of
    `layer_config`, whose class path is imported: use only your own files and checkpoints.

    Raises:
        ValueError: for an unknown name, or a path that is not a class of recurrent layers.
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
    """Serialise a class of recurrent layers as ``"lstm"`` or ``{"class_path": ...}``."""
    cls = recurrent_layer(kind)
    if cls in (LSTM, GRU, RNN):
        return cls.__name__.lower()
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}"}
