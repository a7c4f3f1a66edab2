"""Locks on shared disks: one owner at a time, whose death is noticed here and elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ln_zoo.utils import locks
from ln_zoo.utils.locks import LockedError, is_free, lock_of, owned

#: Owns a lock for a minute, or until SIGTERM.
OWNER = """
import signal, sys, time
from pathlib import Path
from ln_zoo.utils import locks
locks._LEASE = float(sys.argv[2])
signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
with locks.owned(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(60)
"""


def owner_of(path: Path, lease: float = 60) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", OWNER, str(path), str(lease)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_killed_owner_is_noticed_at_once(tmp_path: Path) -> None:
    lock = tmp_path / ".owner"
    process = owner_of(lock)
    watched = lock_of(lock)
    assert not is_free(watched)
    with pytest.raises(LockedError, match=f"process {process.pid} on "), owned(lock):
        pass
    process.kill()
    process.wait()
    assert is_free(watched)
    with owned(lock):
        assert str(os.getpid()) in lock.read_text()
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_owner_leaves_no_file(tmp_path: Path) -> None:
    process = owner_of(tmp_path / ".owner")
    process.terminate()
    process.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("hour", [-3600, 3600])
def test_owners_on_other_hosts_are_known_by_their_touch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hour: int
) -> None:
    """Clocks may differ by an hour: only a file that stops changing has no owner."""
    monkeypatch.setattr(locks, "_LEASE", 0.5)
    lock = tmp_path / ".owner"
    with owned(lock):
        text = lock.read_text()
    lines = [
        f"{x.partition('=')[0]}=elsewhere" if x[:5] == "host=" else x for x in text.split("\n")
    ]
    lock.write_text("\n".join(lines))
    watched = lock_of(lock)
    for beat in range(6):
        now = time.time() + hour + beat
        os.utime(lock, (now, now))
        assert not is_free(watched)
        time.sleep(0.2)
    time.sleep(0.4)
    assert is_free(watched)


def test_a_frozen_owner_stops_when_it_has_lost_its_lock(tmp_path: Path) -> None:
    lock = tmp_path / ".owner"
    process = owner_of(lock, lease=0.5)
    os.kill(process.pid, signal.SIGSTOP)
    lock.unlink()  # as another host does
    with owned(lock):
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(timeout=20) == 1
        assert b"stopped" in process.stderr.read()
        assert lock.exists()
