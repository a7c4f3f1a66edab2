"""Memory that is kept or comes in large pages."""

from __future__ import annotations

import mmap
import threading

import pytest
import torch

from ln_zoo.ops import memory


def test_scratch_memory_is_used_again_under_its_name_alone() -> None:
    first = memory.scratch("test one", 3, 5, dtype=torch.float32)
    assert first.shape == (3, 5)
    assert first.data_ptr() % 64 == 0
    again = memory.scratch("test one", 2, 7, dtype=torch.float32)
    other = memory.scratch("test two", 3, 5, dtype=torch.float32)
    assert again.data_ptr() == first.data_ptr()
    assert other.data_ptr() != first.data_ptr()
    assert memory.scratch("test one", 4, dtype=torch.float64).dtype == torch.float64
    assert memory.scratch("test one", 0, 3, dtype=torch.float32).shape == (0, 3)


def test_threads_do_not_share_scratch_memory() -> None:
    found: list[int] = []

    def note() -> None:
        found.append(memory.scratch("test", 100, dtype=torch.float32).data_ptr())

    note()
    thread = threading.Thread(target=note)
    thread.start()
    thread.join()
    assert found[0] != found[1]


def test_much_is_not_kept() -> None:
    big = memory.scratch("test big", memory._KEPT // 4 + 1, dtype=torch.float32)
    assert "test big" not in vars(memory._kept)
    assert big.numel() * 4 > memory._KEPT


def test_scratch_memory_of_inference_mode_can_be_written_to_later() -> None:
    with torch.inference_mode():
        memory.scratch("test inference", 3, dtype=torch.float32).fill_(1)
    kept = memory.scratch("test inference", 3, dtype=torch.float32)
    assert kept.fill_(2).tolist() == [2, 2, 2]


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no large pages")
def test_large_memory_is_asked_for_in_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(memory, "_advise", lambda: lambda *given: asked.append(given))
    like = torch.zeros(1)
    small = memory.empty(10, 3, like=like, dtype=torch.bfloat16)
    assert (small.shape, small.dtype, asked) == ((10, 3), torch.bfloat16, [])
    large = memory.empty(memory._LARGE, like=like, dtype=torch.uint8)
    ((start, length, advice),) = asked
    assert advice == mmap.MADV_HUGEPAGE
    assert start % mmap.PAGESIZE == length % mmap.PAGESIZE == 0
    assert large.data_ptr() <= start
    assert start + length <= large.data_ptr() + large.numel()
    assert length > memory._LARGE - 2 * mmap.PAGESIZE


def test_advice_is_taken_or_not_but_does_no_harm() -> None:
    large = memory.empty(memory._LARGE, like=torch.zeros(1), dtype=torch.uint8)
    assert large.fill_(7).float().mean() == 7
