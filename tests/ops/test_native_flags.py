"""The kernels with vectors of every width that this processor has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ln_zoo.ops.native import build

ROOT = Path(__file__).parents[2]
#: What a processor must have for each level of the instruction set.
LEVELS = {
    "x86-64": {"sse2"},
    "x86-64-v3": {"avx2", "fma"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512vl"},
}
#: What is compared with the equations: each engine of rows and cases, the window, and DRAW.
COMPARED = (
    "tests/ops/test_native_products.py",
    "tests/ops/test_engines.py::test_float32_against_the_equations",
    "tests/ops/test_engines.py::test_any_places",
    "tests/ops/test_batch_recurrence.py",
    "tests/ops/test_window.py",
    "tests/ops/test_draw.py",
    "tests/ops/test_streaming.py",
)


def run_with(flags: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Other tests, in a process whose kernels are compiled with such flags."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=os.environ
        | {"LN_ZOO_CXXFLAGS": flags, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=3600,
    )


def assert_passed(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_narrower_vectors(level: str) -> None:
    there = build._processor()[1]
    if not LEVELS[level] <= there:
        missing = ", ".join(sorted(LEVELS[level] - there))
        pytest.skip(f"this processor has no {missing}")
    flags = f"-march={level} -O1"
    assert_passed(run_with(flags, "-k", "not compile and not aten", *COMPARED))
