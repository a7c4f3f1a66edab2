"""Long training: memory and step time stay as they are, and kills change nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from soak import FITS, soak

#: Seconds of all models together.
SECONDS = float(os.environ.get("LN_ZOO_SOAK_SECONDS", "600"))
#: A step may take this much longer in the last third of the run than in the middle, and the process
#: may have this much more memory.
STEADY = 1.05


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")
@pytest.mark.parametrize("name", FITS)
def test_soak(name: str, tmp_path: Path) -> None:
    found = soak(name, SECONDS / len(FITS), tmp_path)
    assert found.growth(1) < STEADY, "the steps became slower"
    assert found.growth(2) < STEADY, "memory grew"
    assert not found.differing
    assert not found.left
