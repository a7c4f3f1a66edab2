"""What every model of the zoo shares: arguments stored as plain values, checkpoints, optimiser."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from lightning.pytorch import LightningModule

from ln_zoo.norms import Norm, to_config

#: The one instantiator that Lightning admits when it reads a checkpoint back.
_INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"


class ZooModule(LightningModule):
    """A LightningModule whose checkpoints the zoo's base class and command line read back.

    A subclass takes ``norm: Norm | None = None``, chooses its own default in ``__init__`` and calls
    `remember` there. Checkpoints then hold plain values only (weights-only loading works), name
    their class, and carry the state of the random number generator, so that a resumed run on CPU
    draws the same noise as one that was never interrupted.
    """

    def remember(self, norm: Norm) -> None:
        """Stores the arguments of the calling ``__init__`` as hyperparameters, in plain values.

        Args:
            norm: the strategy in use, after the model's own default was chosen. It is stored as
                ``class_path`` and ``init_args``: safe loading refuses a checkpoint with the object.

        Raises:
            TypeError: if the strategy is no dataclass, so that it cannot be stored.
        """
        frame = inspect.currentframe()
        assert frame is not None
        self.save_hyperparameters(frame=frame.f_back)
        for hparams in (self.hparams, self._hparams_initial):
            hparams["norm"] = to_config(norm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        cls = type(self)
        hparams = checkpoint.setdefault("hyper_parameters", {})
        hparams["_class_path"] = f"{public_module(cls)}.{cls.__qualname__}"
        hparams["_instantiator"] = _INSTANTIATOR
        checkpoint["rng_state"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._rng_state = checkpoint.get("rng_state")

    def on_train_start(self) -> None:
        # Only now: between reading the checkpoint and here Lightning draws numbers of its own.
        state = self.__dict__.pop("_rng_state", None)
        if state is not None and self.global_rank == 0:
            torch.set_rng_state(state)


def public_module(cls: type) -> str:
    """The module a class is imported from: our own go by their room, not by their file."""
    parts = cls.__module__.split(".")
    return ".".join(parts[:2]) if parts[0] == "ln_zoo" else cls.__module__
