"""Fixtures of the command line's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_support import fit


@pytest.fixture
def here(in_tmp: Path) -> Path:
    """A temporary current folder."""
    return in_tmp


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the small model after one epoch; not to be written to."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fit("--model.lr=0.01")
    return folder / "runs/MLPClassifier-LayerNorm/version_0/checkpoints/last.ckpt"
