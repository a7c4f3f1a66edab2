"""No card and no checkpoint makes a module be imported, however it spells the name of a class."""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
import warnings
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, fields
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="needs hypothesis: pip install 'ln-zoo[test]'")

import torch
from campaign import campaign, fast, limited
from hypothesis import example, given
from hypothesis import strategies as st

import ln_zoo
from ln_zoo import models, norms
from ln_zoo.cli import check_training
from ln_zoo.cli.lightning import ZooCLI, settings_of
from ln_zoo.models import ZooModule

#: A module that leaves a trace when it is imported.
STRANGER = "open('imported', 'w')\nclass Foo: pass\n"
PATH = "stranger.Foo"
WORDS = ["a", "b", "c"]
SMALL: dict[str, ZooModule] = {
    model.__class__.__name__: model
    for model in (
        models.MLPClassifier(64, [2]),
        models.SequenceClassifier(64, hidden_size=2, step_features=8),
        models.ConvClassifier((1, 8, 8), channels=((2,),), hidden_size=2),
        models.DRAW((8, 8), glimpses=1, hidden_size=2, latent_size=2),
        models.Handwriting(hidden_size=4, num_layers=1),
        models.AttentiveReader(["@entity0", *WORDS], hidden_size=2),
        models.OrderEmbedding(WORDS, image_features=2, embedding_features=2, hidden_size=2),
        models.SkipThought(WORDS, hidden_size=2, embedding_features=2),
    )
}
ARGUMENTS = [
    (name, arg) for name, m in SMALL.items() for arg in inspect.signature(type(m)).parameters
]
#: What a checkpoint stores of ``--optimizer`` and ``--lr_scheduler``.
OPTIONS = {
    "optimizer": lambda value: {"optimizer": value},
    "betas": lambda v: {"optimizer": {"class_path": "torch.optim.Adam", "init_args": {"betas": v}}},
    "lr_lambda": lambda value: {
        "lr_scheduler": {
            "class_path": "torch.optim.lr_scheduler.LambdaLR",
            "init_args": {"lr_lambda": value},
        }
    },
}
COMMANDS = ("test", "fit", "validate", "predict", "sweep", "load")
DATA = ["--data=Digits", "--data.train_size=40", "--data.val_size=20", "--trainer.logger=false"]


@dataclass(frozen=True)
class Case:
    argument: tuple[str, str]
    value: Any
    is_card: bool
    command: str
    resumes: bool = True  # by ``--ckpt_path``; else a checkpoint's weights are used


def _quoted(text: str, escapes: list[int]) -> str:
    """The text in YAML's double quotes, with characters escaped or lines folded before them."""
    out = ""
    for i, letter in enumerate(text):
        how = escapes[i % len(escapes)]
        code = ord(letter)
        forms = (letter, f"\\x{code:02x}", f"\\u{code:04x}", f"\\U{code:08x}", f"\\\n  {letter}")
        out += forms[how % len(forms)]
    return f'"{out}"'


@st.composite
def _spelled(draw: st.DrawFn, text: str) -> str:
    """A scalar of YAML or JSON."""
    kind = draw(st.integers(0, 6))
    if kind < 3:
        return _quoted(text, draw(st.lists(st.integers(0, 4), min_size=1, max_size=5)))
    if kind == 3:
        return f"'{text}'"
    if kind == 4:  # letters that look alike, or become the same when they are normalised
        wide = chr(ord(text[0]) + 0xFEE0)
        return wide + text[1:]
    return text


@st.composite
def _documents(draw: st.DrawFn) -> str:
    """A text in which some parser may find a class."""
    path, key, more = (draw(_spelled(t)) for t in (PATH, "class_path", "init_args"))
    tag = draw(st.sampled_from(["", "", "!!str ", "!!map ", "&a ", "!!python/name:", "! "]))
    return draw(
        st.sampled_from(
            [
                f"{tag}{path}", f" {path}\n", f"[{path}]", f"- {path}", f"{{{key}: {path}}}",
                f"{key}: {tag}{path}", f"? {key}\n: {path}", f"{{{key}: {path}, {more}: {{}}}}",
                f"{tag}{{? {key} : {path}}}", f"? !!str {key}\n: >-\n  {PATH}",
                f"a: &x {{{key}: {path}}}\n<<: *x", f"{key}: |-\n  {PATH}", f"--- {path}",
                f"!!python/object/apply:{PATH} []", f"!!python/module:stranger {path}",
                json.dumps({"class_path": PATH}), json.dumps(PATH), "mine.yaml", "./mine.yaml",
                f"{PATH}()", f"lambda: {PATH}", f"{PATH}#", f"ln_zoo.{PATH}", "stranger",
            ]
        )
    )  # fmt: skip


_texts = _documents() | st.text(max_size=6).map(lambda text: text + PATH)
_values: st.SearchStrategy[Any] = st.recursive(
    _texts | st.just({"class_path": PATH}),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=2)
        | inner.map(lambda value: {"class_path": value})
        | inner.map(lambda value: {"class_path": "ln_zoo.norms.LayerNorm", "init_args": value})
        | inner.map(lambda value: {"class": value, "init_args": {}})
        | st.tuples(st.sampled_from(["eps", "gain", "init_args", "x"]), inner).map(
            lambda p: {p[0]: p[1]}
        )
        | inner.map(lambda v: {"class": "LayerNorm", "init_args": {"eps": v}})
        | inner.map(lambda v: {"class_path": "ln_zoo.norms.LayerNorm", "init_args": {"eps": v}})
    ),
    max_leaves=3,
)
cases = st.builds(
    Case,
    st.sampled_from(ARGUMENTS),
    _values,
    st.booleans(),
    st.sampled_from(COMMANDS),
    st.booleans(),
) | st.builds(
    lambda option, value: Case(("MLPClassifier", option), value, False, "fit"),
    st.sampled_from(sorted(OPTIONS)),
    _values,
)


@cache
def _card(name: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The configuration of a model's card, and its files."""
    with tempfile.TemporaryDirectory() as folder:
        path = SMALL[name].save_pretrained(f"{folder}/card")
        content = {file.name: file.read_bytes() for file in path.iterdir()}
    return json.loads(content["config.json"]), content


def _write(case: Case) -> str:
    """The card or the checkpoint of a model, with one of its arguments replaced."""
    name, argument = case.argument
    config, content = _card(name)
    if case.is_card:
        Path("card").mkdir()
        for file, data in content.items():
            Path("card", file).write_bytes(data)
        config = config | {"init_args": config["init_args"] | {argument: case.value}}
        Path("card/config.json").write_text(json.dumps(config))
        return "./card"
    stored = {**SMALL[name].hparams, "_class_path": f"ln_zoo.models.{name}"}
    whole = {"state_dict": SMALL[name].state_dict(), "hyper_parameters": stored}
    whole |= {"pytorch-lightning_version": "2.6.6", "epoch": 0, "global_step": 0, "loops": {}}
    whole |= {"callbacks": {}, "optimizer_states": [], "lr_schedulers": []}
    if argument in OPTIONS:
        whole["optimization"] = {"lr_scheduler_config": {}, **OPTIONS[argument](case.value)}
    else:
        stored[argument] = case.value
    torch.save(whole, "x.ckpt")
    return "x.ckpt"


def _run(command: str, path: str, resumes: bool) -> None:
    start = "--ckpt_path" if resumes and path == "x.ckpt" else "--weights"
    argv = ["fit" if command == "sweep" else command, f"{start}={path}", *DATA]
    if command == "load":
        ln_zoo.load(path)
    elif command == "sweep":
        settings_of(argv)
    else:
        ZooCLI(argv, check_training(argv))


def check(case: Case) -> None:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.append(folder)
        try:
            Path("stranger.py").write_text(STRANGER)
            Path("mine.yaml").write_text(f"class_path: {PATH}\n")
            quiet = redirect_stdout(StringIO()), redirect_stderr(StringIO())
            with quiet[0], quiet[1], warnings.catch_warnings(), limited():
                warnings.simplefilter("ignore")
                path = _write(case)
                with suppress(ValueError, OSError, SystemExit):
                    _run(case.command, path, case.resumes)
            assert "stranger" not in sys.modules
            assert not Path("imported").exists()
        finally:
            sys.modules.pop("stranger", None)
            sys.path.remove(folder)
            os.chdir(before)


_CELL = ("SequenceClassifier", "cell")
_FOLDED = '? "class\\\n_path"\n: "stranger\\\n.Foo"'


def test_every_model_is_small_here() -> None:
    found = (getattr(models, name) for name in models.__all__)
    zoo = {c.__name__ for c in found if inspect.isclass(c) and issubclass(c, ZooModule)}
    assert zoo - {"ZooModule"} == set(SMALL)
    assert {"eps"} <= {field.name for field in fields(norms.LayerNorm)}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("is_card", [True, False])
@pytest.mark.parametrize(
    "value", [PATH, _FOLDED, {"class_path": PATH}], ids=["text", "yaml", "map"]
)
def test_known_spellings_in_the_argument_that_takes_a_class(
    command: str, is_card: bool, value: Any
) -> None:
    check(Case(_CELL, value, is_card, command))


@fast(100)
@given(cases)
@example(Case(("Handwriting", "alphabet"), _FOLDED, False, "fit"))
@example(Case(("DRAW", "compile_mode"), PATH, True, "test"))
@example(Case(("MLPClassifier", "lr_lambda"), PATH, False, "fit"))
@example(Case(("SkipThought", "vocabulary"), "mine.yaml", False, "test"))
def test_nothing_is_imported(case: Case) -> None:
    check(case)


@pytest.mark.slow
def test_nothing_is_imported_for_long() -> None:
    campaign(cases, check)
