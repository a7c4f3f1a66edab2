"""Datasets held in memory, fetched a whole batch at a time, resumable within an epoch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ln_zoo.utils.checks import check_at_least

Batch = tuple[Tensor, Tensor]


class BatchSet(Dataset[Any]):
    """A dataset that is indexed by a tensor of indices and returns a whole batch.

    Collating single examples would cost more than a small training step.
    """

    @property
    def batches(self) -> type[DistributedBatches]:
        return DistributedBatches

    def __getitems__(self, indices: list[int]) -> Any:
        """The batch that a plain ``DataLoader`` requests."""
        return self[torch.tensor(indices)]


class Tensors(BatchSet):
    r"""N inputs (N, \*), in batches float32 divided by ``scale``, with labels (N,) int64."""

    def __init__(self, inputs: Tensor, labels: Tensor, scale: float = 1.0) -> None:
        if len(inputs) != len(labels):
            raise ValueError(
                f"there are {len(inputs)} inputs and {len(labels)} labels; each input needs one"
            )
        self.inputs = inputs
        self.labels = labels
        self.scale = scale

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor) -> Batch:
        return self.inputs[index].float() / self.scale, self.labels[index]


class DistributedBatches(DistributedSampler[Tensor]):
    """Sampler of whole batches of indices, distributed over W processes.

    Process r takes batches r, r + W, ... of one list, which does not depend on W. Lightning keeps a
    ``DistributedSampler`` under DDP and calls its ``set_epoch``.

    *Training*: the order of epoch e depends only on (seed, e), so a resumed run continues in the
    same order. All processes take the same number of steps; excess batches are dropped, and so is a
    last batch of one example, which has no variance for batch norm. *Evaluation*: each example
    occurs once, so scores do not depend on W. Processes may differ by one batch. Batches are
    smaller if a process would get none.

    ``shuffle`` permutes the examples in each epoch; ``drop_last`` drops a last batch of fewer than
    ``batch_size``. ``num_replicas`` (W) and ``rank`` (r) default to the process group's.

    Example:
        >>> data = Tensors(torch.zeros(7, 2), torch.zeros(7, dtype=torch.int64))
        >>> [batch.tolist() for batch in DistributedBatches(data, 3)]
        [[0, 1, 2], [3, 4, 5], [6]]
        >>> [batch.tolist() for batch in DistributedBatches(data, 3, num_replicas=2, rank=1)]
        [[3, 4, 5]]
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        training: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        check_at_least(1, batch_size=batch_size)
        check_at_least(0, seed=seed)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if num_replicas is None:
            num_replicas = torch.distributed.get_world_size() if distributed else 1
        if rank is None:
            rank = torch.distributed.get_rank() if distributed else 0
        super().__init__(
            dataset,
            num_replicas=num_replicas,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        examples = len(dataset)  # type: ignore[arg-type]
        if not training:
            # A process without a batch would miss the reduction of metrics.
            batch_size = max(1, min(batch_size, examples // num_replicas))
        self.batch_size = batch_size
        self.training = training
        self.first = 0
        batches, remainder = divmod(examples, batch_size)
        if remainder > (1 if training else 0) and not drop_last:
            batches += 1
        if batches < num_replicas:
            raise ValueError(
                f"{examples} examples in batches of {batch_size} make {batches} batches"
                f"{' to train on' if training else ''}, too few for {num_replicas} process(es): "
                "lower the batch size or use fewer devices"
            )
        self.whole = batches
        self.total = batches - batches % num_replicas if training else batches

    def __iter__(self) -> Iterator[Any]:
        """Iterate over (B,) int64 indices, starting with this rank's batch number ``first``."""
        order = self.permutation(len(self.dataset))  # type: ignore[arg-type]
        batches = order.split(self.batch_size)[: self.total]
        yield from batches[self.rank :: self.num_replicas][self.first :]

    def __len__(self) -> int:
        return len(range(self.rank, self.total, self.num_replicas))

    def permutation(self, n: int, *stream: int) -> Tensor:
        """A permutation of 0 to n - 1 for this epoch and ``stream``, if ``shuffle`` is set."""
        if not self.shuffle:
            return torch.arange(n)
        return torch.randperm(n, generator=self.generator(*stream))

    def generator(self, *stream: int) -> torch.Generator:
        # Hashed, since seed + epoch would give neighbouring seeds the same numbers.
        mixed = np.random.SeedSequence((self.seed, self.epoch, *stream))
        return torch.Generator().manual_seed(int(mixed.generate_state(1, np.uint64)[0]))

    def settings(self) -> dict[str, Any]:
        """Settings that determine the batches of an epoch."""
        return {
            "examples": len(self.dataset),  # type: ignore[arg-type]
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "processes": self.num_replicas,
        }


class BatchLoader(DataLoader):
    """A ``DataLoader`` over `DistributedBatches`, with the options of both.

    Creating an iterator does not use torch's global random state and loads nothing: Lightning
    creates it before it sets the epoch.

    Args:
        dataset: N examples, indexed by a (B,) tensor. Its attribute ``batches``, if present, is the
            sampler class.
        sampler: set by Lightning; a ``SequentialSampler`` (``overfit_batches``) disables shuffling.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        training: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        sampler: Sampler | None = None,
        batch_sampler: None = None,
    ) -> None:
        if sampler is None or isinstance(sampler, SequentialSampler):
            batches = getattr(dataset, "batches", DistributedBatches)
            sampler = batches(
                dataset,
                batch_size,
                training=training,
                shuffle=shuffle,
                seed=seed,
                drop_last=drop_last,
            )
        elif not isinstance(sampler, DistributedBatches):
            raise TypeError(
                f"{type(self).__name__} takes a DistributedBatches sampler, which yields whole "
                f"batches, got {type(sampler).__name__}"
            )
        super().__init__(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=num_workers,
            pin_memory=pin_memory,
            collate_fn=whole_batch,
            worker_init_fn=_start_worker,
            generator=torch.Generator().manual_seed(seed),
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


class ResumableLoader(BatchLoader):
    """A `BatchLoader` for training that resumes within an epoch.

    Lightning saves its state with each checkpoint. After loading, the first pass over the
    checkpoint's epoch skips the batches already used; it raises ValueError if the batch size, the
    order or the number of processes differs.
    """

    sampler: DistributedBatches
    _epoch = 0
    _handed_out = 0
    _loaded: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler = self.sampler
        sampler.first = 0
        if self._loaded is not None and self._loaded["epoch"] == sampler.epoch:
            self._check_order(self._loaded)
            sampler.first = int(self._loaded["handed_out"])
        self._loaded = None
        self._epoch, self._handed_out = sampler.epoch, sampler.first
        for batch in super().__iter__():
            self._handed_out += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The epoch, its batches used so far, and the settings of their order."""
        if self._loaded is not None:
            return dict(self._loaded)
        return {"epoch": self._epoch, "handed_out": self._handed_out, **self.sampler.settings()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = dict(state_dict)

    def _check_order(self, loaded: dict[str, Any]) -> None:
        differing = [
            f"{name} {loaded.get(name)} (now {now})"
            for name, now in self.sampler.settings().items()
            if loaded.get(name) != now
        ]
        if differing:
            raise ValueError(
                f"the checkpoint was written within epoch {loaded['epoch']}, after "
                f"{loaded['handed_out']} batches, by a run with {', '.join(differing)}: resume "
                "with the same values, or from a checkpoint written at the end of an epoch"
            )


def whole_batch(batch: Any) -> Any:
    """Collate function for batches that are complete."""
    return batch


def _start_worker(number: int) -> None:
    """Ignore SIGINT in workers; the main process handles it and still needs their batches."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    if os.environ.get("PL_SEED_WORKERS") == "1":
        pl_worker_init_function(number)


def subset(examples: Any, count: int | None) -> Any:
    """A set, or ``count`` evenly spaced examples of it, since neighbours are often alike."""
    if count is None or count >= len(examples):
        return examples
    return examples.pick([i * len(examples) // count for i in range(count)])


def rows(index: Tensor | int) -> list[int]:
    """The row numbers in a tensor of indices or a single index."""
    return torch.as_tensor(index).reshape(-1).tolist()
