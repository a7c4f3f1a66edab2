"""The sequence model of DreamerV3 in state dicts of other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ln_zoo.conversion.formats.entries import StateKeys, Weights
from ln_zoo.conversion.layers import sites
from ln_zoo.layers import DreamerV3SequenceModel
from ln_zoo.layers.dreamer_v3 import dreamer_v3_cell
from ln_zoo.norms import RMSNorm
from ln_zoo.ops import Cell

_OURS = "recurrence."
#: Added to a bias in our layers only.
_SURPLUS = f"{_OURS}bias_ih_l0"


@dataclass(frozen=True)
class SequenceModelForm:
    """Keys of a sequence model: of a linear layer, and of the norm after it.

    ``{i}`` is the number of a layer in blocks, ``{j}`` and ``{k}`` are 3 i and 3 i + 1.
    """

    state: tuple[str, str]
    inputs: tuple[tuple[str, str], ...]
    dynamics: tuple[str, str]
    gates: str
    axes: str  # of a weight in blocks: block (g), output (o), input (i)
    state_first: bool = True  # whether the state's features are before those of inputs
    leads: tuple[str, ...] = ("",)  # starts of keys; the first is written
    fixed_offset: bool = True  # whether the update offset is -1
    cell: Cell = field(default_factory=dreamer_v3_cell)
    entries: tuple[Any, ...] = ()

    def _lead(self, keys: StateKeys) -> str:
        starts = (lead for lead in self.leads if any(key.startswith(lead) for key in keys.values))
        return next(starts)

    def matches(self, keys: StateKeys) -> bool:
        return f"{self._lead(keys)}{self.state[0]}.weight" in keys

    # Reading

    def read(
        self, keys: StateKeys, eps: float | None, options: dict[str, Any]
    ) -> tuple[DreamerV3SequenceModel, list[str]]:
        """The model with these weights, and names of parameters that the library lacks."""
        lead = self._lead(keys)
        count = 1
        while f"{lead}{_numbered(self.dynamics[0], count)}.weight" in keys:
            count += 1
        activation = options.get("activation")
        if activation is not None and not isinstance(activation, str):
            name = getattr(activation, "__name__", type(activation).__name__)
            options = options | {"activation": name.lower()}
        width, units = keys.matrix_shape(f"{lead}{self.state[0]}.weight")
        try:
            weights = self._read_weights(keys, lead, count)
        except (RuntimeError, IndexError) as error:
            raise _unfit(keys, error) from None
        try:
            model = DreamerV3SequenceModel(
                [weights[f"inputs.{i}.weight"].shape[1] for i in range(len(self.inputs))],
                units,
                projection_size=width,
                dynamics_layers=count,
                norm=RMSNorm(eps=1e-4 if eps is None else eps),
                blocks=keys.shape(f"{lead}{self.gates}.weight")[self.axes.index("g")],
                device=weights["inputs.0.weight"].device,
                dtype=weights["inputs.0.weight"].dtype,
                **options,
            )
            model.load_state_dict(weights)
        except (RuntimeError, IndexError, ValueError) as error:
            raise _unfit(keys, error) from None
        return model, [_SURPLUS]

    def _read_weights(self, keys: StateKeys, lead: str, count: int) -> Weights:
        found: Weights = {}
        for key, name in self._plain(count).items():
            found[name] = keys.read(f"{lead}{key}")
        name = f"{_OURS}weight_state_bias_l0"
        found[name] = found[name].unsqueeze(0)
        layers = [self._in_blocks(keys, f"{lead}{key}.weight") for key in self._layers(count)]
        (blocks, units, _), width = layers[0].shape, len(found[f"{_OURS}weight_state_l0"])
        sizes = {"projected": width, "ih": width * len(self.inputs)}
        order = [*sizes] if self.state_first else [*sizes][::-1]
        of_state, *parts = layers[0].split([units, *(sizes[name] for name in order)], 2)
        for name, part in zip(order, parts, strict=True):
            found[f"{_OURS}weight_{name}_l0"] = part.flatten(0, 1)
        rows = torch.cat([of_state, *layers[1:]], 1)
        found[f"{_OURS}weight_hh_l0"] = rows.squeeze(0)
        biases = [keys.read(f"{lead}{key}.bias") for key in self._layers(count)]
        biases[-1] = biases[-1].view(blocks, 3, units).transpose(0, 1).flatten()
        found[f"{_OURS}bias_hh_l0"] = torch.cat(biases)
        found[_SURPLUS] = torch.zeros_like(biases[0])
        return found

    def _in_blocks(self, keys: StateKeys, key: str) -> Tensor:
        """A weight in blocks, (blocks, outputs, inputs)."""
        return keys.read(key).permute([self.axes.index(axis) for axis in "goi"])

    # Names

    def _layers(self, count: int) -> Iterator[str]:
        for i in range(count):
            yield _numbered(self.dynamics[0], i)
        yield self.gates

    def _plain(self, count: int) -> dict[str, str]:
        """Our names of tensors that both have in one form, by the library's."""
        linear, norm = self.state
        found = {
            f"{linear}.weight": f"{_OURS}weight_state_l0",
            f"{linear}.bias": f"{_OURS}weight_state_bias_l0",
            f"{norm}.weight": f"{_OURS}sites.l0.projected.gain",
        }
        for i, (linear, norm) in enumerate(self.inputs):
            found |= {f"{linear}.{part}": f"inputs.{i}.{part}" for part in ("weight", "bias")}
            found[f"{norm}.weight"] = f"inputs.{i}.site.gain"
        for i in range(count):
            key = f"{_numbered(self.dynamics[1], i)}.weight"
            found[key] = f"{_OURS}sites.l0.dynamics_{i}.gain"
        return found

    # Writing

    def unwritable(self, layer: Any) -> str | None:
        """Part of a model that this form lacks, or None."""
        if not isinstance(layer, DreamerV3SequenceModel):
            return f"{layer.cell.name} without layers of its inputs"
        inner = layer.recurrence
        if len(layer.inputs) != len(self.inputs):
            return f"model of {len(layer.inputs)} inputs, but of {len(self.inputs)}"
        if inner.num_layers > 1 or inner.bidirectional or not inner.bias:
            return "several layers, a second direction, or a layer without biases"
        if self.fixed_offset and inner.update_offset != -1:
            return f"update offset of {inner.update_offset}, but -1"
        for name, site in sites(layer).items():
            acts = site.role not in ("input", "recurrent")
            if acts and type(site.norm) is not RMSNorm:
                return f"{site.norm} at {name}, but RMSNorm"
        return None

    def write(self, dialect: str, layer: DreamerV3SequenceModel) -> Weights:
        """The state dict of a model."""
        ours = {name: value.detach() for name, value in layer.state_dict().items()}
        inner, lead = layer.recurrence, self.leads[0]
        count, units = inner.dynamics_layers, inner.hidden_size // inner.blocks
        found = {key: ours[name] for key, name in self._plain(count).items()}
        key = f"{self.state[0]}.bias"
        found[key] = found[key].flatten()
        sizes = [units] * count + [3 * units]
        rows = ours[f"{_OURS}weight_hh_l0"].reshape(inner.blocks, -1, units).split(sizes, 1)
        parts = [
            ours[f"{_OURS}weight_{name}_l0"].unflatten(0, (inner.blocks, units))
            for name in (("projected", "ih") if self.state_first else ("ih", "projected"))
        ]
        rows = (torch.cat([rows[0], *parts], 2), *rows[1:])
        biases = [*ours[f"{_OURS}bias_hh_l0"].split([inner.blocks * n for n in sizes])]
        biases[0] = biases[0] + ours[_SURPLUS]
        biases[-1] = biases[-1].view(3, inner.blocks, units).transpose(0, 1).flatten()
        back = ["goi".index(axis) for axis in self.axes]
        for key, row, bias in zip(self._layers(count), rows, biases, strict=True):
            found |= {f"{key}.weight": row.permute(back), f"{key}.bias": bias}
        return {f"{lead}{key}": value for key, value in found.items()}


def _unfit(keys: StateKeys, error: Exception) -> ValueError:
    return ValueError(f"{keys.dialect}: {' '.join(str(error).split())}")


def _numbered(key: str, i: int) -> str:
    return key.format(i=i, j=3 * i, k=3 * i + 1)


_RSSM = ("belief_projection", "state_projection", "action_projection")
TORCHRL = (
    SequenceModelForm(
        (f"{_RSSM[0]}.0", f"{_RSSM[0]}.1"),
        tuple((f"{name}.0", f"{name}.1") for name in _RSSM[1:]),
        ("hidden_layers.{j}", "hidden_layers.{k}"),
        "gates",
        "gio",
    ),
    SequenceModelForm(
        ("hidden_linear", "hidden_norm"),
        (("input_linear", "input_norm"),),
        ("dynamic_linears.{i}", "dynamic_norms.{i}"),
        "gates",
        "gio",
        state_first=False,
        leads=("cell.", ""),
        fixed_offset=False,
    ),
)
R2_DREAMER = SequenceModelForm(
    ("_dyn_in0.0", "_dyn_in0.1"),
    (("_dyn_in1.0", "_dyn_in1.1"), ("_dyn_in2.0", "_dyn_in2.1")),
    ("_dyn_hid.dyn_hid_{i}", "_dyn_hid.norm_{i}"),
    "_dyn_gru",
    "oig",
)
