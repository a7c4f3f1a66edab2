"""Kills while a checkpoint is written, and at random: every run goes on, every end is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import environment


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
def test_every_killed_run_goes_on(tmp_path: Path) -> None:
    """$TMPDIR is on another file system, where there is one to write to."""
    runs, temporary = tmp_path / "runs", tmp_path / "temporary"
    for other in map(Path, ("/dev/shm", "/var/tmp")):
        if other.is_dir() and other.stat().st_dev != tmp_path.stat().st_dev:
            temporary = other / f"ln_zoo-{tmp_path.name}"
    runs.mkdir()
    temporary.mkdir()
    script = Path(__file__).with_name("kills.py")
    try:
        done = subprocess.run(
            [sys.executable, script, runs, temporary, "5", "5"],
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    finally:
        temporary.rmdir()
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == 20
    for each in told:
        assert (each["resumed"], each["differing"]) == (0, []), each
        assert not each["partial"], each
        assert not each["temporary"], each
    assert any("last.ckpt.partial" in each["left"] for each in told if each["kill"] == "timed")
