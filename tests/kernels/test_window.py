"""The loop with a window over a text, on each engine that has it, against eq. 46-51 in float64."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from accuracy import assert_as_accurate, moved
from engines import NEW_MEMORY, cpu_engines, needs_native, poisoned
from kernels.engine_case import Marked
from kernels.loop_case import Function, LoopCase, Problem, Under, cast, cotangents_of
from reference import Direction, Site, run_window
from torch import Tensor
from torch.nn import functional as F

from ln_zoo.kernels import window
from ln_zoo.kernels.cuda_graphs import graphs
from ln_zoo.kernels.native.runtime import unavailable_reason
from ln_zoo.kernels.triton import steps
from ln_zoo.kernels.triton.engine import TritonEngine
from ln_zoo.ops import (
    RowNorm,
    Weights,
    Windowed,
    WindowOperands,
    chunks,
    select_window_kernel,
    window_weights,
    windowed_lstm,
)
from ln_zoo.ops.registry import kernel_named

F32, F64 = torch.float32, torch.float64
PLACES = ("input", "recurrent", "cell")
RESULTS = ("output", "windows", "h", "c", "kappa")


#: Triton's interpreter is chosen for a whole process: `test_gpu_engine.py` has one.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ENGINES = ["triton"] if INTERPRETED else [*cpu_engines("window")]


@pytest.fixture(params=ENGINES)
def under(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Under]:
    """Lets one engine run alone, and makes sure that it did."""
    if request.param == "native" and unavailable_reason() is not None:
        pytest.skip(f"no native kernels: {unavailable_reason()}")
    if request.param == "triton":
        monkeypatch.setattr(TritonEngine, "unsupported_reason", lambda *arguments: None)
    found = Under(kernel_named("window", request.param).engine).alone(monkeypatch)
    yield found
    assert found.calls


class Rule(NamedTuple):
    """How rows are normalised at the places named; of the gates in such groups."""

    places: tuple[str, ...] = PLACES
    center: bool = True
    groups: tuple[int, ...] = (4,)
    eps: float = 1e-5


def problem(
    T: int, N: int, H: int, U: int, K: int, rule: Rule | None = None, seed: int = 0
) -> Problem:
    """Random tensors in float64, such as float32 can hold; texts are of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    I, E = 3, 6  # noqa: E741

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) * 2 - 1

    there = () if rule is None else rule.places
    k = 1.5 * H**-0.5
    letters = torch.randint(E, (N, U), generator=generator)
    text = F.one_hot(letters, E) * (torch.arange(U) < U - torch.arange(N)[:, None] % U)[..., None]
    found = {
        "x": rand(T, N, I) * 2,
        "w_ih": rand(4 * H, I + E) * k,
        "w_hh": rand(4 * H, H) * k,
        "b_ih": rand(4 * H) / 2,
        "b_hh": rand(4 * H) / 2,
        "h": rand(N, H),
        "c": rand(N, H),
        "weight": rand(3 * K, H) * k,
        # The window reaches the end of the text about when the sequence ends.
        "bias": rand(3 * K) / 4
        + torch.tensor([-1.0, -1.0, torch.log(torch.tensor(U / T))])[
            torch.arange(3).repeat_interleave(K)
        ],
        "text": text,
        "window": rand(N, E),
        "kappa": rand(N, K) + 1,
    }
    for place in there:
        found[f"gain_{place}"] = 0.5 + rand(H if place == "cell" else 4 * H) / 10
    if "cell" in there:
        found["shift_cell"] = rand(H) / 10
    return {name: a.float().double() for name, a in found.items()}


def equations(rule: Rule | None, p: Problem) -> tuple[Tensor, ...]:
    """Outputs and windows of all steps, and the last h, c and kappa."""
    d = Direction("LSTM", p["w_ih"], p["w_hh"], p.get("b_ih"), p.get("b_hh"))
    for place in () if rule is None else rule.places:
        groups, shift = ((1,), p["shift_cell"]) if place == "cell" else (rule.groups, None)
        kind = "layer" if rule.center else "rms"
        d.sites[place] = Site(kind, p[f"gain_{place}"], shift, rule.eps, groups)
    state = [p[name] for name in ("h", "c", "kappa", "window")]
    return run_window(d, p["weight"], p["bias"], p["x"], p["text"], state)[:5]


def records(rule: Rule | None, p: Problem, H: int | None = None) -> dict[str, RowNorm]:
    """Of H units, by default as many as the recurrent weights have."""
    H = p["w_hh"].shape[1] if H is None else H
    gates, states = (4 * H,), (H,)
    found = {"input": RowNorm(gates), "recurrent": RowNorm(gates), "cell": RowNorm(states)}
    if rule is None:
        return found
    groups = tuple(n * H for n in rule.groups)
    for place in rule.places:
        sizes = states if place == "cell" else groups
        shift = p["shift_cell"] if place == "cell" else None
        found[place] = RowNorm(sizes, True, rule.center, rule.eps, p[f"gain_{place}"], shift)
    return found


def weights_of(p: Problem) -> tuple[Weights, WindowOperands]:
    weights = Weights(p["w_ih"], p["w_hh"], p.get("b_ih"), p.get("b_hh"))
    return weights, WindowOperands(*(p[name] for name in WindowOperands._fields))


def called(kernel: Any, rule: Rule | None, p: Problem, H: int | None = None) -> Windowed:
    return windowed_lstm(kernel, records(rule, p, H), p["x"], (p["h"], p["c"]), *weights_of(p))


def layer(under: Under, rule: Rule | None, p: Problem) -> Windowed:
    """The layer on the engine, after it was chosen as users have it chosen."""
    kernel = select_window_kernel(records(rule, p), p["x"], *weights_of(p))
    assert kernel.engine is under.engine
    return called(kernel, rule, p)


def by(under: Under, rule: Rule | None) -> Function:
    return lambda p: tuple(layer(under, rule, p)[: len(RESULTS)])


def plain(rule: Rule | None) -> Function:
    return lambda p: equations(rule, p)


class TestLoop(LoopCase):
    """On a small problem of its own; other tests use its helpers."""

    results, given, changed = RESULTS, ("text",), (0, 1)

    def problem(self) -> Problem:
        return problem(*SMALL, Rule())

    def equations(self, p: Problem) -> tuple[Tensor, ...]:
        return equations(Rule(), p)

    def engine(self, under: Under) -> Function:
        return by(under, Rule())

    def none_of(self, name: str, a: Tensor) -> Tensor:
        of_examples = ("h", "c", "text", "window", "kappa")
        return a[:, :0] if name == "x" else a[:0] if name in of_examples else a

    def chosen(self, p: Problem) -> str | None:
        return chosen(p, Rule())


CASE = TestLoop()
run, in_float32 = CASE.run, CASE.in_float32


def compare(under: Under, rule: Rule | None, p: Problem) -> None:
    expected, found = run(plain(rule), p, F64), run(by(under, rule), p, F32)
    assert_as_accurate(found, expected, in_float32(plain(rule), p))


RULES: dict[str, Rule | None] = {
    "none": None,
    "layer": Rule(),
    "rms": Rule(center=False),
    "per gate": Rule(groups=(1, 1, 1, 1)),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
SIZES = [  # T, N, H, U, K
    (16, 3, 5, 1, 1),
    (17, 1, 16, 7, 1),
    (23, 5, 20, 9, 3),
    (40, 7, 33, 17, 10),  # more rows than a chunk has
    (64, 4, 48, 8, 2),  # as many
    (66, 8, 20, 31, 4),
]


@functools.cache
def by_equations(
    rule: Rule | None, size: tuple[int, ...], dtype: torch.dtype, k: int = 0
) -> dict[str, Tensor]:
    """What `run` gives of the equations, of a problem `moved`; engines share it."""
    p = {name: moved(a, k) for name, a in problem(*size, rule).items()}
    return run(plain(rule), p, dtype)


@every_rule
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_float32_against_the_equations(
    rule: Rule | None, size: tuple[int, ...], under: Under
) -> None:
    found = run(by(under, rule), problem(*size, rule), F32)
    expected = by_equations(rule, size, F64)
    assert_as_accurate(found, expected, lambda k: by_equations(rule, size, F32, k))


SUBSETS = [places for n in range(4) for places in itertools.combinations(PLACES, n)]
#: T, N, H, U, K.
SMALL = (18, 3, 12, 5, 2)


@pytest.mark.parametrize(
    ("rule", "size"),
    [
        *((rule, (16, 1, 1, 1, 1)) for rule in (None, Rule(("input",)))),
        *((Rule(places, center=i % 2 == 0), SMALL) for i, places in enumerate(SUBSETS)),
        (Rule(groups=(1, 1, 1, 1), eps=0.1), SMALL),
        (Rule(center=False, groups=(3, 1), eps=0.1), SMALL),
        (Rule(groups=(1, 2, 1), eps=0.1), SMALL),
    ],
    ids=str,
)
def test_any_places_and_groups_of_gates(
    rule: Rule | None, size: tuple[int, ...], under: Under
) -> None:
    compare(under, rule, problem(*size, rule))


def test_no_biases(under: Under) -> None:
    for rule, biases in ((Rule(), ("b_ih", "b_hh")), (None, ("b_ih",))):
        p = problem(*SMALL, rule)
        compare(under, rule, {name: a for name, a in p.items() if name not in biases})


@pytest.mark.parametrize("rows", [1, 4, 12, 10**6])
def test_many_chunks_are_as_one(rows: int, under: Under, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, asked = Rule(), []
    cut = chunks.time_chunks
    monkeypatch.setattr(
        chunks, "time_chunks", lambda sizes, *_: asked.append(1) or cut(sizes, rows)
    )
    compare(under, rule, problem(17, 3, 12, 5, 2, rule))
    assert len(asked) == 2


def test_terms_are_what_makes_the_windows(under: Under) -> None:
    p = cast(problem(30, 3, 12, 5, 2), F32)
    done = layer(under, None, p | {"x": p["x"].requires_grad_()})
    assert not done.terms.requires_grad
    assert done.terms.shape == (30, 3, 4, 2)
    asked = (done.output @ p["weight"].T + p["bias"]).exp().view(30, 3, 3, 2).detach()
    torch.testing.assert_close(done.terms[:, :, :3], asked)
    steps = torch.cat([p["kappa"][None], done.terms[:, :, 3]]).diff(dim=0)
    torch.testing.assert_close(steps, done.terms[:, :, 2])
    phi = window_weights(done.terms, 5)
    torch.testing.assert_close(torch.einsum("tnu,nue->tne", phi, p["text"]), done.windows.detach())
    alpha, beta, _, kappa = done.terms.double().unbind(2)
    for u in range(5):
        by_hand = (alpha * (-beta * (kappa - (u + 1)) ** 2).exp()).sum(2)
        torch.testing.assert_close(phi[:, :, u].double(), by_hand)


def test_a_text_of_no_characters_shows_nothing(under: Under) -> None:
    p = problem(*SMALL)
    p["text"] = p["text"][:, :0]
    compare(under, None, p)
    assert not layer(under, None, cast(p, F32)).windows.any()


def test_sums_of_any_size(under: Under) -> None:
    """alpha near e^30 and nearly 0, beta from flat to a needle, steps from none to large."""
    p = problem(20, 2, 12, 5, 3)
    bias = torch.tensor([30.0, -60.0, 0.0, -9.0, 4.0, 12.0, -60.0, 1.0, -3.0]).double()
    compare(under, None, p | {"weight": p["weight"] / 8, "bias": bias})


@pytest.mark.parametrize("source", ["x", "text", "kappa", "c"])
def test_nan_is_not_hidden_and_stays_in_its_example(source: str, under: Under) -> None:
    p = cast(problem(20, 3, 12, 5, 2), F32)
    p[source][{"x": (2, 1), "text": (1, 0)}.get(source, 1)] = float("nan")
    done = layer(under, None, p)
    for a in (done.output, done.windows):
        assert a[-1, 1].isnan().all()
        assert a[:, [0, 2]].isfinite().all()


@every_rule
def test_memory_is_not_read_before_it_is_written(rule: Rule | None, under: Under) -> None:
    # More rows than one chunk has, where that does not take minutes.
    p = problem(*((18, 3, 12, 5, 2) if INTERPRETED else (66, 8, 20, 9, 3)), rule)
    expected = run(plain(rule), p, F64)
    with poisoned(*NEW_MEMORY, (under.engine, "empty")):
        actual = run(by(under, rule), p, F32)
        with torch.no_grad():
            quiet = layer(under, rule, cast(p, F32))
    assert_as_accurate(actual, expected, in_float32(plain(rule), p))
    assert all(a.isfinite().all() for a in quiet)


@pytest.mark.skipif(not INTERPRETED, reason="of kernels in triton's interpreter")
@every_rule
def test_kernels_stay_within_their_memory(
    rule: Rule | None, under: Under, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that kernels write lies between marks, which they leave alone."""
    memory = Marked()

    def of_engine(*size: int, like: Tensor, dtype: torch.dtype, scratch: str = "") -> Tensor:
        return memory.empty(size, like, dtype)

    monkeypatch.setattr(steps, "empty", memory.empty)
    monkeypatch.setattr(under.engine, "empty", of_engine)
    monkeypatch.setattr(window, "_LEAST_STEPS", 2)
    compare(under, rule, problem(2, 3, 5, 3, 3, rule))
    assert len(memory.made) > 10
    memory.check()


@pytest.mark.skipif(not INTERPRETED, reason="the other engines record nothing")
def test_graphs_give_the_same_numbers(
    under: Under, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of texts of another length, and with two forwards before a backward."""
    monkeypatch.setattr(graphs, "LENGTHS", (2, 1))
    monkeypatch.setattr(graphs, "SHORTEST", 2)
    monkeypatch.setattr(window, "_LEAST_STEPS", 2)
    rule = Rule()
    problems = [problem(3, 1, 3, U, 1, rule, seed) for seed, U in ((0, 4), (1, 35))]
    wanted = [run(by(under, rule), p, F32) for p in problems]
    assert recorded.replays == 0
    monkeypatch.setattr(steps, "may_replay", lambda a: True)
    run(by(under, rule), problems[0], F32)
    assert recorded.replays == 0  # recorded when it comes again
    for p, numbers in zip(problems, wanted, strict=True):
        found = run(by(under, rule), p, F32)
        assert all(torch.equal(found[name], numbers[name]) for name in numbers)
    assert recorded.replays == 2 * 2 * 2  # of 2 steps and 1
    assert recorded.recordings == 2 * 2  # texts of all lengths share them

    leaves = [cast(p, F32) for p in problems]
    done = [by(under, rule)(p | {"w_hh": p["w_hh"].requires_grad_()}) for p in leaves]
    for p, results, numbers in reversed(list(zip(leaves, done, wanted, strict=True))):
        (found,) = torch.autograd.grad(results, p["w_hh"], cotangents_of(results))
        assert torch.equal(found, numbers["dw_hh"])


def chosen(p: Problem, rule: Rule | None = None, **weights: Tensor) -> str | None:
    own, operands = weights_of(p)
    kernel = select_window_kernel(records(rule, p), p["x"], own._replace(**weights), operands)
    return None if kernel is None else kernel.name


@needs_native
def test_what_functions_of_torch_do_better_or_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LN_ZOO_KERNELS", raising=False)
    p = cast(problem(16, 2, 3, 4, 2, Rule()), F32)
    assert chosen(p, Rule()) is not None
    assert chosen(p | {"x": p["x"][:15]}, Rule()) is None
    assert chosen(p | {"text": p["text"].clone().requires_grad_()}, Rule()) is None
    assert chosen(p, Rule(), hr=torch.zeros(2, 3)) is None
    for name in ("x", "weight", "text", "kappa"):
        assert chosen(p | {name: p[name].double()}, Rule()) is None
    half = cast(p, torch.bfloat16)
    assert chosen(half, Rule()) is None
    opaque = records(Rule(), p) | {"recurrent": None}
    assert select_window_kernel(opaque, p["x"], *weights_of(p)) is None
