"""The contract of a dataset."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ln_zoo.testing.argument_case import ArgumentCase

_SETS = ("train", "val", "test")


class DataCase(ArgumentCase):
    """Contract of a dataset, a `ln_zoo.data.ZooDataModule`; pytest runs every check.

    A subclass implements `data`. To omit a check, set it to ``None``.

    Example:
        >>> from ln_zoo.data import Digits
        >>> class TestDigits(DataCase):
        ...     invalid = {"image_size": (7, 2.5)}
        ...
        ...     def data(self, **options):
        ...         return Digits(**{"train_size": 50, "val_size": 20, **options})
        >>> TestDigits().test_invalid_arguments_are_named()
    """

    _always_invalid: ClassVar[dict[str, tuple[Any, ...]]] = {
        "batch_size": (0, -4, 2.5, True),
        "eval_batch_size": (0,),
        "seed": (-1,),
        "num_workers": (-1,),
    }

    def data(self, **options: Any) -> Any:
        """A data module of at most some hundred examples; options override its own."""
        raise NotImplementedError

    def _made(self, **arguments: Any) -> Any:
        return self.data(**arguments)

    def _ready(self, **options: Any) -> Any:
        data = self.data(**{"batch_size": 4, "eval_batch_size": 3, **options})
        data.prepare_data()
        data.setup()
        return data

    def test_loaders_need_setup(self) -> None:
        with pytest.raises(RuntimeError, match="setup"):
            self.data().train_dataloader()

    def test_setup_reads_once(self) -> None:
        data = self._ready()
        data.read = None
        data.setup()
        assert len(data.training_set())

    def test_metadata_is_plain(self) -> None:
        data = self._ready(seed=7)
        for name in ("metadata", "preprocessing"):
            plain = getattr(data, name)
            assert json.loads(json.dumps(plain)) == plain, f"{name} must be JSON: {plain}"
        metadata = data.metadata
        assert (metadata["dataset"], metadata["seed"]) == (data.name, 7)
        assert metadata["batch_size"] == data.batch_size

    def test_order_of_training_depends_on_seed_and_epoch_only(self) -> None:
        def order(seed: int, epoch: int) -> list[Any]:
            sampler = self._ready(seed=seed).train_dataloader().sampler
            sampler.set_epoch(epoch)
            return _plain(list(sampler))

        first = {}
        for seed in range(2):
            for epoch in range(2):
                torch.default_generator.manual_seed(10 * seed + epoch)
                first[seed, epoch] = order(seed, epoch)
        assert first == {key: order(*key) for key in reversed(first)}
        assert len({str(batches) for batches in first.values()}) == len(first), (
            "two seeds or epochs have one order"
        )

    def test_an_epoch_repeats_no_example(self) -> None:
        data = self._ready()
        for processes in (1, 2, 3):
            dealt = [
                example
                for rank in range(processes)
                for batch in self._sampler(data, "training", processes, rank)
                for example in _examples(batch)
            ]
            assert len(set(dealt)) == len(dealt)

    def test_processes_train_for_as_many_steps(self) -> None:
        data = self._ready()
        for processes in (2, 3):
            steps = {
                len(list(self._sampler(data, "training", processes, rank)))
                for rank in range(processes)
            }
            assert len(steps) == 1, f"{processes} processes take {sorted(steps)} steps"

    def test_evaluation_takes_each_example_once(self) -> None:
        data = self._ready()
        for name in _SETS:
            whole = [_examples(batch) for batch in self._sampler(data, name, 1, 0)]
            ids = [example for batch in whole for example, *_ in batch]
            assert sorted(ids) == list(range(len(ids))), f"{name}: {ids}"
            for processes in (2, 3):
                shares = [
                    [_examples(batch) for batch in self._sampler(data, name, processes, rank)]
                    for rank in range(processes)
                ]
                assert all(shares), f"{name}: a process has no batch"
                assert sorted(batch for share in shares for batch in share) == sorted(whole)

    def test_loaders_leave_random_numbers_alone(self) -> None:
        data = self._ready()
        before = torch.get_rng_state()
        for loader in (data.train_dataloader(), data.val_dataloader(), data.predict_dataloader()):
            next(iter(loader))
        assert torch.equal(before, torch.get_rng_state())

    def test_two_instances_agree(self) -> None:
        for one, other in zip(self._batches(), self._batches(), strict=True):
            assert _equal(one, other)

    def test_batches_are_copies(self) -> None:
        data = self._ready()
        first = next(iter(data.test_dataloader()))
        kept = copy.deepcopy(first)
        for tensor in _tensors(first):
            tensor.zero_()
        assert _equal(next(iter(data.test_dataloader())), kept), (
            "a change of a batch changes the data"
        )

    def test_sets_can_be_pickled(self) -> None:
        data = self._ready()
        for examples in (data.training_set(), data.evaluation_set("val")):
            again = pickle.loads(pickle.dumps(examples))
            index = torch.arange(2)
            assert _equal(again.__getitems__([0, 1]), examples.__getitems__(index.tolist()))

    def test_resumes_within_an_epoch(self) -> None:
        def loader(**options: Any) -> Any:
            made = self._ready(**options).train_dataloader()
            made.sampler.set_epoch(1)
            return made

        interrupted = loader()
        batches = iter(interrupted)
        next(batches)
        state = _saved(interrupted.state_dict())
        rest = list(batches)
        resumed = loader()
        resumed.load_state_dict(state)
        for one, other in zip(resumed, rest, strict=True):
            assert _equal(one, other)
        changed = loader(batch_size=2)
        changed.load_state_dict(state)
        with pytest.raises(ValueError, match=r"batch_size 4 \(now 2\)"):
            next(iter(changed))

    def test_prediction_is_in_the_order_of_the_set(self) -> None:
        data = self._ready()
        examples = data.evaluation_set("test")
        start = 0
        for batch in data.predict_dataloader():
            indices = list(range(start, min(start + data.eval_batch_size, len(examples))))
            assert _equal(batch, examples.__getitems__(indices))
            start += len(indices)
        assert start == len(examples)

    def _batches(self) -> Iterator[Any]:
        data = self._ready()
        for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
            yield from loader

    @staticmethod
    def _sampler(data: Any, name: str, processes: int, rank: int) -> Any:
        training = name == "training"
        examples = data.training_set() if training else data.evaluation_set(name)
        size = data.batch_size if training else data.eval_batch_size
        options = {"training": True, "shuffle": True} if training else {}
        return examples.batches(examples, size, num_replicas=processes, rank=rank, **options)


def _examples(batch: Any) -> list[tuple[int, ...]]:
    """The examples of a batch of indices, with the part or draw that a sampler adds."""
    indices, extra = batch if isinstance(batch, tuple) else (batch, ())
    parts = (extra,) if isinstance(extra, int) else ()
    return [(index, *parts) for index in indices.tolist()]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _saved(state: Any) -> Any:
    """A state after a round trip through a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
