"""The kernels with vectors of every width of this processor, and under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ln_zoo.kernels.native import build

ROOT = Path(__file__).parents[3]
#: What a processor must have for each level of the instruction set, in torch's spelling.
LEVELS = {
    "x86-64": {"sse2"},
    "x86-64-v3": {"avx2", "fma3"},
    "x86-64-v4": {"avx512_f", "avx512_bw", "avx512_vl"},
}
#: What is compared with the equations: each engine of rows and examples, the window, and DRAW.
COMPARED = (
    "tests/kernels/native/test_products.py",
    "tests/kernels/test_engines.py::test_float32_against_the_equations",
    "tests/kernels/test_engines.py::test_any_places",
    "tests/kernels/test_batch_recurrence.py",
    "tests/kernels/test_window.py",
    "tests/kernels/test_draw.py",
    "tests/kernels/native/test_layers.py",
    "tests/kernels/native/test_mixed_precision.py",
    "tests/kernels/native/test_subnormals.py",
    "tests/kernels/native/test_infinity.py",
    "tests/layers/test_resets.py",
    "tests/fuzz/test_random_layers.py",
)


LOAD = "from ln_zoo.kernels.native.runtime import library; library()"


def python(
    *arguments: str, environment: dict[str, str], before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=3600,
    )


def run_with(flags: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Other tests, in a process whose kernels are compiled with such flags."""
    environment = {"LN_ZOO_CXXFLAGS": flags, "PYTHONPATH": str(ROOT)} | environment
    # Without kernels, the tests would pass on other engines.
    python("-c", LOAD, environment=environment).check_returncode()
    return python("-m", "pytest", "-n", "0", "--capture=sys", *arguments, environment=environment)


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


def sanitizer(name: str = "asan") -> dict[str, str]:
    """The environment of a process that runs kernels compiled with a sanitizer."""
    try:
        compiler = build.find_compiler()
    except build.Unavailable as error:
        pytest.skip(str(error))
    runtimes = []
    # That of C++ too: loaded later, the sanitizer would not know how exceptions are thrown.
    for file in (f"lib{name}.so", "libstdc++.so.6"):
        done = subprocess.run(
            [*compiler.command, f"-print-file-name={file}"],
            capture_output=True,
            text=True,
            check=False,
        )
        runtimes.append(done.stdout.strip())
        if not Path(runtimes[-1]).is_absolute():
            pytest.skip(f"{compiler} has no {file}")
    # Python keeps memory for ever, and torch is not instrumented.
    return {"LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0"}


SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -g1"
#: Packs a matrix as if it had a row more than it has.
BEYOND = """
import torch
from ln_zoo.kernels.native.runtime import library
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
    environment = sanitizer() | {"LN_ZOO_CXXFLAGS": SANITIZED}
    done = python("-c", BEYOND, environment=environment)
    assert done.returncode != 0
    assert done.stdout == "packed 8\n"
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "READ of size" in done.stderr


@pytest.mark.slow
def test_sanitizers_find_nothing_in_the_tests_of_kernels() -> None:
    assert_passed(run_with(SANITIZED, "-k", "not compile and not aten", *COMPARED, **sanitizer()))


#: Calls of all kinds of teams of threads.
TEAMS = """
import torch
from ln_zoo.layers import GRU, LSTM, RNN
from ln_zoo.norms import LayerNorm, RMSNorm
from ln_zoo.kernels.native.runtime import library
library()
torch.set_num_threads(3)
for cls in (LSTM, GRU, RNN):
    for norm in (None, LayerNorm(), RMSNorm()):
        sizes = (4, 1, 64), (4, 3, 130), (4, 16, 33), (4, 2, 512), (20, 40, 9)
        for steps, examples, hidden in sizes:
            layer = cls(5, hidden, norm=norm)
            layer(torch.randn(steps, examples, 5))[0].square().sum().backward()
print("done")
"""
#: Two threads pack into the same memory.
RACE = """
import threading
import torch
from ln_zoo.kernels.native.runtime import library
matrix, packed, pack = torch.ones(128, 128), torch.empty(128 * 256), library().ln_zoo_pack
both = threading.Barrier(2)
def run():
    both.wait()
    for _ in range(500):
        pack(matrix.data_ptr(), 128, 1, 128, 128, packed.data_ptr(), 0, None, 1, 0, 1)
threads = [threading.Thread(target=run) for _ in range(2)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "races"), [(RACE, True), (TEAMS, False)], ids=["race", "none"])
def test_thread_sanitizer(program: str, races: bool) -> None:
    if shutil.which("setarch") is None:
        pytest.skip("needs setarch: ThreadSanitizer needs addresses that are not randomised")
    threads = Path(__file__).with_name("threads_for_tsan.h")
    environment = sanitizer("tsan") | {
        "LN_ZOO_CXXFLAGS": f"-fsanitize=thread -O1 -g1 -include {threads}",
        # Python and torch are not instrumented.
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1",
    }
    done = python("-c", program, environment=environment, before=("setarch", "-R"))
    assert "done" in done.stdout, done.stderr[-3000:]
    assert ("data race" in done.stderr) == races, done.stderr[-3000:]
    assert (done.returncode != 0) == races
