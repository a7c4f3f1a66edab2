"""Normalisation of any LightningModule."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.saving import pl_load
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from ln_zoo.conversion import Conversion, adopt_
from ln_zoo.conversion.formats.adapters import Adapter
from ln_zoo.conversion.layers import OURS, TORCHS, Selection, acting_norms, acts, uncompiled
from ln_zoo.conversion.normalize import normalize_selected
from ln_zoo.conversion.report import short_name
from ln_zoo.norms import Identity, LayerNorm, Norm, to_config
from ln_zoo.norms.base import check_norm
from ln_zoo.utils import schema
from ln_zoo.utils.errors import CardError
from ln_zoo.utils.trust import Reader

_Module = TypeVar("_Module", bound=LightningModule)


class Normalize(Callback):
    """Put a norm into a LightningModule of any project, before its optimizer is made.

    `torch.nn.LSTM`, `GRU`, `RNN` and their cells become the layers of `ln_zoo` with the same names
    and weights, as by `ln_zoo.normalize_`. The callback acts after ``configure_model``, and logs
    one line that names the layers. No-op for layers that have this norm already, so that a module
    can be trained, tested and trained again.

    Checkpoints store what was done. ``validate``, ``test``, ``predict`` and a resumed ``fit`` need
    the callback again; `load_from_checkpoint` needs no trainer. Callbacks that average weights must
    come after this one.

    Args:
        norm: the normalisation; default: ``LayerNorm()``. With `Identity`, layers compute the same
            as before, on the kernels of `ln_zoo`.
        include: shell patterns of layer names, as for `ln_zoo.normalize_`; they may name `Linear`
            and `Conv2d` layers too. Default: recurrent layers only.
        exclude: patterns of layers to skip.
        adopt: run all other recurrent layers on our kernels too, also those of other libraries,
            as by `ln_zoo.adopt_`.

    Raises:
        TypeError: if ``norm`` is not a norm, or cannot be stored.
        ValueError: in a run: if no layer can be converted, a layer has another norm, or the
            checkpoint was trained with another norm or without one.

    Example:
        .. code-block:: python

            trainer = Trainer(callbacks=[Normalize(LayerNorm(), exclude="decoder.*")])

        .. code-block:: bash

            python project.py fit --trainer.callbacks+=ln_zoo.callbacks.Normalize \\
                --trainer.callbacks.norm=LayerNorm
    """

    def __init__(
        self,
        norm: Norm | None = None,
        include: str | list[str] | None = None,
        exclude: str | list[str] | None = None,
        adopt: bool = False,
    ) -> None:
        self.norm = LayerNorm() if norm is None else norm
        check_norm(self.norm)
        self._stored = to_config(self.norm)
        self.include = include
        self.exclude = exclude
        self.adopt = adopt
        #: Names of the layers that have the norm, in the last run.
        self.layers: list[str] = []
        #: Names of the layers that were adopted.
        self.adopted: list[str] = []

    @property
    def state_key(self) -> str:
        # Several callbacks may convert different layers.
        return self._generate_state_key(include=self.include, exclude=self.exclude)

    def state_dict(self) -> dict[str, Any]:
        choice = {"include": self.include, "exclude": self.exclude, "adopt": self.adopt}
        return {"norm": self._stored, **choice, "layers": self.layers, "adopted": self.adopted}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        def convert() -> None:
            self._convert(pl_module)
            _check_averages(trainer, pl_module)

        _wrap(pl_module, "on_load_checkpoint", before=lambda read: self._check(trainer, read))
        if any(is_overridden(hook, pl_module) for hook in ("setup", "configure_model")):
            # Both may make layers, after the callbacks' setup.
            _wrap(pl_module, "configure_model", after=convert)
        else:
            convert()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _unwrap(pl_module)
        for logger in trainer.loggers:
            logger.log_hyperparams({"normalize": self.state_dict()})

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _unwrap(pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        _unwrap(pl_module)

    @staticmethod
    def load_from_checkpoint(cls: type[_Module], path: Any, **options: Any) -> _Module:
        """A module with norms and weights, from a checkpoint of a run with the callback.

        Args:
            cls: the class of the module.
            path: path of the checkpoint.
            options: those of ``cls.load_from_checkpoint``: ``map_location``, ``weights_only``, and
                arguments of the module.

        Raises:
            ValueError: if the checkpoint was trained without the callback, what it stores is
                malformed, or its norm is of a class outside ln_zoo that is not imported.

        Example:
            .. code-block:: python

                module = Normalize.load_from_checkpoint(MyModule, "last.ckpt")
        """
        loading = {name: options.get(name) for name in ("map_location", "weights_only")}
        checkpoint = pl_load(path, **loading)
        if not states_of(checkpoint, path):
            raise ValueError(
                f"{path} was trained without Normalize: use {cls.__name__}.load_from_checkpoint"
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found keys that are not in the model state dict")
            module = cls.load_from_checkpoint(path, strict=False, **options)
        normalize_as_trained(module, checkpoint, path)
        module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
        return module

    def _convert(self, module: LightningModule) -> None:
        selection = self._selection(module)
        names, done = list(selection.layers), set()
        for name, layer in list(selection.layers.items()):
            norms = acting_norms(layer)
            if other := next((norm for norm in norms if norm != self.norm), None):
                raise ValueError(
                    f"Normalize: {name} has {short_name(other)} already, not "
                    f"{short_name(self.norm)}: exclude it, or give the same norm"
                )
            if norms or (isinstance(self.norm, Identity) and isinstance(layer, tuple(TORCHS))):
                done.add(name)
                del selection.layers[name]
        if selection.layers:
            try:
                report = normalize_selected(selection, self.norm)
            except ValueError as error:
                if not done:
                    raise ValueError(f"Normalize: {error}") from None
            else:
                done |= {layer.name for layer in report.layers}
                self._say(module, report)
        self.layers = [uncompiled(name) for name in names if name in done]
        if self.adopt:
            self._adopt(module)

    def _say(self, module: LightningModule, report: Conversion) -> None:
        kinds = {layer.name: type(module.get_submodule(layer.name)) for layer in report.layers}
        layers = ", ".join(f"{uncompiled(name)} ({cls.__name__})" for name, cls in kinds.items())
        left = [f"; not {each.name} ({each.kind}): {each.reason}" for each in report.refused]
        rank_zero_info(f"Normalize: {short_name(self.norm)} in {layers}{''.join(left)}")

    def _selection(self, module: LightningModule) -> Selection:
        """The chosen layers, without those inside adopted ones."""
        try:
            selection = Selection.plain(module, self.include, self.exclude or ())
        except ValueError as error:
            others = [name for name, part in module.named_modules() if type(part) in OURS]
            hint = f"; include={uncompiled(others[0])!r} names another" if others else ""
            hint = hint if self.include is None else ""
            raise ValueError(f"Normalize: {error}{hint}") from None
        for name in list(selection.layers):
            if any(isinstance(parent, Adapter) for parent in selection.around(name)):
                del selection.layers[name]
        return selection

    def _adopt(self, module: LightningModule) -> None:
        try:
            adoption = adopt_(module)
        except ValueError:  # nothing left to adopt
            return
        self.adopted = [uncompiled(layer.name) for layer in adoption.layers]
        rank_zero_info(f"Normalize: adopted {', '.join(self.adopted)}")

    def _check(self, trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
        """ValueError if the checkpoint was trained with other norms than the module has."""
        module = trainer.lightning_module
        path = trainer.ckpt_path
        stored = {name: each.norm for each in states_of(checkpoint, path) for name in each.layers}
        weights = checkpoint.get("state_dict") or module.state_dict()  # none if it is sharded
        layers = {uncompiled(name): (name, layer) for name, layer in module.named_modules()}
        for name in self.layers:
            own, layer = layers[name]
            if name in stored and stored[name] != self.norm:
                raise ValueError(
                    f"{path} was trained with {_shown(stored[name])} in {name}, Normalize has "
                    f"{_shown(self.norm)}: give the same norm"
                )
            if name not in stored and any(
                f"{own}.{key}" not in weights for key in layer.state_dict()
            ):
                raise ValueError(
                    f"{path} was trained without {short_name(self.norm)} in {name}: remove "
                    "Normalize, or train again from its weights"
                )
        for name, norm in stored.items():
            plain = name in layers and not acts(layers[name][1])
            if plain and norm != Identity():
                raise ValueError(
                    f"{path} was trained with {_shown(norm)} in {name}, which Normalize leaves "
                    "out: give the same include and exclude"
                )


def states_of(checkpoint: Mapping[str, Any], where: str | PathLike[str] | None) -> list[Normalize]:
    """The `Normalize` callbacks of a checkpoint's run, in their order.

    CardError, with the file ``where``, for a malformed state, or a norm of a class outside ln_zoo
    that is not imported.
    """
    states = schema.read_as(dict, checkpoint.get("callbacks") or {}, f"{where}: callbacks")
    return [
        _restored(state, str(where))
        for key, state in states.items()
        if str(key).partition("{")[0] == "Normalize"
    ]


def _restored(state: Any, where: str) -> Normalize:
    state = schema.read_as(dict, state, f"{where}: Normalize")
    if missing := [key for key in Normalize().state_dict() if key not in state]:
        raise CardError(f"{where}: Normalize: {missing[0]!r} is missing")
    given = dict(state)
    layers, adopted = (
        schema.read_as(list[str], given.pop(key), f"{where}: Normalize.{key}")
        for key in ("layers", "adopted")
    )
    reader = Reader(where, "import {module} first")
    callback = Normalize(**reader.arguments(Normalize, given, "Normalize"))
    callback.layers, callback.adopted = layers, adopted
    return callback


def normalize_as_trained(
    module: nn.Module, checkpoint: Mapping[str, Any], where: str | PathLike[str]
) -> None:
    """Convert a module's layers as the run of a checkpoint did; no-op without `Normalize`.

    CardError as `states_of`.
    """
    for each in states_of(checkpoint, where):
        names = set(each.layers)
        selection = Selection(module, "*", (), lambda n, _: uncompiled(n) in names, "layer")  # noqa: B023
        normalize_selected(selection, each.norm)
        if each.adopted:
            adopt_(module, include=each.adopted)


def _wrap(
    module: LightningModule,
    hook: str,
    before: Callable[..., None] = lambda *_: None,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Add to the next call of a module's hook; callbacks have no hook at that point."""
    original = getattr(module, hook)
    replaced = vars(module).get(hook)

    def wrapped(*args: Any) -> None:
        restore()
        before(*args)
        original(*args)
        after()

    def restore() -> None:
        if replaced is None:
            delattr(module, hook)
        else:
            setattr(module, hook, replaced)

    wrapped.restore = restore  # type: ignore[attr-defined]
    setattr(module, hook, wrapped)


def _unwrap(module: LightningModule) -> None:
    """Restore hooks that were not called."""
    for hook in ("configure_model", "on_load_checkpoint"):
        while hasattr(vars(module).get(hook), "restore"):
            vars(module)[hook].restore()


def _check_averages(trainer: Trainer, module: LightningModule) -> None:
    """ValueError if a callback has copied the module before it was converted."""
    count = len(list(module.parameters()))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        average = getattr(callback, "_average_model", None)
        if isinstance(average, nn.Module) and len(list(average.parameters())) != count:
            raise ValueError(
                f"{type(callback).__name__} copied the module before Normalize converted it: put "
                "Normalize before it, or call ln_zoo.normalize_ in the module's __init__"
            )


def _shown(norm: Norm) -> str:
    arguments = ", ".join(f"{name}={v!r}" for name, v in to_config(norm)["init_args"].items())
    return f"{type(norm).__name__}({arguments})"
