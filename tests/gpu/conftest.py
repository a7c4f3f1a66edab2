"""Tests that need a card are skipped without one, and end a process that hangs."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator

import pytest
import torch

#: Seconds after which a test ends its process. A kernel that spins cannot be interrupted otherwise.
LONGEST = 90


@pytest.fixture(autouse=True)
def _card(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU, and torch finds none here")


@pytest.fixture(autouse=True)
def _never_hangs(_card: None) -> Iterator[None]:
    """Prints where it stands and ends the process; under xdist another takes over."""
    faulthandler.dump_traceback_later(LONGEST, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _full_float32() -> Iterator[None]:
    """Matrix products and cuDNN in float32, not tf32."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before
