"""Turn plain layers of a model into normalised layers, and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ln_zoo.conversion import calibrate as calibration
from ln_zoo.conversion.layers import (
    OURS,
    TORCHS,
    Selection,
    acts,
    become,
    has_peepholes,
    new_parameters,
    sites,
    twin,
)
from ln_zoo.conversion.report import (
    Conversion,
    Converted,
    describe,
    norm_names,
    nothing_done,
    refusals,
    short_name,
)
from ln_zoo.layers import RecurrentLayer
from ln_zoo.norms import Norm
from ln_zoo.norms.base import check_norm

#: torch's normalisation layers.
_NORMALIZERS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


def normalize_(
    model: nn.Module,
    norm: Norm,
    *,
    include: str | Sequence[str] | None = "*",
    exclude: str | Sequence[str] = (),
    calibrate: Any = None,
) -> Conversion:
    """Turn plain layers of a model into normalised layers, in place; weights are kept.

    Every `torch.nn.LSTM`, `GRU`, `RNN`, their cells, `Linear` and `Conv2d` whose name matches
    becomes the `ln_zoo` layer of the same name. Module objects and parameters stay the same, so
    references, hooks and optimizers stay valid; add `Conversion.new_parameters` to an optimizer.
    Layers of `ln_zoo` without normalisation are converted too.

    Normalising changes what a layer computes (with `WeightNorm`, only what it learns). Given a
    batch, gains, shifts and biases are set to keep outputs as close as possible: by least squares,
    layer by layer in the order of the forward pass, then in recurrent layers by 30 steps of
    gradient descent, in evaluation mode. Running statistics of `BatchNorm` become those of the
    batch. The report has the remaining distance.

    `Conversion.refused` has layers that cannot be converted, with reasons: normalised already (by
    their norm, or by torch's layer after them in a `torch.nn.Sequential`); tied, parametrised or
    quantised weights; subclasses; layers whose weights `torch.nn.MultiheadAttention` or
    `TransformerEncoderLayer` read. A Linear inside a recurrent layer that normalises is converted
    with a warning.

    Args:
        model: a module, or a single layer.
        norm: the normalisation, shared by all layers.
        include: shell patterns of layer names (``"encoder.*"``), or of names of modules that
            contain layers; None: recurrent layers only.
        exclude: patterns of layers to skip; usually the last layer, whose outputs are logits.
        calibrate: a batch of inputs: a tuple or list is unpacked, ``model(*batch)``; a function is
            called with the model, ``lambda model: model(**batch)``; anything else is the only
            argument. Default: no calibration.

    Returns:
        The report; ``print`` shows a table.

    Raises:
        TypeError: if ``model`` is not a module, or ``norm`` not a norm.
        ValueError: if no layer can be converted, a pattern matches no layer, or the model is
            wrapped for several devices. The model is then unchanged, as after any error.

    Example:
        >>> from ln_zoo.norms import LayerNorm
        >>> model = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 3))
        >>> report = normalize_(model, LayerNorm(), exclude="2", calibrate=torch.randn(100, 5))
        >>> print(report.layers[0].before, "->", report.layers[0].after)
        torch.nn.Linear -> ln_zoo.Linear, LayerNorm()
        >>> report.distance < report.distance_before, list(report.new_parameters)
        (True, ['0.site.gain'])
    """
    return normalize_selected(Selection.plain(model, include, exclude), norm, calibrate)


def normalize_selected(selection: Selection, norm: Norm, calibrate: Any = None) -> Conversion:
    """`normalize_` for layers that are chosen already."""
    check_norm(norm)
    model = selection.model
    followers = _followers(model)
    for name in selection.layers:
        selection.refuse(name, _why_not(selection, name, norm, followers))
    run = None if calibrate is None else calibration.runner(calibrate)
    outputs: Any = None
    plain: dict[str, list[calibration.Call]] = {}
    if run is not None:
        outputs, plain = calibration.record(model, selection.accepted, run)
    made = _twins(selection, norm, plain)
    if not made:
        raise ValueError(nothing_done("be normalised", selection))
    _warn_if_normalised_twice(selection)
    layers = selection.accepted
    undo = _undo(layers.values())
    words = {name: describe(layer) for name, layer in layers.items()}
    had = set(model.parameters())
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    try:
        for name, layer in layers.items():
            become(layer, made[name])
        if run is not None:
            first, last = _calibrate(model, layers, plain, outputs, run)
    except BaseException:
        undo()
        raise
    return Conversion(
        tuple(
            Converted(name, before, describe(layers[name]), first.get(name), last.get(name))
            for name, before in words.items()
        ),
        refusals(selection),
        new_parameters(model, had),
        first.get(_ALL),
        last.get(_ALL),
    )


def denormalize_(
    model: nn.Module, *, include: str | Sequence[str] = "*", exclude: str | Sequence[str] = ()
) -> Conversion:
    """Turn our layers into torch's, in place, if torch's compute the same.

    This holds without normalisation, and for norms that act on weights only (`WeightNorm`): the
    effective weights become the weights. Parameters stay the same objects. `Conversion.refused` has
    layers that cannot be converted, with reasons: norms of summed inputs, peepholes, clipped
    derivatives, recurrent weights in blocks; and as for `normalize_`. Arguments, result and errors
    as for `normalize_`.

    Example:
        >>> from ln_zoo.layers import LSTM
        >>> from ln_zoo.norms import WeightNorm
        >>> model = nn.ModuleDict({"rnn": LSTM(3, 5, norm=WeightNorm())})
        >>> print(denormalize_(model))
        layer  was                        is
        rnn    ln_zoo.LSTM, WeightNorm()  torch.nn.LSTM
    """
    selection = Selection.plain(model, include, exclude)
    for name in selection.layers:
        selection.refuse(name, _why_not_plain(selection, name))
    layers = selection.accepted
    if not layers:
        raise ValueError(nothing_done("become plain", selection))
    words = {name: describe(layer) for name, layer in layers.items()}
    with torch.no_grad():
        effective = [pair for layer in layers.values() for pair in _effective(layer)]
        for weight, value in effective:
            weight.copy_(value)
    for layer in layers.values():
        become(layer, twin(layer, TORCHS[type(layer)]))
    return Conversion(
        tuple(Converted(name, words[name], describe(layer)) for name, layer in layers.items()),
        refusals(selection),
    )


#: Key of the model's outputs among names of layers.
_ALL = "outputs"


def _undo(layers: Collection[nn.Module]) -> Callable[[], None]:
    """A function that restores layers, and the biases that calibration changes."""
    states = [(layer, type(layer), dict(layer.__dict__)) for layer in layers]
    biases = [
        (parameter, parameter.detach().clone())
        for layer in layers
        for kind, parameter in layer._parameters.items()
        if kind.startswith("bias") and parameter is not None
    ]

    def undo() -> None:
        for layer, cls, state in states:
            layer.__class__ = cls
            layer.__dict__.clear()
            layer.__dict__.update(state)
        with torch.no_grad():
            for parameter, value in biases:
                parameter.copy_(value)

    return undo


def _why_not(
    selection: Selection, name: str, norm: Norm, followers: dict[nn.Module, str]
) -> str | None:
    layer = selection.layers[name]
    if reason := selection.why_not(name) or _not_by(norm, layer):
        return reason
    if other := selection.tied(name):
        return f"its weights are tied to {other}"
    if layer in followers:
        return f"its output is normalised already, by {followers[layer]} after it"
    return None


def _why_not_plain(selection: Selection, name: str) -> str | None:
    layer = selection.layers[name]
    if reason := selection.why_not(name) or _not_plain(layer):
        return reason
    if acts(layer) and (other := selection.tied(name)):
        return f"its weights are tied to {other}, which would change with them"
    return None


def _twins(
    selection: Selection, norm: Norm, calls: dict[str, list[calibration.Call]]
) -> dict[str, nn.Module]:
    """Normalised layers with the parameters of the accepted ones; refuses what the norm does."""
    made: dict[str, nn.Module] = {}
    for name, layer in selection.accepted.items():
        cls = OURS.get(type(layer), type(layer))
        try:
            made[name] = twin(layer, cls, norm=norm, **_positions(layer, calls.get(name, ())))
        except ValueError as error:
            selection.refuse(name, str(error))
    return made


def _warn_if_normalised_twice(selection: Selection) -> None:
    for name in selection.accepted:
        parent = selection.recurrent_around(name)
        if parent is not None and any(isinstance(part, _NORMALIZERS) for part in parent.modules()):
            warnings.warn(
                f"{name} is part of {type(parent).__name__}, which normalises, so it is normalised "
                "twice: exclude it, or use ln_zoo.adopt_",
                stacklevel=4,
            )


def _calibrate(
    model: nn.Module,
    layers: dict[str, nn.Module],
    plain: dict[str, list[calibration.Call]],
    outputs: Any,
    run: Callable[[nn.Module], Any],
) -> tuple[dict[str, float], dict[str, float]]:
    """Calibrate layers; distances of their outputs and of the model's, before and after."""

    def distances() -> dict[str, float]:
        now, calls = calibration.record(model, layers, run)
        found = {}
        for name, layer in layers.items():
            pair = (
                [calibration.shown(layer, call.output) for call in each[name]]
                for each in (calls, plain)
            )
            found[name] = calibration.distance(*pair)
        pair_of_model = (calibration.shown(model, output) for output in (now, outputs))
        return found | {_ALL: calibration.distance(*pair_of_model)}

    before = distances()
    calibration.calibrate(model, layers, plain, run)
    return before, distances()


def _not_by(norm: Norm, layer: nn.Module) -> str | None:
    if type(layer) in TORCHS and acts(layer):
        return f"it is normalised already, by {', '.join(norm_names(layer))}"
    if isinstance(layer, nn.RNNCellBase) and norm.per_timestep:
        return (
            f"{type(norm).__name__} has statistics for each time step, and the loop around a cell "
            "does not pass it: call ln_zoo's cell with step=t"
        )
    return None


def _not_plain(layer: nn.Module) -> str | None:
    if type(layer) in OURS:
        return "it is torch's already"
    for site in sites(layer).values():
        if site.normalizes:
            return f"{short_name(site.norm)} normalises summed inputs, torch's layers do not"
    if has_peepholes(layer) or getattr(layer, "derivative_bound", None) is not None:
        return "torch has no LSTM with peepholes or clipped derivatives"
    if isinstance(layer, RecurrentLayer) and layer.noise:
        return f"torch has no {' or '.join(layer.noise)}"
    if getattr(layer, "blocks", 1) > 1:
        return "torch has no recurrent weights in blocks"
    return None


def _effective(layer: Any) -> list[tuple[Tensor, Tensor]]:
    found = []
    for name, site in sites(layer).items():
        suffix = "_".join(name.split(".")[1:-1])
        kind = {"site": "weight", "input": "weight_ih", "recurrent": "weight_hh"}.get(
            name.rpartition(".")[2]
        )
        if kind is not None:
            weight = getattr(layer, f"{kind}_{suffix}" if suffix else kind)
            found.append((weight, site.weight(weight)))
    return found


def _positions(layer: nn.Module, calls: Sequence[calibration.Call]) -> dict[str, Any]:
    """The size of a convolution's output, if the same in all calls."""
    sizes = {tuple(call.output.shape[-2:]) for call in calls if isinstance(call.output, Tensor)}
    return {"positions": sizes.pop()} if type(layer) is nn.Conv2d and len(sizes) == 1 else {}


def _followers(model: nn.Module) -> dict[nn.Module, str]:
    """By layer of an `nn.Sequential`, the class of a normalisation layer right after it."""
    return {
        layer: type(after).__name__
        for module in model.modules()
        if isinstance(module, nn.Sequential)
        for layer, after in pairwise(module)
        if isinstance(after, _NORMALIZERS)
    }
