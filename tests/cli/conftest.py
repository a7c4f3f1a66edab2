"""Fixtures of the command line's tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from cli_support import fit

# Between Lightning and jsonargparse, and no concern of ours.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"


@contextmanager
def as_found(temporary: Path) -> Iterator[None]:
    """Puts back what a command changes in this process: a user's own process ends after it."""
    path, environment, folder = list(sys.path), dict(os.environ), Path.cwd()
    modules = set(sys.modules)
    try:
        yield
    finally:
        os.chdir(folder)
        torch.set_flush_denormal(False)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            # A user's own files lie in temporary folders, under the same names in each.
            if str(temporary) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
        os.environ.clear()
        os.environ.update(environment)


@pytest.fixture(autouse=True)
def _as_found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with as_found(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture
def here(in_tmp: Path) -> Path:
    """A temporary current folder."""
    return in_tmp


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the small model after one epoch; not to be written to."""
    folder = tmp_path_factory.mktemp("trained")
    with as_found(folder):
        os.chdir(folder)
        fit("--model.lr=0.01")
    return folder / "runs/MLPClassifier-LayerNorm/version_0/checkpoints/last.ckpt"
