"""Transforms of torch.func, higher derivatives and activation checkpointing, by any norm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_results import CELLS, LAYERS
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

from ln_zoo.conversion import from_dialect
from ln_zoo.layers import GRU, LSTM, Conv2d, DRAWNetwork, GRUCell, Linear, LSTMCell, WindowLSTM
from ln_zoo.norms import BatchNorm, LayerNorm, Norm, RMSNorm, WeightNorm

F64 = torch.float64
NORMS = [None, WeightNorm(), LayerNorm(), RMSNorm(), BatchNorm(max_steps=4)]


def name(norm: Norm | None) -> str:
    return "no norm" if norm is None else type(norm).__name__


#: Each layer with two norms, and each norm with two layers at least.
PAIRS = [(cls, NORMS[(i + k) % 5]) for i, cls in enumerate(LAYERS + CELLS) for k in (0, 2)]
some_pairs = pytest.mark.parametrize(
    ("cls", "norm"), PAIRS, ids=[f"{cls.__name__}-{name(norm)}" for cls, norm in PAIRS]
)
#: The same of all layers, with three layers for each norm at least.
MORE_PAIRS = [
    (cls, NORMS[(i + k) % 5])
    for i, cls in enumerate([*LAYERS, *CELLS, Linear, Conv2d])
    for k in (1, 3)
]


def build(cls: type, norm: Norm | None, seed: int = 0, layers: int = 2) -> nn.Module:
    """A small module in float64. Running averages do not change: transforms forbid it, as in torch.

    Averages of four steps are there.
    """
    torch.manual_seed(seed)
    sizes: tuple[int, ...] = (1, 2, 2) if cls is Conv2d else (2, 3)
    options: dict[str, Any] = {"positions": (2, 2)} if cls is Conv2d else {}
    if cls in LAYERS:
        options = {"num_layers": layers, "bidirectional": layers > 1}
    module = cls(*sizes, norm=norm, dtype=F64, **options)
    for name, buffer in module.named_buffers():
        _ = buffer.fill_(1) if name.endswith("tracked") else buffer.uniform_(0.5, 1.5)
    return module.eval()


def inputs(cls: type, *more: int) -> Tensor:
    return torch.randn(*more, *((3, 2, 2) if cls in LAYERS else (2, 2)), dtype=F64)


def states(cls: type, *more: int) -> Any:
    lead = (*more, 4, 2) if cls in LAYERS else (*more, 2)
    found = tuple(torch.randn(*lead, 3, dtype=F64) for _ in range(2))
    return found if cls in (LSTM, LSTMCell) else found[0]


def first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def call(module: nn.Module, *arguments: Any) -> Tensor:
    """The output of a layer, or the first state that a cell gives."""
    return first(module(*arguments, **step_of(module)))


def step_of(module: nn.Module) -> dict[str, int]:
    return {"step": 1} if type(module) in CELLS else {}


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@some_pairs
def test_vmap_over_inputs_and_states(cls: type, norm: Norm | None) -> None:
    module, x, hx = build(cls, norm), inputs(cls, 3), states(cls, 3)
    parts = list(hx) if isinstance(hx, tuple) else [hx]
    for i, mapped in enumerate(vmap(lambda x: call(module, x))(x)):
        assert_close(mapped, call(module, x[i]))
    for i, mapped in enumerate(vmap(lambda x, hx: call(module, x, hx))(x, hx)):
        one = tuple(part[i] for part in parts)
        assert_close(mapped, call(module, x[i], one if len(one) == 2 else one[0]))


@some_pairs
def test_an_ensemble_and_its_gradients(cls: type, norm: Norm | None) -> None:
    modules = [build(cls, norm, seed) for seed in range(3)]
    parameters, buffers = stack_module_state(modules)
    x, options = inputs(cls), step_of(modules[0])

    def of(parameters: Any, buffers: Any) -> Tensor:
        return first(functional_call(modules[0], (parameters, buffers), (x,), options))

    together = vmap(of)(parameters, buffers)
    found = vmap(grad(lambda *state: of(*state).square().sum()))(parameters, buffers)
    for i, module in enumerate(modules):
        alone = call(module, x)
        assert_close(together[i], alone)
        names, leaves = zip(*module.named_parameters(), strict=True)
        expected = torch.autograd.grad(alone.square().sum(), leaves)
        for name, gradient in zip(names, expected, strict=True):
            assert_close(found[name][i], gradient)


def examples(cls: type) -> Tensor:
    """Four examples, first axis first."""
    shape = {Linear: (2,), Conv2d: (1, 3, 3)}.get(cls, (3, 2) if cls in LAYERS else (2,))
    return torch.randn(4, *shape, dtype=F64)


def check_gradients_of_each_example(module: nn.Module, x: Tensor) -> None:
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    options = step_of(module)

    def loss(parameters: Any, x: Tensor) -> Tensor:
        state = {**parameters, **buffers}
        return first(functional_call(module, state, (x,), options)).sin().sum()

    found = [vmap(of(loss), in_dims=(None, 0))(parameters, x) for of in (grad, jacrev)]
    for i, example in enumerate(x):
        alone = call(module, example).sin().sum()
        expected = torch.autograd.grad(alone, list(parameters.values()))
        for gradient in found:
            assert_close([gradient[name][i] for name in parameters], expected)


@pytest.mark.parametrize(("cls", "norm"), MORE_PAIRS)
def test_gradients_of_each_example(cls: type, norm: Norm | None) -> None:
    check_gradients_of_each_example(build(cls, norm, layers=1), examples(cls))


def test_gradients_of_each_example_by_other_cells() -> None:
    torch.manual_seed(6)
    peepholes = LSTM(2, 3, norm=LayerNorm(), dtype=F64, peephole=True, derivative_bound=0.1)
    check_gradients_of_each_example(peepholes, examples(LSTM))
    state = {
        "linear.weight": torch.randn(9, 5, dtype=F64),
        "layer_norm.weight": torch.rand(9, dtype=F64),
        "layer_norm.bias": torch.randn(9, dtype=F64),
    }
    check_gradients_of_each_example(from_dialect("sheeprl", state), examples(GRU))


@pytest.mark.parametrize(
    ("cls", "norm"),
    [
        *MORE_PAIRS,
        *((Conv2d, LayerNorm(convolution=form)) for form in ("channel", "unit", "position")),
        *((cls, BatchNorm(unbiased=b)) for cls in (Linear, Conv2d) for b in (False, True)),
    ],
)
def test_double_backward(cls: type, norm: Norm | None) -> None:
    """By finite differences; batch norm in training too, where its statistics are functions."""
    module, x = build(cls, norm, layers=1), examples(cls)
    x = x.transpose(0, 1) if cls in LAYERS else x
    leaves = (x.contiguous().requires_grad_(), *module.parameters())
    for training in {False, isinstance(norm, BatchNorm)}:
        module.train(training)
        assert torch.autograd.gradgradcheck(
            lambda x, *_: call(module, x).tanh(), leaves, fast_mode=True
        )


@some_pairs
def test_forward_mode_derivatives(cls: type, norm: Norm | None) -> None:
    """Those of dual numbers, `jacfwd` and `hessian` are those of the backward."""
    module, x = build(cls, norm, layers=1), inputs(cls)
    direction = torch.randn_like(x)
    backward = torch.autograd.functional.jacobian(lambda x: call(module, x), x)
    assert_close(jacfwd(lambda x: call(module, x))(x), backward)
    assert_close(jacrev(lambda x: call(module, x))(x), backward)
    with forward_ad.dual_level():
        output = call(module, forward_ad.make_dual(x, direction))
        tangent = forward_ad.unpack_dual(output).tangent
    assert_close(tangent, (backward * direction).flatten(-x.dim()).sum(-1))

    def loss(x: Tensor) -> Tensor:
        return call(module, x).square().sum()

    expected = torch.autograd.functional.hessian(loss, x)
    assert_close(hessian(loss)(x) / expected.norm(), expected / expected.norm())


@pytest.mark.parametrize(
    ("cls", "norm", "training"),
    [(*pair, i % 2 == 0) for i, pair in enumerate(PAIRS)],  # each layer and norm in both modes
)
def test_batches_of_gradients(cls: type, norm: Norm | None, training: bool) -> None:
    """In float32, where kernels read memory that a batch of gradients does not have."""
    module = build(cls, norm).float().train(training)
    x = torch.randn(*((3, 6, 2) if cls in LAYERS else (6, 2)), requires_grad=True)

    def one(a: Tensor) -> Tensor:
        return call(module, a).square().sum((-2, -1))

    # Both calls of a norm in training use the statistics of the batch.
    output = one(x)
    heads = torch.eye(output.numel()).view(-1, *output.shape)
    sources = [x, *module.parameters()]
    together = torch.autograd.grad(
        output, sources, heads, is_grads_batched=True, retain_graph=True, allow_unused=True
    )
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    apart = [torch.autograd.grad(output, sources, head, **options) for head in heads]
    for found, *expected in zip(together, *apart, strict=True):
        if found is not None:
            assert not found.requires_grad
            torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)
    mapped = vmap(lambda h: torch.autograd.grad(output, x, h, retain_graph=True)[0])(heads)
    torch.testing.assert_close(mapped, together[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cls", [LSTM, GRUCell])
@pytest.mark.parametrize("norm", [None, LayerNorm()], ids=name)
def test_vectorised_jacobians_and_hessians(cls: type, norm: Norm | None) -> None:
    module, x = build(cls, norm, layers=1).float(), inputs(cls).float()
    for of, function in (
        (torch.autograd.functional.jacobian, lambda x: call(module, x)),
        (torch.autograd.functional.hessian, lambda x: call(module, x).square().sum()),
    ):
        found, expected = of(function, x, vectorize=True), of(function, x)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("compiler")
def test_compiled_transforms() -> None:
    """Tracing sees transforms too: of an operator of ours it would take tangents to be zero."""
    module, x = build(GRU, LayerNorm(), layers=1), inputs(GRU)
    direction = torch.randn_like(x)

    def all_of_them(x: Tensor) -> tuple[Tensor, ...]:
        _, tangent = torch.func.jvp(lambda x: call(module, x), (x,), (direction,))
        gradient = grad(lambda x: call(module, x).square().sum())(x)
        return tangent, gradient, vmap(lambda x: call(module, x))(x[None])

    compiled = torch.compile(all_of_them, fullgraph=True, backend="eager")
    for actual, expected in zip(compiled(x), all_of_them(x), strict=True):
        assert_close(actual, expected)


def checkpointed(cls: type, norm: Norm | None) -> tuple[nn.Module, Callable[..., Any], Tensor]:
    """A module in training, a function of it and of an input, and the input."""
    torch.manual_seed(5)
    if cls is DRAWNetwork:
        network = DRAWNetwork(5, 5, hidden_size=4, latent_size=3, norm=norm)
        noise = torch.randn(3, 6, 3)
        return network, lambda m, x: m(x, noise).logits, torch.rand(6, 5, 5)
    if cls is WindowLSTM:
        layer = WindowLSTM(2, 4, 3, 2, norm=norm)
        text = torch.randn(6, 4, 3)
        return layer, lambda m, x: m(x, text).output, torch.randn(17, 6, 2)
    if cls in LAYERS:
        layer = cls(2, 3, num_layers=2, bidirectional=True, norm=norm)
        return layer, lambda m, x: m(x)[0], torch.randn(4, 6, 2)
    return cls(2, 3, norm=norm), lambda m, x: first(m(x, step=0)), torch.randn(6, 2)


#: Layers with the ways to run them; the norms in turn.
CHECKPOINTED = [
    *((cls, kernels, False) for cls in (*LAYERS, WindowLSTM, DRAWNetwork) for kernels in "10"),
    (LSTM, "aten", False),
    *((cls, "0", False) for cls in CELLS),
    # It computes the same; autograd sees another part of it.
    *((cls, "1", True) for cls in (LSTM, LSTMCell, WindowLSTM, DRAWNetwork)),
]


@pytest.mark.parametrize(
    ("cls", "kernels", "reentrant", "norm"),
    [(*way, NORMS[(i + k) % 5]) for i, way in enumerate(CHECKPOINTED) for k in (0, 2)],
)
def test_activation_checkpointing(
    cls: type, kernels: str, reentrant: bool, norm: Norm | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LN_ZOO_KERNELS", kernels)
    module, function, x = checkpointed(cls, norm)
    twin = copy.deepcopy(module)
    x.requires_grad_(cls is not DRAWNetwork)  # its kernel has no gradients of images
    # A reentrant one looks for what needs gradients among the inputs alone.
    flag = torch.ones((), requires_grad=True)
    again = checkpoint(lambda x, flag: function(module, x) * flag, x, flag, use_reentrant=reentrant)
    results = []
    for output, of in ((again, module), (function(twin, x) * flag, twin)):
        (output * torch.arange(output.numel()).view_as(output)).sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in of.parameters())])
        x.grad = None
    for actual, expected in zip(*results, strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert torch.equal(actual, expected)
    assert any(g is not None and g.abs().sum() > 0 for g in results[0])
