"""The generic loop as a function of tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from ln_zoo.ops import CELLS, Weights, scan
from ln_zoo.ops.recurrence import reversal

F64 = torch.float64


@pytest.mark.parametrize("lengths", [(1,), (3, 3), (5, 4, 4, 1), (7, 1, 1)])
def test_reversal_reverses_each_sequence_within_its_length(lengths: tuple[int, ...]) -> None:
    sequences = [torch.randn(n, 2) for n in lengths]
    packed = pack_sequence(sequences)
    order = reversal(packed.batch_sizes)
    wanted = pack_sequence([s.flip(0) for s in sequences])
    assert torch.equal(packed.data[order], wanted.data)
    assert torch.equal(order[order], torch.arange(len(order)))


@pytest.mark.parametrize("name", CELLS)
def test_scan_takes_any_function_at_the_sites(name: str) -> None:
    """No norm and no module is needed: a halving stands in for one."""
    cell = CELLS[name]
    calls: list[tuple[str, int | None]] = []

    def halve(role: str, a: Tensor, step: int | None) -> Tensor:
        calls.append((role, step))
        return a / 2

    sites = {role: lambda a, t, role=role: halve(role, a, t) for role in cell.roles}
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=F64, generator=generator)

    rows = cell.gates * 4
    weights = Weights(rand(rows, 3), rand(rows, 4), rand(rows), rand(rows))
    states = tuple(rand(2, 4) for _ in cell.states)
    x = rand(3, 2, 3)
    output, final = scan(cell, x, None, states, weights, sites)
    assert output.shape == (3, 2, 4)
    assert torch.equal(output[-1], final[0])
    assert ("input", None) in calls
    per_step = [role for role in cell.roles if role != "input" and (role, 0) in calls]
    assert all((role, t) in calls for role in per_step for t in range(3))

    calls.clear()
    again, _ = scan(cell, x, None, states, weights, sites, per_timestep=True)
    torch.testing.assert_close(again, output)
    assert [step for role, step in calls if role == "input"] == [0, 1, 2]


def test_backward_of_long_sequences_is_linear_in_their_length() -> None:
    """Nothing of full length is made per step: the graph holds no slices of the whole input."""
    cell = CELLS["GRU"]
    weights = Weights(torch.randn(6, 2), torch.randn(6, 2), None, None)
    sites = {role: lambda a, t: a for role in cell.roles}
    x = torch.randn(50, 1, 2, requires_grad=True)
    output, _ = scan(cell, x, None, (torch.zeros(1, 2),), weights, sites)
    nodes, todo = set(), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            todo += [following for following, _ in node.next_functions]
    names = [node.name() for node in nodes]
    assert sum("Unbind" in name for name in names) == 1
    assert not any("Select" in name or "Slice" in name for name in names)
