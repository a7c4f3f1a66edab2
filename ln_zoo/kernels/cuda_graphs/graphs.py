"""Captured CUDA graphs of time steps, cached for calls of the same shape.

A step is two kernels of a few microseconds, less than two launches cost; a graph of many steps is
one launch. Graphs use fixed addresses, so step kernels find their tensors through a table.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

#: Lengths of captured runs in steps; any number of steps is a sum of a few.
LENGTHS = (64, 16, 4, 1)
#: Shorter runs are launched step by step.
SHORTEST = 4


def pieces(steps: int) -> list[tuple[int, int]]:
    """Split steps into captured lengths, such as 82 = 64 + 16 + 1 + 1: (first step, length)."""
    found = []
    start = 0
    for length in LENGTHS:
        while steps - start >= length:
            found.append((start, length))
            start += length
    return found


class Entry:
    """Graphs of one kind, and ``tensors``, the memory at fixed addresses that they use."""

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}


class Cache:
    """Graphs of the most recently used kinds of steps on one device; users must hold `lock`.

    Capture takes as long as thousands of steps, so a kind is captured at its second request. A full
    cache only evicts a kind without a request in the last ``patience``, so that many kinds in turn
    do not evict each other. Work is ordered by call, also across streams, because graphs share the
    scratch memory of matrix products.
    """

    def __init__(self, size: int = 8, patience: int = 64) -> None:
        self.lock = threading.RLock()
        self.size, self.patience = size, patience
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._asked: dict[Hashable, int] = {}
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._requests = 0
        self._used: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._workspaces: Any = None
        #: A pool's memory lives as long as a graph of it.
        self._reserved: dict[Any, torch.cuda.CUDAGraph] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Entry | None:
        """The entry of a key, or None if nothing is to be captured now."""
        self._requests += 1
        if key in self._entries:
            self._entries.move_to_end(key)
            self._asked[key] = self._requests
            return self._entries[key]
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > self.patience:
                self._seen.popitem(last=False)
            return None
        if len(self._entries) == self.size:
            oldest = next(iter(self._entries))
            if self._requests - self._asked[oldest] <= self.patience:
                return None
            if self._used is not None:
                self._used.synchronize()
            del self._entries[oldest], self._asked[oldest]
        del self._seen[key]
        # Tensors created in inference mode could not be modified outside of it.
        with torch.inference_mode(False):
            self._entries[key] = Entry(make())
        self._asked[key] = self._requests
        return self._entries[key]

    def record(
        self,
        entry: Entry,
        name: Hashable,
        warm_up: Callable[[], object],
        work: Callable[[], object],
    ) -> None:
        """Capture work under a name unless it exists; the work is not executed.

        ``warm_up`` must execute each of its kernels.
        """
        if name in entry.graphs:
            return
        self.begin()
        # Compilation and library initialisation cannot be captured.
        with self.stream():
            for _ in range(3):
                warm_up()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        except BaseException:
            self._recover(current)
            raise
        entry.graphs[name] = graph

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Context manager that runs work on the stream of captures, in order with the current's."""
        if self._stream is None:
            # Few use streams of high priority, so that its cuBLAS workspace is not another's.
            self._stream = torch.cuda.Stream(priority=-1)
            self._pool, self._workspaces = (torch.cuda.graph_pool_handle() for _ in range(2))
        current, own = torch.cuda.current_stream(), self._stream
        own.wait_stream(current)
        self._reserve_workspace(own)
        try:
            with torch.cuda.stream(own):
                yield
        finally:
            if self._stream is own:
                current.wait_stream(own)

    def _reserve_workspace(self, own: torch.cuda.Stream) -> None:
        """Let cuBLAS workspaces on a stream be memory that lives as long as the cache.

        Graphs contain the address of the workspace, which torch allocates at a thread's first
        product on a stream, and frees when anything clears workspaces, such as torch.compile.
        """
        _products(own.device)  # cuBLAS cannot be initialised in a capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(own):
            graph.capture_begin(pool=self._workspaces, capture_error_mode="thread_local")
            try:
                _products(own.device)
            finally:
                graph.capture_end()
        self._reserved[self._workspaces] = graph

    def _recover(self, current: torch.cuda.Stream) -> None:
        """Restore the state that torch leaves if CUDA refuses to end a capture."""
        torch.cuda.set_stream(current)
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(current.device_index, self._pool)
        self._stream = self._pool = None
        # Otherwise random numbers raise "Offset increment outside graph capture".
        graph = torch.cuda.CUDAGraph()
        with (
            contextlib.suppress(Exception),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            torch.zeros(1, device=current.device)

    def begin(self) -> None:
        """Make the current stream wait for graphs that other streams have launched."""
        if self._used is not None:
            torch.cuda.current_stream().wait_event(self._used)

    def end(self) -> None:
        """Mark that the current stream has launched graphs."""
        if self._used is None:
            self._used = torch.cuda.Event()
        self._used.record()


def _products(device: torch.device) -> None:
    """Multiply with and without a bias, in this thread and in autograd's.

    Autograd saves nothing, because hooks of saved tensors, such as those of activation
    checkpointing, would notice.
    """

    def multiply(a: Tensor) -> None:
        with torch.no_grad():
            F.linear(a, a)
            F.linear(a, a, a[0])

    with torch.inference_mode(False), torch.enable_grad():
        a = torch.zeros(8, 8, device=device, requires_grad=True)
        multiply(a)
        negative = -a
        negative.register_hook(multiply)
        torch.autograd.grad(negative, a, a.detach())


_CACHES: dict[int, Cache] = {}
_CACHES_LOCK = threading.Lock()


def cache(device: torch.device) -> Cache:
    """The graphs of a device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with _CACHES_LOCK:
        return _CACHES.setdefault(index, Cache())


@contextlib.contextmanager
def on(a: Tensor) -> Iterator[None]:
    """Make the device of a tensor current for launches."""
    with torch.cuda.device(a.device) if a.is_cuda else contextlib.nullcontext():
        yield


def may_replay(a: Tensor) -> bool:
    """Whether captured graphs can be launched now."""
    return (
        a.is_cuda
        and os.environ.get("LN_ZOO_CUDA_GRAPHS") != "0"
        and not torch.cuda.is_current_stream_capturing()
    )


def product_settings() -> tuple[Any, ...]:
    """Settings of torch that affect captured products."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # torch 2.9
    return (
        matmul.allow_tf32 if precision is None else precision,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
    )
