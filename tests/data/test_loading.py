"""Order, sharding and resumption of batches, without a trainer."""

import pickle
from itertools import chain

import pytest
import torch
from data_support import ready
from refusals import refuses

from ln_zoo.data import (
    BatchLoader,
    BinarizedDigits,
    DistributedBatches,
    ResumableLoader,
    SyntheticBooks,
    SyntheticClozeQA,
    SyntheticHandwriting,
    Tensors,
)


def numbered(examples: int) -> Tensors:
    return Tensors(torch.arange(examples)[:, None], torch.arange(examples))


def batches(examples: int, batch_size: int, epoch: int = 0, **options) -> list[list[int]]:
    sampler = DistributedBatches(numbered(examples), batch_size, **options)
    sampler.set_epoch(epoch)
    result = [batch.tolist() for batch in sampler]
    assert len(result) == len(sampler)
    return result


def shards(examples: int, batch_size: int, processes: int, **options) -> list[list[list[int]]]:
    return [
        batches(examples, batch_size, num_replicas=processes, rank=rank, **options)
        for rank in range(processes)
    ]


def flat(lists: list[list]) -> list:
    return list(chain.from_iterable(lists))


def labels(loader) -> list[list[int]]:
    return [batch_labels.tolist() for _, batch_labels in loader]


def test_a_batch_is_scaled_float32_and_leaves_the_data_alone():
    pixels = torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8)
    data = Tensors(pixels, torch.tensor([3, 4]), scale=255)
    images, classes = data[torch.tensor([1, 0])]
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, torch.tensor([[0.2, 0.4], [0.0, 1.0]]), rtol=0, atol=1e-7)
    assert classes.tolist() == [4, 3]
    images.fill_(9)
    assert data[torch.tensor([1])][0].max() < 0.5
    assert torch.equal(data.__getitems__([1, 0])[1], classes)


def test_float_inputs_are_not_scaled_in_place():
    data = Tensors(torch.ones(2, 1), torch.zeros(2, dtype=torch.int64), scale=2)
    for _ in range(2):
        assert data[0][0].item() == 0.5


def test_inputs_without_labels_are_refused():
    refuses("3 inputs and 2 labels", Tensors, torch.zeros(3, 1), torch.zeros(2))


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
@pytest.mark.parametrize("examples", [97, 101, 100])
def test_evaluation_shards_are_the_batches_of_one_process(examples, processes):
    whole = batches(examples, 7)
    assert flat(whole) == list(range(examples))
    parts = shards(examples, 7, processes)
    assert sorted(flat(parts)) == whole
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    # Fewer examples than a batch for each process: every one has a batch all the same.
    few = shards(10, 100, processes)
    assert all(few)
    assert sorted(flat(flat(few))) == list(range(10))


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
@pytest.mark.parametrize("examples", [97, 101, 100])
def test_training_shards_are_disjoint_and_even(examples, processes):
    whole = batches(examples, 4, training=True, shuffle=True)
    parts = shards(examples, 4, processes, training=True, shuffle=True)
    dealt = [batch for step in zip(*parts, strict=True) for batch in step]
    assert dealt == whole[: len(dealt)]
    assert len(whole) - len(dealt) < processes
    indices = flat(dealt)
    assert len(set(indices)) == len(indices)


@pytest.mark.parametrize(
    ("examples", "batch_size", "options", "sizes"),
    [
        # A single trailing example is left out in training only.
        (9, 4, {"training": True}, [4, 4]),
        (10, 4, {"training": True}, [4, 4, 2]),
        (9, 4, {}, [4, 4, 1]),
        (3, 1, {"training": True}, [1, 1, 1]),
        (11, 4, {"training": True, "drop_last": True}, [4, 4]),
        (12, 4, {"training": True, "drop_last": True}, [4, 4, 4]),
    ],
)
def test_the_last_batch(examples, batch_size, options, sizes):
    assert [len(batch) for batch in batches(examples, batch_size, **options)] == sizes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"batch_size": 4, "seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"batch_size": 4, "training": True, "num_replicas": 4}, "make 3 batches .* 4 process"),
        ({"batch_size": 20, "training": True, "drop_last": True}, "make 0 batches"),
    ],
)
def test_what_makes_no_batches_is_refused(options, message):
    refuses(message, DistributedBatches, numbered(10), **{"rank": 0, "num_replicas": 1, **options})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_takes_the_epoch_set_after_iter(num_workers):
    options = {"training": True, "shuffle": True, "seed": 3}
    loader = BatchLoader(numbered(10), 4, num_workers=num_workers, **options)
    iterator = iter(loader)
    loader.sampler.set_epoch(5)
    assert labels(iterator) == batches(10, 4, 5, **options)


def test_loader_refuses_a_sampler_of_single_examples():
    data = numbered(10)
    with pytest.raises(TypeError, match="got RandomSampler"):
        BatchLoader(data, 4, sampler=torch.utils.data.RandomSampler(data))


def shuffled(**options) -> ResumableLoader:
    return ResumableLoader(numbered(19), 4, **{"training": True, "shuffle": True} | options)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("handed_out", [0, 1, 3, 5])
def test_resumption_gives_the_remaining_batches_once(handed_out, num_workers):
    def loader() -> ResumableLoader:
        made = shuffled(num_workers=num_workers)
        made.sampler.set_epoch(2)
        return made

    interrupted = loader()
    iterator = iter(interrupted)
    for _ in range(handed_out):
        next(iterator)
    state = pickle.loads(pickle.dumps(interrupted.state_dict()))

    resumed = loader()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    iter(resumed)
    if handed_out:
        assert labels(resumed) == labels(loader())[handed_out:]
        assert len(resumed) == 5
        assert resumed.state_dict()["handed_out"] == 5
    resumed.sampler.set_epoch(3)
    assert labels(resumed) == batches(19, 4, 3, training=True, shuffle=True)


PARTS = {"train_size": 20, "length_mode": "tbptt", "max_points": 9}


def test_state_of_another_epoch_skips_nothing():
    loader, resumed = shuffled(), shuffled()
    next(iter(loader))
    resumed.load_state_dict(loader.state_dict())
    resumed.sampler.set_epoch(1)
    assert len(labels(resumed)) == 5


@pytest.mark.parametrize(
    ("cls", "options", "changed", "message"),
    [
        (BinarizedDigits, {}, {"seed": 1}, r"seed 0 \(now 1\)"),
        (
            BinarizedDigits, {"binarization": "dynamic"}, {"binarization_seed": 1},
            r"binarization_seed 0 \(now 1\)",
        ),
        (SyntheticBooks, {"books": 5}, {"sampler": "proportional"}, "round_robin"),
        (SyntheticClozeQA, {"train_size": 20}, {"entities": "file"}, "entities"),
        (SyntheticHandwriting, PARTS, {"max_points": 8}, r"max_points 9 \(now 8\)"),
        (SyntheticHandwriting, PARTS, {"length_mode": "crop"}, r"parts True \(now False\)"),
    ],
)  # fmt: skip
def test_resumption_within_an_epoch_in_another_order_is_refused(cls, options, changed, message):
    def loader(**more) -> ResumableLoader:
        return ready(cls(**{"batch_size": 4, **options, **more})).train_dataloader()

    interrupted, resumed = loader(), loader(**changed)
    next(iter(interrupted))
    resumed.load_state_dict(interrupted.state_dict())
    refuses(message, next, iter(resumed))


def test_resumption_without_shuffling_is_refused():
    loader, resumed = shuffled(), shuffled(shuffle=False)
    next(iter(loader))
    resumed.load_state_dict(loader.state_dict())
    refuses("shuffle", next, iter(resumed))
