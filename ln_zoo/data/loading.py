"""Datasets held in memory, fetched a whole batch at a time, resumable within an epoch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

Batch = tuple[Tensor, Tensor]


class Tensors(Dataset[Batch]):
    """Inputs and labels of N examples, indexed by a tensor of indices.

    One index operation gives a whole batch: at four examples a batch, collating single examples
    would cost more than the training step.

    Args:
        inputs: (N, \\*), any dtype; a batch of them is float32, divided by ``scale``.
        labels: (N,) int64.
        scale: the input value that becomes 1.0.

    Raises:
        ValueError: inputs and labels differ in number.

    Example:
        >>> pixels = torch.tensor([[0], [51], [255]], dtype=torch.uint8)
        >>> data = Tensors(pixels, torch.arange(3), scale=255)
        >>> data[torch.tensor([2, 1])]
        (tensor([[1.0000], [0.2000]]), tensor([2, 1]))
    """

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

    def __getitems__(self, indices: list[int]) -> Batch:
        """One batch for a list of indices: what a ``DataLoader`` with a batch size asks for."""
        return self[torch.tensor(indices)]


class DistributedBatches(DistributedSampler[Tensor]):
    """Indices of whole batches, dealt out to W processes.

    The batches of an epoch are one list, the same for any W; process r takes batches r, r + W, ...
    Being a ``DistributedSampler``, Lightning leaves it alone under DDP and calls ``set_epoch``.

    *Training*: the order of epoch e depends on (seed, e) only, never on the epochs before, so that
    a resumed run continues in the order of one never interrupted. Trailing batches are dropped so
    that all processes take the same number of steps, and so is a last batch of a single example,
    which has no variance for batch norm. *Evaluation*: nothing is dropped or repeated, so that any
    number of processes scores exactly the same batches; their numbers of batches may differ by one.
    Only where a process would get no batch at all are there more and smaller ones.

    Args:
        dataset: the N examples; only its length is used.
        batch_size: examples per batch, B; the last batch holds what remains.
        training: see above.
        shuffle: permute the examples in each epoch, else take them in order.
        seed: seed of the permutations, at least 0.
        drop_last: drop a last batch of fewer than B examples.
        num_replicas: number of processes W; default: those of the process group, 1 without one.
        rank: number r of this process; default: that in the process group, 0 without one.

    Raises:
        ValueError: a batch size below 1, a negative seed, or too few examples for the processes.

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
            # A process without a batch would not take part in the exchange of metrics.
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
        """Yields (B,) int64 indices, from the rank's batch number ``first`` on."""
        order = self.permutation(len(self.dataset))  # type: ignore[arg-type]
        batches = order.split(self.batch_size)[: self.total]
        yield from batches[self.rank :: self.num_replicas][self.first :]

    def __len__(self) -> int:
        """The batches of a whole epoch for this process, wherever iteration starts."""
        return len(range(self.rank, self.total, self.num_replicas))

    def permutation(self, n: int, *stream: int) -> Tensor:
        """Numbers 0 to n - 1 in the order of this epoch, int64; without ``shuffle`` as they are.

        Args:
            n: how many.
            stream: numbers that tell apart what is permuted in the same epoch.
        """
        if not self.shuffle:
            return torch.arange(n)
        return torch.randperm(n, generator=self.generator(*stream))

    def generator(self, *stream: int) -> torch.Generator:
        """Draws what is random in this epoch; ``stream`` tells apart what is drawn in the same."""
        # Seeds are mixed: with seed + epoch, neighbouring seeds would share their numbers.
        mixed = np.random.SeedSequence((self.seed, self.epoch, *stream))
        return torch.Generator().manual_seed(int(mixed.generate_state(1, np.uint64)[0]))

    def settings(self) -> dict[str, Any]:
        """What the batches of an epoch depend on, by name."""
        return {
            "examples": len(self.dataset),  # type: ignore[arg-type]
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "processes": self.num_replicas,
        }


class BatchLoader(DataLoader):
    """A ``DataLoader`` over `DistributedBatches`.

    Making an iterator draws nothing from torch's global random state, and nothing is fetched before
    the first batch is asked for: Lightning makes the iterator before it sets the epoch.

    Args:
        dataset: the N examples; indexing it with what the sampler yields, a (B,) tensor, gives a
            batch. Its attribute ``batches``, if it has one, is the subclass of `DistributedBatches`
            to take in place of that.
        batch_size: examples per batch.
        training: see `DistributedBatches`, as for shuffle, seed and drop_last.
        shuffle: permute the examples in each epoch.
        seed: seed of the permutations.
        drop_last: drop a last batch of fewer examples.
        num_workers: processes that fetch batches; the data are in memory, 0 is fastest.
        pin_memory: put batches into page-locked memory, for faster copies to a GPU.
        sampler: what Lightning puts in place of the sampler: a `DistributedBatches` is used as it
            is, a ``SequentialSampler`` (``Trainer(overfit_batches=...)``) turns shuffling off.
        batch_sampler: None, which Lightning passes beside its sampler.

    Raises:
        ValueError: as `DistributedBatches`.
        TypeError: another sampler.
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
    """A `BatchLoader` that continues within an epoch: for training.

    Lightning saves the state of such a loader with each checkpoint. After it is loaded, the first
    pass over the epoch of the checkpoint starts behind the batches already handed out; any other
    epoch is complete.

    Raises:
        ValueError: when iterated in the middle of an epoch after the state of a loader with another
            batch size, order or number of processes was loaded.

    Example:
        >>> data = Tensors(torch.zeros(6, 1), torch.arange(6))
        >>> loader = ResumableLoader(data, 2)
        >>> batches = iter(loader)
        >>> next(batches)[1]
        tensor([0, 1])
        >>> resumed = ResumableLoader(data, 2)
        >>> resumed.load_state_dict(loader.state_dict())
        >>> [labels.tolist() for _, labels in resumed]
        [[2, 3], [4, 5]]
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
        """The epoch, its batches handed out so far, and what their order depends on."""
        if self._loaded is not None:
            return dict(self._loaded)
        return {
            "epoch": self._epoch,
            "handed_out": self._handed_out,
            **self.sampler.settings(),
        }

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
    """Returns a batch as it is, where a ``DataLoader`` would collate examples."""
    return batch


def _start_worker(number: int) -> None:
    """Leaves signals to the process that trains: Ctrl-C reaches all, and it still needs batches."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    if os.environ.get("PL_SEED_WORKERS") == "1":
        pl_worker_init_function(number)


def check_at_least(least: int, **values: int) -> None:
    """Checks that each named value is an integer of at least ``least``.

    Raises:
        ValueError: a value is not.
    """
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Checks that a named value is one of the choices.

    Raises:
        ValueError: it is not.
    """
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def evenly_spaced(n: int, examples: int) -> list[int]:
    """Some of the numbers 0 to n - 1, at even distances.

    Example:
        >>> evenly_spaced(10, 4)
        [0, 2, 5, 7]
    """
    return [i * n // examples for i in range(examples)]
