"""Calls of a few steps run on generated kernels, and on no others."""

from __future__ import annotations

import pytest

from ln_zoo.kernels.generated import engine
from ln_zoo.kernels.native.compiler import Unavailable, find_compiler


@pytest.fixture(autouse=True)
def only_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        find_compiler()
    except Unavailable as error:
        pytest.skip(error.reason)
    monkeypatch.setenv("LN_ZOO_KERNELS", "generated")
    monkeypatch.setattr(engine, "LEAST_STEPS", 1)
