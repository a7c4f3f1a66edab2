"""What every model of the zoo shares: arguments stored as plain values, checkpoints, optimiser."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import STEP_OUTPUT, OptimizerLRScheduler
from torch import Tensor

from ln_zoo.export import Part
from ln_zoo.models.pretrained import Pretrained
from ln_zoo.models.run_counter import RunCounter
from ln_zoo.norms import Identity, Norm, to_config
from ln_zoo.training_runs import Run

#: The one instantiator that Lightning admits when it reads a checkpoint back.
_INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
#: Of the runs of training, in a checkpoint.
_RUNS = "training_runs"


class DynamicsTask(NamedTuple):
    """What ``ln-zoo analyze dynamics`` runs a model on.

    Attributes:
        batch: of examples, in float64, as ``loss`` takes it.
        loss: (model, batch) to a scalar; its gradients with respect to hidden states are
            measured.
        description: the examples in a few words.
        first_layer: number of the first recurrent layer that is measured, counted from 1.
    """

    batch: Any
    loss: Callable[[Any, Any], Tensor]
    description: str
    first_layer: int = 1


class ZooModule(Pretrained, LightningModule, ABC):
    """A LightningModule whose checkpoints the zoo's base class and command line read back.

    A subclass takes ``norm: Norm | None = None``, chooses its own default in ``__init__`` and calls
    `remember` there. Checkpoints then hold plain values only (weights-only loading works), name
    their class, say which runs of training are behind the weights, and carry the state of torch's
    random number generator on the CPU, of each process its own, so that a resumed run draws the
    same noise there as one that was never interrupted.

    It is abstract, so that the command line offers only models that can be trained.
    """

    #: What a batch may hold, in the words of the data modules; empty: anything.
    takes: ClassVar[tuple[str, ...]] = ()
    #: The task, in the Hugging Face hub's words, for cards.
    pipeline_tag: ClassVar[str] = "other"
    #: Of a model from `ln_zoo.load`: the parameters that are new, all others being trained.
    new_weights: tuple[str, ...] = ()

    @property
    def _run_counter(self) -> RunCounter:
        # Not made in an `__init__`: Lightning loads checkpoints of a class with one by another way.
        counter: RunCounter = self.__dict__.setdefault("_counter", RunCounter())
        return counter

    @property
    def training_runs(self) -> tuple[Run, ...]:
        """The runs of training behind the weights, oldest first; see `ln_zoo.training_runs`.

        Whoever gives the model other weights states theirs here. Checkpoints keep them.

        Example:
            >>> from ln_zoo.models import MLPClassifier
            >>> MLPClassifier(64, [8]).training_runs
            ()
        """
        return self._run_counter.runs(self._trainer)

    @training_runs.setter
    def training_runs(self, runs: tuple[Run, ...]) -> None:
        self.__dict__["_counter"] = RunCounter(runs)

    @property
    def multiplications(self) -> int | None:
        """Multiplications in the forward pass of one example, or None if unknown.

        ``ln-zoo`` runs models on one thread if a batch needs few.

        Example:
            >>> from ln_zoo.models import MLPClassifier
            >>> MLPClassifier(64, [32], num_classes=10).multiplications
            2368
        """
        return None

    @classmethod
    def card_example(cls, preprocessing: Mapping[str, Any]) -> str:
        """Lines of Python that use a loaded ``model``, for its card.

        Args:
            preprocessing: what the card says of inputs.
        """
        return ""

    def dynamics_data(self, examples: int) -> tuple[str, dict[str, Any]]:
        """For ``ln-zoo analyze dynamics``: the data that `dynamics_task` reads.

        Args:
            examples: how many will be read.

        Returns:
            The name of a class in `ln_zoo.data`, or the import path of another, and its arguments.
        """
        raise NotImplementedError

    def dynamics_task(self, data: Any, examples: int, steps: int) -> DynamicsTask:
        """For ``ln-zoo analyze dynamics``: what the model, in float64, is run on.

        Args:
            data: the module of `dynamics_data`, set up.
            examples: how many, at most.
            steps: time steps, at most.
        """
        raise NotImplementedError

    def export_parts(self) -> Mapping[str, Part]:
        """For ``ln-zoo export``: what of the model is exported; by default nothing.

        Returns:
            For each name, the most used first, a function ``part(copy, form)`` that gives the
            `ln_zoo.export.Path`; ``copy`` is what `ln_zoo.export.exportable` made of the model.

        Example:
            >>> from ln_zoo.models import OrderEmbedding
            >>> list(OrderEmbedding(["a", "cat"], hidden_size=4).export_parts())
            ['captions', 'images']
        """
        return {}

    @abstractmethod
    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        """The loss of a batch, as in Lightning."""

    @abstractmethod
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer, as in Lightning."""

    def remember(self, norm: Norm | None, **resolved: Any) -> None:
        """Stores the arguments of the calling ``__init__`` as hyperparameters, in plain values.

        Called in the ``__init__`` of a subclass's parent, it stores the subclass's arguments: those
        that make the model again.

        Args:
            norm: the norm in use, after the model's own default was chosen. It is stored as
                ``class_path`` and ``init_args``, which the command line reads too. ``None`` stands
                for `Identity`, as in the layers.
            resolved: other arguments whose default was chosen there, with the values in use. The
                command line would store what was given, so ``None``.

        Raises:
            TypeError: if the norm is not a dataclass, so that it cannot be stored.
        """
        frame = inspect.currentframe()
        assert frame is not None
        self.save_hyperparameters(frame=frame.f_back)
        values = {**self.hparams, **resolved, "norm": to_config(norm or Identity())}
        parameters = inspect.signature(type(self)).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        # Lightning logs a second copy; torch's stubs know of neither.
        for hparams in (self.__dict__["_hparams"], self.__dict__["_hparams_initial"]):
            hparams.clear()
            hparams.update({k: v for k, v in values.items() if takes_any or k in parameters})
        words = values.get("vocabulary")
        if isinstance(words, list) and "vocabulary" in parameters:
            # Loggers write this copy to a file, and to the first page of their pictures.
            self.__dict__["_hparams_initial"]["vocabulary"] = f"{len(words):,} words"

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        cls = type(self)
        hparams = checkpoint.setdefault("hyper_parameters", {})
        hparams["_class_path"] = f"{public_module(cls)}.{cls.__qualname__}"
        hparams["_instantiator"] = _INSTANTIATOR
        states = [torch.get_rng_state()] * self.trainer.world_size
        if len(states) > 1:
            # Each has its own noise.
            torch.distributed.all_gather_object(states, states[0])
        checkpoint["rng_state"] = torch.stack(states)
        checkpoint[_RUNS] = self._run_counter.stored(self.trainer)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._rng_states = checkpoint.get("rng_state")
        self.__dict__["_counter"] = RunCounter.restored(checkpoint.get(_RUNS))

    def on_train_start(self) -> None:
        # Only now: between reading the checkpoint and here Lightning draws numbers of its own. And
        # only if this run goes on with that one: a model that was merely loaded has no past noise.
        states = self.__dict__.pop("_rng_states", None)
        resumed = states is not None and self.trainer.ckpt_path is not None
        self._run_counter.begin(self.trainer, self.trainer.ckpt_path is not None)
        if resumed and len(states) == self.trainer.world_size:
            torch.set_rng_state(states[self.global_rank])
        elif self.global_rank:
            # All processes begin with the same seed, for the same weights. Noise is to be each
            # one's own, as it would be for its examples in one process.
            torch.manual_seed((torch.initial_seed() + self.global_rank) % 2**63)

    def on_train_end(self) -> None:
        self._run_counter.end(self.trainer)


def runs_of_checkpoint(checkpoint: Mapping[str, Any]) -> tuple[Run, ...]:
    """The runs of training behind the weights of a checkpoint; see `ln_zoo.training_runs`.

    Args:
        checkpoint: its content. Where it says nothing of runs, there is one of which nothing is
            known.
    """
    return RunCounter.restored(checkpoint.get(_RUNS)).runs(None)


def fused_on_cpu(module: LightningModule) -> dict[str, bool]:
    """``{"fused": True}`` where torch's Adam and SGD should take their fused form, else nothing.

    On a CPU it takes half the time of the default; on a GPU the default is as fast. Under mixed
    precision Lightning refuses to clip the gradients of a fused optimizer, on a CPU too, where no
    gradient is ever scaled.

    Args:
        module: the model, on its device; attached to its trainer if it has one.

    Example:
        >>> from ln_zoo.models import MLPClassifier
        >>> model = MLPClassifier(64, [8])
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **fused_on_cpu(model))
        >>> optimizer.defaults["fused"]
        True
    """
    trainer = module._trainer  # the public property raises where there is none
    mixed = trainer is not None and str(trainer.precision).endswith("-mixed")
    return {"fused": True} if module.device.type == "cpu" and not mixed else {}


def public_module(cls: type) -> str:
    """The module a class is imported from: our own by their package, not by their file."""
    parts = cls.__module__.split(".")
    return ".".join(parts[:2]) if parts[0] == "ln_zoo" else cls.__module__
