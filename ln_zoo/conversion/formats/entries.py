"""Tables that map state dicts of other libraries to parameters of our recurrent layers.

A `Form` describes one layer of a library: our cell, and an `Entry` for each key. An entry maps
tensors of the library, split along the gates, to columns, rows or a sum of parameters, with an
optional transpose and permutation of gates.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ln_zoo.conversion.layers import sites
from ln_zoo.layers import RecurrentCell, RecurrentLayer
from ln_zoo.norms import LayerNorm, Norm
from ln_zoo.ops import Cell

#: Parameters of a layer by our names.
Weights = dict[str, Tensor]


class StateKeys:
    """Keys of a state dict under a prefix; tracks which of them were read.

    ``dialect`` is a name for messages. ValueError if no key starts with the prefix.
    """

    def __init__(self, dialect: str, state: Mapping[str, Any], prefix: str = "") -> None:
        self.dialect = dialect
        self.values = {
            key.removeprefix(prefix): value
            for key, value in state.items()
            if key.startswith(prefix)
        }
        self._read: set[str] = set()
        if not self.values:
            shown = ", ".join(map(repr, list(state)[:4])) or "no keys"
            raise ValueError(f"{dialect}: no key starts with {prefix!r}, got {shown}")

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def strip_scopes(self, names: Sequence[str]) -> None:
        """Remove Keras' scopes and suffixes: ``lstm/lstm_cell/kernel:0`` becomes ``kernel``."""
        for key in list(self.values):
            plain = key.rpartition(":")[0] or key
            for name in sorted(names, key=len, reverse=True):
                if plain == name or plain.endswith(f"/{name}"):
                    self.values[name] = self.values.pop(key)
                    break

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a key's tensor, without reading it."""
        return tuple(self._tensor(key).shape)

    def matrix_shape(self, key: str) -> tuple[int, int]:
        shape = self.shape(key)
        if len(shape) != 2:
            raise ValueError(f"{self.dialect}: {key!r} should be a matrix, got shape {shape}")
        return shape[0], shape[1]

    def read(self, key: str) -> Tensor:
        """The tensor of a key; ValueError if missing, empty or not a floating-point tensor."""
        tensor = self._tensor(key)
        self._read.add(key)
        return tensor

    def _tensor(self, key: str) -> Tensor:
        if key not in self.values:
            left = [name for name in self.values if name not in self._read]
            near = difflib.get_close_matches(key, left, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; unread are {sorted(left)[:6]}"
            raise ValueError(f"{self.dialect}: the state dict has no {key!r}{hint}")
        try:
            tensor = torch.as_tensor(self.values[key]).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{self.dialect}: {key!r} is not a tensor: {error}") from None
        if not tensor.is_floating_point():
            raise ValueError(f"{self.dialect}: {key!r} must be floating-point, got {tensor.dtype}")
        if not tensor.numel():
            raise ValueError(f"{self.dialect}: {key!r} is empty, of shape {tuple(tensor.shape)}")
        return tensor

    def finish(self) -> None:
        left = sorted(set(self.values) - self._read)
        if left:
            raise ValueError(
                f"{self.dialect}: unexpected keys {', '.join(map(repr, left[:4]))}: select one "
                "layer with prefix=..."
            )


class Direction(NamedTuple):
    """One direction of one layer: the end of our parameter names, and the start of their keys."""

    layer: int
    suffix: str
    lead: str

    def key(self, key: str) -> str:
        """The library's key, with ``{k}``, ``{even}`` (2k), ``{odd}`` and ``{suffix}`` replaced."""
        k = self.layer
        numbers = {"k": k, "even": 2 * k, "odd": 2 * k + 1, "suffix": self.suffix}
        return self.lead + key.format(**numbers)

    def parameter(self, name: str) -> str:
        """Our parameter, from ``"weight_ih"``, or ``"input.gain"`` for a site."""
        return f"sites.{self.suffix}.{name}" if "." in name else f"{name}_{self.suffix}"

    def keys(self, entry: Entry) -> list[str]:
        return [self.key(key) for key in entry.keys]

    def parameters(self, entry: Entry) -> list[str]:
        return [self.parameter(name) for name in entry.names]


def _directions(layer: int, leads: Sequence[str]) -> list[Direction]:
    return [
        Direction(layer, f"l{layer}{'_reverse' if d else ''}", lead.format(k=layer))
        for d, lead in enumerate(leads)
    ]


@dataclass(frozen=True)
class Entry:
    """Maps keys of a library to our parameters.

    ``join`` is ``"columns"`` of a matrix, ``"rows"`` of a tensor with the gates last, or a
    ``"sum"``, which the first parameter gets when reading. ``"added"`` adds the tensor to the
    parameter when reading, and writes zeros.
    """

    keys: tuple[str, ...] | str  # a key, or several, concatenated along the gates
    names: tuple[str, ...] | str  # a parameter, or several, which are joined
    join: Literal["columns", "rows", "sum", "added"] = "columns"
    transposed: bool = False  # the library has the gates last
    gates: tuple[int, ...] = ()  # number of gates in each key, if unequal
    cut: bool = True  # the tensor has gates, in the form's order
    optional: bool = False  # the entry may be missing on both sides
    layers: bool = False  # the library has one tensor with a row for each layer
    default: float | None = None  # value of the parameter if the key is missing; not written either

    def __post_init__(self) -> None:
        for name in ("keys", "names"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else value)


def kernel(key: str, names: str | tuple[str, ...]) -> Entry:
    """A weight with the gates last, as in TensorFlow."""
    return Entry(key, names, transposed=True)


def affine(key: str, site: str, bias: str) -> tuple[Entry, Entry]:
    """Gain and shift of a `torch.nn.LayerNorm` over gates; the shift becomes a bias."""
    return Entry(f"{key}.weight", f"{site}.gain"), Entry(f"{key}.bias", bias)


BIASES = ("bias_ih", "bias_hh")


@dataclass(frozen=True)
class Form:
    """One kind of layer of a library.

    ``leads`` are alternatives, the preferred first, each with the start of the keys of each
    direction. ``{k}`` is the layer's index; without it there is one layer.
    """

    kind: type[RecurrentLayer] | Cell  # our layer's class, or the cell of a `RecurrentLayer`
    entries: tuple[Entry, ...]
    norm: LayerNorm | None = None  # with the library's eps; None: no norm
    # Roles of the normalised sites; default: all of the cell.
    normalized: tuple[str, ...] | None = None
    # The library's gates and ours, such as ("igfo", "ifgo"), if they differ.
    order: tuple[str, str] | None = None
    leads: tuple[tuple[str, ...], ...] = (("",),)
    # Whether a state dict has this form; default: it has the first key.
    when: Callable[[StateKeys], bool] | None = None
    fixed_eps: bool = False  # the library has no argument for eps
    # Buffers without information, as functions of the number of units.
    constants: Mapping[str, Callable[[int], Tensor]] = field(default_factory=dict)

    @property
    def cell(self) -> Cell:
        return self.kind if isinstance(self.kind, Cell) else self.kind.cell

    @property
    def roles(self) -> tuple[str, ...]:
        if self.norm is None:
            return ()
        return self.cell.roles if self.normalized is None else self.normalized

    # Reading

    def matches(self, keys: StateKeys) -> bool:
        if self.when is not None:
            return self.when(keys)
        return self._directions_of(keys) is not None

    @property
    def _first_key(self) -> str:
        return self.entries[0].keys[0]

    def _has_layers(self, leads: tuple[str, ...]) -> bool:
        return "{" in leads[0] + self._first_key

    def _directions_of(self, keys: StateKeys) -> list[Direction] | None:
        for leads in self.leads:
            found: list[Direction] = []
            while self._has_layers(leads) or not found:
                layer = _directions(len(found) // len(leads), leads)
                if not all(d.key(self._first_key) in keys for d in layer):
                    break
                found += layer
            if found:
                return found
        return None

    def read(
        self, keys: StateKeys, eps: float | None, options: dict[str, Any]
    ) -> tuple[RecurrentLayer, list[str]]:
        """The layer with these weights, and names of parameters that the library lacks."""
        directions = self._directions_of(keys) or _directions(0, self.leads[-1][:1])
        weights: Weights = {}
        surplus: list[str] = []
        for direction in directions:
            for entry in self.entries:
                try:
                    weights |= self._read_entry(entry, keys, direction, weights)
                except (RuntimeError, IndexError):
                    sizes = ", ".join(f"{k!r} {keys.shape(k)}" for k in direction.keys(entry))
                    raise ValueError(
                        f"{keys.dialect}: sizes do not fit each other: {sizes}"
                    ) from None
                if entry.default is not None and direction.keys(entry)[0] not in keys:
                    surplus += direction.parameters(entry)
                if entry.join == "sum":
                    surplus.append(direction.parameters(entry)[1])
            for key in map(direction.key, self.constants):
                if key in keys:
                    keys.read(key)
        arguments = dict(options)
        if self.norm is not None:
            arguments["norm"] = self.norm if eps is None else replace(self.norm, eps=eps)
            arguments["normalize"] = self.roles
        layer = build(keys.dialect, self.kind, weights, **arguments)
        return layer, [name for name in surplus if name in weights]

    def _read_entry(
        self, entry: Entry, keys: StateKeys, direction: Direction, weights: Weights
    ) -> Weights:
        found, names = direction.keys(entry), direction.parameters(entry)
        if found[0] not in keys and entry.default is not None:
            like = weights[direction.parameter("weight_ih")]
            return {name: like.new_full((len(like),), entry.default) for name in names}
        if found[0] not in keys and entry.optional:
            return {}
        joined = self._joined(entry, keys, direction)
        if entry.join == "added":
            return {names[0]: weights[names[0]] + joined}
        if entry.join == "sum":
            return {names[0]: joined, names[1]: torch.zeros_like(joined)}
        if entry.join == "rows":
            rows = joined.split([1] * len(names))
            return {name: row.squeeze(0) for name, row in zip(names, rows, strict=True)}
        if len(names) == 1:
            return {names[0]: self._shaped(entry.names[0], joined)}
        hidden = len(joined) // self.cell.gates
        rest = joined.shape[1] - hidden
        widths = [hidden if name == "weight_hh" else rest for name in entry.names]
        return dict(zip(names, joined.split(widths, 1), strict=True))

    def _joined(self, entry: Entry, keys: StateKeys, direction: Direction) -> Tensor:
        """The tensors of an entry, concatenated along the gates, in our order of gates."""
        found = direction.keys(entry)
        pieces = [keys.read(key) for key in found]
        if entry.layers:
            pieces = [piece[direction.layer] for piece in pieces]
        axis = -1 if entry.join == "rows" else 0
        joined = torch.cat([p.t() if entry.transposed else p for p in pieces], axis)
        return _permuted(joined, *self.order, axis) if entry.cut and self.order else joined

    def _shaped(self, name: str, joined: Tensor) -> Tensor:
        """The cell's own weights as (rows, H); libraries flatten them."""
        rows = dict(self.cell.weights).get(name.removeprefix("weight_"))
        return joined.reshape(rows, -1) if isinstance(rows, int) else joined

    # Writing

    def unwritable(self, layer: RecurrentLayer | RecurrentCell) -> str | None:
        """Part of a layer or cell that this form lacks, or None."""
        if layer.cell.name != self.cell.name:
            return layer.cell.name
        layers, directions, projection = _shape(layer)
        leads = [leads for leads in self.leads if len(leads) == directions]
        if not leads:
            return "second direction"
        if layers > 1 and not any(map(self._has_layers, leads)):
            return "several layers: write each layer separately"
        if projection and not any("weight_hr" in entry.names for entry in self.entries):
            return "projection"
        for name, site in sites(layer).items():
            norm: Norm = site.norm
            if type(norm).weight is not Norm.weight:
                return f"{norm}: denormalize_ the layer first"
            if site.role not in self.roles and site.normalizes:
                return f"normalisation at {name}: {norm}"
            if self.norm is None or site.role not in self.roles:
                continue
            if type(norm) is not LayerNorm or norm.per_gate != self.norm.per_gate:
                wanted = f"LayerNorm{'(per_gate=True)' if self.norm.per_gate else ''}"
                return f"{norm} at {name}, but {wanted}"
            if self.fixed_eps and norm.eps != self.norm.eps:
                return f"eps of {norm.eps}, but {self.norm.eps}"
        return None

    def write(self, dialect: str, layer: RecurrentLayer | RecurrentCell) -> Weights:
        """The state dict of a layer or cell; ValueError if biases cannot be summed."""
        weights = {name: value.detach() for name, value in layer.state_dict().items()}
        if isinstance(layer, RecurrentCell):
            one = Direction(0, "l0", "")
            weights = {one.parameter(name.removeprefix("sites.")): v for name, v in weights.items()}
        found: Weights = {}
        for direction in self._directions_for(layer):
            for entry in self.entries:
                self._write_entry(dialect, entry, direction, weights, found)
            for key, constant in self.constants.items():
                like = weights[direction.parameter("weight_ih")]
                found[direction.key(key)] = constant(layer.hidden_size).to(like)
        return found

    def _directions_for(self, layer: RecurrentLayer | RecurrentCell) -> Iterator[Direction]:
        layers, directions, _ = _shape(layer)
        leads = next(
            leads
            for leads in self.leads
            if len(leads) == directions and (layers == 1 or self._has_layers(leads))
        )
        for k in range(layers):
            yield from _directions(k, leads)

    def _write_entry(
        self, dialect: str, entry: Entry, direction: Direction, weights: Weights, found: Weights
    ) -> None:
        keys, names = direction.keys(entry), direction.parameters(entry)
        if entry.optional and entry.join != "added" and names[0] not in weights:
            return
        if entry.default is not None and bool((weights[names[0]] == entry.default).all()):
            return
        like = weights[direction.parameter("weight_ih")]
        rows = len(like)
        parts = [weights.get(name, like.new_zeros(rows)) for name in names]
        axis = -1 if entry.join == "rows" else 0
        if entry.join == "rows":
            joined = torch.stack(parts)
        elif entry.join == "added":
            joined = torch.zeros_like(parts[0])
        elif entry.join == "sum":
            if self.cell.name == "GRU" and parts[1][2 * rows // 3 :].any():
                raise ValueError(f"{dialect} has no bias inside the reset of its candidate")
            joined = parts[0] + parts[1]
        else:
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            if entry.names[0].removeprefix("weight_") in dict(self.cell.weights):
                joined = joined.flatten()
        if entry.cut and self.order is not None:
            given, wanted = self.order
            joined = _permuted(joined, wanted, given, axis)
        shares = entry.gates or (1,) * len(keys)
        unit = joined.shape[axis] // sum(shares)
        for key, piece in zip(keys, joined.split([unit * n for n in shares], axis), strict=True):
            value = piece.T if entry.transposed else piece
            if entry.layers:
                value = value.unsqueeze(0)
                value = torch.cat([found[key], value]) if key in found else value
            found[key] = value


def _shape(layer: RecurrentLayer | RecurrentCell) -> tuple[int, int, int]:
    if isinstance(layer, RecurrentCell):
        return 1, 1, 0
    return layer.num_layers, 1 + layer.bidirectional, layer.proj_size


def _permuted(tensor: Tensor, given: str, wanted: str, dim: int) -> Tensor:
    gates = tensor.movedim(dim, 0).unflatten(0, (len(given), -1))
    return gates[[given.index(gate) for gate in wanted]].flatten(0, 1).movedim(0, dim)


def build(
    dialect: str, kind: type[RecurrentLayer] | Cell, weights: Weights, **arguments: Any
) -> RecurrentLayer:
    """The layer with these weights; ValueError for mismatched sizes."""
    ih, hr = weights["weight_ih_l0"], weights.get("weight_hr_l0")
    cls: Any = kind
    if isinstance(kind, Cell):
        cls, arguments["cell"] = RecurrentLayer, kind
    gates = kind.gates if isinstance(kind, Cell) else kind.cell.gates
    if hr is not None:
        arguments["proj_size"] = len(hr)
    layers = [key for key in weights if key.startswith("weight_hh") and not key.endswith("reverse")]
    try:
        layer = cls(
            ih.shape[1],
            len(ih) // gates,
            num_layers=len(layers),
            bias="bias_ih_l0" in weights,
            bidirectional="weight_ih_l0_reverse" in weights,
            dtype=ih.dtype,
            device=ih.device,
            **arguments,
        )
        layer.load_state_dict(weights)
    except (RuntimeError, IndexError, ValueError) as error:
        raise ValueError(f"{dialect}: {' '.join(str(error).split())}") from None
    return layer
