"""Both ways to run a layer."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["kernels", "generic loop"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with fast paths allowed and once more without any."""
    monkeypatch.setenv("LN_ZOO_KERNELS", "1" if request.param == "kernels" else "0")
    return request.param
