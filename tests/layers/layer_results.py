"""Results of layers as flat lists of tensors, their gradients, and random parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from reference import Direction
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.rnn import PackedSequence

from ln_zoo.layers import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm

LAYERS, CELLS = [LSTM, GRU, RNN], [LSTMCell, GRUCell, RNNCell]


def flat(value: Any) -> list[Tensor]:
    """The tensors of nested tuples; the data of a packed sequence, nothing for None."""
    if isinstance(value, PackedSequence):
        return [value.data]
    if value is None or isinstance(value, Tensor):
        return [] if value is None else [value]
    return [a for part in value for a in flat(part)]


def gradients(results: Any, sources: Iterable[Tensor]) -> list[Tensor]:
    """Gradients of a sum that weighs every element of the results differently."""
    generator = torch.Generator().manual_seed(5)
    loss = sum(
        (a * torch.randn(a.shape, generator=generator).to(a.dtype)).sum() for a in flat(results)
    )
    found = torch.autograd.grad(loss, list(sources), allow_unused=True, materialize_grads=True)
    return list(found)


def results_of(
    module: Any,
    x: Any,
    states: Sequence[Tensor] | None = None,
    *,
    gradients_too: bool = True,
    call: Callable[..., Any] | None = None,
) -> dict[str, Tensor]:
    """Return output, states and all gradients by name; the seed of the noise is fixed.

    Args:
        module: a recurrent layer or cell.
        x: the input, which may be packed.
        states: initial states.
        gradients_too: whether to take gradients.
        call: a function to call in place of the module.
    """
    torch.manual_seed(4)
    source, *starts = (a.detach().clone() for a in (*flat(x), *(states or ())))
    for a in (source, *starts):
        a.requires_grad_(gradients_too)
    given = x._replace(data=source) if isinstance(x, PackedSequence) else source
    with torch.set_grad_enabled(gradients_too):
        done = (call or module)(given, tuple(starts) if len(starts) > 1 else (*starts, None)[0])
    found = {("output", "h", "c", "n", "m")[i]: a for i, a in enumerate(flat(done))}
    if gradients_too:
        sources = {"x": source, **{f"start {i}": s for i, s in enumerate(starts)}}
        sources |= {n: p for n, p in module.named_parameters() if p.requires_grad}
        pairs = zip(sources, gradients(done, sources.values()), strict=True)
        found |= {f"d {name}": g for name, g in pairs}
    return {name: a.detach() for name, a in found.items()}


def results_by_pieces(layer: Any, x: Tensor, steps: int) -> list[Tensor]:
    """Output, states and all gradients of a padded input in calls of at most ``steps`` steps."""
    inputs, outputs, states = x.clone().requires_grad_(), [], None
    for piece in inputs.split(steps):
        output, states = layer(piece, states)
        outputs.append(output)
    done = torch.cat(outputs), states
    return [*flat(done), *gradients(done, [inputs, *layer.parameters()])]


def bytes_kept(layer: Any, x: Tensor) -> int:
    """What a call saves for its backward pass, beside inputs, weights and what it returns."""
    storages: dict[int, int] = {}

    def keep(a: Tensor) -> Tensor:
        storages[a.untyped_storage().data_ptr()] = a.untyped_storage().nbytes()
        return a

    with saved_tensors_hooks(keep, lambda a: a):
        done = layer(x)
    for a in (x, *layer.parameters(), *flat(done)):
        storages.pop(a.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def randomised(module: Any, size: float = 0.3) -> Any:
    """The module, with noise added to its parameters."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return module


def filled(module: Any, reached: int | None = None) -> Any:
    """Fill parameters and running averages at random, with no gain or scale near 0.

    With ``reached``, the module is in evaluation mode after batches of that many time steps.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.uniform_(-1, 1)
            if name.endswith(("gain", "scale")):
                parameter.add_(0.2 * parameter.sign())
        for name, buffer in module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.uniform_(0.5, 1.5)
            elif reached is not None and buffer.dim():
                buffer[:reached] = 7
    return module.train(reached is None)


#: Norms for comparisons with the equations.
NORMS: dict[str, Norm] = {
    "none": Identity(),
    "layer": LayerNorm(eps=1e-3),
    "rms": RMSNorm(eps=1e-3),
    "weight": WeightNorm(),
    "batch": BatchNorm(eps=1e-3, max_steps=4, momentum=0.3),
    "batch-eval": BatchNorm(eps=1e-3, max_steps=4),
}


def made(cls: type, norm: Norm = NORMS["layer"], **options: Any) -> Any:
    """A layer of 3 inputs and 5 units in float64, always with the same random parameters."""
    torch.manual_seed(0)
    return randomised(cls(3, 5, norm=norm, dtype=torch.float64, **options), 0.2)


def assert_close(one: Any, two: Any, tolerance: float = 1e-11, atol: float | None = None) -> None:
    """Compare results; ``tolerance`` is relative, and absolute unless ``atol`` is given."""
    atol = tolerance if atol is None else atol
    torch.testing.assert_close(flat(one), flat(two), rtol=tolerance, atol=atol)


def assert_same_statistics(sites: Any, d: Direction) -> None:
    """Compare the running averages of a cell, and their counts, with those of the equations."""
    of_norm = {role: site.statistics for role, site in d.sites.items() if site.statistics}
    assert 3 * len(of_norm) == len(list(sites.buffers()))
    for role, statistics in of_norm.items():
        assert_close(sites[role].running_mean, statistics.mean)
        assert_close(sites[role].running_var, statistics.var)
        assert sites[role].num_batches_tracked.tolist() == statistics.count


def assert_threads_run_parts(
    layer: Any, x: Tensor, states: Sequence[Tensor], *, one_thread_backward: bool = False
) -> None:
    """With two threads, results are those of two halves of the examples; gradients of parameters
    are their sums, to the bit."""
    examples, middle = x.shape[1], x.shape[1] // 2
    d: list[Tensor] = []

    def run(first: int, end: int, threads: int) -> tuple[list[Tensor], list[Tensor]]:
        torch.set_num_threads(threads)
        layer.zero_grad()
        inputs, *starts = (a[:, first:end].detach().clone().requires_grad_() for a in (x, *states))
        output, final = layer(inputs, tuple(starts) if len(starts) > 1 else starts[0])
        if not d:
            d.append(torch.randn_like(output))
        if one_thread_backward:
            torch.set_num_threads(1)
        squares = sum(a.square().sum() for a in flat(final))
        ((output * d[0][:, first:end]).sum() + squares).backward()
        of_examples = [output, *flat(final), inputs.grad, *(a.grad for a in starts)]
        return of_examples, [p.grad.clone() for p in layer.parameters()]

    both, sums = run(0, examples, 2)
    parts = [run(0, middle, 1), run(middle, examples, 1)]
    for found, *expected in zip(both, *(part[0] for part in parts), strict=True):
        assert torch.equal(found, torch.cat(expected, 1))
    for found, first, second in zip(sums, *(part[1] for part in parts), strict=True):
        assert torch.equal(found, first + second)
