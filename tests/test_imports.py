"""Imports between rooms run downward only, and Lightning stays out of the rooms of plain torch.

    cli -> sweeps -> zoo -> models -> export -> layers -> norms -> ops

`callbacks` stand beside `models`, and may read data of their own; `checkpoints`, `files`,
`metrics` and `training_runs` import no other room, `vocabulary` only `files`, and `data` those two.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ln_zoo

PACKAGE = Path(ln_zoo.__file__).parent

#: What each room may import. The version is a constant that every room may read.
BELOW = {
    "_version": set(),
    "ops": set(),
    "norms": {"ops"},
    "layers": {"norms", "ops"},
    "analysis": {"layers", "norms", "ops", "tables"},
    "conversion": {"layers", "norms", "ops", "tables"},
    "testing": {"analysis", "layers", "norms", "ops", "testing_cases"},
    "testing_cases": set(),
    "rl": {"layers"},
    "files": set(),
    "tables": set(),
    "packages": set(),
    "strict_yaml": {"files"},
    "vocabulary": {"files"},
    "data": {"files", "vocabulary"},
    "metrics": {"tables"},
    "checkpoints": set(),
    "training_runs": set(),
    "signals": set(),
    "plots": {"analysis", "metrics", "files", "tables"},
    "callbacks": {
        *("plots", "checkpoints", "signals", "data", "files", "vocabulary"),
        *("metrics", "layers", "norms", "ops"),
    },
    "export": {"layers", "norms", "ops"},
    "late": set(),
    "models": {
        *("late", "training_runs", "export", "vocabulary", "metrics", "layers", "norms", "ops"),
    },
}
_ALL_BELOW_ZOO = {room for room in BELOW if not room.startswith(("_version", "testing", "rl"))}
BELOW["zoo"] = _ALL_BELOW_ZOO
BELOW["sweeps"] = {"zoo"} | _ALL_BELOW_ZOO
BELOW["cli"] = {"sweeps", "zoo"} | _ALL_BELOW_ZOO
# The package itself only hands names on, so it stands above everything but the command line.
BELOW["__init__"] = {"zoo"} | _ALL_BELOW_ZOO
BELOW["__main__"] = {"cli"}

#: `test_light_install.py` loads them where Lightning is not installed.
WITHOUT_LIGHTNING = (
    *("ops", "norms", "layers", "analysis", "conversion", "export", "testing", "rl", "tables"),
)


def room_of(path: Path, package: Path) -> str:
    """The room a file lies in: its folder, or its own name directly under the package."""
    first = path.relative_to(package).parts[0]
    return first.removesuffix(".py")


def imported_modules(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each import in a file, those inside functions and strings to
    ``import_module`` as well."""
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            first = node.args[0] if node.args else None
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def violations(package: Path) -> list[str]:
    """Every import that runs upward or sideways, and every Lightning import out of its rooms."""
    found = []
    rooms = {room_of(path, package) for path in package.rglob("*.py")}
    for path in sorted(package.rglob("*.py")):
        room = room_of(path, package)
        if room not in BELOW:
            found.append(f"{path.relative_to(package)}: room {room!r} has no place in BELOW")
            continue
        for line, name in imported_modules(path, package):
            place = f"{path.relative_to(package)}:{line}: {room} imports {name}"
            top, _, rest = name.partition(".")
            if room in WITHOUT_LIGHTNING and top.split("_")[0] in ("lightning", "pytorch"):
                found.append(f"{place}: Lightning has no place here")
            if top != package.name:
                continue
            target = rest.partition(".")[0]
            # A name that is no room (``from ln_zoo import LayerNorm``) is the package's.
            target = target if target in rooms | set(BELOW) else "__init__"
            if target not in {room, "_version"} | BELOW[room]:
                found.append(f"{place}: not below it")
    return found


def file_graph(package: Path) -> dict[str, set[str]]:
    """For each module of the package the others that it imports, anywhere in the file."""
    names = {}
    for path in package.rglob("*.py"):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        names[".".join(parts).removesuffix(".__init__")] = path
    graph = {}
    for name, path in names.items():
        imported = (given for _, given in imported_modules(path, package))
        # ``from ln_zoo.ops import spec`` is a module, ``from ln_zoo.ops.spec import Spec`` a name.
        modules = (m if m in names else m.rpartition(".")[0] for m in imported)
        graph[name] = {module for module in modules if module in names} - {name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for target in graph[waiting.pop()] - seen:
                seen.add(target)
                waiting.append(target)
        return seen

    reach = {module: reachable(module) for module in graph}
    groups = {
        tuple(sorted(m for m in reach[module] if module in reach[m]))
        for module in graph
        if module in reach[module]
    }
    return [list(group) for group in sorted(groups)]


def test_no_modules_import_each_other():
    assert circles(file_graph(PACKAGE)) == []


def test_a_planted_circle_is_found(tmp_path):
    package = tmp_path / "ln_zoo"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("def f():\n    from ln_zoo.b import g")
    (package / "b.py").write_text("from . import c\nfrom ln_zoo.d import x")
    (package / "c.py").write_text("import importlib\nimportlib.import_module('ln_zoo.a')")
    (package / "d.py").write_text("import os")
    assert circles(file_graph(package)) == [["ln_zoo.a", "ln_zoo.b", "ln_zoo.c"]]


def test_imports_run_downward():
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("norms/upward.py", "from ln_zoo.layers import Linear"),
        ("norms/upward.py", "from ..layers import Linear"),
        ("norms/deep/upward.py", "from ...layers.linear import Linear"),
        ("norms/upward.py", "from ln_zoo import layers"),
        ("norms/upward.py", "import ln_zoo.zoo.registry as registry"),
        ("ops/upward.py", "def f():\n    from ln_zoo.norms import Norm"),
        ("ops/upward.py", "import importlib\nimportlib.import_module('ln_zoo.norms')"),
        ("models/upward.py", "from ln_zoo import LayerNorm"),
        ("models/base.py", "def f():\n    from ln_zoo.zoo import load"),
        ("models/sideways.py", "from ln_zoo.callbacks import CurvesPlot"),
        ("data/sideways.py", "import torch, ln_zoo.metrics"),
        ("metrics/sideways.py", "from ln_zoo.data.mnist import MNIST"),
        ("zoo/upward.py", "import ln_zoo.cli"),
        ("layers/heavy.py", "from lightning.pytorch import LightningModule"),
        ("testing.py", "import lightning as L"),
        ("analysis/heavy.py", "import pytorch_lightning"),
        ("ops/heavy.py", "from lightning_fabric.utilities import x"),
        ("attic/new.py", "import os"),
    ],
)
def test_a_planted_import_is_found(tmp_path, file, line):
    package = tmp_path / "ln_zoo"
    for room in ("ops", "norms", "layers", "models", "callbacks", "data", "metrics", "zoo"):
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").write_text("from ln_zoo._version import __version__\n")
    (package / "cli.py").write_text("import ln_zoo.zoo\nfrom ln_zoo import models\n")
    (package / "norms" / "fine.py").write_text("from ..ops import RowNorm\nfrom . import base\n")
    assert violations(package) == []

    (package / file).parent.mkdir(parents=True, exist_ok=True)
    (package / file).write_text(line + "\n")
    (found,) = violations(package)
    assert found.startswith(file)
