"""Kernels over whole rows, before and after the persistent time loop, emulated on the CPU.

References are the equations in float64, differentiated by torch; tolerances come from the same in
float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from accuracy import assert_as_accurate, moved
from kernels.cluster.emulation import emulate, missing
from kernels.engine_case import Marked, between_nans
from torch import Tensor

from ln_zoo.kernels.cluster.arguments import (
    AfterLoopArguments,
    PackArguments,
    ScaleArguments,
    StatisticsArguments,
)
from ln_zoo.kernels.cluster.geometry import Problem
from ln_zoo.kernels.cluster.persistent import after_loop_bytes
from ln_zoo.ops.engines.base import centred
from ln_zoo.ops.spec import Rows

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

KINDS = (torch.float32, torch.bfloat16, torch.float16)
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
#: Gates of each group of statistics.
GROUPS = {"lstm": (4,), "gru": (2, 1), "rnn": (1,)}
#: The same of cells whose gates share statistics otherwise.
OTHERS = {"lstm, each gate": (1, 1, 1, 1), "lstm, halves": (1, 3), "gru, all gates": (3,)}
GROUPS |= OTHERS
GATES |= {name: sum(groups) for name, groups in OTHERS.items()}
every_cell = pytest.mark.parametrize("cell", GATES)
EPS = 1e-3


class Buffer:
    """A tensor filled with NaN between marks, for a kernel to write to."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> None:
        self._memory = Marked()
        self.tensor = self._memory.empty(shape, torch.empty(0), dtype, shift)

    def read(self) -> Tensor:
        self._memory.check()
        return self.tensor


def problem_of(
    cell: str, kind: torch.dtype = torch.float32, norms: tuple[int, int] = (1, 1)
) -> Problem:
    number = ["lstm", "gru", "rnn"].index(cell.split(",")[0])
    return Problem(number, 1, KINDS.index(kind), 2, *map(bool, norms), groups=GROUPS[cell])


def rows_kernel(
    name: str, cell: str, kind: torch.dtype, norms: tuple[int, int], **more: Any
) -> Any:
    macros = problem_of(cell, kind, norms).rows_macros()
    return emulate("rows.cu", name, macros, **more)


def normals(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reciprocal_roots(a: Tensor, cell: str) -> Tensor:
    hidden = a.shape[1] // GATES[cell]
    parts = a.split([n * hidden for n in GROUPS[cell]], 1)
    return torch.stack([(part.square().mean(1) + EPS).rsqrt() for part in parts], 1)


def normalised(a: Tensor, cell: str) -> Tensor:
    hidden = a.shape[1] // GATES[cell]
    roots = reciprocal_roots(a, cell)
    repeats = torch.tensor([n * hidden for n in GROUPS[cell]])
    return a * roots.repeat_interleave(repeats, 1)


def after_loop_reference(
    cell: str, kind: torch.dtype, norms: tuple[int, int], given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of the terms and vectors, from the equations, by autograd.

    The terms are v^ g_v + b and u^ g_u + b_hn; ``work`` holds the gradients of their sums, for a
    GRU's candidate those of each of its two terms.
    """
    hidden = given["work"].shape[2]
    wide = given["work"].dtype
    leaf = {name: a.detach().to(wide).requires_grad_() for name, a in given.items()}
    v = leaf["v"]
    u = leaf["u"]
    term_v = normalised(v, cell) * leaf["gain_v"] if norms[0] else v
    term_u = normalised(u, cell) * leaf["gain_u"] if norms[1] else u
    bias = leaf["gain_v"].detach().clone().requires_grad_()
    bias_hn = leaf["gain_v"][:hidden].detach().clone().requires_grad_()
    work = given["work"].to(wide)
    if GATES[cell] == 3:
        first, second = work[:, :3].flatten(1), torch.cat([work[:, :2], work[:, 3:]], 1).flatten(1)
        shift = torch.cat([torch.zeros(2 * hidden, dtype=wide), bias_hn])
        loss = ((term_v + bias) * first).sum() + ((term_u + shift) * second).sum()
    else:
        loss = ((term_v + term_u + bias) * work.flatten(1)).sum()
    loss.backward()
    found = {"du": u.grad.to(kind), "bias": bias.grad}
    if cell != "rnn":
        found["dv"] = v.grad.to(kind)
    if GATES[cell] == 3:
        found["bias_hn"] = bias_hn.grad
    if norms[0]:
        found["sum_v"] = leaf["gain_v"].grad
    if norms[1]:
        found["sum_u"] = leaf["gain_u"].grad
    return {name: a.detach() for name, a in found.items()}


def check_after_loop(
    cell: str,
    kind: torch.dtype,
    norms: tuple[int, int],
    rows: int,
    hidden: int,
    blocks: int = 2,
    shifted: str = "",
    in_place: bool = False,
) -> None:
    gates, groups = GATES[cell], len(GROUPS[cell])
    width = gates * hidden
    given = {
        "work": normals(1, rows, 4 if cell != "rnn" else 1, hidden),
        "v": normals(2, rows, width).to(kind),
        "u": (normals(3, rows, width) * 3).to(kind),
        "gain_v": normals(4, width),
        "gain_u": normals(5, width),
    }
    exact = after_loop_reference(cell, kind, norms, {n: a.double() for n, a in given.items()})

    # One column too many on each side: offsets count.
    stats = torch.full((rows, 2 * groups + 2), float("nan"))
    stats[:, 1 : 1 + groups] = reciprocal_roots(given["v"].double(), cell)
    stats[:, 1 + groups : -1] = reciprocal_roots(given["u"].double(), cell)
    inputs = {name: between_nans(a, int(name == shifted)) for name, a in given.items()}
    shapes = {"bias": width, "sum_v": width, "sum_u": width, "bias_hn": hidden}
    buffers = {name: Buffer(blocks, shapes[name]) for name in exact if name not in ("du", "dv")}
    gradients = {
        name: Buffer(rows, width, dtype=kind, shift=int(name == shifted))
        for name in ("du", "dv")
        if name in exact
    }
    if in_place:
        for name, buffer in gradients.items():
            buffer.tensor.copy_(given[name[1]])
            inputs[name[1]] = buffer.tensor
    kernel = rows_kernel(
        *("after_loop", cell, kind, norms),
        threads=384,
        shared_bytes=after_loop_bytes(gates, hidden, groups),
    )
    arguments = AfterLoopArguments(
        **inputs,
        **{name: buffer.tensor for name, buffer in (buffers | gradients).items()},
        stats=between_nans(stats),
        rows=rows,
        H=hidden,
        stride=stats.shape[1],
        offset_v=1,
        offset_u=1 + groups,
    )
    kernel(blocks, arguments)
    found = {name: buffer.read().sum(0) for name, buffer in buffers.items()}
    found |= {name: buffer.read().clone() for name, buffer in gradients.items()}

    def loop(run: int) -> dict[str, Tensor]:
        inputs = {n: a if n in "uv" else moved(a, run) for n, a in given.items()}
        return after_loop_reference(cell, kind, norms, {n: a.float() for n, a in inputs.items()})

    assert_as_accurate(found, exact, loop)
    if in_place:
        return
    first = [buffer.tensor.clone() for buffer in (buffers | gradients).values()]
    kernel(blocks, arguments)
    again = [buffer.tensor for buffer in (buffers | gradients).values()]
    assert all(map(torch.equal, first, again))


def cases() -> list[tuple[str, tuple[int, int]]]:
    both = [(1, 1), (1, 0), (0, 1), (0, 0)]
    some = {"rnn": both[2:]} | dict.fromkeys(OTHERS, both[:1])
    return [(c, n) for c in GATES for n in some.get(c, both)]


@pytest.mark.parametrize(
    ("cell", "norms", "kind"),
    [
        (cell, norms, kind)
        for cell, norms in cases()
        # In bfloat16 reads and writes do not depend on the norm.
        for kind in KINDS[: 1 if cell in OTHERS or norms != (cell != "rnn", 1) else 2]
    ],
)
def test_gradients_after_the_loop(cell: str, norms: tuple[int, int], kind: torch.dtype) -> None:
    for rows, hidden in ((1, 1), (7, 5), (40, 100), (25, 257)):
        check_after_loop(cell, kind, norms, rows, hidden)


@every_cell
def test_gradients_of_many_rows_and_of_the_largest_size(cell: str) -> None:
    norms = (int(cell != "rnn"), 1)
    check_after_loop(cell, torch.float32, norms, rows=300, hidden=100, blocks=3)
    check_after_loop(cell, torch.float32, norms, rows=5, hidden=1536)
    check_after_loop(cell, torch.float32, norms, rows=5, hidden=516)


@pytest.mark.parametrize("shifted", ["work", "v", "u", "du", "dv"])
def test_gradients_of_rows_that_are_not_aligned(shifted: str) -> None:
    for kind in KINDS[:2]:
        check_after_loop("gru", kind, (1, 1), rows=15, hidden=100, shifted=shifted)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_gradients_may_take_the_place_of_the_terms(cell: str, kind: torch.dtype) -> None:
    check_after_loop(cell, kind, (1, 1), rows=30, hidden=36, in_place=True)


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        (cell, kind)
        for cell in GATES
        for kind in KINDS[: {"gru": 3, "lstm": 2, "rnn": 2}.get(cell, 1)]
    ],
)
def test_statistics(cell: str, kind: torch.dtype) -> None:
    kernel = rows_kernel("input_statistics", cell, kind, (int(cell != "rnn"), 1), threads=256)
    groups = len(GROUPS[cell])
    for rows, hidden, shift in ((1, 1, 0), (3, 5, 0), (300, 100, 0), (20, 257, 0), (20, 100, 1)):
        v = normals(6, rows, GATES[cell] * hidden).to(kind)
        v[0] = 0  # as a state of zeros makes of u
        stats = Buffer(rows, groups + 2)
        arguments = StatisticsArguments(
            v=between_nans(v, shift), stats=stats.tensor, rows=rows, H=hidden, stride=groups + 2,
            offset=1, eps=EPS,
        )  # fmt: skip
        kernel(2, arguments)
        found = stats.read()
        assert found[:, 0].isnan().all()
        assert found[:, -1].isnan().all()
        exact = {"stats": reciprocal_roots(v.double(), cell)}

        def loop(run: int, v: Tensor = v) -> dict[str, Tensor]:
            return {"stats": reciprocal_roots(moved(v.float(), run), cell)}

        assert_as_accurate({"stats": found[:, 1:-1]}, exact, loop)


def pack_kernel(name: str, pieces: int, kind: torch.dtype, **more: Any) -> Any:
    macros = {"PIECES": pieces, "KIND": KINDS.index(kind)}
    return emulate("pack.cu", name, macros, **more)


def scaled(w: Tensor, cell: str, centre: bool) -> tuple[Tensor, Tensor]:
    """What ``scale_weights`` makes of weights: the centred ones, and the bits of their maximum."""
    rows, hidden = w.shape
    kernel = pack_kernel("scale_weights", 2, torch.float32, threads=1024, shared_bytes=4096)
    found, largest = Buffer(rows, hidden), torch.zeros(1, dtype=torch.int32)
    arguments = ScaleArguments(
        w=between_nans(w),
        centred=found.tensor,
        largest=largest,
        G=rows,
        H=hidden,
        groups=len(GROUPS[cell]),
        group_of=problem_of(cell).group_of,
        centre=int(centre),
        kind=KINDS.index(w.dtype),
    )
    kernel(len(GROUPS[cell]) * -(-hidden // 32), arguments)
    return found.read(), largest


@pytest.mark.parametrize("kind", KINDS)
@every_cell
def test_weights_are_centred(cell: str, kind: torch.dtype) -> None:
    for hidden in (1, 5, 33, 100):
        # Means that are large beside what is left are where rounding shows.
        w = (normals(7, GATES[cell] * hidden, hidden) + 30).to(kind)
        found, largest = scaled(w, cell, centre=True)
        rows = Rows(scale=True, center=True, eps=EPS, groups=GROUPS[cell])
        # A single row is its own mean.
        sizes = [n * hidden for n in GROUPS[cell] for _ in range(n * hidden)]
        alone = torch.tensor(sizes) == 1

        def loop(
            run: int, w: Tensor = w, rows: Rows = rows, there: Tensor = ~alone
        ) -> dict[str, Tensor]:
            return {"w": centred(moved(w.float(), run), rows)[there]}

        assert not found[alone].any()
        exact = {"w": centred(w.double(), rows)[~alone]}
        assert_as_accurate({"w": found[~alone]}, exact, loop)
        assert torch.equal(largest.view(torch.float32), found.abs().max().reshape(1))


def test_weights_without_centring_are_as_they_were() -> None:
    w = normals(8, 300, 100).bfloat16()
    found, largest = scaled(w, "gru", centre=False)
    assert torch.equal(found, w.float())
    assert torch.equal(largest.view(torch.float32), w.float().abs().max().reshape(1))


def test_the_largest_weight_may_be_infinite_or_nan() -> None:
    for value in (float("inf"), -float("inf"), float("nan")):
        w = normals(8, 40, 10)
        w[17, 3] = value
        _, largest = scaled(w, "lstm", centre=False)
        found = largest.view(torch.float32)
        assert bool(found.isnan()) if value != value else bool(found == float("inf"))


def packed(
    w: Tensor, index: Tensor, pieces: int, kind: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, float]:
    count = len(index)
    storage = torch.bfloat16 if kind == torch.bfloat16 else torch.float16
    high, low = (Buffer(count, dtype=storage) for _ in range(2))
    unscale = Buffer(1)
    kernel = pack_kernel("pack_weights", pieces, kind, threads=256)
    kernel(
        3,
        PackArguments(
            centred=between_nans(w),
            index=index,
            largest=w.abs().max().reshape(1).view(torch.int32),
            high=high.tensor,
            low=low.tensor if pieces == 2 else None,
            unscale=unscale.tensor,
            count=count,
        ),
    )
    return high.read(), low.read(), float(unscale.read())


INDEX = torch.randint(-1, 4000, (5001,), generator=torch.Generator().manual_seed(9)).int()


@pytest.mark.parametrize("factor", [1e-30, 0.02, 1.0, 3e38])
def test_weights_in_two_pieces(factor: float) -> None:
    w = normals(10, 40, 100)
    w *= factor / w.abs().max()
    high, low, unscale = packed(w, INDEX, 2)
    exact = torch.where(INDEX < 0, 0, w.flatten()[INDEX.clamp(min=0)]).double()
    found = (high.double() + low.double() / 2048) * unscale
    largest = float(w.abs().max())
    # float16 rounds twice to 11 bits; the second piece's unit is the smallest float16 at least.
    assert float((found - exact).abs().max()) <= 2.0**-23 * 2 * largest
    assert unscale == 2.0 ** min(126, torch.tensor(largest).double().log2().ceil().item())
    assert torch.equal(high, (exact / unscale).float().half())


def test_weights_in_one_piece() -> None:
    w = normals(11, 40, 100)
    wanted = torch.where(INDEX < 0, 0, w.flatten()[INDEX.clamp(min=0)])
    high, low, unscale = packed(w, INDEX, 1)
    assert unscale == 4.0
    assert torch.equal(high, (wanted / 4).half())
    assert low.isnan().all()
    high, _, unscale = packed(w, INDEX, 1, torch.bfloat16)
    assert unscale == 1.0
    assert torch.equal(high, wanted.bfloat16())


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_weights_without_a_scale(value: float) -> None:
    w = torch.full((40, 100), value)
    high, _, unscale = packed(w, INDEX, 1)
    assert unscale == 1.0
    wanted = torch.where(INDEX < 0, 0, w.flatten()[INDEX.clamp(min=0)]).half()
    assert torch.equal(high.nan_to_num(3), wanted.nan_to_num(3))
