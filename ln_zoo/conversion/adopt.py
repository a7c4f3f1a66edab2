"""Replace recurrent layers of other libraries by ours, in place."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ln_zoo.conversion.calibrate import measuring, tensors
from ln_zoo.conversion.formats import DIALECTS, find_dialect, read_dialect
from ln_zoo.conversion.formats.adapters import BATCH, STEPS, Adapter, adopted_class
from ln_zoo.conversion.formats.tables import ForeignClass
from ln_zoo.conversion.layers import (
    ADOPTED,
    OURS,
    RECURRENT,
    TORCHS,
    Selection,
    become,
    has_own,
    looks_recurrent,
    module_path,
    new_parameters,
    twin,
)
from ln_zoo.conversion.report import Adopted, Adoption, describe, nothing_done, refusals
from ln_zoo.norms import Identity
from ln_zoo.norms.modes import evaluation_mode
from ln_zoo.utils.class_paths import class_path, loaded

#: Largest relative difference of a layer and its replacement in float64.
_TOLERANCE = 1e-9
#: Standard deviation of noise on weights before comparison: initial gains and shifts hide errors.
_SPREAD = 0.1
#: Timed forward passes of each layer; the fastest counts.
_ROUNDS = 5

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

#: Name of a dialect, and one of its classes.
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

    A layer of a library in `DIALECTS` keeps its object, hooks, call signature, state format,
    attributes and methods, but runs our ``forward``. torch's LSTM, GRU, RNN and their cells become
    `ln_zoo.LSTM` and so on, without a norm; layers stay instances of torch's classes.

    Before that, each layer of a library is compared with its replacement in evaluation and training
    mode: outputs, states and the gradient of the input. Copies run in float64 on random input, with
    noise on their weights. A layer that differs is not replaced, nor one that is quantised, shares
    weights, has hooks inside, or has an unknown class; `Adoption.refused` has the reasons.

    Adopted layers have our keys in the model's ``state_dict``, under ``layer.``; `to_dialect`
    writes the library's keys. They have new parameters: create the optimizer after the call.
    torch's layers keep parameters and keys.

    Args:
        model: a module, or a single layer.
        include: shell patterns of layer names, or of names of modules that contain layers.
        exclude: patterns of layers to skip.
        subclasses: adopt subclasses of `torch.nn.LSTM`, `GRU` and `RNN` too, if their ``forward``
            calls torch's by ``super()``. They keep their own code.
        classes: dialects of your own copies of a library's classes, such as ``{MyLSTM:
            "torchaudio"}``.

    Returns:
        The report; ``print`` shows a table.

    Raises:
        TypeError: if the model is not a module.
        ValueError: for an unknown dialect, if no layer can be replaced, a pattern matches no layer,
            or the model is wrapped for several devices. The model is then unchanged.

    Example:
        >>> model = nn.ModuleDict({"rnn": nn.LSTM(3, 5)})
        >>> report = adopt_(model)
        >>> print(report.layers[0].before, "->", report.layers[0].after)
        torch.nn.LSTM -> ln_zoo.LSTM, Identity()
    """
    own = {class_path(cls): name for cls, name in (classes or {}).items()}
    for path, name in own.items():
        if not find_dialect(name).classes:
            known = ", ".join(_WITH_CLASSES)
            raise ValueError(
                f"classes: the dialect {name!r} of {path} has no class in PyTorch; use one of "
                f"{known}"
            )
    found = _find(model, own) if isinstance(model, nn.Module) else {}
    kinds = f"{', '.join(cls.__name__ for cls in RECURRENT)}, or of {', '.join(_WITH_CLASSES)}"
    selection = Selection(model, include, exclude, lambda name, _: name in found, kinds)
    replacements: list[_Replacement] = []
    cards = {p.get_device() for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(cards)):
        for name in selection.layers:
            try:
                replacements.append(_replacement(selection, name, found[name], subclasses))
            except _Refusal as reason:
                selection.refuse(name, str(reason))
    if not replacements:
        raise ValueError(nothing_done("be adopted", selection))
    had = set(model.parameters())
    for replacement in replacements:
        replacement.apply(model)
    return Adoption(
        tuple(replacement.report for replacement in replacements),
        refusals(selection),
        new_parameters(model, had),
    )


class _Refusal(Exception):
    """Why a layer is not adopted."""


@dataclass
class _Replacement:
    layer: nn.Module
    new: nn.Module
    report: Adopted
    cls: type[nn.Module] | None = None

    def apply(self, model: nn.Module) -> None:
        if isinstance(self.layer, torch.jit.ScriptModule):
            for parent in model.modules():
                for name, child in list(parent._modules.items()):
                    if child is self.layer:
                        parent._modules[name] = self.new
            return
        become(self.layer, self.new, self.cls)


def _find(model: nn.Module, own: Mapping[str, str]) -> dict[str, list[_Candidate] | None]:
    """Recurrent layers by name, with candidate classes of dialects.

    Empty for torch's layers and their subclasses, None for unknown classes.
    """
    found: dict[str, list[_Candidate] | None] = {}
    ours: list[str] = []
    for name, module in model.named_modules():
        if _inside(name, [*found, *ours]):
            continue
        if isinstance(module, (Adapter, *TORCHS)):
            ours.append(name)
        elif (path := module_path(module)) in own:
            found[name] = [(own[path], foreign) for foreign in DIALECTS[own[path]].classes]
        elif path in _BY_PATH:
            found[name] = [_BY_PATH[path]]
        elif isinstance(module, tuple(RECURRENT)) and not type(module).__module__.startswith(
            "ln_zoo."
        ):
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
    return any(not other or name == other or name.startswith(f"{other}.") for other in others)


def _replacement(
    selection: Selection, name: str, candidates: list[_Candidate] | None, subclasses: bool
) -> _Replacement:
    layer = selection.layers[name]
    cls = type(layer).__name__
    if candidates is None:
        near = [path for path in _BY_PATH if path.endswith(f".{cls}")]
        hint = (
            f"; if it is a copy of {near[0]}, pass classes={{{cls}: {_BY_PATH[near[0]][0]!r}}}"
            if near
            else ""
        )
        raise _Refusal(f"no dialect has a class {module_path(layer)}{hint}")
    _refuse(selection.unready(name) or _runs_otherwise(layer))
    if type(layer) in OURS:
        _refuse(selection.why_not(name))
        return _of_torch(name, layer)
    if not candidates:
        return _of_subclass(name, layer, subclasses)
    _refuse(_tied(selection.model, layer) or _hooked(layer))
    if isinstance(layer, torch.jit.ScriptModule) and not name:
        raise _Refusal("it is a torch.jit module, which cannot change: adopt its parent module")
    refusals = []
    for candidate in candidates:
        try:
            return _of_library(name, layer, *candidate)
        except _Refusal as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise _Refusal(reason)


def _runs_otherwise(layer: nn.Module) -> str | None:
    """Why calls do not run the forward of the layer's class, or None."""
    if isinstance(layer, torch.jit.ScriptModule):
        return None
    if layer.__dict__.get("_compiled_call_impl") is not None:
        return "it is compiled: adopt first, then compile"
    if "forward" in layer.__dict__:
        return "its forward is replaced on the object, and would be lost"
    return None


def _tied(model: nn.Module, layer: nn.Module) -> str | None:
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
        return "some of its parameters are frozen: freeze all or none before, others after"
    return None


def _storage(parameter: Tensor) -> tuple[Any, ...]:
    return parameter.device, parameter.data_ptr(), parameter.shape


def _hooked(layer: nn.Module) -> str | None:
    if isinstance(layer, torch.jit.ScriptModule):
        return None
    for path, part in layer.named_modules():
        if path and any(getattr(part, name) for name in _CALL_HOOKS):
            return f"{path} in it has hooks, which would not run: remove them first"
        if any(getattr(part, name) for name in _STATE_HOOKS):
            return "it has state dict hooks, which would see other keys: remove them first"
    for path, parameter in layer.named_parameters():
        hooks: Any = parameter
        if hooks._backward_hooks or hooks._post_accumulate_grad_hooks:
            return f"its parameter {path} has hooks, which would not run: remove them first"
    return None


# Replacements


def _of_torch(name: str, layer: nn.Module) -> _Replacement:
    new = twin(layer, OURS[type(layer)], norm=Identity())
    speedup = _speedup(layer, new, _plain_example(new))
    report = Adopted(name, describe(layer), describe(new), "torch", None, speedup)
    return _Replacement(layer, new, report, ADOPTED.get(type(layer)))


def _of_subclass(name: str, layer: nn.Module, wanted: bool) -> _Replacement:
    base = next((cls for cls in ADOPTED if isinstance(layer, cls)), None)
    if base is None:
        raise _Refusal(f"it is a subclass of a torch cell, {module_path(layer)}, not supported")
    path = f"torch.nn.{base.__name__}"
    if not wanted:
        raise _Refusal(f"it is a subclass of {path}: pass subclasses=True to adopt it")
    _refuse(has_own(layer))
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

    with _refusing_errors("it cannot be copied"):
        plain = _copy(layer)
        trial, new = adopted(plain), adopted(layer)
    error = _compared(plain, trial, _plain_example(layer), layer, f"ln_zoo.{base.__name__}")
    if not reached:
        raise _Refusal(f"its forward does not call that of {path} by super()")
    del new.__dict__["_run"]
    speedup = _speedup(layer, new, _plain_example(layer))
    report = Adopted(
        name, module_path(layer), f"the same on ln_zoo.{base.__name__}", "torch", error, speedup
    )
    return _Replacement(layer, twin(layer, OURS[base], norm=Identity()), report, cls)


def _of_library(name: str, layer: nn.Module, dialect: str, foreign: ForeignClass) -> _Replacement:
    for attribute, wanted in foreign.only.items():
        if (value := _attribute(layer, attribute)) not in (None, wanted):
            raise _Refusal(f"its {attribute} is {value!r}; ours has {wanted!r} alone")
    with _refusing_errors("it cannot be read"):
        plain = _copy(layer)
        vars(plain).update(foreign.plain)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            for parameter in plain.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(_SPREAD * noise)
        trial = _wrapped(plain, dialect, foreign)
        new = _wrapped(layer, dialect, foreign)
        if not isinstance(layer, torch.jit.ScriptModule):
            probe = object.__new__(type(layer))
            probe.__class__ = type(new)  # fails here, before any layer is replaced
        args = foreign.adapter.example(new.layer)
    error = _compared(plain, trial, args, new.layer, f"the dialect {dialect!r}")
    if not any(p.requires_grad for p in layer.parameters()):
        new.requires_grad_(False)
    with _refusing_errors("its call fails"):
        speedup = _speedup(layer, new, args)
    before, after = module_path(layer), describe(new.layer)
    return _Replacement(layer, new, Adopted(name, before, after, dialect, error, speedup))


def _wrapped(layer: nn.Module, dialect: str, foreign: ForeignClass) -> Adapter:
    options = {name: _attribute(layer, path) for name, path in foreign.options.items()}
    options = {name: value for name, value in options.items() if value is not None}
    eps = _attribute(layer, foreign.eps)
    inner: Any
    inner, surplus = read_dialect(dialect, layer.state_dict(), "", eps, options)
    if foreign.adapter.stepwise:
        inner = inner.to_cell()
        surplus = [name.replace("_l0", "").replace(".l0", "") for name in surplus]
    for name in surplus:  # the library lacks them, so they must not train
        inner.get_parameter(name).requires_grad_(False)
    scripted = isinstance(layer, torch.jit.ScriptModule)
    cls: Any = adopted_class(foreign.adapter, _python_class(layer) if scripted else type(layer))
    new: Adapter = cls.__new__(cls)
    nn.Module.__init__(new)
    if not scripted:
        own = {key: value for key, value in vars(layer).items() if key not in vars(new)}
        own |= dict.fromkeys(foreign.views)
        vars(new).update(own)
    new.layer, new.dialect = inner, dialect
    return new.train(layer.training)


def _attribute(layer: Any, path: str | None) -> Any:
    for part in path.split(".") if path else ():
        layer = getattr(layer, part, None)
    return layer if path else None


def _python_class(layer: nn.Module) -> type[nn.Module] | None:
    found = loaded(module_path(layer))
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
    cell = isinstance(layer, nn.RNNCellBase)
    sizes = (BATCH, layer.input_size) if cell else (STEPS, BATCH, layer.input_size)
    return (torch.randn(sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)


def _compared(
    original: nn.Module, new: nn.Module, args: tuple[Any, ...], layer: Any, what: str
) -> float:
    """`_difference` in evaluation and, without dropout, in training mode.

    `_Refusal` if it is too large or a call fails.
    """
    modes = (False,) if getattr(layer, "dropout", 0.0) else (False, True)
    with _refusing_errors("it cannot be compared, its call fails"):
        error = max(_difference(original.train(mode), new.train(mode), args) for mode in modes)
    if error > _TOLERANCE:
        raise _Refusal(f"it differs from {what} by {error:.1e} of the largest value")
    return error


@contextmanager
def _refusing_errors(problem: str) -> Iterator[None]:
    """Turn errors into `_Refusal`: code of other libraries may raise anything."""
    try:
        yield
    except Exception as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise _Refusal(f"{problem}: {line}") from error


class KeepsFloat64(TorchFunctionMode):
    """Makes `Tensor.float` leave float64: some norms compute in float32, and would round."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float and args[0].dtype is torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def _difference(original: nn.Module, new: nn.Module, args: tuple[Any, ...]) -> float:
    """Largest relative difference of outputs, states and the input's gradient."""
    results = []
    for module in (original, new):
        x = args[0].clone().requires_grad_()
        with torch.enable_grad(), KeepsFloat64():
            found = list(tensors(module(x, *args[1:])))
            (gradient,) = torch.autograd.grad([a.square().sum() for a in found], x)
        results.append([*(a.detach() for a in found), gradient])
    shapes = [[a.shape for a in found] for found in results]
    if shapes[0] != shapes[1]:
        return float("inf")
    pairs = zip(*results, strict=True)
    gaps = [float((a - b).abs().max() / a.abs().max().clamp(min=1e-300)) for a, b in pairs]
    return max(float("inf") if gap != gap else gap for gap in gaps)


def _speedup(original: nn.Module, new: nn.Module, args: tuple[Any, ...]) -> float:
    """Forward time of the original divided by the new one's, in evaluation mode; NaN on meta."""
    like = next(original.parameters())
    if like.is_meta:
        return float("nan")
    args = tree_map_only(
        Tensor, lambda a: a.to(like) if a.is_floating_point() else a.to(like.device), args
    )

    def seconds(module: nn.Module) -> float:
        _synchronise(like)
        start = time.perf_counter()
        module.forward(*args)
        _synchronise(like)
        return time.perf_counter() - start

    with measuring(original), evaluation_mode(new):
        pairs = [(seconds(original), seconds(new)) for _ in range(_ROUNDS + 2)]
    before, after = (min(times) for times in zip(*pairs[2:], strict=True))  # the first compile
    return before / after


def _synchronise(like: Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
