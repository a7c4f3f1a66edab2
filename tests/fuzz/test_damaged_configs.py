"""Damaged configurations either parse and build, or end in one readable line."""

from __future__ import annotations

import copy
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("hypothesis", reason="needs hypothesis: pip install 'ln-zoo[test]'")

import yaml
from campaign import campaign, fast, limited
from hypothesis import example, given
from hypothesis import strategies as st

from ln_zoo.cli import check_training
from ln_zoo.cli.errors import report_error
from ln_zoo.cli.lightning import ZooCLI

CONFIGS = Path(__file__).parents[2] / "configs"
#: Runs whose model and data are small.
NAMES = sorted(
    str(path.relative_to(CONFIGS))
    for path in CONFIGS.rglob("*.yaml")
    if path.name == "quickstart.yaml" or path.parent.name in ("mlp", "pixels")
)
#: Characters of an error.
LONGEST = 900
#: What Python says of a value that nothing checked.
_RAW = re.compile(
    r"Traceback|this is a bug|object has no attribute|'NoneType'|unhashable type|not iterable|"
    r"not subscriptable|unexpected keyword|object is not|string indices|dictionary update"
)

#: Sizes between these would take memory before anything refuses them.
ODD: list[Any] = [
    None, True, "", "x", " ", "null", 0, -1, 1, 3, 0.5, -0.5, 1e-9, 1e300, float("nan"),
    float("inf"), 10**25, [], [1], [None], ["x", 1], {}, {"a": 1}, {1: 2}, {"class_path": "x"},
    {"class_path": None}, {"class_path": "LayerNorm", "init_args": None}, [[[]]], "LayerNorm",
    "Digits", "MLPClassifier", "torch.nn.Linear", "ln_zoo.norms", "os.path.join", "no.such.Thing",
    "été\n", "\x00", "a" * 2000, "${oc.env:HOME}", "!!python/name:os.system", "2001-01-01", "1_000",
    "\u00a08", "/dev/null", ".",
]  # fmt: skip


@dataclass(frozen=True)
class Edit:
    """A change of the node that a number picks among all nodes of the tree."""

    kind: str
    node: int
    value: Any = None


@dataclass(frozen=True)
class ConfigCase:
    name: str
    edits: tuple[Edit, ...]
    #: A place in the text, as a part of its length, and what is inserted there.
    text: tuple[float, str] | None = None


@cache
def tree_of(name: str) -> Any:
    return yaml.safe_load((CONFIGS / name).read_text())


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    for key in keys:
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from nodes(tree[key])


def edited(case: ConfigCase) -> str:
    tree = copy.deepcopy(tree_of(case.name))
    for edit in case.edits:
        found = list(nodes(tree))
        if not found:
            break
        owner, key = found[edit.node % len(found)]
        if edit.kind == "delete":
            del owner[key]
        elif edit.kind == "rename" and isinstance(owner, dict):
            owner[f"{key}s" if isinstance(key, str) else "x"] = owner.pop(key)
        elif edit.kind == "wrap":
            owner[key] = [owner[key]]
        elif edit.kind == "copy":
            other, source = found[(edit.node * 7 + 3) % len(found)]
            owner[key] = copy.deepcopy(other[source])
        else:
            owner[key] = copy.deepcopy(edit.value)  # later edits may change it
    # Other types at these keys are lines of tests/cli/test_mistakes.py.
    for owner, key in list(nodes(tree)):
        kind = {"class_path": str, "init_args": dict}.get(key if isinstance(key, str) else "")
        if kind is not None and not isinstance(owner[key], kind):
            owner[key] = kind()
    text = yaml.safe_dump(tree, allow_unicode=True)
    if case.text is None:
        return text
    at = round(case.text[0] * len(text))
    return text[:at] + case.text[1] + text[at:]


_edits = st.builds(
    Edit,
    st.sampled_from(["set", "set", "set", "delete", "rename", "wrap", "copy"]),
    st.integers(0, 80),
    st.sampled_from(ODD),
)
_texts = st.sampled_from(
    [":", "\n", "\t", "- ", "{", "}", "[", "'", '"', "#", "&a ", "*a", "!!x ", "? ", "|", "%",
     "\x07", "\ufeff", "---\n", "<<: ", "\u00a0", "é"]
)  # fmt: skip
config_cases = st.builds(
    ConfigCase,
    st.sampled_from(NAMES),
    st.lists(_edits, min_size=1, max_size=3).map(tuple),
    st.none() | st.none() | st.tuples(st.floats(0, 1, width=32), _texts),
)


def ended(text: str) -> tuple[int, str]:
    """Exit code and errors of parsing and building what ``fit`` would run."""
    with tempfile.TemporaryDirectory() as folder:
        before = Path.cwd()
        os.chdir(folder)
        errors = StringIO()
        try:
            Path("run.yaml").write_text(text, encoding="utf-8")
            argv = ["fit", "--config=run.yaml", "--trainer.logger=false"]
            quiet = redirect_stdout(StringIO()), redirect_stderr(errors), warnings.catch_warnings()
            with quiet[0], quiet[1], quiet[2], limited():
                warnings.simplefilter("ignore")
                try:
                    ZooCLI(argv, check_training(argv))
                    return 0, ""
                except SystemExit as end:
                    return int(end.code or 0), errors.getvalue()
                except Exception as error:
                    return report_error(error, "fit", 2), errors.getvalue()
        finally:
            os.chdir(before)


def check(case: ConfigCase) -> None:
    kept = {"LN_ZOO_DATA": "", "PL_GLOBAL_SEED": "0", "LN_ZOO_DEBUG": ""}
    with mock.patch.dict(os.environ, kept):
        del os.environ["LN_ZOO_DATA"]
        code, errors = ended(edited(case))
    if code == 0:
        return
    first, *_ = errors.strip().splitlines() or [""]
    assert code == 2, f"exit code {code}: {errors}"
    assert "error: " in first, errors
    assert len(first) < LONGEST, f"an error of {len(first):,} characters: {first[:300]}"
    assert not _RAW.search(errors), errors


@given(case=config_cases)
@example(ConfigCase("attentive_reader/quickstart.yaml", (Edit("set", 0, "a" * 2000),), None))
@fast(20)
def test_damaged_configurations(case: ConfigCase) -> None:
    check(case)


@pytest.mark.slow
def test_damaged_configurations_for_long() -> None:
    campaign(config_cases, check)
