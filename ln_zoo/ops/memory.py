"""CPU memory that is cheap to touch.

The system hands out memory page by page as it is touched, and zeroes each page. For what a
recurrent layer keeps for its backward pass, this can take as long as the training step itself,
above all on virtual machines. That memory and scratch memory are therefore used again from call to
call, and large results are allocated in large pages.
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

#: Bytes from which large pages pay, and up to which scratch memory is kept for the next call.
_LARGE, _KEPT = 1 << 22, 1 << 26
#: Bytes of all blocks that `reusable` holds, at most.
_REUSABLE = 1 << 29
_LINE = 64
_kept = threading.local()


def scratch(name: str, *size: int, dtype: torch.dtype) -> Tensor:
    """Memory for the time of one call, not filled, that begins at a cache line.

    Args:
        name: pieces of memory of different names are never the same; each thread has its own.
        *size: the shape.
        dtype: the precision.
    """
    found: dict[str, Tensor] = _kept.__dict__
    bytes_ = math.prod(size) * dtype.itemsize
    memory = found.get(name)
    if memory is None or memory.numel() < bytes_ + _LINE:
        # Otherwise torch would not let it be written to outside of inference mode.
        with torch.inference_mode(False):
            memory = torch.empty(bytes_ + _LINE, dtype=torch.uint8, device="cpu")
        if bytes_ <= _KEPT:
            found[name] = memory
    start = -memory.data_ptr() % _LINE
    return memory[start : start + bytes_].view(dtype).view(size)


def empty(*size: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory that is not filled, in large pages where it is large.

    Args:
        *size: the shape.
        like: a tensor on the same device.
        dtype: the precision.
    """
    memory = like.new_empty(size, dtype=dtype)
    bytes_ = memory.numel() * dtype.itemsize
    advise = _advise()
    if bytes_ >= _LARGE and memory.device.type == "cpu" and advise is not None:
        page = mmap.PAGESIZE
        start = -(-memory.data_ptr() // page) * page
        end = (memory.data_ptr() + bytes_) // page * page
        # Only advice: where the system does not take it, pages stay small.
        advise(start, end - start, mmap.MADV_HUGEPAGE)
    return memory


def reusable(*size: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory that is not filled, and goes to a later call once no tensor uses it any more.

    For tensors that users do not get hold of, since these cannot be resized. What does not fit into
    512 MiB together with all else that is held, or is small, comes from `empty`.

    Args:
        *size: the shape.
        like: a tensor on the same device.
        dtype: the precision.
    """
    bytes_ = math.prod(size) * dtype.itemsize
    if bytes_ >= _LARGE and like.device.type == "cpu" and _COUNTS:
        block = _blocks.take(bytes_)
        if block is not None:
            # The tensor's storage holds a reference to the block until it is freed.
            return torch.frombuffer(block, dtype=dtype, count=math.prod(size)).view(size)
    return empty(*size, like=like, dtype=dtype)


def to_device(a: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on another device, without waiting for what runs there.

    Args:
        a: the tensor.
        device: where to copy it.
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        return a.to(device, non_blocking=True)
    if torch.cuda.is_current_stream_capturing():
        return a.to(device)  # an error: the graph would read memory that others write to
    return a.pin_memory().to(device, non_blocking=True)  # torch keeps it until it was copied


def release() -> None:
    """Gives back the memory that is held for later calls, as far as no tensor uses it.

    That is what backward passes have used, and scratch memory of the calling thread. Scratch memory
    inside the C++ kernels stays: each thread keeps the pieces that its calls took, of at most 64
    MiB each.

    Example:
        >>> from ln_zoo.ops import memory
        >>> memory.release()
    """
    _kept.__dict__.clear()
    _blocks.release()


class _Blocks:
    """Blocks of memory, of which those are free that nothing else refers to."""

    def __init__(self) -> None:
        self.forked()
        #: The one that was used last is the last.
        self._blocks: list[mmap.mmap] = []

    def take(self, bytes_: int) -> mmap.mmap | None:
        """The smallest free block of at most twice the size, or a new one; ``None``: no room."""
        with self._alone() as alone:
            return self._take(bytes_) if alone else None

    def release(self) -> None:
        with self._alone() as alone:
            for i in reversed(self._free() if alone else []):
                del self._blocks[i]

    def forked(self) -> None:
        """In a new process: another thread of its parent may have held the lock."""
        self._lock, self._busy = threading.RLock(), False

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Waits for other threads; ``False`` inside another call of the same thread.

        The interpreter may collect garbage or handle a signal in the middle of a call, and what it
        runs then may come here.
        """
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
        grain = max(1 << 21, 1 << (bytes_.bit_length() - 4))
        bytes_ = -(-bytes_ // grain) * grain
        excess = sum(map(len, self._blocks)) + bytes_ - _REUSABLE
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
        """Those of the free blocks that must go, so that so many bytes do."""
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
    """Fresh memory of this process, in large pages where the system has them."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, bytes_)
    # The default is memory that is shared with forked processes.
    block = mmap.mmap(-1, bytes_, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


_blocks = _Blocks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_blocks.forked)
#: Whether references are counted exactly: not by a Python without the global interpreter lock.
_COUNTS: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
#: References to a block that only the list holds.
_UNUSED = _references([mmap.mmap(-1, 1)], 0)


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """The system's ``madvise``, where it has large pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
