"""Replace a layer in place: same object, same parameters, another class."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ln_zoo.conversion.formats.adapters import ADOPTED
from ln_zoo.layers import (
    GRU,
    LSTM,
    RNN,
    Conv2d,
    GRUCell,
    Linear,
    LSTMCell,
    RecurrentLayer,
    RNNCell,
)
from ln_zoo.norms import Norm, Site

#: Our layer for each of torch's.
OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.RNN: RNN,
    nn.LSTMCell: LSTMCell,
    nn.GRUCell: GRUCell,
    nn.RNNCell: RNNCell,
    nn.Linear: Linear,
    nn.Conv2d: Conv2d,
}
TORCHS = {new: plain for plain, new in OURS.items()}
TORCHS |= {new: plain for plain, new in ADOPTED.items()}
NAMES = [plain.__name__ for plain in OURS]
#: Modules of torch that read weights of their layers without calling them.
_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
#: Modules that copy or shard parameters in their constructor.
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"}
#: Attributes of our recurrent layers and cells that torch's lack.
_OWN = (
    "_plans",
    "cell",
    "derivative_bound",
    "zoneout",
    "recurrent_dropout",
    "weight_dropout",
)


def selected(
    model: nn.Module,
    include: str | Sequence[str],
    exclude: str | Sequence[str],
    wanted: Callable[[str, nn.Module], bool],
    kinds: str,
) -> dict[str, nn.Module]:
    """Layers of a model by name, filtered by shell patterns; ``kinds`` names them in messages.

    TypeError if the model is not a module; ValueError if it is wrapped for several devices or has
    no layer, or a pattern matches no layer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        if type(module).__name__ in _WRAPPERS:
            raise ValueError(
                f"{type(module).__name__} would not see the new parameters: convert the model "
                "first, then wrap it"
            )
    layers = {name: module for name, module in model.named_modules() if wanted(name, module)}
    if not layers:
        raise ValueError(f"this {type(model).__name__} has no layer to convert: no {kinds}")
    include, exclude = _patterns(include), _patterns(exclude)
    for pattern in (*include, *exclude):
        if not any(_matches(name, pattern) for name in layers):
            shown = ", ".join(repr(name) for name in list(layers)[:8])
            more = ", ..." if len(layers) > 8 else ""
            raise ValueError(f"no layer's name matches {pattern!r}; layers are {shown}{more}")
    return {
        name: module
        for name, module in layers.items()
        if any(_matches(name, pattern) for pattern in include)
        and not any(_matches(name, pattern) for pattern in exclude)
    }


def _patterns(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")


def is_plain(name: str, module: nn.Module) -> bool:
    """Whether a module is one of torch's layers or ours, or a subclass of one."""
    return _kind(module) in NAMES


def looks_recurrent(module: nn.Module) -> bool:
    """Whether a module's class is named like a recurrent layer."""
    return re.search("LSTM|GRU|RNN", class_path(module).rpartition(".")[2]) is not None


def recurrent_around(name: str, owners: Owners) -> nn.Module | None:
    """The innermost recurrent layer around a module, unless it contains others."""
    parents = [parent for parent in owners.around(name) if looks_recurrent(parent)]
    if not parents:
        return None
    inside = [part for part in parents[-1].modules() if looks_recurrent(part)]
    return parents[-1] if len(inside) == 1 else None


def class_path(module: nn.Module) -> str:
    """Import path of a module's class; for a scripted module, of its original class."""
    if isinstance(module, torch.jit.ScriptModule):
        path: str = module._c._type().qualified_name()
        return re.sub(r"\.___torch_mangle_\d+", "", path.removeprefix("__torch__."))
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _kind(module: nn.Module) -> str:
    for base in type(module).__mro__:
        if base in TORCHS:
            return TORCHS[base].__name__
        if base in OURS or (is_quantised(module) and base.__name__ in NAMES):
            return base.__name__
    return type(module).__name__


def is_quantised(module: nn.Module) -> bool:
    """Whether a module is one of torch's quantised layers."""
    path = type(module).__module__
    return path.startswith(("torch.ao.", "torch.nn.quantized", "torch.nn.qat"))


class Owners:
    """Modules of a model that own each parameter, and parents of each module."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names: dict[int, list[str]] = {}
        for name, module in model.named_modules():
            for kind, parameter in module._parameters.items():
                if parameter is not None:
                    full = f"{name}.{kind}" if name else kind
                    self._names.setdefault(id(parameter), []).append(full)

    def sharing(self, name: str, module: nn.Module) -> str | None:
        """Name of a parameter elsewhere that is tied to the module's, or None."""
        lead = f"{name}." if name else ""
        for kind, parameter in module._parameters.items():
            others = [n for n in self._names.get(id(parameter), ()) if n != f"{lead}{kind}"]
            if parameter is not None and others:
                return others[0]
        return None

    def around(self, name: str) -> Iterator[nn.Module]:
        parts = name.split(".") if name else []
        for k in range(len(parts)):
            yield self._model.get_submodule(".".join(parts[:k]))


def unready(name: str, module: nn.Module, owners: Owners) -> str | None:
    """Why a layer of any library cannot be replaced in its present state, or None."""
    for part in module.modules():
        if is_quantised(part):
            return "it is quantised: convert the model first, then quantise it"
        if is_parametrized(part):
            return "it is parametrised: torch.nn.utils.parametrize.remove_parametrizations first"
        for tensor in part._parameters.values():
            if tensor is None:
                continue
            if is_lazy(tensor):
                return "its weights have no shape yet: call the model once first"
            if type(tensor.data) is not Tensor:
                return f"its weights are {type(tensor.data).__name__}: convert before quantising"
            if not tensor.is_floating_point():
                return f"its weights are {tensor.dtype}, not floating-point"
    for parent in owners.around(name):
        if isinstance(parent, torch.jit.ScriptModule):
            return f"it is part of a torch.jit module, {class_path(parent)}: convert, then script"
        if isinstance(parent, _READERS):
            return f"{type(parent).__name__} reads its weights without calling it"
        if type(parent).__module__.startswith("ln_zoo.layers."):
            return f"it is part of {type(parent).__name__}, which takes norm= itself"
    return None


def why_not(name: str, module: nn.Module, owners: Owners) -> str | None:
    """Why one of torch's layers or ours cannot be converted, or None."""
    cls = type(module)
    reason = unready(name, module, owners)
    if reason is not None:
        return reason
    if cls not in OURS and cls not in TORCHS:
        return f"it is a subclass, {cls.__name__}, whose behaviour would be lost"
    return has_own(module)


def has_own(layer: nn.Module) -> str | None:
    """Why a layer has additional state that would be lost, or None."""
    if argument_names(layer) != set(layer._parameters):
        return (
            "it has additional parameters, or its parameters are computed (weight_norm, "
            "spectral_norm or prune of torch.nn.utils): remove those first"
        )
    if set(layer._modules) - {"site", "sites"} or layer._buffers:
        return "it has additional modules or buffers, which would be lost"
    return None


def sites(layer: nn.Module) -> dict[str, Site]:
    """The sites of a layer, by name; empty for torch's layers."""
    return {name: part for name, part in layer.named_modules() if isinstance(part, Site)}


def acts(layer: nn.Module) -> bool:
    """Whether any site of a layer changes summed inputs or weights."""
    return any(
        site.normalizes or type(site.norm).weight is not Norm.weight
        for site in sites(layer).values()
    )


def twin(layer: nn.Module, cls: type[Any], **more: Any) -> nn.Module:
    """A layer of another class with the same parameters and new norms; restores generators."""
    weight = next(p for p in layer._parameters.values() if p is not None)
    cards = [weight.get_device()] if weight.is_cuda else []
    with torch.random.fork_rng(devices=cards):
        new: Any = cls(**_arguments(layer), **more, device=weight.device, dtype=weight.dtype)
    for name, parameter in layer._parameters.items():
        if parameter is not None:
            setattr(new, name, parameter)
    if cls in TORCHS:
        new.reset_norm()
    new.train(layer.training)
    return new


def become(layer: nn.Module, new: nn.Module, cls: type[nn.Module] | None = None) -> None:
    """Turn a layer into another in place, so that references to it stay valid; they share state.

    Hooks and users' attributes are kept. ``cls`` is the new class; default: the class of ``new``.
    """
    for name in _OWN:
        layer.__dict__.pop(name, None)
    for name, value in new.__dict__.items():
        if "hook" not in name:
            layer.__dict__[name] = value
    layer.__class__ = type(new) if cls is None else cls


def _arguments(layer: Any) -> dict[str, Any]:
    if isinstance(layer, nn.Linear):
        names = ["in_features", "out_features"]
    elif isinstance(layer, nn.Conv2d):
        names = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation"]
        names += ["groups", "padding_mode"]
    else:
        names = ["input_size", "hidden_size"]
        if isinstance(layer, nn.RNNBase):
            names += ["num_layers", "batch_first", "dropout", "bidirectional"]
        if isinstance(layer, nn.LSTM | LSTM):
            names.append("proj_size")
        if isinstance(layer, nn.RNN | nn.RNNCell | RNN | RNNCell):
            names.append("nonlinearity")
    found = {name: getattr(layer, name) for name in names}
    bias = layer.bias
    found["bias"] = bias if isinstance(bias, bool) else bias is not None
    if has_peepholes(layer):
        found["peephole"] = True
    if getattr(layer, "derivative_bound", None) is not None:
        found["derivative_bound"] = layer.derivative_bound
    if isinstance(layer, RecurrentLayer):
        found |= layer.noise
    if isinstance(layer, Conv2d) and layer.site.positions is not None:
        found["positions"] = layer.site.positions
    return found


def has_peepholes(layer: nn.Module) -> bool:
    """Whether an LSTM or its cell has peepholes."""
    return any(
        name.startswith("weight_peephole") and parameter is not None
        for name, parameter in layer._parameters.items()
    )


def argument_names(layer: nn.Module) -> set[str]:
    """Names of the parameters that a layer with these arguments has."""
    if not isinstance(layer, nn.RNNBase):
        names = {"weight", "bias"}
        if isinstance(layer, nn.RNNCellBase):
            names = {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}
            names |= {"weight_peephole"} if has_peepholes(layer) else set()
        return names
    names = set(layer._flat_weights_names)
    suffixes = [name.removeprefix("weight_ih") for name in names if name.startswith("weight_ih")]
    return names | ({f"weight_peephole{s}" for s in suffixes} if has_peepholes(layer) else set())
