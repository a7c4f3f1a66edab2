"""What a conversion did, for programs and for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from ln_zoo.conversion.replace import OURS, norms_of
from ln_zoo.layers import RecurrentCell, RecurrentLayer
from ln_zoo.norms import Identity, Norm

#: What the model itself is called where it is a layer.
_ROOT = "(the model)"


@dataclass(frozen=True)
class Converted:
    """A layer that was converted.

    Attributes:
        name: its name in the model, ``""`` for the model itself.
        before: what it was, such as ``"torch.nn.LSTM"``.
        after: what it is now.
        distance_before: how far its output is from the plain layer's on the calibration batch,
            before calibration: root mean square of the difference, divided by that of the plain
            output; ``None`` without calibration. The states that a recurrent layer ends in do not
            count.
        distance: the same after calibration.
    """

    name: str
    before: str
    after: str
    distance_before: float | None = None
    distance: float | None = None


@dataclass(frozen=True)
class Refused:
    """A layer that stays as it is.

    Attributes:
        name: its name in the model.
        kind: its class.
        reason: why it cannot be converted, and what to do where there is something.
    """

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Adopted:
    """A layer that `adopt_` replaced.

    Attributes:
        name: its name in the model, ``""`` for the model itself.
        before: the path of its class.
        after: what it is now.
        dialect: the dialect that reads and writes its weights.
        error: largest difference in float64, relative to the largest value; None for torch's own
            layers, which are not compared.
        speedup: how many times faster a forward pass of 20 steps of 8 random sequences is (a cell:
            one step), in evaluation mode, here and now.
    """

    name: str
    before: str
    after: str
    dialect: str
    error: float | None
    speedup: float


@dataclass(frozen=True)
class Adoption:
    """What `adopt_` did; printed, it is a table.

    Attributes:
        layers: the layers that were replaced, in the order of the model's modules.
        refused: those that match the patterns and stay as they are.
        new_parameters: the parameters of replaced layers, by name. An optimizer made before has
            the former ones: make it anew.
    """

    layers: tuple[Adopted, ...]
    refused: tuple[Refused, ...] = ()
    new_parameters: dict[str, nn.Parameter] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "was", "is", "speed")]
        rows += [
            (layer.name or _ROOT, layer.before, layer.after, f"{layer.speedup:.1f}x")
            for layer in self.layers
        ]
        return _table(rows, self.refused)


@dataclass(frozen=True)
class Conversion:
    """What `normalize_` or `denormalize_` did; printed, it is a table.

    Attributes:
        layers: the layers that were converted, in the order of the model's modules.
        refused: those that match the patterns and stay as they are.
        new_parameters: gains, shifts and scales that the model did not have, by name. An optimizer
            made before does not know of them:
            ``optimizer.add_param_group({"params": report.new_parameters.values()})``.
        distance_before: how far the model's outputs are from the plain model's on the calibration
            batch, before calibration: root mean square of the difference, divided by that of the
            plain outputs; ``None`` without calibration.
        distance: the same after calibration.
    """

    layers: tuple[Converted, ...]
    refused: tuple[Refused, ...] = ()
    new_parameters: dict[str, nn.Parameter] = field(default_factory=dict, repr=False)
    distance_before: float | None = None
    distance: float | None = None

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "was", "is")]
        rows += [(layer.name or _ROOT, layer.before, layer.after) for layer in self.layers]
        if self.distance is not None:
            rows.append(("outputs of the model", "", ""))
            numbers: list[tuple[str, ...]] = [("distance", "calibrated")]
            numbers += [_digits(layer.distance_before, layer.distance) for layer in self.layers]
            numbers.append(_digits(self.distance_before, self.distance))
            rows = [(*row, *more) for row, more in zip(rows, numbers, strict=True)]
        return _table(rows, self.refused)


def describe(layer: nn.Module) -> str:
    """A layer's class and norms in a few words.

    Example:
        >>> describe(nn.LSTM(2, 3))
        'torch.nn.LSTM'
    """
    cls = type(layer).__name__
    if type(layer) in OURS:
        return f"torch.nn.{cls}"
    if isinstance(layer, RecurrentLayer | RecurrentCell) and cls in (
        "RecurrentLayer",
        "RecurrentCell",
    ):
        cls += f" ({layer.cell.name})"
    return ", ".join([f"ln_zoo.{cls}", *norm_names(layer)])


def norm_names(layer: nn.Module) -> list[str]:
    """The norms of a layer of ours, each once; `Identity` only if it is the only one."""
    names = dict.fromkeys(short_name(norm) for norm in norms_of(layer))
    acting = [name for name in names if name != short_name(Identity())]
    return acting or list(names)


def short_name(norm: Norm) -> str:
    """A norm with the fields that differ from their defaults."""
    if not dataclasses.is_dataclass(norm):
        return type(norm).__name__
    fields = {f.name: getattr(norm, f.name) for f in dataclasses.fields(norm) if f.repr}
    defaults = {f.name: f.default for f in dataclasses.fields(norm)}
    chosen = [f"{name}={value!r}" for name, value in fields.items() if value != defaults[name]]
    return f"{type(norm).__name__}({', '.join(chosen)})"


def nothing_done(what: str, model: nn.Module, refused: Sequence[Refused]) -> str:
    """The message if no layer can be converted."""
    shown = [f"{r.name or 'the model'} ({r.kind}): {r.reason}" for r in refused[:3]]
    more = [f"and {len(refused) - 3} more"] if len(refused) > 3 else []
    why = "; ".join([*shown, *more]) or "the patterns leave none"
    return f"no layer of this {type(model).__name__} can {what}: {why}"


def _table(rows: Sequence[Sequence[str]], refused: Sequence[Refused]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines += [f"not converted: {r.name or _ROOT} ({r.kind}): {r.reason}" for r in refused]
    return "\n".join(lines)


def _digits(*distances: float | None) -> tuple[str, ...]:
    return tuple("" if distance is None else f"{distance:.3g}" for distance in distances)
