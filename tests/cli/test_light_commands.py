"""The front door: what needs no torch does not import it, and answers at once."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from cli_support import SCRIPT, heavy_imports

from ln_zoo import __version__
from ln_zoo.cli import main, precheck


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("--version", f"ln-zoo {__version__}"),
        ("", "ln-zoo fit --config quickstart"),
        ("fit --help", "--help_all"),
        ("test -h", "--ckpt_path"),
        ("analyze invariance --help", "--weight_scale"),
        ("write a --model m --width 0", "--width"),
        ("lsit", "'list'"),
        ("fit --ckpt_path=none.ckpt", "none.ckpt"),
    ],
)
def test_imports_nothing_heavy(here: Path, given: str, answer: str) -> None:
    printed, heavy = heavy_imports(*given.split())
    assert answer in printed
    assert heavy == set()


def test_short_help_fits_a_screen(here: Path) -> None:
    printed, _ = heavy_imports("fit", "--help")
    options = re.findall(r"^  (--[a-z.+_]+)", printed, re.MULTILINE)
    assert len(printed.splitlines()) <= 24
    assert max(map(len, printed.splitlines())) <= 100
    # All but the flags are options of the parser.
    known = {*precheck.options("fit"), "model.norm", "model.lr", "data.root"}
    known |= {"trainer.logger.save_dir", "print_config", "help_all"}
    assert {option.strip("-+") for option in options} <= known


def test_the_installed_script_answers_at_once() -> None:
    """Within 0.3 s of processor time; wall time depends on what else runs."""
    times = [0.0]
    for _ in range(3):
        done = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True, check=True)
        times.append(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]))
        assert done.stdout == f"ln-zoo {__version__}\n"
    assert min(after - before for before, after in pairwise(times)) < 0.3


@pytest.mark.parametrize("first", [[], ["", "x"], ["HERE", "x"], ["x", "HERE"]])
def test_the_current_folder_is_searched_last(here: Path, monkeypatch, first: list[str]) -> None:
    before = [str(Path.cwd()) if entry == "HERE" else entry for entry in first]
    monkeypatch.setattr(sys, "path", list(before))
    assert main(["--version"]) == main(["--version"]) == 0
    # Python's own entry for it, of `python -m` and `python -c`, stays where it is.
    assert sys.path == (before or [str(Path.cwd())])
