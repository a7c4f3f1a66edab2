"""Plain layers of any model become normalised ones, and back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ln_zoo.conversion import calibrate as calibration
from ln_zoo.conversion.replace import (
    NAMES,
    OURS,
    TORCHS,
    Owners,
    acts,
    become,
    has_peepholes,
    is_plain,
    recurrent_around,
    restore,
    selected,
    sites,
    snapshot,
    twin,
    why_not,
)
from ln_zoo.conversion.report import (
    Conversion,
    Converted,
    Refused,
    describe,
    norm_names,
    nothing_done,
    short_name,
)
from ln_zoo.layers.rnn import RecurrentLayer
from ln_zoo.norms import Norm

#: Layers of torch that normalise what the layer before them in an `nn.Sequential` gives.
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
    include: str | Sequence[str] = "*",
    exclude: str | Sequence[str] = (),
    calibrate: Any = None,
) -> Conversion:
    """Turns the plain layers of any model into normalised ones, in place; weights are kept.

    Every `torch.nn.LSTM`, `GRU`, `RNN`, their cells, `Linear` and `Conv2d` whose name matches
    becomes the layer of `ln_zoo` of that name. The module objects and their parameters stay the
    same ones, so that references, hooks and optimizers hold; `Conversion.new_parameters` are the
    gains that an optimizer does not know of. Layers of `ln_zoo` without normalisation count as
    plain.

    Normalising changes what a layer computes (with `WeightNorm`, only what it learns). Given a
    batch, gains, shifts and biases are set so that outputs stay as close as the norm allows:
    by least squares, layer by layer in the order of the forward pass, and in recurrent layers by 30
    steps of gradient descent from there, in evaluation mode. Running statistics of `BatchNorm`
    become those of the batch. What distance remains is in the report.

    A layer that cannot be converted stays as it is, with the reason in `Conversion.refused`: it is
    normalised already (by its own norm, or by torch's layer behind it in an
    `torch.nn.Sequential`), its weights are tied to another layer's, parametrised or quantised, it
    is a subclass, or `torch.nn.MultiheadAttention` or `TransformerEncoderLayer` read its weights
    themselves. A Linear inside a recurrent layer that normalises is converted with a warning.

    Args:
        model: any module, a single layer too.
        norm: the normalisation, shared by all layers.
        include: names of layers, or of modules with all layers in them, as shell patterns
            (``"encoder.*"``); default all.
        exclude: the same for layers to leave alone. A last layer, whose outputs are logits, is
            usually better left alone.
        calibrate: a batch of inputs: a tuple or list is taken apart, ``model(*batch)``; a function
            is called with the model, ``lambda model: model(**batch)``; anything else is the one
            argument. Default: gains, shifts and biases stay where they start.

    Returns:
        The report; ``print`` shows it as a table.

    Raises:
        TypeError: for what is not a module, or not a norm.
        ValueError: if no layer can be converted, a pattern matches none, or the model is wrapped
            for several devices. The model is then as before, as it is if calibration fails.

    Example:
        >>> from ln_zoo.norms import LayerNorm
        >>> model = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 3))
        >>> report = normalize_(model, LayerNorm(), exclude="2", calibrate=torch.randn(100, 5))
        >>> print(report.layers[0].before, "->", report.layers[0].after)
        torch.nn.Linear -> ln_zoo.Linear, LayerNorm()
        >>> report.distance < report.distance_before
        True
        >>> list(report.new_parameters)
        ['0.site.gain']
    """
    if not isinstance(norm, Norm):
        raise TypeError(
            "norm must be an instance of a subclass of ln_zoo.norms.Norm, such as "
            f"LayerNorm(); got {norm!r}"
        )
    layers = selected(model, include, exclude, is_plain, ", ".join(NAMES))
    owners = Owners(model)
    followers = _followers(model)
    reasons = {}
    for name, layer in layers.items():
        reason = why_not(name, layer, owners) or _not_by(norm, layer)
        if reason is None and (other := owners.sharing(name, layer)):
            reason = f"its weights are tied to {other}"
        if reason is None and id(layer) in followers:
            reason = f"its output is normalised already, by {followers[id(layer)]} after it"
        reasons[name] = reason
    run, outputs = None, None
    plain: dict[str, list[calibration.Call]] = {}
    if calibrate is not None:
        chosen = {n: layer for n, layer in layers.items() if reasons[n] is None}
        run = calibration.runner(calibrate)
        outputs, plain = calibration.record(model, chosen, run)
    made: dict[str, nn.Module] = {}
    for name, layer in layers.items():
        if reasons[name] is None:
            more = _positions(layer, plain.get(name, ()))
            try:
                cls = OURS.get(type(layer), type(layer))
                made[name] = twin(layer, cls, norm=norm, **more)
            except ValueError as error:
                reasons[name] = str(error)
    refused = _refused(layers, reasons)
    if not made:
        raise ValueError(nothing_done("be normalised", model, refused))
    for name in made:
        parent = recurrent_around(name, owners)
        if parent is not None and any(isinstance(part, _NORMALIZERS) for part in parent.modules()):
            warnings.warn(
                f"{name} is part of {type(parent).__name__}, which normalises: it is normalised "
                "twice now; exclude it, or see ln_zoo.adopt_",
                stacklevel=2,
            )
    before = _Before(layers, made)
    had = {id(parameter) for parameter in model.parameters()}
    try:
        for name, new in made.items():
            become(layers[name], new)
        converted = {name: layers[name] for name in made}
        gaps: list[dict[str, float]] = [{}, {}]
        if run is not None:
            for k in range(2):
                if k:
                    calibration.calibrate(model, converted, plain, run)
                now, calls = calibration.record(model, converted, run)
                gaps[k] = {
                    name: calibration.distance(
                        [calibration.shown(layers[name], call.output) for call in calls[name]],
                        [calibration.shown(layers[name], call.output) for call in plain[name]],
                    )
                    for name in made
                }
                of_all = [calibration.shown(model, output) for output in (now, outputs)]
                gaps[k][_ALL] = calibration.distance(*of_all)
    except BaseException:
        before.restore()
        raise
    return Conversion(
        tuple(
            Converted(
                name,
                before.words[name],
                describe(layers[name]),
                gaps[0].get(name),
                gaps[1].get(name),
            )
            for name in made
        ),
        refused,
        {name: p for name, p in model.named_parameters() if id(p) not in had},
        gaps[0].get(_ALL),
        gaps[1].get(_ALL),
    )


def denormalize_(
    model: nn.Module, *, include: str | Sequence[str] = "*", exclude: str | Sequence[str] = ()
) -> Conversion:
    """Turns our layers into torch's own, in place, where those compute the same.

    That is so without normalisation, and where a norm acts on weights alone, as `WeightNorm`:
    the effective weights become the weights, and its scales go. Parameters stay the same objects.

    A layer that cannot be converted stays as it is, with the reason in `Conversion.refused`: its
    norm normalises summed inputs, or it has peepholes or clipped derivatives, which torch has
    not; and as with `normalize_`.

    Args:
        model: any module, a single layer too.
        include: names of layers, or of modules with all layers in them, as shell patterns; default
            all.
        exclude: the same for layers to leave alone.

    Returns:
        The report.

    Raises:
        TypeError: for what is not a module.
        ValueError: if no layer can be converted, or a pattern matches none.

    Example:
        >>> from ln_zoo.layers import LSTM
        >>> from ln_zoo.norms import WeightNorm
        >>> model = nn.ModuleDict({"rnn": LSTM(3, 5, norm=WeightNorm())})
        >>> print(denormalize_(model))
        layer  was                        is
        rnn    ln_zoo.LSTM, WeightNorm()  torch.nn.LSTM
        >>> model
        ModuleDict(
          (rnn): LSTM(3, 5)
        )
    """
    layers = selected(model, include, exclude, is_plain, ", ".join(NAMES))
    owners = Owners(model)
    reasons = {}
    for name, layer in layers.items():
        reason = why_not(name, layer, owners) or _not_plain(layer)
        if reason is None and acts(layer) and (other := owners.sharing(name, layer)):
            reason = f"its weights are tied to {other}, which would change with them"
        reasons[name] = reason
    refused = _refused(layers, reasons)
    chosen = {name: layer for name, layer in layers.items() if reasons[name] is None}
    if not chosen:
        raise ValueError(nothing_done("become plain", model, refused))
    words = {name: describe(layer) for name, layer in chosen.items()}
    with torch.no_grad():
        effective = [pair for layer in chosen.values() for pair in _effective(layer)]
        for weight, value in effective:
            weight.copy_(value)
    for layer in chosen.values():
        become(layer, twin(layer, TORCHS[type(layer)]))
    return Conversion(
        tuple(Converted(name, words[name], describe(layer)) for name, layer in chosen.items()),
        refused,
    )


#: Stands for the model's outputs beside the names of layers.
_ALL = "outputs"


class _Before:
    """What layers were, and the numbers that calibration changes."""

    def __init__(self, layers: dict[str, nn.Module], made: dict[str, nn.Module]) -> None:
        self._layers = [(layers[name], snapshot(layers[name])) for name in made]
        self.words = {name: describe(layers[name]) for name in made}
        self._values = [
            (parameter, parameter.detach().clone())
            for name in made
            for kind, parameter in layers[name]._parameters.items()
            if kind.startswith("bias") and parameter is not None
        ]

    def restore(self) -> None:
        """Puts all of it back."""
        for layer, state in self._layers:
            restore(layer, state)
        with torch.no_grad():
            for parameter, value in self._values:
                parameter.copy_(value)


def _not_by(norm: Norm, layer: nn.Module) -> str | None:
    """Why this norm cannot act on a layer."""
    if type(layer) in TORCHS and acts(layer):
        return f"it is normalised already, by {', '.join(norm_names(layer))}"
    if isinstance(layer, nn.RNNCellBase) and norm.per_timestep:
        return (
            f"{type(norm).__name__} keeps statistics for each time step, which the loop around a "
            "cell does not pass: call ln_zoo's cell with step=t"
        )
    return None


def _not_plain(layer: nn.Module) -> str | None:
    """Why no layer of torch computes what a layer does."""
    if type(layer) in OURS:
        return "it is torch's own already"
    for site in sites(layer).values():
        if site.normalizes:
            return f"{short_name(site.norm)} normalises summed inputs, which no layer of torch does"
    if has_peepholes(layer) or getattr(layer, "derivative_bound", None) is not None:
        return "torch has no LSTM with peepholes or clipped derivatives"
    if isinstance(layer, RecurrentLayer) and layer.noise:
        return f"torch has no {' or '.join(layer.noise)}"
    return None


def _effective(layer: Any) -> list[tuple[Tensor, Tensor]]:
    """Each weight of a layer, and what its norm makes of it."""
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
    """The size of a convolution's output, where it is known and always the same."""
    sizes = {tuple(call.output.shape[-2:]) for call in calls if isinstance(call.output, Tensor)}
    return {"positions": sizes.pop()} if type(layer) is nn.Conv2d and len(sizes) == 1 else {}


def _followers(model: nn.Module) -> dict[int, str]:
    """The name of torch's normaliser right behind a layer of an `nn.Sequential`."""
    return {
        id(layer): type(after).__name__
        for module in model.modules()
        if isinstance(module, nn.Sequential)
        for layer, after in zip(list(module), list(module)[1:], strict=False)
        if isinstance(after, _NORMALIZERS)
    }


def _refused(layers: dict[str, nn.Module], reasons: dict[str, str | None]) -> tuple[Refused, ...]:
    return tuple(
        Refused(name, type(layers[name]).__name__, reason)
        for name, reason in reasons.items()
        if reason is not None
    )
