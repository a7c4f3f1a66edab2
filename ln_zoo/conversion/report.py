"""What a conversion did, for programs and for people."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

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
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines += [
            f"not converted: {layer.name or _ROOT} ({layer.kind}): {layer.reason}"
            for layer in self.refused
        ]
        return "\n".join(lines)


def _digits(*distances: float | None) -> tuple[str, ...]:
    return tuple("" if distance is None else f"{distance:.3g}" for distance in distances)
