"""The kernels with vectors of every width of this processor, and under AddressSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ln_zoo.ops.engines.native import build

ROOT = Path(__file__).parents[2]
#: What a processor must have for each level of the instruction set, in torch's spelling.
LEVELS = {
    "x86-64": {"sse2"},
    "x86-64-v3": {"avx2", "fma3"},
    "x86-64-v4": {"avx512_f", "avx512_bw", "avx512_vl"},
}
#: What is compared with the equations: each engine of rows and examples, the window, and DRAW.
COMPARED = (
    "tests/ops/test_native_products.py",
    "tests/ops/test_engines.py::test_float32_against_the_equations",
    "tests/ops/test_engines.py::test_any_places",
    "tests/ops/test_batch_recurrence.py",
    "tests/ops/test_window.py",
    "tests/ops/test_draw.py",
    "tests/ops/test_one_call.py",
)


def run_with(flags: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Other tests, in a process whose kernels are compiled with such flags."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "--capture=sys", *arguments],
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


def sanitizer() -> dict[str, str]:
    """The environment of a process that runs kernels compiled with -fsanitize=address."""
    try:
        compiler = build.find_compiler()
    except build.Unavailable as error:
        pytest.skip(str(error))
    runtimes = []
    # That of C++ too: loaded later, the sanitizer would not know how exceptions are thrown.
    for name in ("libasan.so", "libstdc++.so.6"):
        done = subprocess.run(
            [*compiler.command, f"-print-file-name={name}"],
            capture_output=True,
            text=True,
            check=False,
        )
        runtimes.append(done.stdout.strip())
        if not Path(runtimes[-1]).is_absolute():
            pytest.skip(f"{compiler} has no {name}")
    # Python keeps memory for ever, and torch is not instrumented.
    return {"LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0"}


SANITIZED = "-fsanitize=address -O0 -g1"
#: Packs a matrix as if it had a row more than it has.
BEYOND = """
import torch
from ln_zoo.ops.engines.native.runtime import library
matrix, packed = torch.ones(8, 4), torch.empty(64 * 9)
for rows in (8, 9):
    library().ln_zoo_pack(
        *(matrix.data_ptr(), 4, 1, rows, 4, packed.data_ptr(), 0, None, 1, 0, 1)
    )
    print("packed", rows, flush=True)
"""


@pytest.mark.slow
def test_address_sanitizer_finds_a_read_beyond_the_end() -> None:
    """So that finding nothing means something."""
    environment = os.environ | sanitizer() | {"LN_ZOO_CXXFLAGS": SANITIZED}
    done = subprocess.run(
        [sys.executable, "-c", BEYOND],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert done.stdout == "packed 8\n"
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "READ of size" in done.stderr


@pytest.mark.slow
def test_address_sanitizer_finds_nothing_in_the_tests_of_kernels() -> None:
    assert_passed(run_with(SANITIZED, "-k", "not compile and not aten", *COMPARED, **sanitizer()))
