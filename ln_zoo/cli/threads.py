"""Number of threads for small models, and OpenMP's spinning."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

#: About 2 ms, a tenth of libgomp's default: spinning threads can block the one they wait for.
#: Measurements: docs/explanation/kernels.md.
_SPINS = 30_000
#: Multiplications of a forward pass below which a second thread gains nothing.
_SMALL = 2**23
#: Lower bound: the optimizer reads all weights in each step, also for fewer examples.
_LEAST_EXAMPLES = 64


def shorten_spinning() -> None:
    """Let waiting OpenMP threads sleep early, unless the environment sets a policy.

    Call it before torch is imported: libgomp reads the variable when it is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


@contextlib.contextmanager
def limited(model: Any, data: Any) -> Iterator[None]:
    """Run a model on one thread if a batch is little work.

    The choice depends on sizes only, so that runs are reproducible to the last bit. Larger models,
    models of unknown work, and data without ``batch_size`` keep torch's number of threads.
    """
    import torch

    before = torch.get_num_threads()
    examples = getattr(data, "batch_size", None)
    multiplications = getattr(model, "multiplications", None)
    if isinstance(examples, int) and multiplications is not None:
        work = multiplications * max(examples, _LEAST_EXAMPLES)
        torch.set_num_threads(1 if work < _SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
