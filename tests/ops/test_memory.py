"""Memory that is kept or comes in large pages."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from ln_zoo.kernels.native.runtime import unavailable_reason
from ln_zoo.layers import LSTM
from ln_zoo.norms import LayerNorm
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
    def address() -> int:
        return memory.scratch("test", 100, dtype=torch.float32).data_ptr()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(address).result() != address()


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


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> memory._Blocks:
    found = memory._Blocks()
    monkeypatch.setattr(memory, "_blocks", found)
    return found


LIKE = torch.zeros(1)
MIB = 1 << 20


def pooled_empty(mib: int) -> torch.Tensor:
    return memory.pooled_empty(mib, 1 << 18, like=LIKE, dtype=torch.float32)


def test_memory_is_used_again_once_nothing_uses_it(blocks: memory._Blocks) -> None:
    first = pooled_empty(8)
    assert (first.shape, first.dtype, first.device.type) == ((8, 1 << 18), torch.float32, "cpu")
    address = first.data_ptr()
    view = first.fill_(1)[2:].t()
    del first
    second = pooled_empty(8).fill_(2)
    assert second.data_ptr() != address
    assert view.eq(1).all()
    del view
    assert pooled_empty(7).data_ptr() == address


def test_what_autograd_keeps_is_in_use(blocks: memory._Blocks) -> None:
    weight = torch.ones(8, 1 << 18, requires_grad=True)
    product = (weight * pooled_empty(8).fill_(3)).sum()
    pooled_empty(8).fill_(4)
    product.backward()
    assert weight.grad.eq(3).all()
    assert len(blocks._blocks) == 2
    pooled_empty(8), pooled_empty(8)
    assert len(blocks._blocks) == 2


def test_blocks_fit_calls_of_similar_size(blocks: memory._Blocks) -> None:
    for mib in (40, 39, 37, 41):
        pooled_empty(mib)
    assert len(blocks._blocks) == 2  # 39 and 37 are within 40; 41 is not
    pooled_empty(15)
    assert len(blocks._blocks) == 3


def test_what_is_held_is_bounded(blocks: memory._Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_POOL", 100 * MIB)
    big = [pooled_empty(40), pooled_empty(40)]
    pooled_empty(40)  # beyond the bound: ordinary memory
    assert [len(block) // MIB for block in blocks._blocks] == [40, 40]
    del big[0]
    pooled_empty(8)  # this one replaces nothing
    assert [len(block) // MIB for block in blocks._blocks] == [40, 40, 8]
    pooled_empty(60)
    assert [len(block) // MIB for block in blocks._blocks] == [40, 60]
    pooled_empty(200)
    assert [len(block) // MIB for block in blocks._blocks] == [40, 60]


def test_held_memory_is_given_back(blocks: memory._Blocks) -> None:
    memory.scratch("test release", 100, dtype=torch.float32)
    used = pooled_empty(8).fill_(5)
    pooled_empty(8)
    memory.release()
    assert len(blocks._blocks) == 1
    assert "test release" not in vars(memory._kept)
    assert used.eq(5).all()


def test_small_or_unmappable_memory_is_ordinary(
    blocks: memory._Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pooled_empty(3, 4, like=LIKE, dtype=torch.float64).fill_(1)

    def refuse(bytes_: int) -> mmap.mmap:
        raise OSError("no memory")

    monkeypatch.setattr(memory, "_map", refuse)
    assert pooled_empty(8).fill_(6).eq(6).all()
    assert blocks._blocks == []


def test_a_call_inside_another_neither_waits_nor_interferes(
    blocks: memory._Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a finaliser or a signal handler runs in the middle of one."""
    inner: list[torch.Tensor] = []
    map_ = memory._map

    def interrupted(bytes_: int) -> mmap.mmap:
        memory.release()
        inner.append(pooled_empty(8).fill_(1))
        return map_(bytes_)

    monkeypatch.setattr(memory, "_map", interrupted)
    outer = pooled_empty(8).fill_(2)
    assert inner[0].eq(1).all()
    assert len(blocks._blocks) == 1
    del outer
    memory.release()
    assert blocks._blocks == []


def test_threads_never_share_a_block(blocks: memory._Blocks) -> None:
    wrong: list[int] = []

    def use(number: int) -> None:
        for _ in range(50):
            own = pooled_empty(4).fill_(number)
            if not own.eq(number).all():
                wrong.append(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    assert wrong == []
    assert len(blocks._blocks) <= 8  # each may hold one while it takes the next


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_forked_processes_have_memory_of_their_own(blocks: memory._Blocks) -> None:
    own = pooled_empty(8).fill_(7)
    child = os.fork()
    if not child:
        own.view(-1).numpy()[:] = 8
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert own.eq(7).all()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_layer_keeps_what_its_backward_reads(packed: bool, blocks: memory._Blocks) -> None:
    """Two forward passes before two backward passes, and again in the same blocks."""
    layer = LSTM(3, 64, norm=LayerNorm())
    first, second = torch.randn(2, 300, 16, 3)

    def output(x: torch.Tensor) -> torch.Tensor:
        if packed:
            return layer(pack_sequence([x[: 300 - n, n] for n in range(16)]))[0].data
        return layer(x)[0]

    def gradient(x: torch.Tensor) -> torch.Tensor:
        layer.zero_grad()
        output(x).sum().backward()
        return layer.weight_hh_l0.grad.clone()

    alone = gradient(first), gradient(second)
    for _ in range(2):
        losses = output(first).sum(), output(second).sum()
        for loss, expected in zip(losses, alone, strict=True):
            layer.zero_grad()
            loss.backward()
            torch.testing.assert_close(layer.weight_hh_l0.grad, expected, rtol=0, atol=0)
        del losses, loss
    # Padded, all that a call keeps is one tensor; packed, there are v, u and c, and small ones.
    expected = 6 if packed else 2 if unavailable_reason() is None else 0
    assert len(blocks._blocks) == expected
