"""``ln-zoo kernels``: what it lists, what it builds, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import Capture, Patch, told

from ln_zoo import ops
from ln_zoo.cli import main
from ln_zoo.kernels.native import build
from ln_zoo.ops import KERNELS, registry
from ln_zoo.ops.engines.aten import AtenEngine
from ln_zoo.ops.recurrent_kernel import Recurrence

#: Each once: `LN_ZOO_KERNELS` chooses by name.
NAMES = list(dict.fromkeys(kernel.name for kernel in KERNELS))
TINY = '#include <cstdint>\nextern "C" int64_t ln_zoo_abi() { return %d; }\n'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LN_ZOO_CACHE", str(folder))
    monkeypatch.setenv("COLUMNS", "300")
    return folder


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: Patch) -> None:
    """A source that is compiled in no time stands for that of the kernels."""
    source = tmp_path / "tiny.cpp"
    source.write_text(TINY % build.ABI)
    monkeypatch.setattr(build, "_KERNELS", build.NativeLibrary(source))


def compiler() -> build.Compiler:
    try:
        return build.find_compiler()
    except build.Unavailable as error:
        pytest.skip(error.reason)


def as_json(capsys: Capture, *options: str) -> dict:
    return json.loads(told(capsys, "kernels", "--json", *options))


def reason_of(listed: dict, name: str) -> str | None:
    (found,) = (kernel for kernel in listed["kernels"] if kernel["name"] == name)
    assert found["available"] == (found["reason"] is None)
    return found["reason"]


def test_lists_kernels_in_order_and_compiles_nothing(tiny: None, cache: Path, capsys) -> None:
    table, facts = told(capsys, "kernels").split("the generic loop")
    words = [line.split() for line in table.splitlines()]
    assert [row[0] for row in words] == [*NAMES, "(none)"]
    assert {row[-1] for row in words if row[0] in ("torch", "aten")} == {"available"}
    assert "native processor" in facts
    assert not cache.exists()


def test_json_tells_what_is_built(tiny: None, cache: Path, capsys: Capture) -> None:
    compiler()
    for options, built in ([], False), (["--build"], True), ([], True):
        listed = as_json(capsys, *options)
        assert listed["native"]["built"] is built
        assert [kernel["name"] for kernel in listed["kernels"]] == NAMES
        assert reason_of(listed, "native") is None
    assert Path(listed["native"]["path"]).parent == cache
    assert listed["native"]["openmp"] == "torch's"


def test_failure_to_build_is_an_error_until_it_is_mended(
    tiny: None, here: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    found = compiler()
    wrapper = here / "compiler"
    monkeypatch.setenv("CXX", str(wrapper))
    broken = 'echo "error: out of order" >&2; exit 1'
    for shell, command, code in ((broken, "--build", 1), ("", "--build", 1), ("", "--rebuild", 0)):
        wrapper.write_text(
            f'#!/bin/sh\ncase "$*" in *--version*) echo wrapped; exit;; esac\n{shell}\n'
            f'exec {found.command[0]} "$@"\n'
        )
        wrapper.chmod(0o755)
        assert main(["kernels", command]) == code
        printed = capsys.readouterr()
        assert ("error: out of order" in printed.err) == bool(code)
        assert (str(build.status().path) in printed.out) == (not code)
        # A failure is remembered until --rebuild.
        assert ("compiling native CPU kernels" in printed.err) == (shell == broken or not code)


@pytest.mark.parametrize("fault", ["cache", "compiler"])
def test_kernels_that_cannot_be_built(
    tiny: None, cache: Path, monkeypatch: Patch, capsys: Capture, fault: str
) -> None:
    compiler()
    cache.mkdir()
    if fault == "cache":
        cache.chmod(0o777)  # others could write to it
    else:
        monkeypatch.setenv("CXX", "no-such-compiler")
    reason = f"chmod go-w {cache}" if fault == "cache" else "no-such-compiler"
    assert reason in told(capsys, "kernels")
    assert reason in told(capsys, "kernels", "--build", code=1)
    assert list(cache.iterdir()) == []


def test_reasons(tiny: None, monkeypatch: Patch, capsys: Capture) -> None:
    class Mine(AtenEngine):
        name, title = "mine", "my loops"

        def missing(self) -> str | None:
            return "no such device"

    monkeypatch.setattr(ops, "KERNELS", [*ops.KERNELS, Recurrence(Mine())])
    monkeypatch.setattr(registry, "KERNELS", ops.KERNELS)
    assert reason_of(as_json(capsys), "mine") == "no such device"

    monkeypatch.setenv("LN_ZOO_KERNELS", "aten")
    listed = as_json(capsys)
    assert reason_of(listed, "aten") is None
    assert all("LN_ZOO_KERNELS=aten" in k["reason"] for k in listed["kernels"] if k["reason"])

    monkeypatch.setenv("LN_ZOO_KERNELS", "fast")
    assert "'fast'" in told(capsys, "kernels", code=1)
