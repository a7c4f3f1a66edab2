"""Base class of all models: stored arguments, checkpoints, publishing."""

from __future__ import annotations

import inspect
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import STEP_OUTPUT, OptimizerLRScheduler

from ln_zoo.export import Exported, ExportError, export
from ln_zoo.models.run_counter import RunCounter
from ln_zoo.norms import Identity, Norm, to_config
from ln_zoo.utils.class_paths import class_path
from ln_zoo.utils.training_runs import TrainingRun

#: The only instantiator that Lightning accepts when it reads a checkpoint.
_INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
#: Key of the training runs in a checkpoint.
RUNS = "training_runs"


class ZooModule(LightningModule, ABC):
    """A LightningModule whose checkpoints and cards can be read back by class and arguments.

    A subclass takes ``norm: Norm | None = None`` and chooses its default in ``__init__``, where it
    calls Lightning's ``save_hyperparameters()`` and then `resolve_hyperparameters`. Checkpoints
    hold plain values only (weights-only loading works), name their class, and list the training
    runs behind the weights. They store the state of torch's CPU generator of each process, so that
    a resumed run samples the same noise as an uninterrupted one.

    Constructors raise TypeError for a size or rate that is not a number, and ValueError for values
    out of range and unknown choices; methods raise ValueError for inputs of another size.

    Optional methods of a subclass: ``export_parts()`` for ``ln-zoo export`` (see
    `ln_zoo.export.parts.export_parts`), and ``dynamics_data(examples)`` and ``dynamics_task(data,
    examples, steps)`` for ``ln-zoo analyze trained_dynamics`` (see `ln_zoo.models.dynamics`).
    """

    #: Kinds of batches the model reads, as in ``batch_kind`` of data modules; empty: any.
    input_kinds: ClassVar[tuple[str, ...]] = ()
    #: The task in the Hugging Face hub's vocabulary, for cards.
    pipeline_tag: ClassVar[str] = "other"
    #: Names of the parameters that `ln_zoo.load` initialised; all others are trained.
    new_weights: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "takes" in cls.__dict__ and "input_kinds" not in cls.__dict__:
            warnings.warn(
                f"{cls.__name__}.takes is deprecated: rename it to input_kinds",
                DeprecationWarning,
                stacklevel=2,
            )
            cls.input_kinds = cls.__dict__["takes"]

    # Arguments

    def resolve_hyperparameters(self, norm: Norm | None, **resolved: Any) -> None:
        """Replace hyperparameters by the values in use, as plain data.

        Call it in ``__init__`` after ``save_hyperparameters()``, which stores the arguments as
        passed. Arguments that the class does not take, such as its parent's, are dropped.

        Args:
            norm: the norm in use; stored as ``class_path`` and ``init_args``. None: `Identity`.
            resolved: values of other arguments that ``__init__`` chose or converted.

        Raises:
            TypeError: if the norm is not a dataclass.
        """
        values = {**resolved, "norm": to_config(norm or Identity())}
        parameters = inspect.signature(type(self)).parameters
        foreign: list[str] = []
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            foreign = [name for name in {**self.hparams, **values} if name not in parameters]
        # Lightning merges a mapping into stored hyperparameters, and drops ignored ones.
        self.save_hyperparameters(values, ignore=foreign)

    def remember(self, norm: Norm | None, **resolved: Any) -> None:
        """Deprecated: ``save_hyperparameters()``, then `resolve_hyperparameters`."""
        warnings.warn(
            "remember is deprecated: call save_hyperparameters(), then resolve_hyperparameters("
            "norm, ...)",
            DeprecationWarning,
            stacklevel=2,
        )
        frame = inspect.currentframe()
        self.save_hyperparameters(frame=frame and frame.f_back)
        self.resolve_hyperparameters(norm, **resolved)

    @property
    def hparams_initial(self) -> AttributeDict:
        """Hyperparameters for loggers: with the size of a vocabulary, not its words."""
        initial = super().hparams_initial
        if isinstance(words := initial.get("vocabulary"), list):
            initial["vocabulary"] = f"{len(words):,} words"
        return initial

    # Facts for the command line and cards

    @property
    def multiplications(self) -> int | None:
        """Multiplications in the forward pass of one example, or None if unknown.

        ``ln-zoo`` uses one thread for small batches.
        """
        return None

    @classmethod
    def card_example(cls, preprocessing: Mapping[str, Any]) -> str:
        """Lines of Python that use a loaded ``model``, for a card."""
        return ""

    # Training

    @abstractmethod
    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        """The loss of a batch, as in Lightning."""

    @abstractmethod
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer, as in Lightning."""

    def default_clipping(self) -> tuple[float | None, str | None]:
        """Value and algorithm of gradient clipping if the trainer sets none."""
        return None, None

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if gradient_clip_val is None:
            gradient_clip_val, default = self.default_clipping()
            gradient_clip_algorithm = default or gradient_clip_algorithm
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    # Training runs and checkpoints

    @property
    def _run_counter(self) -> RunCounter:
        # Created lazily: `load_from_checkpoint` behaves differently if the class has `__init__`.
        counter: RunCounter = self.__dict__.setdefault("_counter", RunCounter())
        return counter

    @property
    def training_runs(self) -> tuple[TrainingRun, ...]:
        """The training runs behind the weights, oldest first; see `ln_zoo.utils.training_runs`.

        Set this when you replace the weights.
        """
        return self._run_counter.runs(self._trainer)

    @training_runs.setter
    def training_runs(self, runs: tuple[TrainingRun, ...]) -> None:
        self.__dict__["_counter"] = RunCounter(runs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        hparams = checkpoint.setdefault("hyper_parameters", {})
        hparams["_class_path"] = class_path(type(self))
        hparams["_instantiator"] = _INSTANTIATOR
        states = [torch.get_rng_state()] * self.trainer.world_size
        if len(states) > 1:
            torch.distributed.all_gather_object(states, states[0])
        checkpoint["rng_state"] = torch.stack(states)
        checkpoint[RUNS] = self._run_counter.stored(self.trainer)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._rng_states = checkpoint.get("rng_state")
        self.__dict__["_counter"] = RunCounter.restored(checkpoint.get(RUNS))

    def on_train_start(self) -> None:
        # Restored here because Lightning draws numbers after it reads the checkpoint, and only if
        # this run resumes: a model that was merely loaded starts new noise.
        states = self.__dict__.pop("_rng_states", None)
        resumed = states is not None and self.trainer.ckpt_path is not None
        self._run_counter.begin(self.trainer, self.trainer.ckpt_path is not None)
        if resumed and len(states) == self.trainer.world_size:
            torch.set_rng_state(states[self.global_rank])
        elif self.global_rank:
            # All processes share a seed for equal weights; their noise must differ.
            torch.manual_seed((torch.initial_seed() + self.global_rank) % 2**63)

    def on_train_end(self) -> None:
        self._run_counter.end(self.trainer)

    # Export

    def to_onnx(  # type: ignore[override]
        self, file_path: str | os.PathLike[str], input_sample: None = None, **options: Any
    ) -> Exported:
        """Export to ONNX by `ln_zoo.export.export`, which compares the file with the model.

        ``input_sample`` must be None: shapes are known, and sizes such as N and T stay dynamic.
        ``options`` are those of `ln_zoo.export.export`, ``form`` being ``"sequence"`` by default.

        Raises:
            ln_zoo.export.ExportError: as `ln_zoo.export.export`; for an unsupported form, or an
                input sample.
        """
        if input_sample is not None:
            raise ExportError(
                f"{type(self).__name__}.to_onnx takes no input_sample; call "
                "torch.onnx.export(model, ...) to trace forward with one"
            )
        return export(self, file_path, **{"form": "sequence", **options}, format="onnx")

    # Publishing

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **options: Any) -> Self:
        """A published model of this class with its weights, in evaluation mode.

        A class of your own reads its own cards, and its ln_zoo base class's if it takes their
        arguments.

        Args:
            name_or_path: a name, a card folder or a hub id, as for `ln_zoo.load`.
            options: further arguments of `ln_zoo.load`.

        Raises:
            ln_zoo.zoo.CardError: as `ln_zoo.load`; for a model of another class.
        """
        from ln_zoo.zoo import loading

        return loading.load_as(cls, name_or_path, **options)

    def save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> Path:
        """Write weights, arguments and card to a folder, which `from_pretrained` reads.

        The card of a loaded model with unchanged weights is kept. ``ln-zoo card`` writes a card
        from a checkpoint and its test run, with all facts of that run.

        Args:
            folder: created; it is a complete hub repository.
            options: ``metrics``, as ``trainer.test(model, data)[0]``; ``data``, the data module or
                a mapping of facts with ``dataset``; ``facts`` of the author (see
                `ln_zoo.zoo.Facts`); ``name``; ``overwrite``.

        Raises:
            ln_zoo.zoo.CardError: if an argument, name or fact cannot be stored, or if the folder
                must not be replaced.

        Example:
            >>> import tempfile
            >>> from ln_zoo.models import MLPClassifier
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = MLPClassifier(64, [8]).save_pretrained(f"{folder}/mine")
            ...     sorted(file.name for file in path.iterdir())
            ['README.md', 'config.json', 'model.safetensors', 'results.json']
        """
        from ln_zoo.zoo import publishing

        return publishing.save(self, folder, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Upload weights, arguments and card to the Hugging Face hub.

        Args:
            repo_id: ``user/repo``; created if it does not exist.
            options: ``metrics``, ``data``, ``facts`` and ``name`` of `save_pretrained`; ``token``,
                ``private``, ``revision`` and ``dry_run`` of `ln_zoo.zoo.publish`.

        Returns:
            The `ln_zoo.zoo.publishing.Publication`.

        Raises:
            ln_zoo.zoo.CardError: as `save_pretrained` and `ln_zoo.zoo.publish`.
        """
        from ln_zoo.zoo import publishing

        return publishing.push(self, repo_id, **options)


def runs_of_checkpoint(checkpoint: Mapping[str, Any]) -> tuple[TrainingRun, ...]:
    """The training runs behind the weights of a checkpoint; see `ln_zoo.utils.training_runs`."""
    return RunCounter.restored(checkpoint.get(RUNS)).runs(None)


def fused_on_cpu(module: LightningModule) -> dict[str, bool]:
    """``{"fused": True}`` if torch's Adam and SGD should use their fused form, else ``{}``.

    On a CPU it takes half the time; on a GPU the default is as fast. Under mixed precision
    Lightning refuses to clip the gradients of a fused optimizer.
    """
    trainer = module._trainer  # the public property raises without a trainer
    mixed = trainer is not None and str(trainer.precision).endswith("-mixed")
    return {"fused": True} if module.device.type == "cpu" and not mixed else {}
