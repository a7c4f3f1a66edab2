"""The emulation of CUDA kernels: its arithmetic, and the faults that it has to find."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from kernels.cluster.emulation import Emulated, emulate, missing
from torch import Tensor

from ln_zoo.kernels.cluster.arguments import Arguments

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

CLUSTER, THREADS = 4, 256
FAULTS = {
    "early_access": "before the first cluster_barrier",
    "no_announcement": "hang",
    "too_few_bytes": "bytes more than announced|before messages",
    "misaligned_push": "not a multiple of 8",
    "far_push": "not in shared memory",
    "no_wait": "before messages",
    "divergence": "hang",
    "no_copy_wait": None,
    "misaligned_load": "not aligned",
    "bad_index": "index 4 is out of bounds",
    "overrun": "outside of its shared memory",
    "twice_announced": "twice",
    "wrong_count": "threads and for",
}


class Primitives(Arguments):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("n", ctypes.c_int),
        ("fault", ctypes.c_int),
    )


@pytest.fixture(scope="module")
def kernel() -> Emulated:
    source = Path(__file__).parent / "emulation" / "primitives.cu"
    return emulate(source, "primitives", {"CLUSTER": CLUSTER}, THREADS, CLUSTER, 8192)


def run(kernel: Emulated, fault: int = 0, blocks: int = 2 * CLUSTER) -> Tensor:
    found = torch.full((blocks, THREADS), float("nan"))
    x = torch.arange(THREADS).float() / 8
    kernel(blocks, Primitives(x=x, y=found, n=4, fault=fault))
    return found


def test_results(kernel: Emulated) -> None:
    t = torch.arange(THREADS)
    sender = torch.tensor([3, 0, 1, 2]).repeat(2)[:, None]
    exchanged = (t ^ 1) + t + 2000 * sender
    copied = (THREADS - 1 - t) / 8
    lane = t % 32
    product = 16 * (lane // 4 + 8 * (t % 4 // 2)) * (2 * (lane % 4) + t % 2 + 1) + 1
    for seed in range(5):
        kernel.seed = seed
        assert torch.equal(run(kernel), exchanged + copied + product)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(kernel: Emulated, fault: str) -> None:
    number = 1 + list(FAULTS).index(fault)
    words = FAULTS[fault]
    if words is None:  # the memory is read as it was before
        assert run(kernel, number).isnan().any()
        return
    with pytest.raises(RuntimeError, match=words):
        run(kernel, number)
    assert run(kernel).isfinite().all()  # a failed run leaves nothing behind


def test_launches_are_checked(kernel: Emulated) -> None:
    with pytest.raises(RuntimeError, match="whole clusters"):
        run(kernel, blocks=6)

    class TooShort(Arguments):
        _fields_ = Primitives._fields_[:2]

    with pytest.raises(RuntimeError, match="bytes"):
        kernel(4, TooShort())
