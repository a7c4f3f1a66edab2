"""Signals handled by a function of ours for a while."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

#: Those that ask a command to stop.
STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def handling(
    handler: Callable[[int, FrameType | None], object], numbers: Sequence[int] = STOPPING
) -> Iterator[None]:
    """Calls a function at signals, and puts back what was called before.

    In a thread other than the main one, which has no signals, it does nothing.

    Args:
        handler: as `signal.signal` takes it.
        numbers: of the signals.

    Example:
        >>> had = []
        >>> with handling(lambda number, frame: had.append(number), [signal.SIGTERM]):
        ...     signal.raise_signal(signal.SIGTERM)
        >>> had == [signal.SIGTERM]
        True
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)
