"""The data module that all datasets inherit: three sets and their loaders."""

from __future__ import annotations

import hashlib
import inspect
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from ln_zoo.data.loading import BatchLoader, ResumableLoader, whole_batch
from ln_zoo.utils.checks import check_at_least


class ZooDataModule(LightningDataModule, ABC):
    """A data module with sets ``"train"``, ``"val"`` and ``"test"`` and loaders of whole batches.

    Training resumes within an epoch. Evaluation scores each example once on any number of
    processes. A subclass fills ``_sets`` in `setup` and implements `training_set` and
    `evaluation_set`. Its constructor states its own options and passes ``**options`` on; the
    command line and ``inspect.signature`` show all of them.

    Args:
        batch_size: training examples per step and process.
        seed: seed of the order of training examples; the splits do not depend on it.
        eval_batch_size: examples per batch in evaluation; changes results only under norms that use
            batch statistics.
        num_workers: processes that load batches; 0 is fastest for data in memory.
        pin_memory: use page-locked memory for faster copies to a GPU.
        drop_last: drop the last training batch if it is smaller than ``batch_size``. A last
            training batch of one example is always dropped.
    """

    name: str
    #: The kind of batch, which models check.
    batch_kind: ClassVar[str]
    #: Name of the test set in tables.
    test_split: str = "test"
    #: Folder or file of a local copy.
    _folder: Path | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "gives" in vars(cls):
            _warn_renamed("gives", "batch_kind")
            cls.batch_kind = cls.gives  # type: ignore[assignment]
        cls.__signature__ = _signature(cls)  # type: ignore[attr-defined]

    def __init__(
        self,
        batch_size: int,
        seed: int = 0,
        eval_batch_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        check_at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        check_at_least(0, seed=seed, num_workers=num_workers)
        self.batch_size = batch_size
        self.seed = seed
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.drop_last = drop_last
        self._sets: dict[str, Any] = {}

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Preprocessing of an example as plain data, for model cards."""
        return {}

    @property
    def metadata(self) -> dict[str, Any]:
        """The dataset, its splits and its batches as plain data, for tables and model cards."""
        return {
            "dataset": self.name,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "seed": self.seed,
        }

    @property
    def facts(self) -> dict[str, Any]:
        """Deprecated name of `metadata`."""
        _warn_renamed("facts", "metadata")
        return self.metadata

    @property
    def gives(self) -> str:
        """Deprecated name of `batch_kind`."""
        _warn_renamed("gives", "batch_kind")
        return self.batch_kind

    def checksum(self) -> str | None:
        """SHA-256 of names, sizes and first MiB of the data's files; None without local files."""
        folder = self._folder
        if folder is None or not folder.exists():
            return None
        found = hashlib.sha256()
        for path in [folder] if folder.is_file() else sorted(folder.rglob("*")):
            name = path.relative_to(folder.parent)
            if path.is_file() and not any(part.startswith(".") for part in name.parts):
                with path.open("rb") as file:
                    content = hashlib.sha256(file.read(2**20)).hexdigest()
                found.update(f"{name.as_posix()} {path.stat().st_size} {content}\n".encode())
        return found.hexdigest()

    @abstractmethod
    def training_set(self) -> Dataset:
        """The training set in the form used for training."""

    @abstractmethod
    def evaluation_set(self, name: str, examples: int | None = None) -> Dataset:
        """A set, or ``examples`` of it, in the form and order of evaluation."""

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(
            self.training_set(),
            self.batch_size,
            training=True,
            shuffle=True,
            seed=self.seed,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )

    def train_eval_dataloader(
        self, batch_size: int | None = None, examples: int | None = None
    ) -> BatchLoader:
        """The training set, or ``examples`` of it, in the form used for evaluation."""
        return self._evaluation_loader("train", batch_size, examples)

    def val_eval_dataloader(
        self, batch_size: int | None = None, examples: int | None = None
    ) -> BatchLoader:
        """The validation set; arguments as for `train_eval_dataloader`."""
        return self._evaluation_loader("val", batch_size, examples)

    def val_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader:
        """The test set in a plain ``DataLoader``, whose indices Lightning passes to writers."""
        return DataLoader(
            self.evaluation_set("test"),
            batch_size=self.eval_batch_size,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            collate_fn=whole_batch,
            generator=torch.Generator(),
        )

    def _evaluation_loader(
        self, name: str, batch_size: int | None = None, examples: int | None = None
    ) -> BatchLoader:
        return BatchLoader(
            self.evaluation_set(name, examples),
            self.eval_batch_size if batch_size is None else batch_size,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )

    def _set(self, name: str) -> Any:
        if not self._sets:
            raise RuntimeError("the data are not read yet: call prepare_data() and setup() first")
        return self._sets[name]


def _warn_renamed(old: str, new: str) -> None:
    warnings.warn(
        f"{old} of data modules is deprecated: use {new}", DeprecationWarning, stacklevel=3
    )


def _signature(cls: type) -> inspect.Signature:
    found: dict[str, inspect.Parameter] = {}
    for base in (base for base in cls.__mro__ if "__init__" in vars(base)):
        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        own = not found
        for parameter in parameters:
            if parameter.kind is not parameter.VAR_KEYWORD and parameter.name not in found:
                kind = parameter.kind if own else parameter.KEYWORD_ONLY
                found[parameter.name] = parameter.replace(kind=kind)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    return inspect.Signature(sorted(found.values(), key=lambda parameter: parameter.kind))
