"""Fixtures of the command line's tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli_support import fit

# Between Lightning and jsonargparse, and no concern of ours.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"


@pytest.fixture(autouse=True)
def _as_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what a command changes in this process: a user's own process ends after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    environment = dict(os.environ)
    modules = set(sys.modules)
    yield
    torch.set_flush_denormal(False)
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def here(in_tmp: Path) -> Path:
    """A temporary current folder."""
    return in_tmp


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the small model after one epoch; not to be written to."""
    folder = tmp_path_factory.mktemp("trained")
    before = Path.cwd()
    os.chdir(folder)
    try:
        fit("--model.lr=0.01")
    finally:
        os.chdir(before)
    return folder / "runs/MLPClassifier-LayerNorm/version_0/checkpoints/last.ckpt"
