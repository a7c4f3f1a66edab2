"""What is not generated: the generic loop runs, and the log says why in one line."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import names_of
from kernels.generated.generated_case import PLACES, gated_cell
from torch import Tensor
from torch.nn import functional as F

from ln_zoo.kernels.generated import binding, check, engine
from ln_zoo.layers import RecurrentLayer
from ln_zoo.norms import BatchNorm, LayerNorm, Norm
from ln_zoo.ops import Cell, linear, registry

H = 6
OTHER = torch.ones(H)


def reads_a_value(a: Tensor) -> Tensor:
    return 2 * a if bool((a > 0).any()) else a


def changes_a_view(a: Tensor) -> Tensor:
    b = a * 2
    b[:, : H // 2].mul_(3)
    return b


def changes_an_input(a: Tensor) -> Tensor:
    OTHER.mul_(2.0)
    return a * 1.5


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "value": (reads_a_value, "read back"),
    "random numbers": (lambda a: F.dropout(a, 0.5), "random numbers"),
    "another tensor": (lambda a: a * OTHER, "neither weight nor state"),
    "a view in place": (changes_a_view, "in place"),
    "another tensor in place": (changes_an_input, "changed in place"),
    "half a gate": (lambda a: torch.cat([a[:, H // 2 :], a[:, : H // 2]], -1), "part of a gate"),
    "the batch": (lambda a: a - a.mean(0), "over the examples"),
    "roll": (lambda a: torch.roll(a, 1, -1), "aten"),
    "double": (lambda a: a.double().tanh().float(), "float64"),
    "median": (lambda a: a - a.median(-1, keepdim=True).values, r"aten\.median"),
}


def reason_of(layer: Any, caplog: pytest.LogCaptureFixture, x: Tensor | None = None) -> str:
    """Run a layer and its backward pass; the reason in the log."""
    registry._log.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="ln_zoo"):
        out, _ = layer(torch.randn(4, 3, 3) if x is None else x)
        out.sum().backward()
    lines = [
        r.getMessage() for r in caplog.records if "not run by generated (C++" in r.getMessage()
    ]
    assert len(lines) == 1, caplog.text
    assert "\n" not in lines[0]
    return lines[0]


@pytest.mark.parametrize("kind", REFUSED)
def test_operations(kind: str, caplog: pytest.LogCaptureFixture, chosen: list[Any]) -> None:
    function, expected = REFUSED[kind]
    layer = RecurrentLayer(3, H, cell=gated_cell(function, kind), norm=LayerNorm())
    before = torch.get_rng_state()
    assert re.search(expected, reason_of(layer, caplog))
    assert names_of(chosen) == [None]
    assert OTHER[0] == (2.0**4 if "in place" in kind and "tensor" in kind else 1.0)
    OTHER.fill_(1.0)
    if kind != "random numbers":
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        torch.randn(4, 3, 3)
        assert torch.equal(torch.get_rng_state(), after), "tracing moved the generator"


def test_the_time_step(caplog: pytest.LogCaptureFixture) -> None:
    def step(wx: Any, states: Any, w: Any, sites: Any, t: Any) -> Any:
        (h,) = states
        a, _ = (wx + linear(h, w.hh)).chunk(2, -1)
        return (a.tanh() * (0.5 if t > 2 else 1.0),)

    layer = RecurrentLayer(3, H, cell=Cell("timed", step, PLACES), norm=LayerNorm())
    assert "time step" in reason_of(layer, caplog)


def test_norms_over_the_batch_and_double(caplog: pytest.LogCaptureFixture) -> None:
    layer = RecurrentLayer(3, H, cell=gated_cell(torch.tanh, "over a batch"), norm=BatchNorm())
    assert "BatchNorm" in reason_of(layer, caplog)
    layer = RecurrentLayer(3, H, cell=gated_cell(torch.tanh, "in double")).double()
    assert "float64" in reason_of(layer, caplog, torch.randn(4, 3, 3, dtype=torch.float64))


def test_few_steps(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LEAST_STEPS", 16)
    layer = RecurrentLayer(3, H, cell=gated_cell(torch.tanh, "short"))
    assert "16 steps" in reason_of(layer, caplog)


def test_products_with_parts_of_a_weight(caplog: pytest.LogCaptureFixture) -> None:
    def step(wx: Any, states: Any, w: Any, sites: Any, t: Any) -> Any:
        (h,) = states
        return ((wx[:, :H] + linear(h[:, :2], w.hh[:H, :2])).tanh(),)

    layer = RecurrentLayer(3, H, cell=Cell("parts", step, PLACES))
    assert "whole rows" in reason_of(layer, caplog)


def test_a_weight_that_is_multiplied_both_ways(caplog: pytest.LogCaptureFixture) -> None:
    def step(wx: Any, states: Any, w: Any, sites: Any, t: Any) -> Any:
        (h,) = states
        return ((wx[:, :H] + linear(h, w.own[0]) * w.own[0][0]).tanh(),)

    layer = RecurrentLayer(3, H, cell=Cell("both", step, PLACES, weights=(("own", H),)))
    assert "elsewhere" in reason_of(layer, caplog)


def test_a_kernel_that_differs_is_refused_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, chosen: list[Any]
) -> None:
    monkeypatch.setattr(check, "TOLERANCE", -1.0)
    layer = RecurrentLayer(3, H + 1, cell=gated_cell(lambda a: (a + 0.123).tanh(), "wrong"))
    assert "differs from the generic loop" in reason_of(layer, caplog)
    assert [r.levelname for r in caplog.records if "not used" in r.getMessage()] == ["WARNING"]
    assert names_of(chosen) == [None]


# The page

ROOT = Path(__file__).parents[3]


def strings(node: ast.AST) -> Iterator[str]:
    """String literals below a node; formatted values are braces."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
        yield "".join(map(str, parts))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from strings(child)


def reasons(file: Path, *names: str) -> Iterator[str]:
    """Reasons in these functions and classes of a file, or in all of it."""
    tree = ast.parse(file.read_text())
    named = [node for node in ast.walk(tree) if getattr(node, "name", None) in names]
    for node in [inner for outer in named or [tree] for inner in ast.walk(outer)]:
        raised = isinstance(node, ast.Raise) and node.exc is not None
        told = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "reason"
        if told or raised or (isinstance(node, ast.Return) and names):
            yield from (text for text in strings(node) if " " in text)


def test_the_reference_lists_every_reason() -> None:
    package = Path(binding.__file__).parent
    found = {text for file in package.glob("*.py") for text in reasons(file)}
    found |= {*reasons(package / "engine.py", "_unsupported")}
    found |= {*reasons(package / "trace.py", "_reason")}
    found |= {*reasons(package / "binding.py", "bound_to", "_refused")}
    graphs = package.parent / "cuda_graphs" / "recorded.py"
    found |= {*reasons(graphs, "unsupported_site", "Watch", "StepNumber")}
    found -= {"{} changed during its call: {}"}  # an error
    page = (ROOT / "docs" / "reference" / "kernels.md").read_text()
    table = page.partition("## Refusals")[2]
    listed = {
        text
        for row in table.splitlines()
        for text in re.findall("`([^`]+ [^`]+)`", row.partition(" | ")[0])
    }
    plain = [
        {re.sub(r"[A-Z]{2,}|[{][}]", "X", text) for text in texts} for texts in (found, listed)
    ]
    assert plain[0] == plain[1]


# Values that a trace depends on


@dataclass(frozen=True)
class Scaled(Norm):
    """A norm of one plain attribute."""

    factor: float = 1.0

    def normalize(self, site: Any, a: Tensor, step: int | None = None) -> Tensor:
        return a * self.factor / (1 + a.abs().mean(-1, keepdim=True))


GLOBAL = 1.0


def reads_a_global(a: Tensor) -> Tensor:
    return (GLOBAL * a).tanh()


@pytest.mark.parametrize("where", ["norm", "site", "closure", "global"])
def test_changed_values_lead_to_a_new_trace(
    where: str, monkeypatch: pytest.MonkeyPatch, chosen: list[Any]
) -> None:
    factors = {"a": 1.0}

    def closed(a: Tensor) -> Tensor:
        return (factors["a"] * a).tanh()

    function = reads_a_global if where == "global" else closed
    cell = gated_cell(function, where)
    layer = RecurrentLayer(3, H, cell=cell, norm=Scaled())
    x = torch.randn(4, 3, 3)
    site: Any = layer.sites["l0"]["recurrent"]
    for _ in range(2):
        found = layer(x)[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LN_ZOO_KERNELS", "0")
            torch.testing.assert_close(found, layer(x)[0], rtol=1e-4, atol=1e-5)
        if where == "norm":
            object.__setattr__(site.norm, "factor", 3.0)
        elif where == "site":
            site.norm = Scaled(3.0)
        elif where == "global":
            monkeypatch.setitem(globals(), "GLOBAL", 3.0)
        else:
            factors["a"] = 3.0
    assert names_of(chosen) == ["generated", None, "generated", None]


def test_values_that_change_with_each_call_are_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "MOST_TRACES", 2)
    count = [0]

    def counted(a: Tensor) -> Tensor:
        count[0] += 1
        return a.tanh()

    layer = RecurrentLayer(3, H, cell=gated_cell(counted, "counted"))
    for _ in range(binding.MOST_TRACES + 1):
        layer(torch.randn(4, 3, 3))
    assert "change from call to call" in reason_of(layer, caplog)
