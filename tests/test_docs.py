"""The documentation: links lead somewhere, examples run, commands are those of the command line."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import python

from ln_zoo.cli import main
from ln_zoo.zoo.catalog import markdown_table

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "benchmarks/README.md",
    ROOT / "examples/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
#: Pages whose examples need trained weights of some size, data, or modules that only they have.
NEED_DATA = {"draw", "order_embeddings", "skip_thoughts", "weight_geometry", "invariance"}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language; of none, for an empty one."""
    fenced = page.read_text(encoding="utf-8").split("```")[1::2]
    return [b.partition("\n")[2] for b in fenced if b.partition("\n")[0] == language]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
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


EXAMPLES = [
    page
    for page in PAGES
    if page.is_relative_to(ROOT / "docs") and page.stem not in NEED_DATA and blocks(page, "python")
]


#: Whose examples take seconds; doctests of the same functions are in the fast suite.
LONG = {"dynamics"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] * (page.stem in LONG))
        for page in EXAMPLES
    ],
)
def test_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks of a page, one after the other, as a reader would run them."""
    names: dict[str, object] = {"__name__": f"example_{page.stem}"}
    monkeypatch.setitem(sys.modules, names["__name__"], type(sys)(str(names["__name__"])))
    for block in blocks(page, "python"):
        exec(compile(block, name_of(page), "exec"), names)


def test_a_norm_of_ones_own_is_short_and_passes_its_case(tmp_path: Path) -> None:
    norm, case = blocks(ROOT / "docs/how-to/own_norm.md", "python")
    assert len(norm.partition("@dataclass")[2].strip().splitlines()) < 10
    (tmp_path / "my_norm.py").write_text(norm)
    (tmp_path / "test_my_norm.py").write_text(f"from my_norm import MyNorm\n{case}")
    command = ["-q", "-x", "-p", "no:cacheprovider", str(tmp_path)]
    done = python(tmp_path, f"import pytest, sys; sys.exit(pytest.main({command}))")
    assert done.code == 0, done.out
    assert re.search(r"\d+ passed", done.out)


def commands() -> dict[str, Path]:
    """Each different `ln-zoo` command of the documentation, with a page that has it."""
    found: dict[str, Path] = {}
    for page in PAGES:
        for block in blocks(page, ""):
            for line in block.replace("\\\n", " ").splitlines():
                for start in re.finditer(r"(?:^|[;&] |do )\s*(?:[A-Z_]+=\S+ )*(ln-zoo .*)", line):
                    found.setdefault(start[1].strip(), page)
    return found


def test_commands_name_files_and_commands_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    told = re.findall(r"ln-zoo ([a-z][a-z|-]+)", capsys.readouterr().out)
    known = {word for words in told for word in words.split("|")}
    assert len(commands()) > 80
    for command, page in commands().items():
        words = shlex.split(command.partition("  #")[0].partition("; done")[0])
        assert words[1] in known or words[1].startswith("-"), f"{name_of(page)}: {command}"
        for word in words:
            if word.startswith("configs/") and "$" not in word:
                for path in re.split("[,+]", word.partition("=")[2] or word):
                    if path.startswith("configs/"):
                        assert (ROOT / path).is_file(), f"{name_of(page)}: {command}"


@pytest.mark.slow
def test_fit_commands_are_understood(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option of every `ln-zoo fit` that needs no file of the reader's."""
    monkeypatch.chdir(ROOT)
    yours = re.compile(r"\$|\.\.\.|--ckpt_path|my_\w+|own_\w+|FILE|RUN|--weights")
    fits = [c.partition("  #")[0] for c in commands() if c.startswith("ln-zoo fit")]
    wrong = {}
    for command in (c for c in fits if not yours.search(c) and ".help" not in c):
        words = [word for word in shlex.split(command)[1:] if not word.startswith("--print_")]
        if main([*words, "--print_config"]) != 0:
            wrong[command] = capsys.readouterr().err
    assert len(fits) > 30
    assert not wrong


def test_the_table_of_models_is_that_of_the_cards() -> None:
    assert markdown_table() in (ROOT / "docs/results/models.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the extra `docs`")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra `docs`")
    pytest.importorskip("ipykernel", reason="needs the extra `docs`")
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(ROOT / "docs/first_steps.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "docs")}}
    ).execute()
    printed = [o.text for c in notebook.cells for o in c.get("outputs", ()) if "text" in o]
    assert any(text.startswith("says  [0, 1, 2, 3") for text in printed)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs the extra `docs`")
    pytest.importorskip("myst_nb", reason="needs the extra `docs`")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "docs", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"MPLBACKEND": "agg"}, check=True)
    assert "LSTM" in (tmp_path / "reference/layers.html").read_text(encoding="utf-8")
