"""Recorded CUDA graphs of time steps, kept for calls of the same shape.

A step is two kernels of a few microseconds each, less than the CPU needs to launch them. A graph of
many steps is launched at once; the tensors it uses are fixed, which is why step kernels find theirs
through a table of addresses (`ln_zoo.ops.engines.triton.kernels`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

#: Lengths of recorded runs, in steps: any number of steps is a few of these.
LENGTHS = (64, 16, 4, 1)
#: Shorter runs are launched step by step.
SHORTEST = 4


def pieces(steps: int) -> list[tuple[int, int]]:
    """Cuts a number of steps into recorded lengths: (first step, length).

    Example:
        >>> pieces(82)
        [(0, 64), (64, 16), (80, 1), (81, 1)]
    """
    found = []
    start = 0
    for length in LENGTHS:
        while steps - start >= length:
            found.append((start, length))
            start += length
    return found


class Entry:
    """What recorded work of one kind reads and writes by fixed addresses, and its graphs.

    Args:
        tensors: these tensors, or what holds them.
    """

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}


class Cache:
    """The graphs of the kinds of steps used last, on one device.

    Recording takes as long as thousands of steps, so a kind is recorded when it is asked for the
    second time; and when the cache is full, only a kind not asked for lately is evicted, so that
    many kinds in turn do not evict each other.

    Work goes to the current stream, in the order of calls, also across streams: graphs share the
    scratch memory of matrix products. Whoever uses an entry must hold `lock`.

    Args:
        size: kinds kept.
        patience: requests after which a kind may be evicted.
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

    def get(self, key: Hashable, make: Callable[[], Any]) -> Entry | None:
        """The entry of a key, or ``None`` where nothing is to be recorded for it now.

        Args:
            key: everything that the recorded launches depend on.
            make: makes the tensors of a new entry.
        """
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
        # Outside of it, tensors made in inference mode could not be written to.
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
        """Records work under a name, unless that exists; the work is not executed.

        Args:
            entry: whose tensors it uses.
            name: of the graph, among those of the entry.
            warm_up: executes each of its kernels.
            work: launches all that is to be recorded.
        """
        if name in entry.graphs:
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()
        self.begin()
        self._stream.wait_stream(torch.cuda.current_stream())
        # Kernels are compiled and libraries set up before: neither can be recorded.
        with torch.cuda.stream(self._stream):
            for _ in range(3):
                warm_up()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # Scratch memory of cuBLAS that others may give back must not be recorded: with none there,
        # the recording takes its own, which lives as long as the graph.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        except BaseException:
            self._recover(current)
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        entry.graphs[name] = graph

    def _recover(self, current: torch.cuda.Stream) -> None:
        """Undoes what torch leaves as it was during a recording, if CUDA refuses to end it."""
        torch.cuda.set_stream(current)
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(current.device_index, self._pool)
        self._stream = self._pool = None
        # Random numbers fail until a recording ends well: "Offset increment outside graph capture".
        graph = torch.cuda.CUDAGraph()
        with (
            contextlib.suppress(Exception),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            torch.zeros(1, device=current.device)

    def begin(self) -> None:
        """Makes the current stream wait for graphs that other streams have launched."""
        if self._used is not None:
            torch.cuda.current_stream().wait_event(self._used)

    def end(self) -> None:
        """Notes that the current stream has launched graphs."""
        if self._used is None:
            self._used = torch.cuda.Event()
        self._used.record()


_CACHES: dict[int, Cache] = {}
_CACHES_LOCK = threading.Lock()


def cache(device: torch.device) -> Cache:
    """The graphs of a device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with _CACHES_LOCK:
        return _CACHES.setdefault(index, Cache())
