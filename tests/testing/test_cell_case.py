"""Checks of `CellCase` meet cells that they must refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ln_zoo.layers import RecurrentCell, RecurrentLayer
from ln_zoo.ops import Cell, Place, States, linear
from ln_zoo.ops.regularization import Noise
from ln_zoo.testing import CellCase

pytest_plugins = ["pytester"]


def good(wx: Any, states: States, w: Any, sites: Any, t: int | None) -> States:
    return ((wx + sites["recurrent"](linear(w.dropped(states[0]), w.hh), t) + w.bias).tanh(),)


def then(change: Callable[[Tensor, int], Tensor]) -> Any:
    """The good step, after which the state is changed, by time step."""
    return lambda wx, states, w, sites, t: (change(good(wx, states, w, sites, t)[0], t or 0),)


def detaches(wx: Any, states: States, w: Any, sites: Any, t: int | None) -> States:
    return good(wx, tuple(s.detach() for s in states), w, sites, t)


def ignores_masks(wx: Any, states: States, w: Any, sites: Any, t: int | None) -> States:
    return good(wx, states, w._replace(noise=Noise()), sites, t)


mixes_examples = then(lambda h, _: h + h.mean(0, keepdim=True))
counts_steps = then(lambda h, t: h * (1 + t))
draws = then(lambda h, _: h * torch.rand_like(h))
GOOD = Cell(
    "good",
    good,
    (Place("input", (1,), weight="ih"), Place("recurrent", (1,), weight="hh")),
    candidates=(0,),
    drops=True,
)


def case(cell: Cell, of_step: Cell | None = None) -> Any:
    layer = type("Layer", (RecurrentLayer,), {"cell": cell})
    step = type("Step", (RecurrentCell,), {"cell": of_step or cell})
    return type("Case", (CellCase,), {"layer": layer, "step": step})()


REFUSED = [
    ("packed_examples_equal_examples_alone", mixes_examples, ("Layer", "evaluation"), "alone"),
    ("evaluation_is_not_batch_dependent", mixes_examples, ("Step",), "depends on"),
    ("gradients_are_those_of_finite_differences", detaches, ("Layer", "training"), "gradient of"),
    ("begins_where_it_left_off", counts_steps, (), "cut in two"),
    ("noise_is_drawn_in_training_alone", ignores_masks, (), "recurrent_dropout=0.3: .* the same"),
    ("evaluation_changes_nothing", draws, ("Layer",), "two runs on one input differ"),
    ("resets_are_pieces_apart", mixes_examples, (), "between resets, against those alone"),
    ("layers_and_directions_are_single_layers", draws, (), "against four single ones"),
]


@pytest.mark.parametrize(
    ("check", "step", "args", "message"), REFUSED, ids=[check for check, *_ in REFUSED]
)
def test_a_broken_cell_fails(check: str, step: Any, args: tuple, message: str) -> None:
    torch.manual_seed(0)
    getattr(case(GOOD), f"test_{check}")(*args)
    with pytest.raises((AssertionError, pytest.fail.Exception), match=message):
        getattr(case(replace(GOOD, name="broken", step=step)), f"test_{check}")(*args)


def test_two_cells_are_refused() -> None:
    with pytest.raises(AssertionError, match="Layer and Step have different cells: give both"):
        case(GOOD, replace(GOOD, name="other")).test_layer_and_step_have_one_cell()


def test_a_case_without_classes_says_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_mine="""
        from ln_zoo.testing import CellCase

        class TestNothing(CellCase):
            pass
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--collect-only")
    result.stdout.fnmatch_lines("*TestNothing: set the class attribute layer to a subclass of*")
