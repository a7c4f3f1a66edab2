"""Compiled kernels on disk: found again, made once, and never loaded from others' hands."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import names_of
from kernels.generated.generated_case import gated_cell

from ln_zoo.kernels.generated import binding, kernel
from ln_zoo.layers import RecurrentLayer
from ln_zoo.norms import LayerNorm


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on disk and in memory; the native library stays loaded."""
    kernel.product_functions()
    monkeypatch.setenv("LN_ZOO_CACHE", str(tmp_path / "cache"))
    forget(monkeypatch)
    return tmp_path / "cache"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process remembers, as in a new one."""
    monkeypatch.setattr(kernel, "_libraries", {})
    monkeypatch.setattr(binding, "_made", {})
    monkeypatch.setattr(binding, "_checked", set())


def run() -> None:
    torch.manual_seed(0)
    layer = RecurrentLayer(3, 5, cell=gated_cell(torch.tanh, "cached"), norm=LayerNorm())
    layer(torch.randn(3, 2, 3))[0].sum().backward()


def test_compiled_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, chosen: list[Any]
) -> None:
    run()
    (library,) = cache.glob("generated-*.so")
    first = capfd.readouterr().err
    assert "compiling the generated kernel of cached" in first
    assert str(cache) in first
    forget(monkeypatch)
    run()
    assert "compiling" not in capfd.readouterr().err
    assert [*cache.glob("generated-*.so")] == [library]
    assert names_of(chosen) == ["generated"] * 2


@pytest.mark.parametrize("damage", ["cut short", "planted"])
def test_a_damaged_or_planted_library_is_not_loaded(
    damage: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, chosen: list[Any]
) -> None:
    run()
    (library,) = cache.glob("generated-*.so")
    if damage == "cut short":
        short = library.with_name("short")
        short.write_bytes(library.read_bytes()[:1000])
        short.replace(library)  # this process still has the whole one in memory
    else:
        library.chmod(0o777)
    forget(monkeypatch)
    capfd.readouterr()
    run()
    assert "compiling" in capfd.readouterr().err
    assert names_of(chosen) == ["generated"] * 2


def test_without_a_compiler_the_loop_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, chosen: list[Any]
) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    with caplog.at_level(logging.INFO, logger="ln_zoo"):
        run()
    assert names_of(chosen) == [None]
    assert "no-compiler" in caplog.text


def test_a_first_call_does_not_import_the_compiler_of_torch() -> None:
    """Its import takes longer than all the rest of a first call."""
    code = (
        "import sys, torch\nfrom ln_zoo.layers import RecurrentLayer\n"
        "from ln_zoo.norms import LayerNorm\nfrom ln_zoo.ops import KERNELS, lstm_cell\n"
        "layer = RecurrentLayer(3, 5, cell=lstm_cell(peephole=True), norm=LayerNorm())\n"
        "out, _ = layer(torch.randn(16, 2, 3))\n"
        "assert type(out.grad_fn).__name__ == '_FunctionBackward', out.grad_fn\n"
        "print([name for name in ('torch._dynamo', 'sympy', 'triton') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_two_processes_compile_once(cache: Path) -> None:
    code = (
        "import torch\nfrom ln_zoo.layers import RecurrentLayer\nfrom ln_zoo.ops import lstm_cell\n"
        "layer = RecurrentLayer(3, 5, cell=lstm_cell(peephole=True))\n"
        "layer(torch.randn(16, 2, 3))\n"
    )
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    texts = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], texts
    assert "".join(texts).count("compiling the generated kernel") == 1
