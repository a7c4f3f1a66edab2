"""``ln-zoo kernels``: what it lists, what it builds, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import script

from ln_zoo import ops
from ln_zoo.cli import main
from ln_zoo.ops import KERNELS, registry
from ln_zoo.ops.engines.aten import AtenEngine
from ln_zoo.ops.engines.native import build
from ln_zoo.ops.recurrent_kernel import Recurrence

#: Each once: `LN_ZOO_KERNELS` chooses by name.
NAMES = list(dict.fromkeys(kernel.name for kernel in KERNELS))
TINY = '#include <cstdint>\nextern "C" int64_t ln_zoo_abi() { return %d; }\n'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LN_ZOO_CACHE", str(folder))
    monkeypatch.setenv("COLUMNS", "300")
    return folder


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that is compiled in no time stands for that of the kernels."""
    source = tmp_path / "tiny.cpp"
    source.write_text(TINY % build.ABI)
    monkeypatch.setattr(build, "_KERNELS", build.NativeLibrary(source))


def compiler() -> build.Compiler:
    try:
        return build.find_compiler()
    except build.Unavailable as error:
        pytest.skip(error.reason)


def as_json(capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    assert main(["kernels", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def reason_of(told: dict, name: str) -> str | None:
    """Why a kernel is not available."""
    (found,) = (kernel for kernel in told["kernels"] if kernel["name"] == name)
    assert found["available"] == (found["reason"] is None)
    return found["reason"]


def test_builds_the_kernels_ahead_of_time(
    here: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler()
    monkeypatch.setenv("LN_ZOO_CXXFLAGS", "-O0")  # a third of the time
    done = script(here, "kernels", "--build")
    assert done.code == 0, done.err
    assert done.err.count("compiling CPU kernels") == 1
    (library,) = (file for file in cache.iterdir() if file.suffix in (".so", ".dylib"))
    assert str(library) in done.out


def test_lists_kernels_in_order_and_compiles_nothing(
    tiny: None, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernels"]) == 0
    table, facts = capsys.readouterr().out.split("the generic loop")
    words = [line.split() for line in table.splitlines() if line.strip()][2:]
    assert [row[0] for row in words if row] == [*NAMES, "(none)"]
    assert {row[-1] for row in words if row[0] in ("torch", "aten")} == {"yes"}
    assert "native processor" in facts
    assert not cache.exists()


def test_json_tells_what_is_built(
    tiny: None, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler()
    for options, built in ([], False), (["--build"], True), ([], True):
        told = as_json(capsys, *options)
        assert told["native"]["built"] is built
        assert [kernel["name"] for kernel in told["kernels"]] == NAMES
        assert reason_of(told, "native") is None
    assert Path(told["native"]["path"]).parent == cache
    assert told["native"]["openmp"] == "torch's"


def test_failure_to_build_is_an_error_until_it_is_mended(
    tiny: None, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compiler()
    wrapper = here / "compiler"

    def behave(shell: str) -> None:
        wrapper.write_text(
            f'#!/bin/sh\ncase "$*" in *--version*) echo wrapped; exit;; esac\n{shell}\n'
            f'exec {found.command[0]} "$@"\n'
        )
        wrapper.chmod(0o755)

    behave('echo "error: out of order" >&2; exit 1')
    monkeypatch.setenv("CXX", str(wrapper))
    assert main(["kernels", "--build"]) == 1
    told = capsys.readouterr().err
    assert "ln-zoo kernels: error: not built:" in told
    assert "error: out of order" in told

    behave("")
    assert main(["kernels"]) == 0
    assert "error: out of order" in capsys.readouterr().out
    assert main(["kernels", "--build"]) == 1
    assert main(["kernels", "--rebuild"]) == 0
    assert str(build.status().path) in capsys.readouterr().out


def test_a_cache_that_others_can_write_to(
    tiny: None, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler()
    cache.mkdir()
    cache.chmod(0o777)
    assert main(["kernels"]) == 0
    assert f"chmod go-w {cache}" in capsys.readouterr().out
    assert main(["kernels", "--build"]) == 1
    assert f"chmod go-w {cache}" in capsys.readouterr().err
    assert list(cache.iterdir()) == []


def test_no_compiler(
    tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    told = as_json(capsys)
    assert "no-such-compiler" in (reason_of(told, "native") or "")
    assert told["native"]["compiler"] is None
    assert main(["kernels", "--build"]) == 1


def test_reasons(
    tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Mine(AtenEngine):
        name, title = "mine", "my loops"

        def missing(self) -> str | None:
            return "no such device"

    monkeypatch.setattr(ops, "KERNELS", [*ops.KERNELS, Recurrence(Mine())])
    monkeypatch.setattr(registry, "KERNELS", ops.KERNELS)
    assert reason_of(as_json(capsys), "mine") == "no such device"

    monkeypatch.setenv("LN_ZOO_KERNELS", "aten")
    told = as_json(capsys)
    assert reason_of(told, "aten") is None
    assert all("LN_ZOO_KERNELS=aten" in k["reason"] for k in told["kernels"] if k["reason"])

    monkeypatch.setenv("LN_ZOO_KERNELS", "fast")
    assert main(["kernels"]) == 1
    assert "'fast'" in capsys.readouterr().err
