"""How exact a float32 result has to be: about as exact as the generic loop in float32.

How far rounding carries a result from the exact one depends on the processor, its library of matrix
products and the number of threads, and on the problem: a layer-normalised LSTM with gains of 1
multiplies every error from step to step, whoever makes it. No fixed number holds on every machine.
What does hold: a right kernel rounds about as often as the generic loop, so their errors on one
problem are of one size. The float64 result is the reference for both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

Results = Mapping[str, Tensor]

#: How many times the generic loop's error is allowed.
#:
#: A kernel may add in another order and has its own exponential function: its error is up to about
#: twice the loop's. The rest is luck. Where one direction of the state space multiplies errors, the
#: whole error is one random number, and so is the loop's: it can be small by chance. The largest of
#: `RUNS` of them is a steadier measure. Of normal errors of one size, one is more than 5 times the
#: largest of 4 others with probability E|x|^4 (0.8 / 5)^4 = 0.002, and few problems are so: of
#: 9,000 comparisons on one machine the largest ratio was 2. Faults are far from that: one in the
#: fourth digit is a thousand roundings.
FACTOR = 5.0
#: Runs of the generic loop: one on the inputs as they are, the others with their last bits moved.
RUNS = 4
#: The least error taken for the loop's, which may be exact by chance.
ULP = torch.finfo(torch.float32).eps
#: The error allowed in float64, which is far from its rounding and from any fault.
DOUBLE = 1e-12


def moved(a: Tensor | None, run: int, precision: torch.dtype = torch.float32) -> Tensor | None:
    """The tensor with each number moved by at most about its last bit in a precision, at random.

    Such inputs are as good as the given ones: an algorithm in that precision cannot tell them apart
    by more than its own rounding. Run 0 has the inputs as they are; zeros stay zeros.
    """
    if a is None or run == 0:
        return a
    generator = torch.Generator().manual_seed(run)
    shifts = 2 * torch.rand(a.shape, generator=generator, dtype=torch.float64) - 1
    found = a.detach().double() * (1 + torch.finfo(precision).eps * shifts)
    return (found if precision == torch.float64 else found.float()).to(a.dtype)


@contextmanager
def generic_loop() -> Iterator[None]:
    """Layers run without any kernel."""
    with mock.patch.dict(os.environ, LN_ZOO_KERNELS="0"):
        yield


def error(found: Tensor, exact: Tensor) -> float:
    """Length of the difference as a part of the length of the exact result; infinite for NaN."""
    assert found.shape == exact.shape, f"shape {tuple(found.shape)}, not {tuple(exact.shape)}"
    exact = exact.detach().double()
    gap = ((found.detach().double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()
    return gap if gap == gap else float("inf")


def limits(exact: Results, loop: Callable[[int], Results]) -> dict[str, float]:
    """The `error` that each result may have in float32, of exact results in float64, by name.

    ``loop``: the same in float32 by the generic loop, of inputs `moved` for a run of that number.
    """
    *_, allowed = limits_by_run(exact, loop)
    return allowed


def limits_by_run(
    exact: Results, loop: Callable[[int], Results], runs: int = RUNS, least: float = FACTOR * ULP
) -> Iterator[dict[str, float]]:
    """What is allowed after one run of the loop, after two, and so on."""
    allowed = dict.fromkeys(exact, least)
    for k in range(runs):
        run = loop(k)
        allowed = {n: max(allowed[n], FACTOR * error(run[n], a)) for n, a in exact.items()}
        yield allowed


def ratios(found: Results, exact: Results, allowed: Mapping[str, float]) -> dict[str, float]:
    """The error of each result as a part of what is allowed."""
    assert found.keys() == exact.keys()
    return {name: error(found[name], value) / allowed[name] for name, value in exact.items()}


def assert_within(found: Results, exact: Results, allowed: Mapping[str, float]) -> None:
    """Every result is within its limit of the exact one; a failure names all that are not."""
    beyond = {name: r for name, r in ratios(found, exact, allowed).items() if not r <= 1}
    assert not beyond, "; ".join(
        f"{name}: error {r * allowed[name]:.2e}, allowed {allowed[name]:.2e}"
        for name, r in beyond.items()
    )


def assert_as_accurate(
    found: Results,
    exact: Results,
    loop: Callable[[int], Results],
    double: float = DOUBLE,
    runs: int = RUNS,
    loop_in_double: bool = False,
) -> None:
    """Results in float64 are exact; in float32 they are about as exact as the generic loop's.

    Args:
        found, exact: results by name, all of one precision, and in float64.
        loop: see `limits`. It is run until the results are within the limits, and not at all where
            they are in float64.
        double: the error allowed in float64.
        runs: runs of the loop at most.
        loop_in_double: whether the loop runs in float64 too, on inputs moved by its last bits, and
            may be further off than ``double`` where cancellation multiplies them.
    """
    in_double = all(a.dtype == torch.float64 for a in found.values())
    allowed = dict.fromkeys(exact, double)
    if in_double and (not loop_in_double or max(ratios(found, exact, allowed).values()) <= 1):
        assert_within(found, exact, allowed)
        return
    for allowed in limits_by_run(exact, loop, runs, double if in_double else FACTOR * ULP):
        if all(r <= 1 for r in ratios(found, exact, allowed).values()):
            return
    assert_within(found, exact, allowed)
