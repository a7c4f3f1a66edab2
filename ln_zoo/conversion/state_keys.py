"""State dicts of recurrent layers as tables, read and written from the same rows.

A `Form` is one layer of another library: our cell, and an `Entry` for each of its keys. An entry
relates tensors of theirs to parameters of ours: pieces along the gates on one side, columns, rows
or a sum on the other, with a transpose and a permutation of gates between them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ln_zoo.conversion.replace import sites
from ln_zoo.layers import RecurrentCell, RecurrentLayer
from ln_zoo.norms import LayerNorm, Norm
from ln_zoo.ops import Cell

#: Parameters of a layer by our names.
Weights = dict[str, Tensor]


class StateKeys:
    """The keys of a state dict under a prefix, and which of them were read.

    Args:
        dialect: for messages.
        state: tensors or arrays by name.
        prefix: leads the keys of the layer; others are ignored.

    Raises:
        ValueError: if no key begins with the prefix.
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
            raise ValueError(f"{dialect}: no key begins with {prefix!r}; there are {shown}")

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def shorten(self, names: Sequence[str]) -> None:
        """Cut Keras' scopes and suffixes: ``lstm/lstm_cell/kernel:0`` becomes ``kernel``."""
        for key in list(self.values):
            plain = key.rpartition(":")[0] or key
            for name in sorted(names, key=len, reverse=True):
                if plain == name or plain.endswith(f"/{name}"):
                    self.values[name] = self.values.pop(key)
                    break

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a key's tensor, which stays unread."""
        return tuple(self._tensor(key).shape)

    def matrix_shape(self, key: str) -> tuple[int, int]:
        """The shape of a key's matrix.

        Raises:
            ValueError: if it is no matrix.
        """
        shape = self.shape(key)
        if len(shape) != 2:
            raise ValueError(f"{self.dialect}: {key!r} should be a matrix, got shape {shape}")
        return shape[0], shape[1]

    def read(self, key: str) -> Tensor:
        """The tensor of a key.

        Raises:
            ValueError: if the key is missing, or its value is no floating-point tensor or empty.
        """
        tensor = self._tensor(key)
        self._read.add(key)
        return tensor

    def _tensor(self, key: str) -> Tensor:
        if key not in self.values:
            left = [name for name in self.values if name not in self._read]
            near = difflib.get_close_matches(key, left, 1)
            hint = f"; is it {near[0]!r}?" if near else f"; left are {sorted(left)[:6]}"
            raise ValueError(f"{self.dialect}: the state dict has no {key!r}{hint}")
        try:
            tensor = torch.as_tensor(self.values[key]).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{self.dialect}: {key!r} is not a tensor: {error}") from None
        if not tensor.is_floating_point():
            raise ValueError(
                f"{self.dialect}: {key!r} is {tensor.dtype}; quantised weights are not read"
            )
        if not tensor.numel():
            raise ValueError(f"{self.dialect}: {key!r} is empty, of shape {tuple(tensor.shape)}")
        return tensor

    def finish(self) -> None:
        """Check that every key was read.

        Raises:
            ValueError: otherwise.
        """
        left = sorted(set(self.values) - self._read)
        if left:
            raise ValueError(
                f"{self.dialect}: the state dict has keys of other layers, "
                f"{', '.join(map(repr, left[:4]))}: name the layer by prefix=..."
            )


class Direction(NamedTuple):
    """One direction of one layer.

    Attributes:
        layer: its number.
        suffix: the end of our parameters' names, ``"l0"`` or ``"l0_reverse"``.
        lead: the start of their keys.
    """

    layer: int
    suffix: str
    lead: str

    def theirs(self, key: str) -> str:
        """A key of theirs; it may name the layer as ``{k}``, ``{even}`` (2k) or ``{odd}``."""
        k = self.layer
        numbers = {"k": k, "even": 2 * k, "odd": 2 * k + 1, "suffix": self.suffix}
        return self.lead + key.format(**numbers)

    def ours(self, name: str) -> str:
        """A parameter of ours: ``"weight_ih"``, or ``"input.gain"`` for a site's."""
        return f"sites.{self.suffix}.{name}" if "." in name else f"{name}_{self.suffix}"


@dataclass(frozen=True)
class Entry:
    """How keys of theirs and parameters of ours correspond.

    Args:
        theirs: a key, or several that are concatenated along the gates.
        ours: a parameter, or several, which are joined.
        join: how ours are joined: as columns of a matrix (``"columns"``), as rows of a tensor with
            the gates last (``"rows"``), or as a sum, of which the first gets all (``"sum"``).
            ``"added"`` adds theirs to ours when reading and writes zeros.
        transposed: whether each of theirs has the gates last.
        gates: how many gates each of theirs has, for unequal pieces.
        cut: whether the gates are permuted; False for what has no gates.
        optional: whether both sides may lack it.
        layers: whether theirs is one tensor with a row for each layer.
        default: the value of ours where theirs is missing; it is not written either.
    """

    theirs: str | tuple[str, ...]
    ours: str | tuple[str, ...]
    join: Literal["columns", "rows", "sum", "added"] = "columns"
    transposed: bool = False
    gates: tuple[int, ...] = ()
    cut: bool = True
    optional: bool = False
    layers: bool = False
    default: float | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Theirs as a tuple."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    @property
    def names(self) -> tuple[str, ...]:
        """Ours as a tuple."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours


def kernel(theirs: str, ours: str | tuple[str, ...]) -> Entry:
    """A weight with the gates last, as TensorFlow has it."""
    return Entry(theirs, ours, transposed=True)


def affine(theirs: str, site: str, bias: str) -> tuple[Entry, Entry]:
    """Gain and shift of a `torch.nn.LayerNorm` over gates; our shift is the layer's bias."""
    return Entry(f"{theirs}.weight", f"{site}.gain"), Entry(f"{theirs}.bias", bias)


BIASES = ("bias_ih", "bias_hh")


@dataclass(frozen=True)
class Form:
    """One kind of layer of a library.

    Args:
        kind: our layer's class, or the cell of a `RecurrentLayer`.
        entries: its keys.
        norm: the norm at the normalised places, with the library's eps; None: there is no norm.
        normalized: the roles of these places; default: all of the cell.
        order: their gates and ours, such as ``("igfo", "ifgo")``, where they differ.
        leads: how the keys of a direction begin, for each direction; alternatives, the preferred
            first. ``{k}`` is the layer's number: without it there is one layer.
        when: whether this form is the one in a state dict; default: if its first key is there.
        fixed_eps: whether the library has no argument for eps.
        constants: buffers that carry no information, as functions of the number of units.
    """

    kind: type[RecurrentLayer] | Cell
    entries: tuple[Entry, ...]
    norm: LayerNorm | None = None
    normalized: tuple[str, ...] | None = None
    order: tuple[str, str] | None = None
    leads: tuple[tuple[str, ...], ...] = (("",),)
    when: Callable[[StateKeys], bool] | None = None
    fixed_eps: bool = False
    constants: Mapping[str, Callable[[int], Tensor]] = field(default_factory=dict)

    @property
    def cell(self) -> Cell:
        """The cell of our layer."""
        return self.kind if isinstance(self.kind, Cell) else self.kind.cell

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the normalised places."""
        if self.norm is None:
            return ()
        return self.cell.roles if self.normalized is None else self.normalized

    # Reading

    def matches(self, keys: StateKeys) -> bool:
        """Whether a state dict has this form."""
        if self.when is not None:
            return self.when(keys)
        return self._directions_of(keys) is not None

    def _directions_of(self, keys: StateKeys) -> list[Direction] | None:
        """All directions in a state dict, in our order; None if there is none."""
        marker = self.entries[0].keys[0]
        for leads in self.leads:
            found: list[Direction] = []
            several = "{k}" in leads[0] or "{" in marker
            while several or not found:
                k = len(found) // len(leads)
                layer = [
                    Direction(k, f"l{k}{'_reverse' if d else ''}", lead.format(k=k))
                    for d, lead in enumerate(leads)
                ]
                if not all(d.theirs(marker) in keys for d in layer):
                    break
                found += layer
            if found:
                return found
        return None

    def read(
        self, keys: StateKeys, eps: float | None, options: dict[str, Any]
    ) -> tuple[RecurrentLayer, list[str]]:
        """The layer with these weights, and the names of parameters that theirs does not have.

        Raises:
            ValueError: for missing keys, and sizes that do not fit.
        """
        first = self.leads[-1][0].format(k=0)
        directions = self._directions_of(keys) or [Direction(0, "l0", first)]
        weights: Weights = {}
        surplus: list[str] = []
        for direction in directions:
            for entry in self.entries:
                try:
                    weights |= self._read_entry(entry, keys, direction, weights)
                except (RuntimeError, IndexError):
                    theirs = [direction.theirs(key) for key in entry.keys]
                    sizes = ", ".join(f"{key!r} {keys.shape(key)}" for key in theirs)
                    raise ValueError(
                        f"{keys.dialect}: sizes do not fit each other: {sizes}"
                    ) from None
                if entry.default is not None and direction.theirs(entry.keys[0]) not in keys:
                    surplus += map(direction.ours, entry.names)
                if entry.join == "sum":
                    surplus.append(direction.ours(entry.names[1]))
            for key in map(direction.theirs, self.constants):
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
        theirs = [direction.theirs(key) for key in entry.keys]
        ours = [direction.ours(name) for name in entry.names]
        if theirs[0] not in keys and entry.default is not None:
            like = weights[direction.ours("weight_ih")]
            return {name: like.new_full((len(like),), entry.default) for name in ours}
        if theirs[0] not in keys and entry.optional:
            return {}
        pieces = [keys.read(key) for key in theirs]
        if entry.layers:
            pieces = [piece[direction.layer] for piece in pieces]
        axis = -1 if entry.join == "rows" else 0
        gates = self.cell.gates
        for key, piece in zip(theirs, pieces, strict=True):
            dim = piece.dim() - 1 if entry.transposed or axis else 0
            if entry.cut and (not piece.dim() or (len(pieces) == 1 and piece.shape[dim] % gates)):
                raise ValueError(
                    f"{keys.dialect}: {key!r} should hold {gates} gates along dimension "
                    f"{max(dim, 0)}, got shape {tuple(piece.shape)}"
                )
        whole = torch.cat([p.t() if entry.transposed else p for p in pieces], axis)
        if entry.cut and self.order is not None:
            whole = _permuted(whole, *self.order, axis)
        if entry.join == "added":
            return {ours[0]: weights[ours[0]] + whole}
        if entry.join == "sum":
            return {ours[0]: whole, ours[1]: torch.zeros_like(whole)}
        if entry.join == "rows":
            if whole.dim() != 2 or len(whole) != len(ours):
                raise ValueError(
                    f"{keys.dialect}: {theirs[0]!r} should be ({len(ours)}, gates), got "
                    f"{tuple(whole.shape)}"
                )
            return dict(zip(ours, whole, strict=True))
        if len(ours) == 1:
            return {ours[0]: self._shaped(entry.names[0], whole)}
        hidden = len(whole) // gates
        if whole.dim() != 2 or whole.shape[1] <= hidden:
            raise ValueError(
                f"{keys.dialect}: the weight should be of {gates} gates over states and inputs, "
                f"got {tuple(whole.shape)} as outputs and inputs"
            )
        rest = whole.shape[1] - hidden
        widths = [hidden if name == "weight_hh" else rest for name in entry.names]
        return dict(zip(ours, whole.split(widths, 1), strict=True))

    def _shaped(self, name: str, whole: Tensor) -> Tensor:
        """The cell's own weights are (rows, H); theirs are flat."""
        rows = dict(self.cell.weights).get(name.removeprefix("weight_"))
        return whole if rows is None else whole.reshape(rows, -1)

    # Writing

    def unwritable(self, layer: RecurrentLayer | RecurrentCell) -> str | None:
        """Why a layer or cell has another form, or None."""
        if layer.cell.name != self.cell.name:
            return layer.cell.name
        layers, directions, projection = _shape(layer)
        leads = [leads for leads in self.leads if len(leads) == directions]
        if not leads:
            return "second direction"
        marker = self.entries[0].keys[0]
        if layers > 1 and not any("{" in leads[0] + marker for leads in leads):
            return "several layers: write each layer apart"
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
                return f"{norm} at {name}: it has {wanted} there"
            if self.fixed_eps and norm.eps != self.norm.eps:
                return f"eps of {norm.eps}: its eps is {self.norm.eps}"
        return None

    def write(self, dialect: str, layer: RecurrentLayer | RecurrentCell) -> Weights:
        """The state dict of a layer or cell.

        Raises:
            ValueError: if biases cannot be summed.
        """
        weights = {name: value.detach() for name, value in layer.state_dict().items()}
        if isinstance(layer, RecurrentCell):
            one = Direction(0, "l0", "")
            weights = {one.ours(name.removeprefix("sites.")): v for name, v in weights.items()}
        found: Weights = {}
        for direction in self._directions_for(layer):
            for entry in self.entries:
                self._write_entry(dialect, entry, direction, weights, found)
            for key, constant in self.constants.items():
                like = weights[direction.ours("weight_ih")]
                found[direction.theirs(key)] = constant(layer.hidden_size).to(like)
        return found

    def _directions_for(self, layer: RecurrentLayer | RecurrentCell) -> Iterator[Direction]:
        layers, directions, _ = _shape(layer)
        marker = self.entries[0].keys[0]
        leads = next(
            leads
            for leads in self.leads
            if len(leads) == directions and (layers == 1 or "{" in leads[0] + marker)
        )
        for k in range(layers):
            for d, lead in enumerate(leads):
                yield Direction(k, f"l{k}{'_reverse' if d else ''}", lead.format(k=k))

    def _write_entry(
        self, dialect: str, entry: Entry, direction: Direction, weights: Weights, found: Weights
    ) -> None:
        theirs = [direction.theirs(key) for key in entry.keys]
        ours = [direction.ours(name) for name in entry.names]
        if entry.optional and entry.join != "added" and ours[0] not in weights:
            return
        if entry.default is not None and bool((weights[ours[0]] == entry.default).all()):
            return
        like = weights[direction.ours("weight_ih")]
        rows = len(like)
        parts = [weights.get(name, like.new_zeros(rows)) for name in ours]
        axis = -1 if entry.join == "rows" else 0
        if entry.join == "rows":
            whole = torch.stack(parts)
        elif entry.join == "added":
            whole = torch.zeros_like(parts[0])
        elif entry.join == "sum":
            if self.cell.name == "GRU" and parts[1][2 * rows // 3 :].any():
                raise ValueError(f"{dialect} has no bias inside the reset of its candidate")
            whole = parts[0] + parts[1]
        else:
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            if entry.names[0].removeprefix("weight_") in dict(self.cell.weights):
                whole = whole.flatten()
        if entry.cut and self.order is not None:
            given, wanted = self.order
            whole = _permuted(whole, wanted, given, axis)
        shares = entry.gates or (1,) * len(theirs)
        unit = whole.shape[axis] // sum(shares)
        for key, piece in zip(theirs, whole.split([unit * n for n in shares], axis), strict=True):
            value = piece.T if entry.transposed else piece
            if entry.layers:
                value = value.unsqueeze(0)
                value = torch.cat([found[key], value]) if key in found else value
            found[key] = value


def _shape(layer: RecurrentLayer | RecurrentCell) -> tuple[int, int, int]:
    """Layers, directions and the size of the projection."""
    if isinstance(layer, RecurrentCell):
        return 1, 1, 0
    return layer.num_layers, 1 + layer.bidirectional, layer.proj_size


def _permuted(tensor: Tensor, given: str, wanted: str, dim: int) -> Tensor:
    parts = dict(zip(given, tensor.chunk(len(given), dim), strict=True))
    return torch.cat([parts[gate] for gate in wanted], dim)


def build(
    dialect: str, kind: type[RecurrentLayer] | Cell, weights: Weights, **arguments: Any
) -> RecurrentLayer:
    """The layer with these weights.

    Raises:
        ValueError: if their sizes do not fit.
    """
    ih, hr = weights["weight_ih_l0"], weights.get("weight_hr_l0")
    for name in ("weight_ih_l0", "weight_hh_l0", "weight_hr_l0"):
        shape = tuple(weights[name].shape) if name in weights else (1, 1)
        if len(shape) != 2:
            raise ValueError(f"{dialect}: our {name} should be a matrix, got shape {shape}")
    cls: Any = kind
    if isinstance(kind, Cell):
        cls, arguments["cell"] = RecurrentLayer, kind
    gates = kind.gates if isinstance(kind, Cell) else kind.cell.gates
    if hr is not None:
        arguments["proj_size"] = len(hr)
        if len(hr) >= len(ih) // gates:
            raise ValueError(
                f"{dialect}: sizes do not fit each other: a projection of {len(ih) // gates} units "
                f"to {len(hr)}"
            )
    layers = [key for key in weights if key.startswith("weight_hh") and not key.endswith("reverse")]
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
    try:
        layer.load_state_dict(weights)
    except RuntimeError as error:
        lines = " ".join(str(error).split("\n", 1)[-1].split())
        raise ValueError(f"{dialect}: sizes do not fit each other: {lines}") from None
    return layer
