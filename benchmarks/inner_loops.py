"""Cycles of the inner loops of matrix products, on processors that need not be at hand.

``python -m benchmarks.inner_loops`` compiles the kernels to assembly for each processor, finds the
loops of the largest tiles there, and asks ``llvm-mca`` (Debian's package ``llvm-19``) how many
cycles a pass takes. What counts is how many vectors are multiplied in a cycle, as a share of what
the ports can do at most, which is asked with multiplications that wait for nothing. Loads count as
hits of the first-level cache: waiting for memory is not in it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from ln_zoo.kernels.native.compiler import COMPILE, SOURCE

#: Names that llvm-mca may go by, the newest first: before 16 it knows no Zen 4.
_MCA = ("llvm-mca-20", "llvm-mca-19", "llvm-mca-18", "llvm-mca-17", "llvm-mca-16", "llvm-mca")
_ITERATIONS = 200


class Target(NamedTuple):
    """A processor.

    Attributes:
        cpu: its name to llvm-mca.
        flags: to the compiler.
        register: of a vector, in assembly.
        bfloat: whether it multiplies pairs of bfloat16.
    """

    cpu: str
    flags: tuple[str, ...]
    register: str
    bfloat: bool = False


#: GCC 12 does not know Zen 4 by name.
TARGETS = (
    Target("haswell", ("-march=haswell",), "ymm"),
    Target("znver3", ("-march=haswell", "-mtune=znver3"), "ymm"),
    Target("znver4", ("-march=x86-64-v4", "-mavx512bf16", "-mtune=znver3"), "zmm", True),
    Target("icelake-server", ("-march=icelake-server",), "zmm"),
    Target("sapphirerapids", ("-march=sapphirerapids",), "zmm", True),
)


class Loop(NamedTuple):
    """A loop in assembly.

    Attributes:
        lines: its instructions.
        multiplications: instructions that multiply and add vectors.
    """

    lines: tuple[str, ...]
    multiplications: int


def loops(assembly: str, instruction: str, functions: str) -> Iterator[Loop]:
    """Loops of products: of one block, from a label to the jump back to it, with the instruction.

    Args:
        assembly: of GCC or Clang.
        instruction: a pattern.
        functions: a pattern of the names of the functions to look into.

    Example:
        >>> loop = ".L1:\\n\\tvmulps %ymm0, %ymm1, %ymm1\\n\\tdecq %rax\\n\\tjne .L1\\n"
        >>> text = f"_Z4tileIf:\\n{loop}_Z1a:\\n{loop}"
        >>> [found.multiplications for found in loops(text, "vmulps", "tileIf")]
        [1]
    """
    function, label, block = "", "", list[str]()
    for line in assembly.splitlines():
        if name := re.match(r"([\w.]+):", line):
            label, block = name[1], []
            if not label.startswith("."):
                function = label
        elif re.match(r"\s+[a-z]", line):
            block.append(line.strip())
            if jump := re.match(r"\s+j\w+\s+(\S+)", line):
                count = sum(bool(re.match(instruction, each)) for each in block)
                if jump[1] == label and count and re.search(functions, function):
                    yield Loop(tuple(block), count)
                if line.split()[0] == "jmp":
                    label, block = "", []


def largest(found: Sequence[Loop]) -> Loop:
    """The loop of the largest tile, and of those that are as large the one that does least beside.

    Raises:
        ValueError: without a loop.
    """
    if not found:
        raise ValueError("the assembly has no loop that multiplies")
    return max(found, key=lambda loop: (loop.multiplications, -len(loop.lines)))


def compiled(compiler: str, target: Target) -> str:
    """The kernels in assembly."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.s"
        subprocess.run([compiler, *COMPILE, *target.flags, "-S", SOURCE, "-o", out], check=True)
        return out.read_text()


def cycles(mca: str, cpu: str, lines: Sequence[str]) -> float:
    """Cycles of one pass through instructions, when many follow each other."""
    done = subprocess.run(
        [mca, f"-mcpu={cpu}", f"-iterations={_ITERATIONS}", "-instruction-info=0"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    (total,) = re.findall(r"Total Cycles:\s+(\d+)", done.stdout)
    return int(total) / _ITERATIONS


def at_most(mca: str, target: Target, instruction: str) -> float:
    """Vectors that a processor multiplies in a cycle where none waits for another."""
    r = target.register
    lines = [f"{instruction} %{r}14, %{r}15, %{r}{i}" for i in range(14)]
    return len(lines) / cycles(mca, target.cpu, lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.inner_loops", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--compiler", default="g++", help="GCC or Clang; default g++")
    found = next(filter(None, map(shutil.which, _MCA)), None)
    parser.add_argument("--mca", default=found, help="llvm-mca; default: the newest that is there")
    options = parser.parse_args(argv)
    if options.mca is None:
        print("llvm-mca is missing: install Debian's package llvm-19, or name it with --mca")
        return 2
    table = Table("processor", "factors", "tile", "cycles", "a cycle", "limit", "share")
    for target in TARGETS:
        assembly = compiled(options.compiler, target)
        kinds = [("float32", "f", r"vfmadd\d+ps", "vfmadd231ps")]
        kinds += [("bfloat16", "t", "vdpbf16ps", "vdpbf16ps")] * target.bfloat
        for kind, letter, pattern, instruction in kinds:
            loop = largest(list(loops(assembly, pattern, f"(tile|product)I{letter}")))
            # Without the jump, which is predicted and fuses with the test before it.
            passes = cycles(options.mca, target.cpu, loop.lines[:-1])
            rate = loop.multiplications / passes
            limit = at_most(options.mca, target, instruction)
            table.add_row(
                target.cpu, kind, str(loop.multiplications), f"{passes:.1f}", f"{rate:.2f}",
                f"{limit:.2f}", f"{rate / limit:.0%}",
            )  # fmt: skip
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
