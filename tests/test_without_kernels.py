"""The package without its folder of kernels, and kernels of other packages."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import every_layer
import pytest
import torch

import ln_zoo
from ln_zoo.layers import RNN
from ln_zoo.ops import registry

PACKAGE = Path(ln_zoo.__file__).parent
SCRIPT = Path(every_layer.__file__)


def test_every_layer_works_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the whole package without the other kernels, which are held against references."""
    omit = shutil.ignore_patterns("kernels", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "ln_zoo", ignore=omit)
    assert (tmp_path / "ln_zoo/cli/kernels.py").exists()
    done = {}
    for name, command in {
        "layers": [SCRIPT, tmp_path / "found.pt"],
        "command": ["-c", "from ln_zoo.cli import main; main(['kernels'])"],
    }.items():
        done[name] = subprocess.run(
            [sys.executable, *command],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done[name].returncode == 0, done[name].stderr
    listed = [line.split()[0] for line in done["command"].stdout.splitlines() if line]
    assert listed == ["torch", "aten", "(none)"]

    monkeypatch.setenv("LN_ZOO_KERNELS", "torch,aten")
    found, wanted = torch.load(tmp_path / "found.pt"), every_layer.results()
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0)
    assert len(wanted) == 66
    assert all(a.isfinite().all() for tensors in wanted.values() for a in tensors)


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Entry points are read again, before and after the test."""
    monkeypatch.setattr(registry, "KERNELS", [*registry.kernels()])
    registry.load.__wrapped__.cache_clear()
    yield
    registry.load.__wrapped__.cache_clear()


def test_kernels_of_other_packages_are_found_at_the_first_selection(
    anew: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Constant:
        name, title, tasks, rank = "constant", "a test", ("layers",), 0

        def missing(self) -> str | None:
            return None

        def unsupported_reason(self, call: Any) -> str | None:
            return None

        def __call__(self, call: Any) -> Any:
            return call.x.new_full((*call.x.shape[:2], 4), 7.0), call.states

    theirs = SimpleNamespace(
        name="theirs", load=lambda: registry.register(Constant()), value="theirs"
    )
    broken = EntryPoint("broken", "no_such_package_of_kernels", "ln_zoo.kernels")
    groups = {"ln_zoo.kernels": [broken, theirs]}
    monkeypatch.setattr(registry, "entry_points", lambda *, group: groups[group])
    layer, x = RNN(3, 4), torch.randn(5, 2, 3)
    with caplog.at_level(logging.WARNING, logger="ln_zoo"):
        assert (layer(x)[0] == 7).all()
        layer(x)
    (message,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert "broken" in message
    assert "no_such_package_of_kernels" in message


def test_kernels_are_tried_by_rank() -> None:
    ranks = [kernel.rank for kernel in registry.kernels()]
    assert ranks == sorted(ranks)
    names = list(dict.fromkeys(kernel.name for kernel in registry.kernels()))
    assert names == ["cluster", "torch", "triton", "native", "aten", "generated"]
