"""Configurations that would be read in part, without end, or as something else than they say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ln_zoo.cli import main
from ln_zoo.cli.arguments import configurations, weights_last

BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: A\ndata: B\nmodel: C\n", "line 3: duplicate key 'model', first given in line 1"),
        (
            "model:\n  norm:\n    eps: 1\n    eps: 2\n",
            "line 4: duplicate key 'eps', first given in line 3",
        ),
        ("{a: 1, a: 1}", "line 1: duplicate key 'a', first given in line 1"),
        ("- {a: 1}\n- {b: 1, 'b': 1}\n", "line 2: duplicate key 'b', first given in line 2"),
        (BOMB, "holds more than 100,000 values where its aliases are written out"),
        ("a: &a [*a]\n", "holds more than 100,000 values"),
        ("[" * 700, "nests lists or mappings too deeply"),
        (" " * 10_000_001, "cannot be read: it is longer than 10,000,000 bytes"),
    ],
)
def test_what_a_configuration_may_not_hold(here: Path, text: str, message: str) -> None:
    (here / "bad.yaml").write_text(text)
    for given in ("bad.yaml", text):
        if given.isspace():
            continue
        with pytest.raises(ValueError, match=r"(bad\.yaml|the configuration)") as caught:
            configurations(["fit", "--config", given])
        assert message in str(caught.value)


def test_merged_keys_and_aliases_are_read(here: Path) -> None:
    (here / "good.yaml").write_text("base: &base {a: 1, b: 2}\nmine: {<<: *base, a: 3}\n")
    (content,) = configurations(["fit", "--config=good.yaml"])
    assert content["mine"] == {"a": 3, "b": 2}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_that_nobody_writes_to_is_not_waited_for(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(here / "pipe.yaml")
    assert main(["fit", "--config", "pipe.yaml"]) == 2
    assert (
        "--config pipe.yaml is a pipe, which may never end: give a file" in capsys.readouterr().err
    )


def test_a_pipe_of_the_shell_is_left_to_the_parser() -> None:
    read, write = os.pipe()
    try:
        assert configurations(["fit", "--config", f"/dev/fd/{read}"]) == []
    finally:
        os.close(read)
        os.close(write)


def test_a_stray_value_does_not_become_that_of_another_option() -> None:
    argv = ["test", "--trainer.max_epochs", "--ckpt_path", "a.ckpt", "3"]
    assert weights_last(argv) == argv
