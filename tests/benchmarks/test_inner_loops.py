"""Which loops llvm-mca is asked about, and how much of the multiplying ports they use."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from benchmarks import inner_loops


def test_the_largest_loop_is_the_one_that_does_least_beside() -> None:
    short = inner_loops.Loop(("vfmadd231ps a", "jne .L1"), 1)
    long = inner_loops.Loop(("vfmadd231ps a", "addq b", "jne .L2"), 1)
    assert inner_loops.largest([long, short]) is short
    with pytest.raises(ValueError, match="no loop that multiplies"):
        inner_loops.largest([])


def test_loops_of_other_functions_and_types_are_left_out() -> None:
    loop = ".L{}:\n\tvfmadd231ps %ymm0, %ymm1, %ymm2\n\tjne .L{}\n"
    text = "_ZN7productIfE:\n" + loop.format(1, 1) + "_ZN7productItE:\n" + loop.format(2, 2)
    text += "lstm_row:\n" + loop.format(3, 3) + "_ZN4tileIfE:\n" + loop.format(4, 5)
    (found,) = inner_loops.loops(text, "vfmadd", "(tile|product)If")
    assert found.lines[-1] == "jne .L1"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.skipif(not any(map(shutil.which, inner_loops._MCA)), reason="needs llvm-mca")
@pytest.mark.parametrize("target", inner_loops.TARGETS, ids=lambda target: target.cpu)
def test_products_fill_the_ports(target: inner_loops.Target) -> None:
    mca = next(filter(None, map(shutil.which, inner_loops._MCA)))
    command = [mca, f"-mcpu={target.cpu}"]
    known = subprocess.run(command, input="nop\n", capture_output=True, text=True, check=False)
    if "not a recognized processor" in known.stderr:
        pytest.skip(f"needs llvm-mca 16 or later: {mca} does not know {target.cpu}")
    assembly = inner_loops.compiled("g++", target)
    loops = inner_loops.loops(assembly, r"vfmadd\d+ps", "(tile|product)If")
    loop = inner_loops.largest(list(loops))
    rate = loop.multiplications / inner_loops.cycles(mca, target.cpu, loop.lines[:-1])
    # Zen 4's model takes a broadcast from memory for work of a multiplying port.
    share = 0.75 if target.cpu == "znver4" else 0.9
    assert rate >= share * inner_loops.at_most(mca, target, "vfmadd231ps")
