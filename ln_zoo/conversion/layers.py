"""Layers of a model: choose them, say why one cannot be replaced, replace one in place."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ln_zoo.layers import (
    GRU,
    LSTM,
    RNN,
    Conv2d,
    GRUCell,
    Linear,
    LSTMCell,
    RecurrentCell,
    RecurrentLayer,
    RNNCell,
)
from ln_zoo.norms import Norm, Site
from ln_zoo.utils import class_paths


class AdoptedLSTM(LSTM, nn.LSTM):  # type: ignore[misc]
    """`ln_zoo.LSTM` as a `torch.nn.LSTM`, which torch.compile does not trace."""


class AdoptedGRU(GRU, nn.GRU):
    """`ln_zoo.GRU` as a `torch.nn.GRU`, which torch.compile does not trace."""


class AdoptedRNN(RNN, nn.RNN):
    """`ln_zoo.RNN` as a `torch.nn.RNN`, which torch.compile does not trace."""


#: Our layers that are still instances of torch's classes.
ADOPTED: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: AdoptedLSTM,
    nn.GRU: AdoptedGRU,
    nn.RNN: AdoptedRNN,
}

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
#: Those of torch's layers that are recurrent.
RECURRENT = tuple(cls for cls in OURS if issubclass(cls, nn.RNNBase | nn.RNNCellBase))
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
    "blocks",
    "recompute",
)


class Selection:
    """Layers of a model, chosen by shell patterns of their names.

    Args:
        model: a module, or a single layer.
        include: patterns of layer names, or of names of modules that contain layers.
        exclude: patterns of layers to skip.
        wanted: whether a module, by name, is a layer that may be chosen.
        kinds: what such layers are, for messages.

    Raises:
        TypeError: if the model is not a module.
        ValueError: if it is wrapped for several devices or has no layer, or a pattern matches none.
    """

    def __init__(
        self,
        model: nn.Module,
        include: str | Sequence[str],
        exclude: str | Sequence[str],
        wanted: Callable[[str, nn.Module], bool],
        kinds: str,
    ) -> None:
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
        self.model = model
        #: The chosen layers by name, in the order of the model's modules.
        self.layers = {
            name: module
            for name, module in layers.items()
            if any(_matches(name, pattern) for pattern in include)
            and not any(_matches(name, pattern) for pattern in exclude)
        }
        #: Why layers are left as they are, by name.
        self.refused: dict[str, str] = {}
        self._owners: dict[int, list[str]] = {}
        for name, module in model.named_modules():
            for kind, parameter in module._parameters.items():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append(_joined(name, kind))

    @classmethod
    def plain(
        cls,
        model: nn.Module,
        include: str | Sequence[str] | None,
        exclude: str | Sequence[str],
    ) -> Selection:
        """Choose among torch's layers and ours, and subclasses; None: recurrent ones only."""
        kinds = RECURRENT if include is None else tuple(OURS)
        include = "*" if include is None else include
        names = ", ".join(plain.__name__ for plain in kinds)
        return cls(model, include, exclude, lambda _, module: _is_plain(module, kinds), names)

    @property
    def accepted(self) -> dict[str, nn.Module]:
        """The chosen layers that are not refused."""
        return {name: layer for name, layer in self.layers.items() if name not in self.refused}

    def refuse(self, name: str, reason: str | None) -> None:
        """Leave a layer as it is for a reason; no-op without one."""
        if reason is not None:
            self.refused[name] = reason

    def tied(self, name: str) -> str | None:
        """Name of a parameter elsewhere that is one of this layer's, or None."""
        for kind, parameter in self.layers[name]._parameters.items():
            for other in self._owners.get(id(parameter), ()):
                if other != _joined(name, kind):
                    return other
        return None

    def around(self, name: str) -> list[nn.Module]:
        """Modules that contain this layer, from the model to its parent."""
        parts = name.split(".") if name else []
        return [self.model.get_submodule(".".join(parts[:k])) for k in range(len(parts))]

    def recurrent_around(self, name: str) -> nn.Module | None:
        """The innermost recurrent layer around this layer, unless it contains others."""
        parents = [parent for parent in self.around(name) if looks_recurrent(parent)]
        if not parents:
            return None
        inside = [part for part in parents[-1].modules() if looks_recurrent(part)]
        return parents[-1] if len(inside) == 1 else None

    def unready(self, name: str) -> str | None:
        """Why this layer, of any library, cannot be replaced in its present state, or None."""
        for part in self.layers[name].modules():
            if reason := _unready(part):
                return reason
        for parent in self.around(name):
            if isinstance(parent, torch.jit.ScriptModule):
                return (
                    f"it is part of a torch.jit module, {module_path(parent)}: convert, then script"
                )
            if isinstance(parent, _READERS):
                return f"{type(parent).__name__} reads its weights without calling it"
            if type(parent).__module__.startswith("ln_zoo.layers."):
                return f"it is part of {type(parent).__name__}, which takes norm= itself"
        return None

    def why_not(self, name: str) -> str | None:
        """Why this layer, torch's or ours, cannot be converted, or None."""
        layer = self.layers[name]
        if reason := self.unready(name):
            return reason
        if type(layer) not in OURS and type(layer) not in TORCHS:
            return f"it is a subclass, {type(layer).__name__}, whose behaviour would be lost"
        return has_own(layer)


def _joined(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _patterns(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def uncompiled(name: str) -> str:
    """A module's name without the wrappers of torch.compile."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _matches(name: str, pattern: str) -> bool:
    name = uncompiled(name)
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")


def _unready(part: nn.Module) -> str | None:
    if _is_quantised(part):
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
    return None


def _is_plain(module: nn.Module, kinds: Collection[type[nn.Module]]) -> bool:
    names = [plain.__name__ for plain in kinds]
    known = (
        base in kinds
        or TORCHS.get(base) in kinds
        or (_is_quantised(module) and base.__name__ in names)
        for base in type(module).__mro__
    )
    return type(module).__name__ in names or any(known)


def _is_quantised(module: nn.Module) -> bool:
    path = type(module).__module__
    return path.startswith(("torch.ao.", "torch.nn.quantized", "torch.nn.qat"))


def looks_recurrent(module: nn.Module) -> bool:
    """Whether a module's class is named like a recurrent layer."""
    return re.search("LSTM|GRU|RNN", module_path(module).rpartition(".")[2]) is not None


def module_path(module: nn.Module) -> str:
    """Import path of a module's class; for a scripted module, of its original class."""
    if isinstance(module, torch.jit.ScriptModule):
        path: str = module._c._type().qualified_name()
        return re.sub(r"\.___torch_mangle_\d+", "", path.removeprefix("__torch__."))
    return class_paths.class_path(type(module))


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


def acting_norms(layer: nn.Module) -> list[Norm]:
    """The norms of the sites of a layer that change summed inputs or weights."""
    return [
        site.norm
        for site in sites(layer).values()
        if site.normalizes or type(site.norm).weight is not Norm.weight
    ]


def acts(layer: nn.Module) -> bool:
    """Whether any site of a layer changes summed inputs or weights."""
    return bool(acting_norms(layer))


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


def new_parameters(model: nn.Module, had: Collection[nn.Parameter]) -> dict[str, nn.Parameter]:
    """A model's parameters, by name, that it did not have before."""
    return {name: p for name, p in model.named_parameters() if p not in had}


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
        found |= layer.options
    if isinstance(layer, RecurrentCell) and layer.blocks > 1:
        found["blocks"] = layer.blocks
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
