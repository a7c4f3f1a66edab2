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


def native_of(told: dict) -> dict:
    return next(kernel for kernel in told["kernels"] if kernel["name"] == "native")


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
        assert main(["kernels", "--json", *options]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["native"]["built"] is built
        assert [kernel["name"] for kernel in told["kernels"]] == NAMES
        assert [native_of(told)["available"], native_of(told)["reason"]] == [True, None]
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


def test_a_cache_that_others_can_write_to_is_told(
    tiny: None, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler()
    cache.mkdir()
    cache.chmod(0o777)
    assert main(["kernels"]) == 0
    reason = f"every user can write to {cache} (chmod go-w {cache})"
    assert f"not used: {reason}; each process compiles" in capsys.readouterr().out
    assert main(["kernels", "--build"]) == 1
    assert f"error: built, but not kept: {reason}" in capsys.readouterr().err
    assert list(cache.iterdir()) == []


def test_no_compiler_is_told(
    tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["kernels", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert native_of(told)["available"] is False
    assert "CXX=no-such-compiler is not a compiler" in native_of(told)["reason"]
    assert told["native"]["compiler"] is None
    assert main(["kernels", "--build"]) == 1


def test_any_engine_tells_what_it_lacks(
    tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Mine(AtenEngine):
        name, title = "mine", "my loops"

        def missing(self) -> str | None:
            return "no such device"

    monkeypatch.setattr(ops, "KERNELS", [*ops.KERNELS, Recurrence(Mine())])
    monkeypatch.setattr(registry, "KERNELS", ops.KERNELS)
    assert main(["kernels", "--json"]) == 0
    last = json.loads(capsys.readouterr().out)["kernels"][-1]
    assert (last["name"], last["available"], last["reason"]) == ("mine", False, "no such device")


def test_what_the_environment_turns_off_is_told(
    tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LN_ZOO_KERNELS", "aten")
    assert main(["kernels", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert {kernel["name"] for kernel in kernels if kernel["available"]} == {"aten"}
    reasons = {kernel["reason"] for kernel in kernels if not kernel["available"]}
    assert reasons == {"turned off: LN_ZOO_KERNELS=aten"}

    monkeypatch.setenv("LN_ZOO_KERNELS", "fast")
    assert main(["kernels"]) == 1
    assert "there is no kernel called 'fast'" in capsys.readouterr().err
