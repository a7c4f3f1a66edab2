"""Imports between rooms run downward only, and Lightning stays out of the rooms of plain torch.

Beside torch alone, layers, norms, kernels and conversion work, and the rest says why not.

    cli -> reproduction -> sweeps -> zoo -> models -> export -> layers -> norms -> ops
    kernels -> ops

No room imports `kernels`: `ops.registry` loads what is there.
`callbacks` stand beside `models`, and may read data of their own. Each module of `utils` and
`testing` is a room of its own, since some need Lightning and most do not.
"""

import ast
import fnmatch
import graphlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ln_zoo
from ln_zoo.ops.cells import ARITHMETICS, CELLS
from ln_zoo.utils.packages import EXTRAS, MODULES, missing_package

PACKAGE = Path(ln_zoo.__file__).parent

#: Folders of modules that have little to do with each other.
SHELVES = ("utils", "testing")
#: What each room may import. The version is a constant that every room may read.
BELOW = {
    "_version": set(),
    "ops": set(),
    "kernels": {"ops"},
    "norms": {"ops", "checks", "class_paths", "names"},
    "layers": {"norms", "ops", "checks", "class_paths"},
    "analysis": {"layers", "norms", "ops", "checks", "tables"},
    "conversion": {"layers", "norms", "ops", "class_paths", "tables"},
    "testing": {"norm_case", "cell_case", "layer_case", "data_case", "callback_case"},
    "layer_case": {"analysis", "layers", "norms"},
    "norm_case": {"layer_case", "analysis", "layers", "norms", "ops"},
    "cell_case": {"layer_case", "analysis", "layers", "norms"},
    "argument_case": set(),
    "data_case": {"argument_case"},
    "callback_case": {"argument_case"},
    "rl": {"layers"},
    "utils": set(),
    "checkpoints": set(),
    "checks": set(),
    "class_paths": set(),
    "errors": set(),
    "files": set(),
    "locks": set(),
    "names": set(),
    "package_data": set(),
    "preprocessing": {"errors"},
    "schema": {"errors", "files", "names"},
    "packages": set(),
    "signals": set(),
    "tables": {"files"},
    "trust": {"class_paths", "errors", "names", "schema"},
    "training_runs": set(),
    "vocabulary": {"checks", "files"},
    "yaml": {"files"},
    "data": {"checks", "files", "schema", "vocabulary"},
    "metrics": {"checks", "tables"},
    "plots": {"analysis", "metrics", "checks", "files", "tables"},
    "callbacks": {
        *("plots", "checkpoints", "checks", "class_paths", "signals", "data", "files"),
        *("errors", "packages", "schema", "trust", "vocabulary"),
        *("metrics", "conversion", "layers", "norms", "ops"),
    },
    "export": {"layers", "norms", "ops"},
    "models": {
        *("training_runs", "export", "checks", "class_paths", "files", "vocabulary", "metrics"),
        *("layers", "norms", "ops"),
    },
}
_BESIDE = re.compile("_version|rl|testing|kernels|.*_case")
_ALL_BELOW_ZOO = {room for room in BELOW if not _BESIDE.fullmatch(room)}
BELOW["zoo"] = _ALL_BELOW_ZOO
BELOW["sweeps"] = {"zoo"} | _ALL_BELOW_ZOO
BELOW["reproduction"] = {"sweeps", "zoo"} | _ALL_BELOW_ZOO
BELOW["cli"] = {"reproduction", "sweeps", "zoo"} | _ALL_BELOW_ZOO
# The package itself only hands names on, so it stands above everything but the command line.
BELOW["__init__"] = {"zoo"} | _ALL_BELOW_ZOO
BELOW["__main__"] = {"cli"}

#: They are loaded below where Lightning is not installed.
WITHOUT_LIGHTNING = (
    *("ops", "kernels", "norms", "layers", "analysis", "conversion", "export", "testing", "rl"),
    *("checks", "class_paths", "tables", "layer_case", "norm_case", "cell_case"),
)


def room_of(parts: Sequence[str]) -> str:
    """The room of a module, from the parts of its name or path below the package."""
    inside = parts[0] in SHELVES and len(parts) > 1 and parts[1] != "__init__.py"
    return parts[int(inside)].removesuffix(".py")


#: The imports that go up: `ZooModule.from_pretrained`, `save_pretrained` and `push_to_hub`.
UPWARD = {("ln_zoo.models.base", f"ln_zoo.zoo.{name}") for name in ("loading", "publishing")}


def imported_modules(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each import in a file, those inside functions and strings to
    ``import_module`` as well, but not `UPWARD`."""
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    for line, name in _imports(path, parts):
        if (".".join(parts), name) not in UPWARD:
            yield line, name


def _imports(path: Path, parts: list[str]) -> Iterator[tuple[int, str]]:
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
    rooms = {room_of(path.relative_to(package).parts) for path in package.rglob("*.py")}
    for path in sorted(package.rglob("*.py")):
        room = room_of(path.relative_to(package).parts)
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
            target = room_of(rest.split("."))
            # A name that is no room (``from ln_zoo import LayerNorm``) is the package's.
            target = target if target in rooms | set(BELOW) else "__init__"
            if target not in {room, "_version"} | BELOW[room]:
                found.append(f"{place}: not below it")
    return found


def file_graph(package: Path) -> dict[str, set[str]]:
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


def circle(graph: dict[str, set[str]]) -> set[str]:
    """Modules that import each other, directly or through others; none if there are none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return set(error.args[1])
    return set()


def test_no_modules_import_each_other_and_a_planted_circle_is_found(tmp_path):
    package = tmp_path / "ln_zoo"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("def f():\n    from ln_zoo.b import g")
    (package / "b.py").write_text("from . import c\nfrom ln_zoo.d import x")
    (package / "c.py").write_text("import importlib\nimportlib.import_module('ln_zoo.a')")
    (package / "d.py").write_text("import os")
    assert circle(file_graph(package)) == {"ln_zoo.a", "ln_zoo.b", "ln_zoo.c"}
    assert circle(file_graph(PACKAGE)) == set()


def test_imports_run_downward():
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("norms/upward.py", "from ln_zoo.layers import Linear"),
        ("norms/upward.py", "from ..layers import Linear"),
        ("norms/deep/upward.py", "from ...layers.linear import Linear"),
        ("norms/upward.py", "from ln_zoo import layers"),
        ("norms/upward.py", "import ln_zoo.zoo.reading as reading"),
        ("ops/upward.py", "def f():\n    from ln_zoo.norms import Norm"),
        ("ops/upward.py", "import importlib\nimportlib.import_module('ln_zoo.norms')"),
        ("models/upward.py", "from ln_zoo import LayerNorm"),
        ("models/base.py", "def f():\n    from ln_zoo.zoo import load"),
        ("models/mlp.py", "def f():\n    from ln_zoo.zoo import pretrained"),
        ("models/sideways.py", "from ln_zoo.callbacks import CurvesPlot"),
        ("data/sideways.py", "import torch, ln_zoo.metrics"),
        ("metrics/sideways.py", "from ln_zoo.data.images.dataset import MNIST"),
        ("zoo/upward.py", "import ln_zoo.cli"),
        ("sweeps/upward.py", "from ln_zoo.reproduction import claims"),
        ("layers/heavy.py", "from lightning.pytorch import LightningModule"),
        ("testing.py", "import lightning as L"),
        ("analysis/heavy.py", "import pytorch_lightning"),
        ("ops/heavy.py", "from lightning_fabric.utilities import x"),
        ("layers/fast.py", "from ln_zoo.kernels.native import build"),
        ("ops/fast.py", "def f():\n    from ..kernels import native"),
        ("cli/fast.py", "import ln_zoo.kernels"),
        ("kernels/upward.py", "from ln_zoo.norms import Norm"),
        ("attic/new.py", "import os"),
    ],
)
def test_a_planted_import_is_found(tmp_path, file, line):
    package = tmp_path / "ln_zoo"
    for room in (
        "ops",
        "kernels",
        "norms",
        "layers",
        "models",
        "callbacks",
        "data",
        "metrics",
        "zoo",
    ):
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").write_text("from ln_zoo._version import __version__\n")
    (package / "cli").mkdir()
    (package / "cli" / "__init__.py").write_text("import ln_zoo.zoo\nfrom ln_zoo import models\n")
    (package / "norms" / "fine.py").write_text("from ..ops import RowNorm\nfrom . import base\n")
    assert violations(package) == []

    (package / file).parent.mkdir(parents=True, exist_ok=True)
    (package / file).write_text(line + "\n")
    (found,) = violations(package)
    assert found.startswith(file)


CELL_NAMES = {name.lower() for name in (*CELLS, *ARITHMETICS, "RNN")}
#: Where cells are defined, run fast, and recognised in other libraries.
MAY_COMPARE = "ops/cells.py", "kernels/*", "conversion/*"


def comparisons_of_cells(package: Path) -> list[str]:
    """Every comparison with the name of a cell: elsewhere a cell is data."""
    found = []
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package).as_posix()
        if any(fnmatch.fnmatch(place, pattern) for pattern in MAY_COMPARE):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Compare | ast.MatchValue):
                continue
            words = (a.value for a in ast.walk(node) if isinstance(a, ast.Constant))
            if CELL_NAMES & {word.lower() for word in words if isinstance(word, str)}:
                found.append(f"{place}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_a_cell_is_data(tmp_path: Path) -> None:
    assert comparisons_of_cells(PACKAGE) == []
    for file, line in {
        "ops/spec.py": "gates = 4 if cell == 'LSTM' else 3",
        "layers/rnn.py": "fast = kind in ('gru', 'lstm')",
        "export/loops.py": "if 'RNN_RELU' != name: pass",
        "analysis/a.py": "match cell:\n    case 'light GRU': pass",
        "ops/cells.py": "a = name == 'LSTM'",
        "kernels/native/steps.py": "a = name == 'LSTM'",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(line)
    found = [place.partition(":")[0] for place in comparisons_of_cells(tmp_path)]
    assert found == ["analysis/a.py", "export/loops.py", "layers/rnn.py", "ops/spec.py"]


ROOT = Path(__file__).parent.parent
#: torch needs filelock itself.
THERE = {"torch", "numpy", "filelock"}

CODE = """
import contextlib, io, json, sys
from importlib.machinery import PathFinder

absent = set(json.loads(sys.argv[1]))

class WithoutThem(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        known = name.partition(".")[0] not in absent
        return super().find_spec(name, path, target) if known else None

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutThem

import importlib
import torch
for room in json.loads(sys.argv[2]):
    importlib.import_module(f"ln_zoo.{room}")
import ln_zoo
from ln_zoo import GRU, LSTM, BatchNorm, LayerNorm, Linear, WeightNorm, normalize_

found = {}
for norm in (None, LayerNorm(), BatchNorm(), WeightNorm()):
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = torch.nn.ModuleList([LSTM(3, 4, norm=norm), GRU(4, 4, norm=norm), Linear(4, 1)])
        model.to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        x, losses = torch.randn(6, 8, 3).to(dtype), []
        for _ in range(20):
            h, _ = model[0](x)
            h, _ = model[1](h)
            loss = (model[2](h[-1]).float() - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found[f"{norm} {dtype}"] = losses[-1] / losses[0]
        model.eval()
        with torch.no_grad():
            assert model[0](x)[0].dtype == dtype

torch_model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
normalize_(torch_model, LayerNorm())
found["converted"] = type(torch_model[0]).__module__.partition(".")[0]

from ln_zoo.cli import main

for command in (
    ["list"],
    ["kernels"],
    ["fit", "--config", "configs/quickstart.yaml"],
    ["write", "a", "--model", "b"],
):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(command)
    found[command[0]] = [code, said.getvalue()]
try:
    ln_zoo.load("mlp.layernorm-digits")
except ImportError as error:
    found["load"] = str(error)
print(json.dumps(found))
"""


def test_torch_alone_is_enough_for_layers() -> None:
    absent = sorted({*MODULES} - THERE)
    paths = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    rooms = [
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path in paths
        if len(path.parts) <= 2 and room_of(path.parts) in WITHOUT_LIGHTNING
    ]
    lists = [*absent, "pytorch_lightning"], rooms
    command = [sys.executable, "-c", CODE, *map(json.dumps, lists)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])

    trained = {name: share for name, share in found.items() if " torch." in name}
    assert len(trained) == 8
    assert all(share < 0.5 for share in trained.values()), trained
    assert found["converted"] == "ln_zoo"
    assert found["list"] == found["kernels"] == [0, ""]
    for name, package in (("fit", "yaml"), ("write", r"\w+")):
        code, said = found[name]
        assert code == 1
        (line,) = said.splitlines()
        wanted = rf"ln-zoo {name}: error: this needs the package {package}, which is not installed"
        assert re.match(wanted, line), line
        assert "pip install ln-zoo" in line
    assert re.search(r"needs the package \w+, which is not installed", found["load"])


def test_every_dependency_has_its_message() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {canonicalize_name(Requirement(need).name) for need in project["dependencies"]}
    owners = packages_distributions()
    found = [{canonicalize_name(owner) for owner in owners[name]} for name in MODULES]
    assert all(each & needed for each in found)
    assert set.union(*found) >= needed


def test_every_extra_has_its_message() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for module, extra in EXTRAS.items():
        said = str(missing_package(ModuleNotFoundError(name=f"{module}.part")))
        assert module in said
        assert f"ln-zoo[{extra}]" in said
        brought = {canonicalize_name(Requirement(need).name) for need in extras[extra]}
        assert brought & {canonicalize_name(owner) for owner in packages_distributions()[module]}


def test_a_layer_imports_what_it_uses() -> None:
    """Also after a call on the CPU: no compiler, no plots, no Lightning, no kernels for GPUs."""
    code = (
        "import json, sys, torch\n"
        "from ln_zoo import LSTM, LayerNorm\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('ln_zoo.')}\n"
        "LSTM(3, 4, norm=LayerNorm())(torch.randn(5, 2, 3))[0].sum().backward()\n"
        "print(json.dumps([sorted(rooms), list(sys.modules)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    rooms, modules = json.loads(done.stdout)
    assert {*rooms} == {"_version", "utils", "layers", "norms", "ops"}
    heavy = "torch._dynamo", "sympy", "scipy", "matplotlib", "lightning", "torchmetrics"
    unused = "triton.steps", "cluster.persistent", "cuda_graphs.recorded", "native.draw"
    assert not {*heavy, *(f"ln_zoo.kernels.{name}" for name in unused)} & {*modules}
