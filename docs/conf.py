"""The documentation as a site; warnings are errors: sphinx-build -W -b html docs build/site."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

from ln_zoo import __version__

project = "ln_zoo"
author = "the authors of ln_zoo"
release = version = __version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

# Pages
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["figures"]
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
nb_execution_mode = "off"  # A test runs the notebook.

# Reference, from docstrings
default_role = "py:obj"
autodoc_default_options = {
    "members": True,
    "imported-members": True,
    "show-inheritance": True,
    "member-order": "bysource",
}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Looks
html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = html_css_files = ["equations.css"]
html_title = f"ln_zoo {release}"
html_copy_source = False
html_show_copyright = False

#: A bar that would begin a substitution: norms of vectors are written with bars.
_BAR = re.compile(r"(``.*?``)|(?<![^\s(\[{<'\"/-])\|(?=\S)")


def _escape_bars(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[number] = _BAR.sub(lambda found: found[1] or r"\|", line)


#: Where a layer refers to the arguments of its base class.
_OF_BASE = re.compile(r"^(Further arguments|Arguments and errors): see `(Recurrent\w+)`\.\s?")


def _list_arguments(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """List the arguments of a layer's base class on its own page."""
    place = next((n for n, line in enumerate(lines) if _OF_BASE.match(line)), None)
    if place is None or not inspect.isclass(obj):
        return
    base = _OF_BASE.match(lines[place])[2]
    (cls,) = (each for each in obj.__mro__ if each.__name__ == base)
    found = inspect.getdoc(cls).split("Args:\n")[1].split("\n\n")[0].splitlines()
    end = next(n for n, line in enumerate(found) if line.startswith("    cell:"))
    lines[place] = _OF_BASE.sub("", lines[place]).replace("as there", f"as of `{base}`")
    if "Args:" in lines[:place]:
        at = max(n for n in range(place) if lines[n].strip()) + 1
        lines[at:at] = found[:end]
    else:
        lines[place:place] = ["Args:", *found[:end], ""]


_TORCH = "https://docs.pytorch.org/docs/stable"
#: Pages of other packages by name: a build without a network cannot fetch their inventories.
_ELSEWHERE = {
    r"torch\.(nn\.(utils\.rnn\.)?[A-Z]\w+|optim\.[A-Z]\w+|compile|jit\.\w+|load)": (
        f"{_TORCH}/generated/{{}}.html"
    ),
    r"torch\.Tensor": f"{_TORCH}/tensors.html",
    r"torch\.(device|dtype)": f"{_TORCH}/tensor_attributes.html",
    r"(lightning\.[\w.]+\.)?(LightningModule|LightningDataModule|Trainer|Callback)": (
        "https://lightning.ai/docs/pytorch/stable/optional-api/api_references"
    ),
}


def _link_elsewhere(
    app: Any, env: Any, node: nodes.Element, text: nodes.Element
) -> nodes.reference | None:
    name = node.get("reftarget", "")
    for pattern, page in _ELSEWHERE.items():
        if re.fullmatch(pattern, name):
            return nodes.reference("", "", text, refuri=page.format(name), internal=False)
    return None


def _write_mathml(writer: Any, node: nodes.math | nodes.math_block) -> None:
    """Write an equation as MathML, which browsers draw without scripts and without a network."""
    writer.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Registers the changes of docstrings, and the renderer of equations."""
    app.connect("missing-reference", _link_elsewhere)
    how = (_write_mathml, None)
    app.add_html_math_renderer("mathml", inline_renderers=how, block_renderers=how)
    # The first before napoleon, which reads the sections.
    app.connect("autodoc-process-docstring", _list_arguments, priority=400)
    app.connect("autodoc-process-docstring", _escape_bars)
