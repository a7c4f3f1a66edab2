"""The documentation: links lead somewhere, examples run, commands are those of the command line."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cli_support import python

import ln_zoo
from ln_zoo import data, models, norms
from ln_zoo.cli import _HELP, check_training, main, precheck
from ln_zoo.cli.arguments import Arguments
from ln_zoo.cli.commands import parser_of
from ln_zoo.cli.listing import markdown_table, results_csv
from ln_zoo.cli.sweep import sweep
from ln_zoo.cli.sweep.check import check_grid
from ln_zoo.cli.sweep.request import grid_of, searched
from ln_zoo.sweeps.grid import SweepError
from ln_zoo.zoo.catalog import list_models

ROOT = Path(__file__).parent.parent
FRONT = ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY", "benchmarks/README", "examples/README")
PAGES = [*(ROOT / f"{name}.md" for name in FRONT), *sorted((ROOT / "docs").rglob("*.md"))]
#: Variables of the package, as its help has them.
ENVIRONMENT = set(re.findall(r"LN_ZOO_\w+", _HELP))


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    fenced = page.read_text(encoding="utf-8").split("```")[1::2]
    return [b.partition("\n")[2] for b in fenced if b.partition("\n")[0] == language]


def prose(page: Path) -> str:
    return "".join(page.read_text(encoding="utf-8").split("```")[::2])


def anchors(page: Path) -> set[str]:
    """What links to a page's headings end in, as GitHub makes it of them."""
    heads = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", head.replace("`", "").lower()) for head in heads)
    return {head.replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)}: {target}"
        assert not anchor or anchor in anchors(file), f"{name_of(page)}: {target}"


def test_pages_and_figures_are_linked() -> None:
    """Each page has a place in a table of contents, each figure a page that shows it."""
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    listed = {
        (page.parent / f"{entry}.md").resolve()
        for page, text in texts.items()
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)
        for entry in re.findall(r"^[\w/-]+$", tree, re.MULTILINE)
    }
    pages = set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs/index.md"}
    assert pages <= listed
    whole = "".join(texts.values())
    unused = [p.name for p in (ROOT / "docs/figures").glob("*.png") if p.name not in whole]
    assert unused == []


@pytest.mark.parametrize("name", ["docs/explanation/architecture.md", "CONTRIBUTING.md"])
def test_files_that_are_named_exist(name: str) -> None:
    named = re.findall(r"`([\w/.]+\.(?:py|md|yaml|cpp|txt))`", prose(ROOT / name))
    files = [file for file in named if "/" in file and "my" not in file]
    assert len(files) > 8
    missing = [f for f in files if not ((ROOT / f).is_file() or (ROOT / "ln_zoo" / f).is_file())]
    assert not missing


#: Stands before a block that takes long, or needs what is not in the repository: ``slow``, and a
#: folder of `LN_ZOO_DATA` or a package. Every other block is run.
MARK = re.compile(r"<!-- example: (slow)?(?:, )?(?:needs (\w+))? -->\n```python\n(.*?)```", re.S)


def own_files() -> dict[str, str]:
    """Files that examples and commands name: those of the pages on one's own, and word vectors."""
    data, changed, *_, plain = blocks(ROOT / "docs/how-to/own_data_and_model.md", "python")
    words = ["it", "rained", "all", "day", "the", "dog", "barked", ".", "night", "umbrella"]
    return {
        "my_norm.py": blocks(ROOT / "docs/how-to/own_norm.md", "python")[0],
        "my_data.py": data,
        "my_models.py": f"{changed}\n{plain}",
        "glove.txt": "\n".join(f"{word} {i} {i % 3} {-i}" for i, word in enumerate(words)),
    }


def marked(page: Path) -> dict[str, tuple[str, str]]:
    return {m[3]: (m[1] or "", m[2] or "") for m in MARK.finditer(page.read_text("utf-8"))}


def run_examples(page: Path, examples: list[str], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Runs blocks of a page one after the other, as a reader would, in an empty folder."""
    patch.chdir(folder)
    patch.syspath_prepend(folder)
    for name, text in own_files().items():
        Path(name).write_text(text, encoding="utf-8")
    names: dict[str, object] = {"__name__": f"example_{page.stem}"}
    patch.setitem(sys.modules, names["__name__"], type(sys)(str(names["__name__"])))
    for block in examples:
        exec(compile(block, name_of(page), "exec"), names)
    sys.modules.pop("my_norm", None)


EXAMPLES = [page for page in PAGES if blocks(page, "python")]
WITH_MARKS = [page for page in EXAMPLES if marked(page)]


@pytest.mark.parametrize("page", EXAMPLES, ids=name_of)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [block for block in blocks(page, "python") if block not in marked(page)]
    run_examples(page, examples, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_MARKS, ids=name_of)
def test_marked_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python blocks of a page, but for those whose data or package is not here."""

    def there(needed: str) -> bool:
        folder = Path(os.environ.get("LN_ZOO_DATA", "none"), needed)
        package = importlib.util.find_spec(needed) if needed else None
        # Without an origin it is a folder of tests.
        return not needed or folder.is_dir() or bool(package and package.origin)

    left = [b for b, (_, data) in marked(page).items() if not there(data)]
    if len(left) == len(marked(page)):
        names = ", ".join(marked(page)[b][1] for b in left)
        pytest.skip(f"needs {names}: a folder of LN_ZOO_DATA, or a package")
    examples = [block for block in blocks(page, "python") if block not in left]
    run_examples(page, examples, tmp_path, monkeypatch)


def test_a_norm_of_ones_own_is_short_and_passes_its_case(tmp_path: Path) -> None:
    norm, case = blocks(ROOT / "docs/how-to/own_norm.md", "python")
    assert len(norm.partition("@dataclass")[2].strip().splitlines()) < 10
    (tmp_path / "my_norm.py").write_text(norm)
    (tmp_path / "test_my_norm.py").write_text(f"from my_norm import MyNorm\n{case}")
    # All layers: tests/norms/test_norm_cases.py.
    some = "not RNN and not LSTM and not Conv2d"
    command = ["-q", "-x", "-p", "no:cacheprovider", "-k", some, str(tmp_path)]
    done = python(tmp_path, f"import pytest, sys; sys.exit(pytest.main({command}))")
    assert done.code == 0, done.out
    assert re.search(r"\d+ passed", done.out)


#: A `console` shows commands of the reader's own programs, which are not parsed.
LANGUAGES = {"python", "bash", "console", "text", "bibtex", "{toctree}", "{include}", "{eval-rst}"}
#: What stands for the commands of a page: it writes down the arguments as bash makes them, with
#: loops, variables and arrays, and the names of the package's own variables.
RECORD = r"""
record() { printf '%s\0' "$PAGE" "${!LN_ZOO_@}" "$@" END; }
for name in ln-zoo python pip pytest torchrun srun; do
  eval "$name() { record $name \"\$@\"; }"
done
which() { echo "$@"; }
function . { :; }
"""
#: Variables of a shell that pages read.
GIVEN = ("HOME", "NODE", "HOST", "SLURM_JOB_ID", "SLURM_TMPDIR")
CARDS = sorted((ROOT / "model_cards").glob("*/README.md"))


@functools.cache
def commands() -> dict[tuple[str, ...], str]:
    """Each different command of documentation and cards, as bash reads it, and a page that has it.

    Numbers make no difference.
    """
    script = [RECORD]
    for page in [*PAGES, *CARDS]:
        found = blocks(page, "bash")
        script += [f"PAGE={shlex.quote(name_of(page))}", *found] if found else []
    command, given = [shutil.which("bash") or "bash", "-eu"], dict.fromkeys(GIVEN, "given")
    options: Any = {"env": {"PATH": "", **given}, "capture_output": True, "text": True}
    with tempfile.TemporaryDirectory() as folder:  # redirections write there
        done = subprocess.run(command, input="\n".join(script), cwd=folder, **options)
    assert not done.returncode, done.stderr
    assert not done.stderr
    alike: dict[tuple[str, ...], tuple[tuple[str, ...], str]] = {}
    for text in done.stdout.removesuffix("\0END\0").split("\0END\0"):
        page, *words = text.split("\0")
        while words[0].startswith("LN_ZOO_"):
            assert words[0] in ENVIRONMENT, f"{page}: {words[0]}"
            words.pop(0)
        if words[0] in ("torchrun", "srun"):
            words = words[words.index("ln-zoo") :]
        alike.setdefault(tuple(re.sub(r"^[\d.e-]+$", "0", w) for w in words), (tuple(words), page))
    return dict(alike.values())


def commands_of(*names: str) -> list[tuple[list[str], str]]:
    return [
        (list(words[len(names) :]), f"{page}: {shlex.join(words)}")
        for words, page in commands().items()
        if words[: len(names)] == names
    ]


TRAINER = ("fit", "validate", "test", "predict")


class _Parsed(BaseException):  # no error, and not to be taken for one
    """A command has parsed its arguments."""


@pytest.fixture
def parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands end when they have parsed their arguments; the folder is that of the project."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(parser: argparse.ArgumentParser, *arguments: Any) -> None:
        parse(parser, *arguments)
        raise _Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    monkeypatch.chdir(ROOT)


def test_every_block_says_what_it_is_and_marks_are_few() -> None:
    """What is `bash` is parsed, what is `python` is run: nothing else may hold commands."""
    for page in [*PAGES, *CARDS]:
        marks = page.read_text(encoding="utf-8").split("```")[1::2]
        for block in marks:
            assert re.match(r"[\w{}-]*", block)[0] in LANGUAGES, f"{name_of(page)}: {block[:80]}"
        for block in blocks(page, "text"):
            assert not re.search(r"^(ln-zoo|python|pip) ", block, re.MULTILINE), name_of(page)
    # Marks are few and understood.
    assert sum(len(marked(page)) for page in PAGES) <= 8
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(marked(page)) == len(re.findall("^<!-- example:", text, re.M)), name_of(page)
        assert all(slow or data for slow, data in marked(page).values())


@pytest.mark.usefixtures("parsing")
def test_commands_parse_what_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    """All but training, by their own parsers: a misspelt or renamed option is an error."""
    found = [(words, where) for words, where in commands_of("ln-zoo") if words[0] not in TRAINER]
    assert len(found) > 60
    for words, where in found:
        with contextlib.suppress(_Parsed):
            pytest.fail(f"{where}: code {main(words)}, {capsys.readouterr().err}")


@pytest.mark.usefixtures("parsing")
def test_options_of_training_exist() -> None:
    """By the signatures of trainer and classes; the parser needs a minute."""
    found = [(words, where) for words, where in commands_of("ln-zoo") if words[0] in TRAINER]
    assert len(found) > 80
    for words, where in found:
        assert unknown_options(check_training(without(words, "--ckpt_path"))) == [], where


def unknown_options(given: Arguments) -> list[str]:
    """Options that neither the command, nor the trainer, nor a class of ours has."""
    names = [each.name for each in given.options]
    known = {*precheck.options(given.command), "c", "print_config", "lr_scheduler_config"}
    found = [name for name in names if name.partition(".")[0] not in known]
    found += [n for n in names if n[:8] == "trainer." and ".".join(n.split(".")[:2]) not in known]
    for group, room in (("model", models), ("data", data), ("model.norm", norms)):
        chosen = {str(each.value) for each in given.options if each.name == group}
        cls = getattr(room, chosen.pop().rpartition(".")[2], None) if len(chosen) == 1 else None
        for name in names:
            argument = name.removeprefix(f"{group}.").partition(".")[0]
            if cls and name.startswith(f"{group}.") and argument not in arguments_of(cls):
                found.append(name)
    return found


@functools.cache
def arguments_of(cls: type) -> set[str]:
    """Arguments of a class, with those that it passes on to its bases."""
    return {name for each in cls.__mro__ for name in inspect.signature(each.__init__).parameters}


def without(words: list[str], option: str) -> list[str]:
    place = words.index(option) if option in words else len(words)
    return words[:place] + words[place + 2 :]


@pytest.mark.usefixtures("parsing")
def test_scripts_parse_what_they_are_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(commands_of("python")) > 12
    for words, where in commands_of("python"):
        if words[:2] == ["-m", "venv"]:
            continue
        is_module = words[0] == "-m"
        script, *arguments = words[is_module:]
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        start: Any = runpy.run_module if is_module else runpy.run_path
        try:
            start(script, run_name="__main__")
        except _Parsed:
            continue
        except ModuleNotFoundError as error:
            if error.name in ("gymnasium", "sb3_contrib"):  # of an example of these libraries
                continue
            raise
        except SystemExit:
            pytest.fail(f"{where}: {capsys.readouterr().err}")
        pytest.fail(f"{where}: parses nothing")


def test_packages_and_tests_that_are_named_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for words, where in commands_of("pip", "install"):
        for extras in re.findall(r"\[([\w,]+)\]", " ".join(words)):
            assert set(extras.split(",")) <= project["optional-dependencies"].keys(), where
        assert all((ROOT / word).is_file() for word in words if word.endswith(".txt")), where
    for words, where in commands_of("pytest"):
        assert all((ROOT / word).exists() for word in words if "/" in word), where


@pytest.mark.slow
def test_the_whole_parser_takes_the_commands_of_training(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same commands by the parser that knows every class. A reader's own checkpoint and weights
    are replaced by those of a published model."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in own_files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    wrong = {}
    for words, where in commands_of("ln-zoo"):
        if words[0] not in TRAINER:
            continue
        argv = without(words, "--ckpt_path")
        if "--weights" in argv:
            at = argv.index("--weights") + 1
            name = argv[at].partition("@")[0]  # a version may lie in the repository's history
            argv[at] = name if name in ln_zoo.list_models() else stand_in(argv)
        elif argv != words and "--config" not in words and "--model" not in words:
            argv += ["--weights", stand_in(argv)]
        argv = [word for word in argv if not word.startswith("--print_")]
        shown = [] if any(word.endswith(".help") for word in argv) else ["--print_config"]
        if main([*argv, *shown]) != 0:
            wrong[where] = capsys.readouterr().err
    assert not wrong


def stand_in(words: list[str]) -> str:
    models = {"Books": "skip_thought.none", "SentenceFile": "skip_thought.none"}
    models["CaptionedImages"] = "order_embedding.none"
    return models.get(words[words.index("--data") + 1], "mlp.none")


@pytest.mark.slow
def test_sweeps_are_of_runs_that_can_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sweep of the documentation passes the check that precedes its first run."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LN_ZOO_DATA", str(tmp_path))
    (tmp_path / "books").mkdir()
    for i in range(9):
        (tmp_path / f"books/{i}.txt").write_text("a sentence\n")
    wrong = {}
    for words, where in commands_of("ln-zoo", "sweep"):
        if "--config" not in words:
            continue
        end = words.index("--") if "--" in words else len(words)
        out = [] if "--out" in words else ["--out", "sweeps/none"]
        asked = vars(parser_of(sweep, "sweep").parse_args([*words[:end], *out]))
        known = asked.keys() & inspect.signature(grid_of).parameters.keys()
        search = [asked.get(name) for name in ("search", "trials", "sampler", "pruner")]
        try:
            grid = grid_of(**{name: asked[name] for name in known}, fit_options=words[end + 1 :])
            assert check_grid(searched(grid, *search), tmp_path).lengths, where
        except SweepError as error:
            wrong[where] = str(error)
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["submitit", "ray", "optuna"])
def test_sweeps_on_engines_run(engine: str, tmp_path: Path) -> None:
    """The documentation's sweeps on an engine, with few and small runs, on this machine."""
    pytest.importorskip(engine, reason="needs the extra for it")
    option = {"submitit": "launcher=slurm", "ray": "launcher=ray", "optuna": "search=optuna"}[
        engine
    ]
    code = "import sys; from ln_zoo.cli import main; sys.exit(main())"
    small = ["--model.hidden_sizes=[8]", "--data.train_size=100", "--trainer.max_epochs=1"]
    small += ["--data.val_size=20", "--trainer.enable_model_summary=false"]
    found = []
    for words, where in commands_of("ln-zoo", "sweep"):
        name, _, value = option.partition("=")
        if "--config" not in words or f"--{name}" not in words:
            continue
        asked = vars(parser_of(sweep, "sweep").parse_args(words))
        if asked[name] != value:
            continue
        given = [f"--{option}", f"--out=s{len(found)}", f"--config={ROOT}/configs/quickstart.yaml"]
        given += ["--norms=layer", "--jobs=2", "--threads=1", "--seeds=1"]
        given += [f"--set={text}" for text in asked.get("set_", ())]
        given += ["--slurm=cluster=local"] if engine == "submitit" else []
        given += ["--trials=2", f"--select={asked['select']}"] if engine == "optuna" else []
        argv = [sys.executable, "-P", "-c", code, "sweep", *given, "--", *small]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, (where, done.stderr)
        found.append(tmp_path / f"s{len(found)}/report/index.html")
    assert found
    assert all(page.is_file() for page in found)


def test_the_table_of_models_is_that_of_the_cards() -> None:
    assert markdown_table() in (ROOT / "docs/results/models.md").read_text(encoding="utf-8")
    # `ln-zoo list --csv docs/figures/models.csv` makes it anew.
    table = (ROOT / "docs/figures/models.csv").read_text(encoding="utf-8")
    assert table == results_csv(list_models())


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the extra `docs`")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra `docs`")
    pytest.importorskip("ipykernel", reason="needs the extra `docs`")
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(ROOT / "docs/first_steps.ipynb", as_version=4)
    resources = {"metadata": {"path": str(ROOT / "docs")}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    printed = [o.text for c in notebook.cells for o in c.get("outputs", ()) if "text" in o]
    assert any(text.startswith("says  [0, 1, 2, 3") for text in printed)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs the extra `docs`")
    pytest.importorskip("myst_nb", reason="needs the extra `docs`")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "docs", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"MPLBACKEND": "agg"}, check=True)
    assert "LSTM" in (tmp_path / "reference/layers.html").read_text(encoding="utf-8")


#: Phrases of `docs/words.txt` are not used.
AVOIDED = dict(
    line.split(" -> ")
    for line in (ROOT / "docs/words.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)
WORDED = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "benchmarks").glob("*.md"),
    *(ROOT / "configs").rglob("*.yaml"),
    *(ROOT / "ln_zoo").rglob("*.py"),
]


def test_phrases_to_avoid_are_not_used() -> None:
    avoided = re.compile(rf"\b(?:{'|'.join(AVOIDED)})\b", re.IGNORECASE)
    found = []
    for page in WORDED:
        # Lines are joined: a phrase may be broken across two.
        text = re.sub(r"\s+", " ", page.read_text(encoding="utf-8"))
        for match in avoided.finditer(text):
            around = text[max(0, match.start() - 40) : match.end() + 40]
            found.append(f"{name_of(page)}: {match[0]!r} is in docs/words.txt: {around!r}")
    assert not found, found


def test_each_item_of_a_list_has_a_line() -> None:
    # An editor that fills paragraphs joins items, and the site shows one long item.
    joined = re.compile(r"^(?:- |  )\S.*[.;:)] -(?:$| [A-Z`*\[])", re.MULTILINE)
    assert joined.search("- one. - Two")
    assert joined.search("- one\n  more. -\n  Two")
    pages = {page: page.read_text(encoding="utf-8") for page in WORDED if page.suffix == ".md"}
    found = {page.name: [m[0] for m in joined.finditer(text)] for page, text in pages.items()}
    assert not any(found.values()), found
