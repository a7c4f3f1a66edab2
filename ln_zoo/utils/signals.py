"""Temporary signal handlers."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

#: Signals that request a stop.
STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def signal_handler(
    handler: Callable[[int, FrameType | None], object], numbers: Sequence[int] = STOPPING
) -> Iterator[None]:
    """Install a signal handler within a context; no-op outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)
