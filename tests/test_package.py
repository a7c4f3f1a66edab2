"""The package as a whole: light import, torch hub, the built wheel, the README."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from test_docs import blocks

import ln_zoo
from ln_zoo.kernels.native.compiler import ARCHITECTURE, LEVELS, parts

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip"]
README = ROOT / "README.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_import_is_light() -> None:
    code = "dir(ln_zoo); ln_zoo.list_models(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"import sys, ln_zoo; {code}"], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", ln_zoo.__all__)
def test_every_public_name_is_found(name: str) -> None:
    assert getattr(ln_zoo, name) is not None


def test_subpackages_need_no_import_and_unknown_names_are_attribute_errors() -> None:
    # The tests have imported them all, so that the package need not be asked for them.
    for name in ("analysis", "data", "layers", "models", "norms", "zoo"):
        assert ln_zoo.__getattr__(name) is sys.modules[f"ln_zoo.{name}"]
    with pytest.raises(AttributeError, match="no attribute 'LayrNorm'"):
        _ = ln_zoo.LayrNorm


def test_archives_leave_the_same_weights_out() -> None:
    """Else the sdist passes the 100 MB that an index takes."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    sdist, wheel = (set(build["targets"][name]["exclude"]) for name in ("sdist", "wheel"))
    assert sdist == {each for each in wheel if each.startswith("model_cards/")}


def test_bad_releases_of_lightning_are_excluded_and_dependencies_pinned() -> None:
    needed = {need.name: need.specifier for need in map(Requirement, PROJECT["dependencies"])}
    admitted = [f"2.6.{patch}" for patch in range(7) if f"2.6.{patch}" in needed["lightning"]]
    assert admitted == ["2.6.0", "2.6.1", "2.6.4", "2.6.5", "2.6.6"]
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    extras = PROJECT["optional-dependencies"]
    needed = PROJECT["dependencies"] + extras["test"] + extras["docs"]
    names = {Requirement(need).name.lower().replace("_", "-") for need in needed}
    assert names <= pinned


def test_ci_runs_the_commands_of_the_readme() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    (install,) = (block for block in blocks(README, "bash") if ".venv" in block)
    (test,) = (block for block in blocks(README, "bash") if "pytest" in block)
    parts = install.strip().split(" && ")[2:] + test.strip().split(" && ")
    assert parts[-1] == "pytest"
    for part in parts:
        assert part in ci.replace("--quiet ", "")


def test_the_check_of_a_wheel_runs_every_command_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "packaging")
    check = importlib.import_module("check_install")
    ran: list[str] = []
    monkeypatch.setattr(check, "run", ran.append)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LN_ZOO_DATA", str(tmp_path))
    check.check_readme(README.read_text())
    assert ran == []
    (tmp_path / "mnist").mkdir()
    check.check_readme(README.read_text())
    lines = "".join(blocks(README, "bash")).splitlines()
    commands = [line.removeprefix("ln-zoo ") for line in lines if line.startswith("ln-zoo ")]
    assert len(commands) >= 4
    assert [a.startswith(b) for a, b in zip(ran, commands, strict=True)] == [True] * len(commands)
    left = [line for line in capsys.readouterr().out.splitlines() if "for checkouts" in line]
    assert len(left) == 2 * 4
    with pytest.raises(AssertionError, match="make train"):
        check.check_readme("Text.\n\n```bash\nmake train\n```\n")
    with pytest.raises(ZeroDivisionError):
        check.check_readme("Text.\n\n```python\n1 / 0\n```\n")


def test_the_version_is_stated_once_and_torch_hub_loads_a_checkout() -> None:
    """The build reads `_version.py`; what else names it is compared with that."""
    stated = f"\nversion: {ln_zoo.__version__}\n"
    assert stated in (ROOT / "CITATION.cff").read_text()
    assert f'version: "{ln_zoo.__version__}"' in (ROOT / "packaging/conda/recipe.yaml").read_text()
    model = torch.hub.load(str(ROOT), "mlp_layernorm", source="local")
    assert not model.training


def build_wheel(folder: Path, **environment: str) -> Path:
    """A wheel of the checkout; its kernels are not optimised, which takes a third of the time."""
    folder.mkdir()
    subprocess.run(
        [*PIP, "wheel", "-q", "--no-deps", "-w", folder, ROOT],
        check=True,
        env=os.environ | {"LN_ZOO_CXXFLAGS": "-O0"} | environment,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_wheel_without_a_compiler_is_pure_unless_kernels_are_required(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "pure", CXX="no-compiler")
    assert wheel.name.endswith("py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "/libraries/" in name]
    for wanted in ("require", "yes"):
        with pytest.raises(subprocess.CalledProcessError):
            build_wheel(tmp_path / wanted, CXX="no-compiler", LN_ZOO_WHEEL_KERNELS=wanted)


def python(target: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment |= {"PYTHONPATH": str(target), "HF_HUB_OFFLINE": "1", "PATH": ""}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=target.parent, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_wheel_holds_kernels_and_published_models(tmp_path: Path) -> None:
    address = "https://example.org/me/ln_zoo"
    given = {"LN_ZOO_WHEEL_KERNELS": "require", "LN_ZOO_REPOSITORY": address}
    wheel = build_wheel(tmp_path / "wheel", **given)
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    assert wheel.stat().st_size <= 45e6
    names = zipfile.ZipFile(wheel).namelist()
    (metadata,) = (name for name in names if name.endswith("/METADATA"))
    described = zipfile.ZipFile(wheel).read(metadata).decode()
    assert f"Project-URL: Source, {address}\n" in described
    assert set(re.findall(r"\]\(([a-z]+):?", described)) == {"https"}
    assert not [name for name in names if name.startswith("ln_zoo/docs/") and name[-4:] != ".csv"]
    tables = {path.name for path in (ROOT / "docs" / "figures").glob("*.csv")}
    assert tables == {Path(name).name for name in names if name.startswith("ln_zoo/docs/")}
    libraries = [name for name in names if name.endswith((".so", ".pyd", ".dll", ".dylib"))]
    assert len(libraries) == len(LEVELS[ARCHITECTURE])
    cards = {path.parent.name for path in ROOT.glob("model_cards/*/config.json")}
    assert cards == {name.split("/")[2] for name in names if name.endswith("/config.json")}
    native = Path("ln_zoo/kernels/native")
    source = ROOT / native / "kernels.cpp"
    files = {file for file in source.parent.iterdir() if file.suffix in (".cpp", ".h")}
    assert {file for file in parts(source) if file.parent == source.parent} == files
    needed = [native / "compiler.py", *(file.relative_to(ROOT) for file in parts(source))]
    assert {file.as_posix() for file in needed} <= set(names)
    target = tmp_path / "site"
    subprocess.run([*PIP, "install", "-q", "--no-deps", "--target", target, wheel], check=True)
    code = (
        "import json, ln_zoo; model = ln_zoo.load('mlp.layernorm');"
        "from ln_zoo.kernels.native.build import status; assert status(build=True).prebuilt;"
        "print(json.dumps([ln_zoo.__file__, sum(p.numel() for p in model.parameters())]))"
    )
    done = python(target, code)
    assert done.returncode == 0, done.stderr
    file, parameters = json.loads(done.stdout.splitlines()[-1])
    assert file.startswith(str(target))
    assert parameters == 1_798_010
    # Outside a checkout: configurations and tables are in the package.
    check = [sys.executable, "-P", ROOT / "packaging" / "check_install.py", "prebuilt"]
    variables = os.environ | {"PYTHONPATH": str(target), "HF_HUB_OFFLINE": "1"}
    subprocess.run(check, cwd=tmp_path, env=variables, check=True)
    left_out = "import ln_zoo; print(ln_zoo.load('mlp.none').card.folder)"
    for models, said in ((None, "do not come with the installed package"), (ROOT, "mlp.none")):
        found = {} if models is None else {"LN_ZOO_MODELS": str(models / "model_cards")}
        done = python(target, left_out, **found)
        assert (done.returncode == 0) == bool(models)
        assert said in done.stdout + done.stderr


def test_files_that_workflows_and_pages_name_are_there() -> None:
    pages = [*ROOT.glob(".github/workflows/*.yml"), *ROOT.glob("docs/*/*.md"), *ROOT.glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = {*re.findall(r"(?<![\w/])(?:tests|packaging)/[\w/]+\.py\b", text)}
    assert len(named) > 10
    # `test_my_...` is the reader's own.
    assert [
        name for name in sorted(named) if "/test_my_" not in name and not (ROOT / name).exists()
    ] == []
