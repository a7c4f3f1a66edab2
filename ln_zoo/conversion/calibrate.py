"""Fit gains and biases of normalised layers to the outputs of plain layers on a batch.

Gain and shift of each feature minimise the squared error of ``gain * z + shift``, with normalised
sums z, from the plain layer's ``a + b``. Terms that are added (an LSTM's) are fitted jointly.
Recurrent layers are fitted at the plain layer's states, then by gradient descent on the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ln_zoo.conversion.layers import sites
from ln_zoo.norms import (
    Norm,
    Site,
    batch_statistics,
    keeps_statistics,
    population_statistics,
)
from ln_zoo.norms.modes import evaluation_mode

#: Steps of gradient descent on the output of a recurrent layer, and learning rate.
_STEPS, _RATE = 30, 0.02
#: Relative ridge term, which keeps the gains of constant features.
_RIDGE = 1e-6


class Call(NamedTuple):
    """One call of a layer: arguments and result."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


class _Terms(NamedTuple):
    """Terms that are added, to be fitted jointly; ``bias`` is None if the site has a shift."""

    roles: tuple[str, ...]
    features: slice
    bias: str | None


def runner(batch: Any) -> Callable[[nn.Module], Any]:
    """A function that runs a model on a batch; see ``calibrate`` in `ln_zoo.normalize_`."""
    if callable(batch) and not isinstance(batch, Tensor | nn.Module):
        return batch
    if isinstance(batch, tuple | list) and not hasattr(batch, "_fields"):
        return lambda model: model(*batch)
    return lambda model: model(batch)


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients; restores modes and random number generators."""
    cards = {t.get_device() for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    forked = torch.random.fork_rng(devices=sorted(cards))
    with forked, torch.no_grad(), evaluation_mode(model):
        torch.manual_seed(0)  # equal noise in all runs
        yield


def record(
    model: nn.Module, layers: Mapping[str, nn.Module], run: Callable[[nn.Module], Any]
) -> tuple[Any, dict[str, list[Call]]]:
    """Run a model; its outputs, and the calls of some layers."""
    calls: dict[str, list[Call]] = {name: [] for name in layers}
    with ExitStack() as stack, measuring(model):
        for name, layer in layers.items():

            def keep(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                calls[name].append(Call(args, kwargs, output))

            stack.callback(layer.register_forward_hook(keep, with_kwargs=True).remove)
        return run(model), calls


def calibrate(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    plain: Mapping[str, Sequence[Call]],
    run: Callable[[nn.Module], Any],
) -> None:
    """Set gains, shifts and biases of normalised layers, in the order of the forward pass.

    A layer that is called once is fitted on its inputs in the calibrated model, and so corrects
    errors of earlier layers; a layer that is called several times, such as a cell, on its inputs in
    the plain model, whose calls are ``plain``.
    """
    handles: dict[str, Any] = {}
    with ExitStack() as stack, measuring(model), batch_statistics(model):
        for name, layer in layers.items():
            if not any(site.normalizes for site in sites(layer).values()):
                continue

            def set_once(layer: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                handles.pop(name).remove()
                calls = list(plain[name])
                targets = terms = [_sums(layer, call.args, call.kwargs) for call in calls]
                if len(calls) == 1 and _sizes((args, kwargs)) == _sizes(calls[0][:2]):
                    terms = [_sums(layer, args, kwargs)]
                    calls = [Call(args, kwargs, calls[0].output)]
                _fit(layer, targets, terms)
                if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
                    _descend(layer, calls)

            handles[name] = layer.register_forward_pre_hook(set_once, with_kwargs=True)
            stack.callback(handles[name].remove)
        run(model)
    if keeps_statistics(model):
        with measuring(model), population_statistics(model):
            run(model)


def tensors(value: Any) -> Iterator[Tensor]:
    """Floating-point tensors in nested arguments or results."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)


def shown(layer: nn.Module, output: Any) -> Any:
    """A layer's output without final states, whose effect is in the outputs."""
    return output[0] if isinstance(layer, nn.RNNBase) else output


def distance(found: Any, plain: Any) -> float:
    """Relative root mean square of the difference; infinite if sizes differ."""
    pairs = list(zip(tensors(found), tensors(plain), strict=False))
    if _sizes(found) != _sizes(plain):
        return math.inf
    gap = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    size = sum(float(b.double().square().sum()) for _, b in pairs)
    return math.sqrt(gap / size) if size else float(gap > 0)


def _sizes(value: Any) -> list[tuple[int, ...]]:
    return [tuple(a.shape) for a in tensors(value)]


# Recording


class _RecordingNorm(Norm):
    def __init__(self, per_timestep: bool) -> None:
        self.per_timestep = per_timestep  # type: ignore[misc]
        self.seen: list[tuple[Tensor, int | None]] = []

    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        self.seen.append((a, step))
        return a


#: Summed inputs of each site by name, with the time step for norms that use it.
_Seen = dict[str, list[tuple[Tensor, int | None]]]


def _sums(layer: nn.Module, args: Any, kwargs: Any) -> _Seen:
    places = sites(layer)
    former = {name: site.norm for name, site in places.items()}
    recorders = {name: _RecordingNorm(norm.per_timestep) for name, norm in former.items()}
    try:
        for name, site in places.items():
            site.norm = recorders[name]
        layer.forward(*args, **kwargs)  # not __call__, which runs hooks
    finally:
        for name, site in places.items():
            site.norm = former[name]
    return {name: recorder.seen for name, recorder in recorders.items()}


# Fitting


def _fits(layer: Any, prefix: str) -> Iterator[_Terms]:
    if prefix == "":
        yield _Terms(("site",), slice(None), "bias")
        return
    suffix = prefix.removeprefix("sites").replace(".", "_")
    ih, hh = f"bias_ih{suffix}", f"bias_hh{suffix}"
    roles = [name.rpartition(".")[2] for name in sites(layer) if name.startswith(f"{prefix}.")]
    hidden = layer.hidden_size
    if "sum" in roles:
        yield _Terms((f"{prefix}.sum",), slice(None), ih)
        return
    terms = (f"{prefix}.input", f"{prefix}.recurrent")
    if "cell" in roles:
        yield _Terms(terms, slice(None), ih)
        yield _Terms((f"{prefix}.cell",), slice(None), None)
        return
    # A GRU's reset gate multiplies only the recurrent term of its candidate.
    yield _Terms(terms, slice(0, 2 * hidden), ih)
    yield _Terms(terms[:1], slice(2 * hidden, None), ih)
    yield _Terms(terms[1:], slice(2 * hidden, None), hh)


def _fit(layer: nn.Module, targets: Sequence[_Seen], terms: Sequence[_Seen]) -> None:
    places = {name: site for name, site in sites(layer).items() if site.normalizes}
    plain = {name: _rows(site, [a[name] for a in targets]) for name, site in places.items()}
    found = {name: _rows(site, _normalized(site, terms, name)) for name, site in places.items()}
    for prefix in dict.fromkeys(name.rpartition(".")[0] for name in places):
        for roles, features, bias in _fits(layer, prefix):
            used = {role: places[role] for role in roles}
            gains = {role: site.gain for role, site in used.items() if site.gain is not None}
            left = torch.stack([plain[role][:, features] for role in roles]).sum(0)
            for role in roles:
                if role not in gains:
                    left = left - found[role][:, features]
            constant = used[roles[0]].shift
            if constant is None and bias is not None:
                constant = layer._parameters.get(bias)
            solved = _least_squares(
                left,
                [found[role][:, features] for role in gains],
                [gain.flatten()[features] for gain in gains.values()],
                constant is not None,
            )
            for gain, value in zip(gains.values(), solved, strict=False):
                gain.view(-1)[features] = value.to(gain.dtype)
            if constant is not None:
                constant.view(-1)[features] += solved[-1].to(constant.dtype)


def _descend(layer: nn.Module, calls: Sequence[Call]) -> None:
    weights = {id(p) for name, p in layer._parameters.items() if name.startswith("weight")}
    free = [p for p in layer.parameters() if id(p) not in weights]
    former = [(p, p.grad, p.requires_grad) for p in layer.parameters()]
    best, least = [p.clone() for p in free], math.inf
    plain = [list(tensors(shown(layer, call.output))) for call in calls]
    size = sum(float(a.float().square().sum()) for part in plain for a in part)
    try:
        for p, _, _ in former:
            p.requires_grad_(id(p) not in weights)
        optimizer = torch.optim.Adam(free, lr=_RATE)
        for step in range(_STEPS + 1):
            optimizer.zero_grad()
            loss = 0.0
            with torch.set_grad_enabled(step < _STEPS):
                for call, wanted in zip(calls, plain, strict=True):
                    found = layer.forward(*call.args, **call.kwargs)
                    pairs = zip(tensors(shown(layer, found)), wanted, strict=True)
                    gaps = [(a - b).float().square().sum() for a, b in pairs]
                    gap = torch.stack(gaps).sum() / (size or 1.0)
                    loss += float(gap.detach())
                    if gap.requires_grad:
                        gap.backward()
            if loss < least:
                best, least = [p.detach().clone() for p in free], loss
            if step < _STEPS:
                optimizer.step()
    finally:
        for p, grad, requires_grad in former:
            p.grad = grad
            p.requires_grad_(requires_grad)
        for p, value in zip(free, best, strict=True):
            p.copy_(value)


def _normalized(site: Site, seen: Sequence[_Seen], name: str) -> list[Any]:
    affine = [(p, p.clone()) for p in (site.gain, site.shift) if p is not None]
    if site.gain is not None:
        site.gain.fill_(1.0)
    if site.shift is not None:
        site.shift.zero_()
    try:
        return [[(site(a, step), step) for a, step in call[name]] for call in seen]
    finally:
        for parameter, value in affine:
            parameter.copy_(value)


def _rows(site: Site, calls: Sequence[Sequence[tuple[Tensor, int | None]]]) -> Tensor:
    parts = []
    for a, _ in (pair for call in calls for pair in call):
        if site.axis == 1:
            by_unit = site.gain is not None and site.gain.dim() > 1
            a = a.flatten(1) if by_unit else a.movedim(1, -1)
        parts.append(a.reshape(-1, a.shape[-1]).double())
    return torch.cat(parts)


def _least_squares(
    target: Tensor, terms: Sequence[Tensor], start: Sequence[Tensor], constant: bool
) -> list[Tensor]:
    """Factors (F,) of K terms (R, F) for a target (R, F), and a constant.

    ``start`` are the initial factors, then the constant.
    """
    columns = list(terms) + ([torch.ones_like(target)] if constant else [])
    if not columns:
        return []
    first = [a.to(target.dtype) for a in start]
    first += [torch.zeros_like(target[0])] if constant else []
    x, begin = torch.stack(columns), torch.stack(first)  # (K, R, F), (K, F)
    left = target - (x * begin.unsqueeze(1)).sum(0)
    squares = torch.einsum("irf,jrf->fij", x, x)
    ridge = _RIDGE * squares.diagonal(dim1=1, dim2=2).mean(-1)
    eye = torch.eye(len(columns), dtype=x.dtype, device=x.device)
    squares = squares + (ridge + torch.finfo(x.dtype).tiny)[:, None, None] * eye
    moved = torch.linalg.solve(squares, torch.einsum("irf,rf->fi", x, left))
    return list(begin + moved.T)
