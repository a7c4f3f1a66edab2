"""Recurrent layers of other libraries, replaced in place by ours behind the same calls."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ln_zoo.conversion.adapters import ADOPTED, BATCH, STEPS, Adapter, adopted_class
from ln_zoo.conversion.calibrate import measuring, tensors
from ln_zoo.conversion.dialects import DIALECTS, ForeignClass, find_dialect, read_dialect
from ln_zoo.conversion.replace import (
    OURS,
    TORCHS,
    Owners,
    become,
    class_path,
    has_own,
    looks_recurrent,
    selected,
    twin,
    unready,
    why_not,
)
from ln_zoo.conversion.report import Adopted, Adoption, Refused, describe, nothing_done
from ln_zoo.norms import Identity
from ln_zoo.norms.modes import evaluation_mode

#: Largest difference of a layer and its replacement in float64, relative to the largest value.
_TOLERANCE = 1e-9
#: How far weights are moved before layers are compared: fresh gains and shifts hide differences.
_SPREAD = 0.1
_ROUNDS = 5

_RECURRENT = tuple(cls for cls in OURS if issubclass(cls, nn.RNNBase | nn.RNNCellBase))
_BY_PATH = {
    path: (name, foreign)
    for name, dialect in DIALECTS.items()
    for foreign in dialect.classes
    for path in foreign.paths
}
_WITH_CLASSES = [name for name, dialect in DIALECTS.items() if dialect.classes]
_CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

#: A dialect's name and a class of it.
_Candidate = tuple[str, ForeignClass]


def adopt_(
    model: nn.Module,
    *,
    include: str | Sequence[str] = "*",
    exclude: str | Sequence[str] = (),
    subclasses: bool = False,
    classes: Mapping[type[nn.Module], str] | None = None,
) -> Adoption:
    """Replace recurrent layers of other libraries by ours, in place; the model computes the same.

    A layer of a library of `DIALECTS` keeps its object, hooks, call signature, state format,
    attributes and methods; its ``forward`` is ours. torch's LSTM, GRU, RNN and their cells become
    `ln_zoo.LSTM` and so on, without a norm; layers are instances of torch's class still.

    Each layer of a library is first copied and run once in float64 on random input, with its
    weights moved a little, and compared with its replacement, in evaluation and training mode:
    outputs, states and the gradient of the input. If they differ, the layer is left alone. So is a
    layer that is quantised, shares weights, has hooks inside, or whose class is unknown;
    `Adoption.refused` has the reasons.

    In the model's ``state_dict``, adopted layers have our keys, under ``layer.``; `to_dialect`
    writes the library's keys. Parameters of a library's layers are new: make the optimizer after
    the call. torch's layers keep parameters and keys.

    Args:
        model: any module, a single layer too.
        include: names of layers, or of modules with all layers in them, as shell patterns; default
            all.
        exclude: the same for layers to leave alone.
        subclasses: whether to adopt subclasses of `torch.nn.LSTM`, `GRU` and `RNN` as well, whose
            ``forward`` calls torch's by ``super()``. They keep their own code.
        classes: dialects of your own copies of a library's classes, such as
            ``{MyLSTM: "torchaudio"}``.

    Returns:
        The report, which prints as a table.

    Raises:
        TypeError: if the model is not a module.
        ValueError: for an unknown dialect, if no layer can be replaced, a pattern matches none, or
            the model is wrapped for several devices. The model is then unchanged.

    Example:
        >>> model = nn.ModuleDict({"rnn": nn.LSTM(3, 5)})
        >>> x = torch.randn(4, 2, 3)
        >>> before = model["rnn"](x)[0]
        >>> report = adopt_(model)
        >>> print(report.layers[0].before, "->", report.layers[0].after)
        torch.nn.LSTM -> ln_zoo.LSTM, Identity()
        >>> torch.allclose(model["rnn"](x)[0], before, atol=1e-6)
        True
    """
    own = {_path_of(cls): name for cls, name in (classes or {}).items()}
    for path, name in own.items():
        if not find_dialect(name).classes:
            known = ", ".join(_WITH_CLASSES)
            raise ValueError(
                f"classes: the dialect {name!r} of {path} has no class in PyTorch whose calls "
                f"could be taken over; dialects that have are {known}"
            )
    found = _find(model, own) if isinstance(model, nn.Module) else {}
    kinds = f"{', '.join(cls.__name__ for cls in _RECURRENT)}, or of {', '.join(_WITH_CLASSES)}"
    layers = selected(model, include, exclude, lambda name, _: name in found, kinds)
    owners = Owners(model)
    swaps: list[_Swap] = []
    refused: list[Refused] = []
    cards = {p.get_device() for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(cards)):
        for name, layer in layers.items():
            made = _replacement(model, name, layer, found[name], owners, subclasses)
            if isinstance(made, str):
                refused.append(Refused(name, class_path(layer).rpartition(".")[2], made))
            else:
                swaps.append(made)
    if not swaps:
        raise ValueError(nothing_done("be adopted", model, refused))
    had = {id(parameter) for parameter in model.parameters()}
    for swap in swaps:
        swap.apply(model)
    return Adoption(
        tuple(swap.report for swap in swaps),
        tuple(refused),
        {name: p for name, p in model.named_parameters() if id(p) not in had},
    )


@dataclass
class _Swap:
    """A layer, its replacement, and how to exchange them."""

    layer: nn.Module
    new: nn.Module
    report: Adopted
    cls: type[nn.Module] | None = None

    def apply(self, model: nn.Module) -> None:
        """Exchange them."""
        if isinstance(self.layer, torch.jit.ScriptModule):
            for parent in model.modules():
                for name, child in list(parent._modules.items()):
                    if child is self.layer:
                        parent._modules[name] = self.new
            return
        become(self.layer, self.new, self.cls)


def _path_of(cls: type[nn.Module]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _find(model: nn.Module, own: Mapping[str, str]) -> dict[str, list[_Candidate] | None]:
    """Recurrent layers by name, with the classes of dialects that they may be.

    torch's layers and subclasses have no candidates; unknown layers have None.
    """
    found: dict[str, list[_Candidate] | None] = {}
    ours: list[str] = []
    for name, module in model.named_modules():
        if _inside(name, [*found, *ours]):
            continue
        if isinstance(module, (Adapter, *TORCHS)):
            ours.append(name)
        elif (path := class_path(module)) in own:
            found[name] = [(own[path], foreign) for foreign in DIALECTS[own[path]].classes]
        elif path in _BY_PATH:
            found[name] = [_BY_PATH[path]]
        elif isinstance(module, _RECURRENT) and not type(module).__module__.startswith("ln_zoo."):
            found[name] = []
    known = list(found)
    for name, module in model.named_modules():
        if (
            looks_recurrent(module)
            and not type(module).__module__.startswith("ln_zoo.")
            and not _inside(name, [*found, *ours])
            and not any(_inside(other, [name]) for other in (*known, *ours))
        ):
            found[name] = None
    return {name: found[name] for name, _ in model.named_modules() if name in found}


def _inside(name: str, others: Sequence[str]) -> bool:
    """Whether a module is one of others, or inside one."""
    return any(not other or name == other or name.startswith(f"{other}.") for other in others)


def _replacement(
    model: nn.Module,
    name: str,
    layer: nn.Module,
    candidates: list[_Candidate] | None,
    owners: Owners,
    subclasses: bool,
) -> _Swap | str:
    """How to replace a layer, or why not."""
    cls = type(layer).__name__
    if candidates is None:
        near = [path for path in _BY_PATH if path.endswith(f".{cls}")]
        hint = (
            f"; if it is a copy of {near[0]}, pass classes={{{cls}: {_BY_PATH[near[0]][0]!r}}}"
            if near
            else ""
        )
        return f"no dialect has a class {class_path(layer)}{hint}"
    reason = unready(name, layer, owners) or _runs_otherwise(layer)
    if reason is not None:
        return reason
    if type(layer) in OURS:
        reason = why_not(name, layer, owners)
        return reason if reason is not None else _of_torch(name, layer)
    if not candidates:
        return _of_subclass(name, layer, subclasses)
    reason = _tied(model, layer) or _hooked(layer)
    if reason is None and isinstance(layer, torch.jit.ScriptModule) and not name:
        reason = "it is a torch.jit module, which cannot change in place: adopt a model around it"
    if reason is not None:
        return reason
    results = [_of_library(name, layer, *candidate) for candidate in candidates]
    return next((made for made in results if isinstance(made, _Swap)), results[0])


def _runs_otherwise(layer: nn.Module) -> str | None:
    """Why a call of a layer does not run the forward of its class, or None."""
    if isinstance(layer, torch.jit.ScriptModule):
        return None
    if layer.__dict__.get("_compiled_call_impl") is not None:
        return "it is compiled: adopt first, then compile"
    if "forward" in layer.__dict__:
        return "its forward was replaced on the object, and would be lost"
    return None


def _tied(model: nn.Module, layer: nn.Module) -> str | None:
    """Why a layer's parameters have other users, or None."""
    inside = set(layer.modules())
    own: dict[tuple[Any, ...], str] = {}
    for name, parameter in layer.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            return "its weights are on the meta device, without values"
        if (key := _storage(parameter)) in own:
            return f"its weights {own[key]} and {name} are tied"
        own[key] = name
    for path, module in model.named_modules():
        if module in inside:
            continue
        if any(child in inside and child is not layer for child in module._modules.values()):
            return f"a module in it is also part of {path or 'the model'}"
        for name, parameter in module._parameters.items():
            if parameter is not None and _storage(parameter) in own:
                return f"its weights are tied to {path}.{name}".replace(" .", " ")
    if len({p.requires_grad for p in layer.parameters()}) > 1:
        return "some of its parameters are frozen: freeze all or none, and the rest after"
    return None


def _storage(parameter: Tensor) -> tuple[Any, ...]:
    return parameter.device, parameter.data_ptr(), parameter.shape


def _hooked(layer: nn.Module) -> str | None:
    """Why hooks of a layer would be lost, or None."""
    if isinstance(layer, torch.jit.ScriptModule):
        return None
    for path, part in layer.named_modules():
        if path and any(getattr(part, name) for name in _CALL_HOOKS):
            return f"{path} in it has hooks, which would not run: remove them first"
        if any(getattr(part, name) for name in _STATE_HOOKS):
            return "it has hooks of its state dict, which would see other keys: remove them first"
    for path, parameter in layer.named_parameters():
        hooks: Any = parameter
        if hooks._backward_hooks or hooks._post_accumulate_grad_hooks:
            return f"its parameter {path} has hooks, which would not run: remove them first"
    return None


# Replacements


def _of_torch(name: str, layer: nn.Module) -> _Swap:
    """torch's layer itself."""
    new = twin(layer, OURS[type(layer)], norm=Identity())
    speedup = _speedup(layer, new, _plain_example(new))
    report = Adopted(name, describe(layer), describe(new), "torch", None, speedup)
    return _Swap(layer, new, report, ADOPTED.get(type(layer)))


def _of_subclass(name: str, layer: nn.Module, wanted: bool) -> _Swap | str:
    """A layer that inherits from torch's."""
    base = next((cls for cls in ADOPTED if isinstance(layer, cls)), None)
    if base is None:
        return f"it is a subclass of a torch cell, {class_path(layer)}, which stays"
    if not wanted:
        return f"it is a subclass of torch.nn.{base.__name__}: pass subclasses=True to adopt it"
    reason = has_own(layer)
    if reason is not None:
        return reason
    cls = adopted_class(ADOPTED[base], type(layer))
    reached: list[bool] = []

    def adopted(of: nn.Module) -> nn.Module:
        new = copy.copy(of)
        new.__dict__ = dict(of.__dict__)
        become(new, twin(of, OURS[base], norm=Identity()), cls)
        run: Callable[..., Any] = new._run  # type: ignore[assignment]

        def counted(*args: Any, **kwargs: Any) -> Any:
            reached.append(True)
            return run(*args, **kwargs)

        new.__dict__["_run"] = counted
        return new

    try:
        plain = _copy(layer)
        error = _error(plain, adopted(plain), _plain_example(layer), layer)
        new = adopted(layer)
    except Exception as failure:  # The subclass's own code may raise anything.
        return f"it cannot be compared, its call fails: {_line(failure)}"
    if not reached:
        return f"its forward does not call that of torch.nn.{base.__name__} by super()"
    if error > _TOLERANCE:
        return f"its replacement computes something else, by {error:.1e} of the largest value"
    del new.__dict__["_run"]
    speedup = _speedup(layer, new, _plain_example(layer))
    report = Adopted(
        name, class_path(layer), f"the same on ln_zoo.{base.__name__}", "torch", error, speedup
    )
    return _Swap(layer, twin(layer, OURS[base], norm=Identity()), report, cls)


def _of_library(name: str, layer: nn.Module, dialect: str, foreign: ForeignClass) -> _Swap | str:
    """A layer of a dialect."""
    for attribute in foreign.zero:
        if value := _attribute(layer, attribute):
            return f"its {attribute} is {value!r}, and ours has nothing like it: set it to 0"
    try:
        plain = _copy(layer)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            for parameter in plain.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(_SPREAD * noise)
        trial = _wrapped(plain, dialect, foreign)
        new = _wrapped(layer, dialect, foreign)
        if not isinstance(layer, torch.jit.ScriptModule):
            probe = object.__new__(type(layer))
            probe.__class__ = type(new)  # Fails now, not when the first layers are exchanged.
    except Exception as failure:  # A layer of another class may hold anything.
        return f"it cannot be read: {_line(failure)}"
    args = foreign.adapter.example(new.layer)
    try:
        error = _error(plain, trial, args, new.layer)
    except Exception as failure:
        return f"it cannot be compared, its call fails: {_line(failure)}"
    if error > _TOLERANCE:
        return (
            f"it computes something else than the dialect {dialect!r}, by {error:.1e} of the "
            "largest value"
        )
    if not any(p.requires_grad for p in layer.parameters()):
        new.requires_grad_(False)
    report = Adopted(
        name, class_path(layer), describe(new.layer), dialect, error, _speedup(layer, new, args)
    )
    return _Swap(layer, new, report)


def _wrapped(layer: nn.Module, dialect: str, foreign: ForeignClass) -> Adapter:
    """The adapter of a layer, with our layer and the attributes of theirs."""
    options = {ours: _attribute(layer, path) for ours, path in foreign.options.items()}
    options = {ours: value for ours, value in options.items() if value is not None}
    eps = _attribute(layer, foreign.eps)
    inner: Any
    inner, surplus = read_dialect(dialect, layer.state_dict(), "", eps, options)
    if foreign.adapter.stepwise:
        inner = inner.to_cell()
        surplus = [name.replace("_l0", "").replace(".l0", "") for name in surplus]
    for name in surplus:  # They would train, though the library's layer has nothing like them.
        inner.get_parameter(name).requires_grad_(False)
    scripted = isinstance(layer, torch.jit.ScriptModule)
    cls: Any = adopted_class(foreign.adapter, _python_class(layer) if scripted else type(layer))
    new: Adapter = cls.__new__(cls)
    nn.Module.__init__(new)
    if not scripted:
        own = {key: value for key, value in vars(layer).items() if key not in vars(new)}
        vars(new).update(own)
    new.layer, new.dialect = inner, dialect
    return new.train(layer.training)


def _attribute(layer: Any, path: str | None) -> Any:
    """A nested attribute, or None if there is none."""
    for part in path.split(".") if path else ():
        layer = getattr(layer, part, None)
    return layer if path else None


def _python_class(layer: nn.Module) -> type[nn.Module] | None:
    """The class that a `torch.jit` module is made from, if it is imported."""
    module, _, name = class_path(layer).rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


# Comparison


def _copy(layer: nn.Module) -> nn.Module:
    """A copy on the CPU in float64 and evaluation mode, without hooks."""
    memo: dict[int, Any] = {}
    if not isinstance(layer, torch.jit.ScriptModule):
        for part in layer.modules():
            memo |= {
                id(value): type(value)()
                for key, value in vars(part).items()
                if "hooks" in key and value
            }
    return copy.deepcopy(layer, memo).to("cpu", torch.float64).eval()


def _plain_example(layer: Any) -> tuple[Tensor, ...]:
    """Random input of torch's layers and cells."""
    cell = isinstance(layer, nn.RNNCellBase)
    sizes = (BATCH, layer.input_size) if cell else (STEPS, BATCH, layer.input_size)
    return (torch.randn(sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)


def _error(theirs: nn.Module, ours: nn.Module, args: tuple[Any, ...], layer: Any) -> float:
    """`_difference` in evaluation and, if there is no dropout in our layer, in training mode."""
    modes = (False,) if getattr(layer, "dropout", 0.0) else (False, True)
    return max(_difference(theirs.train(mode), ours.train(mode), args) for mode in modes)


def _difference(theirs: nn.Module, ours: nn.Module, args: tuple[Any, ...]) -> float:
    """Largest difference of outputs, states and the input's gradient, relative to the largest."""
    results = []
    for module in (theirs, ours):
        x = args[0].clone().requires_grad_()
        with torch.enable_grad():
            found = list(tensors(module(x, *args[1:])))
            (gradient,) = torch.autograd.grad([a.square().sum() for a in found], x)
        results.append([*(a.detach() for a in found), gradient])
    shapes = [[a.shape for a in found] for found in results]
    if shapes[0] != shapes[1]:
        return float("inf")
    pairs = zip(*results, strict=True)
    gaps = [float((a - b).abs().max() / a.abs().max().clamp(min=1e-300)) for a, b in pairs]
    return max(float("inf") if gap != gap else gap for gap in gaps)


def _speedup(theirs: nn.Module, ours: nn.Module, args: tuple[Any, ...]) -> float:
    """The time of a forward pass before, divided by the time after, in evaluation mode.

    NaN on the meta device.
    """
    like = next(theirs.parameters())
    if like.is_meta:
        return float("nan")
    args = tuple(_moved(arg, like) for arg in args)
    best = [float("inf")] * 2
    with measuring(theirs), evaluation_mode(ours):
        for turn in range(_ROUNDS + 2):
            for k, module in enumerate((theirs, ours)):
                for _ in _synchronised(like):
                    start = time.perf_counter()
                    module.forward(*args)
                seconds = time.perf_counter() - start
                if turn > 1:  # The first calls compile.
                    best[k] = min(best[k], seconds)
    return best[0] / best[1]


def _synchronised(like: Tensor) -> Iterator[None]:
    """Run once, with a GPU's queue empty before and after."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    yield
    if like.is_cuda:
        torch.cuda.synchronize(like.device)


def _moved(value: Any, like: Tensor) -> Any:
    """Tensors in a nested argument with another's device and precision."""
    if isinstance(value, Tensor):
        return value.to(like)
    if isinstance(value, dict):
        return {key: _moved(part, like) for key, part in value.items()}
    return type(value)(_moved(part, like) for part in value)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
