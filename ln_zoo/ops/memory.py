"""CPU memory without page faults.

The OS maps and zeroes fresh memory page by page on first access. For the tensors that a recurrent
layer saves, this can take as long as the training step, above all on virtual machines. Saved
tensors and scratch memory are therefore pooled, and large results use huge pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

#: Minimum bytes for huge pages, and maximum bytes of cached scratch memory.
_LARGE, _KEPT = 1 << 22, 1 << 26
#: Minimum bytes of a tensor of `pooled_empty` that is pooled, and upper bound of its pool.
_POOLED, _POOL = 1 << 20, 1 << 29
_LINE = 64
_kept = threading.local()


def scratch(name: str, *size: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised scratch memory for one call, aligned to a cache line.

    Different names never share memory; each thread has its own.
    """
    found: dict[str, Tensor] = _kept.__dict__
    bytes_ = math.prod(size) * dtype.itemsize
    memory = found.get(name)
    if memory is None or memory.numel() < bytes_ + _LINE:
        # Inference tensors could not be modified outside of inference mode.
        with torch.inference_mode(False):
            memory = torch.empty(bytes_ + _LINE, dtype=torch.uint8, device="cpu")
        if bytes_ <= _KEPT:
            found[name] = memory
    start = -memory.data_ptr() % _LINE
    return memory[start : start + bytes_].view(dtype).view(size)


def empty(*size: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised tensor on the device of ``like``, in huge pages if it is large."""
    memory = like.new_empty(size, dtype=dtype)
    bytes_ = memory.numel() * dtype.itemsize
    if torch.compiler.is_compiling() or bytes_ < _LARGE or memory.device.type != "cpu":
        return memory
    advise = _advise()
    if advise is not None:
        page = mmap.PAGESIZE
        start = -(-memory.data_ptr() // page) * page
        end = (memory.data_ptr() + bytes_) // page * page
        # `madvise` is a hint; the kernel may ignore it.
        advise(start, end - start, mmap.MADV_HUGEPAGE)
    return memory


def pooled_empty(*size: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised tensor from a pool, to which its memory returns when the tensor is freed.

    For internal tensors only: they cannot be resized. Small tensors, and those beyond the pool's
    512 MiB, come from `empty`.
    """
    bytes_ = math.prod(size) * dtype.itemsize
    if bytes_ >= _POOLED and like.device.type == "cpu" and _COUNTS:
        block = _blocks.take(bytes_)
        if block is not None:
            # The tensor's storage holds a reference to the block until it is freed.
            return torch.frombuffer(block, dtype=dtype, count=math.prod(size)).view(size)
    return empty(*size, like=like, dtype=dtype)


#: Host memory that captured graphs read at each replay.
_captured: list[Tensor] = []


def to_device(a: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without synchronising."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return a.to(device, non_blocking=True)
    a = a.pin_memory()  # torch keeps it alive until copied
    if torch.cuda.is_current_stream_capturing():
        _captured.append(a)
    return a.to(device, non_blocking=True)


def release() -> None:
    """Free pooled memory that no tensor uses, and the scratch memory of the calling thread.

    C++ kernels keep their scratch memory, at most 64 MiB per buffer and thread.
    """
    _kept.__dict__.clear()
    _blocks.release()


class _Blocks:
    """Pool of memory blocks; a block is free if only the pool refers to it."""

    def __init__(self) -> None:
        self.forked()
        #: Least recently used first.
        self._blocks: list[mmap.mmap] = []

    def take(self, bytes_: int) -> mmap.mmap | None:
        """The smallest free block of at most twice the size, else a new one; None if full."""
        with self._alone() as alone:
            return self._take(bytes_) if alone else None

    def release(self) -> None:
        with self._alone() as alone:
            for i in reversed(self._free() if alone else []):
                del self._blocks[i]

    def forked(self) -> None:
        """Reset the lock in a forked process: another thread of the parent may have held it."""
        self._lock, self._busy = threading.RLock(), False

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Acquire the lock; False on re-entry, by garbage collection or a signal handler."""
        with self._lock:
            if self._busy:
                yield False
                return
            try:
                self._busy = True
                yield True
            finally:
                self._busy = False

    def _take(self, bytes_: int) -> mmap.mmap | None:
        free = self._free()
        fits = [i for i in free if bytes_ <= len(self._blocks[i]) <= 2 * bytes_]
        if fits:
            block = self._blocks.pop(min(fits, key=lambda i: len(self._blocks[i])))
            self._blocks.append(block)
            return block
        # Calls of almost the same length share a block.
        grain = max(1 << 20, 1 << (bytes_.bit_length() - 4))
        bytes_ = -(-bytes_ // grain) * grain
        excess = sum(map(len, self._blocks)) + bytes_ - _POOL
        if excess > sum(len(self._blocks[i]) for i in free):
            return None
        for i in reversed(self._oldest(free, excess)):
            del self._blocks[i]
        try:
            block = _map(bytes_)
        except (OSError, ValueError):
            return None
        self._blocks.append(block)
        return block

    def _free(self) -> list[int]:
        return [i for i in range(len(self._blocks)) if _references(self._blocks, i) == _UNUSED]

    def _oldest(self, free: list[int], excess: int) -> list[int]:
        """Free blocks to evict to release ``excess`` bytes."""
        found = []
        for i in free:
            if excess <= 0:
                break
            found.append(i)
            excess -= len(self._blocks[i])
        return found


def _references(items: list[mmap.mmap], i: int) -> int:
    return sys.getrefcount(items[i])


def _map(bytes_: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, bytes_)
    # The default is shared with forked processes.
    block = mmap.mmap(-1, bytes_, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


_blocks = _Blocks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_blocks.forked)
#: Whether reference counts are exact: not in free-threaded Python.
_COUNTS: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
#: Reference count of a block that only the list holds.
_UNUSED = _references([mmap.mmap(-1, 1)], 0)


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """``madvise`` of the C library, or None without huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
