"""The base of recurrent layers: any cell with any norm, with torch's semantics."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ln_zoo import ops
from ln_zoo.layers import sequences
from ln_zoo.layers.cells import (
    NoQuantiser,
    RecurrentCell,
    as_states,
    cell_sites,
    check_blocks,
    chosen_cell,
    draw_weights,
    effective_recurrent,
    entries,
    recurrent_rows,
    sites_by_role,
    start_sequence,
)
from ln_zoo.norms import Norm, Site
from ln_zoo.norms.arguments import check_no_norm
from ln_zoo.ops import Cell, Plans, Records, States, Weights


class RecurrentOptions(TypedDict, total=False):
    """Keyword arguments that all recurrent layers share; see `RecurrentLayer`."""

    norm: Norm | None
    normalize: Sequence[str] | None
    zoneout: float | Sequence[float]
    recurrent_dropout: float
    weight_dropout: float
    blocks: int
    recompute: int


class RecurrentLayer(nn.RNNBase):
    r"""Layers of any recurrent cell with any norm, with torch's semantics.

    `LSTM`, `GRU` and `RNN` are subclasses. Your own sets an `ln_zoo.ops.Cell` and inherits layers,
    directions, packed sequences, dropout and every norm::

        class MyLayer(RecurrentLayer):
            cell = MY_CELL

    It runs on a kernel generated from the cell's step, or on the generic loop; the logger
    ``ln_zoo`` reports which, and why. The base is `torch.nn.RNNBase`, not `torch.nn.LSTM`, `GRU` or
    `RNN`, which torch.compile does not trace.

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
        blocks: number B of blocks of the recurrent weight (heads), each of H / B units: unit block
            k of every gate reads only block k of h. Such a layer equals one with ``blocks=1`` and a
            block-diagonal weight, with a B-th of its recurrent parameters and products.
        recompute: keep states for the backward pass only every ``recompute`` time steps, and
            compute what lies between again (Chen et al. 2016, arXiv 1604.06174). Default 0: keep
            all. Norms must act on each row.
        cell: the cell; default: the attribute of the class.

    Parameters: ``weight_ih_l0`` (G, I) with G = gates * H, ``weight_hh_l0`` (G, H or P),
    ``bias_ih_l0``, ``bias_hh_l0`` (G,), ``weight_hr_l0`` (P, H), ``..._reverse``; the cell's own,
    ``weight_NAME_l0`` (rows, H), or of a shape of the cell's; and the norm's,
    ``sites.l0.ROLE.gain``, ``.shift`` or ``.scale``. They are initialised as in torch. With B
    blocks, ``weight_hh_l0`` is (B, G / B, H / B): block k has the H / B rows of its units for the
    first gate, then for the second, and so on; it is initialised for H / B inputs. All other
    parameters have the order of ``blocks=1``: by gate, then by unit.

    Precision: states are carried in float32 or wider. Under autocast the output has autocast's
    dtype and the final states that of the parameters, so splitting a sequence does not round.
    torch's fused loop, where it runs, follows its own rules.

    Raises:
        TypeError: if neither the class nor the argument sets a cell, and as torch does.
        ValueError: for an unknown role in ``normalize``, ``proj_size`` with a cell that does not
            project, a probability outside [0, 1), ``recurrent_dropout`` with a cell that does not
            support it, ``blocks`` that do not divide ``hidden_size`` or with ``proj_size``, and as
            torch does.
    """

    cell: Cell
    qconfig = NoQuantiser()
    #: Defaults for layers that earlier versions pickled.
    zoneout: tuple[float, ...] = ()
    recurrent_dropout: float = 0.0
    weight_dropout: float = 0.0
    blocks: int = 1
    recompute: int = 0
    #: Defaults of `RecurrentOptions` that differ from those here.
    defaults: ClassVar[Mapping[str, Any]] = {}

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
        blocks: int = 1,
        recompute: int = 0,
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
        check_blocks(self, hidden_size, blocks, proj_size)
        self.mode, self.blocks = cell.name, blocks
        self._set_noise(zoneout, recurrent_dropout, weight_dropout)
        self.recompute = recompute
        self._plans = Plans()
        for name in self._flat_weights_names:
            rows, *columns = self.get_parameter(name).shape
            if not name.startswith("weight_hr"):
                rows *= cell.recurrent_gates if "_hh_" in name else cell.gates
            shape = rows, *columns
            if name.startswith("weight_hh"):
                shape = ops.recurrent_shape(rows, columns[0], blocks)
            setattr(self, name, nn.Parameter(torch.empty(shape, **factory)))
        for suffix in self._suffixes():
            for name, own in cell.own_shapes(hidden_size).items():
                weight = nn.Parameter(torch.empty(own, **factory))
                self.register_parameter(f"weight_{name}_{suffix}", weight)
        self._init_flat_weights()
        self._draw_weights()
        self.sites = nn.ModuleDict()
        for suffix in self._suffixes():
            weights = {kind: getattr(self, f"weight_{kind}_{suffix}") for kind in ("ih", "hh")}
            of_cell = cell, hidden_size, weights, norm, normalize, factory, blocks
            self.sites[suffix] = cell_sites(*of_cell)
        if isinstance(recompute, bool) or not isinstance(recompute, int) or recompute < 0:
            raise ValueError(f"recompute must be a number of time steps or 0, got {recompute!r}")
        self._describe(planned=False, recompute=recompute)

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

    @property
    def options(self) -> dict[str, Any]:
        """`noise`, several blocks and a nonzero recompute."""
        blocks = {"blocks": self.blocks} if self.blocks > 1 else {}
        return self.noise | blocks | ({"recompute": self.recompute} if self.recompute else {})

    def extra_repr(self) -> str:
        return ", ".join([super().extra_repr(), *(f"{k}={v}" for k, v in self.options.items())])

    def flatten_parameters(self) -> None:
        """Lay out weights for cuDNN, as torch does; a no-op for cells that torch lacks."""
        if self.cell.in_torch and self.mode == self.cell.name and self.blocks == 1:
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
        kinds = [f"weight_{name}" for name, _ in self.cell.weights]
        of_cell = [f"{kind}_{suffix}" for suffix in self._suffixes() for kind in kinds]
        names = (*self._flat_weights_names, *of_cell)
        draw_weights([(name, getattr(self, name)) for name in names], self.hidden_size, self.blocks)

    def reset_norm(self) -> None:
        """Recompute norm parameters that depend on the weights; call it after changing weights."""
        for suffix, sites in self._directions().items():
            sites["input"].reset_weight(getattr(self, f"weight_ih_{suffix}"))
            sites["recurrent"].reset_weight(recurrent_rows(getattr(self, f"weight_hh_{suffix}")))

    def to_cell(self, layer: int = 0, reverse: bool = False) -> RecurrentCell:
        """The cell of one layer, with copies of its weights and its norm's parameters.

        Parametrised weights (`torch.nn.utils.parametrize`) are copied by value. Cells have no
        dropout, which acts only in training.

        Raises:
            ValueError: for a missing layer or direction, ``proj_size`` or zoneout.

        Example:
            >>> from ln_zoo.layers import LSTM
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
                blocks=self.blocks,
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
        """Output and final states; see `LSTM.forward`. A single state is a tensor, not a tuple."""
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
        name, first = type(self).__name__, self.batch_first
        states = as_states(name, self.cell, hx)
        if isinstance(input, PackedSequence):
            data, batch_sizes, order, back = input
            ops.check_packed(data, batch_sizes)
            ops.check_devices(data, sorted_indices=order, unsorted_indices=back)
            if states is not None and order is not None:
                self._check_states(data, batch_sizes, states)
                states = tuple(s.index_select(1, order) for s in states)
            # torch allows steps without examples at the end; skip them.
            active = batch_sizes if batch_sizes[-1] else batch_sizes[batch_sizes > 0]
            flags = None if reset is None else sequences.packed_reset(name, input, reset)
            output, states = self._run_layers(data, active, states, flags)
            if back is not None:
                states = tuple(s.index_select(1, back) for s in states)
            return PackedSequence(output, batch_sizes, order, back), states

        if input.dim() not in (2, 3):
            raise ValueError(f"{name}: Expected input to be 2D or 3D, got {input.dim()}D instead")
        sequences.check_batching(self.cell, input, states)
        flags = None if reset is None else sequences.padded_reset(name, input, reset, first)
        if input.dim() == 2:
            if states is not None:
                states = tuple(s.unsqueeze(1) for s in states)
            output, states = self._run_layers(input.unsqueeze(1), None, states, flags)
            return output.squeeze(1), tuple(s.squeeze(1) for s in states)
        x = input.transpose(0, 1) if first else input
        output, states = self._run_layers(x, None, states, flags)
        return output.transpose(0, 1) if first else output, states

    def _run_padded(self, input: Any, hx: Any, reset: Any, mask: Tensor) -> tuple[Tensor, States]:
        """`_run` for sequences padded at their ends, by packing them."""
        name, first = type(self).__name__, self.batch_first
        lengths = sequences.lengths_of(name, input, mask, first)

        def packed(a: Tensor) -> PackedSequence:
            return pack_padded_sequence(a, lengths, first, enforce_sorted=False)

        if reset is not None:
            reset = packed(sequences.check_reset(name, reset, input, mask.shape))
        output, states = self._run(packed(input), hx, reset)
        assert isinstance(output, PackedSequence)
        steps = mask.shape[1 if first else 0]
        return pad_packed_sequence(output, first, total_length=steps)[0], states

    def _run_layers(
        self, x: Tensor, batch_sizes: Tensor | None, states: States | None, reset: Tensor | None
    ) -> tuple[Tensor, States]:
        """Outputs and final states.

        x is time-major (T, N, I), or packed (total, I); rows to reset are (T * N,) or (total,).
        """
        cache = self._plans.cache
        recompute = self.recompute if torch.is_grad_enabled() else 0
        # Weight dropout gives every call other weights.
        drops_weights = self.training and self.weight_dropout
        planned = batch_sizes is None and not (drops_weights or recompute)
        if planned and cache is not None:
            noisy = self.training and self._is_noisy
            draw = functools.partial(self._draw_noise, x.shape[:-1]) if noisy else None
            options = len(self.cell.states), self.dropout, self.training, draw, reset
            done = cache.run(self.__dict__, x, states, *options)
            if done is not None:
                return done
        self.check_input(x, batch_sizes)
        if x.shape[0] == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        if states is None:
            states = tuple(x.new_zeros(size) for size in self._state_sizes(x, batch_sizes))
        else:
            self._check_states(x, batch_sizes, states)
        call = ops.RecurrentCall(
            cell=self.cell,
            records=(),
            x=x,
            batch_sizes=batch_sizes,
            states=states,
            weights=(),
            bidirectional=self.bidirectional,
            dropout=self.dropout,
            training=self.training,
            reset=reset,
        )
        return ops.run_call(self._describe(planned, recompute), call)

    def _describe(self, planned: bool, recompute: int) -> ops.Description:
        directions = self._directions()
        sites = list(directions.values())
        steps = [s.norm for of in sites for s in of.values() if s.norm.per_timestep]
        if recompute and steps:
            raise ValueError(
                f"{type(self).__name__}: recompute must be 0 with {steps[0]!r}, which has "
                "statistics of each time step"
            )
        return ops.Description(
            sites,
            per_timestep=[of["input"].norm.per_timestep for of in sites],
            counts_steps=bool(steps),
            complete=functools.partial(self._complete, directions),
            keep=functools.partial(self._keep_plan, directions) if planned else None,
            recompute=recompute,
        )

    def _complete(
        self, directions: dict[str, dict[str, Site]], call: ops.RecurrentCall
    ) -> ops.RecurrentCall:
        """The call with records, weights and noise; begins a sequence."""
        rows = call.x if call.batch_sizes is None else call.batch_sizes
        start_sequence(directions.values(), len(rows))
        weights = [self._effective_weights(*direction) for direction in directions.items()]
        records = [
            {role: site.to_spec() for role, site in sites.items()} for sites in directions.values()
        ]
        self._check_parameters(call.x, records, weights)
        if self._is_noisy:
            noise = self._draw_noise(call.x.shape[:-1], call.states)
            weights = [w._replace(noise=n) for w, n in zip(weights, noise, strict=True)]
        return call._replace(records=records, weights=weights)

    def _keep_plan(
        self, directions: dict[str, dict[str, Site]], run: ops.Runner, call: ops.RecurrentCall
    ) -> None:
        suffixes = [f"_{suffix}" for suffix in directions]
        watched = entries(self, suffixes, list(directions.values()))
        if watched is not None:
            watched = [*watched, (self.__dict__, "zoneout")]
        self._plans.keep(self.__dict__, watched, run, call)

    @property
    def _is_noisy(self) -> bool:
        return bool(self.recurrent_dropout) or any(self.zoneout)

    def _draw_noise(self, lead: Sequence[int], states: States) -> list[ops.Noise]:
        """Zoneout and recurrent dropout of a call; ``lead`` is the shape of x without features."""
        both = self.zoneout, self.recurrent_dropout
        return ops.draw_noise(*both, states, lead, self.training)

    def _effective_weights(self, suffix: str, sites: dict[str, Site]) -> Weights:
        recurrent = effective_recurrent(sites["recurrent"], getattr(self, f"weight_hh_{suffix}"))
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
            ops.check_parameters(cell, record, weight, x, sizes, suffix, self.blocks)


RecurrentOptions.__doc__ = RecurrentLayer.__doc__  # where jsonargparse reads descriptions


def _signature(cls: type[RecurrentLayer]) -> inspect.Signature:
    """The constructor's signature, with `RecurrentOptions` in place of ``**options``."""
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    if parameters and "RecurrentOptions" in str(parameters[-1].annotation):
        shared = inspect.signature(RecurrentLayer.__init__).parameters
        own = {name: shared[name] for name in RecurrentOptions.__annotations__}
        own |= {name: own[name].replace(default=value) for name, value in cls.defaults.items()}
        parameters[-1:] = own.values()
    return inspect.Signature(parameters)
