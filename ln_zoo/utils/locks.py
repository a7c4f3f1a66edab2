"""Locks on shared disks (NFS, Lustre), which release the locks of the kernel badly or not at all.

The lock is a file with host and process of its owner. Its owner touches it every twenty seconds. A
dead owner on this host is noticed at once, another host's once its file has not changed for
`_LEASE` seconds on the clock of the one who waits: clocks need not agree.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from filelock import LeaseCompromise, SoftFileLease, Timeout

#: Seconds without a touch after which a lock may be taken.
_LEASE = 60.0


class LockedError(Exception):
    """Another process owns a lock."""


@contextlib.contextmanager
def owned(path: Path, timeout: float = 0) -> Iterator[None]:
    """Own a lock within a context.

    A process that was frozen so long that another one took its lock gets SIGTERM when it goes on.

    Raises:
        LockedError: if another process owns the lock after ``timeout`` seconds.
        OSError: if the lock's file cannot be written.
    """
    lock = lock_of(path)
    try:
        lock.acquire(timeout=timeout)
    except Timeout:
        raise LockedError(f"{path.parent} is in use by {owner(lock)}") from None
    try:
        yield
    finally:
        lock.release()


def is_free(lock: SoftFileLease) -> bool:
    """Whether nobody owns a lock; call it again with the same object to notice a dead owner."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    lock.release()
    return True


def lock_of(path: Path) -> SoftFileLease:
    """The lock of a file; not yet owned."""
    return SoftFileLease(path, lease_duration=_LEASE, on_compromise=_stop)


def owner(lock: SoftFileLease) -> str:
    """Process and host of a lock's owner, such as ``"process 71 on node4"``."""
    found = lock.owner
    return f"process {found.pid} on {found.hostname}" if found else "another process"


def _stop(loss: LeaseCompromise) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
