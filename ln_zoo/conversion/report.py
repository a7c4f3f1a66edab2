"""Reports of conversions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from ln_zoo.conversion.layers import OURS, Selection, module_path, sites
from ln_zoo.layers import RecurrentCell, RecurrentLayer
from ln_zoo.norms import Identity, Norm
from ln_zoo.utils.tables import aligned

#: Name of the model itself, if it is a layer.
_ROOT = "(the model)"


@dataclass(frozen=True)
class Converted:
    """A converted layer."""

    name: str  #: its name in the model, "" for the model itself
    before: str  #: its class before, such as "torch.nn.LSTM"
    after: str  #: its class and norm now
    #: Distance of its output from the plain layer's on the calibration batch, before calibration:
    #: root mean square of the difference, divided by that of the plain output; None without
    #: calibration. Final states are ignored.
    distance_before: float | None = None
    distance: float | None = None  #: the same after calibration


@dataclass(frozen=True)
class Refused:
    """A layer that was not converted: name, class, and the reason with a remedy if there is one."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Adopted:
    """A layer that `adopt_` replaced."""

    name: str  #: its name in the model, "" for the model itself
    before: str  #: path of its class
    after: str  #: its class now
    dialect: str  #: dialect of its weights
    #: Largest relative difference in float64; None for torch's layers, which are not compared.
    error: float | None
    #: Measured speedup of a forward pass in evaluation mode, on 8 random sequences of 20 steps
    #: (cells: one step).
    speedup: float


@dataclass(frozen=True)
class Adoption:
    """Report of `adopt_`; ``print`` shows a table."""

    layers: tuple[Adopted, ...]  #: replaced layers, in the order of the model's modules
    refused: tuple[Refused, ...] = ()  #: layers that match the patterns but were not replaced
    #: Parameters of replaced layers, by name; create the optimizer anew.
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
    """Report of `normalize_` or `denormalize_`; ``print`` shows a table.

    Add the new parameters to an existing optimizer:
    ``optimizer.add_param_group({"params": report.new_parameters.values()})``.
    """

    layers: tuple[Converted, ...]  #: converted layers, in the order of the model's modules
    refused: tuple[Refused, ...] = ()  #: layers that match the patterns but were not converted
    #: New gains, shifts and scales, by name.
    new_parameters: dict[str, nn.Parameter] = field(default_factory=dict, repr=False)
    #: Distance of the model's outputs from the plain model's; see `Converted`.
    distance_before: float | None = None
    distance: float | None = None  #: the same after calibration

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
    """A layer's class and norms."""
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
    """The different norms of a layer; `Identity` only if it is the only one."""
    names = dict.fromkeys(short_name(site.norm) for site in sites(layer).values())
    acting = [name for name in names if name != short_name(Identity())]
    return acting or list(names)


def short_name(norm: Norm) -> str:
    """A norm's class and non-default fields."""
    if not dataclasses.is_dataclass(norm):
        return type(norm).__name__
    fields = {f.name: getattr(norm, f.name) for f in dataclasses.fields(norm) if f.repr}
    defaults = {f.name: f.default for f in dataclasses.fields(norm)}
    chosen = [f"{name}={value!r}" for name, value in fields.items() if value != defaults[name]]
    return f"{type(norm).__name__}({', '.join(chosen)})"


def refusals(selection: Selection) -> tuple[Refused, ...]:
    """The refused layers of a selection, in the order of the model's modules."""
    return tuple(
        Refused(name, module_path(layer).rpartition(".")[2], selection.refused[name])
        for name, layer in selection.layers.items()
        if name in selection.refused
    )


def nothing_done(what: str, selection: Selection) -> str:
    """Error message if no layer can be converted."""
    refused = refusals(selection)
    shown = [f"{r.name or 'the model'} ({r.kind}): {r.reason}" for r in refused[:3]]
    more = [f"and {len(refused) - 3} more"] if len(refused) > 3 else []
    why = "; ".join([*shown, *more]) or "no layer matches the patterns"
    return f"no layer of this {type(selection.model).__name__} can {what}: {why}"


def _table(rows: Sequence[Sequence[str]], refused: Sequence[Refused]) -> str:
    lines = aligned(rows)
    lines += [f"not converted: {r.name or _ROOT} ({r.kind}): {r.reason}" for r in refused]
    return "\n".join(lines)


def _digits(*distances: float | None) -> tuple[str, ...]:
    return tuple("" if distance is None else f"{distance:.3g}" for distance in distances)
