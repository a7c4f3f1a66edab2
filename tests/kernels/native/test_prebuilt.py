"""Kernels that a wheel carries: which one is loaded, and every way in which they cannot be."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from ln_zoo import LSTM, LayerNorm
from ln_zoo.kernels.native import build, prebuilt
from ln_zoo.kernels.native.build import NativeLibrary
from ln_zoo.kernels.native.compiler import (
    ARCHITECTURE,
    LEVELS,
    MANIFEST,
    SUFFIX,
    Unavailable,
    compile_library,
    find_compiler,
)
from ln_zoo.ops import registry

ALL = LEVELS.get(ARCHITECTURE, ())
TINY = f'#include <cstdint>\nextern "C" int64_t ln_zoo_abi() {{ return {build.ABI}; }}\n'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prebuilt libraries of a tiny source, which any processor runs, for each level."""
    folder = tmp_path_factory.mktemp("prebuilt")
    try:
        compiler = find_compiler()
    except Unavailable as error:
        pytest.skip(error.reason)
    source = folder / "tiny.cpp"
    source.write_text(TINY)
    work = folder / "work"
    work.mkdir()
    file, how = compile_library(source, compiler, ALL[-1], work)
    libraries = {}
    for level in ALL:
        name = f"kernels-{level.name}{SUFFIX}"
        shutil.copy(file, folder / name)
        libraries[level.name] = {"file": name} | asdict(how) | {"level": level.name}
    manifest = {"system": [sys.platform, ARCHITECTURE], "libraries": libraries}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    shutil.rmtree(work)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of them, an empty cache, and no compiler."""
    monkeypatch.setenv("LN_ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-compiler")
    for name in ("LN_ZOO_CPU_LEVEL", "LN_ZOO_CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    return Path(shutil.copytree(made, tmp_path / "prebuilt"))


@pytest.fixture
def kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> NativeLibrary:
    native = NativeLibrary(folder / "tiny.cpp", folder)
    monkeypatch.setattr(build, "_KERNELS", native)
    return native


def processor(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    monkeypatch.setattr(build, "_processor", lambda: ("some processor", frozenset(features)))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def assert_layers_run() -> None:
    x = torch.randn(5, 2, 3)
    output, _ = LSTM(3, 4, norm=LayerNorm())(x)
    assert output.isfinite().all()


def assert_refused(kernels: NativeLibrary, caplog: pytest.LogCaptureFixture, *named: str) -> None:
    """Check for a one-line reason and a warning with it; layers run without kernels."""
    with pytest.raises(Unavailable) as caught:
        kernels.load()
    reason = caught.value.reason
    (line,) = warnings_of(caplog)
    assert reason in line
    assert "\n" not in line
    assert all(text in reason for text in named)
    assert kernels.status().reason == reason
    assert_layers_run()


@pytest.mark.parametrize("level", ALL, ids=lambda level: level.name)
def test_the_fastest_level_that_the_processor_runs(
    folder: Path, level: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processor(monkeypatch, *level.features, "something else")
    native = NativeLibrary(folder / "tiny.cpp", folder)
    before = native.status()
    assert (before.available, before.built, before.prebuilt) == (True, True, True)
    assert native.load().ln_zoo_abi() == build.ABI
    after = native.status()
    assert after == before
    assert after.level == level.name
    assert after.path == folder / f"kernels-{level.name}{SUFFIX}"
    assert not (tmp_path / "cache").exists()


def test_levels_are_ordered_by_what_they_need() -> None:
    for faster, slower in itertools.pairwise(ALL):
        assert slower.features < faster.features


@pytest.mark.skipif(len(ALL) < 2, reason="needs an architecture with several levels")
def test_a_level_can_be_chosen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch, *ALL[0].features)
    monkeypatch.setenv("LN_ZOO_CPU_LEVEL", ALL[-1].name)
    native = NativeLibrary(folder / "tiny.cpp", folder)
    native.load()
    assert native.status().level == ALL[-1].name


@pytest.mark.parametrize("name", ["native", "flags"])
def test_compiling_can_be_chosen(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("CXX")
    variable = "LN_ZOO_CPU_LEVEL" if name == "native" else "LN_ZOO_CXXFLAGS"
    monkeypatch.setenv(variable, "native" if name == "native" else "-O1")
    native = NativeLibrary(folder / "tiny.cpp", folder)
    assert not native.status().built
    native.load()
    status = native.status()
    assert (status.prebuilt, status.level) == (False, "native")


@pytest.mark.parametrize("level", ["x86-64-v9", ALL[0].name if len(ALL) > 1 else "sse5"])
def test_a_level_that_cannot_run_is_a_reason(
    kernels: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    level: str,
) -> None:
    processor(monkeypatch)
    monkeypatch.setenv("LN_ZOO_CPU_LEVEL", level)
    assert_refused(kernels, caplog, f"LN_ZOO_CPU_LEVEL={level}")


def damage(file: Path, how: str) -> None:
    """Another file, not the same cut short: the library may be in use by this process."""
    content = file.read_bytes()
    file.unlink()
    if how != "missing":
        file.write_bytes({"truncated": content[: len(content) // 2], "empty": b""}[how])


@pytest.mark.skipif(len(ALL) < 2, reason="needs an architecture with several levels")
@pytest.mark.parametrize("how", ["truncated", "empty", "missing"])
def test_a_damaged_library_is_named_and_the_next_level_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    processor(monkeypatch, *ALL[0].features)
    file = folder / f"kernels-{ALL[0].name}{SUFFIX}"
    damage(file, how)
    native = NativeLibrary(folder / "tiny.cpp", folder)
    native.load()
    assert native.status().level == ALL[1].name
    (line,) = warnings_of(caplog)
    assert str(folder) in line
    assert file.name in line
    assert "\n" not in line


def test_all_libraries_damaged_and_no_compiler(
    folder: Path,
    kernels: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    processor(monkeypatch, *ALL[-1].features)
    for file in folder.glob(f"*{SUFFIX}"):
        damage(file, "truncated")
    assert_refused(kernels, caplog, ALL[-1].name, "CXX=no-compiler")


def test_a_whole_file_that_is_no_library(
    folder: Path,
    kernels: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    processor(monkeypatch, *ALL[-1].features)
    file = folder / f"kernels-{ALL[-1].name}{SUFFIX}"
    file.unlink()
    file.write_bytes(b"no library")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["libraries"][ALL[-1].name]["sha256"] = prebuilt.checksum(file)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert_refused(kernels, caplog, str(file))


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"system": ["plan9", "x86_64"], "libraries": {"a": {"file": "b"}}}'],
)
def test_a_damaged_manifest(
    folder: Path, kernels: NativeLibrary, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / MANIFEST).write_text(content)
    assert_refused(kernels, caplog, str(folder / MANIFEST))


@pytest.mark.parametrize("system", [["plan9", ARCHITECTURE], [sys.platform, "vax"]])
def test_a_wheel_for_another_system(
    folder: Path, kernels: NativeLibrary, system: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    manifest = json.loads((folder / MANIFEST).read_text()) | {"system": system}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert_refused(kernels, caplog, " ".join(system), f"{sys.platform} {ARCHITECTURE}")


def test_a_read_only_cache_does_not_matter(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "make_private", lambda folder: pytest.fail("not needed"))
    monkeypatch.setattr(build, "FileLock", lambda *args, **kwargs: pytest.fail("not needed"))
    assert NativeLibrary(folder / "tiny.cpp", folder).load().ln_zoo_abi() == build.ABI


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("name", ["cluster", "triton"])
def test_a_kernel_that_this_machine_lacks_gives_way_to_the_loop(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LN_ZOO_KERNELS", name)
    caplog.set_level(logging.INFO, logger="ln_zoo")
    registry._log.cache_clear()
    assert_layers_run()
    (line,) = [line for line in caplog.messages if f"LN_ZOO_KERNELS={name}" in line]
    assert "\n" not in line
