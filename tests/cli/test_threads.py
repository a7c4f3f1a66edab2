"""Threads of the command line: which policy libgomp gets, and how many a model runs on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli_support import QUIET, SMALL, Patch

from ln_zoo.cli import main, threads
from ln_zoo.models import MLPClassifier, SequenceClassifier

POLICIES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": str(threads._SPINS)}),
        *((kept, kept) for kept in ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"})),
    ],
)
def test_a_policy_of_the_environment_is_kept(
    given: dict[str, str], expected: dict[str, str], monkeypatch: Patch
) -> None:
    for name in POLICIES:
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    threads.shorten_spinning()
    assert {name: os.environ[name] for name in POLICIES if name in os.environ} == expected


@pytest.mark.parametrize(
    ("model", "data", "expected"),
    [
        (MLPClassifier(64, [256, 256]), SimpleNamespace(batch_size=64), 1),
        (MLPClassifier(64, [256, 256]), SimpleNamespace(batch_size=512), 2),
        (MLPClassifier(784, [500]), SimpleNamespace(batch_size=1), 2),
        (MLPClassifier(64, [8]), None, 2),
        (SequenceClassifier(1, 8), SimpleNamespace(batch_size=1), 2),
    ],
)
def test_small_models_of_known_work_run_on_one_thread(
    model: object, data: object, expected: int, two_threads: None
) -> None:
    with threads.limited(model, data):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 2


def test_fit_limits_its_threads(in_tmp: Path, two_threads: None, monkeypatch: Patch) -> None:
    used, step = set(), MLPClassifier.training_step

    def recorded(*arguments: object) -> object:
        used.add(torch.get_num_threads())
        return step(*arguments)

    monkeypatch.setattr(MLPClassifier, "training_step", recorded)
    assert main(["fit", *SMALL, *QUIET, "--trainer.max_epochs=1", "--trainer.logger=false"]) == 0
    assert used == {1}
    assert torch.get_num_threads() == 2
