"""CPU memory that is cheap to touch for the first time.

The system hands out memory page by page as it is touched, and zeroes each page: for what a
recurrent layer keeps, this can take a tenth of a training step. Scratch memory is therefore kept
from call to call, and large results are allocated in large pages.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import threading
from collections.abc import Callable

import torch
from torch import Tensor

#: Bytes from which large pages pay, and up to which scratch memory is kept for the next call.
_LARGE, _KEPT = 1 << 22, 1 << 26
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


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """The system's ``madvise``, where it has large pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
