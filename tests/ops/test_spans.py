"""How time is cut, and which rows belong together."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from ln_zoo.ops.time_chunks import previous_rows, rows_of, step_sizes, time_chunks


@pytest.mark.parametrize("sizes", [[3] * 7, [5, 5, 4, 2, 2, 1, 1, 1], [1], [9, 1], [0, 0]], ids=str)
@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (4, 1), (6, 2), (1, 3), (100, 1)])
def test_spans_cover_all_steps(sizes: list[int], rows: int, steps: int) -> None:
    found = time_chunks(sizes, rows, steps)
    assert [n for span in found for n in span.sizes] == sizes
    row, before = 0, sizes[0]
    for span in found:
        assert (span.first, span.last) == (row, row + sum(span.sizes))
        assert span.before == before
        assert sizes[span.steps] == list(span.sizes)
        row, before = span.last, span.sizes[-1]
    for span in found[:-1]:
        assert len(span.sizes) >= steps
        assert sum(span.sizes) >= rows
        # And no step more than that.
        assert len(span.sizes) == steps or sum(span.sizes[:-1]) < rows


@pytest.mark.parametrize("lengths", [(4, 4, 4), (5, 3, 3, 1), (6, 1, 1)], ids=str)
@pytest.mark.parametrize("least", [1, 4, 100])
def test_rows_before_each_row(lengths: tuple[int, ...], least: int) -> None:
    """Of the state after step t of example k, 10 t + k; before the first, -10 + k."""
    packed = pack_sequence([10.0 * torch.arange(n).unsqueeze(1) + k for k, n in enumerate(lengths)])
    start = torch.arange(len(lengths)).unsqueeze(1) - 10.0
    for span in time_chunks(packed.batch_sizes.tolist(), least):
        before = previous_rows(start, packed.data, span)
        assert torch.equal(before, packed.data[span.first : span.last] - 10)
        assert before.is_contiguous()


@pytest.mark.parametrize("least", [1, 4, 100])
def test_rows_that_are_reset_had_zeros(least: int) -> None:
    packed = pack_sequence([torch.rand(n, 3) + 1 for n in (6, 6, 3, 2)])
    start, reset = torch.rand(4, 3) + 1, torch.rand(17) < 0.4
    kept = packed.data.clone()
    for span in time_chunks(packed.batch_sizes.tolist(), least):
        flags = reset[span.rows]
        found, plain = (previous_rows(start, packed.data, span, r) for r in (flags, None))
        assert torch.equal(found, plain * ~flags.unsqueeze(1))
    assert torch.equal(packed.data, kept)


def test_rows_before_are_found_run_by_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not step by step: of 1000 steps of two sizes, four pieces are joined."""
    sizes, joined = [3] * 500 + [2] * 500, []
    after, join = torch.rand(sum(sizes), 1), torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts: joined.append(len(parts)) or join(parts))
    (span,) = time_chunks(sizes, sum(sizes))
    found = previous_rows(torch.zeros(3, 1), after, span)
    assert joined == [4]
    assert torch.equal(found[3:1500], after[:1497])
    assert torch.equal(found[1500:1502], after[1497:1499])
    assert torch.equal(found[1502:], after[1500:-2])


@pytest.mark.parametrize("batch_first", [False, True])
def test_rows_of_a_padded_batch_are_contiguous(batch_first: bool) -> None:
    x = torch.randn(3, 6, 2).transpose(0, 1) if batch_first else torch.randn(6, 3, 2)
    sizes = step_sizes(x, None)
    assert sizes == [3] * 6
    found = [rows_of(x, False, span) for span in time_chunks(sizes, 4)]
    assert all(rows.is_contiguous() for rows in found)
    assert torch.equal(torch.cat(found), x.reshape(18, 2))
    expanded = torch.ones(()).expand(6, 3, 2)
    assert rows_of(expanded, False, time_chunks(sizes, 4)[0]).is_contiguous()


def test_rows_of_packed_data() -> None:
    packed = pack_sequence([torch.randn(n, 2) for n in (5, 3, 1)])
    sizes = step_sizes(packed.data, packed.batch_sizes)
    found = [rows_of(packed.data, True, span) for span in time_chunks(sizes, 4)]
    assert torch.equal(torch.cat(found), packed.data)
