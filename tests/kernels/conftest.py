"""Which files are tests only when asked for, numbers of threads, recorded graphs without a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable
from types import SimpleNamespace

import pytest

from ln_zoo.kernels.cuda_graphs import graphs

# Test modules are collected for their doctests too, whatever their names.
INTERPRETED = ["triton/gpu_in_interpreter.py", "generated/gpu_in_interpreter.py"]
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else INTERPRETED


class PretendedCache(graphs.Cache):
    """A graph launches again what was launched when it was recorded.

    Attributes:
        recordings: graphs recorded so far.
        replays: graphs launched so far.
    """

    recordings = replays = 0

    def stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record(
        self,
        entry: graphs.Entry,
        name: Hashable,
        warm_up: Callable[[], object],
        work: Callable[[], object],
    ) -> None:
        if name not in entry.graphs:
            self.recordings += 1
            warm_up()
            graph = SimpleNamespace(replay=lambda: self._replay(work))
            entry.graphs[name] = graph  # type: ignore[assignment]

    def _replay(self, work: Callable[[], object]) -> None:
        self.replays += 1
        work()

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> PretendedCache:
    """The cache of graphs of every device."""
    cache = PretendedCache()
    monkeypatch.setattr(graphs, "cache", lambda device: cache)
    return cache
