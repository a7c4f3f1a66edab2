"""Batches of handwriting: what they hold, their order, their dealing out, bad lines."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from handwriting_support import drawn, module
from refusals import refuses
from torch import Tensor

from ln_zoo.data import HandwritingBatch, LineSet, PenLines
from ln_zoo.data.pen.batches import LineBatches, median_step

LENGTHS = np.random.default_rng(5).integers(2, 60, 97).tolist()


def by_hand(lines: PenLines, i: int) -> Tensor:
    """Targets of a line in float64: differences of positions, y upwards."""
    steps = lines.steps(i, np.float64)
    positions = np.cumsum(steps[:, :2], axis=0) * (1, -1)
    moves = np.diff(positions, axis=0)
    return torch.tensor(np.column_stack([moves, steps[1:, 2]])).float()


def real(batch: HandwritingBatch) -> list[Tensor]:
    counts = batch.lengths.tolist()
    return [rows[1 : count + 1] for rows, count in zip(batch.offsets, counts, strict=True)]


def batches(points: list[int], batch_size: int, epoch: int = 0, **options) -> list:
    mode = {name: options.pop(name) for name in ("max_points", "parts") if name in options}
    sampler = LineBatches(LineSet(drawn(points), **mode), batch_size, **options)
    sampler.set_epoch(epoch)
    found = list(sampler)
    assert len(found) == len(sampler)
    return found


def training(points: list[int], batch_size: int, epoch: int = 0, **options) -> list:
    return batches(points, batch_size, epoch, training=True, shuffle=True, **options)


def taken(steps: list) -> list[tuple]:
    return [
        (*step[0].tolist(), f"part {step[1]}") if isinstance(step, tuple) else tuple(step.tolist())
        for step in steps
    ]


def test_a_batch_is_what_is_computed_by_hand() -> None:
    lines = drawn([5, 3, 9])
    batch = LineSet(lines)[torch.tensor([2, 1])]
    assert isinstance(batch, HandwritingBatch)
    assert (batch.offsets.shape, batch.offsets.dtype) == ((2, 9, 3), torch.float32)
    assert (batch.lengths.tolist(), batch.lengths.dtype) == ([8, 2], torch.int64)
    assert (batch.text, batch.first) == (("text 2", "text 1"), True)
    assert batch.offsets[:, 0].abs().sum() == 0
    assert batch.offsets[1, 3:].abs().sum() == 0
    for example, i in enumerate((2, 1)):
        assert torch.equal(real(batch)[example], by_hand(lines, i))


def test_the_null_vector_has_no_flag_even_if_a_line_begins_with_a_dot() -> None:
    dot = np.array([[10, 20, 1], [1, 0, 1], [2, 0, 1]])
    data = LineSet(PenLines.from_steps([dot], ["a"], ["."]), max_points=1, parts=True)
    assert data[torch.tensor([0])].offsets[0].tolist() == [[0, 0, 0], [1, 0, 1]]
    # In a later part the flag of the point before is there.
    assert data[torch.tensor([0]), 1].offsets[0].tolist() == [[1, 0, 1], [2, 0, 1]]
    assert data.offsets(0).tolist() == [[0, 0, 1], [1, 0, 1], [2, 0, 1]]


def test_a_crop_is_the_beginning_with_the_whole_text() -> None:
    lines = drawn([5, 3, 9])
    data = LineSet(lines, max_points=4)
    assert data.targets.tolist() == [4, 2, 4]
    batch = data[torch.tensor([0, 1, 2])]
    assert batch.lengths.tolist() == [4, 2, 4]
    assert batch.text == ("text 0", "text 1", "text 2")
    for i, found in enumerate(real(batch)):
        assert torch.equal(found, by_hand(lines, i)[:4])


def test_parts_put_together_are_the_whole_line() -> None:
    data = module(drawn(LENGTHS), batch_size=4, length_mode="tbptt", max_points=7)
    lines = data.lines("train").lines
    found: dict[str, list[Tensor]] = {}
    before = None
    for batch in data.train_dataloader():
        if batch.first:
            assert batch.offsets[:, 0].abs().sum() == 0
        else:
            assert batch.text == before.text
            for example, (now, then) in enumerate(zip(real(batch), real(before), strict=True)):
                if len(now):
                    assert len(then) == 7
                    assert torch.equal(batch.offsets[example, 0], then[-1])
                else:
                    assert batch.offsets[example].abs().sum() == 0
        assert 0 < batch.lengths.max() <= 7
        assert batch.offsets.shape[1] == batch.lengths.max() + 1
        for text, part in zip(batch.text, real(batch), strict=True):
            found.setdefault(text, []).append(part)
        before = batch
    assert len(found) == 96  # one is left over and would be a batch of its own
    for text, parts in found.items():
        assert torch.equal(torch.cat(parts), by_hand(lines, lines.text.index(text)))


def test_scales() -> None:
    lines = drawn(LENGTHS)
    whole = torch.cat([by_hand(lines, i) for i in range(len(lines))])[:, :2].double()
    mean, std = module(lines, max_points=3).offset_statistics
    assert mean.dtype == std.dtype == torch.float32
    torch.testing.assert_close(mean.double(), whole.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(std.double(), whole.std(0, correction=0), rtol=1e-6, atol=0)

    mean, std = module(lines, scale="const").offset_statistics
    assert (mean.tolist(), std.tolist()) == ([0, 0], [20, 20])

    data = module(lines, scale="median", batch_size=1)
    mean, std = data.offset_statistics
    assert (mean.tolist(), std.tolist()) == ([0, 0], [1, 1])
    for batch in (next(iter(data.val_dataloader())), next(iter(data.train_dataloader()))):
        for text, found in zip(batch.text, real(batch), strict=True):
            wanted = by_hand(lines, lines.text.index(text))
            wanted[:, :2] /= wanted[:, :2].norm(dim=1).quantile(0.5)
            torch.testing.assert_close(found, wanted)


def test_the_median_of_steps_most_of_which_do_not_move() -> None:
    assert median_step(np.array([[0, 0], [0, 0], [0, 0], [3, 4], [6, 8]])) == 7.5
    assert median_step(np.zeros((3, 2))) == 1
    assert median_step(np.array([[3.0, 4.0]])) == 5


@pytest.mark.parametrize(("parts", "steps"), [(False, 16), (True, None)])
def test_an_epoch_has_each_line_once(parts: bool, steps: int | None) -> None:
    points = LENGTHS[:-1]
    for epoch in range(3):
        found = training(points, 6, epoch, max_points=20, parts=parts)
        first = [step for step in found if not parts or step[1] == 0]
        lines = [step[0] if parts else step for step in first]
        assert sorted(torch.cat(lines).tolist()) == list(range(96))
        assert steps is None or len(found) == steps


def test_batches_hold_lines_of_similar_length() -> None:
    points = np.random.default_rng(0).integers(2, 800, 900).tolist()
    found = training(points, 8)
    spread = [max(points[i] for i in b) - min(points[i] for i in b) for b in found]
    assert np.mean(spread) < 0.03 * 800
    order = [max(points[i] for i in b) for b in found]
    assert order not in (sorted(order), sorted(order, reverse=True))


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("mode", [{}, {"max_points": 9, "parts": True}])
@pytest.mark.parametrize("lines", [97, 33])
def test_training_is_dealt_out_evenly(lines: int, mode: dict, processes: int) -> None:
    points = LENGTHS[:lines]
    for epoch in range(2):
        whole = taken(training(points, 4, epoch, **mode))
        dealt = [
            taken(training(points, 4, epoch, num_replicas=processes, rank=rank, **mode))
            for rank in range(processes)
        ]
        assert len({len(steps) for steps in dealt}) == 1
        steps = list(chain.from_iterable(dealt))
        # The batches of one process, each once, and hardly one left out.
        assert not Counter(steps) - Counter(whole)
        longest = max(-(-count // 9) for count in points) if mode.get("parts") else 1
        assert len(whole) - len(steps) < processes * longest
        for mine in dealt:
            places = [whole.index(step) for step in mine]
            assert places == sorted(places)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_epoch_has_as_many_steps(processes: int) -> None:
    last = {"num_replicas": processes, "rank": processes - 1, "drop_last": True}
    for batch_size in (4, 10):
        found = [
            training(LENGTHS, batch_size, epoch, max_points=9, parts=True, **last)
            for epoch in range(30)
        ]
        assert len({len(steps) for steps in found}) == 1


def test_drop_last_and_single_lines() -> None:
    sizes = [len(b) for b in training(LENGTHS[:11], 4)]
    assert sorted(sizes) == [3, 4, 4]
    assert [len(b) for b in training(LENGTHS[:11], 4, drop_last=True)] == [4, 4]
    assert [len(b) for b in training(LENGTHS[:9], 4)] == [4, 4]
    left_out = [set(range(9)) - set(chain(*taken(training(LENGTHS[:9], 4, e)))) for e in range(9)]
    assert len(set(map(tuple, left_out))) > 1


def test_evaluation_takes_the_targets_of_training() -> None:
    lines = drawn(LENGTHS)
    for mode, most in (("crop", 9), ("tbptt", 1000), ("full", 1000)):
        data = module(lines, length_mode=mode, max_points=9, eval_batch_size=10)
        for loader in (data.val_dataloader(), data.test_dataloader(), data.train_eval_dataloader()):
            found = list(loader)
            assert all(batch.first for batch in found)
            assert [len(batch.text) for batch in found] == [10] * 9 + [7]
            wanted = sorted(min(count - 1, most) for count in LENGTHS)
            assert sorted(torch.cat([b.lengths for b in found]).tolist()) == wanted


def test_some_examples_of_training() -> None:
    """Evenly spaced, as neighbours are of one writer."""
    data = module(drawn(LENGTHS))
    found = [text for batch in data.train_eval_dataloader(5, examples=12) for text in batch.text]
    assert len(LENGTHS) == 97
    expected = (0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88)
    assert sorted(found) == sorted(f"text {i}" for i in expected)
    assert [len(b.text) for b in data.train_eval_dataloader(5, examples=12)] == [5, 5, 2]
    assert sum(len(b.text) for b in data.train_eval_dataloader(examples=1000)) == 97


def bad_lines() -> PenLines:
    good = drawn([6, 7, 5, 4])
    steps = [np.array([[1.0, 1, 0], [np.nan, 1, 1]]), np.array([[4.0, 4, 1]])]
    both = good + PenLines.from_steps(steps, ["nan-line", "dot-line"], ["a", "b"])
    both.text = ("one", "", "  ", "four", "a", "")
    return both


def test_bad_lines_are_left_out_named_and_counted() -> None:
    with pytest.warns(UserWarning, match="left out") as told:
        data = module(bad_lines())
    (message,) = {str(warning.message) for warning in told if "train" in str(warning.message)}
    for count, names in ((1, "nan-line"), (1, "dot-line"), (2, "line-1, line-2")):
        assert re.search(rf"{count} with [\w ]+ \({names}\)", message)
    assert data.lines("train").text == ("one", "four")
    counts = {"coordinates that are not finite": 1, "fewer than two points": 1, "no text": 2}
    assert data.metadata["left_out"] == {"train": counts}
    assert data.metadata["train_size"] == data.metadata["val_size"] == 2
    assert all(torch.isfinite(batch.offsets).all() for batch in data.val_dataloader())


def test_lines_without_text_serve_where_no_text_is_needed(caplog) -> None:
    good = drawn([6, 7, 5])
    good.text = ("one", "", "three")
    with caplog.at_level("INFO"), warnings.catch_warnings():
        warnings.simplefilter("error")  # that some have no text is in the order of things
        assert module(good).metadata["train_size"] == 2
        assert "1 with no text (line-1)" in caplog.text
        assert module(good, require_text=False).lines("train").text == ("one", "", "three")


def test_many_names_are_cut_short() -> None:
    lines = drawn([1] * 8 + [5, 6])
    with pytest.warns(UserWarning, match=r"8 with fewer than two points \(.*line-4 and 3 more\)"):
        module(lines)


@pytest.mark.filterwarnings("ignore:.*left out")
def test_sets_that_cannot_be_used() -> None:
    refuses("drawn: no line of the train set can be used", module, drawn([1, 1]))
    flat = PenLines.from_steps([np.array([[5, 5, 0], [3, 0, 0], [4, 0, 1]])], ["a"], ["b"])
    data = module(flat)
    refuses(r'do not vary on an axis.*scale="const"', lambda: data.offset_statistics)


def test_long_steps_are_dropped_or_clipped_before_all_else() -> None:
    spike = np.array([[9, 9, 0], [3, 4, 0], [300, 400, 0], [3, -4, 1], [900, 0, 0], [0, 5, 1]])
    jumps = np.array([[9, 9, 0], [300, 0, 0], [0, 400, 1]])
    lines = PenLines.from_steps([spike, jumps], ["spike", "jumps"], ["a", "b"])
    with pytest.warns(UserWarning, match=r"1 with nothing but long steps \(jumps\)"):
        data = module(lines, max_step=50)
    kept = [[0, 0, 0], [3, -4, 0], [3, 4, 1], [900, 0, 0], [0, -5, 1]]
    assert data.lines("train").offsets(0).tolist() == kept
    assert (data.preprocessing["max_step"], data.preprocessing["long_steps"]) == (50, "drop")
    clipped = module(lines, max_step=50, long_steps="clip").lines("train")
    assert clipped.offsets(0)[2].tolist() == [30, -40, 0]
    assert len(clipped) == 2


def test_metadata_and_preprocessing_are_plain() -> None:
    data = module(drawn(LENGTHS), drawn([4, 5]), batch_size=4)
    sizes = {"train_size": 97, "val_size": 2, "test_size": 2}
    form = {"scale": "std", "length_mode": "crop", "max_points": 500}
    loading = {"batch_size": 4, "drop_last": False, "seed": 0}
    assert data.metadata == {"dataset": "drawn", "test_split": "test"} | sizes | form | loading
    mean, std = data.offset_statistics
    assert data.preprocessing == {
        **form,
        "offsets": "from point to point, y upwards",
        "offset_mean": mean.tolist(),
        "offset_std": std.tolist(),
    }
    assert "max_points" not in module(drawn([3, 3]), length_mode="full").metadata
