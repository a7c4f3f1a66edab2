"""Build hook of the wheel: compiles the CPU kernels for every level of the processor.

``LN_ZOO_WHEEL_KERNELS=require`` makes a missing or failing compiler an error, ``0`` builds the pure
Python wheel. By default, a wheel without kernels is built with a warning.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("ln_zoo/kernels/native")
VARIABLE = "LN_ZOO_WHEEL_KERNELS"


def load_compiler(root: Path) -> ModuleType:
    """The module that compiles; importing it by name would import torch."""
    name = "ln_zoo_compiler"
    spec = importlib.util.spec_from_file_location(name, root / NATIVE / "compiler.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def compile_all(root: Path, folder: Path) -> dict[str, Path]:
    """Compile a library per level and write the manifest.

    Returns:
        The files, by name.
    """
    compiling = load_compiler(root)
    levels = compiling.LEVELS.get(compiling.ARCHITECTURE, ())
    if not levels:
        raise compiling.Unavailable(f"there are no levels for {compiling.ARCHITECTURE}")
    compiler = compiling.find_compiler()
    compiling.LIMIT = 3600  # nobody waits for it, and the machine may be busy

    def compile_level(level: Any) -> tuple[Path, dict[str, Any]]:
        work = folder / level.name
        work.mkdir()
        file, made = compiling.compile_library(compiling.SOURCE, compiler, level, work)
        return file, {"file": f"kernels-{level.name}{file.suffix}"} | asdict(made)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compile_level, levels))
    manifest = folder / compiling.MANIFEST
    libraries = {entry["level"]: entry for _, entry in made}
    system = [sys.platform, compiling.ARCHITECTURE]
    manifest.write_text(json.dumps({"system": system, "libraries": libraries}, indent=2) + "\n")
    return {manifest.name: manifest} | {entry["file"]: file for file, entry in made}


def platform_tag() -> str:
    """This system; on Linux, auditwheel replaces it by a manylinux tag."""
    if sys.platform == "darwin":
        target = os.environ.get("MACOSX_DEPLOYMENT_TARGET", "11.0").replace(".", "_")
        return f"macosx_{target}_{os.uname().machine}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the libraries and the platform to a wheel that is not editable."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless the wheel is an editable one or the environment says not to."""
        wanted = os.environ.get(VARIABLE, "")
        if wanted not in ("", "0", "require"):
            raise ValueError(f"{VARIABLE}={wanted}: expected 0, require or nothing")
        if version == "editable" or wanted == "0":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="ln_zoo-wheel-"))
        try:
            files = compile_all(Path(self.root), self._folder)
        except RuntimeError as error:
            if wanted == "require":
                raise
            self.app.display_warning(
                f"ln-zoo: the wheel has no CPU kernels: {error}. They will be compiled on first "
                f"use. {VARIABLE}=require makes this an error"
            )
            return
        for name, file in files.items():
            build_data["force_include"][str(file)] = f"{NATIVE.as_posix()}/libraries/{name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the compiled files, once they are in the wheel."""
        if hasattr(self, "_folder"):
            shutil.rmtree(self._folder, ignore_errors=True)
