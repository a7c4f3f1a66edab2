"""What tests share: where real data lie, an offline network, quiet threads."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_pictures import leave_out_layout

# Set before any library reads them: no test may reach the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# Tensors of tests are small: threads would spend their time waiting for one another.
if os.environ.setdefault("OMP_NUM_THREADS", "1") == "1":
    torch.set_num_threads(1)  # without workers, torch was imported before the variable was set

# Tests write some ten thousand small files, for each of which a disk may take milliseconds.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("TMPDIR", str(MEMORY))

ROOT = Path(__file__).parent.parent
#: Their files start processes and compile, and take longest: last, one would keep its worker busy
#: while the others wait.
FIRST = ("cli", "zoo", "kernels", "norms", "data", "callbacks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long go first, in the order of their folders."""

    def place(item: pytest.Item) -> int:
        if not item.path.is_relative_to(ROOT / "tests"):
            return len(FIRST) + 1
        folder, *files = item.path.relative_to(ROOT / "tests").parts
        if folder in FIRST:
            return FIRST.index(folder)
        return len(FIRST) + bool(files)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Before the first test. What is there by now stays to the end: no collection of garbage need
    look at it again."""
    leave_out_layout()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """torch's number of threads, which tests may set, is put back."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Folder of real datasets: ``LN_ZOO_DATA``, else ``../shared/data`` beside the repository."""
    folder = Path(os.environ.get("LN_ZOO_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "mnist").is_dir():
        pytest.skip(
            f"needs real data: {folder} does not exist; set LN_ZOO_DATA to a folder that does"
        )
    return folder


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary current folder, where runs and a user's own files may lie."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=["kernels", "generic loop"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with fast paths allowed and once more without any."""
    monkeypatch.setenv("LN_ZOO_KERNELS", "1" if request.param == "kernels" else "0")
    return request.param


@pytest.fixture
def compiler() -> Iterator[None]:
    """Forgets what was compiled before and after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def subnormal_numbers() -> None:
    """Subnormal numbers are computed, which the command line turns off in its process."""
    torch.set_flush_denormal(False)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Kernels selected so far; see `engines.note_kernels`."""
    from engines import note_kernels  # which compiles the native kernels

    return note_kernels(monkeypatch)
