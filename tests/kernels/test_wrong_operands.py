"""Every tensor of every entry to native code, in every wrong form: an error, never a crash.

Entries are called directly, as layers never would. Each example runs in a process that may die.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import needs_native
from equations import random_operands
from forked import STRIDED, example, outcomes, wrong_forms
from kernels import test_draw, test_window
from kernels.engine_case import (
    BATCH_GRU,
    BATCH_LSTM,
    BATCH_RNN,
    GRU,
    LSTM,
    RNN,
    given_for,
    with_given,
)
from torch import Tensor

from ln_zoo.kernels.native.layers import Parameters, Prepared
from ln_zoo.kernels.native.runtime import NativeProducts, multiply, packed
from ln_zoo.ops import CELLS, RowNorm, Weights, draw_forward
from ln_zoo.ops.chunks import SavedTensors
from ln_zoo.ops.engines.base import FixedStatistics, Masks
from ln_zoo.ops.recurrence import RecurrentCall
from ln_zoo.ops.registry import kernel_named
from ln_zoo.ops.spec import Rows, Spec

pytestmark = needs_native

T, N, I, H = 4, 3, 2, 5  # noqa: E741
SIZES = [3, 3, 2, 1]
GIVEN, KEPT, MASKS = FixedStatistics._fields, SavedTensors._fields, Masks._fields
#: A function of tensors by name, and right ones.
Entry = tuple[Callable[[dict[str, Any]], list[Tensor]], dict[str, Any]]


def rand(*size: int) -> Tensor:
    """Random numbers that lose nothing in bfloat16."""
    return (torch.rand(size) - 0.5).bfloat16().float()


def halved(p: dict[str, Any]) -> dict[str, Any]:
    """In float32, such as bfloat16 can hold."""
    return {name: None if a is None else a.bfloat16().float() for name, a in p.items()}


def operands_for(spec: Spec, rows: int | None) -> dict[str, Any]:
    """Padded inputs, or ``rows`` packed rows."""
    lead = (T, N) if rows is None else (rows,)
    return halved(random_operands(spec, lead, N, I, H)._asdict())


def both_ways(
    title: str, spec: Spec, operands: dict[str, Any], more: dict[str, Any], sizes: Tensor | None
) -> Iterator[tuple[str, Entry]]:
    """The operator that runs a recurrence, and its backward."""
    code = spec.numbers()

    def forward(given: dict[str, Any], save: bool = True) -> list[Tensor]:
        return list(torch.ops.ln_zoo.recurrence(*given.values(), *code, "native", save))

    def backward(given: dict[str, Any]) -> list[Tensor]:
        found = torch.ops.ln_zoo.recurrence_backward(
            *given.values(), *code, "native", [a is not None for a in operands.values()]
        )
        return list(found)

    given = {**operands, **more, "batch_sizes": sizes}
    yield title, (forward, given)
    if title == "recurrence":
        yield f"{title}, nothing kept", (lambda given: forward(given, save=False), given)
    output, h, c, *kept = forward(given)
    grads = {"d_out": torch.ones_like(output), "d_h": torch.ones_like(h), "d_c": torch.ones_like(c)}
    kept_too = dict(zip(KEPT, (output, *kept), strict=True))
    all_of_it = {**grads, **operands, **more, **kept_too, "batch_sizes": sizes}
    yield f"{title}_backward", (backward, all_of_it)


def recurrence(spec: Spec, is_packed: bool, noise: bool = False) -> Iterator[tuple[str, Entry]]:
    operands = operands_for(spec, sum(SIZES) if is_packed else None)
    more: dict[str, Any] = dict.fromkeys((*GIVEN, *MASKS))
    if noise:
        held = torch.rand(*operands["x"].shape[:-1], H) < 0.5
        more |= {"dropout": rand(N, H), "zoneout_h": held}
        more["zoneout_c"] = held.clone() if spec.cell == "LSTM" else None
        more["reset"] = torch.rand(operands["x"].shape[:-1].numel()) < 0.5
    return both_ways("recurrence", spec, operands, more, torch.tensor(SIZES) if is_packed else None)


def batch_recurrence(spec: Spec, is_packed: bool) -> Iterator[tuple[str, Entry]]:
    steps = [3, 3, 2, 2]
    operands = operands_for(spec, sum(steps) if is_packed else None)
    given = given_for(spec, H)
    more = dict(zip(GIVEN, (None if a is None else a.float() for a in given), strict=True))
    more |= dict.fromkeys(MASKS)
    sizes = torch.tensor(steps) if is_packed else None
    return both_ways("batch_recurrence", spec, operands, more, sizes)


def both_of(
    title: str,
    forward: Callable[[dict[str, Any]], Any],
    right: dict[str, Any],
    fixed: Sequence[str],
) -> Iterator[tuple[str, Entry]]:
    """A loop, and the gradients of all tensors that are not fixed."""

    def both(given: dict[str, Any]) -> list[Tensor]:
        leaves = {name: a.clone().requires_grad_(name not in fixed) for name, a in given.items()}
        results = [a for a in forward(leaves) if a.requires_grad]
        sum(a.sum() for a in results).backward()  # type: ignore[union-attr]
        return [*results, *(a.grad for a in leaves.values() if a.grad is not None)]

    yield title, (lambda given: list(forward(given)), right)
    yield f"{title} and back", (both, right)


def window() -> Iterator[tuple[str, Entry]]:
    rule, kernel = test_window.Rule(), kernel_named("window", "native")
    right = halved(test_window.problem(20, N, H, 6, 2, rule))

    def forward(given: dict[str, Any]) -> Any:
        return test_window.called(kernel, rule, given, H)

    return both_of("window", forward, right, ("text",))


def draw() -> Iterator[tuple[str, Entry]]:
    size, norm = test_draw.Size(T=3, N=N, B=6, A=7, H=H, Z=4), test_draw.Norm()
    right = halved(test_draw.problem(size, norm))
    kernel, settings = kernel_named("DRAW", "native"), test_draw.settings_of(size)

    def forward(given: dict[str, Any]) -> Any:
        weights = test_draw.weights_of(norm, given, H)
        return draw_forward(kernel, settings, given["x"], given["noise"], weights)

    return both_of("draw", forward, right, test_draw.GIVEN)


def single_step() -> Iterator[tuple[str, Entry]]:
    vectors = ("bias_ih", "bias_hh", "gain_input", "gain_recurrent")
    right = {"x": rand(2, I), "h": rand(2, H), "c": rand(2, H), "ih": rand(4 * H, I)}
    right |= {"hh": rand(4 * H, H)} | {name: rand(4 * H) for name in vectors}
    right |= {"gain_cell": rand(H), "shift_cell": rand(H)}

    def terms(given: dict[str, Any]) -> tuple[dict[str, RowNorm], Weights]:
        norms = {
            role: RowNorm((size,), True, True, 1e-5, given[f"gain_{role}"])
            for role, size in (("input", 4 * H), ("recurrent", 4 * H), ("cell", H))
        }
        norms["cell"] = replace(norms["cell"], shift=given["shift_cell"])
        return norms, Weights(*(given[name] for name in ("ih", "hh", "bias_ih", "bias_hh")))

    norms, weights = terms(right)
    states = right["h"], right["c"]
    call = RecurrentCall(CELLS["LSTM"], [norms], right["x"], None, states, [weights])
    prepared = Prepared(call)

    def run(given: dict[str, Any]) -> Any:
        # As after an assignment to the data of each parameter.
        prepared._parameters = [Parameters.of(call.cell, *terms(given))]
        states = given["h"], given["c"]
        options = (0.0, False, None, None)
        return prepared(prepared.check(), given["x"], None, states, *options)[1]

    return both_of("step", run, right, ())


def products() -> Iterator[tuple[str, Entry]]:
    rows = Rows(True, True, 1e-5, (4,))
    right = {"a": rand(20, 18), "b": rand(18, 17), "out": torch.zeros(20, 17)}

    def product(given: dict[str, Any]) -> list[Tensor]:
        out = given["out"].clone(memory_format=torch.preserve_format)
        multiply(given["a"], packed("test", given["b"]), out, add=True)
        return [out]

    def terms(given: dict[str, Any]) -> list[Tensor]:
        found = given["out"].clone()
        NativeProducts(given["w"], rows, 20).terms(given["x"], found)
        total, back = given["total"].clone(), given["back"].clone()
        NativeProducts(given["w"], rows, 20).input_gradient(given["d"], back)
        NativeProducts(given["w"], rows, 20).add_weight_gradient(
            given["d"], given["x"], total, False
        )
        return [found, back, total]

    yield "product", (product, right)
    shapes = {"x": (20, 17), "w": (32, 17), "d": (20, 32)}
    results = {"out": (20, 32), "back": (20, 17), "total": (32, 17)}
    given = {name: rand(*shape) for name, shape in (shapes | results).items()}
    yield "products of a layer", (terms, given)


ENTRIES = {
    "LSTM, padded": lambda: recurrence(LSTM, False),
    "LSTM, packed": lambda: recurrence(LSTM, True),
    "GRU, packed": lambda: recurrence(GRU, True),
    "RNN, padded": lambda: recurrence(RNN, False),
    "LSTM with noise and resets, padded": lambda: recurrence(LSTM, False, noise=True),
    "GRU with noise and resets, packed": lambda: recurrence(GRU, True, noise=True),
    "batch LSTM, padded": lambda: batch_recurrence(BATCH_LSTM, False),
    "batch GRU, packed": lambda: batch_recurrence(BATCH_GRU, True),
    "given LSTM, packed": lambda: batch_recurrence(with_given(BATCH_LSTM), True),
    "given RNN, padded": lambda: batch_recurrence(with_given(BATCH_RNN), False),
    "window": window,
    "draw": draw,
    "step": single_step,
    "products": products,
}


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


def wrong_outcomes(which: str, together: bool) -> dict[tuple[str, str, str], str]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keys, examples = [], []
    for title, entry in ENTRIES[which]():
        function, right = entry
        expected = [a.detach() for a in function(right)]
        for name, a in right.items():
            for form, wrong in ({} if a is None or not a.numel() else wrong_forms(a)).items():
                if (name, form) in itertools.product(LEADS.get(title, ()), LENGTHS):
                    continue
                keys.append((title, name, form))
                run = functools.partial(function, {**right, name: wrong})
                examples.append(example(run, expected, close))
    return dict(zip(keys, outcomes(examples, together), strict=True))


#: Tensors whose first size, that of time, is free, by entry; and the forms that change it.
LEADS = {
    "recurrence": ("x",),
    "recurrence, nothing kept": ("x",),
    "batch_recurrence": ("x",),
    **dict.fromkeys(("window", "window and back"), ("x",)),
    **dict.fromkeys(("draw", "draw and back"), ("noise",)),
}
LENGTHS = ("long", "short", "one")

#: What has the right numbers in another precision, and is converted: sums, and DRAW's weights.
CONVERTED = {"float64", "bfloat16", STRIDED}
#: What an error may be: no accident on the way, such as a missing key.
ERRORS = ("raised RuntimeError", "raised ValueError", "raised IndexError")


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(
    "together",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["in one process", "each in a process of its own"],
)
@pytest.mark.parametrize("which", ENTRIES)
def test_no_wrong_tensor_is_taken(which: str, together: bool) -> None:
    found = wrong_outcomes(which, together)
    assert found
    bad = {
        key: outcome
        for key, outcome in found.items()
        if not outcome.startswith(ERRORS) and not (outcome == "same" and key[2] in CONVERTED)
    }
    assert not bad
